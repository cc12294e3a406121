"""Read settings: TOML files and command-line arguments -> assignments with their source -> checked, typed values.

An `Assignment` is one key with one value, ``configs/x.toml:12: trainer.args.max_steps = 10``. The type hint of a
dataclass field defines the allowed values; `Bounds` and `Form` in ``Annotated`` narrow it. Problems are collected as
sentences, so that a command reports all of them at once. The commands define which keys exist.
"""

from __future__ import annotations

import enum
import math
import re
import tomllib
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verifiers.errors import ConfigError, VerifiersError
from verifiers.runtime.bounded import TooLong, read_text
from verifiers.runtime.suggest import SIMILAR, close_match, closest


@dataclass(frozen=True, slots=True)
class Assignment:
    """One key with its value and source: ``Assignment(("trainer", "args", "max_steps"), 10, "x.toml:12")``."""

    path: tuple[str, ...]
    value: Any
    place: str
    """``file:line``, or the flag as it was typed."""
    text: str | None = None
    """The value as typed on the command line; None when it comes from a file."""

    @property
    def key(self) -> str:
        """The dotted key."""
        return ".".join(self.path)

    @property
    def is_flag(self) -> bool:
        """Whether it comes from the command line."""
        return self.place.startswith("--")

    def problem(self, sentence: str) -> str:
        """A sentence about this assignment, prefixed with its place."""
        return f"{self.place}: {sentence}"


# --- TOML files -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TomlFile:
    """A parsed TOML file: its document, and the line of each key."""

    path: Path
    document: dict[str, Any]
    lines: Mapping[tuple[str | int, ...], int]

    @classmethod
    def read(cls, path: str | Path) -> TomlFile:
        """*Raises* ``ConfigError``: the file cannot be read, or is not valid TOML."""
        path = Path(path)
        try:
            text = read_text(path)
            return cls(path, tomllib.loads(text), key_lines(text))
        except FileNotFoundError as error:
            files = sorted(path.parent.glob("*.toml")) if path.parent.is_dir() else []
            near = f"; {path.parent} holds {', '.join(file.name for file in files[:8])}" if files else ""
            raise ConfigError(f"{path} cannot be read: {error.strerror}{near}", path=str(path)) from None
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"{path} is not valid TOML: {error}", path=str(path)) from error
        except (OSError, UnicodeDecodeError, TooLong) as error:
            reason = getattr(error, "strerror", None) or error
            raise ConfigError(f"{path} cannot be read: {reason}", path=str(path)) from error

    def place(self, *keys: str | int) -> str:
        """``file:line`` of the key, or of the nearest table above it; numbers count the tables of an array from 0."""
        for length in range(len(keys), 0, -1):
            if keys[:length] in self.lines:
                return f"{self.path}:{self.lines[keys[:length]]}"
        return str(self.path)


_HEADER = re.compile(r"\s*(\[\[?)\s*([^\]]+?)\s*\]\]?\s*(?:#.*)?$")
_KEY = re.compile(r"""\s*((?:[\w-]+|"[^"]*"|'[^']*')(?:\s*\.\s*(?:[\w-]+|"[^"]*"|'[^']*'))*)\s*=""")


def key_lines(text: str) -> dict[tuple[str | int, ...], int]:
    """Path of a key -> number of the first line that sets it, from 1.

    A key in an array of tables has two paths: with the index of its table, and without (the first table that has it).
    Keys inside inline tables have no path.

    >>> key_lines('model = "x"\\n[trainer.args]\\nmax_steps = 10')
    {('model',): 1, ('trainer',): 2, ('trainer', 'args'): 2, ('trainer', 'args', 'max_steps'): 3}
    >>> key_lines("[[eval]]\\nn = 1\\n[[eval]]\\nn = 2")[("eval", 1, "n")]
    4
    """
    lines: dict[tuple[str | int, ...], int] = {}
    tables: dict[tuple[str, ...], int] = {}
    table: tuple[str, ...] = ()
    quote = ""

    def note(path: tuple[str, ...], number: int) -> None:
        numbered: list[str | int] = []
        for depth, name in enumerate(path, 1):
            numbered.append(name)
            lines.setdefault(tuple(numbered), number)
            if path[:depth] in tables:
                numbered.append(tables[path[:depth]])
                lines.setdefault(tuple(numbered), number)
            lines.setdefault(path[:depth], number)

    for number, line in enumerate(text.splitlines(), 1):
        if quote:  # inside a multi-line string
            quote = "" if quote in line else quote
            continue
        if match := _HEADER.match(line):
            table = _split(match[2])
            if match[1] == "[[":
                tables[table] = tables.get(table, -1) + 1
            note(table, number)
        elif match := _KEY.match(line):
            note((*table, *_split(match[1])), number)
        quote = next((q for q in ('"""', "'''") if line.count(q) % 2), "")
    return lines


