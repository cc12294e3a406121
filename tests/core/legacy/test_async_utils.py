"""Older ``verifiers.utils.async_utils``: calls, limits, repeats, the lag of a loop; finished and
started coroutines."""

import asyncio
import time

import pytest

import verifiers as vf
from verifiers.legacy.awaited import Done, started
from verifiers.testing import ScriptedClient
from verifiers.utils import async_utils


async def test_calls_take_the_arguments_that_they_declare():
    async def later(a, b=1):
        return a + b

    assert await async_utils.maybe_await(later, 2, b=3) == 5
    assert await async_utils.maybe_await(7) == 7
    assert await async_utils.maybe_call_with_named_args(later, a=1, b=2, c=3) == 3


async def test_repeats_stop_at_the_limit_and_see_errors_in_states():
    calls = []

    async def fails(error):
        calls.append(error)
        raise error

    with pytest.raises(vf.InfraError):
        await async_utils.maybe_retry(fails, max_retries=2, initial=0.0)(vf.InfraError("x"))
    assert len(calls) == 3
    with pytest.raises(KeyError):
        await async_utils.maybe_retry(fails, max_retries=2, initial=0.0)(KeyError("x"))
    assert len(calls) == 4

    async def state(results):
        return results.pop(0)

    results = [{"error": vf.InfraError("x")}, {"error": None}]
    assert await async_utils.maybe_retry(state, max_retries=1, initial=0.0)(results) == {
        "error": None
    }


async def test_a_blocked_loop_is_measured():
    async with async_utils.EventLoopLagMonitor(measure_interval=0.01) as monitor:
        await asyncio.sleep(0.02)
        time.sleep(0.1)  # noqa: ASYNC251 - it blocks the loop
        await asyncio.sleep(0.03)
    assert monitor.get_stats().max >= 0.05
    monitor.reset()
    assert monitor.get_stats().n == 0


async def test_a_coroutine_that_waits_is_continued_and_can_be_cancelled():
    async def waits(seconds):
        await asyncio.sleep(seconds)
        return "slept"

    async def at_once():
        return "now"

    assert started(at_once()) == Done("now")
    assert await started(waits(0.01)) == "slept"
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.02):
            await started(waits(60))


def test_results_of_a_blocking_call_are_finished_coroutines():
    env = vf.SingleTurnEnv(dataset=[{"question": "q"}])
    results = env.evaluate(ScriptedClient("x"), "m")
    assert asyncio.run(results) is results
    state = env.rollout(env.get_dataset()[0], ScriptedClient("x"), "m")

    async def both():
        return await asyncio.gather(asyncio.ensure_future(state), asyncio.create_task(state))

    assert asyncio.run(both()) == [state, state]
    assert not env.has_error(state)
