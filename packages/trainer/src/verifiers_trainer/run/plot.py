"""Plot the learning curve of a run from its ``metrics.jsonl``."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from verifiers_trainer.run.metrics_files import read_metrics, reward_name

SMOOTHING_STEPS = 10


def draw_learning_curve(
    metrics: Path, picture: Path, title: str, exact: str = "exact_match"
) -> None:
    """Write ``picture``: the reward, and ``reward/success`` else the metric ``exact``, per step
    with running means.

    A dashed line shows what the best non-solution earns, where that is known
    (``reward/non_solution``); entropy below. Of a batch that is used several times, the steps of
    its first pass.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    lines = read_metrics(metrics)
    rows = [row for row in lines if "reward/mean" in row and row.get("batch/pass", 1) == 1]
    steps = np.array([row["step"] for row in rows])
    figure, (top, bottom) = plt.subplots(2, 1, figsize=(8, 6), height_ratios=(3, 1), sharex=True)
    if any(row.get("reward/success") is not None for row in rows):
        solved = "reward/success"
    else:
        solved = f"reward/{exact}"
    for name, colour in (("reward/mean", "tab:blue"), (solved, "tab:green")):
        values = np.array([row.get(name) for row in rows], float)  # None becomes NaN
        if not np.isnan(values).all():
            top.plot(steps, values, color=colour, alpha=0.25)
            top.plot(
                steps,
                running_mean(values),
                color=colour,
                label=f"{name} (mean of {SMOOTHING_STEPS} steps)",
            )
    for row in [row for row in lines if row.get("eval_reward") is not None]:
        top.errorbar(
            row["step"],
            row["eval_reward"],
            yerr=1.96 * (row.get("eval_reward_stderr") or 0),
            fmt="ko",
            ms=4,
        )
    lines_below = [
        row["reward/non_solution"] for row in rows if row.get("reward/non_solution") is not None
    ]
    if lines_below:
        top.axhline(
            lines_below[-1],
            color="tab:red",
            linestyle="--",
            label=f"best non-solution {lines_below[-1]:.3g}",
        )
    top.set_ylabel(reward_name(rows))
    top.set_title(title)
    top.grid(alpha=0.3)
    top.legend(loc="lower right")
    entropy = np.array([row.get("entropy") for row in rows], float)
    bottom.plot(steps, entropy, color="tab:orange")
    bottom.set_ylabel("entropy (nats)")
    bottom.set_xlabel("optimizer step")
    bottom.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(picture, dpi=110)
    plt.close(figure)


def running_mean(values: np.ndarray) -> np.ndarray:
    """Mean of each value and up to ``SMOOTHING_STEPS - 1`` before it, float [n]."""
    windows = [values[max(0, i + 1 - SMOOTHING_STEPS) : i + 1] for i in range(len(values))]
    return np.array(
        [np.nan if np.isnan(window).all() else np.nanmean(window) for window in windows]
    )
