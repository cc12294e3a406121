"""``History``: the metrics of a training run as rows, as a table and as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from statistics import fmean
from typing import Any

from verifiers.errors import ConfigError
from verifiers.results.trainings import EDGE_STEPS, edge_rewards
from verifiers.runtime.bounded import read_file
from verifiers_trainer.run.metrics_files import METRICS, read_metrics, reward_name

PICTURE = "learning-curve.png"
WIDTH, HEIGHT = 480, 120
"""Pixels of the curve in a notebook."""


class History:
    """The lines of a run's ``metrics.jsonl``, read anew at each use: one dict per step, evaluation
    or skipped batch."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)

    @property
    def rows(self) -> list[dict[str, Any]]:
        """All lines; empty before the first step."""
        file = self.folder / METRICS
        return read_metrics(file) if file.is_file() else []

    def __len__(self) -> int:
        return len(self.rows)

    def to_pandas(self) -> Any:
        """The lines as a ``pandas.DataFrame``, one column per metric; NaN if a line has no such
        metric."""
        import pandas

        return pandas.DataFrame(self.rows)

    def plot(self, picture: str | Path | None = None) -> Picture:
        """Draw the learning curve into ``picture`` (PNG; default: ``learning-curve.png`` in the
        run's folder).

        *Raises* ConfigError before the first step, and where matplotlib is not installed.
        """
        if not any("reward/mean" in row for row in self.rows):
            raise ConfigError(f"{self.folder / METRICS} holds no step yet: train first")
        try:
            import matplotlib  # noqa: F401
        except ModuleNotFoundError as error:
            raise ConfigError(
                "a plot needs matplotlib, which is not installed: pip install matplotlib"
            ) from error
        from verifiers_trainer.run.plot import draw_learning_curve

        target = self.folder / PICTURE if picture is None else Path(picture)
        draw_learning_curve(self.folder / METRICS, target, self.folder.name)
        return Picture(target)

    def __repr__(self) -> str:
        return f"History({str(self.folder)!r}: {summary_of(self.rows)})"

    def _repr_html_(self) -> str:
        return self.html(f"{self.folder}: {summary_of(self.rows)}")

    def html(self, caption: str) -> str:
        """The curve of the rewards over ``caption``: the mean of each step, the mean of ten, and
        points for the evaluations."""
        return f"<figure>{_curve(self.rows)}<figcaption>{escape(caption)}</figcaption></figure>"


class Picture:
    """A PNG file that a notebook shows."""

    def __init__(self, path: Path):
        self.path = path

    def __repr__(self) -> str:
        return f"Picture({str(self.path)!r})"

    def _repr_png_(self) -> bytes:
        return read_file(self.path)


def summary_of(rows: Sequence[Mapping[str, Any]]) -> str:
    """The steps, the reward at both ends, and the newest evaluation, in words."""
    ends = edge_rewards(rows)
    if ends is None:
        return "no step yet"
    first, last, edge = ends
    steps = max(row["step"] for row in rows)
    text = f"{steps} steps, {reward_name(rows)} {first:.3f} -> {last:.3f} (first and last {edge})"
    evaluations = [row["eval_reward"] for row in rows if row.get("eval_reward") is not None]
    return text + (f", evaluated {evaluations[-1]:.3f}" if evaluations else "")


def _curve(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rewards against steps as SVG; nothing before the second step."""
    steps, evaluations = (
        [(row["step"], float(row[name])) for row in rows if row.get(name) is not None]
        for name in ("reward/mean", "eval_reward")
    )
    if len(steps) < 2:
        return ""
    window = range(len(steps))
    smooth = [
        (steps[i][0], fmean(value for _, value in steps[max(0, i - EDGE_STEPS + 1) : i + 1]))
        for i in window
    ]
    values = [value for _, value in steps + evaluations]
    low, high = min(0.0, *values), max(values)
    last = max(1, steps[-1][0])

    def point(step: float, value: float) -> str:
        height = (value - low) / ((high - low) or 1.0)
        return f"{WIDTH * step / last:.1f},{HEIGHT * (1 - height):.1f}"

    lines = "".join(
        f"<polyline fill='none' stroke='currentColor' stroke-opacity='{opacity}'"
        f" points='{' '.join(point(*pair) for pair in pairs)}'/>"
        for pairs, opacity in ((steps, 0.3), (smooth, 1))
    )
    for pair in evaluations:
        x, y = point(*pair).split(",")
        lines += f"<circle cx='{x}' cy='{y}' r='3' fill='currentColor'><title>{pair[1]:.3f}</title></circle>"
    label = f"{reward_name(rows)} from {low:.3g} to {high:.3g}, step {steps[0][0]} to {last}"
    return (
        f"<svg width='{WIDTH}' height='{HEIGHT}' style='overflow:visible' role='img'"
        f" aria-label='{label}'>{lines}</svg><div>{label}</div>"
    )
