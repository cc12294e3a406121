"""The caller's side of the workers: starts them, replaces dead workers, sends each rollout to the
least busy.

Guarantees: the rollouts of a worker that dies are run again by others; a rollout that has lost
``MAX_DEATHS`` workers, or one that fell silent, is run once more alone in a worker, so that a
rollout which crashes or stops its worker fails without affecting others, at once if it was alone;
every model call is made here, with the client and the limits of the run; closing the pool ends all
workers.

``WorkerPool.generate`` has the signature of ``runner.generate_and_score`` and replaces it. The
caller does the group scoring of the states that workers return.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import Callable, Coroutine
from types import TracebackType

from verifiers.errors import RunError, WorkerLost
from verifiers.rollouts.loop import conclude
from verifiers.rollouts.state import State
from verifiers.rubrics.scoring import leave_unscored
from verifiers.runs.plan import Job
from verifiers.runs.rollout import RunContext, RunEnvironment
from verifiers.runs.workers.channels import Channel, OpenChannel
from verifiers.runs.workers.messages import (
    CallModel,
    Cancel,
    CancelCall,
    Failed,
    Finished,
    Generate,
    ModelReply,
    Ready,
    Setup,
    portable,
)
from verifiers.runs.workers.packing import unpack_state
from verifiers.runtime.calls import settle

log = logging.getLogger(__name__)

MAX_DEATHS = 2
"""Workers that a rollout may lose before it is run alone in a worker."""
START_S = 120.0
"""Seconds a worker may take to load its environment."""
START_AGAIN_S = (0.5, 5.0)
"""Pauses in seconds before a worker that died during its start is replaced."""


class WorkerPool:
    """Workers of a run. ``async with WorkerPool(...) as pool: Runner(...,
    generate=pool.generate)``.

    *Raises*, on entry, what a worker raises while it loads the environment, and RunError when none
    starts.
    """

    def __init__(
        self, setup: Setup, context: RunContext, open_channel: OpenChannel, num_workers: int
    ):
        self.setup, self.context = setup, context
        self.num_workers, self._open_channel = num_workers, open_channel
        self._workers: list[_Remote] = []
        self._starting: set[asyncio.Task[None]] = set()
        self._closing: set[asyncio.Task[None]] = set()
        self._isolated_worker: _Remote | None = None
        self._one_at_a_time = asyncio.Lock()
        self._is_closing = False
        self._last_failure: BaseException | None = None

    async def __aenter__(self) -> WorkerPool:
        for _ in range(self.num_workers):
            self._start_one()
        try:
            await asyncio.gather(*self._starting)
        except BaseException:  # an interrupt too: workers that did start are ended; raised again
            await self.__aexit__(None, None, None)
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._is_closing = True
        starting, workers = list(self._starting), list(self._workers)
        for task in starting:
            # a second cancellation would interrupt the closing of its worker
            if not task.cancelling():
                task.cancel()
        await asyncio.gather(*starting, return_exceptions=True)
        workers += [self._isolated_worker] if self._isolated_worker is not None else []
        await asyncio.gather(*(worker.close() for worker in workers), *self._closing)

    async def generate(self, env: RunEnvironment, job: Job, context: RunContext) -> State:
        """Run and score a job in a worker; its failure is recorded on the state."""
        for _ in range(MAX_DEATHS):
            worker = await self._least_busy()
            try:
                return _attached(await worker.generate(job, context.seed), job, context)
            except WorkerLost as error:
                if worker.num_stopped == 1:
                    return await _failed(env, job, context, error)
                if (
                    worker.num_stopped
                ):  # the limit of silence has passed, and shall not a third time
                    break
        async with self._one_at_a_time:
            try:
                return _attached(
                    await (await self._isolated()).generate(job, context.seed), job, context
                )
            except WorkerLost as error:
                return await _failed(env, job, context, error)

    # --- start and replace workers ----------------------------------------------------------------

    async def _least_busy(self) -> _Remote:
        while not self._workers:
            if not self._starting:
                raise RunError(
                    f"no environment worker is left: {self._last_failure}"
                ) from self._last_failure
            await asyncio.wait(self._starting, return_when=asyncio.FIRST_COMPLETED)
        return min(self._workers, key=_Remote.num_running)

    def _start_one(self) -> None:
        task = asyncio.create_task(self._start())
        self._starting.add(task)
        task.add_done_callback(self._started)

    def _started(self, task: asyncio.Task[None]) -> None:
        self._starting.discard(task)
        if not task.cancelled() and (failure := task.exception()) is not None:
            self._last_failure = failure

    async def _isolated(self) -> _Remote:
        """The worker for rollouts that may crash it, one at a time."""
        if self._isolated_worker is None:
            self._isolated_worker = await self._open()
        return self._isolated_worker

    async def _start(self) -> None:
        for pause_s in (*START_AGAIN_S, None):
            try:
                self._workers.append(await self._open())
                return
            except RunError as error:
                # its process or node died; an error of the environment is not retried
                if pause_s is None:
                    raise
                log.warning("%s; starting another", error)
                await asyncio.sleep(pause_s)

    async def _open(self) -> _Remote:
        channel = await self._open_channel()
        try:
            async with asyncio.timeout(START_S):
                await channel.send(self.setup)
                reply = await channel.receive()
        except (TimeoutError, WorkerLost) as error:
            await channel.close()
            why = f"not within {START_S:g} s" if isinstance(error, TimeoutError) else str(error)
            raise RunError(f"an environment worker did not start: {why}") from error
        except BaseException:  # an interrupt too: the process is not left behind; raised again
            await channel.close()
            raise
        if not isinstance(reply, Ready):
            await channel.close()
            raise (
                reply.error
                if isinstance(reply, Failed)
                else RunError(f"an environment worker sent {reply!r}")
            )
        return _Remote(channel, reply.pid, self.context, self._died)

    def _died(self, worker: _Remote, why: str) -> None:
        if not self._is_closing:
            closing = asyncio.create_task(worker.channel.close())
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)
        if worker is self._isolated_worker:
            self._isolated_worker = None
            return
        self._workers.remove(worker)
        if not self._is_closing and not self.context.is_over:
            log.warning("%s; running its %d rollouts again", why, worker.num_running())
            self._start_one()


class _Remote:
    """A running worker, as the pool sees it."""

    def __init__(
        self,
        channel: Channel,
        pid: int,
        context: RunContext,
        on_death: Callable[[_Remote, str], None],
    ):
        self.channel, self.pid, self.context, self._on_death = channel, pid, context, on_death
        self._numbers = itertools.count(1)
        self._running: dict[int, asyncio.Future[State]] = {}
        self.num_stopped = 0
        """Rollouts that it was running when it fell silent."""
        self._calls: dict[int, asyncio.Task[None]] = {}
        self._listening = asyncio.create_task(self._listen())

    def num_running(self) -> int:
        """Rollouts that it is running."""
        return len(self._running)

    async def generate(self, job: Job, seed: int | None) -> State:
        """Run one job. *Raises* WorkerLost, and errors that end the run."""
        number = next(self._numbers)
        future: asyncio.Future[State] = asyncio.get_running_loop().create_future()
        self._running[number] = future
        try:
            await self.channel.send(Generate(number, job, seed))
            return await future
        except WorkerLost:
            self._listening.cancel()  # remove it from the pool before the next worker is selected
            await asyncio.wait([self._listening])
            raise
        except asyncio.CancelledError:
            with contextlib.suppress(WorkerLost):
                await self.channel.send(Cancel(number))
            raise
        finally:
            self._running.pop(number, None)
            if future.done() and not future.cancelled():
                future.exception()  # mark it retrieved: it may have been set during the send

    async def close(self) -> None:
        """End the worker and its model calls."""
        self._listening.cancel()
        await asyncio.gather(self._listening, return_exceptions=True)
        await self.channel.close()

    async def _listen(self) -> None:
        why = "the environment worker was closed"
        try:
            while True:
                match await self.channel.receive():
                    case Finished(number, packed):
                        settle(self._running.get(number), unpack_state(packed))
                    case Failed(number, error):
                        settle(self._running.get(number), error=error)
                    case CallModel() as call:
                        self._begin(call.number, self._call_model(call))
                    case CancelCall(number):
                        if number in self._calls:
                            self._calls[number].cancel()
        except WorkerLost as error:
            why = str(error)
        finally:
            for task in self._calls.values():
                task.cancel()
            if getattr(self.channel, "was_silent", False):
                self.num_stopped = len(self._running)
            self._on_death(self, why)
            for future in list(self._running.values()):
                settle(future, error=WorkerLost(why))

    def _begin(self, number: int, coroutine: Coroutine[object, object, None]) -> None:
        task = self._calls[number] = asyncio.create_task(coroutine)
        task.add_done_callback(lambda _: self._calls.pop(number, None))

    async def _call_model(self, call: CallModel) -> None:
        try:
            async with self.context.generation_slot:
                self.context.check_open()
                reply = ModelReply(
                    call.number, response=await self.context.client.complete(call.request)
                )
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # noqa: BLE001 - sent to the worker, which raises it
            reply = ModelReply(call.number, error=portable(error))
        with contextlib.suppress(WorkerLost):  # the worker died: its rollouts are run again
            await self.channel.send(reply)


def _attached(state: State, job: Job, context: RunContext) -> State:
    """Attach a state from a worker, with its branches, to this run."""
    for number, leaf in enumerate(state.leaves, job.sibling):
        leaf["client"] = context.given_client or context.client
        leaf.run, leaf.seed_key = context, f"{job.example.hash}:{number}"
    return state


async def _failed(env: RunEnvironment, job: Job, context: RunContext, error: WorkerLost) -> State:
    """The state of a rollout that crashed every worker, with those of its tree."""
    leaves = []
    for number in range(job.sibling, job.sibling + job.num_branches):
        state = await env.init_state(
            dict(job.example.row), context.given_client or context.client, context.model
        )
        state.run, state.seed_key, state.cleaned_up = context, f"{job.example.hash}:{number}", True
        state.record.status = state.record.status.failed(error)
        conclude(state, time.perf_counter())
        leaves.append(state)
    leave_unscored(leaves)
    leaves[0].branches = tuple(leaves[1:])
    return leaves[0]
