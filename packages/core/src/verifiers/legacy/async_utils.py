"""Older ``verifiers.utils.async_utils``: calls that may be coroutines, limits, repeats, and the lag
of a loop."""

from __future__ import annotations

import asyncio
import inspect
import logging
import random
import statistics
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

from verifiers.errors import InfraError, MalformedResponse
from verifiers.rollouts import author_code

T = TypeVar("T")
NullContext = nullcontext
NullAsyncContext = nullcontext
REPEATED: tuple[type[Exception], ...] = (InfraError, MalformedResponse)
"""What ``maybe_retry`` repeats unless told otherwise."""


async def maybe_await(function: object, *args: object, **kwargs: object) -> Any:
    """Call ``function`` and await what it returns where needed; a value that is no function is
    awaited where needed.

    >>> asyncio.run(maybe_await(max, 2, 3)), asyncio.run(maybe_await("plain"))
    (3, 'plain')
    """
    if not callable(function):
        if args or kwargs:
            raise TypeError(f"{type(function).__name__} is no function to call with arguments")
        return await author_code.maybe_await(function)
    return await author_code.maybe_await(function(*args, **kwargs))


async def maybe_call_with_named_args(function: Callable[..., object], **kwargs: object) -> object:
    """Call ``function`` with those of ``kwargs`` that it declares, all of them for ``**kwargs``;
    await where needed."""
    parameters = inspect.signature(function).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    accepted = {name: value for name, value in kwargs.items() if takes_all or name in parameters}
    return await maybe_await(function, **accepted)


async def maybe_semaphore(limit: int | None = None) -> AbstractAsyncContextManager[object]:
    """A semaphore of ``limit`` slots, or a context that never blocks for None and numbers below
    1."""
    return asyncio.Semaphore(limit) if limit is not None and limit > 0 else nullcontext()


async def with_sem(semaphore: AbstractAsyncContextManager[object], work: Awaitable[T]) -> T:
    """Await ``work`` within ``semaphore``. A coroutine that never gets its turn is closed."""
    try:
        async with semaphore:
            return await work
    finally:
        if isinstance(work, Coroutine):
            work.close()


def maybe_retry(
    function: Callable[..., Awaitable[T]],
    max_retries: int = 0,
    initial: float = 1.0,
    max_wait: float = 60.0,
    error_types: tuple[type[BaseException], ...] = REPEATED,
) -> Callable[..., Awaitable[T]]:
    """``function``, called again up to ``max_retries`` times when it raises or *returns a state
    with* such an error.

    Pauses are random below ``initial`` seconds, doubled with every repeat, at most ``max_wait``.
    The last error is raised; a last state is returned as it is.
    """
    if max_retries <= 0:
        return function

    async def repeated(*args: object, **kwargs: object) -> T:
        for attempt in range(max_retries + 1):
            is_last = attempt == max_retries
            try:
                result = await function(*args, **kwargs)
            except error_types:
                if is_last:
                    raise
            else:
                if is_last or not _failed(result, error_types):
                    return result
            await asyncio.sleep(random.uniform(0.0, min(max_wait, initial * 2.0**attempt)))
        raise AssertionError("the last attempt returns or raises")

    return repeated


def _failed(result: object, error_types: tuple[type[BaseException], ...]) -> bool:
    states = result if isinstance(result, list) else [result]
    return any(isinstance(s.get("error"), error_types) for s in states if hasattr(s, "get"))


@dataclass(frozen=True, slots=True)
class EventLoopLagStats:
    """How late a loop ran, in seconds, over ``n`` measurements."""

    min: float = 0.0
    mean: float = 0.0
    median: float = 0.0
    p90: float = 0.0
    p99: float = 0.0
    max: float = 0.0
    n: int = 0

    @classmethod
    def from_lags(cls, lags: list[float]) -> EventLoopLagStats:
        """The statistics of measured lags; zeros without any."""
        if not lags:
            return cls()
        ordered = sorted(lags)

        def quantile(share: float) -> float:
            return ordered[min(len(ordered) - 1, int(share * len(ordered)))]

        middle = statistics.median(ordered)
        return cls(
            ordered[0],
            statistics.fmean(ordered),
            middle,
            quantile(0.9),
            quantile(0.99),
            ordered[-1],
            len(ordered),
        )


class EventLoopLagMonitor:
    """Measures how late the event loop runs: ``async with EventLoopLagMonitor() as monitor: …;
    monitor.get_lags()``.

    ``measure_interval`` is the pause between measurements in seconds; the last ``max_measurements``
    are kept.
    """

    def __init__(
        self,
        measure_interval: float = 0.1,
        max_measurements: int = 10_000,
        logger: logging.Logger | None = None,
    ):
        self.measure_interval, self.max_measurements = measure_interval, max_measurements
        self.logger = logger or logging.getLogger(__name__)
        self._lags: list[float] = []
        self._task: asyncio.Task[None] | None = None

    async def measure_lag(self) -> float:
        """Sleep one interval; how much longer it took, in seconds."""
        started = time.perf_counter()
        await asyncio.sleep(self.measure_interval)
        return max(0.0, time.perf_counter() - started - self.measure_interval)

    def get_lags(self) -> list[float]:
        """The measured lags."""
        return list(self._lags)

    def get_stats(self) -> EventLoopLagStats:
        """Statistics of the measured lags."""
        return EventLoopLagStats.from_lags(self._lags)

    def reset(self) -> None:
        """Forget the measurements."""
        self._lags.clear()

    async def run(self) -> None:
        """Measure until cancelled."""
        while True:
            self._lags.append(await self.measure_lag())
            del self._lags[: -self.max_measurements]

    def run_in_background(self) -> asyncio.Task[None]:
        """Start ``run`` as a task of the running loop."""
        self._task = asyncio.ensure_future(self.run())
        return self._task

    async def __aenter__(self) -> EventLoopLagMonitor:
        self.run_in_background()
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
