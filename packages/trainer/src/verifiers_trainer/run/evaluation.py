"""Evaluation with the weights of a training run: the same runner and results format
as ``vf-eval``."""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verifiers.data.examples import examples_from
from verifiers.data.messages import normalize_messages
from verifiers.data.row_format import format_row
from verifiers.results import GenerateOutputs
from verifiers.results.run_metadata import total_usage
from verifiers.results.statistics import draws
from verifiers.runs.rollout import RunContext
from verifiers.runtime.calls import blocking
from verifiers.types import ModelRequest
from verifiers_trainer.engines.policy_client import PolicyClient
from verifiers_trainer.run.context import TrainingRun

if TYPE_CHECKING:
    from verifiers.environments.base import Environment
    from verifiers_trainer.settings.config import RLConfig


def run_rollouts(
    run: TrainingRun,
    context: RunContext,
    *,
    num_examples: int = -1,
    inputs: Sequence[object] | None = None,
    folder: Path | None = None,
    model_name: str | None = None,
    facts: Mapping[str, object] | None = None,
) -> GenerateOutputs:
    """Run rollouts of ``num_examples`` of the evaluation set, or one of each row of ``inputs``;
    block until done.

    context: client and sampling arguments. folder: where to save the results; None saves nothing.
    model_name: the name of the weights in the results; facts: where they come from.
    """
    settings = run.settings
    options = {
        "client": context.client,
        "model": context.model,
        "sampling_args": dict(context.sampling_args),
        "rollout_timeout_s": context.rollout_timeout_s,
        "max_concurrent": _concurrency(settings),
        "seed": settings.seed,
        "keep_states": False,
        "results_path": None if folder is None else str(_fresh(folder)),
        "model_name": model_name,
        "provenance": facts,
    }
    if inputs is not None:
        return run.env.generate_sync(inputs, **options)
    return run.eval_env.evaluate_sync(
        num_examples=num_examples,
        rollouts_per_example=settings.eval_rollouts_per_example,
        **options,
    )


def evaluate(
    run: TrainingRun,
    context: RunContext,
    step: int,
    num_examples: int,
    *,
    version: int | None,
    facts: Mapping[str, object],
    rows: Sequence[object] | None = None,
    prefix: str = "eval",
) -> dict[str, float]:
    """Evaluate ``num_examples`` of the evaluation set (or of ``rows``); return metrics named
    ``<prefix>_<name>``.

    ``pass_at_<k>_examples`` are behind ``pass_at_<k>``: those with k known rollouts;
    ``pass_at_k_unknown`` rollouts are in none. ``success`` and ``pass_at_<k>`` are NaN if the
    reward is graded and no success metric is named, so that every evaluation of a run has the same
    metrics.

    Save the results in ``<output_dir>/<prefix>/step-<step>``, with the run, the step and the
    served ``version`` as the model's name, and the training's ``facts`` as their provenance.
    Unknown rewards are counted, and excluded from means.
    """
    started = time.perf_counter()
    folder = run.folder / prefix / f"step-{step}"
    if rows is None and run.eval_rows is not None:
        rows = list(itertools.islice(run.eval_rows, num_examples if num_examples >= 0 else None))
    results = run_rollouts(
        run,
        context,
        num_examples=num_examples,
        inputs=rows,
        folder=folder,
        model_name=name_of_weights(run, step, version),
        facts={**facts, "policy": {"run": str(run.folder), "step": step, "version": version}},
    )
    metadata = results.metadata
    solved, behind = metadata["pass_at_k"] or {}, metadata["pass_at_k_examples"] or {}
    ks = draws(metadata["rollouts_per_example"])
    metrics = {
        "reward": metadata["avg_reward"],
        "reward_stderr": metadata["reward_stderr"],
        "num_unscored": metadata["num_unscored"],
        "num_errors": metadata["num_errors"],
        "truncated": sum(results["is_truncated"]) / max(1, len(results)),
        "tokens": total_usage(results.measurements()).get("output_tokens", 0),
        "runtime": time.perf_counter() - started,
        "success": metadata["avg_success"],
        **metadata["avg_metrics"],
        **{f"pass_at_{k}": solved.get(str(k), math.nan) for k in ks},
        **{f"pass_at_{k}_examples": behind.get(str(k), 0) for k in ks},
        **({"pass_at_k_unknown": metadata["pass_at_k_unknown"]} if ks else {}),
    }
    return {f"{prefix}_{name}": value for name, value in metrics.items()}


def name_of_weights(run: TrainingRun, step: int, version: int | None) -> str:
    """The name of a run's weights in results: the run's folder and the step; with ``sync_every``
    an older version may be served."""
    served = "" if version in (None, step) else f" (version {version})"
    return f"{run.folder} step {step}{served}"


def _concurrency(settings: RLConfig) -> int:
    """Concurrent rollouts of an evaluation."""
    if settings.is_given("per_device_eval_batch_size"):
        return settings.per_device_eval_batch_size
    return settings.max_concurrent


def parts(run: TrainingRun) -> list[dict[str, list[Any]]]:
    """The first ``eval_num_examples`` of the evaluation set, in parts of
    ``per_device_eval_batch_size`` rows."""
    settings, env = run.settings, run.eval_env
    table = (
        env.eval_table if run.eval_rows is None else examples_from(run.eval_rows, env.row_format)
    )
    rows = [example.row for example in table][
        : settings.eval_num_examples if settings.eval_num_examples >= 0 else None
    ]
    size = settings.per_device_eval_batch_size
    return [
        {f"{name}s": [row[name] for row in part] for name in ("prompt", "answer", "info")}
        | {"examples": part}
        for part in (rows[start : start + size] for start in range(0, len(rows), size))
    ]


def complete(client: PolicyClient, env: Environment, prompts: Sequence[object]) -> list[Any]:
    """A completion for each prompt, which may be a row of a dataset, by the present policy: a list
    of one message, or text where prompts are text. *Raises* ``DatasetError`` for a row without a
    prompt."""

    async def sample(prompt: object) -> Any:
        if isinstance(prompt, Mapping):
            prompt = format_row(prompt, env.row_format)["prompt"]
        elif isinstance(prompt, str) and env.message_type == "chat":
            prompt = format_row(
                {"question": prompt}, replace(env.row_format, question_key="question")
            )["prompt"]
        request = ModelRequest(
            normalize_messages(prompt, env.message_type),
            client.model,
            env.message_type,
            env.tool_defs or None,
        )
        response = await client.complete(request)
        return [response.message] if env.message_type == "chat" else response.text

    async def all_of_them() -> list[object]:
        return await asyncio.gather(*(sample(prompt) for prompt in prompts))

    return blocking(all_of_them)


def numbers_of(outcome: Any) -> dict[str, float]:
    """The result of an overridden ``evaluate``, by name: one number is the mean reward."""
    if isinstance(outcome, Mapping):
        return outcome if isinstance(outcome, dict) else dict(outcome)
    if outcome is None:
        return {}
    return {"eval_reward": float(outcome)}


def _fresh(folder: Path) -> Path:
    """A path that does not exist: ``folder``, ``folder-2``, …"""
    number, path = 1, folder
    while path.exists():
        number += 1
        path = folder.with_name(f"{folder.name}-{number}")
    return path
