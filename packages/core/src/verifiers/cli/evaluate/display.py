"""Show the progress of a run on stderr: a refreshed block, a line every ten seconds, or one JSON
event per line.

A display reads ``runs.runner.Progress`` and never changes it; every number counts durable rollouts.
When no rollout has finished for ``SILENT_S`` it shows what the rollouts wait for. Each of several
runs has a line in the block. No model text is shown; control characters in log messages and names
are escaped.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import sys
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any, TextIO

from verifiers.cli.common.interrupt import watched
from verifiers.errors import ConfigError
from verifiers.results.texts import duration
from verifiers.runs.rollout import SCORING, Progress
from verifiers.runtime.redaction import redacted_text
from verifiers.runtime.terminal import escape_control

if TYPE_CHECKING:
    from verifiers.rollouts.state import State

SILENT_S = 30.0
"""Seconds without a finished rollout after which the display shows what the rollouts wait for."""
LINE_EVERY_S = 10.0
RATE_WINDOW_S = 30.0
"""Seconds over which the display of a running evaluation averages tokens per second."""
LATER = 1.25
"""Factor by which an estimate of the time left must exceed the shown estimate to be shown."""
BAR_CHARS = 24
LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
NUM_NEIGHBOURS = 4
"""Runs before and after the current run that have a line in the block."""


class TokenRate:
    """Tokens per second in the last ``RATE_WINDOW_S``, or since the start of a younger run.

    The number falls when a server slows down, where the mean of the whole run hides it.
    """

    def __init__(self, started: float) -> None:
        self._counts = deque([(started, 0)])
        """(monotonic seconds, tokens sampled until then), oldest first."""

    def update(self, tokens: int, now: float) -> float:
        """The rate at ``now``, where ``tokens`` have been sampled since the start."""
        self._counts.append((now, tokens))
        while self._counts[1][0] <= now - RATE_WINDOW_S:
            self._counts.popleft()
        before, count = self._counts[0]
        # a failed rollout takes the tokens of its running turns out of the count
        return max(tokens - count, 0) / max(now - before, 1e-9)


class TimeLeft:
    """Seconds that remain, without the jitter of single rollouts: the end moves back only by a
    share of the rest."""

    def __init__(self) -> None:
        self._end = math.inf

    def update(self, left_s: float, now: float) -> float:
        """The seconds to show at ``now``, where ``left_s`` are estimated."""
        if now + left_s < self._end or left_s > LATER * max(self._end - now, 1.0):
            self._end = now + left_s
        return max(self._end - now, 0.0)


def status_line(
    progress: Progress,
    now: float,
    tokens_per_s: float | None = None,
    time_left: TimeLeft | None = None,
) -> str:
    """Rollouts done and running, mean reward, errors, throughput, time; ``now`` on the monotonic
    clock.

    The throughput is ``tokens_per_s``, or the mean since the start.
    """
    elapsed = max(now - progress.started, 1e-9)
    fresh = progress.done - progress.resumed
    parts = [f"{progress.done}/{progress.total} done"]
    if progress.running or progress.done < progress.total:
        scored = sum(_awaited(state) == SCORING for _, state in progress.running.values())
        being_scored = f" ({scored} being scored)" if scored else ""
        parts.append(f"{len(progress.running)} running{being_scored}")
    if progress.rewards:
        parts.append(f"reward {progress.reward_sum / progress.rewards:.3f}")
    if errors := progress.errors.total():
        most, count = progress.errors.most_common(1)[0]
        parts.append(f"{errors} {'error' if errors == 1 else 'errors'} ({count} × {most})")
    if tokens := sampled_tokens(progress):
        parts.append(f"{tokens / elapsed if tokens_per_s is None else tokens_per_s:,.0f} tokens/s")
    if fresh and progress.done < progress.total:
        # from the newest finished rollout, so that the estimate falls while nothing finishes
        per_rollout = max(progress.last_done - progress.started, 1e-9) / fresh
        ends_at = progress.last_done + (progress.total - progress.done) * per_rollout
        remaining_s = max(ends_at - now, 0.0)
        remaining_s = remaining_s if time_left is None else time_left.update(remaining_s, now)
        # 0 would be wrong while the last rollouts are waited for
        parts.append(f"{duration(remaining_s)} left" if remaining_s >= 0.5 else duration(elapsed))
    else:
        parts.append(duration(elapsed))
    return " · ".join(parts)


def sampled_tokens(progress: Progress) -> int:
    """Tokens sampled by this start, of finished rollouts and finished turns of running rollouts."""
    states = [state for _, state in progress.running.values() if state is not None]
    running: int = sum(state["usage"].get("output_tokens", 0) for state in states)
    return progress.output_tokens + running


def waiting_line(progress: Progress, now: float) -> str:
    """What the rollouts wait for, with counts, when none finished for ``SILENT_S``; else empty."""
    silent = now - max(progress.last_done, progress.started)
    if silent < SILENT_S or not progress.running:
        return ""
    running = list(progress.running.values())
    counts = Counter(_awaited(state) for _, state in running)
    waits = ", ".join(f"{count} for {awaited}" for awaited, count in counts.most_common())
    started, state = min(running, key=lambda entry: entry[0])
    oldest = duration(now - started)
    if state is not None:
        oldest += f" (example {state['example_id']}, turn {len(state['trajectory']) + 1})"
    return f"nothing finished for {duration(silent)}: waiting {waits}, the oldest since {oldest}"


def _awaited(state: State | None) -> str:
    return "a start" if state is None else state.waiting_for or "the environment"


class Display:
    """Shows no progress; base class of the others. ``quiet`` suppresses notices as well."""

    tick_s = 0.5

    def __init__(self, stream: TextIO, quiet: bool = False):
        self.stream, self.quiet = stream, quiet
        self.label = ""
        self.progress: Progress | None = None
        self._num_planned = self._num_ended = 0
        """Rollouts of all runs where there are several, and those of runs that have ended."""

    def plan(self, labels: Sequence[str], num_rollouts: Sequence[int] = ()) -> None:
        """Announce the runs, in order, with the number of rollouts of each."""
        self._num_planned = sum(num_rollouts) if len(labels) > 1 else 0

    def begin(self, label: str, progress: Progress, facts: Mapping[str, object]) -> None:
        """Start a run; ``facts`` go into its JSON event."""
        self.label, self.progress = label, progress
        self._rate, self._time_left = TokenRate(progress.started), TimeLeft()

    def _status(self, progress: Progress, now: float) -> str:
        """The status line of a running evaluation."""
        line = status_line(
            progress, now, self._rate.update(sampled_tokens(progress), now), self._time_left
        )
        if self._num_planned:
            line += f" · all runs {self._num_ended + progress.done}/{self._num_planned}"
        return line

    def tick(self) -> None:
        """Called every ``tick_s``."""

    def rows(self, outputs: Sequence[Any]) -> None:
        """These rollouts just became durable."""

    def finish(self, exit_code: int) -> None:
        """The run is over."""
        self._num_ended += self.progress.done if self.progress is not None else 0
        self.progress = None

    def note(self, text: str) -> None:
        """One line for people."""
        if not self.quiet:
            print(_printable(text), file=self.stream, flush=True)

    def warn(self, text: str) -> None:
        """Print a warning."""
        print(_printable(f"warning: {text}"), file=self.stream, flush=True)


def _printable(text: str) -> str:
    return escape_control(redacted_text(text))


class PlainDisplay(Display):
    """Prints a line every ``LINE_EVERY_S`` seconds; for logs and pipes."""

    def begin(self, label: str, progress: Progress, facts: Mapping[str, object]) -> None:
        super().begin(label, progress, facts)
        self._next = time.monotonic() + LINE_EVERY_S

    def tick(self) -> None:
        now = time.monotonic()
        if self.progress is None or now < self._next:
            return
        self._next = now + LINE_EVERY_S
        texts = filter(None, (self._status(self.progress, now), waiting_line(self.progress, now)))
        print(f"{self.label}: {' · '.join(texts)}", file=self.stream, flush=True)


class BarDisplay(Display):
    """A refreshed block at the bottom of the terminal; notices scroll above it."""

    tick_s = 0.25

    def __init__(self, stream: TextIO, quiet: bool = False):
        super().__init__(stream, quiet)
        from rich.console import Console

        self._console = Console(file=stream, highlight=False, markup=False, soft_wrap=False)
        self._live: Any = None
        self._ended: list[tuple[str, str, bool]] = []
        """(label, status line, whether it succeeded) of the previous runs."""
        self._coming: list[str] = []

    def plan(self, labels: Sequence[str], num_rollouts: Sequence[int] = ()) -> None:
        super().plan(labels, num_rollouts)
        self._coming = list(labels)

    def begin(self, label: str, progress: Progress, facts: Mapping[str, object]) -> None:
        from rich.live import Live

        super().begin(label, progress, facts)
        self._coming = self._coming[1:]
        self._live = Live(
            console=self._console, auto_refresh=False, transient=True, redirect_stdout=False
        )
        self._live.start()
        self.tick()

    def tick(self) -> None:
        if self._live is not None:
            self._live.update(self._block(), refresh=True)

    def finish(self, exit_code: int) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
        if self.progress is not None:
            status = status_line(self.progress, time.monotonic())
            self._ended.append((self.label, status, exit_code == 0))
        super().finish(exit_code)

    def note(self, text: str) -> None:
        if not self.quiet:
            self._console.print(_printable(text))

    def warn(self, text: str) -> None:
        self._console.print(_printable(f"warning: {text}"), style="yellow")

    def _block(self) -> object:
        from rich.console import Group
        from rich.text import Text

        progress, now = self.progress, time.monotonic()
        if progress is None:
            return Text("")
        share = progress.done / progress.total if progress.total else 0.0
        full = round(share * BAR_CHARS)
        block = Text(f"{self.label}  ", style="bold", no_wrap=False)
        block.append("━" * full, style="green")
        block.append("─" * (BAR_CHARS - full), style="bright_black")
        block.append(f"  {self._status(progress, now)}", style="not bold")
        if line := waiting_line(progress, now):
            block.append(f"\n{line}", style="not bold yellow")
        return Group(*self._before(), block, *self._after())

    def _before(self) -> list[Any]:
        """A line for each of the last ``NUM_NEIGHBOURS`` finished runs."""
        left_out = len(self._ended) - NUM_NEIGHBOURS
        lines = [_line(f"… {left_out} more before")] if left_out > 0 else []
        for label, numbers, succeeded in self._ended[-NUM_NEIGHBOURS:]:
            line = _line("✓ ", "green") if succeeded else _line("✗ ", "red")
            lines.append(line.append(f"{label}  {numbers}", style="default"))
        return lines

    def _after(self) -> list[Any]:
        """A line for each of the next ``NUM_NEIGHBOURS`` runs."""
        lines = [_line(f"· {label}") for label in self._coming[:NUM_NEIGHBOURS]]
        if (left_out := len(self._coming) - NUM_NEIGHBOURS) > 0:
            lines.append(_line(f"… {left_out} more to come"))
        return lines


def _line(text: str, style: str = "bright_black") -> Any:
    from rich.text import Text

    return Text(text, style=style, no_wrap=True, overflow="ellipsis")


class JsonDisplay(Display):
    """Events ``start``, ``rollout``, ``warning`` and ``end``, one JSON object per line."""

    def begin(self, label: str, progress: Progress, facts: Mapping[str, object]) -> None:
        super().begin(label, progress, facts)
        self._done: int | None = None
        self._facts = facts

    def tick(self) -> None:
        progress = self.progress
        if progress is not None and self._done is None and progress.total:
            self._done = progress.resumed
            self._event("start", **self._facts, total=progress.total, resumed=progress.resumed)

    def rows(self, outputs: Sequence[Any]) -> None:
        self.tick()
        for output in outputs:
            self._done = (self._done or 0) + 1
            error = output["error"]
            self._event(
                "rollout",
                key=output.get("rollout_key"),
                example_id=output["example_id"],
                reward=output["reward"],
                error=error and error["error"],
                done=self._done,
                total=self.progress.total if self.progress else None,
                **self._over_all(),
            )

    def finish(self, exit_code: int) -> None:
        self.tick()
        if (progress := self.progress) is not None:
            self._event("end", exit_code=exit_code, done=progress.done, total=progress.total)
        super().finish(exit_code)

    def _over_all(self) -> dict[str, object]:
        """Rollouts done and planned over all runs, where there are several."""
        if not self._num_planned:
            return {}
        done = self._num_ended + (self._done or 0)
        return {"all_done": done, "all_total": self._num_planned}

    def note(self, text: str) -> None:
        pass

    def warn(self, text: str) -> None:
        self._event("warning", message=redacted_text(text))

    def _event(self, name: str, **facts: object) -> None:
        for key, value in facts.items():
            if isinstance(value, float) and not math.isfinite(value):
                facts[key] = None
        print(json.dumps({"event": name, **facts}), file=self.stream, flush=True)


def make_display(kind: str, quiet: bool) -> Display:
    """The display of ``--progress``: ``auto`` is ``bar``, which is ``plain`` on a pipe, or none."""
    stream = sys.stderr
    if kind == "auto":
        kind = "none" if quiet else "bar"
    if kind == "bar" and not stream.isatty():
        kind = "plain"
    display = {"bar": BarDisplay, "plain": PlainDisplay, "json": JsonDisplay, "none": Display}[kind]
    return display(stream, quiet)


@asynccontextmanager
async def ticking(display: Display) -> AsyncIterator[None]:
    """Refresh ``display`` and reset the watchdog of `interrupt` periodically within the block."""

    async def tick() -> None:
        while True:
            alive()
            display.tick()
            await asyncio.sleep(display.tick_s)

    with watched() as alive:
        ticker = asyncio.create_task(tick())
        try:
            yield
        finally:
            ticker.cancel()
            (ended,) = await asyncio.gather(ticker, return_exceptions=True)
            if isinstance(ended, Exception):
                display.warn(f"the progress display stopped with {type(ended).__name__}: {ended}")


class LogHandler(logging.Handler):
    """Sends the ``verifiers`` logger's messages through the display, whose block stays intact."""

    def __init__(self, display: Display):
        super().__init__()
        self.display = display

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = self.format(record)
        except Exception:  # noqa: BLE001 - bad format arguments of a message; logging reports them on stderr
            self.handleError(record)
            return
        show = self.display.warn if record.levelno >= logging.WARNING else self.display.note
        show(text)


@contextmanager
def logging_to(display: Display, verbose: bool, quiet: bool) -> Iterator[None]:
    """Show the ``verifiers`` logger's messages from its level on. *Raises* ``ConfigError``."""
    variable = os.environ.get("VF_LOG_LEVEL", "").upper()
    if variable and variable not in LOG_LEVELS:
        levels = ", ".join(LOG_LEVELS)
        raise ConfigError(f"VF_LOG_LEVEL is {variable!r}; it must be one of {levels}")
    logger, handler = logging.getLogger("verifiers"), LogHandler(display)
    level = "DEBUG" if verbose else "ERROR" if quiet else variable or "WARNING"
    before = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(level)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before[0])
        logger.propagate = before[1]
