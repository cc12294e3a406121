"""What happened in one rollout: ``State``, the one mutable thing.

A state is a dict for authors to read and write. A few keys are the state's own (``State.RESERVED``); the columns of
its row stand beside them, and everything else belongs to the author. Its turns are ``TrajectoryStep``s (``steps``).

This module does not run rollouts (``rollout``) and does not write them to disk (``rows``).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

from verifiers.rollouts.turns import TrajectoryStep, TrajectoryStepTokens, record_tokens, turns_of
from verifiers.types import AttributeDict, Rollout

__all__ = ["InputView", "State", "Timing", "TrajectoryStep", "TrajectoryStepTokens", "record_tokens"]


class Timing(AttributeDict):
    """Where a rollout's time went, in milliseconds, and when it began (epoch seconds).

    >>> timing = vf.Timing(model_ms=12.5)
    >>> timing.model_ms, timing["total_ms"]
    (12.5, 0.0)
    """

    _ZERO = dict.fromkeys(
        ("setup_ms", "generation_ms", "model_ms", "env_ms", "scoring_ms", "total_ms", "overhead_ms", "start_time"), 0.0
    )

    def __init__(self, **given: float):
        super().__init__(self._ZERO, **given)


class InputView(MutableMapping[str, Any]):
    """``state["input"]``: the row's columns, live; reading and writing go to the state itself.

    A column whose name is one of the state's own keys (a dataset may have a column "reward" or "id") is kept apart and
    is seen only here.
    """

    __slots__ = ("_state",)

    def __init__(self, state: State):
        self._state = state

    def __getitem__(self, key: str) -> Any:
        if key not in self._state.input_columns:
            raise KeyError(key)
        hidden = self._state.hidden_columns
        return hidden[key] if key in hidden else dict.__getitem__(self._state, key)

    def __setitem__(self, key: str, value: Any) -> None:
        if key not in self._state.input_columns:
            self._state.input_columns.append(key)
        if key in State.RESERVED:
            self._state.hidden_columns[key] = value
        else:
            dict.__setitem__(self._state, key, value)

    def __delitem__(self, key: str) -> None:
        self._state.input_columns.remove(key)

    def __iter__(self) -> Iterator[str]:
        return iter(self._state.input_columns)

    def __len__(self) -> int:
        return len(self._state.input_columns)

    def __repr__(self) -> str:
        return repr(dict(self))


class State(dict[str, Any]):
    """Everything about one rollout, from its dataset row to its reward. Keys beyond the listed ones are the author's.

    The row's columns stand at the top level, and ``state["input"]`` is a live view of them. ``reward`` is None until
    scored, NaN when unknown. ``oai_tools`` and ``tool_defs`` are one list. ``id``, ``turn`` and ``responses`` are
    computed when read and cannot be assigned.

    >>> s = State(prompt=[], answer="4", example_id=3)
    >>> s["input"]["answer"], s["turn"], s["reward"]
    ('4', 0, None)
    """

    run: Any = None
    """The run this rollout belongs to (``runner.RunContext``): its limits and seeds; None outside a run."""
    waiting_for: str | None = None
    """What the rollout waits for at this moment, for progress displays and time-outs."""
    turn_rewards: list[Any] | None = None
    """What the environment gave for each turn, None where nothing, before scoring fills the steps with the reward."""
    seed_key: str = ""
    """What the rollout's sampling seeds are derived from, beside the run's seed: its example and sibling."""
    attempts: int = 1
    """How often the rollout was played."""
    cleaned_up: bool = False
    """Whether the rubric's clean-up handlers have run for it already, in the process that played it."""

    INPUT_FIELDS = ("prompt", "answer", "task", "info", "example_id")
    COMPUTED = frozenset(("id", "turn", "responses"))
    _DEFAULTS: Mapping[str, Any] = {
        "client": None,
        "model": "",
        "sampling_args": None,
        "tool_defs": None,
        "trajectory": None,
        "trajectory_id": "",
        "completion": None,
        "is_completed": False,
        "is_truncated": False,
        "prompt_too_long": False,
        "stop_condition": None,
        "error": None,
        "reward": None,
        "advantage": None,
        "metrics": None,
        "timing": None,
        "usage": None,
        "final_env_response": None,
        "judge_response": None,
    }
    RESERVED = COMPUTED | _DEFAULTS.keys() | {"input", "oai_tools"}
    """Keys that are the state's own; a column of such a name is read through ``state["input"]``."""

    def __init__(self, *mappings: Mapping[str, Any], **fields: Any):
        given = fields
        if mappings:
            given = {}
            for mapping in mappings:
                given.update(mapping)
            given.update(fields)
        row = given.pop("input", None)
        if row is None:
            row = {key: value for key, value in given.items() if key not in self._DEFAULTS and key != "oai_tools"}
        if "oai_tools" in given:
            given["tool_defs"] = given.pop("oai_tools")
        columns = {"prompt": [], "answer": "", "task": "default", "info": {}, "example_id": 0, **row}
        self.input_columns = list(columns)
        """Names of the row's columns."""
        hidden = () if self.RESERVED.isdisjoint(columns) else self.RESERVED.intersection(columns)
        self.hidden_columns = {key: columns.pop(key) for key in hidden}
        """Columns whose names are the state's own keys."""
        super().__init__(self._DEFAULTS)
        dict.update(self, columns)
        dict.update(self, given)
        if not self.COMPUTED.isdisjoint(given):
            for name in self.COMPUTED:
                dict.pop(self, name, None)
        for key, fresh in _FRESH:
            if dict.__getitem__(self, key) is None:
                dict.__setitem__(self, key, fresh())
        if type(timing := dict.__getitem__(self, "timing")) is not Timing:
            dict.__setitem__(self, "timing", Timing(**timing))

    def __missing__(self, key: str) -> Any:
        match key:
            case "input":
                return InputView(self)
            case "oai_tools":
                return self["tool_defs"]
            case "id":
                return self["example_id"]
            case "turn":
                return len(self["trajectory"])
            case "responses":
                return [step["response"] for step in self["trajectory"]]
        raise KeyError(key)

    def __setitem__(self, key: str, value: Any) -> None:
        if key in self.COMPUTED:
            raise KeyError(f"state[{key!r}] is computed and cannot be assigned")
        if key == "input":
            self.input_columns, self.hidden_columns = [], {}
            InputView(self).update(value)
        elif key == "timing":
            super().__setitem__(key, value if isinstance(value, Timing) else Timing(**value))
        else:
            super().__setitem__("tool_defs" if key == "oai_tools" else key, value)

    def __contains__(self, key: object) -> bool:
        return super().__contains__(key) or key in ("input", "oai_tools") or key in self.COMPUTED

    def get(self, key: str, default: Any = None) -> Any:
        try:
            return self[key]
        except KeyError:
            return default

    def update(self, *mappings: Any, **fields: Any) -> None:
        for key, value in dict(*mappings, **fields).items():
            self[key] = value

    def __ior__(self, other: Any) -> State:  # type: ignore[override,misc]  # dict's own overloads give a dict
        self.update(other)
        return self

    def setdefault(self, key: str, default: Any = None) -> Any:
        if key not in self:
            self[key] = default
        return self[key]

    def copy(self) -> dict[str, Any]:
        """A plain dict of the keys, with ``input``."""
        return {**self, "input": dict(self["input"])}

    def rollout(self) -> Rollout:
        """The rollout as it stands, frozen: its turns as sampled and what it was worth."""
        error, reward = self["error"], self["reward"]
        return Rollout(
            turns=turns_of(self["trajectory"]),
            reward=math.nan if reward is None else float(reward),
            metrics=dict(self["metrics"]),
            error=None if error is None else f"{type(error).__name__}: {error}",
            stop=self["stop_condition"],
            is_truncated=bool(self["is_truncated"]),
            text={key: self[key] for key in ("prompt", "completion", "answer")},
            turn_rewards=self._own_turn_rewards(),
        )

    def _own_turn_rewards(self) -> tuple[float, ...]:
        """Rewards that the environment gave to turns; scoring fills the others with the rollout's, counted there."""
        steps, given = self["trajectory"], self.turn_rewards
        if given is None or len(given) != len(steps):  # read from a file
            given = [None if step.get("reward") in (None, self["reward"]) else step["reward"] for step in steps]
        own = [r for step, r in zip(steps, given, strict=True) if dict.__getitem__(step, "tokens") is not None]
        known = [0.0 if reward is None or math.isnan(reward) else float(reward) for reward in own]
        return tuple(known) if any(known) else ()

    def __reduce__(self) -> tuple[Any, ...]:
        return State, (self.copy(),)


_FRESH = (("trajectory", list), ("metrics", dict), ("timing", Timing), ("usage", dict), ("judge_response", dict))
