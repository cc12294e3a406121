"""Write the learning curves of finished runs, one plot and one table per set of seeds, for
`train/learning.md`.

    python docs/learning_curves.py NAME RUN_FOLDER [RUN_FOLDER ...] [--line REWARD LABEL]

writes ``docs/train/learning/NAME.csv`` (every step of every run) and ``NAME.png`` (plotted from the
table alone), and prints the held-out rewards as a Markdown table. ``--line`` draws what the best
non-solution earns.
"""

from __future__ import annotations

import argparse
import csv
import sys
from pathlib import Path

import numpy as np

from verifiers_trainer.run.metrics_files import read_metrics
from verifiers_trainer.run.plot import running_mean

FOLDER = Path(__file__).parent / "train" / "learning"
COLUMNS = ("run", "step", "reward", "held_out_reward", "held_out_stderr")


def table_of(runs: list[Path]) -> list[dict[str, float | str]]:
    """Return one entry per step and per evaluation, of runs numbered from 0; a repeated step
    replaces the first."""
    rows: dict[tuple[float | bool, ...], dict[str, float | str]] = {}
    for number, run in enumerate(runs):
        for line in read_metrics(run / "metrics.jsonl"):
            row: dict[str, float | str] = {"run": number, "step": line["step"]}
            if line.get("eval_reward") is not None:
                row |= {
                    "held_out_reward": line["eval_reward"],
                    "held_out_stderr": line["eval_reward_stderr"],
                }
            elif line.get("reward/mean") is not None:
                row["reward"] = line["reward/mean"]
            rows[number, line["step"], "reward" in row] = row
    return list(rows.values())


def write_table(path: Path, rows: list[dict[str, float | str]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(
            {
                name: f"{value:.4f}" if isinstance(value, float) else value
                for name, value in row.items()
            }
            for row in rows
        )


def in_markdown(rows: list[dict[str, float | str]]) -> str:
    """Return the held-out rewards, ± one standard error: a line per run, a column per evaluated
    step."""
    held_out = [row for row in rows if "held_out_reward" in row]
    steps = sorted({row["step"] for row in held_out})
    lines = [
        "| seed | " + " | ".join(f"{step} steps" if step else "before" for step in steps) + " |"
    ]
    lines.append("|---" * (len(steps) + 1) + "|")
    for run in sorted({row["run"] for row in held_out}):
        of_run = {row["step"]: row for row in held_out if row["run"] == run}
        cells = [
            f"{of_run[s]['held_out_reward']:.2f} ± {of_run[s]['held_out_stderr']:.2f}"
            for s in steps
        ]
        lines.append(f"| {run} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def draw(table: Path, picture: Path, title: str, line: tuple[float, str] | None) -> None:
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
        axes.plot(
            steps,
            running_mean(rewards),
            color=colour,
            label=f"seed {number}: training, mean of 10 steps",
        )
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
    if line is not None:
        axes.axhline(line[0], color="black", linestyle="--", linewidth=1, label=line[1])
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("reward")
    axes.set_title(title)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(picture, dpi=100)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name")
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--line", nargs=2, metavar=("REWARD", "LABEL"))
    chosen = parser.parse_args()
    FOLDER.mkdir(exist_ok=True)
    table = FOLDER / f"{chosen.name}.csv"
    rows = table_of(chosen.runs)
    write_table(table, rows)
    line = (float(chosen.line[0]), chosen.line[1]) if chosen.line else None
    draw(table, table.with_suffix(".png"), chosen.name, line)
    sys.stdout.write(f"{in_markdown(rows)}\nwrote {table} and {table.with_suffix('.png')}\n")


if __name__ == "__main__":
    main()
