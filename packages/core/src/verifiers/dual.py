"""Call the same coroutine from a script and from an event loop.

A *dual* method blocks and returns its value when no event loop runs in the calling thread, and returns an awaitable of
that value when one does. A *blocking twin* always blocks; under a running loop it works in an extra thread. Either way
a blocking call owns a private event loop, closes it at the end and leaves no thread, task or socket behind.

No signal handler is installed: a KeyboardInterrupt that arrives while a blocking call waits cancels the work, gives its
clean-up ten seconds, and is raised again.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")
CLEANUP_S = 10.0


def dual(work: Callable[[], Coroutine[Any, Any, T]]) -> T | Awaitable[T]:
    """The value of ``work()`` when no loop is running in this thread, else an awaitable of it."""
    return work() if _loop_is_running() else run_in_private_loop(work)


def blocking(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """The value of ``work()``, always blocking; under a running loop it runs in an extra thread."""
    if not _loop_is_running():
        return run_in_private_loop(work)
    outcome: list[Any] = []

    def target() -> None:
        try:
            outcome.append(("value", run_in_private_loop(work)))
        except BaseException as error:  # noqa: BLE001 - carried to the calling thread and raised there
            outcome.append(("error", error))

    thread = threading.Thread(target=target, name="verifiers-blocking-call")
    thread.start()
    thread.join()
    kind, result = outcome[0]
    if kind == "error":
        raise result
    return result


def run_in_private_loop(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run ``work()`` to completion on a fresh loop of the calling thread, then close the loop."""
    loop = _new_event_loop()
    try:
        task = loop.create_task(work())
        try:
            return loop.run_until_complete(task)
        except BaseException:
            if not task.done():
                task.cancel()
                loop.run_until_complete(asyncio.wait([task], timeout=CLEANUP_S))
            raise
    finally:
        _close(loop)


def _new_event_loop() -> asyncio.AbstractEventLoop:
    """uvloop's loop when it is installed, the standard one otherwise."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


def _close(loop: asyncio.AbstractEventLoop) -> None:
    pending = asyncio.all_tasks(loop)
    for task in pending:
        task.cancel()
    if pending:
        loop.run_until_complete(asyncio.wait(pending, timeout=CLEANUP_S))
    loop.run_until_complete(loop.shutdown_asyncgens())
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()


def _loop_is_running() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


async def maybe_await(value: Any) -> Any:
    """The value, awaited when it is awaitable: author-supplied callables may be sync or async."""
    return await value if inspect.isawaitable(value) else value
