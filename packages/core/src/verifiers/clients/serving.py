"""The base of the servers of model APIs: HTTP in a thread and an event loop of its own.

The promise: the body of a request is read, bounded and parsed here (`ModelServer.max_body_bytes`,
`read_object`); a request that cannot be served (``ModelRefused``), or not even be read, is answered
in its own dialect, also inside a stream; a stream begins with its first event, and a reader that disconnects ends it
(`send_stream`). What is served is each server's own (`ModelServer.respond`).
"""

from __future__ import annotations

import asyncio
import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import aclosing, contextmanager, suppress
from functools import partial
from typing import Any, TypeAlias

from aiohttp import web
from aiohttp.http import HttpProcessingError
from aiohttp.http_exceptions import ContentEncodingError
from aiohttp.typedefs import Handler

from verifiers.clients.dialects import DIALECTS, Dialect
from verifiers.clients.http import open_file_limit
from verifiers.clients.payload import encode
from verifiers.errors import ConfigError, ModelRefused
from verifiers.runtime.bounded import size_text
from verifiers.runtime.decoding import decode_message
from verifiers.runtime.origins import foreign_page

SHORT_BYTES = 2**20
"""A body that is read without waiting for room."""
MAX_LINE_BYTES = 400
"""Of the first line of a request that cannot be read."""
START_S = 20.0
STOP_S = 10.0
DIALECT_OF = {path: dialect for dialect in DIALECTS.values() for path in dialect.PATHS}
"""Path below ``/v1/`` -> dialect."""
Answer: TypeAlias = web.StreamResponse | Mapping[str, Any] | bytes
"""A response, or the JSON value of a response, or its text."""


class ModelServer(ABC):
    """A server; ``start`` returns once it listens, and ``respond`` runs on its loop."""

    thread_name = "verifiers-server"
    max_body_bytes = 64 * 2**20
    """Of the decoded body of a request; a longer body is refused."""
    max_held_bytes = 128 * 2**20
    """Of what has come of the long bodies of all requests that are being answered; the rest of them is
    read later."""
    max_idle = open_file_limit() // 2
    """Connections of a socket without a request in flight; beyond them the oldest is closed, so that
    files are left."""
    max_idle_s = 120.0
    """How long a connection may stay without a request, and how long a body may take."""
    max_stall_s = 20.0
    """How long a body may stand still, while others may wait for its room."""
    host = "127.0.0.1"
    """Where the server listens."""
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

    @abstractmethod
    async def listen(self, runner: web.ServerRunner) -> None:
        """Open the addresses of the server."""

    @abstractmethod
    async def respond(self, request: web.BaseRequest) -> Answer:
        """Answer one request. *Raises* ModelRefused; ConfigError for a body that cannot be read."""

    async def _serve(self, started: Future[None]) -> None:
        self._loop, self._stopping = asyncio.get_running_loop(), asyncio.Event()
        self._held: dict[web.RequestHandler, int] = {}
        self._growing: dict[web.RequestHandler, None] = {}
        self._held_bytes, self._room = 0, asyncio.Condition()
        make = partial(web.BaseRequest, loop=self._loop, client_max_size=self.max_body_bytes)
        self.http = _Server(
            self._answered,
            request_factory=make,
            handler_cancellation=True,
            access_log=None,
            logger=log,
        )
        self._idle = IdleConnections(self.http, self.max_idle, self.max_idle_s)
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
        with self._idle.in_use(request.protocol):
            try:
                if not _is_unix(request.transport):  # no browser reaches a Unix socket
                    check_origin(request, self.host)
                answer = await self.respond(request)
            except (ModelRefused, ConfigError) as error:
                return refusal(dialect_of(request.path), error)
            finally:
                await self._release(request)
        if isinstance(answer, web.StreamResponse):
            return answer
        body = answer if isinstance(answer, bytes) else encode(answer)
        return web.Response(body=body, content_type="application/json")

    async def body(
        self, request: web.BaseRequest, grow: Callable[[int], None] = lambda num_bytes: None
    ) -> bytes:
        """The body of a request, whose bytes count as they come, until it is answered.

        ``grow`` is told how many have come. *Raises* ModelRefused when it is too long, there is no
        room, or the rest of it does not come; what ``grow`` raises.
        """
        body, why = bytearray(), f"within {self.max_idle_s:g} s"
        try:
            async with asyncio.timeout(self.max_idle_s):
                while chunk := await self._next_chunk(request):
                    body += chunk
                    if len(body) > self.max_body_bytes:
                        limit = size_text(self.max_body_bytes)
                        raise ModelRefused(f"the body is longer than {limit}", status=413)
                    grow(len(body))
                    if len(body) > SHORT_BYTES:
                        await self._hold(request.protocol, len(body))
                return bytes(body)
        except _Stalled:
            why = f"because none of it came for {self.max_stall_s:g} s"
        except TimeoutError:
            pass
        except web.RequestPayloadError as error:
            raise ModelRefused(_undecodable(request, error), status=400) from error
        raise ModelRefused(
            f"the body was not read {why}: send it faster, or when fewer long requests are being"
            " answered",
            status=503,
        )

    async def _next_chunk(self, request: web.BaseRequest) -> bytes:
        """*Raises* _Stalled."""
        stall = asyncio.timeout(self.max_stall_s)
        try:
            async with stall:
                return await request.content.readany()
        except TimeoutError:
            if stall.expired():
                raise _Stalled from None
            raise

    async def _hold(self, connection: web.RequestHandler, num_bytes: int) -> None:
        """Wait until there is room for what has come of a body."""
        num_more = num_bytes - self._held.get(connection, 0)
        if self._growing or self._held_bytes + num_more > self.max_held_bytes:
            self._growing[connection] = None
            try:
                async with self._room:
                    self._room.notify_all()  # the last that could end without more room may wait now
                    await self._room.wait_for(lambda: self._may_grow(connection, num_more))
            finally:
                self._growing.pop(connection, None)
        self._held_bytes += num_more
        self._held[connection] = num_bytes

    def _may_grow(self, connection: web.RequestHandler, num_more: int) -> bool:
        """Where every long body waits for the rest of its room, the first that waits has it, or none
        would end."""
        if self._held_bytes + num_more <= self.max_held_bytes:
            return True
        return self._held.keys() <= self._growing.keys() and next(iter(self._growing)) is connection

    async def _release(self, request: web.BaseRequest) -> None:
        if held_bytes := self._held.pop(request.protocol, 0):
            async with self._room:
                self._held_bytes -= held_bytes
                self._room.notify_all()


