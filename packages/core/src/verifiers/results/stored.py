"""Results in a file that is too large to hold: its numbers in memory, its texts read when they are
asked for.

Columns of numbers and the statistics are computed from an index of the file, some 60 to 100 bytes
per rollout; a column of texts (``results["completions"]``) reads that column alone.
``results.outputs``, and whatever needs whole rollouts (``filter``, ``states``), reads all of them
and keeps them. Until then the file must stay as it was.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from verifiers.results.columns import Selection
from verifiers.results.index import RowIndex
from verifiers.results.labels import LABEL
from verifiers.results.outputs import COLUMNS, GenerateOutputs
from verifiers.results.rows import DISK_FIELDS, RolloutOutput, keep_columns, set_advantage
from verifiers.results.run_metadata import GenerateMetadata, Measurements
from verifiers.results.statistics import numbered
from verifiers.rollouts.error_info import ErrorInfo
from verifiers.rubrics.advantages import centered_advantages

_INDEXED = {"rewards": "reward", "example_ids": "example", "stop_conditions": "stop_condition"}
"""Column of the results -> column of the index, where they are equal."""


class StoredOutputs(GenerateOutputs):
    """``GenerateOutputs`` over an indexed file.

    Args:
        index: The index, read to its end.
        numbers: Row numbers of the rollouts, in the order of the results: an array of integers.
        facts: Facts of the metadata.
        state_columns: Names of the extra columns of a rollout; None = all.
        labels: Row number -> a person's label; None if the run has no labels.
        fills_advantages: Whether a group without advantages gets reward minus group mean.
        example_ids: For the results that a run returns: the id of its plan for each rollout, an
            array of integers; its rollouts have no ``DISK_FIELDS``.
    """

    def __init__(
        self,
        index: RowIndex,
        numbers: np.ndarray,
        facts: Mapping[str, object],
        state_columns: Sequence[str] | None = None,
        labels: Mapping[int, bool | None] | None = None,
        fills_advantages: bool = True,
        example_ids: np.ndarray | None = None,
    ):
        self._index, self._numbers, self._facts = index, numbers, dict(facts)
        self._state_columns = state_columns
        self._labels = labels
        self._fills_advantages = fills_advantages
        self._example_ids = example_ids
        self._states = None
        self._every_advantage: np.ndarray | None = None
        self._columns: dict[str, object] = {}

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Python calls this for missing attributes only: once for ``outputs``, once for
            ``metadata``."""
            if name == "outputs":
                value = list(self.rollouts())
            elif name == "metadata":
                value = GenerateMetadata.of(self.measurements(), **self._facts)
            else:
                return super().__getattr__(name)
            setattr(self, name, value)
            return value

    def __len__(self) -> int:
        return len(self._numbers)

    def __reduce__(self) -> tuple[object, ...]:
        return GenerateOutputs, (self.outputs, self.metadata)

    def rollouts(self) -> Iterator[RolloutOutput]:
        """Each rollout in order, read from the file; only one is in memory."""
        if self._is_read:
            yield from self.outputs
            return
        advantages = self._advantages()
        for index, row in enumerate(self._index.rows(self._numbers)):
            output = self._output(index, row)
            set_advantage(output, self._advantage(advantages[index]))
            yield output

    def at(self, place: int) -> RolloutOutput:
        if self._is_read:
            return self.outputs[place]
        place = range(len(self))[place]
        output = self._output(place, self._index.row(int(self._numbers[place])))
        set_advantage(output, self._advantage(self._advantage_at(place)))
        return output

    def _output(self, index: int, output: RolloutOutput) -> RolloutOutput:
        """A rollout as it is on disk, without what these results leave out."""
        if self._state_columns is not None:
            keep_columns(output, self._state_columns)
        if self._labels is not None:
            output[LABEL] = self._labels.get(int(self._numbers[index]))
        if self._example_ids is not None:
            output["example_id"] = int(self._example_ids[index])
            for name in DISK_FIELDS:
                output.pop(name, None)
        return output

    @property
    def _is_read(self) -> bool:
        return "outputs" in self.__dict__

    def measurements(self) -> Measurements:
        if self._is_read:
            return super().measurements()
        return measurements(self._index, self._numbers, self._example_ids)

    def _failures(self) -> Iterable[ErrorInfo]:
        if self._is_read:
            return super()._failures()
        failed = np.asarray(self._index.columns["error"].codes)[self._numbers] >= 0
        return (row["error"] for row in self._index.rows(self._numbers[failed]))

    def _has_states(self) -> bool:
        if self._is_read:
            return super()._has_states()
        return len(self) > 0 and "trajectory" in self.at(0)

    def _make_column(self, column: str) -> object:
        index, numbers = self._index, self._numbers
        if self._is_read or column == "states":
            return super()._make_column(column)
        if column == "example_ids" and self._example_ids is not None:
            return self._example_ids.tolist()
        if column in _INDEXED:
            return list(Selection(index.columns[_INDEXED[column]], numbers))
        if column == "metrics":
            return {
                name: list(Selection(values, numbers)) for name, values in index.metrics.items()
            }
        if column == "errors":
            failures = iter(self._failures())
            return [
                None if name is None else next(failures)
                for name in Selection(index.columns["error"], numbers)
            ]
        if column == "advantages":
            return [self._advantage(value) for value in self._advantages().tolist()]
        field, is_present = COLUMNS.get(column, column), False
        values = []
        for output in self.rollouts():
            is_present = is_present or field in output
            values.append(output.get(field))
        if not is_present and column not in COLUMNS:
            raise KeyError(f"results have no column {column!r}; they have {', '.join(self.keys())}")
        return values

    def _advantage(self, value: float) -> float | None:
        """An advantage as a rollout has it."""
        return None if math.isnan(value) and not self._fills_advantages else float(value)

    def _advantage_at(self, index: int) -> float:
        """The advantage of a rollout, computed from its group alone."""
        if self._every_advantage is not None:
            return float(self._every_advantage[index])
        examples = _examples(self._index, self._numbers, self._example_ids)
        group = np.flatnonzero(examples == examples[index])
        return float(self._filled(self._numbers[group], examples[group])[group == index][0])

    def _advantages(self) -> np.ndarray:
        """The advantage of each rollout, NaN if it is unknown."""
        if self._every_advantage is None:
            examples = _examples(self._index, self._numbers, self._example_ids)
            self._every_advantage = self._filled(self._numbers, examples)
        return self._every_advantage

    def _filled(self, numbers: np.ndarray, examples: np.ndarray) -> np.ndarray:
        """The saved advantages of some rows; a group without gets them as by
        ``fill_advantages``."""
        columns = self._index.columns
        advantages: np.ndarray = np.asarray(columns["advantage"])[numbers]
        if not self._fills_advantages:
            return advantages
        rewards, groups = np.asarray(columns["reward"])[numbers], numbered(examples)
        order = np.argsort(groups, kind="stable")
        for members in np.split(order, np.flatnonzero(np.diff(groups[order])) + 1):
            if np.isnan(advantages[members]).all():
                advantages[members] = centered_advantages(rewards[members].tolist())
        return advantages


