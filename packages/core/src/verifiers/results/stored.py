"""Results in a file that is too large to hold: its numbers in memory, its texts read when they are asked for.

Columns of numbers and the statistics are computed from an index of the file, some 60 to 100 bytes per rollout; a column
of texts (``results["completions"]``) reads that column alone. ``results.outputs``, and whatever needs whole rollouts
(``filter``, ``states``), reads all of them and keeps them. Until then the file must stay as it was.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from verifiers.results.columns import HashColumn, Selection
from verifiers.results.index import RowIndex
from verifiers.results.labels import LABEL
from verifiers.results.outputs import (
    COLUMNS,
    DISK_FIELDS,
    FIELDS,
    ErrorInfo,
    GenerateMetadata,
    GenerateOutputs,
    Measurements,
    RolloutOutput,
    set_advantage,
)
from verifiers.results.statistics import PART, numbered, part_of
from verifiers.rubrics.advantages import centered_advantages

_INDEXED = {"rewards": "reward", "example_ids": "example", "stop_conditions": "stop_condition"}
"""Column of the results -> column of the index, where they are equal."""


MAX_GROUPS = 8
"""Rollouts that are read at a time for which only the advantages of their groups are computed."""


class StoredOutputs(GenerateOutputs):
    """``GenerateOutputs`` over an indexed file.

    Args:
        index: The index, read to its end.
        numbers: Row numbers of the rollouts, in the order of the results: an array of integers.
        facts: Facts of the metadata.
        state_columns: Names of the extra columns of a rollout; None = all.
        labels: Row number -> a person's label; None where the run has no labels.
        fills_advantages: Whether a group without advantages gets reward minus group mean.
        example_ids: For the results that a run returns: the id of its plan for each rollout, a column of numbers; its
            rollouts have no ``DISK_FIELDS``.
        group_size: The number of rollouts that no example exceeds; None = unknown.
    """

    def __init__(
        self,
        index: RowIndex,
        numbers: np.ndarray,
        facts: Mapping[str, Any],
        state_columns: Sequence[str] | None = None,
        labels: Mapping[int, bool | None] | None = None,
        fills_advantages: bool = True,
        example_ids: Selection | None = None,
        group_size: int | None = None,
    ):
        self._index, self._numbers, self._facts = index, numbers, dict(facts)
        self._state_columns, self._labels, self._fills_advantages = state_columns, labels, fills_advantages
        self._example_ids, self._group_size = example_ids, group_size
        self._states = None
        self._every_advantage: np.ndarray | None = None
        self._columns: dict[str, Any] = {}

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Python calls this for missing attributes only: once for ``outputs``, once for ``metadata``."""
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

    def __reduce__(self) -> tuple[Any, ...]:
        return GenerateOutputs, (self.outputs, self.metadata)

    def rollouts(self) -> Iterator[RolloutOutput]:
        """Each rollout in order, read from the file; only one is in memory."""
        if self._is_read:
            yield from self.outputs
            return
        yield from self._read(range(len(self)))

    def at(self, place: int) -> RolloutOutput:
        return self.outputs[place] if self._is_read else next(self._read([range(len(self))[place]]))

    def _read(self, places: Sequence[int]) -> Iterator[RolloutOutput]:
        columns = None if self._state_columns is None else {*FIELDS, *DISK_FIELDS, *self._state_columns}
        is_known = self._every_advantage is not None or len(places) > MAX_GROUPS
        advantages = self._advantages() if is_known else self._advantages_at(places)
        for place, output in zip(places, self._index.rows(self._numbers[places]), strict=True):
            if columns is not None:
                for name in [name for name in output if name not in columns and name not in output["metrics"]]:
                    del output[name]
            if self._labels is not None:
                output[LABEL] = self._labels.get(int(self._numbers[place]))
            if self._example_ids is not None:
                output["example_id"] = self._example_ids[place]
                for name in DISK_FIELDS:
                    output.pop(name, None)
            set_advantage(output, self._advantage(advantages[place]))
            yield output

    @property
    def _is_read(self) -> bool:
        return "outputs" in self.__dict__

    def measurements(self) -> Measurements:
        if self._is_read:
            return super().measurements()
        return measurements(self._index, self._numbers, self._example_ids, self._group_size)

    def _failures(self) -> Iterable[ErrorInfo]:
        if self._is_read:
            return super()._failures()
        failed = self._index.columns["error"].codes.at(self._numbers) >= 0
        return (row["error"] for row in self._index.rows(self._numbers[failed]))

    def _has_states(self) -> bool:
        if self._is_read:
            return super()._has_states()
        return "trajectory" in next(self.rollouts(), {})

    def _make_column(self, column: str) -> Any:
        index, numbers = self._index, self._numbers
        if self._is_read or column == "states":
            return super()._make_column(column)
        if column == "example_ids" and self._example_ids is not None:
            return list(self._example_ids)
        if column in _INDEXED:
            return list(Selection(index.columns[_INDEXED[column]], numbers))
        if column == "metrics":
            return {name: list(Selection(values, numbers)) for name, values in index.metrics.items()}
        if column == "errors":
            failures = iter(self._failures())
            return [None if name is None else next(failures) for name in Selection(index.columns["error"], numbers)]
        if column == "advantages":
            return [self._advantage(value) for value in self._advantages().tolist()]
        field, found = COLUMNS.get(column, column), False
        values = []
        for output in self.rollouts():
            found = found or field in output
            values.append(output.get(field))
        if not found and column not in COLUMNS:
            raise KeyError(f"results have no column {column!r}; they have {', '.join(self.keys())}")
        return values

    def _advantage(self, value: float) -> float | None:
        """An advantage as a rollout has it."""
        return None if math.isnan(value) and not self._fills_advantages else float(value)

    def _advantages_at(self, places: Sequence[int]) -> Mapping[int, float]:
        """The advantages of a few rollouts, computed from their groups alone."""
        examples = _examples(self._index, self._numbers, self._example_ids)
        found: dict[int, float] = {}
        for place in places:
            own = examples[place]
            near = [np.flatnonzero(part == own) + PART * n for n, part in enumerate(_parts(examples))]
            group = np.concatenate(near)
            ids = None if self._example_ids is None else self._example_ids.take(group)
            part = StoredOutputs(
                self._index, self._numbers[group], {}, fills_advantages=self._fills_advantages, example_ids=ids
            )
            found |= zip(group.tolist(), part._advantages().tolist(), strict=True)
        return found

    def _advantages(self) -> np.ndarray:
        """The advantage of each rollout, NaN where it is unknown."""
        if self._every_advantage is None:
            columns, numbers = self._index.columns, self._numbers
            advantages = columns["advantage"].at(numbers)
            if self._fills_advantages:
                _fill(advantages, columns["reward"].at(numbers), _examples(self._index, numbers, self._example_ids))
            self._every_advantage = advantages
        return self._every_advantage


