"""From finished rollouts to the one batch an optimizer step uses. Pure: groups in, rows and statistics out.

A ``Record`` is what training keeps of a rollout: its turns as sampled, its reward, and its text for the log. A
``Group`` holds the siblings of one example. ``build`` turns groups into packed rows: rewards to advantages, turns to
samples, weights over the whole step, rows of bounded length.

This module does not decide which groups to train (``orchestrator``) and computes no loss (``losses``).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from verifiers.state import State, TrajectoryStep, TrajectoryStepTokens
from verifiers_trainer.advantages import compute_advantages, is_dead
from verifiers_trainer.aggregation import step_weights
from verifiers_trainer.packing import Row, fill, pack
from verifiers_trainer.samples import RolloutSamples, Turn, rollout_samples

if TYPE_CHECKING:
    from verifiers_trainer.config import RLConfig

ROW_TOKENS, ROW_TOKENS_CPU = 1024, 512
"""Bounds on a row where attention costs the square of its length, as everywhere without kernels for packed rows.
Measured on a CPU, 128 rollouts of 37 tokens in rows of 384, 512, 1024, 4096 tokens: 0.48, 0.51, 0.67, 1.3 s a step."""


@dataclass(frozen=True, slots=True)
class Record:
    """One rollout as training keeps it. ``reward`` is NaN when unknown."""

    turns: tuple[Turn, ...]
    reward: float
    metrics: Mapping[str, float]
    error: str | None
    stop: str | None
    is_truncated: bool
    text: Mapping[str, Any]
    """``prompt``, ``completion`` and ``answer``, for the log alone."""

    @classmethod
    def of(cls, state: State, zero_truncated: bool = False) -> Record:
        """What to keep of a finished rollout; ``zero_truncated`` makes 0 the reward of one cut by a length limit."""
        error = state["error"]
        reward = 0.0 if zero_truncated and state["is_truncated"] and error is None else state["reward"]
        return cls(
            turns=_turns(state["trajectory"]),
            reward=math.nan if reward is None else float(reward),
            metrics=dict(state["metrics"]),
            error=None if error is None else f"{type(error).__name__}: {error}",
            stop=state["stop_condition"],
            is_truncated=bool(state["is_truncated"]),
            text={key: state[key] for key in ("prompt", "completion", "answer")},
        )

    @property
    def oldest_version(self) -> int | None:
        """The policy version of its oldest token; None without tokens."""
        return min((int(np.min(turn.version)) for turn in self.turns if len(turn.completion_ids)), default=None)

    @property
    def num_sampled(self) -> int:
        return sum(len(turn.completion_ids) for turn in self.turns)


def _turns(steps: Sequence[TrajectoryStep]) -> tuple[Turn, ...]:
    """The turns of the steps that have tokens; linear in their tokens while each prompt continues the turn before."""
    turns: list[Turn] = []
    run: list[tuple[TrajectoryStepTokens, bool, int]] = []
    before, end, shared_of_first = None, 0, 0
    for step in steps:
        tokens = _stored(step, "tokens")
        if tokens is None:
            continue
        shared = tokens.shared if tokens._previous is before else 0
        if run and shared < end:
            turns += _turns_of(run, shared_of_first)
            run = []
        if not run:
            shared_of_first = shared
        end = tokens.num_tokens
        run.append((tokens, _stored(step, "is_truncated"), end))
        before = tokens
    return tuple(turns + _turns_of(run, shared_of_first)) if run else ()


def _turns_of(run: Sequence[tuple[TrajectoryStepTokens, bool, int]], shared: int) -> list[Turn]:
    """Turns of which each begins with all of the one before: their prompts are views of one array.

    ``run``: tokens, whether a limit cut the turn, where the turn ends; ``shared``: of the first one.
    """
    pieces: list[np.ndarray] = []
    for tokens, _, _ in run:
        pieces.append(tokens.new_prompt_ids() if pieces else tokens.prompt_array())
        pieces.append(_stored(tokens, "completion_ids"))
    ids = np.concatenate(pieces[:-1]) if len(run) > 1 else pieces[0]
    turns = []
    for (tokens, is_truncated, end), sampled in zip(run, pieces[1::2], strict=True):
        prompt_ids, logprobs = ids[: end - len(sampled)], _stored(tokens, "completion_logprobs")
        turns.append(Turn(prompt_ids, sampled, logprobs, _stored(tokens, "version"), is_truncated, shared))
        shared = end
    return turns


_stored = dict.__getitem__
"""What a step or its tokens hold; reading by key would make lists of arrays."""


@dataclass(frozen=True, slots=True)
class Group:
    """The siblings of one example. ``index`` counts groups in the order in which they were begun."""

    index: int
    example_id: int
    records: tuple[Record, ...]

    @property
    def rewards(self) -> np.ndarray:
        """float64 [G], NaN where unknown."""
        return np.array([record.reward for record in self.records])

    @property
    def oldest_version(self) -> int | None:
        """The policy version of its oldest token; None without tokens."""
        return min((v for record in self.records if (v := record.oldest_version) is not None), default=None)

    def is_dead(self, config: RLConfig) -> bool:
        """Whether it teaches nothing: too few known rewards, or all of them equal."""
        return is_dead(self.rewards, config.min_group_fraction, baseline=config.advantage != "none")


@dataclass(frozen=True, slots=True)
class StepBatch:
    """Everything one optimizer step uses."""

    rows_R: list[list[Row]]
    """Rows for each rank, as many on every rank."""
    groups: tuple[Group, ...]
    advantages_G: tuple[np.ndarray, ...]
    stats: dict[str, float]
    num_tokens: int
    """Tokens that carry loss, over all ranks."""


def build(groups: Sequence[Group], discarded: Sequence[Group], config: RLConfig, world: int = 1) -> StepBatch:
    """The batch of ``groups``; ``discarded`` ones count in the statistics alone."""
    lengths_G = [np.array([record.num_sampled for record in group.records], np.float64) for group in groups]
    advantages_G = compute_advantages(
        config.advantage,
        [group.rewards for group in groups],
        lengths_G=lengths_G,
        min_group_fraction=config.min_group_fraction,
    )
    made = [
        _samples_of(record, advantage, number, group.index, config)
        for group, advantages in zip(groups, advantages_G, strict=True)
        for number, (record, advantage) in enumerate(zip(group.records, advantages, strict=True))
    ]
    samples = [sample for rollout in made for sample in rollout.samples]
    weights = step_weights(samples, config.aggregation, max_len=config.max_seq_len)
    longest = max((sample.num_tokens for sample in samples), default=1)
    max_tokens = max(longest, config.micro_batch_tokens or _row_bound(config))
    rows_R = pack(samples, weights.weights, max_tokens=max_tokens, world=world, packing=config.packing)
    stats = rollout_stats([*groups, *discarded]) | _sample_stats(made) | group_stats(groups, discarded, config)
    stats |= {
        "tokens/trained": weights.num_tokens,
        "packing/rows": sum(len(rows) for rows in rows_R),
        "packing/fill": fill(rows_R, max_tokens),
    }
    return StepBatch(rows_R, tuple(groups), tuple(advantages_G), stats, weights.num_tokens)


def _row_bound(config: RLConfig) -> int:
    return min(ROW_TOKENS_CPU if config.use_cpu else ROW_TOKENS, config.micro_batch_size * config.max_seq_len)


def _samples_of(record: Record, advantage: float, number: int, group: int, config: RLConfig) -> RolloutSamples:
    return rollout_samples(
        record.turns,
        advantage,
        rollout=group * config.rollouts_per_example + number,
        group=group,
        temperature=config.temperature,
        max_seq_len=config.max_seq_len,
        mask_truncated=config.mask_truncated_completions,
        mask_env_responses=config.mask_env_responses,
    )


def rollout_stats(groups: Sequence[Group]) -> dict[str, float]:
    """Statistics of every rollout generated for a batch, trained or not."""
    records = [record for group in groups for record in group.records]
    rewards = np.array([record.reward for record in records], np.float64)
    known = rewards[~np.isnan(rewards)]
    stats: dict[str, float] = {
        "reward/mean": float(known.mean()) if known.size else math.nan,
        "reward/std": float(known.std()) if known.size else math.nan,
        "reward/min": float(known.min()) if known.size else math.nan,
        "reward/max": float(known.max()) if known.size else math.nan,
        "reward/unscored": int(rewards.size - known.size),
        "rollouts/errors": sum(record.error is not None for record in records),
        "rollouts/timeouts": sum((record.error or "").startswith("RolloutTimeout") for record in records),
        "rollouts/truncated": sum(record.is_truncated for record in records),
        "rollouts/generated": len(records),
        "tokens/completion": sum(record.num_sampled for record in records),
        "tokens/prompt": sum(len(record.turns[0].prompt_ids) for record in records if record.turns),
        "turns/mean": float(np.mean([len(record.turns) for record in records])) if records else math.nan,
    }
    for name in sorted({name for record in records for name in record.metrics}):
        values = np.array([record.metrics.get(name, math.nan) for record in records], np.float64)
        stats[f"reward/{name}"] = float(np.nanmean(values)) if not np.isnan(values).all() else math.nan
    return stats


def _sample_stats(made: Sequence[RolloutSamples]) -> dict[str, float]:
    excluded = Counter(rollout.excluded for rollout in made if rollout.excluded)
    trained = [rollout for rollout in made if not rollout.excluded]
    return {
        "samples/forks_per_rollout": sum(rollout.num_forks for rollout in trained) / max(1, len(trained)),
        "rollouts/overlong": excluded["overlong"],
        "rollouts/trained": len(trained),
    }


def group_stats(groups: Sequence[Group], discarded: Sequence[Group], config: RLConfig) -> dict[str, float]:
    """How many groups were trained and how many taught nothing."""
    dead = sum(group.is_dead(config) for group in [*groups, *discarded])
    return {
        "groups/live": len(groups) + len(discarded) - dead,
        "groups/dead": dead,
        "groups/backfilled": len(discarded),
    }


def reward_histogram(groups: Sequence[Group]) -> dict[float, int]:
    """How many rollouts have each reward, rounded to three digits; NaN counts the unknown ones."""
    rewards = np.round(np.concatenate([group.rewards for group in groups]), 3)
    values, counts = np.unique(rewards, return_counts=True)
    return {float(value): int(count) for value, count in zip(values, counts, strict=True)}
