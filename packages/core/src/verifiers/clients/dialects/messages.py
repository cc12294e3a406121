"""Messages (``POST /v1/messages``), the dialect of Anthropic's API.

Source: https://platform.claude.com/docs/en/api/messages. Differences from a conversation of this
library:

* A system message at the start is the field ``system``; later messages stay where they are.
* Results of tools are parts of a user message; one user message with several becomes several tool
  messages.
* Thinking with a signature is kept verbatim in ``thinking_blocks`` and sent back; thinking without
  a signature is ``reasoning_content`` alone, marked by the signature `UNSIGNED`.
* Marks for the cache (``cache_control``) and ``is_error`` of a result are not part of a
  conversation and are not kept.
* Arguments of tools are objects, so their spelling is not kept, only their value.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from verifiers.clients.dialects import sse
from verifiers.clients.dialects.common import (
    arguments_text,
    assistant,
    calls_of,
    collapsed,
    entries,
    inner,
    limited_arguments,
    malformed,
    reading_event,
    reading_request,
    refuse_rest,
    require,
    sampling_of,
    says_the_same,
    schema,
    text_of,
    with_call_ids,
)
from verifiers.clients.dialects.protocol import DialectRequest
from verifiers.clients.payload import EMPTY_TEXT, arguments_object, is_blank, sendable
from verifiers.clients.reply import (
    count,
    distinct_ids,
    finish_of,
    reading_answer,
    streamed_error,
)
from verifiers.data.media import split_data_url
from verifiers.errors import ConfigError
from verifiers.runtime.decoding import decode_message
from verifiers.types import (
    AssistantMessage,
    Message,
    ModelRequest,
    Response,
    Tool,
    ToolCall,
    Usage,
)

NAME = "messages"
PATHS = ("messages", "messages/count_tokens")
DEFAULT_MAX_TOKENS = 8192
"""Sent when a call has no limit of tokens, because the API requires a limit."""
PICTURES = ("image/jpeg", "image/png", "image/gif", "image/webp")
UNSIGNED = "unsigned"
"""The signature of thinking that no vendor signed."""

_CALLS = frozenset(("tool_use",))
_THINKING = frozenset(("thinking", "redacted_thinking"))
_OTHER_DIALECT = frozenset(
    ("reasoning", "message", "function_call", "custom_tool_call", "local_shell_call")
)
_STOP_REASONS = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
    "abort": "pause_turn",
}
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}


# --- of a server ----------------------------------------------------------------------------------


@reading_request(NAME)
def parse_request(body: Mapping[str, Any]) -> DialectRequest:
    """Read the body of a model call, or of ``count_tokens``. Raises: ``ConfigError`` that names the
    field."""
    model = require(body, "model", str, "the name of a model")
    require(body, "messages", list, "a list of messages")
    sampling = sampling_of(body, "max_tokens")
    if body.get("stop_sequences"):
        sampling["stop"] = list(body["stop_sequences"])
    sampling |= _choice_read(body.get("tool_choice") or {})
    output = body.get("output_config") or {}
    if output.get("effort"):
        sampling["reasoning_effort"] = output["effort"]
    if form := output.get("format"):
        sampling["response_format"] = {
            "type": "json_schema",
            "json_schema": {"schema": form.get("schema")},
        }
    tools, dropped = [], []
    for tool in entries(body, "tools"):
        if "input_schema" in tool:
            name, description = str(tool.get("name") or ""), str(tool.get("description") or "")
            tools.append(
                Tool(name, description, schema(tool, "input_schema"), tool.get("strict") or None)
            )
        else:
            dropped.append(str(tool.get("name") or tool.get("type")))
    messages: list[Message] = []
    if system := body.get("system"):
        messages.append(Message(role="system", content=_content_read(system, "system")))
    for index, entry in enumerate(entries(body, "messages")):
        messages += _messages_read(entry, f"messages[{index}]")
    return DialectRequest(
        messages=messages,
        model=model,
        tools=tuple(tools),
        sampling_args=sampling,
        stream=bool(body.get("stream")),
        dropped_tools=tuple(dropped),
        settings={name: body[name] for name in ("thinking", "metadata") if body.get(name)},
    )


def _choice_read(choice: Mapping[str, Any]) -> dict[str, object]:
    arguments: dict[str, Any] = {}
    if choice.get("type") == "tool":
        arguments["tool_choice"] = {"type": "function", "function": {"name": choice.get("name")}}
    elif choice.get("type") in _CHOICES:
        arguments["tool_choice"] = _CHOICES[choice["type"]]
    if choice.get("disable_parallel_tool_use"):
        arguments["parallel_tool_calls"] = False
    return arguments


def _messages_read(entry: Mapping[str, object], location: str) -> Iterator[Message]:
    role, content = entry.get("role"), entry.get("content")
    if role not in ("user", "assistant", "system"):
        raise ConfigError(
            f"{location} has the role {role!r}: it must be user, assistant or system",
            key="messages",
        )
    if role == "assistant" and isinstance(content, list):
        yield _assistant_read(_blocks(content, location))
    elif role != "user" or not isinstance(content, list):
        yield Message(role=role, content=_content_read(content, location))
    else:
        for is_result, blocks in groupby(
            _blocks(content, location), lambda block: block.get("type") == "tool_result"
        ):
            if not is_result:
                yield Message(role="user", content=_content_read(list(blocks), location))
                continue
            for block in blocks:
                result = _content_read(block.get("content") or "", location)
                yield Message(
                    role="tool", content=result, tool_call_id=str(block.get("tool_use_id") or "")
                )


def _blocks(content: object, location: str) -> list[Mapping[str, object]]:
    if not isinstance(content, list) or not all(isinstance(block, Mapping) for block in content):
        raise ConfigError(f"{location}: content must be text or a list of blocks", key="messages")
    return content


def _content_read(content: object, location: str) -> str | list[dict[str, object]]:
    if isinstance(content, str):
        return content
    return collapsed([_part_read(b) for b in _blocks(content, location)])


def _part_read(block: Mapping[str, object]) -> dict[str, object]:
    """A part of our content; a block of another type (``document``) stays as it is."""
    source = block.get("source")
    if block.get("type") == "text":
        return {"type": "text", "text": str(block.get("text") or "")}
    if block.get("type") == "image" and isinstance(source, Mapping):
        if source.get("type") == "base64":
            url = f"data:{source.get('media_type')};base64,{source.get('data')}"
            return {"type": "image_url", "image_url": {"url": url}}
        if source.get("type") == "url":
            return {"type": "image_url", "image_url": {"url": str(source.get("url"))}}
    return {name: value for name, value in block.items() if name != "cache_control"}


def _assistant_read(blocks: Sequence[Mapping[str, object]]) -> AssistantMessage:
    """The message of blocks, with what of them has to go back verbatim."""
    blocks = [
        {name: value for name, value in block.items() if name != "cache_control"}
        for block in blocks
    ]
    message = _plain_message(blocks)
    signed = [block for block in blocks if _is_signed(block)]
    if [_bare(block) for block in blocks] != [
        _bare(block) for block in _blocks_of(message, signed)
    ]:
        signed = blocks  # text between thinking, several texts, blocks of other types
    if signed:
        message["thinking_blocks"] = signed
    return message


def _plain_message(blocks: Sequence[Mapping[str, object]]) -> AssistantMessage:
    """The message that blocks say to a reader without this dialect."""
    calls = [
        ToolCall(
            str(block.get("id") or ""),
            str(block.get("name") or ""),
            arguments_text(block.get("input")),
        )
        for block in blocks
        if block.get("type") == "tool_use"
    ]
    text = "".join(str(block.get("text") or "") for block in blocks if block.get("type") == "text")
    thought = [
        str(block.get("thinking") or "") for block in blocks if block.get("type") == "thinking"
    ]
    return assistant(text, calls, "\n".join(filter(None, thought)))


def _is_signed(block: Mapping[str, object]) -> bool:
    kind = block.get("type")
    return kind == "redacted_thinking" or (
        kind == "thinking" and block.get("signature") not in ("", None, UNSIGNED)
    )


def _bare(block: Mapping[str, object]) -> dict[str, object]:
    """A block without fields that are empty."""
    bare = {name: value for name, value in block.items() if value is not None}
    if bare.get("type") == "thinking" and not _is_signed(bare):
        bare["signature"] = UNSIGNED
    return bare


def response_body(response: Response, request: DialectRequest) -> dict[str, object]:
    """Write a response as the body of the answer."""
    return _head(request) | {
        "content": _assistant_written(response.message),
        "stop_reason": _STOP_REASONS[response.finish_reason],
        "usage": _usage_written(response.usage),
    }


def _head(request: DialectRequest) -> dict[str, object]:
    return {
        "id": f"msg_{request.id}",
        "type": "message",
        "role": "assistant",
        "model": request.model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": _usage_written(Usage()),
    }


def _usage_written(usage: Usage) -> dict[str, object]:
    """In this dialect ``input_tokens`` are those outside of the cache."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens - usage.cache_write_tokens,
        "cache_creation_input_tokens": usage.cache_write_tokens,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
    }