def measurements(
    index: RowIndex, rows: np.ndarray, example_ids: np.ndarray | None = None
) -> Measurements:
    """What the statistics need of some rows of an index.

    ``rows``: their numbers, an integer array; ``example_ids``: what siblings share, one for each;
    None = as saved.
    """
    columns = index.columns
    return Measurements(
        rewards=Selection(columns["reward"], rows),
        examples=_examples(index, rows, example_ids),
        metrics={name: Selection(values, rows) for name, values in index.metrics.items()},
        errors=Selection(columns["error"], rows),
        causes=Selection(columns["cause"], rows),
        stop_conditions=Selection(columns["stop_condition"], rows),
        usage={name: Selection(values, rows) for name, values in index.usage.items()},
        total_ms=Selection(columns["total_ms"], rows),
        trees=Selection(columns["tree"], rows),
    )


def _examples(index: RowIndex, rows: np.ndarray, example_ids: np.ndarray | None) -> np.ndarray:
    """What siblings share: the given id, else the saved hash of their example, else
    its saved id."""
    if example_ids is not None:
        return example_ids
    hashes = np.asarray(Selection(index.columns["key"], rows))
    if (hashes != b"").all():
        return hashes
    ids = Selection(index.columns["example"], rows)
    keys = (digits or example_id for digits, example_id in zip(hashes, ids, strict=True))
    return np.fromiter(keys, object, len(rows))
