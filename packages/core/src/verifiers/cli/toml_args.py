"""Settings from TOML: eval files, an environment's own ``[tool.verifiers.eval]``, and back to TOML (``--dump-config``).

Everything wrong with a file is found in one pass, each sentence with file, line and section. Values are checked by the
same table as flags (``options``). This module evaluates nothing and asks nobody.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verifiers.cli.options import MERGED, SETTINGS, EvalSettings, layered
from verifiers.suggest import closest

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


@dataclass(slots=True)
class EvalFile:
    """What the files of a command line say together."""

    common: dict[str, Any] = field(default_factory=dict)
    """Settings at the top level: for every entry."""
    entries: list[Entry] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def read_files(paths: Sequence[str]) -> EvalFile:
    """The files merged from left to right: settings of a later one win, its ``[[eval]]`` replace those before."""
    merged = EvalFile()
    for path in map(Path, paths):
        document = _document(path, merged.problems)
        if document is None:
            continue
        reader = _Reader(path, merged.problems)
        tables = document.pop("eval", None)
        merged.common = layered(merged.common, reader.settings(document, "the top level"))
        if tables is not None:
            merged.entries = reader.entries(tables)
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
                self.problem(key, f"unknown key {key!r} in {section}{closest(key, (*self.allowed, 'eval'))}")
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

    def entries(self, tables: Any) -> list[Entry]:
        """The entries of the ``[[eval]]`` tables."""
        if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
            self.problem("eval", "write [[eval]], with two brackets, once per evaluation")
            return []
        entries: list[Entry] = []
        for number, table in enumerate(tables, 1):
            section = f"[[eval]] number {number}"
            named = {key: table[key] for key in ENTRY_KEYS if key in table}
            given = self.settings({k: v for k, v in table.items() if k not in ENTRY_KEYS}, section)
            entries += [Entry(env_id, given) for env_id in self.ids(named, section)]
        return entries

    def ids(self, named: Mapping[str, Any], section: str) -> list[str]:
        if len(named) != 1:
            wrong = "has no env_id" if not named else f"has {' and '.join(named)}; give one of them"
            self.problem(next(iter(named), "eval"), f"{section} {wrong}")
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


# --- back to TOML --------------------------------------------------------------------------------------------------


def dump(entries: Sequence[tuple[str, EvalSettings]]) -> str:
    """Entries as an eval file that gives the same runs. Of headers that hold secrets only the names are printed."""
    return "\n".join(line for env_id, settings in entries for line in _entry_lines(env_id, settings)) + "\n"


def _entry_lines(env_id: str, settings: EvalSettings) -> Iterator[str]:
    from verifiers.redaction import HIDDEN, redacted

    yield "[[eval]]"
    yield f"env_id = {_toml(env_id)}"
    for name in SETTINGS:
        value = getattr(settings, name)
        if name == "timeout" and value is None:
            value = "none"
        if name == "header":
            safe = redacted(value)
            hidden = [key for key in value if safe[key] == HIDDEN]
            yield from (f"# header {json.dumps(key)}: its value is a secret and is not printed" for key in hidden)
            value = {key: value[key] for key in value if key not in hidden}
        if value is None or (name in MERGED and not value) or value == ():
            continue
        yield f"{name} = {_toml(value)}"
    yield ""


def _toml(value: Any) -> str:
    """A value in TOML. A table with null in it, which TOML lacks, becomes the text of a JSON object."""
    match value:
        case bool():
            return "true" if value else "false"
        case int() | float():
            return repr(value)
        case str():
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007F")
        case Mapping():
            if "null" in (text := json.dumps(value, ensure_ascii=False)) and _has_null(value):
                return _toml(text)
            return "{ " + ", ".join(f"{_key(str(key))} = {_toml(member)}" for key, member in value.items()) + " }"
        case list() | tuple():
            return "[" + ", ".join(map(_toml, value)) + "]"
    raise TypeError(f"no TOML for {type(value).__name__}")


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _toml(name)


def _has_null(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_has_null, value.values()))
    return value is None or (isinstance(value, list) and any(map(_has_null, value)))
