"""A sandbox whose root file system is a folder of the host's: its files, its programs, and changes
in memory alone."""

import asyncio
import contextlib
import os

import pytest

import verifiers as vf
from support import isolated
from support.overlays import without_overlay
from support.root_files import MARK, write_root
from verifiers.sandbox import SandboxSpec, backend_for
from verifiers.sandbox.host import mounts
from verifiers.sandbox.host.zygotes import owner
from verifiers.sandbox.transfer import pack, put, take


def give(folder):
    """Let the user own the files as whom code runs: an unpacked image's belong to it."""
    if os.getuid() == 0:
        for path in (folder, *folder.rglob("*")):
            os.lchown(path, owner(), owner())
    return folder


@pytest.fixture(scope="module", params=["overlay", "copy"])
def root(request, tmp_path_factory):
    """A root file system, also where the kernel refuses an overlay of it."""
    base = tmp_path_factory.mktemp("root")
    folders = [base] if request.param == "overlay" else without_overlay(base)
    for folder in folders:
        yield give(write_root(folder / "files"))


def is_copied(root):
    return "base" in root.parts


def in_sandbox(use, **spec):
    return isolated.in_sandbox(use, SandboxSpec(working_dir="/app", **spec))


async def sh(sandbox, command):
    return await sandbox.exec(["sh", "-c", command], timeout_s=20)


def test_the_programs_and_files_are_those_of_the_folder_and_no_others(root):
    async def use(sandbox):
        return (
            await sh(sandbox, "cat /etc/mark; pwd; id -u; command -v python3; command -v perl"),
            await sh(sandbox, "ls -A /usr/bin /etc /usr/lib /home"),
        )

    said, listed = in_sandbox(use, root=str(root))
    assert said.stdout.splitlines() == [MARK, "/app", "1000"], (
        "no interpreter of the host is on the path"
    )
    folders = dict(part.split(":\n") for part in listed.stdout.strip().split("\n\n"))
    assert {name: sorted(names.split()) for name, names in folders.items()} == {
        f"/{name}": sorted(os.listdir(root / name)) for name in ("etc", "usr/bin", "usr/lib")
    }


def test_changes_are_in_memory_and_the_next_sandbox_has_none(root):
    async def use(sandbox):
        changed = await sh(
            sandbox,
            "echo new > /etc/mark && rm -r /etc/old && mkdir /data && echo x > /usr/bin/added &&"
            " cat /etc/mark",
        )
        return changed, await sh(sandbox, "ls -d /data /usr/bin/added /etc/old")

    before = sorted(str(path) for path in root.rglob("*"))
    for _ in range(2):
        changed, after = in_sandbox(use, root=str(root))
        assert (changed.exit_code, changed.stdout) == (0, "new\n"), changed.stderr
        assert (after.stdout.split(), after.exit_code) == (["/data", "/usr/bin/added"], 2)
    assert (root / "etc/mark").read_text() == f"{MARK}\n"
    assert sorted(str(path) for path in root.rglob("*")) == before


def test_files_are_copied_in_and_out_and_what_is_changed_counts_as_files(root, tmp_path):
    (tmp_path / "a.txt").write_text("one")

    async def use(sandbox):
        await put(sandbox, pack([(tmp_path, "data")]), "/srv")
        await sandbox.restart()
        content = await take(sandbox, "/srv/data")
        full = await sh(sandbox, "cat /dev/zero > /srv/big")
        return content, full, await sandbox.exec("open('/srv/data/a.txt').read()", timeout_s=20)

    file_mb = 48 if is_copied(root) else 8
    content, full, read = in_sandbox(use, root=str(root), file_mb=file_mb, memory_mb=128)
    assert content.is_folder
    assert "No space left" in full.stderr
    assert read.value == "'one'", (
        "Python calls run in the interpreter of the host, beside the image"
    )


def test_an_image_is_copied_only_where_the_kernel_mounts_no_overlay_and_only_where_it_fits(root):
    async def use(sandbox):
        return await sh(sandbox, "test -e /opt/sandbox/image && echo a copy")

    assert in_sandbox(use, root=str(root)).stdout == ("a copy\n" if is_copied(root) else "")
    refused = (
        r"kernel refuses an overlay .*Invalid argument.* cannot be copied into the 1 MB of .*No"
        r" space left"
    )
    with (
        pytest.raises(vf.SandboxUnavailable, match=refused)
        if is_copied(root)
        else contextlib.nullcontext()
    ):
        in_sandbox(use, root=str(root), file_mb=1, memory_mb=64)


def test_the_interpreter_of_the_host_runs_beside_an_image_without_its_libraries(root):
    code = (
        "import hashlib, ssl, sys; print(sys.version_info[:2], hashlib.sha256(b'').hexdigest()[:4])"
    )

    async def use(sandbox):
        argv = mounts.interpreter(has_image=True)
        return await sandbox.exec(
            [*argv, "-I", "-S", "-c", code], timeout_s=20
        ), await sandbox.exec([mounts.INTERPRETER, "-I", "-S", "-c", code], timeout_s=20)

    beside, negative_control = in_sandbox(use, root=str(root))
    assert beside.stdout.endswith("e3b0\n"), beside.stderr
    assert negative_control.exit_code != 0, "without the host's loader its libraries are not found"


def test_the_isolation_is_that_of_every_sandbox(root):
    async def use(sandbox):
        return await sh(
            sandbox,
            f"ls {os.path.dirname(__file__)} {root}; ls -A /home /root; "
            "touch /opt/sandbox/changes/x /opt/sandbox/guest/x; "
            "grep -E 'CapEff|NoNewPrivs' /proc/self/status",
        )

    result = in_sandbox(use, root=str(root))
    assert result.stdout.split() == ["CapEff:", "0" * 16, "NoNewPrivs:", "1"]
    assert result.stderr.count("No such file") == 4
    assert (
        result.stderr.count("Read-only file system") + result.stderr.count("Permission denied") == 2
    )


def test_a_root_that_is_not_there_and_a_sandbox_that_has_none_are_named(root, tmp_path):
    with pytest.raises(vf.ConfigError, match="must be an absolute path"):
        SandboxSpec(root="here")
    with pytest.raises(vf.ConfigError, match=r"mount .*/gone, which does not exist"):
        in_sandbox(None, root=str(tmp_path / "gone"))
    with pytest.raises(
        vf.ConfigError, match=r"'unsafe_subprocess' has no root file system .*SandboxSpec\.root"
    ):
        asyncio.run(
            (asyncio.run(backend_for("unsafe_subprocess"))).open(SandboxSpec(root=str(root)))
        )
