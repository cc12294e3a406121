"""``Rollout``: everything that happened in one rollout and what it was worth. Start reading here.

A dataset row goes in. ``loop`` alternates *the model completes* and *the environment responds* and
appends each model call to the ``transcript`` as a ``Turn``: its messages, token ids and
log-probabilities exactly as sampled. Why it ended is ``stop``; an exception becomes ``error``. The
rubric sets ``metrics`` and ``reward`` (NaN when unknown, never 0). Then the same object travels:
``to_json`` is its line in a run's journal and in a checkpoint, ``transcript.branches()`` are the
token sequences that training weighs, and ``state`` shows it to authors as a dict.

What only the running rollout has (its client, the keys that authors add) stays in the ``State``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from verifiers.data.messages import normalize_messages
from verifiers.rollouts.error_info import ErrorInfo
from verifiers.rollouts.transcript import Transcript
from verifiers.rollouts.turn import Turn
from verifiers.types import AttributeDict, StopReason

INPUT_COLUMNS: Mapping[str, Any] = {
    "prompt": [],
    "answer": "",
    "task": "default",
    "info": {},
    "example_id": 0,
}
"""Columns that every row has, with their defaults."""


class Timing(AttributeDict):
    """Where a rollout's time went, in milliseconds, and when it began (epoch seconds).

    >>> timing = vf.Timing(model_ms=12.5)
    >>> timing.model_ms, timing["total_ms"]
    (12.5, 0.0)
    """

    _ZERO = dict.fromkeys(
        (
            "setup_ms generation_ms model_ms env_ms scoring_ms total_ms overhead_ms start_time"
        ).split(),
        0.0,
    )

    def __init__(self, **times: float):
        dict.__init__(self, self._ZERO, **times)


@dataclass(slots=True)
class Rollout:
    """A rollout. Example, of one turn::

    Rollout([Turn([1, 15], [7, 2], [-0.1, -0.7])], reward=1.0, metrics={"exact_match": 1.0},
            stop="max_turns_reached")
    """

    transcript: Transcript = field(default_factory=Transcript)
    """Every model call, in order."""
    reward: float = None  # type: ignore[assignment]  # before it is scored
    """NaN when unknown; None before scoring."""
    metrics: dict[str, float] = field(default_factory=dict)
    error: Any = None
    """What ended it: the exception while it runs, ``ErrorInfo`` once it is finished."""
    stop: str | None = None
    """A ``StopReason``, or the name of an author's stop condition."""
    is_truncated: bool = False
    """Whether a limit of tokens or time cut it."""
    row: dict[str, Any] = field(default_factory=dict)
    """The dataset's columns; always with ``INPUT_COLUMNS``."""
    completion: Any = None
    """Messages (or text) after the row's prompt."""
    advantage: float | None = None
    """As the rubric computed it over the group: by its ``@advantage`` method, else reward minus
    mean. None before."""
    role_rewards: dict[str, float] = field(default_factory=dict)
    """The reward of each role that took a turn to train, NaN when unknown; empty if roles have
    none of their own."""
    turn_sum: str = ""
    """The metric of the reward that is the sum of its turns' rewards, so that credit per turn
    counts them once; empty without a turn's reward."""
    tool_errors: list[str] = field(default_factory=list)
    """Tool and text of each tool call that failed."""
    is_unparsed: bool | None = None
    """Whether the environment's parser found nothing in it; None if its parser takes any text."""
    id: str = ""
    model: str = ""
    sampling_args: Any = None
    tool_defs: Any = None
    is_completed: bool = False
    timing: Timing = field(default_factory=Timing)
    usage: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.row = {**INPUT_COLUMNS, "prompt": [], "info": {}, **self.row}
        if not isinstance(self.transcript, Transcript):
            self.transcript = Transcript(self.transcript)
        if isinstance(self.error, str):
            self.error = ErrorInfo.of(self.error)

    @property
    def text(self) -> dict[str, Any]:
        """``prompt completion answer``, for logs."""
        row = self.row
        return {"prompt": row["prompt"], "completion": self.completion, "answer": row["answer"]}

    # --- what training reads

    @property
    def turns(self) -> tuple[Turn, ...]:
        """The turns to train, which have tokens; empty when the endpoint returned none."""
        return self.transcript.trained

    @property
    def turn_rewards(self) -> tuple[float, ...]:
        """The environment's reward of each turn to train; empty when it sets none but 0."""
        rewards = [turn.env_reward for turn in self.turns]
        numbers = [0.0 if math.isnan(reward := number(each)) else reward for each in rewards]
        return tuple(numbers) if any(numbers) else ()

    @property
    def oldest_version(self) -> int | None:
        """The policy version of its oldest token; None without tokens."""
        versions = (turn.version for turn in self.turns if turn.num_tokens > turn.num_prompt)
        oldest = (v if isinstance(v, int) else int(v.min()) for v in versions)
        return min(oldest, default=None)

    @property
    def num_sampled(self) -> int:
        """Tokens that the model sampled, over all turns to train."""
        return sum(turn.num_tokens - turn.num_prompt for turn in self.turns)

    def of_role(self, role: str) -> Rollout:
        """What is trained of a role: its turns and reward, and whether a limit cut it."""
        turns = Transcript(turn for turn in self.turns if turn.role == role)
        return replace(
            self,
            transcript=turns,
            reward=self.role_rewards.get(role, math.nan),
            is_truncated=StopReason.truncates(self.stop) or any(t.is_truncated for t in turns),
            advantage=None,
            role_rewards={},
            turn_sum="",
        )

    # --- JSON

    def fields(self) -> dict[str, Any]:
        """The fields of a saved rollout, without its turns."""
        row = self.row
        return {
            "example_id": row["example_id"],
            "prompt": row["prompt"],
            "completion": self.completion,
            "answer": row["answer"],
            "task": row["task"],
            "info": row["info"],
            "reward": number(self.reward),
            "advantage": self.advantage,
            "metrics": dict(self.metrics),
            "error": None if self.error is None else ErrorInfo.of(self.error),
            "is_completed": self.is_completed,
            "is_truncated": self.is_truncated,
            "stop_condition": self.stop,
            "timing": times_of(self.timing),
            "token_usage": dict(self.usage),
            "tool_defs": self.tool_defs,
        }

    def to_json(self) -> dict[str, Any]:
        """The rollout with its turns, for ``runtime.json.encode_row``; NaN becomes null."""
        further = {
            name: getattr(self, name)
            for name in ("role_rewards", "turn_sum", "is_unparsed", "tool_errors")
        }
        saved = self.fields() | {"trajectory": self.transcript.to_json()}
        return saved | {name: value for name, value in further.items() if value}

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> Rollout:
        """The rollout of ``to_json``, or of a saved row; unknown numbers are NaN.

        ``advantage`` stays None if it is null: unknown or not computed, which only the whole
        group shows. *Raises* ValueError, KeyError or TypeError for a value of another shape.
        """
        row = {name: saved[name] for name in INPUT_COLUMNS if name in saved}
        row["info"] = {} if row.get("info") is None else row["info"]
        if isinstance(row.get("prompt"), list):
            row["prompt"] = normalize_messages(row["prompt"])
        completion, error = saved.get("completion"), saved.get("error")
        return cls(
            transcript=transcript_of(saved),
            reward=number(saved.get("reward")),
            metrics={name: number(value) for name, value in (saved.get("metrics") or {}).items()},
            error=None if error is None else ErrorInfo.of(error),
            stop=saved.get("stop_condition"),
            is_truncated=bool(saved.get("is_truncated")),
            row=row,
            completion=(
                normalize_messages(completion) if isinstance(completion, list) else completion
            ),
            advantage=saved.get("advantage"),
            role_rewards={k: number(v) for k, v in (saved.get("role_rewards") or {}).items()},
            turn_sum=saved.get("turn_sum") or "",
            is_unparsed=saved.get("is_unparsed"),
            tool_errors=saved.get("tool_errors") or [],
            tool_defs=saved.get("tool_defs"),
            is_completed=bool(saved.get("is_completed")),
            timing=times_of(saved.get("timing") or {}),
            usage=dict(saved.get("token_usage") or {}),
        )


