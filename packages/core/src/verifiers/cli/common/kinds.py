"""What a setting may hold: text from the command line, or a value from TOML, becomes a checked Python value.

A ``Kind`` answers with the value or a ``ValueError`` whose text ends the sentence "SETTING …". This module knows no
setting by name (``options``).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Kind:
    """One form of value. ``from_text`` reads the command line, ``check`` what that or TOML gave."""

    metavar: str
    check: Callable[[Any], Any]
    from_text: Callable[[str], Any] = str
    is_flag: bool = False
    repeats: bool = False


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"must be a text that is not empty, not {value!r}")
    return value


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"must be true or false, not {value!r}")
    return value


def _number_of(text: str) -> Any:
    try:
        return int(text)
    except ValueError:
        pass
    try:
        return float(text)
    except ValueError:
        return text


def _between(value: Any, low: float | None, high: float | None, what: str) -> Any:
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not is_number or (low is not None and value < low) or (high is not None and value > high):
        raise ValueError(f"must be {what}, not {value!r}")
    return value


def integer(low: int | None = None, *, or_minus_one: str | None = None) -> Kind:
    """A whole number from ``low`` up; -1 too, where ``or_minus_one`` says what it means."""
    what = "a whole number" + (f" of at least {low}" if low is not None else "")
    what += f", or -1 for {or_minus_one}" if or_minus_one else ""

    def check(value: Any) -> int:
        if isinstance(value, float):
            raise ValueError(f"must be {what}, not {value!r}")
        if or_minus_one and value == -1 and not isinstance(value, bool):
            return -1
        return int(_between(value, low, None, what))

    return Kind("N", check, _number_of)


def number(low: float, high: float | None = None) -> Kind:
    """A number from ``low`` to ``high``."""
    what = f"a number from {low:g} to {high:g}" if high is not None else f"a number of at least {low:g}"
    return Kind("X", lambda value: float(_between(value, low, high, what)), _number_of)


def choice(*allowed: str) -> Kind:
    """One of the given words."""

    def check(value: Any) -> str:
        if value not in allowed:
            raise ValueError(f"must be one of {', '.join(allowed)}, not {value!r}")
        return str(value)

    return Kind("|".join(allowed), check)


def _seconds(value: Any) -> float | None:
    if value is None or value == "none":
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"must be a number of seconds above 0, or none for no bound, not {value!r}")
    return float(value)


def _workers(value: Any) -> int:
    if value == "auto":
        return 0
    what = 'a number of processes, 0 for this one, or "auto"'
    return int(_between(value, 0, None, what)) if not isinstance(value, float) else _between(None, 0, None, what)


def _table(value: Any) -> dict[str, Any]:
    """A table; as text, a JSON object (so that TOML can carry what it has no word for, null)."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise ValueError(f"is not JSON ({error}); write an object: '{{\"key\": 1}}'") from None
    if not isinstance(value, Mapping):
        raise ValueError(f"must be a JSON object like '{{\"key\": 1}}', not {value!r}")
    return dict(value)


def _by_header(value: Any, separator: str, form: str) -> dict[str, str]:
    """Texts of the given form, or a table, as header name -> what stands behind the separator."""
    pairs = list(value.items()) if isinstance(value, Mapping) else []
    for line in [] if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else [value]:
        name, found, content = str(line).partition(separator)
        if not found:
            raise ValueError(f"must be {form}, not {line!r}")
        pairs.append((name, content))
    headers = {str(name).strip(): str(content).strip() for name, content in pairs}
    if bad := [name for name in headers if not name or not name.isascii() or not name.isprintable() or " " in name]:
        raise ValueError(f"has a header name that cannot be sent: {bad[0]!r}")
    return headers


def _headers(value: Any) -> dict[str, str]:
    headers = _by_header(value, ":", '"Name: value"')
    if bad := [name for name, content in headers.items() if not content.isprintable()]:
        raise ValueError(f"has a value for {bad[0]} with characters that cannot be sent")
    return headers


def _headers_from_state(value: Any) -> dict[str, str]:
    headers = _by_header(value, "=", "NAME=key")
    if bad := [name for name, key in headers.items() if not key]:
        raise ValueError(f"names no key of the state for {bad[0]}; write {bad[0]}=key")
    return headers


def _names(value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        value = [name.strip() for name in value.split(",")]
    if not isinstance(value, list | tuple) or not all(isinstance(name, str) and name for name in value):
        raise ValueError(f"must be names separated by commas, not {value!r}")
    return tuple(value)


def several(*allowed: str) -> Kind:
    """Some of the given words, separated by commas or as a list; each counts once."""

    def check(value: Any) -> tuple[str, ...]:
        names = tuple(dict.fromkeys(_names(value)))
        if wrong := [name for name in names if name not in allowed]:
            raise ValueError(f"must be of {', '.join(allowed)}, not {wrong[0]!r}")
        return names

    return Kind("A,B", check)


def _path_or_newest(value: Any) -> str:
    """A path; ``""`` (the flag alone, or true) asks for the newest run."""
    if value is True:
        return ""
    if not isinstance(value, str):
        raise ValueError(f"must be a run directory, or stand alone for the newest unfinished run, not {value!r}")
    return value


def _variable(value: Any) -> str:
    if not isinstance(value, str) or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", value):
        raise ValueError("must be the NAME of an environment variable; put the key into a variable, never here")
    return value


TEXT = Kind("TEXT", _text)
VARIABLE = Kind("NAME", _variable)
RUN = Kind("[PATH]", _path_or_newest)
FLAG = Kind("", _flag, is_flag=True)
SECONDS = Kind("SECONDS", _seconds, _number_of)
WORKERS = Kind("N|auto", _workers, _number_of)
TABLE = Kind("JSON", _table)
HEADERS = Kind('"Name: value"', _headers, repeats=True)
HEADERS_FROM_STATE = Kind("NAME=key", _headers_from_state, repeats=True)
NAMES = Kind("A,B", _names)
ANYTHING = Kind("TEXT", lambda value: value)
