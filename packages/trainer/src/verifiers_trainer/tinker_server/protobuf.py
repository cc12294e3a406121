"""The wire format of protocol buffers: a message is a sequence of numbered fields.

*Source*: protobuf.dev/programming-guides/encoding. Groups, which no message of ours has, are
refused. What the numbers mean is each message's own (``messages``).
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator

from verifiers.errors import ModelRefused

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


def fields_of(content: bytes) -> Iterator[tuple[int, int | bytes]]:
    """(number, value) of every field: an int of a varint, else the bytes.

    *Raises* ModelRefused for what is no message.
    """
    position = 0
    while position < len(content):
        key, position = _varint(content, position)
        number, kind = key >> 3, key & 7
        if kind == _VARINT:
            value, position = _varint(content, position)
            yield number, value
            continue
        if kind == _BYTES:
            length, position = _varint(content, position)
        elif kind in (_FIXED32, _FIXED64):
            length = 4 if kind == _FIXED32 else 8
        else:
            raise _malformed()
        if position + length > len(content):
            raise _malformed()
        yield number, content[position : position + length]
        position += length


def _varint(content: bytes, position: int) -> tuple[int, int]:
    """(value, where the next begins); at most 64 bits."""
    value = 0
    for shift in range(0, 70, 7):
        if position >= len(content):
            break
        byte = content[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if not byte & 0x80:
            return value & (2**64 - 1), position
    raise _malformed()


def _malformed() -> ModelRefused:
    return ModelRefused("the body is no protocol buffer", status=400)


def as_bytes(value: int | bytes) -> bytes:
    """Of a field with a length. *Raises* ModelRefused for a number."""
    if isinstance(value, int):
        raise _malformed()
    return value


def as_text(value: int | bytes) -> str:
    """Of a field of text. *Raises* ModelRefused."""
    try:
        return as_bytes(value).decode()
    except UnicodeDecodeError:
        raise _malformed() from None


def as_int(value: int | bytes) -> int:
    """Of a varint, with its sign. *Raises* ModelRefused."""
    if not isinstance(value, int):
        raise _malformed()
    return value - 2**64 if value >= 2**63 else value


def as_double(value: int | bytes) -> float:
    """Of a double. *Raises* ModelRefused."""
    content = as_bytes(value)
    if len(content) != 8:
        raise _malformed()
    number: float = struct.unpack("<d", content)[0]
    return number


def as_ints(value: int | bytes) -> list[int]:
    """Of a field of several varints, packed or one of them alone. *Raises* ModelRefused."""
    if isinstance(value, int):
        return [as_int(value)]
    numbers, position = [], 0
    while position < len(value):
        number, position = _varint(value, position)
        numbers.append(as_int(number))
    return numbers


def entry_of(content: bytes) -> tuple[str, bytes]:
    """(key, encoded value) of an entry of a map from text to messages or doubles."""
    key, value = "", b""
    for number, part in fields_of(content):
        if number == 1:
            key = as_text(part)
        elif number == 2:
            value = as_bytes(part)
    return key, value


def number_field(number: int, value: int) -> bytes:
    """A field with a number that is not negative; nothing for 0, which is the default."""
    return _encoded(number << 3 | _VARINT) + _encoded(value) if value else b""


def bytes_field(number: int, content: bytes | str) -> bytes:
    """A field of bytes, text, or a message."""
    content = content.encode() if isinstance(content, str) else content
    return _encoded(number << 3 | _BYTES) + _encoded(len(content)) + content


def double_field(number: int, value: float) -> bytes:
    """A field with a double."""
    return _encoded(number << 3 | _FIXED64) + struct.pack("<d", value)


def map_fields(number: int, entries: Iterable[tuple[str, bytes]]) -> bytes:
    """A map whose values are encoded as field 2."""
    return b"".join(bytes_field(number, bytes_field(1, key) + value) for key, value in entries)


def _encoded(value: int) -> bytes:
    parts = bytearray()
    while value > 0x7F:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    parts.append(value)
    return bytes(parts)
