"""Evaluation with the weights of a training run: the same runner and results format as ``vf-eval``."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any


def evaluate(trainer: Any, num_examples: int) -> dict[str, float]:
    """Play ``num_examples`` of the evaluation set through the trainer's engine; blocks until done.

    Results are saved under ``<output_dir>/eval/step-<n>``. Unknown rewards are counted and in no mean.
    """
    started = time.perf_counter()
    settings = trainer.args
    context = trainer.run_context(settings.eval_sampling_args)
    folder = Path(settings.output_dir) / "eval" / f"step-{trainer.state.global_step}"
    results = trainer.eval_env.evaluate_sync(
        client=context.client,
        model=context.model,
        sampling_args=dict(context.sampling_args),
        num_examples=num_examples,
        rollouts_per_example=settings.eval_rollouts_per_example,
        rollout_timeout_s=context.rollout_timeout_s,
        max_concurrent=settings.max_concurrent,
        seed=settings.seed,
        results_path=_fresh(folder),
        keep_states=False,
    )
    metadata = results.metadata
    metrics = {
        "eval_reward": metadata["avg_reward"],
        "eval_reward_stderr": metadata["reward_stderr"],
        "eval_num_unscored": metadata["num_unscored"],
        "eval_num_errors": metadata["num_errors"],
        "eval_truncated": sum(results["is_truncated"]) / max(1, len(results)),
        "eval_runtime": time.perf_counter() - started,
    }
    metrics |= {f"eval_{name}": value for name, value in metadata["avg_metrics"].items()}
    metrics |= {f"eval_pass_at_{k}": value for k, value in (metadata.get("pass_at_k") or {}).items()}
    return metrics


def _fresh(folder: Path) -> str:
    """``folder``, or ``folder-2``, …: an evaluation is a run of its own, also when a step is evaluated twice."""
    number, path = 1, folder
    while path.exists():
        number += 1
        path = folder.with_name(f"{folder.name}-{number}")
    return str(path)
