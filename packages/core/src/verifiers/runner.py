"""Run MANY rollouts: a fixed number of workers takes jobs from a lazy plan, plays, scores and stores them.

Promises: one rollout's failure costs no neighbour; a rollout is acknowledged (counted, reported, returned) only after
its bytes are durable; memory grows with concurrency and not with the plan, kept states aside; after a cancellation
nothing calls the model any more.

The flow of one job: ``play_and_score`` gives a state, whatever happens. Without group functions the row is stored at
once. With them the group is the unit: its last member scores it, and its rows are one write.

This module does not choose what to run, nor where results lie (``generate``).
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import Counter
from collections.abc import Awaitable, Iterable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

from verifiers.dataset import Example, copy_row
from verifiers.environments.base import Environment
from verifiers.errors import RolloutError, RolloutTimeout, RunError, TooManyFaults
from verifiers.rollout import PASS_THROUGH, fault, play
from verifiers.rubrics.scoring import leave_unscored
from verifiers.state import State

Slot = AbstractAsyncContextManager[Any]


class Sink(Protocol):
    """Where finished rollouts go."""

    async def store(self, jobs: list[Job], states: list[State]) -> None:
        """Return only when these are durable; several at once are stored together or not at all."""

    def complete(self, jobs: list[Job], states: list[State]) -> None:
        """All siblings of one example are there, with their advantages; they were stored before."""


@dataclass(frozen=True, slots=True)
class Job:
    """One planned rollout: the ``sibling``-th of an example that has ``siblings`` of them."""

    example: Example
    sibling: int
    siblings: int
    position: int
    """Place in the plan; results are ordered by it."""


@dataclass(slots=True)
class RunContext:
    """What all rollouts of a run share: who answers, and the limits they keep together."""

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

    def seed_of(self, state: State) -> int | None:
        """The sampling seed of the state's next turn: a function of run seed, example, sibling and turn alone."""
        if self.seed is None:
            return None
        key = f"{self.seed}:{state.seed_key}:{len(state['trajectory'])}"
        return int.from_bytes(hashlib.sha256(key.encode()).digest()[:4], "big") & 0x7FFFFFFF


@dataclass(slots=True)
class Progress:
    """A view of a run for displays; every number counts durable rollouts."""

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


async def play_and_score(env: Environment, job: Job, context: RunContext) -> State:
    """One rollout from its row to its individual scores; its own failure is a value on the state.

    A ``retryable`` fault that is not the model's is played again, ``max_retries`` times; the attempts are counted.
    """
    for attempt in range(context.max_retries + 1):
        state = await _play(env, job, context)
        state.attempts = attempt + 1
        error = state["error"]
        if error is None or not error.retryable or attempt == context.max_retries:
            break
    await score(env, state, context)
    return state


async def _play(env: Environment, job: Job, context: RunContext) -> State:
    row = copy_row(job.example.row) | {"example_id": job.example.example_id}
    state = await env.init_state(row, context.client, context.model, context.sampling_args)
    state.run, state.seed_key = context, f"{job.example.hash}:{job.sibling}"
    if context.progress is not None:
        context.progress.running[job.position] = (time.monotonic(), state)
    if type(env).rollout is Environment.rollout:
        return await play(env, state, context.rollout_timeout_s)
    try:
        async with asyncio.timeout(context.rollout_timeout_s):
            played = await env.rollout(row, context.client, context.model, context.sampling_args)
    except RolloutError as error:
        state["error"] = error
    except TimeoutError:
        state["error"] = RolloutTimeout(f"the rollout was stopped after {context.rollout_timeout_s:g} s")
    except PASS_THROUGH:
        raise
    except BaseException as error:  # noqa: BLE001 - an overridden rollout() is author code
        state["error"] = fault("rollout", error)
    else:
        state = played
        state.run, state.seed_key = context, f"{job.example.hash}:{job.sibling}"
    return state


async def score(env: Environment, state: State, context: RunContext) -> None:
    """Individual scores of a finished rollout; unknown when scoring is off or its error is not scorable."""
    if context.score:
        state.waiting_for = "scoring"
        await env.rubric.score_individual(state, context.scoring_slot)
        state.waiting_for = None
    else:
        leave_unscored([state])
    timing = state["timing"]
    timing["total_ms"] = timing["generation_ms"] + timing["scoring_ms"]
    timing["overhead_ms"] = timing["generation_ms"] - timing["model_ms"] - timing["env_ms"] - timing["setup_ms"]


