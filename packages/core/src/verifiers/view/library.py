"""The page's questions and their answers: one method each, plain JSON values out.

``app`` serves the answers to a running page, ``export`` writes the same answers as files. Nothing here knows of HTTP.
A row number is a row's place in its file, so it stays the same while a run goes on.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from verifiers.view import describe, rollout
from verifiers.view.catalog import METRICS_NAME, TRAINING, Catalog, Source
from verifiers.view.curves import Curves
from verifiers.view.index import NAMES, NUMBERS, RowIndex

MAX_INDEXES = 16
"""Indexes kept in memory; the least recently used one goes first."""
READ_S = 0.4
"""How long one answer may read on in a file before it gives what it has."""
MAX_PREVIEWS = 400


class Library:
    """Answers about the runs of a catalog. Safe to ask from several threads.

    Every method with ``run_id`` raises ``LookupError`` for a run, step or row that does not exist.
    """

    def __init__(self, catalog: Catalog, pieces: rollout.Pieces | None = None):
        self.catalog = catalog
        self._pieces = pieces
        self._lock = threading.Lock()
        self._indexes: OrderedDict[tuple[str, int | None], RowIndex] = OrderedDict()
        self._curves: dict[str, Curves] = {}
        self._described: dict[str, tuple[str, dict[str, Any]]] = {}

    def version(self, run_id: str | None = None) -> dict[str, Any]:
        """A token that changes with the run, or with the list of runs."""
        if run_id is not None:
            return {"version": describe.version(self.catalog.get(run_id))}
        tokens = [f"{source.id}:{describe.version(source)}" for source in self.catalog.sources().values()]
        return {"version": f"{hash(tuple(tokens)) & 0xFFFFFFFFFFFF:x}"}

    def runs(self) -> dict[str, Any]:
        """Every run at a glance, and the folders they are in."""
        described = []
        for source in self.catalog.sources().values():
            try:
                described.append(self._describe(source))
            except OSError:  # removed since it was found
                continue
        return {"runs": described, "folders": [str(folder) for folder in self.catalog.folders]}

    def run(self, run_id: str) -> dict[str, Any]:
        """One run: its line of the list, its settings, and the steps of a training that have rollouts."""
        source = self.catalog.get(run_id)
        made = dict(self._describe(source)) | describe.settings(source)
        made["steps"] = source.steps() if source.kind == TRAINING else []
        return made

    def columns(
        self, run_id: str, step: int | None = None, first: int = 0, generation: int = -1, budget_s: float = READ_S
    ) -> dict[str, Any]:
        """The sorting columns from row ``first`` on; from 0 when the file was written anew since ``generation``.

        ``complete`` is false while there is more to read than the time allowed: ask again from ``total``.
        """
        index = self._index(run_id, step)
        index.read(budget_s)
        first = first if generation == index.generation else 0
        total = len(index)
        columns: dict[str, Any] = {name: index.columns[name][first:total] for name in ("example", "key", *NUMBERS)}
        columns |= {name: _coded(index.columns[name][first:total]) for name in NAMES}
        return {
            "generation": index.generation,
            "first": first,
            "total": total,
            "complete": index.is_complete,
            "progress": index.progress,
            "replaced": list(index.replaced),
            "damage": index.damage,
            "columns": columns,
            "metrics": {name: values[first:total] for name, values in index.metrics.items()},
        }

    def previews(self, run_id: str, numbers: Sequence[int], step: int | None = None) -> dict[str, Any]:
        """The first words of some rows, by row number."""
        index, numbers = self._read_index(run_id, step), numbers[:MAX_PREVIEWS]
        texts = zip(numbers, index.texts(numbers), strict=True)
        return {"previews": {str(number): rollout.preview(*pair) for number, pair in texts}}

    def rollout(self, run_id: str, number: int, step: int | None = None) -> dict[str, Any]:
        """One rollout, whole."""
        source = self.catalog.get(run_id)
        row = self._read_index(run_id, step).row(number)
        return {"row": number} | rollout.page(row, describe.settings(source)["weights"], self._pieces)

    def search(
        self, run_id: str, text: str, first: int = 0, step: int | None = None, budget_s: float = READ_S
    ) -> dict[str, Any]:
        """Rows from ``first`` on that hold ``text``; ``next`` is where to go on, null at the end."""
        index = self._read_index(run_id, step)
        found, following = index.search(text, first, budget_s)
        return {"rows": found, "next": following if following < len(index) else None}

    def metrics(self, run_id: str, first: int = 0, generation: str = "") -> dict[str, Any]:
        """A training's lines of metrics from line ``first`` on; all when they were cut back since ``generation``."""
        source = self.catalog.get(run_id)
        if source.kind != TRAINING:
            raise LookupError(f"{run_id!r} is no training")
        with self._lock:
            curves = self._curves.setdefault(run_id, Curves(source.folder / METRICS_NAME))
            curves.read()
            first = first if generation == curves.generation else 0
            return {
                "generation": curves.generation,
                "first": first,
                "lines": curves.lines[first:],
                "steps": source.steps(),
            }

    def _describe(self, source: Source) -> dict[str, Any]:
        version = describe.version(source)
        known = self._described.get(source.id)
        if known is None or known[0] != version:
            known = self._described[source.id] = version, describe.describe(source)
        return known[1]

    def _read_index(self, run_id: str, step: int | None) -> RowIndex:
        index = self._index(run_id, step)
        if not len(index):
            index.read()
        return index

    def _index(self, run_id: str, step: int | None) -> RowIndex:
        file = self.catalog.rows_file(run_id, step)  # first: also a run whose index is there may be gone
        with self._lock:
            index = self._indexes.pop((run_id, step), None)
            if index is None or index.path != file:
                index = RowIndex(file, describe.metric_names(self.catalog.get(run_id)))
            self._indexes[run_id, step] = index
            while len(self._indexes) > MAX_INDEXES:
                self._indexes.popitem(last=False)
        return index


def _coded(values: Sequence[str | None]) -> dict[str, Any]:
    """A column of few different names: the names, and for each row which of them; -1 for none."""
    names: dict[str, int] = {}
    codes = [-1 if value is None else names.setdefault(value, len(names)) for value in values]
    return {"names": list(names), "codes": codes}
