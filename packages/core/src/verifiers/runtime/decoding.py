"""Decode JSON and TOML of others: files of run folders, tasks and checkpoints, and models' texts.

The promise: what cannot be used is a ``ValueError``, whatever it is made of. A value nested deeper
than ``MAX_DEPTH`` is refused, because the interpreter's own limit is a ``RecursionError`` that
depends on the caller, and a value just below it breaks the next function that walks through it.
"""

from __future__ import annotations

import json
import tomllib
from os import PathLike
from typing import Any

from verifiers.runtime.bounded import MAX_FILE_BYTES, read_file, read_text

MAX_DEPTH = 100
"""Levels of arrays and objects within each other."""
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


def decode_toml(text: str) -> dict[str, Any]:
    """The table of a TOML text. *Raises* ValueError."""
    try:
        table = tomllib.loads(text)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    check_depth(table)
    return table


def read_json(path: str | PathLike[str], max_bytes: int = MAX_FILE_BYTES) -> Any:
    """The value in a JSON file, as ``bounded.read_file`` reads it. *Raises* OSError; ValueError."""
    return decode_json(read_file(path, max_bytes))


def read_toml(path: str | PathLike[str], max_bytes: int = MAX_FILE_BYTES) -> dict[str, Any]:
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
