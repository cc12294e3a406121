"""Find the runs below some folders by their files, and open them by id.

A run's id is its path relative to its folder. An id is looked up among the known runs, never joined to a path, so no id
can leave the folders. Symbolic links are not followed. ``describe`` and ``index`` read the files' content.
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
"""Folder levels that are searched for runs."""
FRESH_S = 1.0
"""Seconds for which the list of runs is cached, at least."""
COST_SHARE = 0.2
"""Largest share of the time that is spent on searching the folders; the list of many runs is cached for longer."""
_SKIPPED = frozenset(("node_modules", "__pycache__", "site-packages", COMPLETIONS_NAME))
_STEP = re.compile(r"(step|dropped)-(\d+)\.jsonl")


@dataclass(frozen=True, slots=True)
class Source:
    """One run: its id, its folder, and whether it is an "evaluation" or a "training"."""

    id: str
    folder: Path
    kind: str

    def file(self, step: int | None = None) -> Path:
        """The file of its saved rollouts; of a training run those of ``step``, of -step those dropped before it."""
        if self.kind == EVALUATION:
            return self.folder / RESULTS_NAME
        name = f"dropped-{-step}" if step is not None and step < 0 else f"step-{step}"
        return self.folder / COMPLETIONS_NAME / f"{name}.jsonl"

    def steps(self) -> list[int]:
        """The steps of a training run that have saved rollouts, in order; -n before n has those dropped before n."""
        try:
            names = os.listdir(self.folder / COMPLETIONS_NAME)
        except OSError:
            return []
        found = [
            -int(match[2]) if match[1] == "dropped" else int(match[2]) for match in map(_STEP.fullmatch, names) if match
        ]
        return sorted(found, key=lambda step: (abs(step), step))


class Catalog:
    """The runs below ``folders``; the list is cached for a second, of very many runs for some.

    Raises: ``ConfigError`` for a folder that does not exist.
    """

    def __init__(self, folders: Sequence[str | os.PathLike[str]]):
        self.folders = [Path(folder).resolve() for folder in folders]
        for path, folder in zip(folders, self.folders, strict=True):
            if not folder.is_dir():
                raise ConfigError(f"{path} is not a folder; name a folder with runs, or one run's folder")
        self._lock = threading.Lock()
        self._sources: dict[str, Source] = {}
        self._next_scan = 0.0

    def sources(self) -> dict[str, Source]:
        """Id -> run."""
        with self._lock:
            if (started := time.monotonic()) >= self._next_scan:
                self._sources = {source.id: source for source in self._scan()}
                ended = time.monotonic()
                self._next_scan = ended + max(FRESH_S, (ended - started) / COST_SHARE)
            return self._sources

    def get(self, run_id: str) -> Source:
        """The run with this id. Raises: ``LookupError``."""
        source = self.sources().get(run_id)
        if source is None or not self._is_inside(source.folder):
            raise LookupError(f"there is no run {run_id!r}")
        return source

    def rows_file(self, run_id: str, step: int | None = None) -> Path:
        """The file of a run's saved rollouts. Raises: ``LookupError`` when it is missing, or outside the folders."""
        source = self.get(run_id)
        if step is not None and source.kind == EVALUATION:
            raise LookupError(f"{run_id!r} is an evaluation, which has no steps")
        file = source.file(step)
        if file.is_symlink() or not file.is_file() or not self._is_inside(file):
            raise LookupError(f"{run_id!r} has no saved rollouts" + ("" if step is None else f" of step {step}"))
        return file

    def _is_inside(self, path: Path) -> bool:
        """Whether a path lies in one of the folders, also after links were created since the last scan."""
        real = path.resolve()
        return any(real.is_relative_to(folder) for folder in self.folders)

    def _scan(self) -> Iterator[Source]:
        ids: set[str] = set()
        for folder in self.folders:
            label, root = _label(folder), str(folder)
            for path, kind in _runs_below(root, MAX_DEPTH):
                run_id = path.removeprefix(root).lstrip("/") or label
                if run_id in ids:
                    run_id = f"{label}/{run_id}"
                if run_id not in ids:
                    ids.add(run_id)
                    yield Source(run_id, Path(path), kind)


def default_folders() -> list[Path]:
    """``./outputs`` and every ``./environments/*/outputs`` that exist. Raises: ``ConfigError`` when none does."""
    candidates = [Path("outputs"), *sorted(Path("environments").glob("*/outputs"))]
    if existing := [folder for folder in candidates if folder.is_dir()]:
        return existing
    raise ConfigError("there is no ./outputs and no ./environments/*/outputs here; name the folder: vf-view FOLDER")


def _label(folder: Path) -> str:
    """A distinguishing name of a folder: its name, or for ``…/<module>/outputs`` its parent's name."""
    return folder.parent.name if folder.name == "outputs" else folder.name


def _runs_below(folder: str, depth: int) -> Iterator[tuple[str, str]]:
    """(folder, kind) of each run, sorted by name. A training run may contain evaluations; an evaluation has no runs."""
    try:
        with os.scandir(folder) as entries:
            listed = sorted(entries, key=lambda entry: entry.name)
    except OSError:  # removed meanwhile, or not readable
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
            yield from _runs_below(entry.path, depth - 1)
