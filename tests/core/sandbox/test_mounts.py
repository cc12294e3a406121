"""Files of the host inside a sandbox: read-only, only those asked for, and a socket that reaches
out."""

import asyncio
import socket
import threading

import pytest

import verifiers as vf
from support.isolated import in_sandbox
from verifiers.sandbox import SandboxSpec


def in_bubblewrap(spec, *commands):
    """The results of commands (lists) or code (texts)."""

    async def use(sandbox):
        return [await sandbox.exec(command, timeout_s=20) for command in commands]

    return in_sandbox(use, spec)


def test_a_mounted_folder_is_readable_and_not_writable(tmp_path):
    tmp_path.chmod(0o755)
    (tmp_path / "tool").write_text("#!/bin/sh\necho mounted\n")
    (tmp_path / "tool").chmod(0o755)
    spec = SandboxSpec(mounts={"/opt/agent": str(tmp_path)})
    ran, wrote, outside = in_bubblewrap(
        spec, ["/opt/agent/tool"], ["sh", "-c", "echo x > /opt/agent/new"], ["ls", str(tmp_path)]
    )
    assert ran.stdout == "mounted\n"
    assert wrote.exit_code != 0
    assert "Read-only" in wrote.stderr
    assert not (tmp_path / "new").exists()
    assert outside.exit_code != 0  # the path of the host is not there


def test_a_mounted_socket_is_the_only_way_out(tmp_path):
    tmp_path.chmod(0o755)
    path = tmp_path / "out.sock"
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        path.chmod(0o666)
        listening.listen()

        def answer():
            connection, _ = listening.accept()
            with connection:
                connection.sendall(connection.recv(100).upper())

        threading.Thread(target=answer, daemon=True).start()
        code = (
            "import socket\ns ="
            " socket.socket(1)\ns.connect('/run/out/out.sock')\ns.sendall(b'hi')\ns.recv(9)"
        )
        network = "import socket\nsocket.create_connection(('127.0.0.1', 9), 1)"
        spoke, unreachable = in_bubblewrap(
            SandboxSpec(mounts={"/run/out": str(tmp_path)}), code, network
        )
    assert spoke.value == "b'HI'"
    assert "refused" in unreachable.error


def test_without_the_limit_a_program_may_reserve_more_than_it_uses():
    reserve = (
        "import mmap\nm = mmap.mmap(-1, 2**32, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS |"
        " 0x4000)\nlen(m)"
    )
    (free,) = in_bubblewrap(SandboxSpec(memory_mb=256, limit_address_space=False), reserve)
    (bound,) = in_bubblewrap(SandboxSpec(memory_mb=256), reserve)  # the negative control
    assert free.value == str(2**32)
    assert "Cannot allocate memory" in bound.error


def test_memory_in_use_is_bounded_all_the_same():
    use = "b = b'x' * 2**30\nimport time\ntime.sleep(5)"
    (result,) = in_bubblewrap(SandboxSpec(memory_mb=128, limit_address_space=False), use)
    assert result.limit == "memory"


@pytest.mark.parametrize("name", ["sandlock", "unsafe_subprocess"])
def test_a_backend_without_mounts_refuses_them_by_name(name, tmp_path):
    async def open_one():
        from verifiers.sandbox.backends import sandlock, unsafe_subprocess

        backend = (
            sandlock.Sandlock() if name == "sandlock" else unsafe_subprocess.UnsafeSubprocess()
        )
        await backend.open(SandboxSpec(mounts={"/opt/x": str(tmp_path)}))

    with pytest.raises(vf.ConfigError, match=rf"{name}.*cannot mount .*bubblewrap"):
        asyncio.run(open_one())


def test_a_mount_that_does_not_exist_is_named():
    with pytest.raises(vf.ConfigError, match=r"mount /nowhere/at/all, which does not exist"):
        in_bubblewrap(SandboxSpec(mounts={"/opt/x": "/nowhere/at/all"}), "1")


@pytest.mark.parametrize("mounts", [{"opt": "/usr"}, {"/opt": "usr"}, {"/opt/../usr": "/usr"}])
def test_paths_of_mounts_are_absolute(mounts):
    with pytest.raises(vf.ConfigError, match=r"SandboxSpec\.mounts"):
        SandboxSpec(mounts=mounts)