def _split(dotted: str) -> tuple[str, ...]:
    return tuple(part.strip().strip("\"'") for part in re.findall(r'"[^"]*"|\'[^\']*\'|[^.]+', dotted))


# --- the command line -------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Words:
    """The arguments of a command line by kind: files, assignments, and the rest in its order."""

    files: list[str] = field(default_factory=list)
    assignments: list[Assignment] = field(default_factory=list)
    rest: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


_OPTION = re.compile(r"--|@|-[a-zA-Z]$")
"""A word that is not the value of the flag before it (``-5`` is a value)."""


def read_words(words: Sequence[str], is_setting: Callable[[str], bool]) -> Words:
    """Sort ``@ FILE``, ``@FILE``, ``--a.b VALUE``, ``--a.b=VALUE``, ``--a.b`` (true) and ``--no-a.b`` (false).

    ``is_setting``: whether a flag, including its dashes, assigns a setting; other words are the rest.

    >>> words = read_words(["@", "x.toml", "--trainer.args.max-steps", "10", "-q"], lambda flag: "." in flag)
    >>> words.files, [(one.key, one.value) for one in words.assignments], words.rest
    (['x.toml'], [('trainer.args.max_steps', 10)], ['-q'])
    """
    read, remaining = Words(), list(words)
    while remaining:
        word = remaining.pop(0)
        flag, equals, text = word.partition("=")
        if word.startswith("@"):
            if name := word[1:] or (remaining.pop(0) if remaining else ""):
                read.files.append(name)
            else:
                read.problems.append("@ must be followed by the name of a TOML file")
        elif flag.startswith("--") and len(flag) > 2 and is_setting(flag):
            name = flag.removeprefix("--")
            if not equals and remaining and not _OPTION.match(remaining[0]):
                text, equals = remaining.pop(0), "="
            value = parse_value(text) if equals else not name.startswith("no-")
            path = tuple(part.replace("-", "_") for part in name.removeprefix("" if equals else "no-").split("."))
            read.assignments.append(Assignment(path, value, flag, text if equals else None))
        else:
            read.rest.append(word)
    return read


def parse_value(text: str) -> Any:
    """The text parsed as a TOML value, or the text itself when that fails.

    >>> parse_value("5"), parse_value("[1, 2]"), parse_value("builtin:tiny"), parse_value("true")
    (5, [1, 2], 'builtin:tiny', True)
    """
    if "\n" in text:
        return text
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def unknown_option(flag: str, known: Iterable[str], command: str) -> str:
    """The error message for a flag that ``command`` does not have."""
    match = close_match(flag, known, SIMILAR) if flag.startswith("--") else None
    return f"{flag}: no such option" + (f", did you mean {match}?" if match else f" (see {command} --help)")


# --- values -----------------------------------------------------------------------------------------------------------

_NOUNS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a text",
    list: "a list",
    dict: "a table",
}


@dataclass(frozen=True, slots=True)
class Bounds:
    """In ``Annotated``: the range of a number, which must be finite. ``Annotated[int, Bounds(1)]``."""

    low: float | None = None
    high: float | None = None
    exclusive: bool = False
    """Whether ``low`` itself is excluded."""
    minus_one: str | None = None
    """Meaning of -1, when it is allowed in addition to the range."""

    def describe(self, noun: str) -> str:
        """The range in words.

        >>> Bounds(1, minus_one="all").describe("a whole number")
        'a whole number of at least 1, or -1 for all'
        """
        if self.low is not None and self.high is not None:
            noun += f" from {self.low:g} to {self.high:g}"
        elif self.low is not None:
            noun += f" above {self.low:g}" if self.exclusive else f" of at least {self.low:g}"
        return noun + (f", or -1 for {self.minus_one}" if self.minus_one else "")

    def holds(self, value: float) -> bool:
        """Whether a number lies inside."""
        if self.minus_one and value == -1:
            return True
        too_low = self.low is not None and (value <= self.low if self.exclusive else value < self.low)
        return math.isfinite(value) and not too_low and (self.high is None or value <= self.high)


