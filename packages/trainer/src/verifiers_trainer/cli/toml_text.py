"""A document as TOML text. Knows no setting, and imports nothing heavy."""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Mapping
from typing import Any


def write_toml(document: Mapping[str, Any]) -> str:
    """A TOML document: plain keys first, then one table per nested mapping; mappings inside tables' values inline.

    >>> print(write_toml({"model": "x", "env": {"id": "y", "args": {"a": [1, 2.5]}}}), end="")
    model = "x"
    <BLANKLINE>
    [env]
    id = "y"
    <BLANKLINE>
    [env.args]
    a = [1, 2.5]
    """
    return "\n".join(_tables(document, ())).lstrip("\n") + "\n"


def _tables(table: Mapping[str, Any], above: tuple[str, ...]) -> list[str]:
    nested = {key: value for key, value in table.items() if isinstance(value, Mapping) and len(above) < 2}
    lines = [f"{_key(key)} = {_value(value)}" for key, value in table.items() if key not in nested]
    if above and lines:
        lines = ["", f"[{'.'.join(map(_key, above))}]", *lines]
    for key, value in nested.items():
        lines += _tables(value, (*above, key))
    return lines


def _key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _text(key)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, datetime.datetime | datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{_key(key)} = {_value(member)}" for key, member in value.items()) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_value, value)) + "]"
    raise TypeError(f"TOML has no {type(value).__name__}")


def _text(text: str) -> str:
    """A basic string: JSON's escapes are TOML's, except that TOML also wants DEL escaped."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
