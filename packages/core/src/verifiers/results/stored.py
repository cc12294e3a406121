"""Results in a file that is too large to hold: its numbers in memory, its texts read when they are asked for.

Columns of numbers and the statistics are computed from an index of the file, some 200 bytes per rollout; a column of
texts (``results["completions"]``) reads that column alone. ``results.outputs``, and whatever needs whole rollouts
(``filter``, ``states``), reads all of them and keeps them. Until then the file must stay as it was.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from verifiers.results.columns import HashColumn, select
from verifiers.results.index import RowIndex
from verifiers.results.labels import LABEL
from verifiers.results.outputs import (
    COLUMNS,
    DISK_FIELDS,
    FIELDS,
    GenerateMetadata,
    GenerateOutputs,
    Measurements,
    RolloutOutput,
    set_advantage,
)
from verifiers.rubrics.advantages import centered_advantages

_INDEXED = {"rewards": "reward", "example_ids": "example", "stop_conditions": "stop_condition"}
"""Column of the results -> column of the index, where they are equal."""


MAX_GROUPS = 8
"""Rollouts that are read at a time for which only the advantages of their groups are computed."""


class StoredOutputs(GenerateOutputs):
    """``GenerateOutputs`` over an indexed file.

    Args:
        index: The index, read to its end.
        numbers: Row numbers of the rollouts, in the order of the results.
        facts: Facts of the metadata.
        state_columns: Names of the extra columns of a rollout; None = all.
        labels: Row number -> a person's label; None where the run has no labels.
        fills_advantages: Whether a group without advantages gets reward minus group mean.
        example_ids: For the results that a run returns: the ids of its plan, an array with one for each rollout; its
            rollouts have no ``DISK_FIELDS``.
    """

    def __init__(
        self,
        index: RowIndex,
        numbers: Iterable[int],
        facts: Mapping[str, Any],
        state_columns: Sequence[str] | None = None,
        labels: Mapping[int, bool | None] | None = None,
        fills_advantages: bool = True,
        example_ids: np.ndarray | None = None,
    ):
        self._index, self._numbers, self._facts = index, np.fromiter(numbers, np.int64), dict(facts)
        self._state_columns, self._labels, self._fills_advantages = state_columns, labels, fills_advantages
        self._example_ids = example_ids
        self._states = None
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
        is_known = "advantages" in self._columns or len(places) > MAX_GROUPS
        advantages = self["advantages"] if is_known else self._advantages_at(places)
        for place, output in zip(places, self._index.rows(self._numbers[places]), strict=True):
            if columns is not None:
                for name in [name for name in output if name not in columns and name not in output["metrics"]]:
                    del output[name]
            if self._labels is not None:
                output[LABEL] = self._labels.get(int(self._numbers[place]))
            if self._example_ids is not None:
                output["example_id"] = int(self._example_ids[place])
                for name in DISK_FIELDS:
                    output.pop(name, None)
            set_advantage(output, advantages[place])
            yield output

    @property
    def _is_read(self) -> bool:
        return "outputs" in self.__dict__

    def measurements(self) -> Measurements:
        if self._is_read:
            return super().measurements()
        return measurements(self._index, self._numbers, self._example_ids)

    def _has_states(self) -> bool:
        if self._is_read:
            return super()._has_states()
        return "trajectory" in next(self.rollouts(), {})

    def _make_column(self, column: str) -> Any:
        index, numbers = self._index, self._numbers
        if self._is_read or column == "states":
            return super()._make_column(column)
        if column == "example_ids" and self._example_ids is not None:
            return list(self._example_ids.tolist())
        if column in _INDEXED:
            return list(select(index.columns[_INDEXED[column]], numbers))
        if column == "metrics":
            return {name: list(select(values, numbers)) for name, values in index.metrics.items()}
        if column == "errors":
            failed = [number for number in numbers.tolist() if index.columns["error"][number] is not None]
            errors = {number: row["error"] for number, row in zip(failed, index.rows(failed), strict=True)}
            return [errors.get(number) for number in numbers.tolist()]
        if column == "advantages":
            return self._advantages()
        field, found = COLUMNS.get(column, column), False
        values = []
        for output in self.rollouts():
            found = found or field in output
            values.append(output.get(field))
        if not found and column not in COLUMNS:
            raise KeyError(f"results have no column {column!r}; they have {', '.join(self.keys())}")
        return values

    def _advantages_at(self, places: Sequence[int]) -> Mapping[int, float | None]:
        """The advantages of a few rollouts, computed from their groups alone."""
        examples = _examples(self._index, self._numbers, self._example_ids)
        every = np.array(examples, dtype=object if isinstance(examples, list) else None)
        found: dict[int, float | None] = {}
        for place in places:
            group = np.flatnonzero(every == examples[place])
            ids = None if self._example_ids is None else self._example_ids[group]
            part = StoredOutputs(
                self._index, self._numbers[group], {}, fills_advantages=self._fills_advantages, example_ids=ids
            )
            found |= zip(group.tolist(), part["advantages"], strict=True)
        return found

    def _advantages(self) -> list[float | None]:
        columns = self._index.columns
        stored = list(select(columns["advantage"], self._numbers))
        if not self._fills_advantages:
            return [None if math.isnan(value) else value for value in stored]
        groups: dict[Any, list[int]] = {}
        for place, example in enumerate(_examples(self._index, self._numbers, self._example_ids)):
            groups.setdefault(example, []).append(place)
        rewards = select(columns["reward"], self._numbers)
        for places in groups.values():
            if all(math.isnan(stored[place]) for place in places):
                advantages = centered_advantages([rewards[place] for place in places])
                for place, advantage in zip(places, advantages, strict=True):
                    stored[place] = advantage
        return stored


def measurements(index: RowIndex, rows: np.ndarray, example_ids: np.ndarray | None = None) -> Measurements:
    """What the statistics need of some rows of an index.

    ``rows``: their numbers, an integer array; ``example_ids``: what siblings share, one for each; None = as saved.
    """
    columns = index.columns
    return Measurements(
        rewards=select(columns["reward"], rows),
        examples=_examples(index, rows, example_ids),
        metrics={name: select(values, rows) for name, values in index.metrics.items()},
        errors=select(columns["error"], rows),
        causes=select(columns["cause"], rows),
        stop_conditions=select(columns["stop_condition"], rows),
        usage={name: select(values, rows) for name, values in index.usage.items()},
        total_ms=select(columns["total_ms"], rows),
    )


def _examples(index: RowIndex, rows: np.ndarray, example_ids: np.ndarray | None) -> Sequence[Any]:
    """What siblings share: the given id, else the saved hash of their example, else its saved id."""
    if example_ids is not None:
        return array("q", example_ids.tobytes())
    hashes: HashColumn = index.columns["key"]
    if hashes.is_plain:
        return select(hashes.digits, rows)  # type: ignore[no-any-return]
    ids = index.columns["example"]
    return [hashes[row] or ids[row] for row in rows.tolist()]
