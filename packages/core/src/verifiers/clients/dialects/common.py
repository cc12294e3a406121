"""What the dialects share: fields of bodies, tool arguments, usage, sampling arguments."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from verifiers.clients.payload import RAW_ARGUMENTS, arguments_object, split_arguments
from verifiers.clients.reply import OF_ANOTHER_FORM
from verifiers.errors import ConfigError, MalformedResponse
from verifiers.types import AssistantMessage, ModelRequest, ToolCall, Usage

T = TypeVar("T")

SAMPLING_NAMES = (
    "temperature top_p top_k min_p seed stop presence_penalty frequency_penalty repetition_penalty"
    " min_tokens logprobs top_logprobs logit_bias parallel_tool_calls return_token_ids"
).split()
"""Sampling arguments that every dialect and every engine names alike."""


@contextmanager
def reading_request(dialect: str) -> Iterator[None]:
    """Raises: ``ConfigError`` for a field of another type in the request of a program."""
    try:
        yield
    except OF_ANOTHER_FORM as error:
        raise ConfigError(f"the body is no request of the {dialect} API: {error}") from error


@contextmanager
def reading_event(dialect: str) -> Iterator[None]:
    """Raises: ``ValueError`` for a field of another type in an event."""
    try:
        yield
    except OF_ANOTHER_FORM as error:
        raise ValueError(f"no event of the {dialect} API: {error}") from error


def sampling_of(body: Mapping[str, object], *limits: str) -> dict[str, object]:
    """Return the sampling arguments that are named alike, and the limit of tokens, which has one of
    the names ``limits``, as ``max_tokens``. Raises: ``ConfigError`` for a limit that is none."""
    sampling = {name: body[name] for name in SAMPLING_NAMES if body.get(name) is not None}
    for name in limits:
        if (value := body.get(name)) is None:
            continue
        if type(value) is not int or value < 1:
            raise ConfigError(
                f"{name} is {str(value)[:50]!r}; it must be a whole number, at least 1", key=name
            )
        sampling["max_tokens"] = value
    return sampling


def require(
    body: Mapping[str, object], name: str, kind: type[T] | tuple[type[T], ...], expected: str
) -> T:
    """Return a field. Raises: ``ConfigError`` for another type."""
    value = body.get(name)
    if not isinstance(value, kind):
        fault = "is missing" if value is None else f"is {type(value).__name__}"
        raise ConfigError(f"{name} {fault}: it must be {expected}", key=name)
    return value


def schema(tool: Mapping[str, Any], name: str) -> Mapping[str, object]:
    """Return the JSON schema of a tool; {} when absent. Raises: ``ConfigError`` for anything but an
    object."""
    value = tool.get(name)
    if value and not isinstance(value, Mapping):
        raise ConfigError(f"{name} is {type(value).__name__}: it must be an object", key=name)
    return value or {}


def entries(body: Mapping[str, object], name: str) -> list[Mapping[str, Any]]:
    """Return a field that is a list of objects; [] when absent. Raises: ``ConfigError`` for
    anything else."""
    value = body.get(name)
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(entry, Mapping) for entry in value):
        raise ConfigError(f"{name} must be a list of objects", key=name)
    return value


def inner(event: Mapping[str, object], name: str) -> Mapping[str, object]:
    """Return the object in a field of an event. Raises: ``ValueError`` where there is none."""
    value = event.get(name)
    if not isinstance(value, Mapping):
        raise ValueError(f"an event {event.get('type')!r} has no {name}")
    return value


def arguments_text(arguments: object) -> str:
    """Return an object of tool arguments as JSON text; reverses `arguments_object`."""
    if isinstance(arguments, str):
        return arguments
    if isinstance(arguments, Mapping) and arguments.keys() == {RAW_ARGUMENTS}:
        return str(arguments[RAW_ARGUMENTS])
    return json.dumps(arguments if arguments is not None else {})


def calls_of(message: Mapping[str, Any]) -> list[ToolCall]:
    """Return the tool calls of a message."""
    return [
        call if isinstance(call, ToolCall) else ToolCall.from_wire(call)
        for call in message.get("tool_calls") or ()
    ]


def assistant(text: str, calls: Sequence[ToolCall], reasoning: str) -> AssistantMessage:
    """Return an assistant message without empty fields."""
    return AssistantMessage(text or None, list(calls) or None, reasoning or None)


def with_call_ids(
    parts: Sequence[Mapping[str, object]], kinds: Collection[str], field: str, ids: Iterable[str]
) -> list[dict[str, object]]:
    """Return the blocks or items of a message with these ids in the field of its calls, which are
    those of the ``kinds``."""
    of_calls = iter(ids)
    return [
        {**part, field: next(of_calls, "")} if part.get("type") in kinds else dict(part)
        for part in parts
    ]


def says_the_same(a: Mapping[str, object], b: Mapping[str, object]) -> bool:
    """Return whether two assistant messages have equal text and tool calls, in whatever spelling of
    the arguments."""

    def content_of(message: Mapping[str, object]) -> tuple[str, list[Any]]:
        calls = [
            (call["id"], call.name, arguments_object(call.arguments)) for call in calls_of(message)
        ]
        return text_of(message.get("content")), calls

    return content_of(a) == content_of(b)


def text_of(content: object) -> str:
    """Return the text of a content: of text, or of its text parts.

    >>> text_of([{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {}}]), text_of(None)
    ('a', '')
    """
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        return ""
    return "".join(str(part.get("text") or "") for part in content if isinstance(part, Mapping))


def collapsed(parts: list[dict[str, object]]) -> str | list[dict[str, object]]:
    """Return parts as content: one text part is its text, none are ""."""
    if not parts:
        return ""
    if len(parts) == 1 and parts[0].keys() == {"type", "text"}:
        return str(parts[0]["text"])
    return parts


def limited_arguments(
    request: ModelRequest, dialect: str
) -> tuple[dict[str, Any], dict[str, object]]:
    """Return (known arguments with ``max_tokens``, all others), without what a chat completion
    alone has.

    Raises: ``ConfigError`` for a request that needs token ids, which the dialect does not carry.
    """
    if request.require_tokens:
        raise ConfigError(
            f"the {dialect} API returns no token ids: use a client of type openai_chat_completions"
        )
    if request.message_type == "completion":
        raise ConfigError(f"the {dialect} API answers conversations: use message_type='chat'")
    standard, extra = split_arguments(request, "max_tokens")
    standard.pop("modalities", None)
    return standard, extra


def refuse_rest(arguments: Mapping[str, object], dialect: str) -> None:
    """Raises: ``ConfigError`` that names an argument which the dialect does not have."""
    for name in arguments:
        raise ConfigError(
            f"the {dialect} API has no sampling argument {name!r}: remove it", key=name
        )


def openai_usage(usage: Usage, prompt: str, completion: str) -> dict[str, object]:
    """Return the usage in OpenAI's form, whose two counts are named differently in its two APIs."""
    return {
        f"{prompt}_tokens": usage.prompt_tokens,
        f"{prompt}_tokens_details": {
            "cached_tokens": usage.cached_tokens,
            "cache_write_tokens": usage.cache_write_tokens,
        },
        f"{completion}_tokens": usage.completion_tokens,
        f"{completion}_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.total_tokens,
    }


def malformed(where: str, name: str, what: str) -> MalformedResponse:
    """Return the error of an answer whose field is not as the dialect says."""
    return MalformedResponse(f"{where} answered 200, but {name} {what}", field=name)
