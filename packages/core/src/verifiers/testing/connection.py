"""One connection of `FakeServer`: HTTP/1.1 requests off a socket, and the faults that answer them.

The server selects the `Behaviour` of each request (``server``).
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from verifiers.errors import ConfigError
from verifiers.testing import wire

COMPLETION_PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")


@dataclass(frozen=True, slots=True)
class Behaviour:
    """How one request is treated. The default is a proper answer. Example: ``Behaviour(429, {"Retry-After": "1"})``"""

    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes | str | None = None
    """Sent instead of the completion (or of the error, when ``status`` is not 200)."""
    delay_s: float = 0.0
    drip_s: float = 0.0
    """Above 0: the body is sent byte by byte, this many seconds apart."""
    reset: bool = False
    """The connection is reset instead of answered."""
    garbage: bytes | None = None
    """Sent instead of an HTTP answer; then the connection is closed."""
    never: bool = False
    """The request is read and never answered."""
    cut_bytes: int | None = None
    """Only so many bytes of the body are sent; then the connection is closed, or with ``never`` stays silent."""


@dataclass(frozen=True, slots=True)
class Hit:
    """One request as it arrived."""

    index: int
    """0 for the first of its kind: completions and everything else are counted apart."""
    time_s: float
    """``time.monotonic()`` when it was read."""
    method: str
    path: str
    query: str
    headers: Mapping[str, str]
    """Names in lower case."""
    body: bytes

    def json(self) -> Any:
        """The body as data."""
        return json.loads(self.body)


Script = Sequence[Any] | Callable[[Hit], Any] | None


def as_behaviour(given: object) -> Behaviour:
    """A `Behaviour`, a status, a dict of its fields, or None for a proper answer."""
    if given is None:
        return PROPER
    if isinstance(given, Behaviour):
        return given
    if isinstance(given, int):
        return Behaviour(status=given)
    if isinstance(given, Mapping):
        return Behaviour(**given)
    raise ConfigError(f"a script holds Behaviours, statuses, dicts or None, not {given!r}")


PROPER = Behaviour()


class Handler(Protocol):
    """What a connection needs of its server."""

    connections: set[Connection]

    def count_up(self, num_completions: int) -> int:
        """The index of a request that arrived."""

    def leave(self, num_completions: int) -> None:
        """A request is over."""

    def handle(self, connection: Connection, hit: Hit) -> None:
        """Answer a request through `Connection.answer` or `Connection.act`."""


class Connection(asyncio.Protocol):
    """One client connection: requests are read and answered one after another."""

    transport: asyncio.Transport

    def __init__(self, server: Handler):
        self._server = server
        self._buffer = bytearray()
        self._is_busy = False
        self._in_flight = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]
        self._server.connections.add(self)

    def connection_lost(self, error: Exception | None) -> None:
        self._server.connections.discard(self)
        self._finish()

    def data_received(self, received: bytes) -> None:
        self._buffer += received
        if not self._is_busy:
            self._read()

    def answer(self, whole: bytes) -> None:
        """Send a whole HTTP answer and go on to the next request."""
        self._finish()
        if not self.transport.is_closing():
            self.transport.write(whole)
            if self._buffer:
                self._read()

    def answer_later(self, whole: bytes, delay_s: float) -> None:
        """As `answer`, after a pause."""
        if delay_s:
            asyncio.get_running_loop().call_later(delay_s, self.answer, whole)
        else:
            self.answer(whole)

    async def act(self, behaviour: Behaviour, completion: bytes) -> None:
        """Treat the current request as scripted."""
        if behaviour.delay_s:
            await asyncio.sleep(behaviour.delay_s)
        if (behaviour.never and behaviour.cut_bytes is None) or self.transport.is_closing():
            return
        if behaviour.reset:
            linger = struct.pack("ii", 1, 0)  # close() then sends RST
            self.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            self.transport.abort()
            return
        if behaviour.garbage is not None:
            self.transport.write(behaviour.garbage)
            self.transport.close()
            return
        body = completion if behaviour.body is None else behaviour.body
        body = body.encode() if isinstance(body, str) else body
        if not body and behaviour.status != 200 and behaviour.body is None:
            body = wire.error_body(f"scripted {behaviour.status}")
        whole = wire.http_answer(behaviour.status, body, dict(behaviour.headers))
        if behaviour.cut_bytes is not None:
            self.transport.write(whole[: len(whole) - len(body) + behaviour.cut_bytes])
            if not behaviour.never:
                self.transport.close()
        elif behaviour.drip_s:
            await self._drip(whole, len(body), behaviour.drip_s)
        else:
            self.answer(whole)

    async def _drip(self, whole: bytes, num_body: int, pause_s: float) -> None:
        self.transport.write(whole[: len(whole) - num_body])
        for i in range(len(whole) - num_body, len(whole)):
            await asyncio.sleep(pause_s)
            if self.transport.is_closing():
                return
            self.transport.write(whole[i : i + 1])
        self.answer(b"")

    def _finish(self) -> None:
        if self._is_busy:
            self._is_busy = False
            self._server.leave(self._in_flight)
            self._in_flight = 0

    def _read(self) -> None:
        """Take one whole request off the buffer, if it is there."""
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            return
        first, *lines = bytes(self._buffer[:end]).decode("latin-1").split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        size = int(headers.get("content-length", 0))
        if len(self._buffer) < end + 4 + size:
            return
        body = bytes(self._buffer[end + 4 : end + 4 + size])
        del self._buffer[: end + 4 + size]
        method, target, _ = first.split(" ", 2)
        path, _, query = target.partition("?")
        self._is_busy = True
        self._in_flight = int(method == "POST" and path in COMPLETION_PATHS)
        index = self._server.count_up(self._in_flight)
        self._server.handle(self, Hit(index, time.monotonic(), method, path, query, headers, body))
