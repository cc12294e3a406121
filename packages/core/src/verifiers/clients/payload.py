"""Convert a `ModelRequest` to the arguments of an OpenAI-compatible endpoint.

The promise: every argument is sent under the name that the endpoint expects, ``None`` is never
sent, the seed of the request takes precedence, and arguments for several completions or a stream
are refused before sending.

This module does not normalize messages (they arrive as dicts) and sends nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import msgspec

from verifiers.errors import ConfigError
from verifiers.types import ModelRequest

if TYPE_CHECKING:
    from verifiers.types import Messages

MAX_TOKENS_ALIASES = ("max_tokens", "max_completion_tokens", "max_new_tokens")

OPENAI_ARGUMENTS = frozenset(
    "audio best_of echo frequency_penalty logit_bias logprobs max_completion_tokens max_tokens"
    " metadata modalities parallel_tool_calls prediction presence_penalty prompt_cache_key"
    " reasoning_effort response_format safety_identifier seed service_tier stop store suffix"
    " temperature tool_choice top_logprobs top_p user verbosity web_search_options".split()
)
"""Sampling arguments of the OpenAI API. All others are specific to an engine and are sent in
``extra_body``."""


def split_arguments(
    request: ModelRequest, max_tokens_name: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return (arguments of the OpenAI API, extra body); ``max_tokens_name`` is the name of the
    token limit.

    Raises: ``ConfigError`` for unsupported or contradictory arguments.
    """
    known: dict[str, Any] = {}
    extra: dict[str, Any] = {}
    limit = None
    for name, value in request.sampling_args.items():
        if value is None or name == "extra_body":
            continue
        if name in MAX_TOKENS_ALIASES:
            if limit is not None and limit != value:
                raise ConfigError(
                    f"sampling_args have two limits of tokens, {limit} and {value}: keep max_tokens"
                )
            limit = value
        elif name in OPENAI_ARGUMENTS:
            known[name] = value
        elif (name == "stream" and value) or (name == "n" and value != 1):
            instead = (
                "ask for several rollouts per example"
                if name == "n"
                else "completions are read as a whole"
            )
            raise ConfigError(
                f"sampling_args[{name!r}]={value!r} is not supported: {instead}", key=name
            )
        elif name not in ("stream", "n"):
            extra[name] = value
    extra.update(request.sampling_args.get("extra_body") or {})
    if limit is not None:
        known[max_tokens_name] = limit
    if request.seed is not None:
        known["seed"] = request.seed
    if request.require_tokens or extra.get("return_tokens_as_token_ids"):
        known["logprobs"] = known.get("logprobs") or (
            1 if request.message_type == "completion" else True
        )
        extra["return_token_ids"] = True
    if request.message_type != "completion" and has_audio(request.prompt):
        known["modalities"] = ["text"]
    return known, extra


def to_body(request: ModelRequest, max_tokens_name: str) -> bytes:
    """Return the JSON body of one request. Raises: ``ConfigError`` for an argument that JSON cannot
    store."""
    return encode(to_fields(request, max_tokens_name))


def to_fields(request: ModelRequest, max_tokens_name: str) -> dict[str, Any]:
    """Return the fields of the body of one request."""
    known, extra = split_arguments(request, max_tokens_name)
    body: dict[str, Any] = {"model": request.model}
    if request.message_type == "completion":
        body["prompt"] = request.prompt
    else:
        body["messages"] = chat_messages(request.prompt)
        if request.tools:
            body["tools"] = request.tools
    body.update(known)
    body.update(extra)
    return body


def chat_messages(prompt: Any) -> list[Any]:
    """Return the prompt as a list of messages; text becomes one user message."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


def has_audio(prompt: Messages) -> bool:
    """Return whether any message has an ``input_audio`` part."""
    if isinstance(prompt, str):
        return False
    try:
        if _TEXT.issuperset(map(type, map(_CONTENT, prompt))):  # fast path: all contents are text
            return False
    except KeyError:  # a message without content
        pass
    for message in prompt:
        content = message.get("content")
        if isinstance(content, list) and any(
            isinstance(part, Mapping) and part.get("type") == "input_audio" for part in content
        ):
            return True
    return False


def encode(body: Mapping[str, Any]) -> bytes:
    """Encode as JSON; a lone surrogate, which a model may write, is escaped."""
    try:
        return _ENCODER.encode(body)
    except UnicodeEncodeError:
        return json.dumps(msgspec.to_builtins(body, enc_hook=_plain)).encode("ascii")
    except (TypeError, OverflowError, RecursionError) as error:
        raise ConfigError(f"the model call cannot be written as JSON: {error}") from error


def _plain(value: object) -> Any:
    """Convert numpy scalars and arrays and pydantic objects to JSON types."""
    for name in ("tolist", "model_dump"):
        if callable(convert := getattr(value, name, None)):
            return convert()
    raise TypeError(f"{type(value).__name__} has no JSON form")


_CONTENT = itemgetter("content")
_TEXT = frozenset((str, type(None)))
_ENCODER = msgspec.json.Encoder(enc_hook=_plain)
