"""Older construction of ``GenerateOutputs``: from columns, ``prompt=[…], completion=[…],
reward=[…], metrics={…}``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from verifiers.errors import ConfigError
from verifiers.results.outputs import COLUMNS
from verifiers.results.rows import ALWAYS, RolloutOutput
from verifiers.results.run_metadata import FACTS, GenerateMetadata
from verifiers.rollouts.state import State


def results_of_columns(
    outputs: Sequence[Mapping[str, object]] | None,
    metadata: Mapping[str, object] | None,
    states: Sequence[Mapping[str, object]] | None,
    columns: Mapping[str, Any],
) -> tuple[list[RolloutOutput], GenerateMetadata, list[State] | None]:
    """Rollouts, metadata and states of columns named as ``outputs.COLUMNS`` or as the fields of a
    rollout.

    *Raises* ConfigError for rows and columns together, and for columns of unequal length.
    """
    if outputs is not None:
        raise ConfigError(
            f"GenerateOutputs takes rollouts or columns, not both; leave {min(columns)!r} out"
        )
    column_values = {
        COLUMNS.get(name, name): values for name, values in columns.items() if values is not None
    }
    measured = column_values.pop("metrics", {})
    states = column_values.pop("state", states)
    lengths = {name: len(values) for name, values in (column_values | measured).items()}
    if states is not None:
        lengths["state"] = len(states)
    if len(set(lengths.values())) > 1:
        sizes = ", ".join(f"{name} {length}" for name, length in lengths.items())
        raise ConfigError(f"the columns of GenerateOutputs have different lengths: {sizes}")
    rows = []
    for index in range(max(lengths.values(), default=0)):
        row = RolloutOutput(dict.fromkeys(ALWAYS) | {"example_id": index, "info": {}})
        row.update((name, values[index]) for name, values in column_values.items())
        row["metrics"] = {name: values[index] for name, values in measured.items()}
        row.update((name, value) for name, value in row["metrics"].items() if name not in row)
        rows.append(row)
    facts = metadata or {}
    described = GenerateMetadata.of(
        rows, **{name: value for name, value in facts.items() if name in FACTS}
    )
    described.update(facts)
    complete = (
        None if states is None else [s if isinstance(s, State) else State(s or {}) for s in states]
    )
    return rows, described, complete
