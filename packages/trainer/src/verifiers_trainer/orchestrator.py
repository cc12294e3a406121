"""Keeps rollouts coming: begins groups, collects them, and hands the trainer one batch per optimizer step.

Promises: no token older than ``max_off_policy_steps`` batches is ever trained; a batch holds ``batch_size`` rollouts
of groups that teach something, or says that it is short; a failure in here is raised in the trainer, not hidden behind
a time-out; every wait is bounded and names what it waits for.

How much runs at once follows from four numbers (b = batches trained so far, which is the policy version; k = allowed
lag; B = batch size)::

    capacity = min(max_concurrent - running, (k + b + 1)·B - (delivered·B + ready + running))      [rollouts]

With k = 0 nothing is generated while a batch trains; with k = 1 the next batch is generated meanwhile ("one step
off-policy"). Which example a group plays is a function of its index alone, so a resumed run continues the same order.

The rollouts themselves are core's (``verifiers.runner.play_group``), on an event loop in a thread of this object.
Neither weights nor gradients are known here.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from verifiers.dataset import Example
from verifiers.environments.base import Environment
from verifiers.errors import GenerationStalled, NoLearningSignal, RunError, TooManyFaults
from verifiers.runner import Job, RunContext, play_group
from verifiers_trainer.batch import Group, Record, StepBatch, build
from verifiers_trainer.config import RLConfig

log = logging.getLogger(__name__)


class Schedule:
    """Which example the n-th group plays: pass after pass over the examples, each shuffled by (seed, pass)."""

    def __init__(self, examples: Sequence[Example], seed: int, shuffle: bool):
        self.examples, self.seed, self.shuffle = examples, seed, shuffle
        self._orders: dict[int, list[int]] = {}

    def example(self, index: int) -> Example:
        """The example of group ``index``."""
        epoch, place = divmod(index, len(self.examples))
        return self.examples[self._order(epoch)[place]]

    def seed_of(self, index: int) -> int:
        """The sampling seed of the pass that group ``index`` belongs to."""
        return self.seed * 1_000_003 + index // len(self.examples)

    def _order(self, epoch: int) -> list[int]:
        if epoch not in self._orders:
            order = list(range(len(self.examples)))
            if self.shuffle:
                random.Random(f"{self.seed}:{epoch}").shuffle(order)
            self._orders = {epoch: order} | {e: o for e, o in self._orders.items() if e >= epoch - 1}
        return self._orders[epoch]


@dataclass
class PipelineState:
    """What a checkpoint keeps of the pipeline."""

    next_index: int = 0
    """Index of the next group to begin."""
    delivered: int = 0
    """Batches handed to the trainer."""
    base: int = 0
    """Index after the newest group that a batch has used; what lies beyond it was begun for the batches to come."""
    ready: list[Group] = field(default_factory=list)
    """Finished groups not yet trained."""
    requeue: list[int] = field(default_factory=list)
    """Indices of groups that were being played; they are played anew."""


class Orchestrator:
    """The pipeline of one training run; ``start`` before ``next_batch``, ``close`` at the end."""

    def __init__(self, env: Environment, context: RunContext, config: RLConfig, world: int = 1):
        self.env, self.context, self.config, self.world = env, context, config, world
        table = env.train_table if env.train_table is not None else env.eval_table
        self.schedule = Schedule(list(table), config.seed, config.shuffle_dataset)
        self.version = 0
        self.state = PipelineState()
        self.discarded: list[Group] = []
        """Groups dropped since the last batch."""
        self.stale = 0
        self.running: dict[int, tuple[float, int, asyncio.Task]] = {}
        """Group index -> (start on the monotonic clock, policy version at the start, task)."""
        self._faults: deque[bool] = deque(maxlen=4 * config.batch_size)
        self._batches_without_signal = 0
        self._failure: BaseException | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._draining = False

    # --- for the trainer's thread -------------------------------------------------------------------------------

    def start(self, version: int = 0, state: PipelineState | None = None) -> None:
        """Begin generating; ``state`` continues an earlier pipeline."""
        self.version = version
        if state is not None:
            self.state = state
        ready = threading.Event()
        self._thread = threading.Thread(target=self._serve, args=(ready,), name="verifiers-orchestrator", daemon=True)
        self._thread.start()
        ready.wait()
        self._call(self._admit)

    def next_batch(self) -> StepBatch:
        """The next batch, as soon as its rollouts are there.

        Raises the error of a failed pipeline at once, ``GenerationStalled`` after ``generation_timeout`` seconds
        without a batch, ``NoLearningSignal`` and ``TooManyFaults`` when going on makes no sense.
        """
        started = time.monotonic()
        batch = self._wait(self._next_batch(), self.config.generation_timeout)
        batch.stats["time/wait_generation"] = time.monotonic() - started
        return batch

    def set_version(self, version: int) -> None:
        """The trainer has made policy ``version``; begin what that allows."""

        def advance() -> None:
            self.version = version
            self._admit()

        self._call(advance)

    def settle(self) -> None:
        """Wait until everything that may run at this version has finished (deterministic mode, before a step)."""
        self._wait(self._until(lambda: not self.running), self.config.generation_timeout)

    def snapshot(self) -> PipelineState:
        """The pipeline's state at this moment; groups in flight are listed to be played again.

        In deterministic mode they are finished first.
        """
        if self.config.deterministic:
            self.settle()
        return self._call(
            lambda: replace(self.state, ready=list(self.state.ready), requeue=sorted(self.running) + self.state.requeue)
        )

    def close(self) -> None:
        """Cancel what runs and end the thread; calling it again does nothing."""
        if self._thread is None or self._loop is None:
            return
        self._draining = True
        asyncio.run_coroutine_threadsafe(self._cancel_all(), self._loop).result(timeout=30)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=30)
        self._thread = None

    # --- on the pipeline's own loop -----------------------------------------------------------------------------

    def _serve(self, ready: threading.Event) -> None:
        self._loop = asyncio.new_event_loop()
        asyncio.set_event_loop(self._loop)
        self._changed = asyncio.Condition()
        self._loop.call_soon(ready.set)
        self._loop.run_forever()
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()

    def _call(self, function: Callable[[], Any]) -> Any:
        async def run() -> Any:
            return function()

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result()  # type: ignore[arg-type]

    def _wait(self, work: Any, timeout_s: float) -> Any:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)  # type: ignore[arg-type]
        try:
            return future.result(timeout=timeout_s)
        except FutureTimeout:
            future.cancel()
            awaited = self._describe_running()
            raise GenerationStalled(
                f"no batch after {timeout_s:g} s: {awaited}. Raise generation_timeout, or look at why they take so long",
                waiting_for=awaited,
                elapsed_s=timeout_s,
            ) from None

    def _describe_running(self) -> str:
        if not self.running:
            return "nothing is running, and the finished groups do not fill a batch"
        index, (started, version, _) = min(self.running.items(), key=lambda entry: entry[1][0])
        example = self.schedule.example(index).example_id
        return (
            f"{len(self.running)} group(s) are running, the oldest for {time.monotonic() - started:.0f} s "
            f"(example {example}, begun at policy version {version})"
        )

    @property
    def capacity(self) -> int:
        """Rollouts that may be begun now."""
        batch, group = self.config.batch_size, self.config.rollouts_per_example
        running = len(self.running) * group
        taken = self.state.delivered * batch + len(self.state.ready) * group + running
        owed = (self.config.max_off_policy_steps + self.version + 1) * batch - taken
        return min(max(group, self.config.max_concurrent) - running, owed)

    def _admit(self) -> None:
        """Begin as many groups as the capacity allows, those of an interrupted run first."""
        group = self.config.rollouts_per_example
        while not self._draining and self._failure is None and self.capacity >= group and not self._exhausted:
            if self.state.requeue:
                index = self.state.requeue.pop(0)
            else:
                index, self.state.next_index = self.state.next_index, self.state.next_index + 1
            task = asyncio.ensure_future(self._play(index))
            self.running[index] = (time.monotonic(), self.version, task)

    @property
    def _exhausted(self) -> bool:
        """Whether the batches to come have had their share of groups, dropped ones included (``oversample``)."""
        ahead = (self.config.max_off_policy_steps + 1) * self._groups_per_batch
        return self.state.next_index - self.state.base >= math.ceil(self.config.oversample * ahead)

    @property
    def _groups_per_batch(self) -> int:
        return self.config.batch_size // self.config.rollouts_per_example

    async def _play(self, index: int) -> None:
        example = self.schedule.example(index)
        context = replace(self.context, seed=self.schedule.seed_of(index))
        siblings = self.config.rollouts_per_example
        jobs = [Job(example, sibling, siblings, index * siblings + sibling) for sibling in range(siblings)]
        try:
            states = await play_group(self.env, jobs, context)
            self._collect(Group(index, example.example_id, tuple(Record.of(state) for state in states)))
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # noqa: BLE001 - raised again in the trainer's thread by next_batch
            self._failure = self._failure or error
        finally:
            self.running.pop(index, None)
            async with self._changed:
                self._admit()
                self._changed.notify_all()

    def _collect(self, group: Group) -> None:
        self._faults.extend(record.error is not None for record in group.records)
        failed, seen = sum(self._faults), len(self._faults)
        if seen >= self.config.batch_size and failed > self.config.max_error_fraction * seen:
            last = next((r.error for r in reversed(group.records) if r.error), "")
            raise TooManyFaults(
                f"{failed} of the last {seen} rollouts failed, the last with {last}; training stops "
                f"(max_error_fraction={self.config.max_error_fraction:g})",
                cause=last,
                count=failed,
            )
        drop = self.config.zero_variance == "drop" and group.is_dead(self.config)
        (self.discarded if drop else self.state.ready).append(group)

    async def _next_batch(self) -> StepBatch:
        while True:
            await self._until(self._batch_is_there)
            groups = self._take()
            discarded, self.discarded = self.discarded, []
            batch = build(groups, discarded, self.config, self.world)
            if batch.num_tokens:
                self._batches_without_signal = 0
                self.state.delivered += 1
                batch.stats.update(self._pipeline_stats(groups))
            elif groups or discarded:
                self._note_no_signal([*groups, *discarded])
            self._admit()
            if batch.num_tokens:
                return batch

    def _pipeline_stats(self, groups: Sequence[Group]) -> dict[str, float]:
        ages = [self.version - group.oldest_version for group in groups]
        stale, self.stale = self.stale, 0
        return {
            "batch/short": int(len(groups) < self._groups_per_batch),
            "groups/dropped_stale": stale,
            "staleness/mean": float(np.mean(ages)),
            "staleness/max": max(ages),
        }

    def _batch_is_there(self) -> bool:
        """Whether a batch can be taken: enough groups, and none still running that would be too old for the next."""
        last_chance = self.version - self.config.max_off_policy_steps
        if any(begun <= last_chance for _, begun, _ in self.running.values()):
            return False
        self._drop_stale()
        wanted = self._groups_per_batch
        if len(self.state.ready) < wanted:
            return self._exhausted and not self.running
        if self.config.deterministic and self.running:  # take in the order of the indices, whatever finishes first
            return sorted(group.index for group in self.state.ready)[wanted - 1] < min(self.running)
        return True

    def _drop_stale(self) -> None:
        oldest = self.version - self.config.max_off_policy_steps
        fresh = [group for group in self.state.ready if group.oldest_version >= oldest]
        if len(fresh) < len(self.state.ready):
            self.stale += len(self.state.ready) - len(fresh)
            self.state.ready = fresh
            self._admit()

    def _take(self) -> list[Group]:
        """The oldest ready groups, in the order in which they were begun."""
        self.state.ready.sort(key=lambda group: group.index)
        taken, self.state.ready = (
            self.state.ready[: self._groups_per_batch],
            self.state.ready[self._groups_per_batch :],
        )
        if len(taken) == self._groups_per_batch:
            self.state.base = max(self.state.base, taken[-1].index + 1)
        else:
            self.state.base = self.state.next_index
        return taken

    def _note_no_signal(self, groups: Sequence[Group]) -> None:
        self._batches_without_signal += 1
        rewards = np.concatenate([group.rewards for group in groups]) if groups else np.array([math.nan])
        values, counts = np.unique(np.round(rewards, 3), return_counts=True)
        histogram = {float(value): int(count) for value, count in zip(values, counts, strict=True)}
        shown = ", ".join(f"{value:g} x {count}" for value, count in list(histogram.items())[:8])
        limit = self.config.no_signal_steps
        log.warning("no group of this batch has two different rewards (rewards: %s)", shown)
        if limit and self._batches_without_signal >= limit:
            raise NoLearningSignal(
                f"{limit} batches in a row had no group with two different rewards, so there is nothing to learn from "
                f"(rewards of the last: {shown}). Make the task easier or harder, raise rollouts_per_example or the "
                "temperature, or check the reward function",
                histogram=histogram,
            )

    async def _until(self, condition: Callable[[], bool]) -> None:
        async with self._changed:
            while True:
                if self._failure is not None:
                    raise self._failure
                if condition():
                    return
                await self._changed.wait()

    async def _cancel_all(self) -> None:
        tasks = [task for _, _, task in self.running.values()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=20)
        close = getattr(self.context.client, "aclose", None)
        if close is not None:
            await close()


__all__ = ["Orchestrator", "PipelineState", "RunError", "Schedule"]