@dataclass(frozen=True, slots=True)
class Form:
    """In ``Annotated``: a value with a special notation, such as ``"Name: value"`` for a header."""

    metavar: str
    """Placeholder of the value in ``--help``."""
    read: Callable[[Any], Any]
    """Parses the value; *raises* ``ValueError`` whose text ends the sentence "SETTING …"."""
    repeats: bool = False
    """Whether the flag may be repeated."""


def convert(value: object, hint: object) -> Any:
    """``value`` converted to the annotation ``hint``. An int is accepted as a float; a bool is neither.

    *Raises* ``ValueError`` whose text ends the sentence "SETTING …".

    >>> convert(1, float), convert(["q_proj"], list[str] | str | None), convert("a,b", tuple[str, ...])
    (1, ['q_proj'], ('a', 'b'))
    >>> convert(True, int)
    Traceback (most recent call last):
        ...
    ValueError: must be a whole number, not True
    """
    origin, members = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return value
    if origin is typing.Annotated:
        return _convert_annotated(value, hint)
    if origin in (typing.Union, types.UnionType):
        return _convert_union(value, hint)
    if origin is tuple:
        return _convert_names(value, members[0])
    if origin is typing.Literal:
        ok = value in members
    elif isinstance(value, bool):
        ok = hint is bool
    elif hint is float:
        ok = isinstance(value, int | float)
    elif origin is list and isinstance(value, list):
        ok = all(fits(member, members[0]) for member in value)
    else:
        plain = origin or hint
        ok = isinstance(plain, type) and isinstance(value, plain)
    if not ok:
        raise ValueError(f"must be {describe(hint)}, not {value!r}")
    return value


def _convert_annotated(value: Any, hint: object) -> Any:
    base, *marks = typing.get_args(hint)
    for mark in marks:
        if isinstance(mark, Form):
            return mark.read(value)
        if isinstance(mark, Bounds):
            if not fits(value, base) or not mark.holds(value):
                raise ValueError(f"must be {describe(hint)}, not {value!r}")
            return float(value) if base is float else value  # the identity of a run distinguishes 1 from 1.0
    return convert(value, base)


def _convert_union(value: object, hint: object) -> Any:
    members = typing.get_args(hint)
    real = [member for member in members if member is not types.NoneType]
    if value is None and len(real) < len(members):
        return None
    if len(real) == 1:
        return convert(value, real[0])
    for member in real:
        if fits(value, member):
            return convert(value, member)
    raise ValueError(f"must be {describe(hint)}, not {value!r}")


def _convert_names(value: object, member: object) -> tuple[str, ...]:
    """Names from a list, or from one comma-separated string."""
    names = [name.strip() for name in value.split(",")] if isinstance(value, str) else value
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) and name for name in names):
        raise ValueError(f"must be names separated by commas, not {names!r}")
    if typing.get_origin(member) is not typing.Literal:
        return tuple(names)
    allowed = typing.get_args(member)
    if wrong := [name for name in names if name not in allowed]:
        raise ValueError(f"must be of {', '.join(allowed)}, not {wrong[0]!r}")
    return tuple(dict.fromkeys(names))


def fits(value: object, hint: object) -> bool:
    try:
        convert(value, hint)
    except ValueError:
        return False
    return True


def describe(hint: object) -> str:
    """Describe the values that an annotation allows; types that TOML cannot express are left out.

    >>> describe(int | None), describe(list[str] | str | None), describe(typing.Literal["a", "b"])
    ('a whole number', 'a list or a text', 'one of a, b')
    """
    members = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    nouns: list[str] = []
    for member in members:
        plain = typing.get_origin(member) or member
        if plain is typing.Annotated:
            base, *marks = typing.get_args(member)
            bounds = next((mark for mark in marks if isinstance(mark, Bounds)), Bounds())
            nouns.append(bounds.describe(describe(base)))
        elif plain is typing.Literal:
            nouns.append(f"one of {', '.join(map(str, typing.get_args(member)))}")
        elif isinstance(plain, type) and issubclass(plain, enum.Enum):
            nouns.append("one of " + ", ".join(str(choice.value) for choice in plain))
        elif plain in _NOUNS:
            nouns.append(_NOUNS[plain])
    return " or ".join(dict.fromkeys(nouns)) or "another value"


