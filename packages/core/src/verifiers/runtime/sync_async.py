"""Call the same coroutine from a script and from an event loop.

A *dual* method blocks and returns its value when no event loop runs in the calling thread, and returns an awaitable of
that value when one does. A *blocking* method (``…_sync``) always blocks; under a running loop it runs in an extra
thread. A blocking call runs a private event loop, closes it at the end and leaves no thread, task or socket open.

No signal handler is installed: a KeyboardInterrupt during a blocking call cancels the work, allows it ten seconds of
clean-up, and is raised again.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import inspect
import threading
from collections.abc import Awaitable, Callable, Coroutine, Generator
from typing import Any, TypeVar

T = TypeVar("T")
Work = Callable[[], Coroutine[Any, Any, T]]
CLEANUP_S = 10.0
POLL_S = 0.05


def dual(work: Work[T]) -> T | Awaitable[T]:
    """The value of ``work()`` when no loop is running in this thread, else an awaitable of it."""
    return work() if _loop_is_running() else run_in_private_loop(work)


def blocking(work: Work[T]) -> T:
    """The value of ``work()``, always blocking; under a running loop it runs in an extra thread."""
    return _InThread(work).result() if _loop_is_running() else run_in_private_loop(work)


class _InThread:
    """Run work in a thread with a private loop, in the context of the calling thread.

    The calling loop is blocked meanwhile, so a cancellation of the calling task (``asyncio.run`` turns Ctrl-C into one)
    is polled and forwarded.
    """

    def __init__(self, work: Work[Any]):
        self._work = work
        self._outcome: list[tuple[bool, Any]] = []
        self._running: list[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]]] = []
        context = contextvars.copy_context()
        self._thread = threading.Thread(target=lambda: context.run(self._run), name="verifiers-blocking-call")

    def result(self) -> Any:
        """Block until the work is done. An interrupt, or a cancellation of the calling task, cancels the work."""
        caller = asyncio.current_task()
        requests = caller.cancelling() if caller is not None else 0
        self._thread.start()
        try:
            while self._thread.is_alive():
                self._thread.join(POLL_S)
                if caller is not None and caller.cancelling() > requests:
                    requests = caller.cancelling()
                    self._cancel()
        except BaseException:  # an interrupt: cancel the work and let it clean up, then raise again
            self._cancel()
            self._thread.join(CLEANUP_S)
            raise
        succeeded, value = self._outcome[0]
        if not succeeded:
            raise value
        return value

    def _cancel(self) -> None:
        for loop, task in self._running:
            with contextlib.suppress(RuntimeError):  # the loop is closed because the work has ended
                loop.call_soon_threadsafe(task.cancel)

    def _run(self) -> None:
        try:
            value = run_in_private_loop(self._work, lambda loop, task: self._running.append((loop, task)))
            self._outcome.append((True, value))
        except BaseException as error:  # noqa: BLE001  passed to the calling thread and raised there
            self._outcome.append((False, error))


def run_in_private_loop(
    work: Work[T], on_start: Callable[[asyncio.AbstractEventLoop, asyncio.Task[T]], None] | None = None
) -> T:
    """Run ``work()`` to completion on a fresh loop of the calling thread, then close the loop."""
    loop = _new_event_loop()
    try:
        task = loop.create_task(work())
        if on_start is not None:
            on_start(loop, task)
        try:
            return loop.run_until_complete(task)
        except BaseException:  # an interrupt leaves the task unfinished: let it clean up, then raise again
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
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


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
    return await value if is_awaitable(value) else value


class Done:
    """Return value of a synchronous hook that was a coroutine in older versions; awaiting it is optional.

    Both ``await super().setup_state(state)`` and ``super().setup_state(state)`` work.
    """

    __slots__ = ("value",)

    def __init__(self, value: Any = None):
        self.value = value

    def __await__(self) -> Generator[None, None, Any]:
        yield from ()
        return self.value


NOTHING = Done()
_PLAIN = frozenset((type(None), bool, int, float, str, list, dict, tuple, Done))


def is_awaitable(value: object) -> bool:
    """As ``inspect.isawaitable``, but fast for the plain values that synchronous callables mostly return."""
    return type(value) not in _PLAIN and inspect.isawaitable(value)