async def play_group(env: Environment, jobs: list[Job], context: RunContext) -> list[State]:
    """All siblings of one example side by side, scored as a group, with advantages."""
    states = await _all(play_and_score(env, job, context) for job in jobs)
    if context.score:
        await env.rubric.score_group_stage(states, context.scoring_slot)
    return states


async def _all(work: Iterable[Awaitable[State]]) -> list[State]:
    """Await everything together; when one raises (a ``RunError``) the others are cancelled before it is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(_coroutine(awaitable)) for awaitable in work]
    except BaseExceptionGroup as failures:
        raise _first_leaf(failures) from failures
    return [task.result() for task in tasks]


async def _coroutine(awaitable: Awaitable[State]) -> State:
    return await awaitable


def _first_leaf(failures: BaseExceptionGroup) -> BaseException:
    first: BaseException = failures
    while isinstance(first, BaseExceptionGroup):
        first = first.exceptions[0]
    return first


class Runner:
    """Plays a plan with bounded workers.

    ``abort_after`` consecutive failures of one cause with no success between them stop the run as ``TooManyFaults``
    (0 = never). ``concurrency`` is the number of rollouts in flight.
    """

    def __init__(
        self,
        env: Environment,
        context: RunContext,
        sink: Sink,
        concurrency: int,
        abort_after: int = 32,
        progress: Progress | None = None,
    ):
        self.env, self.context, self.sink = env, context, sink
        self.concurrency, self.abort_after = concurrency, abort_after
        self.progress = context.progress = progress or context.progress or Progress()
        self._groups: dict[int, list[tuple[Job, State]]] = {}
        self._streak: tuple[str, int] = ("", 0)
        self._by_group = env.rubric.has_group_rewards and context.score and not context.independent_scoring

    async def run(self, plan: Iterable[Job]) -> None:
        """Play every job of ``plan``; returns when all are durable.

        Raises ``RunError`` when the run cannot go on; everything acknowledged before is durable. On cancellation the
        workers are cancelled and awaited first.
        """
        jobs = iter(plan)
        workers = [asyncio.ensure_future(self._work(jobs)) for _ in range(self.concurrency)]
        try:
            done, _ = await asyncio.wait(workers, return_when=asyncio.FIRST_EXCEPTION)
            for worker in done:
                worker.result()
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)

    async def _work(self, jobs: Iterator[Job]) -> None:
        for job in jobs:
            self.progress.running[job.position] = (time.monotonic(), None)
            try:
                state = await play_and_score(self.env, job, self.context)
                await self._finish(job, state)
            finally:
                self.progress.running.pop(job.position, None)
            self._guard(state)

    async def _finish(self, job: Job, state: State) -> None:
        """Store the rollout at once, or with its siblings where functions score them together."""
        if not self._by_group:
            await self._store([job], [state])
        if self.context.independent_scoring:
            return
        members = self._groups.setdefault(job.example.example_id, [])
        members.append((job, state))
        if len(members) < job.siblings:
            return
        del self._groups[job.example.example_id]
        members.sort(key=lambda member: member[0].sibling)
        jobs, states = [job for job, _ in members], [state for _, state in members]
        if self.context.score:
            await self.env.rubric.score_group_stage(states, self.context.scoring_slot)
        if self._by_group:
            await self._store(jobs, states)
        self.sink.complete(jobs, states)

    async def _store(self, jobs: list[Job], states: list[State]) -> None:
        await self.sink.store(jobs, states)
        for state in states:
            self.progress.count(state)

    def _guard(self, state: State) -> None:
        error = state["error"]
        if error is None:
            self._streak = ("", 0)
            return
        cause = type(error).__name__
        count = self._streak[1] + 1 if self._streak[0] == cause else 1
        self._streak = (cause, count)
        if self.abort_after and count >= self.abort_after:
            raise TooManyFaults(
                f"{count} rollouts in a row failed with {cause}, the last with: {error}. Finished rollouts are kept; "
                "correct the cause and run the same command again (or set abort_after=0 to go on regardless)",
                cause=cause,
                count=count,
            ) from (error if isinstance(error, Exception) else None)


__all__ = ["Job", "Progress", "RunContext", "RunError", "Runner", "Sink", "play_and_score", "play_group"]