def accept(assignment: Assignment, hint: object) -> Any:
    """The value of an assignment, converted to the type of ``hint``. *Raises* ``ValueError`` as `convert`.

    A flag's text that parses as another type is also tried as a number and as the text itself: ``--run_name=2024``.

    >>> accept(Assignment(("run_name",), 2024, "--run_name", "2024"), str)
    '2024'
    """
    if assignment.text is None:
        return convert(assignment.value, hint)
    errors: list[ValueError] = []
    for candidate in (assignment.value, *_numbers(assignment.text), assignment.text):
        try:
            return convert(candidate, hint)
        except ValueError as error:
            errors.append(error)
    raise errors[-2]  # the error of the number, where there is one: "not 0" rather than "not '0'"


def _numbers(text: str) -> list[int | float]:
    """The number that Python parses from a text (TOML rejects ``.5``); empty when there is none."""
    for kind in (int, float):
        try:
            return [kind(text)]
        except ValueError:
            continue  # the next kind of number, or none
    return []


# --- typed fields -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Fields:
    """The settings of one table: names with their annotations, and aliases."""

    hints: Mapping[str, Any]
    aliases: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, owner: type, aliases: Mapping[str, str] | None = None) -> Fields:
        """The fields of a dataclass."""
        return cls(typing.get_type_hints(owner, include_extras=True), aliases or {})

    def read(
        self, assignments: Iterable[Assignment], section: str, problems: list[str], also: Collection[str] = ()
    ) -> dict[str, Any]:
        """Checked values by name; appends to ``problems`` for each key that is unknown, repeated or invalid.

        The last part of an assignment's path is its key. ``also``: further names to suggest for an unknown key.
        """
        values: dict[str, Any] = {}
        for assignment in assignments:
            key = assignment.path[-1]
            name = self.aliases.get(key, key)
            if name not in self.hints:
                problems.append(assignment.problem(unknown_key(key, section, (*self.hints, *self.aliases, *also))))
            elif name in values:
                problems.append(assignment.problem(f"{key!r} in {section} repeats {name!r}; give one of them"))
            else:
                try:
                    values[name] = accept(assignment, self.hints[name])
                except ValueError as error:
                    problems.append(assignment.problem(f"{key} in {section} {error}"))
        return values


def unknown_key(key: str, section: str, known: Iterable[str]) -> str:
    """The error message for a key that ``section`` does not have.

    >>> unknown_key("max_step", "[trainer.args]", ["max_steps", "seed"])
    'unknown key \\'max_step\\' in [trainer.args], did you mean "max_steps"?'
    """
    return f"unknown key {key!r} in {section}{closest(key, known)}"


def store(table: dict[str, Any], path: Sequence[str], value: object) -> None:
    """Set a value in nested tables; missing tables are created, existing ones are copied first.

    >>> table = {"a": {"b": 1}}
    >>> store(table, ("a", "c", "d"), 2)
    >>> table
    {'a': {'b': 1, 'c': {'d': 2}}}
    """
    *above, last = path
    for key in above:
        inner = table.get(key)
        table[key] = dict(inner) if isinstance(inner, Mapping) else {}
        table = table[key]
    table[last] = value


# --- all problems at once ---------------------------------------------------------------------------------------------


def raise_together(problems: Sequence[str | VerifiersError]) -> None:
    """*Raises* a single error unchanged, or one ``ConfigError`` that lists several; returns when there are none."""
    texts = list(dict.fromkeys(map(str, problems)))
    if len(texts) == 1 and isinstance(problems[0], VerifiersError):
        raise problems[0]
    if texts:
        several = f"{len(texts)} things to correct:" + "".join(f"\n  - {text}" for text in texts)
        raise ConfigError(texts[0] if len(texts) == 1 else several, names=texts)
