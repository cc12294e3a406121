"""Adapters of objects with their own transport: custom SDK clients, test doubles, and
third-generation clients.

The promise: any object with ``chat.completions.create`` (sync or async; ``completions.create`` for
text) or with ``get_response`` becomes a `Client`. Responses are read by attribute, so SDK objects,
dicts and hand-written doubles work alike; a blocking ``create`` runs in a thread; failures are
mapped to ``errors`` and repeated by ``clients.retry`` (the retries of an SDK object are set to 0 on
a copy). The object is never changed or closed.

This module does not import ``openai``.
"""

from __future__ import annotations

import asyncio
import inspect
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any

from verifiers.clients.attributes import read_completion, read_flat
from verifiers.clients.failures import Endpoint, Standing, failure, refuses_argument
from verifiers.clients.limiter import AdaptiveLimiter
from verifiers.clients.payload import (
    LIMIT_NAMES,
    limit_name,
    reasoning_name,
    refused_in_history,
    sendable,
    split_arguments,
)
from verifiers.clients.reply import Completion, StreamedError, excerpt, to_response
from verifiers.clients.retry import RetryPolicy, call_with_retries
from verifiers.clients.sdk import is_sdk_object
from verifiers.clients.spending import metered
from verifiers.errors import (
    EndpointUnreachable,
    MalformedResponse,
    ModelError,
    ModelUnavailable,
    VerifiersError,
)
from verifiers.runtime.calls import PerLoop
from verifiers.runtime.http_clients import tls_fault
from verifiers.storage.identity import Free, Identified
from verifiers.types import ModelRequest, Response

NUM_THREADS = 64  # blocking calls at once, per event loop
MAX_IN_FLIGHT = 28000


class _LoopResources:
    """Limiter and threads of an adapter in one event loop; a thread starts when a blocking call
    needs it."""

    def __init__(self) -> None:
        self.limiter = AdaptiveLimiter(MAX_IN_FLIGHT)
        self.standing = Standing()
        self.threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="verifiers-client")

    async def close(self) -> None:
        self.threads.shutdown(wait=False, cancel_futures=True)


class _Adapter(Identified, ABC):
    """Common part of the adapters: run the call, map its failures, and repeat it."""

    is_metered = True

    def __init__(
        self,
        called: Any,
        retry: Annotated[RetryPolicy | None, Free("only how often a failure is repeated")] = None,
        keep_raw: Annotated[bool, Free("only what stays in memory")] = False,
    ):
        self.original = called
        self._is_sdk = is_sdk_object(called)
        self.called = called.with_options(max_retries=0) if self._is_sdk else called
        self.keep_raw = keep_raw
        self.retry = retry or RetryPolicy()
        # model -> what its endpoint refused of a request (``payload.sendable``)
        self._without: defaultdict[str, frozenset[str]] = defaultdict(frozenset)
        self._resources: PerLoop[_LoopResources] = PerLoop(_LoopResources, _LoopResources.close)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({type(self.called).__name__})"

    async def complete(self, request: ModelRequest) -> Response:
        """Return one completion of the object. Raises as `Client.complete`."""
        resources = self._resources.here()
        attempt = metered(self, request, lambda: self._send(resources, request))
        call = call_with_retries(attempt, self.retry, resources.limiter, request.timeout_s)
        return await resources.standing.call(request.model, call)

    async def aclose(self) -> None:
        """Release the threads of this loop; the adapted object stays open."""
        await self._resources.aclose()

    @abstractmethod
    async def _send(self, resources: _LoopResources, request: ModelRequest) -> Response:
        """Make one attempt."""

    async def _call(
        self, resources: _LoopResources, create: Callable[..., Any], arguments: dict[str, Any]
    ) -> object:
        """Call ``create(**arguments)``, in a thread unless it is a coroutine function."""
        if inspect.iscoroutinefunction(inspect.unwrap(create)):
            return await create(**arguments)
        loop = asyncio.get_running_loop()
        result = await loop.run_in_executor(resources.threads, lambda: create(**arguments))
        return await result if inspect.isawaitable(result) else result

    def _read(self, completion: Completion, request: ModelRequest, response: object) -> Response:
        raw = response if self.keep_raw else None
        try:
            return to_response(completion, request, repr(self), raw)
        except StreamedError as error:
            endpoint = self._endpoint()
            raise failure(error.status, str(error).encode(), endpoint, request.model) from None

    def _endpoint(self) -> Endpoint:
        """What error messages say of the object."""
        url = str(getattr(self.called, "base_url", "") or type(self.called).__name__)
        key = getattr(self.called, "api_key", None)
        secrets = (key,) if isinstance(key, str) and len(key) >= 6 else ()
        return Endpoint(url, "the api_key of the client", None, secrets)

    def _mapped(self, error: Exception, model: str) -> VerifiersError:
        """Map an exception of the object to one of ``errors``."""
        endpoint = self._endpoint()
        status = getattr(error, "status_code", None)
        if isinstance(status, int) and 300 <= status < 600:
            response = getattr(error, "response", None)
            headers = getattr(response, "headers", None) or {}
            retry_after = headers.get("retry-after-ms"), headers.get("retry-after")
            return failure(status, _body(error), endpoint, model, retry_after)
        text = endpoint.redact(f"{self!r} failed: {type(error).__name__}: {error}")
        if fault := tls_fault(error):
            return EndpointUnreachable(f"no answer from {endpoint.url}: {fault}", url=endpoint.url)
        names = {cls.__name__ for cls in type(error).__mro__}
        if names & {"APIConnectionError", "APITimeoutError"} or isinstance(error, OSError):
            return ModelUnavailable(text, url=endpoint.url)
        if "APIResponseValidationError" in names:
            return MalformedResponse(text, url=endpoint.url)
        return ModelError(text, url=endpoint.url)


