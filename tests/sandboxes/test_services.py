"""The remote backends against the types of their packages, with this machine in the place of the
service.

No service is asked. What each backend calls is bound to the signature of the real package, so a
call that the package would not take fails here; what the service would do is done on this machine.
Skipped for a package that is not there.
"""

import asyncio
import base64
import importlib
import inspect
import types

import pytest

import verifiers as vf
from support.machine import Here
from verifiers.sandbox import SandboxSpec, backend_for
from verifiers.sandbox.guest import frames
from verifiers_sandboxes import services

SPEC = SandboxSpec(wall_s=90)


def bound(real, call_machine, *, method=True):
    """``call_machine`` behind the signature of ``real``: *raises* TypeError for a call that it does
    not take."""
    signature = inspect.signature(real)

    async def call(*args, **keywords):
        arguments = signature.bind(*([None] if method else []), *args, **keywords).arguments
        arguments.pop("self", None)
        return await call_machine(arguments)

    return call


async def use(backend, machine):
    sandbox = await backend.open(SPEC)
    try:
        await sandbox.write_file("f", b"x" * 200_000)
        first = await sandbox.exec("x = len(open('f').read())\nprint('out')", timeout_s=60)
        second = await sandbox.exec("x", timeout_s=60)
        return first.stdout, second.value, len(await sandbox.read_file("f"))
    finally:
        await sandbox.close()


def works(backend, machine):
    assert asyncio.run(use(backend, machine)) == ("out\n", "200000", 200_000)


@pytest.mark.real
def test_e2b(monkeypatch):
    e2b = pytest.importorskip("e2b", reason="run: python3 tests/real/peers.py sandboxes")
    from e2b.sandbox_async.commands.command import Commands
    from e2b.sandbox_async.filesystem.filesystem import Filesystem

    machine, seen = Here(), {}

    async def run(arguments):
        code, printed = await machine.run(arguments["cmd"], arguments["timeout"])
        if code:
            raise e2b.CommandExitException(stderr="", stdout=printed, exit_code=code, error=None)
        return types.SimpleNamespace(exit_code=code, stdout=printed)

    async def create(arguments):
        seen.update(arguments)
        commands = types.SimpleNamespace(run=bound(Commands.run, run))
        files = types.SimpleNamespace(
            write=bound(
                Filesystem.write,
                lambda arguments: machine.upload(arguments["path"], arguments["data"]),
            ),
            read=bound(Filesystem.read, lambda arguments: machine.download(arguments["path"])),
        )
        kill = bound(e2b.AsyncSandbox.kill, lambda arguments: machine.end())
        return types.SimpleNamespace(commands=commands, files=files, kill=kill)

    monkeypatch.setattr(
        e2b.AsyncSandbox, "create", bound(e2b.AsyncSandbox.create, create, method=False)
    )
    works(services.E2B(), machine)
    assert (seen["timeout"], seen["allow_internet_access"]) == (90, False)


@pytest.mark.real
def test_modal(monkeypatch):
    modal = pytest.importorskip("modal", reason="run: python3 tests/real/peers.py sandboxes")
    from modal.sandbox._filesystem import _SandboxFilesystem as files

    machine, seen = Here(), {}
    real = modal.Sandbox

    def aio(call):
        return types.SimpleNamespace(aio=call)

    async def execute(arguments):
        assert arguments["args"][:2] == ("sh", "-c")
        code, printed = await machine.run(arguments["args"][2], arguments["timeout"])

        async def later(value):
            return value

        stdout = types.SimpleNamespace(read=aio(lambda: later(printed)))
        return types.SimpleNamespace(stdout=stdout, wait=aio(lambda: later(code)))

    async def create(arguments):
        seen.update(arguments)
        filesystem = types.SimpleNamespace(
            write_bytes=aio(
                bound(files.write_bytes, lambda g: machine.upload(g["remote_path"], g["data"]))
            ),
            read_bytes=aio(bound(files.read_bytes, lambda g: machine.download(g["remote_path"]))),
        )
        terminate = aio(bound(real.terminate, lambda arguments: machine.end()))
        return types.SimpleNamespace(
            exec=aio(bound(real.exec, execute)), filesystem=filesystem, terminate=terminate
        )

    async def lookup(arguments):
        return "the app"

    fake = types.SimpleNamespace(create=aio(bound(real.create, create, method=False)))
    monkeypatch.setattr(
        modal,
        "App",
        types.SimpleNamespace(lookup=aio(bound(modal.App.lookup, lookup, method=False))),
    )
    monkeypatch.setattr(modal, "Sandbox", fake)
    works(services.Modal(), machine)
    assert (seen["timeout"], seen["block_network"], seen["app"]) == (90, True, "the app")


