"""Find the runs below some folders by their files, and open them by id.

A run's id is its path relative to its folder. An id is looked up among the known runs, never joined
to a path, so no id can leave the folders. Symbolic links are not followed. ``describe`` and
``index`` read the files' content.

A thread searches, the folders that changed last first, so that the newest of very many runs are
known at once.
"""

from __future__ import annotations

import functools
import heapq
import math
import os
import re
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from verifiers.errors import ConfigError
from verifiers.storage.directory import (
    COMPLETIONS_NAME,
    METRICS_NAME,
    RESULTS_NAME,
    may_hold_runs,
)

EVALUATION, TRAINING = "evaluation", "training"
MAX_DEPTH = 10
"""Folder levels that are searched for runs."""
FRESH_S = 1.0
"""Seconds for which the list of runs is cached, at least."""
COST_SHARE = 0.2
"""Largest share of the time that is spent on searching the folders; the list of many runs is cached
for longer."""
GET_S = 0.1
"""Seconds for which a request about a known run waits for a search: it may be gone."""
_STEP = re.compile(r"(step|dropped)-(\d+)\.jsonl")


@dataclass(frozen=True, slots=True)
class Source:
    """A run: its id, its folder, and whether it is an "evaluation" or a "training"."""

    id: str
    folder: Path
    kind: str

    def file(self, step: int | None = None) -> Path:
        """The file of its saved rollouts; of a training run those of ``step``, of -step those
        dropped before it."""
        if self.kind == EVALUATION:
            return self.folder / RESULTS_NAME
        name = f"dropped-{-step}" if step is not None and step < 0 else f"step-{step}"
        return self.folder / COMPLETIONS_NAME / f"{name}.jsonl"

    def steps(self) -> list[int]:
        """The steps of a training run that have saved rollouts, in order; -n before n has those
        dropped before n."""
        try:
            names = os.listdir(self.folder / COMPLETIONS_NAME)
        except OSError:
            return []
        matches = filter(None, map(_STEP.fullmatch, names))
        steps = [-int(m[2]) if m[1] == "dropped" else int(m[2]) for m in matches]
        return sorted(steps, key=lambda step: (abs(step), step))


