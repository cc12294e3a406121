"""Build a batch from groups of finished rollouts: the rows of one optimizer step, or of ``updates_per_batch`` of them.

``build`` credits the rollouts, turns turns into samples, weighs the tokens over the whole step and packs the samples
into rows of bounded length. Groups in, rows and statistics out; nothing here runs a model.

With several updates the advantages are those of the whole batch, and the rollouts are divided among the updates, whole
groups together where there are as many groups as updates. Each update then is a step of its own: its denominators are
sums over its own tokens.

The pipeline decides which groups to train, ``losses`` what is minimised.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from verifiers.errors import ConfigError
from verifiers.rollouts.rollout import Rollout
from verifiers.rollouts.turn import Turn
from verifiers_trainer.algorithm.aggregation import step_weights
from verifiers_trainer.algorithm.credit import CreditSettings, Siblings, credit, has_signal
from verifiers_trainer.algorithm.packing import PackedRow, fill, pack, shared
from verifiers_trainer.algorithm.samples import RolloutSamples, is_overlong, joined, rollout_samples

Advantages = dict[str, Any]
"""Of a rollout: by role, "" without roles, one number or an array [turns of the role]; NaN = not trained."""
ROW_TOKENS, ROW_TOKENS_CPU = 1024, 512
"""Bounds on a row where attention costs the square of its length, as everywhere without kernels for packed rows.
Measured on a CPU, 128 rollouts of 37 tokens in rows of 384, 512, 1024, 4096 tokens: 0.48, 0.51, 0.67, 1.3 s a step."""


class BatchSettings(CreditSettings, Protocol):
    """Every value that decides how groups become a batch; ``RLConfig`` has them all, with their documentation."""

    @property
    def component(self) -> str: ...  # "rl", "ce" or "ref_kl"

    loss: Any
    teacher: str | None
    # turns to samples
    rollouts_per_example: int
    temperature: float
    max_seq_len: int  # tokens, also below
    max_completion_len: int | None
    mask_env_responses: bool
    mask_truncated_completions: bool
    zero_truncated_completions: bool
    overlong: Any  # "mask" or "drop"
    # samples to rows
    updates_per_batch: int
    aggregation: Any  # a name of ``AGGREGATIONS``
    micro_batch_size: int
    micro_batch_tokens: int | None
    packing: bool
    share_prompts: bool
    use_cpu: Any


def apply_length_rules(rollout: Rollout, settings: BatchSettings) -> Rollout:
    """Apply the length limits to the reward of a rollout: the only function where length changes a reward.

    With ``overlong="drop"`` the reward of a rollout that is too long becomes NaN (unknown). With
    ``zero_truncated_completions`` a rollout that a limit cut gets the reward 0, unless it failed. The reward of a role
    changes by its own turns.
    """
    if rollout.role_rewards:
        parts = {role: apply_length_rules(rollout.of_role(role), settings) for role in rollout.role_rewards}
        rollout = replace(rollout, role_rewards={role: part.reward for role, part in parts.items()})
    if settings.overlong == "drop" and is_overlong(rollout.turns, settings.max_seq_len, settings.max_completion_len):
        return replace(rollout, reward=math.nan)
    if settings.zero_truncated_completions and rollout.is_truncated and rollout.error is None:
        return replace(rollout, reward=0.0)
    return rollout


@dataclass(frozen=True, slots=True)
class Group:
    """The sibling rollouts of one example. ``index`` counts groups in the order in which their rollouts began."""

    index: int
    example_id: int
    rollouts: tuple[Rollout, ...]
    env: str = ""
    """Name of the environment of the group's rollouts; empty where there is only one environment."""
    weights: Mapping[str, float] = field(default_factory=dict)
    """Weight of each reward function in the reward; empty where that is not known."""
    component: str = ""
    """The part of the loss that trains the group, one of ``COMPONENTS``; empty: that of the setting ``loss``."""

    @property
    def records(self) -> tuple[Rollout, ...]:
        """``rollouts`` under its name in version 0.2.0."""
        return self.rollouts

    @property
    def rewards(self) -> np.ndarray:
        """float64 [G], NaN where unknown."""
        return np.array([rollout.reward for rollout in self.rollouts])

    @property
    def scores(self) -> np.ndarray:
        """float64 [G, F], a column for each reward function with a weight; a row of NaN where the reward is unknown.

        *Raises* ConfigError when the weights of the reward functions are unknown.
        """
        if not self.weights:
            raise ConfigError(
                "advantage 'gdpo' compares the scores of each reward function, and of these rollouts only the reward "
                "is known: use mean_std"
            )
        columns = [[rollout.metrics.get(name, math.nan) for name in self.weights] for rollout in self.rollouts]
        scores = np.array(columns, np.float64)
        scores[np.isnan(self.rewards)] = math.nan
        return scores

    @property
    def advantages(self) -> np.ndarray:
        """float64 [G], the advantages that the environment computed; NaN where the reward is unknown, or it failed.

        *Raises* ConfigError where it computed none.
        """
        return np.array([self._advantage_of(rollout) for rollout in self.rollouts])

    def _advantage_of(self, rollout: Rollout) -> float:
        value = rollout.advantage
        if math.isnan(rollout.reward) or (rollout.error is not None and (value is None or math.isnan(value))):
            return math.nan
        if value is None or not math.isfinite(value):
            raise ConfigError(
                f"advantage='environment', and the environment gave a rollout of example {self.example_id} with the "
                f"reward {rollout.reward:g} the advantage {value}: compute a number for each in the rubric's "
                "@vf.advantage method, or set advantage='mean'"
            )
        return value

    def values(self, choice: object) -> np.ndarray:
        """What an advantage is computed from: rewards [G], scores [G, F] ("gdpo"), or the environment's advantages."""
        return self.scores if choice == "gdpo" else self.advantages if choice == "environment" else self.rewards

    def limited(self, settings: BatchSettings) -> Group:
        """The group under the length rules, which may be applied more than once."""
        return replace(self, rollouts=tuple(apply_length_rules(rollout, settings) for rollout in self.rollouts))

    def siblings(self, settings: BatchSettings) -> list[Siblings]:
        """What is compared in the group: its rollouts or, if roles have rewards of their own, what each role did."""
        if self.component_of(settings) != "rl":
            values = np.array([1.0 if rollout.error is None else math.nan for rollout in self.rollouts])
            return [Siblings(values, np.zeros(0), is_compared=False)]
        roles = dict.fromkeys(role for rollout in self.rollouts for role in rollout.role_rewards)
        return [self._siblings_of(role, settings) for role in roles or ("",)]

    def _siblings_of(self, role: str, settings: BatchSettings) -> Siblings:
        members = [n for n, rollout in enumerate(self.rollouts) if not role or role in rollout.role_rewards]
        rollouts = tuple(self.rollouts[n].of_role(role) if role else self.rollouts[n] for n in members)
        part = replace(self, rollouts=rollouts, weights={role: 1.0} if role else self.weights)
        turn_rewards = [
            np.array(rollout.turn_rewards or [0.0] * len(rollout.turns), np.float64)
            for rollout in (rollouts if settings.credit == "turn" else ())
        ]
        return Siblings(
            part.values(settings.advantage),
            np.array([rollout.num_sampled for rollout in rollouts], np.float64),
            turn_rewards,
            np.array(list(part.weights.values())) if settings.advantage == "gdpo" else None,
            role=role,
            members=members,
        )

    @property
    def oldest_version(self) -> int | None:
        """Policy version of the oldest token; None without tokens."""
        return min((v for rollout in self.rollouts if (v := rollout.oldest_version) is not None), default=None)

    def is_dead(self, settings: BatchSettings) -> bool:
        """Whether the group has no signal: too few known rewards, or all of them equal. Only "rl" reads rewards.

        With rewards for each role: whether no role has a signal.
        """
        return not has_signal(self.siblings(settings), settings)

    def component_of(self, settings: BatchSettings) -> str:
        """The part of the loss that trains the group under these settings. *Raises* ConfigError if none can."""
        component = self.component or settings.component
        if component == "rl" != settings.component:
            raise ConfigError(
                f"the group of example {self.example_id} has the component 'rl', and the loss {settings.loss!r} reads "
                "no rewards: set a loss that does, such as loss='cispo', and the component of each other group"
            )
        if component == "ref_kl" and settings.teacher is None:
            raise ConfigError(
                f"the group of example {self.example_id} has the component 'ref_kl', and there is no teacher to be "
                "near to: set teacher"
            )
        return component


