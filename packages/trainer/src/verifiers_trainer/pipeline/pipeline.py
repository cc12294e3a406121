"""``Pipeline``: starts groups of rollouts, collects them, and builds the batches.

Guarantees: no token older than ``max_off_policy_steps`` batches is trained on; a batch holds
``batch_size`` rollouts of groups with a learning signal, or is marked short; slow rollouts are
awaited rather than dropped, so lengths are not biased; a failure is raised by ``next_batch``, not
hidden behind a time-out.

Concurrency follows from four numbers (b = batches trained so far, which is the policy version
divided by the optimizer steps of a batch; k = allowed lag; B = batch size)::

    capacity = min(max_concurrent - running, (k + b + 1)·B - (delivered·B + ready + running))      [rollouts]

With k = 0 nothing is generated while a batch trains; with k = 1 the next batch is generated
meanwhile ("one step off-policy"). Groups without a learning signal leave the sum, and replacements
are started.

Everything runs on one event loop; ``thread.PipelineThread`` is its blocking handle for the
trainer's thread. Rollouts are run by core (``verifiers.runs.runner``).
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace

import numpy as np

from verifiers.data.examples import Example, examples_from
from verifiers.environments.base import Environment
from verifiers.errors import ConfigError, RunError
from verifiers.rollouts.state import State
from verifiers.runs.options import RunOptions
from verifiers.runs.plan import Job
from verifiers.runs.rollout import (
    GenerateJob,
    Progress,
    RunContext,
    RunEnvironment,
    generate_and_score,
    generate_group,
)
from verifiers.runs.runner import job_generator
from verifiers.runtime.calls import blocking
from verifiers_trainer.algorithm.batch import Group, TrainBatch, build
from verifiers_trainer.pipeline.health import FaultMeter, SignalMeter
from verifiers_trainer.pipeline.mixture import member_of
from verifiers_trainer.pipeline.schedule import (
    PipelineState,
    Pool,
    Schedule,
    Solved,
    amid_batch,
    forget_batch,
)
from verifiers_trainer.settings.config import RLConfig

log = logging.getLogger(__name__)

RecordDropped = Callable[[int, Sequence[Group], Mapping[str, float]], None]
"""(step, groups, numbers): keeps the finished groups that the step is not trained on; ``numbers``
are those of a batch without any signal, else empty."""
DecideRewards = Callable[[int, Sequence[State]], Awaitable[Mapping[str, float] | None]]
"""(group index, its rollouts): changes their rewards; returns the weights used, or None for the
rubric's."""
CANCEL_S = 20.0
"""Seconds that cancelled rollouts may take to end."""


@dataclass(frozen=True, slots=True)
class InFlightGroup:
    """A group whose rollouts are running."""

    started: float
    """On the monotonic clock, in seconds."""
    version: int
    """The policy version at its start; none of its tokens is older."""
    task: asyncio.Task[None]
    progress: Progress
    """Its rollouts, to report what they wait for; rollouts in worker processes are not included."""


