"""Responses (``POST /responses``), the dialect of OpenAI's newer API and of Codex.

Source: https://platform.openai.com/docs/api-reference/responses. Differences from a conversation of
this library:

* What the model said in one turn is several items; they are one assistant message here.
* Reasoning with ``encrypted_content`` is kept verbatim in ``thinking_blocks`` and sent back;
  reasoning without it is ``reasoning_content`` alone.
* Tools with free text as input (``custom``), the ``local_shell`` and tools inside a namespace are
  functions for the model; their calls are written in their own form (`ToolForm`). Tools that run at
  the vendor are dropped by name.
* Nothing is stored between calls: ``previous_response_id`` and references to items are refused.
* The role ``developer`` is read as ``system``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import count as numbers
from typing import Any

from verifiers.clients.dialects import sse
from verifiers.clients.dialects.common import (
    assistant,
    calls_of,
    collapsed,
    entries,
    inner,
    limited_arguments,
    malformed,
    openai_usage,
    reading_event,
    reading_request,
    refuse_rest,
    require,
    sampling_of,
    says_the_same,
    schema,
    with_call_ids,
)
from verifiers.clients.dialects.protocol import DialectRequest, ToolForm
from verifiers.clients.failures import refuses_argument
from verifiers.clients.payload import arguments_object, sendable, sendable_arguments
from verifiers.clients.reply import (
    count,
    distinct_ids,
    finish_of,
    reading_answer,
    streamed_error,
)
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

NAME = "responses"
PATHS = ("responses",)
ENCRYPTED = "reasoning.encrypted_content"

_CALLS = frozenset(("function_call", "custom_tool_call", "local_shell_call"))
_OUTPUTS = frozenset(("function_call_output", "custom_tool_call_output", "local_shell_call_output"))
_OTHER_DIALECT = frozenset(("thinking", "redacted_thinking", "text", "tool_use"))
_KEPT_ELSEWHERE = ("previous_response_id", "conversation", "background", "prompt")
_REPEATED = "instructions metadata text truncation store user prompt_cache_key reasoning".split()
_FREE_TEXT = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
_SHELL = {
    "type": "object",
    "properties": {
        "command": {"type": "array", "items": {"type": "string"}},
        "timeout_ms": {"type": "integer"},
        "working_directory": {"type": "string"},
    },
    "required": ["command"],
}
MAX_PLACES = 2**16
"""Items of an answer, and parts of an item."""
_NAMED_ALIKE = (
    "temperature top_p top_logprobs parallel_tool_calls metadata service_tier store user"
    " safety_identifier prompt_cache_key"
).split()
_ERROR_CODES = {400: "invalid_prompt", 429: "rate_limit_exceeded"}


# --- of a server ----------------------------------------------------------------------------------


@reading_request(NAME)
def parse_request(body: Mapping[str, Any]) -> DialectRequest:
    """Read the body of a model call. Raises: ``ConfigError`` that names the field."""
    model = require(body, "model", str, "the name of a model")
    content = require(body, "input", (str, list), "text or a list of items")
    for name in _KEPT_ELSEWHERE:
        if body.get(name):
            raise ConfigError(
                f"{name} is not offered here, nothing is stored: send the whole input", key=name
            )
    sampling = sampling_of(body, "max_output_tokens")
    if effort := (body.get("reasoning") or {}).get("effort"):
        sampling["reasoning_effort"] = effort
    text = body.get("text") or {}
    if text.get("verbosity"):
        sampling["verbosity"] = text["verbosity"]
    if (form := text.get("format") or {}).get("type", "text") != "text":
        schema = {name: value for name, value in form.items() if name != "type"}
        sampling["response_format"] = {"type": form["type"]} | (
            {"json_schema": schema} if schema else {}
        )
    tools, forms, dropped = _tools_read(entries(body, "tools"))
    if choice := _choice_read(body.get("tool_choice"), forms):
        sampling["tool_choice"] = choice
    messages = (
        [Message(role="system", content=body["instructions"])] if body.get("instructions") else []
    )
    if isinstance(content, str):
        messages.append(Message(role="user", content=content))
    else:
        messages += _messages_read(entries(body, "input"))
    return DialectRequest(
        messages=messages,
        model=model,
        tools=tuple(tools),
        sampling_args=sampling,
        stream=bool(body.get("stream")),
        tool_forms=forms,
        dropped_tools=tuple(dropped),
        settings={
            name: body[name]
            for name in (*_REPEATED, "tools", "tool_choice")
            if body.get(name) is not None
        },
    )


def _tools_read(
    definitions: Sequence[Mapping[str, object]],
) -> tuple[list[Tool], dict[str, ToolForm], list[str]]:
    """(tools as functions, forms of those that are none, names of those that are dropped)."""
    tools: list[Tool] = []
    forms: dict[str, ToolForm] = {}
    dropped: list[str] = []
    flat = [(None, tool) for tool in definitions if tool.get("type") != "namespace"]
    nested = [
        (space, tool)
        for space in definitions
        if space.get("type") == "namespace"
        for tool in entries(space, "tools")
    ]
    for space, tool in [*flat, *nested]:
        kind, name = tool.get("type"), str(tool.get("name") or tool.get("type"))
        namespace = None if space is None else str(space.get("name"))
        seen_as = _seen_as(name, namespace)
        if kind == "function":
            tools.append(
                Tool(
                    seen_as,
                    tool.get("description") or "",
                    schema(tool, "parameters"),
                    tool.get("strict") or None,
                )
            )
        elif kind == "custom":
            tools.append(Tool(seen_as, _free_text_description(tool), _FREE_TEXT))
        elif kind == "local_shell":
            tools.append(Tool(seen_as, "Run a command and return its output.", _SHELL))
        else:
            dropped.append(name)
            continue
        if kind != "function" or namespace is not None:
            forms[seen_as] = ToolForm(kind, name, namespace)
    return tools, forms, dropped


def _seen_as(name: str, namespace: str | None) -> str:
    return name if not namespace else f"{namespace.rstrip('_')}__{name}"


def _free_text_description(tool: Mapping[str, Any]) -> str:
    """The description of a custom tool with the grammar of its input."""
    form = tool.get("format") or {}
    parts = [tool.get("description") or ""]
    if form.get("type") == "grammar":
        parts.append(
            f"`input` must match this {form.get('syntax')} grammar:\n{form.get('definition')}"
        )
    return "\n\n".join(filter(None, parts))


def _choice_read(choice: object, forms: Mapping[str, ToolForm]) -> object:
    if not isinstance(choice, Mapping):
        return choice
    if choice.get("type") == "allowed_tools":
        return choice.get("mode") or "auto"
    name = str(choice.get("name") or choice.get("type"))
    name = next((seen_as for seen_as, form in forms.items() if form.name == name), name)
    return {"type": "function", "function": {"name": name}}


def _messages_read(items: Sequence[Mapping[str, object]]) -> list[Message]:
    messages: list[Message] = []
    turn: list[
        Mapping[str, object]
    ] = []  # what the model said since the last item of another speaker

    def end_turn() -> None:
        if turn:
            messages.append(_assistant_read([_as_function(item) for item in turn]))
            turn.clear()

    for index, item in enumerate(items):
        kind, role = _kind(item), item.get("role")
        if kind == "reasoning" or kind in _CALLS or (kind == "message" and role == "assistant"):
            kinds = {_kind(earlier) for earlier in turn} - {"reasoning"}
            if (kinds and kind == "reasoning") or (kind == "message" and kinds):
                end_turn()
            turn.append(item)
            continue
        end_turn()
        if kind == "message" and role in ("user", "system", "developer"):
            content = _content_read(item.get("content"), index)
            messages.append(
                Message(role="system" if role == "developer" else role, content=content)
            )
        elif kind in _OUTPUTS:
            output = item.get("output")
            content = _content_read(output if output is not None else "", index)
            messages.append(
                Message(role="tool", content=content, tool_call_id=str(item.get("call_id") or ""))
            )
        else:
            what = f"of type {kind!r}" if kind != "message" else f"of role {role!r}"
            raise ConfigError(
                f"input[{index}] is an item {what}, which is not offered here", key="input"
            )
    end_turn()
    return messages


def _kind(item: Mapping[str, object]) -> str:
    return str(item.get("type") or "message")


def _content_read(content: object, index: int) -> str | list[dict[str, object]]:
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not all(isinstance(part, Mapping) for part in content):
        raise ConfigError(f"input[{index}]: content must be text or a list of parts", key="input")
    return collapsed([_part_read(part) for part in content])


def _part_read(part: Mapping[str, object]) -> dict[str, object]:
    """A part of our content; a part of another type (``input_file``) stays as it is."""
    kind = part.get("type")
    if kind in ("input_text", "output_text", "text"):
        return {"type": "text", "text": str(part.get("text") or "")}
    if kind == "input_image" and isinstance(part.get("image_url"), str):
        detail = part.get("detail")
        image = {"url": part["image_url"]} | (
            {"detail": detail} if detail not in (None, "auto") else {}
        )
        return {"type": "image_url", "image_url": image}
    return dict(part)


def _assistant_read(items: Sequence[Mapping[str, object]]) -> AssistantMessage:
    """The message of a turn's items, with what of them has to go back verbatim."""
    message = _plain_message(items)
    verbatim = [dict(item) for item in items if _is_signed(item)]
    if [_bare(item) for item in items] != [_bare(item) for item in _items_of(message, verbatim)]:
        # several texts, reasoning between calls, phases, other types
        verbatim = [dict(item) for item in items]
    if verbatim:
        message["thinking_blocks"] = verbatim
    return message


