"""``evaluate`` and ``generate``: what to run, where results lie, what is owed.

A call becomes a ``Plan``. With a run directory the rows already there are matched by content hash and sibling, and
only what is owed is run. Everything that can be wrong with a call is found before the first request: unknown options,
reward arguments that nobody supplies, an endpoint that is not there, a folder that cannot be written, a directory that
holds another configuration.

Playing, scoring and storing is ``runner``; this module never looks into a conversation.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager, ExitStack, nullcontext
from typing import Any

from verifiers.data.examples import examples_from
from verifiers.errors import ConfigError, JournalError
from verifiers.results import GenerateOutputs, fill_advantages
from verifiers.runs.client import client_for
from verifiers.runs.metadata import RunDescription
from verifiers.runs.options import DEFAULT_CONCURRENCY, RunOptions, count, parse
from verifiers.runs.plan import Owed, Plan, owed
from verifiers.runs.runner import Job, Progress, RunContext, RunEnvironment, Runner
from verifiers.runs.score_after import play_then_score
from verifiers.runs.store import RunResults
from verifiers.runs.workers import player_for
from verifiers.runtime.gc import fewer_collections
from verifiers.runtime.sync_async import maybe_await
from verifiers.runtime.threads import workers
from verifiers.storage.directory import RunDirectory, default_root, read_config, run_path
from verifiers.storage.identity import fingerprint

__all__ = ["Plan", "check_before_run", "evaluate", "generate", "run"]


async def evaluate(
    env: RunEnvironment,
    client: Any,
    model: Any,
    sampling_args: Mapping[str, Any] | None,
    num_examples: int,
    rollouts_per_example: int | None,
    given: Mapping[str, Any],
) -> GenerateOutputs:
    """See ``Environment.evaluate``."""
    options, sampling = parse(env, given, ("num_examples", "rollouts_per_example"))
    siblings = count(given, "rollouts_per_example", rollouts_per_example) or _siblings_of(env)
    if num_examples != -1:
        count({}, "num_examples", num_examples)
    with fewer_collections():
        examples = env.eval_table.take(num_examples, options.shuffle_seed)
        plan = Plan(examples, [siblings] * len(examples))
        return await run(env, plan, client, model, {**(sampling_args or {}), **sampling}, options)


async def generate(
    env: RunEnvironment,
    inputs: Any,
    client: Any,
    model: Any,
    sampling_args: Mapping[str, Any] | None,
    n_samples: int | None,
    given: Mapping[str, Any],
) -> GenerateOutputs:
    """See ``Environment.generate``."""
    options, sampling = parse(env, given, ("rollouts_per_example", "n_samples"))
    n_samples = count(given, "n_samples", n_samples)
    siblings = count(given, "rollouts_per_example", given.get("rollouts_per_example"))
    if n_samples is not None and siblings is not None:
        raise ConfigError("n_samples and rollouts_per_example both say how many rollouts there are; give one of them")
    if inputs is not None:
        if n_samples is not None:
            raise ConfigError("n_samples draws from the environment's own dataset; give it or inputs, not both")
        plan = Plan.of_rows([row for row in examples_from(inputs, env.row_format) for _ in range(siblings or 1)])
    else:
        table = (env.train_table if env.train_table is not None else env.eval_table).take(-1, options.shuffle_seed)
        if n_samples is not None:
            plan = Plan.wrapped(table, n_samples)
        else:
            plan = Plan(table, [siblings or _siblings_of(env)] * len(table))
    return await run(env, plan, client, model, {**(sampling_args or {}), **sampling}, options)


def _siblings_of(env: RunEnvironment) -> int:
    """The environment's own ``rollouts_per_example``, given to its loader."""
    return count({}, "rollouts_per_example", getattr(env, "rollouts_per_example", None)) or 1


def check_before_run(env: RunEnvironment, plan: Plan, options: RunOptions) -> None:
    """Raise ``ConfigError`` for what would only show after the first completion."""
    if not len(plan):
        raise ConfigError("there is nothing to run: the plan has no rollouts (an empty dataset)")
    env.rubric.check_arguments(plan.columns)
    if options.independent_scoring and env.rubric.has_group_rewards:
        raise ConfigError("independent_scoring=True cannot score group functions; drop the option or the functions")


async def run(
    env: RunEnvironment, plan: Plan, client: Any, model: Any, sampling_args: Mapping[str, Any], options: RunOptions
) -> GenerateOutputs:
    """Play a plan; returns when every rollout of it is durable (and at once when all of them already are)."""
    if sampling_args.get("n", 1) != 1:
        raise ConfigError("sampling_args['n'] must be 1: ask for siblings with rollouts_per_example", key="n")
    check_before_run(env, plan, options)
    if env.max_workers is not None:
        workers().max_threads = env.max_workers
    async with client_for(client, model, keep_raw=options.keep_raw_responses) as (resolved, model_name):
        describe = RunDescription(env, plan, resolved, model_name, sampling_args, options, time.time())
        with ExitStack() as stack:
            stack.enter_context(fewer_collections())
            directory = _open_directory(describe, stack)
            outputs = await _run_owed(describe, directory, client, stack)
    if options.push_to_hub:
        from verifiers.results import make_dataset

        make_dataset(outputs, push_to_hub=True, hub_name=options.hub_name)
    return outputs


