"""Run many rollouts: a plan of them, workers that generate and score them, and the store of finished ones.

A ``Plan`` is examples times siblings, in order; ``pending`` compares it with saved rollouts. A ``Runner`` has a fixed
number of workers that take jobs from it. The flow of one job: ``generate_and_score`` returns a state, failed or not.
Without group functions the rollout is stored at once. With them the group is the unit: its last member scores it, and
its rollouts are one write. ``RunStore`` holds finished rollouts by their index in the plan, with or without a journal;
those of an earlier run and of this one are returned in the same format.

Guarantees: a failed rollout does not affect others; a rollout is acknowledged (counted, reported, returned) only after
its bytes are durable, where there is a journal; memory grows with concurrency, not with the plan (apart from retained
states and results; those of a large run are not held: ``large_store``); no model call starts after a cancellation.

``run`` decides what a run consists of; ``results`` computes statistics.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from verifiers.data.examples import CHUNK, Example, RowFormat, Table, copy_row
from verifiers.errors import (
    BudgetExhausted,
    ConfigError,
    JournalError,
    ModelError,
    RolloutTimeout,
    RunError,
    TooManyFaults,
)
from verifiers.results import GenerateMetadata, GenerateOutputs, fill_advantages
from verifiers.results.rows import (
    DISK_FIELDS,
    RolloutOutput,
    output_to_state,
    row_for_disk,
    saved_row,
    set_advantage,
    state_to_output,
)
from verifiers.results.run_metadata import Measurements
from verifiers.rollouts.author_code import Hook, ends_the_run
from verifiers.rollouts.contract import LoadedFrom, RolloutEnvironment
from verifiers.rollouts.loop import conclude, current_run, generate
from verifiers.rollouts.state import State
from verifiers.rubrics import Rubric
from verifiers.rubrics.scoring import leave_unscored, measure, scoring_error
from verifiers.runtime.calls import maybe_await, num_positional
from verifiers.storage.directory import RunDirectory
from verifiers.storage.identity import EnvironmentParts, rollout_key
from verifiers.storage.journal import Journal
from verifiers.types import Immutable, StopReason

if TYPE_CHECKING:
    from verifiers.clients.protocol import ClientLike

Slot = AbstractAsyncContextManager[Any]
HEX_DIGITS = "0123456789abcdef"
YIELD_EVERY = 8
"""Jobs after which a worker yields to the event loop, in case none of them suspended."""
NUM_COMPARED = 2_000
"""Examples of a plan that are compared with the saved rollouts at a time."""

METADATA_EVERY_S = 10.0
"""Seconds between writes of ``metadata.json`` during a run."""
REPORT_EVERY_S = 1.0
"""Seconds between updates of the metadata passed to ``on_progress``."""
COST_SHARE = 0.02
"""Largest share of the run time spent on computing metadata; a long run computes it less often."""
SERVED_MODELS = "served_models"
"""Column of a rollout, and fact of a run: names under which the server answered, where the requested one is not all."""
LARGE_PLAN = 20_000
"""Rollouts of a plan from which on they are not held."""


class RunEnvironment(RolloutEnvironment, EnvironmentParts, Protocol):
    """What a run needs of an environment beside the loop: data, rubric and identity."""

    sampling_args: dict[str, Any]
    rubric: Rubric
    monitor_rubric: Rubric
    """Metrics of every rollout beside the rubric's."""
    row_format: RowFormat
    score_rollouts: bool
    pass_threshold: float | None
    max_workers: int | None
    loaded_from: LoadedFrom | None
    """How another process loads it; None when it was constructed directly."""
    changes: dict[str, Any]
    """Settings changed since it was loaded."""

    def check_definition(self, sample: Sequence[Example]) -> None:
        """Check, before the first rollout, that nothing is missing that these examples need. *Raises* ConfigError."""
        ...

    def warn_once(self, message: str) -> None:
        """Log a warning, unless it was logged for this environment before."""
        ...

    @property
    def train_table(self) -> Table | None: ...

    @property
    def eval_table(self) -> Table: ...

    @property
    def has_own_loop(self) -> bool:
        """Whether the author wrote ``rollout``, which then runs in place of the loop."""
        ...

    def for_row(self, row: Mapping[str, Any]) -> RunEnvironment: ...

    async def init_state(
        self,
        input: Mapping[str, Any],
        client: ClientLike | None,
        model: str,
        sampling_args: Mapping[str, Any] | None = None,
    ) -> State: ...

    def rollout(self, *args: Any, **keywords: Any) -> Any: ...

    def set_kwargs(self, **settings: object) -> None: ...


