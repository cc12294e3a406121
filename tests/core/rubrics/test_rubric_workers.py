"""Synchronous reward functions: off the loop, bounded, and cheap to hand over."""

import asyncio
import math
import threading
import time

import pytest

from support.threads import no_new_thread
from verifiers.errors import ScoringError, TooManyFaults
from verifiers.rollouts.state import State
from verifiers.rubrics import Rubric
from verifiers.runtime.worker_threads import MAX_STUCK, call_in_thread, workers


def state_of(**more):
    return State(
        prompt="2+2", completion=[{"role": "assistant", "content": "4"}], answer="4", **more
    )


async def score_all(rubric, count):
    states = [state_of() for _ in range(count)]
    await asyncio.gather(*(rubric.score_individual(state) for state in states))
    return states


async def test_functions_that_wait_get_more_threads():
    both = threading.Barrier(2)

    def waits(completion):
        # for another one: with one thread nobody ever comes, and the score is an error
        both.wait(60)
        return 1.0

    states = await score_all(Rubric([waits]), 40)
    assert [state["reward"] for state in states] == [1.0] * 40


async def test_trivial_functions_are_served_by_one_thread():
    names = set()

    def trivial(completion):
        names.add(threading.current_thread().ident)
        return 1.0

    rubric = Rubric([trivial])
    for _ in range(20):
        await score_all(rubric, 10)
    assert len(names) == 1


async def test_a_function_past_its_bound_is_unknown_and_its_neighbours_are_not():
    release = threading.Event()

    def hangs(answer):
        return release.wait(20)

    def exact(completion, answer):
        return completion[-1]["content"] == answer

    rubric = Rubric([exact, hangs, lambda answer: 0.5], timeout_s=0.1)
    state = state_of()
    begun = time.perf_counter()
    await rubric.score_rollout(state)
    release.set()
    assert time.perf_counter() - begun < 2
    assert (state["metrics"]["exact"], state["metrics"]["<lambda>"]) == (1.0, 0.5)
    assert math.isnan(state["reward"])
    assert isinstance(state["error"], ScoringError)
    assert state["error"].function == "hangs"
    assert "did not return within 0.1 s" in str(state["error"])
    assert (await Rubric([exact]).score_rollout(state_of()))["reward"] == 1.0


async def test_what_a_given_up_function_returns_later_is_not_used():
    release = threading.Event()

    def late(state):
        release.wait(20)
        return 1.0

    state = state_of()
    await Rubric([late], timeout_s=0.05).score_rollout(state)
    release.set()
    await asyncio.sleep(0.05)
    assert math.isnan(state["metrics"]["late"])


async def test_an_asynchronous_function_past_its_bound_is_unknown_too():
    async def hangs(answer):
        await asyncio.sleep(20)

    async def raises(answer):
        raise TimeoutError("the service was slow")

    state, raising = state_of(), state_of()
    await Rubric([hangs], timeout_s=0.05).score_rollout(state)
    await Rubric([raises]).score_rollout(raising)
    assert "did not return within 0.05 s" in str(state["error"])
    assert "the service was slow" in str(raising["error"])


async def test_threads_that_never_come_back_stop_the_run_by_name():
    release = threading.Event()

    def stuck(completion):
        return release.wait(20)

    rubric = Rubric([stuck], timeout_s=0.05)
    try:
        for _ in range(MAX_STUCK - 1):
            await rubric.score_rollout(state_of())
        with pytest.raises(TooManyFaults, match="'stuck'") as raised:
            await rubric.score_rollout(state_of())
    finally:
        release.set()
    assert raised.value.count == MAX_STUCK
    assert raised.value.function == "stuck"


async def test_threads_that_came_back_are_not_counted():
    def slow(completion):
        time.sleep(0.1)

    rubric = Rubric([slow], timeout_s=0.02)
    for _ in range(MAX_STUCK + 2):
        await rubric.score_rollout(state_of())
        await asyncio.sleep(0.1)


async def test_cancelling_ends_the_wait_and_skips_the_rest():
    started, release, later = threading.Event(), threading.Event(), []

    def first(completion):
        started.set()
        release.wait(20)
        return 1.0

    def second(completion):
        later.append(1)
        return 1.0

    task = asyncio.ensure_future(Rubric([first, second]).score_individual(state_of()))
    await asyncio.to_thread(started.wait)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    release.set()
    await call_in_thread(time.sleep, 0)
    assert not later


async def test_call_in_thread_gives_values_and_exceptions():
    assert await call_in_thread(divmod, 7, 2) == (3, 1)
    assert (
        await call_in_thread(lambda: threading.current_thread() is threading.main_thread()) is False
    )
    with pytest.raises(ZeroDivisionError):
        await call_in_thread(divmod, 1, 0)
    with pytest.raises(TimeoutError, match="'sleep'"):
        await call_in_thread(time.sleep, 0.3, limit_s=0.02)


def test_workers_end_with_their_loop():
    async def use():
        await call_in_thread(time.sleep, 0)
        return workers()

    with no_new_thread():
        first, second = asyncio.run(use()), asyncio.run(use())
    assert first is not second


def test_a_loop_that_is_only_closed_loses_its_threads_soon():
    async def use():
        await call_in_thread(time.sleep, 0)

    with no_new_thread(5.0):
        loop = asyncio.new_event_loop()
        with pytest.raises(AssertionError, match="verifiers-worker"), no_new_thread():
            loop.run_until_complete(use())
        loop.close()
