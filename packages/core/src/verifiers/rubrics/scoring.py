"""Scoring is two functions: ``score`` for a rollout that has ended, ``score_group`` for all
rollouts of an example.

Both write rewards and metrics into the rollouts. ``score`` runs the individual functions of a
``Plan``, ``score_group`` those that see the whole group, and sets the advantages. A value must be a
finite int, float, bool or numpy scalar; anything else is a ``ScoringError`` naming the function.
``NOT_APPLICABLE`` (of weight 0 also None) says that the function has nothing to say of a rollout:
it has no metric, the weighted sum is that of the other functions, and nothing failed.

An unknown reward is NaN, never 0. A failed function gives an unknown value: its metric is NaN, the
reward that needs it is NaN, and the ``ScoringError`` is recorded in ``state["error"]`` unless that
has an earlier error. Functions are not called for rollouts that ended in an error that is not
scorable; group functions receive only the other rollouts, so that siblings keep their rewards.

Worker threads and processes are in ``runtime``, the arguments of a function in ``arguments``.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import logging
import math
import os
import traceback
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from verifiers.errors import RunError, ScoringError, message_of
from verifiers.rollouts.author_code import sums_turns
from verifiers.rollouts.rollout import Rollout
from verifiers.rollouts.state import State
from verifiers.rollouts.values import LARGEST, number
from verifiers.rubrics.advantages import centered_advantages
from verifiers.rubrics.arguments import ArgumentResolver, RewardFunction
from verifiers.runtime.alarms import replace_alarms
from verifiers.runtime.processes import process_pool
from verifiers.runtime.worker_threads import Raised, call_in_thread, workers
from verifiers.types import AttributeDict, StopReason

NAN = math.nan


class NotApplicable(Enum):
    """The type of ``NOT_APPLICABLE``."""

    NOT_APPLICABLE = "not applicable"


NOT_APPLICABLE = NotApplicable.NOT_APPLICABLE
"""The value of a reward function for a rollout that it does not apply to: the reward is that of the
other functions, and the metric leaves the rollout out of its mean."""
Value = float | NotApplicable | ScoringError
"""What a function says of a rollout."""
SUCCESS = "success"
"""Metric that repeats the value of the function that a rubric names as its success: 1 or 0."""
_PACKAGE = str(Path(__file__).resolve().parents[1]) + os.sep
_STANDARD_LIBRARY = os.path.dirname(os.__file__) + os.sep


@dataclass(frozen=True, slots=True)
class Plan:
    """What one scoring pass runs: the functions in order, and their effective weights (group weight
    times weight)."""

    functions: Sequence[RewardFunction]
    weights: Mapping[str, float]
    """Function name -> effective weight; functions of weight 0 are absent."""
    parallel: bool
    """The individual functions run concurrently."""
    advantage: RewardFunction | None
    success: str | None
    """Name of the function whose value is also the metric ``success``."""

    @property
    def turn_sum(self) -> str:
        """Name of the weighted function that adds up the rewards of the turns (``sums_turns``); ""
        without such a function."""
        sums = (
            f.name for f in self.functions if f.function in sums_turns and f.name in self.weights
        )
        return next(sums, "")


# --- the two functions


async def score(plan: Plan, state: State) -> None:
    """Write the metrics of the individual functions; without group functions also the
    final reward."""
    started = perf_counter()
    functions = [function for function in plan.functions if not function.is_group]
    rollout = state.record
    # from an earlier scoring pass, whose result is replaced
    if isinstance(rollout.error, ScoringError):
        rollout.error = None
    rollout.not_applicable = []
    if not can_be_scored(rollout):
        rollout.metrics.update((function.name, NAN) for function in functions)
    elif functions:
        resolver = ArgumentResolver([state])
        await _provide(functions, resolver, state)
        if plan.parallel:
            await each(_run([function], resolver) for function in functions)
        else:
            for batch in _batches(functions):
                await _run(batch, resolver)
    if len(functions) == len(plan.functions):
        _conclude(plan, rollout)
    rollout.timing["scoring_ms"] += (perf_counter() - started) * 1000


async def score_group(plan: Plan, states: Sequence[State]) -> None:
    """Run the group functions, then set the rewards that depend on them and the advantages."""
    started = perf_counter()
    if functions := [function for function in plan.functions if function.is_group]:
        for state in states:
            state.record.metrics.update((function.name, NAN) for function in functions)
        if alive := [state for state in states if can_be_scored(state.record)]:
            resolver = ArgumentResolver(alive)
            await _provide(functions, resolver, alive)
            for function in functions:
                await _run([function], resolver)
        for state in states:
            _conclude(plan, state.record)
    await _set_advantages(plan.advantage, states)
    spent = (perf_counter() - started) * 1000
    for state in states:
        state.record.timing["scoring_ms"] += spent


def can_be_scored(rollout: Rollout) -> bool:
    """Whether functions are called for a rollout: it has no error, or a scorable error (caused by
    the model)."""
    error = rollout.error
    return error is None or isinstance(error, ScoringError) or getattr(error, "scorable", False)


def weighted(weights: Mapping[str, float], rollout: Rollout) -> float:
    """Σ weight · metric over the functions that apply to a rollout; NaN when a metric of these is
    missing or unknown, and when there is none."""
    left_out, metrics = rollout.not_applicable, rollout.metrics
    terms = [w * metrics.get(name, NAN) for name, w in weights.items() if name not in left_out]
    return sum(terms, 0.0) if terms else NAN


def leave_unscored(states: Sequence[State]) -> None:
    """Set rewards and advantages to NaN and metrics to empty, without scoring."""
    for state in states:
        state.record.advantage = NAN
        state.record.metrics, state.record.not_applicable = {}, []
        _set_reward(state.record, NAN)


async def measure(
    functions: Sequence[RewardFunction], state: State, logger: logging.Logger
) -> None:
    """Add the metrics of ``functions`` whose names the rollout does not have; a failure is logged,
    its value NaN.

    They are the library's own and run in the event loop, where they cost less than a thread.
    """
    resolver = ArgumentResolver([state])
    for function in functions:
        if function.name in state.record.metrics:
            continue
        try:
            value = function(resolver)
            value = value_or_error(await value if inspect.isawaitable(value) else value, function)
            if isinstance(value, ScoringError):
                raise value
            if isinstance(value, NotApplicable):
                continue
        except Exception as error:  # noqa: BLE001 - must not fail the rollout
            logger.warning("monitor metric %s failed: %s", function.name, error)
            value = NAN
        state.record.metrics[function.name] = value


def _conclude(plan: Plan, rollout: Rollout) -> None:
    """Set ``reward``, and the metric ``success`` if the rubric names its function.

    The reward is NaN when a metric is unknown, and when no function has a weight: what nothing
    measures is unknown.
    """
    is_scored = can_be_scored(rollout)
    rollout.note_turn_sum(plan.turn_sum, plan.weights)
    reward = weighted(plan.weights, rollout) if is_scored else NAN
    if plan.weights and plan.weights.keys() <= set(rollout.not_applicable):
        names = ", ".join(map(repr, plan.weights))
        rollout.error = rollout.error or ScoringError(
            f"no weighted reward function applies to this rollout: {names} returned None or"
            " NOT_APPLICABLE",
            function=next(iter(plan.weights)),
        )
    if abs(reward) > LARGEST:
        rollout.error = rollout.error or ScoringError(
            f"the weighted sum of the metrics is beyond ±{LARGEST:g}"
        )
        reward = NAN
    _set_reward(rollout, reward)
    if plan.success is None or plan.success == SUCCESS:
        return
    solved = rollout.metrics.get(plan.success, NAN) if is_scored else NAN
    if solved in (0.0, 1.0) or math.isnan(solved):
        _record(rollout, SUCCESS, solved)
        return
    message = f"the success metric {plan.success!r} is {solved:g}; it must be 0 or 1"
    _record(rollout, SUCCESS, ScoringError(message, function=plan.success))


async def _set_advantages(function: RewardFunction | None, states: Sequence[State]) -> None:
    """Set ``advantage``, also on turns without an advantage; an ``@advantage`` method sees the
    rollouts with a known reward."""
    rollouts = [state.record for state in states]
    rewards = [NAN if rollout.reward is None else rollout.reward for rollout in rollouts]
    if function is None:
        advantages = centered_advantages(rewards)
    else:
        advantages = [NAN] * len(states)
        numbers = [number for number, reward in enumerate(rewards) if not math.isnan(reward)]
        if numbers:
            resolver = ArgumentResolver([states[number] for number in numbers])
            (values,) = await _values([function], resolver)
            errors = [value for value in values if isinstance(value, ScoringError)]
            for number, value in zip(numbers, values, strict=True):
                if errors:
                    rollouts[number].error = rollouts[number].error or errors[0]
                elif isinstance(value, float):
                    advantages[number] = value
    for rollout, advantage in zip(rollouts, advantages, strict=True):
        rollout.advantage = advantage
        for turn in rollout.transcript.turns:
            if turn.advantage is None:
                turn.advantage = advantage


def _set_reward(rollout: Rollout, reward: float) -> None:
    """Set the reward, which also turns show that the environment gave none."""
    rollout.reward = reward
    for turn in rollout.transcript.turns:
        turn.rollout_reward = reward


def _record(rollout: Rollout, name: str, value: Value) -> None:
    """Write the metric of a function; the first failure is the error of the rollout."""
    if isinstance(value, NotApplicable):
        rollout.metrics.pop(name, None)
        rollout.not_applicable = [*dict.fromkeys((*rollout.not_applicable, name))]
        return
    if isinstance(value, ScoringError):
        rollout.error = rollout.error or value
        value = NAN
    rollout.metrics[name] = value


# --- running the functions


def _batches(functions: Sequence[RewardFunction]) -> Iterator[list[RewardFunction]]:
    """The functions in order: synchronous functions share a call of a worker thread, a coroutine
    function is alone."""
    for is_async, batch in itertools.groupby(functions, lambda function: function.is_async):
        if is_async:
            yield from ([function] for function in batch)
        else:
            yield list(batch)


async def _run(batch: Sequence[RewardFunction], resolver: ArgumentResolver) -> None:
    for function, values in zip(batch, await _values(batch, resolver), strict=True):
        for state, value in zip(resolver.states, values, strict=True):
            _record(state.record, function.name, value)


async def _values(
    batch: Sequence[RewardFunction], resolver: ArgumentResolver
) -> list[Sequence[Value]]:
    """For each function its value of each rollout, or the failure. *Raises* RunError only."""
    outcomes = await _outcomes(batch, resolver)
    for index, outcome in enumerate(outcomes):
        function = batch[index]
        if isinstance(outcome, Raised) and replace_alarms(outcome.error, function.name):
            (outcome,) = await _outcomes([function], resolver)
        if isinstance(outcome, Raised):
            outcomes[index] = [
                scoring_error(outcome.error, function.name, state) for state in resolver.states
            ]
        elif function.is_group:
            outcomes[index] = _values_of_group(outcome, len(resolver.states), function)
        else:
            outcomes[index] = [value_or_error(outcome, function)]
    return outcomes


async def _outcomes(batch: Sequence[RewardFunction], resolver: ArgumentResolver) -> list[Any]:
    """What each function returned, or ``Raised``."""
    if batch[0].is_async:
        return [await _bounded(batch[0], resolver)]
    outcomes = await workers().run(batch, resolver)
    for index, outcome in enumerate(outcomes):
        if inspect.isawaitable(outcome):  # a synchronous function that returned a coroutine
            outcomes[index] = await _bounded(batch[index], resolver, outcome)
    return outcomes


async def _bounded(
    function: RewardFunction, resolver: ArgumentResolver, started: Awaitable[Any] | None = None
) -> Any:
    limit_s = function.time_limit_s
    try:
        async with asyncio.timeout(limit_s) as scope:
            return await (function(resolver) if started is None else started)
    except (asyncio.CancelledError, KeyboardInterrupt):
        raise
    except BaseException as error:  # noqa: BLE001  a failure of the author's function is recorded on the rollout
        expired = isinstance(error, TimeoutError) and scope.expired()
        return Raised(
            TimeoutError(f"{function.name!r} did not return within {limit_s:g} s")
            if expired
            else error
        )


async def _provide(
    functions: Sequence[RewardFunction], resolver: ArgumentResolver, subject: object
) -> None:
    """Give the resolver worker processes if a function is isolated, and the objects of the rubrics'
    providers."""
    if any(function.isolated for function in functions):
        resolver.processes = process_pool()
    attribute = (
        "group_score_object_providers" if functions[0].is_group else "score_object_providers"
    )
    for rubric in {id(function.rubric): function.rubric for function in functions}.values():
        objects: dict[str, Any] = {}
        for provider in getattr(rubric, attribute):
            try:
                objects.update(await call(provider, subject, limit_s=rubric.timeout_s))
            except Exception as error:  # noqa: BLE001  a failure of the author's provider is recorded on the rollout
                name = getattr(provider, "__name__", type(provider).__name__)
                resolver.provided[id(rubric)] = scoring_error(error, name)
                break
        else:
            resolver.provided[id(rubric)] = objects


async def call(
    function: Callable[..., Any], *args: object, limit_s: float | None = None, **kwargs: object
) -> Any:
    """Call an author's callable within ``limit_s``, a synchronous callable in a worker thread; its
    exceptions propagate."""
    if inspect.iscoroutinefunction(function):
        value = function(*args, **kwargs)
    else:
        value = await call_in_thread(function, *args, limit_s=limit_s, **kwargs)
    if inspect.isawaitable(value):
        async with asyncio.timeout(limit_s):
            return await value
    return value


async def each(coroutines: Iterable[Awaitable[object]]) -> None:
    """Run coroutines concurrently until all have ended, then raise the first exception."""
    for outcome in await asyncio.gather(*coroutines, return_exceptions=True):
        if isinstance(outcome, BaseException):
            raise outcome


# --- values


def value_or_error(value: object, function: RewardFunction) -> Value:
    """The value of a function as a float; the error unless it is a finite number, of at most
    ``LARGEST``, or says that the function does not apply."""
    if isinstance(value, NotApplicable) or (value is None and function.weight == 0):
        return NOT_APPLICABLE
    if isinstance(value, np.generic):
        value = value.item()
    elif isinstance(value, Decimal | Fraction):
        value = float(value)
    if not isinstance(value, (int, float)):
        problem = f"{_short_repr(value)}; return a number, or vf.NOT_APPLICABLE"
    else:
        if not math.isnan(usable := number(value)):
            return usable
        is_finite = isinstance(value, int) or math.isfinite(value)
        problem = f"a number beyond ±{LARGEST:g}" if is_finite else f"{value}, which is not finite"
    name = function.name
    return ScoringError(f"reward function {name!r} returned {problem}", function=name)


def _values_of_group(values: object, size: int, function: RewardFunction) -> Sequence[Value]:
    """The values of a group function; an error for all rollouts unless they are a list of group
    length."""
    name = function.name
    if isinstance(values, np.ndarray):
        values = list(values)
    if not isinstance(values, (list, tuple)):
        problem = f"returned {_short_repr(values)}; return a list of {size} numbers"
    elif len(values) != size:
        problem = f"returned {len(values)} values for a group of {size}"
    else:
        return [value_or_error(value, function) for value in values]
    return [ScoringError(f"group function {name!r} {problem}", function=name)] * size


def _short_repr(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"a {type(value).__name__} ({text[:57]}…)"


def scoring_error(error: BaseException, name: str, state: State | None = None) -> ScoringError:
    """The ``ScoringError`` for a failed function, with the failure as its cause; if ``state`` has no
    completion because its prompt is too long, it says so.

    *Raises* the error itself when it ends the run (``RunError``).
    """
    if isinstance(error, RunError):
        raise error
    if isinstance(error, ScoringError):
        error.facts.setdefault("function", name)
        return error
    if isinstance(error, TimeoutError):
        text = message_of(error) or "timed out"
    else:
        text = f"raised {type(error).__name__}: {message_of(error)}"
    message = f"reward function {name!r}: {text}"
    record = None if state is None else state.record
    if (
        record is not None
        and record.stop == StopReason.PROMPT_TOO_LONG.value
        and not record.transcript.turns
    ):
        message = (
            "the first prompt does not fit the context of the model, so there is no completion to"
            f" score; {message}"
        )
    failure = ScoringError(message, function=name, **_location(error))
    failure.__cause__ = error
    return failure


def _location(error: BaseException) -> dict[str, Any]:
    """File name and line in the author's function, if the traceback has them."""
    location: dict[str, Any] = {}
    path = None
    for frame, line in traceback.walk_tb(error.__traceback__):
        if path is None and not _is_ours(frame.f_code.co_filename):
            path = frame.f_code.co_filename
        if path == frame.f_code.co_filename:
            location = {"file": os.path.basename(path), "line": line}
    return location


