"""Turns of a rollout in, token samples out: every sampled token is trained exactly once, on the ids that were sampled.

A turn whose prompt begins with an earlier turn's prompt and completion continues that sample: only what is new is
appended, the environment's part without loss. Any other turn forks: a new sample with its whole prompt without loss.
Masks come from lengths and turn boundaries, never from ids, so an end token that equals the pad token is trained.

Convention of every array here: entry t describes token t given the tokens before it; entry 0 is never trained.

Nothing is decoded, re-encoded or cut here. Whether a rollout's reward stays in the baseline is decided where
groups are formed; the weights of tokens in `aggregation`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

NOT_SAMPLED = -2
"""Version of a token no policy sampled: prompts, tool results, offline text. (-1 is "sampled, version unknown".)"""
_INT32, _FLOAT32 = np.dtype(np.int32), np.dtype(np.float32)
_TURN_ARRAYS = (("prompt_ids", _INT32), ("completion_ids", _INT32), ("logprobs", _FLOAT32))


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """One model call exactly as sampled.

    Example: ``Turn(prompt_ids=[1, 15, 9], completion_ids=[7, 2], logprobs=[-0.1, -0.7], version=4)``.
    Raises ValueError when the shapes disagree or the prompt is empty: its first token would have no context.
    """

    prompt_ids: np.ndarray  # int32 [P]
    completion_ids: np.ndarray  # int32 [C]
    logprobs: np.ndarray  # float32 [C], of the processed distribution that was sampled
    version: int | np.ndarray = -1
    """Policy version, one for the turn or int32 [C] when weights changed while it was generated."""
    is_truncated: bool = False
    shared: int = 0
    """Leading prompt tokens the caller knows to equal the previous turn's prompt and completion; not compared."""

    def __post_init__(self) -> None:
        for name, dtype in _TURN_ARRAYS:
            given = getattr(self, name)
            if type(given) is np.ndarray and given.dtype == dtype and given.ndim == 1:
                continue
            array = np.asarray(given, dtype=dtype)
            if array.ndim != 1:
                raise ValueError(f"{name} of a turn must have one dimension, got shape {array.shape}")
            object.__setattr__(self, name, array)
        if len(self.logprobs) != len(self.completion_ids):
            raise ValueError(
                f"a turn has {len(self.completion_ids)} completion ids and {len(self.logprobs)} log-probabilities"
            )
        if type(self.version) is not int and np.shape(self.version) not in ((), self.completion_ids.shape):
            raise ValueError(
                f"a turn has {len(self.completion_ids)} completion ids and versions of shape {np.shape(self.version)}"
            )
        if not len(self.prompt_ids):
            raise ValueError("a turn has no prompt ids; its first token would have nothing to be conditioned on")

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.completion_ids)


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """One token row to learn from.

    Example, a prompt [1, 15], the answer [7, 2] and an environment's token 9 before the answer [2]::

        Sample(token_ids=[1, 15, 7, 2, 9, 2], loss_mask=[F, F, T, T, F, T], logprobs=[0, 0, -.1, -.7, 0, -.2],
               versions=[-2, -2, 4, 4, -2, 5], advantages=[0, 0, .5, .5, 0, .5])
    """

    token_ids: np.ndarray  # int32 [T]
    loss_mask: np.ndarray  # bool [T]
    logprobs: np.ndarray  # float32 [T], log μ; 0 where nothing was sampled
    versions: np.ndarray  # int32 [T], NOT_SAMPLED where nothing was sampled
    advantages: np.ndarray  # float32 [T], 0 where masked
    inv_temperature: float = 1.0
    rollout: int = 0
    """Which rollout of the step batch it belongs to; the samples of a forked rollout share it."""
    group: int = 0
    live: bool = True
    """False: present but without weight, for example in a dead group that is kept."""

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_trained(self) -> int:
        """Tokens with loss: 0 when the sample is not live."""
        return int(self.loss_mask.sum()) if self.live else 0

    @property
    def oldest_version(self) -> int | None:
        """Smallest policy version among its sampled tokens; None when nothing was sampled."""
        sampled = self.versions[self.versions != NOT_SAMPLED]
        return int(sampled.min()) if len(sampled) else None


@dataclass(frozen=True, slots=True)
class RolloutSamples:
    """The samples of one rollout, or why it has none."""

    samples: tuple[Sample, ...]
    excluded: str | None = None
    """"overlong", "truncated", "unscored" or "empty" when the rollout carries no loss; None when it does."""

    @property
    def num_forks(self) -> int:
        return max(0, len(self.samples) - 1)


