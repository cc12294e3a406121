"""One scoring pass: run the functions of a plan over finished rollouts and write metrics, rewards and advantages.

The individual stage runs as soon as a rollout ends, the group stage when its last sibling has ended. A failure of a
function is a value: its metric is NaN, the reward that needs it is unknown, the ``ScoringError`` stands in
``state["error"]`` unless an earlier error does. A rollout that ended in an error which is not scorable is not run
through any function, and group functions see only the others, so that one rollout's failure costs no sibling.

This module holds no configuration (``rubric``) and moves no work between threads (``workers``).
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from verifiers.errors import ScoringError
from verifiers.results.statistics import centered_advantages
from verifiers.rollouts.state import State
from verifiers.rubrics.arguments import GroupSupply, Supply
from verifiers.rubrics.functions import RewardFunction, finite_value, scoring_error, value_list
from verifiers.runtime.sync_async import is_awaitable
from verifiers.runtime.threads import Raised, call_in_thread, workers

NAN = math.nan


@dataclass(frozen=True, slots=True)
class Plan:
    """The functions of a rubric in order, and what each weighs in the reward (group weight times weight)."""

    individual: tuple[RewardFunction, ...]
    group: tuple[RewardFunction, ...]
    weights: Mapping[str, float]
    """By function name; functions that do not count in the reward are absent."""
    segments: tuple[tuple[RewardFunction, ...], ...]
    """The individual functions cut into runs that share one hop to a worker; a coroutine function stands alone."""
    rubrics: tuple[Any, ...]
    """The plain rubrics the functions belong to."""
    providers: tuple[Any, ...]
    """Those with individual object providers."""
    group_providers: tuple[Any, ...]
    parallel: bool
    advantage: RewardFunction | None

    @classmethod
    def of(
        cls,
        functions: Sequence[RewardFunction],
        weights: Mapping[str, float],
        rubrics: Sequence[Any],
        parallel: bool,
        advantage: RewardFunction | None,
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
        )


def _segments(functions: Sequence[RewardFunction]) -> tuple[tuple[RewardFunction, ...], ...]:
    segments: list[list[RewardFunction]] = []
    for function in functions:
        if function.is_async or not segments or segments[-1][0].is_async:
            segments.append([])
        segments[-1].append(function)
    return tuple(tuple(segment) for segment in segments)


def can_be_scored(state: State) -> bool:
    """Whether the rollout ended in a way that can be worth something: no error, or the model's own doing."""
    error = state["error"]
    return error is None or isinstance(error, ScoringError) or getattr(error, "scorable", False)


async def individual_stage(plan: Plan, state: State) -> None:
    """Write the metrics of the individual functions; with no group functions also the final reward."""
    started = perf_counter()
    if isinstance(state["error"], ScoringError):  # scored before: this pass judges anew
        state["error"] = None
    if can_be_scored(state):
        await _run_individual(plan, state)
    else:
        state["metrics"].update((f.name, NAN) for f in plan.individual)
    if not plan.group:
        settle_reward(plan.weights, state)
    state["timing"]["scoring_ms"] += (perf_counter() - started) * 1000


async def group_stage(plan: Plan, states: Sequence[State]) -> None:
    """Run the group functions, settle the rewards they take part in, then the advantages, once."""
    started = perf_counter()
    alive = [state for state in states if can_be_scored(state)]
    if plan.group:
        await _run_group(plan, states, alive)
        for state in states:
            settle_reward(plan.weights, state)
    await _set_advantages(plan, states)
    spent = (perf_counter() - started) * 1000
    for state in states:
        state["timing"]["scoring_ms"] += spent


def settle_reward(weights: Mapping[str, float], state: State) -> None:
    """``reward`` = sum of weight * metric; NaN when one is unknown or the rollout cannot be scored. Fills steps."""
    metrics = state["metrics"]
    reward = sum((weight * metrics.get(name, NAN) for name, weight in weights.items()), 0.0)
    state["reward"] = reward if can_be_scored(state) else NAN
    _fill_steps(state, "reward")


def leave_unscored(states: Sequence[State]) -> None:
    """Rewards unknown, metrics empty, advantages unknown: scoring is off."""
    for state in states:
        state["reward"] = state["advantage"] = NAN
        state["metrics"] = {}
        _fill_steps(state, "reward")


async def _run_individual(plan: Plan, state: State) -> None:
    supply = Supply(state, workers().processes)
    failed = await _provide(plan.providers, "score_object_providers", supply, state) if plan.providers else {}
    if plan.parallel:
        await each(_run_segment(segment, supply, state, failed) for segment in plan.segments)
        return
    for segment in plan.segments:
        await _run_segment(segment, supply, state, failed)


