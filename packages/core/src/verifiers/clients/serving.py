"""The base of the servers of model APIs: HTTP in a thread and an event loop of its own.

The promise: the body of a request is read, bounded and parsed here (`read_body`, `read_object`); a request that cannot
be served (`Refused`) is answered in its own dialect, inside a stream too; a stream begins with its first event, and a
reader that disconnects ends it (`send_stream`). What is served is each server's own (`ModelServer.respond`).
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncGenerator, Callable, Mapping
from concurrent.futures import Future
from contextlib import aclosing, suppress
from typing import Any

from aiohttp import web

from verifiers.clients.dialects import DIALECTS, Dialect
from verifiers.clients.payload import encode
from verifiers.errors import ConfigError
from verifiers.runtime.bounded import TooLong, read_chunks

MAX_BODY_BYTES = 64 * 2**20
START_S = 20.0
STOP_S = 10.0
DIALECT_OF = {path: dialect for dialect in DIALECTS.values() for path in dialect.PATHS}
"""Path below ``/v1/`` -> dialect."""
MODEL_FIELDS = {"object": "model", "created": 0, "owned_by": "verifiers"}


class Refused(Exception):
    """Why a request got no completion: the HTTP status and one sentence; ``param`` names the field, if one is wrong."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.status, self.param, self.code = status, param, code


class ModelServer:
    """One server; ``start`` returns once it listens, and ``respond`` runs on its loop."""

    thread_name = "verifiers-server"
    shutdown_s = 0.5
    """How long requests that are being answered may go on after `stop`."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop

    def start(self, deadline_s: float = START_S) -> None:
        """Listen. *Raises* OSError when that fails; TimeoutError after ``deadline_s``."""
        started: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=(started,), name=self.thread_name, daemon=True)
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
        """Call a function on the server's loop, from any thread; nothing happens once the loop is closed."""
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:
            if not self._loop.is_closed():
                raise

    async def listen(self, runner: web.ServerRunner) -> None:
        """Open the addresses of the server."""
        raise NotImplementedError(f"{type(self).__name__} must define async listen(self, runner)")

    async def respond(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer one request. *Raises* Refused; ConfigError for a body that cannot be read."""
        raise NotImplementedError(f"{type(self).__name__} must define async respond(self, request)")

    def _run(self, started: Future[None]) -> None:
        with asyncio.Runner() as runner:
            runner.run(self._serve(started))

    async def _serve(self, started: Future[None]) -> None:
        self._loop, self._stopping = asyncio.get_running_loop(), asyncio.Event()
        self.http = web.Server(self._answered, handler_cancellation=True, access_log=None)
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
        try:
            return await self.respond(request)
        except (Refused, ConfigError) as error:
            refused = error if isinstance(error, Refused) else Refused(400, str(error))
            return refusal(dialect_of(request.path), refused)


def dialect_of(path: str) -> Dialect:
    """The dialect in which a request to a path is refused."""
    named = (dialect for ending, dialect in DIALECT_OF.items() if path.endswith(f"/{ending}"))
    return next(named, DIALECTS["chat"])


async def read_body(request: web.BaseRequest, max_bytes: int = MAX_BODY_BYTES) -> bytes:
    """The decoded body of a request. *Raises* Refused for a longer one."""
    try:
        return await read_chunks(request.content.iter_any(), max_bytes, "the body")
    except TooLong as error:
        raise Refused(413, str(error)) from error


async def read_object(request: web.BaseRequest) -> dict[str, Any]:
    """The JSON object in the body of a request. *Raises* ConfigError; Refused."""
    body = await read_body(request)
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"the body is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise ConfigError("the body is not an object")
    return fields


def send_json(content: Mapping[str, Any] | bytes, status: int = 200) -> web.Response:
    """An answer that is one JSON value."""
    body = content if isinstance(content, bytes) else encode(content)
    return web.Response(body=body, status=status, content_type="application/json")


def refusal(dialect: Dialect, refused: Refused) -> web.Response:
    """The answer to a request that is refused."""
    body = dialect.error_body(refused.status, str(refused))
    if refused.param is not None or refused.code is not None:
        body["error"] |= {"param": refused.param, "code": refused.code or refused.status}
    return send_json(body, refused.status)


def models_body(*models: Mapping[str, Any]) -> dict[str, Any]:
    """The answer to ``GET /models``; a model has an ``id``, and fields of its own."""
    return {"object": "list", "data": [MODEL_FIELDS | dict(model) for model in models], "has_more": False}


async def send_stream(
    request: web.BaseRequest, events: AsyncGenerator[bytes, None], error_event: Callable[[int, str], bytes]
) -> web.StreamResponse:
    """Answer with server-sent events. *Raises* Refused of ``events`` before the first; later it is the last event."""
    reply = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    with suppress(ConnectionResetError):  # the reader has closed the connection
        async with aclosing(events):
            try:
                async for event in events:
                    if not reply.prepared:
                        await reply.prepare(request)
                    await reply.write(event)
            except Refused as refused:
                if not reply.prepared:
                    raise
                await reply.write(error_event(refused.status, str(refused)))
        await reply.write_eof()
    return reply