def _fill(advantages: np.ndarray, rewards: np.ndarray, examples: Sequence[Any]) -> None:
    """Set the advantages of each group that has none: as ``outputs.fill_advantages``."""
    groups = numbered(examples)
    order = np.argsort(groups, kind="stable")
    for places in np.split(order, np.flatnonzero(np.diff(groups[order])) + 1):
        if np.isnan(advantages[places]).all():
            advantages[places] = centered_advantages(rewards[places].tolist())


def _parts(values: Sequence[Any]) -> Iterator[np.ndarray]:
    """The values in arrays of ``PART``, as they are."""
    for start in range(0, len(values), PART):
        is_list = isinstance(values, list)
        yield np.array(values[start : start + PART], object) if is_list else part_of(values, start, start + PART)


def measurements(
    index: RowIndex, rows: np.ndarray, example_ids: Selection | None = None, group_size: int | None = None
) -> Measurements:
    """What the statistics need of some rows of an index.

    ``rows``: their numbers, an integer array; ``example_ids``: what siblings share, one for each; None = as saved.
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
        group_size=group_size,
    )


def _examples(index: RowIndex, rows: np.ndarray, example_ids: Selection | None) -> Sequence[Any]:
    """What siblings share: the given id, else the saved hash of their example, else its saved id."""
    if example_ids is not None:
        return example_ids
    hashes: HashColumn = index.columns["key"]
    if hashes.is_plain:
        return Selection(hashes.digits, rows)
    ids = index.columns["example"]
    return [hashes[row] or ids[row] for row in rows.tolist()]
