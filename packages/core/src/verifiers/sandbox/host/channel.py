"""Host end of the connection to one worker: one request, one answer.

Received data is untrusted, because model-written code may have produced it: sizes are bounded
before anything is stored, types are validated, and an invalid answer ends the worker. The only
exception raised is ``WorkerGone``.
"""

from __future__ import annotations

import asyncio
import socket
from typing import cast

import msgspec

from verifiers.sandbox.guest import frames


class Answer(msgspec.Struct):
    """Header of a worker's answer; the fields that are set depend on the request."""

    stdout: str = ""
    stderr: str = ""
    value: str | None = None
    error: str | None = None
    exit_code: int | None = None
    truncated: bool = False
    limit: str | None = None
    errno: int | None = None
    message: str | None = None


_DECODER = msgspec.json.Decoder(Answer)


class WorkerGone(Exception):
    """The connection ended, or something other than an answer was received."""


class Channel(asyncio.Protocol):
    """A connection. ``max_header_bytes`` and ``max_body_bytes`` bound an answer."""

    def __init__(self, max_header_bytes: int, max_body_bytes: int):
        self._max_sizes = (max_header_bytes, max_body_bytes)
        self._received = bytearray()
        self._pending: asyncio.Future[tuple[Answer, bytes]] | None = None
        self._transport: asyncio.Transport | None = None
        self._end_reason: str | None = None

    @classmethod
    async def open(
        cls, connection: socket.socket, max_header_bytes: int, max_body_bytes: int
    ) -> Channel:
        """Open a channel over a connected socket and take ownership of it."""
        loop = asyncio.get_running_loop()
        connection.setblocking(False)
        _, channel = await loop.create_connection(
            lambda: cls(max_header_bytes, max_body_bytes), sock=connection
        )
        return channel

    async def request(self, header: dict[str, object], body: bytes = b"") -> tuple[Answer, bytes]:
        """Send a request; return the answer and its body. *Raises* WorkerGone."""
        if self._end_reason is not None or self._transport is None:
            raise WorkerGone(self._end_reason or "not connected")
        self._pending = asyncio.get_running_loop().create_future()
        self._transport.write(frames.pack(header, body))
        try:
            return await self._pending
        finally:
            self._pending = None

    def close(self) -> None:
        self._end("closed")

    # --- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transport does not inherit from asyncio.Transport
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self._pending is None or self._pending.done():
            return self._end("it sent data without a request")
        self._received += data
        if len(self._received) < frames.LENGTHS.size:
            return None
        header_size, body_size = frames.LENGTHS.unpack_from(self._received)
        if header_size > self._max_sizes[0] or body_size > self._max_sizes[1]:
            return self._end(f"its answer of {header_size + body_size} bytes is above the bound")
        start = frames.LENGTHS.size + header_size
        if len(self._received) < start + body_size:
            return None
        if len(self._received) > start + body_size:
            return self._end("it sent more than one answer")
        received, self._received = self._received, bytearray()
        try:
            answer = _DECODER.decode(memoryview(received)[frames.LENGTHS.size : start])
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            return self._end(f"its answer is malformed ({error})")
        return self._pending.set_result((answer, bytes(memoryview(received)[start:])))

    def connection_lost(self, exc: Exception | None) -> None:
        self._end("it ended")

    def _end(self, reason: str) -> None:
        self._end_reason = self._end_reason or reason
        self._received = bytearray()
        if self._transport is not None:
            self._transport.abort()
        if self._pending is not None and not self._pending.done():
            self._pending.set_exception(WorkerGone(self._end_reason))