class _Stalled(Exception):
    """Nothing of a body came for too long."""


class _Connection(web.RequestHandler):
    """Its answer to what cannot be read, or fails, is JSON as all others."""

    def __init__(self, server: _Server, **options: Any):
        super().__init__(server, **options)
        self._server = server
        self._arrived = b""

    def data_received(self, data: bytes) -> None:
        self._arrived = data[:MAX_LINE_BYTES]  # of a request that is not read nothing else is left
        super().data_received(data)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        plain = super().handle_error(request, status, exc, message)  # which writes to the log
        words = " ".join((message or "").split())[:200]
        if isinstance(exc, ContentEncodingError):
            sentence = f"the body cannot be decoded, send it as gzip or as it is: {words}"
        elif isinstance(exc, HttpProcessingError):
            sentence = f"the request is no HTTP: {words}"
        else:
            sentence = f"the server failed{f': {words}' if words else ', its log says why'}"
        path = request.path
        if isinstance(exc, HttpProcessingError):
            line = self._arrived.split(b"\r\n", 1)[0].split(b" ")
            path = line[1].decode("latin-1") if len(line) > 1 else ""
        answer = web.Response(
            body=encode(self._server.error_body(path.partition("?")[0], status, sentence)),
            status=plain.status,
            content_type="application/json",
        )
        answer.force_close()
        return answer


class _Server(web.Server):
    """A server whose connections are `_Connection`."""

    def __call__(self) -> web.RequestHandler:
        return _Connection(self, loop=self._loop, **self._kwargs)

    @staticmethod
    def error_body(path: str, status: int, sentence: str) -> Mapping[str, object]:
        """What stands in the answer to a request to ``path`` that cannot be read."""
        return dialect_of(path).error_body(status, sentence)


class _AppServer(_Server):
    @staticmethod
    def error_body(path: str, status: int, sentence: str) -> Mapping[str, object]:
        return {"detail": sentence}


