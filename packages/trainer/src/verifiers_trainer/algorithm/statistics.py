"""Statistics of the rollouts of a batch, under the names of ``metrics.jsonl``; they change neither
loss nor batch."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from verifiers.results.coverage import Coverage
from verifiers_trainer.algorithm.group import Group

IMITATES = "offline/imitated"
"""1 where the rollouts are demonstrations: their reward is not the policy's."""


def rollout_stats(groups: Sequence[Group]) -> dict[str, float]:
    """Statistics of every rollout for a batch, trained or not; NaN without known rewards."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    rewards = np.array([rollout.reward for rollout in rollouts], np.float64)
    finite = rewards[~np.isnan(rewards)]
    stats: dict[str, float] = {
        "reward/mean": float(finite.mean()) if finite.size else math.nan,
        "reward/std": float(finite.std()) if finite.size else math.nan,
        "reward/min": float(finite.min()) if finite.size else math.nan,
        "reward/max": float(finite.max()) if finite.size else math.nan,
        "reward/unscored": int(rewards.size - finite.size),
        "rollouts/errors": sum(rollout.error is not None for rollout in rollouts),
        "rollouts/timeouts": sum(
            rollout.error is not None and rollout.error["error"] == "RolloutTimeout"
            for rollout in rollouts
        ),
        **Coverage.of(rollouts).metrics(),
        "rollouts/truncated": sum(rollout.is_truncated for rollout in rollouts),
        "rollouts/generated": len(rollouts),
        "tokens/completion": sum(rollout.num_sampled for rollout in rollouts),
        "tokens/longest": max((rollout.num_sampled for rollout in rollouts), default=0),
        "tokens/prompt": sum(rollout.turns[0].num_prompt for rollout in rollouts if rollout.turns),
        "turns/mean": (
            float(np.mean([len(rollout.turns) for rollout in rollouts])) if rollouts else math.nan
        ),
    }
    for name in sorted({name for rollout in rollouts for name in rollout.metrics}):
        values = np.array([rollout.metrics.get(name, math.nan) for rollout in rollouts], np.float64)
        is_known = not np.isnan(values).all()
        stats[f"reward/{name}"] = float(np.nanmean(values)) if is_known else math.nan
    return stats | _stats_by_environment(groups)


def _stats_by_environment(groups: Sequence[Group]) -> dict[str, float]:
    """``env/<name>/{reward,share,errors}``: mean known reward, share of the groups; nothing for an
    environment."""
    stats: dict[str, float] = {}
    for name in sorted({group.env for group in groups} - {""}):
        members = [group for group in groups if group.env == name]
        rewards = np.concatenate([group.rewards for group in members])
        finite = rewards[~np.isnan(rewards)]
        stats[f"env/{name}/reward"] = float(finite.mean()) if finite.size else math.nan
        stats[f"env/{name}/share"] = len(members) / len(groups)
        stats[f"env/{name}/errors"] = sum(
            rollout.error is not None for group in members for rollout in group.rollouts
        )
    return stats


def reward_histogram(groups: Sequence[Group]) -> dict[float, int]:
    """How many rollouts have each reward, to three digits; NaN counts the unknown rewards."""
    rewards = np.round(np.concatenate([group.rewards for group in groups]), 3)
    values, counts = np.unique(rewards, return_counts=True)
    return {float(value): int(count) for value, count in zip(values, counts, strict=True)}