@dataclass(frozen=True, slots=True)
class TrainBatch:
    """The data of one optimizer step."""

    rows_R: list[list[PackedRow]]
    """Rows of each rank, as many on every rank."""
    groups: tuple[Group, ...]
    advantages_G: tuple[np.ndarray, ...]
    """float64 [rollouts] per group; with credit per turn the mean over the turns of a rollout."""
    stats: dict[str, float]
    num_tokens: int
    """Tokens that carry loss, over all ranks."""
    updates: tuple[TrainBatch, ...] = ()
    """The parts that one optimizer step each is taken on, in their order; empty where the batch is one step."""
    part_of: TrainBatch | None = None
    """The batch that this is one update of."""
    discarded: tuple[Group, ...] = ()
    """Groups without a learning signal, which count in the statistics alone."""
    samples_G: tuple[tuple[RolloutSamples, ...], ...] = ()
    """The samples of each rollout of each group, or why it has none; on rank 0 alone."""
    weights: tuple[np.ndarray, ...] = ()
    """float64 [T] of each sample, in the order of ``samples_G``; on rank 0 alone."""
    first_G: tuple[int, ...] = ()
    """Number of each group's first rollout: above 0 where several updates divide a group; on rank 0 alone."""

    @property
    def whole(self) -> TrainBatch:
        """The batch, of which this may be a part."""
        return self.part_of or self

    @property
    def steps(self) -> tuple[TrainBatch, ...]:
        """What one pass over the batch trains on, an entry for each optimizer step."""
        return self.updates or (self,)


