"""One scoring pass: run the functions of a plan over finished rollouts; write metrics, rewards and advantages.

The individual stage runs as soon as a rollout ends, the group stage when the last rollout of its group has ended. A
failed function gives an unknown value: its metric is NaN, the reward that needs it is NaN, and the ``ScoringError`` is
recorded in ``state["error"]`` unless that has an earlier error. Functions are not called for rollouts that ended in an
error that is not scorable; group functions receive only the other rollouts, so that siblings keep their rewards.

Configuration is in ``rubric``; worker threads and processes are in ``runtime``.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from verifiers.errors import ScoringError
from verifiers.rollouts.state import State
from verifiers.rubrics.advantages import centered_advantages
from verifiers.rubrics.functions import (
    SINGULAR,
    ArgumentResolver,
    GroupArgumentResolver,
    RewardFunction,
    finite_value,
    rollout_value,
    scoring_error,
    value_list,
)
from verifiers.runtime.sync_async import is_awaitable
from verifiers.runtime.threads import Raised, call_in_thread, workers

NAN = math.nan
SUCCESS = "success"
"""Metric that repeats the value of the function that a rubric names as its success: 1 or 0."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The functions of a rubric in order, with their effective weights (group weight times weight)."""

    individual: tuple[RewardFunction, ...]
    group: tuple[RewardFunction, ...]
    weights: Mapping[str, float]
    """Function name -> effective weight; functions of weight 0 are absent."""
    segments: tuple[tuple[RewardFunction, ...], ...]
    """The individual functions in batches that share a call of a worker thread; a coroutine function is alone."""
    rubrics: tuple[Any, ...]
    """The plain rubrics of the functions."""
    providers: tuple[Any, ...]
    """The rubrics with object providers for single rollouts."""
    group_providers: tuple[Any, ...]
    """The rubrics with object providers for groups."""
    parallel: bool
    advantage: RewardFunction | None
    success: str | None = None
    """Name of the function whose value is also the metric ``success``."""

    @classmethod
    def of(
        cls,
        functions: Sequence[RewardFunction],
        weights: Mapping[str, float],
        rubrics: Sequence[Any],
        parallel: bool,
        advantage: RewardFunction | None,
        success: str | None = None,
    ) -> Plan:
        individual = tuple(f for f in functions if not f.is_group)
        return cls(
            individual,
            tuple(f for f in functions if f.is_group),
            weights,
            tuple((f,) for f in individual) if parallel else _segments(individual),
            tuple(rubrics),
            tuple(r for r in rubrics if r.score_object_providers),
            tuple(r for r in rubrics if r.group_score_object_providers),
            parallel,
            advantage,
            success,
        )


def _segments(functions: Sequence[RewardFunction]) -> tuple[tuple[RewardFunction, ...], ...]:
    segments: list[list[RewardFunction]] = []
    for function in functions:
        if function.is_async or not segments or segments[-1][0].is_async:
            segments.append([])
        segments[-1].append(function)
    return tuple(tuple(segment) for segment in segments)


def can_be_scored(state: State) -> bool:
    """Whether the rollout can have a reward: it has no error, or a scorable one (caused by the model)."""
    error = state["error"]
    return error is None or isinstance(error, ScoringError) or getattr(error, "scorable", False)


async def individual_stage(plan: Plan, state: State) -> None:
    """Write the metrics of the individual functions; without group functions also the final reward."""
    started = perf_counter()
    if isinstance(state["error"], ScoringError):  # from an earlier scoring pass, whose result is replaced
        state["error"] = None
    if can_be_scored(state):
        await _run_individual(plan, state)
    else:
        state["metrics"].update((f.name, NAN) for f in plan.individual)
    if not plan.group:
        _conclude(plan, state)
    state["timing"]["scoring_ms"] += (perf_counter() - started) * 1000


async def group_stage(plan: Plan, states: Sequence[State]) -> None:
    """Run the group functions, then set the rewards that depend on them and the advantages."""
    started = perf_counter()
    alive = [state for state in states if can_be_scored(state)]
    if plan.group:
        await _run_group(plan, states, alive)
        for state in states:
            _conclude(plan, state)
    await _set_advantages(plan, states)
    spent = (perf_counter() - started) * 1000
    for state in states:
        state["timing"]["scoring_ms"] += spent


def _conclude(plan: Plan, state: State) -> None:
    """Set ``reward`` and, where the rubric names one, the metric ``success``, from the values of the functions."""
    set_reward(plan, state)
    if plan.success is None or plan.success == SUCCESS:
        return
    value = state["metrics"].get(plan.success, NAN) if can_be_scored(state) else NAN
    if value in (0.0, 1.0) or math.isnan(value):
        state["metrics"][SUCCESS] = value
    else:
        message = f"the success metric {plan.success!r} is {value:g}; it must be 0 or 1"
        _record(state, SUCCESS, ScoringError(message, function=plan.success))


