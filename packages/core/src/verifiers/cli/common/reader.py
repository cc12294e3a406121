"""Read settings: TOML files and command-line arguments -> assignments with their source -> checked,
typed values.

An `Assignment` is one key with one value, ``configs/x.toml:12: trainer.args.max_steps = 10``. The
annotation of a dataclass field defines the allowed values (``runtime.values``), which pydantic
checks, and of which it makes a JSON schema. Problems are
collected as sentences, so that a command reports all of them at once. The commands define which
keys exist.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verifiers.errors import ConfigError, VerifiersError
from verifiers.runtime.bounded import TooLong, read_text
from verifiers.runtime.suggest import SIMILAR, close_match, closest
from verifiers.runtime.values import Also, Option, adapter, convert, parts


@dataclass(frozen=True, slots=True)
class Assignment:
    """A key with its value and source: ``Assignment(("trainer", "args", "max_steps"), 10,
    "x.toml:12")``."""

    path: tuple[str, ...]
    value: Any
    location: str
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
        return self.location.startswith("--")

    def problem(self, sentence: str) -> str:
        """A sentence about this assignment, prefixed with its place."""
        return f"{self.location}: {sentence}"


# --- TOML files -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TomlFile:
    """A parsed TOML file: its document, and the line of each key."""

    path: Path
    document: dict[str, Any]
    lines: Mapping[tuple[str | int, ...], int]

    @classmethod
    def read(cls, path: str | Path) -> TomlFile:
        """*Raises* ``ConfigError``: the file cannot be read, or is not valid TOML."""
        from verifiers.runtime.decoding import decode_toml

        path = Path(path)
        try:
            text = read_text(path)
            return cls(path, decode_toml(text), key_lines(text))
        except FileNotFoundError as error:
            files = sorted(path.parent.glob("*.toml")) if path.parent.is_dir() else []
            if files:
                near = f"; {path.parent} holds {', '.join(file.name for file in files[:8])}"
            else:
                near = ""
            raise ConfigError(
                f"{path} cannot be read: {error.strerror}{near}", path=str(path)
            ) from None
        except (OSError, UnicodeDecodeError, TooLong) as error:
            reason = getattr(error, "strerror", None) or error
            raise ConfigError(f"{path} cannot be read: {reason}", path=str(path)) from error
        except ValueError as error:
            raise ConfigError(f"{path} is not valid TOML: {error}", path=str(path)) from error

    def location(self, *keys: str | int) -> str:
        """``file:line`` of the key, or of the nearest table above it; numbers count the tables of
        an array from 0."""
        for length in range(len(keys), 0, -1):
            if keys[:length] in self.lines:
                return f"{self.path}:{self.lines[keys[:length]]}"
        return str(self.path)


_HEADER = re.compile(r"\s*(\[\[?)([^\]]+)\]\]?\s*(?:#.*)?$")
_KEY = re.compile(r"""\s*((?:[\w-]+|"[^"]*"|'[^']*')(?:\s*\.\s*(?:[\w-]+|"[^"]*"|'[^']*'))*)\s*=""")


def key_lines(text: str) -> dict[tuple[str | int, ...], int]:
    """Path of a key -> number of the first line that sets it, from 1.

    A key in an array of tables has two paths: with the index of its table, and without (the first
    table that has it). Keys inside inline tables have no path.

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
    return tuple(
        part.strip().strip("\"'") for part in re.findall(r'"[^"]*"|\'[^\']*\'|[^.]+', dotted)
    )


# --- the command line -----------------------------------------------------------------------------


@dataclass(slots=True)
class Words:
    """The arguments of a command line by kind: files, assignments, and the rest in its order."""

    files: list[str] = field(default_factory=list)
    assignments: list[Assignment] = field(default_factory=list)
    remaining: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


_OPTION = re.compile(r"--|@|-[a-zA-Z]$")
"""A word that is not the value of the flag before it (``-5`` is a value)."""


def read_words(words: Sequence[str], is_setting: Callable[[str], bool]) -> Words:
    """Sort ``@ FILE``, ``@FILE``, ``--a.b VALUE``, ``--a.b=VALUE``, ``--a.b`` (true) and
    ``--no-a.b`` (false).

    ``is_setting``: whether a flag, including its dashes, assigns a setting; other words are the
    rest.

    >>> words = read_words(["@", "x.toml", "--trainer.args.max-steps", "10", "-q"], lambda flag: "." in flag)
    >>> words.files, [(setting.key, setting.value) for setting in words.assignments], words.remaining
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
            path = tuple(
                part.replace("-", "_")
                for part in name.removeprefix("" if equals else "no-").split(".")
            )
            read.assignments.append(Assignment(path, value, flag, text if equals else None))
        else:
            read.remaining.append(word)
    return read


def parse_value(text: str) -> object:
    """The text parsed as a TOML value, or the text itself when that fails.

    >>> parse_value("5"), parse_value("[1, 2]"), parse_value("builtin:tiny"), parse_value("true")
    (5, [1, 2], 'builtin:tiny', True)
    """
    from verifiers.runtime.decoding import decode_toml

    if "\n" in text:
        return text
    try:
        return decode_toml(f"value = {text}")["value"]
    except ValueError:
        return text


def listed_values(key: str, values: object, section: str) -> list[object]:
    """The values that a sweep tries for ``key``. *Raises* ConfigError unless they are listed."""
    if isinstance(values, list) and values:
        return values
    wrong = "an empty list" if isinstance(values, list) else repr(values)
    raise ConfigError(f"{key} in {section} must be a list of values to try, not {wrong}")


def unknown_option(flag: str, choices: Iterable[str], command: str) -> str:
    """The error message for a flag that ``command`` does not have."""
    match = close_match(flag, choices, SIMILAR) if flag.startswith("--") else None
    return f"{flag}: no such option" + (
        f", did you mean {match}?" if match else f" (see {command} --help)"
    )


# --- values ---------------------------------------------------------------------------------------


def accept(assignment: Assignment, hint: object) -> object:
    """The value of an assignment, converted to the type of ``hint``. *Raises* ``ValueError`` as
    `convert`.

    A flag's text that parses as another type is also tried as a number and as the text itself:
    ``--run_name=2024``.

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
    raise errors[-2]  # the error of the number, if there is any: "not 0" rather than "not '0'"


def _numbers(text: str) -> list[int | float]:
    """The number that Python parses from a text (TOML rejects ``.5``); empty when there is none."""
    for kind in (int, float):
        try:
            return [kind(text)]
        except ValueError:
            continue  # the next kind of number, or none
    return []


# --- typed fields ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Fields:
    """The settings of a table by key, as their class declares them."""

    hints: Mapping[str, object]
    """Key -> annotation."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Another name of a key -> the key."""
    attributes: Mapping[str, str] = field(default_factory=dict)
    """Key -> the field of the class."""
    options: Mapping[str, Option] = field(default_factory=dict)

    @classmethod
    @functools.cache
    def of(cls, owner: type) -> Fields:
        """The fields of a dataclass; those that have an `Option` have its key."""
        hints = typing.get_type_hints(owner, include_extras=True)
        options = {line.name: line.metadata.get("option") for line in dataclasses.fields(owner)}
        keys = {name: (line.key if line else "") or name for name, line in options.items()}
        by_key = cls.declared({key: hints[name] for name, key in keys.items()})
        return dataclasses.replace(
            by_key,
            attributes={key: name for name, key in keys.items()},
            options={keys[name]: line for name, line in options.items() if line},
        )

    @classmethod
    def declared(cls, hints: Mapping[str, object]) -> Fields:
        """The settings with these annotations; `Also` in an annotation has the other names."""
        aliases = {
            alias: name
            for name, hint in hints.items()
            for part in parts(hint)
            if isinstance(part, Also)
            for alias in part.names
        }
        return cls(hints, aliases)

    @property
    def names(self) -> list[str]:
        """Every name of a setting."""
        return [*self.hints, *self.aliases]

    def hint(self, key: str) -> Any:
        """The annotation of a setting, by any of its names; None of an unknown key."""
        return self.hints.get(self.aliases.get(key, key))

    def by_name(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Values by key as keywords of the class."""
        return {self.attributes[key]: value for key, value in values.items()}

    def schema(self, facts: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
        """Key -> the JSON schema of its values. ``facts``: setting -> what else is said of it."""
        properties = {
            name: adapter(hint).json_schema() | dict(facts.get(name, {}))
            for name, hint in self.hints.items()
        }
        for alias, name in self.aliases.items():
            properties[alias] = properties[name] | {"description": f"Another name of {name}."}
        return properties

    def read(
        self,
        assignments: Iterable[Assignment],
        section: str,
        problems: list[str],
        also: Collection[str] = (),
    ) -> dict[str, Any]:
        """Checked values by name; appends to ``problems`` for each key that is unknown, repeated or
        invalid.

        The last part of an assignment's path is its key. ``also``: further names to suggest for an
        unknown key.
        """
        values: dict[str, object] = {}
        for assignment in assignments:
            key = assignment.path[-1]
            name = self.aliases.get(key, key)
            if name not in self.hints:
                choices = (*self.names, *also)
                problems.append(assignment.problem(unknown_key(key, section, choices)))
            elif name in values:
                repeated = f"{key!r} in {section} repeats {name!r}"
                problems.append(assignment.problem(f"{repeated}; give one of them"))
            else:
                try:
                    values[name] = accept(assignment, self.hints[name])
                except ValueError as error:
                    problems.append(assignment.problem(f"{key} in {section} {error}"))
        return values


def unknown_key(key: str, section: str, choices: Iterable[str]) -> str:
    """The error message for a key that ``section`` does not have.

    >>> unknown_key("max_step", "[trainer.args]", ["max_steps", "seed"])
    'unknown key \\'max_step\\' in [trainer.args], did you mean "max_steps"?'
    """
    return f"unknown key {key!r} in {section}{closest(key, choices)}"


def store(table: dict[str, Any], path: Sequence[str], value: object) -> None:
    """Set a value in nested tables; missing tables are created, existing tables are copied first.

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


# --- all problems at once -------------------------------------------------------------------------


def raise_together(problems: Sequence[str | VerifiersError]) -> None:
    """*Raises* a single error unchanged, or one ``ConfigError`` that lists several; if any."""
    texts = list(dict.fromkeys(map(str, problems)))
    if len(texts) == 1 and isinstance(problems[0], VerifiersError):
        raise problems[0]
    if texts:
        several = f"{len(texts)} things to correct:" + "".join(f"\n  - {text}" for text in texts)
        raise ConfigError(texts[0] if len(texts) == 1 else several, names=texts)