# --- the plan


class Job(Immutable, frozen=True):
    """One planned rollout: the ``sibling``-th of an example that has ``siblings`` of them."""

    example: Example
    sibling: int
    siblings: int
    position: int
    """Index in the plan; results are ordered by it."""
    num_pending: int | None = None
    """Siblings that this run generates when others are finished already; None = all."""

    @property
    def in_part(self) -> bool:
        """Whether an earlier run finished some of the siblings."""
        return self.num_pending is not None and self.num_pending < self.siblings


@dataclass(slots=True)
class Plan:
    """Every rollout of a run, in order: examples first, then siblings."""

    examples: Sequence[Example]
    siblings: Sequence[int]
    """How many rollouts each example has."""
    sibling_rows: Mapping[int, Sequence[Example]] = field(default_factory=dict)
    """Index of an example -> one row per sibling, where the rows of one ``example_id`` differ."""
    _may_repeat: bool | None = field(default=None, init=False, repr=False, compare=False)
    """Whether two examples may have equal content; None until it was asked for, since that sorts all hashes."""

    @classmethod
    def of_rows(cls, rows: Sequence[Example]) -> Plan:
        """Rows of equal ``example_id`` are siblings, in order of appearance; each row is run unchanged."""
        groups: dict[int, list[Example]] = {}
        for row in rows:
            groups.setdefault(row.example_id, []).append(row)
        members = list(groups.values())
        differing = {n: group for n, group in enumerate(members) if len({row.hash for row in group}) > 1}
        return cls([group[0] for group in members], [len(group) for group in members], differing)

    @classmethod
    def wrapped(cls, table: Table, n_samples: int) -> Plan:
        """``n_samples`` rollouts over the rows in order, wrapping around; repeated rows are siblings."""
        if not len(table):
            raise ConfigError("n_samples cannot be taken from an empty dataset", key="n_samples")
        rounds, rest = divmod(n_samples, len(table))
        counts = [rounds + (index < rest) for index in range(min(n_samples, len(table)))]
        return cls(table.take(len(counts)), counts)

    def __len__(self) -> int:
        return sum(self.siblings)

    @property
    def columns(self) -> set[str]:
        """The columns of the first row; the others are assumed to have them too."""
        return set(self.examples[0].row)

    def groups(self, flags: bytes | bytearray | None = None) -> Iterator[list[Job]]:
        """The jobs of one example at a time, or of those that have a 1 in ``flags`` at the index of a rollout.

        Formats the rows of these examples alone.
        """
        if flags is not None and 1 not in flags:
            return
        hashes, position = self.hashes(), 0
        for start in range(0, len(self.siblings), CHUNK):
            selected: dict[int, tuple[int, list[str]]] = {}
            for index, named in enumerate(itertools.islice(hashes, CHUNK), start):
                if flags is None or 1 in flags[position : position + len(named)]:
                    selected[index] = position, named
                position += len(named)
            for (index, (first, named)), example in zip(
                selected.items(), self._examples_at(list(selected)), strict=True
            ):
                rows = self.sibling_rows.get(index) or [example]
                yield [
                    Job(_with_hash(rows[n % len(rows)], name), n, len(named), first + n, None)
                    for n, name in enumerate(named)
                ]

    def hashes(self) -> Iterator[list[str]]:
        """For one example at a time the hash of each of its rollouts; formats no row that was formatted before.

        Rows of equal content are numbered: the second and later ones have their number after the hash (``9f86….2``), so
        that every rollout has a unique key on disk and separate seeds.
        """
        if isinstance(self.examples, Table):
            plain = self.examples.hashes()
            self._may_repeat = self.examples.may_repeat() if self._may_repeat is None else self._may_repeat
        else:
            plain, self._may_repeat = (example.hash for example in self.examples), True
        counts: dict[str, int] = {}
        for index, (own, count) in enumerate(zip(plain, self.siblings, strict=True)):
            rows = self.sibling_rows.get(index)
            if rows is None and not self._may_repeat:
                yield [own] * count
                continue
            hashes = [own] if rows is None else [row.hash for row in rows]
            distinct = {each: _numbered(each, counts) for each in hashes}
            yield [distinct[hashes[n % len(hashes)]] for n in range(count)]

    def example_ids(self) -> Iterator[int]:
        """The id of each example; formats no row."""
        if not isinstance(self.examples, Table):
            yield from (example.example_id for example in self.examples)
            return
        for start in range(0, len(self.examples), CHUNK):
            yield from self.examples[start : start + CHUNK].example_ids()

    def _examples_at(self, indexes: list[int]) -> list[Example]:
        if isinstance(self.examples, Table):
            return self.examples.at(indexes)
        return [self.examples[index] for index in indexes]

    def jobs(self) -> Iterator[Job]:
        """One job at a time."""
        for group in self.groups():
            yield from group