class OpenAILikeClient(_Adapter):
    """Any object with ``chat.completions.create``; text requests use its ``completions.create``."""

    async def _send(
        self,
        resources: _LoopResources,
        request: ModelRequest,
        without: frozenset[str] = frozenset(),
    ) -> Response:
        without |= self._without[request.model]
        in_chat = request.message_type != "completion"
        create = self.called.chat.completions.create if in_chat else self.called.completions.create
        # a test double may accept a single name: that of the request
        has_newer_name = self._is_sdk or LIMIT_NAMES[0] in request.sampling_args
        name = limit_name(without, is_older=not (in_chat and has_newer_name))
        parts = without.difference(LIMIT_NAMES)
        try:
            arguments = self._arguments(create, request, name, parts)
            response = await self._call(resources, create, arguments)
        except VerifiersError:
            raise
        except Exception as error:  # whatever the object raises is mapped and chained
            status, body = getattr(error, "status_code", 0), _body(error)
            part = refused_in_history(status, excerpt(body, 2000), request, parts)
            part = name if refuses_argument(status, body, name) else part
            if part is None or part in without:
                raise self._mapped(error, request.model) from error
            return await self._send(resources, request, without | {part})
        answered = self._read(read_completion(response), request, response)
        self._without[request.model] |= without | reasoning_name(answered)
        return answered

    def _arguments(
        self,
        create: Callable[..., object],
        request: ModelRequest,
        max_tokens_name: str,
        without: frozenset[str],
    ) -> dict[str, object]:
        standard, extra = split_arguments(request, max_tokens_name)
        arguments: dict[str, object] = {"model": request.model, **standard}
        if request.message_type == "completion":
            arguments["prompt"] = request.prompt
        else:
            arguments["messages"] = sendable(request, without)
            if request.tools:
                arguments["tools"] = list(request.tools)
        if extra:
            arguments["extra_body"] = extra
        headers = dict(request.headers or {})
        if request.rollout_id is not None and self._is_sdk:
            headers["X-Session-ID"] = request.rollout_id
        if headers and _accepts(create, "extra_headers"):
            arguments["extra_headers"] = headers
        return arguments


class GetResponseClient(_Adapter):
    """A third-generation client: ``get_response(prompt, model, sampling_args, tools)`` with a flat
    response."""

    async def _send(self, resources: _LoopResources, request: ModelRequest) -> Response:
        sampling_args = {
            name: value for name, value in request.sampling_args.items() if value is not None
        }
        if request.seed is not None:
            sampling_args["seed"] = request.seed
        arguments = {
            "prompt": request.prompt,
            "model": request.model,
            "sampling_args": sampling_args,
            "tools": list(request.tools) if request.tools else None,
        }
        try:
            response = await self._call(resources, self.called.get_response, arguments)
        except VerifiersError:
            raise
        except Exception as error:  # whatever the object raises is mapped and chained
            raise self._mapped(error, request.model) from error
        return self._read(read_flat(response), request, response)


def _body(error: Exception) -> bytes:
    """Return the body of the response where the exception holds it, else the text of
    the exception."""
    content = getattr(getattr(error, "response", None), "content", None)
    return (
        content if isinstance(content, bytes) and content else str(error).encode("utf-8", "replace")
    )


def _accepts(function: Callable[..., object], name: str) -> bool:
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return True
    return name in parameters or any(
        p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()
    )