class Catalog:
    """The runs below ``folders``; the list is cached for a second, of very many runs for some.

    Raises: ``ConfigError`` for a folder that does not exist.
    """

    def __init__(self, folders: Sequence[str | os.PathLike[str]]):
        self.folders = [Path(folder).resolve() for folder in folders]
        for path, folder in zip(folders, self.folders, strict=True):
            if not folder.is_dir():
                raise ConfigError(
                    f"{path} is not a folder; name a folder with runs, or one run's folder"
                )
        self._roots = [str(folder) for folder in self.folders]
        self._labels = [_label(folder) for folder in self.folders]
        self._changed = threading.Condition()
        self._sources: dict[str, Source] = {}
        self._is_searched = self._is_searching = False
        self._is_folder = functools.cache(os.path.isdir)  # a new cache in every search
        self._affordable = self._due = 0.0
        """When the folders may be searched again at an acceptable cost, and when they are."""

    def sources(self) -> dict[str, Source]:
        """Id -> run, of all runs."""
        return self.sources_known(math.inf, math.inf)[0]

    def sources_known(self, least: float, wait_s: float) -> tuple[dict[str, Source], bool]:
        """(id -> run of those that were found, newest first; whether the folders were searched to
        the end).

        Searches again when that is due, and waits ``wait_s`` seconds for the result; the first time
        it waits until there are ``least`` runs.
        """
        deadline = time.monotonic() + wait_s
        with self._changed:
            self.search()
            while self._is_searching:
                if self._is_searched and (remaining_s := deadline - time.monotonic()) > 0:
                    self._changed.wait(None if remaining_s == math.inf else remaining_s)
                elif not self._is_searched and len(self._sources) < least:
                    self._changed.wait()
                else:
                    break
            return (self._sources if self._is_searched else dict(self._sources)), self._is_searched

    def search(self, is_wanted: bool = False) -> None:
        """Search the folders in a thread if that is due, or ``is_wanted`` and affordable."""
        with self._changed:
            due = self._affordable if is_wanted else self._due
            if not self._is_searching and time.monotonic() >= due:
                self._is_searching = True
                threading.Thread(target=self._search, name="vf-view-search", daemon=True).start()

    def _search(self) -> None:
        """Find all runs; during the first search they can be seen in turn."""
        started, sources = time.monotonic(), {}
        try:
            for source in self._scan():
                sources[source.id] = source
                if not self._is_searched:
                    with self._changed:
                        self._sources[source.id] = source
                        self._changed.notify_all()
        finally:
            ended = time.monotonic()
            with self._changed:
                self._sources = sources
                self._is_searched, self._is_searching = True, False
                self._affordable = ended + (ended - started) / COST_SHARE
                self._due = max(ended + FRESH_S, self._affordable)
                self._changed.notify_all()

    def get(self, run_id: str) -> Source:
        """The run with this id. Raises: ``LookupError``."""
        source = self.sources_known(0, GET_S)[0].get(run_id)
        if source is None:  # it may be new
            self.search(is_wanted=True)
            source = self.sources().get(run_id)
        if source is None or not self._is_inside(source.folder):
            raise LookupError(f"there is no run {run_id!r}")
        return source

    def rows_file(self, run_id: str, step: int | None = None) -> Path:
        """The file of a run's saved rollouts. Raises: ``LookupError`` when missing, or outside."""
        source = self.get(run_id)
        if step is not None and source.kind == EVALUATION:
            raise LookupError(f"{run_id!r} is an evaluation, which has no steps")
        file = source.file(step)
        if file.is_symlink() or not file.is_file() or not self._is_inside(file):
            of_step = "" if step is None else f" of step {step}"
            raise LookupError(f"{run_id!r} has no saved rollouts{of_step}")
        return file

    def _is_inside(self, path: Path) -> bool:
        """Whether a path lies in one of the folders, links made since the last scan resolved."""
        real = path.resolve()
        return any(real.is_relative_to(folder) for folder in self.folders)

    def _scan(self) -> Iterator[Source]:
        self._is_folder = functools.cache(os.path.isdir)
        for number, path, kind in runs_below(self._roots):
            run_id = self._id(number, path.removeprefix(self._roots[number]).lstrip("/"))
            if run_id is not None:
                yield Source(run_id, Path(path), kind)

    def _id(self, number: int, relative: str) -> str | None:
        """The id of a run of folder ``number``, whatever order they are found in: earlier folders
        name theirs first.

        None when they have named both that it could have.
        """
        label = self._labels[number]
        name = relative or label
        for run_id in (name, f"{label}/{name}"):
            if not any(self._has(earlier, run_id) for earlier in range(number)):
                return run_id
        return None

    def _has(self, number: int, run_id: str) -> bool:
        """Whether a run of folder ``number`` has this id."""
        root, label = self._roots[number], self._labels[number]
        possible = [run_id, run_id.removeprefix(f"{label}/")]
        if run_id in (label, f"{label}/{label}"):
            possible.append("")
        return any(self._is_run(f"{root}/{p}") and self._id(number, p) == run_id for p in possible)

    def _is_run(self, folder: str) -> bool:
        files = (f"{folder}/{name}" for name in (RESULTS_NAME, METRICS_NAME))
        return self._is_folder(os.path.dirname(folder)) and any(map(os.path.isfile, files))


def default_folders() -> list[Path]:
    """``./outputs`` and every ``./environments/*/outputs``. Raises: ``ConfigError`` without any."""
    candidates = [Path("outputs"), *sorted(Path("environments").glob("*/outputs"))]
    if existing := [folder for folder in candidates if folder.is_dir()]:
        return existing
    raise ConfigError(
        "there is no ./outputs and no ./environments/*/outputs here; name the folder: vf-view"
        " FOLDER"
    )


def _label(folder: Path) -> str:
    """What distinguishes a folder: its name, or for ``…/<module>/outputs`` its parent's."""
    return folder.parent.name if folder.name == "outputs" else folder.name


def runs_below(roots: Sequence[str]) -> Iterator[tuple[int, str, str]]:
    """(number of the root, folder, kind) of each run, the folder that changed last first.

    A training run may contain evaluations; an evaluation has no runs.
    """
    pending = [(0, root, number, MAX_DEPTH) for number, root in enumerate(roots)]  # a heap
    while pending:
        _, folder, number, depth = heapq.heappop(pending)
        names, below = _listed(folder)
        if RESULTS_NAME in names:
            yield number, folder, EVALUATION
            continue
        if METRICS_NAME in names:
            yield number, folder, TRAINING
        if depth:
            for changed_ns, path in below:
                heapq.heappush(pending, (-changed_ns, path, number, depth - 1))


def _listed(folder: str) -> tuple[set[str], list[tuple[int, str]]]:
    """(the files that make a folder a run, (time of the last change, path) of each folder in it
    that may hold runs)."""
    names, below = set(), []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                name = entry.name
                if name in (RESULTS_NAME, METRICS_NAME):
                    if entry.is_file(follow_symlinks=False):
                        names.add(name)
                elif not may_hold_runs(name):
                    continue
                elif entry.is_dir(follow_symlinks=False):
                    below.append((entry.stat(follow_symlinks=False).st_mtime_ns, entry.path))
    except OSError:  # removed meanwhile, or not readable
        pass
    return names, below
