"""The caller's side: as many workers as were asked for, kept alive, each rollout with the one that holds the fewest.

Promises: a worker that dies costs only the rollouts it held, and those are played again by others; what has lost its
worker ``MAX_DEATHS`` times is played once more with a worker to itself, so that a rollout which brings its worker down
fails, and fails alone; every completion is asked for here, with the
run's own client and limits; when the pool closes no worker is left.

``WorkerPool.generate`` has the signature of ``runner.generate_and_score`` and is used in its place. The caller scores
whole groups, from what the workers sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import Coroutine
from types import TracebackType
from typing import Any

from verifiers.errors import RunError, WorkerLost
from verifiers.rollouts.loop import conclude
from verifiers.rollouts.state import State
from verifiers.rubrics.scoring import leave_unscored
from verifiers.runs.runner import Job, RunContext, RunEnvironment
from verifiers.runs.workers.channels import Channel, OpenChannel
from verifiers.runs.workers.messages import (
    Answer,
    Ask,
    Cancel,
    Failed,
    Finished,
    Generate,
    Ready,
    Setup,
    Withdraw,
    portable,
)
from verifiers.runs.workers.packing import unpack_state
from verifiers.types import StopReason

log = logging.getLogger(__name__)

MAX_DEATHS = 2
"""Workers that may die with a rollout among others before it is played alone."""
START_S = 120.0
"""What a worker may take until its environment stands."""
START_AGAIN_S = (0.5, 5.0)
"""Pauses before another worker is started in place of one that died while it started."""


class WorkerPool:
    """Workers of one run. ``async with WorkerPool(...) as pool: Runner(..., generate=pool.generate)``.

    *Raises*, on entering, what a worker raises while it builds the environment, and ``RunError`` when none starts.
    """

    def __init__(self, setup: Setup, context: RunContext, open_channel: OpenChannel, num_workers: int):
        self.setup, self.context = setup, context
        self.num_workers, self._open_channel = num_workers, open_channel
        self._workers: list[_Remote] = []
        self._starting: set[asyncio.Task[None]] = set()
        self._closing: set[asyncio.Task[None]] = set()
        self._alone: _Remote | None = None
        self._one_at_a_time = asyncio.Lock()
        self._is_closing = False
        self._last_failure: BaseException | None = None

    async def __aenter__(self) -> WorkerPool:
        for _ in range(self.num_workers):
            self._start_one()
        try:
            await asyncio.gather(*self._starting)
        except BaseException:
            await self.__aexit__(None, None, None)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_closing = True
        starting, workers = list(self._starting), list(self._workers)
        for task in starting:
            if not task.cancelling():  # a second cancellation would cut the closing of its worker short
                task.cancel()
        await asyncio.gather(*starting, return_exceptions=True)
        workers += [self._alone] if self._alone is not None else []
        await asyncio.gather(*(worker.close() for worker in workers), *self._closing)

    async def generate(self, env: RunEnvironment, job: Job, context: RunContext) -> State:
        """The finished state of a job, played and scored by a worker; its own failure is a value on it."""
        for _ in range(MAX_DEATHS):
            worker = await self._least_busy()
            with contextlib.suppress(WorkerLost):
                return _adopted(await worker.generate(job, context.seed), job, context)
        async with self._one_at_a_time:
            try:
                return _adopted(await (await self._lonely()).generate(job, context.seed), job, context)
            except WorkerLost as died:
                return await _lost(env, job, context, died)

    # --- keeping them alive ---------------------------------------------------------------------------------------

    async def _least_busy(self) -> _Remote:
        while not self._workers:
            if not self._starting:
                raise RunError(f"no environment worker is left: {self._last_failure}") from self._last_failure
            await asyncio.wait(self._starting, return_when=asyncio.FIRST_COMPLETED)
        return min(self._workers, key=_Remote.num_held)

    def _start_one(self) -> None:
        task = asyncio.create_task(self._start())
        self._starting.add(task)
        task.add_done_callback(self._started)

    def _started(self, task: asyncio.Task[None]) -> None:
        self._starting.discard(task)
        if not task.cancelled() and (failure := task.exception()) is not None:
            self._last_failure = failure

    async def _lonely(self) -> _Remote:
        """The worker that plays suspects, one at a time."""
        if self._alone is None:
            self._alone = await self._open()
        return self._alone

    async def _start(self) -> None:
        for pause_s in (*START_AGAIN_S, None):
            try:
                self._workers.append(await self._open())
                return
            except RunError as error:  # its process or its node died; what the environment raises is final
                if pause_s is None:
                    raise
                log.warning("%s; another is started", error)
                await asyncio.sleep(pause_s)

    async def _open(self) -> _Remote:
        channel = await self._open_channel()
        try:
            async with asyncio.timeout(START_S):
                await channel.send(self.setup)
                said = await channel.receive()
        except (TimeoutError, WorkerLost) as error:
            await channel.close()
            why = f"not within {START_S:g} s" if isinstance(error, TimeoutError) else str(error)
            raise RunError(f"an environment worker did not start: {why}") from error
        except BaseException:
            await channel.close()
            raise
        if not isinstance(said, Ready):
            await channel.close()
            raise said.error if isinstance(said, Failed) else RunError(f"an environment worker said {said!r}")
        return _Remote(channel, said.pid, self.context, self._died)

    def _died(self, worker: _Remote, why: str) -> None:
        if not self._is_closing:
            closing = asyncio.create_task(worker.channel.close())
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)
        if worker is self._alone:
            self._alone = None
            return
        self._workers.remove(worker)
        if not self._is_closing and not self.context.is_over:
            log.warning("%s; the %d rollouts it held are played again", why, worker.num_held())
            self._start_one()


class _Remote:
    """One living worker, as the pool sees it."""

    def __init__(self, channel: Channel, pid: int, context: RunContext, died: Any):
        self.channel, self.pid, self.context, self._died = channel, pid, context, died
        self._numbers = itertools.count(1)
        self._held: dict[int, asyncio.Future[State]] = {}
        self._questions: dict[int, asyncio.Task[None]] = {}
        self._listening = asyncio.create_task(self._listen())

    def num_held(self) -> int:
        """Rollouts it plays at this moment."""
        return len(self._held)

    async def generate(self, job: Job, seed: int | None) -> State:
        """Raises ``WorkerLost``, and what ends the run."""
        number = next(self._numbers)
        future: asyncio.Future[State] = asyncio.get_running_loop().create_future()
        self._held[number] = future
        try:
            await self.channel.send(Generate(number, job, seed))
            return await future
        except WorkerLost:
            self._listening.cancel()  # nothing comes from it any more: the pool must know before it chooses again
            await asyncio.wait([self._listening])
            raise
        except asyncio.CancelledError:
            with contextlib.suppress(WorkerLost):
                await self.channel.send(Cancel(number))
            raise
        finally:
            self._held.pop(number, None)
            if future.done() and not future.cancelled():
                future.exception()  # it may have been set while the message was still being sent

    async def close(self) -> None:
        """End the worker, and what it asked."""
        self._listening.cancel()
        await asyncio.gather(self._listening, return_exceptions=True)
        await self.channel.close()

    async def _listen(self) -> None:
        why = "an environment worker was told to end"
        try:
            while True:
                match await self.channel.receive():
                    case Finished(number, packed):
                        self._settle(number, unpack_state(packed))
                    case Failed(number, error):
                        self._settle(number, error)
                    case Ask() as question:
                        self._begin(question.number, self._answer(question))
                    case Withdraw(number):
                        if number in self._questions:
                            self._questions[number].cancel()
        except WorkerLost as gone:
            why = str(gone)
        finally:
            for asked in self._questions.values():
                asked.cancel()
            self._died(self, why)
            for number in list(self._held):
                self._settle(number, WorkerLost(why))

    def _settle(self, number: int, outcome: State | BaseException) -> None:
        future = self._held.get(number)
        if future is None or future.done():
            return
        if isinstance(outcome, BaseException):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)

    def _begin(self, number: int, answering: Coroutine[Any, Any, None]) -> None:
        task = self._questions[number] = asyncio.create_task(answering)
        task.add_done_callback(lambda _: self._questions.pop(number, None))

    async def _answer(self, question: Ask) -> None:
        try:
            async with self.context.generation_slot:
                self.context.check_open()
                answer = Answer(question.number, response=await self.context.client.complete(question.request))
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # noqa: BLE001 - whatever a client raises is the answer
            answer = Answer(question.number, error=portable(error))
        with contextlib.suppress(WorkerLost):  # the worker died meanwhile: its rollouts are played again
            await self.channel.send(answer)


def _adopted(state: State, job: Job, context: RunContext) -> State:
    """A state from a worker as one of this run."""
    state["client"] = context.given_client or context.client
    state.run, state.seed_key = context, f"{job.example.hash}:{job.sibling}"
    return state


async def _lost(env: RunEnvironment, job: Job, context: RunContext, death: WorkerLost) -> State:
    """The state of a rollout that no worker survived."""
    state = await env.init_state(dict(job.example.row), context.given_client or context.client, context.model)
    state.run, state.seed_key, state.cleaned_up = context, f"{job.example.hash}:{job.sibling}", True
    state["error"], state["stop_condition"] = death, StopReason.ERROR.value
    conclude(state, time.perf_counter())
    leave_unscored([state])
    return state
