"""The faults with which `FakeServer` answers: a script of a `Behaviour` per request (`Hit`)."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from verifiers.errors import ConfigError

COMPLETION_PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")


@dataclass(frozen=True, slots=True)
class Behaviour:
    """How one request is treated. The default is a proper answer. Example: ``Behaviour(429,
    {"Retry-After": "1"})``"""

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
    """Only so many bytes of the body are sent; then the connection is closed, or with ``never``
    stays silent."""


@dataclass(frozen=True, slots=True)
class Hit:
    """A request as it arrived."""

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


def as_behaviour(value: object) -> Behaviour:
    """A `Behaviour`, a status, a dict of its fields, or None for a proper answer."""
    if value is None:
        return PROPER
    if isinstance(value, Behaviour):
        return value
    if isinstance(value, int):
        return Behaviour(status=value)
    if isinstance(value, Mapping):
        return Behaviour(**value)
    raise ConfigError(f"a script holds Behaviours, statuses, dicts or None, not {value!r}")


PROPER = Behaviour()


async def act(
    request: web.BaseRequest, behaviour: Behaviour, completion: bytes
) -> web.StreamResponse:
    """Treat a request as scripted; ``completion`` is the body of a proper answer."""
    await asyncio.sleep(behaviour.delay_s)
    if behaviour.never and behaviour.cut_bytes is None:
        await asyncio.Event().wait()
    transport = request.transport
    assert transport is not None  # a client that disconnects cancels this
    if behaviour.reset:
        linger = struct.pack("ii", 1, 0)  # close() then sends RST
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        transport.abort()
        return web.Response()
    if behaviour.garbage is not None:
        transport.write(behaviour.garbage)
        transport.close()
        return web.Response()
    body = completion if behaviour.body is None else behaviour.body
    body = body.encode() if isinstance(body, str) else body
    kind = "text/event-stream" if body.startswith((b"event:", b"data:")) else "application/json"
    lines = {"Content-Type": kind, "Content-Length": str(len(body)), **behaviour.headers}
    reply = web.StreamResponse(status=behaviour.status, headers=lines)
    await reply.prepare(request)
    if behaviour.drip_s:
        for i in range(len(body)):
            await asyncio.sleep(behaviour.drip_s)
            await reply.write(body[i : i + 1])
    else:
        await reply.write(body[: behaviour.cut_bytes])
    if behaviour.cut_bytes is not None:
        if behaviour.never:
            await asyncio.Event().wait()
        transport.close()
    return reply
