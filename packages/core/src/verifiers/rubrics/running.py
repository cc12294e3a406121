"""Run reward functions on the states of a rollout or of a group, each within its time limit.

Coroutines run in the event loop, synchronous functions in worker threads, isolated functions in
worker processes (``runtime``). A failure becomes the ``ScoringError`` of the function; only what
ends the run is raised.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import Any

from verifiers.rollouts.state import State
from verifiers.rubrics.arguments import ArgumentResolver, RewardFunction
from verifiers.rubrics.values import Value, scoring_error, value_or_error, values_of_group
from verifiers.runtime.alarms import replace_alarms
from verifiers.runtime.processes import process_pool
from verifiers.runtime.worker_threads import Raised, call_in_thread, workers


def batches(functions: Sequence[RewardFunction]) -> Iterator[list[RewardFunction]]:
    """The functions in order: synchronous functions share a call of a worker thread, a coroutine
    function is alone."""
    for is_async, batch in itertools.groupby(functions, lambda function: function.is_async):
        if is_async:
            yield from ([function] for function in batch)
        else:
            yield list(batch)


async def values_of(
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
            outcomes[index] = values_of_group(outcome, len(resolver.states), function)
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
    function: RewardFunction, resolver: ArgumentResolver, started: Awaitable[object] | None = None
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


async def resolver_for(
    functions: Sequence[RewardFunction], states: Sequence[State]
) -> ArgumentResolver:
    """The arguments of functions of one stage, with the objects that the providers of their rubrics
    give, and worker processes if a function is isolated."""
    resolver = ArgumentResolver(states)
    subject = states if functions[0].is_group else states[0]
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
    return resolver


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