def numbered(example: Example, counts: dict[str, int]) -> Example:
    """The example; the second and later ones of equal content with their number after the hash (``9f86….2``).

    ``counts`` holds how many of each hash came before, and is updated. Rollouts then have keys and seeds of their own.
    """
    return _with_hash(example, _numbered(example.hash, counts))


def _numbered(example_hash: str, counts: dict[str, int]) -> str:
    number = counts[example_hash] = counts.get(example_hash, 0) + 1
    return example_hash if number == 1 else f"{example_hash}.{number}"


def _with_hash(example: Example, name: str) -> Example:
    return example if example.hash == name else replace(example, hash=name)


class Saved(Protocol):
    """The saved rollouts of a run, each an object of their own kind."""

    num_saved: int
    """Different rollouts that are saved."""

    def find(self, keys: Sequence[str]) -> Sequence[Any]:
        """The newest rollout of each key, None where there is none."""

    def has_error(self, rollout: Any) -> bool:
        """Whether this rollout ended in an error."""


@dataclass(slots=True)
class Pending:
    """The pending rollouts of a plan; iterating yields their jobs, which are not held in memory."""

    plan: Plan
    flags: bytearray
    """1 at the index of each pending rollout, 0 at that of a finished one."""

    def __len__(self) -> int:
        return self.flags.count(1)

    def __iter__(self) -> Iterator[Job]:
        for jobs in self.plan.groups(self.flags):
            missing = [job for job in jobs if self.flags[job.position]]
            yield from missing if len(missing) == len(jobs) else (replace(j, num_pending=len(missing)) for j in missing)

    def keys(self) -> Iterator[tuple[int, str]]:
        """(index in the plan, ``rollout_key``) of each pending rollout; formats no row."""
        if len(self):
            every = ((name, sibling) for names in self.plan.hashes() for sibling, name in enumerate(names))
            for position, (name, sibling) in enumerate(every):
                if self.flags[position]:
                    yield position, rollout_key(name, sibling)


def pending(
    plan: Plan, saved: Saved, take: Callable[[int, int, Any], None], *, whole_groups: bool, retry_errors: bool
) -> Pending:
    """Compare a plan with saved rollouts, by ``rollout_key``; ``take`` receives each that is done, after its index in
    the plan and the id of its example.

    ``whole_groups``: siblings are scored together, so a group with a missing rollout is pending as a whole.
    ``retry_errors``: a saved rollout with an error is pending again.
    """
    flags = bytearray(b"\1") * len(plan)
    if not saved.num_saved:
        return Pending(plan, flags)
    groups, position = zip(plan.example_ids(), plan.hashes(), strict=True), 0
    while several := list(itertools.islice(groups, NUM_COMPARED)):
        keys = [rollout_key(name, sibling) for _, names in several for sibling, name in enumerate(names)]
        found = iter(saved.find(keys))
        for example_id, names in several:
            rollouts = [next(found) for _ in names]
            usable = [None if r is None or (retry_errors and saved.has_error(r)) else r for r in rollouts]
            if not (whole_groups and None in usable):
                for place, rollout in enumerate(usable, position):
                    if rollout is not None:
                        flags[place] = 0
                        take(place, example_id, rollout)
            position += len(names)
    return Pending(plan, flags)


# --- one rollout


@dataclass(slots=True)
class RunControl:
    """The mutable part of a run."""

    is_over: bool = False
    """The run has returned or is stopping; no model call may start."""


