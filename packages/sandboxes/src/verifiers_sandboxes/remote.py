"""Sandboxes on machines of a service: one small machine per sandbox, which runs the guest init as a
container does.

A service must be able to run a command, upload and download a file, and end the machine. Each
request to the guest init is one command, so a call costs a round trip to the service. The machine
is the boundary: the code is not confined further inside, and can interfere with the guest init of
its sandbox only.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import importlib.util
import io
import secrets
import shlex
import zipfile
from abc import abstractmethod
from typing import Any, Protocol

from verifiers.errors import ConfigError, SandboxUnavailable, VerifiersError
from verifiers.sandbox.guest import frames
from verifiers.sandbox.host.mounts import GUEST
from verifiers.sandbox.host.probed import ProbedBackend
from verifiers.sandbox.host.session import Session
from verifiers.sandbox.protocol import SandboxSpec
from verifiers_sandboxes.remote_processes import (
    END_S,
    MAX_HEAD_BYTES,
    InitConnection,
    RemoteProcesses,
    encoded_settings,
    max_reply_bytes,
)

MAX_INLINE_BYTES = 2**14
"""Larger requests are uploaded as a file, because services bound the length of a command."""
SETUP_S = 300.0
RUN_INIT = (
    "import sys; sys.path.insert(0, {bundle!r}); from guest.init import {name}; del sys.path[0];"
    " {name}()"
)


class Machine(Protocol):
    """One machine of a service. Any exception of its methods ends the sandbox."""

    async def run(self, command: str, timeout_s: float) -> tuple[int, str]:
        """Run a shell command; return its exit code and stdout."""
        ...

    async def upload(self, path: str, data: bytes) -> None: ...

    async def download(self, path: str) -> bytes: ...

    async def end(self) -> None: ...


class RemoteBackend(ProbedBackend):
    """A ``SandboxBackend`` over a service. Packages are installed on the machine unless its image
    has them."""

    name: str
    package: str
    """The module to import."""
    distribution: str
    """The argument of ``pip install``."""
    capabilities = frozenset({"numpy", "sympy", "files", "network", "state", "isolation"})

    probe, probe_value, probe_s = "6 * 7", "42", 60.0
    probe_spec = SandboxSpec(wall_s=SETUP_S)
    failure = "a session did not answer"
    answered = "a machine of {} answered"

    @abstractmethod
    async def create(self, spec: SandboxSpec) -> Machine:
        """Create a machine that the service itself ends after ``spec.wall_s`` seconds."""

    async def open(self, spec: SandboxSpec) -> Session:
        spec.check_capabilities(self.name, self.capabilities)
        if importlib.util.find_spec(self.package) is None:
            raise SandboxUnavailable(
                f"The package {self.distribution!r} is not installed; pip install"
                f" {self.distribution}",
                names=[self.name],
            )

        async def connect() -> InitConnection:
            return await self._connect(spec)

        return await Session.open(spec, RemoteProcesses(connect), start_s=SETUP_S)

    async def _connect(self, spec: SandboxSpec) -> InitConnection:
        machine: Machine | None = None
        try:
            machine = await self.create(spec)
            return await _start_init(machine, spec)
        except BaseException as error:  # raised again after the machine has ended
            if machine is not None:
                await _end(machine)
            if isinstance(error, VerifiersError) or not isinstance(error, Exception):
                raise
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            raise SandboxUnavailable(
                f"{self.name} could not start a sandbox: {reason}", names=[self.name]
            ) from error


class _Commands:
    """An ``InitConnection`` that runs one command per request."""

    def __init__(self, machine: Machine, folder: str, spec: SandboxSpec):
        self._machine, self._folder = machine, folder
        self._wall_s = spec.wall_s
        self._max_bytes = frames.LENGTHS.size + MAX_HEAD_BYTES + max_reply_bytes(spec)
        self._closed = False

    async def request(
        self, header: dict[str, object], body: bytes = b""
    ) -> tuple[dict[str, Any], bytes]:
        if self._closed:
            raise ConnectionResetError("closed")
        try:
            code, encoded = await self._send(frames.pack(header, body))
        except Exception as error:
            raise ConnectionAbortedError(
                f"{type(error).__name__}: {error}".splitlines()[0]
            ) from error
        if code != 0:
            raise ConnectionResetError(f"the guest init did not answer (exit code {code})")
        if len(encoded) > 2 * self._max_bytes:
            raise ConnectionResetError(f"its reply of {len(encoded)} bytes is above the bound")
        try:
            reply = frames.take(bytearray(base64.b64decode(encoded)))
        except (ValueError, RecursionError) as error:
            raise ConnectionResetError(f"its reply is malformed: {error}") from error
        if reply is None or not isinstance(reply[0], dict):
            raise ConnectionResetError("its reply is cut short or malformed")
        return reply

    async def close(self) -> None:
        if not self._closed:
            self._closed = True
            await _end(self._machine)

    async def _send(self, packed: bytes) -> tuple[int, bytes]:
        """Send one request; return the command's exit code and the reply in base64."""
        token = secrets.token_hex(6)
        argument, source = base64.b64encode(packed).decode(), ""
        if len(packed) > MAX_INLINE_BYTES:
            argument, source = "-", f" < {self._folder}/{token}.request"
            await self._machine.upload(f"{self._folder}/{token}.request", packed)
        reply = f"{self._folder}/{token}.reply"
        command = (
            f"{_python(self._folder, 'send')} {self._folder}/socket {argument} {reply}{source}"
        )
        code, printed = await self._machine.run(command, self._wall_s)
        if code == 0 and printed.strip() == "@":  # the reply is too long to be printed
            return code, await self._machine.download(reply)
        return code, printed.encode("ascii", "replace")


