"""The owner's end of the connection to one worker: one request, one answer.

Everything that comes back was written by code that a model may have written: sizes are bounded before anything is kept,
types are checked, and what is not an answer ends the worker. It never raises into the rollout as a foreign error.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Any, cast

import msgspec

from verifiers.sandbox.guest import frames


class Answer(msgspec.Struct):
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
    """The connection ended, or something else than an answer came over it."""


class Channel(asyncio.Protocol):
    """One connection. ``max_header_bytes`` and ``max_body_bytes`` bound what is taken from the other side."""

    def __init__(self, max_header_bytes: int, max_body_bytes: int):
        self._bounds = (max_header_bytes, max_body_bytes)
        self._received = bytearray()
        self._waiting: asyncio.Future[tuple[Answer, bytes]] | None = None
        self._transport: asyncio.Transport | None = None
        self._ended: str | None = None

    @classmethod
    async def over(cls, connection: socket.socket, max_header_bytes: int, max_body_bytes: int) -> Channel:
        loop = asyncio.get_running_loop()
        connection.setblocking(False)
        _, channel = await loop.create_connection(lambda: cls(max_header_bytes, max_body_bytes), sock=connection)
        return channel

    async def request(self, header: dict[str, Any], body: bytes = b"") -> tuple[Answer, bytes]:
        """*Raises* WorkerGone."""
        if self._ended is not None or self._transport is None:
            raise WorkerGone(self._ended or "not connected")
        self._waiting = asyncio.get_running_loop().create_future()
        self._transport.write(frames.pack(header, body))
        try:
            return await self._waiting
        finally:
            self._waiting = None

    def close(self) -> None:
        self._end("closed")

    # --- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one, and does not inherit from it

    def data_received(self, data: bytes) -> None:
        if self._waiting is None or self._waiting.done():
            return self._end("it sent something that nobody asked for")
        self._received += data
        if len(self._received) < frames.LENGTHS.size:
            return None
        header_size, body_size = frames.LENGTHS.unpack_from(self._received)
        if header_size > self._bounds[0] or body_size > self._bounds[1]:
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
        return self._waiting.set_result((answer, bytes(memoryview(received)[start:])))

    def connection_lost(self, exc: Exception | None) -> None:
        self._end("it ended")

    def _end(self, why: str) -> None:
        self._ended = self._ended or why
        self._received = bytearray()
        if self._transport is not None:
            self._transport.abort()
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_exception(WorkerGone(self._ended))
