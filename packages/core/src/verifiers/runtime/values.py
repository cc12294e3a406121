"""Check the value of a setting against its annotation, and say in words what the annotation allows.

An annotation is a declaration: ``Annotated[int, Meta(ge=1)] | None`` with ranges by
``msgspec.Meta`` and choices by ``Literal``. `MinusOne` in ``Annotated`` is what msgspec cannot say.
`check_arguments` checks the arguments of a function.
"""

from __future__ import annotations

import functools
import inspect
import math
import sys
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, ParamSpec, TypeVar

import msgspec
from msgspec import Meta

from verifiers.errors import ConfigError

P = ParamSpec("P")
R = TypeVar("R")

FINITE = sys.float_info.max
"""In ``Meta(le=FINITE)``: infinity is not in the range."""
_NOUNS: dict[Any, str] = {
    **{int: "a whole number", float: "a number", bool: "true or false", str: "a text"},
    **dict.fromkeys((list, Sequence), "a list"),
    **dict.fromkeys((dict, Mapping), "a table"),
}


@dataclass(frozen=True, slots=True)
class MinusOne:
    """In ``Annotated``: -1 is allowed in addition to the range of a whole number, with this
    meaning."""

    meaning: str


Number = Annotated[int, Meta(ge=0)]
Count = Annotated[int, Meta(ge=1)]
Positive = Annotated[float, Meta(gt=0.0, le=FINITE, description="a positive number")]
CountOrAll = Annotated[int, Meta(ge=1), MinusOne("all")]


def parts(hint: object) -> Iterator[Any]:
    """Yield the types in an annotation, ``Literal``s as they are, and the metadata of every
    ``Annotated``."""
    members = typing.get_args(hint)
    if typing.get_origin(hint) is Annotated:
        yield from members[1:]
        yield from parts(members[0])
    elif typing.get_origin(hint) in (typing.Union, types.UnionType):
        for member in members:
            yield from parts(member)
    else:
        yield hint


def fits(value: object, hint: object) -> bool:
    """Return whether a value has the type of an annotation and is in its range, which NaN never is.

    An int is a float, but 2.0 is no whole number, and a bool is neither.

    >>> fits(1, float), fits(True, int), fits(0, Annotated[int, Meta(ge=1)] | None)
    (True, False, False)
    """
    marks = [part for part in parts(hint) if isinstance(part, Meta | MinusOne)]
    if type(value) is int and value == -1 and any(isinstance(mark, MinusOne) for mark in marks):
        return True
    if isinstance(value, float):
        value = float(value)  # msgspec refuses subclasses, such as those of numpy
    try:
        msgspec.convert(value, hint)
    except msgspec.ValidationError:
        return False
    return not (marks and isinstance(value, float) and math.isnan(value))


def describe(hint: object) -> str:
    """Describe the values that an annotation allows; types that TOML cannot express are left out.

    >>> describe(int | None), describe(list[str] | str | None), describe(Literal["a", "b"])
    ('a whole number', 'a list or a text', 'one of a, b')
    >>> describe(Annotated[int, Meta(ge=1), MinusOne("all")] | None)
    'a whole number of at least 1, or -1 for all'
    """
    return " or ".join(dict.fromkeys(_nouns(hint))) or "another value"


def _nouns(hint: object) -> Iterator[str]:
    origin, members = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        described = [
            mark.description for mark in members[1:] if isinstance(mark, Meta) and mark.description
        ]
        marks = "".join(_range(mark) for mark in members[1:])
        yield from (noun + marks for noun in described or _nouns(members[0]))
    elif origin in (typing.Union, types.UnionType):
        for member in members:
            yield from _nouns(member)
    elif origin is Literal:
        yield f"one of {', '.join(map(str, members))}"
    elif (plain := origin or hint) in _NOUNS:
        yield _NOUNS[plain]


def _range(mark: object) -> str:
    if isinstance(mark, MinusOne):
        return f", or -1 for {mark.meaning}"
    if not isinstance(mark, Meta) or mark.description:
        return ""
    if mark.min_length:
        return " that is not empty"
    if mark.gt is not None:
        return f" above {mark.gt:g}"
    if mark.ge is None:
        return ""
    return f" of at least {mark.ge:g}" if mark.le is None else f" from {mark.ge:g} to {mark.le:g}"


def check_arguments(function: Callable[P, R]) -> Callable[P, R]:
    """The function with a check of its arguments against their annotations, before it runs. It
    *raises* ConfigError.

    >>> @check_arguments
    ... def rows(count: Count, seed: int = 0) -> list[int]:
    ...     return list(range(seed, seed + count))
    >>> rows(2)
    [0, 1]
    >>> rows(0)
    Traceback (most recent call last):
        ...
    verifiers.errors.ConfigError: count must be a whole number of at least 1, not 0
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        hints = typing.get_type_hints(function, include_extras=True)
        for name, value in inspect.signature(function).bind(*args, **kwargs).arguments.items():
            if not fits(value, hints.get(name, Any)):
                raise ConfigError(
                    f"{name} must be {describe(hints[name])}, not {value!r}", key=name
                )
        return function(*args, **kwargs)

    return call