@pytest.mark.real
def test_daytona(monkeypatch):
    daytona = pytest.importorskip("daytona", reason="run: python3 tests/real/peers.py sandboxes")
    files = importlib.import_module("daytona._async.filesystem").AsyncFileSystem
    processes = importlib.import_module("daytona._async.process").AsyncProcess
    machine, seen = Here(), []
    real = daytona.AsyncDaytona

    async def execute(arguments):
        code, printed = await machine.run(arguments["command"], arguments["timeout"])
        return types.SimpleNamespace(exit_code=code, result=printed)

    async def create(arguments):
        seen.append(arguments["params"])
        fs = types.SimpleNamespace(
            upload_file=bound(files.upload_file, lambda g: machine.upload(g["dst"], g["src"])),
            download_file=bound(files.download_file, lambda g: machine.download(g["args"][0])),
        )
        return types.SimpleNamespace(
            process=types.SimpleNamespace(exec=bound(processes.exec, execute)), fs=fs
        )

    async def close(arguments):
        seen.append("closed")

    client = types.SimpleNamespace(
        create=bound(real.create, create),
        delete=bound(real.delete, lambda arguments: machine.end()),
        close=bound(real.close, close),
    )
    monkeypatch.setattr(daytona, "AsyncDaytona", lambda: client)
    works(services.Daytona(), machine)
    assert (seen[0].network_block_all, seen[0].ttl_minutes, seen[0].ephemeral) == (True, 2, True)
    assert seen[-1] == "closed"


@pytest.mark.real
def test_prime_sandboxes(monkeypatch):
    prime = pytest.importorskip(
        "prime_sandboxes", reason="run: python3 tests/real/peers.py prime-sandboxes"
    )
    machine, seen = Here(), []
    real = prime.AsyncSandboxClient

    async def create(arguments):
        seen.append(arguments["request"])
        return types.SimpleNamespace(id="one")

    async def execute(arguments):
        code, printed = await machine.run(arguments["command"], arguments["timeout"])
        return prime.CommandResponse(stdout=printed, stderr="", exit_code=code)

    async def noted(arguments):
        seen.append(arguments.get("sandbox_id"))

    client = types.SimpleNamespace(
        create=bound(real.create, create),
        wait_for_creation=bound(real.wait_for_creation, noted),
        execute_command=bound(real.execute_command, execute),
        upload_bytes=bound(
            real.upload_bytes, lambda g: machine.upload(g["file_path"], g["file_bytes"])
        ),
        delete=bound(real.delete, lambda arguments: machine.end()),
        aclose=bound(real.aclose, noted),
    )
    monkeypatch.setattr(prime, "AsyncSandboxClient", lambda: client)
    works(services.PrimeSandboxes(), machine)
    assert (seen[0].timeout_minutes, seen[0].network_denylist) == (2, ["0.0.0.0/0"])
    assert seen[1] == "one"


