"""Generate first, score afterwards: ``interleave_scoring=False``, for models and judges that do not fit side by side.

Both stages are ``Runner``s over the same jobs. Generated rollouts wait in memory: a rollout is durable once it is
scored, so a killed process loses the unscored ones. When the first stage stops with a ``RunError``, the finished
rollouts are scored and stored before it is raised.
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
    """Generate every job (``generate`` does not score), then score and store them. *Raises* as ``Runner.run``."""
    generated, generation_progress = _GeneratedStates(), Progress(total=len(jobs), running=progress.running)
    single_jobs = [replace(job, siblings=1, num_pending=None) for job in jobs]
    generation_context = replace(context, score=False, independent_scoring=False, control=RunControl())
    run_error: RunError | None = None
    try:
        runner = Runner(
            env,
            generation_context,
            generated,
            concurrency=concurrency,
            abort_after=abort_after,
            progress=generation_progress,
            generate=generate,
        )
        await runner.run(single_jobs)
    except RunError as error:
        run_error = error

    async def score_job(env: RunEnvironment, job: Job, context: RunContext) -> State:
        state = generated.states.pop(job.position)
        state.run = context
        await score(env, state, context)
        return state

    generated_jobs = [job for job in jobs if job.position in generated.states]
    abort_after = 0 if run_error else abort_after
    runner = Runner(
        env, context, sink, concurrency=concurrency, abort_after=abort_after, progress=progress, generate=score_job
    )
    await runner.run(generated_jobs)
    if run_error is not None:
        raise run_error
