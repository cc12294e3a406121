"""Answer the page's requests: one method each, returning plain JSON values, independent of HTTP.

``app`` serves the responses, ``export`` writes them as files. A row number is a saved rollout's
index in its file, so it does not change while a run continues.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import TypedDict
from urllib.parse import urlencode

import numpy as np

from verifiers.errors import ConfigError
from verifiers.results.agreement import agreement
from verifiers.results.columns import NameColumn, Selection
from verifiers.results.comparison import Measured, compare_runs
from verifiers.results.heads import NAMES, NUMBERS
from verifiers.results.index import RowIndex
from verifiers.results.labels import LABEL, completion_hash, read_labels, write_label
from verifiers.results.sets import partners_within
from verifiers.results.statistics import known_values
from verifiers.results.stored import StoredOutputs
from verifiers.results.summary import RunSummary
from verifiers.results.texts import OF_ONE_TURN
from verifiers.storage.directory import METRICS_NAME
from verifiers.storage.images import IMAGES_NAME, StoredImages, stored_name
from verifiers.storage.proof import proof_of, read_proof
from verifiers.view import describe, rollout, sets
from verifiers.view.catalog import TRAINING, Catalog
from verifiers.view.curves import Curves
from verifiers.view.describe import RunEntry, RunSettings
from verifiers.view.listing import Listing, ListPart

MAX_INDEXES, MAX_INDEXED_ROWS = 16, 1_000_000
"""Number of indexes in memory, and of their rows, 60 to 100 bytes each; the least recently used is
dropped first. The index in use stays."""
READ_S = 0.4
"""Seconds that one request may spend reading a file; then it returns a partial result."""
FIRST_READ_S = 0.1
"""The same of the first request for the rows of a file, which the page shows meanwhile."""
LIST_S = 0.15
"""Seconds that one request may spend on the list of runs after the first, which is answered with a
few runs."""
MAX_PREVIEWS = 400


class Runs(ListPart):
    """The list of runs, or the part of it that changed."""

    folders: list[str]
    """Those that were searched."""


class Run(RunEntry, RunSettings):
    """A run."""

    steps: list[int]
    """Of a training: those that have saved rollouts."""


class Names(TypedDict):
    """A column of names: the distinct ones, and the index of each row's, -1 for none."""

    names: list[str]
    codes: Sequence[int]


class Columns(TypedDict):
    """The columns for sorting."""

    generation: int
    first: int
    total: int
    complete: bool
    """False if the time budget ended before the file: request again from ``total``."""
    progress: float
    replaced: list[int]
    damage: str | None
    info: list[str]
    ends: dict[str, str]
    columns: dict[str, list[object] | Names]
    metrics: dict[str, list[float]]


class Rollouts(TypedDict):
    """Complete rollouts, by row number."""

    rollouts: dict[str, rollout.Page]


class Previews(TypedDict):
    """The first words of rollouts, by row number."""

    previews: dict[str, rollout.Preview]


class Matches(TypedDict):
    """Row numbers; ``next`` is where to continue, null at the end."""

    rows: list[int]
    next: int | None


class Metrics(TypedDict):
    """Lines of the metrics of a training."""

    generation: str
    first: int
    lines: list[dict[str, object]]
    steps: list[int]
    proof: dict[str, object]


