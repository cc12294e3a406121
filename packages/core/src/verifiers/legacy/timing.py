"""Times of a rollout as older versions had them: spans and sums in seconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from verifiers.compat import TIMES

_SUMS = ("total", "overhead")
"""The names that had no span."""


@dataclass(frozen=True, slots=True)
class Span:
    """The seconds of a part of a rollout, to read only; when the part began and ended is not
    kept.

    >>> Span(0.5).duration, Span(0.5)["duration"]
    (0.5, 0.5)
    """

    duration: float

    def __getitem__(self, name: str) -> float:
        if name != "duration":
            raise KeyError(
                f"{name!r}: a part of a rollout has its duration alone; timing.start_time is the"
                " rollout's"
            )
        return self.duration


def adapt_timing(module: ModuleType) -> None:
    """Times are also read by their older names."""
    module.Timing.__missing__ = _missing


def adapt_rows(module: Any) -> None:
    """Rows of older versions have their times in other places."""
    present = module.saved_times

    def saved_times(row: Mapping[str, object]) -> Mapping[str, float]:
        times: Mapping[str, float] = present(row)
        return times if times and times.keys().isdisjoint(TIMES) else flat_timing(row)

    module.saved_times = saved_times


def _missing(timing: Any, key: str) -> object:
    if key in TIMES:
        return seconds_of(timing, TIMES[key], key)
    raise KeyError(key)


def seconds_of(timing: Mapping[str, float], key: str, name: str) -> Any:
    """A time in milliseconds as the span, or the sum, of that older name."""
    seconds = timing[key] / 1000
    return seconds if name in _SUMS else Span(seconds)


def flat_timing(row: Mapping[str, Any]) -> dict[str, float]:
    """The timing of a row that an older version saved: spans in seconds, or milliseconds at the
    row's top level."""
    saved = row.get("timing") or {}
    if not saved:
        return {
            name: row[name] for name in ("generation_ms", "scoring_ms", "total_ms") if name in row
        }
    flat = {"start_time": saved["start_time"]} if "start_time" in saved else {}
    for name, key in TIMES.items():
        if name in saved:
            flat[key] = 1000 * (saved[name] if name in _SUMS else saved[name]["duration"])
    return flat
