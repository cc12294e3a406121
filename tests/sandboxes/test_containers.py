"""The container backends: nothing of a container outlives its owner, and the engine is asked for
every confinement.

Backends that do not work here are skipped with the probe's reason; docker's command line is also
checked against a stand-in for the program.
"""

import asyncio
import contextlib
import os
import pathlib
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time

import pytest

import verifiers as vf
from support.isolated import needs_sandbox
from verifiers.sandbox import SandboxSpec, backend_for
from verifiers_sandboxes import Docker, GVisor, Nsjail
from verifiers_sandboxes.container import root_for
from verifiers_sandboxes.engines import LABEL

CONTAINERS = ["nsjail", "docker", "podman", "gvisor"]
ENGINES = ["docker", "podman"]
OWNER = """
import asyncio, sys
from verifiers.sandbox import SandboxSpec, backend_for
async def main():
    sandbox = await (await backend_for(sys.argv[1])).open(SandboxSpec(env={"MARK": sys.argv[2]}))
    await sandbox.exec(["bash", "-c", "setsid sleep 600 & sleep 600 & true"], timeout_s=60)
    print("ready", flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""


def traces(mark, folders=()):
    """``(processes, bundles)`` of the host that belong to the sandbox whose variables hold
    ``mark``."""
    bundles = {*folders}
    for path in pathlib.Path(tempfile.gettempdir()).glob("gvisor-*/config.json"):
        with contextlib.suppress(OSError):
            if mark in path.read_text():
                bundles.add(path.parent)
    pids = []
    for path in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            process = (path / "cmdline").read_bytes() + (path / "environ").read_bytes()
            if mark.encode() in process or any(bytes(bundle) in process for bundle in bundles):
                pids.append(int(path.name))
    return [pid for pid in pids if pid != os.getpid()], {
        bundle for bundle in bundles if bundle.exists()
    }


def gone(mark, bundles, seconds=30):
    ended = time.monotonic() + seconds
    while traces(mark, bundles) != ([], set()) and time.monotonic() < ended:
        time.sleep(0.1)
    return traces(mark, bundles)


def containers_of(engine, pid):
    listed = subprocess.run(
        [engine, "ps", "--all", "--quiet", "--filter", f"label={LABEL}={pid}"],
        capture_output=True,
        text=True,
    )
    assert listed.returncode == 0, listed.stderr
    return listed.stdout.split()


def eventually_none(name, pid, seconds=30):
    """No container: the engine removes it a moment after its processes have ended."""
    ended = time.monotonic() + seconds
    while name in ENGINES and containers_of(name, pid) and time.monotonic() < ended:
        time.sleep(0.2)
    return name not in ENGINES or containers_of(name, pid) == []


def owned(name):
    """An owner of its own process group with a sandbox that works, and the mark."""
    needs_sandbox(name)
    mark = f"mark-{secrets.token_hex(8)}"
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, name, mark], stdout=subprocess.PIPE, start_new_session=True
    )
    assert owner.stdout.readline() == b"ready\n"
    owner.stdout.close()
    return owner, mark


@pytest.mark.slow
@pytest.mark.parametrize("name", CONTAINERS)
def test_when_the_owner_is_killed_no_process_container_or_folder_is_left(name):
    owner, mark = owned(name)
    before, bundles = traces(mark)
    assert len(before) >= 2
    if name in ENGINES:
        assert len(containers_of(name, owner.pid)) == 1
    owner.kill()
    owner.wait()
    assert gone(mark, bundles) == ([], set())
    assert eventually_none(name, owner.pid)


@pytest.mark.slow
@pytest.mark.parametrize("name", CONTAINERS)
def test_nor_when_the_program_that_runs_the_container_is_killed_too(name):
    """The guest init sees its input close when the last process that holds it ends."""
    owner, mark = owned(name)
    before, bundles = traces(mark)
    programs = [pid for pid in before if _starts_with(pid, b"/bin/sh") or _is_program(pid, name)]
    assert len(programs) >= 2
    owner.kill()
    for pid in programs:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    owner.wait()
    for bundle in bundles:  # the shell that would have removed it was killed
        shutil.rmtree(bundle, ignore_errors=True)
    assert gone(mark, bundles) == ([], set())
    assert eventually_none(name, owner.pid)


def _words(pid):
    with contextlib.suppress(OSError):
        return pathlib.Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    return [b""]


def _starts_with(pid, text):
    return _words(pid)[0].startswith(text)


def _is_program(pid, name):
    return os.path.basename(_words(pid)[0]).decode() in {
        "docker",
        "podman",
        "nsjail",
        "runsc",
    } and b"run" in [*_words(pid), b"run" if name == "nsjail" else b""]


@pytest.mark.slow
@pytest.mark.parametrize("name", ENGINES)
def test_negative_control_a_container_that_does_not_follow_its_input_outlives_its_owner(name):
    needs_sandbox(name)

    async def command():
        backend = Docker() if name == "docker" else (await backend_for(name))
        return (
            await backend.launch(shutil.which(name), SandboxSpec(), ["/usr/bin/sleep", "600"])
        ).argv

    argv = asyncio.run(command())
    container = argv[argv.index("--name") + 1]
    owner = subprocess.Popen(
        argv, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True
    )
    try:
        ended = time.monotonic() + 30
        while not containers_of(name, os.getpid()) and time.monotonic() < ended:
            time.sleep(0.1)
        time.sleep(1)
        owner.kill()
        owner.wait()
        owner.stdin.close()
        time.sleep(2)
        assert len(containers_of(name, os.getpid())) == 1
    finally:
        subprocess.run([name, "rm", "--force", container], capture_output=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", ENGINES)
def test_close_leaves_no_container(name):
    needs_sandbox(name)

    async def use():
        sandbox = await (await backend_for(name)).open(SandboxSpec())
        within = containers_of(name, os.getpid())
        await sandbox.close()
        return within

    assert len(asyncio.run(use())) == 1
    assert containers_of(name, os.getpid()) == []


FLOOD = """
import os
written = 0
try:
    fd = os.open("/proc/1/fd/2", os.O_WRONLY)
    for _ in range(8):
        written += os.write(fd, bytes(2**20))
