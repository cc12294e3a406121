"""The server that agents take for a model's API: one per process, on loopback and on a Unix socket.

Each rollout has a route of its own, ``/r/<id>/v1/…``, whose id cannot be guessed. A request there
waits in the rollout's ``Route`` until the rollout answers it. Promise:

* every dialect, as a stream or not; a stream gets keep-alive events while the model is slow;
* a request that the agent repeats, also while the first is being answered, gets the same answer and
  is one call;
* what cannot be served is answered in the dialect of the request with one sentence, and noted in
  ``Route.refusals``;
* the route of a rollout that is over answers at once.

The server has an event loop and a thread of its own, so it answers while the loop of the rollouts
is busy, and serves the rollouts of every loop. It starts with the first route and ends with the
process.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import hashlib
import json
import os
import secrets
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from aiohttp import web

from verifiers.clients.dialects import DIALECTS, Dialect, DialectRequest
from verifiers.clients.serving import (
    DIALECT_OF,
    SHORT_BYTES,
    Answer,
    ModelServer,
    models_body,
    read_object,
    send_stream,
)
from verifiers.errors import ConfigError, InfraError, ModelRefused
from verifiers.runtime.bounded import size_text
from verifiers.types import Message, Response

MODEL = "policy"
"""The model's name as agents see it; the run decides which model answers."""
KEEP_ALIVE_S = 5.0
"""Seconds without an answer before a stream begins, and between its keep-alive events."""
MAX_WAITING, MAX_WAITING_BYTES = 64, 16 * 2**20
"""Requests of an agent that wait for an answer, and their bytes; a single request may be longer."""
MAX_REFUSALS, MAX_REFUSAL_CHARS = 20, 500
SOCKET = "gateway.sock"
PREFIX = "verifiers-gateway-"
MAX_BASE_BYTES = 50
SWEEP_AFTER_S = 3600.0
BYTES_PER_TOKEN = 4
"""For ``count_tokens``: an estimate, because the tokenizer is the server's."""

MODEL_FIELDS = {"id": MODEL, "type": "model", "display_name": MODEL}


@dataclass(slots=True, eq=False)
class Call:
    """A model call of an agent; ``answer`` and ``refuse`` may be called from any thread, the
    first call counts."""

    dialect: str
    request: DialectRequest
    headers: Mapping[str, str]
    _future: asyncio.Future[Response | ModelRefused]
    _loop: asyncio.AbstractEventLoop
    num_repeats: int = 0
    """How often the agent sent the same request again."""

    def answer(self, response: Response) -> None:
        self._settle(response)

    def refuse(self, status: int, message: str) -> None:
        self._settle(ModelRefused(message, status=status))

    @property
    def is_refused(self) -> bool:
        """On the gateway's loop."""
        return self._future.done() and isinstance(self._future.result(), ModelRefused)

    def _settle(self, outcome: Response | ModelRefused) -> None:
        # the gateway ended with the process: no agent is left to answer
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(_set, self._future, outcome)

    async def outcome(self) -> Response:
        """Wait for the answer, on the gateway's loop, any number of times. *Raises*
        ModelRefused."""
        outcome = await asyncio.shield(self._future)
        if isinstance(outcome, ModelRefused):
            # a new error: each request that waits raises its own
            raise ModelRefused(str(outcome), status=outcome.status)
        return outcome

    def echo(self, response: Response) -> Message | None:
        """The answer as the agent's next request will hold it; None when it is several messages."""
        dialect = DIALECTS[self.dialect]
        body, head = dialect.response_body(response, self.request), {"model": MODEL}
        if self.dialect == "chat":
            written: Mapping[str, object] = {"messages": [body["choices"][0]["message"]]}
        elif self.dialect == "messages":
            written = {
                "messages": [{"role": "assistant", "content": body["content"]}],
                "max_tokens": 1,
            }
        else:
            written = {"input": body["output"]}
        try:
            messages = dialect.parse_request(head | dict(written)).messages
        except ConfigError:
            return None  # the answer is empty, and an agent cannot send it back
        return messages[0] if len(messages) == 1 else None


def _set(future: asyncio.Future[Response | ModelRefused], outcome: Response | ModelRefused) -> None:
    if not future.done():
        future.set_result(outcome)


