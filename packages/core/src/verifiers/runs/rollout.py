"""A rollout of a run, or the siblings of an example: generated, tried again, and scored.

``generate_and_score`` returns a state, failed or not; its failure is recorded there. ``runner``
runs many of them.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from verifiers.clients.resolve import client_for
from verifiers.data.examples import Example, Table, examples_from
from verifiers.data.row_format import RowFormat, copy_row
from verifiers.errors import ModelError, RolloutTimeout, RunError
from verifiers.parsers import Parser
from verifiers.parsers.parser import is_plain
from verifiers.rollouts.author_code import Hook, ends_the_run
from verifiers.rollouts.contract import LoadedFrom
from verifiers.rollouts.loop import conclude, current_run, generate
from verifiers.rollouts.state import State
from verifiers.rubrics import Rubric
from verifiers.rubrics.running import call
from verifiers.rubrics.scoring import leave_unscored, measure
from verifiers.rubrics.values import scoring_error
from verifiers.runtime.redaction import remember_secrets
from verifiers.storage.identity import EnvironmentParts
from verifiers.types import StopReason

if TYPE_CHECKING:
    from verifiers.clients.protocol import ClientLike, ModelLike
from verifiers.runs.branching import ForkingEnvironment, first_leaf, grow, trees
from verifiers.runs.plan import Job

Slot = AbstractAsyncContextManager[Any]
SCORING = "scoring"
"""What a rollout waits for while functions and judges score it."""
HEX_DIGITS = "0123456789abcdef"


class RunEnvironment(ForkingEnvironment, EnvironmentParts, Protocol):
    """What a run needs of an environment beside the loop: data, rubric and identity."""

    sampling_args: dict[str, Any]
    parser: Parser
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

    @property
    def has_reward(self) -> bool:
        """Whether something gives a reward."""
        ...

    def check_definition(self, sample: Sequence[Example]) -> None:
        """Check, before the first rollout, that nothing is missing that these examples need.
        *Raises* ConfigError."""
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
        input: Mapping[str, object],
        client: ClientLike | None,
        model: str,
        sampling_args: Mapping[str, object] | None = None,
    ) -> State: ...

    def rollout(self, *args: Any, **keywords: Any) -> Any: ...

    def set_kwargs(self, **settings: object) -> None: ...


# --- what the rollouts of a run share


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
    """Position in the plan -> (start on the monotonic clock, state once it exists),
    oldest first."""
    last_done: float = field(default_factory=time.monotonic)
    started: float = field(default_factory=time.monotonic)

    def count(self, state: State) -> None:
        self.done += 1
        self.last_done = time.monotonic()
        rollout = state.record
        self.output_tokens += rollout.usage.get("output_tokens", 0)
        reward = rollout.reward
        if reward is not None and reward == reward:
            self.reward_sum += reward
            self.rewards += 1
        if rollout.error is not None:
            self.errors[type(rollout.error).__name__] += 1


def slots(limit: int | None) -> Slot:
    """A semaphore of so many; without a limit a block that lets everyone in."""
    return nullcontext() if limit is None else asyncio.Semaphore(limit)


@dataclass(slots=True)
class RunControl:
    """The mutable part of a run."""

    is_over: bool = False
    """The run has returned or is stopping; no model call may start."""


@dataclass(frozen=True, slots=True)
class RunContext:
    """What all rollouts of a run share: the client and the common limits. Only
    ``control`` changes."""

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

    def __post_init__(self) -> None:
        remember_secrets(self.sampling_args)

    @property
    def is_over(self) -> bool:
        """Whether the run has returned or is stopping."""
        return self.control.is_over

    def check_open(self) -> None:
        """*Raises* RunError when the run is over."""
        if self.control.is_over:
            raise RunError("the run is over: a hook that outlived it requested another completion")

    def sample_of(self, state: State) -> str:
        """Which sample of its prompt the state's next turn is: number of the equal row, sibling and
        turn."""
        return f"{state.seed_key.lstrip(HEX_DIGITS)}:{len(state.record.transcript)}"

    def seed_of(self, state: State) -> int | None:
        """The sampling seed of the state's next turn: a function of run seed, example, sibling and
        turn alone."""
        if self.seed is None:
            return None
        key = f"{self.seed}:{state.seed_key}:{len(state.record.transcript)}"
        return int.from_bytes(hashlib.sha256(key.encode()).digest()[:4], "big") & 0x7FFFFFFF


async def generate_and_score(env: RunEnvironment, job: Job, context: RunContext) -> State:
    """Run one rollout and score it individually; its failure is recorded on the state. Those of a
    tree are its ``branches``."""
    state = await generate_job(env, job, context)
    if state.branches:
        await asyncio.gather(*(score(env, leaf, context) for leaf in state.leaves))
    else:
        await score(env, state, context)
    return state


async def generate_job(env: RunEnvironment, job: Job, context: RunContext) -> State:
    """Run one rollout without scoring it; its failure is recorded on the state.

    A ``retryable`` error other than a ``ModelError`` is retried up to ``max_retries`` times; the
    attempts are counted. (The client has already retried model calls.) A tree is not: its other
    rollouts are finished.
    """
    failed: dict[str, int] = {}
    for attempt in range(1, context.max_retries + 2):
        state = await _generate_once(env, job, context)
        state.attempts = attempt
        state.record.count_failed(failed)
        failed = state.record.failed_requests
        error = state.record.error
        if error is None or not error.retryable or isinstance(error, ModelError) or state.branches:
            break
    return state


async def _generate_once(env: RunEnvironment, job: Job, context: RunContext) -> State:
    async def new(sibling: int) -> State:
        state = await env.init_state(
            copy_row(job.example.row),
            context.given_client or context.client,
            context.model,
            context.sampling_args,
        )
        state.run, state.seed_key = context, f"{job.example.hash}:{sibling}"
        if context.progress is not None:
            started = time.monotonic()
            context.progress.running.setdefault(job.position, (started, None))
            if sibling == job.sibling:
                context.progress.running[job.position] = (started, state)
        return state

    row_env = env.for_row(job.example.row)
    if job.num_branches > 1 and row_env.branching is not None:
        return await grow(row_env, row_env.branching, job, new, context.rollout_timeout_s)
    state = await new(job.sibling)
    row = state.record.row
    if row_env.has_own_loop:
        return await _generate_own_loop(row_env, row, state, context)
    return await generate(row_env, state, context.rollout_timeout_s)


async def _generate_own_loop(
    env: RunEnvironment, row: Mapping[str, object], state: State, context: RunContext
) -> State:
    """Call an author's ``rollout()``; return ``state`` with the error when it fails."""
    token, started = current_run.set((context, state.seed_key)), time.perf_counter()
    limit_s = context.rollout_timeout_s
    try:
        async with asyncio.timeout(limit_s) as scope:
            with Hook(state, "rollout", timing=None):
                result = await env.rollout(
                    row, state["client"], context.model, context.sampling_args
                )
                if not isinstance(result, State):
                    raise TypeError(f"it returned {type(result).__name__}, not a State")
        result.run, result.seed_key = context, state.seed_key
        state = result
    except BaseException as error:
        if ends_the_run(error):
            raise
        if scope.expired():
            text = (
                f"the rollout was stopped after {limit_s:g} s; raise rollout_timeout_s if it needs"
                " longer"
            )
            error = RolloutTimeout(text, waiting_for="rollout", elapsed_s=limit_s)
        reason = StopReason.TIMEOUT if scope.expired() else StopReason.ERROR
        state.record.status = state.record.status.failed(error, reason.value)
    finally:
        current_run.reset(token)
    conclude(state, started)
    return state


