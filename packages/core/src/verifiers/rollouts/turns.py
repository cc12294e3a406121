"""One model call of a rollout, stored once: ``TrajectoryStep`` and its tokens.

Every turn of a conversation repeats the turns before it. A step therefore keeps only what is new after the prefix it
shares with the step before; ``step["prompt"]`` and ``tokens["prompt_ids"]`` are composed when read, so a rollout's
memory grows linearly with its turns. Only the newest step of a rollout that goes on also holds its prompt whole, so
that the next turn costs what is new in it. Token ids and log-probabilities are never re-encoded: they are the arrays
the server sent.

This module does not know what a rollout is (``state``) and does not write steps to disk (``trajectories``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np

from verifiers.types import AttributeDict, Messages, Response, ResponseTokens, Turn


class TrajectoryStepTokens(AttributeDict):
    """The tokens of one model call, as sampled. Lists when read by key; ``arrays()`` gives them without a copy.

    Keys: ``prompt_ids``, ``prompt_mask`` (all 0), ``completion_ids``, ``completion_mask`` (all 1),
    ``completion_logprobs``, ``overlong_prompt``, ``is_truncated``, ``version``.

    >>> tokens = vf.TrajectoryStepTokens(prompt_ids=[1, 15], completion_ids=[7], completion_logprobs=[-0.5])
    >>> tokens["prompt_ids"], tokens["completion_mask"]
    ([1, 15], [1])
    """

    __slots__ = ("_previous", "_shared", "_whole_prompt")
    _previous: Any
    _shared: int
    _whole_prompt: np.ndarray | None
    COMPOSED = frozenset(("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "completion_logprobs"))

    def __init__(
        self,
        prompt_ids: Any = (),
        completion_ids: Any = (),
        completion_logprobs: Any = (),
        version: int = -1,
        is_truncated: bool = False,
        overlong_prompt: bool = False,
        previous: TrajectoryStepTokens | None = None,
        **extra: Any,
    ):
        prompt = np.asarray(prompt_ids, np.int32)
        shared = 0 if previous is None else _common_prefix(previous.full_ids(), prompt)
        _link(self, previous, shared, prompt)
        extra.pop("prompt_mask", None), extra.pop("completion_mask", None)
        super().__init__(
            prompt_ids=prompt[shared:].copy() if shared else prompt,
            prompt_mask=None,
            completion_ids=np.asarray(completion_ids, np.int32),
            completion_mask=None,
            completion_logprobs=np.asarray(completion_logprobs, np.float32),
            overlong_prompt=overlong_prompt,
            is_truncated=is_truncated,
            version=version,
            **extra,
        )

    @property
    def shared(self) -> int:
        """How many leading prompt tokens are the previous step's prompt and completion, unchanged."""
        return self._shared

    @property
    def previous(self) -> TrajectoryStepTokens | None:
        """The tokens of the step that these continue; None when they share nothing with it."""
        previous: TrajectoryStepTokens | None = self._previous
        return previous

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt and the completion together, without composing them."""
        return self._shared + len(self.new_prompt_ids()) + len(dict.__getitem__(self, "completion_ids"))

    def new_prompt_ids(self) -> np.ndarray:
        """The prompt tokens after the shared prefix, int32 [P - shared]."""
        ids: np.ndarray = dict.__getitem__(self, "prompt_ids")
        return ids

    def prompt_array(self) -> np.ndarray:
        """The whole prompt, int32 [P]."""
        if self._whole_prompt is not None:
            return self._whole_prompt
        if self._previous is None:
            return self.new_prompt_ids()
        return np.concatenate([self._previous.full_ids()[: self._shared], self.new_prompt_ids()])

    def full_ids(self) -> np.ndarray:
        """Prompt and completion together, int32 [P + C]; linear in the length, without recursion."""
        if self._whole_prompt is not None:
            return np.concatenate([self._whole_prompt, dict.__getitem__(self, "completion_ids")])
        end = self.num_tokens
        ids, step = np.empty(end, np.int32), self
        while step is not None:  # from the newest back: each fills what lies beyond the prefix it shares
            own = np.concatenate([step.new_prompt_ids(), dict.__getitem__(step, "completion_ids")])
            own = own[: max(0, end - step._shared)]
            ids[step._shared : step._shared + len(own)] = own
            end, step = min(end, step._shared), step._previous
        return ids

    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(prompt ids int32 [P], completion ids int32 [C], log-probabilities float32 [C])."""
        return (
            self.prompt_array(),
            dict.__getitem__(self, "completion_ids"),
            dict.__getitem__(self, "completion_logprobs"),
        )

    def __getitem__(self, key: str) -> Any:
        if key not in self.COMPOSED:
            return super().__getitem__(key)
        if key == "prompt_ids":
            return self.prompt_array().tolist()
        if key == "prompt_mask":
            return [0] * (self._shared + len(self.new_prompt_ids()))
        if key == "completion_mask":
            return [1] * len(dict.__getitem__(self, "completion_ids"))
        return dict.__getitem__(self, key).tolist()

    def __setitem__(self, key: str, value: Any) -> None:
        if key == "prompt_ids":
            _link(self, None, 0, None)
        if key in ("prompt_ids", "completion_ids"):
            value = np.asarray(value, np.int32)
        elif key == "completion_logprobs":
            value = np.asarray(value, np.float32)
        super().__setitem__(key, value)

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        raise AttributeError(f"step tokens have no {name!r}")

    def get(self, key: str, default: Any = None) -> Any:
        return self[key] if key in self else default

    def __iter__(self) -> Iterator[str]:  # an own __iter__ makes dict(x) read through __getitem__
        return super().__iter__()

    def items(self) -> Any:
        return [(key, self[key]) for key in self]

    def values(self) -> Any:
        return [self[key] for key in self]

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (TrajectoryStepTokens, dict(self))