@dataclass(frozen=True, slots=True)
class RunContext:
    """What all rollouts of a run share: the client and the common limits. Only ``control`` changes."""

    client: Any
    model: str
    sampling_args: Mapping[str, Any] = field(default_factory=dict)
    score: bool = True
    independent_scoring: bool = False
    require_tokens: bool = False
    seed: int | None = None
    rollout_timeout_s: float | None = 3600.0
    max_retries: int = 0
    progress: Progress | None = None
    generation_slot: Slot = field(default_factory=nullcontext)
    scoring_slot: Slot = field(default_factory=nullcontext)
    tool_slot: Slot = field(default_factory=nullcontext)
    given_client: Any = None
    """The client as the caller passed it, for ``state["client"]``; None = ``client``."""
    is_cached: bool = False
    """Whether replies come from a cache, for which every request says which sample it is."""
    control: RunControl = field(default_factory=RunControl)

    @property
    def is_over(self) -> bool:
        """Whether the run has returned or is stopping."""
        return self.control.is_over

    def serves(self, client: object, state: State) -> bool:
        """Whether a call with this ``client`` argument goes to the run's own client."""
        return client is None and state["client"] in (self.client, self.given_client)

    def check_open(self) -> None:
        """*Raises* RunError when the run is over."""
        if self.control.is_over:
            raise RunError("the run is over: a hook that outlived it requested another completion")

    def sample_of(self, state: State) -> str:
        """Which sample of its prompt the state's next turn is: number of the equal row, sibling and turn."""
        return f"{state.seed_key.lstrip(HEX_DIGITS)}:{len(state['trajectory'])}"

    def seed_of(self, state: State) -> int | None:
        """The sampling seed of the state's next turn: a function of run seed, example, sibling and turn alone."""
        if self.seed is None:
            return None
        key = f"{self.seed}:{state.seed_key}:{len(state['trajectory'])}"
        return int.from_bytes(hashlib.sha256(key.encode()).digest()[:4], "big") & 0x7FFFFFFF


async def generate_and_score(env: RunEnvironment, job: Job, context: RunContext) -> State:
    """Run one rollout and score it individually; its failure is recorded on the state."""
    state = await generate_job(env, job, context)
    await score(env, state, context)
    return state


async def generate_job(env: RunEnvironment, job: Job, context: RunContext) -> State:
    """Run one rollout without scoring it; its failure is recorded on the state.

    A ``retryable`` error other than a ``ModelError`` is retried up to ``max_retries`` times; the attempts are counted.
    (The client has already retried model calls.)
    """
    for attempt in range(1, context.max_retries + 2):
        state = await _generate_once(env, job, context)
        state.attempts = attempt
        error = state["error"]
        if error is None or not error.retryable or isinstance(error, ModelError):
            break
    return state


async def _generate_once(env: RunEnvironment, job: Job, context: RunContext) -> State:
    row = copy_row(job.example.row)
    state = await env.init_state(row, context.given_client or context.client, context.model, context.sampling_args)
    state.run, state.seed_key = context, f"{job.example.hash}:{job.sibling}"
    if context.progress is not None:
        context.progress.running[job.position] = (time.monotonic(), state)
    row_env = env.for_row(row)
    if row_env.has_own_loop:
        return await _generate_own_loop(row_env, row, state, context)
    return await generate(row_env, state, context.rollout_timeout_s)


async def _generate_own_loop(env: RunEnvironment, row: Mapping[str, Any], state: State, context: RunContext) -> State:
    """Call an author's ``rollout()``; return ``state`` with the error when it fails."""
    token, started = current_run.set((context, state.seed_key)), time.perf_counter()
    limit_s = context.rollout_timeout_s
    try:
        async with asyncio.timeout(limit_s) as scope:
            with Hook(state, "rollout", timing=None):
                result = await env.rollout(row, state["client"], context.model, context.sampling_args)
                if not isinstance(result, State):
                    raise TypeError(f"it returned {type(result).__name__}, not a State")
        result.run, result.seed_key = context, state.seed_key
        state = result
    except BaseException as error:
        if ends_the_run(error):
            raise
        if scope.expired():
            text = f"the rollout was stopped after {limit_s:g} s; raise rollout_timeout_s if it needs longer"
            error = RolloutTimeout(text, waiting_for="rollout", elapsed_s=limit_s)
        state["stop_condition"] = (StopReason.TIMEOUT if scope.expired() else StopReason.ERROR).value
        state["error"] = error
    finally:
        current_run.reset(token)
    conclude(state, started)
    return state