def stream_opening(request: DialectRequest) -> Sequence[bytes]:
    """Write ``message_start``."""
    return [_event("message_start", message=_head(request))]


def _event(kind: str, **fields: object) -> bytes:
    return sse.event({"type": kind, **fields}, kind)


def stream_rest(response: Response, request: DialectRequest) -> Iterator[bytes]:
    """Write the blocks, the stop reason with the usage, and ``message_stop``."""
    for index, block in enumerate(_assistant_written(response.message)):
        start, deltas = _deltas(block)
        yield _event("content_block_start", index=index, content_block=start)
        for delta in deltas:
            yield _event("content_block_delta", index=index, delta=delta)
        yield _event("content_block_stop", index=index)
    delta = {"stop_reason": _STOP_REASONS[response.finish_reason], "stop_sequence": None}
    yield _event("message_delta", delta=delta, usage=_usage_written(response.usage))
    yield _event("message_stop")


def _deltas(block: dict[str, object]) -> tuple[dict[str, object], list[dict[str, object]]]:
    """(block as it starts, its deltas)."""
    kind = block["type"]
    if kind == "text":
        return block | {"text": ""}, [{"type": "text_delta", "text": block["text"]}]
    if kind == "tool_use":
        text = json.dumps(block["input"])
        return block | {"input": {}}, [{"type": "input_json_delta", "partial_json": text}]
    if kind == "thinking":
        thought = {"type": "thinking_delta", "thinking": block["thinking"]}
        signature = {"type": "signature_delta", "signature": block["signature"]}
        return block | {"thinking": "", "signature": ""}, [thought, signature]
    return block, []


