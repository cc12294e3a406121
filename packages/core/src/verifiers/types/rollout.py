"""One rollout as it is trained: its turns, its reward and why it ended."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from enum import StrEnum
from typing import Any

import msgspec
import numpy as np
from msgspec.structs import force_setattr

from verifiers.types.fields import Immutable


class StopReason(StrEnum):
    """Why a rollout ended: the library's conditions. An author's condition has the name of its method.

    >>> StopReason("max_turns_reached") is StopReason.MAX_TURNS, StopReason.truncates("timeout_reached")
    (True, True)
    """

    ERROR = "has_error"
    FINAL_RESPONSE = "has_final_env_response"
    MAX_TURNS = "max_turns_reached"
    MAX_SEQ_LEN = "max_seq_len_reached"
    MAX_COMPLETION_TOKENS = "max_total_completion_tokens_reached"
    PROMPT_TOO_LONG = "prompt_too_long"
    TIMEOUT = "timeout_reached"

    @classmethod
    def truncates(cls, reason: str | None) -> bool:
        """Whether a rollout that ended for this reason was truncated by a limit of tokens or time."""
        return reason in _TRUNCATING


_TRUNCATING = StopReason.MAX_SEQ_LEN, StopReason.MAX_COMPLETION_TOKENS, StopReason.PROMPT_TOO_LONG, StopReason.TIMEOUT


class Turn(Immutable, frozen=True, eq=False):
    """One model call exactly as sampled. Tokens are never decoded and encoded again.

    The second turn of a conversation, in which the environment added the token 9; the policy was updated while it was
    generated::

        Turn(prompt_ids=[1, 15, 7, 2, 9], completion_ids=[4, 2], sampler_logprobs=[-0.1, -0.7], version=[4, 5],
             num_shared=4)

    *Raises* ValueError when the shapes disagree, or the prompt is empty: its first token would have no context.
    """

    prompt_ids: np.ndarray  # int32 [P]
    completion_ids: np.ndarray  # int32 [C]
    sampler_logprobs: np.ndarray  # float32 [C], nats, of the processed distribution that was sampled
    version: int | np.ndarray = -1
    """Policy version: one for the turn, or int32 [C] when weights changed while it was generated; -1 = unknown."""
    is_truncated: bool = False
    """Whether a length limit truncated the completion."""
    num_shared: int = 0
    """Leading prompt tokens that are known to equal the previous turn's prompt and completion; not compared again."""
    role: str = ""
    """The role that took the turn, where roles have rewards of their own (``MultiAgentEnv``); else empty."""

    def __post_init__(self) -> None:
        prompt, sampled, logprobs = self.prompt_ids, self.completion_ids, self.sampler_logprobs
        is_row = type(prompt) is type(sampled) is type(logprobs) is np.ndarray and (
            prompt.ndim == sampled.ndim == logprobs.ndim == 1
        )
        if not (is_row and prompt.dtype is sampled.dtype is _INT and logprobs.dtype is _FLOAT):  # as a step has them
            self._convert()
        num_sampled = len(self.completion_ids)
        if len(self.sampler_logprobs) != num_sampled:
            raise ValueError(
                f"a turn has {num_sampled} completion ids and {len(self.sampler_logprobs)} log-probabilities"
            )
        if type(self.version) is not int and np.shape(self.version) not in ((), self.completion_ids.shape):
            raise ValueError(f"a turn has {num_sampled} completion ids and versions of shape {np.shape(self.version)}")
        if not len(self.prompt_ids):
            raise ValueError("a turn has no prompt ids; its first token would have nothing to be conditioned on")

    def _convert(self) -> None:
        for name, dtype in (("prompt_ids", _INT), ("completion_ids", _INT), ("sampler_logprobs", _FLOAT)):
            array = np.asarray(getattr(self, name), dtype=dtype)
            if array.ndim != 1:
                raise ValueError(f"{name} of a turn must have one dimension, got shape {array.shape}")
            force_setattr(self, name, array)

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and completion."""
        return len(self.prompt_ids) + len(self.completion_ids)


_INT, _FLOAT = np.dtype(np.int32), np.dtype(np.float32)  # their classes are looked up at every use


class Rollout(Immutable, frozen=True):
    """One finished rollout: its sampled turns, reward and metrics; passed from the runner to training.

    ``State`` is the author's mutable view of the same rollout while it runs; ``state.rollout()`` freezes it::

        Rollout(turns=(Turn(...),), reward=1.0, metrics={"exact_match": 1.0}, stop="max_turns_reached")
    """

    turns: tuple[Turn, ...]
    """The turns to train, which have tokens; empty when the endpoint returned none."""
    reward: float
    """NaN when unknown."""
    metrics: Mapping[str, float] = msgspec.field(default_factory=dict)
    error: str | None = None
    """``ClassName: message`` of the error that ended it."""
    stop: str | None = None
    """A ``StopReason``, or the name of an author's stop condition."""
    is_truncated: bool = False
    text: Mapping[str, Any] = msgspec.field(default_factory=dict)
    """``prompt``, ``completion`` and ``answer``, for logs."""
    turn_rewards: tuple[float, ...] = ()
    """The environment's rewards per turn, beside the reward; empty when it sets none."""
    advantage: float | None = None
    """As the rubric computed it over the group: by its ``@advantage`` method, else reward minus mean. None before."""
    cause: str | None = None
    """The innermost exception and where it was raised: ``ValueError in right (sums.py:12)``."""
    role_rewards: Mapping[str, float] = msgspec.field(default_factory=dict)
    """The reward of each role that took a turn to train, NaN when unknown; empty where roles have none of their own."""

    def of_role(self, role: str) -> Rollout:
        """What is trained of one role: its turns, its reward, and whether a limit truncated it."""
        numbers = [number for number, turn in enumerate(self.turns) if turn.role == role]
        follows = [number > 0 and self.turns[number - 1].role == role for number in numbers]
        turns = tuple(
            self.turns[number] if is_next else replace(self.turns[number], num_shared=0)
            for number, is_next in zip(numbers, follows, strict=True)
        )
        return replace(
            self,
            turns=turns,
            reward=self.role_rewards.get(role, math.nan),
            is_truncated=StopReason.truncates(self.stop) or any(turn.is_truncated for turn in turns),
            turn_rewards=tuple(self.turn_rewards[number] for number in numbers) if self.turn_rewards else (),
            advantage=None,
            role_rewards={},
        )

    @property
    def oldest_version(self) -> int | None:
        """The policy version of its oldest token; None without tokens."""
        return min((int(np.min(turn.version)) for turn in self.turns if len(turn.completion_ids)), default=None)

    @property
    def num_sampled(self) -> int:
        """Tokens that the model sampled, over all turns."""
        return sum(len(turn.completion_ids) for turn in self.turns)
