"""Messages and tools in Inspect's types, and back. Knows no log and no task (``inspect``,
``inspect_task``).

Imported only by these two, once ``inspect_ai`` is known to be there; what a function needs of it,
it imports itself.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from verifiers.data.messages import message_text
from verifiers.runtime.decoding import decode_message
from verifiers.runtime.install_lines import install_line
from verifiers.types import Message, ToolCall
from verifiers_integrations.peers import Peer

load = Peer(
    "inspect_ai", "inspect-ai", ("0.3.285",), lambda: install_line("verifiers", "inspect")
).load
"""A module of Inspect, ``load("log")``. *Raises* ImportError that says what to install."""
STOP_REASONS = {
    "length": "max_tokens",
    "tool_calls": "tool_calls",
    "stop": "stop",
    "abort": "unknown",
}
FINISH_REASONS = {"max_tokens": "length", "model_length": "length", "tool_calls": "tool_calls"}


def to_chat(messages: Sequence[Mapping[str, Any]] | str) -> list[Any]:
    """Inspect's messages of ours; text becomes one user message."""
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    names: dict[str, str] = {}
    return [_to_message(message, names) for message in messages]


def _to_message(message: Mapping[str, Any], names: dict[str, str]) -> object:
    model = load("model")
    role = message["role"]
    if role == "assistant":
        calls = [_to_call(call, names) for call in message.get("tool_calls") or ()]
        return model.ChatMessageAssistant(
            content=_to_assistant_content(message), tool_calls=calls or None
        )
    if role == "tool":
        call_id = message.get("tool_call_id")
        return model.ChatMessageTool(
            content=message_text(message), tool_call_id=call_id, function=names.get(call_id or "")
        )
    kind = model.ChatMessageSystem if role == "system" else model.ChatMessageUser
    return kind(content=_to_content(message.get("content")))


def _to_assistant_content(message: Mapping[str, object]) -> object:
    reasoning = message.get("reasoning_content")
    if not reasoning:
        return message_text(message)
    model = load("model")
    return [
        model.ContentReasoning(reasoning=reasoning),
        model.ContentText(text=message_text(message)),
    ]


def _to_content(content: object) -> object:
    if not isinstance(content, list):
        return content or ""
    model = load("model")
    parts = []
    for part in content:
        if part.get("type") == "image_url":
            parts.append(model.ContentImage(image=part["image_url"]["url"]))
        else:
            parts.append(model.ContentText(text=part.get("text") or json.dumps(part)))
    return parts


def _to_call(call: Mapping[str, object], names: dict[str, str]) -> object:
    call = ToolCall.from_wire(call)
    names[call["id"]] = call["name"]
    arguments, problem = {}, None
    try:
        arguments = decode_message(call["arguments"])
        if not isinstance(arguments, dict):
            raise ValueError("the arguments are no object")
    except ValueError as error:
        arguments, problem = {"raw": call["arguments"]}, str(error)
    return load("tool").ToolCall(
        id=call["id"], function=call["name"], arguments=arguments, parse_error=problem
    )


def to_tools(tools: Sequence[Mapping[str, Any]] | None) -> list[Any]:
    """Inspect's descriptions of OpenAI tools."""
    module = load("tool")
    infos = []
    for tool in tools or ():
        function = tool.get("function") or tool
        schema = function.get("parameters") or {"type": "object", "properties": {}}
        infos.append(
            module.ToolInfo(
                name=function["name"],
                description=function.get("description") or "",
                parameters=module.ToolParams(
                    properties=schema.get("properties") or {}, required=schema.get("required") or []
                ),
            )
        )
    return infos


def from_assistant(reply: Any) -> Message:
    """Convert an Inspect assistant message to ours."""
    message = Message(role="assistant", content=reply.text)
    parts = reply.content if isinstance(reply.content, list) else []
    if reasoning := [part.reasoning for part in parts if part.type == "reasoning"]:
        message["reasoning_content"] = "\n".join(reasoning)
    if reply.tool_calls:
        message["tool_calls"] = [
            ToolCall(call.id, call.function, call.arguments) for call in reply.tool_calls
        ]
        message["content"] = reply.text or None
    return message