def keep_alive(request: DialectRequest) -> bytes:
    """Write a ``ping``."""
    return _event("ping")


def error_body(status: int, message: str) -> dict[str, Any]:
    """Write the body of an answer with another status than 200."""
    kind = _ERROR_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": message}}


def error_event(status: int, message: str, request: DialectRequest) -> bytes:
    """Write the event that ends an opened stream with an error."""
    return sse.event(error_body(status, message), "error")


# --- of a client ----------------------------------------------------------------------------------


def request_body(
    request: ModelRequest, *, stream: bool = False, without: frozenset[str] = frozenset()
) -> dict[str, Any]:
    """Write a model call; ``without`` may hold "reasoning": thinking that no vendor signed is left
    out.

    Raises: ``ConfigError`` for what the dialect cannot say: audio, a seed, penalties.
    """
    standard, extra = limited_arguments(request, NAME)
    body: dict[str, object] = {
        "model": request.model,
        "max_tokens": standard.pop("max_tokens", DEFAULT_MAX_TOKENS),
    }
    prompt = list(sendable(request))
    is_first = prompt and prompt[0].get("role") in ("system", "developer")
    if is_first and (system := _content_written(prompt.pop(0).get("content"), "")):
        body["system"] = system
    body["messages"] = list(_messages_written(prompt, "reasoning" not in without))
    if request.tools:
        body["tools"] = [_tool_written(Tool.from_wire(tool)) for tool in request.tools]
    body |= {
        name: standard.pop(name)
        for name in ("temperature", "top_p", "service_tier", "metadata")
        if name in standard
    }
    if stop := standard.pop("stop", None):
        body["stop_sequences"] = [stop] if isinstance(stop, str) else list(stop)
    if choice := _choice_written(
        standard.pop("tool_choice", None), standard.pop("parallel_tool_calls", None)
    ):
        body["tool_choice"] = choice
    if user := standard.pop("user", None):
        body["metadata"] = {"user_id": user}
    output: dict[str, object] = {}
    if effort := standard.pop("reasoning_effort", None):
        output["effort"] = effort
    if form := standard.pop("response_format", None):
        output["format"] = {
            "type": "json_schema",
            "schema": form.get("json_schema", {}).get("schema"),
        }
    if output:
        body["output_config"] = output
    refuse_rest(standard, NAME)
    return body | extra | ({"stream": True} if stream else {})