def set_reward(plan: Plan, state: State) -> None:
    """Set ``reward`` = sum of weight * metric, also on turns without a reward.

    NaN when a metric is unknown, and when no function has a weight: what nothing measures is unknown, not 0.
    """
    metrics = state["metrics"]
    reward = sum((weight * metrics.get(name, NAN) for name, weight in plan.weights.items()), 0.0)
    state["reward"] = reward if plan.weights and can_be_scored(state) else NAN
    _fill_turns(state, "reward")


def leave_unscored(states: Sequence[State]) -> None:
    """Set rewards and advantages to NaN and metrics to empty, without scoring."""
    for state in states:
        state["reward"] = state["advantage"] = NAN
        state["metrics"] = {}
        _fill_turns(state, "reward")


# --- rubrics that override score_rollout or score_group


def overrides(owner: object, base: type, name: str) -> bool:
    """Whether the class of ``owner``, or the object itself, replaces a method of ``base``."""
    return getattr(type(owner), name) is not getattr(base, name) or name in vars(owner)


async def score_by_override(rubric: Any, state: State) -> None:
    """Call an overridden ``score_rollout`` with the parameters it declares; record its score in the state.

    It may take the state, or prompt, completion, answer and so on by name, as in older versions.
    """
    declared = inspect.signature(rubric.score_rollout).parameters
    if "prompt" in declared:
        takes_all = any(p.kind is p.VAR_KEYWORD for p in declared.values())
        values = {name: rollout_value(state, name) for name in SINGULAR if takes_all or name in declared}
        score = await rubric.score_rollout(**values)
    else:
        score = await rubric.score_rollout(state, **_semaphore(declared))
    if isinstance(score, Mapping) and (state["reward"] is None or "prompt" in declared):
        metrics = score.get("metrics")
        state["metrics"].update(metrics if isinstance(metrics, Mapping) else {})
        state["reward"] = score.get("reward", NAN)


async def score_group_by_override(rubric: Any, states: Sequence[State]) -> None:
    """Call an overridden ``score_group`` with the parameters it declares."""
    await rubric.score_group(list(states), **_semaphore(inspect.signature(rubric.score_group).parameters))


def _semaphore(declared: Mapping[str, Any]) -> dict[str, Any]:
    """A semaphore that never blocks, for overrides that declare one: the caller already holds the real one."""
    return {"score_sem": nullcontext()} if "score_sem" in declared else {}


# --- running the functions


async def _run_individual(plan: Plan, state: State) -> None:
    resolver = ArgumentResolver(state, plan.individual)
    errors = await _provide(plan.providers, "score_object_providers", resolver, state) if plan.providers else {}
    if plan.parallel:
        await each(_run_segment(segment, resolver, state, errors) for segment in plan.segments)
        return
    for segment in plan.segments:
        await _run_segment(segment, resolver, state, errors)


async def _run_segment(
    segment: Sequence[RewardFunction], resolver: ArgumentResolver, state: State, errors: Mapping[int, ScoringError]
) -> None:
    if errors:
        broken = [f for f in segment if id(f.rubric) in errors]
        segment = [f for f in segment if id(f.rubric) not in errors]
        for function in broken:
            _record(state, function.name, errors[id(function.rubric)])
    for function, outcome in zip(segment, await _outcomes(segment, resolver), strict=True):
        try:
            if isinstance(outcome, Raised):
                raise outcome.error
            state["metrics"][function.name] = finite_value(outcome, function.name)
        except ScoringError as error:
            _record(state, function.name, error)


async def _run_group(plan: Plan, states: Sequence[State], alive: Sequence[State]) -> None:
    for state in states:
        state["metrics"].update((f.name, NAN) for f in plan.group)
    if not alive:
        return
    resolver = GroupArgumentResolver(alive, plan.group)
    errors = await _provide(plan.group_providers, "group_score_object_providers", resolver, list(alive))
    for function in plan.group:
        (outcome,) = (
            (Raised(errors[id(function.rubric)]),)
            if id(function.rubric) in errors
            else await _outcomes((function,), resolver)
        )
        try:
            if isinstance(outcome, Raised):
                raise outcome.error
            values = value_list(outcome, len(alive), function.name)
        except ScoringError as error:
            values = [error] * len(alive)
        for state, value in zip(alive, values, strict=True):
            try:
                if isinstance(value, ScoringError):
                    raise value
                state["metrics"][function.name] = finite_value(value, function.name)
            except ScoringError as error:
                _record(state, function.name, error)


