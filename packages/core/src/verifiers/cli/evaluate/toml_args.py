"""Settings from TOML: eval files (``[[eval]]``, ``[[ablation]]``), and an environment's ``[tool.verifiers.eval]``.

Everything wrong with a file is found in one pass, each sentence with file, line and section. Values are checked by the
same table as flags (``options``). This module evaluates nothing and asks nobody.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verifiers.cli.evaluate.options import MERGED, SETTINGS, layered
from verifiers.runtime.suggest import closest

ALIASES = {"args": "env_args", "headers": "header", "max_concurrent_requests": "max_concurrent"}
"""Other spellings of settings as TOML keys."""
ENTRY_KEYS = ("id", "env_id", "env_ids")
DEFAULTS = ("num_examples", "rollouts_per_example", "max_tokens", "temperature", "env_args")
"""What an environment may set for its own evaluations."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One evaluation that a file or a command line asks for."""

    env_id: str
    given: Mapping[str, Any] = field(default_factory=dict)
    swept: Sequence[str] = ()
    """What the ``[[ablation]]`` it comes from varies: ``temperature``, ``env_args.max_turns``."""


@dataclass(slots=True)
class EvalFile:
    """What the files of a command line say together."""

    common: dict[str, Any] = field(default_factory=dict)
    """Settings at the top level: for every entry."""
    entries: list[Entry] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def read_files(paths: Sequence[str]) -> EvalFile:
    """The files merged from left to right: settings of a later one win, its evaluations replace those before."""
    merged = EvalFile()
    for path in map(Path, paths):
        document = _document(path, merged.problems)
        if document is None:
            continue
        reader = _Reader(path, merged.problems)
        evaluations, ablations = document.pop("eval", None), document.pop("ablation", None)
        merged.common = layered(merged.common, reader.settings(document, "the top level"))
        if evaluations is not None or ablations is not None:
            merged.entries = reader.evaluations([] if evaluations is None else evaluations)
            merged.entries += reader.ablations([] if ablations is None else ablations)
    return merged


def _document(path: Path, problems: list[str]) -> dict[str, Any] | None:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        problems.append(f"{path} cannot be read: {error.strerror or error}")
    except UnicodeDecodeError:
        problems.append(f"{path} is no text in UTF-8")
    except tomllib.TOMLDecodeError as error:
        problems.append(f"{path} is not valid TOML: {error}")
    return None


@dataclass(slots=True)
class _Reader:
    """Checks the tables of one file; ``problems`` collects what is wrong."""

    path: Path
    problems: list[str]
    allowed: Sequence[str] = (*SETTINGS, *ALIASES)

    def settings(self, table: Mapping[str, Any], section: str) -> dict[str, Any]:
        """The table's settings by canonical name, checked."""
        found: dict[str, Any] = {}
        for key, value in table.items():
            name = ALIASES.get(key, key)
            if name not in SETTINGS or key not in self.allowed:
                near = closest(key, (*self.allowed, "eval", "ablation"))
                self.problem(key, f"unknown key {key!r} in {section}{near}")
            elif name in found:
                self.problem(key, f"{key!r} in {section} repeats {name!r}; give one of them")
            else:
                try:
                    found[name] = SETTINGS[name].metadata["kind"].check(value)
                except ValueError as error:
                    self.problem(key, f"{key} in {section} {error}")
        if "endpoints_path" in found:
            found["endpoints_path"] = str(self.path.parent / Path(found["endpoints_path"]).expanduser())
        return found

    def evaluations(self, tables: Any) -> list[Entry]:
        """The entries of the ``[[eval]]`` tables."""
        entries: list[Entry] = []
        for section, table in self.sections("eval", tables):
            ids, given = self.ids(table, section), self.settings(table, section)
            entries += [Entry(env_id, given) for env_id in ids]
        return entries

    def ablations(self, tables: Any) -> list[Entry]:
        """The entries of the ``[[ablation]]`` tables: one for every combination of what they sweep."""
        entries: list[Entry] = []
        for section, table in self.sections("ablation", tables):
            sweep = table.pop("sweep", None)
            ids, fixed = self.ids(table, section), self.settings(table, section)
            axes = self.axes(sweep, section)
            swept = [name for options in axes for name in _names(options)]
            for name in swept:
                key = name.rpartition(".")[2]
                if _canonical(name) in {_canonical(other) for other in _names([fixed])}:
                    self.problem(key, f"{section} gives {name} a fixed value and sweeps it; leave one of them out")
                elif [_canonical(other) for other in swept].count(_canonical(name)) > 1:
                    self.problem(key, f"{section} sweeps {_canonical(name)} twice; leave one of them out")
            for env_id, chosen in itertools.product(ids, itertools.product(*axes)):
                entries.append(Entry(env_id, functools.reduce(layered, chosen, fixed), swept))
        return entries

    def axes(self, sweep: Any, section: str) -> list[list[dict[str, Any]]]:
        """For each swept key the settings that each of its values stands for."""
        if not isinstance(sweep, dict) or not sweep:
            self.problem("ablation", f"{section} sweeps nothing: add [ablation.sweep] with a list of values to try")
            return []
        axes, section = [], f"[ablation.sweep] of {section}"
        for key, values in sweep.items():
            inner = values if ALIASES.get(key, key) in MERGED and isinstance(values, dict) else None
            if ALIASES.get(key, key) not in SETTINGS:
                self.settings({key: values}, section)  # says that there is no such setting
            elif inner is None:
                axes.append([self.settings({key: value}, section) for value in self.values(key, values, section)])
            elif not inner:
                self.problem(key, f"{key} in {section} is empty; name what to vary in it, with a list of values")
            else:
                for member, options in inner.items():
                    listed = self.values(f"{key}.{member}", options, section)
                    axes.append([self.settings({key: {member: value}}, section) for value in listed])
        return axes

    def values(self, key: str, values: Any, section: str) -> list[Any]:
        """A list of values to try."""
        if isinstance(values, list) and values:
            return values
        wrong = "an empty list" if isinstance(values, list) else repr(values)
        self.problem(key.rpartition(".")[2], f"{key} in {section} must be a list of values to try, not {wrong}")
        return []

    def sections(self, kind: str, tables: Any) -> Iterator[tuple[str, dict[str, Any]]]:
        """(what to call it, a table) of each table of an array."""
        if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
            what = {"eval": "evaluation", "ablation": "ablation"}[kind]
            self.problem(kind, f"write [[{kind}]], with two brackets, once per {what}")
            return
        for number, table in enumerate(tables, 1):
            yield f"[[{kind}]] number {number}", dict(table)

    def ids(self, table: dict[str, Any], section: str) -> list[str]:
        """Take the ids of its environments out of a table."""
        named = {key: table.pop(key) for key in ENTRY_KEYS if key in table}
        if len(named) != 1:
            wrong = "has no env_id" if not named else f"has {' and '.join(named)}; give one of them"
            self.problem(next(iter(named), section.partition("]]")[0].strip("[")), f"{section} {wrong}")
            return []
        ((key, value),) = named.items()
        ids = value if key == "env_ids" else [value]
        if not isinstance(ids, list) or not ids or not all(isinstance(env_id, str) and env_id for env_id in ids):
            expected = "a list of ids" if key == "env_ids" else "an id"
            self.problem(key, f"{key} in {section} must be {expected}, not {value!r}")
            return []
        return ids

    def problem(self, key: str, sentence: str) -> None:
        self.problems.append(f"{self.path}{_line_of(self.path, key)}: {sentence}")