except OSError:
    pass
written
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", CONTAINERS)
def test_code_cannot_fill_the_file_that_holds_the_errors_of_the_program(name):
    """Under gVisor it can open what its first process has open; that was a file of the host's."""
    needs_sandbox(name)

    async def use():
        sandbox = await (await backend_for(name)).open(SandboxSpec())
        try:
            errors = sandbox._processes._connection._errors
            before = os.fstat(errors.fileno()).st_size
            result = await sandbox.exec(FLOOD, timeout_s=30)
            assert result.error is None
            return os.fstat(errors.fileno()).st_size - before
        finally:
            await sandbox.close()

    assert asyncio.run(use()) == 0


# --- the command lines

PROGRAM = """#!/bin/sh
printf '%s\\n' "$*" >> {log}
case "$1" in
run) echo "no such runtime" >&2; exit 125 ;;
image) exit {known} ;;
esac
"""


def stand_in(tmp_path, monkeypatch, existing=0):
    """A program called docker that logs its arguments and starts nothing."""
    log = tmp_path / "log"
    program = tmp_path / "docker"
    program.write_text(PROGRAM.format(log=log, known=existing))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return log


def test_a_stand_in_engine_gets_the_options_that_confine_and_to_remove_the_container(
    tmp_path, monkeypatch
):
    log = stand_in(tmp_path, monkeypatch)
    with pytest.raises(
        vf.SandboxUnavailable, match="docker could not start a sandbox: no such runtime"
    ):
        asyncio.run(
            Docker(options=("--runtime=other",)).open(SandboxSpec(memory_mb=100, num_processes=7))
        )
    inspected, run, removed = log.read_text().splitlines()
    assert inspected.startswith("image inspect verifiers-sandbox:")
    for option in (
        "--rm --interactive",
        "--network none",
        "--read-only",
        "--cap-drop ALL",
        "--security-opt no-new-privileges",
        "--memory 228m --memory-swap 228m",
        "--pids-limit 11",
        "--pull never",
        "--runtime=other",
        "--entrypoint /opt/python/bin/python3",
    ):
        assert option in run, option
    name = run.split("--name ")[1].split()[0]
    assert removed == f"rm --force {name}"
    assert "readonly" in run.split("target=/usr/bin")[1].split()[0]


def test_a_stand_in_engine_without_the_image_is_given_one_and_a_network_only_on_request(
    tmp_path, monkeypatch
):
    log = stand_in(tmp_path, monkeypatch, existing=1)
    with pytest.raises(vf.SandboxUnavailable):
        asyncio.run(Docker().open(SandboxSpec(network=True)))
    _, imported, run, _ = log.read_text().splitlines()
    assert imported.startswith("import ")
    assert "verifiers-sandbox:" in imported
    assert "--network" not in run


def test_each_sandbox_has_a_user_of_its_own(tmp_path, monkeypatch):
    log = stand_in(tmp_path, monkeypatch)
    for _ in range(2):
        with pytest.raises(vf.SandboxUnavailable):
            asyncio.run(Docker().open(SandboxSpec()))
    users = [
        line.split("--user ")[1].split()[0]
        for line in log.read_text().splitlines()
        if line.startswith("run")
    ]
    assert len({*users}) == 2
    assert "0:0" not in users


@pytest.mark.parametrize(
    ("backend", "missing"), [(Nsjail, "nsjail"), (Docker, "docker"), (GVisor, "runsc")]
)
def test_a_program_that_is_not_there_is_named(backend, missing, monkeypatch):
    monkeypatch.setattr(backend, "find", lambda self: None)
    with pytest.raises(vf.SandboxUnavailable, match=f"{missing!r} is not installed"):
        asyncio.run(backend().open(SandboxSpec()))


def test_a_root_holds_names_and_no_file_of_the_host():
    root = root_for(())
    assert sum(path.stat().st_size for path in root.folder.rglob("*") if path.is_file()) < 1000
    assert root.visible["/opt/sandbox/guest"].endswith("/sandbox/guest")
    assert not any(
        "site-packages" in path
        for inside, path in root.visible.items()
        if inside.startswith("/opt/packages")
    )
    paths = [*root.visible]
    assert paths == sorted(paths), "a path is mounted after its parents"