async def score(env: RunEnvironment, state: State, context: RunContext) -> None:
    """Compute individual scores and monitor metrics of a finished rollout; unknown when scoring is
    off."""
    # 1. the rubric's functions of one rollout
    if context.score:
        state.waiting_for = SCORING
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
    # 2. what the environment that ran it measures
    ran = env.for_row(state)
    state.record.is_unparsed = await _is_unparsed(ran, state.record.completion)
    await measure(ran.monitor_rubric.functions, state, ran.logger)
    # 3. the times, which the score is part of
    timing = state.record.timing
    timing["total_ms"] = timing["generation_ms"] + timing["scoring_ms"]
    timing["overhead_ms"] = (
        timing["generation_ms"] - timing["model_ms"] - timing["env_ms"] - timing["setup_ms"]
    )


async def _is_unparsed(env: RunEnvironment, completion: object) -> bool | None:
    """Whether the environment's parser finds nothing in a completion; None if it takes any text,
    and if it fails, which scoring reports."""
    if is_plain(env.parser) or not completion:
        return None
    try:
        limit_s = env.rubric.timeout_s
        return await call(env.parser.parse_answer, completion, limit_s=limit_s) in (None, "")
    except Exception:  # noqa: BLE001 - an author's parser
        return None


# --- the rollouts of an example


