"""Open the workers of a run according to its options."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, nullcontext
from dataclasses import replace
from functools import partial

from verifiers.clients.protocol import shows_tools
from verifiers.errors import ConfigError
from verifiers.runs.options import RunOptions
from verifiers.runs.rollout import GenerateJob, RunContext, RunEnvironment
from verifiers.runs.workers.channels import OpenChannel, ProcessChannel
from verifiers.runs.workers.messages import Setup
from verifiers.runs.workers.pool import WorkerPool
from verifiers.runtime.importing import paths_without_namespaces


@asynccontextmanager
async def open_workers(
    env: RunEnvironment,
    identity: Mapping[str, object],
    context: RunContext,
    options: RunOptions,
    *,
    scores_later: bool = False,
) -> AsyncIterator[GenerateJob]:
    """Yield the function that generates jobs in workers; ``scores_later`` leaves scoring to the
    caller.

    *Raises* ConfigError for an environment that was not loaded by its id, and what a worker raises
    loading it.
    """
    if env.loaded_from is None:
        raise ConfigError(
            f"num_workers={options.num_workers}: a worker loads its environment by id, and this"
            f" {type(env).__name__} was constructed directly; load it with vf.load_environment(id,"
            " ...), or use num_workers=0",
            key="num_workers",
        )
    sent = replace(
        context,
        client=None,
        given_client=None,
        score=context.score and not scores_later,
        progress=None,
        generation_slot=nullcontext(),
        scoring_slot=nullcontext(),
        tool_slot=nullcontext(),
    )
    setup = Setup(
        loaded_from=env.loaded_from,
        context=sent,
        changes=env.changes,
        identity=identity,
        cleans_up=not scores_later,
        max_scoring=_share(options.max_concurrent_scoring, options.num_workers),
        max_tools=_share(options.max_concurrent_tools, options.num_workers),
        max_threads=env.max_workers,
        shows_tools=await shows_tools(context.client),
        import_paths=paths_without_namespaces(),
    )
    open_channel: OpenChannel = partial(ProcessChannel.open, context.rollout_timeout_s)
    if options.worker_backend == "ray":
        from verifiers.runs.workers.ray import RayChannel

        open_channel = RayChannel.open
    async with WorkerPool(setup, context, open_channel, options.num_workers) as pool:
        yield pool.generate


def _share(limit: int | None, num_workers: int) -> int | None:
    """A worker's part of a limit, at least 1."""
    return None if limit is None else max(1, limit // num_workers)
