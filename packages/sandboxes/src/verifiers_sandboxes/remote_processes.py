"""The processes of a sandbox whose first process is the guest init (``guest.init``), reached over a
connection to it.

The connection is the input and output of a container's command, or a sequence of commands on a
remote machine. Received data is untrusted: sizes are bounded here, and ``Channel`` validates a
worker's answers as with every other backend.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import socket
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from verifiers.errors import SandboxError
from verifiers.sandbox.guest import frames
from verifiers.sandbox.host.session import (
    MAX_READ_BYTES,
    limit_in,
    max_header_bytes,
    supervisor_settings,
)
from verifiers.sandbox.protocol import SandboxSpec

END_S = 20.0
"""Seconds to wait for the guest init to kill its processes before its container or machine is
ended."""
MAX_HEAD_BYTES = 2**16


class InitConnection(Protocol):
    """A connection to one guest init."""

    async def request(
        self, header: dict[str, object], body: bytes = b""
    ) -> tuple[dict[str, Any], bytes]:
        """Return the reply: header and body.

        *Raises* ConnectionResetError when the guest init has ended (the code may have killed it),
        ConnectionAbortedError when the transport failed (never caused by the code).
        """
        ...

    async def close(self) -> None:
        """End the guest init, every process it started and their files. A second call
        does nothing."""
        ...


class RemoteProcesses:
    """``Processes`` behind a connection. ``connect`` creates the container or machine; it *raises*
    SandboxError."""

    def __init__(self, connect: Callable[[], Awaitable[InitConnection]]):
        self._connect = connect
        self._connection: InitConnection | None = None
        self._relay: asyncio.Task[None] | None = None
        self._killing: asyncio.Task[dict[str, object]] | None = None
        self._area_fd = -1
        self._transport_error: ConnectionAbortedError | None = None

    async def start(self, connection: socket.socket, area_fd: int) -> None:
        await self.ended()
        self._area_fd = area_fd
        if self._connection is None:
            self._connection = await self._connect()
        try:
            await self._connection.request({"op": "start"})
        except ConnectionError as error:
            await self._disconnect()
            raise SandboxError(f"The sandbox could not start an interpreter: {error}") from error
        self._relay = asyncio.create_task(self._forward(connection.dup(), self._connection))

    def kill(self) -> None:
        if self._relay is not None:
            self._relay.cancel()
            self._relay = None
        if self._connection is not None and (self._killing is None or self._killing.done()):
            self._killing = asyncio.create_task(self._request_with_outputs("kill"))

    async def ended(self) -> None:
        if self._killing is not None:
            await asyncio.shield(self._killing)

    async def cause(self) -> str | None:
        """*Raises* SandboxError when the transport failed, which the code cannot cause."""
        await self.ended()
        reply = await self._request_with_outputs("cause")
        error, self._transport_error = self._transport_error, None
        if error is not None:
            raise SandboxError(f"The sandbox is gone: {error}") from error
        return limit_in(reply)

    async def clear(self) -> None:
        self.kill()
        try:
            await self.ended()
        finally:  # also on cancellation: nothing else closes the connection
            await self._disconnect()

    async def close(self) -> None:
        await self.clear()

    async def _request_with_outputs(self, op: str) -> dict[str, object]:
        """Send a request whose reply carries stdout and stderr; return {} without a valid reply.

        A guest init that does not answer is ended, and its files are deleted.
        """
        if self._connection is None:
            return {}
        try:
            reply, outputs = await asyncio.wait_for(self._connection.request({"op": op}), END_S)
            self._store_outputs(reply, outputs)
        except (
            ConnectionError,
            TimeoutError,
            ValueError,
            TypeError,
            KeyError,
            OverflowError,
        ) as error:
            if isinstance(error, ConnectionAbortedError):
                self._transport_error = error
            await self._disconnect()
            return {}
        return reply

    def _store_outputs(self, reply: dict[str, Any], outputs: bytes) -> None:
        """Write the outputs into the output area, as a worker that shares its memory does."""
        stdout_bytes, stderr_bytes = (int(size) for size in reply["sizes"])
        room = (os.fstat(self._area_fd).st_size - frames.OUTPUT.size) // 2
        if (
            not 0 <= stdout_bytes <= room
            or not 0 <= stderr_bytes <= room
            or len(outputs) != stdout_bytes + stderr_bytes
        ):
            raise ValueError("the outputs do not match their sizes")
        os.pwrite(self._area_fd, frames.OUTPUT.pack(stdout_bytes, stderr_bytes), 0)
        os.pwrite(self._area_fd, outputs[:stdout_bytes], frames.OUTPUT.size)
        os.pwrite(self._area_fd, outputs[stdout_bytes:], frames.OUTPUT.size + room)

    async def _forward(self, worker: socket.socket, init: InitConnection) -> None:
        """Pass requests for the worker to the guest init and its answers back, until either side
        ends."""
        reader, writer = await asyncio.open_connection(sock=worker)
        try:
            while True:
                lengths = await reader.readexactly(frames.LENGTHS.size)
                payload = await reader.readexactly(sum(frames.LENGTHS.unpack(lengths)))
                reply, answer = await init.request({"op": "forward"}, lengths + payload)
                if reply.get("gone"):
                    break
                writer.write(answer)
                await writer.drain()
        except ConnectionAbortedError as error:
            self._transport_error = error
        except (asyncio.IncompleteReadError, OSError):
            # the session dropped this worker or the guest init ended; the session sees the closed
            # connection
            pass
        finally:
            writer.transport.abort()

    async def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if self._relay is not None:
            self._relay.cancel()
            self._relay = None
        if connection is not None:
            await connection.close()


def encoded_settings(
    spec: SandboxSpec, home: str, mount_points: list[str], folders: list[str], confined: bool
) -> str:
    """The guest init's settings, as its command-line argument.

    ``mount_points``: in-memory file systems, whose files count as memory. ``folders``: created at
    the start.
    ``confined``: drop privileges and install the system-call filter.
    """
    settings = {
        **supervisor_settings(spec),
        "home": home,
        "places": mount_points,
        "folders": folders,
        "confined": confined,
        "max_header_bytes": max_header_bytes(spec),
    }
    return base64.b64encode(json.dumps(settings).encode()).decode()


def max_reply_bytes(spec: SandboxSpec) -> int:
    """Largest body of a reply: a worker's answer to reading a file."""
    return frames.LENGTHS.size + max_header_bytes(spec) + MAX_READ_BYTES