def build(groups: Sequence[Group], discarded: Sequence[Group], settings: BatchSettings, world: int = 1) -> TrainBatch:
    """The batch of ``groups`` for ``world`` ranks; ``discarded`` groups count in the statistics alone.

    The length rules hold for every source: they are applied here, again to groups that came with them applied.

    With ``updates_per_batch`` above 1, ``updates`` has that many parts, and the batch the rows of all of them.
    """
    groups, discarded = ([group.limited(settings) for group in part] for part in (groups, discarded))
    credited = _credited(groups, settings)
    whole = _step(credited, discarded, settings, world)
    if settings.updates_per_batch == 1:
        return whole
    parts = _divided(credited, settings.updates_per_batch)
    updates = tuple(_step(part, discarded[number :: len(parts)], settings, world) for number, part in enumerate(parts))
    rows_R = [[row for update in updates for row in update.rows_R[rank]] for rank in range(world)]
    return replace(whole, rows_R=rows_R, updates=updates)


@dataclass(frozen=True, slots=True)
class _Credited:
    """Rollouts of a group with their credit and samples, all of them or some."""

    group: Group
    credit: list[Advantages]
    """The advantages of each rollout."""
    samples: list[RolloutSamples]
    is_dead: bool
    """Whether the whole group has no signal."""
    first: int = 0
    """Number of the first of them in the whole group."""

    def part(self, start: int, end: int) -> _Credited:
        """The rollouts from ``start`` to before ``end``."""
        group = replace(self.group, rollouts=self.group.rollouts[start:end])
        return _Credited(group, self.credit[start:end], self.samples[start:end], self.is_dead, self.first + start)


