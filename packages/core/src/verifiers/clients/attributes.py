"""Read response objects by attribute into the same `Completion` as HTTP bodies.

The promise: SDK objects, dicts, namespaces and hand-written doubles read alike, and a field of an
unexpected type reads as absent, so the automatic attributes of a mock are never mistaken for data.

``adapters`` makes the calls and ``reply`` validates the result.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from verifiers.clients.reply import Choice, Completion, Entry, Logprobs


def read_completion(response: object) -> Completion:
    """Read the completion of an SDK object, a dict or a test double; fields of an unexpected type
    are absent."""
    choices = _typed(response, "choices", list) or []
    usage = _get(response, "usage")
    return Completion(
        choices=[_choice(choice) for choice in choices[:1]],
        id=_typed(response, "id", str),
        model=_typed(response, "model", str),
        created=_typed(response, "created", int),
        usage={name: _typed(usage, name, int) for name in ("prompt_tokens", "completion_tokens")},
        error=_plain_data(_get(response, "error")),
        prompt_token_ids=_typed(response, "prompt_token_ids", list),
        weight_versions=_plain_data(_get(response, "weight_versions")),
        weight_version=_plain_data(_get(response, "weight_version")),
    )


def read_flat(response: object) -> Completion:
    """Read the completion of a third-generation response, with message and tokens one
    level higher."""
    message = _get(response, "message")
    tokens = _get(message, "tokens")
    choice = {
        "message": message,
        "finish_reason": _typed(message, "finish_reason", str) or _get(response, "finish_reason"),
        "logprobs": {"token_logprobs": _get(tokens, "completion_logprobs")},
        "token_ids": _get(tokens, "completion_ids"),
    }
    fields = {name: _get(response, name) for name in ("id", "model", "created", "usage")}
    choices = [choice] if message is not None else []
    return read_completion(
        {**fields, "choices": choices, "prompt_token_ids": _get(tokens, "prompt_ids")}
    )


def _choice(choice: object) -> Choice:
    message = _get(choice, "message")
    return Choice(
        message=(
            _message(message)
            if message is not None and _typed(choice, "text", str) is None
            else None
        ),
        text=_typed(choice, "text", str),
        finish_reason=_typed(choice, "finish_reason", str),
        error=_plain_data(_get(choice, "error")),
        logprobs=_logprobs(_get(choice, "logprobs")),
        token_ids=_typed(choice, "token_ids", list),
        prompt_token_ids=_typed(choice, "prompt_token_ids", list),
        weight_versions=_plain_data(_get(choice, "weight_versions")),
        weight_version=_plain_data(_get(choice, "weight_version")),
    )


def _message(message: object) -> dict[str, object]:
    content = _get(message, "content")
    calls = _typed(message, "tool_calls", list)
    fields: dict[str, object] = {
        **_extra(message),
        "content": content if isinstance(content, str | list) else None,
        "tool_calls": [_tool_call(call) for call in calls] if calls else None,
        "thinking_blocks": _typed(message, "thinking_blocks", list),
    }
    for name in ("reasoning_content", "reasoning", "refusal"):
        fields[name] = _typed(message, name, str)
    return fields


def _tool_call(call: object) -> dict[str, object]:
    function = _get(call, "function")
    source = function if function is not None else call
    arguments = _get(source, "arguments")
    written = {
        "name": _typed(source, "name", str) or "",
        "arguments": arguments if isinstance(arguments, str | Mapping) else "{}",
    }
    further = {
        name: value for name, value in _extra(call).items() if name not in ("name", "arguments")
    }
    return {
        **further,
        "id": _typed(call, "id", str) or "",
        "type": "function",
        "function": {**_extra(function), **written},
    }


def _extra(holder: object) -> dict[str, object]:
    """Fields that an SDK does not know, or all of a mapping; for a mock none."""
    extra = holder if isinstance(holder, Mapping) else getattr(holder, "model_extra", None)
    if not isinstance(extra, Mapping):
        return {}
    return {
        str(name): plain
        for name, value in extra.items()
        if (plain := _plain_data(value)) is not None
    }


def _logprobs(logprobs: object) -> Logprobs | None:
    if logprobs is None:
        return None
    content = _typed(logprobs, "content", list)
    entries = None
    if content is not None:
        entries = [
            Entry(_get(entry, "logprob"), _get(entry, "token"), _get(entry, "id"))
            for entry in content
        ]
    tokens, values = (_typed(logprobs, name, list) for name in ("tokens", "token_logprobs"))
    return Logprobs(entries, tokens, values) if entries is not None or values is not None else None


def _get(holder: object, name: str) -> object:
    return holder.get(name) if isinstance(holder, Mapping) else getattr(holder, name, None)


def _typed(holder: object, name: str, kind: type) -> Any:
    value = _get(holder, name)
    if kind is list and hasattr(value, "tolist"):
        value = value.tolist()
    return value if isinstance(value, kind) else None


def _plain_data(value: object) -> object:
    """Return version spans as plain data; None for anything else."""
    try:
        return msgspec.to_builtins(value)
    except TypeError:
        return None
