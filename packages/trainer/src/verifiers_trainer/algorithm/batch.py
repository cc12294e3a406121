"""Build a batch from groups of finished rollouts: the rows of an optimizer step, or of
``updates_per_batch`` of them.

``build`` credits the rollouts, turns turns into samples, weighs the tokens over the whole step and
packs the samples into rows of bounded length. Groups in, rows and statistics out; nothing here runs
a model.

With several updates the advantages are those of the whole batch, and the rollouts are divided among
the updates, whole groups together where there are as many groups as updates. Each update then is a
step of its own: its denominators are sums over its own tokens.

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

from verifiers.rollouts.rollout import Rollout
from verifiers.rollouts.turn import Turn
from verifiers_trainer.algorithm.aggregation import step_weights
from verifiers_trainer.algorithm.credit import credit, has_signal
from verifiers_trainer.algorithm.group import Group as Group  # here for ``get_batch`` of users
from verifiers_trainer.algorithm.group import GroupSettings
from verifiers_trainer.algorithm.packing import PackedRow, fill, pack, shared
from verifiers_trainer.algorithm.samples import RolloutSamples, Sample, joined, rollout_samples
from verifiers_trainer.algorithm.state import state_of
from verifiers_trainer.algorithm.statistics import rollout_stats


class TeacherPrompts(Protocol):
    """Says what a teacher reads of a rollout's samples; ``pipeline.teacher_context`` has it."""

    def __call__(
        self, group: Group, number: int, turns: Sequence[Turn], samples: RolloutSamples
    ) -> RolloutSamples:
        """The ``samples`` of ``turns``, of the group's rollout of that number, with ``teacher`` and
        ``teacher_prompt``."""
        ...


Advantages = dict[str, Any]
"""By role, "" without roles, one number or an array [turns of the role]; NaN = not trained."""
ROW_TOKENS, ROW_TOKENS_CPU = 1024, 512
"""Bounds on a row where attention costs the square of its length, as everywhere without kernels for
packed rows. Measured on a CPU, 128 rollouts of 37 tokens in rows of 384, 512, 1024, 4096 tokens:
0.48, 0.51, 0.67, 1.3 s a step."""
SUMMED = ("groups/", "time/", "tokens/trained", "packing/rows")
"""Statistics that add up over the batches of one optimizer step."""


class BatchSettings(GroupSettings, Protocol):
    """What decides how groups become a batch; ``RLConfig`` documents each."""

    # turns to samples
    rollouts_per_example: int
    temperature: float
    mask_env_responses: bool
    mask_truncated_completions: bool
    # samples to rows
    updates_per_batch: int
    aggregation: Any  # a name of ``AGGREGATIONS``
    micro_batch_size: int
    micro_batch_tokens: int | None
    packing: bool
    share_prompts: bool
    use_cpu: bool
    teacher_prompts: TeacherPrompts | None
    """What teachers read; None: one teacher, and what the policy read."""
    adapter_roles: tuple[str, ...]
    """The roles with an adapter of their own, by its number; empty: one policy is trained."""


@dataclass(frozen=True, slots=True)
class TrainBatch:
    """The data of an optimizer step."""

    rows_R: list[list[PackedRow]]
    """[rank][row], as many rows on every rank."""
    groups: tuple[Group, ...]
    advantages_G: tuple[np.ndarray, ...]
    """float64 [rollouts] per group; with credit per turn the mean over the turns of a rollout."""
    stats: dict[str, float]
    num_tokens: int
    """Tokens that carry loss, over all ranks."""
    updates: tuple[TrainBatch, ...] = ()
    """The parts of one optimizer step each, in their order; empty if the batch is one step."""
    part_of: TrainBatch | None = None
    """The batch that this is one update of."""
    discarded: tuple[Group, ...] = ()
    """Groups without a learning signal, which count in the statistics alone."""
    samples_G: tuple[tuple[RolloutSamples, ...], ...] = ()
    """The samples of each rollout of each group, or why it has none; on rank 0 alone."""
    weights: tuple[np.ndarray, ...] = ()
    """float64 [T] of each sample, in the order of ``samples_G``; on rank 0 alone."""
    first_G: tuple[int, ...] = ()
    """Number of each group's first rollout: above 0 in a divided group; on rank 0 alone."""
    state_before: Mapping[str, object] = field(default_factory=dict)
    """State of the advantage before the batch was built (``state.state_of``), with which it can be
    built again; on rank 0 alone."""

    @property
    def whole_batch(self) -> TrainBatch:
        """The batch, of which this may be a part."""
        return self.part_of or self

    @property
    def steps(self) -> tuple[TrainBatch, ...]:
        """What one pass over the batch trains on, an entry for each optimizer step."""
        return self.updates or (self,)


