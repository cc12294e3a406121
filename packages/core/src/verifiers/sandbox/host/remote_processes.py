"""The processes of a sandbox whose first process is a keeper (``guest.init``), reached over a line of orders.

A line is the input and output of a container's command, or one command after another on a remote machine. Whatever
comes over it is bounded here, and judged where every worker's answer is (``channel``).
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
from verifiers.sandbox.host.session import LIMITS, MAX_READ_BYTES, max_header_bytes, settings
from verifiers.sandbox.protocol import SandboxSpec

END_S = 20.0
MAX_HEAD_BYTES = 2**16


class Line(Protocol):
    """A way to one keeper."""

    async def order(self, header: dict[str, Any], body: bytes = b"") -> tuple[dict[str, Any], bytes]:
        """Its reply. *Raises* ConnectionResetError when the keeper is gone, ConnectionAbortedError when that was no
        doing of the code.
        """
        ...

    async def close(self) -> None:
        """The keeper and all that it started are gone, with their files. Again: nothing."""
        ...


class Kept:
    """``Processes`` behind a line; ``open_line`` makes the sandbox when there is none. *Raises* SandboxError then."""

    def __init__(self, open_line: Callable[[], Awaitable[Line]]):
        self._open_line = open_line
        self._line: Line | None = None
        self._relay: asyncio.Task[None] | None = None
        self._killing: asyncio.Task[None] | None = None
        self._area_fd = -1
        self._failed: ConnectionAbortedError | None = None

    async def start(self, connection: socket.socket, area_fd: int) -> None:
        await self.ended()
        self._area_fd = area_fd
        if self._line is None:
            self._line = await self._open_line()
        try:
            await self._line.order({"op": "start"})
        except ConnectionError as error:
            await self._drop()
            raise SandboxError(f"The sandbox could not start an interpreter: {error}") from error
        self._relay = asyncio.create_task(self._pass_on(connection.dup(), self._line))

    def kill(self) -> None:
        if self._relay is not None:
            self._relay.cancel()
            self._relay = None
        if self._line is not None and (self._killing is None or self._killing.done()):
            self._killing = asyncio.create_task(self._kill())

    async def ended(self) -> None:
        if self._killing is not None:
            await asyncio.shield(self._killing)

    async def cause(self) -> str | None:
        """*Raises* SandboxError when it was no doing of the code."""
        await self.ended()
        told = await self._order("cause")
        failed, self._failed = self._failed, None
        if failed is not None:
            raise SandboxError(f"The sandbox is gone: {failed}") from failed
        return told.get("cause") if told.get("cause") in LIMITS else None

    async def clear(self) -> None:
        self.kill()
        try:
            await self.ended()
        finally:  # also when this is cancelled: nobody closes it again
            await self._drop()

    async def close(self) -> None:
        await self.clear()

    async def _kill(self) -> None:
        await self._order("kill")

    async def _order(self, op: str) -> dict[str, Any]:
        """An order whose reply carries the outputs. A keeper that does not answer is ended, and its files with it."""
        if self._line is None:
            return {}
        try:
            told, body = await asyncio.wait_for(self._line.order({"op": op}), END_S)
            self._keep(told, body)
        except (ConnectionError, TimeoutError, ValueError, TypeError, KeyError, OverflowError) as error:
            self._failed = error if isinstance(error, ConnectionAbortedError) else self._failed
            await self._drop()
            return {}
        return told

    def _keep(self, told: dict[str, Any], body: bytes) -> None:
        """Into the area, as a worker that shares it would have done."""
        first, second = (int(size) for size in told["sizes"])
        room = (os.fstat(self._area_fd).st_size - frames.OUTPUT.size) // 2
        if not 0 <= first <= room or not 0 <= second <= room or len(body) != first + second:
            raise ValueError("the outputs are not what their sizes say")
        os.pwrite(self._area_fd, frames.OUTPUT.pack(first, second), 0)
        os.pwrite(self._area_fd, body[:first], frames.OUTPUT.size)
        os.pwrite(self._area_fd, body[first:], frames.OUTPUT.size + room)

    async def _pass_on(self, connection: socket.socket, line: Line) -> None:
        """Requests of one worker's owner to the keeper, and answers back, until either ends."""
        reader, writer = await asyncio.open_connection(sock=connection)
        try:
            while True:
                lengths = await reader.readexactly(frames.LENGTHS.size)
                rest = await reader.readexactly(sum(frames.LENGTHS.unpack(lengths)))
                told, answer = await line.order({"op": "ask"}, lengths + rest)
                if told.get("gone"):
                    break
                writer.write(answer)
                await writer.drain()
        except ConnectionAbortedError as error:
            self._failed = error
        except (asyncio.IncompleteReadError, OSError):
            pass  # its owner let go of the worker, or the keeper is gone
        finally:
            writer.transport.abort()

    async def _drop(self) -> None:
        line, self._line = self._line, None
        if self._relay is not None:
            self._relay.cancel()
            self._relay = None
        if line is not None:
            await line.close()


def told_settings(spec: SandboxSpec, home: str, places: list[str], folders: list[str], confined: bool) -> str:
    """What the keeper is told, as its argument. ``places`` hold files in memory; ``folders`` are made."""
    told = {
        **settings(spec),
        "memory_mb": spec.memory_mb,
        "file_mb": spec.file_mb,
        "num_processes": spec.num_processes,
        "cpu_s": spec.cpu_s,
        "env": dict(spec.env),
        "working_dir": spec.working_dir,
        "home": home,
        "places": places,
        "folders": folders,
        "confined": confined,
        "max_header_bytes": max_header_bytes(spec),
    }
    return base64.b64encode(json.dumps(told).encode()).decode()


def max_reply_bytes(spec: SandboxSpec) -> int:
    """Of a reply's body: an answer in it is the longest."""
    return frames.LENGTHS.size + max_header_bytes(spec) + MAX_READ_BYTES