@dataclass(slots=True, eq=False)
class Route:
    """The way from one agent to its rollout. ``next`` is awaited in the loop that
    opened the route."""

    id: str
    dialects: tuple[str, ...]
    _gateway: Gateway
    _loop: asyncio.AbstractEventLoop
    _waiting: asyncio.Queue[Call] = field(default_factory=asyncio.Queue)
    _calls: dict[bytes, Call] = field(default_factory=dict)
    _over: str | None = None
    _num_waiting: int = 0
    _waiting_bytes: int = 0
    refusals: list[str] = field(default_factory=list)
    """Why requests were refused, at most ``MAX_REFUSALS``."""

    @property
    def url(self) -> str:
        """Base URL of the dialects chat and responses on loopback; ends in ``/v1``."""
        return f"{self._gateway.url}{self.path}/v1"

    @property
    def path(self) -> str:
        """Path of the route: what stands between the address of a server and ``/v1``."""
        return f"/r/{self.id}"

    async def next(self) -> Call:
        """The next call that waits for an answer."""
        return await self._waiting.get()

    def close(self, reason: str) -> None:
        """End the route: calls that wait, and later calls, are refused with ``reason``."""
        self._gateway.remove(self, reason)

    # --- on the gateway's loop

    def receive(self, dialect: str, request: DialectRequest, headers: Mapping[str, str]) -> Call:
        """The call of a request: a new call, or the call that it repeats. A call that was refused is
        not repeated, it generated nothing."""
        key = _key(dialect, request)
        earlier_call = self._calls.get(key)
        if earlier_call is not None and not earlier_call.is_refused:
            earlier_call.num_repeats += 1
            return earlier_call
        loop = asyncio.get_running_loop()
        call = self._calls[key] = Call(dialect, request, headers, loop.create_future(), loop)
        if self._over is not None:
            call.refuse(403, self._over)
        else:
            self._loop.call_soon_threadsafe(self._waiting.put_nowait, call)
        return call

    @contextlib.contextmanager
    def room(self, content_length: int | None) -> Iterator[Callable[[int], None]]:
        """A request is being answered; the function is told how many bytes of it have come. Both
        *raise* ModelRefused beside too many others."""
        num_bytes = SHORT_BYTES if content_length is None else content_length
        if self._num_waiting >= MAX_WAITING:
            raise self._too_many()
        num_counted = 0

        def grow(num_bytes: int) -> None:
            nonlocal num_counted
            num_more = max(0, num_bytes - num_counted)
            has_more = self._waiting_bytes > num_counted
            if has_more and num_more and self._waiting_bytes + num_more > MAX_WAITING_BYTES:
                raise self._too_many()
            self._waiting_bytes += num_more
            num_counted += num_more

        grow(num_bytes)
        self._num_waiting += 1
        try:
            yield grow
        finally:
            self._num_waiting -= 1
            self._waiting_bytes -= num_counted

    def _too_many(self) -> ModelRefused:
        sentence = self.refuse(
            f"the agent has {self._num_waiting} requests of {self._waiting_bytes:,} bytes that"
            f" wait for an answer; at most {MAX_WAITING} may, of {size_text(MAX_WAITING_BYTES)}"
        )
        return ModelRefused(sentence, status=429)

    def refuse(self, sentence: str) -> str:
        sentence = sentence[:MAX_REFUSAL_CHARS]  # it may quote the agent
        if len(self.refusals) < MAX_REFUSALS and sentence not in self.refusals:
            self.refusals.append(sentence)
        return sentence

    def end(self, reason: str) -> None:
        self._over = reason
        for call in self._calls.values():
            call.refuse(403, reason)


def _key(dialect: str, request: DialectRequest) -> bytes:
    """Equal for a request and its repetition, as a stream or not: everything that the model sees,
    and no id."""
    seen = [dialect, request.messages, request.tools, dict(request.sampling_args)]
    return hashlib.blake2b(
        json.dumps(seen, default=str, sort_keys=True).encode(), digest_size=16
    ).digest()


