"""A root file system of a sandbox's own, processes that are restarted, and folders copied in and
out."""

import asyncio
import contextlib
import io
import sys
import tarfile

import pytest

import verifiers as vf
from support import isolated
from verifiers.sandbox import SandboxSpec, backend_for
from verifiers.sandbox.transfer import pack, put, take

ROOT = SandboxSpec(writable_root=True, working_dir="/app")


def in_sandbox(use, spec=ROOT):
    return isolated.in_sandbox(use, spec)


async def sh(sandbox, command):
    return await sandbox.exec(["bash", "-c", command], timeout_s=20)


def archive_of(*members):
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for member, data in members:
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return packed.getvalue()


def link(name, target, kind=tarfile.SYMTYPE):
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, target
    return member


def test_files_can_be_created_below_the_root_and_no_system_program_changed():
    async def use(sandbox):
        made = await sh(
            sandbox,
            "pwd; mkdir -p /logs/verifier /usr/local/bin && echo 1 > /logs/verifier/reward.txt;"
            " id -u",
        )
        system = await sh(
            sandbox,
            "echo x > /usr/bin/bash || cp /bin/true /opt/python/bin/python3.11 || ln -sf /x"
            " /bin/sh",
        )
        return made, system

    made, system = in_sandbox(use)
    assert (made.stdout, made.exit_code) == ("/app\n1000\n", 0)
    assert system.exit_code != 0
    assert "Read-only file system" in system.stderr


def test_negative_control_without_it_only_home_and_tmp_can_be_written():
    result = in_sandbox(
        lambda sandbox: sh(sandbox, "touch /tmp/a ~/b && mkdir /app"), SandboxSpec()
    )
    assert result.exit_code != 0
    assert "Read-only file system" in result.stderr


def test_a_file_of_the_host_does_not_come_with_it(tmp_path):
    (tmp_path / "file").write_text("of the host")
    assert in_sandbox(lambda sandbox: sh(sandbox, f"test -e {tmp_path}/file")).exit_code == 1


@pytest.mark.parametrize(
    "path", ["/root", "/home", "/etc/shadow", "/var", "/sandbox/root", "/sandbox/tmp"]
)
def test_nothing_of_the_host_or_of_the_outer_sandbox_comes_with_it(path):
    assert in_sandbox(lambda sandbox: sh(sandbox, f"test -e {path}")).exit_code == 1


@pytest.mark.parametrize("name", ["sandlock", "unsafe_subprocess"])
def test_a_backend_without_one_refuses_it(name):
    async def use():
        await (await backend_for(name)).open(ROOT)

    with pytest.raises(vf.ConfigError, match=f"'{name}' has no root file system of its own"):
        asyncio.run(use())


def test_its_files_count_as_memory():
    spec = SandboxSpec(writable_root=True, working_dir="/app", file_mb=8, memory_mb=64)
    result = in_sandbox(lambda sandbox: sh(sandbox, "head -c 20M /dev/zero > /data"), spec)
    assert result.exit_code != 0


def test_a_restart_ends_every_process_and_keeps_the_files():
    async def use(sandbox):
        await sandbox.exec("x = 1", timeout_s=10)
        await sh(
            sandbox,
            "echo kept > f; (while true; do date +%N > tick; sleep 0.02; done) > /dev/null 2>&1 &",
        )
        await asyncio.sleep(0.2)
        await sandbox.restart()
        ticks = [
            (await sandbox.read_file("/app/tick"))
            for _ in range(2)
            if await asyncio.sleep(0.1) is None
        ]
        return ticks, await sandbox.read_file("f"), await sandbox.exec("x", timeout_s=10)

    (first, second), kept, forgotten = in_sandbox(use)
    assert first == second
    assert kept == b"kept\n"
    assert "NameError" in forgotten.error


