"""``evaluate`` and ``generate``: what to run, where results lie, what is owed.

A call becomes a plan (examples times siblings). With a run directory the rows already there are matched by content
hash and sibling, and only what is owed is run. Everything that can be wrong with a call is found before the first
request: unknown options, reward arguments that nobody supplies, an endpoint that is not there, a folder that cannot be
written, a directory that holds another configuration.

Playing, scoring and storing is ``runner``; this module never looks into a conversation.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any

from verifiers import clients
from verifiers.dataset import Example, Table, examples_from
from verifiers.environments.base import Environment
from verifiers.errors import ConfigError
from verifiers.options import DEFAULT_CONCURRENCY, RunOptions, parse
from verifiers.results import GenerateOutputs, fill_advantages
from verifiers.rows import RolloutOutput, row_for_disk, row_from_disk, state_to_output
from verifiers.run_description import RunDescription
from verifiers.run_directory import RunDirectory, default_root, run_path
from verifiers.run_identity import fingerprint, rollout_key
from verifiers.runner import Job, Progress, RunContext, Runner
from verifiers.state import State


@dataclass(slots=True)
class Plan:
    """Every rollout of a run, in order: examples first, then siblings."""

    examples: Sequence[Example]
    siblings: Sequence[int]
    """How many rollouts each example has."""

    def __len__(self) -> int:
        return sum(self.siblings)

    def jobs(self) -> Iterator[Job]:
        """One job at a time."""
        position = 0
        for example, count in zip(self.examples, self.siblings, strict=True):
            for sibling in range(count):
                yield Job(example, sibling, count, position)
                position += 1


async def evaluate(
    env: Environment,
    client: Any,
    model: Any,
    sampling_args: Mapping[str, Any] | None,
    num_examples: int,
    rollouts_per_example: int | None,
    given: Mapping[str, Any],
) -> GenerateOutputs:
    """See ``Environment.evaluate``."""
    options, sampling = parse(env, given)
    count = rollouts_per_example or given.get("rollouts_per_example") or getattr(env, "rollouts_per_example", None) or 1
    examples = env.eval_table.take(num_examples, options.shuffle_seed)
    plan = Plan(examples, [count] * len(examples))
    return await run(env, plan, client, model, {**(sampling_args or {}), **sampling}, options)


async def generate(
    env: Environment,
    inputs: Any,
    client: Any,
    model: Any,
    sampling_args: Mapping[str, Any] | None,
    n_samples: int | None,
    given: Mapping[str, Any],
) -> GenerateOutputs:
    """See ``Environment.generate``."""
    options, sampling = parse(env, given)
    if inputs is not None:
        plan = _siblings(examples_from(inputs, env.row_format))
    else:
        table = env.train_table if env.train_table is not None else env.eval_table
        plan = _wrapped(table.take(-1, options.shuffle_seed), n_samples, given.get("rollouts_per_example"))
    return await run(env, plan, client, model, {**(sampling_args or {}), **sampling}, options)


def _siblings(examples: Sequence[Example]) -> Plan:
    """Rows of equal ``example_id`` are siblings, in order of appearance."""
    counts: dict[int, int] = {}
    first: dict[int, Example] = {}
    for example in examples:
        counts[example.example_id] = counts.get(example.example_id, 0) + 1
        first.setdefault(example.example_id, example)
    return Plan(list(first.values()), list(counts.values()))


def _wrapped(table: Table, n_samples: int | None, rollouts_per_example: int | None) -> Plan:
    """``n_samples`` rollouts over the rows in order, wrapping round; without it every row once (or r times)."""
    if n_samples is None:
        return Plan(table, [rollouts_per_example or 1] * len(table))
    if n_samples < 1 or not len(table):
        raise ConfigError(f"n_samples is {n_samples} over {len(table)} rows; both must be at least 1")
    rounds, rest = divmod(n_samples, len(table))
    counts = [rounds + (place < rest) for place in range(len(table))]
    return Plan(table.take(min(n_samples, len(table))), [count for count in counts if count])


# --- a run ------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Results:
    """Finished rollouts by their place in the plan; the runner's sink, with or without a journal."""

    env: Environment
    options: RunOptions
    journal: Any = None
    outputs: dict[int, RolloutOutput] = field(default_factory=dict)
    states: dict[int, State] = field(default_factory=dict)

    def in_order(self) -> list[RolloutOutput]:
        """The rows so far, in the order of the plan."""
        return [self.outputs[place] for place in sorted(self.outputs)]

    async def store(self, jobs: list[Job], states: list[State]) -> None:
        outputs = [state_to_output(state, self.options.state_columns) for state in states]
        if self.journal is not None:
            await self.journal.append(
                [
                    row_for_disk(output, job.example.hash, job.sibling, state.attempts)
                    for output, job, state in zip(outputs, jobs, states, strict=True)
                ]
            )
        for output, job, state in zip(outputs, jobs, states, strict=True):
            self.outputs[job.position] = output
            if self.options.keep_states:
                self.states[job.position] = state
        if self.options.on_progress is not None:
            _call_back(self.env, self.options.on_progress, outputs)

    def complete(self, jobs: list[Job], states: list[State]) -> None:
        for job, state in zip(jobs, states, strict=True):
            self.outputs[job.position]["advantage"] = state["advantage"]


def _call_back(env: Environment, callback: Any, outputs: list[RolloutOutput]) -> None:
    try:
        callback(outputs, None)
    except Exception as error:  # noqa: BLE001 - a display must not stop a run; it is logged
        env.logger.warning("on_progress raised %s: %s", type(error).__name__, error)