async def _run_owed(
    describe: RunDescription, directory: RunDirectory | None, given_client: Any, stack: ExitStack
) -> GenerateOutputs:
    options, plan = describe.options, describe.plan
    results = RunResults(describe, directory)
    left = await _left(describe, results, directory, stack)
    progress = options.progress or Progress()
    progress.total, describe.resumed = len(plan), len(left.done)
    progress.done = progress.resumed = len(left.done)
    status = "failed"
    try:
        await _call_back(describe, "on_start", len(left.jobs))
        if left.jobs:
            results.write_metadata(describe.metadata(results.in_order(), "running"))
            await _play(describe, left.jobs, given_client, progress, results)
        status = "complete"
    except (asyncio.CancelledError, KeyboardInterrupt):
        status = "interrupted"
        raise
    finally:
        if not describe.options.independent_scoring:
            fill_advantages(results.in_order())
        outputs = results.outputs(status)
        try:
            results.write_metadata(outputs.metadata)
        except JournalError as error:
            if status == "complete":
                raise
            describe.env.logger.warning("%s", error)  # the failure that ended the run is the one to tell
    return outputs


async def _play(
    describe: RunDescription, jobs: list[Job], given_client: Any, progress: Progress, results: RunResults
) -> None:
    env, options, client = describe.env, describe.options, describe.client
    preflight = getattr(client, "preflight", None)
    if options.preflight and preflight is not None and (note := await preflight(describe.model)):
        await _warn(describe, note)
    context = RunContext(
        client=client,
        model=describe.model,
        sampling_args=describe.sampling_args,
        score=describe.scored,
        independent_scoring=options.independent_scoring,
        seed=options.seed,
        rollout_timeout_s=options.rollout_timeout_s,
        max_retries=options.max_retries,
        generation_slot=_slots(options.max_concurrent_generation),
        scoring_slot=_slots(options.max_concurrent_scoring),
        tool_slot=_slots(options.max_concurrent_tools),
        given_client=given_client,
    )
    limit = DEFAULT_CONCURRENCY if options.max_concurrent == -1 else options.max_concurrent
    limit = min(limit, len(jobs))
    if preflight is not None:
        limit = await _clamped(describe, limit)
    async with player_for(env, context, options) as play:
        with fewer_collections():
            if options.interleave_scoring or not context.score:
                await Runner(env, context, results, limit, options.abort_after, progress, play).run(jobs)
            else:
                await play_then_score(env, context, results, jobs, limit, options.abort_after, progress, play)


async def _clamped(describe: RunDescription, limit: int) -> int:
    """``limit``, or as many rollouts as this process may open connections, with a sentence that says so."""
    from verifiers.clients.http import connection_room, open_file_limit

    room = connection_room()
    if limit <= room:
        return limit
    await _warn(
        describe,
        f"{room} rollouts run at a time instead of {limit}: this process may open {open_file_limit()} files; raise "
        "the limit (ulimit -n) or lower max_concurrent",
    )
    return room


def _slots(limit: int | None) -> AbstractAsyncContextManager[Any]:
    return nullcontext() if limit is None else asyncio.Semaphore(limit)


# --- what it has done already --------------------------------------------------------------------------------------


def _open_directory(describe: RunDescription, stack: ExitStack) -> RunDirectory | None:
    options, env = describe.options, describe.env
    if options.results_path is None and not options.save_results:
        return None
    config = describe.config()
    path = options.results_path
    if path is None:
        name = env.env_id or type(env).__name__
        place = (default_root(name), name, describe.model, fingerprint(config))
        path = run_path(*place, resume=options.resume, config=config)
    elif not options.resume and read_config(path) is not None:
        raise ConfigError(f"{path} holds a run already, and resume=False; choose another folder", path=str(path))
    describe.path = path
    directory = stack.enter_context(RunDirectory.create_or_resume(path, config, describe.noted()))
    describe.stored_fingerprint = directory.fingerprint
    return directory


async def _left(
    describe: RunDescription, results: RunResults, directory: RunDirectory | None, stack: ExitStack
) -> Owed:
    """Read the rows that are durable into ``results``, and say what is owed."""
    durable: dict[str, dict[str, Any]] = {}

    def newest(row: dict[str, Any]) -> None:
        durable[row["rollout_key"]] = row

    if directory is not None:
        results.journal = stack.enter_context(directory.open_journal(on_row=newest))
    left = owed(
        describe.plan,
        durable,
        whole_groups=describe.scores_groups,
        retry_errors=describe.options.retry_errors,
    )
    for job, row in left.done:
        results.take(job, row)
    describe.outside_plan = left.foreign
    if left.foreign:
        await _warn(
            describe,
            f"{describe.path} holds {len(left.foreign)} rows of rollouts that are not in this plan (removed or edited "
            "examples, or a smaller plan); they are kept and not counted",
        )
    if directory is not None:
        done = f"; {len(left.done)} of {len(describe.plan)} rollouts are done already" if left.done else ""
        await _call_back(describe, "on_log", f"results are saved in {describe.path}{done}")
        if directory.uncompared:
            await _call_back(
                describe,
                "on_log",
                f"{describe.path} was saved by an older version or through another kind of client, so these parts "
                f"of the configuration are not compared: {', '.join(directory.uncompared)}",
            )
    return left


# --- what it says --------------------------------------------------------------------------------------------------


async def _warn(describe: RunDescription, text: str) -> None:
    describe.env.logger.warning("%s", text)
    await _call_back(describe, "on_log", text)


async def _call_back(describe: RunDescription, name: str, said: Any) -> None:
    """Call a callback of the options, where there is one; what it raises is logged and stops nothing."""
    callback = getattr(describe.options, name)
    if callback is None:
        return
    try:
        await maybe_await(callback(said))
    except Exception as error:  # noqa: BLE001 - a display must not stop a run; it is logged
        describe.env.logger.warning("%s raised %s: %s", name, type(error).__name__, error)
