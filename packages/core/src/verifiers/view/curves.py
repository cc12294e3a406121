"""The metrics of a training run over its steps, read incrementally from ``metrics.jsonl``.

A line is one optimizer step or one evaluation, ``{"step", "policy_version", "time", name: value,
…}``; an unknown value is null. An unfinished last line is skipped. When the file was truncated, as
resuming does, it is read again.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path

from verifiers.runtime.bounded import MAX_FILE_BYTES, lines_of, open_file
from verifiers.runtime.decoding import decode_json

MAX_NUMBER = 2**63


class Curves:
    """The parsed ``lines`` of a metrics file."""

    def __init__(self, path: Path):
        self.path = path
        self.lines: list[dict[str, object]] = []
        self._end = 0
        self._restarts = 0
        self._identity: tuple[int, int] | None = None

    def read(self) -> None:
        """Read the appended lines; skips a line that is not a JSON object. Raises: ``OSError``."""
        stat = os.stat(self.path)
        if self._identity != (stat.st_dev, stat.st_ino) or stat.st_size < self._end:
            self.lines, self._end = [], 0
            self._restarts += 1
            self._identity = (stat.st_dev, stat.st_ino)
        with open_file(self.path) as file:
            file.seek(self._end)
            for raw in lines_of(file, MAX_FILE_BYTES):
                if not raw.endswith(b"\n"):
                    return
                self._end += len(raw)
                try:
                    line = decode_json(raw)
                except ValueError:
                    continue
                if isinstance(line, dict):
                    self.lines.append({n: v for n, v in line.items() if not _is_odd(v)})

    @property
    def generation(self) -> str:
        """A token that changes when the file was rewritten: earlier lines may differ."""
        return "-".join(f"{part:x}" for part in (*(self._identity or ()), self._restarts))

    @property
    def step(self) -> int:
        """The newest step."""
        steps = (step for line in self.lines if isinstance(step := line.get("step"), int))
        return max(steps, default=0)

    @property
    def times(self) -> list[float]:
        """When each line was written, in seconds since the epoch."""
        times = (line.get("time") for line in self.lines)
        return [time for time in times if isinstance(time, int | float)]

    @property
    def seconds(self) -> float | None:
        """Seconds that the steps took, with what was between them, and without the pauses between
        the sessions of a resumed run. Of lines without ``time/step``: from the first to the last."""
        if steps := self.points("time/step"):
            return math.fsum(value for _, value in steps)
        return times[-1] - times[0] if (times := self.times) else None

    def seconds_per_step(self) -> float | None:
        """Mean seconds per step; None if unknown."""
        if steps := self.points("time/step"):
            return math.fsum(value for _, value in steps) / len(steps)
        return self.seconds / (self.step - 1) if self.seconds and self.step > 1 else None

    def points(self, name: str) -> list[tuple[int, float]]:
        """(step, value) of every line with a finite ``name``."""
        return [
            (_step_of(line), float(value))
            for line in self.lines
            if isinstance(value := line.get(name), int | float) and math.isfinite(value)
        ]

    def last(self, name: str) -> float | None:
        """The newest value of ``name``."""
        points = self.points(name)
        return points[-1][1] if points else None

    def total(self, name: str) -> float:
        """The sum of ``name`` over all lines."""
        return math.fsum(value for _, value in self.points(name))

    def thumbnail(self, name: str, num_points: int) -> list[float]:
        """At most ``num_points`` values: means over equal intervals of steps."""
        values = [value for _, value in self.points(name)]
        size = max(1, math.ceil(len(values) / num_points))
        parts = (values[start : start + size] for start in range(0, len(values), size))
        return [math.fsum(part) / len(part) for part in parts]


def _step_of(line: Mapping[str, object]) -> int:
    step = line["step"]
    if not isinstance(step, int):
        raise TypeError(f"a line of the metrics has the step {step!r:.40}, no number")
    return step


def _is_odd(value: object) -> bool:
    """Whether a value is a number that no run writes: none can be computed with it."""
    if isinstance(value, float):
        return not math.isfinite(value)
    return isinstance(value, int) and abs(value) > MAX_NUMBER
