"""Evaluation with the weights of a training run: the same runner and results format as ``vf-eval``."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from verifiers.results import GenerateOutputs


def play(
    trainer: Any, *, num_examples: int = -1, inputs: Sequence[Any] | None = None, folder: Path | None = None
) -> GenerateOutputs:
    """Play ``num_examples`` of the evaluation set (or the rows ``inputs``, once each) with the present weights.

    Blocks until done. Results are saved in ``folder`` when it is given.
    """
    trainer.start_engine()
    settings, context = trainer.args, trainer.run_context(trainer.args.eval_sampling_args)
    options = {
        "client": context.client,
        "model": context.model,
        "sampling_args": dict(context.sampling_args),
        "rollout_timeout_s": context.rollout_timeout_s,
        "max_concurrent": settings.max_concurrent,
        "seed": settings.seed,
        "keep_states": False,
        "results_path": None if folder is None else str(_fresh(folder)),
    }
    if inputs is not None:
        return trainer.env.generate_sync(inputs, **options)
    return trainer.eval_env.evaluate_sync(
        num_examples=num_examples, rollouts_per_example=settings.eval_rollouts_per_example, **options
    )


def evaluate(
    trainer: Any, num_examples: int, *, rows: Sequence[Any] | None = None, prefix: str = "eval"
) -> dict[str, float]:
    """The statistics of ``num_examples`` of the evaluation set (or of ``rows``), under the names that training logs.

    Results are saved under ``<output_dir>/<prefix>/step-<n>``. Unknown rewards are counted and in no mean.
    """
    started = time.perf_counter()
    folder = Path(trainer.args.output_dir) / prefix / f"step-{trainer.state.global_step}"
    results = play(trainer, num_examples=num_examples, inputs=rows, folder=folder)
    metadata = results.metadata
    metrics = {
        "reward": metadata["avg_reward"],
        "reward_stderr": metadata["reward_stderr"],
        "num_unscored": metadata["num_unscored"],
        "num_errors": metadata["num_errors"],
        "truncated": sum(results["is_truncated"]) / max(1, len(results)),
        "runtime": time.perf_counter() - started,
        **metadata["avg_metrics"],
        **{f"pass_at_{k}": value for k, value in (metadata["pass_at_k"] or {}).items()},
    }
    return {f"{prefix}_{name}": value for name, value in metrics.items()}


def _fresh(folder: Path) -> Path:
    """``folder``, or ``folder-2``, …: an evaluation is a run of its own, also when a step is evaluated twice."""
    number, path = 1, folder
    while path.exists():
        number += 1
        path = folder.with_name(f"{folder.name}-{number}")
    return path