def transcript_of(saved: Mapping[str, Any]) -> Transcript:
    """The turns of a saved rollout.

    Version 0.2.0 wrote a turn's reward without saying whose it is: a reward that differs from the
    rollout's is the environment's.
    """
    steps = saved.get("trajectory") or ()
    if isinstance(steps, Transcript):
        return steps
    transcript = Transcript.from_json(steps)
    if not any("env_reward" in step for step in steps):
        for turn in transcript.turns:
            if turn.rollout_reward != saved.get("reward"):
                turn.env_reward = turn.rollout_reward
    return transcript


LARGEST = 1e19
"""The largest reward or metric: float32, in which training computes, still holds its square, and
statistics add up as many as there are."""


def number(value: object) -> float:
    """A number as float; NaN for anything else, and beyond ``LARGEST``."""
    if isinstance(value, int | float | np.integer | np.floating) and -LARGEST <= value <= LARGEST:
        return float(value)
    return math.nan


def role_rewards_of(turns: Iterable[Turn], metrics: Mapping[str, float], reward: float) -> Any:
    """The reward of each role among these turns: the metric of its name, else the rollout's."""
    return {turn.role: float(metrics.get(turn.role, reward)) for turn in turns if turn.role}


def times_of(times: Mapping[str, float]) -> Timing:
    """These times alone, without a zero for each that is not among them."""
    timing = Timing.__new__(Timing)
    timing.update(times)
    return timing