@pytest.mark.parametrize("name", ["e2b", "modal", "daytona", "prime-sandboxes", "prime"])
def test_without_package_or_key_it_is_refused_with_the_reason(name, monkeypatch):
    for variable in (
        "E2B_API_KEY",
        "MODAL_TOKEN_ID",
        "MODAL_TOKEN_SECRET",
        "DAYTONA_API_KEY",
        "PRIME_API_KEY",
    ):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HOME", "/nonexistent")
    monkeypatch.setenv("MODAL_CONFIG_PATH", "/nonexistent/modal.toml")
    with pytest.raises(vf.SandboxUnavailable, match=r"pip install |could not start a sandbox: \w+"):
        asyncio.run(backend_for(name))


def backend_of(machine, monkeypatch):
    """A backend whose service gives this machine."""

    async def create(self, spec):
        return machine

    monkeypatch.setattr(services.RemoteBackend, "package", "sys", raising=False)
    names = {"name": "double", "distribution": "double"}
    return type("Double", (services.RemoteBackend,), {**names, "create": create})()


class Failing(Here):
    """A service that fails at its n-th command."""

    def __init__(self, at):
        super().__init__()
        self.at, self.ended = at, False

    async def run(self, command, timeout_s):
        self.at -= 1
        if self.at == 0:
            raise ConnectionError("the service is down")
        return await super().run(command, timeout_s)

    async def end(self):
        self.ended = True
        await super().end()


@pytest.mark.parametrize("at", [1, 2, 3, 4])
def test_a_service_that_fails_on_the_way_is_said_and_the_machine_is_ended(at, monkeypatch):
    machine = Failing(at)
    backend = backend_of(machine, monkeypatch)
    with pytest.raises(vf.SandboxError, match="the service is down"):
        asyncio.run(backend.open(SPEC))
    assert machine.ended


class Lying(Here):
    """Its guest init was replaced by the code: it answers every request with ``reply``."""

    reply = None
    ended = False

    async def run(self, command, timeout_s):
        if self.reply is not None:
            return (
                0,
                base64.b64encode(frames.LENGTHS.pack(len(self.reply), 0) + self.reply).decode(),
            )
        return await super().run(command, timeout_s)

    async def end(self):
        self.ended = True
        await super().end()


@pytest.mark.parametrize(
    "reply", [b"[" * 60_000, b'{"sizes": [Infinity, 1]}', b"[]", b"null", b'{"sizes": [9]}']
)
def test_a_malformed_reply_of_the_guest_init_ends_its_own_sandbox_and_nothing_else(
    reply, monkeypatch
):
    machine = Lying()
    backend = backend_of(machine, monkeypatch)

    async def use():
        sandbox = await backend.open(SPEC)
        try:
            machine.reply = reply
            result = await sandbox.exec("1", timeout_s=2)
        except vf.SandboxError:
            return None
        else:
            return result.value
        finally:
            await sandbox.close()

    assert asyncio.run(use()) is None
    assert machine.ended


def test_a_close_that_is_cancelled_still_ends_the_machine(monkeypatch):
    machine = Lying()
    backend = backend_of(machine, monkeypatch)

    async def use():
        sandbox = await backend.open(SPEC)
        closing = asyncio.create_task(sandbox.close())
        await asyncio.sleep(0)  # it has asked the guest init to kill everything, and waits
        closing.cancel()
        await asyncio.gather(closing, return_exceptions=True)
        return closing.cancelled()

    assert asyncio.run(use())
    assert machine.ended


def test_a_service_that_fails_later_is_the_sandboxes_error_and_no_doing_of_the_code(monkeypatch):
    machine = Failing(at=99)
    backend = backend_of(machine, monkeypatch)

    async def use():
        sandbox = await backend.open(SPEC)
        try:
            machine.at = 1
            with pytest.raises(vf.SandboxError, match="the service is down"):
                await sandbox.exec("1", timeout_s=30)
            killed = (
                "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)\nimport"
                " time\ntime.sleep(9)"
            )
            return await sandbox.exec(killed, timeout_s=30)
        finally:
            await sandbox.close()

    assert asyncio.run(use()).limit == "killed", (
        "negative control: code that ends the guest init gets its own end as the cause"
    )
