"""Where the user's files are."""

import sys

from verifiers.runtime.folders import user_cache_folder


def test_the_cache_follows_the_platform(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert user_cache_folder() == tmp_path / "verifiers"