class Gateway(ModelServer):
    """The server. ``gateway()`` returns the one of this process.

    *Raises* InfraError when it cannot listen.
    """

    thread_name = "verifiers-gateway"

    def __init__(self, keep_alive_s: float = KEEP_ALIVE_S) -> None:
        super().__init__()
        self.keep_alive_s = keep_alive_s
        _sweep()
        self.folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir=_base()))
        """Holds the Unix socket and nothing else, so that a sandbox can mount it."""
        self.folder.chmod(0o755)
        self.url = ""
        """Address on loopback, without a path."""
        self._routes: dict[str, Route] = {}
        self._ended: dict[str, str] = {}
        try:
            self.start()
        except OSError as error:
            shutil.rmtree(self.folder, ignore_errors=True)
            raise InfraError(f"the gateway of the agents cannot listen: {error}") from error

    def open(self, dialects: tuple[str, ...] = tuple(DIALECTS)) -> Route:
        """Open a route for a rollout of the running loop."""
        route = Route(secrets.token_urlsafe(18), dialects, self, asyncio.get_running_loop())
        self._routes[route.id] = route
        return route

    def remove(self, route: Route, reason: str) -> None:
        """End a route. Its id is remembered a while, to say why it is gone."""
        if self._routes.pop(route.id, None) is not None:
            self._ended[route.id] = reason
            while len(self._ended) > 1000:
                self._ended.pop(next(iter(self._ended)))
            self.call(route.end, reason)

    def stop(self) -> None:
        """Stop the server and remove its socket. A second call does nothing."""
        super().stop()
        shutil.rmtree(self.folder, ignore_errors=True)

    # --- the server's thread

    async def listen(self, runner: web.ServerRunner) -> None:
        await web.TCPSite(runner, "127.0.0.1", 0, backlog=4096).start()
        path = self.folder / SOCKET
        await web.UnixSite(runner, str(path), backlog=4096).start()
        path.chmod(0o666)  # the user inside a sandbox is another user
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"

    async def respond(self, request: web.BaseRequest) -> Answer:
        _, _, route_path = request.path.partition("/r/")
        route_id, _, path = route_path.partition("/")
        if not request.path.startswith("/r/") or not path:
            raise ModelRefused(
                f"{request.method} {request.path} is not a path of this gateway: write the base URL"
                " as /r/<id>/v1",
                status=404,
            )
        route = self._routes.get(route_id)
        if route is None:
            why = "there is no rollout with this id"
            if (reason := self._ended.get(route_id)) is not None:
                why = f"the rollout is over: {reason}"
            raise ModelRefused(why, status=404)
        path = path.removeprefix("v1/").removeprefix("v1/")  # some clients add another
        if path == "models" or path.startswith("models/"):
            listing = models_body(MODEL_FIELDS)
            return listing if path == "models" else dict(listing["data"][0])
        if request.method == "HEAD":
            return web.Response()
        with route.room(request.content_length) as grow:
            return await self._answer(request, route, path, grow)

    async def _answer(
        self, request: web.BaseRequest, route: Route, path: str, grow: Callable[[int], None]
    ) -> Answer:
        try:
            dialect = _offered(request.method, path, route)
            body = read_object(await self.body(request, grow))
            if path.endswith("/count_tokens"):
                return {"input_tokens": _estimate(body)}
            parsed = dialect.parse_request(body)
        except ConfigError as error:
            sentence = route.refuse(f"a request to /v1/{path} cannot be read: {error}")
            raise ModelRefused(sentence, status=400) from error
        except ModelRefused as refused:
            route.refuse(str(refused))
            raise
        call = route.receive(dialect.NAME, parsed, dict(request.headers))
        if parsed.stream:
            events = self._events(dialect, call, parsed)
            return await send_stream(request, events, partial(dialect.error_event, request=parsed))
        return dialect.response_body(await call.outcome(), parsed)

    async def _events(
        self, dialect: Dialect, call: Call, parsed: DialectRequest
    ) -> AsyncGenerator[bytes, None]:
        """The answer as a stream: at once, or an opening and keep-alive events after
        ``keep_alive_s``."""
        waiting = asyncio.ensure_future(call.outcome())
        opening = b"".join(dialect.stream_opening(parsed))
        try:
            while not (await asyncio.wait([waiting], timeout=self.keep_alive_s))[0]:
                yield opening + dialect.keep_alive(parsed)
                opening = b""
            yield opening + b"".join(dialect.stream_rest(waiting.result(), parsed))
        finally:
            waiting.cancel()


def _offered(method: str, path: str, route: Route) -> Dialect:
    """The dialect of a path that the route offers. *Raises* ModelRefused."""
    dialect = DIALECT_OF.get(path)
    if dialect is None or method != "POST":
        offered = ", ".join(DIALECTS[name].PATHS[0] for name in route.dialects)
        raise ModelRefused(
            f"the agent called {method} /v1/{path}, which is not offered; offered are {offered} and"
            " models",
            status=404,
        )
    if dialect.NAME not in route.dialects:
        raise ModelRefused(
            f"the agent called /v1/{path}, the dialect {dialect.NAME!r}, which this environment"
            f" does not offer (dialect={route.dialects[0]!r})",
            status=404,
        )
    return dialect


def _base() -> Path:
    """The folder for temporary files; ``/tmp`` where its path is too long for a Unix socket (108
    bytes on Linux)."""
    folder = Path(tempfile.gettempdir())
    return folder if len(os.fsencode(folder)) <= MAX_BASE_BYTES else Path("/tmp")


def _sweep() -> None:
    """Remove the folders of gateways whose process was killed: nothing listens there any more. Their
    process ids say nothing here, they may be those of another container."""
    for folder in _base().glob(f"{PREFIX}*-*"):
        with socket.socket(socket.AF_UNIX) as connection, contextlib.suppress(OSError):
            connection.settimeout(1.0)
            try:
                connection.connect(str(folder / SOCKET))
                continue
            except ConnectionRefusedError:
                is_over = True
            except FileNotFoundError:  # another gateway may be about to listen
                is_over = time.time() - folder.stat().st_mtime > SWEEP_AFTER_S
            if is_over:
                shutil.rmtree(folder, ignore_errors=True)


def _estimate(body: Mapping[str, object]) -> int:
    """An estimate of a prompt's tokens from its bytes."""
    seen = {name: value for name, value in body.items() if name in ("system", "messages", "tools")}
    return len(json.dumps(seen, ensure_ascii=False).encode("utf-8", "replace")) // BYTES_PER_TOKEN


_gateway: Gateway | None = None
_lock = threading.Lock()


def gateway() -> Gateway:
    """The gateway of this process, started on the first call."""
    global _gateway
    with _lock:
        if _gateway is None:
            _gateway = Gateway()
            atexit.register(_gateway.stop)
        return _gateway


def _forget() -> None:
    """After a fork the thread is gone: the child starts a gateway of its own, and leaves its
    parent's folder alone."""
    global _gateway, _lock
    if _gateway is not None:
        atexit.unregister(_gateway.stop)
    _gateway, _lock = None, threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
