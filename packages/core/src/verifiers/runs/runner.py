"""Run many rollouts: a fixed number of workers takes jobs from a lazy plan, generates, scores and stores them.

Guarantees: a failed rollout does not affect others; a rollout is acknowledged (counted, reported, returned) only after
its bytes are durable; memory grows with concurrency, not with the plan (apart from retained states); no model call
starts after a cancellation.

The flow of one job: ``generate_and_score`` returns a state, failed or not. Without group functions the rollout is
stored at once. With them the group is the unit: its last member scores it, and its rollouts are one write.

This module decides neither what to run (``plan``) nor where results are stored (``store``).
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from verifiers.data.examples import Example, RowFormat, Table, copy_row
from verifiers.errors import BudgetExhausted, ModelError, RolloutTimeout, RunError, TooManyFaults
from verifiers.rollouts.author_code import Hook, ends_the_run
from verifiers.rollouts.contract import LoadedFrom, RolloutEnvironment
from verifiers.rollouts.loop import conclude, current_run, generate
from verifiers.rollouts.state import State
from verifiers.rubrics import Rubric
from verifiers.rubrics.rubric import ArgumentResolver, finite_value, leave_unscored, overrides, scoring_error
from verifiers.runtime.redaction import digested
from verifiers.runtime.sync_async import is_awaitable
from verifiers.storage.identity import source_hashes
from verifiers.types import StopReason

Slot = AbstractAsyncContextManager[Any]
HEX_DIGITS = "0123456789abcdef"
YIELD_EVERY = 8
"""Jobs after which a worker yields to the event loop, in case none of them suspended."""


class RunEnvironment(RolloutEnvironment, Protocol):
    """What a run needs of an environment beside the loop: data, rubric and identity."""

    env_id: str
    env_args: dict[str, Any]
    env_version: str
    sampling_args: dict[str, Any]
    rubric: Rubric
    monitor_rubric: Rubric
    """Metrics of every rollout beside the rubric's."""
    row_format: RowFormat
    score_rollouts: bool
    pass_threshold: float | None
    max_workers: int | None
    system_prompt: str | None
    max_seq_len: int | None
    max_total_completion_tokens: int
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

    def identity(self) -> dict[str, Any]:
        """Its constructor parameters as JSON; see ``storage.identity``."""
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
        self, input: Mapping[str, Any], client: Any, model: str, sampling_args: Mapping[str, Any] | None = None
    ) -> State: ...

    def rollout(self, *args: Any, **keywords: Any) -> Any: ...

    def set_kwargs(self, **settings: Any) -> None: ...


def identity_of(env: RunEnvironment) -> dict[str, Any]:
    """The identity of an environment, without secrets: equal identities generate and score alike.

    Every version has stored the first entries; ``environment``, ``parser`` and ``rubric`` hold all other constructor
    parameters.
    """
    rubric, described = env.rubric, env.identity()
    base = {
        "env_id": env.env_id,
        "env_class": f"{type(env).__module__}.{type(env).__qualname__}",
        "env_version": env.env_version,
        "env_args": digested(env.env_args),
        "message_type": env.message_type,
        "system_prompt": env.system_prompt,
        "reward_functions": rubric.get_reward_func_names(),
        "reward_weights": rubric.get_reward_weights(),
        "group_weights": rubric.get_group_weights(),
        "max_turns": env.max_turns,
        "max_seq_len": env.max_seq_len,
        "max_total_completion_tokens": env.max_total_completion_tokens,
        "timeout_seconds": env.timeout_seconds,
    }
    parts = {name: described.pop(name) for name in ("parser", "rubric") if name in described}
    excluded = ("class", "sampling_args", "score_rollouts")  # class is env_class; a run may override the others
    further = {name: value for name, value in described.items() if name not in base and name not in excluded}
    return base | {"environment": further} | parts


def code_of(env: RunEnvironment) -> dict[str, str]:
    """Hashes of the source files of an environment: of its class, rubric, parser, functions and tools."""
    members = getattr(env, "envs", ())  # of a group of environments
    environments = [env, *(members if isinstance(members, list | tuple) else ())]
    tools = [tool for one in environments for tool in getattr(one, "tools", ()) or ()]
    rubrics = [one.rubric for one in environments]
    functions = [function for rubric in rubrics for function in rubric.get_reward_funcs()]
    parsers = [getattr(one, "parser", None) for one in environments]
    return source_hashes([*environments, *parsers, *rubrics, *functions, *tools])


class Sink(Protocol):
    """Where finished rollouts go."""

    async def store(self, jobs: list[Job], states: list[State]) -> None:
        """Return once these are durable; several are stored atomically."""

    def complete(self, jobs: list[Job], states: list[State]) -> None:
        """Receive all siblings of one example with their advantages, after they were stored."""


@dataclass(frozen=True, slots=True)
class Job:
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

    def serves(self, client: Any, state: State) -> bool:
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
            await env.rubric.score_individual(state, context.scoring_slot)
        except BaseException as error:
            if ends_the_run(error):
                raise
            _mark_unscored([state], error)
        state.waiting_for = None
    else:
        leave_unscored([state])
    await _monitor(env.for_row(state), state)
    timing = state["timing"]
    timing["total_ms"] = timing["generation_ms"] + timing["scoring_ms"]
    timing["overhead_ms"] = timing["generation_ms"] - timing["model_ms"] - timing["env_ms"] - timing["setup_ms"]


async def score_together(env: RunEnvironment, states: Sequence[State], context: RunContext) -> None:
    """Compute group scores and advantages of finished siblings."""
    if not context.score:
        return
    try:
        await env.rubric.score_group_stage(states, context.scoring_slot)
    except BaseException as error:
        if ends_the_run(error):
            raise
        _mark_unscored(states, error)


def groups_are_units(rubric: Rubric) -> bool:
    """Whether siblings are scored together, so that a group is stored, and resumed, as a whole."""
    if rubric.has_group_rewards or rubric.has_advantages:
        return True
    return overrides(rubric, Rubric, "score_group")


def _mark_unscored(states: Sequence[State], error: BaseException) -> None:
    """Record the failure of an overridden ``score_rollout`` or ``score_group``: the rewards are unknown."""
    failure = scoring_error(error, "the rubric")
    for state in states:
        state["reward"] = math.nan
        state["error"] = state["error"] or failure


async def _monitor(env: RunEnvironment, state: State) -> None:
    """Add the metrics of ``env.monitor_rubric`` whose names the rubric does not use."""
    functions = env.monitor_rubric.functions
    resolver = ArgumentResolver(state, functions)
    for function in functions:
        try:
            value = function(resolver)
            value = finite_value(await value if is_awaitable(value) else value, function.name)
        except Exception as error:  # noqa: BLE001 - must not fail the rollout: logged, value unknown
            env.logger.warning("monitor metric %s failed: %s", function.name, error)
            value = math.nan
        state["metrics"].setdefault(function.name, value)


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


__all__ = [
    "Job",
    "Progress",
    "RunContext",
    "Runner",
    "Sink",
    "generate_and_score",
    "generate_group",
    "generate_job",
    "score",
]