def _rebuild(cls: type, fields: dict[str, Any]) -> Any:
    return cls(**fields)


def _link(made: Any, previous: Any, shared: int, whole_prompt: Any) -> None:
    """Let a step continue ``previous`` after ``shared`` of its parts; the whole prompt moves on to the newest."""
    object.__setattr__(made, "_previous", previous if shared else None)
    object.__setattr__(made, "_shared", shared)
    object.__setattr__(made, "_whole_prompt", whole_prompt if shared else None)
    if previous is not None:
        object.__setattr__(previous, "_whole_prompt", None)


def _common_prefix(left: np.ndarray, right: np.ndarray) -> int:
    """Length of the longest common prefix of two 1-D arrays."""
    n = min(len(left), len(right))
    if np.array_equal(left[:n], right[:n]):
        return n
    return int(np.argmin(left[:n] == right[:n]))


class TrajectoryStep(AttributeDict):
    """One model call: ``prompt completion response tokens reward advantage is_truncated trajectory_id extras``.

    Token data stand in ``tokens`` alone: a ``response`` whose tokens were recorded there is kept without them, because
    every response repeats the ids of the whole prompt.

    >>> step = vf.TrajectoryStep([vf.UserMessage("hi")], [vf.AssistantMessage("hello")])
    >>> step["completion"][0].content, step.reward
    ('hello', None)
    """

    __slots__ = ("_previous", "_shared", "_whole_prompt")
    _previous: Any
    _shared: int
    _whole_prompt: Any

    def __init__(
        self,
        prompt: Messages = "",
        completion: Messages = "",
        response: Response | None = None,
        tokens: Any = None,
        reward: float | None = None,
        advantage: float | None = None,
        is_truncated: bool = False,
        trajectory_id: str = "",
        extras: dict[str, Any] | None = None,
        previous: TrajectoryStep | None = None,
        **more: Any,
    ):
        shared = 0 if previous is None else _common_messages(previous.conversation(), prompt)
        _link(self, previous, shared, prompt[:])
        if isinstance(tokens, TrajectoryStepTokens) and response is not None and response.tokens is not None:
            response = replace(response, tokens=None)
        super().__init__(
            prompt=prompt[shared:],
            completion=completion,
            response=response,
            tokens=tokens,
            reward=reward,
            advantage=advantage,
            is_truncated=is_truncated,
            trajectory_id=trajectory_id,
            extras={} if extras is None else extras,
            **more,
        )

    @property
    def shared(self) -> int:
        """How many leading messages (characters, in completion mode) the prompt shares with the previous step."""
        return self._shared

    def new_prompt(self) -> Messages:
        """The prompt's messages after the shared prefix."""
        prompt: Messages = dict.__getitem__(self, "prompt")
        return prompt

    def conversation(self) -> Messages:
        """Prompt and completion together, as a new list (or text)."""
        conversation: Messages = self["prompt"] + dict.__getitem__(self, "completion")
        return conversation

    def settle(self) -> None:
        """No step will continue this one: hold nothing twice any more."""
        object.__setattr__(self, "_whole_prompt", None)
        tokens = dict.__getitem__(self, "tokens")
        if isinstance(tokens, TrajectoryStepTokens):
            object.__setattr__(tokens, "_whole_prompt", None)

    def _composed(self) -> Messages:
        """The prompt, from the pieces that the chain of steps holds; linear in the result."""
        own = self.new_prompt()
        pieces: list[Any] = [own]
        end, step = self._shared, self._previous
        while end:  # from the newest back: each gives what lies beyond the prefix it shares itself
            if end > step._shared:
                pieces.append((step.new_prompt() + dict.__getitem__(step, "completion"))[: end - step._shared])
                end = step._shared
            step = step._previous
        pieces.reverse()
        return "".join(pieces) if isinstance(own, str) else list(chain.from_iterable(pieces))

    def __getitem__(self, key: str) -> Any:
        if key != "prompt":
            return super().__getitem__(key)
        return self._composed() if self._whole_prompt is None else self._whole_prompt[:]

    def __setitem__(self, key: str, value: Any) -> None:
        if key == "prompt":
            _link(self, None, 0, None)
        super().__setitem__(key, value)

    def get(self, key: str, default: Any = None) -> Any:
        return self[key] if key in self else default

    def __iter__(self) -> Iterator[str]:
        return super().__iter__()

    def items(self) -> Any:
        return [(key, self[key]) for key in self]

    def values(self) -> Any:
        return [self[key] for key in self]

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (TrajectoryStep, dict(self))


