"""Event loops: calls from scripts and from loops, what belongs to one loop, its worker threads, and time limits.

A *dual* method blocks and returns its value when no event loop runs in the calling thread, and returns an awaitable of
that value when one does. A *blocking* method (``…_sync``) always blocks; under a running loop it runs in an extra
thread. A blocking call runs a private event loop, closes it at the end and leaves no thread, task or socket open. No
signal handler is installed: a KeyboardInterrupt during a blocking call cancels the work, allows it ten seconds of
clean-up, and is raised again.

An author's synchronous function never blocks the loop: it runs in a worker thread, at an overhead of a few
microseconds. Functions that must be killable run in a process (``processes``).
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import inspect
import queue
import threading
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator, Sequence
from dataclasses import dataclass
from time import monotonic, process_time, thread_time
from types import CoroutineType, TracebackType
from typing import Any, Generic, NoReturn, Protocol, Self, TypeVar

from verifiers.errors import TooManyFaults

T = TypeVar("T")
Work = Callable[[], Coroutine[Any, Any, T]]

CLEANUP_S = 10.0
POLL_S = 0.05

MAX_STUCK = 8
CHECK_EVERY_S = 0.01
"""Seconds between checks of the time limits of a loop's worker threads."""
IDLE_S = 1.0
GROW_AFTER_S = 0.02
WINDOW_S = 0.05
IDLE_SHARE = 0.05
"""Threads that use less than this share of one core over ``WINDOW_S`` are waiting, not computing."""
HEALTHY_LAG_S = 0.02
"""While the loop wakes later than this, the machine is too busy to distinguish waiting threads from starved ones."""
PROMPT_LAG_S = 0.002
PROMPT_WINDOWS = 4
"""A loop with at most ``PROMPT_LAG_S`` for so many windows is not blocked: a thread that holds the interpreter lock
delays it by about 5 ms. So the pool also grows for threads that compute without the lock."""

TICK_S = 0.25
"""Seconds between checks of long ``Deadline``s."""
COARSE_FROM_S = 5.0
"""Limits of at least this length are checked at ticks; they expire at most 5 % late."""


# --- calls from a script and from an event loop


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
        _close_loop(loop)


def _new_event_loop() -> asyncio.AbstractEventLoop:
    """uvloop's loop when it is installed, the standard one otherwise."""
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


# --- values that may be awaitable


async def maybe_await(value: Any) -> Any:
    """The value, awaited when it is awaitable: author-supplied callables may be sync or async."""
    return await value if is_awaitable(value) else value


def is_awaitable(value: object) -> bool:
    """As ``inspect.isawaitable``, but fast for coroutines, and for plain values of synchronous callables."""
    kind = type(value)
    return kind is CoroutineType or (kind not in _PLAIN and inspect.isawaitable(value))


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
"""No value; the two values of a condition that older code awaits."""
_PLAIN = frozenset((type(None), bool, int, float, str, list, dict, tuple, Done))


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


# --- one resource per loop


class PerLoop(Generic[T]):
    """One resource per running event loop, closed when that loop shuts down.

    ``make()`` runs inside the loop on first use there; ``close(resource)`` is awaited in the same loop. One client
    object can thereby serve many blocking calls, each with a private loop, from any thread. ``aclose`` closes the
    resource; otherwise the loop's ``shutdown_asyncgens`` does (called by ``asyncio.run`` and by blocking calls),
    because an asynchronous generator owns the resource. A loop that is closed without it drops its resource unclosed.
    """

    __slots__ = ("_close", "_make", "_resources")

    def __init__(self, make: Callable[[], T], close: Callable[[T], Awaitable[None]]):
        self._make = make
        self._close = close
        self._resources: dict[asyncio.AbstractEventLoop, tuple[T, AsyncGenerator[None, None]]] = {}

    def here(self) -> T:
        """The running loop's resource. *Raises* RuntimeError outside a loop, and the exceptions of ``make``."""
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
        for other in [other for other in tuple(self._resources) if other.is_closed()]:  # copy: other threads add too
            self._resources.pop(other, None)
        resource = self._make()
        owner = self._lifetime(loop)
        self._resources[loop] = (resource, owner)
        with contextlib.suppress(StopIteration):  # runs to the first yield, which registers it with the loop's shutdown
            owner.__anext__().send(None)
        return resource

    async def _lifetime(self, loop: asyncio.AbstractEventLoop) -> AsyncGenerator[None, None]:
        try:
            yield
        finally:
            resource, _ = self._resources.pop(loop)
            await self._close(resource)


