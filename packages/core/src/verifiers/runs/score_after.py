"""Play first, score afterwards: ``interleave_scoring=False``, for models and judges that cannot work side by side.

Both stages are ``Runner``s over the same jobs. What is played waits in memory: a rollout is durable once it is scored,
so a process that is killed before has lost it. A run that stops itself while playing (``RunError``) scores and stores
what was played before it raises.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from verifiers.errors import RunError
from verifiers.rollouts.state import State
from verifiers.runs.runner import (
    GenerateJob,
    Job,
    Progress,
    RunContext,
    RunControl,
    RunEnvironment,
    Runner,
    Sink,
    generate_job,
    score,
)


class _Held:
    """The sink of the first stage."""

    def __init__(self) -> None:
        self.states: dict[int, State] = {}
        """By place in the plan."""

    async def store(self, jobs: list[Job], states: list[State]) -> None:
        """Keep them until they are scored."""
        self.states.update((job.position, state) for job, state in zip(jobs, states, strict=True))

    def complete(self, jobs: list[Job], states: list[State]) -> None:
        """Nothing yet: siblings are scored in the second stage."""


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
    """Generate every job (``generate`` does not score), then score and store them. Raises as ``Runner.run``."""
    held, playing = _Held(), Progress(total=len(jobs), running=progress.running)
    alone = [replace(job, siblings=1, num_pending=None) for job in jobs]
    first = replace(context, score=False, independent_scoring=False, control=RunControl())
    stopped: RunError | None = None
    try:
        runner = Runner(
            env, first, held, concurrency=concurrency, abort_after=abort_after, progress=playing, generate=generate
        )
        await runner.run(alone)
    except RunError as error:
        stopped = error

    async def scored(env: RunEnvironment, job: Job, context: RunContext) -> State:
        state = held.states.pop(job.position)
        state.run = context
        await score(env, state, context)
        return state

    played = [job for job in jobs if job.position in held.states]
    abort_after = 0 if stopped else abort_after
    runner = Runner(
        env, context, sink, concurrency=concurrency, abort_after=abort_after, progress=progress, generate=scored
    )
    await runner.run(played)
    if stopped is not None:
        raise stopped
