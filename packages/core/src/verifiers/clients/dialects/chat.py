"""Chat completions (``POST /chat/completions``), the dialect of OpenAI's older API and of every
open server.

Source: https://platform.openai.com/docs/api-reference/chat. The client of this library writes and
reads it in ``payload`` and ``reply``, which this module shares.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from verifiers.clients.dialects import sse
from verifiers.clients.dialects.common import (
    calls_of,
    entries,
    openai_usage,
    reading_request,
    require,
    sampling_of,
)
from verifiers.clients.dialects.protocol import DialectRequest
from verifiers.clients.payload import MAX_TOKENS_ALIASES
from verifiers.clients.reply import version_spans
from verifiers.errors import ConfigError
from verifiers.types import Message, Response, Tool, ToolCall

NAME = "chat"
PATHS = ("chat/completions",)

_ROLES = {"developer": "system", "function": "tool"}
_ARGUMENTS = ("tool_choice", "response_format", "reasoning_effort", "verbosity")
_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


@reading_request(NAME)
def parse_request(body: Mapping[str, Any]) -> DialectRequest:
    """Read the body of a model call. Raises: ``ConfigError`` that names the field."""
    model = require(body, "model", str, "the name of a model")
    require(body, "messages", list, "a list of messages")
    if body.get("n") not in (None, 1):
        raise ConfigError(f"n is {body['n']!r}: one completion is sampled per call", key="n")
    sampling = sampling_of(body, *MAX_TOKENS_ALIASES)
    sampling |= {name: body[name] for name in _ARGUMENTS if body.get(name) is not None}
    tools, dropped = [], []
    for tool in entries(body, "tools"):
        if tool.get("type", "function") == "function":
            tools.append(Tool.from_wire(tool))
        else:
            dropped.append(str(tool.get("name") or tool["type"]))
    return DialectRequest(
        messages=[_message(message, i) for i, message in enumerate(entries(body, "messages"))],
        model=model,
        tools=tuple(tools),
        sampling_args=sampling,
        stream=bool(body.get("stream")),
        with_usage=bool((body.get("stream_options") or {}).get("include_usage")),
        dropped_tools=tuple(dropped),
    )


def _message(fields: Mapping[str, object], index: int) -> Message:
    role = fields.get("role")
    if not isinstance(role, str):
        raise ConfigError(f"messages[{index}] has no role", key="messages")
    message = Message(
        {name: value for name, value in fields.items() if value is not None or name == "content"}
    )
    message["role"] = _ROLES.get(role, role)
    calls = entries(fields, "tool_calls")
    if calls:
        message["tool_calls"] = [ToolCall.from_wire(call) for call in calls]
    else:
        message.pop("tool_calls", None)
        if message.get("content") is None:
            message["content"] = ""
    if isinstance(message.get("reasoning"), str):  # the name that some servers and agents use
        message.setdefault("reasoning_content", message.pop("reasoning"))
    return message


def response_body(response: Response, request: DialectRequest) -> dict[str, object]:
    """Write a response as the body of the answer."""
    body = completion_body(response)
    body["choices"][0]["logprobs"] = None
    return body | _chunk("chat.completion", request)


def completion_body(
    response: Response, in_chat: bool = True, token_fields: Collection[str] = ()
) -> dict[str, Any]:
    """Write a completion of a conversation or of a text.

    ``token_fields``: the token data in it, by vLLM's arguments: return_token_ids, logprobs,
    return_weight_versions.
    """
    choice: dict[str, object] = {"index": 0, "finish_reason": response.finish_reason}
    choice |= {"message": _written(response.message)} if in_chat else {"text": response.text}
    body = {
        "id": response.id,
        "object": "chat.completion" if in_chat else "text_completion",
        "created": response.created,
        "model": response.model,
        "choices": [choice],
        "usage": openai_usage(response.usage, "prompt", "completion"),
    }
    spans: list[dict[str, int]] = []
    if (tokens := response.tokens) is not None:
        spans = version_spans(np.broadcast_to(tokens.version, len(tokens.completion_ids)))
        if "return_token_ids" in token_fields:
            body["prompt_token_ids"] = tokens.prompt_ids.tolist()
            choice["token_ids"] = tokens.completion_ids.tolist()
        if "logprobs" in token_fields:
            texts = [f"token_id:{token_id}" for token_id in tokens.completion_ids.tolist()]
            choice["logprobs"] = _logprobs(texts, tokens.completion_logprobs.tolist(), in_chat)
    if "return_weight_versions" in token_fields and response.version >= 0:
        span = {"version": response.version, "start": 0, "end": response.usage.completion_tokens}
        choice["weight_versions"] = spans or [span]
    return body


def _logprobs(texts: list[str], logprobs: list[float], in_chat: bool) -> dict[str, object]:
    if not in_chat:
        return {"tokens": texts, "token_logprobs": logprobs}
    pairs = zip(texts, logprobs, strict=True)
    return {
        "content": [
            {"token": text, "logprob": value, "bytes": None, "top_logprobs": []}
            for text, value in pairs
        ]
    }


def _written(message: Mapping[str, object]) -> dict[str, object]:
    return {name: value for name, value in message.items() if name != "thinking_blocks"}


def _chunk(kind: str, request: DialectRequest) -> dict[str, object]:
    return {
        "id": f"chatcmpl-{request.id}",
        "object": kind,
        "created": request.created,
        "model": request.model,
    }


def stream_opening(request: DialectRequest) -> Sequence[bytes]:
    """Write the chunk with the role."""
    return [_delta(request, {"role": "assistant", "content": ""})]


def _delta(
    request: DialectRequest, delta: Mapping[str, object], finish_reason: str | None = None
) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish_reason, "logprobs": None}
    return sse.event(_chunk("chat.completion.chunk", request) | {"choices": [choice]})


def stream_rest(response: Response, request: DialectRequest) -> Iterator[bytes]:
    """Write reasoning, text and tool calls, then the finish reason, the usage if asked for, and the
    end mark."""
    for name, value in _written(response.message).items():
        if name not in ("role", "tool_calls") and value:
            yield _delta(request, {name: value})
    for index, call in enumerate(calls_of(response.message)):
        yield _delta(request, {"tool_calls": [{"index": index, **call}]})
    yield _delta(request, {}, response.finish_reason)
    if request.with_usage:
        usage = openai_usage(response.usage, "prompt", "completion")
        yield sse.event(_chunk("chat.completion.chunk", request) | {"choices": [], "usage": usage})
    yield sse.event(b"[DONE]")


def keep_alive(request: DialectRequest) -> bytes:
    """Write a comment, which readers of events skip."""
    return sse.COMMENT


def error_body(status: int, message: str) -> dict[str, object]:
    """Write the body of an answer with another status than 200."""
    kind = _ERROR_TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}


def error_event(status: int, message: str, request: DialectRequest) -> bytes:
    """Write the event that ends an opened stream with an error."""
    return sse.event(error_body(status, message))
