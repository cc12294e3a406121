"""Turn the model calls of a rollout into samples: every sampled token is trained exactly once, on the sampled ids.

A turn whose prompt begins with an earlier turn's prompt and completion continues that sample: only the new tokens are
appended, those of the environment without loss. Any other turn starts a new sample (a fork) with its whole prompt
without loss. Masks come from lengths and turn boundaries, never from token ids, so an end token that equals the pad
token is trained.

Every array here describes token t at entry t, given the tokens before it; entry 0 is never trained. Nothing is decoded,
encoded again or cut. ``batch`` decides which rewards enter the baseline, ``aggregation`` how much a token weighs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy import empty, zeros  # looked up five times per sample

from verifiers.types import Immutable, Rollout, Turn

NOT_SAMPLED = -2
"""Version of a token that no policy sampled: prompts, tool results, offline text. (-1: sampled, version unknown.)"""
COMPONENTS = ("rl", "ce", "ref_kl")
"""Parts of the loss, of which a sample has one: its rewards ("rl"), imitation ("ce"), nearness to a teacher
("ref_kl"). Each is a mean over its own tokens of the step."""

_INT, _FLOAT = np.dtype(np.int32), np.dtype(np.float32)  # their classes are looked up at every use


class Sample(Immutable, frozen=True, eq=False):
    """One token sequence to learn from.

    Example, a prompt [1, 15], the completion [7, 2] and an environment's token 9 before the completion [2]::

        Sample(token_ids=[1, 15, 7, 2, 9, 2], loss_mask=[F, F, T, T, F, T],
               sampler_logprobs=[0, 0, -.1, -.7, 0, -.2], versions=[-2, -2, 4, 4, -2, 5],
               advantages=[0, 0, .5, .5, 0, .5])
    """

    token_ids: np.ndarray  # int32 [T]
    loss_mask: np.ndarray  # bool [T]
    sampler_logprobs: np.ndarray  # float32 [T], nats, log μ of the sampling policy; 0 where nothing was sampled
    versions: np.ndarray  # int32 [T], NOT_SAMPLED where nothing was sampled
    advantages: np.ndarray  # float32 [T], 0 where masked
    inv_temperature: float = 1.0
    rollout: int = 0
    """Number of the rollout in the train batch; the samples of a forked rollout share it."""
    group: int = 0
    """Number of the group of sibling rollouts."""
    live: bool = True
    """False: present but without weight."""
    component: str = "rl"
    """The part of the loss that trains the sample, one of ``COMPONENTS``."""

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_trained(self) -> int:
        """Tokens with loss: 0 when the sample is not live."""
        return int(self.loss_mask.sum()) if self.live else 0

    @property
    def oldest_version(self) -> int | None:
        """Smallest policy version among the sampled tokens; None when nothing was sampled."""
        sampled = self.versions[self.versions != NOT_SAMPLED]
        return int(sampled.min()) if len(sampled) else None


class RolloutSamples(Immutable, frozen=True):
    """The samples of one rollout, or the reason why it has none."""

    samples: tuple[Sample, ...]
    excluded: str | None = None
    """"overlong", "truncated", "unscored" or "empty" when the rollout carries no loss; None when it does."""
    num_of_role: tuple[int, ...] = ()
    """How many of the samples are of each role, one after another; empty where roles have no rewards of their own."""

    @property
    def num_forks(self) -> int:
        return sum(max(0, num - 1) for num in self.num_of_role or (len(self.samples),))


def merge_turns(turns: Sequence[Turn], *, mask_env_responses: bool = True) -> list[Sample]:
    """Merge the turns of a rollout into samples, in the order of their first turn, with advantages of zero.

    Time is linear in the tokens compared and returned; with `Turn.num_shared`, linear in new tokens. A
    turn continues the newest sample it can. With ``mask_env_responses=False`` the environment's tokens between turns
    carry loss too (never the first prompt of a sample). A sample without any completion token is left out.
    """
    return _merge(turns, [0.0] * len(turns), mask_env_responses)


def rollout_samples(
    turns: Sequence[Turn],
    advantage: float | Sequence[float],
    *,
    rollout: int = 0,
    group: int = 0,
    temperature: float = 1.0,
    max_seq_len: int | None = None,
    max_completion_len: int | None = None,
    mask_truncated: bool = False,
    mask_env_responses: bool = True,
    live: bool = True,
    component: str = "rl",
) -> RolloutSamples:
    """The samples of one rollout with their advantage: one number, or one per turn (credit="turn").

    A turn whose advantage is NaN carries no loss. A rollout gives no samples, and ``excluded`` says why, when its
    advantage is NaN, or that of every turn, when it is longer than
    ``max_seq_len`` tokens in any sample (or than ``max_completion_len`` after its first prompt), or when a length limit
    cut it and ``mask_truncated`` is set. *Raises* ValueError when the number of advantages is not that of the turns.
    """
    if isinstance(advantage, float) or np.ndim(advantage) == 0:
        per_turn = [float(advantage)] * len(turns)  # type: ignore[arg-type]
    else:
        per_turn = [float(one) for one in advantage]
    if len(per_turn) != len(turns):
        raise ValueError(f"{len(per_turn)} advantages for {len(turns)} turns: give one number, or one per turn")
    if per_turn and all(map(math.isnan, per_turn)):
        return RolloutSamples((), "unscored")
    is_limited = max_seq_len is not None or max_completion_len is not None
    if is_limited and is_overlong(turns, max_seq_len, max_completion_len):
        return RolloutSamples((), "overlong")
    if mask_truncated and any(turn.is_truncated for turn in turns):
        return RolloutSamples((), "truncated")
    samples = _merge(turns, per_turn, mask_env_responses, 1.0 / temperature, rollout, group, live, component)
    return RolloutSamples(tuple(samples), None if samples else "empty")


def joined(parts: Sequence[RolloutSamples]) -> RolloutSamples:
    """The samples of the roles of one rollout together; ``excluded`` says why when none of them has any."""
    samples = tuple(sample for part in parts for sample in part.samples)
    return RolloutSamples(samples, None if samples else parts[0].excluded, tuple(len(part.samples) for part in parts))


def is_overlong(turns: Sequence[Turn], max_seq_len: int | None, max_completion_len: int | None = None) -> bool:
    """Whether any sample exceeds ``max_seq_len`` tokens, or ``max_completion_len`` tokens after the first prompt.

    A sample is as long as its last turn.
    """
    if not turns:
        return False
    bounds = [] if max_seq_len is None else [max_seq_len]
    if max_completion_len is not None:
        bounds.append(len(turns[0].prompt_ids) + max_completion_len)
    return bool(bounds) and max(turn.num_tokens for turn in turns) > min(bounds)


def turn_places(rollout: Rollout, samples: RolloutSamples) -> list[tuple[int, int, int]]:
    """Where the completion of each turn of a rollout is in its ``samples``: (sample, start, end).

    A turn of a sample that is left out, for it has no completion token or its role is excluded, is at (-1, 0, 0).
    """
    if not rollout.role_rewards:
        return _places(rollout.turns, 0) if samples.samples else [(-1, 0, 0)] * len(rollout.turns)
    places, before = [(-1, 0, 0)] * len(rollout.turns), 0
    for role, num in zip(rollout.role_rewards, samples.num_of_role, strict=True):
        numbers = [number for number, turn in enumerate(rollout.turns) if turn.role == role]
        if num:
            for number, place in zip(numbers, _places(rollout.of_role(role).turns, before), strict=True):
                places[number] = place
        before += num
    return places


def _places(turns: Sequence[Turn], before: int) -> list[tuple[int, int, int]]:
    """`turn_places` of turns whose samples come after ``before`` others."""
    places = [(-1, 0, 0)] * len(turns)
    chains = [chain for chain in _chains(turns) if any(len(turns[i].completion_ids) for i in chain)]
    for sample, chain in enumerate(chains, start=before):
        for i in chain:
            places[i] = sample, len(turns[i].prompt_ids), turns[i].num_tokens
    return places


def _chains(turns: Sequence[Turn]) -> list[list[int]]:
    """Indices of the turns of each sample."""
    if len(turns) == 1:
        return [[0]]
    chains: list[list[int]] = []
    for index, turn in enumerate(turns):
        for chain in reversed(chains):  # newest sample first, so that interleaved conversations match correctly
            num_shared = turn.num_shared if chain[-1] == index - 1 else 0
            if _continues(turn, turns[chain[-1]], num_shared):
                chain.append(index)
                break
        else:
            chains.append([index])
    return chains


def _continues(turn: Turn, earlier: Turn, num_shared: int) -> bool:
    """Whether the prompt begins with all tokens of ``earlier``, of which ``num_shared`` are known to be equal."""
    start, end = len(earlier.prompt_ids), earlier.num_tokens
    if len(turn.prompt_ids) < end:
        return False
    if num_shared >= end:
        return True
    split = max(num_shared, start)  # compare the completion first: that is where branches differ
    tail_equal = np.array_equal(turn.prompt_ids[split:end], earlier.completion_ids[split - start :])
    return tail_equal and np.array_equal(turn.prompt_ids[num_shared:start], earlier.prompt_ids[num_shared:])


def _merge(
    turns: Sequence[Turn],
    advantages: list[float],
    mask_env_responses: bool,
    inv_temperature: float = 1.0,
    rollout: int = 0,
    group: int = 0,
    live: bool = True,
    component: str = "rl",
) -> list[Sample]:
    samples = []
    for chain in _chains(turns):
        last = turns[chain[-1]]  # each turn of a chain begins with all of the one before: the last holds every id
        num_prompt, num_sampled = len(last.prompt_ids), len(last.completion_ids)
        if not num_sampled and not any([len(turns[i].completion_ids) for i in chain]):
            continue
        size = num_prompt + num_sampled
        token_ids = empty(size, _INT)
        token_ids[:num_prompt] = last.prompt_ids  # in two thirds of the time of np.concatenate
        token_ids[num_prompt:] = last.completion_ids
        loss_mask = zeros(size, bool)
        sampler_logprobs = zeros(size, _FLOAT)
        versions = empty(size, _INT)
        versions.fill(NOT_SAMPLED)  # half of the time of np.full
        per_token = zeros(size, _FLOAT)
        before = len(turns[chain[0]].prompt_ids)
        for i in chain:
            turn, advantage = turns[i], advantages[i]
            start = len(turn.prompt_ids)
            end = start + len(turn.completion_ids)
            places = slice(start, end)
            sampler_logprobs[places] = turn.sampler_logprobs
            versions[places] = turn.version
            if not math.isnan(advantage):
                trained = places if mask_env_responses else slice(before, end)
                loss_mask[trained] = True
                per_token[trained] = advantage
            before = end
        kind = inv_temperature, rollout, group, live, component
        samples.append(Sample(token_ids, loss_mask, sampler_logprobs, versions, per_token, *kind))
    return samples