GenerateJob = Callable[[RunEnvironment, Job, RunContext], Coroutine[Any, Any, State]]
"""Returns the finished state of a job, failed or not."""


async def generate_group(
    env: RunEnvironment,
    jobs: list[Job],
    context: RunContext,
    generate: GenerateJob = generate_and_score,
) -> list[State]:
    """Run all siblings of an example concurrently with ``generate``, score the group and set
    advantages.

    When any of them raises (a ``RunError``), the others are cancelled and awaited first.
    """
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(generate(env, tree[0], context)) for tree in trees(env, jobs)
            ]
    except BaseExceptionGroup as failures:
        raise first_leaf(failures) from failures
    states = [leaf for task in tasks for leaf in task.result().leaves]
    await score_together(env, states, context)
    return states


async def score_together(env: RunEnvironment, states: Sequence[State], context: RunContext) -> None:
    """Compute group scores and advantages of finished siblings."""
    if not context.score:
        return
    for state in states:
        state.waiting_for = SCORING
    try:
        async with context.scoring_slot:
            await env.rubric.score_group_stage(states)
    except BaseException as error:
        if ends_the_run(error):
            raise
        _mark_unscored(states, error)
    for state in states:
        state.waiting_for = None


def groups_are_units(env: RunEnvironment, scored_together: bool) -> bool:
    """Whether siblings are scored together, or are trees, so that a group is stored, and resumed,
    as a whole; ``scored_together``: whether the run scores groups."""
    rubric = env.rubric
    is_scored = scored_together and (rubric.has_group_rewards or rubric.has_advantages)
    return is_scored or env.max_branches > 0


def _mark_unscored(states: Sequence[State], error: BaseException) -> None:
    """Record the failure of an overridden ``score_rollout`` or ``score_group``: the rewards are
    unknown."""
    failure = scoring_error(error, "the rubric")
    for state in states:
        state.record.reward = math.nan
        state.record.error = state.record.error or failure


# --- single rollouts and groups, without plan and disk


async def single_rollout(
    env: RunEnvironment,
    input: Mapping[str, object],
    client: ClientLike | None = None,
    model: ModelLike | None = None,
    sampling_args: Mapping[str, object] | None = None,
) -> State:
    """Run one rollout of the row ``input`` without scoring it."""
    row = copy_row(examples_from([input], env.row_format)[0].row)
    async with client_for(client, model) as (resolved, name):
        state = await env.init_state(
            row, resolved if client is None else client, name, sampling_args
        )
        # called by an author's rollout() inside a run, which has its time limit
        if state.run is not None:
            return await generate(env, state)
        state.run = RunContext(resolved, name, given_client=client)
        return await generate(env, state, state.run.rollout_timeout_s)


async def scored_rollout(
    env: RunEnvironment,
    row: Mapping[str, object],
    client: ClientLike | None,
    model: ModelLike | None,
    sampling_args: Mapping[str, Any] | None = None,
    **limits: Any,
) -> State:
    """Run and score one rollout; its failure is recorded on the state. ``limits``: further fields
    of ``RunContext``."""
    async with _single_run(env, client, model, sampling_args, **limits) as context:
        state = await generate_and_score(env, _jobs(env, [row])[0], context)
        if env.rubric.has_group_rewards:
            await score_together(env, [state], context)
            state.record.advantage = None
        else:
            await env.rubric.run_cleanup([state])
    return state


async def scored_group(
    env: RunEnvironment,
    rows: Sequence[Mapping[str, object]],
    client: ClientLike | None,
    model: ModelLike | None,
    sampling_args: Mapping[str, Any] | None = None,
    **limits: Any,
) -> list[State]:
    """Run and score siblings of an example, with advantages; otherwise as ``scored_rollout``."""
    async with _single_run(env, client, model, sampling_args, **limits) as context:
        return await generate_group(env, _jobs(env, rows), context)


@asynccontextmanager
async def _single_run(
    env: RunEnvironment,
    client: ClientLike | None,
    model: ModelLike | None,
    sampling_args: Mapping[str, object] | None,
    score: bool = True,
    **limits: Any,
) -> AsyncIterator[RunContext]:
    async with client_for(client, model) as (resolved, name):
        score = score and env.score_rollouts
        yield RunContext(
            resolved, name, sampling_args or {}, score=score, given_client=client, **limits
        )


def _jobs(env: RunEnvironment, rows: Sequence[Mapping[str, object]]) -> list[Job]:
    examples = examples_from(list(rows), env.row_format)
    return [Job(example, n, len(examples), n) for n, example in enumerate(examples)]
