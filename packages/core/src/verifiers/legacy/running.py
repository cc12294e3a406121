"""Methods and attributes of environments that older trainers and tools use: rows, results,
handlers, usage."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verifiers.data.row_format import copy_row
from verifiers.environments.base import Environment
from verifiers.legacy.usage import extract_usage_tokens
from verifiers.results import GenerateMetadata, GenerateOutputs
from verifiers.results.rows import state_to_output
from verifiers.rollouts.author_code import decorated, maybe_await
from verifiers.rollouts.state import State
from verifiers.types import StopReason

if TYPE_CHECKING:
    from verifiers.clients.protocol import ClientLike


def eval_inputs(
    env: Environment, num_examples: int = -1, rollouts_per_example: int = 1
) -> list[dict[str, object]]:
    """The rows of the evaluation set, each ``rollouts_per_example`` times, siblings next to each
    other."""
    return [
        copy_row(e.row)
        for e in env.eval_table.take(num_examples, None)
        for _ in range(rollouts_per_example)
    ]


def rollout_results(
    env: Environment,
    all_states: Sequence[State],
    model: str = "",
    client: object = None,
    state_columns: Sequence[str] | None = None,
    results_path: str | Path | None = None,
    gen_sampling_args: Mapping[str, object] | None = None,
    start_time: float | None = None,
) -> GenerateOutputs:
    """Results of finished states; ``start_time`` is a ``time.time()``. ``results_path`` is
    recorded, not written to."""
    outputs = [state_to_output(state, state_columns) for state in all_states]
    metadata = GenerateMetadata.of(
        outputs,
        env_id=env.env_id,
        env_args=env.env_args,
        env_version=env.env_version,
        model=model,
        base_url=str(getattr(client, "base_url", "") or ""),
        sampling_args=dict(gen_sampling_args or {}),
        time=0.0 if start_time is None else time.time() - start_time,
        success_metric=env.rubric.success_metric,
        pass_threshold=env.pass_threshold,
        state_columns=list(state_columns or ()),
        path_to_save=None if results_path is None else str(results_path),
    )
    return GenerateOutputs(outputs, metadata, list(all_states))


async def run_rollouts(
    env: Environment,
    client: ClientLike,
    model: str,
    prompts: Sequence[Any],
    answers: Sequence[str],
    tasks: Sequence[str],
    infos: Sequence[Mapping[str, object]],
    sampling_args: Mapping[str, object] | None = None,
    max_concurrent: int = -1,
    **kwargs: object,
) -> list[Any]:
    """Run one rollout of each row of the columns, unscored: (completion, state) in their order."""
    limit = asyncio.Semaphore(max_concurrent if max_concurrent > 0 else max(1, len(prompts)))

    async def run(
        prompt: Sequence[Mapping[str, Any]] | str, answer: str, task: str, info: Mapping[str, Any]
    ) -> Any:
        row = {"prompt": prompt, "answer": answer, "task": task, "info": dict(info)}
        async with limit:
            return await env.a_rollout(
                client=client, model=model, sampling_args=sampling_args, **row, **kwargs
            )

    return await asyncio.gather(*map(run, prompts, answers, tasks, infos))


def _decorated(kind: str, env: Environment) -> list[Callable[..., object]]:
    """The bound methods of a kind, highest priority first, then by name."""
    return [method for _, method, _ in decorated(env, kind)]


stop_conditions = functools.partial(_decorated, "stop")
cleanup_handlers = functools.partial(_decorated, "cleanup")
teardown_handlers = functools.partial(_decorated, "teardown")


async def clean_up(env: Environment, state: State) -> None:
    """Run the ``@cleanup`` methods of a rollout."""
    for _, method, options in decorated(env, "cleanup"):
        if options.stage != "group":
            await maybe_await(method(state))


def mark_timed_out(env: Environment, state: State) -> None:
    """Record that the rollout reached its time limit. A rollout that continues records its own end,
    and stays marked."""
    state["timed_out"], state["is_completed"] = True, True
    state["stop_condition"] = StopReason.TIMEOUT.value


def increment_state_usage_from_response(env: Environment, state: State, response: object) -> None:
    """Add the tokens of an extra response, of any kind, to the usage of the rollout."""
    env.increment_state_usage(state, *extract_usage_tokens(response))
