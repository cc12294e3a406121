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
from typing import Annotated, Any, TypedDict

from verifiers.data.messages import saved_messages
from verifiers.rollouts.declaration import Saved, declared, values_to_save
from verifiers.rollouts.error_info import ErrorInfo
from verifiers.rollouts.status import Status
from verifiers.rollouts.transcript import Transcript
from verifiers.rollouts.turn import Turn
from verifiers.rollouts.values import Fork, Timing, counts, known_number, number, numbers, text
from verifiers.types import StopReason


def _error(value: object) -> ErrorInfo | None:
    return None if value is None else ErrorInfo.of(value)


def _advantage(value: object) -> float | None:
    """Null is unknown or not computed, which only the whole group shows; NaN is unknown."""
    is_nan = isinstance(value, float) and math.isnan(value)
    return math.nan if is_nan else known_number(value)


class RolloutInput(TypedDict, total=False):
    """A dataset row as the input of a rollout; further columns are allowed.

    >>> row: vf.RolloutInput = {"prompt": [vf.UserMessage("2 + 2")], "answer": "4", "info": {"level": 1}}
    """

    prompt: Annotated[Any, Saved(default=list, read=saved_messages, column="prompts")]
    """Messages, or text in completion mode."""
    answer: Annotated[Any, Saved(default=str, column="answers")]
    """The right answer, for the rubric."""
    task: Annotated[str, Saved(default=lambda: "default", column="tasks", index="name")]
    """The environment of a group that it belongs to, or a name of one's own."""
    info: Annotated[
        dict[str, Any],
        Saved(default=dict, read=lambda info: {} if info is None else info, column="infos"),
    ]
    """Whatever else the environment needs of the example."""
    example_id: Annotated[Any, Saved(default=int, column="example_ids")]
    """Which example of the dataset."""


ROW = declared(RolloutInput)
"""The columns that every row has."""
_ROW_DEFAULTS = {name: column.saved.default for name, column in ROW.items() if column.saved.default}
INPUT_COLUMNS: Mapping[str, Any] = {name: make() for name, make in _ROW_DEFAULTS.items()}
"""Columns that every row has, with their defaults."""


