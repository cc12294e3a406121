"""``evaluate`` and ``generate``: a call of an environment becomes a ``Plan``, which a ``Run`` runs.

Errors of a call are raised before the first request: unknown options, reward arguments that nothing
provides, a plan without rollouts, sampling arguments that no server takes.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from verifiers.clients.resolve import client_for
from verifiers.data.examples import examples_from
from verifiers.errors import ConfigError
from verifiers.results import GenerateOutputs
from verifiers.results.rows import COLUMNS_OF_RUNS, MAX_METRICS
from verifiers.runs.options import RunOptions, check_sampling, count, parse
from verifiers.runs.plan import Plan
from verifiers.runs.rollout import RunEnvironment
from verifiers.runs.run import Run
from verifiers.runtime.gc import fewer_collections

if TYPE_CHECKING:
    from verifiers.clients.protocol import ClientLike, ModelLike
    from verifiers.data.sources import DatasetLike

NUM_SAMPLED = 20
"""Examples that are read to see what the data lack."""


async def evaluate(
    env: RunEnvironment,
    client: ClientLike | None,
    model: ModelLike | None,
    sampling_args: Mapping[str, object] | None,
    num_examples: int,
    rollouts_per_example: int | None,
    keywords: Mapping[str, object],
) -> GenerateOutputs:
    """See ``Environment.evaluate``."""
    options, sampling = parse(env, keywords, ("num_examples", "rollouts_per_example"))
    siblings = count(keywords, "rollouts_per_example", rollouts_per_example) or _siblings_of(env)
    if num_examples != -1:
        count({}, "num_examples", num_examples)
    with fewer_collections():
        warn_of_fewer(env, num_examples)
        if options.shuffle_seed is None and (options.until_half_width or options.until_decided):
            env.warn_once(
                "the examples are in dataset order: pass shuffle_seed=0, or the interval may be of"
                " easy rows"
            )
        examples = env.eval_table.take(num_examples, options.shuffle_seed)
        plan = Plan(examples, [siblings] * len(examples))
        return await _execute(
            env, plan, client, model, {**(sampling_args or {}), **sampling}, options
        )


async def generate(
    env: RunEnvironment,
    inputs: DatasetLike | None,
    client: ClientLike | None,
    model: ModelLike | None,
    sampling_args: Mapping[str, object] | None,
    n_samples: int | None,
    keywords: Mapping[str, Any],
) -> GenerateOutputs:
    """See ``Environment.generate``."""
    options, sampling = parse(env, keywords, ("rollouts_per_example", "n_samples"))
    n_samples = count(keywords, "n_samples", n_samples)
    siblings = count(keywords, "rollouts_per_example", keywords.get("rollouts_per_example"))
    if n_samples is not None and siblings is not None:
        raise ConfigError(
            "n_samples and rollouts_per_example both set the number of rollouts; give one of them"
        )
    if inputs is not None:
        if n_samples is not None:
            raise ConfigError(
                "n_samples draws from the environment's own dataset; give it or inputs, not both"
            )
        plan = Plan.of_rows(
            [row for row in examples_from(inputs, env.row_format) for _ in range(siblings or 1)]
        )
    else:
        table = (env.train_table if env.train_table is not None else env.eval_table).take(
            -1, options.shuffle_seed
        )
        if n_samples is not None:
            plan = Plan.wrapped(table, n_samples)
        else:
            plan = Plan(table, [siblings or _siblings_of(env)] * len(table))
    return await _execute(env, plan, client, model, {**(sampling_args or {}), **sampling}, options)


def _siblings_of(env: RunEnvironment) -> int:
    """The ``rollouts_per_example`` that the environment was loaded with, else 1."""
    return count({}, "rollouts_per_example", getattr(env, "rollouts_per_example", None)) or 1


def warn_of_fewer(env: RunEnvironment, num_examples: int) -> None:
    """Log a warning when the data have fewer examples than requested."""
    if num_examples > (there_are := len(env.eval_table)):
        env.warn_once(
            f"{num_examples} examples are requested, and the data have {there_are}: all are run"
        )


def check_before_run(env: RunEnvironment, plan: Plan, options: RunOptions) -> None:
    """*Raises* ConfigError for errors that would otherwise appear only after the
    first completion."""
    if not len(plan):
        raise ConfigError("there is nothing to run: the plan has no rollouts (an empty dataset)")
    if clashes := sorted(COLUMNS_OF_RUNS.intersection(options.state_columns)):
        raise ConfigError(
            f"state_columns names {clashes[0]!r}, which a run writes itself beside each rollout:"
            " give that key of the state another name",
            key="state_columns",
        )
    if (num_metrics := len(env.rubric.functions)) > MAX_METRICS:
        raise ConfigError(
            f"the rubric has {num_metrics:,} functions, each a column of every rollout; a run has at"
            f" most {MAX_METRICS:,}"
        )
    env.check_definition(list(plan.examples[:NUM_SAMPLED]))
    env.rubric.check_needs()
    env.rubric.check_arguments(plan.columns)
    if options.independent_scoring and env.rubric.has_group_rewards:
        raise ConfigError(
            "independent_scoring=True cannot score group functions; drop the option or the"
            " functions"
        )


async def _execute(
    env: RunEnvironment,
    plan: Plan,
    client: ClientLike | None,
    model: ModelLike | None,
    sampling_args: Mapping[str, object],
    options: RunOptions,
) -> GenerateOutputs:
    check_sampling(sampling_args)
    check_before_run(env, plan, options)
    async with client_for(client, model, keep_raw=options.keep_raw_responses) as (
        resolved,
        model_name,
    ):
        if "ipykernel" in sys.modules:
            from verifiers.runs.notebook import with_notebook_progress

            options = with_notebook_progress(options)
        return await Run(env, plan, resolved, model_name, sampling_args, options).execute(client)
