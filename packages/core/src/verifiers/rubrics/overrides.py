"""The forms in which scoring is called: a state, or prompt, completion, answer and state by keyword.

Also the reverse: a rubric class of an author may override ``score_rollout`` or ``score_group`` in either form, and is
then called as it is declared. This module scores nothing.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from verifiers.errors import ConfigError
from verifiers.rollouts.state import State
from verifiers.rubrics.arguments import SINGULAR, rollout_value

OLD_ORDER = ("prompt", "completion", "answer", "state", "task", "info")
WRITTEN = ("reward", "advantage", "metrics", "error")


@dataclass(frozen=True, slots=True)
class RolloutCall:
    """One rollout to score; ``given`` is the caller's own mapping when it was no ``State``."""

    state: State
    given: Any
    score_sem: Any

    def write_back(self) -> None:
        """Put the results into the caller's plain dict."""
        if isinstance(self.given, dict) and not isinstance(self.given, State):
            self.given.update((key, self.state[key]) for key in WRITTEN)


def rollout_call(args: Sequence[Any], kwargs: Mapping[str, Any], score_sem: Any) -> RolloutCall:
    """Read the arguments of ``score_rollout`` in either form.

    *Raises* ConfigError when they fit neither.
    """
    if args and isinstance(args[0], Mapping):
        if len(args) > 2 or kwargs:
            raise ConfigError("score_rollout(state, score_sem=None) takes nothing else beside a state")
        given, score_sem = args[0], args[1] if len(args) == 2 else score_sem
        return RolloutCall(given if isinstance(given, State) else State(given), given, score_sem)
    if len(args) > len(OLD_ORDER):
        raise ConfigError(f"score_rollout takes {', '.join(OLD_ORDER)}, not {len(args)} positional arguments")
    fields = dict(zip(OLD_ORDER, args, strict=False)) | dict(kwargs)
    given = fields.pop("state", {})
    if not fields:
        return RolloutCall(given if isinstance(given, State) else State(given), given, score_sem)
    if "prompt" not in fields or "completion" not in fields:
        raise ConfigError("score_rollout needs a state, or prompt= and completion= (with answer= and state=)")
    return RolloutCall(_with_columns(given, fields), given, score_sem)


def rows_of(columns: Mapping[str, Sequence[Any] | None], states: Sequence[Any]) -> list[State]:
    """States of rows given as columns; absent columns are skipped. *Raises* ConfigError for uneven lengths."""
    present = {name: values for name, values in columns.items() if values is not None}
    for name, values in present.items():
        if len(values) != len(states):
            raise ConfigError(f"score_rollouts got {len(values)} of {name!r} and {len(states)} states")
    return [
        _with_columns(state, {name: values[i] for name, values in present.items()}) for i, state in enumerate(states)
    ]


def _with_columns(state: Any, fields: Mapping[str, Any]) -> State:
    """The state itself with the fields set, or a new one around a plain mapping."""
    made = state if isinstance(state, State) else State(state or {})
    for name, value in fields.items():
        if name == "info" and value is None:
            continue
        made[name] = value
        if name != "completion" and name not in made.input_columns:
            made.input_columns.append(name)
    return made


def overrides(rubric: Any, base: type, name: str) -> bool:
    """Whether the rubric's class replaces a method of ``base``."""
    return getattr(type(rubric), name) is not getattr(base, name)


async def score_by_override(rubric: Any, state: State) -> None:
    """Call an author's own ``score_rollout`` as it is declared and leave its score in the state."""
    names = inspect.signature(rubric.score_rollout).parameters
    if "prompt" in names:
        takes_all = any(p.kind is p.VAR_KEYWORD for p in names.values())
        values = {name: rollout_value(state, name) for name in SINGULAR if takes_all or name in names}
        score = await rubric.score_rollout(**values)
    else:
        score = await rubric.score_rollout(state, **_semaphore(names))
    if isinstance(score, Mapping) and (state["reward"] is None or "prompt" in names):
        metrics = score.get("metrics")
        state["metrics"].update(metrics if isinstance(metrics, Mapping) else {})
        state["reward"] = score.get("reward", math.nan)


async def score_group_by_override(rubric: Any, states: Sequence[State]) -> None:
    """Call an author's own ``score_group`` as it is declared."""
    await rubric.score_group(list(states), **_semaphore(inspect.signature(rubric.score_group).parameters))


def _semaphore(parameters: Mapping[str, Any]) -> dict[str, Any]:
    return {"score_sem": nullcontext()} if "score_sem" in parameters else {}
