"""Run many rollouts: a fixed number of workers take jobs from a plan, generate, score and store
them.

Without group functions a rollout is stored at once. With them the group is the unit: its last
member scores it, and its rollouts are one write.

Guarantees: a failed rollout does not affect others; memory grows with concurrency, not with the
plan (apart from retained states and results); no model call starts after a cancellation.

``run`` decides what a run consists of.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import replace
from typing import Protocol

from verifiers.errors import BudgetExhausted, RunError, TooManyFaults
from verifiers.rollouts.state import State
from verifiers.runs.branching import trees
from verifiers.runs.options import RunOptions
from verifiers.runs.plan import Job
from verifiers.runs.rollout import (
    GenerateJob,
    Progress,
    RunContext,
    RunControl,
    RunEnvironment,
    generate_and_score,
    generate_job,
    groups_are_units,
    score,
    score_together,
)
from verifiers.storage.identity import identity_of

YIELD_EVERY = 8
"""Jobs after which a worker yields to the event loop, in case none of them suspended."""


class Sink(Protocol):
    """Where finished rollouts go."""

    async def store(self, jobs: list[Job], states: list[State]) -> None:
        """Return once these are durable; several are stored atomically."""

    def complete(self, jobs: list[Job], states: list[State]) -> None:
        """Receive all siblings of an example with their advantages, after they were stored."""


class Runner:
    """Runs a plan with a fixed number of workers.

    ``abort_after`` consecutive failures of one cause with no success between them stop the run as
    ``TooManyFaults`` (0 = never). ``concurrency`` is the number of rollouts in flight. ``generate``
    returns the finished state of a job.
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
        self.concurrency = max(1, concurrency // max(1, env.max_branches))
        self.abort_after = abort_after
        self.progress = progress or context.progress or Progress()
        self.context = replace(context, progress=self.progress)
        self._groups: dict[int, list[tuple[Job, State]]] = {}
        self._streak: tuple[str, int] = ("", 0)
        self._failure: BaseException | None = None
        scored_together = context.score and not context.independent_scoring
        self._by_group = groups_are_units(env, scored_together)

    async def run(self, plan: Iterable[Job]) -> None:
        """Run every job of ``plan``; return when all are durable.

        *Raises* RunError when the run cannot continue; everything acknowledged is durable. The
        workers are always awaited first, and no model call starts afterwards.
        """
        jobs = trees(self.env, plan)
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
            # scored individually; their siblings will not finish
            for members in self._groups.values():
                await self.env.rubric.run_cleanup([state for _, state in members])

    async def _work(self, jobs: Iterator[list[Job]]) -> None:
        task = asyncio.current_task()
        assert task is not None
        for number, tree in enumerate(jobs):
            job = tree[0]
            if number % YIELD_EVERY == 0:
                await asyncio.sleep(0)
            if self.context.is_over or self._failure is not None or task.cancelling():
                return  # cancelling: a hook swallowed the cancellation
            self.progress.running[job.position] = (time.monotonic(), None)
            try:
                state = await self.generate(self.env, job, self.context)
                await self._finish(tree, list(state.leaves))
                for leaf in state.leaves:
                    self._guard(leaf)
            except BudgetExhausted as error:
                # the rollouts that need no further request finish: they are paid for
                self._failure = self._failure or error
                return
            except BaseException as error:
                if not self.context.is_over:
                    self._failure, self.context.control.is_over = error, True
                raise
            finally:
                self.progress.running.pop(job.position, None)

    async def _finish(self, jobs: list[Job], states: list[State]) -> None:
        """Store a rollout at once, or with its siblings where functions score them together, and
        where they are trees."""
        if not self._by_group:
            await self._store(jobs, states)
        if self.context.independent_scoring:
            if self._by_group:
                await self._store(jobs, states)
            await self.env.rubric.run_cleanup(states)
            return
        job = jobs[0]
        if (num_members := job.num_pending or job.siblings) > 1:
            members = self._groups.setdefault(job.example.example_id, [])
            members += zip(jobs, states, strict=True)
            if len(members) < num_members:
                return
            del self._groups[job.example.example_id]
            members.sort(key=lambda member: member[0].sibling)
            jobs, states = [job for job, _ in members], [state for _, state in members]
        # advantages also depend on rewards of an earlier run: Run._finish sets them
        if job.in_part:
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
        """Stop the run after ``abort_after`` consecutive failures of one cause; ``scorable`` errors
        do not count."""
        error = state.record.error
        if error is None or error.scorable:
            self._streak = ("", 0)
            return
        cause = type(error).__name__
        count = self._streak[1] + 1 if self._streak[0] == cause else 1
        self._streak = (cause, count)
        if count == self.abort_after:  # ==: concurrent failures must not raise it again
            location = f" ({error.file}:{error.line})" if error.file and error.line else ""
            raise TooManyFaults(
                f"{count} rollouts in a row failed with {cause}, the last with: {error}{location}."
                " Finished rollouts are kept; correct the cause and run the same command again (or"
                " set abort_after=0 to continue regardless)",
                cause=cause,
                count=count,
            ) from error


# --- generate first, score afterwards


class _GeneratedStates:
    """Sink of the first stage: holds generated states in memory."""

    def __init__(self) -> None:
        self.states: dict[int, State] = {}
        """By index in the plan."""

    async def store(self, jobs: list[Job], states: list[State]) -> None:
        """Keep the states until they are scored."""
        self.states.update((job.position, state) for job, state in zip(jobs, states, strict=True))

    def complete(self, jobs: list[Job], states: list[State]) -> None:
        """Do nothing: siblings are scored in the second stage."""


async def generate_then_score(
    env: RunEnvironment,
    context: RunContext,
    sink: Sink,
    jobs: Sequence[Job],
    concurrency: int,
    abort_after: int,
    progress: Progress,
    generate: GenerateJob = generate_job,
) -> None:
    """Generate every job (``generate`` does not score), then score and store them. *Raises* as
    ``Runner.run``."""
    generated = _GeneratedStates()
    generation_progress = Progress(total=len(jobs), running=progress.running)
    single_jobs = [replace(job, siblings=1, num_pending=None) for job in jobs]
    siblings = {job.position: job.siblings for job in jobs}
    generation_context = replace(
        context, score=False, independent_scoring=False, control=RunControl()
    )
    run_error: RunError | None = None

    async def generate_of_group(env: RunEnvironment, job: Job, context: RunContext) -> State:
        # the tokens of a tree are a share of its group's
        return await generate(env, replace(job, siblings=siblings[job.position]), context)

    try:
        runner = Runner(
            env,
            generation_context,
            generated,
            concurrency=concurrency,
            abort_after=abort_after,
            progress=generation_progress,
            generate=generate_of_group,
        )
        await runner.run(single_jobs)
    except RunError as error:
        run_error = error

    async def score_job(env: RunEnvironment, job: Job, context: RunContext) -> State:
        state = generated.states.pop(job.position)
        progress.running[job.position] = (time.monotonic(), state)
        for position, leaf in enumerate(state.leaves, job.position):
            generated.states.pop(position, None)
            leaf.run = context
            await score(env, leaf, context)
        return state

    generated_jobs = [job for job in jobs if job.position in generated.states]
    abort_after = 0 if run_error else abort_after
    runner = Runner(
        env,
        context,
        sink,
        concurrency=concurrency,
        abort_after=abort_after,
        progress=progress,
        generate=score_job,
    )
    await runner.run(generated_jobs)
    if run_error is not None:
        raise run_error


def job_generator(
    env: RunEnvironment, context: RunContext, options: RunOptions
) -> AbstractAsyncContextManager[GenerateJob]:
    """The function that generates jobs, in this process or in workers; it also scores unless
    scoring comes later.

    *Raises* ConfigError on entry when a worker cannot load the environment.
    """
    scores_later = context.score and not options.interleave_scoring
    if not options.num_workers:
        return nullcontext(generate_job if scores_later else generate_and_score)
    from verifiers.runs.workers.opening import open_workers

    return open_workers(env, identity_of(env), context, options, scores_later=scores_later)
