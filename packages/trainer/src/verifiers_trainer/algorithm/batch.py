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
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from verifiers.errors import ConfigError
from verifiers.rollouts.state import State, TrajectoryStep, TrajectoryStepTokens
from verifiers_trainer.algorithm.advantages import compute_advantages, is_dead, turn_advantages
from verifiers_trainer.algorithm.aggregation import step_weights
from verifiers_trainer.algorithm.packing import Row, fill, pack, shared
from verifiers_trainer.algorithm.samples import RolloutSamples, Turn, is_overlong, rollout_samples

if TYPE_CHECKING:
    from verifiers_trainer.settings.config import RLConfig

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
    turn_rewards: tuple[float, ...] = ()
    """What the environment gave for each turn alone, beside the reward; empty when it gave nothing."""

    @classmethod
    def of(cls, state: State, config: RLConfig | None = None) -> Record:
        """What to keep of a finished rollout, with the reward that the length limits of ``config`` leave it."""
        error, turns, reward = state["error"], _turns(state["trajectory"]), state["reward"]
        if config is not None:
            if error is None and config.zero_truncated_completions and state["is_truncated"]:
                reward = 0.0
            if config.overlong == "drop" and is_overlong(turns, config.max_seq_len, config.max_completion_len):
                reward = None
        return cls(
            turns=turns,
            reward=math.nan if reward is None else float(reward),
            metrics=dict(state["metrics"]),
            error=None if error is None else f"{type(error).__name__}: {error}",
            stop=state["stop_condition"],
            is_truncated=bool(state["is_truncated"]),
            text={key: state[key] for key in ("prompt", "completion", "answer")},
            turn_rewards=_turn_rewards(state),
        )

    @property
    def oldest_version(self) -> int | None:
        """The policy version of its oldest token; None without tokens."""
        return min((int(np.min(turn.version)) for turn in self.turns if len(turn.completion_ids)), default=None)

    @property
    def num_sampled(self) -> int:
        return sum(len(turn.completion_ids) for turn in self.turns)


def _turn_rewards(state: State) -> tuple[float, ...]:
    """The turns' own rewards; scoring fills steps that have none with the rollout's, which is not counted twice."""
    steps, given = state["trajectory"], getattr(state, "turn_rewards", None)
    if given is None or len(given) != len(steps):  # read from a file
        given = [None if step.get("reward") in (None, state["reward"]) else step["reward"] for step in steps]
    kept = [reward for step, reward in zip(steps, given, strict=True) if _stored(step, "tokens") is not None]
    known = [0.0 if reward is None or math.isnan(reward) else float(reward) for reward in kept]
    return tuple(known) if any(known) else ()


def _turns(steps: Sequence[TrajectoryStep]) -> tuple[Turn, ...]:
    """The turns of the steps that have tokens; linear in their tokens while each prompt continues the turn before."""
    turns: list[Turn] = []
    run: list[tuple[TrajectoryStepTokens, bool, int]] = []
    before, end, shared_of_first = None, 0, 0
    for step in steps:
        tokens = _stored(step, "tokens")
        if tokens is None:
            continue
        shared = tokens.shared if tokens.previous is before else 0
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
    env: str = ""
    """The environment of a group of environments that played it."""
    weights: Mapping[str, float] = field(default_factory=dict)
    """How much each reward function counted; empty where that is not known."""

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
        baseline = config.advantage != "none"
        if config.credit == "turn":
            distinct = np.where(np.isnan(self.rewards), np.nan, np.arange(len(self.records)))
            too_few = is_dead(distinct, config.min_group_fraction, baseline=baseline)
            return too_few or not any(np.nan_to_num(turns).any() for turns in self.turn_advantages(config))
        rewards = self.scores if config.advantage == "gdpo" else self.rewards
        return is_dead(rewards, config.min_group_fraction, baseline=baseline)

    @property
    def scores(self) -> np.ndarray:
        """float64 [G, F], a column for each function that counted; a row of NaN where the reward is unknown.

        Raises ``ConfigError`` when it is not known which functions counted.
        """
        if not self.weights:
            raise ConfigError(
                "advantage 'gdpo' compares the scores of each reward function, and of these rollouts only the reward "
                "is known: use mean_std"
            )
        found = [[record.metrics.get(name, math.nan) for name in self.weights] for record in self.records]
        scores = np.array(found, np.float64)
        scores[np.isnan(self.rewards)] = math.nan
        return scores

    def turn_advantages(self, config: RLConfig) -> list[np.ndarray]:
        """For each rollout an advantage per turn; of a turn the discounted rewards from there on count."""
        returns = []
        for record in self.records:
            own = np.array(record.turn_rewards or [0.0] * len(record.turns), np.float64)
            own[-1:] += record.reward
            returns.append(own)
        return turn_advantages(returns, config.gamma, baseline=config.advantage != "none")


