"""Clients as versions 0.1.12 and later wrote them: subclasses of ``vf.Client`` with a template of
methods.

``get_response`` converts messages and tools to the provider's form, sends them, and converts the
answer back; a subclass defines the steps, or ``get_response`` alone. ``Client.__init_subclass__``
makes ``TemplateClient`` the base of a subclass that has no ``complete``. Such a client has its own
policy of retries: nothing here repeats a call.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from verifiers.clients.attributes import read_flat
from verifiers.clients.protocol import Client, ClientConfig
from verifiers.clients.reply import to_response, token_fault
from verifiers.data.messages import normalize_chat, normalize_message
from verifiers.errors import (
    AuthenticationFailed,
    EmptyModelResponseError,
    MalformedResponse,
    ModelError,
    VerifiersError,
)
from verifiers.storage.identity import Identified
from verifiers.types import ModelRequest, Response, Tool

STEPS = ("to_native_prompt", "to_native_tool", "get_native_response", "from_native_response")
"""What a subclass defines, unless it defines ``get_response``."""
_OF_SDKS = ("openai", "anthropic")


class TemplateClient(Client, Identified):
    """Base of a subclass of ``vf.Client`` without ``complete``; ``get_response`` calls the steps in
    their order.

    *Raises* TypeError when a subclass defines neither ``get_response`` nor every step.
    """

    def __new__(cls, *args: object, **kwargs: object) -> TemplateClient:
        missing = [name for name in STEPS if getattr(cls, name) is getattr(TemplateClient, name)]
        if (
            missing
            and cls.get_response is TemplateClient.get_response
            and cls.complete is TemplateClient.complete
        ):
            raise TypeError(
                f"{cls.__name__} cannot be instantiated: define complete(self, request), or"
                f" get_response, or the abstract {', '.join(missing)}"
            )
        return super().__new__(cls, *args, **kwargs)  # Identified records them

    def __init__(self, client_or_config: object):
        self.logger = logging.getLogger(f"{type(self).__module__}.{type(self).__name__}")
        self._config = client_or_config if isinstance(client_or_config, ClientConfig) else None
        self.client: Any = (
            client_or_config if self._config is None else self.setup_client(self._config)
        )

    @property
    def config(self) -> ClientConfig | None:
        """The settings that it was built from; None when it was given an object."""
        return getattr(self, "_config", None)

    # --- the steps

    def setup_client(self, config: ClientConfig) -> Any:
        """The provider's object for settings."""
        raise NotImplementedError(f"{type(self).__name__} must define setup_client(self, config)")

    async def to_native_prompt(self, messages: object) -> tuple[object, dict[str, object]]:
        """(prompt in the provider's form, further keywords of ``get_native_response``)."""
        raise NotImplementedError(
            f"{type(self).__name__} must define to_native_prompt(self, messages)"
        )

    async def to_native_tool(self, tool: Tool) -> Any:
        """A tool in the provider's form."""
        raise NotImplementedError(f"{type(self).__name__} must define to_native_tool(self, tool)")

    async def to_native_tools(self, tools: Sequence[Tool] | None) -> Any:
        """All tools in the provider's form; None without tools."""
        return [await self.to_native_tool(tool) for tool in tools] if tools else None

    async def get_native_response(
        self,
        prompt: object,
        model: str,
        sampling_args: Mapping[str, object],
        tools: object = None,
        **kwargs: object,
    ) -> Any:
        """Send one request; the answer in the provider's form."""
        raise NotImplementedError(f"{type(self).__name__} must define get_native_response")

    async def raise_from_native_response(self, response: object) -> None:
        """Raise for an answer that is an error."""

    async def from_native_response(self, response: object) -> Response:
        """The answer as a ``Response``."""
        raise NotImplementedError(
            f"{type(self).__name__} must define from_native_response(self, response)"
        )

    async def close(self) -> None:
        """Release what the provider's object holds."""

    async def get_response(
        self,
        prompt: object,
        model: str,
        sampling_args: Mapping[str, object],
        tools: Sequence[Tool] | None = None,
        **kwargs: object,
    ) -> Response:
        """A completion, by the steps.

        *Raises* the errors of this package unchanged, ``EmptyModelResponseError`` for no answer,
        and ``ModelError`` for any other failure; refused keys of the SDKs pass.
        """
        try:
            native, extra = await self.to_native_prompt(prompt)
            native_tools = await self.to_native_tools(tools)
            answer = await self.get_native_response(
                native, model, sampling_args, native_tools, **extra, **kwargs
            )
            await self.raise_from_native_response(answer)
            response: Response = _checked(await self.from_native_response(answer), self)
            return response
        except Exception as error:
            if isinstance(error, VerifiersError) or _is_refused_key(error):
                raise
            raise _model_error(error, self) from error

    # --- as every client

    async def complete(self, request: ModelRequest) -> Response:
        """A completion through ``get_response``. Raises as ``Client.complete``."""
        arguments = _arguments(self.get_response, request)
        try:
            answer = await self.get_response(**arguments)
        except VerifiersError:
            raise
        except Exception as error:
            if _is_refused_key(error):
                raise AuthenticationFailed(f"{self!r} was refused its key: {error}") from error
            raise _model_error(error, self) from error
        checked = _checked(answer, self)
        if not isinstance(checked, Response):
            return to_response(read_flat(checked), request, repr(self))
        if request.require_tokens:
            tokens = checked.tokens
            if tokens is None:
                raise MalformedResponse(
                    f"{self!r} returned a response without tokens", field="completion_ids"
                )
            arrays = tokens.prompt_ids, tokens.completion_ids, tokens.completion_logprobs
            if fault := token_fault(*arrays):
                raise MalformedResponse(
                    f"{self!r} answered without usable {fault[0]}: {fault[1]}", field=fault[0]
                )
        message = normalize_message(checked.message)
        return checked.model_copy(
            update={"message": message, "model": checked.model or request.model}
        )

    async def aclose(self) -> None:
        """Nothing: the object that it was given stays open, as ``close`` is the
        author's to call."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({type(getattr(self, 'client', None)).__name__})"


def _arguments(get_response: Callable[..., object], request: ModelRequest) -> dict[str, Any]:
    """Keywords of a call: state and headers only where ``get_response`` accepts them."""
    sampling_args = {
        name: value for name, value in request.sampling_args.items() if value is not None
    }
    if request.seed is not None:
        sampling_args["seed"] = request.seed
    prompt = request.prompt if isinstance(request.prompt, str) else normalize_chat(request.prompt)
    tools = [Tool.from_wire(tool) for tool in request.tools] if request.tools else None
    arguments = {
        "prompt": prompt,
        "model": request.model,
        "sampling_args": sampling_args,
        "tools": tools,
    }
    parameters = inspect.signature(get_response).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    further = {"state": request.state, "extra_headers": dict(request.headers or {})}
    return arguments | {
        name: value
        for name, value in further.items()
        if value and (takes_all or name in parameters)
    }


def _checked(answer: object, client: object) -> Any:
    """The answer. *Raises* EmptyModelResponseError for None, and without content, tool call and
    reasoning."""
    message = getattr(answer, "message", None)
    if message is None:
        raise EmptyModelResponseError(
            f"{client!r} returned {'nothing' if answer is None else 'no message'}"
        )
    fields = ("content", "tool_calls", "reasoning_content", "thinking_blocks")
    if not any(getattr(message, name, None) for name in fields):
        raise EmptyModelResponseError(
            f"{client!r} returned no content, no tool call and no reasoning"
        )
    return answer


def _is_refused_key(error: Exception) -> bool:
    classes = type(error).__mro__
    return any(
        c.__name__ == "AuthenticationError" and c.__module__.partition(".")[0] in _OF_SDKS
        for c in classes
    )


def _model_error(error: Exception, client: object) -> ModelError:
    failure = ModelError(f"{client!r} failed: {type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure
