"""Display of a training run: a progress line, in a notebook a live curve, and a closing table.

On a terminal the line is redrawn in place; elsewhere a plain line is printed every ten seconds. The
numbers come from ``trainer.last_step`` and ``metrics.jsonl``; only rates and the remaining time are
computed here.
"""

from __future__ import annotations

import logging
import math
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column
from transformers.trainer_callback import TrainerCallback

from verifiers.results.coverage import counts_in_metrics, coverage_lines
from verifiers.results.trainings import edge_rewards
from verifiers.runtime.decoding import read_json
from verifiers.runtime.terminal import escape_control
from verifiers.storage.proof import PROOF
from verifiers_trainer.run.metrics_files import METRICS, read_metrics, reward_name
from verifiers_trainer.run.proof import rows_of as proof_rows

if TYPE_CHECKING:
    from transformers.trainer_callback import TrainerControl, TrainerState
    from transformers.training_args import TrainingArguments

    from verifiers_trainer.run.history import History


class Progressing(Protocol):
    """What is shown of a trainer."""

    @property
    def last_step(self) -> Mapping[str, Any]: ...

    @property
    def history(self) -> History: ...

    @property
    def args(self) -> Any: ...


log = logging.getLogger(__name__)

PLAIN_INTERVAL_S = 10.0
CURVE_INTERVAL_S = 1.0
"""Seconds between two pictures in a notebook."""
RATE_STEPS = 20
"""Number of steps over which rates are averaged."""
PICTURE = "learning_curve.png"


class ProgressLine(TrainerCallback):
    """Shows the progress of training: a line, in a notebook with the learning curve."""

    def __init__(self, trainer: Progressing, console: Console | None = None, quiet: bool = False):
        self.trainer, self.quiet = trainer, quiet
        self.console = console or Console(stderr=True)
        self.step = 0
        self.evaluation: float | None = None
        self._progress: Progress | None = None
        self._cell: Any = None
        """The display of a notebook's cell."""
        self._ends: deque[tuple[float, float, float]] = deque(maxlen=RATE_STEPS + 1)
        """(clock, tokens trained, seconds waited) at the end of each step."""
        self._printed_at = -math.inf

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> None:
        self.step = state.global_step
        self._ends.clear()
        self._ends.append((time.monotonic(), 0.0, 0.0))
        if in_notebook() and not self.quiet:
            from IPython.display import display

            self._cell = display(self.trainer.history, display_id=True)
        elif self.console.is_terminal and not self.quiet:
            text = TextColumn(
                "{task.description}",
                markup=False,
                table_column=Column(no_wrap=True, overflow="ellipsis"),
            )
            self._progress = Progress(
                BarColumn(12),
                text,
                TimeElapsedColumn(),
                console=self.console,
                redirect_stdout=sys.stdout.isatty(),  # what is piped stays in the pipe
            )
            self._task = self._progress.add_task(
                f"step {self.step}/{state.max_steps}  generating",
                total=state.max_steps,
                completed=self.step,
            )
            self._progress.start()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> Any:
        self.step = state.global_step
        numbers = self.trainer.last_step
        self._ends.append(
            (
                time.monotonic(),
                _number(numbers, "tokens/trained"),
                _number(numbers, "time/wait_generation"),
            )
        )
        self._show(
            self._line(numbers, state.max_steps),
            last=self.step >= state.max_steps,
        )
        return control

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        metrics: Mapping[str, float] | None = None,
        **_: object,
    ) -> None:
        self.evaluation = (metrics or {}).get("eval_reward", self.evaluation)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Restore the terminal; a second call does nothing."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def _line(self, numbers: Mapping[str, object], max_steps: int) -> str:
        seconds = self._ends[-1][0] - self._ends[0][0]
        steps = max(1, len(self._ends) - 1)
        tokens = sum(end[1] for end in list(self._ends)[1:])
        waited = sum(end[2] for end in list(self._ends)[1:])
        columns = [
            f"step {self.step}/{max_steps}",
            f"{reward_name([numbers])} {_number(numbers, 'reward/mean'):.3f}",
            f"loss {_number(numbers, 'loss'):+.4f}",
            f"grad {_number(numbers, 'grad_norm'):.3g}",
            f"entropy {_number(numbers, 'entropy'):.3f}",
            f"{tokens / max(seconds, 1e-9):,.0f} tok/s",
            f"waiting {min(1.0, waited / max(seconds, 1e-9)):.0%}",
            f"left {duration(seconds / steps * max(0, max_steps - self.step))}",
        ]
        if self.evaluation is not None:
            columns.append(f"eval {self.evaluation:.3f}")
        return "  ".join(columns)

    def _show(self, line: str, last: bool) -> None:
        if self.quiet:
            return
        interval = PLAIN_INTERVAL_S if self._cell is None else CURVE_INTERVAL_S
        if self._progress is not None:
            self._progress.update(self._task, completed=self.step, description=line)
        elif last or time.monotonic() - self._printed_at >= interval:
            self._printed_at = time.monotonic()
            if self._cell is None:
                self.console.print(line, markup=False, highlight=False, soft_wrap=True)
            else:
                self._cell.update(_Live(self.trainer.history, line))

    def report(self, checkpoint: Path | None) -> None:
        """Print what was trained and where it is, and draw the learning curve."""
        if self.quiet:
            return
        folder = self.trainer.args.folder
        rows = closing_rows(folder, checkpoint, draw(folder, folder.name), ())
        self.console.print(two_columns(rows), markup=False, highlight=False, soft_wrap=True)