def test_negative_control_without_a_restart_the_process_continues():
    async def use(sandbox):
        await sh(
            sandbox,
            "touch tick; (while true; do date +%N > tick; sleep 0.02; done) > /dev/null 2>&1 &",
        )
        ticks: set[bytes] = set()
        async with asyncio.timeout(30):  # however busy the machine is
            while len(ticks - {b""}) < 2:
                await asyncio.sleep(0.1)
                ticks.add(await sandbox.read_file("/app/tick"))
        return ticks

    assert len(in_sandbox(use)) >= 2


def test_a_folder_comes_out_as_it_went_in(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a b.txt").write_text("one")
    (tmp_path / "run.sh").write_text("#!/bin/sh\n")
    (tmp_path / "run.sh").chmod(0o755)
    (tmp_path / "__pycache__").mkdir()

    async def use(sandbox):
        await put(sandbox, pack([(tmp_path, ".")]), "/app/data")
        await sh(sandbox, "rm /app/data/run.sh; mkfifo /app/data/pipe; echo two > /app/data/b")
        packed = await take(sandbox, "/app/data", ["--exclude=*.tmp"])
        await sh(sandbox, "mkdir /copy; echo old > /copy/old")
        await put(sandbox, packed.archive, "/copy", replace=True)
        file = await take(sandbox, "/app/data/b")
        await put(sandbox, file.archive, "/copy")
        assert (packed.is_folder, file.is_folder) == (True, False)
        listed = await sh(sandbox, "cd /copy; find . | sort; cat 'sub/a b.txt'; ls -A /tmp")
        return listed.stdout, await take(sandbox, "/absent")

    assert in_sandbox(use) == (".\n./b\n./pipe\n./sub\n./sub/a b.txt\none", None)


@pytest.mark.parametrize(
    "members",
    [
        [(tarfile.TarInfo("../tests/test.sh"), b"forged")],
        [(tarfile.TarInfo("/tests/test.sh"), b"forged")],
        [(link("d", "/tests"), b""), (tarfile.TarInfo("d/test.sh"), b"forged")],
        [(link("d", "../tests"), b""), (tarfile.TarInfo("d/test.sh"), b"forged")],
        [(link("h", "/tests/test.sh", tarfile.LNKTYPE), b""), (tarfile.TarInfo("h"), b"forged")],
    ],
    ids=["above", "absolute", "absolute link", "relative link", "hard link"],
)
def test_a_forged_archive_writes_nothing_outside_its_folder(members):
    async def use(sandbox):
        await sh(sandbox, "mkdir /tests; echo true > /tests/test.sh")
        with contextlib.suppress(vf.SandboxError):
            await put(sandbox, archive_of(*members), "/app")
        return await sandbox.read_file("/tests/test.sh")

    assert in_sandbox(use) == b"true\n"


def test_what_a_sandbox_sends_is_bounded_and_what_is_no_archive_is_said():
    async def use(sandbox):
        await sh(sandbox, "head -c 70M /dev/zero > /app/large")
        with pytest.raises(vf.SandboxLimit, match="larger than"):
            await take(sandbox, "/app")
        with pytest.raises(vf.SandboxError, match="could not be unpacked in /x"):
            await put(sandbox, b"no archive", "/x")

    in_sandbox(use)


def test_a_working_folder_that_cannot_be_is_refused_at_the_start():
    with pytest.raises(vf.SandboxUnavailable):
        in_sandbox(None, SandboxSpec(writable_root=True, working_dir="/usr/bin/app"))


def test_a_working_folder_that_the_code_removed_is_no_end_of_the_sandbox():
    async def use(sandbox):
        await sh(sandbox, "cd /; rm -rf /app; echo no folder > /app")
        await sandbox.restart()
        return await sh(sandbox, "pwd")

    assert in_sandbox(use).stdout == "/sandbox/home\n"


def test_the_interpreter_inside_is_the_one_outside():
    """Also one that was built with a shared library, of which the system may have
    another version."""
    result = in_sandbox(lambda sandbox: sh(sandbox, "python3 -c 'import sys; print(sys.version)'"))
    assert result.stdout.strip() == sys.version.strip()
