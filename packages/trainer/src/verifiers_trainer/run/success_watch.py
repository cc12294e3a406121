"""``SuccessWatch``: raises an alarm when the reward rises while fewer tasks are solved.

It compares the last ``WINDOW`` steps with the ``WINDOW`` before them, by the difference of their
means in standard errors. A run is watched where the rubric names a success metric: a reward that is
itself 0 or 1 cannot part from it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from statistics import fmean, variance
from typing import Any

WINDOW = 20
"""Steps in each of the two windows."""
STANDARD_ERRORS = 3.0
"""Rise of the reward, and fall of the success, in standard errors of the difference."""
SENTENCE = (
    "the reward rises while fewer tasks are solved (reward/mean against reward/success over the"
    f" last {2 * WINDOW} steps): the policy may have found a way to be paid without solving them;"
    " read its rollouts, and run vf-audit on the environment"
)


class SuccessWatch:
    """The reward and the success of the last steps."""

    def __init__(self) -> None:
        self._steps: deque[tuple[float, float]] = deque(maxlen=2 * WINDOW)

    def parts(self, numbers: Mapping[str, Any]) -> bool:
        """Add the metrics of a step; return whether reward and success part."""
        pair = numbers.get("reward/mean", math.nan), numbers.get("reward/success", math.nan)
        if any(value is None or math.isnan(value) for value in pair):
            return False
        self._steps.append(pair)
        if len(self._steps) < 2 * WINDOW:
            return False
        rewards, successes = zip(*self._steps, strict=True)
        return _rise(rewards) > STANDARD_ERRORS and _rise(successes) < -STANDARD_ERRORS


def _rise(values: Sequence[float]) -> float:
    """Difference of the halves' means in standard errors; infinite when the halves are constant and
    differ."""
    before, after = values[:WINDOW], values[WINDOW:]
    difference = fmean(after) - fmean(before)
    error = math.sqrt((variance(before) + variance(after)) / WINDOW)
    return (
        difference / error if error else math.copysign(math.inf, difference) if difference else 0.0
    )
