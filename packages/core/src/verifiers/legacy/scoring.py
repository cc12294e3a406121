"""Older call forms of a rubric: fields instead of a state, columns instead of states, and dummy scores.

``compat.RUBRIC_METHODS`` makes these functions methods of ``Rubric``; ``Rubric.score_rollout`` and ``score_group``
delegate calls without a ``State`` to this module, which builds states and calls those two methods.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any

from verifiers.data.messages import field
from verifiers.data.tool_schema import shortened
from verifiers.errors import ConfigError, ScoringError
from verifiers.rollouts.state import State
from verifiers.rubrics import RolloutScore, RolloutScores, Rubric
from verifiers.rubrics.rubric import each, leave_unscored, overrides, rollout_value
from verifiers.runtime.calls import blocking, dual, maybe_await

FIELD_ORDER = ("prompt", "completion", "answer", "state", "task", "info")
"""Order of the positional arguments of ``score_rollout(prompt, completion, answer, state)``."""
RESULTS = ("reward", "advantage", "metrics", "error")
"""Keys copied back into a plain dict that was passed as the state."""
MAX_CONCURRENT = 1024


async def score_fields(rubric: Rubric, args: Sequence[Any], fields: Mapping[str, Any], score_sem: Any) -> RolloutScore:
    """``score_rollout`` called with a plain dict, or with prompt, completion, answer, state by position or keyword.

    *Raises* ConfigError for other arguments.
    """
    state, original, score_sem = _read(args, fields, score_sem)
    score = await Rubric.score_rollout(rubric, state, score_sem=score_sem)
    _copy_back(state, original)
    return score


async def score_dicts(rubric: Rubric, states: Sequence[Any], score_sem: Any) -> RolloutScores:
    """``score_group`` called with plain dicts, which receive the results."""
    members = [state if isinstance(state, State) else State(state) for state in states]
    scores = await Rubric.score_group(rubric, members, score_sem=score_sem)
    for member, original in zip(members, states, strict=True):
        _copy_back(member, original)
    return scores


async def clean_up(rubric: Rubric, state: Mapping[str, Any]) -> None:
    """Run the cleanup handlers of ``rubric`` for one rollout, once.

    Called from an override, run those that it stands for; a decorated override stands for itself alone.
    """
    states = [state if isinstance(state, State) else State(state)]
    if not overrides(rubric, Rubric, "cleanup"):
        await rubric.run_cleanup(states)
        return
    handlers = rubric.declared_cleanup_handlers()
    if all(handler != rubric.cleanup for handler, _ in handlers):
        await rubric.call_cleanup_handlers([pair for pair in handlers if pair[1] != "group"], states)


def score_rollouts(
    rubric: Rubric,
    prompts: Sequence[Any],
    completions: Sequence[Any],
    answers: Sequence[Any],
    states: Sequence[Any],
    tasks: Sequence[str] | None = None,
    infos: Sequence[Any] | None = None,
    max_concurrent: int = -1,
    group_size: int | None = None,
    **columns: Sequence[Any],
) -> RolloutScores | Awaitable[RolloutScores]:
    """Score rollouts given as columns; returns the scores, or an awaitable of them under a running loop.

    With ``group_size``, every ``group_size`` consecutive rollouts form a group; without it there are no groups. At most
    ``max_concurrent`` groups (or rollouts) are scored at a time; -1 means 1,024.
    """
    lists = {"prompt": prompts, "completion": completions, "answer": answers, "task": tasks, "info": infos} | columns
    members = _states_of(lists, states)
    return dual(lambda: _score_all(rubric, members, group_size, max_concurrent))


def score_rollouts_sync(rubric: Rubric, *args: object, **kwargs: object) -> RolloutScores:
    """``score_rollouts``, always blocking."""

    async def scores() -> RolloutScores:
        result: RolloutScores = await rubric.score_rollouts(*args, **kwargs)
        return result

    return blocking(scores)


async def score_group_by_columns(rubric: Rubric, states: Sequence[State]) -> None:
    """Score a group by an overridden ``score_rollouts``: columns in, rewards and metrics out.

    Versions that had it passed it all rollouts of a run; here it scores one group at a time.
    *Raises* ScoringError when it returns another number of rewards.
    """
    columns: dict[str, Any] = {f"{name}s": [rollout_value(state, name) for state in states] for name in FIELD_ORDER}
    declared = inspect.signature(rubric.score_rollouts).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in declared.values())
    further = {"max_concurrent": -1, "apply_weights": True}
    columns |= {name: value for name, value in further.items() if takes_all or name in declared}
    scores = await maybe_await(rubric.score_rollouts(**columns))
    rewards, metrics = field(scores, "reward"), field(scores, "metrics") or {}
    if rewards is None or len(rewards) != len(states):
        raise ScoringError(f"score_rollouts returned {shortened(rewards)} for {len(states)} rollouts; return one each")
    for index, state in enumerate(states):
        state["reward"] = float(rewards[index])
        state["metrics"].update((name, values[index]) for name, values in metrics.items())


def score_nothing(rubric: Rubric, state: State) -> None:
    """Leave a rollout unscored: reward unknown, no metrics."""
    leave_unscored([state])


async def dummy_score_rollout(rubric: Rubric, state: State) -> RolloutScore:
    """Leave a rollout unscored and return its score."""
    leave_unscored([state])
    return RolloutScore.of(state)


async def dummy_score_group(rubric: Rubric, states: Sequence[State]) -> RolloutScores:
    """Leave a group unscored and return its scores."""
    leave_unscored(states)
    return RolloutScores.of(states)


async def _score_all(rubric: Rubric, states: list[State], group_size: int | None, max_concurrent: int) -> RolloutScores:
    if group_size is not None and (group_size < 1 or len(states) % group_size):
        raise ConfigError(f"{len(states)} rollouts cannot be divided into groups of group_size={group_size}")
    size = group_size or 1
    groups = iter([states[i : i + size] for i in range(0, len(states), size)])

    async def score_groups() -> None:
        for group in groups:
            await (rubric.score_group(group) if group_size else rubric.score_rollout(group[0]))

    limit = max_concurrent if max_concurrent > 0 else MAX_CONCURRENT
    await each(score_groups() for _ in range(min(limit, len(states))))
    return RolloutScores.of(states)


def _read(args: Sequence[Any], fields: Mapping[str, Any], score_sem: object) -> tuple[State, Any, Any]:
    """The state to score, the state object of the caller, and the semaphore."""
    if args and isinstance(args[0], Mapping):
        if len(args) > 2 or fields:
            raise ConfigError("score_rollout(state, score_sem=None) takes no further arguments")
        original, score_sem = args[0], args[1] if len(args) == 2 else score_sem
        return original if isinstance(original, State) else State(original), original, score_sem
    if len(args) > len(FIELD_ORDER):
        raise ConfigError(f"score_rollout takes {', '.join(FIELD_ORDER)}, not {len(args)} positional arguments")
    fields = dict(zip(FIELD_ORDER, args, strict=False)) | dict(fields)
    original = fields.pop("state", {})
    if not fields:
        return original if isinstance(original, State) else State(original), original, score_sem
    if "prompt" not in fields or "completion" not in fields:
        raise ConfigError("score_rollout needs a state, or prompt= and completion= (with answer= and state=)")
    return _state_with(original, fields), original, score_sem


def _copy_back(state: State, original: object) -> None:
    if isinstance(original, dict) and not isinstance(original, State):
        original.update((key, state[key]) for key in RESULTS)


def _states_of(columns: Mapping[str, Sequence[Any] | None], states: Sequence[Any]) -> list[State]:
    """One state per row of the columns; None columns are skipped. *Raises* ConfigError for different lengths."""
    present = {name: values for name, values in columns.items() if values is not None}
    for name, values in present.items():
        if len(values) != len(states):
            raise ConfigError(f"score_rollouts received {len(values)} values of {name!r} and {len(states)} states")
    return [_state_with(state, {name: values[i] for name, values in present.items()}) for i, state in enumerate(states)]


def _state_with(original: Any, fields: Mapping[str, Any]) -> State:
    """The ``State`` itself with the fields set, or a new one that copies a plain mapping."""
    state = original if isinstance(original, State) else State(original or {})
    for name, value in fields.items():
        if name == "info" and value is None:
            continue
        if name in State.RESERVED:
            state[name] = value
        else:
            dict.pop(state, name, None)
            state["input"][name] = value
    return state