async def _run_segment(
    segment: Sequence[RewardFunction], supply: Supply, state: State, failed: Mapping[int, ScoringError]
) -> None:
    if failed:
        broken = [f for f in segment if id(f.rubric) in failed]
        segment = [f for f in segment if id(f.rubric) not in failed]
        for function in broken:
            _record(state, function.name, failed[id(function.rubric)])
    for function, outcome in zip(segment, await _outcomes(segment, supply), strict=True):
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
    supply = GroupSupply(alive, workers().processes)
    failed = await _provide(plan.group_providers, "group_score_object_providers", supply, list(alive))
    for function in plan.group:
        (outcome,) = (
            (Raised(failed[id(function.rubric)]),)
            if id(function.rubric) in failed
            else await _outcomes((function,), supply)
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
    if len(states) == 1 and plan.advantage is None:  # nobody to compare with
        (state,) = states
        state["advantage"] = NAN if state["reward"] is None or math.isnan(state["reward"]) else 0.0
        _fill_steps(state, "advantage")
        return
    rewards = [NAN if state["reward"] is None else state["reward"] for state in states]
    known = [state for state, reward in zip(states, rewards, strict=True) if not math.isnan(reward)]
    if plan.advantage is None:
        advantages = dict(zip(map(id, states), centered_advantages(rewards), strict=True))
    else:
        advantages = await _own_advantages(plan.advantage, known) if known else {}
    for state in states:
        state["advantage"] = advantages.get(id(state), NAN)
        _fill_steps(state, "advantage")


async def _own_advantages(function: RewardFunction, known: Sequence[State]) -> dict[int, float]:
    """Advantages by ``id`` of the state from an ``@advantage`` method, which sees the members with a known reward."""
    (outcome,) = await _outcomes((function,), GroupSupply(known, workers().processes))
    try:
        if isinstance(outcome, Raised):
            raise outcome.error
        values = value_list(outcome, len(known), function.name)
        return {id(s): finite_value(value, function.name) for s, value in zip(known, values, strict=True)}
    except ScoringError as error:
        for state in known:
            state["error"] = state["error"] or error
        return {}


async def _outcomes(segment: Sequence[RewardFunction], supply: Supply) -> list[Any]:
    """Per function its value, or ``Raised`` with a ScoringError. *Raises* RunError only."""
    if not segment:
        return []
    if segment[0].is_async:
        outcomes = [await _bounded(segment[0], supply)]
    else:
        outcomes = await workers().run(segment, supply)
    for index, outcome in enumerate(outcomes):
        if is_awaitable(outcome):  # a plain function that returned a coroutine
            outcome = await _bounded(segment[index], supply, outcome)
        if isinstance(outcome, Raised):
            outcome = Raised(scoring_error(outcome.error, segment[index].name))
        outcomes[index] = outcome
    return outcomes


async def _bounded(function: RewardFunction, supply: Supply, begun: Awaitable[Any] | None = None) -> Any:
    limit_s = function.time_limit_s
    try:
        async with asyncio.timeout(limit_s) as scope:
            return await (function(supply) if begun is None else begun)
    except (asyncio.CancelledError, KeyboardInterrupt):
        raise
    except BaseException as error:  # noqa: BLE001  the outcome of the author's function, recorded on its rollout
        expired = isinstance(error, TimeoutError) and scope.expired()
        return Raised(TimeoutError(f"{function.name!r} did not return within {limit_s:g} s") if expired else error)


async def _provide(rubrics: Sequence[Any], attribute: str, supply: Supply, subject: Any) -> dict[int, ScoringError]:
    """Call the object providers; the failures by ``id`` of the rubric whose provider failed."""
    failed: dict[int, ScoringError] = {}
    for rubric in rubrics:
        objects: dict[str, Any] = {}
        for provider in getattr(rubric, attribute):
            name = getattr(provider, "__name__", type(provider).__name__)
            try:
                objects.update(await call(provider, subject, limit_s=rubric.timeout_s))
            except Exception as error:  # noqa: BLE001  the author's provider: recorded on the rollout as unknown values
                failed[id(rubric)] = scoring_error(error, name)
        supply.provided[id(rubric)] = objects
    return failed


async def call(function: Callable[..., Any], *args: Any, limit_s: float | None = None, **kwargs: Any) -> Any:
    """Call an author's callable, sync in a worker thread or async here, within ``limit_s``; exceptions propagate."""
    if inspect.iscoroutinefunction(function):
        value = function(*args, **kwargs)
    else:
        value = await call_in_thread(function, *args, limit_s=limit_s, **kwargs)
    if is_awaitable(value):
        async with asyncio.timeout(limit_s):
            return await value
    return value


async def each(coroutines: Any) -> None:
    """Run coroutines side by side to their end, then raise the first exception any of them raised."""
    for outcome in await asyncio.gather(*coroutines, return_exceptions=True):
        if isinstance(outcome, BaseException):
            raise outcome


def _record(state: State, name: str, error: ScoringError) -> None:
    state["metrics"][name] = NAN
    if state["error"] is None:
        state["error"] = error


def _fill_steps(state: State, key: str) -> None:
    value = state[key]
    if key == "reward" and state.turn_rewards is None:
        state.turn_rewards = [step.get("reward") for step in state["trajectory"]]
    for step in state["trajectory"]:
        if step.get(key) is None:
            step[key] = value
