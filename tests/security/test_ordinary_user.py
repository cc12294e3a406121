"""The attacks once more by an ordinary user: when these tests run as root, what root may do must
not be what holds.

A child enters a mount namespace of its own where the interpreter can be reached by everybody, gives
up every privilege, and runs the probe. Run by an ordinary user, test_attacks.py is this already.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from verifiers.sandbox.probe.attacks import ATTACKS
from verifiers.testing import FakeServer

pytestmark = [
    pytest.mark.skipif(
        os.getuid() != 0, reason="this user is an ordinary one: test_attacks.py has shown it"
    ),
    pytest.mark.skipif(
        not (shutil.which("setpriv") and shutil.which("unshare")), reason="needs util-linux"
    ),
]
NOBODY = 65534
ENTER = """
set -e
kept=$1 closed=$2 aside=$3; shift 3
if [ -n "$closed" ]; then
    mount --make-rprivate /
    mount --bind "$kept" "$aside"
    mount -t tmpfs -o mode=755 tmpfs "$closed"
    mkdir -p "$kept"
    mount --bind "$aside" "$kept"
fi
exec setpriv --reuid=65534 --regid=65534 --clear-groups --inh-caps=-all --bounding-set=-all --no-new-privs -- "$@"
"""
"""``closed``, a folder above the interpreter that only root may enter, is replaced there by one
with only ``kept``."""
WHO = """
import os
with open("/proc/self/status") as file:
    held = [line.split()[1] for line in file if line.startswith(("CapPrm", "CapEff", "CapBnd", "CapAmb"))]
print(os.getuid(), {int(mask, 16) for mask in held})
"""


@pytest.fixture
def user_folder():
    """Of no use to pytest's own folders, which only their owner may enter."""
    with tempfile.TemporaryDirectory(prefix="ordinary-user-") as folder:
        user_folder = Path(folder)
        user_folder.chmod(0o711)
        for name in ("home", "aside"):
            (user_folder / name).mkdir()
        os.chown(user_folder / "home", NOBODY, NOBODY)
        yield user_folder


def as_nobody(user_folder, *argv, temporary=None):
    interpreter = Path(sys.base_prefix).resolve()
    closed = [path for path in reversed(interpreter.parents) if not path.stat().st_mode & 0o001]
    home = str(user_folder / "home")
    ended = subprocess.run(
        [
            "unshare",
            "--mount",
            "sh",
            "-c",
            ENTER,
            "sh",
            interpreter,
            *(closed[:1] or [""]),
            user_folder / "aside",
            *argv,
        ],
        env={
            "PATH": os.environ["PATH"],
            "HOME": home,
            "TMPDIR": str(temporary or home),
            "PYTHONDONTWRITEBYTECODE": "1",
        },
        cwd="/",
        capture_output=True,
        text=True,
        timeout=900,
    )
    if "Operation not permitted" in ended.stderr and "unshare" in ended.stderr:
        pytest.skip(ended.stderr)
    return ended


def test_it_is_an_ordinary_user_that_holds_nothing(user_folder):
    ended = as_nobody(user_folder, sys.executable, "-c", WHO)
    assert ended.stdout == f"{NOBODY} {{0}}\n", ended.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bubblewrap", "sandlock", "nsjail"])
def test_every_attack_is_stopped_for_an_ordinary_user_too(user_folder, name):
    ended = as_nobody(user_folder, sys.executable, "-m", "verifiers.sandbox.probe", name)
    if "is not installed" in ended.stderr:
        pytest.skip(ended.stderr)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert f"{len(ATTACKS)} of {len(ATTACKS)} attacks stopped" in ended.stdout


@pytest.mark.slow
def test_negative_control_without_a_sandbox_the_same_user_reaches_them(user_folder):
    ended = as_nobody(
        user_folder, sys.executable, "-m", "verifiers.sandbox.probe", "unsafe_subprocess"
    )
    assert ended.returncode == 1, ended.stderr
    assert ended.stdout.count("REACHED") >= 15, ended.stdout


@pytest.mark.slow
def test_vf_eval_needs_no_home_that_can_be_written(user_folder):
    work = user_folder / "work"
    work.mkdir()
    os.chown(work, NOBODY, NOBODY)
    os.chown(user_folder / "home", 0, 0)
    (user_folder / "home").chmod(0o555)
    with FakeServer("ok", models=["m"]) as server:
        words = ("reverse-text", "-n", "1", "-r", "2", "-b", server.url, "-m", "m", "-o", str(work))
        command = (sys.executable, "-m", "verifiers.cli.evaluate.command", *words)
        ended = as_nobody(user_folder, *command, temporary=work)
    assert ended.returncode == 0, ended.stderr
    assert len(list(work.glob("evals/*/*/results.jsonl"))) == 1
    control = as_nobody(
        user_folder, sys.executable, "-c", "import pathlib; (pathlib.Path.home() / 'x').touch()"
    )
    assert "PermissionError" in control.stderr  # negative control: it is read-only for this user
