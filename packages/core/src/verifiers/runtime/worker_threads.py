"""Worker threads of an event loop, for an author's synchronous functions, with a time limit on
every call.

A synchronous function never blocks the loop: it runs in a worker thread, at an overhead of a few
microseconds. Functions that must be killable run in a process (``processes``).
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import monotonic, process_time, thread_time
from typing import Any, Protocol, TypeVar

from verifiers.errors import TooManyFaults
from verifiers.runtime.calls import PerLoop, settle

T = TypeVar("T")

MAX_STUCK = 8
CHECK_EVERY_S = 0.01
"""Seconds between checks of the time limits of a loop's worker threads."""
IDLE_S = 1.0
GROW_AFTER_S = 0.02
WINDOW_S = 0.05
IDLE_SHARE = 0.05
"""Threads that use less than this share of one core over ``WINDOW_S`` are waiting,
not computing."""
HEALTHY_LAG_S = 0.02
"""While the loop wakes later than this, the machine is too busy to distinguish waiting threads from
starved threads."""
PROMPT_LAG_S = 0.002
PROMPT_WINDOWS = 4
"""A loop with at most ``PROMPT_LAG_S`` for so many windows is not blocked: a thread that holds the
interpreter lock delays it by about 5 ms. So the pool also grows for threads that compute without
the lock."""


async def call_in_thread(
    function: Callable[..., T],
    /,
    *args: object,
    limit_s: float | None = None,
    **kwargs: object,
) -> T:
    """Call a synchronous function in a worker thread; its exception propagates.

    *Raises* TimeoutError after ``limit_s``, TooManyFaults as ``Workers.run``.
    """
    step = _Call(function, getattr(function, "__name__", type(function).__name__), limit_s)
    outcomes: list[T | Raised] = await workers().run((step,), (args, kwargs))
    (outcome,) = outcomes
    if isinstance(outcome, Raised):
        raise outcome.error
    return outcome


@dataclass(frozen=True, slots=True)
class _Call:
    function: Callable[..., Any]
    name: str
    time_limit_s: float | None

    def __call__(self, context: Any) -> object:
        args, kwargs = context
        return self.function(*args, **kwargs)


def workers() -> Workers:
    """The running loop's worker threads, created on first use; they end with the loop."""
    return _WORKERS.here()


class Step(Protocol):
    """A call of a job: ``step(context)``. ``time_limit_s`` None sets no limit."""

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
    """The worker threads of an event loop, for synchronous functions, with a time limit on every
    call.

    All functions of a rollout are handed to a thread together, finished jobs return to the loop
    in batches, and one timer per loop checks the limits. The pool starts with one thread and grows
    while jobs are queued *and* its threads wait on I/O. It does not grow while threads hold the
    interpreter lock: more threads would only delay the loop.

    Threads end with their loop; idle threads end after a second. A call that exceeds its limit is
    abandoned together with its thread, which cannot be killed: the run stops after ``MAX_STUCK`` of
    them have not returned.
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
        # start, CPU time of the other threads at the start
        self._window: tuple[float, float] = (0.0, 0.0)

    async def run(self, steps: Sequence[Step], context: object) -> list[Any]:
        """Call the steps sequentially in a worker thread; return the value of each step, or
        ``Raised``.

        A step that exceeds its limit gives ``Raised(TimeoutError)``; the following steps run in
        another thread.

        *Raises* TooManyFaults when ``MAX_STUCK`` threads hang in functions that do not return.
        """
        loop = asyncio.get_running_loop()
        job = _Job(steps, context, loop.create_future())
        self._open += 1
        # jobs of a loop iteration are submitted together, which wakes a thread once
        if not self._outbox:
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
            waiting = self._lag_s < HEALTHY_LAG_S and cpu_now - cpu_then < IDLE_SHARE * (
                now - begun
            )
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
            if all(
                worker.job is not None and now - worker.started > GROW_AFTER_S
                for worker in self._threads
            ):
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
        job.outcomes.append(
            Raised(TimeoutError(f"{step.name!r} did not return within {limit:g} s"))
        )
        if len(self._stuck) >= MAX_STUCK:
            settle(job.future, error=_too_many_stuck(step.name, limit, len(self._stuck)))
        elif len(job.outcomes) < len(job.steps):
            self._submit(job)
        else:
            settle(job.future, job.outcomes)

    def _deliver(self) -> None:
        self._wake_pending = False
        while self._finished:
            job = self._finished.popleft()
            errors = [outcome.error for outcome in job.outcomes if isinstance(outcome, Raised)]
            interrupt = next((e for e in errors if isinstance(e, KeyboardInterrupt)), None)
            settle(job.future, job.outcomes, interrupt)

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
        self.thread = threading.Thread(
            target=target, args=(self,), name="verifiers-worker", daemon=True
        )


class _Job:
    __slots__ = ("context", "future", "outcomes", "steps")

    def __init__(
        self, steps: Sequence[Step], context: object, future: asyncio.Future[list[object]]
    ):
        self.steps, self.context, self.future = steps, context, future
        self.outcomes: list[Any] = []


def _other_threads_cpu_s() -> float:
    """CPU time of all other threads of the process, in seconds."""
    return process_time() - thread_time()


def _too_many_stuck(name: str, limit_s: float, count: int) -> TooManyFaults:
    return TooManyFaults(
        f"{count} threads hang in functions that did not return in time, the last in {name!r} after"
        f" {limit_s:g} s; bound the function's own waits, or register it with isolated=True so that"
        " it can be killed",
        cause=name,
        count=count,
        function=name,
    )


async def _close_workers(threads: Workers) -> None:
    threads.close()


_WORKERS: PerLoop[Workers] = PerLoop(lambda: Workers(asyncio.get_running_loop()), _close_workers)