async def score(env: RunEnvironment, state: State, context: RunContext) -> None:
    """Compute individual scores and monitor metrics of a finished rollout; unknown when scoring is off."""
    if context.score:
        state.waiting_for = "scoring"
        try:
            async with context.scoring_slot:
                await env.rubric.score_individual(state)
        except BaseException as error:
            if ends_the_run(error):
                raise
            _mark_unscored([state], error)
        state.waiting_for = None
    else:
        leave_unscored([state])
    ran = env.for_row(state)
    await measure(ran.monitor_rubric.functions, state, ran.logger)
    timing = state["timing"]
    timing["total_ms"] = timing["generation_ms"] + timing["scoring_ms"]
    timing["overhead_ms"] = timing["generation_ms"] - timing["model_ms"] - timing["env_ms"] - timing["setup_ms"]


# --- the rollouts of one example


GenerateJob = Callable[[RunEnvironment, Job, RunContext], Coroutine[Any, Any, State]]
"""Returns the finished state of a job, failed or not."""


async def generate_group(
    env: RunEnvironment, jobs: list[Job], context: RunContext, generate: GenerateJob = generate_and_score
) -> list[State]:
    """Run all siblings of one example concurrently with ``generate``, score the group and set advantages.

    When one of them raises (a ``RunError``), the others are cancelled and awaited first.
    """
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(generate(env, job, context)) for job in jobs]
    except BaseExceptionGroup as failures:
        raise _first_leaf(failures) from failures
    states = [task.result() for task in tasks]
    await score_together(env, states, context)
    return states


def _first_leaf(failures: BaseExceptionGroup) -> BaseException:
    first: BaseException = failures
    while isinstance(first, BaseExceptionGroup):
        first = first.exceptions[0]
    return first


async def score_together(env: RunEnvironment, states: Sequence[State], context: RunContext) -> None:
    """Compute group scores and advantages of finished siblings."""
    if not context.score:
        return
    try:
        async with context.scoring_slot:
            await env.rubric.score_group_stage(states)
    except BaseException as error:
        if ends_the_run(error):
            raise
        _mark_unscored(states, error)


def groups_are_units(rubric: Rubric) -> bool:
    """Whether siblings are scored together, so that a group is stored, and resumed, as a whole."""
    return rubric.has_group_rewards or rubric.has_advantages


def _mark_unscored(states: Sequence[State], error: BaseException) -> None:
    """Record the failure of an overridden ``score_rollout`` or ``score_group``: the rewards are unknown."""
    failure = scoring_error(error, "the rubric")
    for state in states:
        state["reward"] = math.nan
        state["error"] = state["error"] or failure


# --- many rollouts


@dataclass(slots=True)
class Progress:
    """Progress of a run, for displays. Only durable rollouts are counted."""

    total: int = 0
    done: int = 0
    resumed: int = 0
    reward_sum: float = 0.0
    rewards: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    output_tokens: int = 0
    running: dict[int, tuple[float, State | None]] = field(default_factory=dict)
    """Position in the plan -> (start on the monotonic clock, state once it exists), oldest first."""
    last_done: float = field(default_factory=time.monotonic)
    started: float = field(default_factory=time.monotonic)

    def count(self, state: State) -> None:
        self.done += 1
        self.last_done = time.monotonic()
        self.output_tokens += state["usage"].get("output_tokens", 0)
        reward = state["reward"]
        if reward is not None and reward == reward:
            self.reward_sum += reward
            self.rewards += 1
        if state["error"] is not None:
            self.errors[type(state["error"]).__name__] += 1


class Sink(Protocol):
    """Where finished rollouts go."""

    async def store(self, jobs: list[Job], states: list[State]) -> None:
        """Return once these are durable; several are stored atomically."""

    def complete(self, jobs: list[Job], states: list[State]) -> None:
        """Receive all siblings of one example with their advantages, after they were stored."""


