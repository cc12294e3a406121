"""Calls between code that blocks and code that awaits, and what belongs to one event loop.

A method with two forms (``either``) blocks and returns its value when no event loop runs in the
calling thread, and returns an awaitable of that value when a loop does. A blocking method
(``blocking_form``) always blocks; under a running loop it runs in an extra thread. A blocking call
runs a private event loop, closes it at the end and leaves no thread, task or socket open. No signal
handler is installed: a KeyboardInterrupt during a blocking call cancels the work, allows it ten
seconds of clean-up, and is raised again.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import contextvars
import functools
import inspect
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

T = TypeVar("T")
Owner = TypeVar("Owner")
P = ParamSpec("P")
Work = Callable[[], Coroutine[Any, Any, T]]

CLEANUP_S = 10.0
POLL_S = 0.05


# --- two forms of a coroutine function


def either(
    method: Callable[Concatenate[Owner, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Owner, P], T | Awaitable[T]]:
    """The form of an async method that blocks, or returns an awaitable under a running loop.

    It calls the method by name, so that an override of ``method`` in a subclass counts.

    >>> class Adder:
    ...     async def a_add(self, x, y):
    ...         return x + y
    ...     add = either(a_add)
    >>> Adder().add(1, 2)
    3
    """

    @functools.wraps(method)
    def call(owner: Owner, /, *args: P.args, **kwargs: P.kwargs) -> T | Awaitable[T]:
        return dual(lambda: getattr(owner, method.__name__)(*args, **kwargs))

    call.__name__ = method.__name__.removeprefix("a_")
    return call


def blocking_form(
    method: Callable[Concatenate[Owner, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Owner, P], T]:
    """The form of an async method that always blocks; see ``either``."""

    @functools.wraps(method)
    def call(owner: Owner, /, *args: P.args, **kwargs: P.kwargs) -> T:
        value: T = blocking(lambda: getattr(owner, method.__name__)(*args, **kwargs))
        return value

    call.__name__ = f"{method.__name__.removeprefix('a_')}_sync"
    return call


def dual(work: Work[T]) -> T | Awaitable[T]:
    """The value of ``work()`` when no loop is running in this thread, else an awaitable of it."""
    return _Unawaited(work()) if _loop_is_running() else run_in_private_loop(work)


class _Unawaited(Coroutine[Any, Any, T]):
    """A coroutine that says so when it is taken for its value, as code from a script in a notebook
    does."""

    def __init__(self, work: Coroutine[Any, Any, T]):
        self._work = work

    def __await__(self) -> Generator[Any, Any, T]:
        return self._work.__await__()

    def send(self, value: object) -> object:
        return self._work.send(value)

    def throw(self, *error: Any) -> object:
        return self._work.throw(*error)

    def close(self) -> None:
        self._work.close()

    def __getattr__(self, name: str) -> object:
        raise AttributeError(f"there is no {name!r} yet: {self!r}")

    def __getitem__(self, key: object) -> Any:
        raise TypeError(f"there is no [{key!r}] yet: {self!r}")

    def __repr__(self) -> str:
        return (
            "an event loop is running, as in a notebook: write await before the call"
            " (results = await env.evaluate(…)), or call its form that blocks (evaluate_sync)"
        )


def blocking(work: Work[T]) -> T:
    """The value of ``work()``, always blocking; under a running loop it runs in an extra thread.

    The thread has the context of the caller. The calling loop is blocked meanwhile, so a
    cancellation of the calling task (``asyncio.run`` turns Ctrl-C into a cancellation) is polled
    and forwarded.
    """
    if not _loop_is_running():
        return run_in_private_loop(work)
    running: list[tuple[asyncio.AbstractEventLoop, asyncio.Task[T]]] = []
    executor = concurrent.futures.ThreadPoolExecutor(1, "verifiers-blocking-call")
    result: concurrent.futures.Future[T] = executor.submit(
        contextvars.copy_context().run,
        run_in_private_loop,
        work,
        lambda loop, task: running.append((loop, task)),
    )

    def cancel() -> None:
        for loop, task in running:
            with contextlib.suppress(RuntimeError):  # the loop is closed because the work has ended
                loop.call_soon_threadsafe(task.cancel)

    caller = asyncio.current_task()
    requests = caller.cancelling() if caller is not None else 0
    try:
        while not concurrent.futures.wait([result], POLL_S).done:
            if caller is not None and caller.cancelling() > requests:
                requests = caller.cancelling()
                cancel()
    except BaseException:  # an interrupt: cancel the work and let it clean up, then raise again
        cancel()
        concurrent.futures.wait([result], CLEANUP_S)
        executor.shutdown(wait=False)
        raise
    executor.shutdown()
    return result.result()


def run_in_private_loop(
    work: Work[T],
    on_start: Callable[[asyncio.AbstractEventLoop, asyncio.Task[T]], None] | None = None,
) -> T:
    """Run ``work()`` to completion on a fresh loop of the calling thread, then close the loop."""
    loop = _new_event_loop()
    try:
        task = loop.create_task(work())
        if on_start is not None:
            on_start(loop, task)
        try:
            return loop.run_until_complete(task)
        except BaseException:  # an interrupt, too: the task cleans up first; raised again
            if not task.done():
                task.cancel()
                loop.run_until_complete(asyncio.wait([task], timeout=CLEANUP_S))
            raise
    finally:
        _close_loop(loop)


def _new_event_loop() -> asyncio.AbstractEventLoop:
    """uvloop's loop when it is installed, the standard loop otherwise."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


