"""Read and write settings in TOML: eval files (``[[eval]]``, ``[[ablation]]``), and
``[tool.verifiers.eval]``.

Reports all problems of a file in one pass, each with file, line and section. Sends no request.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verifiers.cli.common.reader import Assignment, Fields, TomlFile, listed_values
from verifiers.cli.evaluate.options import MERGED, EvalSettings, layered
from verifiers.errors import ConfigError
from verifiers.runtime.decoding import decode_json

if TYPE_CHECKING:
    from verifiers.environments.registry import FoundEnvironment

ENTRY_KEYS = ("id", "env_id", "env_ids")
DEFAULTS = ("num_examples", "rollouts_per_example", "max_tokens", "temperature", "env_args")
"""Settings that an environment may define in ``[tool.verifiers.eval]``."""


@dataclass(frozen=True, slots=True)
class Entry:
    """An evaluation of a file or a command line."""

    env_id: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    swept: Sequence[str] = ()
    """Keys that its ``[[ablation]]`` varies: ``temperature``, ``env_args.max_turns``."""


@dataclass(slots=True)
class EvalFile:
    """The merged content of a command line's files."""

    common: dict[str, object] = field(default_factory=dict)
    """Top-level settings, which apply to every entry."""
    entries: list[Entry] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def read_files(paths: Sequence[str]) -> EvalFile:
    """Merge the files: a later file's settings take precedence, its evaluations replace others."""
    merged = EvalFile()
    for path in paths:
        try:
            file = TomlFile.read(path)
        except ConfigError as error:
            merged.problems.append(str(error))
            continue
        reader, top = _Reader(file, merged.problems), dict(file.document)
        evaluations, ablations = top.pop("eval", None), top.pop("ablation", None)
        merged.common = layered(merged.common, reader.settings(top, "the top level", ()))
        if evaluations is not None or ablations is not None:
            merged.entries = reader.evaluations([] if evaluations is None else evaluations)
            merged.entries += reader.ablations([] if ablations is None else ablations)
    return merged


KeyPath = tuple[str | int, ...]
"""Path of a table in its file: ``("eval", 1)`` is the second ``[[eval]]``."""


@dataclass(slots=True)
class _Reader:
    """Reads the tables of a file; appends to ``problems``."""

    file: TomlFile
    problems: list[str]
    fields: Fields = field(default_factory=lambda: Fields.of(EvalSettings))

    def settings(self, table: Mapping[str, object], section: str, where: KeyPath) -> dict[str, Any]:
        """The table's settings by name, checked."""
        locations = {key: self.file.location(*where, key) for key in table}
        assignments = [
            Assignment((key,), table[key], location) for key, location in locations.items()
        ]
        values = self.fields.read(assignments, section, self.problems, also=("eval", "ablation"))
        if "endpoints_path" in values:
            registry = Path(values["endpoints_path"]).expanduser()
            values["endpoints_path"] = str(self.file.path.parent / registry)
        return values

    def evaluations(self, tables: object) -> list[Entry]:
        """The entries of the ``[[eval]]`` tables."""
        entries: list[Entry] = []
        for section, where, table in self.sections("eval", tables):
            ids, settings = self.ids(table, section, where), self.settings(table, section, where)
            entries += [Entry(env_id, settings) for env_id in ids]
        return entries

    def ablations(self, tables: object) -> list[Entry]:
        """The entries of the ``[[ablation]]`` tables: one for each combination that they sweep."""
        entries: list[Entry] = []
        for section, where, table in self.sections("ablation", tables):
            sweep = table.pop("sweep", None)
            ids, fixed = self.ids(table, section, where), self.settings(table, section, where)
            axes = self.axes(sweep, section, where)
            swept = [name for options in axes for name in _names(options)]
            fixed_names = {_canonical(name) for name in _names([fixed])}
            counts = Counter(map(_canonical, swept))
            for name in swept:
                canonical, why = _canonical(name), ""
                if canonical in fixed_names:
                    why = f"gives {name} a fixed value and sweeps it"
                elif counts[canonical] > 1:
                    why = f"sweeps {canonical} twice"
                if why:
                    path = (*where, "sweep", *name.split("."))
                    self.problem(path, f"{section} {why}; leave one of them out")
            for env_id, combination in itertools.product(ids, itertools.product(*axes)):
                entries.append(Entry(env_id, functools.reduce(layered, combination, fixed), swept))
        return entries

    def axes(self, sweep: object, section: str, where: KeyPath) -> list[list[dict[str, object]]]:
        """For each swept key, a list of settings, one for each of its values."""
        if not isinstance(sweep, dict) or not sweep:
            advice = "add [ablation.sweep] with a list of values to try"
            self.problem(where, f"{section} sweeps nothing: {advice}")
            return []
        axes, section, where = [], f"[ablation.sweep] of {section}", (*where, "sweep")
        for key, values in sweep.items():
            name = self.fields.aliases.get(key, key)
            if name not in self.fields.hints:
                self.settings({key: values}, section, where)  # reports the unknown key
            elif name not in MERGED or not isinstance(values, dict):
                listed = self.values((*where, key), key, values, section)
                axes.append([self.settings({key: value}, section, where) for value in listed])
            elif not values:
                advice = "name what to vary, with a list of values"
                self.problem((*where, key), f"{key} in {section} is empty; {advice}")
            else:
                for member, options in values.items():
                    listed = self.values((*where, key, member), f"{key}.{member}", options, section)
                    tables = [{key: {member: value}} for value in listed]
                    axes.append([self.settings(table, section, where) for table in tables])
        return axes

    def values(self, path: KeyPath, key: str, values: object, section: str) -> list[Any]:
        """A list of values to try."""
        try:
            return listed_values(key, values, section)
        except ConfigError as error:
            self.problem(path, str(error))
            return []

    def sections(
        self, kind: str, tables: object
    ) -> Iterator[tuple[str, KeyPath, dict[str, object]]]:
        """(description, path in the file, copy) of each table of an array."""
        if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
            what = {"eval": "evaluation", "ablation": "ablation"}[kind]
            self.problem((kind,), f"write [[{kind}]], with two brackets, once per {what}")
            return
        for number, table in enumerate(tables):
            yield f"[[{kind}]] number {number + 1}", (kind, number), dict(table)

    def ids(self, table: dict[str, Any], section: str, where: KeyPath) -> list[str]:
        """Remove the environment ids from a table and return them."""
        id_values = {key: table.pop(key) for key in ENTRY_KEYS if key in table}
        if len(id_values) != 1:
            several = f"has {' and '.join(id_values)}; give one of them"
            wrong = several if id_values else "has no env_id"
            self.problem((*where, *list(id_values)[:1]), f"{section} {wrong}")
            return []
        ((key, value),) = id_values.items()
        ids = value if key == "env_ids" else [value]
        is_list = isinstance(ids, list) and bool(ids)
        if not is_list or not all(isinstance(env_id, str) and env_id for env_id in ids):
            expected = "a list of ids" if key == "env_ids" else "an id"
            self.problem((*where, key), f"{key} in {section} must be {expected}, not {value!r}")
            return []
        return ids

    def problem(self, where: KeyPath, sentence: str) -> None:
        self.problems.append(f"{self.file.location(*where)}: {sentence}")