class _Live:
    """A notebook's cell during training."""

    def __init__(self, history: History, line: str):
        self.history, self.line = history, line

    def _repr_html_(self) -> str:
        return self.history.html(self.line)


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and hasattr(ipython.get_ipython(), "kernel")


def draw(folder: Path, title: str) -> Path | None:
    """Draw the learning curve into the folder of a run; None without a step, or if it cannot be
    drawn, which is logged."""
    from verifiers_trainer.run.plot import draw_learning_curve

    metrics, picture = folder / METRICS, folder / PICTURE
    if not metrics.is_file() or not any("reward/mean" in row for row in read_metrics(metrics)):
        return None
    try:
        draw_learning_curve(metrics, picture, title)
    except Exception as error:  # noqa: BLE001 - a failed plot is reported and must not lose a trained model
        log.warning("the learning curve could not be drawn: %s: %s", type(error).__name__, error)
        return None
    return picture


def _number(numbers: Mapping[str, Any], name: str) -> float:
    value = numbers.get(name)
    return math.nan if value is None else float(value)


def duration(seconds: float) -> str:
    """Format seconds as a clock.

    >>> duration(75), duration(3725), duration(float("nan"))
    ('1:15', '1:02:05', '?')
    """
    if not math.isfinite(seconds):
        return "?"
    minutes, seconds_left = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds_left:02d}" if hours else f"{minutes}:{seconds_left:02d}"


def two_columns(rows: Sequence[tuple[str, str]]) -> str:
    """Format names and values as lines of text, control characters escaped.

    >>> print(two_columns([("model", "builtin:tiny"), ("steps", "60")]))
    model  builtin:tiny
    steps  60
    """
    width = max((len(name) for name, _ in rows), default=0)
    return "\n".join(f"{name:{width}}  {escape_control(value)}" for name, value in rows)


def closing_rows(
    folder: Path, checkpoint: Path | None, picture: Path | None, next_commands: Sequence[str]
) -> list[tuple[str, str]]:
    """Return the closing table: first and last rewards, paths of the results, next commands."""
    metrics = folder / METRICS
    rows: list[tuple[str, str]] = []
    lines = read_metrics(metrics) if metrics.is_file() else []
    ends = edge_rewards(lines)
    if ends is not None:
        first, last, edge = ends
        steps = f"{edge} steps" if edge > 1 else "step"
        rows.append(
            (
                reward_name(lines),
                (
                    f"{first:.3f} over the first {steps} -> {last:.3f} over the last"
                    f" ({last - first:+.3f})"
                ),
            )
        )
        rows += coverage_lines(counts_in_metrics(lines))
        rows.append(("numbers", str(metrics)))
    if (folder / PROOF).is_file():
        rows += proof_rows(read_json(folder / PROOF))
    if (folder / "completions").is_dir():
        rows.append(("rollouts", f"{folder}/completions/"))
    if (folder / "eval").is_dir():
        rows.append(("evaluations", f"{folder}/eval/"))
    if picture is not None:
        rows.append(("learning curve", str(picture)))
    if checkpoint is not None:
        rows.append(("checkpoint", str(checkpoint)))
    return rows + [
        ("next" if number == 0 else "", command) for number, command in enumerate(next_commands)
    ]
