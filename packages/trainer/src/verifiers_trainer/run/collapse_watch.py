"""``CollapseWatch``: says when a policy that follows a teacher has collapsed.

A policy that teaches itself with a context can drift to what its teacher finds likely and no task
rewards: replies of one token, of the whole budget, or always the same. Its loss falls meanwhile, so
the loss tells nothing. Watched are the reward, the entropy and the length of completions: collapsed
is a policy whose reward has fallen from its best window of ``WINDOW`` steps by more than chance
explains, while entropy or length halved or doubled since then. Either alone is no collapse: a
policy that learns a task becomes surer, and a harder part of the data has lower rewards.

It is a function of the lines of ``metrics.jsonl`` alone, so a resumed run continues with what its
file says.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, variance
from typing import Any

WINDOW = 10
"""Steps in a window."""
STANDARD_ERRORS = 5.0
"""Fall of the reward, in standard errors of the difference: the best of many windows is a lucky one."""
FACTOR = 2.0
"""Change of entropy or length."""


@dataclass(frozen=True, slots=True)
class _Window:
    last: int  # number of its last step
    reward: float
    variance: float  # of the reward from step to step
    entropy: float  # nats per token
    length: float  # sampled tokens of a rollout


class CollapseWatch:
    """The reward, the entropy and the length of a run's steps so far."""

    def __init__(self) -> None:
        self._steps: deque[tuple[float, float, float]] = deque(maxlen=WINDOW)
        self._recent: deque[_Window] = deque(maxlen=WINDOW)
        """The windows that have a step in common with the present one."""
        self._best: _Window | None = None
        """Of those before."""

    def sentence(self, number: int, numbers: Mapping[str, Any]) -> str:
        """Add the metrics of step ``number``; say what collapsed, or nothing."""
        names = ("reward/mean", "entropy", "tokens/completion", "rollouts/generated")
        # unknown is NaN in a step and None in the file
        values = [numbers.get(name) for name in names]
        reward, entropy, tokens, count = [math.nan if v is None else float(v) for v in values]
        step = (reward, entropy, tokens / count if count else math.nan)
        if any(math.isnan(value) for value in step):
            return ""
        self._steps.append(step)
        if len(self._steps) < WINDOW:
            return ""
        now = _window(number, list(self._steps))
        if len(self._recent) == WINDOW:
            earlier = self._recent[0]
            if self._best is None or earlier.reward > self._best.reward:
                self._best = earlier
        self._recent.append(now)
        if self._best is None or not _has_collapsed(self._best, now):
            return ""
        best = self._best
        return (
            f"the policy has collapsed: its reward was {best.reward:.3g} in the {WINDOW} steps up to"
            f" step {best.last} and is {now.reward:.3g} in those up to step {now.last}, while the"
            f" entropy went from {best.entropy:.2g} to {now.entropy:.2g} nats per token and"
            f" completions from {best.length:.0f} to {now.length:.0f} tokens; begin again from a"
            f" checkpoint near step {best.last} with a lower learning_rate, sync_ref_model=True or a"
            " context that says less, or set collapse='warn'"
        )


def _window(number: int, steps: Sequence[tuple[float, float, float]]) -> _Window:
    rewards, entropies, lengths = zip(*steps, strict=True)
    return _Window(number, fmean(rewards), variance(rewards), fmean(entropies), fmean(lengths))


def _has_collapsed(best: _Window, now: _Window) -> bool:
    error = math.sqrt((best.variance + now.variance) / WINDOW)
    has_fallen = best.reward - now.reward > STANDARD_ERRORS * error + 1e-9
    return has_fallen and (_moved(best.entropy, now.entropy) or _moved(best.length, now.length))


def _moved(before: float, now: float) -> bool:
    return now > FACTOR * before or FACTOR * now < before
