"""Display of a training run on stderr: messages, a progress line, and a closing table.

On a terminal the line is redrawn in place; elsewhere a plain line is printed every ten seconds. The
numbers come from ``trainer.last_step`` and ``metrics.jsonl``; only rates and the remaining time are
computed here.
"""

from __future__ import annotations

import logging
import math
import time
import warnings
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column
from transformers.trainer_callback import TrainerCallback
from transformers.utils import logging as transformers_logging

from verifiers.results.coverage import counts_in_metrics, coverage_lines
from verifiers.runtime.redaction import redacted_text
from verifiers.runtime.terminal import escape_control
from verifiers_trainer.run.metrics_files import METRICS, read_metrics

if TYPE_CHECKING:
    from transformers.trainer_callback import TrainerControl, TrainerState
    from transformers.training_args import TrainingArguments

    from verifiers_trainer.trainer import RLTrainer

PLAIN_INTERVAL_S = 10.0
RATE_STEPS = 20
"""Number of steps over which rates are averaged."""
EDGE_STEPS = 10
"""Number of first and of last steps whose rewards the closing table compares."""
LOGGERS = ("verifiers", "verifiers_trainer")


class ConsoleHandler(logging.Handler):
    """Print log records on the console, above the progress line."""

    def __init__(self, console: Console):
        super().__init__()
        self.console = console

    def emit(self, record: logging.LogRecord) -> None:
        text = escape_control(redacted_text(record.getMessage()))
        self.console.print(
            f"{record.levelname.lower()}: {text}", markup=False, highlight=False, soft_wrap=True
        )


@contextmanager
def show_logs(console: Console, level: int) -> Iterator[None]:
    """Send the project's log messages of ``level`` and above to ``console``, and nowhere else,
    inside the block."""
    loggers = [logging.getLogger(name) for name in LOGGERS]
    before = [(logger.handlers, logger.level, logger.propagate) for logger in loggers]
    for logger in loggers:
        logger.handlers, logger.propagate = [ConsoleHandler(console)], False
        logger.setLevel(level)
    try:
        yield
    finally:
        for logger, (handlers, old, propagate) in zip(loggers, before, strict=True):
            logger.handlers, logger.propagate = handlers, propagate
            logger.setLevel(old)


@contextmanager
def quiet_libraries(enabled: bool = True) -> Iterator[None]:
    """Silence transformers and the FutureWarnings of libraries inside the block."""
    if not enabled:
        yield
        return
    level = transformers_logging.get_verbosity()
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            # it searches the Hub for builtin models
            warnings.filterwarnings("ignore", category=UserWarning, module="peft")
            yield
    finally:
        transformers_logging.set_verbosity(level)
        if bars:
            transformers_logging.enable_progress_bar()


class ProgressLine(TrainerCallback):
    """Shows the progress of training. ``stop_after_step`` ends training, with a checkpoint, after
    the current step."""

    def __init__(self, trainer: RLTrainer, console: Console, quiet: bool = False):
        self.trainer, self.console, self.quiet = trainer, console, quiet
        self.stop_after_step = False
        self.step = 0
        self.evaluation: float | None = None
        self._progress: Progress | None = None
        self._ends: deque[tuple[float, float, float]] = deque(maxlen=RATE_STEPS + 1)
        """(clock, tokens trained, seconds waited) at the end of each step."""
        self._printed_at = -math.inf

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        self.step = state.global_step
        self._ends.append((time.monotonic(), 0.0, 0.0))
        if self.console.is_terminal and not self.quiet:
            text = TextColumn(
                "{task.description}",
                markup=False,
                table_column=Column(no_wrap=True, overflow="ellipsis"),
            )
            self._progress = Progress(
                BarColumn(12), text, TimeElapsedColumn(), console=self.console
            )
            self._task = self._progress.add_task(
                f"step {self.step}/{state.max_steps}  generating",
                total=state.max_steps,
                completed=self.step,
            )
            self._progress.start()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
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
            last=self.step >= state.max_steps or self.stop_after_step,
        )
        if self.stop_after_step:
            control.should_training_stop = control.should_save = True
        return control

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        metrics: Mapping[str, float] | None = None,
        **_: Any,
    ) -> None:
        self.evaluation = (metrics or {}).get("eval_reward", self.evaluation)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Restore the terminal; a second call does nothing."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def _line(self, numbers: Mapping[str, Any], max_steps: int) -> str:
        seconds = self._ends[-1][0] - self._ends[0][0]
        steps = max(1, len(self._ends) - 1)
        tokens = sum(end[1] for end in list(self._ends)[1:])
        waited = sum(end[2] for end in list(self._ends)[1:])
        columns = [
            f"step {self.step}/{max_steps}",
            f"reward {_number(numbers, 'reward/mean'):.3f}",
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
        if self._progress is not None:
            self._progress.update(self._task, completed=self.step, description=line)
        elif last or time.monotonic() - self._printed_at >= PLAIN_INTERVAL_S:
            self._printed_at = time.monotonic()
            self.console.print(line, markup=False, highlight=False, soft_wrap=True)


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


def edge_rewards(rows: Sequence[Mapping[str, Any]]) -> tuple[float, float, int] | None:
    """Return (mean reward of the first steps, of the last steps, number of steps in each); None
    without rewards.

    >>> edge_rewards([{"reward/mean": 0.0}, {"reward/mean": 1.0}])
    (0.0, 1.0, 1)
    """
    rewards = [float(row["reward/mean"]) for row in rows if row.get("reward/mean") is not None]
    if not rewards:
        return None
    edge = max(1, min(EDGE_STEPS, len(rewards) // 2))
    return sum(rewards[:edge]) / edge, sum(rewards[-edge:]) / edge, edge


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
                "reward",
                (
                    f"{first:.3f} over the first {steps} -> {last:.3f} over the last"
                    f" ({last - first:+.3f})"
                ),
            )
        )
        rows += coverage_lines(counts_in_metrics(lines))
        rows.append(("numbers", str(metrics)))
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