async def _set_advantages(plan: Plan, states: Sequence[State]) -> None:
    if len(states) == 1 and plan.advantage is None:  # a group of one has no siblings to compare with
        (state,) = states
        state["advantage"] = NAN if state["reward"] is None or math.isnan(state["reward"]) else 0.0
        _fill_turns(state, "advantage")
        return
    rewards = [NAN if state["reward"] is None else state["reward"] for state in states]
    known = [state for state, reward in zip(states, rewards, strict=True) if not math.isnan(reward)]
    if plan.advantage is None:
        advantages = dict(zip(map(id, states), centered_advantages(rewards), strict=True))
    else:
        advantages = await _custom_advantages(plan.advantage, known) if known else {}
    for state in states:
        state["advantage"] = advantages.get(id(state), NAN)
        _fill_turns(state, "advantage")


async def _custom_advantages(function: RewardFunction, known: Sequence[State]) -> dict[int, float]:
    """``id`` of the state -> advantage, from an ``@advantage`` method that sees the rollouts with a known reward."""
    (outcome,) = await _outcomes((function,), GroupArgumentResolver(known, (function,)))
    try:
        if isinstance(outcome, Raised):
            raise outcome.error
        values = value_list(outcome, len(known), function.name)
        return {id(s): finite_value(value, function.name) for s, value in zip(known, values, strict=True)}
    except ScoringError as error:
        for state in known:
            state["error"] = state["error"] or error
        return {}


async def _outcomes(segment: Sequence[RewardFunction], resolver: ArgumentResolver) -> list[Any]:
    """The value of each function, or ``Raised`` with a ScoringError. *Raises* RunError only."""
    if not segment:
        return []
    if segment[0].is_async:
        outcomes = [await _bounded(segment[0], resolver)]
    else:
        outcomes = await workers().run(segment, resolver)
    for index, outcome in enumerate(outcomes):
        if is_awaitable(outcome):  # a synchronous function that returned a coroutine
            outcome = await _bounded(segment[index], resolver, outcome)
        if isinstance(outcome, Raised):
            outcome = Raised(scoring_error(outcome.error, segment[index].name))
        outcomes[index] = outcome
    return outcomes


async def _bounded(function: RewardFunction, resolver: ArgumentResolver, started: Awaitable[Any] | None = None) -> Any:
    limit_s = function.time_limit_s
    try:
        async with asyncio.timeout(limit_s) as scope:
            return await (function(resolver) if started is None else started)
    except (asyncio.CancelledError, KeyboardInterrupt):
        raise
    except BaseException as error:  # noqa: BLE001  a failure of the author's function is recorded on the rollout
        expired = isinstance(error, TimeoutError) and scope.expired()
        return Raised(TimeoutError(f"{function.name!r} did not return within {limit_s:g} s") if expired else error)


async def _provide(
    rubrics: Sequence[Any], attribute: str, resolver: ArgumentResolver, subject: object
) -> dict[int, ScoringError]:
    """Call the object providers; return ``id`` of the rubric -> error for failed providers."""
    errors: dict[int, ScoringError] = {}
    for rubric in rubrics:
        objects: dict[str, Any] = {}
        for provider in getattr(rubric, attribute):
            name = getattr(provider, "__name__", type(provider).__name__)
            try:
                objects.update(await call(provider, subject, limit_s=rubric.timeout_s))
            except Exception as error:  # noqa: BLE001  a failure of the author's provider is recorded on the rollout
                errors[id(rubric)] = scoring_error(error, name)
        resolver.provided[id(rubric)] = objects
    return errors


async def call(function: Callable[..., Any], *args: object, limit_s: float | None = None, **kwargs: object) -> Any:
    """Call an author's callable within ``limit_s``, a synchronous one in a worker thread; its exceptions propagate."""
    if inspect.iscoroutinefunction(function):
        value = function(*args, **kwargs)
    else:
        value = await call_in_thread(function, *args, limit_s=limit_s, **kwargs)
    if is_awaitable(value):
        async with asyncio.timeout(limit_s):
            return await value
    return value


async def each(coroutines: Any) -> None:
    """Run coroutines concurrently until all have ended, then raise the first exception."""
    for outcome in await asyncio.gather(*coroutines, return_exceptions=True):
        if isinstance(outcome, BaseException):
            raise outcome


def _record(state: State, name: str, error: ScoringError) -> None:
    state["metrics"][name] = NAN
    if state["error"] is None:
        state["error"] = error


def _fill_turns(state: State, key: str) -> None:
    """Copy the rollout's value to the turns without one."""
    value = state[key]
    if key == "reward" and state.turn_rewards is None:
        state.turn_rewards = [step.get("reward") for step in state["trajectory"]]
    for step in state["trajectory"]:
        if step.get(key) is None:
            step[key] = value
