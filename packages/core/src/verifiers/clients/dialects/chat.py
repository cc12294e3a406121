"""Chat completions (``POST /chat/completions``), the dialect of OpenAI's older API and of every
open server.

Source: https://platform.openai.com/docs/api-reference/chat. The client of this library writes and
reads it in ``payload`` and ``reply``, which this module shares.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from verifiers.clients.dialects import sse
from verifiers.clients.dialects.common import (
    calls_of,
    entries,
    openai_usage,
    reading_event,
    reading_request,
    require,
    sampling_of,
)
from verifiers.clients.dialects.protocol import DialectRequest
from verifiers.clients.failures import refuses_argument
from verifiers.clients.payload import MAX_TOKENS_ALIASES, to_fields
from verifiers.clients.reply import Completion, streamed_error, to_response, version_spans
from verifiers.errors import ConfigError, MalformedResponse
from verifiers.runtime.decoding import decode_message
from verifiers.types import Message, ModelRequest, Response, Tool, ToolCall

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


# --- of a server ----------------------------------------------------------------------------------


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


def _message(fields: Mapping[str, Any], index: int) -> Message:
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


def response_body(response: Response, request: DialectRequest) -> dict[str, Any]:
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
    choice: dict[str, Any] = {"index": 0, "finish_reason": response.finish_reason}
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


def _logprobs(texts: list[str], logprobs: list[float], in_chat: bool) -> dict[str, Any]:
    if not in_chat:
        return {"tokens": texts, "token_logprobs": logprobs}
    pairs = zip(texts, logprobs, strict=True)
    return {
        "content": [
            {"token": text, "logprob": value, "bytes": None, "top_logprobs": []}
            for text, value in pairs
        ]
    }


def _written(message: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in message.items() if name != "thinking_blocks"}


def _chunk(kind: str, request: DialectRequest) -> dict[str, Any]:
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
    request: DialectRequest, delta: Mapping[str, Any], finish_reason: str | None = None
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


def stream_events(response: Response, request: DialectRequest) -> Iterator[bytes]:
    """Write a response as a whole stream."""
    yield from stream_opening(request)
    yield from stream_rest(response, request)


def keep_alive(request: DialectRequest) -> bytes:
    """Write a comment, which readers of events skip."""
    return sse.COMMENT


def error_body(status: int, message: str) -> dict[str, Any]:
    """Write the body of an answer with another status than 200."""
    kind = _ERROR_TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}


def error_event(status: int, message: str, request: DialectRequest) -> bytes:
    """Write the event that ends an opened stream with an error."""
    return sse.event(error_body(status, message))


# --- of a client ----------------------------------------------------------------------------------


def request_body(
    request: ModelRequest, *, stream: bool = False, without: frozenset[str] = frozenset()
) -> dict[str, Any]:
    """Write a model call; ``without`` may hold "max_completion_tokens"."""
    name = "max_completion_tokens"
    body = to_fields(request, "max_tokens" if name in without else name)
    return body | {"stream": True, "stream_options": {"include_usage": True}} if stream else body


def concession(status: int, body: bytes) -> str | None:
    """Return "max_completion_tokens" for an endpoint that knows only the older name."""
    name = "max_completion_tokens"
    return name if refuses_argument(status, body, name) else None


def parse_response(body: Mapping[str, Any], request: ModelRequest, where: str) -> Response:
    """Read an answer. Raises: ``MalformedResponse`` that names ``where`` and the field."""
    try:
        completion = msgspec.convert(body, Completion)
    except msgspec.ValidationError as error:
        raise MalformedResponse(
            f"{where} answered 200, but not with a completion: {error}"
        ) from None
    return to_response(completion, request, where)


class ChatStream:
    """Puts chunks together.

    >>> stream = stream_reader()
    >>> stream.feed('{"choices": [{"index": 0, "delta": {"content": "hi"}, "finish_reason": "stop"}]}')
    >>> stream.feed("[DONE]")
    >>> stream.is_done, stream.body()["choices"][0]["message"]["content"]
    (True, 'hi')
    """

    def __init__(self) -> None:
        self.is_done = False
        self._head: dict[str, Any] = {}
        self._message: dict[str, Any] = {"role": "assistant"}
        self._calls: dict[int, dict[str, Any]] = {}
        self._finish_reason: str | None = None

    @reading_event(NAME)
    def feed(self, data: str) -> None:
        """Read one chunk. Raises: `StreamedError`; ``ValueError`` for data that is no chunk."""
        if data == "[DONE]":
            self.is_done = True
            return
        chunk = decode_message(data)
        if not isinstance(chunk, dict):
            raise ValueError("a chunk is not an object")
        if error := chunk.get("error"):
            raise streamed_error(error)
        self._head |= {
            name: value for name, value in chunk.items() if name != "choices" and value is not None
        }
        for choice in chunk.get("choices") or ():
            self._add(choice.get("delta") or {})
            self._finish_reason = choice.get("finish_reason") or self._finish_reason

    def _add(self, delta: Mapping[str, Any]) -> None:
        for name, value in delta.items():
            if name == "tool_calls":
                for piece in value or ():
                    self._add_call(piece)
            elif name != "role" and value is not None:
                held = self._message.get(name)
                self._message[name] = held + value if isinstance(held, str | list) else value

    def _add_call(self, piece: Mapping[str, Any]) -> None:
        index = piece.get("index")
        call = self._calls.setdefault(
            index if isinstance(index, int) else len(self._calls), {"type": "function"}
        )
        function = call.setdefault("function", {"name": "", "arguments": ""})
        function["arguments"] += (piece.get("function") or {}).get("arguments") or ""
        function["name"] = function["name"] or (piece.get("function") or {}).get("name") or ""
        call |= {
            name: value
            for name, value in piece.items()
            if name not in ("index", "function") and value
        }

    def body(self) -> dict[str, Any]:
        """The body that the same answer has without a stream."""
        calls = [call for _, call in sorted(self._calls.items())]
        message = {"content": None, **self._message} | ({"tool_calls": calls} if calls else {})
        choice = {"index": 0, "message": message, "finish_reason": self._finish_reason}
        return self._head | {"object": "chat.completion", "choices": [choice]}


stream_reader = ChatStream
