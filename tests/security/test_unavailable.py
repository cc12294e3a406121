"""A kernel that offers neither namespaces nor Landlock: a refusal with both reasons, never
something weaker.

The kernel is a real one that says no: a system-call filter in a child process refuses what each
backend needs.
"""

import subprocess
import sys
import textwrap

import pytest

from verifiers.runtime.install_lines import install_line

UNSHARE, CLONE, LANDLOCK = "unshare", "clone", "landlock"
CHILD = """
import asyncio, errno, platform, sys
from verifiers.sandbox import SandboxSpec, backend_for
from verifiers.sandbox.guest import kernel, seccomp

def forbid(numbers):
    load = seccomp._op(seccomp._LOAD, 0, 0, seccomp._NUMBER)
    code = [load]
    for number, error in numbers:
        code += [seccomp._op(seccomp._JUMP_EQUAL, 0, 1, number), seccomp._refuse(error)]
    if "namespaces" in sys.argv:
        code += seccomp._refuse_when(seccomp.CLONE[platform.machine()], seccomp._FIRST,
            [seccomp._op(seccomp._JUMP_SET, 0, 1, seccomp.NAMESPACES), seccomp._refuse(errno.EPERM)])
    kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    kernel.install_filter(b"".join([*code, seccomp._op(seccomp._RETURN, 0, 0, seccomp._ALLOW)]))

forbidden = []
if "namespaces" in sys.argv:
    forbidden.append((seccomp.numbers(seccomp.TABLES[platform.machine()])["unshare"], errno.EPERM))
if "landlock" in sys.argv:
    forbidden.append((444, errno.ENOSYS))
if forbidden:
    forbid(forbidden)

async def main():
    backend = await backend_for("auto")
    sandbox = await backend.open(SandboxSpec())
    print(backend.name, (await sandbox.exec("6 * 7", timeout_s=30)).value)
    await sandbox.close()
try:
    asyncio.run(main())
except Exception as error:
    print(type(error).__name__, error)
"""


def backend_in_child(*without):
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(CHILD), *without],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.strip()


@pytest.fixture(scope="module")
def unhindered():
    """Negative control: nothing forbidden."""
    name, _, result = backend_in_child().partition(" ")
    if name != "bubblewrap":
        pytest.skip(f"bubblewrap does not work here: {name} {result}")
    assert result == "42"


def test_without_namespaces_the_next_best_is_taken(unhindered):
    pytest.importorskip("sandlock")
    answer = backend_in_child("namespaces")
    if answer.startswith("SandboxUnavailable"):
        assert "sandlock: " in answer
        pytest.skip(f"sandlock does not work here: {answer}")
    assert answer == "sandlock 42"


def test_without_both_it_refuses_and_names_both(unhindered):
    answer = backend_in_child("namespaces", "landlock")
    assert answer.startswith("SandboxUnavailable No sandbox is available")
    assert "bubblewrap: " in answer
    assert "install Debian's, Fedora's or Arch's package bubblewrap" in answer
    assert "sandlock: " in answer
    assert install_line("verifiers", "sandbox") in answer
    assert "unsafe_subprocess" in answer


def test_without_landlock_alone_nothing_changes(unhindered):
    assert backend_in_child("landlock") == "bubblewrap 42"
