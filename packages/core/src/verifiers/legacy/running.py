"""Methods that older trainers call on environments: evaluation rows, and results from finished states."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from verifiers.data.examples import copy_row
from verifiers.environments.base import Environment
from verifiers.results import GenerateMetadata, GenerateOutputs
from verifiers.results.rows import state_to_output
from verifiers.rollouts.state import State


def eval_inputs(env: Environment, num_examples: int = -1, rollouts_per_example: int = 1) -> list[dict[str, Any]]:
    """The rows of the evaluation set, each ``rollouts_per_example`` times, siblings next to each other."""
    return [copy_row(e.row) for e in env.eval_table.take(num_examples, None) for _ in range(rollouts_per_example)]


def rollout_results(
    env: Environment,
    all_states: Sequence[State],
    model: str = "",
    client: object = None,
    state_columns: Sequence[str] | None = None,
    results_path: str | Path | None = None,
    gen_sampling_args: Mapping[str, Any] | None = None,
    start_time: float | None = None,
) -> GenerateOutputs:
    """Results of finished states; ``start_time`` is a ``time.time()``. ``results_path`` is recorded, not written to."""
    outputs = [state_to_output(state, state_columns) for state in all_states]
    metadata = GenerateMetadata.of(
        outputs,
        env_id=env.env_id,
        env_args=env.env_args,
        env_version=env.env_version,
        model=model,
        base_url=str(getattr(client, "base_url", "") or ""),
        sampling_args=dict(gen_sampling_args or {}),
        time=0.0 if start_time is None else time.time() - start_time,
        success_metric=env.rubric.success_metric,
        pass_threshold=env.pass_threshold,
        state_columns=list(state_columns or ()),
        path_to_save=None if results_path is None else str(results_path),
    )
    return GenerateOutputs(outputs, metadata, list(all_states))
