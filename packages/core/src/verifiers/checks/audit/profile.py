"""Which rows a model can learn from: pass rates by row, and the file that keeps the useful rows.

In a group whose rollouts all solve the row, or all fail, every advantage is 0. Only rows that a
model solves sometimes are useful to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from verifiers.checks.audit.report import RowProfile
from verifiers.clients.protocol import ClientLike, ModelLike
from verifiers.data.examples import Example
from verifiers.data.kept_rows import AUDIT, EXAMPLE_HASH
from verifiers.environments.base import Environment
from verifiers.errors import ConfigError
from verifiers.results.run_metadata import successes
from verifiers.results.statistics import known_values
from verifiers.runtime.json import encode_row
from verifiers.storage.files import atomic_write


async def profile_rows(
    env: Environment,
    client: ClientLike,
    model: ModelLike,
    *,
    num_rows: int,
    rollouts_per_example: int,
    **sampling_args: object,
) -> tuple[list[Example], list[RowProfile]]:
    """Run ``num_rows`` of the training rows (-1 = all) ``rollouts_per_example`` times each with a
    model.

    *Raises* ConfigError if nothing says what solved means, and as a run does.
    """
    table = (env.train_table if env.train_table is not None else env.eval_table).take(num_rows)
    examples = list(table)
    rows = [example.row for example in examples for _ in range(rollouts_per_example)]
    results = await env.a_generate(
        rows, client, model, sampling_args=sampling_args, keep_states=False
    )
    solved: dict[object, list[float]] = {example.example_id: [] for example in examples}
    outcomes = successes(results.outputs, env.pass_threshold)
    for output, success in zip(results.outputs, outcomes, strict=True):
        solved[output["example_id"]] += known_values([success])
    if not any(solved.values()):
        raise ConfigError(
            "no rollout has a known success: the reward is graded and the rubric names no success"
            " metric, or nothing was scored; name one with vf.Rubric(…, success=…)"
        )
    profiles = []
    for example in examples:
        numbers = solved[example.example_id]
        counts = round(sum(numbers)), len(numbers)
        profiles.append(RowProfile(example.example_id, example.hash, *counts))
    return examples, profiles


def write_useful(
    path: Path,
    examples: Sequence[Example],
    profiles: Sequence[RowProfile],
    env: Environment,
    model: str | None,
) -> int:
    """Write the useful rows in the format of ``data.kept_rows``; return their number."""
    lines = []
    audit = {"environment": env.env_id, "env_args": env.env_args, "model": model}
    for example, profile in zip(examples, profiles, strict=True):
        if profile.kind == "useful":
            rate = profile.num_solved / profile.num_rollouts
            facts = {EXAMPLE_HASH: example.hash, "pass_rate": rate, AUDIT: audit}
            lines.append(encode_row({**example.row, **facts}) + b"\n")
    atomic_write(path, b"".join(lines))
    return len(lines)
