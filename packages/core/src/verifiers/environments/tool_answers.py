"""Turn the result of a tool into the message for its call, truncated to a limit; the limits of what
a server says of its tools.

This module calls no tool and depends on no environment.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence

from verifiers.data.images import image_url, is_image
from verifiers.data.messages import content_part
from verifiers.errors import ConfigError, ToolCallError
from verifiers.types import Message, ToolMessage

PARTS = ("text", "image_url", "input_audio")
MAX_DESCRIPTION_CHARS = 20_000
"""Of a tool of a server; a longer description is cut."""
MAX_DEFINITIONS_CHARS = 2**20
"""Of all tools of a server together, which are in every request and in every saved row."""


def listed(result: object, limit: int) -> object:
    """At most ``limit`` values of an iterator, whose text would be its address; another result
    unchanged.

    >>> listed(iter("abc"), 2), listed("abc", 2)
    (['a', 'b'], 'abc')
    """
    if isinstance(result, Iterator) and type(result).__str__ is object.__str__:
        return list(itertools.islice(result, limit))
    return result


async def all_listed(result: object, limit: int) -> object:
    """``listed``, of an asynchronous iterator too."""
    if not isinstance(result, AsyncIterator):
        return listed(result, limit)
    values: list[object] = []
    async for value in result:
        values.append(value)
        if len(values) == limit:
            break
    return values


def cut_description(description: str) -> str:
    """What a server says of a tool, up to ``MAX_DESCRIPTION_CHARS``."""
    if len(description) <= MAX_DESCRIPTION_CHARS:
        return description
    return cut(description, MAX_DESCRIPTION_CHARS)


def check_definitions(tools: Sequence[Mapping[str, object]]) -> None:
    """*Raises* ValueError for tools of a server that are longer than ``MAX_DEFINITIONS_CHARS``."""
    sizes = [len(json.dumps(tool, default=str)) for tool in tools]
    if sum(sizes) > MAX_DEFINITIONS_CHARS:
        longest = sizes.index(max(sizes))
        raise ValueError(
            f"their {len(sizes)} tools take {sum(sizes):,} characters of every request and every saved"
            f" row, {str(tools[longest].get('name'))[:64]!r} alone {sizes[longest]:,}; at most"
            f" {MAX_DEFINITIONS_CHARS:,} may"
        )


def as_answer(result: object, tool_call_id: str) -> Message:
    """Return a ``Message`` unchanged, an image, or a list of content parts and images, as content, a
    dict as JSON, everything else as ``str(result)``. *Raises* ToolCallError for an image that
    cannot be read, or is too large.

    >>> as_answer(4, "call_1")
    {'role': 'tool', 'content': '4', 'tool_call_id': 'call_1'}
    """
    if isinstance(result, Message):
        lacks_id = result.get("role") == "tool" and not result.get("tool_call_id")
        return ToolMessage(result.get("content", ""), tool_call_id) if lacks_id else result
    is_alone = is_image(result) or image_url(result) is not None
    results = [result] if is_alone else result
    if not isinstance(results, list) or not _are_parts(results):
        return ToolMessage(_text(result), tool_call_id)
    try:
        return ToolMessage([content_part(part) for part in results], tool_call_id)
    except ConfigError as error:
        raise ToolCallError(str(error)) from error


def _text(result: object) -> str:
    """JSON for a dict, if it can be written as JSON; else ``str(result)``."""
    if isinstance(result, dict):
        with contextlib.suppress(TypeError, ValueError):
            return json.dumps(result, ensure_ascii=False)
    return str(result)


def bounded(message: Message, max_chars: int) -> Message:
    """Truncate the text of a message to ``max_chars`` characters, with a note of the cut; images
    stay whole."""
    content = message.get("content")
    if isinstance(content, str) and len(content) > max_chars:
        return Message({**message, "content": cut(content, max_chars)})
    if not isinstance(content, list) or sum(map(_text_length, content)) <= max_chars:
        return message
    parts, remaining = [], max_chars
    for part in content:
        length = _text_length(part)
        parts.append({**part, "text": cut(part["text"], remaining)} if length > remaining else part)
        remaining = max(0, remaining - length)
    return Message({**message, "content": parts})


def cut(text: str, max_chars: int) -> str:
    """Return the start and the end of a text, ``max_chars`` in total, around a note of the omitted
    length.

    >>> cut("0123456789", 4)
    '01\\n[... cut: 6 of 10 characters left out ...]\\n89'
    """
    missing, end = len(text) - max_chars, max_chars // 2
    note = f"\n[... cut: {missing} of {len(text)} characters left out ...]\n"
    return text[: max_chars - end] + note + (text[-end:] if end else "")


def _are_parts(results: Sequence[object]) -> bool:
    """Whether these are content parts and images, with texts between them or without."""
    parts = [part for part in results if not isinstance(part, str)]
    return bool(parts) and all(map(_is_part, parts))


def _is_part(part: object) -> bool:
    is_part = isinstance(part, Mapping) and part.get("type") in PARTS and part["type"] in part
    return is_part or is_image(part)


def _text_length(part: object) -> int:
    text = part.get("text") if isinstance(part, Mapping) else None
    return len(text) if isinstance(text, str) else 0
