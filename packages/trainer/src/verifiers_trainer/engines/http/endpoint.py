"""The OpenAI endpoint of an in-process generation loop: an HTTP server on loopback, in its own
thread.

Routes: ``GET /health, /version, /v1/models, /weight_info``; ``POST /v1/chat/completions,
/v1/completions``. Field names are vLLM's. Every route but ``/health`` requires the bearer token,
which is random unless ``Address`` sets a token, because other users of the machine can reach the
port. A client that disconnects aborts its request, also when streaming.
"""

from __future__ import annotations

import asyncio
import hmac
import itertools
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any, TypeVar

import numpy as np
from aiohttp import web

from verifiers.clients.dialects import chat, sse
from verifiers.clients.serving import START_S, Answer, ModelServer, models_body, send_stream
from verifiers.errors import EndpointUnreachable, ModelRefused, ModelUnavailable
from verifiers.runtime.decoding import decode_message
from verifiers.runtime.worker_threads import call_in_thread
from verifiers_trainer.engines.http.chat import BadRequest, ChatFormat, Prompt
from verifiers_trainer.engines.http.replies import chat_reply, text_reply
from verifiers_trainer.engines.http.streaming import StreamedReply
from verifiers_trainer.engines.http.tool_calls import ToolCallParser, for_tools
from verifiers_trainer.engines.http.wire import (
    ChatBody,
    TextBody,
    decode_body,
    fit_prompt,
    sampling_params,
)
from verifiers_trainer.engines.lora import LoraWeights
from verifiers_trainer.engines.requests import Generation, GenerationRequest, Generator

TOKENIZE_S = 60.0
MAX_CHOICES = 10_000
"""Completions of one request."""
_Ids = TypeVar("_Ids")


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
    vocabulary: int
    """Number of token ids of the model: of a padded one more than its tokenizer has, and each may
    be sampled, so that each may come back in a prompt."""
    version: Callable[[], int]
    description: dict[str, str]
    """Response of ``/version``."""
    adapters: Mapping[str, LoraWeights] = field(default_factory=dict)
    """Model of a request -> what is computed with; empty: ``served_model`` alone is served. With
    adapters that is no model of a request: it is what none of them trains."""

    @property
    def models(self) -> tuple[str, ...]:
        """What a request may name as its model."""
        return tuple(self.adapters) or (self.served_model,)


