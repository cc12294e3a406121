"""For the tests of the core."""

import subprocess
import sys

import pytest


@pytest.fixture
def shadowed_modules(tmp_path, monkeypatch):
    """A working folder with a file that has the name of a module every process imports: a process
    that looks there does not start."""
    folder = tmp_path / "shadow"
    folder.mkdir()
    (folder / "types.py").write_text("raise RuntimeError('a file of the user was imported')")
    monkeypatch.chdir(folder)
    code = [sys.executable, "-c", "import functools"]
    assert subprocess.run(code, capture_output=True, check=False).returncode == 1, (
        "negative control"
    )
