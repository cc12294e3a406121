"""How many examples and siblings a comparison needs, from an earlier run. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from verifiers.results.comparison import examples_needed
from verifiers.results.statistics import known_values

SIBLINGS = (1, 2, 4, 8, 16)


@dataclass(frozen=True, slots=True)
class Spread:
    """Standard deviations of a reward: of examples' true means, and of an example's siblings."""

    between: float
    within: float

    @classmethod
    def of(cls, values: Mapping[Hashable, Sequence[float]]) -> Spread | None:
        """Estimate from example -> rewards; None with fewer than two examples, or without siblings.

        *Source*: the one-way random effects model, Searle et al. 1992, section 3.6, with equal
        weight per example.

        >>> Spread.of({"a": [0.0, 0.0], "b": [1.0, 1.0]})
        Spread(between=0.7071067811865476, within=0.0)
        """
        groups = [np.array(group) for group in map(known_values, values.values()) if len(group) > 1]
        if len(groups) < 2:
            return None
        within = float(np.mean([group.var(ddof=1) for group in groups]))
        noise = float(np.mean([group.var(ddof=1) / len(group) for group in groups]))
        between = float(np.var([group.mean() for group in groups], ddof=1)) - noise
        return cls(math.sqrt(max(0.0, between)), math.sqrt(within))

    def of_differences(self, siblings: int) -> tuple[float, float]:
        """Standard deviation of a difference within an example of two runs: when both find the same
        examples hard, and when not."""
        chance = 2 * self.within**2 / siblings
        return math.sqrt(chance), math.sqrt(chance + 2 * self.between**2)


ASSUMED = Spread(math.sqrt(0.125), math.sqrt(0.125))
"""Without an earlier run: a reward of 0 or 1, equally likely, half by example, half by chance."""


@dataclass(frozen=True, slots=True)
class Size:
    """Examples that a comparison of two runs needs, with ``siblings`` rollouts of each."""

    siblings: int
    at_least: int
    """When the runs find the same examples hard, so that only chance differs within a pair."""
    at_most: int
    """When the examples that one run solves say nothing about those that the other solves."""


def sizes(spread: Spread, difference: float, siblings: Sequence[int] = SIBLINGS) -> list[Size]:
    """The examples that show a true ``difference`` of means with 80% probability at 5%, by number
    of siblings.

    >>> sizes(Spread(0.3, 0.4), 0.05, [1, 4])
    [Size(siblings=1, at_least=1007, at_most=1572), Size(siblings=4, at_least=254, at_most=819)]
    """
    return [
        Size(count, *(examples_needed(sd, difference) or 2 for sd in spread.of_differences(count)))
        for count in siblings
    ]


def detectable(spread: Spread, num_examples: int, siblings: int) -> tuple[float, float]:
    """The smallest differences that ``num_examples`` show, as ``sizes``: paired well, and not."""
    low, high = (_smallest(sd, num_examples) for sd in spread.of_differences(siblings))
    return low, high


def _smallest(sd: float, num_examples: int) -> float:
    if not sd:
        return 0.0
    low, high = 0.0, 8 * sd
    for _ in range(40):  # examples_needed falls as the difference grows
        middle = (low + high) / 2
        is_enough = (examples_needed(sd, middle) or 0) <= num_examples
        low, high = (low, middle) if is_enough else (middle, high)
    return high