class Pipeline:
    """The rollouts of a training run, on one event loop: ``open``, then ``next_batch`` and
    ``advance`` in turn.

    A group is where it is held, each arrow a method::

        not begun ──_begin──► running ──_collect──► state.ready ──_take──────► in a batch
            │                             │               └──────_drop_stale─► gone, counted as stale
            └──_next_index──► skipped     └───────► state.discarded ──_count_discarded──► in a batch's statistics

    A checkpoint saves ready and discarded groups; running groups begin again. A group that an error
    forces between the optimizer steps of a batch saves the batch's groups too: it is built again,
    and trained from its next step on.
    """

    def __init__(
        self,
        env: Environment,
        examples: Sequence[Example],
        context: RunContext,
        config: RLConfig,
        schedule: Schedule | None = None,
        decide_rewards: DecideRewards | None = None,
        record_dropped: RecordDropped | None = None,
        no_prompt_fits: str = "",
    ):
        self.env, self.context, self.config = env, context, config
        self.schedule = schedule or Schedule(examples, config.seed, config.shuffle_dataset)
        self._decide_rewards, self._record_dropped = decide_rewards, record_dropped
        self._steps_per_batch = config.steps_per_batch
        self.version = 0
        self.served = 0
        """The policy version being served; behind ``version`` where weights are not pushed after
        every step."""
        self.state = PipelineState()
        self.running: dict[int, InFlightGroup] = {}
        """By group index."""
        self.stale = 0
        """Number of stale groups dropped since the last batch."""
        self._in_training: list[Group] = []
        """Groups of the newest batch: saved while some of its optimizer steps are to come."""
        self._goes_on = False
        """Whether the batch of those groups, of which some steps were taken, is to be built
        again."""
        self._used: list[Group] = []
        """Groups used by batches since the policy version changed."""
        self._workers = AsyncExitStack()
        self._generate: GenerateJob = generate_and_score
        self.progressed = time.monotonic()
        """When the newest rollout or group was finished, on the monotonic clock."""
        self._faults = FaultMeter(config)
        per_pass = len(self.schedule.examples) * config.rollouts_per_example
        self._signal = SignalMeter(
            config, self.state.signal, per_pass, self.schedule.may_skip, no_prompt_fits
        )
        self._failure: BaseException | None = None
        self._changed = asyncio.Condition()
        self.closing = False
        """Whether no group may be started any more; set before ``close``, and by it."""

    # --- called by PipelineThread -----------------------------------------------------------------

    async def open(self, version: int = 0, state: PipelineState | None = None) -> None:
        """Start the environment workers, if configured, and the first groups; ``state`` continues
        an earlier run's."""
        self.version = self.served = version
        if state is not None:
            self.state, self._signal.signal = state, state.signal
            count, state.in_training = state.in_training, 0
            self._in_training, state.ready = state.ready[:count], state.ready[count:]
            self._goes_on = count > 0
            if not count:  # older versions saved the groups of such a batch as others, or not
                forget_batch(state, version, self.config)
        if self.config.num_env_workers:
            options = RunOptions(
                num_workers=self.config.num_env_workers,
                worker_backend=self.config.env_worker_backend,
                max_concurrent_scoring=self.config.max_concurrent_scoring,
                max_concurrent_tools=self.config.max_concurrent_tools,
            )
            workers = job_generator(self.env, self.context, options)
            self._generate = await self._workers.enter_async_context(workers)
        self._drop_stale()
        self._admit()

    async def next_batch(self) -> TrainBatch | None:
        """The next batch, as soon as its rollouts are finished; None when the task is solved.

        Raises the error of a failed rollout task at once, ``NoLearningSignal`` as ``SignalMeter``
        does, ``TooManyFaults`` above ``max_error_fraction``.
        """
        if self._goes_on:  # everything about it was counted before
            self._goes_on = False
            batch = self._built(self._in_training, [])
            batch.stats.update(self._stats(self._in_training))
            return batch
        while True:
            # 1. wait until enough groups are finished, and take the oldest
            await self._until(self._batch_is_ready)
            groups, counted = self._take(), self._count_discarded()
            # 2. build the batch
            batch = self._built(groups, counted)
            self._used += [*groups, *counted]
            # 3. is there anything to learn from it, and is the task solved
            is_step, numbers = self._signal.note(batch)
            if not is_step:
                self._drop(batch, numbers)
            if self._signal.is_solved():
                if is_step:
                    self._drop(batch, {})
                return None
            # 4. count it, and start rollouts in place of those that it took
            if is_step:
                self.state.delivered += 1
                self._in_training = groups
                batch.stats.update(self._stats(groups))
            else:
                self._count_used()  # no ``advance`` follows before the next batch
            self._admit()
            if is_step:
                return batch

    def _built(self, groups: Sequence[Group], counted: Sequence[Group]) -> TrainBatch:
        started = time.monotonic()
        batch = build(groups, counted, self.config, self.config.world_size)
        batch.stats["time/pack"] = time.monotonic() - started
        return batch

    def _drop(self, batch: TrainBatch, numbers: Mapping[str, float]) -> None:
        """Record the groups of a batch that no step will count."""
        if self._record_dropped is not None and (groups := [*batch.groups, *batch.discarded]):
            self._record_dropped(self.version + 1, groups, numbers)

    async def advance(self, version: int, served: int) -> None:
        """Set the trained policy version and the ``served`` version; start the groups
        that this allows."""
        self.version, self.served = version, served
        self._count_used()
        self._drop_stale()
        self._admit()

    async def settle(self) -> None:
        """Wait until all groups that may run at this version have finished."""
        await self._until(lambda: not self.running)

    async def snapshot(self) -> PipelineState:
        """A copy of the present state; running groups are requeued."""
        return self.copy_state()

    def copy_state(self) -> PipelineState:
        """``snapshot``, also from another thread while this loop is blocked."""
        state = self.state
        in_training = self._in_training if amid_batch(state, self.version, self.config) else []
        return replace(
            state,
            ready=[*in_training, *state.ready],
            in_training=len(in_training),
            discarded=list(state.discarded),
            requeue=sorted([*self.running, *state.requeue]),
            skipped=list(state.skipped),
            solved=replace(state.solved, streaks=dict(state.solved.streaks)),
            pool=replace(state.pool, measured=dict(state.pool.measured)),
            signal=replace(state.signal),
        )

    async def close(self) -> None:
        """Cancel running groups, stop the workers, close the client."""
        self.closing = True
        tasks = [group.task for group in self.running.values()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=CANCEL_S)
        await self._workers.aclose()
        close = getattr(self.context.client, "aclose", None)
        if close is not None:
            await close()

    def waiting_for(self) -> str:
        """Describe what a batch waits for: the number of running groups, and what the oldest waits
        for."""
        running = list(self.running.items())
        if not running:
            return "nothing is running, and the finished groups do not fill a batch"
        index, oldest = min(running, key=lambda entry: entry[1].started)
        states = [state for _, state in list(oldest.progress.running.values()) if state is not None]
        awaited = Counter(
            state.waiting_for or "its turn" for state in states if state["reward"] is None
        )
        waiting = ", ".join(f"{count} for {what}" for what, count in awaited.most_common())
        return (
            f"{len(running)} group(s) are running, the oldest for"
            f" {time.monotonic() - oldest.started:.0f} s (example"
            f" {self.schedule.example(index).example_id}, started at policy version"
            f" {oldest.version}; of its rollouts wait {waiting or 'none'})"
        )

    # --- admission: not begun -> running or skipped -----------------------------------------------

    @property
    def capacity(self) -> int:
        """Number of rollouts that may be started now."""
        batch, group = self.config.batch_size, self.config.rollouts_per_example
        running = len(self.running) * group
        admitted = self.state.delivered * batch + len(self.state.ready) * group + running
        allowed = (self.config.max_off_policy_steps + self._batch_of(self.served) + 1) * batch
        return min(self.config.max_concurrent - running, allowed - admitted)

    @property
    def _exhausted(self) -> bool:
        """Whether the next batches' limit of started groups (``oversample``) is reached, dropped
        groups included."""
        ahead = (self.config.max_off_policy_steps + 1) * self._groups_per_batch
        begun = self.state.next_index - self.state.base - len(self.state.skipped)
        return begun >= math.ceil(self.config.oversample * ahead)

    def _batch_of(self, version: int) -> int:
        """Number of batches a policy version was trained on, the unit of the lag."""
        return version // self._steps_per_batch

    @property
    def _groups_per_batch(self) -> int:
        return self.config.batch_size // self.config.rollouts_per_example

    def _admit(self) -> None:
        """Start as many groups as the capacity allows, requeued groups first; none for the policy
        after the last step."""
        group = self.config.rollouts_per_example
        # a resumed, longer run starts them with this policy
        is_trained = 0 <= self.config.max_steps <= self.version
        while not (is_trained or self.closing) and self._failure is None and self.capacity >= group:
            if self.state.requeue:
                self._begin(self.state.requeue.pop(0))
            elif not self._exhausted:
                self._begin(self._next_index())
            else:
                return

    def _next_index(self) -> int:
        """The index of the next group to start; those of solved examples (``skip_solved``) and of
        examples that rest (``curriculum="pool"``) are skipped.

        When all examples are solved, none is skipped. What is skipped changes with the policy
        version alone, so that the order does not depend on which rollouts finish first.
        """
        num_examples, left_out = len(self.schedule.examples), self._left_out
        may_skip = self.schedule.may_skip and len(self.state.solved) < num_examples
        if left_out is not None and may_skip:
            for _ in range(num_examples):
                example = self.schedule.example(self.state.next_index)
                if not left_out.passes_over(example.example_id):
                    break
                self.state.skipped.append(self.state.next_index)
                self.state.next_index += 1
        self.state.next_index += 1
        return self.state.next_index - 1

    @property
    def _left_out(self) -> Solved | Pool | None:
        """What says which examples are passed over; None: no example is."""
        if self.config.skip_solved:
            return self.state.solved
        return self.state.pool if self.config.curriculum == "pool" else None

    def _count_used(self) -> None:
        used, self._used = self._used, []
        if self._left_out is not None:
            self._left_out.count(used)

    def _begin(self, index: int) -> None:
        progress = Progress()
        task = asyncio.ensure_future(self._run_group(index, progress))
        self.running[index] = InFlightGroup(time.monotonic(), self.served, task, progress)

    # --- one group: running -> ready or discarded -------------------------------------------------

    async def _run_group(self, index: int, progress: Progress) -> None:
        siblings = self.config.rollouts_per_example
        try:
            example = self.schedule.example(index)
            context = replace(self.context, seed=self.schedule.seed_of(index), progress=progress)
            group = await run_group(
                self.env, example, index, siblings, context, self._run_rollout, self._decided
            )
            self._collect(group.limited(self.config))
        except asyncio.CancelledError as error:
            if self.closing:
                raise
            example_id = self.schedule.example(index).example_id
            cancelled = RunError(
                f"the rollouts of example {example_id} were cancelled from outside"
            )
            cancelled.__cause__ = error
            self.fail(cancelled)
        except BaseException as error:  # noqa: BLE001 - raised again in the trainer's thread by next_batch
            self.fail(error)
        finally:
            self.running.pop(index, None)
            async with self._changed:
                self._admit()
                self._changed.notify_all()

    async def _decided(self, index: int, states: Sequence[State]) -> Mapping[str, float] | None:
        self.progressed = time.monotonic()
        if self._decide_rewards is None:
            return None
        return await self._decide_rewards(index, states)

    async def _run_rollout(self, env: RunEnvironment, job: Job, context: RunContext) -> State:
        state = await self._generate(env, job, context)
        self.progressed = time.monotonic()
        return state

    def fail(self, error: BaseException) -> None:
        """End the run with this error, unless an earlier error did; ``next_batch`` raises it."""
        self._failure = self._failure or error

    def _collect(self, group: Group) -> None:
        if group.oldest_version is not None and group.oldest_version < 0:
            raise ConfigError(
                "the inference server does not report which policy version sampled its tokens"
                " (weight_versions), so their age is unknown; use the embedded engine or a server"
                " that reports it"
            )
        self._faults.add(group)
        if self.config.zero_variance == "drop" and group.is_dead(self.config):
            self.state.discarded.append(group)
        else:
            self.state.ready.append(group)
            self._drop_stale()

    # --- the next batch: ready -> used or stale, discarded -> used --------------------------------

    async def _until(self, condition: Callable[[], bool]) -> None:
        async with self._changed:
            while True:
                if self._failure is not None:
                    raise self._failure
                if condition():
                    return
                await self._changed.wait()

    def _batch_is_ready(self) -> bool:
        """Whether a batch can be taken now without making other groups stale."""
        size = self._groups_per_batch
        ready = sorted(self.state.ready, key=lambda group: group.index)
        waits = self.config.stale_policy == "wait"
        if waits and self.running and self._would_go_stale(ready[size:]):
            return False
        if len(ready) < size:
            return self._exhausted and not self.running
        # take groups in index order, whichever finishes first
        if self.config.deterministic and self.running:
            return ready[size - 1].index < min(self.running)
        return True

    def _would_go_stale(self, remaining: Sequence[Group]) -> bool:
        """Whether more groups would remain than the next batches can take before they are stale.

        The n-th oldest remaining group is trained n // groups_per_batch batches after the next.
        """
        versions = [group.version for group in self.running.values()]
        versions += [v for group in remaining if (v := group.oldest_version) is not None]
        oldest = self._batch_of(self.version) + 1 - self.config.max_off_policy_steps
        batches = enumerate(sorted(map(self._batch_of, versions)))
        return any(
            batch < oldest + position // self._groups_per_batch for position, batch in batches
        )

    def _drop_stale(self) -> None:
        oldest_batch = self._batch_of(self.version) - self.config.max_off_policy_steps
        oldest = oldest_batch * self._steps_per_batch
        fresh = [g for g in self.state.ready if (v := g.oldest_version) is None or v >= oldest]
        self.stale += len(self.state.ready) - len(fresh)
        self.state.ready = fresh

    def _take(self) -> list[Group]:
        """The oldest ready groups, in the order of their start."""
        size = self._groups_per_batch
        ready = sorted(self.state.ready, key=lambda group: group.index)
        if self.config.stale_policy == "drop" and not self.config.deterministic:
            ready = list(self.state.ready)  # in the order of completion
        groups, self.state.ready = ready[:size], ready[size:]
        newest = max((group.index for group in groups), default=-1)
        self.state.base = (
            max(self.state.base, newest + 1) if len(groups) == size else self.state.next_index
        )
        self.state.skipped = [index for index in self.state.skipped if index >= self.state.base]
        return groups

    def _count_discarded(self) -> list[Group]:
        """The discarded groups that were started before the newest group of this batch."""
        discarded, base = self.state.discarded, self.state.base
        self.state.discarded = [group for group in discarded if group.index >= base]
        return [group for group in discarded if group.index < base]

    def _stats(self, groups: Sequence[Group]) -> dict[str, float]:
        begun = [self._batch_of(v) for group in groups if (v := group.oldest_version) is not None]
        ages = [self._batch_of(self.version) - batch for batch in begun]
        stale, self.stale = self.stale, 0
        return {
            "batch/short": int(len(groups) < self._groups_per_batch),
            "batch/fill": len(groups) / self._groups_per_batch,
            "groups/dropped_stale": stale,
            "staleness/mean": float(np.mean(ages)) if ages else math.nan,
            "staleness/max": max(ages, default=math.nan),
            **({} if self._left_out is None else self._left_out.numbers),
        }