def _plain_message(items: Sequence[Mapping[str, Any]]) -> AssistantMessage:
    """The message that items say to a reader without this dialect."""
    texts: list[str] = []
    refusals: list[str] = []
    calls: list[ToolCall] = []
    thought: list[str] = []
    for item in items:
        kind = _kind(item)
        if kind in _CALLS:
            calls.append(_call_read(item))
        elif kind == "reasoning":
            thought.append(_thought(item))
        elif isinstance(item.get("content"), str):
            texts.append(item["content"])
        elif kind == "message":
            for part in item.get("content") or ():
                texts.append(str(part.get("text") or ""))
                refusals.append(str(part.get("refusal") or ""))
    message = assistant("".join(texts), calls, "\n".join(filter(None, thought)))
    if refusal := "".join(refusals):
        message["refusal"] = refusal
    return message


def _call_read(item: Mapping[str, Any]) -> ToolCall:
    kind = _kind(item)
    name = _seen_as(str(item.get("name") or "local_shell"), item.get("namespace"))
    call_id = str(item.get("call_id") or item.get("id") or "")
    if kind == "custom_tool_call":
        return ToolCall(call_id, name, {"input": str(item.get("input") or "")})
    if kind == "local_shell_call":
        action = item.get("action") or {}
        fields = ("command", "timeout_ms", "working_directory")
        return ToolCall(
            call_id,
            name,
            {field: action[field] for field in fields if action.get(field) is not None},
        )
    arguments = item.get("arguments") or "{}"
    return ToolCall(call_id, name, arguments if isinstance(arguments, Mapping) else str(arguments))