# --- worker threads


async def call_in_thread(
    function: Callable[..., Any], /, *args: object, limit_s: float | None = None, **kwargs: object
) -> Any:
    """Call a synchronous function in a worker thread; its exception propagates.

    *Raises* TimeoutError after ``limit_s``, TooManyFaults as ``Workers.run``.
    """
    step = _Call(function, getattr(function, "__name__", type(function).__name__), limit_s)
    (outcome,) = await workers().run((step,), (args, kwargs))
    if isinstance(outcome, Raised):
        raise outcome.error
    return outcome


@dataclass(frozen=True, slots=True)
class _Call:
    function: Callable[..., Any]
    name: str
    time_limit_s: float | None

    def __call__(self, context: Any) -> Any:
        args, kwargs = context
        return self.function(*args, **kwargs)


def workers() -> Workers:
    """The running loop's worker threads, created on first use; they end with the loop."""
    return _WORKERS.here()


class Step(Protocol):
    """One call of a job: ``step(context)``. ``time_limit_s`` None sets no limit."""

    @property
    def name(self) -> str: ...

    @property
    def time_limit_s(self) -> float | None: ...

    def __call__(self, context: Any, /) -> Any: ...


@dataclass(frozen=True, slots=True)
class Raised:
    """An exception as the result of a step."""

    error: BaseException


