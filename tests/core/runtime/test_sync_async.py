"""Blocking and awaitable calls of one coroutine: from a script, inside a loop, in a thread."""

import asyncio
import contextvars
import gc
import inspect
import os
import signal
import subprocess
import sys
import threading
import time
import warnings

import pytest

from support.threads import no_new_thread
from verifiers.rollouts.author_code import maybe_await
from verifiers.runtime.calls import blocking, dual, run_in_private_loop


async def double(x):
    await asyncio.sleep(0)
    return 2 * x


def test_without_a_loop_the_value_is_returned():
    assert dual(lambda: double(4)) == 8
    assert blocking(lambda: double(4)) == 8


async def test_inside_a_loop_an_awaitable_is_returned_at_once():
    pending = dual(lambda: double(4))
    assert inspect.isawaitable(pending)
    assert await pending == 8


async def test_what_is_taken_for_its_value_without_await_says_so():
    pending = dual(lambda: double(4))
    with pytest.raises(AttributeError, match=r"no 'metadata' yet: .* write await before the call"):
        pending.metadata
    with pytest.raises(TypeError, match=r"no \['rewards'\] yet: .*evaluate_sync"):
        pending["rewards"]
    assert "write await" in repr(pending)
    assert asyncio.iscoroutine(pending)
    assert await asyncio.create_task(pending) == 8
    cancelled = asyncio.create_task(dual(lambda: asyncio.sleep(60)))
    await asyncio.sleep(0)
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    dual(lambda: double(4)).close()


async def test_the_blocking_form_works_inside_a_loop_in_a_separate_thread():
    with no_new_thread():
        assert blocking(lambda: double(4)) == 8


async def test_the_blocking_form_sees_the_context_of_its_caller():
    variable = contextvars.ContextVar("v", default="outside")
    variable.set("inside")

    async def read():
        return variable.get()

    assert blocking(read) == "inside"


def test_it_works_in_a_thread():
    values = []
    thread = threading.Thread(target=lambda: values.append(dual(lambda: double(3))))
    thread.start()
    thread.join()
    assert values == [6]


@pytest.mark.parametrize("call", [dual, blocking])
def test_exceptions_pass_through_with_their_traceback(call):
    async def fail():
        raise LookupError("no such thing")

    with pytest.raises(LookupError, match="no such thing") as caught:
        call(fail)
    assert any("in fail" in str(entry) or entry.name == "fail" for entry in caught.traceback)


async def test_exceptions_pass_out_of_the_extra_thread():
    async def fail():
        raise SystemExit(3)

    with pytest.raises(SystemExit):
        blocking(fail)


def test_nothing_is_left_behind():
    seen_loops = []

    async def begin():
        seen_loops.append(asyncio.get_running_loop())
        seen_loops.append(asyncio.ensure_future(asyncio.sleep(60)))
        await asyncio.to_thread(lambda: None)

        async def held():
            try:
                yield 1
            finally:
                seen_loops.append("generator closed")

        seen_loops.append(held())
        await anext(seen_loops[-1])

    gc.collect()  # what other tests of this process left is not of this loop
    with no_new_thread(), warnings.catch_warnings():
        warnings.simplefilter("error")
        run_in_private_loop(begin)
        gc.collect()
    loop, task, _, closed = seen_loops
    assert loop.is_closed()
    assert task.cancelled()
    assert closed == "generator closed"


def test_signal_handlers_are_left_alone():
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    inside = []

    async def look():
        inside.append((signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)))

    dual(look)
    assert inside == [before]
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


INTERRUPTED = """
import asyncio, os, signal, sys, threading
from verifiers.runtime.calls import {call}
log = []
async def work():
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    try:
        await asyncio.sleep(60)
    finally:
        log.append("cancelled")
        await asyncio.sleep(0.05)
        log.append("cleaned up")
async def inside():
    {call}(work)
try:
    {run}
except KeyboardInterrupt:
    log.append("raised")
print(log)
"""


@pytest.mark.parametrize(
    ("call", "run"), [("dual", "dual(work)"), ("blocking", "asyncio.run(inside())")]
)
def test_an_interrupt_cancels_cleans_up_and_is_raised_again(call, run):
    code = INTERRUPTED.format(call=call, run=run)
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=30, env=os.environ
    )
    assert done.stdout.strip() == "['cancelled', 'cleaned up', 'raised']", done.stderr
    assert time.monotonic() - started < 10


async def test_maybe_await_takes_both():
    assert await maybe_await(3) == 3
    assert await maybe_await(double(2)) == 4
