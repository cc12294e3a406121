"""Keeps rollouts coming: begins groups, collects them, and hands the trainer one batch per optimizer step.

Promises: no token older than ``max_off_policy_steps`` batches is ever trained; a batch holds ``batch_size`` rollouts
of groups that teach something, or says that it is short; slow rollouts are waited for rather than left behind, so
length is not biased; a failure in here is raised in the trainer, not hidden behind a time-out; every wait is bounded
and names what it waits for.

How much runs at once follows from four numbers (b = batches trained so far, which is the policy version divided by
``num_iterations``; k = allowed lag; B = batch size)::

    capacity = min(max_concurrent - running, (k + b + 1)·B - (delivered·B + ready + running))      [rollouts]

With k = 0 nothing is generated while a batch trains; with k = 1 the next batch is generated meanwhile ("one step
off-policy"). Groups that teach nothing leave the sum, and others are begun in their place.

The rollouts themselves are core's (``runs.runner.generate_group``), on an event loop in a thread of this object.
Neither weights nor gradients are known here.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import numpy as np

from verifiers.data.examples import Example
from verifiers.environments.base import Environment
from verifiers.errors import ConfigError, GenerationStalled, RunError
from verifiers.rollouts.state import State
from verifiers.runs.options import RunOptions
from verifiers.runs.run import job_generator
from verifiers.runs.runner import GenerateJob, Job, Progress, RunContext, generate_and_score, generate_group
from verifiers_trainer.algorithm.batch import Group, TrainBatch, apply_length_rules, build
from verifiers_trainer.pipeline.in_flight import Flight, describe
from verifiers_trainer.pipeline.mixture import member_of
from verifiers_trainer.pipeline.schedule import PipelineState, Schedule
from verifiers_trainer.pipeline.thread import LoopThread
from verifiers_trainer.run.meters import FaultMeter, SignalMeter
from verifiers_trainer.settings.config import RLConfig

log = logging.getLogger(__name__)

DecideRewards = Callable[[int, Sequence[State]], Awaitable[Mapping[str, float] | None]]
"""Changes the rewards of the rollouts of a group, given with its index; returns other weights than the rubric's."""
CANCEL_S = 20.0
CLOSE_S = 30.0
BLOCKED = "all rollouts stand still, because code of the environment blocks their event loop"