def build(
    groups: Sequence[Group], discarded: Sequence[Group], settings: BatchSettings, world: int = 1
) -> TrainBatch:
    """The batch of ``groups`` for ``world`` ranks; ``discarded`` groups count in the statistics
    alone.

    The length rules hold for every source: they are applied here, again to groups that came with
    them applied.

    With ``updates_per_batch`` above 1, ``updates`` has that many parts, and the batch the rows of
    all of them.
    """
    groups, discarded = (
        [group.limited(settings) for group in part] for part in (groups, discarded)
    )
    before = state_of(settings, ("advantage",))
    credited = _credited(groups, settings)
    step = replace(_step(credited, discarded, settings, world), state_before=before)
    if settings.updates_per_batch == 1:
        return step
    parts = _divided(credited, settings.updates_per_batch)
    updates = tuple(
        _step(part, discarded[number :: len(parts)], settings, world)
        for number, part in enumerate(parts)
    )
    rows_R = [[row for update in updates for row in update.rows_R[rank]] for rank in range(world)]
    return replace(step, rows_R=rows_R, updates=updates)


def of_rows(rows: Sequence[PackedRow], rank: int, num_tokens_R: Sequence[int]) -> TrainBatch:
    """A batch of rows without rollouts: those of this ``rank``, and the number of tokens with loss
    of every rank."""
    rows_R: list[list[PackedRow]] = [[] for _ in num_tokens_R]
    rows_R[rank] = list(rows)
    num_tokens = int(sum(num_tokens_R))
    return TrainBatch(rows_R, (), (), {"tokens/trained": num_tokens}, num_tokens)


def merged(batches: Sequence[TrainBatch]) -> TrainBatch:
    """One batch of several that one optimizer step trains on. Statistics of rollouts are of all of
    them, counts and times are sums, and what else a batch says is of the last that says it."""
    groups, discarded = (
        [group for batch in batches for group in getattr(batch, name)]
        for name in ("groups", "discarded")
    )
    stats: dict[str, float] = {}
    for batch in batches:
        for name, value in batch.stats.items():
            is_sum = name.startswith(SUMMED) and name in stats
            stats[name] = stats[name] + value if is_sum else value
    if groups or discarded:
        stats |= rollout_stats([*groups, *discarded])
        stats |= _sample_stats([s for batch in batches for part in batch.samples_G for s in part])
    ranks = range(len(batches[0].rows_R))
    return TrainBatch(
        [[row for batch in batches for row in batch.rows_R[rank]] for rank in ranks],
        tuple(groups),
        tuple(advantages for batch in batches for advantages in batch.advantages_G),
        stats,
        sum(batch.num_tokens for batch in batches),
        discarded=tuple(discarded),
        samples_G=tuple(samples for batch in batches for samples in batch.samples_G),
        weights=tuple(weights for batch in batches for weights in batch.weights),
        first_G=tuple(first for batch in batches for first in batch.first_G),
        state_before=batches[0].whole_batch.state_before,
    )


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
        return _Credited(
            group, self.credit[start:end], self.samples[start:end], self.is_dead, self.first + start
        )