def _is_ours(path: str) -> bool:
    """Whether a file belongs to this package or to the standard library, which call the author's
    function."""
    return path.startswith((_PACKAGE, "<frozen")) or (
        path.startswith(_STANDARD_LIBRARY) and "site-packages" not in path
    )


# --- results


class _Scores(AttributeDict):
    """``get("format")`` also finds the metric of the function ``format_reward_func``; so with any
    other name."""

    __slots__ = ()

    def get(self, name: str, default: object = None) -> Any:
        """The value of ``name``, or of the function ``<name>_reward_func``, or ``default``."""
        return super().get(name, super().get(f"{name}_reward_func", default))


class RolloutScore(_Scores):
    """``{"reward": float, "metrics": {name: float}, **metrics}``; NaN is unknown. A metric never
    hides ``reward``.

    >>> score = RolloutScore(1.0, {"correct": 1.0, "format_reward_func": 0.5})
    >>> score["reward"], score.get("correct", 0), score.get("format", 0), score.get("length", 0)
    (1.0, 1.0, 0.5, 0)
    """

    def __init__(self, reward: float, metrics: dict[str, float] | None = None):
        metrics = {} if metrics is None else metrics
        super().__init__({**metrics, "reward": reward, "metrics": metrics})

    @classmethod
    def of(cls, state: State) -> RolloutScore:
        """The score recorded in a scored state."""
        reward = state.record.reward
        return cls(NAN if reward is None else reward, dict(state.record.metrics))


class RolloutScores(_Scores):
    """``RolloutScore`` with one list item per rollout; missing metrics are NaN.

    >>> states = [vf.State(prompt="?", completion="no"), vf.State(prompt="?", completion="yes")]
    >>> rubric = vf.Rubric()
    >>> rubric.add_reward_func(lambda completion: float(completion == "yes"))
    >>> rubric.score_group_sync(states)["reward"]
    [0.0, 1.0]
    """

    def __init__(self, reward: list[float], metrics: dict[str, list[float]] | None = None):
        metrics = {} if metrics is None else metrics
        super().__init__({**metrics, "reward": reward, "metrics": metrics})

    @classmethod
    def of(cls, states: Sequence[State]) -> RolloutScores:
        """The scores recorded in scored states, in their order."""
        names = dict.fromkeys(name for state in states for name in state.record.metrics)
        metrics = {
            name: [state.record.metrics.get(name, NAN) for state in states] for name in names
        }
        return cls([RolloutScore.of(state)["reward"] for state in states], metrics)