class Library:
    """Answers requests about the runs of a catalog. Thread-safe.

    Every method with ``run_id`` raises ``LookupError`` for a run, step or row that does not exist.
    """

    def __init__(self, catalog: Catalog, pieces: rollout.Pieces | None = None):
        self.catalog = catalog
        self._pieces = pieces
        self._lock = threading.Lock()
        self._indexes: OrderedDict[tuple[str, int | None], RowIndex] = OrderedDict()
        self._curves: dict[str, Curves] = {}
        self.listing = Listing(catalog)

    def version(self, run_id: str | None = None) -> dict[str, str]:
        """A token that changes with the run, or with the list of runs."""
        if run_id is not None:
            return {"version": describe.version(self.catalog.get(run_id))}
        return {"version": self.listing.version()}

    def runs(self, first: int = 0, budget_s: float = math.inf, generation: str = "") -> Runs:
        """A summary of every run, the newest first, or of those that changed after ``first``, as
        ``Listing.part``; and the folders that were searched."""
        part = self.listing.part(first, budget_s, generation)
        return {**part, "folders": [str(folder) for folder in self.catalog.folders]}

    def run(self, run_id: str) -> Run:
        """A run: its summary, its settings, and the steps of a training."""
        source = self.catalog.get(run_id)
        steps = source.steps() if source.kind == TRAINING else []
        return {**self.listing.entry(source), **describe.settings(source), "steps": steps}

    def columns(
        self,
        run_id: str,
        step: int | None = None,
        first: int = 0,
        generation: int = -1,
        budget_s: float | None = None,
    ) -> Columns:
        """The columns for sorting from row ``first`` on; from 0 when the file was rewritten since
        ``generation``.

        ``budget_s``: None = ``READ_S``, or ``FIRST_READ_S`` for a file of which nothing
        was read yet.
        """
        index = self._index(run_id, step)
        index.read((READ_S if len(index) else FIRST_READ_S) if budget_s is None else budget_s)
        first = first if generation == index.generation else 0
        total = len(index)
        columns: dict[str, list[object] | Names] = {
            n: list(index.columns[n][first:total]) for n in ("example", "key")
        }
        for name in NUMBERS:  # whole numbers without a fraction, as counts are written
            values = index.columns[name][first:total]
            columns[name] = [int(value) if value.is_integer() else value for value in values]
        for name in (*NAMES, "cause"):
            column: NameColumn = index.columns[name]
            columns[name] = {"names": list(column.names), "codes": column.codes[first:total]}
        return {
            "generation": index.generation,
            "first": first,
            "total": total,
            "complete": index.is_complete,
            "progress": index.progress,
            "replaced": index.replaced,
            "damage": index.damage,
            "info": index.info_names(),
            "ends": OF_ONE_TURN,
            "columns": columns,
            "metrics": {name: list(values[first:total]) for name, values in index.metrics.items()},
        }

    def numbers(self, run_id: str, step: int | None = None) -> RunSummary:
        """The numbers of an evaluation, or of a step of a training, as ``GenerateOutputs.summary``
        has them.

        They count every saved rollout, also while the run continues; cost and time are those that
        the run wrote last.
        """
        source, index = self.catalog.get(run_id), self._index(run_id, step)
        index.read()
        described = self.listing.entry(source)
        facts = {name: described.get(name) for name in ("success_metric", "pass_threshold")}
        rows = np.delete(np.arange(len(index)), index.replaced)
        summary = StoredOutputs(index, rows, facts).summary()
        summary["usage"] = {}
        for name in ("input_tokens", "output_tokens"):
            values = known_values(Selection(index.columns[name], rows))
            if any(values):
                summary["usage"][name] = round(math.fsum(values))
        summary["seconds"] = described["seconds"] if step is None else None
        if step is None:
            summary["cost_usd"] = described["cost"]
        return summary

    def previews(self, run_id: str, numbers: Sequence[int], step: int | None = None) -> Previews:
        """The first words of some saved rollouts, by row number."""
        index, numbers = self._read_index(run_id, step), numbers[:MAX_PREVIEWS]
        texts = zip(numbers, index.texts(numbers), strict=True)
        return {"previews": {str(number): rollout.preview(*pair) for number, pair in texts}}

    def rollout(self, run_id: str, number: int, step: int | None = None) -> rollout.Page:
        """A complete rollout; its stored images at the URLs of ``image``."""
        page = self.rollouts(run_id, [number], step)["rollouts"][str(number)]
        of_run = {"run": run_id} | ({} if step is None else {"step": str(step)})
        for part in rollout.stored_images(page):
            part["url"] = f"api/image?{urlencode(of_run | {'name': stored_name(part['url'])})}"
        return page

    def image(self, run_id: str, name: str, step: int | None = None) -> bytes:
        """The file of a stored image, by its name. Raises ``LookupError`` for another name,
        ``JournalError`` for one that is missing or was changed."""
        if not stored_name(f"{IMAGES_NAME}/{name}"):
            raise LookupError(f"{name[:100]!r} is not the name of an image")
        return StoredImages(self.catalog.rows_file(run_id, step).parent).content(name)

    def rollouts(self, run_id: str, numbers: Sequence[int], step: int | None = None) -> Rollouts:
        """Complete rollouts, by row number; their stored images as references."""
        weights = describe.weights(self.catalog.get(run_id))
        index = self._read_index(run_id, step)
        rows = zip(numbers, index.rows(numbers, restores=False), strict=True)
        pages: dict[int, rollout.Page] = {}
        for number, row in rows:
            page = rollout.page(row, weights, self._pieces)
            page["row"] = number
            pages[number] = page
            for part in rollout.stored_images(page):
                if not (index.path.parent / part["url"]).is_file():
                    part["type"] = "address"
                    part["text"] = f"{part.pop('url')} was moved or deleted"
        return {"rollouts": {str(number): page for number, page in pages.items()}}

    def search(
        self,
        run_id: str,
        text: str,
        first: int = 0,
        step: int | None = None,
        budget_s: float = READ_S,
    ) -> Matches:
        """The rows from ``first`` on that contain ``text``."""
        index = self._read_index(run_id, step)
        matches, following = index.search(text, first, budget_s)
        return {"rows": matches, "next": following if following < len(index) else None}

    def values(
        self,
        run_id: str,
        name: str,
        first: int = 0,
        step: int | None = None,
        budget_s: float = READ_S,
    ) -> dict[str, object]:
        """The values of ``info.<key>`` from row ``first`` on; ``next`` is where to continue, null
        at the end.

        Raises ``ValueError`` for another name.
        """
        index = self._read_index(run_id, step)
        values, following = index.info_values(name, first, budget_s)
        return {"values": values, "next": following if following < len(index) else None}

    def metrics(self, run_id: str, first: int = 0, generation: str = "") -> Metrics:
        """The metrics lines of a training run from ``first`` on; all when it was rewritten since
        ``generation``."""
        source = self.catalog.get(run_id)
        if source.kind != TRAINING:
            raise LookupError(f"{run_id!r} is not a training run")
        with self._lock:
            curves = self._curves.setdefault(run_id, Curves(source.folder / METRICS_NAME))
            curves.read()
            first = first if generation == curves.generation else 0
            try:
                proof = read_proof(source.folder, curves.lines)
            except describe.DAMAGE:  # lines of another program
                proof = proof_of([])
            return {
                "generation": curves.generation,
                "first": first,
                "lines": curves.lines[first:],
                "steps": source.steps(),
                "proof": proof,
            }

    def compare(self, run_ids: Sequence[str]) -> dict[str, object]:
        """The rewards of evaluations compared as ``vf-compare`` does: where some have equal settings,
        as those of two nights, each with its partner (``results.sets``), else each with the first of
        its environment.

        Raises ``ConfigError`` for fewer than two runs.
        """
        runs = self.measured(run_ids)
        pairs = partners_within(runs)
        compared = compare_runs(runs, pairs=pairs or None).to_dict()
        paired = {run.name for pair in pairs or zip(runs) for run in pair}
        alone = [run.name for run in runs if run.name not in paired]
        return compared | {"without_partner": alone}

    def sets(self) -> dict[str, list[sets.SetSummary]]:
        """A summary of every set of runs, the newest first."""
        known_sets = sets.sets_of(self.catalog.sources())
        summaries = (
            sets.summary_of(set_id, run_set) for set_id, (run_set, _) in known_sets.items()
        )
        return {"sets": list(summaries)}

    def set(self, set_id: str) -> dict[str, object]:
        """A set as a table, and its change against the newest complete set before it, as of
        ``sets.table_of``. Raises ``LookupError``."""
        known_sets = sets.sets_of(self.catalog.sources())
        return sets.table_of(
            set_id,
            known_sets,
            lambda run_id: self.listing.entry(self.catalog.get(run_id)),
            self.measured,
        )

    def measured(self, run_ids: Sequence[str]) -> list[Measured]:
        """The rewards of evaluations, for comparing them."""
        indexes = {run_id: self._index(run_id, None) for run_id in run_ids}
        for index in indexes.values():
            index.read()
        by_hash = all(key is not None for i in indexes.values() for key in i.columns["key"])
        return [self._measured(run_id, indexes[run_id], by_hash) for run_id in run_ids]

    def labels(self, run_id: str) -> dict[str, object]:
        """Row number -> a person's label of an evaluation's rollouts, and how far the reward agrees
        with them."""
        source = self.catalog.get(run_id)
        if source.kind == TRAINING:
            return {"labels": {}, "agreement": None}
        index, labels_by_row = self._read_index(run_id, None), {}
        for key, (digest, label) in read_labels(source.folder).items():
            row = index.newest(key)
            if row is not None and completion_hash(index.stored(row).get("completion")) == digest:
                labels_by_row[row] = label
        rows = sorted(set(range(len(index))).difference(index.replaced)) if labels_by_row else []
        measured = None
        with contextlib.suppress(ConfigError):  # no labelled rollout has a reward
            examples = [index.columns["key"][row] or index.columns["example"][row] for row in rows]
            rewards = [index.columns["reward"][row] for row in rows]
            labels = [labels_by_row.get(row) for row in rows]
            measured = agreement(rewards, labels, examples, column=LABEL).to_dict()
        return {
            "labels": {str(row): label for row, label in labels_by_row.items()},
            "agreement": measured,
        }

    def label(self, run_id: str, number: int, label: bool | None) -> dict[str, object]:
        """Write a person's label of a rollout, None to take it back. Raises ``ValueError`` for a
        training."""
        source = self.catalog.get(run_id)
        if source.kind == TRAINING:
            raise ValueError("labels are kept for evaluations")
        write_label(source.folder, self._read_index(run_id, None).stored(number), label)
        return self.labels(run_id)

    def _measured(self, run_id: str, index: RowIndex, by_hash: bool) -> Measured:
        source = self.catalog.get(run_id)
        described, replaced = self.listing.entry(source), set(index.replaced)
        values: dict[object, list[float]] = {}
        keys = index.columns["key" if by_hash else "example"]
        for row, pair in enumerate(zip(keys, index.columns["reward"], strict=True)):
            if row not in replaced:
                values.setdefault(pair[0], []).append(pair[1])
        stored = describe.settings(source)
        return Measured(
            run_id,
            described["env"],
            {"reward": values},
            described["model"],
            stored["config"],
            "complete" if described["status"] == "finished" else described["status"],
            stored["metadata"].get("stopped"),
        )

    def _read_index(self, run_id: str, step: int | None) -> RowIndex:
        index = self._index(run_id, step)
        if not len(index):
            index.read()
        return index

    def _index(self, run_id: str, step: int | None) -> RowIndex:
        # first: a run with a cached index may have been removed
        file = self.catalog.rows_file(run_id, step)
        with self._lock:
            index = self._indexes.pop((run_id, step), None)
            if index is None or index.path != file:
                index = RowIndex(file, describe.metric_names(self.catalog.get(run_id)))
            self._indexes[run_id, step] = index
            while len(self._indexes) > MAX_INDEXES or (
                len(self._indexes) > 1 and sum(map(len, self._indexes.values())) > MAX_INDEXED_ROWS
            ):
                self._indexes.popitem(last=False)
        return index
