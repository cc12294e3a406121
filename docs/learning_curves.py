"""Write the learning curves of finished runs, one plot and one table per set of seeds, for `train/learning.md`.

    python docs/learning_curves.py NAME RUN_FOLDER [RUN_FOLDER ...]

writes ``docs/train/learning/NAME.csv`` (every step of every run) and ``NAME.png`` (plotted from the table alone).
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import numpy as np

from verifiers_trainer.run.metrics_files import read_metrics
from verifiers_trainer.run.plot import running_mean

FOLDER = Path(__file__).parent / "train" / "learning"
COLUMNS = ("run", "step", "reward", "held_out_reward", "held_out_stderr")


def table_of(runs: list[Path]) -> list[dict[str, float | str]]:
    """Return one entry per step and per evaluation, of runs numbered from 0; a repeated step replaces the first."""
    rows: dict[tuple[float | bool, ...], dict[str, float | str]] = {}
    for number, run in enumerate(runs):
        for line in read_metrics(run / "metrics.jsonl"):
            row: dict[str, float | str] = {"run": number, "step": line["step"]}
            if line.get("eval_reward") is not None:
                row |= {"held_out_reward": line["eval_reward"], "held_out_stderr": line["eval_reward_stderr"]}
            elif line.get("reward/mean") is not None:
                row["reward"] = line["reward/mean"]
            rows[number, line["step"], "reward" in row] = row
    return list(rows.values())


def write_table(path: Path, rows: list[dict[str, float | str]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(
            {name: f"{value:.4f}" if isinstance(value, float) else value for name, value in row.items()} for row in rows
        )


def draw(table: Path, picture: Path, title: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    with table.open() as file:
        rows = list(csv.DictReader(file))
    figure, axes = plt.subplots(figsize=(8, 4.5))
    for number in sorted({row["run"] for row in rows}):
        colour = f"C{number}"
        run_rows = [row for row in rows if row["run"] == number]
        steps = np.array([int(row["step"]) for row in run_rows if row["reward"]])
        rewards = np.array([float(row["reward"]) for row in run_rows if row["reward"]])
        axes.plot(steps, rewards, color=colour, alpha=0.2)
        axes.plot(steps, running_mean(rewards), color=colour, label=f"seed {number}: training, mean of 10 steps")
        held_out = [row for row in run_rows if row["held_out_reward"]]
        axes.errorbar(
            [int(row["step"]) for row in held_out],
            [float(row["held_out_reward"]) for row in held_out],
            yerr=[1.96 * float(row["held_out_stderr"]) for row in held_out],
            fmt="o",
            color=colour,
            ms=5,
            capsize=3,
            label=f"seed {number}: held out, 95 % interval",
        )
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("reward")
    axes.set_title(title)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(picture, dpi=100)
    plt.close(figure)


def main() -> None:
    name, *runs = sys.argv[1:]
    FOLDER.mkdir(exist_ok=True)
    table = FOLDER / f"{name}.csv"
    write_table(table, table_of([Path(run) for run in runs]))
    draw(table, FOLDER / f"{name}.png", name)
    sys.stdout.write(f"wrote {table} and {table.with_suffix('.png')}\n")


if __name__ == "__main__":
    main()