class Runner:
    """Runs a plan with a fixed number of workers.

    ``abort_after`` consecutive failures of one cause with no success between them stop the run as ``TooManyFaults``
    (0 = never). ``concurrency`` is the number of rollouts in flight. ``generate`` returns the finished state of a job.
    """

    def __init__(
        self,
        env: RunEnvironment,
        context: RunContext,
        sink: Sink,
        *,
        concurrency: int,
        abort_after: int = 32,
        progress: Progress | None = None,
        generate: GenerateJob = generate_and_score,
    ):
        self.env, self.sink, self.generate = env, sink, generate
        self.concurrency, self.abort_after = concurrency, abort_after
        self.progress = progress or context.progress or Progress()
        self.context = replace(context, progress=self.progress)
        self._groups: dict[int, list[tuple[Job, State]]] = {}
        self._streak: tuple[str, int] = ("", 0)
        self._failure: BaseException | None = None
        self._by_group = groups_are_units(env.rubric) and context.score and not context.independent_scoring

    async def run(self, plan: Iterable[Job]) -> None:
        """Run every job of ``plan``; return when all are durable.

        *Raises* RunError when the run cannot continue; everything acknowledged is durable. The workers are always
        awaited first, and no model call starts afterwards.
        """
        jobs = iter(plan)
        workers = [asyncio.ensure_future(self._work(jobs)) for _ in range(self.concurrency)]
        try:
            await asyncio.wait(workers, return_when=asyncio.FIRST_EXCEPTION)
            if self._failure is not None:
                raise self._failure
        finally:
            self.context.control.is_over = True
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
            for members in self._groups.values():  # scored individually; their siblings will not finish
                await self.env.rubric.run_cleanup([state for _, state in members])

    async def _work(self, jobs: Iterator[Job]) -> None:
        task = asyncio.current_task()
        assert task is not None
        for number, job in enumerate(jobs):
            if number % YIELD_EVERY == 0:
                await asyncio.sleep(0)
            if self.context.is_over or self._failure is not None or task.cancelling():
                return  # cancelling: a hook swallowed the cancellation
            self.progress.running[job.position] = (time.monotonic(), None)
            try:
                state = await self.generate(self.env, job, self.context)
                await self._finish(job, state)
                self._guard(state)
            except BudgetExhausted as error:  # the rollouts that need no further request finish: they are paid for
                self._failure = self._failure or error
                return
            except BaseException as error:
                if not self.context.is_over:
                    self._failure, self.context.control.is_over = error, True
                raise
            finally:
                self.progress.running.pop(job.position, None)

    async def _finish(self, job: Job, state: State) -> None:
        """Store the rollout at once, or with its siblings where functions score them together."""
        if not self._by_group:
            await self._store([job], [state])
        if self.context.independent_scoring:
            await self.env.rubric.run_cleanup([state])
            return
        jobs, states = [job], [state]
        if (num_members := job.num_pending or job.siblings) > 1:
            members = self._groups.setdefault(job.example.example_id, [])
            members.append((job, state))
            if len(members) < num_members:
                return
            del self._groups[job.example.example_id]
            members.sort(key=lambda member: member[0].sibling)
            jobs, states = [job for job, _ in members], [state for _, state in members]
        if job.in_part:  # advantages also depend on rewards of an earlier run: Run._finish sets them
            await self.env.rubric.run_cleanup(states)
            return
        await score_together(self.env, states, self.context)
        if self._by_group:
            await self._store(jobs, states)
        self.sink.complete(jobs, states)

    async def _store(self, jobs: list[Job], states: list[State]) -> None:
        await self.sink.store(jobs, states)
        for state in states:
            self.progress.count(state)

    def _guard(self, state: State) -> None:
        """Stop the run after ``abort_after`` consecutive failures of one cause; ``scorable`` errors do not count."""
        error = state["error"]
        if error is None or error.scorable:
            self._streak = ("", 0)
            return
        cause = type(error).__name__
        count = self._streak[1] + 1 if self._streak[0] == cause else 1
        self._streak = (cause, count)
        if count == self.abort_after:  # ==: concurrent failures must not raise it again
            place = f" ({error.file}:{error.line})" if error.file and error.line else ""
            raise TooManyFaults(
                f"{count} rollouts in a row failed with {cause}, the last with: {error}{place}. Finished rollouts are "
                "kept; correct the cause and run the same command again (or set abort_after=0 to continue regardless)",
                cause=cause,
                count=count,
            ) from error


# --- finished rollouts


def is_large(plan: Plan, directory: RunDirectory | None, keep_states: bool) -> bool:
    """Whether the rollouts of a run are not held: where the run is saved and its states are not kept."""
    return directory is not None and not keep_states and len(plan) >= LARGE_PLAN


