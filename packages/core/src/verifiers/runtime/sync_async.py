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
import functools
import inspect
import threading
from collections.abc import Awaitable, Callable, Coroutine, Generator
from typing import Any, NoReturn, TypeVar

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


def num_positional(function: Callable[..., Any]) -> int:
    """How many positional arguments a function requires at most: older callbacks are told apart by it.

    >>> num_positional(lambda outputs, metadata: None), num_positional(print)
    (2, 0)
    """
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a callable without a readable signature
        return 0
    return len([p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)])


class Done:
    """Return value of a synchronous hook that was a coroutine in older versions; awaiting it is optional.

    Both ``await super().has_error(state)`` and ``super().has_error(state)`` work: it is as true as its value.
    """

    __slots__ = ("value",)

    def __init__(self, value: object = None):
        self.value: Any = value

    def __await__(self) -> Generator[None, None, Any]:
        yield from ()
        return self.value

    def __bool__(self) -> bool:
        return bool(self.value)

    def __eq__(self, other: object) -> bool:
        return bool(self.value == (other.value if isinstance(other, Done) else other))

    def __hash__(self) -> int:
        return hash(self.value)

    def __repr__(self) -> str:
        return repr(self.value)


NOTHING, YES, NO = Done(), Done(True), Done(False)


def answer(condition: object) -> Done:
    """``YES`` or ``NO``: the value of a condition that older code awaits."""
    return YES if condition else NO


def started(work: Coroutine[Any, Any, T]) -> Done | Coroutine[Any, Any, T]:
    """``Done`` of a coroutine that ends without waiting, else a coroutine that continues it.

    For a method that is a coroutine and that older code calls without ``await``.
    """
    try:
        awaited = work.send(None)
    except StopIteration as end:
        return Done(end.value)
    return _continued(work, awaited)


async def _continued(work: Coroutine[Any, Any, T], awaited: object) -> T:
    result: T = await _Continued(work, awaited)
    return result


class _Continued:
    """The rest of a coroutine that has yielded ``awaited``."""

    __slots__ = ("_awaited", "_work")

    def __init__(self, work: Coroutine[Any, Any, Any], awaited: object):
        self._work, self._awaited = work, awaited

    def __await__(self) -> Generator[Any, Any, Any]:
        awaited = self._awaited
        while True:
            try:
                sent = yield awaited
            except BaseException as error:  # noqa: BLE001  a cancellation: passed into the coroutine that waits
                step = functools.partial(self._work.throw, error)
            else:
                step = functools.partial(self._work.send, sent)
            try:
                awaited = step()
            except StopIteration as end:
                return end.value


class Finished:
    """What a blocking call returns is also a coroutine that has ended: ``asyncio.run(env.evaluate(…))`` works."""

    __slots__ = ()

    def send(self, value: object) -> NoReturn:
        raise StopIteration(self)

    def throw(self, *error: Any) -> NoReturn:
        raise error[1] if len(error) > 1 and error[1] is not None else error[0]

    def close(self) -> None:
        """Nothing: it has ended."""

    def __await__(self) -> Generator[None, None, Any]:
        yield from ()
        return self


class FinishedTuple(tuple[Any, ...], Finished):
    """A tuple as ``Finished``."""

    __slots__ = ()


_PLAIN = frozenset((type(None), bool, int, float, str, list, dict, tuple, Done))


def is_awaitable(value: object) -> bool:
    """As ``inspect.isawaitable``, but fast for the plain values that synchronous callables mostly return."""
    return type(value) not in _PLAIN and inspect.isawaitable(value)
