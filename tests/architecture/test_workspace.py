"""The workspace's own files: uv reads its settings, the lock is up to date and names one public
index."""

import os
import re
import shutil
import subprocess
import tomllib

import pytest

from support.import_graph import REPOSITORY

UV = shutil.which("uv")
needs_uv = pytest.mark.skipif(UV is None, reason="uv is not on this machine")
LOCK = (REPOSITORY / "uv.lock").read_text(encoding="utf-8")


def check_lock(config):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("UV_")}
    return subprocess.run(
        [UV, "lock", "--check"],
        cwd=REPOSITORY,
        env={**environment, "UV_CONFIG_FILE": str(config)},
        capture_output=True,
        text=True,
        timeout=120,
    )


@needs_uv
def test_the_lock_is_up_to_date_under_the_settings_of_the_workspace():
    done = check_lock(REPOSITORY / "uv.workspace.toml")
    assert done.returncode == 0, done.stderr
    assert "warning" not in done.stderr


@needs_uv
def test_the_settings_are_read(tmp_path):
    """Negative control: a setting that does not exist is refused, so the file above
    is not ignored."""
    wrong = tmp_path / "uv.toml"
    wrong.write_text((REPOSITORY / "uv.workspace.toml").read_text() + "\n[no-such-table]\n")
    assert check_lock(wrong).returncode != 0


def test_the_lock_names_one_public_index_and_nothing_of_a_machine():
    indexes = set(re.findall(r'registry = "([^"]+)"', LOCK))
    assert len(indexes) == 1
    assert indexes.pop().startswith("https://")
    assert not re.search(r"file://|find-links|path = \"/", LOCK)


def test_every_package_is_a_member():
    members = {
        package["name"]
        for package in tomllib.loads(LOCK)["package"]
        if "editable" in package["source"]
    }
    projects = [
        tomllib.loads(path.read_text()) for path in REPOSITORY.glob("packages/**/pyproject.toml")
    ]
    assert members == {project["project"]["name"] for project in projects}
