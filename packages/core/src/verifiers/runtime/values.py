"""Check the value of a setting against its annotation, and say in words what the annotation allows.

An annotation is a declaration that pydantic reads: ``Annotated[int, Range(ge=1)] | None``, choices
by ``Literal``. The marks below say in ``Annotated`` what a type cannot. Types are exact: an int is
a float, but 2.0 is no whole number, and a bool is neither. Pydantic takes a tenth of a second to
import, so it is imported with the first value: ``--help`` reads annotations alone.

`check_arguments` checks the arguments of a function; a table of settings is read by
``cli.common.reader``.
"""

from __future__ import annotations

import functools
import inspect
import sys
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Annotated, Any, Literal, ParamSpec, TypeVar

from verifiers.errors import ConfigError
from verifiers.runtime.suggest import closest

if TYPE_CHECKING:
    from pydantic import GetCoreSchemaHandler, TypeAdapter
    from pydantic_core import CoreSchema

P = ParamSpec("P")
R = TypeVar("R")
_EXACT = {"strict": True, "arbitrary_types_allowed": True}
"""Pydantic's configuration of every check."""

FINITE = sys.float_info.max
"""In ``Range(le=FINITE)``: infinity is not in the range."""
_NOUNS: dict[Any, str] = {
    **{int: "a whole number", float: "a number", bool: "true or false", str: "a text"},
    **dict.fromkeys((list, Sequence), "a list"),
    **dict.fromkeys((dict, Mapping), "a table"),
}


