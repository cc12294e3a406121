"""Read a file of trajectories into groups for training batches, without sampling or scoring."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from verifiers.data.images import image_part
from verifiers.errors import ConfigError
from verifiers.rollouts.rollout import Rollout
from verifiers.rollouts.transcript import Transcript
from verifiers.rollouts.turn import Turn
from verifiers.types import UserMessage
from verifiers_integrations.trajectories import TrajectoryRow, read_trajectories
from verifiers_trainer.algorithm.batch import Group


def offline_groups(path: str | Path) -> list[Group]:
    """Return the groups of a file of trajectories, in the order of their first rows, ready for
    ``batch.build``.

    Rows with the same ``example_id`` form a group, rows with the same ``rollout`` a rollout.
    *Raises* DatasetError for a damaged file, ConfigError for a row without log-probabilities, which
    importance ratios need.
    """
    by_example: dict[Any, dict[int, list[TrajectoryRow]]] = {}
    for row in read_trajectories(path):
        if row.logprobs is None:
            raise ConfigError(
                f"{path}: rollout {row.rollout} has no logprobs; sample from a server that returns"
                " them"
            )
        by_example.setdefault(row.example_id, {}).setdefault(row.rollout, []).append(row)
    return [
        Group(index, example_id, tuple(_rollout(rows) for rows in rollouts.values()))
        for index, (example_id, rollouts) in enumerate(by_example.items())
    ]


def _rollout(rows: Sequence[TrajectoryRow]) -> Rollout:
    turns = tuple(turn for row in rows for turn in _turns(row))
    return Rollout(Transcript(turns), rows[0].reward, fork=rows[0].fork)


def _turns(row: TrajectoryRow) -> list[Turn]:
    assert row.logprobs is not None
    ids, start = np.concatenate((row.prompt_ids, row.completion_ids)), len(row.prompt_ids)
    turns = [
        Turn(ids[: start + a], row.completion_ids[a:b], row.logprobs[a:b], row.versions[a:b])
        for a, b in row.turns()
    ]
    if row.images:  # of the whole row: its last turn says which images the tokens have
        turns[-1].prompt = [UserMessage([image_part(url) for url in row.images])]
    return turns