def _divided(credited: Sequence[_Credited], num_parts: int) -> list[list[_Credited]]:
    """``num_parts`` parts of nearly equal size: of whole groups, or of rollouts where there are
    fewer groups."""
    if len(credited) >= num_parts:
        bounds = [number * len(credited) // num_parts for number in range(num_parts + 1)]
        return [list(credited[start:end]) for start, end in itertools.pairwise(bounds)]
    single = [item.part(n, n + 1) for item in credited for n in range(len(item.group.rollouts))]
    trained = [item for item in single if item.samples[0].samples]
    bounds = [number * len(trained) // num_parts for number in range(num_parts + 1)]
    parts = [trained[start:end] for start, end in itertools.pairwise(bounds)]
    # for the statistics alone
    parts[0] = [item for item in single if not item.samples[0].samples] + parts[0]
    return parts


def _samples_of(
    group: Group, credit: Sequence[Advantages], settings: BatchSettings
) -> list[RolloutSamples]:
    component = group.component_of(settings)
    reads = None if component == "ce" else settings.teacher_prompts

    def samples_of(
        rollout: Rollout, advantage: float | Sequence[float], number: int
    ) -> RolloutSamples:
        samples = rollout_samples(
            rollout.turns,
            advantage,
            rollout=group.index * settings.rollouts_per_example + number,
            group=group.index,
            temperature=settings.temperature,
            max_seq_len=settings.max_seq_len,
            max_completion_len=settings.max_completion_len,
            mask_truncated=settings.mask_truncated_completions,
            is_truncated=rollout.is_truncated,
            mask_env_responses=settings.mask_env_responses,
            component=component,
            adapter_roles=settings.adapter_roles,
        )
        return samples if reads is None else reads(group, number, rollout.turns, samples)

    samples = []
    for number, (rollout, advantages) in enumerate(zip(group.rollouts, credit, strict=True)):
        of_role = {
            role: samples_of(_part_of(rollout, role), part, number)
            for role, part in advantages.items()
        }
        samples.append(joined(of_role))
    return samples


def _part_of(rollout: Rollout, role: str) -> Rollout:
    return rollout.of_role(role) if role else rollout


def _step(
    credited: Sequence[_Credited], discarded: Sequence[Group], settings: BatchSettings, world: int
) -> TrainBatch:
    """The data of an optimizer step on these rollouts."""
    groups = [item.group for item in credited]
    by_rollout = [rollout for item in credited for rollout in item.samples]
    samples = [sample for rollout in by_rollout for sample in rollout.samples]
    weights = step_weights(
        samples, settings.aggregation, max_len=settings.max_completion_len or settings.max_seq_len
    )
    max_tokens = settings.micro_batch_tokens
    if not max_tokens:  # a batch for a service sets it: it has no device
        of_device = ROW_TOKENS_CPU if settings.use_cpu else ROW_TOKENS
        max_tokens = min(of_device, settings.micro_batch_size * settings.max_seq_len)
    rows_R, max_tokens = _packed(samples, weights.weights, max_tokens, settings, world)
    stats = rollout_stats([*groups, *discarded]) | _sample_stats(by_rollout)
    if settings.teacher_prompts is not None:
        stats |= _teacher_stats(samples)
    stats |= _group_stats([part for part in credited if not part.first], discarded, settings)
    stats |= {
        "tokens/trained": weights.num_tokens,
        "packing/rows": sum(len(rows) for rows in rows_R),
        "packing/fill": fill(rows_R, max_tokens),
        "packing/shared": shared(rows_R, samples, weights.weights),
    }
    advantages_G = [
        np.array(
            [_mean_advantage(*pair) for pair in zip(part.group.rollouts, part.credit, strict=True)]
        )
        for part in credited
    ]
    return TrainBatch(
        rows_R,
        tuple(groups),
        tuple(advantages_G),
        stats,
        weights.num_tokens,
        discarded=tuple(discarded),
        samples_G=tuple(tuple(item.samples) for item in credited),
        weights=tuple(weights.weights),
        first_G=tuple(item.first for item in credited),
    )


def _packed(
    samples: Sequence[Sample],
    weights: Sequence[np.ndarray],
    max_tokens: int,
    settings: BatchSettings,
    world: int,
) -> tuple[list[list[PackedRow]], int]:
    """(rows of each rank, tokens that the largest may hold). A row has the samples of one adapter,
    and the rows of an adapter are those of its samples alone, whatever others there are. An adapter
    without loss has no row: a gradient of zero would let momentum move it."""
    rows_R: list[list[PackedRow]] = [[] for _ in range(world)]
    largest = 1
    trained = (sample.adapter for sample, w in zip(samples, weights, strict=True) if w.any())
    for adapter in dict.fromkeys(trained) or [None]:
        its = [sample.adapter == adapter for sample in samples]
        lengths = [sample.num_tokens for sample, is_its in zip(samples, its, strict=True) if is_its]
        bound = max(max_tokens, *lengths, 1)
        largest = max(largest, bound)
        part_R = pack(
            samples,
            [w if is_its else np.zeros_like(w) for w, is_its in zip(weights, its, strict=True)],
            max_tokens=bound,
            world=world,
            packing=settings.packing,
            share_prompts=settings.share_prompts,
        )
        for rows, part in zip(rows_R, part_R, strict=True):
            rows += part
    return rows_R, largest


def _credited(groups: Sequence[Group], settings: BatchSettings) -> list[_Credited]:
    """Each group with the advantages and samples of its rollouts."""
    siblings_G = [group.siblings(settings) for group in groups]
    values = iter(credit([siblings for parts in siblings_G for siblings in parts], settings))
    credited = []
    for group, parts in zip(groups, siblings_G, strict=True):
        advantages: list[Advantages] = [{} for _ in group.rollouts]
        for part in parts:
            members = part.members or range(len(group.rollouts))
            for number, value in zip(members, next(values), strict=True):
                advantages[number][part.role] = value
        advantages = [by_role or {"": math.nan} for by_role in advantages]
        samples, is_dead = _samples_of(group, advantages, settings), not has_signal(parts, settings)
        credited.append(_Credited(group, advantages, samples, is_dead))
    return credited


def _mean_advantage(rollout: Rollout, advantages: Advantages) -> float:
    """The mean over the turns that have an advantage; NaN without any."""
    if isinstance(value := advantages.get(""), float):
        return value
    values = np.concatenate(
        [np.broadcast_to(a, len(_part_of(rollout, role).turns)) for role, a in advantages.items()]
    )
    finite = values[~np.isnan(values)]
    return float(finite.mean()) if finite.size else math.nan


# --- statistics -----------------------------------------------------------------------------------


def _sample_stats(by_rollout: Sequence[RolloutSamples]) -> dict[str, float]:
    excluded = Counter(rollout.excluded for rollout in by_rollout if rollout.excluded)
    trained = [rollout for rollout in by_rollout if not rollout.excluded]
    num_forks = sum(rollout.num_forks for rollout in trained)
    return {
        "samples/forks_per_rollout": num_forks / max(1, len(trained)),
        "rollouts/overlong": excluded["overlong"],
        "rollouts/trained": len(trained),
    }


def _teacher_stats(samples: Sequence[Sample]) -> dict[str, float]:
    """How many of the samples a teacher reads after a prompt of its own, and how much longer that
    is in the mean over all."""
    added = [
        0 if sample.teacher_prompt is None else len(sample.teacher_prompt) - sample.num_prompt
        for sample in samples
    ]
    num_with = sum(sample.teacher_prompt is not None for sample in samples)
    return {
        "teacher/with_context": num_with / max(1, len(samples)),
        "teacher/context_tokens": sum(added) / max(1, len(samples)),
    }


def _group_stats(
    credited: Sequence[_Credited], discarded: Sequence[Group], settings: BatchSettings
) -> dict[str, float]:
    """How many groups have a signal and how many have none; a group that several updates divide
    counts in the first."""
    dead = sum(part.is_dead for part in credited)
    dead += sum(group.is_dead(settings) for group in discarded)
    return {
        "groups/live": len(credited) + len(discarded) - dead,
        "groups/dead": dead,
        "groups/backfilled": len(discarded),
    }
