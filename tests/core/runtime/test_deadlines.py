"""A deadline stops its block as ``asyncio.timeout`` does; long ones share a timer and may ring a
tick late."""

import asyncio
import time

import pytest

from verifiers.runtime import deadlines
from verifiers.runtime.deadlines import COARSE_FROM_S, TICK_S, Deadline


@pytest.fixture(params=["own timer", "shared timer"])
def limit_s(request, monkeypatch):
    """A short limit, watched in either way."""
    if request.param == "shared timer":
        monkeypatch.setattr(deadlines, "COARSE_FROM_S", 0.0)
        monkeypatch.setattr(deadlines, "TICK_S", 0.01)
    return 0.05


async def test_it_stops_the_block_and_never_early(limit_s):
    started = time.monotonic()
    with pytest.raises(TimeoutError), Deadline(limit_s) as deadline:
        await asyncio.sleep(30)
    assert deadline.expired
    assert 0.045 <= time.monotonic() - started < 5
    assert asyncio.current_task().cancelling() == 0  # the task may go on


async def test_a_block_that_ends_in_time_is_left_alone(limit_s):
    with Deadline(limit_s) as deadline:
        await asyncio.sleep(0)
    await asyncio.sleep(3 * limit_s)
    assert not deadline.expired


async def test_without_a_limit_nothing_is_stopped():
    with Deadline(None) as deadline:
        await asyncio.sleep(0.01)
    assert not deadline.expired


async def test_a_cancellation_by_somebody_else_stays_one(limit_s):
    async def work():
        with Deadline(60.0):
            await asyncio.sleep(30)

    task = asyncio.create_task(work())
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_both_at_once_is_a_cancellation(limit_s):
    """The limit passed, and somebody else cancelled too: the caller must not go on as after a
    time-out."""

    async def work():
        with Deadline(limit_s):
            try:
                await asyncio.sleep(30)
            except asyncio.CancelledError:
                asyncio.current_task().cancel()
                raise

    with pytest.raises(asyncio.CancelledError):
        await asyncio.create_task(work())


async def test_an_error_of_the_block_is_raised_as_it_is_and_the_limit_is_told(limit_s):
    async def stubborn():
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            raise ValueError("stubborn") from None

    with pytest.raises(ValueError, match="stubborn"), Deadline(limit_s) as deadline:
        await stubborn()
    assert deadline.expired
    assert asyncio.current_task().cancelling() == 0


async def test_the_inner_of_two_stops_first():
    with Deadline(60.0) as outer:
        with pytest.raises(TimeoutError), Deadline(0.02):
            await asyncio.sleep(30)
    assert not outer.expired


async def test_thousands_of_long_limits_cost_one_timer_and_leave_nothing_behind():
    loop = asyncio.get_running_loop()
    timers = []
    set_timer = loop.call_later
    loop.call_later = lambda *args, **kwargs: timers.append(args) or set_timer(*args, **kwargs)

    async def work():
        with Deadline(COARSE_FROM_S):
            await gate.wait()

    gate = asyncio.Event()
    tasks = [asyncio.create_task(work()) for _ in range(2000)]
    await asyncio.sleep(0.01)
    assert len(deadlines._TICKERS[loop].waiting) == 2000
    gate.set()
    await asyncio.gather(*tasks)
    # the ticker's, which a slow machine sets again, and a sleep's where the loop takes it from here
    assert len({callback for _, callback, *_ in timers}) <= 2
    assert not deadlines._TICKERS[loop].waiting
    await asyncio.sleep(TICK_S + 0.1)
    assert not deadlines._TICKERS[loop]._is_ticking


async def test_timers_of_their_own_are_as_many_as_the_limits():
    """Negative control: what the shared timer saves."""
    loop = asyncio.get_running_loop()
    timers = []
    set_timer = loop.call_later
    loop.call_later = lambda *args, **kwargs: timers.append(args) or set_timer(*args, **kwargs)

    async def work():
        with Deadline(COARSE_FROM_S - 0.1):
            await asyncio.sleep(0)

    await asyncio.gather(*(work() for _ in range(50)))
    assert len(timers) >= 50


def test_a_closed_loop_is_forgotten():
    async def use():
        with Deadline(60.0):
            await asyncio.sleep(0)
        return asyncio.get_running_loop()

    first = asyncio.run(use())
    second = asyncio.run(use())
    assert first not in deadlines._TICKERS
    assert second in deadlines._TICKERS