def _names(options: Sequence[Mapping[str, Any]]) -> list[str]:
    """What the settings name, members of tables one by one: ``temperature``, ``env_args.max_turns``."""
    names: dict[str, None] = {}
    for settings in options:
        for name, value in settings.items():
            names |= dict.fromkeys((f"{name}.{member}" for member in value) if name in MERGED else (name,))
    return list(names)


def _canonical(name: str) -> str:
    """One name for two spellings of a sampling argument."""
    return name.removeprefix("sampling_args.") if name.endswith((".temperature", ".max_tokens")) else name


def _line_of(path: Path, key: str) -> str:
    """``:12`` for the first line that begins with the key or its section; empty when none does."""
    pattern = re.compile(rf"\s*(\[+\s*)?[\"']?{re.escape(key)}[\"']?\s*[=\].]")
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if pattern.match(line):
            return f":{number}"
    return ""


# --- what an environment says about itself ------------------------------------------------------------------------


def environment_defaults(module: str, distribution: str | None, problems: list[str]) -> dict[str, Any]:
    """``[tool.verifiers.eval]`` of the environment's ``pyproject.toml``; empty when it has none. Imports nothing.

    Looked for in the source tree of an editable install, then among the distribution's files, then beside the module.
    """
    for path in _projects_of(module, distribution):
        if not path.is_file():
            continue
        document = _document(path, problems) or {}
        table = document.get("tool", {}).get("verifiers", {}).get("eval")
        if isinstance(table, dict):
            return _Reader(path, problems, DEFAULTS).settings(table, "[tool.verifiers.eval]")
    return {}


def _projects_of(module: str, distribution: str | None) -> Iterator[Path]:
    import importlib.util

    import importlib_metadata

    if distribution is not None:
        installed = importlib_metadata.distribution(distribution)
        origin = json.loads(installed.read_text("direct_url.json") or "{}")
        if origin.get("dir_info", {}).get("editable"):
            yield _path_of(origin["url"]) / "pyproject.toml"
        for file in installed.files or ():
            if str(file).endswith("pyproject.toml"):
                yield Path(str(file.locate()))
    spec = importlib.util.find_spec(module.partition(".")[0])
    if spec is not None and spec.origin is not None:
        folder = Path(spec.origin).parent
        yield from (folder / "pyproject.toml", folder.parent / "pyproject.toml")
        if folder.parent.name == "src":
            yield folder.parent.parent / "pyproject.toml"


def _path_of(file_url: str) -> Path:
    from urllib.parse import unquote, urlparse

    return Path(unquote(urlparse(file_url).path))