class Endpoint(ModelServer):
    """The server; ``base_url`` and ``api_key`` are known after ``start``."""

    thread_name = "vf-endpoint"

    def __init__(self, serving: Serving, address: Address | None = None):
        super().__init__()
        self._serving = serving
        self._address = address or Address()
        self._waiting: dict[str, asyncio.Future[Generation]] = {}
        self._ids = itertools.count()
        self.api_key, self.host = self._address.api_key, self._address.host
        self.base_url = ""
        self._handlers: dict[tuple[str, str], Callable[[web.BaseRequest], Awaitable[Answer]]] = {
            ("GET", "/health"): self._health,
            ("GET", "/version"): self._version,
            ("GET", "/weight_info"): self._weight_info,
            ("GET", "/v1/models"): self._models,
            ("POST", "/v1/chat/completions"): self._chat,
            ("POST", "/v1/completions"): self._text,
        }

    def start(self, deadline_s: float = START_S) -> None:
        """Listen at the address. Raises EndpointUnreachable when that fails or takes too long."""
        try:
            super().start(deadline_s)
        except OSError as error:
            raise EndpointUnreachable(
                f"the endpoint did not start within {deadline_s:g} s: {error}"
            ) from error

    def resolve(self, finished: list[Generation]) -> None:
        """Return finished completions to their requests; called on the generation thread."""
        self.call(self._resolve, finished)

    def _resolve(self, finished: list[Generation]) -> None:
        for generation in finished:
            future = self._waiting.get(generation.request.request_id)
            if future is not None and not future.done():
                future.set_result(generation)

    async def listen(self, runner: web.ServerRunner) -> None:
        host = self._address.host
        await web.TCPSite(runner, host, self._address.port, backlog=4096).start()
        self.base_url = f"http://{f'[{host}]' if ':' in host else host}:{runner.addresses[0][1]}/v1"

    async def respond(self, request: web.BaseRequest) -> Answer:
        authorization = request.headers.get("Authorization", "").encode("utf-8", "replace")
        is_open = request.path == "/health" or not self.api_key
        expected = f"Bearer {self.api_key}".encode()
        if not is_open and not hmac.compare_digest(authorization, expected):
            raise ModelRefused("missing or wrong bearer token", status=401, code="invalid_api_key")
        method = "GET" if request.method == "HEAD" else request.method
        handler = self._handlers.get((method, request.path))
        if handler is None:
            is_path = any(path == request.path for _, path in self._handlers)
            reason, status = ("Method Not Allowed", 405) if is_path else ("Not Found", 404)
            raise ModelRefused(reason, status=status)
        try:
            return await handler(request)
        except ModelUnavailable as error:
            raise ModelRefused(str(error), status=503) from error

    async def _health(self, request: web.BaseRequest) -> web.Response:
        return web.json_response({}, status=200 if self._serving.generator.alive else 503)

    async def _version(self, request: web.BaseRequest) -> Answer:
        return self._serving.description

    async def _weight_info(self, request: web.BaseRequest) -> Answer:
        return {"weight_version": self._serving.version()}

    async def _models(self, request: web.BaseRequest) -> Answer:
        serving = self._serving
        return models_body(
            *({"id": name, "max_model_len": serving.max_seq_len} for name in serving.models)
        )

    async def _chat(self, request: web.BaseRequest) -> Answer:
        body = decode_body(await self.body(request), ChatBody)
        tools = bytes(body.tools)
        offered = tools not in (b"null", b"[]") and body.tool_choice != "none"
        prompt = await self._tokenized(
            self._serving.chat.prompt,
            bytes(body.messages),
            tools if offered else None,
            bytes(body.chat_template_kwargs),
            body.add_generation_prompt,
            body.continue_final_message,
            body.truncate_prompt_tokens is not None,
        )
        parser = None
        if offered:
            parser = for_tools(self._serving.tool_call_parser, decode_message(tools))
        if body.stream:
            events = self._events([prompt], body, parser)
            return await send_stream(request, events, _error_event)
        (generations,) = await self._complete([prompt], body)
        return chat_reply(generations, body, self._serving.chat, self._name_of(body), parser)

    async def _text(self, request: web.BaseRequest) -> Answer:
        body = decode_body(await self.body(request), TextBody)
        prompts = await self._tokenized(
            self._text_prompts, body.prompt, body.truncate_prompt_tokens is not None
        )
        if body.images:
            prompts = await self._tokenized(self._with_images, prompts, body.images)
        if body.stream:
            return await send_stream(request, self._events(prompts, body, None), _error_event)
        completed = await self._complete(prompts, body)
        return text_reply(completed, body, self._serving.chat, self._name_of(body))

    async def _tokenized(self, render: Callable[..., _Ids], *arguments: object) -> _Ids:
        """What ``render`` makes in a thread of its own. Raises BadRequest when it takes too long."""
        try:
            return await call_in_thread(render, *arguments, limit_s=TOKENIZE_S)
        except TimeoutError:
            raise BadRequest(
                f"the chat template and the tokenizer took more than {TOKENIZE_S:g} s", "messages"
            ) from None

    def _with_images(self, prompts: list[Prompt], urls: list[str]) -> list[Prompt]:
        """The only prompt, of token ids, with its images."""
        if len(prompts) > 1:
            raise BadRequest("images are of one prompt: send each prompt by itself", "images")
        return [self._serving.chat.with_images(prompts[0].ids, urls)]

    def _text_prompts(self, prompt: Any, is_truncated: bool) -> list[Prompt]:
        """The prompts of a text completion: one, or each of a list of texts or of lists of ids."""
        several = isinstance(prompt, list) and prompt and isinstance(prompt[0], list | str)
        prompts = prompt if several else [prompt]
        return [Prompt(self._text_prompt(each, is_truncated)) for each in prompts]

    def _text_prompt(self, prompt: object, is_truncated: bool) -> np.ndarray:
        if isinstance(prompt, str):
            return self._serving.chat.encode(prompt, is_truncated)
        vocabulary = range(self._serving.vocabulary)
        if not isinstance(prompt, list) or not all(
            type(token) is int and token in vocabulary for token in prompt
        ):
            raise BadRequest(
                "prompt must be text or a list of token ids of this model, or a list of those",
                "prompt",
            )
        return np.array(prompt, np.int32)

    async def _complete(
        self, prompts: list[Prompt], body: ChatBody | TextBody
    ) -> list[list[Generation]]:
        """Each prompt's choices. If one fails, or the client disconnects, all are aborted."""
        requests = self._requests(prompts, body)
        with self._submitted(list(chain.from_iterable(requests))) as futures:
            for future in asyncio.as_completed(futures.values()):
                if (error := (await future).error) is not None:
                    raise BadRequest(error, status=500)
        return [
            [futures[request.request_id].result() for request in siblings] for siblings in requests
        ]

    async def _events(
        self, prompts: list[Prompt], body: ChatBody | TextBody, parser: ToolCallParser | None
    ) -> AsyncGenerator[bytes, None]:
        """The choices as events, token by token. Raises BadRequest when a choice fails."""
        serving, arrivals = self._serving, asyncio.Queue[tuple[int, tuple[Any, ...]]]()

        def arrived(index: int, *arrival: object) -> None:
            arrivals.put_nowait((index, arrival))

        flat = [
            replace(each, on_token=partial(self.call, arrived, index))
            for index, each in enumerate(chain.from_iterable(self._requests(prompts, body)))
        ]
        reply = StreamedReply(flat, body, serving.chat, self._name_of(body), parser)
        with self._submitted(flat) as futures:
            for index, future in enumerate(futures.values()):
                future.add_done_callback(partial(arrived, index))
            remaining, opening = len(flat), b"".join(reply.opening())
            while remaining:
                index, arrival = await arrivals.get()
                remaining -= len(arrival) == 1
                if events := opening + b"".join(_events(reply, index, arrival)):
                    yield events
                    opening = b""

    def _requests(
        self, prompts: list[Prompt], body: ChatBody | TextBody
    ) -> list[list[GenerationRequest]]:
        """The requests of each prompt. Raises BadRequest for an unknown model or value."""
        serving = self._serving
        name = self._name_of(body)
        if name not in serving.models:
            served = ", ".join(map(repr, serving.models))
            message = f"the model {name!r} does not exist; this endpoint serves {served}"
            if serving.adapters:
                message += ", an adapter for each role: a request names its role's"
            raise BadRequest(message, "model", "model_not_found", status=404)
        adapter = serving.adapters.get(name)
        if len(prompts) * (body.n or 1) > MAX_CHOICES:
            raise BadRequest(
                f"{len(prompts)} prompts with n={body.n or 1} are more than {MAX_CHOICES}", "n"
            )
        requests = []
        never = serving.chat.never
        fitted = [fit_prompt(prompt.ids, body, serving.max_seq_len) for prompt in prompts]
        for prompt_ids, (ids, images) in zip(fitted, prompts, strict=True):
            if images and len(prompt_ids) < len(ids):
                raise BadRequest(
                    "a prompt with images cannot be truncated", "truncate_prompt_tokens"
                )
            room = serving.max_seq_len - len(prompt_ids)
            params = sampling_params(body, serving.eos_token_ids, room, serving.vocabulary, never)
            if images and params[0].prompt_logprobs is not None:
                raise BadRequest(
                    "the tokens of a prompt with images are not scored", "prompt_logprobs"
                )
            requests.append(
                [
                    GenerationRequest(
                        f"cmpl-{next(self._ids)}", prompt_ids, each, images=images, adapter=adapter
                    )
                    for each in params
                ]
            )
        return requests

    def _name_of(self, body: ChatBody | TextBody) -> str:
        """The model that a request asks for."""
        return self._serving.served_model if body.model is None else body.model

    @contextmanager
    def _submitted(
        self, requests: list[GenerationRequest]
    ) -> Iterator[dict[str, asyncio.Future[Generation]]]:
        """Submit requests; yield the futures of their completions by id. Pending requests are
        aborted on exit."""
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


def _events(reply: StreamedReply, index: int, arrival: tuple[Any, ...]) -> list[bytes]:
    """The events of a token, or of a finished completion. Raises BadRequest if that failed."""
    if len(arrival) > 1:
        return list(reply.token(index, *arrival))
    generation: Generation = arrival[0].result()
    if generation.error is not None:
        raise BadRequest(generation.error, status=500)
    return list(reply.finish(index, generation))


def _error_event(status: int, message: str) -> bytes:
    return sse.event(chat.error_body(status, message))
