"""Whether a TOML value fits the annotation of a setting, and what to say when it does not."""

from __future__ import annotations

import enum
import types
import typing
from typing import Any

_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"} | {
    list: "a list",
    dict: "a table",
}


def fits(value: Any, hint: Any) -> bool:
    """Whether ``value`` can be given for a field annotated ``hint``. A whole number is a number; a bool is neither.

    >>> fits(1, float), fits(True, int), fits("a", int | None), fits(["q_proj"], list[str] | str | None)
    (True, False, False, True)
    """
    if hint is Any:
        return True
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return any(fits(value, member) for member in typing.get_args(hint))
    if typing.get_origin(hint) is typing.Literal:
        return value in typing.get_args(hint)
    if isinstance(value, bool):
        return hint is bool
    if hint is float:
        return isinstance(value, int | float)
    plain = typing.get_origin(hint) or hint
    if plain is list and isinstance(value, list) and typing.get_args(hint):
        return all(fits(member, typing.get_args(hint)[0]) for member in value)
    return isinstance(plain, type) and isinstance(value, plain)


def describe(hint: Any) -> str:
    """What fits, in words; types that TOML cannot express are left out.

    >>> describe(int | None), describe(list[str] | str | None), describe(bool)
    ('a whole number', 'a list or a text', 'true or false')
    """
    members = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    said: list[str] = []
    for member in members:
        plain = typing.get_origin(member) or member
        if isinstance(plain, type) and issubclass(plain, enum.Enum):
            said.append("one of " + ", ".join(str(choice.value) for choice in plain))
        elif plain in _WORDS:
            said.append(_WORDS[plain])
    return " or ".join(dict.fromkeys(said)) or "another value"
