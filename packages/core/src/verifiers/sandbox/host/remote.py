"""Sandboxes on a service's machines: one small machine per sandbox, with the same keeper in it as in a container.

All that a service must offer is to run a command, take and give a file, and end the machine. Each order to the keeper
is one command, so a call costs a trip to the service. The machine is the boundary: inside it the code is not confined
further, and it can disturb the keeper, which only spoils its own sandbox.
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
from abc import ABC, abstractmethod
from typing import Any, Protocol

from verifiers.errors import ConfigError, SandboxError, SandboxUnavailable, VerifiersError
from verifiers.sandbox.guest import frames
from verifiers.sandbox.host.mounts import GUEST
from verifiers.sandbox.host.remote_processes import END_S, MAX_HEAD_BYTES, Kept, Line, max_reply_bytes, told_settings
from verifiers.sandbox.host.session import Session
from verifiers.sandbox.protocol import Availability, SandboxSpec

MAX_INLINE_BYTES = 2**14
SETUP_S = 300.0
PYTHON = "import sys; sys.path.insert(0, {bundle!r}); from guest.init import {name}; del sys.path[0]; {name}()"


class Machine(Protocol):
    """One machine of a service. Whatever its methods raise ends the sandbox."""

    async def run(self, command: str, timeout_s: float) -> tuple[int, str]:
        """Exit code and stdout of a shell's command."""
        ...

    async def upload(self, path: str, data: bytes) -> None: ...

    async def download(self, path: str) -> bytes: ...

    async def end(self) -> None: ...


class RemoteBackend(ABC):
    """A ``SandboxBackend`` over a service. Packages are installed there, or are in the machine's image already."""

    name: str
    package: str
    """What is imported."""
    distribution: str
    capabilities = frozenset({"numpy", "sympy", "files", "network", "state", "isolation"})

    def __init__(self) -> None:
        self._said: Availability | None = None

    @abstractmethod
    async def create(self, spec: SandboxSpec) -> Machine:
        """A machine that ends by itself ``spec.wall_s`` from now, whatever happens here."""

    async def available(self) -> Availability:
        if self._said is None:
            self._said = await self._probe()
        return self._said

    async def open(self, spec: SandboxSpec) -> Session:
        if importlib.util.find_spec(self.package) is None:
            raise SandboxUnavailable(
                f"The package {self.distribution!r} is not installed; pip install {self.distribution}",
                names=[self.name],
            )

        async def line() -> Line:
            return await self._line(spec)

        return await Session.open(spec, Kept(line), start_s=SETUP_S)

    async def _probe(self) -> Availability:
        try:
            sandbox = await self.open(SandboxSpec(wall_s=SETUP_S))
            try:
                result = await sandbox.exec("6 * 7", timeout_s=60)
            finally:
                await sandbox.close()
        except (SandboxError, OSError) as error:
            return Availability(False, str(error))
        if result.value != "42":
            return Availability(False, f"a session did not answer: {result.error or result.value}")
        return Availability(True, f"a machine of {self.name} answered")

    async def _line(self, spec: SandboxSpec) -> Line:
        machine: Machine | None = None
        try:
            machine = await self.create(spec)
            return await _prepared(machine, spec)
        except BaseException as error:
            if machine is not None:
                await _end(machine)
            if isinstance(error, VerifiersError) or not isinstance(error, Exception):
                raise
            why = f"{type(error).__name__}: {error}".splitlines()[0]
            raise SandboxUnavailable(f"{self.name} could not start a sandbox: {why}", names=[self.name]) from error


class _Commands:
    """A ``Line`` of one command after another."""

    def __init__(self, machine: Machine, folder: str, spec: SandboxSpec):
        self._machine, self._folder = machine, folder
        self._wall_s = spec.wall_s
        self._max_bytes = frames.LENGTHS.size + MAX_HEAD_BYTES + max_reply_bytes(spec)
        self._ended = False

    async def order(self, header: dict[str, Any], body: bytes = b"") -> tuple[dict[str, Any], bytes]:
        if self._ended:
            raise ConnectionResetError("closed")
        try:
            code, encoded = await self._give(frames.pack(header, body))
        except Exception as error:
            raise ConnectionAbortedError(f"{type(error).__name__}: {error}".splitlines()[0]) from error
        if code != 0:
            raise ConnectionResetError(f"the keeper did not answer (exit code {code})")
        if len(encoded) > 2 * self._max_bytes:
            raise ConnectionResetError(f"its reply of {len(encoded)} bytes is above the bound")
        try:
            reply = frames.take(bytearray(base64.b64decode(encoded)))
        except (ValueError, RecursionError) as error:
            raise ConnectionResetError(f"its reply is none: {error}") from error
        if reply is None or not isinstance(reply[0], dict):
            raise ConnectionResetError("its reply is cut short or none")
        return reply

    async def close(self) -> None:
        if not self._ended:
            self._ended = True
            await _end(self._machine)

    async def _give(self, packed: bytes) -> tuple[int, bytes]:
        """The command's exit code and the reply as base64."""
        token = secrets.token_hex(6)
        order, source = base64.b64encode(packed).decode(), ""
        if len(packed) > MAX_INLINE_BYTES:
            source = f" < {self._folder}/{token}.order"
            await self._machine.upload(f"{self._folder}/{token}.order", packed)
        reply = f"{self._folder}/{token}.reply"
        command = f"{_python(self._folder, 'ask')} {self._folder}/socket {'-' if source else order} {reply}{source}"
        code, printed = await self._machine.run(command, self._wall_s)
        if code == 0 and printed.strip() == "@":
            return code, await self._machine.download(reply)
        return code, printed.encode("ascii", "replace")


async def _prepared(machine: Machine, spec: SandboxSpec) -> Line:
    """The keeper runs there, with the packages."""
    folder = f"/tmp/verifiers-{secrets.token_hex(8)}"
    await _checked(machine, f"mkdir -m 700 {folder}")
    await machine.upload(f"{folder}/guest.zip", _bundle())
    if spec.packages:
        names = shlex.join(spec.packages)
        quiet = "--quiet --disable-pip-version-check --root-user-action=ignore"
        code, printed = await machine.run(f"python3 -m pip install {quiet} {names} 2>&1", SETUP_S)
        if code != 0:
            last = (printed.strip().splitlines() or ["pip said nothing"])[-1]
            raise ConfigError(
                f"The sandbox is to offer {', '.join(spec.packages)}, which could not be installed there: {last}; "
                "use an image that has them, or network=True",
                names=[*spec.packages],
            )
    told = told_settings(spec, f"{folder}/home", [], [], confined=False)
    await _checked(machine, f"{_python(folder, 'main')} {told} {folder}/socket")
    return _Commands(machine, folder, spec)


async def _checked(machine: Machine, command: str) -> None:
    code, printed = await machine.run(command + " 2>&1", SETUP_S)
    if code != 0:
        raise SandboxUnavailable(f"The machine could not be prepared: {printed.strip()[-400:] or f'exit code {code}'}")


def _python(folder: str, name: str) -> str:
    return "python3 -c " + shlex.quote(PYTHON.format(bundle=f"{folder}/guest.zip", name=name))


def _bundle() -> bytes:
    """The package ``inside``, which needs the standard library only."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as bundle:
        for path in sorted(GUEST.glob("*.py")):
            bundle.write(path, f"guest/{path.name}")
    return packed.getvalue()


async def _end(machine: Machine) -> None:
    """What cannot be ended from here ends by itself at its ``wall_s``."""
    with contextlib.suppress(Exception):
        await asyncio.wait_for(machine.end(), 3 * END_S)
