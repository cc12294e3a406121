"""Decode JSON and TOML of others: files of run folders, tasks and checkpoints, and models' texts.

The promise: what cannot be used is a ``ValueError``, whatever it is made of. A value nested deeper
than ``MAX_DEPTH`` is refused, because the interpreter's own limit is a ``RecursionError`` that
depends on the caller, and a value just below it breaks the next function that walks through it.
What a peer sends (a request, a reply, a frame, the arguments of a call) is bounded by the number of
its values too, before they are made: ``{},`` takes twenty times its bytes in memory.
"""

from __future__ import annotations

import json
import re
import tomllib
from os import PathLike
from typing import Any, TypeVar

import msgspec

from verifiers.runtime.bounded import MAX_FILE_BYTES, read_file, read_text, size_text

MAX_DEPTH = 100
"""Levels of arrays and objects within each other."""
MAX_VALUES = 500_000
"""Brackets and commas outside of texts; so many small objects take about 100 MB."""
MAX_REPLY_VALUES = 2_000_000
"""Of a reply with the data of its tokens, which are mostly numbers."""
T = TypeVar("T")
_CHUNK_BYTES = 2**16
_NO_MARKS = bytes(set(range(256)) - set(b'"{[,'))
_TOO_DEEP = f"it is nested deeper than {MAX_DEPTH} levels"


def decode_json(content: str | bytes) -> Any:
    """The value of a JSON text. *Raises* ValueError.

    >>> decode_json('{"a": [1, null]}')
    {'a': [1, None]}
    >>> decode_json("[" * 5000 + "]" * 5000)
    Traceback (most recent call last):
    ...
    ValueError: it is nested deeper than 100 levels
    """
    try:
        value = json.loads(content)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    check_depth(value)
    return value


def decode_message(
    content: str | bytes, max_values: int = MAX_VALUES, max_bytes: int = MAX_FILE_BYTES
) -> Any:
    """The value of a JSON text that a peer sent. *Raises* ValueError."""
    if len(content) > max_bytes:
        raise ValueError(f"it is longer than {size_text(max_bytes)}")
    check_values(content, max_values)
    return decode_json(content)


def check_values(content: str | bytes, max_values: int = MAX_VALUES) -> None:
    """*Raises* ValueError for a JSON text that becomes more values than ``max_values``.

    >>> check_values('["{,,,,,"]', 2)
    >>> check_values('[{}, {}]', 2)
    Traceback (most recent call last):
    ...
    ValueError: it has more than 2 values
    """
    if len(content) <= max_values:  # each takes a character
        return
    encoded = content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content
    if sum(map(encoded.count, (b"{", b"[", b","))) <= max_values:
        return
    marks = encoded.replace(b"\\\\", b"").replace(b'\\"', b"").translate(None, _NO_MARKS)
    num_values = in_text = 0
    for start in range(0, len(marks), _CHUNK_BYTES):
        pieces = marks[start : start + _CHUNK_BYTES].split(b'"')
        num_values += sum(map(len, pieces[in_text::2]))
        in_text ^= (len(pieces) - 1) % 2
        if num_values > max_values:
            raise ValueError(f"it has more than {max_values:,} values")


def decode_toml(text: str) -> dict[str, object]:
    """The table of a TOML text. *Raises* ValueError.

    >>> decode_toml("a = True")
    Traceback (most recent call last):
    ...
    ValueError: Invalid value (at line 1, column 5): TOML writes true, not True
    """
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        number = re.search(r"at line (\d+)", str(error))
        line = text.splitlines()[int(number[1]) - 1] if number else ""
        if word := re.search(r"=\s*(True|False|None)\b", line):
            instead = "has no None: leave the key out"
            if word[1] != "None":
                instead = f"writes {word[1].lower()}, not {word[1]}"
            raise ValueError(f"{error}: TOML {instead}") from None
        if '"' in line and "\\" in line.partition('"')[2]:
            raise ValueError(
                f"{error}: in double quotes a backslash begins an escape; write a path of Windows"
                " in single quotes, or with /"
            ) from None
        raise
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    check_depth(table)
    return table


def read_json(path: str | PathLike[str], max_bytes: int = MAX_FILE_BYTES) -> Any:
    """The value in a JSON file, as ``bounded.read_file`` reads it. *Raises* OSError; ValueError."""
    return decode_json(read_file(path, max_bytes))


def read_record(path: str | PathLike[str], kind: type[T], max_bytes: int = MAX_FILE_BYTES) -> T:
    """The object in a JSON file as ``kind``, a ``msgspec.Struct`` or a ``TypedDict``: its declared
    fields, checked; others are left out. *Raises* OSError; ValueError, which names file and field.
    """
    try:
        return msgspec.convert(read_json(path, max_bytes), kind)
    except msgspec.ValidationError as error:
        raise ValueError(f"{path}: {error}") from None


def read_toml(path: str | PathLike[str], max_bytes: int = MAX_FILE_BYTES) -> dict[str, object]:
    """The table in a TOML file, as ``bounded.read_text`` reads it. *Raises* OSError; ValueError."""
    return decode_toml(read_text(path, max_bytes))


def check_depth(value: object) -> None:
    """*Raises* ValueError for decoded dicts and lists that are nested too deeply."""
    level: list[Any] = [value] if isinstance(value, dict | list) else []
    for _ in range(MAX_DEPTH):
        if not level:
            return
        level = [
            member
            for container in level
            for member in (container.values() if type(container) is dict else container)
            if type(member) in (dict, list)
        ]
    if level:
        raise ValueError(_TOO_DEEP)
