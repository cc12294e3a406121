"""Merge turns to token rows: turns merge while each prompt continues the ids before it, else the row forks.

Ids and log-probabilities are those the server sent. Linear in the tokens: a turn that is known to share its whole
prefix with the turn before is appended without a comparison.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from verifiers.rollouts.state import TrajectoryStepTokens

if TYPE_CHECKING:
    import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class TokenRow:
    """One conversation as one token sequence.

    Two turns of two tokens each, with one token from the environment between them::

        TokenRow(prompt_ids=[1, 5], completion_ids=[7, 2, 9, 8, 2], sampled=[1, 1, 0, 1, 1],
                 logprobs=[-.1, -.2, 0, -.3, -.4], versions=[4, 4, -1, 5, 5])
    """

    prompt_ids: np.ndarray  # int32 [P]
    completion_ids: np.ndarray  # int32 [C]
    sampled: np.ndarray  # bool [C]: sampled by the model, not written by the environment
    logprobs: np.ndarray | None  # float32 [C], 0 where not sampled; None when the turns have none
    versions: np.ndarray  # int32 [C], policy version, -1 where not sampled or unknown


class _Branch:
    def __init__(self, prompt_ids: np.ndarray):
        self.prompt_ids = prompt_ids
        self.parts: list[tuple[np.ndarray, bool, Any, int | Sequence[int]]] = []
        self.size = len(prompt_ids)

    def add(self, ids: np.ndarray, sampled: bool, logprobs: object, version: int | Sequence[int]) -> None:
        self.parts.append((ids, sampled, logprobs, version))
        self.size += len(ids)

    def full_ids(self) -> np.ndarray:
        return np.concatenate([self.prompt_ids, *(ids for ids, *_ in self.parts)])

    def row(self) -> TokenRow:
        has_logprobs = all(logprobs is not None for _, sampled, logprobs, _ in self.parts if sampled)
        return TokenRow(
            self.prompt_ids,
            _joined([ids for ids, *_ in self.parts], np.int32),
            _joined([np.full(len(ids), sampled) for ids, sampled, _, _ in self.parts], np.bool_),
            _joined([p if s else np.zeros(len(ids)) for ids, s, p, _ in self.parts], np.float32)
            if has_logprobs
            else None,
            _joined([np.broadcast_to(version, len(ids)) for ids, _, _, version in self.parts], np.int32),
        )


def merge_turns(turns: Sequence[TrajectoryStepTokens]) -> list[TokenRow]:
    """One row per branch, in the order of their start; the last one ends with the last turn."""
    branches: list[_Branch] = []
    last: TrajectoryStepTokens | None = None
    for turn in turns:
        added = None if last is None else _continuation(branches[-1], last, turn)
        if added is None:
            branches.append(_Branch(turn.prompt_array()))
        elif len(added):
            branches[-1].add(added, False, None, -1)
        completion_ids, logprobs = (
            dict.__getitem__(turn, "completion_ids"),
            dict.__getitem__(turn, "completion_logprobs"),
        )
        branches[-1].add(
            completion_ids, True, logprobs if len(logprobs) == len(completion_ids) else None, turn["version"]
        )
        last = turn
    return [branch.row() for branch in branches]


def _continuation(branch: _Branch, last: TrajectoryStepTokens, turn: TrajectoryStepTokens) -> np.ndarray | None:
    """The ids that the turn's prompt adds to the branch; None when it does not start with the whole branch."""
    if turn._previous is last and turn.shared == branch.size:
        return turn.new_prompt_ids()
    prompt = turn.prompt_array()
    if len(prompt) >= branch.size and np.array_equal(prompt[: branch.size], branch.full_ids()):
        return prompt[branch.size :]
    return None


def _joined(parts: Sequence[np.ndarray], dtype: npt.DTypeLike) -> np.ndarray:
    return np.concatenate(parts).astype(dtype, copy=False) if parts else np.empty(0, dtype)
