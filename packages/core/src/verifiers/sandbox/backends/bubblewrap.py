"""Sandboxes in Linux namespaces, set up by bubblewrap (https://github.com/containers/bubblewrap).

One zygote per list of packages and mounts runs in an outer sandbox that bubblewrap creates: no
network, no host files but interpreter, system programs, those packages and mounts (all read-only),
an empty environment. Each session is a fork of it in separate namespaces (user, mount, PID,
network, IPC, host name), with its own files in memory, no capability, a system-call filter and
limits; it cannot create further namespaces. Opening a session costs a fork, not the start of an
interpreter.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import socket

from verifiers.errors import SandboxUnavailable
from verifiers.sandbox.host.mounts import IMAGE, IMAGE_ENVIRONMENT, TOP_LEVEL, host_libraries
from verifiers.sandbox.host.packages import require
from verifiers.sandbox.host.probed import ProbedBackend
from verifiers.sandbox.host.session import (
    Session,
    limit_in,
    reported_by,
    supervisor_settings,
)
from verifiers.sandbox.host.zygotes import Zygote, zygote_for
from verifiers.sandbox.protocol import SandboxSpec

ENDING_S = 1.0
"""Seconds in which a zygote that was killed is seen to have ended."""
CAUSE_S = 5.0
"""Seconds to wait for the supervisor to report why a worker ended."""


class Bubblewrap(ProbedBackend):
    """A ``SandboxBackend``."""

    name = "bubblewrap"
    capabilities = frozenset({"numpy", "sympy", "files", "state", "isolation", "mounts", "root"})
    answered = "a session in its own namespaces answered"

    def __init__(self, command: str = "bwrap"):
        super().__init__()
        self._command = command

    async def open(self, spec: SandboxSpec) -> Session:
        spec.check_capabilities(self.name, self.capabilities)
        require(spec.packages)
        mounts = tuple(spec.mounts.items())
        if spec.root is not None:
            mounts += ((IMAGE, spec.root), *host_libraries())
        for is_last in (False, True):
            zygote = await asyncio.to_thread(zygote_for, self._path(), tuple(spec.packages), mounts)
            try:
                session = await Session.open(spec, _Namespaces(spec, zygote))
                if is_last or zygote.alive:
                    return session
                await session.close()  # it answered once, and ends with its zygote
            except SandboxUnavailable:
                # a zygote that was killed meanwhile costs no session that it did not have
                if is_last or not await asyncio.to_thread(zygote.ended_within, ENDING_S):
                    raise
        raise AssertionError("not reached")

    def _path(self) -> str:
        path = shutil.which(self._command)
        if path is None:
            raise SandboxUnavailable(
                f"The program {self._command!r} is not installed", names=[self.name]
            )
        return path


class _Namespaces:
    """``Processes`` of a session; its supervisor handles requests over ``_control``."""

    def __init__(self, spec: SandboxSpec, zygote: Zygote):
        self._settings = {
            **supervisor_settings(spec),
            "file_mb": max(1, min(spec.file_mb, spec.memory_mb)),
            "limit_address_space": spec.limit_address_space,
            "env": {**(IMAGE_ENVIRONMENT if spec.root is not None else {}), **spec.env},
            "writable_root": spec.writable_root,
            "image": None if spec.root is None else IMAGE,
            "left_out": [*TOP_LEVEL, "/usr", "/etc"],
        }
        self._zygote = zygote
        self._control: socket.socket | None = None

    async def start(self, connection: socket.socket, area_fd: int) -> None:
        if self._control is None:
            self._control = self._zygote.fork(self._settings)
        self._request("worker", [connection.fileno(), area_fd])

    def kill(self) -> None:
        self._request("kill", [])

    async def ended(self) -> None:
        return None  # the output area is shared memory, always complete

    async def cause(self) -> str | None:
        if self._control is None:
            return None
        self._request("cause", [])
        reply = await reported_by(self._control, CAUSE_S)
        if (failed := reply.get("failed")) is not None:
            raise SandboxUnavailable(
                f"The session could not enter its namespaces: {failed}", names=["bubblewrap"]
            )
        if not reply:
            await self.close()
        return limit_in(reply)

    async def clear(self) -> None:
        await self.close()

    async def close(self) -> None:
        control, self._control = self._control, None
        if control is not None:
            control.close()

    def _request(self, op: str, fds: list[int]) -> None:
        """Send a request to the supervisor."""
        if self._control is not None:
            # the session has ended: the closed connection of its worker is reported
            with contextlib.suppress(OSError):
                socket.send_fds(self._control, [json.dumps({"op": op}).encode()], fds)