def merge_turns(turns: Sequence[Turn], *, mask_env_responses: bool = True) -> list[Sample]:
    """The samples of a rollout's turns, in the order of their first turn; advantages are zero.

    Time is linear in the tokens that are compared and the tokens that come out; with `Turn.shared` given, linear in
    new tokens. A turn continues the newest sample it can. With ``mask_env_responses=False`` what the environment
    said between turns carries loss too (never the first prompt of a sample). A sample without any completion token
    is left out.
    """
    return _samples(turns, [0.0] * len(turns), mask_env_responses)


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
) -> RolloutSamples:
    """The samples of one rollout with their advantage: one number, or one per turn (credit="turn").

    A rollout longer than ``max_seq_len`` in any sample (or, after its first prompt, than ``max_completion_len``), one
    cut by a length limit with ``mask_truncated``, and one whose advantage is NaN carry no loss and give no samples;
    ``excluded`` says which. Raises ValueError when the number of advantages is not the number of turns.
    """
    per_turn = _per_turn(advantage, len(turns))
    excluded = _exclusion(turns, per_turn, (max_seq_len, max_completion_len), mask_truncated)
    if excluded:
        return RolloutSamples((), excluded)
    samples = _samples(turns, per_turn, mask_env_responses, 1.0 / temperature, rollout, group, live)
    return RolloutSamples(tuple(samples), None if samples else "empty")


def is_truncated(turns: Sequence[Turn]) -> bool:
    """Whether a length limit cut any turn."""
    return any(turn.is_truncated for turn in turns)


def is_overlong(turns: Sequence[Turn], max_seq_len: int | None, max_completion_len: int | None = None) -> bool:
    """Whether any sample of these turns would exceed ``max_seq_len`` tokens (a sample is as long as its last turn), or
    ``max_completion_len`` after the first prompt."""
    if not turns:
        return False
    bounds = [] if max_seq_len is None else [max_seq_len]
    if max_completion_len is not None:
        bounds.append(len(turns[0].prompt_ids) + max_completion_len)
    return bool(bounds) and max(turn.num_tokens for turn in turns) > min(bounds)


def _per_turn(advantage: float | Sequence[float], num_turns: int) -> list[float]:
    if isinstance(advantage, float) or np.ndim(advantage) == 0:
        return [float(advantage)] * num_turns  # type: ignore[arg-type]
    per_turn = [float(one) for one in advantage]
    if len(per_turn) != num_turns:
        raise ValueError(f"{len(per_turn)} advantages for {num_turns} turns: give one number, or one per turn")
    return per_turn


def _exclusion(
    turns: Sequence[Turn], advantages: list[float], limits: tuple[int | None, int | None], mask_truncated: bool
) -> str | None:
    if any(map(math.isnan, advantages)):
        return "unscored"
    if is_overlong(turns, *limits):
        return "overlong"
    if mask_truncated and is_truncated(turns):
        return "truncated"
    return None


def _chains(turns: Sequence[Turn]) -> list[list[int]]:
    """Indices of the turns of each sample. Newest sample first, so interleaved conversations find their own."""
    chains: list[list[int]] = []
    for index, turn in enumerate(turns):
        for chain in reversed(chains):
            known = turn.shared if chain[-1] == index - 1 else 0
            if _continues(turn, turns[chain[-1]], known):
                chain.append(index)
                break
        else:
            chains.append([index])
    return chains


def _continues(turn: Turn, earlier: Turn, known: int) -> bool:
    """Whether the prompt begins with all of ``earlier``; its completion, where branches differ, is compared first."""
    start, end = len(earlier.prompt_ids), earlier.num_tokens
    if len(turn.prompt_ids) < end:
        return False
    if known >= end:
        return True
    split = max(known, start)
    tail_equal = np.array_equal(turn.prompt_ids[split:end], earlier.completion_ids[split - start :])
    return tail_equal and (known >= start or np.array_equal(turn.prompt_ids[known:start], earlier.prompt_ids[known:]))


def _samples(turns: Sequence[Turn], advantages: list[float], mask_env_responses: bool, *identity: Any) -> list[Sample]:
    samples = []
    for chain in _chains(turns):
        members, own = (turns, advantages) if len(chain) == len(turns) else _chosen(chain, turns, advantages)
        if any([len(turn.completion_ids) for turn in members]):
            samples.append(_assemble(members, own, mask_env_responses, identity))
    return samples


def _chosen(chain: Sequence[int], turns: Sequence[Turn], advantages: list[float]) -> tuple[Sequence[Turn], list[float]]:
    return [turns[i] for i in chain], [advantages[i] for i in chain]


def _assemble(
    chain: Sequence[Turn], advantages: list[float], mask_env_responses: bool, identity: tuple[Any, ...]
) -> Sample:
    """One sample of turns that each begin with all of the one before: the last one holds every id."""
    token_ids = np.concatenate((chain[-1].prompt_ids, chain[-1].completion_ids))
    size = len(token_ids)
    loss_mask = np.zeros(size, bool)
    logprobs = np.zeros(size, np.float32)
    versions = np.empty(size, np.int32)
    versions.fill(NOT_SAMPLED)
    per_token = np.zeros(size, np.float32)
    before = len(chain[0].prompt_ids)
    for turn, advantage in zip(chain, advantages, strict=True):
        start = len(turn.prompt_ids)
        end = start + len(turn.completion_ids)
        if not mask_env_responses:
            loss_mask[before:start] = True
            per_token[before:start] = advantage
        loss_mask[start:end] = True
        logprobs[start:end] = turn.logprobs
        versions[start:end] = turn.version
        per_token[start:end] = advantage
        before = end
    return Sample(token_ids, loss_mask, logprobs, versions, per_token, *identity)