class IdleConnections:
    """Connections of a server without a request in flight: so many per socket, for so long."""

    def __init__(self, server: web.Server, max_idle: int, max_idle_s: float):
        self._max_idle, self._max_idle_s = max_idle, max_idle_s
        self._since: dict[bool, dict[web.RequestHandler, float]] = {False: {}, True: {}}
        """Is it the Unix socket -> connection -> when its last request ended; the oldest first."""
        self._loop = asyncio.get_running_loop()
        self._connection_made, self._connection_lost = (
            server.connection_made,
            server.connection_lost,
        )
        server.connection_made = self._opened  # type: ignore[method-assign, assignment]
        server.connection_lost = self._closed  # type: ignore[method-assign, assignment]
        self._sweep()

    @contextmanager
    def in_use(self, connection: web.RequestHandler) -> Iterator[None]:
        """A request of the connection is being answered."""
        self._forget(connection)
        try:
            yield
        finally:
            self._add(connection)

    def _opened(self, connection: web.RequestHandler, transport: asyncio.Transport) -> None:
        self._connection_made(connection, transport)
        self._add(connection)

    def _closed(self, connection: web.RequestHandler, error: BaseException | None = None) -> None:
        self._connection_lost(connection, error)
        self._forget(connection)

    def _add(self, connection: web.RequestHandler) -> None:
        if connection.transport is None:  # closed while its request was answered
            return
        idle = self._since[_is_unix(connection.transport)]
        idle[connection] = self._loop.time()
        if len(idle) > self._max_idle:
            self._close(next(iter(idle)))

    def _forget(self, connection: web.RequestHandler) -> None:
        for idle in self._since.values():
            idle.pop(connection, None)

    def _close(self, connection: web.RequestHandler) -> None:
        self._forget(connection)
        connection.force_close()

    def _sweep(self) -> None:
        for idle in self._since.values():
            until = self._loop.time() - self._max_idle_s
            for connection in [each for each, since in idle.items() if since <= until]:
                self._close(connection)
        self._loop.call_later(self._max_idle_s / 4, self._sweep)


async def open_app(app: web.Application, host: str, port: int) -> web.AppRunner:
    """Listen with an application, whose connections, pages and log are bounded as those of a
    `ModelServer`. *Raises* OSError."""
    connections: list[IdleConnections] = []

    @web.middleware
    async def guarded(request: web.Request, handler: Handler) -> web.StreamResponse:
        with connections[0].in_use(request.protocol):
            try:
                check_origin(request, host)
            except ModelRefused as refused:
                return web.json_response({"detail": str(refused)}, status=refused.status or 400)
            try:
                return await handler(request)
            except web.RequestPayloadError as error:
                return web.json_response({"detail": _undecodable(request, error)}, status=400)

    app.middlewares.append(guarded)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=5, logger=log)
    await runner.setup()
    assert runner.server is not None
    runner.server.__class__ = _AppServer  # a runner of an application makes its server itself
    connections.append(IdleConnections(runner.server, ModelServer.max_idle, ModelServer.max_idle_s))
    try:
        await web.TCPSite(runner, host, port).start()
    except OSError:
        await runner.cleanup()
        raise
    return runner


def _undecodable(request: web.BaseRequest, error: Exception) -> str:
    encoding = request.headers.get("Content-Encoding", "")[:40]
    kind = f" as Content-Encoding: {encoding}" if encoding else ""
    return f"the body cannot be decoded{kind}: {' '.join(str(error).split())[:200]}"


def _is_unix(transport: asyncio.BaseTransport | None) -> bool:
    return transport is not None and isinstance(transport.get_extra_info("sockname"), str)


def check_origin(request: web.BaseRequest, host: str) -> None:
    """*Raises* ModelRefused for a request that a browser sends for another page; ``host``: where the
    server listens."""
    headers = request.headers
    hosts, origins = headers.getall("Host", []), headers.getall("Origin", [])
    refused = foreign_page(hosts, origins, headers.get("Sec-Fetch-Site"), host)
    if refused is not None:
        raise ModelRefused(refused[1], status=refused[0])


def _in_one_line(record: logging.LogRecord) -> bool:
    """Take the traceback of our code off a record of what is no HTTP, and leave out those that follow
    it within a second: a stranger could fill the log with them."""
    global _last_malformed
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, HttpProcessingError | web.RequestPayloadError):
        if record.created - _last_malformed < 1.0:
            return False
        _last_malformed = record.created
        record.msg = f"{record.getMessage()}: {' '.join(str(error).split())[:100]!r}"
        record.args = ()
        record.exc_info = None
    return True


_last_malformed = 0.0
log = logging.getLogger(__name__)
log.addFilter(_in_one_line)


def dialect_of(path: str) -> Dialect:
    """The dialect in which a request to a path is refused."""
    return next(
        (DIALECT_OF[ending] for ending in DIALECT_OF if path.endswith(f"/{ending}")),
        DIALECTS["chat"],
    )


def read_object(body: bytes) -> dict[str, object]:
    """The JSON object in the body of a request. *Raises* ConfigError."""
    try:
        fields = decode_message(body)
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


def models_body(*models: Mapping[str, object]) -> dict[str, Any]:
    """The answer to ``GET /models``; a model has an ``id``, and fields of its own."""
    shared = {"object": "model", "created": 0, "owned_by": "verifiers"}
    return {"object": "list", "data": [shared | dict(model) for model in models], "has_more": False}


async def send_stream(
    request: web.BaseRequest,
    events: AsyncGenerator[bytes, None],
    error_event: Callable[[int, str], bytes],
) -> web.StreamResponse:
    """Answer with server-sent events. *Raises* ModelRefused before the first; a later refusal is
    the last event."""
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
