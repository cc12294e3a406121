"""Call author code: its exceptions become the rollout's ``EnvironmentFault``; its time and name are recorded.

Guarantee: only errors of the library's own tree, ``KeyboardInterrupt`` and a requested cancellation leave a ``Hook``
block unchanged. ``SystemExit``, ``RecursionError``, ``MemoryError``, a ``TimeoutError`` of the author's code and a
``CancelledError`` that leaks out of a task of the author fail the rollout like any other exception.

``loop`` decides which hook runs when, and uses its result.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable
from time import perf_counter
from typing import Any

from verifiers.errors import EnvironmentFault, RolloutError, RunError, UsageError
from verifiers.rollouts.state import State
from verifiers.runtime.loops import maybe_await

NEVER_FAULTS = (KeyboardInterrupt, GeneratorExit)
"""Exceptions that stop the process or its event loop; never recorded as a failure of a rollout."""
EXTRA_PARAMETERS = ("task", "env")
"""Parameters that a marked method may declare beside ``state``."""


class Hook:
    """``with Hook(state, "env_response"): …`` runs author code.

    ``timing``: key of ``state["timing"]`` to which the elapsed milliseconds are added. ``stops_run``: a ``UsageError``
    (an invalid setting) ends the run instead of this rollout.
    """

    __slots__ = ("awaited", "name", "outer_wait", "started", "state", "stops_run", "timing")

    def __init__(
        self,
        state: State,
        name: str,
        timing: str | None = "env_ms",
        awaited: str | None = None,
        stops_run: bool = False,
    ):
        self.state, self.name, self.timing, self.stops_run = state, name, timing, stops_run
        self.awaited = awaited or name

    def __enter__(self) -> None:
        state = self.state
        self.outer_wait, state.waiting_for = state.waiting_for, self.awaited
        self.started = perf_counter()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if self.timing is not None:
            timing = self.state["timing"]
            timing[self.timing] = timing.get(self.timing, 0.0) + 1000 * (perf_counter() - self.started)
        if error is None:
            self.state.waiting_for = self.outer_wait
        elif not passes(error, self.stops_run):
            self.state.waiting_for = self.outer_wait
            raise fault(self.name, error) from error
        elif not isinstance(error, asyncio.CancelledError):  # keep the name, for the message of the time-out
            self.state.waiting_for = self.outer_wait


def passes(error: BaseException, stops_run: bool = False) -> bool:
    """Whether an exception of author code is raised unchanged, not as an ``EnvironmentFault``."""
    if isinstance(error, asyncio.CancelledError):
        return is_cancelled()
    return isinstance(error, (RolloutError, RunError, *NEVER_FAULTS)) or (stops_run and isinstance(error, UsageError))


def ends_the_run(error: BaseException) -> bool:
    """Whether an exception concerns the whole run and must not be recorded as the failure of one rollout."""
    if isinstance(error, asyncio.CancelledError):
        return is_cancelled()
    return isinstance(error, (RunError, UsageError, *NEVER_FAULTS))


def is_cancelled() -> bool:
    """Whether cancellation of the current task was requested; a ``CancelledError`` of an inner task does not count."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def fault(name: str, error: BaseException) -> EnvironmentFault:
    """The failure of the hook ``name``, chained to the exception that it raised."""
    try:
        message = str(error) or "no message"
    except Exception as failure:  # noqa: BLE001 - an author's __str__ may raise anything
        message = f"its message cannot be shown: {type(failure).__name__}"
    environment_fault = EnvironmentFault(f"{name} raised {type(error).__name__}: {message}", hook=name)
    environment_fault.__cause__ = error
    return environment_fault


async def call_handler(env: object, handler: Callable[..., Any], state: State) -> Any:
    """Call a sync or async marked method with ``state`` and the ``EXTRA_PARAMETERS`` that it declares."""
    extras = extra_parameters(getattr(handler, "__func__", handler))
    return await maybe_await(handler(state, **extra_arguments(env, state, extras)) if extras else handler(state))


@functools.lru_cache(maxsize=1024)
def extra_parameters(function: Callable[..., Any]) -> tuple[str, ...]:
    """Which of ``EXTRA_PARAMETERS`` a function declares."""
    parameters = inspect.signature(function).parameters
    return tuple(name for name in EXTRA_PARAMETERS if name in parameters)


def extra_arguments(env: object, state: State, names: tuple[str, ...]) -> dict[str, Any]:
    """The values of the ``EXTRA_PARAMETERS`` in ``names``."""
    return {name: env if name == "env" else state[name] for name in names}