class Workers:
    """The worker threads of one event loop, for synchronous functions, with a time limit on every call.

    All functions of one rollout are handed to a thread together, finished jobs return to the loop in batches, and one
    timer per loop checks the limits. The pool starts with one thread and grows while jobs are queued *and* its threads
    wait on I/O. It does not grow while threads hold the interpreter lock: more threads would only delay the loop.

    Threads end with their loop; idle ones end after a second. A call that exceeds its limit is abandoned together with
    its thread, which cannot be killed: the run stops after ``MAX_STUCK`` of them have not returned.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, max_threads: int = 32):
        self.max_threads = max_threads
        self.on_idle: list[Callable[[], None]] = []
        """Called when the last thread ends because it was idle."""
        self._loop = loop
        self._queue: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads: list[_Worker] = []
        self._stuck: list[_Worker] = []
        self._outbox: list[_Job] = []
        self._finished: deque[_Job] = deque()
        self._wake_pending = False
        self._open = 0  # jobs whose future is pending
        self._ticking = False
        self._expected_tick = 0.0
        self._lag_s = 0.0  # how late ticks come: a decaying maximum
        self._prompt_windows = 0
        self._window: tuple[float, float] = (0.0, 0.0)  # start, CPU time of the other threads at the start

    async def run(self, steps: Sequence[Step], context: object) -> list[Any]:
        """Call the steps sequentially in a worker thread; return the value of each step, or ``Raised``.

        A step that exceeds its limit gives ``Raised(TimeoutError)``; the following steps run in another thread.

        *Raises* TooManyFaults when ``MAX_STUCK`` threads hang in functions that do not return.
        """
        loop = asyncio.get_running_loop()
        job = _Job(steps, context, loop.create_future())
        self._open += 1
        if not self._outbox:  # jobs of one loop iteration are submitted together, which wakes a thread once
            loop.call_soon(self._hand_over)
        self._outbox.append(job)
        if not self._ticking:
            self._ticking = True
            self._window = (monotonic(), _other_threads_cpu_s())
            self._schedule_tick(loop)
        try:
            return await job.future
        finally:
            self._open -= 1

    def close(self) -> None:
        """End idle threads; busy threads end with their call."""
        with self._lock:
            threads, self._threads = self._threads, []
        for _ in threads:
            self._queue.put(None)
        for worker in threads:
            if worker.job is None:
                worker.thread.join(timeout=1.0)

    # --- on the loop

    def _hand_over(self) -> None:
        jobs, self._outbox = self._outbox, []
        self._submit(*jobs)

    def _submit(self, *jobs: _Job) -> None:
        with self._lock:
            for job in jobs:
                self._queue.put(job)
            if not self._threads:
                self._add_thread()

    def _add_thread(self) -> None:
        worker = _Worker(self._work)
        self._threads.append(worker)
        worker.thread.start()

    def _schedule_tick(self, loop: asyncio.AbstractEventLoop) -> None:
        self._expected_tick = monotonic() + CHECK_EVERY_S
        loop.call_later(CHECK_EVERY_S, self._tick, loop)

    def _tick(self, loop: asyncio.AbstractEventLoop) -> None:
        now = monotonic()
        self._lag_s = max(now - self._expected_tick, self._lag_s * 0.9)
        for worker in tuple(self._threads):
            self._check_limit(worker, now)
        begun, cpu_then = self._window
        if now - begun >= WINDOW_S:
            cpu_now = _other_threads_cpu_s()
            waiting = self._lag_s < HEALTHY_LAG_S and cpu_now - cpu_then < IDLE_SHARE * (now - begun)
            self._prompt_windows = self._prompt_windows + 1 if self._lag_s < PROMPT_LAG_S else 0
            self._window = (now, cpu_now)
            if not self._queue.empty() and (waiting or self._prompt_windows >= PROMPT_WINDOWS):
                self._grow(now)
        self._ticking = self._open > 0
        if self._ticking:
            self._schedule_tick(loop)

    def _grow(self, now: float) -> None:
        with self._lock:
            room = min(len(self._threads), self.max_threads - len(self._threads))
            if all(worker.job is not None and now - worker.started > GROW_AFTER_S for worker in self._threads):
                for _ in range(min(room, self._queue.qsize())):
                    self._add_thread()

    def _check_limit(self, worker: _Worker, now: float) -> None:
        with worker.lock:
            job = worker.job
            if job is None or len(job.outcomes) >= len(job.steps):
                return
            step = job.steps[len(job.outcomes)]
            limit = step.time_limit_s
            if limit is None or now - worker.started <= limit:
                return
            worker.abandoned = True
        with self._lock:
            if worker in self._threads:
                self._threads.remove(worker)
        self._stuck = [*(stuck for stuck in self._stuck if stuck.thread.is_alive()), worker]
        job.outcomes.append(Raised(TimeoutError(f"{step.name!r} did not return within {limit:g} s")))
        if len(self._stuck) >= MAX_STUCK:
            _settle(job.future, error=_too_many_stuck(step.name, limit, len(self._stuck)))
        elif len(job.outcomes) < len(job.steps):
            self._submit(job)
        else:
            _settle(job.future, job.outcomes)

    def _deliver(self) -> None:
        self._wake_pending = False
        while self._finished:
            job = self._finished.popleft()
            interrupt = next((o.error for o in job.outcomes if _is_interrupt(o)), None)
            _settle(job.future, job.outcomes, interrupt)

    # --- in a worker thread

    def _work(self, worker: _Worker) -> None:
        while True:
            try:
                job = self._queue.get(timeout=IDLE_S)
            except queue.Empty:
                if self._retire(worker):
                    return
                continue
            if job is None:
                return
            if not self._call_steps(worker, job):
                return
            self._finished.append(job)
            if not self._wake_pending:
                self._wake_pending = True
                try:
                    self._loop.call_soon_threadsafe(self._deliver)
                except RuntimeError:  # the loop has closed: no caller is waiting
                    return

    def _call_steps(self, worker: _Worker, job: _Job) -> bool:
        """Run the remaining steps of a job; False when this thread was abandoned."""
        with worker.lock:
            worker.started, worker.job = monotonic(), job
        while len(job.outcomes) < len(job.steps) and not job.future.cancelled():
            try:
                outcome = job.steps[len(job.outcomes)](job.context)
            except BaseException as error:  # noqa: BLE001  recorded as the result of the step; the caller decides
                outcome = Raised(error)
            with worker.lock:
                if worker.abandoned:
                    return False
                job.outcomes.append(outcome)
                worker.started = monotonic()
        worker.job = None
        return True

    def _retire(self, worker: _Worker) -> bool:
        with self._lock:
            if not self._queue.empty():
                return False
            if worker in self._threads:
                self._threads.remove(worker)
            last = not self._threads
        for callback in self.on_idle if last else ():
            callback()
        return True


class _Worker:
    __slots__ = ("abandoned", "job", "lock", "started", "thread")

    def __init__(self, target: Callable[[_Worker], None]):
        self.job: _Job | None = None
        self.started = monotonic()
        self.abandoned = False
        self.lock = threading.Lock()
        self.thread = threading.Thread(target=target, args=(self,), name="verifiers-worker", daemon=True)


class _Job:
    __slots__ = ("context", "future", "outcomes", "steps")

    def __init__(self, steps: Sequence[Step], context: object, future: asyncio.Future[list[Any]]):
        self.steps, self.context, self.future = steps, context, future
        self.outcomes: list[Any] = []


def _other_threads_cpu_s() -> float:
    """CPU time of all other threads of the process, in seconds."""
    return process_time() - thread_time()


def _settle(future: asyncio.Future[Any], outcomes: object = None, error: BaseException | None = None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(outcomes)
    else:
        future.set_exception(error)


def _is_interrupt(outcome: object) -> bool:
    return isinstance(outcome, Raised) and isinstance(outcome.error, KeyboardInterrupt)


def _too_many_stuck(name: str, limit_s: float, count: int) -> TooManyFaults:
    return TooManyFaults(
        f"{count} threads hang in functions that did not return in time, the last in {name!r} after {limit_s:g} s; "
        "bound the function's own waits, or register it with isolated=True so that it can be killed",
        cause=name,
        count=count,
        function=name,
    )


async def _close_workers(threads: Workers) -> None:
    threads.close()


_WORKERS: PerLoop[Workers] = PerLoop(lambda: Workers(asyncio.get_running_loop()), _close_workers)


# --- time limits


class Deadline:
    """A single-use time limit on the task that enters it. ``limit_s`` None sets no limit.

    ``with Deadline(limit_s) as deadline:`` stops its body as ``asyncio.timeout`` does: the task is cancelled, and the
    block raises ``TimeoutError``. Most of the thousands of limits on rollouts and requests never expire, yet a timer
    for each would have to be scheduled and cancelled; here a limit of five seconds or more is an entry in a dictionary
    that is checked four times a second. A long limit therefore expires up to ``TICK_S`` late, never early. Shorter
    limits use one timer each.

    *Raises* TimeoutError at the end of the block when the limit expired inside and nothing else cancelled the task.
    """

    __slots__ = ("_cancelling", "_timer", "expired", "limit_s", "task")

    def __init__(self, limit_s: float | None):
        self.limit_s = limit_s
        self.expired = False
        """Whether the limit expired inside the block, whether or not the cancellation took effect."""
        self._timer: _Ticker | asyncio.TimerHandle | None = None

    def __enter__(self) -> Self:
        loop = asyncio.get_running_loop()
        self.task = task = asyncio.current_task(loop)
        """The task that entered the block and is cancelled by the limit."""
        if task is None:
            raise RuntimeError("a time limit requires a running task")
        self._cancelling = task.cancelling()
        limit_s = self.limit_s
        if limit_s is None:
            return self
        if limit_s >= COARSE_FROM_S:
            self._timer = ticker = _TICKERS.get(loop) or _new_ticker(loop)
            ticker.add(self, loop.time() + limit_s)
        else:
            self._timer = loop.call_later(max(limit_s, 0.0), self.expire)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        timer, self._timer = self._timer, None
        if type(timer) is _Ticker:
            timer.waiting.pop(self, None)
        elif timer is not None:
            timer.cancel()  # type: ignore[union-attr]  # the other kind of timer is a handle
        if self.expired and self._uncancelled() and kind is asyncio.CancelledError:
            raise TimeoutError from error
        return None

    @property
    def is_cancelled(self) -> bool:
        """Whether the task has been cancelled, by this limit or otherwise."""
        return self.task is not None and self.task.cancelling() > 0

    def expire(self) -> None:
        """Cancel the task because the limit has passed."""
        self.expired = True
        if self.task is not None:
            self.task.cancel()

    def _uncancelled(self) -> bool:
        """Undo the cancellation by this limit; False when the task was also cancelled otherwise."""
        return self.task is not None and self.task.uncancel() <= self._cancelling


class _Ticker:
    """The limits of five seconds or more on one event loop; ticks while any is active."""

    __slots__ = ("_is_ticking", "_loop", "waiting")

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self.waiting: dict[Deadline, float] = {}
        """Limit -> time at which it expires, on the loop's clock."""
        self._loop = loop
        self._is_ticking = False

    def add(self, deadline: Deadline, when: float) -> None:
        self.waiting[deadline] = when
        if not self._is_ticking:
            self._is_ticking = True
            self._loop.call_later(TICK_S, self._tick)

    def _tick(self) -> None:
        now = self._loop.time()
        for deadline in [deadline for deadline, when in self.waiting.items() if when <= now]:
            del self.waiting[deadline]
            deadline.expire()
        self._is_ticking = bool(self.waiting)
        if self._is_ticking:
            self._loop.call_later(TICK_S, self._tick)


_TICKERS: dict[asyncio.AbstractEventLoop, _Ticker] = {}


def _new_ticker(loop: asyncio.AbstractEventLoop) -> _Ticker:
    for closed in [other for other in tuple(_TICKERS) if other.is_closed()]:
        _TICKERS.pop(closed, None)
    return _TICKERS.setdefault(loop, _Ticker(loop))
