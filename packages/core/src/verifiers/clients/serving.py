"""The base of the servers of model APIs: HTTP in a thread and an event loop of its own.

The promise: the body of a request is read, bounded and parsed here (`ModelServer.max_body_bytes`,
`read_object`); a request that cannot be served (``ModelRefused``) is answered in its own dialect,
also inside a stream; a stream begins with its first event, and a reader that disconnects ends it
(`send_stream`). What is served is each server's own (`ModelServer.respond`).
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncGenerator, Callable, Mapping
from concurrent.futures import Future
from contextlib import aclosing, suppress
from functools import partial
from typing import Any, TypeAlias

from aiohttp import web
from aiohttp.http import HttpProcessingError

from verifiers.clients.dialects import DIALECTS, Dialect
from verifiers.clients.http import open_file_limit
from verifiers.clients.payload import encode
from verifiers.errors import ConfigError, ModelRefused
from verifiers.runtime.bounded import size_text
from verifiers.runtime.decoding import decode_message

START_S = 20.0
STOP_S = 10.0
DIALECT_OF = {path: dialect for dialect in DIALECTS.values() for path in dialect.PATHS}
"""Path below ``/v1/`` -> dialect."""
Answer: TypeAlias = web.StreamResponse | Mapping[str, Any] | bytes
"""A response, or the JSON value of one, or its text."""


class ModelServer:
    """One server; ``start`` returns once it listens, and ``respond`` runs on its loop."""

    thread_name = "verifiers-server"
    max_body_bytes = 64 * 2**20
    """Of the decoded body of a request; a longer one is refused."""
    max_idle = open_file_limit() // 2
    """Connections without a request in flight; beyond them the oldest is closed, so that files are
    left."""
    shutdown_s = 0.5
    """How long requests that are being answered may go on after `stop`."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop

    def start(self, deadline_s: float = START_S) -> None:
        """Listen. *Raises* OSError when that fails; TimeoutError after ``deadline_s``."""
        started: Future[None] = Future()
        target = partial(asyncio.run, self._serve(started))
        self._thread = threading.Thread(target=target, name=self.thread_name, daemon=True)
        self._thread.start()
        try:
            started.result(deadline_s)
        except TimeoutError:
            raise TimeoutError(f"no answer in {deadline_s:g} s") from None
        except OSError:
            self._thread.join()
            raise

    def stop(self) -> None:
        """Stop listening and end what is being answered. A second call does nothing."""
        if self._thread is not None and self._thread.is_alive():
            self.call(self._stopping.set)
            self._thread.join(STOP_S)

    def call(self, function: Callable[..., object], *arguments: object) -> None:
        """Call a function on the server's loop, from any thread; nothing happens once the loop is
        closed."""
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:
            if not self._loop.is_closed():
                raise

    async def listen(self, runner: web.ServerRunner) -> None:
        """Open the addresses of the server."""
        raise NotImplementedError(f"{type(self).__name__} must define async listen(self, runner)")

    async def respond(self, request: web.BaseRequest) -> Answer:
        """Answer one request. *Raises* ModelRefused; ConfigError for a body that cannot be read."""
        raise NotImplementedError(f"{type(self).__name__} must define async respond(self, request)")

    async def _serve(self, started: Future[None]) -> None:
        self._loop, self._stopping = asyncio.get_running_loop(), asyncio.Event()
        make = partial(web.BaseRequest, loop=self._loop, client_max_size=self.max_body_bytes)
        self.http = _Http(
            self._answered,
            request_factory=make,
            handler_cancellation=True,
            access_log=None,
            logger=log,
        )
        self.http.max_idle, self.http.busy = self.max_idle, set()
        runner = web.ServerRunner(self.http, shutdown_timeout=self.shutdown_s)
        try:
            await runner.setup()
            await self.listen(runner)
        except BaseException as error:  # noqa: BLE001  raised to the thread that waits for the start
            started.set_exception(error)
        else:
            started.set_result(None)
            await self._stopping.wait()
        await runner.cleanup()

    async def _answered(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.headers.get("Expect", "").lower() == "100-continue":
            await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self.http.busy.add(request.protocol)
        try:
            answer = await self.respond(request)
        except web.HTTPRequestEntityTooLarge:
            refused = ModelRefused(
                f"the body is longer than {size_text(self.max_body_bytes)}", status=413
            )
            return refusal(dialect_of(request.path), refused)
        except (ModelRefused, ConfigError) as error:
            return refusal(dialect_of(request.path), error)
        finally:
            self.http.busy.discard(request.protocol)
        if isinstance(answer, web.StreamResponse):
            return answer
        body = answer if isinstance(answer, bytes) else encode(answer)
        return web.Response(body=body, content_type="application/json")


class _Http(web.Server):
    """The HTTP server, with a bound on idle connections."""

    max_idle: int
    busy: set[Any]

    def connection_made(self, handler: Any, transport: Any) -> None:
        super().connection_made(handler, transport)
        if len(self.connections) > self.max_idle:
            idle = [connection for connection in self.connections if connection not in self.busy]
            for connection in idle[: -self.max_idle]:
                connection.force_close()


def _in_one_line(record: logging.LogRecord) -> bool:
    """Take the traceback of our code off a record of what is no HTTP: a stranger could fill the log
    with it."""
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, HttpProcessingError):
        record.msg = f"{record.getMessage()}: {error.message[:100]!r}"
        record.args = ()
        record.exc_info = None
    return True


log = logging.getLogger(__name__)
log.addFilter(_in_one_line)


def dialect_of(path: str) -> Dialect:
    """The dialect in which a request to a path is refused."""
    return next(
        (DIALECT_OF[ending] for ending in DIALECT_OF if path.endswith(f"/{ending}")),
        DIALECTS["chat"],
    )


async def read_object(request: web.BaseRequest) -> dict[str, Any]:
    """The JSON object in the body of a request. *Raises* ConfigError."""
    try:
        fields = decode_message(await request.read())
    except ValueError as error:
        raise ConfigError(f"the body cannot be read as JSON: {error}") from error
    if not isinstance(fields, dict):
        raise ConfigError("the body is not an object")
    return fields


def refusal(dialect: Dialect, refused: ModelRefused | ConfigError) -> web.Response:
    """The answer to a request that is refused."""
    status = refused.status or 400
    body = dialect.error_body(status, str(refused))
    if refused.field is not None or refused.code is not None:
        body["error"] |= {"param": refused.field, "code": refused.code or status}
    return web.Response(body=encode(body), status=status, content_type="application/json")


def models_body(*models: Mapping[str, Any]) -> dict[str, Any]:
    """The answer to ``GET /models``; a model has an ``id``, and fields of its own."""
    shared = {"object": "model", "created": 0, "owned_by": "verifiers"}
    return {"object": "list", "data": [shared | dict(model) for model in models], "has_more": False}


async def send_stream(
    request: web.BaseRequest,
    events: AsyncGenerator[bytes, None],
    error_event: Callable[[int, str], bytes],
) -> web.StreamResponse:
    """Answer with server-sent events. *Raises* ModelRefused before the first; a later one is the
    last event."""
    reply = web.StreamResponse(
        headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
    )
    with suppress(ConnectionResetError):  # the reader has closed the connection
        async with aclosing(events):
            try:
                async for event in events:
                    if not reply.prepared:
                        await reply.prepare(request)
                    await reply.write(event)
            except ModelRefused as refused:
                if not reply.prepared:
                    raise
                await reply.write(error_event(refused.status or 400, str(refused)))
        await reply.write_eof()
    return reply
