"""An event loop in a thread: results and errors come back, waits end, and what blocks
it is named."""

import asyncio
import threading

import pytest

from verifiers_trainer.engines import loop_thread
from verifiers_trainer.engines.loop_thread import LoopThread


@pytest.fixture
def thread():
    made = LoopThread("verifiers-test")
    made.start()
    yield made
    made.stop()


def late():
    return RuntimeError("late")


async def returned(value):
    return value


async def raised(error):
    raise error


def test_results_and_errors_come_back_also_a_time_out_of_the_work_itself(thread):
    assert thread.wait(returned(3), 5, late) == 3
    with pytest.raises(TimeoutError, match="of a library"):
        thread.wait(raised(TimeoutError("of a library")), 5, late)


def test_a_wait_that_takes_too_long_ends_with_the_callers_error_and_cancels_the_work(thread):
    cancelled = threading.Event()

    async def work():
        try:
            await asyncio.sleep(60)
        finally:
            cancelled.set()

    with pytest.raises(RuntimeError, match="late"):
        thread.wait(work(), 0.05, late)
    assert cancelled.wait(5)
    assert thread.where_blocked() is None


def test_what_blocks_the_loop_is_named(thread, monkeypatch):
    monkeypatch.setattr(loop_thread, "ANSWER_S", 0.1)
    release = threading.Event()
    thread.loop.call_soon_threadsafe(release.wait, 10)
    try:
        assert "threading.py:" in thread.where_blocked()
    finally:
        release.set()


def test_stopping_closes_the_loop_and_happens_once():
    thread = LoopThread("verifiers-test")
    thread.stop()
    assert not thread.is_running
    thread.start()
    assert thread.is_running
    thread.stop()
    thread.stop()
    assert thread.loop.is_closed()
    assert not thread.is_running