def _close_loop(loop: asyncio.AbstractEventLoop) -> None:
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


def num_positional(function: Callable[..., object]) -> int:
    """How many positional arguments a function requires at most: older callbacks are told apart by
    it.

    >>> num_positional(lambda outputs, metadata: None), num_positional(print)
    (2, 0)
    """
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a callable without a readable signature
        return 0
    return len([p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)])


def settle(
    future: asyncio.Future[Any] | None, value: object = None, error: BaseException | None = None
) -> None:
    """Give a future its value or its error, unless there is none, or it was cancelled meanwhile."""
    if future is None or future.done():
        return
    if error is None:
        future.set_result(value)
    else:
        future.set_exception(error)


# --- one resource per loop


class PerLoop(Generic[T]):
    """A resource per running event loop, closed when that loop shuts down.

    ``make()`` runs inside the loop on first use there; ``close(resource)``, if there is anything to
    close, is awaited in the same loop. One client object can thereby serve many blocking calls,
    each with a private loop, from any thread. ``aclose`` closes the resource; otherwise the loop's
    ``shutdown_asyncgens`` does (called by ``asyncio.run`` and by blocking calls), because an
    asynchronous generator owns the resource. A loop that is closed without it drops its resource
    unclosed.
    """

    __slots__ = ("_close", "_make", "_resources")

    def __init__(self, make: Callable[[], T], close: Callable[[T], Awaitable[None]] | None = None):
        self._make = make
        self._close = close
        self._resources: dict[asyncio.AbstractEventLoop, tuple[T, AsyncGenerator[None, None]]] = {}

    def here(self) -> T:
        """The running loop's resource. *Raises* RuntimeError outside a loop, and the exceptions of
        ``make``."""
        loop = asyncio.get_running_loop()
        entry = self._resources.get(loop)
        return entry[0] if entry is not None else self._open(loop)

    async def aclose(self) -> None:
        """Close the running loop's resource; the next ``here`` creates another."""
        if entry := self._resources.get(asyncio.get_running_loop()):
            await entry[1].aclose()

    @property
    def num_open(self) -> int:
        """Number of loops that currently have a resource."""
        return len(self._resources)

    def _open(self, loop: asyncio.AbstractEventLoop) -> T:
        # copy: other threads add too
        for closed in [key for key in tuple(self._resources) if key.is_closed()]:
            self._resources.pop(closed, None)
        resource = self._make()
        owner = self._lifetime(loop)
        self._resources[loop] = (resource, owner)
        # runs to the first yield, which registers it with the loop's shutdown
        with contextlib.suppress(StopIteration):
            owner.__anext__().send(None)
        return resource

    async def _lifetime(self, loop: asyncio.AbstractEventLoop) -> AsyncGenerator[None, None]:
        try:
            yield
        finally:
            resource, _ = self._resources.pop(loop)
            if self._close is not None:
                await self._close(resource)
