"""Results in a file that is too large to hold: its numbers in memory, its texts read when they are asked for.

Columns of numbers and the statistics are computed from an index of the file, some 300 bytes per rollout; a column of
texts (``results["completions"]``) reads that column alone. ``results.outputs``, and whatever needs whole rollouts
(``filter``, ``states``), reads all of them and keeps them. Until then the file must stay as it was.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from verifiers.results.index import RowIndex
from verifiers.results.labels import LABEL
from verifiers.results.outputs import COLUMNS, GenerateMetadata, GenerateOutputs
from verifiers.results.rows import DISK_FIELDS, FIELDS, ErrorInfo, RolloutOutput
from verifiers.rubrics.advantages import centered_advantages

_INDEXED = {"rewards": "reward", "example_ids": "example", "stop_conditions": "stop_condition"}
"""Column of the results -> column of the index, where they are equal."""


class StoredOutputs(GenerateOutputs):
    """``GenerateOutputs`` over an indexed file.

    Args:
        index: The index, read to its end.
        numbers: Row numbers of the rollouts, in the order of the results.
        facts: Facts of the metadata.
        state_columns: Names of the extra columns of a rollout; None = all.
        labels: Row number -> a person's label; None where the run has no labels.
        fills_advantages: Whether a group without advantages gets reward minus group mean.
    """

    def __init__(
        self,
        index: RowIndex,
        numbers: Sequence[int],
        facts: Mapping[str, Any],
        state_columns: Sequence[str] | None = None,
        labels: Mapping[int, bool | None] | None = None,
        fills_advantages: bool = True,
    ):
        self._index, self._numbers, self._facts = index, list(numbers), dict(facts)
        self._state_columns, self._labels, self._fills_advantages = state_columns, labels, fills_advantages
        self._states = None
        self._columns: dict[str, Any] = {}

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Python calls this for missing attributes only: once for ``outputs``, once for ``metadata``."""
            if name == "outputs":
                value = list(self.rollouts())
            elif name == "metadata":
                value = GenerateMetadata.of(self._measured(), **self._facts)
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
        columns = None if self._state_columns is None else {*FIELDS, *DISK_FIELDS, *self._state_columns}
        filled = zip(self._numbers, self["advantages"], self._index.rows(self._numbers), strict=True)
        for number, advantage, output in filled:
            if columns is not None:
                for name in [name for name in output if name not in columns and name not in output["metrics"]]:
                    del output[name]
            if self._labels is not None:
                output[LABEL] = self._labels.get(number)
            output["advantage"] = advantage
            yield output

    @property
    def _is_read(self) -> bool:
        return "outputs" in self.__dict__

    def _measured(self) -> Sequence[RolloutOutput]:
        return self.outputs if self._is_read else _Measured(self._index, self._numbers, self["errors"])

    def _has_states(self) -> bool:
        if self._is_read:
            return super()._has_states()
        return "trajectory" in next(self.rollouts(), {})

    def _make_column(self, column: str) -> Any:
        index, numbers = self._index, self._numbers
        if self._is_read or column == "states":
            return super()._make_column(column)
        if column in _INDEXED:
            values = index.columns[_INDEXED[column]]
            return [values[number] for number in numbers]
        if column == "metrics":
            return {name: [values[number] for number in numbers] for name, values in index.metrics.items()}
        if column == "errors":
            failed = [number for number in numbers if index.columns["error"][number] is not None]
            errors = {number: row["error"] for number, row in zip(failed, index.rows(failed), strict=True)}
            return [errors.get(number) for number in numbers]
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

    def _advantages(self) -> list[float | None]:
        columns = self._index.columns
        stored = [columns["advantage"][number] for number in self._numbers]
        if not self._fills_advantages:
            return [None if math.isnan(value) else value for value in stored]
        groups: dict[Any, list[int]] = {}
        for place, number in enumerate(self._numbers):
            groups.setdefault(columns["key"][number] or columns["example"][number], []).append(place)
        for places in groups.values():
            if all(math.isnan(stored[place]) for place in places):
                rewards = [columns["reward"][self._numbers[place]] for place in places]
                for place, advantage in zip(places, centered_advantages(rewards), strict=True):
                    stored[place] = advantage
        return stored


class _Measured(Sequence[RolloutOutput]):
    """The rollouts with the fields of the statistics alone, each made when it is read."""

    def __init__(self, index: RowIndex, numbers: Sequence[int], errors: Sequence[ErrorInfo | None]):
        self._index, self._numbers, self._errors = index, numbers, errors

    def __len__(self) -> int:
        return len(self._numbers)

    def __iter__(self) -> Iterator[RolloutOutput]:
        return map(self._at, range(len(self)))

    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, slice):
            return [self._at(each) for each in range(*place.indices(len(self)))]
        return self._at(range(len(self))[place])

    def _at(self, place: int) -> RolloutOutput:
        index, number = self._index, self._numbers[place]
        columns = index.columns
        return RolloutOutput(
            example_id=columns["example"][number],
            example_hash=columns["key"][number],
            reward=columns["reward"][number],
            metrics={name: values[number] for name, values in index.metrics.items()},
            error=self._errors[place],
            stop_condition=columns["stop_condition"][number],
            timing={"total_ms": columns["total_ms"][number]},
            token_usage={name: v for name, values in index.usage.items() if not math.isnan(v := values[number])},
        )
