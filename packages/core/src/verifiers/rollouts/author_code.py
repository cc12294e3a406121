"""Calling author code: what it raises becomes one rollout's ``EnvironmentFault``, and its time and name are noted.

Promise: nothing that a hook raises leaves a ``Hook`` block but errors of our own tree, a ``KeyboardInterrupt``, and a
cancellation that somebody asked for. ``SystemExit``, ``RecursionError``, ``MemoryError``, the author's own
``TimeoutError`` and a ``CancelledError`` that leaks out of an author's task are the rollout's failure like any other.

This module decides which hook runs when (``rollout``) as little as what its result means.
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
from verifiers.runtime.sync_async import maybe_await

NEVER_FAULTS = (KeyboardInterrupt, GeneratorExit)
"""What stops the process or its event loop; never recorded as anybody's failure."""
EXTRA_PARAMETERS = ("task", "env")
"""What a marked method may declare by name beside ``state``."""


class Hook:
    """``with Hook(state, "env_response"): …`` runs author code.

    ``timing`` is the key of the state's timing that the spent milliseconds are added to. ``stops_run``: a
    ``UsageError`` (a setting that cannot work) ends the run instead of this rollout.
    """

    __slots__ = ("awaited", "before", "name", "started", "state", "stops_run", "timing")

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
        self.before, state.waiting_for = state.waiting_for, self.awaited
        self.started = perf_counter()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if self.timing is not None:
            timing = self.state["timing"]
            timing[self.timing] = timing.get(self.timing, 0.0) + 1000 * (perf_counter() - self.started)
        if error is None:
            self.state.waiting_for = self.before
        elif not passes(error, self.stops_run):
            self.state.waiting_for = self.before
            raise fault(self.name, error) from error
        elif not isinstance(error, asyncio.CancelledError):  # there the name stays, for the time-out to tell
            self.state.waiting_for = self.before


def passes(error: BaseException, stops_run: bool = False) -> bool:
    """Whether an exception of author code is raised as it is, and not as an ``EnvironmentFault``."""
    if isinstance(error, asyncio.CancelledError):
        return is_cancelled()
    return isinstance(error, (RolloutError, RunError, *NEVER_FAULTS)) or (stops_run and isinstance(error, UsageError))


def ends_the_run(error: BaseException) -> bool:
    """Whether an exception concerns more than one rollout and must not be recorded as one's failure."""
    if isinstance(error, asyncio.CancelledError):
        return is_cancelled()
    return isinstance(error, (RunError, UsageError, *NEVER_FAULTS))


def is_cancelled() -> bool:
    """Whether somebody asked the current task to stop; a stray ``CancelledError`` of an inner task is no such thing."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def fault(name: str, error: BaseException) -> EnvironmentFault:
    """The failure of the hook ``name``, chained to what it raised."""
    try:
        said = str(error) or "no message"
    except Exception as unsayable:  # noqa: BLE001 - an author's __str__; its class is said instead
        said = f"its message cannot be shown: {type(unsayable).__name__}"
    made = EnvironmentFault(f"{name} raised {type(error).__name__}: {said}", hook=name)
    made.__cause__ = error
    return made


async def call_handler(env: Any, handler: Callable[..., Any], state: State) -> Any:
    """Call a marked method with ``state`` and what else it declares by name; sync or async."""
    extras = extra_parameters(getattr(handler, "__func__", handler))
    return await maybe_await(handler(state, **named(env, state, extras)) if extras else handler(state))


@functools.lru_cache(maxsize=1024)
def extra_parameters(function: Callable[..., Any]) -> tuple[str, ...]:
    """Which of ``EXTRA_PARAMETERS`` a function declares."""
    declared = inspect.signature(function).parameters
    return tuple(name for name in EXTRA_PARAMETERS if name in declared)


def named(env: Any, state: State, names: tuple[str, ...]) -> dict[str, Any]:
    """Values of ``EXTRA_PARAMETERS``."""
    return {name: env if name == "env" else state[name] for name in names}
