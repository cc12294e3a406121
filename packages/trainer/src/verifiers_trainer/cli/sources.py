"""Where settings come from: TOML files and dotted flags, read into assignments that remember their place.

An ``Assignment`` is one key with one value, ``configs/x.toml:12: trainer.args.max_steps = 10``. This module knows TOML
and the shape of flags; which keys exist is known in ``settings``.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verifiers.errors import ConfigError
from verifiers_trainer.cli import prime_rl

NOTHING_GIVEN = (
    "nothing to train: give a file, as in `vf-train @ configs/vf-train/tiny-cpu.toml`, or --model and --env.id; "
    "`vf-train quickstart` needs neither"
)
SECTIONS = frozenset(
    {("env",), ("env", "args"), ("inference",), ("inference", "args"), ("trainer",), ("trainer", "args")}
    | {("eval",), ("sampling",), ("wandb",), ("checkpoints",)}
)
"""Tables whose keys are settings of their own; any other table is one value."""
PARTS = ("--trainer", "--orchestrator", "--inference")
"""Each before ``@ FILE``: how prime-rl is given a file per part."""
GPUS = {"trainer-gpus": ("trainer", "gpus"), "inference-gpus": ("inference", "gpus")}


@dataclass(frozen=True, slots=True)
class Assignment:
    """One key set in one place: ``Assignment(("trainer", "args", "max_steps"), 10, "x.toml:12")``."""

    path: tuple[str, ...]
    value: Any
    place: str
    """``file:line``, or the flag as it was typed."""
    text: str | None = None
    """The value as typed on the command line; None when it comes from a file."""

    @property
    def key(self) -> str:
        return ".".join(self.path)

    @property
    def is_flag(self) -> bool:
        """Whether it was given on the command line."""
        return self.place.startswith("--")


def read_toml(path: str) -> list[Assignment]:
    """The settings of one file, in order. Raises ``ConfigError`` when it cannot be read or is not TOML."""
    try:
        text = Path(path).read_text(encoding="utf-8")
        document = tomllib.loads(text)
    except FileNotFoundError:
        near = _neighbours(Path(path))
        raise ConfigError(f"there is no file {path}{near}", path=path) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}", path=path) from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}", path=path) from error
    if prime_rl.is_prime_rl(document):
        document = prime_rl.read_tables((path, document))
    lines = key_lines(text)
    return [Assignment(keys, value, _place(path, keys, lines)) for keys, value in _leaves(document, ())]


def _neighbours(path: Path) -> str:
    files = sorted(path.parent.glob("*.toml")) if path.parent.is_dir() else []
    return f"; {path.parent} holds {', '.join(file.name for file in files[:8])}" if files else ""


def _leaves(table: Mapping[str, Any], above: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    for key, value in table.items():
        path = (*above, key)
        if path == ("env",) and isinstance(value, list) and len(value) == 1 and isinstance(value[0], dict):
            value = value[0]  # one [[env]] is [env]
        if path in SECTIONS and isinstance(value, dict):
            yield from _leaves(value, path)
        else:
            yield path, value


def _place(path: str, keys: tuple[str, ...], lines: Mapping[tuple[str, ...], int]) -> str:
    """The line of the key, or of the nearest table above it that has one."""
    for length in range(len(keys), 0, -1):
        if keys[:length] in lines:
            return f"{path}:{lines[keys[:length]]}"
    return path


_HEADER = re.compile(r"\s*\[\[?\s*([^\]]+?)\s*\]\]?\s*(?:#.*)?$")
_KEY = re.compile(r"""\s*((?:[\w-]+|"[^"]*"|'[^']*')(?:\s*\.\s*(?:[\w-]+|"[^"]*"|'[^']*'))*)\s*=""")


def key_lines(text: str) -> dict[tuple[str, ...], int]:
    """Dotted key -> number of the line that sets it first. Keys inside inline tables have no entry of their own.

    >>> key_lines('model = "x"\\n[trainer.args]\\nmax_steps = 10')
    {('model',): 1, ('trainer',): 2, ('trainer', 'args'): 2, ('trainer', 'args', 'max_steps'): 3}
    """
    found: dict[tuple[str, ...], int] = {}
    table: tuple[str, ...] = ()
    quote = ""
    for number, line in enumerate(text.splitlines(), 1):
        if quote:  # inside a text of several lines
            quote = "" if quote in line else quote
            continue
        if match := _HEADER.match(line):
            table = _split(match[1])
            for depth in range(len(table)):
                found.setdefault(table[: depth + 1], number)
        elif match := _KEY.match(line):
            found.setdefault((*table, *_split(match[1])), number)
        quote = next((q for q in ('"""', "'''") if line.count(q) % 2), "")
    return found


def _split(dotted: str) -> tuple[str, ...]:
    return tuple(part.strip().strip("\"'") for part in re.findall(r'"[^"]*"|\'[^\']*\'|[^.]+', dotted))


def read_arguments(words: Sequence[str]) -> tuple[list[str], list[Assignment], list[str]]:
    """(files, overrides, problems) of the words that are no options: ``@ FILE``, ``@FILE``, ``--a.b value``,
    ``--a.b=value``, ``--a.b`` for true, ``--no-a.b`` for false, ``--orchestrator @ FILE`` as prime-rl has it.

    >>> files, overrides, problems = read_arguments(["@", "x.toml", "--trainer.args.max_steps", "10"])
    >>> files, [(o.key, o.value) for o in overrides], problems
    (['x.toml'], [('trainer.args.max_steps', 10)], [])
    """
    files: list[str] = []
    overrides: list[Assignment] = []
    problems: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if word.startswith("@"):
            file = word[1:] or (rest.pop(0) if rest else "")
            if file:
                files.append(file)
            else:
                problems.append("@: a TOML file must follow, as in: vf-train @ configs/vf-train/tiny-cpu.toml")
        elif word in PARTS and rest and rest[0].startswith("@"):
            continue  # the file that follows says by its keys whose it is
        elif word.startswith("--") and len(word) > 2:
            overrides.extend(_override(word, rest))
        elif word.endswith(".toml"):
            problems.append(f"{word}: write @ {word} to read a file")
        else:
            problems.append(f"{word!r} is neither @ FILE nor an option")
    return files, overrides, problems


def _override(word: str, rest: list[str]) -> list[Assignment]:
    flag, equals, text = word.partition("=")
    name, value = flag.removeprefix("--"), True
    if not equals and rest and not rest[0].startswith(("--", "@")):
        text, equals = rest.pop(0), "="
    if equals:
        value = parse_value(text)
    elif name.startswith("no-"):
        name, value = name.removeprefix("no-"), False
    path = GPUS.get(name) or tuple(part.replace("-", "_") for part in name.split("."))
    if path in SECTIONS and isinstance(value, dict):
        return [Assignment(keys, member, flag) for keys, member in _leaves(value, path)]
    return [Assignment(path, value, flag, text or None)]


def parse_value(text: str) -> Any:
    """A TOML value, or the text itself when it is none.

    >>> parse_value("5"), parse_value("[1, 2]"), parse_value("builtin:tiny"), parse_value("true")
    (5, [1, 2], 'builtin:tiny', True)
    """
    if "\n" in text:
        return text
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def read_words(words: Sequence[str]) -> tuple[list[Assignment], list[str]]:
    """(assignments, problems) of a whole command line.

    Raises ``ConfigError`` when a file cannot be read: the rest would be guesswork.
    """
    files, overrides, problems = read_arguments(words)
    if not words:
        raise ConfigError(NOTHING_GIVEN)
    if not files and not overrides:
        raise ConfigError(listed(problems))
    read: list[Assignment] = []
    unreadable: list[str] = []
    for file in files:
        try:
            read += read_toml(file)
        except ConfigError as error:
            unreadable.append(str(error))
    if unreadable:
        raise ConfigError(listed([*unreadable, *problems]))
    return [*read, *overrides], problems


def listed(problems: Sequence[str]) -> str:
    """One problem as it is, several as a list."""
    if len(problems) == 1:
        return problems[0]
    return f"{len(problems)} things to correct:\n" + "\n".join(f"  - {problem}" for problem in problems)
