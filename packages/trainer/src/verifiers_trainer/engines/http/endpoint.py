"""The OpenAI endpoint of an in-process generation loop: an HTTP server on loopback, in its own thread.

Routes: ``GET /health, /version, /v1/models, /weight_info``; ``POST /v1/chat/completions, /v1/completions``. Field
names are vLLM's. Every route but ``/health`` requires the bearer token, which is random unless ``Address`` sets one,
because other users of the machine can reach the port. A client that disconnects aborts its request, also when
streaming.
"""

from __future__ import annotations

import asyncio
import hmac
import itertools
import secrets
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import msgspec
import numpy as np
from aiohttp import web

from verifiers.errors import EndpointUnreachable, ModelUnavailable
from verifiers_trainer.engines.http.chat import BadRequest, ChatFormat
from verifiers_trainer.engines.http.replies import chat_reply, text_reply
from verifiers_trainer.engines.http.streaming import StreamedReply, event
from verifiers_trainer.engines.http.tool_calls import ToolCallParser
from verifiers_trainer.engines.http.wire import ChatBody, TextBody, decode_body, error_body, fit_prompt, sampling_params
from verifiers_trainer.engines.requests import (
    Generation,
    GenerationRequest,
    Generator,
    OnToken,
)

_MAX_BODY_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class Address:
    """Where an endpoint listens, and the key that it requires."""

    host: str = "127.0.0.1"
    port: int = 0
    """0 is any free port."""
    api_key: str = field(default_factory=lambda: secrets.token_urlsafe(24), repr=False)
    """Bearer token of requests; empty = none is required."""


@dataclass(frozen=True, slots=True)
class Serving:
    """What the endpoint serves and how it describes itself."""

    generator: Generator
    chat: ChatFormat
    tool_call_parser: ToolCallParser | None
    served_model: str
    max_seq_len: int
    eos_token_ids: tuple[int, ...]
    version: Callable[[], int]
    description: dict[str, str]
    """Response of ``/version``."""