def _common_messages(before: Any, now: Any) -> int:
    """Length of the common prefix of two message lists or two texts."""
    if isinstance(before, str) or isinstance(now, str):
        return len(before) if isinstance(before, str) and isinstance(now, str) and now.startswith(before) else 0
    if now[: len(before)] == before:
        return len(before)
    n = 0
    for left, right in zip(before, now, strict=False):
        if left is not right and left != right:
            break
        n += 1
    return n


def record_tokens(tokens: ResponseTokens | None, truncated: bool, previous: TrajectoryStep | None) -> Any:
    """The step tokens of a response, sharing the previous step's prefix; None when the response has none."""
    if tokens is None:
        return None
    before = previous["tokens"] if previous is not None else None
    return TrajectoryStepTokens(
        tokens.prompt_ids,
        tokens.completion_ids,
        tokens.completion_logprobs,
        version=tokens.version,
        is_truncated=truncated,
        previous=before if isinstance(before, TrajectoryStepTokens) else None,
    )


def turns_of(steps: Sequence[TrajectoryStep]) -> tuple[Turn, ...]:
    """The turns of the steps that have tokens; linear in their tokens while each prompt continues the turn before."""
    turns: list[Turn] = []
    run: list[tuple[TrajectoryStepTokens, bool, int]] = []
    before, end, shared_of_first = None, 0, 0
    for step in steps:
        tokens = dict.__getitem__(step, "tokens")
        if tokens is None:
            continue
        shared = tokens.shared if tokens.previous is before else 0
        if run and shared < end:
            turns += _continued_turns(run, shared_of_first)
            run = []
        if not run:
            shared_of_first = shared
        end = tokens.num_tokens
        run.append((tokens, dict.__getitem__(step, "is_truncated"), end))
        before = tokens
    return tuple(turns + _continued_turns(run, shared_of_first)) if run else ()


def _continued_turns(run: Sequence[tuple[TrajectoryStepTokens, bool, int]], num_shared: int) -> list[Turn]:
    """Turns of which each begins with all of the one before: their prompts are views of one array.

    ``run``: tokens, whether a limit cut the turn, where the turn ends; ``num_shared``: of the first one.
    """
    pieces: list[np.ndarray] = []
    for tokens, _, _ in run:
        pieces.append(tokens.new_prompt_ids() if pieces else tokens.prompt_array())
        pieces.append(dict.__getitem__(tokens, "completion_ids"))
    ids = np.concatenate(pieces[:-1]) if len(run) > 1 else pieces[0]
    turns = []
    for (tokens, is_truncated, end), sampled in zip(run, pieces[1::2], strict=True):
        logprobs, version = dict.__getitem__(tokens, "completion_logprobs"), dict.__getitem__(tokens, "version")
        turns.append(Turn(ids[: end - len(sampled)], sampled, logprobs, version, is_truncated, num_shared))
        num_shared = end
    return turns
