"""The memory that a sandbox shares with its owner, and the memory that its processes hide: neither
evades a limit."""

import asyncio
import os

import pytest

from support.isolated import needs_sandbox
from verifiers.sandbox import SandboxSpec, backend_for
from verifiers.sandbox.guest import kernel
from verifiers.sandbox.host.zygotes import _memory_file

SLOW = ["sandlock", "nsjail", "docker", "podman", "gvisor"]  # up to a second and more per session


def test_what_a_worker_shares_with_its_owner_cannot_change_its_size():
    fd = kernel.memory_file("area", 100)
    try:
        os.pwrite(fd, b"y", 99)
        for size in (0, 101, 2**30):
            with pytest.raises(PermissionError):
                os.ftruncate(fd, size)
        with pytest.raises(PermissionError):
            os.pwrite(fd, b"y", 100)
    finally:
        os.close(fd)


def test_a_file_that_is_given_to_a_sandbox_cannot_be_written():
    fd = _memory_file("root:x:0:0\n")
    try:
        assert os.read(fd, 100) == b"root:x:0:0\n"
        with pytest.raises(PermissionError):
            os.pwrite(fd, b"evil", 0)
        with pytest.raises(PermissionError):
            os.ftruncate(fd, 0)
    finally:
        os.close(fd)


GROW = """
import os, stat
got = []
for fd in range(3, 256):
    try:
        if stat.S_ISREG(os.fstat(fd).st_mode):
            os.ftruncate(fd, 16 * 2**20)
            got.append("grown")
    except PermissionError:
        got.append("refused")
    except OSError:
        pass
got
"""


def grown(name):
    needs_sandbox(name)

    async def use():
        sandbox = await (await backend_for(name)).open(SandboxSpec())
        try:
            return (await sandbox.exec(GROW, timeout_s=30)).value
        finally:
            await sandbox.close()

    return asyncio.run(use())


@pytest.mark.parametrize(
    "name", ["bubblewrap", *(pytest.param(n, marks=pytest.mark.slow) for n in SLOW)]
)
def test_code_that_finds_the_area_of_its_output_cannot_hide_memory_there(name):
    """The worker's mapping holds a descriptor. What can be written there is what the owner reads as
    its output."""
    assert grown(name) == "['refused']"


def test_negative_control_an_unsealed_area_is_grown(monkeypatch):
    def unsealed(name, size):
        fd = os.memfd_create(name)
        os.ftruncate(fd, size)
        return fd

    monkeypatch.setattr("verifiers.sandbox.host.session.kernel.memory_file", unsealed)
    assert grown("bubblewrap") == "['grown']"


@pytest.mark.slow
def test_processes_that_hide_their_memory_are_counted_in_full():
    """Undumpable ones do not let anybody read what they share; they counted as nothing."""
    needs_sandbox("bubblewrap")
    code = (
        "import ctypes, os, time\npids = []\nfor _ in range(8):\n    pid = os.fork()\n    if pid =="
        " 0:\n        ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)\n        data = b'x' * (100 * 2**20);"
        " time.sleep(4); os._exit(0)\n    pids.append(pid)\nsum(os.waitpid(pid, 0)[1] for pid in"
        " pids)"
    )

    async def use():
        sandbox = await (await backend_for("bubblewrap")).open(SandboxSpec(memory_mb=256))
        try:
            return await sandbox.exec(code, timeout_s=60)
        finally:
            await sandbox.close()

    result = asyncio.run(use())
    assert result.limit == "memory", result