# --- marks ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Range:
    """The bounds of a number, or the least length of a text or a list; NaN is in no range, not in
    ``Range()`` either. As ``pydantic.Field``, which is slow to import."""

    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    min_length: int | None = None
    noun: str = ""
    """Words for the allowed values, in place of those of type and bounds."""

    def __get_pydantic_core_schema__(
        self, source: object, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        from pydantic import AfterValidator, Field

        bounds: dict[str, Any] = {
            name: bound for name, bound in asdict(self).items() if bound is not None
        }
        del bounds["noun"]
        check = Field(**bounds) if bounds else AfterValidator(_equal_to_itself)
        return handler.generate_schema(Annotated[source, check])

    def holds(self, value: Any) -> bool:
        """Whether a number, or a text by its length, is within the bounds.

        >>> Range(ge=1).holds(1), Range(gt=0.0).holds(0.0), Range().holds(float("nan"))
        (True, False, False)
        """
        if self.min_length is not None:
            return len(value) >= self.min_length
        return (
            value == value
            and (self.ge is None or value >= self.ge)
            and (self.gt is None or value > self.gt)
            and (self.le is None or value <= self.le)
        )

    def __str__(self) -> str:
        """The bounds in words, after a noun."""
        if self.min_length:
            return " that is not empty"
        if self.gt is not None:
            return f" above {_digits(self.gt)}"
        if self.ge is None:
            return ""
        if self.le is None or self.le == FINITE:
            return f" of at least {_digits(self.ge)}"
        return f" from {_digits(self.ge)} to {_digits(self.le)}"


def _digits(bound: float) -> str:
    """A bound as a user writes it: ``1000000``, ``1e-06``."""
    return str(int(bound)) if bound == int(bound) else f"{bound:g}"


def _equal_to_itself(value: R) -> R:
    if value != value:
        raise AssertionError("NaN")
    return value


@dataclass(frozen=True, slots=True)
class MinusOne:
    """After ``Range``: -1 is allowed in addition to a whole number in the range, with this
    meaning."""

    meaning: str

    def __get_pydantic_core_schema__(
        self, source: object, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        from pydantic_core import core_schema

        return core_schema.union_schema(
            [core_schema.int_schema(strict=True, ge=-1, le=-1), handler(source)]
        )

    def __str__(self) -> str:
        return f", or -1 for {self.meaning}"


@dataclass(frozen=True, slots=True)
class Form:
    """A value with a notation of its own, such as ``"Name: value"`` for a header."""

    metavar: str
    """Placeholder of the value in ``--help``."""
    read: Callable[[Any], Any]
    """Parses the value; *raises* ``ValueError`` whose text ends the sentence "SETTING …"."""
    schema: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """The values that a TOML file may have, as a JSON schema."""
    repeats: bool = False
    """Whether the flag may be repeated."""
    words: tuple[str, ...] = ()
    """What a shell completes."""

    def __get_pydantic_core_schema__(self, source: object, handler: object) -> CoreSchema:
        from pydantic_core import core_schema

        return core_schema.no_info_plain_validator_function(self.read)

    def __get_pydantic_json_schema__(self, core: object, handler: object) -> dict[str, object]:
        return dict(self.schema)


class Also:
    """Other names of the setting, with the same value."""

    def __init__(self, *names: str):
        self.names = names


@dataclass(frozen=True, slots=True)
class Flag:
    """A parameter of a constructor that a command has too, with its ``--help`` text."""

    help: str


@dataclass(frozen=True, slots=True)
class Option:
    """What a setting has beside its annotation and default: how a command shows it, and whether it
    is part of what makes two runs differ."""

    help: str
    """Its ``--help`` text; empty: no command has it."""
    flags: str
    """Its command-line options, ``-m --model``. Without a long one it has that of its key."""
    key: str
    """Its name in files; empty: that of the field."""
    free: str
    """Why it may differ when a run resumes; empty: it may not."""
    metavar: str = ""
    """Placeholder of its value in ``--help``, in place of that of its type."""

    def long(self, key: str) -> str:
        """All its command-line options."""
        return self.flags if "--" in self.flags else f"{self.flags} --{key.replace('_', '-')}"


def option(
    default: object,
    help_: str = "",
    flags: str = "",
    *,
    key: str = "",
    free: str = "",
    metavar: str = "",
) -> Any:
    """A setting of a dataclass with its default, which is a new table for each object, and its
    `Option`."""
    metadata = {"option": Option(help_, flags, key, free, metavar)}
    if isinstance(default, dict):
        return field(default_factory=dict, metadata=metadata)
    return field(default=default, metadata=metadata)


def with_default(owner: type[Any], name: str, default: object) -> Any:
    """The setting ``name`` of a base class, with another default."""
    return field(default=default, metadata=owner.__dataclass_fields__[name].metadata)


def options_of(owner: type) -> dict[str, Option]:
    """Field -> its `Option`, of a dataclass."""
    return {each.name: each.metadata["option"] for each in fields(owner)}


Number = Annotated[int, Range(ge=0)]
Count = Annotated[int, Range(ge=1)]
Limit = Annotated[float, Range(gt=0.0, le=FINITE, noun="a number above 0")]
Finite = Annotated[float, Range(ge=-FINITE, le=FINITE, noun="a number")]
Positive = Annotated[float, Range(gt=0.0, le=FINITE, noun="a positive number")]
CountOrAll = Annotated[int, Range(ge=1), MinusOne("all")]


# --- reading an annotation ------------------------------------------------------------------------


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


@functools.cache
def adapter(hint: object) -> TypeAdapter[Any]:
    """Pydantic's check of an annotation."""
    from pydantic import TypeAdapter

    return TypeAdapter(hint, config=_EXACT)  # type: ignore[arg-type]


def convert(value: object, hint: object, in_python: bool = False) -> object:
    """Return the value as pydantic reads it: by its notation if it has any; a whole number with a
    range of floats is a float. ``in_python``: the value can be None, which a file cannot say.

    *Raises* ``ValueError`` whose text ends the sentence "SETTING …".

    >>> convert(1, Annotated[float, Range(ge=0.0)]), convert(["q_proj"], list[str] | str | None)
    (1.0, ['q_proj'])
    >>> convert(True, int)
    Traceback (most recent call last):
        ...
    ValueError: must be a whole number, not True
    """
    if _is_plain(value, hint):
        return value
    from pydantic import ValidationError

    try:
        read = adapter(hint).validate_python(value)
        is_as_given = type(value) is int and not any(
            isinstance(part, Range | Form) for part in parts(hint)
        )
        return value if is_as_given else read
    except ValidationError as error:
        for problem in error.errors(include_url=False, include_input=False):
            if problem["type"] == "value_error":  # the sentence of a notation
                raise ValueError(str(problem["ctx"]["error"])) from None
        near = closest(value, choices(hint)) if isinstance(value, str) else ""
        or_none = ", or None" if in_python and type(None) in parts(hint) else ""
        raise ValueError(f"must be {describe(hint)}{or_none}, not {value!r}{near}") from None


def _is_plain(value: object, hint: object) -> bool:
    """Whether a value is allowed as it is, without a notation: what pydantic would return too, whose
    import takes a worker process a fifth of its start."""
    if not all(isinstance(part, _PLAIN_PARTS) or _is_literal(part) for part in parts(hint)):
        return False
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return any(_is_plain(value, member) for member in typing.get_args(hint))
    ranges: list[Range] = []
    if typing.get_origin(hint) is Annotated:
        hint, *marks = typing.get_args(hint)
        ranges = [mark for mark in marks if isinstance(mark, Range)]
    if _is_literal(hint):
        return any(type(value) is str and value == text for text in typing.get_args(hint))
    is_of_type = type(value) is hint and hint in (bool, int, float, str, type(None))
    return is_of_type and all(bounds.holds(value) for bounds in ranges)


_PLAIN_PARTS = (type, Range, Flag, Also)
"""What an annotation may have beside literals for a value to be looked at without pydantic."""


def _is_literal(hint: object) -> bool:
    return typing.get_origin(hint) is Literal


def checked(name: str, value: object, hint: object) -> Any:
    """The argument ``name`` of a call, as `convert` reads it. *Raises* ConfigError."""
    try:
        return convert(value, hint, in_python=True)
    except ValueError as error:
        raise ConfigError(f"{name} {error}", key=name) from None


def fits(value: object, hint: object) -> bool:
    """Return whether a value has the type of an annotation and is in its range, which NaN never is.

    >>> fits(1, float), fits(True, int), fits(0, Annotated[int, Range(ge=1)] | None)
    (True, False, False)
    """
    try:
        convert(value, hint)
    except ValueError:
        return False
    return True


def describe(hint: object) -> str:
    """Describe the values that an annotation allows; types that TOML cannot express are left out.

    >>> describe(int | None), describe(list[str] | str | None), describe(Literal["a", "b"])
    ('a whole number', 'a list or a text', 'one of a, b')
    >>> describe(Annotated[int, Range(ge=1), MinusOne("all")] | None)
    'a whole number of at least 1, or -1 for all'
    """
    return " or ".join(dict.fromkeys(_nouns(hint))) or "another value"


def choices(hint: object) -> list[str]:
    """The texts that ``Literal``s in an annotation allow."""
    literals = [part for part in parts(hint) if typing.get_origin(part) is Literal]
    return [value for part in literals for value in typing.get_args(part) if isinstance(value, str)]


def _nouns(hint: object) -> Iterator[str]:
    origin, members = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        marks = [mark for mark in members[1:] if isinstance(mark, Range | MinusOne)]
        nouns = [mark.noun for mark in marks if isinstance(mark, Range) and mark.noun]
        # a noun of its own says the range
        bounds = "".join(str(mark) for mark in marks if not (nouns and isinstance(mark, Range)))
        yield from (noun + bounds for noun in nouns or _nouns(members[0]))
    elif origin in (typing.Union, types.UnionType):
        for member in members:
            yield from _nouns(member)
    elif origin is Literal:
        yield f"one of {', '.join(map(str, members))}"
    elif (plain := origin or hint) in _NOUNS:
        is_of_texts = plain in (dict, Mapping) and members[1:] == (str,)
        yield _NOUNS[plain] + (" of texts" if is_of_texts else "")


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
            checked(name, value, hints.get(name, Any))
        return function(*args, **kwargs)

    return call
