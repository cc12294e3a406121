"""Normalize messages of every accepted type, extract their text, and print them safely.

The promise: ``normalize_messages`` returns ``Message`` objects without None values (except
``content: None`` of an assistant message with tool calls), with ``ToolCall`` objects, and without
the nulls that Arrow adds to dicts. Normalized messages are returned as the same objects.

This module applies no chat template (the tokenizer of the server or of the trainer does) and sends
nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from operator import itemgetter
from typing import Any

from verifiers.data.images import image_part, is_image, is_url
from verifiers.errors import ConfigError
from verifiers.runtime.decoding import decode_json, decode_message
from verifiers.runtime.terminal import escape_control
from verifiers.types import (
    AssistantMessage,
    Message,
    Messages,
    SystemMessage,
    TextMessage,
    ToolCall,
    ToolMessage,
    UserMessage,
)

_CLASSES: dict[str, type[Message]] = {
    "system": SystemMessage,
    "user": UserMessage,
    "assistant": AssistantMessage,
    "tool": ToolMessage,
    "text": TextMessage,
}

_KINDS = frozenset(_CLASSES.values())
_TEXT, _TWO = frozenset((str,)), frozenset((2,))
_ROLE, _CONTENT = itemgetter("role"), itemgetter("content")


def normalize_messages(value: object, message_type: str = "chat") -> Messages:
    """Return ``value`` as a new list of ``Message``, or as text when ``message_type`` is
    ``"completion"``.

    Accepts our classes, dicts, pydantic and openai objects, one message or a sequence of them, None
    (nothing) and text, which in chat mode is one user message. Unknown keys are kept.

    Raises: ``ConfigError`` for anything else, for a message without a role, and for chat messages
    in completion mode.

    >>> normalize_messages([{"role": "user", "content": "hi", "name": None}])
    [{'role': 'user', 'content': 'hi'}]
    >>> normalize_messages("2 + 2 =", "completion")
    '2 + 2 ='
    """
    return _normalize_text(value) if message_type == "completion" else normalize_chat(value)


def saved_messages(value: Any) -> Messages:
    """The messages (or text) of a saved rollout; text stays text."""
    messages: Messages = normalize_chat(value) if isinstance(value, list) else value
    return messages


def normalize_chat(value: object) -> list[Message]:
    """``normalize_messages`` in chat mode."""
    if isinstance(value, (list, tuple)):
        if _are_plain(value):
            return list(value)
        return [
            m if isinstance(m, Message) and _is_normal(m) else normalize_message(m) for m in value
        ]
    if isinstance(value, str):
        return [UserMessage(value)]
    if value is None:
        return []
    return [normalize_message(value)]


def normalize_message(value: object) -> Message:
    """Return one message of any accepted type as a new ``Message`` of the class of its role."""
    fields = strip_nones(as_mapping(value, "a message"))
    role = fields.get("role")
    if not isinstance(role, str) or not role:
        raise ConfigError(
            f"a message needs a role, which this lacks: {_shortened(dict(fields))}", key="role"
        )
    calls = fields.get("tool_calls")
    if calls:
        fields["tool_calls"] = [_tool_call(call) for call in calls]
    else:
        fields.pop("tool_calls", None)
    content = fields.get("content")
    if content is None:
        content = None if calls and role == "assistant" else ""
    elif isinstance(content, list):
        content = [content_part(part) for part in content]
    elif is_image(content):
        content = [image_part(content)]
    cls = _CLASSES.get(role, Message)
    message = cls.__new__(cls)
    dict.update(message, {"role": role, "content": content})
    dict.update(message, {name: value for name, value in fields.items() if name != "content"})
    return message


def content_part(part: object) -> Any:
    """A content part of what stands for one: text, and an image in any form of ``image_part`` but a
    path, which leads to files of this machine: also in ``{"type": "image", "image": …}``, as chat
    templates write it. Other parts unchanged."""
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if is_image(part):
        return image_part(part)
    if isinstance(part, Mapping):
        kind = part.get("type")
        image = part.get(kind) if kind in ("image", "image_url") else None
        source = image.get("url") if isinstance(image, Mapping) and "url" in image else image
        is_address = isinstance(source, str) and (kind == "image_url" or is_url(source))
        if is_image(source) or (kind == "image" and is_address):
            more = image if isinstance(image, Mapping) and source is not image else part
            return image_part(source, detail=str(more.get("detail") or ""))
    return part


_PARTS = {
    "text": ("text",),
    "image_url": ("image_url", "url"),
    "input_audio": ("input_audio", "data"),
}
"""Type of a content part -> path of its text."""


_FOREIGN_ROLES = {
    "human": "user",
    **dict.fromkeys(("ai", "bot", "gpt", "model"), "assistant"),
}
"""Roles of other formats -> ours."""
_FOREIGN_CONTENT = ("text", "value", "message")
"""Names of the content in other formats."""


def check_parts(messages: Iterable[Any]) -> None:
    """Raise ``ConfigError`` for a role or a name of the content of another format, and for a text,
    image or audio part that no server can read; other types are not checked."""
    for message in messages:
        content = message.get("content")
        if role := _FOREIGN_ROLES.get(message["role"]):
            raise ConfigError(
                f"there is no role {message['role']!r} here; it is {role!r}", key="role"
            )
        foreign = [name for name in _FOREIGN_CONTENT if name in message]
        if foreign and not content and not message.get("tool_calls"):
            raise ConfigError(
                f"a message has its text in 'content', not in {foreign[0]!r}", key="content"
            )
        for part in content if isinstance(content, list) else ():
            if not isinstance(part, Mapping) or not isinstance(part.get("type"), str):
                raise ConfigError(
                    f"a content part is a dict with a 'type', not {_shortened(part)}", key="content"
                )
            path = _PARTS.get(part["type"], ())
            value: object = part
            for name in path:
                value = value.get(name) if isinstance(value, Mapping) else None
            if part["type"] == "image" and "image" not in part and "source" not in part:
                raise ConfigError(
                    "a part of type 'image' has no image: give it as part['image'], or the row a"
                    " column 'images'",
                    key="content",
                )
            if path and not isinstance(value, str):
                where = "".join(f"[{name!r}]" for name in path)
                raise ConfigError(
                    f"a part of type {part['type']!r} needs a text in part{where}", key="content"
                )


def as_mapping(value: object, what: str) -> Mapping[str, Any]:
    """A mapping as it is, a pydantic or openai object as a dict. Raises: ``ConfigError`` else."""
    if isinstance(value, Mapping):
        return value
    dump = getattr(value, "model_dump", None)
    if callable(dump) and isinstance(dumped := dump(), Mapping):
        return dumped
    raise ConfigError(
        f"{what} must be a dict or an object of the message classes, not {_shortened(value)}"
        f" ({type(value).__name__})"
    )


def strip_nones(value: object) -> Any:
    """Copy without None-valued dict keys at any depth, with pydantic objects as dicts. Tool calls
    stay unchanged.

    Undoes what Arrow does: it gives every dict of a column the keys of all.
    """
    if isinstance(value, str | int | float) or value is None or type(value) is ToolCall:
        return value
    if isinstance(value, Mapping):
        return {key: strip_nones(member) for key, member in value.items() if member is not None}
    if isinstance(value, list | tuple):
        return [strip_nones(member) for member in value]
    if callable(dump := getattr(value, "model_dump", None)):
        return strip_nones(dump())
    return value


def message_text(message: object) -> str:
    """Return the text of a message: its content, or its text parts joined by newlines; ``""``
    without text.

    >>> message_text({"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]})
    'a\\nb'
    """
    if isinstance(message, str):
        return message
    content = field(message, "content")
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        return ""
    texts = (part if isinstance(part, str) else field(part, "text") for part in content)
    return "\n".join(text for text in texts if isinstance(text, str))


def last_text(messages: Iterable[object] | str | None, role: str) -> str | None:
    """Return the text of the last message of ``role``, of any message type; None when there is
    none.

    Text in place of messages counts as a user message (a prompt) and as an assistant message (a
    completion).
    """
    if isinstance(messages, str):
        return messages if role in ("user", "assistant") else None
    for message in reversed(list(messages or ())):
        if field(message, "role") == role:
            return message_text(message)
    return None


def field(message: object, name: str) -> Any:
    """Return a field of a message, part or tool call of any type; None when absent."""
    # a dict first: the check of the abstract class is Python
    if isinstance(message, (dict, Mapping)):
        return message.get(name)
    return getattr(message, name, None)


def canonical_arguments(arguments: object) -> object:
    """Tool arguments as a value, so that spaces and the order of keys do not matter; invalid JSON
    stays text.

    >>> canonical_arguments('{"a": 1,"b":2}') == canonical_arguments('{"b": 2, "a": 1}'), canonical_arguments(" {oops ")
    (True, '{oops')
    """
    if not isinstance(arguments, str):
        return arguments
    try:
        return decode_message(arguments or "{}")
    except ValueError:
        return arguments.strip()


def concat_messages(parts: Iterable[Any]) -> Messages:
    """Concatenate pieces of a conversation: text when all are text, else the messages of all, in
    order.

    >>> concat_messages(["2 + 2", " = 4"])
    '2 + 2 = 4'
    """
    pieces = list(parts)
    if pieces and all(isinstance(piece, str) for piece in pieces):
        return "".join(pieces)
    messages: list[Message] = []
    for piece in pieces:
        messages.extend(normalize_chat(piece))
    return messages


def is_prefix(start: Messages, messages: Messages) -> bool:
    """Whether ``messages`` begins with all of ``start``; text never with messages, or reverse."""
    if isinstance(start, str) or isinstance(messages, str):
        return isinstance(start, str) and isinstance(messages, str) and messages.startswith(start)
    return len(start) <= len(messages) and all(
        a is b or a == b for a, b in zip(start, messages, strict=False)
    )


def render_text(messages: object) -> str:
    """Format a conversation for a terminal: one ``role: text`` paragraph per message, control
    characters escaped.

    >>> print(render_text([{"role": "user", "content": "hi"}, {"role": "assistant", "content": "\\x1b[2J"}]))
    user: hi
    <BLANKLINE>
    assistant: \\x1b[2J
    """
    if isinstance(messages, str):
        return escape_control(messages)
    paragraphs = []
    for message in messages_to_printable(messages):
        lines = [message_text(message)]
        if thought := message.get("reasoning_content"):
            lines.insert(0, f"<think>{thought}</think>")
        lines += [
            f"-> {call['name']}({call['arguments']})" for call in message.get("tool_calls") or ()
        ]
        paragraphs.append(f"{message['role']}: " + "\n".join(line for line in lines if line))
    return escape_control("\n\n".join(paragraphs))


def messages_to_printable(messages: object) -> Any:
    """Messages with ``[image]`` and ``[audio]`` for such parts; text is returned unchanged."""
    if isinstance(messages, str):
        return messages
    return [message_to_printable(message) for message in normalize_chat(messages)]


def message_to_printable(message: object) -> Message:
    """A message with text content only; other parts become ``[image]`` and ``[audio]``."""
    printable = normalize_message(message)
    content = printable["content"]
    if isinstance(content, list):
        printable["content"] = "\n".join(_part_text(part) for part in content)
    elif content is None:
        printable["content"] = ""
    return printable


def _are_plain(values: Sequence[Any]) -> bool:
    """Return whether all are ``Message`` objects of a role and a text alone, as nearly all are."""
    try:
        return (
            _KINDS.issuperset(map(type, values))
            and _TWO.issuperset(map(len, values))
            and _TEXT.issuperset(map(type, map(_CONTENT, values)))
            and all(map(_ROLE, values))
        )
    except KeyError:  # one of the two fields is another
        return False


def _is_normal(message: Message) -> bool:
    """Whether a message is normalized: None only as content beside calls, of ``ToolCall``."""
    content = message.get("content")
    if type(content) is str and len(message) == 2:  # the most frequent case: role and text
        return bool(message.get("role"))
    calls = message.get("tool_calls")
    if "role" not in message or (calls is None) is ("tool_calls" in message):
        return False
    if calls is not None and (not calls or any(type(call) is not ToolCall for call in calls)):
        return False
    if not isinstance(content, str):
        if content is None:
            return bool(calls) and list(message.values()).count(None) == 1 and "content" in message
        if not isinstance(content, list):
            return False
        if not all(
            isinstance(part, dict) and None not in part.values() and content_part(part) is part
            for part in content
        ):
            return False
    return None not in message.values()


def _tool_call(value: object) -> ToolCall:
    """Convert a tool call of any type, including the JSON text of older datasets."""
    if type(value) is ToolCall:
        return value
    if isinstance(value, str):
        with suppress(ValueError):  # other text is refused below
            value = decode_json(value)
    return ToolCall.from_wire(as_mapping(value, "a tool call"))


def _normalize_text(value: object) -> str:
    if isinstance(value, str):
        return value
    if value is None:
        return ""
    messages = normalize_chat(value)
    if chat := [message["role"] for message in messages if message["role"] != "text"]:
        raise ConfigError(
            f"completion mode needs text, not a message of role {chat[0]!r}: pass a str or"
            ' TextMessage objects, or use message_type="chat"'
        )
    return "".join(message_text(message) for message in messages)


def _part_text(part: object) -> str:
    kind = str(field(part, "type") or "part")
    if kind == "text":
        return str(field(part, "text") or "")
    return f"[{kind.removeprefix('input_').removesuffix('_url')}]"


def _shortened(value: object) -> str:
    try:
        text = json.dumps(value, default=repr)
    except (TypeError, ValueError):
        text = repr(value)
    return escape_control(text if len(text) <= 80 else text[:77] + "...")