@dataclass(slots=True)
class Rollout:
    """A rollout. Example, of one turn::

        Rollout([Turn([1, 15], [7, 2], [-0.1, -0.7])], reward=1.0, metrics={"exact_match": 1.0},
                status=Status("max_turns_reached", is_completed=True))

    A field is declared on its line alone (``Saved``): its names, its JSON, what sees it.
    """

    transcript: Annotated[
        Transcript, Saved(name="trajectory", key="trajectory", when="if asked")
    ] = field(default_factory=Transcript)
    """Every model call, in order."""
    reward: Annotated[
        float,
        Saved(write=number, read=number, column="rewards", index="number"),
    ] = None  # type: ignore[assignment]  # before it is scored
    """NaN when unknown; None before scoring."""
    metrics: Annotated[dict[str, float], Saved(write=dict, read=numbers)] = field(
        default_factory=dict
    )
    """The value of each reward and metric function, by name; NaN when unknown."""
    status: Status = field(default_factory=Status)
    """How it ended; ``stop``, ``error``, ``is_truncated`` and ``is_completed`` are its views."""
    row: dict[str, Any] = field(default_factory=dict)
    """The dataset's columns; always with ``INPUT_COLUMNS``."""
    completion: Annotated[Any, Saved(read=saved_messages, column="completions")] = None
    """Messages (or text) after the row's prompt."""
    advantage: Annotated[
        float | None, Saved(column="advantages", read=_advantage, index="number")
    ] = None
    """As the rubric computed it over the group: by its ``@advantage`` method, else reward minus
    mean. None before."""
    role_rewards: Annotated[dict[str, float], Saved(when="if set", key=None, read=numbers)] = field(
        default_factory=dict
    )
    """The reward of each role that took a turn to train, NaN when unknown; empty if roles have
    none of their own."""
    turn_sum: Annotated[str, Saved(when="if set", key=None, read=lambda name: name or "")] = ""
    """The metric of the reward that is the sum of its turns' rewards, so that credit per turn
    counts them once; empty without a turn's reward."""
    turn_sum_weight: Annotated[float | None, Saved(when="if set", key=None)] = None
    """The weight of ``turn_sum`` in the reward; None without it, and where it is not known."""
    tool_errors: Annotated[
        list[str], Saved(when="if set", key=None, read=lambda texts: texts or [])
    ] = field(default_factory=list)
    """Tool and text of each tool call that failed."""
    is_unparsed: Annotated[bool | None, Saved(when="if set", key=None)] = None
    """Whether the environment's parser found nothing in it; None if its parser takes any text."""
    not_applicable: Annotated[
        list[str], Saved(when="if set", key=None, read=lambda names: list(names or []))
    ] = field(default_factory=list)
    """The reward and metric functions that do not apply to it: no metric, and not in the reward."""
    fork: Annotated[
        Fork | None,
        Saved(when="if set", key=None, write=dict, read=Fork.read, type="dict[str, Any] | None"),
    ] = None
    """Where it is in the tree of its group: ``sibling``, ``parent`` (the sibling whose turns it
    shares; null: none) and ``turn`` (how many it shares); None without branches."""
    failed_requests: Annotated[dict[str, int], Saved(when="if set", key=None, read=counts)] = field(
        default_factory=dict
    )
    """Requests to the model that were answered by no completion, by kind: ``refused_for_rate``
    (429), ``server_errors`` (5xx), ``refused`` (another 4xx), ``unanswered`` (no connection, or out
    of time), ``unusable``."""
    id: Annotated[str, Saved(when="never", key="trajectory_id")] = ""
    """Of this attempt; another one has another."""
    model: Annotated[str, Saved(when="never")] = ""
    """The name that was asked for."""
    sampling_args: Annotated[Any, Saved(when="never")] = None
    """As sent with every model call."""
    tool_defs: Annotated[Any, Saved(type="list[Any] | None")] = None
    """The tools that the model was offered."""
    timing: Annotated[
        Timing, Saved(write=Timing.of, read=Timing.read, column="timings", type="dict[str, float]")
    ] = field(default_factory=Timing)
    """Where the time went."""
    usage: Annotated[
        dict[str, Any],
        Saved(
            name="token_usage",
            key="usage",
            column="token_usages",
            write=dict,
            read=counts,
            type="dict[str, int] | None",
        ),
    ] = field(default_factory=dict)
    """Tokens that the server counted."""

    def __post_init__(self) -> None:
        self.row = {name: make() for name, make in _ROW_DEFAULTS.items()} | self.row
        if not isinstance(self.transcript, Transcript):
            self.transcript = Transcript(self.transcript)
        if isinstance(self.error, str):
            self.error = ErrorInfo.of(self.error)

    # --- views of the status

    @property
    def stop(
        self,
    ) -> Annotated[
        str | None,
        Saved(
            name="stop_condition",
            key="stop_condition",
            column="stop_conditions",
            read=text,
            index="name",
        ),
    ]:
        """The condition that ended it: a ``StopReason``, or the name of an author's."""
        return self.status.reason

    @stop.setter
    def stop(self, reason: str | None) -> None:
        self.status = replace(self.status, reason=reason)

    @property
    def error(
        self,
    ) -> Annotated[
        Any,
        Saved(write=_error, read=_error, column="errors", type="ErrorInfo | None", index="name"),
    ]:
        """What ended it: the exception while it runs, ``ErrorInfo`` once it is finished."""
        return self.status.error

    @error.setter
    def error(self, error: object) -> None:
        self.status = replace(self.status, error=error)

    @property
    def is_truncated(self) -> Annotated[bool, Saved(read=bool)]:
        """Whether a limit of tokens or time cut it."""
        return self.status.is_truncated

    @is_truncated.setter
    def is_truncated(self, is_truncated: bool) -> None:
        self.status = replace(self.status, is_truncated=is_truncated)

    @property
    def is_completed(self) -> Annotated[bool, Saved(read=bool)]:
        """Whether it has ended."""
        return self.status.is_completed

    @is_completed.setter
    def is_completed(self, is_completed: bool) -> None:
        self.status = replace(self.status, is_completed=is_completed)

    @property
    def text(self) -> dict[str, Any]:
        """``prompt completion answer``, for logs."""
        row = self.row
        return {"prompt": row["prompt"], "completion": self.completion, "answer": row["answer"]}

    def count_failed(self, kinds: Mapping[str, int]) -> None:
        """Count requests that failed."""
        for kind, count in kinds.items():
            self.failed_requests[kind] = self.failed_requests.get(kind, 0) + count

    def note_turn_sum(self, name: str, weights: Mapping[str, float]) -> None:
        """Say which weighted function, "" = none, adds up the rewards of the turns."""
        self.turn_sum = "" if name in self.not_applicable else name
        self.turn_sum_weight = weights[name] if self.turn_sum else None

    # --- what training reads

    @property
    def turns(self) -> tuple[Turn, ...]:
        """The turns to train, which have tokens; empty when the endpoint returned none."""
        return self.transcript.trained

    @property
    def num_shared_turns(self) -> int:
        """How many of ``turns`` it shares with its parent."""
        shared = self.transcript.turns[: self.fork.turn] if self.fork is not None else ()
        return sum(turn.is_trained for turn in shared)

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
        shared = self.transcript[: self.fork.turn] if self.fork is not None else ()
        return replace(
            self,
            fork=self.fork
            and Fork(
                self.fork.sibling,
                self.fork.parent,
                sum(turn.is_trained and turn.role == role for turn in shared),
            ),
            transcript=turns,
            reward=self.role_rewards.get(role, math.nan),
            status=replace(
                self.status,
                is_truncated=StopReason.truncates(self.stop) or any(t.is_truncated for t in turns),
            ),
            advantage=None,
            role_rewards={},
            turn_sum="",
            turn_sum_weight=None,
        )

    # --- JSON

    def fields(self) -> dict[str, Any]:
        """The fields of a saved rollout, without its turns."""
        row = {name: self.row[name] for name in _SAVED_COLUMNS}
        return row | values_to_save(FIELDS, self)

    def to_json(self) -> dict[str, Any]:
        """The rollout with its turns, for ``runtime.json.encode_row``; NaN becomes null."""
        return self.fields() | {"trajectory": self.transcript.to_json()}

    @classmethod
    def from_json(cls, saved: Mapping[str, object]) -> Rollout:
        """The rollout of ``to_json``, or of a saved row; unknown numbers are NaN.

        ``advantage`` stays None if it is null: unknown or not computed, which only the whole
        group shows. *Raises* ValueError, KeyError or TypeError for a value of another shape.
        """
        values = read_fields(saved)
        rollout = cls(
            transcript=transcript_of(saved),
            row={name: values[name] for name in ROW if name in values},
        )
        for attribute, declaration in FIELDS.items():
            if declaration.name in values:
                setattr(rollout, attribute, values[declaration.name])
        return rollout


FIELDS = declared(Rollout)
"""The declared fields of a rollout itself, by attribute; those of its row are in ``ROW``."""
SAVED = {
    column.name: column
    for column in (ROW["example_id"], *ROW.values(), *FIELDS.values())
    if column.saved.when != "never"
}
"""All fields of a saved rollout, by saved name."""
_SAVED_COLUMNS = tuple(name for name in SAVED if name in ROW)


def read_fields(saved: Mapping[str, object]) -> dict[str, object]:
    """The values of the fields that a saved rollout has, but its turns."""
    return {
        name: field.saved.read(saved[name])
        for name, field in SAVED.items()
        if name in saved and field.saved.when != "if asked"
    }


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


def role_rewards_of(turns: Iterable[Turn], metrics: Mapping[str, float], reward: float) -> Any:
    """The reward of each role among these turns: the metric of its name, else the rollout's."""
    return {turn.role: float(metrics.get(turn.role, reward)) for turn in turns if turn.role}