async def run(
    env: Environment, plan: Plan, client: Any, model: Any, sampling_args: Mapping[str, Any], options: RunOptions
) -> GenerateOutputs:
    """Play a plan; returns when every rollout of it is durable (and at once when all of them already are)."""
    started = time.time()
    resolved, model_name = clients.resolve_client(client, model)
    check_before_run(env, plan, options)
    progress = options.progress or Progress()
    progress.total = len(plan)
    results = _Results(env, options)
    describe = RunDescription(env, plan, resolved, model_name, sampling_args, options, started)
    with ExitStack() as stack:
        directory = _open_directory(describe, stack)
        durable: dict[str, dict[str, Any]] = {}
        if directory is not None:
            results.journal = stack.enter_context(directory.open_journal(on_row=_collect(durable)))
        owed = _owed(env, plan, durable, results, options)
        progress.resumed = progress.done = describe.resumed = len(results.outputs)
        status = "failed"
        try:
            if owed:
                if directory is not None:
                    directory.write_metadata(describe.metadata(results.in_order(), "running"))
                await _play(env, owed, resolved, model_name, sampling_args, options, progress, results)
            status = "complete"
        except (asyncio.CancelledError, KeyboardInterrupt):
            status = "interrupted"
            raise
        finally:
            if resolved is not client:
                await clients.close(resolved)
            outputs = _outputs(describe, results, status)
            if directory is not None:
                directory.write_metadata(dict(outputs.metadata))
    if options.push_to_hub:
        from verifiers.results import make_dataset

        make_dataset(outputs, push_to_hub=True, hub_name=options.hub_name)
    return outputs


async def _play(
    env: Environment,
    owed: list[Job],
    client: Any,
    model: str,
    sampling_args: Mapping[str, Any],
    options: RunOptions,
    progress: Progress,
    results: _Results,
) -> None:
    preflight = getattr(client, "preflight", None)
    if options.preflight and preflight is not None:
        await preflight(model)
    score = env.score_rollouts if options.score_rollouts is None else options.score_rollouts
    context = RunContext(
        client=client,
        model=model,
        sampling_args=sampling_args,
        score=score,
        independent_scoring=options.independent_scoring,
        seed=options.seed,
        rollout_timeout_s=options.rollout_timeout_s,
        max_retries=options.max_retries,
        generation_slot=_slots(options.max_concurrent_generation),
        scoring_slot=_slots(options.max_concurrent_scoring),
    )
    limit = DEFAULT_CONCURRENCY if options.max_concurrent == -1 else options.max_concurrent
    runner = Runner(env, context, results, min(limit, len(owed)), options.abort_after, progress)
    await runner.run(owed)


def _slots(limit: int | None) -> AbstractAsyncContextManager[Any]:
    return nullcontext() if limit is None else asyncio.Semaphore(limit)


def check_before_run(env: Environment, plan: Plan, options: RunOptions) -> None:
    """Raise ``ConfigError`` for what would only show after the first completion."""
    if not len(plan):
        raise ConfigError("there is nothing to run: the plan has no rollouts (num_examples=0, or an empty dataset)")
    columns = set(plan.examples[0].row)
    env.rubric.check_arguments(columns)
    if options.independent_scoring and env.rubric.has_group_rewards:
        raise ConfigError("independent_scoring=True cannot score group functions; drop the option or the functions")


def _outputs(describe: RunDescription, results: _Results, status: str) -> GenerateOutputs:
    rows = results.in_order()
    if not results.options.independent_scoring:
        fill_advantages(rows)
    states = [results.states[place] for place in sorted(results.states)] if results.options.keep_states else None
    return GenerateOutputs(outputs=rows, metadata=describe.metadata(rows, status), states=states)


# --- what it has done already --------------------------------------------------------------------------------------


def _open_directory(describe: RunDescription, stack: ExitStack) -> RunDirectory | None:
    options, env = describe.options, describe.env
    if options.results_path is None and not options.save_results:
        return None
    config = describe.config()
    path = options.results_path
    if path is None:
        name = env.env_id or type(env).__name__
        path = run_path(default_root(name), name, describe.model, fingerprint(config), resume=options.resume)
    describe.path = path
    return stack.enter_context(RunDirectory.create_or_resume(path, config, describe.noted()))


def _collect(rows: dict[str, dict[str, Any]]):
    """Keep the newest row of every rollout while the journal is read."""

    def on_row(row: dict[str, Any]) -> None:
        rows[row["rollout_key"]] = row

    return on_row


def _owed(
    env: Environment, plan: Plan, durable: dict[str, dict[str, Any]], results: _Results, options: RunOptions
) -> list[Job]:
    """The jobs without a durable row; durable rows go into ``results``. With group functions a group is owed whole."""
    owed: list[Job] = []
    groups: dict[int, list[Job]] = {}
    for job in plan.jobs():
        row = durable.get(rollout_key(job.example.hash, job.sibling)) if durable else None
        if row is not None and not (options.retry_errors and row.get("error")):
            results.outputs[job.position] = row_from_disk(row)
        else:
            groups.setdefault(job.example.example_id, []).append(job)
    whole = env.rubric.has_group_rewards and not options.independent_scoring
    for jobs in groups.values():
        if whole and len(jobs) < jobs[0].siblings:
            first = jobs[0]
            start = first.position - first.sibling
            jobs = [Job(first.example, n, first.siblings, start + n) for n in range(first.siblings)]
            for job in jobs:
                results.outputs.pop(job.position, None)
        owed.extend(jobs)
    return owed
