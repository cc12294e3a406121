"""``State``: a rollout as its author sees it, a dict.

The reserved keys (``State.RESERVED``) read and write the ``Rollout`` of the state, the columns of
its row are at the top level, and other keys belong to the author. ``state.rollout()`` is the
finished record, which travels without the author's keys.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any

from verifiers.rollouts.error_info import ErrorInfo
from verifiers.rollouts.rollout import FIELDS, INPUT_COLUMNS, Rollout, role_rewards_of
from verifiers.rollouts.steps import TrajectoryStep, TrajectoryStepTokens
from verifiers.rollouts.transcript import Transcript
from verifiers.rollouts.typed_fields import StateKeys
from verifiers.rollouts.values import Timing, number
from verifiers.rollouts.views import View
from verifiers.types import Messages, Response, StopReason

__all__ = ["State", "Timing", "TrajectoryStep", "TrajectoryStepTokens"]

_ATTRIBUTES = {field.key: attribute for attribute, field in FIELDS.items() if field.key}
"""Key -> attribute of the rollout."""
OF_THE_RUN: Mapping[str, Any] = {
    "client": None,
    "prompt_too_long": False,
    "final_env_response": None,
    "judge_response": None,
}
"""Reserved keys that the finished rollout lacks, with their defaults."""


class State(StateKeys, View):
    """Everything about one rollout, from its dataset row to its reward. Other keys belong to the
    author.

    The row's columns are at the top level, and ``state["input"]`` is the row itself. ``reward`` is
    None until scored, NaN when unknown. ``oai_tools`` and ``tool_defs`` are one list. ``id``,
    ``turn`` and ``responses`` are computed when read and cannot be assigned.

    >>> s = State(prompt=[], answer="4", example_id=3)
    >>> s["input"]["answer"], s["turn"], s["reward"]
    ('4', 0, None)
    """

    record: Rollout
    """What the reserved keys and the columns show."""
    run: Any = None
    """The run this rollout belongs to (``runner.RunContext``): its limits and seeds; None outside a
    run."""
    waiting_for: str | None = None
    """What the rollout currently awaits, for progress displays and time-outs."""
    seed_key: str = ""
    """Example and sibling, from which the sampling seeds are derived together with
    the run's seed."""
    attempts: int = 1
    """How often the rollout was run."""
    saved_columns: tuple[str, ...] = ()
    """Keys that are saved with the rollout, beside those that the run asks for; set by the
    environment."""
    env: Any = None
    """The environment that runs it (``RolloutEnvironment``); None in a state that no run made."""
    is_branch: bool = False
    """Whether it is a branch of another, which was set up."""
    branches: tuple[State, ...] = ()
    """The other rollouts of the tree that this one is the first of."""
    num_branches: int = 0
    """Branches made of it so far."""
    next_prompt: Messages | None = None
    """Of a branch: the prompt that its parent was about to send."""
    usage_before: Mapping[str, int] = {}
    """Of a branch: what its parent had used when it left."""
    before_call: Callable[[State], Awaitable[None]] | None = None
    """Called before each model call, when its prompt is known."""
    cleaned_up: bool = False
    """Whether the rubric's clean-up handlers have already run, in the worker that ran
    the rollout."""

    INPUT_FIELDS = tuple(INPUT_COLUMNS)
    COMPUTED = frozenset(("id", "turn", "responses"))
    OLDER: Mapping[str, Callable[[State], object]] = {}
    """Keys of older versions -> how they are computed; filled by ``legacy``."""
    FORKED: Callable[[State, int], Awaitable[list[State]]]
    """What ``fork`` does; filled by ``forks``."""
    RESERVED = COMPUTED | _ATTRIBUTES.keys() | OF_THE_RUN.keys() | {"input", "oai_tools"}
    """Reserved keys; a column of such a name is read through ``state["input"]``."""

    def __init__(self, *mappings: Mapping[str, object], **fields: object):
        values: dict[str, Any] = {}
        for mapping in (*mappings, fields):
            values.update(mapping)
        row = values.pop("input", None)
        if row is None:
            reserved = _ATTRIBUTES.keys() | OF_THE_RUN.keys() | {"oai_tools"}
            row = {key: values.pop(key) for key in list(values) if key not in reserved}
        self._show(Rollout(row=dict(row)))
        for key, value in values.items():
            if key in self.COMPUTED or (value is None and key in _CONTAINERS):
                continue
            self[key] = value

    @classmethod
    def of(cls, rollout: Rollout) -> State:
        """The view of a rollout."""
        state = cls.__new__(cls)
        state._show(rollout)
        return state

    def _show(self, rollout: Rollout) -> None:
        dict.__init__(self, OF_THE_RUN, judge_response={})
        self.counted: list[Response] = []
        """Responses since the newest turn whose tokens are in ``usage``."""
        self.record = rollout

    def rollout(self) -> Rollout:
        """The finished record: with its error as data, and the rewards of roles."""
        record = self.record
        reward = number(None if record.reward is None else float(record.reward))
        error = None if record.error is None else ErrorInfo.of(record.error)
        return replace(
            record,
            reward=reward,
            status=replace(record.status, error=error),
            advantage=None if record.advantage is None else float(record.advantage),
            role_rewards=role_rewards_of(record.turns, record.metrics, reward),
        )

    async def fork(self, n: int) -> list[State]:
        """``n`` states that share the turns so far, each with a deep copy of the author's keys, a
        copy of the sandbox, and seeds of its own; ``@vf.fork`` methods set what cannot be copied.

        *Raises* UsageError that names the key which cannot be copied.
        """
        return await self.FORKED(self, n)

    @property
    def leaves(self) -> tuple[State, ...]:
        """It, and the other rollouts of its tree."""
        return (self, *self.branches)

    @property
    def input_columns(self) -> list[str]:
        """Names of the row's columns."""
        return list(self.record.row)

    # --- the dict

    def names(self) -> tuple[str, ...]:
        columns = (name for name in self.record.row if name not in self.RESERVED)
        return (*_ATTRIBUTES, *columns)

    def read(self, key: str) -> Any:
        attribute = _ATTRIBUTES.get(key)
        if attribute is not None:
            return getattr(self.record, attribute)
        row = self.record.row
        if key in row and key not in self.RESERVED:
            return row[key]
        match key:
            case "input":
                return row
            case "oai_tools":
                return self.record.tool_defs
            case "id":
                return row["example_id"]
            case "turn":
                return len(self.record.transcript)
            case "responses":
                return [step["response"] for step in self.record.transcript]
            case "timed_out":
                return self.record.stop == StopReason.TIMEOUT
        if key in self.OLDER:
            return self.OLDER[key](self)
        raise KeyError(key)

    def write(self, key: str, value: Any) -> bool:
        attribute = _ATTRIBUTES.get(key)
        if attribute is not None:
            if key == "trajectory" and not isinstance(value, Transcript):
                value = Transcript(value)
            elif key == "timing" and not isinstance(value, Timing):
                value = Timing(**value)
            setattr(self.record, attribute, value)
        elif key == "input":
            self.record.row = dict(value)
        elif key == "oai_tools":
            self.record.tool_defs = value
        elif key in self.COMPUTED:
            raise KeyError(f"state[{key!r}] is computed and cannot be assigned")
        elif key in self.record.row and key not in self.RESERVED:
            self.record.row[key] = value
        else:
            return False
        return True

    def __delitem__(self, key: str) -> None:
        if key in _ATTRIBUTES:
            self[key] = getattr(Rollout(), _ATTRIBUTES[key])
        elif key in self.record.row and key not in self.RESERVED:
            del self.record.row[key]
        else:
            dict.__delitem__(self, key)

    def copy(self) -> dict[str, Any]:
        """A plain dict of the keys, with ``input``."""
        return {**self, "input": dict(self.record.row)}

    def __reduce__(self) -> tuple[object, ...]:
        return State, (self.copy(),)


_CONTAINERS = frozenset(("trajectory", "metrics", "timing", "usage", "judge_response"))
"""Keys whose None means a new container."""