def _as_function(item: Mapping[str, object]) -> Mapping[str, object]:
    """An item with a call in another form as the call of a function, as which the model sees the
    tool."""
    if _kind(item) not in _CALLS or (_kind(item) == "function_call" and not item.get("namespace")):
        return item
    call = _call_read(item)
    return {
        "type": "function_call",
        "call_id": call["id"],
        "name": call.name,
        "arguments": call.arguments,
    }


def _thought(item: Mapping[str, Any]) -> str:
    """The text of a reasoning item: in full where it is open, else its summary."""
    parts = item.get("content") or item.get("summary") or ()
    return "\n".join(str(part.get("text") or "") for part in parts)


def _is_signed(item: Mapping[str, object]) -> bool:
    return _kind(item) == "reasoning" and bool(item.get("encrypted_content"))


def _bare(item: Mapping[str, Any]) -> dict[str, object]:
    """An item without ids, states and fields that are empty."""
    kind = _kind(item)
    if kind == "reasoning" and not _is_signed(item):
        return {"type": kind, "text": _thought(item)}
    bare = {
        name: value
        for name, value in item.items()
        if name not in ("id", "status", "type") and value
    }
    if kind == "message":
        content = bare.get("content") or ""
        parts = [{"text": content}] if isinstance(content, str) else content
        texts = [{n: v for n, v in part.items() if n != "type" and v} for part in parts]
        bare["content"] = [part for part in texts if part]
    return {"type": kind, **bare}