async def _start_init(machine: Machine, spec: SandboxSpec) -> InitConnection:
    """Install the packages on the machine and start the guest init there."""
    folder = f"/tmp/verifiers-{secrets.token_hex(8)}"
    await _run(machine, f"mkdir -m 700 {folder}")
    await machine.upload(f"{folder}/guest.zip", _guest_zip())
    if spec.packages:
        names = shlex.join(spec.packages)
        quiet = "--quiet --disable-pip-version-check --root-user-action=ignore"
        code, printed = await machine.run(f"python3 -m pip install {quiet} {names} 2>&1", SETUP_S)
        if code != 0:
            last = (printed.strip().splitlines() or ["pip printed nothing"])[-1]
            raise ConfigError(
                f"The sandbox needs {', '.join(spec.packages)}, which could not be installed on the"
                f" machine: {last}; use an image that contains them, or network=True",
                names=[*spec.packages],
            )
    settings = encoded_settings(spec, f"{folder}/home", [], [], confined=False)
    await _run(machine, f"{_python(folder, 'main')} {settings} {folder}/socket")
    return _Commands(machine, folder, spec)


async def _run(machine: Machine, command: str) -> None:
    """*Raises* SandboxUnavailable when the command fails."""
    code, printed = await machine.run(command + " 2>&1", SETUP_S)
    if code != 0:
        raise SandboxUnavailable(
            f"The machine could not be prepared: {printed.strip()[-400:] or f'exit code {code}'}"
        )


def _python(folder: str, name: str) -> str:
    return "python3 -c " + shlex.quote(RUN_INIT.format(bundle=f"{folder}/guest.zip", name=name))


def _guest_zip() -> bytes:
    """The package ``guest``, which needs only the standard library."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(GUEST.glob("*.py")):
            archive.write(path, f"guest/{path.name}")
    return packed.getvalue()


async def _end(machine: Machine) -> None:
    # the service ends a machine that cannot be reached after wall_s
    with contextlib.suppress(Exception):
        await asyncio.wait_for(machine.end(), 3 * END_S)