class Endpoint:
    """The server; ``base_url`` and ``api_key`` are known after ``start``."""

    def __init__(self, serving: Serving, address: Address | None = None):
        self._serving = serving
        self._address = address or Address()
        self._waiting: dict[str, asyncio.Future[Generation]] = {}
        self._ids = itertools.count()
        self._thread: threading.Thread | None = None
        self.api_key = self._address.api_key
        self.base_url = ""

    def start(self, deadline_s: float) -> None:
        """Listen at the address. Raises EndpointUnreachable when that fails or takes too long."""
        self._loop = asyncio.new_event_loop()
        started: list[BaseException | None] = []
        ready = threading.Event()

        def run() -> None:
            asyncio.set_event_loop(self._loop)
            try:
                runner, self.base_url = self._loop.run_until_complete(self._listen())
                started.append(None)
            except BaseException as error:  # noqa: BLE001 - raised to the caller of start
                started.append(error)
                self._loop.close()
                return
            finally:
                ready.set()
            self._loop.run_forever()
            self._loop.run_until_complete(runner.cleanup())
            self._loop.close()

        self._thread = threading.Thread(target=run, name="vf-endpoint", daemon=True)
        self._thread.start()
        if not ready.wait(deadline_s) or started[0] is not None:
            cause = started[0] if started else None
            reason = cause or "no response"
            raise EndpointUnreachable(f"the endpoint did not start within {deadline_s:g} s: {reason}") from cause

    def stop(self) -> None:
        if self._thread is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()

    def resolve(self, finished: list[Generation]) -> None:
        """Return finished completions to their requests; called on the generation thread."""
        self._call(self._resolve, finished)

    def _call(self, function: Callable[[Any], None], argument: object) -> None:
        """Call a function on the endpoint's loop from another thread; a no-op once the loop is closed."""
        try:
            self._loop.call_soon_threadsafe(function, argument)
        except RuntimeError:
            if not self._loop.is_closed():
                raise

    def _resolve(self, finished: list[Generation]) -> None:
        for generation in finished:
            future = self._waiting.get(generation.request.request_id)
            if future is not None and not future.done():
                future.set_result(generation)

    async def _listen(self) -> tuple[web.AppRunner, str]:
        app = web.Application(client_max_size=_MAX_BODY_BYTES, middlewares=[self._guard])
        app.router.add_get("/health", self._health)
        app.router.add_get("/version", self._version)
        app.router.add_get("/weight_info", self._weight_info)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/v1/completions", self._text)
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.5)
        await runner.setup()
        host = self._address.host
        site = web.TCPSite(runner, host, self._address.port, backlog=4096)
        await site.start()
        port = runner.addresses[0][1]
        return runner, f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"

    @web.middleware
    async def _guard(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Check the API key and convert failures to OpenAI error bodies."""
        authorization = request.headers.get("Authorization", "").encode("utf-8", "replace")
        is_open = request.path == "/health" or not self.api_key
        if not is_open and not hmac.compare_digest(authorization, f"Bearer {self.api_key}".encode()):
            return _error("missing or wrong bearer token", 401, code="invalid_api_key")
        try:
            return await handler(request)
        except BadRequest as error:
            return _error(str(error), error.status, error.param, error.code)
        except ModelUnavailable as error:
            return _error(str(error), 503)
        except web.HTTPException as error:
            return _error(error.reason, error.status)

    async def _health(self, request: web.Request) -> web.Response:
        return _json({}, 200 if self._serving.generator.alive else 503)

    async def _version(self, request: web.Request) -> web.Response:
        return _json(self._serving.description)

    async def _weight_info(self, request: web.Request) -> web.Response:
        return _json({"weight_version": self._serving.version()})

    async def _models(self, request: web.Request) -> web.Response:
        model = {
            "id": self._serving.served_model,
            "object": "model",
            "created": 0,
            "owned_by": "verifiers",
            "max_model_len": self._serving.max_seq_len,
        }
        return _json({"object": "list", "data": [model]})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = decode_body(await request.read(), ChatBody)
        tools = bytes(body.tools)
        offered = tools not in (b"null", b"[]") and body.tool_choice != "none"
        prompt_ids = self._serving.chat.prompt_ids(
            bytes(body.messages),
            tools if offered else None,
            bytes(body.chat_template_kwargs),
            body.add_generation_prompt,
            body.continue_final_message,
        )
        parser = self._serving.tool_call_parser if offered else None
        if body.stream:
            return await self._stream(request, [prompt_ids], body, parser)
        (generations,) = await self._complete([prompt_ids], body)
        return _body(chat_reply(generations, body, self._serving.chat, self._serving.served_model, parser))

    async def _text(self, request: web.Request) -> web.StreamResponse:
        body = decode_body(await request.read(), TextBody)
        prompt_ids = self._text_prompts(body.prompt)
        if body.stream:
            return await self._stream(request, prompt_ids, body, None)
        prompts = await self._complete(prompt_ids, body)
        return _body(text_reply(prompts, body, self._serving.chat, self._serving.served_model))

    def _text_prompts(self, prompt: Any) -> list[np.ndarray]:
        """The prompts of a text completion: one, or each entry of a list of texts or of lists of ids."""
        several = isinstance(prompt, list) and prompt and isinstance(prompt[0], list | str)
        return [self._text_prompt(each) for each in (prompt if several else [prompt])]

    def _text_prompt(self, prompt: object) -> np.ndarray:
        if isinstance(prompt, str):
            return self._serving.chat.encode(prompt)
        vocabulary = range(self._serving.chat.vocabulary)
        if not isinstance(prompt, list) or not all(type(token) is int and token in vocabulary for token in prompt):
            raise BadRequest("prompt must be text or a list of token ids of this model, or a list of those", "prompt")
        return np.array(prompt, np.int32)

    async def _complete(self, prompts: list[np.ndarray], body: ChatBody | TextBody) -> list[list[Generation]]:
        """The choices of each prompt. When one fails, or the client disconnects, the others are aborted."""
        requests = self._requests(prompts, body)
        with self._submitted([request for siblings in requests for request in siblings]) as futures:
            await _first_failure_or_all(list(futures.values()))
        return [[futures[request.request_id].result() for request in siblings] for siblings in requests]

    async def _stream(
        self, request: web.Request, prompts: list[np.ndarray], body: ChatBody | TextBody, parser: ToolCallParser | None
    ) -> web.StreamResponse:
        """Stream the choices as events, token by token. A failure before the first event is a plain HTTP error."""
        serving, arrivals = self._serving, asyncio.Queue[tuple[int, tuple[Any, ...]]]()
        flat = [each for siblings in self._requests(prompts, body) for each in siblings]
        flat = [replace(each, on_token=self._token_callback(arrivals, index)) for index, each in enumerate(flat)]
        reply = StreamedReply(flat, body, serving.chat, serving.served_model, parser)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        with self._submitted(flat) as futures:
            for index, future in enumerate(futures.values()):
                future.add_done_callback(partial(_put, arrivals, index))
            remaining, events = len(flat), list(reply.opening())
            while remaining:
                index, arrival = await arrivals.get()
                remaining -= len(arrival) == 1
                try:
                    events += _events(reply, index, arrival)
                except BadRequest as error:
                    if not response.prepared:
                        raise
                    events, remaining = [event(error_body(str(error), error.status))], 0
                try:
                    await response.prepare(request)
                    if events:
                        await response.write(b"".join(events))
                except ConnectionResetError:  # the client disconnected
                    return response
                events = []
        return response

    def _token_callback(self, arrivals: asyncio.Queue[tuple[int, tuple[Any, ...]]], index: int) -> OnToken:
        """A callback that sends a choice's tokens from the generation thread to the endpoint's loop."""

        def put(*token: object) -> None:
            self._call(arrivals.put_nowait, (index, token))

        return put

    def _requests(self, prompts: list[np.ndarray], body: ChatBody | TextBody) -> list[list[GenerationRequest]]:
        """The requests of each prompt. Raises BadRequest for an unknown model or values out of range."""
        serving = self._serving
        if body.model not in (None, serving.served_model):
            message = f"the model {body.model!r} does not exist; this endpoint serves {serving.served_model!r}"
            raise BadRequest(message, "model", "model_not_found", status=404)
        requests = []
        for prompt_ids in [fit_prompt(prompt_ids, body, serving.max_seq_len) for prompt_ids in prompts]:
            room = serving.max_seq_len - len(prompt_ids)
            params = sampling_params(body, serving.eos_token_ids, room, serving.chat.vocabulary)
            requests.append([GenerationRequest(f"cmpl-{next(self._ids)}", prompt_ids, each) for each in params])
        return requests

    @contextmanager
    def _submitted(self, requests: list[GenerationRequest]) -> Iterator[dict[str, asyncio.Future[Generation]]]:
        """Submit requests; yield the futures of their completions by id. Pending ones are aborted on exit."""
        futures = {request.request_id: self._loop.create_future() for request in requests}
        self._waiting.update(futures)
        try:
            for request in requests:
                self._serving.generator.submit(request)
            yield futures
        finally:
            for request_id, future in futures.items():
                del self._waiting[request_id]
                if not future.done() or future.cancelled():
                    self._serving.generator.abort(request_id)


def _put(arrivals: asyncio.Queue[tuple[int, tuple[Any, ...]]], index: int, future: asyncio.Future[Generation]) -> None:
    arrivals.put_nowait((index, (future,)))


def _events(reply: StreamedReply, index: int, arrival: tuple[Any, ...]) -> list[bytes]:
    """The events of a token, or of a completion that is finished. Raises BadRequest for one that failed."""
    if len(arrival) > 1:
        return list(reply.token(index, *arrival))
    generation: Generation = arrival[0].result()
    if generation.error is not None:
        raise BadRequest(generation.error, status=500)
    return list(reply.finish(index, generation))


async def _first_failure_or_all(futures: list[asyncio.Future[Generation]]) -> None:
    """Wait for all completions. Raises BadRequest as soon as one fails."""
    for future in asyncio.as_completed(futures):
        if (error := (await future).error) is not None:
            raise BadRequest(error, status=500)


def _json(content: object, status: int = 200) -> web.Response:
    return _body(msgspec.json.encode(content), status)


def _body(content: bytes, status: int = 200) -> web.Response:
    return web.Response(body=content, status=status, content_type="application/json")


def _error(message: str, status: int, param: str | None = None, code: str | None = None) -> web.Response:
    return _body(error_body(message, status, param, code), status)