def response_body(response: Response, request: DialectRequest) -> dict[str, Any]:
    """Write a response as the body of the answer."""
    return _answer(response, request, _output(response, request))


def _output(response: Response, request: DialectRequest) -> list[dict[str, object]]:
    """The items of an answer, with ids, and calls in the form of their tools."""
    items = []
    cut = response.finish_reason == "length"
    written = _assistant_written(response.message)
    for index, item in enumerate(written):
        kind = _kind(item)
        form = request.tool_forms.get(str(item.get("name"))) if kind == "function_call" else None
        if form is not None:
            item = _call_written(item, form)
        state = "incomplete" if cut and index == len(written) - 1 else "completed"
        prefix = {"message": "msg", "reasoning": "rs", "function_call": "fc"}.get(kind, "item")
        item = {"id": f"{prefix}_{request.id}_{index}", **item}
        if kind != "reasoning":
            item["status"] = state
        items.append(item)
    return items


def _call_written(item: Mapping[str, object], form: ToolForm) -> dict[str, object]:
    """A function call as the call of a tool of another form."""
    arguments = arguments_object(str(item["arguments"]))
    call = {"call_id": item["call_id"]}
    if form.kind == "local_shell":
        command = arguments.get("command")
        action = {
            "type": "exec",
            "env": {},
            **arguments,
            "command": command if isinstance(command, list) else [],
        }
        return {"type": "local_shell_call", **call, "action": action}
    space = {"namespace": form.namespace} if form.namespace is not None else {}
    if form.kind == "custom":
        text = arguments.get("input")
        text = text if isinstance(text, str) else str(item["arguments"])
        return {"type": "custom_tool_call", **call, "name": form.name, "input": text, **space}
    return {
        "type": "function_call",
        **call,
        "name": form.name,
        "arguments": item["arguments"],
        **space,
    }


def _head(request: DialectRequest) -> dict[str, object]:
    sampling = request.sampling_args
    settings: dict[str, object] = {
        "instructions": None,
        "metadata": {},
        "tools": [],
        "tool_choice": "auto",
    }
    return {
        **settings,
        **request.settings,
        "id": f"resp_{request.id}",
        "object": "response",
        "created_at": request.created,
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "model": request.model,
        "output": [],
        "parallel_tool_calls": sampling.get("parallel_tool_calls", True),
        "temperature": sampling.get("temperature"),
        "top_p": sampling.get("top_p"),
        "max_output_tokens": sampling.get("max_tokens"),
        "previous_response_id": None,
        "usage": None,
    }