class Orchestrator:
    """The pipeline of one training run; ``start`` before ``next_batch``, ``close`` at the end."""

    def __init__(
        self,
        env: Environment,
        examples: Sequence[Example],
        context: RunContext,
        config: RLConfig,
        schedule: Schedule | None = None,
        decide_rewards: DecideRewards | None = None,
    ):
        self.env, self.context, self.config = env, context, config
        self.schedule = schedule or Schedule(examples, config.seed, config.shuffle_dataset)
        self._decide_rewards = decide_rewards
        self.version = 0
        self.served = 0
        """The policy version that samples; behind ``version`` where weights are not pushed after every step."""
        self.state = PipelineState()
        self.stale = 0
        """Groups dropped for their age since the last batch."""
        self._used: list[Group] = []
        """Groups that batches used since the policy version changed."""
        self._players = AsyncExitStack()
        """The workers that play, if there are any."""
        self._play_one: GenerateJob = generate_and_score
        self.running: dict[int, Flight] = {}
        """By group index."""
        self._faults = FaultMeter(config)
        self._signal = SignalMeter(config)
        self._failure: BaseException | None = None
        self._thread = LoopThread("verifiers-orchestrator")
        self._changed = asyncio.Condition()
        self._draining = False

    # --- for the trainer's thread -------------------------------------------------------------------------------

    def start(self, version: int = 0, state: PipelineState | None = None) -> None:
        """Begin generating; ``state`` continues an earlier pipeline."""
        self.version = self.served = version
        if state is not None:
            self.state = state
        self._thread.start()
        if self.config.num_env_workers:
            self._wait(self._open_workers(), "the environment workers have not started")
        self._call(self._admit)

    def next_batch(self) -> TrainBatch:
        """The next batch, as soon as its rollouts are there.

        Raises the error of a failed pipeline at once, ``GenerationStalled`` after ``generation_timeout`` seconds
        without a batch, ``NoLearningSignal`` and ``TooManyFaults`` when going on makes no sense.
        """
        started = time.monotonic()
        batch = self._wait(self._next_batch(), "no batch")
        batch.stats["time/wait_generation"] = time.monotonic() - started
        return batch

    def set_version(self, version: int, served: int | None = None) -> None:
        """The trainer has made policy ``version``, and ``served`` samples now; begin what that allows."""

        def advance() -> None:
            self.version, self.served = version, version if served is None else served
            self._count_solved()
            self._admit()

        self._call(advance)

    def settle(self) -> None:
        """Wait until everything that may run at this version has finished (deterministic mode, before a step)."""
        self._wait(self._until(lambda: not self.running), "the rollouts of this policy version have not finished")

    def snapshot(self) -> PipelineState:
        """The pipeline's state at this moment; groups in flight are listed to be played again.

        In deterministic mode they are finished first.
        """
        if self.config.deterministic:
            self.settle()

        def copied() -> PipelineState:
            state = self.state
            requeue = sorted([*self.running, *state.requeue])
            return replace(
                state,
                ready=list(state.ready),
                discarded=list(state.discarded),
                requeue=requeue,
                skipped=list(state.skipped),
                solved=replace(state.solved, streaks=dict(state.solved.streaks)),
            )

        return self._call(copied)

    def close(self) -> None:
        """Cancel what runs and end the thread; calling it again does nothing."""
        if not self._thread.is_running:
            return
        self._draining = True
        try:
            self._thread.wait(self._cancel_all(), CLOSE_S, lambda: TimeoutError(describe(self.running, self.schedule)))
        except TimeoutError as error:
            log.warning("rollouts could not be stopped within %g s: %s", CLOSE_S, error)
        finally:
            self._thread.stop()

    # --- between the two threads --------------------------------------------------------------------------------

    def _call(self, function: Callable[[], Any]) -> Any:
        """What ``function`` returns, called on the loop."""

        async def run() -> Any:
            return function()

        return self._wait(run(), "the pipeline does not answer")

    def _wait(self, work: Coroutine[Any, Any, Any], otherwise: str) -> Any:
        timeout_s = self.config.generation_timeout

        def stalled() -> GenerationStalled:
            place = self._thread.where_blocked()
            awaited = describe(self.running, self.schedule) if place is None else f"{BLOCKED} at {place}"
            return GenerationStalled(
                f"{otherwise} after {timeout_s:g} s: {awaited}. Raise generation_timeout, or look at why they take "
                "so long",
                waiting_for=awaited,
                elapsed_s=timeout_s,
            )

        return self._thread.wait(work, timeout_s, stalled)

    # --- on the pipeline's own loop -----------------------------------------------------------------------------

    @property
    def capacity(self) -> int:
        """Rollouts that may be begun now."""
        batch, group = self.config.batch_size, self.config.rollouts_per_example
        running = len(self.running) * group
        taken = self.state.delivered * batch + len(self.state.ready) * group + running
        owed = (self.config.max_off_policy_steps + self._batch_of(self.served) + 1) * batch - taken
        return min(self.config.max_concurrent - running, owed)

    @property
    def _exhausted(self) -> bool:
        """Whether the batches to come have had their share of groups, dropped ones included (``oversample``)."""
        ahead = (self.config.max_off_policy_steps + 1) * self._groups_per_batch
        begun = self.state.next_index - self.state.base - len(self.state.skipped)
        return begun >= math.ceil(self.config.oversample * ahead)

    def _batch_of(self, version: int) -> int:
        """How many batches a policy version was trained on; the lag is counted in them."""
        return version // self.config.num_iterations

    @property
    def _groups_per_batch(self) -> int:
        return self.config.batch_size // self.config.rollouts_per_example

    def _admit(self) -> None:
        """Begin as many groups as the capacity allows, those of an interrupted run first."""
        group = self.config.rollouts_per_example
        while not self._draining and self._failure is None and self.capacity >= group:
            if self.state.requeue:
                self._begin(self.state.requeue.pop(0))
            elif not self._exhausted:
                self._begin(self._next_index())
            else:
                return

    def _next_index(self) -> int:
        """The index of the next group to begin; with ``skip_solved`` past those of examples that are solved.

        When all examples are, the next is taken all the same. What counts as solved changes with the policy version
        alone, so that it does not depend on which rollouts finish first.
        """
        num_examples = len(self.schedule.examples)
        skips = self.config.skip_solved and self.schedule.may_skip and len(self.state.solved) < num_examples
        for _ in range(num_examples if skips else 0):
            if self.schedule.example(self.state.next_index).example_id not in self.state.solved:
                break
            self.state.skipped.append(self.state.next_index)
            self.state.next_index += 1
        self.state.next_index += 1
        return self.state.next_index - 1

    def _count_solved(self) -> None:
        used, self._used = self._used, []
        if self.config.skip_solved:
            self.state.solved.count(used)

    def _begin(self, index: int) -> None:
        progress = Progress()
        task = asyncio.ensure_future(self._play(index, progress))
        self.running[index] = Flight(time.monotonic(), self.served, task, progress)

    async def _play(self, index: int, progress: Progress) -> None:
        siblings = self.config.rollouts_per_example
        try:
            example = self.schedule.example(index)
            context = replace(self.context, seed=self.schedule.seed_of(index), progress=progress)
            jobs = [Job(example, sibling, siblings, index * siblings + sibling) for sibling in range(siblings)]
            states = await generate_group(self.env, jobs, context, self._play_one)
            decided = None if self._decide_rewards is None else await self._decide_rewards(index, states)
            weights = self.env.for_row(example.row).rubric.plan().weights if decided is None else decided
            rollouts = tuple(apply_length_rules(state.rollout(), self.config) for state in states)
            self._collect(Group(index, example.example_id, rollouts, member_of(self.env, example.row), dict(weights)))
        except asyncio.CancelledError as error:
            if self._draining:
                raise
            example_id = self.schedule.example(index).example_id
            self._fail(RunError(f"the rollouts of example {example_id} were cancelled from outside"), error)
        except BaseException as error:  # noqa: BLE001 - raised again in the trainer's thread by next_batch
            self._fail(error)
        finally:
            self.running.pop(index, None)
            async with self._changed:
                self._admit()
                self._changed.notify_all()

    def _fail(self, error: BaseException, cause: BaseException | None = None) -> None:
        if cause is not None:
            error.__cause__ = cause
        self._failure = self._failure or error

    def _collect(self, group: Group) -> None:
        if group.oldest_version is not None and group.oldest_version < 0:
            raise ConfigError(
                "the inference server does not say which policy version sampled its tokens (weight_versions), so their "
                "age is unknown; use the embedded engine or a server that reports it"
            )
        self._faults.add(group)
        drop = self.config.zero_variance == "drop" and group.is_dead(self.config)
        (self.state.discarded if drop else self.state.ready).append(group)

    async def _next_batch(self) -> TrainBatch:
        while True:
            await self._until(self._batch_is_there)
            groups = self._take()
            counted = [group for group in self.state.discarded if group.index < self.state.base]
            self.state.discarded = [group for group in self.state.discarded if group.index >= self.state.base]
            started = time.monotonic()
            batch = build(groups, counted, self.config, self.config.world_size)
            batch.stats["time/pack"] = time.monotonic() - started
            self._used += [*groups, *counted]
            if batch.num_tokens:
                self._signal.note_batch()
                self.state.delivered += 1
                batch.stats.update(self._pipeline_stats(groups))
            elif groups or counted:
                self._signal.note_nothing([*groups, *counted])
                self._count_solved()  # nothing runs, and no version comes before the next batch
            self._admit()
            if batch.num_tokens:
                return batch

    def _pipeline_stats(self, groups: Sequence[Group]) -> dict[str, float]:
        begun = [self._batch_of(v) for group in groups if (v := group.oldest_version) is not None]
        ages = [self._batch_of(self.version) - batch for batch in begun]
        stale, self.stale = self.stale, 0
        return {
            "batch/short": int(len(groups) < self._groups_per_batch),
            "groups/dropped_stale": stale,
            "staleness/mean": float(np.mean(ages)),
            "staleness/max": max(ages),
            **({"examples/solved": len(self.state.solved)} if self.config.skip_solved else {}),
        }

    def _batch_is_there(self) -> bool:
        """Whether a batch can be taken now, without leaving behind what would then be too old."""
        self._drop_stale()
        wanted = self._groups_per_batch
        ready = sorted(self.state.ready, key=lambda group: group.index)
        waits = self.config.stale_policy == "wait"
        if waits and self.running and self._would_go_stale(ready[wanted:]):
            return False
        if len(ready) < wanted:
            return self._exhausted and not self.running
        if self.config.deterministic and self.running:  # take in the order of the indices, whatever finishes first
            return ready[wanted - 1].index < min(self.running)
        return True

    def _would_go_stale(self, left: Sequence[Group]) -> bool:
        """Whether more old groups would remain than the coming batches can take while they are young enough.

        The n-th oldest of what remains is trained n // groups_per_batch batches after the next.
        """
        versions = [flight.version for flight in self.running.values()]
        versions += [v for group in left if (v := group.oldest_version) is not None]
        oldest = self._batch_of(self.version) + 1 - self.config.max_off_policy_steps
        begun = enumerate(sorted(map(self._batch_of, versions)))
        return any(batch < oldest + place // self._groups_per_batch for place, batch in begun)

    def _drop_stale(self) -> None:
        oldest = (self._batch_of(self.version) - self.config.max_off_policy_steps) * self.config.num_iterations
        fresh = [group for group in self.state.ready if group.oldest_version is None or group.oldest_version >= oldest]
        if len(fresh) < len(self.state.ready):
            self.stale += len(self.state.ready) - len(fresh)
            self.state.ready = fresh
            self._admit()

    def _take(self) -> list[Group]:
        """The oldest ready groups, in the order in which they were begun."""
        wanted = self._groups_per_batch
        ready = sorted(self.state.ready, key=lambda group: group.index)
        if self.config.stale_policy == "drop" and not self.config.deterministic:
            ready = list(self.state.ready)  # what was finished first
        taken, self.state.ready = ready[:wanted], ready[wanted:]
        full = len(taken) == wanted
        newest = max((group.index for group in taken), default=-1)
        self.state.base = max(self.state.base, newest + 1) if full else self.state.next_index
        self.state.skipped = [index for index in self.state.skipped if index >= self.state.base]
        return taken

    async def _until(self, condition: Callable[[], bool]) -> None:
        async with self._changed:
            while True:
                if self._failure is not None:
                    raise self._failure
                if condition():
                    return
                await self._changed.wait()

    async def _open_workers(self) -> None:
        options = RunOptions(
            num_workers=self.config.num_env_workers,
            worker_backend=self.config.env_worker_backend,
            max_concurrent_scoring=self.config.max_concurrent_scoring,
            max_concurrent_tools=self.config.max_concurrent_tools,
        )
        self._play_one = await self._players.enter_async_context(job_generator(self.env, self.context, options))

    async def _cancel_all(self) -> None:
        tasks = [flight.task for flight in self.running.values()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=CANCEL_S)
        await self._players.aclose()
        close = getattr(self.context.client, "aclose", None)
        if close is not None:
            await close()


__all__ = ["Orchestrator"]