def _divided(credited: Sequence[_Credited], num_parts: int) -> list[list[_Credited]]:
    """``num_parts`` parts of nearly equal size: of whole groups, or of rollouts where there are fewer groups."""
    if len(credited) >= num_parts:
        bounds = [number * len(credited) // num_parts for number in range(num_parts + 1)]
        return [list(credited[start:end]) for start, end in itertools.pairwise(bounds)]
    single = [one.part(n, n + 1) for one in credited for n in range(len(one.group.rollouts))]
    trained = [one for one in single if one.samples[0].samples]
    bounds = [number * len(trained) // num_parts for number in range(num_parts + 1)]
    parts = [trained[start:end] for start, end in itertools.pairwise(bounds)]
    parts[0] = [one for one in single if not one.samples[0].samples] + parts[0]  # for the statistics alone
    return parts


def _samples_of(group: Group, credit: Sequence[Advantages], settings: BatchSettings) -> list[RolloutSamples]:
    component = group.component_of(settings)

    def samples_of(turns: Sequence[Turn], advantage: float | Sequence[float], number: int) -> RolloutSamples:
        return rollout_samples(
            turns,
            advantage,
            rollout=group.index * settings.rollouts_per_example + number,
            group=group.index,
            temperature=settings.temperature,
            max_seq_len=settings.max_seq_len,
            max_completion_len=settings.max_completion_len,
            mask_truncated=settings.mask_truncated_completions,
            mask_env_responses=settings.mask_env_responses,
            component=component,
        )

    return [
        joined([samples_of(_turns_of(rollout, role), part, number) for role, part in advantages.items()])
        for number, (rollout, advantages) in enumerate(zip(group.rollouts, credit, strict=True))
    ]


def _turns_of(rollout: Rollout, role: str) -> Sequence[Turn]:
    return rollout.of_role(role).turns if role else rollout.turns


def _step(credited: Sequence[_Credited], discarded: Sequence[Group], settings: BatchSettings, world: int) -> TrainBatch:
    """The data of one optimizer step on these rollouts."""
    groups = [one.group for one in credited]
    by_rollout = [rollout for one in credited for rollout in one.samples]
    samples = [sample for rollout in by_rollout for sample in rollout.samples]
    weights = step_weights(samples, settings.aggregation, max_len=settings.max_completion_len or settings.max_seq_len)
    longest = max((sample.num_tokens for sample in samples), default=1)
    max_tokens = max(longest, settings.micro_batch_tokens or _row_bound(settings))
    rows_R = pack(
        samples,
        weights.weights,
        max_tokens=max_tokens,
        world=world,
        packing=settings.packing,
        share_prompts=settings.share_prompts,
    )
    stats = rollout_stats([*groups, *discarded]) | _sample_stats(by_rollout)
    stats |= _group_stats([part for part in credited if not part.first], discarded, settings)
    stats |= {
        "tokens/trained": weights.num_tokens,
        "packing/rows": sum(len(rows) for rows in rows_R),
        "packing/fill": fill(rows_R, max_tokens),
        "packing/shared": shared(rows_R, samples, weights.weights),
    }
    advantages_G = [
        np.array([_mean_advantage(*pair) for pair in zip(part.group.rollouts, part.credit, strict=True)])
        for part in credited
    ]
    return TrainBatch(
        rows_R,
        tuple(groups),
        tuple(advantages_G),
        stats,
        weights.num_tokens,
        discarded=tuple(discarded),
        samples_G=tuple(tuple(one.samples) for one in credited),
        weights=tuple(weights.weights),
        first_G=tuple(one.first for one in credited),
    )


def _credited(groups: Sequence[Group], settings: BatchSettings) -> list[_Credited]:
    """Each group with the advantages and samples of its rollouts."""
    siblings_G = [group.siblings(settings) for group in groups]
    values = iter(credit([siblings for parts in siblings_G for siblings in parts], settings))
    credited = []
    for group, parts in zip(groups, siblings_G, strict=True):
        advantages: list[Advantages] = [{} for _ in group.rollouts]
        for part in parts:
            for number, value in zip(part.members or range(len(group.rollouts)), next(values), strict=True):
                advantages[number][part.role] = value
        advantages = [given or {"": math.nan} for given in advantages]
        samples, is_dead = _samples_of(group, advantages, settings), not has_signal(parts, settings)
        credited.append(_Credited(group, advantages, samples, is_dead))
    return credited


def _mean_advantage(rollout: Rollout, advantages: Advantages) -> float:
    """The mean over the turns that have an advantage; NaN without any."""
    if isinstance(value := advantages.get(""), float):
        return value
    values = np.concatenate([np.broadcast_to(a, len(_turns_of(rollout, role))) for role, a in advantages.items()])
    known = values[~np.isnan(values)]
    return float(known.mean()) if known.size else math.nan


# --- statistics -------------------------------------------------------------------------------------------------


def _row_bound(settings: BatchSettings) -> int:
    """Tokens of a row on a device; a batch for a service, which sets ``micro_batch_tokens``, has no device."""
    return min(ROW_TOKENS_CPU if settings.use_cpu else ROW_TOKENS, settings.micro_batch_size * settings.max_seq_len)


def rollout_stats(groups: Sequence[Group]) -> dict[str, float]:
    """Statistics of every rollout generated for a batch, trained or not; NaN without known rewards."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    rewards = np.array([rollout.reward for rollout in rollouts], np.float64)
    known = rewards[~np.isnan(rewards)]
    stats: dict[str, float] = {
        "reward/mean": float(known.mean()) if known.size else math.nan,
        "reward/std": float(known.std()) if known.size else math.nan,
        "reward/min": float(known.min()) if known.size else math.nan,
        "reward/max": float(known.max()) if known.size else math.nan,
        "reward/unscored": int(rewards.size - known.size),
        "rollouts/errors": sum(rollout.error is not None for rollout in rollouts),
        "rollouts/timeouts": sum(
            rollout.error is not None and rollout.error["error"] == "RolloutTimeout" for rollout in rollouts
        ),
        "rollouts/truncated": sum(rollout.is_truncated for rollout in rollouts),
        "rollouts/generated": len(rollouts),
        "tokens/completion": sum(rollout.num_sampled for rollout in rollouts),
        "tokens/longest": max((rollout.num_sampled for rollout in rollouts), default=0),
        "tokens/prompt": sum(rollout.turns[0].num_prompt for rollout in rollouts if rollout.turns),
        "turns/mean": float(np.mean([len(rollout.turns) for rollout in rollouts])) if rollouts else math.nan,
    }
    for name in sorted({name for rollout in rollouts for name in rollout.metrics}):
        values = np.array([rollout.metrics.get(name, math.nan) for rollout in rollouts], np.float64)
        stats[f"reward/{name}"] = float(np.nanmean(values)) if not np.isnan(values).all() else math.nan
    return stats | _stats_by_environment(groups)


def _stats_by_environment(groups: Sequence[Group]) -> dict[str, float]:
    """``env/<name>/{reward,share,errors}``: mean known reward, share of the groups; nothing for one environment."""
    stats: dict[str, float] = {}
    for name in sorted({group.env for group in groups} - {""}):
        members = [group for group in groups if group.env == name]
        rewards = np.concatenate([group.rewards for group in members])
        known = rewards[~np.isnan(rewards)]
        stats[f"env/{name}/reward"] = float(known.mean()) if known.size else math.nan
        stats[f"env/{name}/share"] = len(members) / len(groups)
        stats[f"env/{name}/errors"] = sum(rollout.error is not None for group in members for rollout in group.rollouts)
    return stats


def _sample_stats(by_rollout: Sequence[RolloutSamples]) -> dict[str, float]:
    excluded = Counter(rollout.excluded for rollout in by_rollout if rollout.excluded)
    trained = [rollout for rollout in by_rollout if not rollout.excluded]
    return {
        "samples/forks_per_rollout": sum(rollout.num_forks for rollout in trained) / max(1, len(trained)),
        "rollouts/overlong": excluded["overlong"],
        "rollouts/trained": len(trained),
    }


def _group_stats(
    credited: Sequence[_Credited], discarded: Sequence[Group], settings: BatchSettings
) -> dict[str, float]:
    """How many groups have a signal and how many have none; one that several updates divide counts in the first."""
    dead = sum(part.is_dead for part in credited) + sum(group.is_dead(settings) for group in discarded)
    return {
        "groups/live": len(credited) + len(discarded) - dead,
        "groups/dead": dead,
        "groups/backfilled": len(discarded),
    }


def reward_histogram(groups: Sequence[Group]) -> dict[float, int]:
    """How many rollouts have each reward, rounded to three digits; NaN counts the unknown ones."""
    rewards = np.round(np.concatenate([group.rewards for group in groups]), 3)
    values, counts = np.unique(rewards, return_counts=True)
    return {float(value): int(count) for value, count in zip(values, counts, strict=True)}