def _answer(
    response: Response, request: DialectRequest, output: list[dict[str, object]]
) -> dict[str, Any]:
    body = _head(request) | {
        "status": "completed",
        "output": output,
        "usage": openai_usage(response.usage, "input", "output"),
    }
    if response.finish_reason == "length":
        body |= {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
    elif response.finish_reason == "abort":
        body |= {
            "status": "failed",
            "error": {"code": "server_error", "message": "the generation was aborted"},
        }
    return body


class _Events:
    """Writes events with their numbers."""

    def __init__(self, first: int = 0):
        self._number = numbers(first)

    def __call__(self, kind: str, **fields: object) -> bytes:
        kind = f"response.{kind}"
        return sse.event({"type": kind, "sequence_number": next(self._number), **fields}, kind)


_OPENING = ("created", "in_progress")


def stream_opening(request: DialectRequest) -> Sequence[bytes]:
    """Write ``response.created`` and ``response.in_progress``."""
    write = _Events()
    return [write(kind, response=_head(request)) for kind in _OPENING]


def stream_rest(response: Response, request: DialectRequest) -> Iterator[bytes]:
    """Write every item with its parts, and the completed (incomplete, failed) response."""
    write = _Events(len(_OPENING))
    output = _output(response, request)
    for index, item in enumerate(output):
        yield from _item_events(write, index, item)
    body = _answer(response, request, output)
    yield write(body["status"], response=body)


def _item_events(write: _Events, index: int, item: dict[str, Any]) -> Iterator[bytes]:
    kind, location = _kind(item), {"output_index": index, "item_id": item["id"]}
    empty = item | ({"status": "in_progress"} if "status" in item else {})
    if kind == "message":
        yield write("output_item.added", output_index=index, item=empty | {"content": []})
        for number, part in enumerate(item["content"]):
            at = location | {"content_index": number}
            name = "text" if part["type"] == "output_text" else "refusal"
            extra: dict[str, object] = {"logprobs": []} if name == "text" else {}
            event = "output_text" if name == "text" else "refusal"
            yield write("content_part.added", **at, part=part | {name: ""})
            yield write(f"{event}.delta", **at, delta=part[name], **extra)
            yield write(f"{event}.done", **at, **{name: part[name]}, **extra)
            yield write("content_part.done", **at, part=part)
    elif kind == "reasoning":
        yield write("output_item.added", output_index=index, item=empty | {"summary": []})
        for number, part in enumerate(item.get("summary") or ()):
            at = location | {"summary_index": number}
            yield write("reasoning_summary_part.added", **at, part=part | {"text": ""})
            yield write("reasoning_summary_text.delta", **at, delta=part["text"])
            yield write("reasoning_summary_text.done", **at, text=part["text"])
            yield write("reasoning_summary_part.done", **at, part=part)
    elif kind in ("function_call", "custom_tool_call"):
        name, event = (
            ("arguments", "function_call_arguments")
            if kind == "function_call"
            else ("input", f"{kind}_input")
        )
        yield write("output_item.added", output_index=index, item=empty | {name: ""})
        yield write(f"{event}.delta", **location, delta=item[name])
        called = {"name": item["name"]} if kind == "function_call" else {}
        yield write(f"{event}.done", **location, **{name: item[name]}, **called)
    else:
        yield write("output_item.added", output_index=index, item=empty)
    yield write("output_item.done", output_index=index, item=item)


def keep_alive(request: DialectRequest) -> bytes:
    """Write a ``keepalive``, which restarts the idle clock of a client that does not count
    comments."""
    return sse.event({"type": "keepalive", "sequence_number": len(_OPENING) - 1}, "keepalive")


def error_body(status: int, message: str) -> dict[str, Any]:
    """Write the body of an answer with another status than 200."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {
        "error": {"message": message, "type": kind, "param": None, "code": _ERROR_CODES.get(status)}
    }


def error_event(status: int, message: str, request: DialectRequest) -> bytes:
    """Write ``response.failed``, which ends an opened stream."""
    error = {"code": _ERROR_CODES.get(status, "server_error"), "message": message}
    return _Events(len(_OPENING))(
        "failed", response=_head(request) | {"status": "failed", "error": error}
    )


# --- of a client ----------------------------------------------------------------------------------


def request_body(
    request: ModelRequest, *, stream: bool = False, without: frozenset[str] = frozenset()
) -> dict[str, Any]:
    """Write a model call that the endpoint does not store, and that asks for reasoning in a form to
    send back.

    ``without`` may hold "encrypted": the model has no reasoning to encrypt; and "reasoning":
    reasoning that the endpoint did not write itself is left out. Raises: ``ConfigError`` for what
    the dialect cannot say: stop texts, a seed, penalties.
    """
    standard, extra = limited_arguments(request, NAME)
    items: list[dict[str, object]] = []
    for message in sendable(request):
        items += _items_written(message, "reasoning" not in without)
    body: dict[str, Any] = {"model": request.model, "input": items, "store": False}
    if request.tools:
        body["tools"] = [_tool_written(Tool.from_wire(tool)) for tool in request.tools]
    if "max_tokens" in standard:
        body["max_output_tokens"] = standard.pop("max_tokens")
    body |= {name: standard.pop(name) for name in _NAMED_ALIKE if name in standard}
    if not body["store"] and "encrypted" not in without:
        body["include"] = [ENCRYPTED]
    if standard.pop("logprobs", False):
        body["include"] = [*body.get("include", ()), "message.output_text.logprobs"]
    if "tool_choice" in standard:
        choice = standard.pop("tool_choice")
        is_named = isinstance(choice, Mapping) and "function" in choice
        body["tool_choice"] = (
            {"type": "function", "name": choice["function"]["name"]} if is_named else choice
        )
    if effort := standard.pop("reasoning_effort", None):
        body["reasoning"] = {"effort": effort}
    if text := _text_written(
        standard.pop("response_format", None), standard.pop("verbosity", None)
    ):
        body["text"] = text
    refuse_rest(standard, NAME)
    return body | extra | ({"stream": True} if stream else {})


def _text_written(form: Mapping[str, Any] | None, verbosity: str | None) -> dict[str, object]:
    text: dict[str, object] = {}
    if form is not None:
        text["format"] = {"type": form.get("type"), **(form.get("json_schema") or {})}
    return text | ({"verbosity": verbosity} if verbosity else {})


def _tool_written(tool: Tool) -> dict[str, object]:
    described = {
        "description": tool.description,
        "parameters": tool.parameters or {"type": "object", "properties": {}},
    }
    return {"type": "function", "name": tool.name, **described, "strict": bool(tool.strict)}


def _items_written(message: Mapping[str, object], with_unsigned: bool) -> list[dict[str, Any]]:
    role = message.get("role")
    if role == "tool":
        output = _content_written(message.get("content"))
        return [
            {
                "type": "function_call_output",
                "call_id": message.get("tool_call_id"),
                "output": output,
            }
        ]
    if role != "assistant":
        return [
            {"type": "message", "role": role, "content": _content_written(message.get("content"))}
        ]
    received = _as_received(message) if with_unsigned else None
    items = []
    for index, item in enumerate(_assistant_written(message) if received is None else received):
        if _kind(item) == "reasoning" and not _is_signed(item):
            if not with_unsigned:
                continue
            item = {"id": f"rs_{index}", **item}
        elif _kind(item) == "function_call":
            item = item | {"arguments": sendable_arguments(str(item.get("arguments") or "{}"))}
        elif _kind(item) == "message" and "id" not in item:
            item = _message_written(item, index)
        items.append(item)
    return items


def _message_written(item: dict[str, Any], index: int) -> dict[str, object]:
    """A message that the vendor did not write: its text, which needs no id."""
    parts = item["content"]
    if all(part["type"] == "output_text" for part in parts):
        return item | {"content": "".join(part["text"] for part in parts)}
    return item | {"id": f"msg_{index}", "status": "completed"}


def _content_written(content: object) -> str | list[dict[str, object]]:
    if isinstance(content, str) or content is None:
        return content or ""
    return [_part_written(part) for part in content]  # type: ignore[attr-defined]


def _part_written(part: Mapping[str, Any]) -> dict[str, Any]:
    kind = part.get("type")
    if kind == "text":
        return {"type": "input_text", "text": part["text"]}
    if kind == "image_url":
        image = part["image_url"]
        return {
            "type": "input_image",
            "image_url": image["url"],
            "detail": image.get("detail") or "auto",
        }
    return dict(part)


def _assistant_written(message: Mapping[str, Any]) -> list[dict[str, object]]:
    """The items of an assistant message: those it came as, if it still says the same."""
    verbatim = [
        dict(item) for item in message.get("thinking_blocks") or () if isinstance(item, Mapping)
    ]
    if any(item.get("type") in _OTHER_DIALECT for item in verbatim):
        verbatim = []
    if any(not _is_signed(item) for item in verbatim):
        if says_the_same(_plain_message(verbatim), message):
            return verbatim
        verbatim = [item for item in verbatim if _is_signed(item)]
    return _items_of(message, verbatim)


def _as_received(message: Mapping[str, object]) -> list[dict[str, object]] | None:
    """The items of a message as the server wrote them, with the ids that its calls have in the
    conversation; None for another message, and for one that an author changed."""
    received = getattr(message, "received", None)
    if not isinstance(received, list):
        return None
    if any(item.get("type") in _OTHER_DIALECT for item in received):
        return None
    ids = [call["id"] for call in calls_of(message)]
    items = with_call_ids(received, _CALLS, "call_id", ids)
    return items if _assistant_read(items) == message else None


def _items_of(
    message: Mapping[str, Any], verbatim: Sequence[Mapping[str, object]]
) -> list[dict[str, object]]:
    """Reasoning, text and calls of a message, in this order."""
    items = [dict(item) for item in verbatim]
    if not verbatim and (reasoning := message.get("reasoning_content")):
        items.append(
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": reasoning}]}
        )
    content, calls = message.get("content"), calls_of(message)
    refusal = message.get("refusal")
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content or []
    written: list[dict[str, object]] = [
        {"type": "output_text", "text": part["text"], "annotations": []}
        for part in parts
        if part.get("type") == "text" and part.get("text")
    ]
    if refusal:
        written.append({"type": "refusal", "refusal": refusal})
    if written or not (calls or items):
        items.append({"type": "message", "role": "assistant", "content": written})
    for call in calls:
        items.append(
            {
                "type": "function_call",
                "call_id": call["id"],
                "name": call.name,
                "arguments": call.arguments,
            }
        )
    return items


def concession(status: int, body: bytes) -> str | None:
    """Name what the endpoint refuses: "encrypted" reasoning, or "reasoning" of another endpoint."""
    if status == 400 and b"ncrypted content is not supported" in body:
        return "encrypted"
    if refuses_argument(status, body, "include") or refuses_argument(status, body, ENCRYPTED):
        return "encrypted"
    return "reasoning" if status in (400, 404) and b"rs_" in body and b"not found" in body else None


def parse_response(body: Mapping[str, Any], request: ModelRequest, where: str) -> Response:
    """Read an answer.

    Raises: ``MalformedResponse`` that names ``where`` and the field; `StreamedError` for an answer
    with the status "failed".
    """
    with reading_answer(NAME, where):
        items = body.get("output")
        if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
            raise malformed(where, "output", "is not a list of items")
        status = body.get("status")
        if status == "failed":
            raise streamed_error(body.get("error"))
        if status not in ("completed", "incomplete", "cancelled", None):
            raise malformed(where, "status", f"is {status!r}, not the end of a response")
        calls = [item for item in items if item.get("type") in _CALLS]
        ids = distinct_ids(
            [str(call.get("call_id") or call.get("id") or "") for call in calls], request
        )
        message = _assistant_read(with_call_ids(items, _CALLS, "call_id", ids))
        if _assistant_written(message) != items:
            message.keep_received(items)
        reason = (body.get("incomplete_details") or {}).get("reason")
        if status == "cancelled":
            reason = status
        elif status == "incomplete" or any(item.get("status") == "incomplete" for item in items):
            reason = reason or "max_output_tokens"
        finish_reason = finish_of(message, reason, where)
        if finish_reason == "stop" and message.get("tool_calls"):
            finish_reason = "tool_calls"
        usage = body.get("usage")
        return Response(
            message=message,
            finish_reason=finish_reason,
            usage=Usage(
                count(usage, "input_tokens"),
                count(usage, "output_tokens"),
                count(usage, "input_tokens_details", "cached_tokens"),
                count(usage, "input_tokens_details", "cache_write_tokens"),
                count(usage, "output_tokens_details", "reasoning_tokens"),
            ),
            model=str(body.get("model") or request.model),
            id=str(body.get("id") or ""),
            created=count(body, "created_at"),
        )


_TEXTS = {
    "output_text": ("content", "content_index", "output_text", "text"),
    "refusal": ("content", "content_index", "refusal", "refusal"),
    "reasoning_text": ("content", "content_index", "reasoning_text", "text"),
    "reasoning_summary_text": ("summary", "summary_index", "summary_text", "text"),
}
"""Name of the events of a text -> (list of its item, number in it, type of the part, its field)."""
_ARGUMENTS = {
    "function_call_arguments": "arguments",
    "mcp_call_arguments": "arguments",
    "custom_tool_call_input": "input",
}
"""Name of the events of a call's arguments -> the field of its item."""
_ENDS = ("completed", "incomplete", "failed", "cancelled", "done")


class ResponseStream:
    """Puts events together: the last event holds the whole answer, or that of the items, or of the
    texts where a server sends no more; a last event with less of it is an error.

    >>> stream = stream_reader()
    >>> stream.feed('{"type": "response.in_progress", "response": {}}')
    >>> stream.is_done
    False
    """

    def __init__(self) -> None:
        self.is_done = False
        self._body: dict[str, Any] = {}
        self._items: dict[int, dict[str, object]] = {}
        """Items that are done, by their place."""
        self._parts: dict[int, dict[str, object]] = {}
        """Items of the smaller events; their texts are lists of pieces."""

    @property
    def is_whole(self) -> bool:
        """Whether the answer is whole if the stream ends here."""
        return self.is_done

    @reading_event(NAME)
    def feed(self, data: str) -> None:
        """Read one event. Raises: `StreamedError`; ``ValueError`` for data that is no event, and
        for a text after the end."""
        if data == "[DONE]":  # some servers end every stream with it
            return
        event = decode_message(data)
        if not isinstance(event, dict):
            raise ValueError("an event is not an object")
        kind = str(event.get("type") or "")
        if kind == "error" or (not kind and event.get("error")):  # of a proxy, without a type
            raise streamed_error(event.get("error") or event)
        name, _, stage = kind.removeprefix("response.").rpartition(".")
        if name in _TEXTS or name in _ARGUMENTS:
            if self.is_done:
                raise ValueError(f"{kind} after the end of the response")
            self._add(name, stage, event)
        elif name == "output_item":
            index = _index_of(event, "output_index", len(self._items))
            item = dict(inner(event, "item"))
            if stage == "done":
                self._items[index] = item
                self._parts.pop(index, None)
            else:
                self._parts.setdefault(index, item)
        elif name == "content_part" and stage == "done":
            self._part(event, _index_of(event, "content_index")).update(inner(event, "part"))
        elif not name and stage in _ENDS:
            self._body = dict(inner(event, "response"))
            if stage in ("incomplete", "cancelled") and not self._body.get("status"):
                self._body["status"] = stage
            self.is_done = True
            if stage == "failed":
                raise streamed_error(self._body.get("error"))

    def _add(self, name: str, stage: str, event: Mapping[str, object]) -> None:
        """Add a piece of a text or of arguments, or the whole of it."""
        if field := _ARGUMENTS.get(name):
            part, text = self._item(event, "function_call"), event.get(field)
        else:
            listed, counter, kind, field = _TEXTS[name]
            number = _index_of(event, counter)
            part, text = self._part(event, number, listed, kind), event.get(field)
        if stage == "delta":
            pieces = part.get(field)
            if not isinstance(pieces, list):
                pieces = part[field] = [pieces or ""]
            pieces.append(str(event.get("delta") or ""))
        elif stage == "done" and isinstance(text, str):
            part[field] = text

    def _item(self, event: Mapping[str, object], kind: str) -> dict[str, Any]:
        index = _index_of(event, "output_index")
        return self._parts.setdefault(index, {"type": kind, "id": event.get("item_id")})

    def _part(
        self,
        event: Mapping[str, object],
        number: int,
        listed: str = "content",
        kind: str = "output_text",
    ) -> dict[str, Any]:
        of_reasoning = kind in ("reasoning_text", "summary_text")
        item = self._item(event, "reasoning" if of_reasoning else "message")
        if item.get("type") == "message":
            item.setdefault("role", "assistant")
        parts = item.get(listed) or []
        parts += [{"type": kind} for _ in range(number + 1 - len(parts))]
        item[listed] = parts
        part: dict[str, object] = parts[number]
        return part

    def body(self) -> dict[str, Any]:
        """The body that the same answer has without a stream. Raises: ``ValueError`` where the last
        event has less than those before it."""
        by_place = {index: _joined(item) for index, item in self._parts.items()} | self._items
        streamed = [item for _, item in sorted(by_place.items())]
        output = self._body.get("output") or streamed
        if self.is_done and not output:
            raise ValueError("the response ended without any output")
        if isinstance(output, list) and _num_characters(output) < _num_characters(streamed):
            raise ValueError("the last event has less of the answer than the events before it")
        return self._body | {"output": output}


def _joined(item: Mapping[str, object]) -> dict[str, object]:
    """An item of the smaller events with its texts in one piece."""
    fields: dict[str, Any] = dict(item)
    for listed in ("content", "summary"):
        if listed in fields:
            fields[listed] = [_joined(part) for part in fields[listed] or ()]
    for name in ("text", "refusal", "arguments", "input"):
        if isinstance(pieces := fields.get(name), list):
            fields[name] = "".join(pieces)
    return fields


def _index_of(event: Mapping[str, object], name: str, default: int = 0) -> int:
    index = event.get(name, default)
    if not isinstance(index, int) or not 0 <= index < MAX_PLACES:
        raise ValueError(f"{name} is not a number: {index!r}")
    return index


def _num_characters(items: Sequence[object]) -> int:
    """Characters of the text and of the arguments of calls."""
    message = _plain_message([item for item in items if isinstance(item, Mapping)])
    calls = message.get("tool_calls") or ()
    return len(message.get("content") or "") + sum(len(call.arguments) for call in calls)


stream_reader = ResponseStream
