"""Older ``verifiers.utils.message_utils``: messages from raw dicts, and their printable and saved
forms."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from verifiers.data.messages import as_mapping, field, message_text, normalize_message, strip_nones
from verifiers.runtime.decoding import decode_json
from verifiers.types import Message, Messages, TextMessage, ToolCall

ROLES = ("text", "system", "user", "assistant", "tool")
_PLACEHOLDERS = {"image_url": "[image]", "input_audio": "[audio]", "audio": "[audio]"}


def from_raw_message(message: Mapping[str, object]) -> Message:
    """The message of a dict, with flat tool calls. *Raises* ValueError for a role that is none of
    ``ROLES``."""
    fields = dict(as_mapping(message, "a message"))
    if fields.get("role") not in ROLES:
        raise ValueError(
            f"a message has one of the roles {', '.join(ROLES)}, not {fields.get('role')!r}"
        )
    if calls := fields.get("tool_calls"):
        fields["tool_calls"] = [_flat_call(call) for call in calls]
    return normalize_message(fields)


def from_raw_content_part(part: object) -> dict[str, object]:
    """A content part without None values. *Raises* ValueError for a part without a type."""
    fields = strip_nones(as_mapping(part, "a content part"))
    if not isinstance(fields.get("type"), str):
        raise ValueError(f"a content part needs a type, which this lacks: {fields!r}")
    return dict(fields)


def normalize_messages(value: object, *, field_name: str = "messages") -> list[Message]:
    """A list of messages; text becomes one text message. *Raises* TypeError that names
    ``field_name``."""
    if isinstance(value, str):
        return [TextMessage(value)]
    if not isinstance(value, Sequence):
        raise TypeError(
            f"{field_name} must be text or a list of messages, not {type(value).__name__}"
        )
    return [_message(item, f"{field_name}[{index}]") for index, item in enumerate(value)]


def maybe_normalize_messages(
    value: object, *, field_name: str = "messages"
) -> list[Message] | None:
    """``normalize_messages``; None stays None."""
    return None if value is None else normalize_messages(value, field_name=field_name)


def message_to_printable(message: object) -> Any:
    """The message with text content only: parts joined by spaces, ``[image]`` and ``[audio]`` in
    place of those."""
    printable = normalize_message(message)
    content = printable["content"]
    if isinstance(content, list):
        printable["content"] = " ".join(filter(None, map(_part_text, content))).strip()
    elif content is None:
        printable["content"] = ""
    return printable


def messages_to_printable(messages: Iterable[object] | str) -> Any:
    """``message_to_printable`` of each message; text unchanged."""
    if isinstance(messages, str):
        return messages
    return [message_to_printable(message) for message in messages]


def serialize_message_for_output(message: object) -> dict[str, object]:
    """A message as saved: images reduced to their URL, audio without white space, further keys left
    out."""
    fields = as_mapping(message, "a message")
    content = fields.get("content")
    saved: dict[str, object] = {"role": fields.get("role"), "content": content}
    if isinstance(content, list):
        saved["content"] = [_saved_part(part) for part in content]
    names = ("reasoning_content", "tool_calls", "tool_call_id", "name")
    return saved | {name: fields[name] for name in names if fields.get(name)}


def serialize_messages_for_output(messages: Iterable[object] | str) -> Any:
    """``serialize_message_for_output`` of each message; text unchanged."""
    if isinstance(messages, str):
        return messages
    return [serialize_message_for_output(message) for message in messages]


def format_messages(messages: Messages) -> str:
    """``role: text`` of each message, one per paragraph; text unchanged."""
    if isinstance(messages, str):
        return messages
    return "\n\n".join(f"{field(message, 'role')}: {message_text(message)}" for message in messages)


def is_valid_tool_content_parts(value: object) -> bool:
    """Whether a tool's result is a list of text and image parts, which the tool message then has as
    its content."""
    return isinstance(value, list) and all(
        isinstance(part, dict) and part.get("type") in ("text", "image_url") for part in value
    )


def _message(item: object, location: str) -> Message:
    if isinstance(item, str) or not (isinstance(item, Mapping) or hasattr(item, "model_dump")):
        raise TypeError(f"{location} must be a message, not {type(item).__name__}")
    return item if isinstance(item, Message) else from_raw_message(as_mapping(item, location))


def _flat_call(call: object) -> ToolCall:
    fields = decode_json(call) if isinstance(call, str) else as_mapping(call, "a tool call")
    function = fields.get("function") or fields
    name = function.get("name") or ""
    return ToolCall(fields.get("id") or name, name, function.get("arguments") or "{}")


def _part_text(part: object) -> str:
    kind = field(part, "type")
    return str(field(part, "text") or "") if kind == "text" else _PLACEHOLDERS.get(kind, "")


def _saved_part(part: object) -> dict[str, object]:
    fields = dict(as_mapping(part, "a content part"))
    if fields.get("type") == "image_url":
        return {"type": "image_url", "image_url": {"url": field(fields.get("image_url"), "url")}}
    if fields.get("type") == "input_audio":
        audio = fields.get("input_audio")
        data, kind = field(audio, "data"), field(audio, "format")
        if not isinstance(data, str) or not isinstance(kind, str):
            return {"type": "text", "text": "[audio]"}
        return {
            "type": "input_audio",
            "input_audio": {"data": "".join(data.split()), "format": kind.strip().lower()},
        }
    return fields