def _choice_written(choice: object, parallel: bool | None) -> dict[str, Any] | None:
    written: dict[str, object] = {}
    if isinstance(choice, Mapping):
        written = {"type": "tool", "name": (choice.get("function") or choice).get("name")}
    elif choice is not None:
        written = {
            "type": next((ours for ours, theirs in _CHOICES.items() if theirs == choice), choice)
        }
    if parallel is False:
        written = {"type": "auto", **written, "disable_parallel_tool_use": True}
    return written or None


def _tool_written(tool: Tool) -> dict[str, Any]:
    written = {"name": tool.name, "description": tool.description, "input_schema": tool.parameters}
    if not tool.parameters:
        written["input_schema"] = {"type": "object", "properties": {}}
    return written | ({"strict": True} if tool.strict else {})


def _messages_written(
    prompt: Sequence[Mapping[str, object]], with_unsigned: bool
) -> Iterator[dict[str, object]]:
    for is_tool, group in groupby(prompt, lambda message: message.get("role") == "tool"):
        if is_tool:
            yield {"role": "user", "content": [_result_written(message) for message in group]}
            continue
        for message in group:
            role, content = message.get("role"), message.get("content")
            if role != "assistant":
                yield {
                    "role": "system" if role == "developer" else role,
                    "content": _content_written(content),
                }
                continue
            blocks = _as_received(message) if with_unsigned else None
            if blocks is None:
                blocks = _assistant_written(message)
            if not with_unsigned:
                blocks = [
                    block for block in blocks if block["type"] != "thinking" or _is_signed(block)
                ]
            is_text = isinstance(content, str) and len(blocks) < 2 and not message.get("tool_calls")
            yield {
                "role": role,
                "content": (
                    _content_written(content)
                    if is_text and all(block.keys() == {"type", "text"} for block in blocks)
                    else blocks or EMPTY_TEXT
                ),
            }


def _result_written(message: Mapping[str, object]) -> dict[str, object]:
    call_id = message.get("tool_call_id")
    return {
        "type": "tool_result",
        "tool_use_id": call_id,
        "content": _content_written(message.get("content"), ""),
    }


def _content_written(content: object, blank: str = EMPTY_TEXT) -> str | list[dict[str, object]]:
    """The content; ``blank`` for text without a visible character, which the API refuses."""
    if isinstance(content, str) or content is None:
        return content if content and content.strip() else blank
    return [_part_written(part) for part in content] or blank  # type: ignore[attr-defined]


