"""The runs below some folders: found by their files, opened by name, and nothing outside them.

A run's id is its place below its folder. An id is looked up among the runs that were found, never joined to a path, so
no id can lead elsewhere. Links are not followed: a run that is reached through one does not exist here.

This module reads no content (``describe``, ``index``).
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from verifiers.errors import ConfigError
from verifiers.storage.directory import RESULTS_NAME

METRICS_NAME, COMPLETIONS_NAME = "metrics.jsonl", "completions"
EVALUATION, TRAINING = "evaluation", "training"
MAX_DEPTH = 10
"""How far below a given folder runs are looked for."""
FRESH_S = 1.0
"""How long a list of runs is taken for current."""
_SKIPPED = frozenset(("node_modules", "__pycache__", "site-packages", COMPLETIONS_NAME))
_STEP = re.compile(r"step-(\d+)\.jsonl")


@dataclass(frozen=True, slots=True)
class Source:
    """One run: its id, its folder, and whether it is an "evaluation" or a "training"."""

    id: str
    folder: Path
    kind: str

    def file(self, step: int | None = None) -> Path:
        """The file of its rows; of a training the rollouts that ``step`` trained on."""
        if self.kind == EVALUATION:
            return self.folder / RESULTS_NAME
        return self.folder / COMPLETIONS_NAME / f"step-{step}.jsonl"

    def steps(self) -> list[int]:
        """The steps of a training whose rollouts were kept."""
        try:
            names = os.listdir(self.folder / COMPLETIONS_NAME)
        except OSError:
            return []
        return sorted(int(match[1]) for match in map(_STEP.fullmatch, names) if match)


class Catalog:
    """The runs below ``folders``, looked up again when the list is older than a second.

    Raises: ``ConfigError`` for a folder that does not exist.
    """

    def __init__(self, folders: Sequence[str | os.PathLike[str]]):
        self.folders = [Path(folder).resolve() for folder in folders]
        for given, folder in zip(folders, self.folders, strict=True):
            if not folder.is_dir():
                raise ConfigError(f"{given} is not a folder; give a folder with runs, or one run's folder")
        self._lock = threading.Lock()
        self._found: dict[str, Source] = {}
        self._looked_at = -FRESH_S

    def sources(self) -> dict[str, Source]:
        """Id -> run."""
        with self._lock:
            if time.monotonic() - self._looked_at >= FRESH_S:
                self._found = {source.id: source for source in self._look()}
                self._looked_at = time.monotonic()
            return self._found

    def get(self, run_id: str) -> Source:
        """The run of this id. Raises: ``LookupError``."""
        found = self.sources().get(run_id)
        if found is None or not self._is_inside(found.folder):
            raise LookupError(f"there is no run {run_id!r}")
        return found

    def rows_file(self, run_id: str, step: int | None = None) -> Path:
        """The file of a run's rows. Raises: ``LookupError`` when there is none, or when it leads elsewhere."""
        file = self.get(run_id).file(step)
        if file.is_symlink() or not file.is_file() or not self._is_inside(file):
            raise LookupError(f"{run_id!r} has no rows" + ("" if step is None else f" of step {step}"))
        return file

    def _is_inside(self, path: Path) -> bool:
        """Whether a path lies in one of the folders, whatever links were put on the way since it was found."""
        real = path.resolve()
        return any(real.is_relative_to(folder) for folder in self.folders)

    def _look(self) -> Iterator[Source]:
        taken: set[str] = set()
        for folder in self.folders:
            label = _label(folder)
            for place, kind in _runs_below(folder, MAX_DEPTH):
                inside = place.relative_to(folder).as_posix()
                run_id = inside if inside != "." else label
                if run_id in taken:
                    run_id = f"{label}/{run_id}"
                if run_id not in taken:
                    taken.add(run_id)
                    yield Source(run_id, place, kind)


def default_folders() -> list[Path]:
    """``./outputs`` and every ``./environments/*/outputs`` that exist. Raises: ``ConfigError`` when none does."""
    found = [Path("outputs"), *sorted(Path("environments").glob("*/outputs"))]
    if existing := [folder for folder in found if folder.is_dir()]:
        return existing
    raise ConfigError("there is no ./outputs and no ./environments/*/outputs here; name the folder: vf-view FOLDER")


def _label(folder: Path) -> str:
    """What tells folders apart: their name, or for ``…/<module>/outputs`` the name above it."""
    return folder.parent.name if folder.name == "outputs" else folder.name


def _runs_below(folder: Path, depth: int) -> Iterator[tuple[Path, str]]:
    """(folder, kind) of each run, in order of names. A training may hold evaluations; an evaluation holds no runs."""
    try:
        with os.scandir(folder) as entries:
            listed = sorted(entries, key=lambda entry: entry.name)
    except OSError:  # removed meanwhile, or not ours to read
        return
    files = {entry.name for entry in listed if entry.is_file(follow_symlinks=False)}
    if RESULTS_NAME in files:
        yield folder, EVALUATION
        return
    if METRICS_NAME in files:
        yield folder, TRAINING
    for entry in listed:
        hidden = entry.name.startswith((".", "checkpoint-")) or entry.name in _SKIPPED
        if depth and not hidden and entry.is_dir(follow_symlinks=False):
            yield from _runs_below(folder / entry.name, depth - 1)