async def run_group(
    env: Environment,
    example: Example,
    index: int,
    siblings: int,
    context: RunContext,
    generate: GenerateJob = generate_and_score,
    decide_rewards: DecideRewards | None = None,
) -> Group:
    """The scored rollouts of an example as the group of that index."""
    jobs = [Job(example, n, siblings, index * siblings + n) for n in range(siblings)]
    states = await generate_group(env, jobs, context, generate)
    weights = None if decide_rewards is None else await decide_rewards(index, states)
    if weights is None:
        weights = env.for_row(example.row).rubric.plan().weights
    rollouts = tuple(state.rollout() for state in states)
    return Group(index, example.example_id, rollouts, member_of(env, example.row), dict(weights))


def sample_groups(
    env: Environment,
    rows: Sequence[Mapping[str, object]],
    first: int,
    siblings: int,
    context: RunContext,
    max_concurrent: int,
) -> list[Group]:
    """A group of ``siblings`` scored rollouts of each row, numbered from ``first``; block until
    done. The context's client is closed at the end.

    *Raises* ConfigError for rows that are none of the environment's.
    """
    try:
        examples = examples_from(list(rows), env.row_format)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"sample got no rows of the dataset: {error}") from error

    async def work() -> list[Group]:
        slots = asyncio.Semaphore(max(1, max_concurrent // siblings))

        async def numbered(number: int) -> Group:
            index = first + number
            async with slots:
                seeded = replace(context, seed=(context.seed or 0) * 1_000_003 + index)
                return await run_group(env, examples[number], index, siblings, seeded)

        try:
            return await asyncio.gather(*map(numbered, range(len(examples))))
        finally:
            if (close := getattr(context.client, "aclose", None)) is not None:
                await close()

    return blocking(work)