@dataclass(frozen=True, slots=True)
class StepBatch:
    """Everything one optimizer step uses."""

    rows_R: list[list[Row]]
    """Rows for each rank, as many on every rank."""
    groups: tuple[Group, ...]
    advantages_G: tuple[np.ndarray, ...]
    """Of each rollout; with credit per turn the mean over its turns."""
    stats: dict[str, float]
    num_tokens: int
    """Tokens that carry loss, over all ranks."""


def build(groups: Sequence[Group], discarded: Sequence[Group], config: RLConfig, world: int = 1) -> StepBatch:
    """The batch of ``groups``; ``discarded`` ones count in the statistics alone."""
    credited_G = _credit(groups, config)
    advantages_G = [np.array([np.mean(of) if np.size(of) else np.nan for of in credited]) for credited in credited_G]
    made = [
        _samples_of(record, advantage, number, group.index, config)
        for group, advantages in zip(groups, credited_G, strict=True)
        for number, (record, advantage) in enumerate(zip(group.records, advantages, strict=True))
    ]
    samples = [sample for rollout in made for sample in rollout.samples]
    weights = step_weights(samples, config.aggregation, max_len=config.max_completion_len or config.max_seq_len)
    longest = max((sample.num_tokens for sample in samples), default=1)
    max_tokens = max(longest, config.micro_batch_tokens or _row_bound(config))
    rows_R = pack(
        samples,
        weights.weights,
        max_tokens=max_tokens,
        world=world,
        packing=config.packing,
        share_prompts=config.share_prompts,
    )
    stats = rollout_stats([*groups, *discarded]) | _sample_stats(made) | group_stats(groups, discarded, config)
    stats |= {
        "tokens/trained": weights.num_tokens,
        "packing/rows": sum(len(rows) for rows in rows_R),
        "packing/fill": fill(rows_R, max_tokens),
        "packing/shared": shared(rows_R, samples, weights.weights),
    }
    return StepBatch(rows_R, tuple(groups), tuple(advantages_G), stats, weights.num_tokens)


def _row_bound(config: RLConfig) -> int:
    return min(ROW_TOKENS_CPU if config.use_cpu else ROW_TOKENS, config.micro_batch_size * config.max_seq_len)


def _credit(groups: Sequence[Group], config: RLConfig) -> list[Sequence[Any]]:
    """The advantage of each rollout of each group: one number, or one for each of its turns; NaN: not trained."""
    if config.credit == "turn":
        return [
            [np.nan] * len(group.records) if group.is_dead(config) else group.turn_advantages(config)
            for group in groups
        ]
    by_function = config.advantage == "gdpo"
    return compute_advantages(  # type: ignore[return-value]
        config.advantage,
        [group.scores if by_function else group.rewards for group in groups],
        lengths_G=[np.array([record.num_sampled for record in group.records], np.float64) for group in groups],
        min_group_fraction=config.min_group_fraction,
        weights_G=[np.array(list(group.weights.values())) for group in groups] if by_function else None,
    )


def _samples_of(record: Record, advantage: Any, number: int, group: int, config: RLConfig) -> RolloutSamples:
    return rollout_samples(
        record.turns,
        advantage,
        rollout=group * config.rollouts_per_example + number,
        group=group,
        temperature=config.temperature,
        max_seq_len=config.max_seq_len,
        max_completion_len=config.max_completion_len,
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
    return stats | _stats_by_environment(groups)


def _stats_by_environment(groups: Sequence[Group]) -> dict[str, float]:
    """``env/<name>/{reward,share,errors}``: mean known reward, share of the groups; nothing for one environment."""
    stats: dict[str, float] = {}
    for name in sorted({group.env for group in groups} - {""}):
        own = [group for group in groups if group.env == name]
        rewards = np.concatenate([group.rewards for group in own])
        known = rewards[~np.isnan(rewards)]
        stats[f"env/{name}/reward"] = float(known.mean()) if known.size else math.nan
        stats[f"env/{name}/share"] = len(own) / len(groups)
        stats[f"env/{name}/errors"] = sum(record.error is not None for group in own for record in group.records)
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