class RunStore:
    """The finished rollouts (and states) of one run; ``metadata(rows, status)`` summarises them."""

    def __init__(
        self,
        plan: Plan,
        metadata: Callable[[RunStore, Measurements, str], GenerateMetadata],
        logger: logging.Logger,
        directory: RunDirectory | None = None,
        *,
        state_columns: Sequence[str] = (),
        keep_states: bool = False,
        fills_advantages: bool = True,
        on_progress: Callable[..., Any] | Sequence[Callable[..., Any]] | None = None,
    ):
        self.plan, self.logger, self.directory = plan, logger, directory
        self.state_columns, self.keep_states = state_columns, keep_states
        self.fills_advantages, self.on_progress = fills_advantages, on_progress
        self.journal: Journal | None = None
        self.work: Pending | None = None
        """What is pending, once the plan was compared with what is saved."""
        self.saved: dict[str, tuple[int, Mapping[str, Any]]] = {}
        """Key -> (line, row) of the newest saved rollouts; those of the plan move to ``rows``."""
        self.num_saved = 0
        """Different rollouts that were saved before this run."""
        self.rows: dict[int, RolloutOutput] = {}
        """By index in the plan."""
        self.states: dict[int, State] = {}
        self.num_turns = 0
        """Model turns stored by this call."""
        self.without_tokens: Counter[str] = Counter()
        """Reason -> stored turns without token data."""
        self._metadata_of = metadata
        self._metadata: GenerateMetadata | None = None
        self._next_report = 0.0
        self._next_write = time.monotonic() + METADATA_EVERY_S

    def open(self, stack: ExitStack) -> None:
        """Open the journal, and read what is saved there. *Raises* JournalError for damage."""
        if self.directory is None:
            return
        file, num_lines = self.directory.results_file, 0

        def read(row: dict[str, Any]) -> None:
            nonlocal num_lines
            num_lines += 1
            if not isinstance(key := row.get("rollout_key"), str):
                raise no_key(file, num_lines)
            self.saved[key] = num_lines, row

        self.journal = stack.enter_context(self.directory.open_journal(read))
        self.num_saved = len(self.saved)

    def find(self, keys: Sequence[str]) -> Sequence[Any]:
        """See ``Saved``: each with its line."""
        return [self.saved.pop(key, None) for key in keys]

    def has_error(self, rollout: Any) -> bool:
        """See ``Saved``."""
        return bool(rollout[1].get("error"))

    def take(self, position: int, example_id: int, rollout: Any) -> None:
        """Add a saved rollout of an earlier run, matched by content; the index of its example may differ.

        *Raises* JournalError that names the line of a row of another shape.
        """
        assert self.directory is not None
        line, row = rollout
        output = saved_row(row, f"{self.directory.results_file}:{line}")
        for name in DISK_FIELDS:
            output.pop(name, None)
        output["example_id"] = example_id
        self.rows[position] = output

    def outside(self) -> list[str]:
        """Keys of saved rollouts that ``find`` was not asked for."""
        return list(self.saved)

    def in_order(self) -> list[RolloutOutput]:
        """The finished rollouts, in the order of the plan."""
        return [self.rows[index] for index in sorted(self.rows)]

    def measurements(self) -> Measurements:
        """What the statistics need of the finished rollouts."""
        return Measurements.of(self.in_order())

    def served_models(self, requested: str) -> dict[str, int]:
        """Name of a model -> rollouts that it answered; empty when all were answered under the requested name."""
        plain = [requested]
        names = [row.get(SERVED_MODELS) or plain for row in self.rows.values() if row["completion"]]
        return other_than(requested, Counter(itertools.chain.from_iterable(names)))

    def metadata(self, status: str) -> GenerateMetadata:
        """Statistics of the finished rollouts, and facts of the run."""
        return self._metadata_of(self, self.measurements(), status)

    async def store(self, jobs: list[Job], states: list[State]) -> None:
        """Return once these are durable; several are stored atomically."""
        outputs = [state_to_output(state, self.state_columns) for state in states]
        for output, state in zip(outputs, states, strict=True):
            if names := self._note_turns(state):
                output[SERVED_MODELS] = names
        if self.journal is not None:
            together = zip(outputs, jobs, states, strict=True)
            await self.journal.append(
                [row_for_disk(output, job.example.hash, job.sibling, state.attempts) for output, job, state in together]
            )
        self._keep(jobs, outputs, states)
        if self.on_progress is not None or time.monotonic() >= self._next_write:
            await self._report(jobs, outputs)

    def _keep(self, jobs: list[Job], outputs: list[RolloutOutput], states: list[State]) -> None:
        """Add rollouts that are durable."""
        for output, job, state in zip(outputs, jobs, states, strict=True):
            self.rows[job.position] = output
            if self.keep_states:
                self.states[job.position] = state

    def _note_turns(self, state: State) -> list[str]:
        """Count the turns, and those without tokens, by reason.

        Returns the names under which the server answered; none when each is the requested one.
        """
        turns, requested = state.record.transcript.turns, state.record.model
        self.num_turns += len(turns)
        names: set[str] = set()
        for turn in turns:
            if model := getattr(turn.response, "model", ""):
                names.add(str(model))
            if not turn.has_tokens and not turn.extras.get("logprobs"):  # by the texts of the tokens
                missing = getattr(turn.response, "tokens_missing", "")
                self.without_tokens[missing or "the client returns none"] += 1
        return [] if names <= {requested} else sorted(names)

    def complete(self, jobs: list[Job], states: list[State]) -> None:
        """Copy the advantages of siblings, after they were stored, to their outputs."""
        for job, state in zip(jobs, states, strict=True):
            set_advantage(self.rows[job.position], state["advantage"])

    def outputs(self) -> GenerateOutputs:
        """The results that the run returns, still without metadata."""
        rows = self.in_order()
        if self.fills_advantages:
            fill_advantages(rows)
        states = [self._state(index) for index in sorted(self.rows)] if self.keep_states else None
        return GenerateOutputs(outputs=rows, metadata=GenerateMetadata(), states=states)

    def write_metadata(self, metadata: GenerateMetadata) -> None:
        """Write ``metadata.json`` if there is a run directory. *Raises* JournalError when it cannot be written."""
        if self.directory is None:
            return
        try:
            self.directory.write_metadata(dict(metadata))
        except OSError as error:
            raise JournalError(
                f"{self.directory.path}/metadata.json could not be written ({error}); every acknowledged rollout is "
                "saved. Free space or repair the disk, then run the same command again.",
                path=str(self.directory.path),
            ) from error

    def _state(self, index: int) -> State:
        row = self.rows[index]
        if (state := self.states.get(index)) is None:
            return output_to_state(row)
        if state["advantage"] is None and row["advantage"] is not None:  # some siblings are from an earlier run
            state["advantage"] = row["advantage"]
            for step in state["trajectory"]:
                step["advantage"] = row["advantage"] if step["advantage"] is None else step["advantage"]
        return state

    async def _report(self, jobs: list[Job], outputs: list[RolloutOutput]) -> None:
        now = time.monotonic()
        if now >= self._next_write and self.directory is not None:
            self.write_metadata(self.metadata("running"))
            self._next_write = _next_time(now, METADATA_EVERY_S)
        if self.on_progress is None:
            return
        if self._metadata is None or now >= self._next_report:
            self._metadata = self.metadata("running")
            self._next_report = _next_time(now, REPORT_EVERY_S)
        given: Any = self.on_progress
        for callback in given if isinstance(given, list | tuple) else [given]:
            every = [self.in_order()] if num_positional(callback) >= 3 else []  # the older form: all, new, metadata
            try:
                await maybe_await(callback(*every, _with_keys(jobs, outputs), self._metadata))
            except Exception as error:  # noqa: BLE001 - a display must not stop a run; it is logged
                self.logger.warning("on_progress raised %s: %s", type(error).__name__, error)


def other_than(requested: str, counts: Mapping[str, int]) -> dict[str, int]:
    """The counts of each name of a model; empty when the requested one is the only name."""
    return {} if counts.keys() <= {requested} else dict(sorted(counts.items()))


def no_key(file: Path, line: int) -> JournalError:
    """The error for a line of a journal that is not a saved rollout."""
    return JournalError(
        f"{file}:{line}: this line is not a saved rollout (it has no rollout_key); restore the file or remove the line",
        line=line,
    )


def _with_keys(jobs: list[Job], outputs: list[RolloutOutput]) -> list[RolloutOutput]:
    """The outputs with their keys on disk: ``rollout_key example_hash sibling``."""
    return [
        RolloutOutput(
            row,
            rollout_key=rollout_key(job.example.hash, job.sibling),
            example_hash=job.example.hash,
            sibling=job.sibling,
        )
        for job, row in zip(jobs, outputs, strict=True)
    ]


def _next_time(started: float, every_s: float) -> float:
    """When to repeat work that began at ``started`` (monotonic clock) and ends now, in keeping with ``COST_SHARE``."""
    done = time.monotonic()
    return done + max(every_s, (done - started) / COST_SHARE)