def _part_written(part: Mapping[str, Any]) -> dict[str, Any]:
    kind = part.get("type")
    if kind == "image_url":
        url = str(part["image_url"]["url"])
        if url[:5].lower() != "data:":
            return {"type": "image", "source": {"type": "url", "url": url}}
        media_type, data = split_data_url(url) or ("", "")
        if media_type not in PICTURES:
            raise ConfigError(
                f"the messages API takes pictures of {', '.join(PICTURES)} in base64, not"
                f" {url.partition(',')[0][:60]!r}: convert the picture, or use another client"
            )
        return {
            "type": "image",
            "source": {"type": "base64", "media_type": media_type, "data": data},
        }
    if kind == "input_audio":
        raise ConfigError(
            "the messages API takes no audio: remove the input_audio part, or use another client"
        )
    return dict(part)


def _assistant_written(message: Mapping[str, Any]) -> list[dict[str, object]]:
    """The blocks of an assistant message: those it came with, if it still says the same."""
    verbatim = [
        dict(block) for block in message.get("thinking_blocks") or () if isinstance(block, Mapping)
    ]
    if any(block.get("type") in _OTHER_DIALECT for block in verbatim):
        verbatim = []
    if not _THINKING.issuperset(block.get("type") for block in verbatim):
        if says_the_same(_plain_message(verbatim), message):
            return [block for block in verbatim if not is_blank(block)]
        verbatim = [block for block in verbatim if _is_signed(block)]
    return _blocks_of(message, verbatim)


def _as_received(message: Mapping[str, object]) -> list[dict[str, object]] | None:
    """The blocks of a message as the server wrote them, with the ids that its calls have in the
    conversation; None for another message, and for one that an author changed."""
    received = getattr(message, "received", None)
    if not isinstance(received, list):
        return None
    if any(block.get("type") in _OTHER_DIALECT for block in received):
        return None
    ids = [call["id"] for call in calls_of(message)]
    blocks = with_call_ids(received, _CALLS, "id", ids)
    if _assistant_read(blocks) != message:
        return None
    return [block for block in blocks if not is_blank(block)]


def _blocks_of(
    message: Mapping[str, object], verbatim: Sequence[Mapping[str, object]]
) -> list[dict[str, object]]:
    """Thinking, text and calls of a message, in this order."""
    blocks = [dict(block) for block in verbatim]
    if not verbatim and (reasoning := message.get("reasoning_content")):
        blocks.append({"type": "thinking", "thinking": reasoning, "signature": UNSIGNED})
    content = message.get("content")
    if isinstance(content, list):
        blocks += [_part_written(part) for part in content]
    elif text_of(content).strip():
        blocks.append({"type": "text", "text": content})
    for call in calls_of(message):
        arguments = arguments_object(call.arguments)
        blocks.append({"type": "tool_use", "id": call["id"], "name": call.name, "input": arguments})
    return blocks


def concession(status: int, body: bytes) -> str | None:
    """Return "reasoning" for an endpoint that refuses thinking which it did not sign itself."""
    return "reasoning" if status == 400 and b"signature" in body else None


def parse_response(body: Mapping[str, object], request: ModelRequest, where: str) -> Response:
    """Read an answer. Raises: ``MalformedResponse`` that names ``where`` and the field."""
    with reading_answer(NAME, where):
        blocks = body.get("content")
        if not isinstance(blocks, list) or not all(isinstance(block, dict) for block in blocks):
            raise malformed(where, "content", "is not a list of blocks")
        reason = body.get("stop_reason")
        if not isinstance(reason, str):
            raise malformed(where, "stop_reason", "is missing")
        usage = body.get("usage")
        cached = count(usage, "cache_read_input_tokens")
        written = count(usage, "cache_creation_input_tokens")
        prompt_tokens = count(usage, "input_tokens") + cached + written
        thought = count(usage, "output_tokens_details", "thinking_tokens")
        calls = [block for block in blocks if block.get("type") in _CALLS]
        ids = distinct_ids([str(call.get("id") or "") for call in calls], request)
        message = _assistant_read(with_call_ids(blocks, _CALLS, "id", ids))
        if _assistant_written(message) != blocks:
            message.keep_received(blocks)
        return Response(
            message=message,
            finish_reason=finish_of(message, reason, where),
            usage=Usage(prompt_tokens, count(usage, "output_tokens"), cached, written, thought),
            model=str(body.get("model") or request.model),
            id=str(body.get("id") or ""),
        )