def _names(options: Sequence[Mapping[str, Any]]) -> list[str]:
    """Dotted names of the settings, a name per member of a table: ``env_args.max_turns``."""
    names: list[str] = []
    for name, value in (pair for settings in options for pair in settings.items()):
        names += [f"{name}.{member}" for member in value] if name in MERGED else [name]
    return list(dict.fromkeys(names))


def _canonical(name: str) -> str:
    """The canonical of two spellings of a sampling argument."""
    if name.endswith((".temperature", ".max_tokens")):
        return name.removeprefix("sampling_args.")
    return name


# --- writing --------------------------------------------------------------------------------------


def dump(entries: Sequence[tuple[str, EvalSettings]]) -> str:
    """An eval file of the same runs, for ``--dump-config``; comments name the secrets left out."""
    import tomli_w

    from verifiers.runtime.redaction import redacted_text, without_secrets

    texts = []
    for env_id, settings in entries:
        table: dict[str, object] = {"env_id": env_id}
        comments = ""
        for name, attribute in Fields.of(EvalSettings).attributes.items():
            value = getattr(settings, attribute)
            if name == "timeout" and value is None:
                value = "none"
            if isinstance(value, Mapping):
                value, left_out = without_secrets(value)
                for key in left_out:
                    comments += f"# {name}.{key} is a secret and is not printed\n"
            if isinstance(value, str) and (printable := redacted_text(value, None)) != value:
                value = printable
                comments += f"# {name} holds a secret: write it again where *** stands\n"
            if value is not None and value != () and not (name in MERGED and not value):
                # TOML has no null: a table with a null is written as a JSON object in a string
                table[name] = json.dumps(value, ensure_ascii=False) if _has_null(value) else value
        texts.append(comments + tomli_w.dumps({"eval": [table]}))
    return "\n".join(texts)


def _has_null(value: object) -> bool:
    if isinstance(value, Mapping):
        return any(map(_has_null, value.values()))
    return value is None or (isinstance(value, list) and any(map(_has_null, value)))


# --- defaults of an environment -------------------------------------------------------------------


def environment_defaults(source: FoundEnvironment, problems: list[str]) -> dict[str, object]:
    """``[tool.verifiers.eval]`` of the environment's ``pyproject.toml``; empty when it has none.
    Imports nothing.

    Searches the source tree of an editable install, then the distribution's files, then the folders
    around the module.
    """
    for path in _projects_of(source):
        if not path.is_file():
            continue
        try:
            file = TomlFile.read(path)
        except ConfigError as error:
            problems.append(str(error))
            continue
        table = file.document.get("tool", {}).get("verifiers", {}).get("eval")
        if isinstance(table, dict):
            fields = Fields.declared(
                {name: Fields.of(EvalSettings).hints[name] for name in DEFAULTS}
            )
            reader = _Reader(file, problems, fields)
            return reader.settings(table, "[tool.verifiers.eval]", ("tool", "verifiers", "eval"))
    return {}


def _projects_of(source: FoundEnvironment) -> Iterator[Path]:
    import importlib.util

    import importlib_metadata

    if source.distribution is not None:
        installed = importlib_metadata.distribution(source.distribution)
        if (folder := _editable_folder(installed.read_text("direct_url.json") or "{}")) is not None:
            yield folder / "pyproject.toml"
        for file in installed.files or ():
            if str(file).endswith("pyproject.toml"):
                yield Path(str(file.locate()))
    spec = None if source.local else importlib.util.find_spec(source.module.partition(".")[0])
    origin = source.local.file if source.local else spec.origin if spec is not None else None
    if origin is not None:
        folder = Path(origin).parent
        yield from (folder / "pyproject.toml", folder.parent / "pyproject.toml")
        if folder.parent.name == "src":
            yield folder.parent.parent / "pyproject.toml"


def _editable_folder(direct_url: str) -> Path | None:
    """The source folder that a ``direct_url.json`` names; None without one."""
    from urllib.parse import unquote, urlparse

    try:
        origin = decode_json(direct_url)
        path = Path(unquote(urlparse(origin["url"]).path))
        return path if origin["dir_info"]["editable"] else None
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
