"""The finished rollouts of a large run: they stay in the journal, and an index of it is all that is
held.

The results that the run returns read their texts from there when they are asked for
(``results.stored``). The index is kept beside the journal, also while the run continues, so that
the run resumes without decoding each line, however it ended.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import islice
from typing import Any

import numpy as np

from verifiers.results import GenerateOutputs
from verifiers.results.columns import Selection
from verifiers.results.heads import counts_of_text
from verifiers.results.index import RowIndex
from verifiers.results.index_file import IndexFile
from verifiers.results.rows import RolloutOutput
from verifiers.results.run_metadata import Measurements
from verifiers.results.stored import StoredOutputs, measurements
from verifiers.rollouts.state import State
from verifiers.runs.plan import NUM_COMPARED, Job
from verifiers.runs.store import RunStore, no_key, other_than

READ_EVERY = 1_000
"""Rollouts stored after which they are indexed: the event loop waits for it, some 20 ms."""
PART_ROWS = 2**14
"""Indexed rollouts after which they are kept beside the journal."""


class LargeRunStore(RunStore):
    """A ``RunStore`` that holds no rollouts."""

    def open(self, stack: ExitStack) -> None:
        """Index the journal, and open it. *Raises* JournalError for damage."""
        assert self.directory is not None
        file = self.directory.results_file
        self._index = index = RowIndex(file)
        self._index_file = IndexFile(index)
        self._is_kept = True
        """Whether the index could be written when it last had to be."""
        if file.exists():
            self._index_file.restore()
            self._read_and_keep()
            if (row := index.keys.first_missing) is not None:
                raise no_key(file, row + 1)
        self.journal = stack.enter_context(
            self.directory.open_journal(checked=(index.end, len(index)))
        )
        self._num_before, self._num_unread = len(index), 0
        self._is_newest = np.ones(len(index), dtype=bool)
        """Of each row that was saved before: whether no newer row replaces it, and ``find`` was not
        asked for it."""
        self._is_newest[index.keys.replaced()] = False
        self.num_saved = int(self._is_newest.sum())
        self._rows: np.ndarray = np.full(len(self.plan), -1, dtype=np.int64)
        """Row number in the journal by index in the plan, of those saved before; -1 = not finished,
        or stored since."""

    def find(self, keys: Sequence[str]) -> Sequence[Any]:
        rows = self._index.keys.find(keys)
        self._is_newest[rows[rows >= 0]] = False
        return [None if row < 0 else row for row in rows.tolist()]

    def has_error(self, rollout: int) -> bool:
        return bool(self._index.columns["error"].codes[rollout] >= 0)

    def take(self, position: int, example_id: int, rollout: int) -> None:
        self._rows[position] = rollout
        column = self._index.columns["counts"]
        self.coverage.add_counts(counts_of_text(column.names[column.codes[rollout]]))

    def outside(self) -> list[str]:
        self._index.keys.forget_order()  # the plan was compared
        return [
            self._index.stored(row)["rollout_key"]
            for row in np.flatnonzero(self._is_newest).tolist()
        ]

    def in_order(self) -> list[RolloutOutput]:
        """The finished rollouts, in the order of the plan: all are read."""
        return self._outputs().outputs

    def measurements(self) -> Measurements:
        return measurements(self._index, self._finished())

    def served_models(self, requested: str) -> dict[str, int]:
        counts = Counter(Selection(self._index.columns["served"], self._finished()))
        names = Counter[str]()
        for served, count in counts.items():
            if served is not None:
                names.update(dict.fromkeys(served.split("\n") if served else [requested], count))
        return other_than(requested, names)

    def complete(self, jobs: list[Job], states: list[State]) -> None:
        """Do nothing: advantages are computed from the rewards when they are read."""

    def outputs(self) -> GenerateOutputs:
        outputs = self._outputs()
        self._keep_index()
        return outputs

    def _keep(self, jobs: list[Job], outputs: list[RolloutOutput], states: list[State]) -> None:
        self._num_unread += len(jobs)
        if self._num_unread >= READ_EVERY:
            self._num_unread = 0
            self._read_and_keep()

    def _read_and_keep(self) -> None:
        """Index what was stored since, and keep each complete part. *Raises* JournalError."""
        while True:
            self._read(PART_ROWS)
            if self._index_file.num_missing >= PART_ROWS:
                self._keep_index()
            if self._index.is_complete:
                return

    def _read(self, max_rows: float = math.inf) -> None:
        """Index what was stored since. *Raises* JournalError."""
        self._index.read(max_rows=max_rows)
        if self._index.failure is not None:
            raise self._index.failure

    def _keep_index(self) -> None:
        """Write the rows of the index that are not yet kept."""
        try:
            self._index_file.append()
        except (OSError, TypeError) as error:  # it is a cache
            if self._is_kept:
                self.logger.warning(
                    "%s has no whole index, so it resumes slowly: %s", self._index.path, error
                )
            self._is_kept = False
            return
        if not self._is_kept:
            self.logger.warning("%s has a whole index again", self._index.path)
        self._is_kept = True

    def _finished(self) -> np.ndarray:
        """Numbers of the rows of finished rollouts, those stored since the start last."""
        self._read()
        return np.concatenate(
            [self._rows[self._rows >= 0], np.arange(self._num_before, len(self._index))]
        )

    def _outputs(self) -> StoredOutputs:
        self._read()
        rows, work = self._rows.copy(), iter(() if self.work is None else self.work.keys())
        while pending := list(islice(work, NUM_COMPARED)):
            positions, keys = zip(*pending, strict=True)
            newest = self._index.keys.find(keys)
            rows[list(positions)] = np.where(newest < self._num_before, -1, newest)
        self._index.keys.forget_order()
        examples = np.repeat(np.fromiter(self.plan.example_ids(), np.int64), self.plan.siblings)
        is_finished = rows >= 0
        return StoredOutputs(
            self._index,
            rows[is_finished],
            {},
            fills_advantages=self.fills_advantages,
            example_ids=examples[is_finished],
        )