@dataclass(slots=True)
class _StreamedBlock:
    """A block of a stream: servers that translate from another API give several the same number."""

    index: int
    content: dict[str, Any]
    json: str = ""
    """Arguments so far."""
    is_open: bool = True


class MessageStream:
    """Puts events together.

    >>> stream = stream_reader()
    >>> stream.feed('{"type": "ping"}')
    >>> stream.is_done
    False
    """

    def __init__(self) -> None:
        self.is_done = False
        self._body: dict[str, Any] = {}
        self._blocks: list[_StreamedBlock] = []

    @property
    def is_whole(self) -> bool:
        """Whether the answer is whole if the stream ends here: the stop reason comes after all of
        it, and some servers send nothing more."""
        return self.is_done or self._body.get("stop_reason") is not None

    @reading_event(NAME)
    def feed(self, data: str) -> None:
        """Read one event. Raises: `StreamedError`; ``ValueError`` for data that is no event, and
        for events in an order that loses or repeats a part of the answer."""
        if data == "[DONE]":  # some servers end every stream with it
            return
        event = decode_message(data)
        if not isinstance(event, dict):
            raise ValueError("an event is not an object")
        kind = event.get("type")
        if kind == "error" or (kind is None and event.get("error")):  # of a proxy, without a type
            raise streamed_error(event.get("error"))
        if self.is_done and kind in ("content_block_start", "content_block_delta"):
            raise ValueError(f"{kind} after the end of the message")
        if kind == "message_start":
            self._body = dict(inner(event, "message")) | self._body
        elif kind == "content_block_start":
            self._start(count(event, "index"), inner(event, "content_block"))
        elif kind == "content_block_delta":
            self._add(count(event, "index"), inner(event, "delta"))
        elif kind == "content_block_stop":
            for block in self._blocks:
                block.is_open = block.is_open and block.index != count(event, "index")
        elif kind == "message_delta":
            self._body |= {
                name: value
                for name, value in (event.get("delta") or {}).items()
                if value is not None
            }
            reported = {
                name: value
                for name, value in (event.get("usage") or {}).items()
                if value is not None
            }
            self._body["usage"] = {**(self._body.get("usage") or {}), **reported}
        self.is_done = self.is_done or kind == "message_stop"

    def _open(self, index: int) -> _StreamedBlock | None:
        return next((b for b in self._blocks if b.is_open and b.index == index), None)

    def _start(self, index: int, content: Mapping[str, object]) -> None:
        started = self._open(index)
        if started is not None and started.content == content and not started.json:
            return  # the same event again
        if started is not None and started.content.get("type") == content.get("type"):
            raise ValueError(f"block {index} is started again before it is complete")
        if started is not None:
            started.is_open = False  # its end was not sent
        self._blocks.append(_StreamedBlock(index, dict(content)))

    def _add(self, index: int, delta: Mapping[str, object]) -> None:
        streamed = self._open(index)
        if streamed is None:
            raise ValueError(f"a delta of block {index}, which was not started")
        block, kind = streamed.content, delta.get("type")
        if kind == "input_json_delta":
            streamed.json += str(delta.get("partial_json") or "")
        elif kind == "citations_delta":
            block["citations"] = block.get("citations") or []
            block["citations"].append(delta.get("citation"))
        else:
            for name, value in delta.items():
                if name != "type":
                    block[name] = block[name] + value if isinstance(block.get(name), str) else value

    def body(self) -> dict[str, Any]:
        """The body that the same answer has without a stream."""
        blocks = [
            block.content | ({"input": arguments_object(block.json)} if block.json else {})
            for block in sorted(self._blocks, key=lambda block: block.index)
        ]
        return self._body | {"content": blocks}


stream_reader = MessageStream
