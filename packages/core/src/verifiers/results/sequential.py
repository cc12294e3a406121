"""Confidence intervals that stay valid however often they are looked at: for stopping an evaluation
when it is decided.

A fixed-sample interval that is looked at after every example, until it says what was hoped for, is
wrong far more often than it claims. A confidence sequence contains the true mean at *all* times
with probability 1 - alpha, so a run may stop whenever it is narrow enough or excludes zero. Values
must be bounded, independent and in random order; here one value is one example, the mean over its
siblings, which may be as correlated as they like. Pure functions.
"""

from __future__ import annotations

import math

import numpy as np

from verifiers.errors import ConfigError

NUM_POINTS = 1000
"""Candidate means; an interval is wider than the exact interval by at most a step at each end."""
MAX_SHARE = 0.5
"""Largest share of the capital that one value may lose."""


class ConfidenceSequence:
    """A 1 - ``alpha`` confidence sequence for the mean of values in ``low`` … ``high``, by betting
    against each mean.

    For every candidate mean two gamblers bet that the values lie above or below it; a candidate is
    out once any of them has multiplied its capital by 2 / ``alpha``, which is improbable for the
    true mean at any time (Ville's inequality). ``batch`` sequences are computed side by side, for
    simulations.

    *Source*: Waudby-Smith and Ramdas 2024, "Estimating means of bounded random variables by
    betting", theorem 3, with their predictable plug-in bets.

    >>> sequence = ConfidenceSequence(0.0, 1.0)
    >>> for n in range(400):
    ...     sequence.add(n % 2)
    >>> low, high = sequence.interval()
    >>> 0.4 < low < 0.5 < high < 0.6
    True
    """

    def __init__(
        self,
        low: float = 0.0,
        high: float = 1.0,
        alpha: float = 0.05,
        *,
        num_points: int = NUM_POINTS,
        batch: int = 1,
    ):
        if not (math.isfinite(low) and math.isfinite(high) and low < high):
            raise ConfigError(
                f"the range of the values is {low} to {high}; give two finite numbers, the lower"
                " first"
            )
        self.low, self.high, self.alpha = low, high, alpha
        self.num_values = 0
        self._means = np.linspace(0.0, 1.0, num_points + 1)  # [M], candidates in units of the range
        # of the bets above, of the bets below
        self._log_capital = np.zeros((2, batch, num_points + 1))
        self._out = np.zeros((batch, num_points + 1), bool)
        self._sum = np.zeros(batch)
        self._squares = np.zeros(batch)
        with np.errstate(divide="ignore"):
            self._limits = MAX_SHARE / self._means, MAX_SHARE / (1 - self._means)

    def add(self, values: float | np.ndarray) -> None:
        """Add the next value, or one of each sequence [batch]. *Raises* ConfigError for a value
        outside the range."""
        numbers = np.atleast_1d(np.asarray(values, dtype=float))
        scaled = (numbers - self.low) / (self.high - self.low)
        if not ((scaled >= -1e-9) & (scaled <= 1 + 1e-9)).all():
            outside = numbers[(scaled < 0) | (scaled > 1) | np.isnan(scaled)][0]
            raise ConfigError(f"the value {outside:g} is outside {self.low:g} to {self.high:g}")
        x = np.clip(scaled, 0.0, 1.0)
        t = self.num_values + 1
        variance = (0.25 + self._squares) / t  # of the values before this value
        bet = np.sqrt(2 * math.log(2 / self.alpha) / (variance * t * math.log(t + 1)))[:, None]
        distance = x[:, None] - self._means
        self._log_capital[0] += np.log1p(np.minimum(bet, self._limits[0]) * distance)
        self._log_capital[1] += np.log1p(-np.minimum(bet, self._limits[1]) * distance)
        self._out |= self._log_capital.max(axis=0) >= math.log(2 / self.alpha)
        self._sum += x
        mean = (0.5 + self._sum) / (t + 1)
        self._squares += (x - mean) ** 2
        self.num_values = t

    def intervals(self) -> np.ndarray:
        """(low, high) of each sequence, [2, batch]; the whole range at first."""
        step = 1 / (len(self._means) - 1)
        last = len(self._means) - 1
        first_in = np.argmin(self._out, axis=1)
        last_in = last - np.argmin(self._out[:, ::-1], axis=1)
        is_empty = self._out.all(axis=1)  # improbable: no mean is left
        middle = np.round(self._sum / max(1, self.num_values) * last).astype(int)
        first_in = np.where(is_empty, middle, first_in)
        last_in = np.where(is_empty, middle, last_in)
        ends = np.stack(((first_in - 1) * step, (last_in + 1) * step)).clip(0.0, 1.0)
        scaled: np.ndarray = self.low + ends * (self.high - self.low)
        return scaled

    def interval(self) -> tuple[float, float]:
        """(low, high) of the only sequence."""
        low, high = self.intervals()[:, 0]
        return float(low), float(high)
