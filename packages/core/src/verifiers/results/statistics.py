"""Statistics of rewards: means, clustered standard errors, pass@k, percentiles. Pure functions.

NaN is an unknown value: it is skipped, never counted as zero.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

NAN = math.nan
_PART = 2**14


def known(values: Iterable[float]) -> list[float]:
    """The values that are not NaN."""
    numbers = list(values)
    return [number for number in numbers if number == number] if math.isnan(sum(numbers)) else numbers


def mean(values: Iterable[float]) -> float:
    """Mean of the known values; NaN when there is none.

    >>> mean([1.0, math.nan, 0.0])
    0.5
    """
    total, count = _total(values)
    return total / count if count else NAN


def known_sum(values: Iterable[float]) -> float:
    """The exact sum of the known values."""
    return _total(values)[0]


def _total(values: Iterable[float]) -> tuple[float, int]:
    """(the exact sum of the known values, their number); of an array a part at a time is in memory as a list."""
    if not hasattr(values, "__array__"):
        numbers = known(values)
        return math.fsum(numbers), len(numbers)
    array = np.asarray(values, float)
    array = array[~np.isnan(array)]
    parts = (array[start : start + _PART].tolist() for start in range(0, len(array), _PART))
    return math.fsum(itertools.chain.from_iterable(parts)), len(array)


def numbered(keys: Iterable[Hashable]) -> np.ndarray:
    """A number for each key, equal for equal keys: an array.

    >>> numbered(["a", "b", "a"]).tolist()
    [0, 1, 0]
    """
    with contextlib.suppress(TypeError, ValueError):  # keys of other kinds than one of integers are counted below
        if isinstance(keys, Sequence) and (integers := np.asarray(keys)).dtype.kind in "iu" and integers.ndim == 1:
            return np.unique(integers, return_inverse=True)[1]
    numbers: dict[Hashable, int] = {}
    return np.array([numbers.setdefault(key, len(numbers)) for key in keys], dtype=np.int64)


def clustered_stderr(values: Sequence[float] | np.ndarray, clusters: Sequence[Hashable]) -> float:
    """Standard error of the mean of the known values when values of one cluster (example) are correlated.

    sqrt(G/(G-1) * sum over clusters of (sum of deviations in the cluster)^2) / n, for n values in G clusters; with
    one value per cluster it is the usual s/sqrt(n). NaN for fewer than two clusters.

    *Source*: Miller 2024, "Adding Error Bars to Evals", eq. 4, with the small-sample factor of cluster-robust errors.
    """
    numbers = np.asarray(values, float)
    is_known = ~np.isnan(numbers)
    each, cluster = numbers[is_known] - mean(numbers), numbered(clusters)[is_known]
    counts = np.bincount(cluster)
    if np.count_nonzero(counts) < 2:
        return NAN
    num_clusters = np.count_nonzero(counts)
    squares = np.bincount(cluster, weights=each)[counts > 0] ** 2
    return math.sqrt(num_clusters / (num_clusters - 1) * math.fsum(squares)) / len(each)


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Probability that at least one of ``k`` drawn from ``n`` rollouts is correct: 1 - C(n-c, k)/C(n, k).

    *Source*: Chen et al. 2021, eq. 1.

    >>> pass_at_k(4, 1, 2)
    0.5
    """
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


def pass_all_k(n: int, correct: int, k: int) -> float:
    """Probability that all ``k`` drawn from ``n`` rollouts are correct (pass^k): C(c, k)/C(n, k)."""
    return math.comb(correct, k) / math.comb(n, k)


@dataclass(frozen=True, slots=True)
class PassRates:
    """pass@k and pass^k of a run by ``str(k)``, and a 95 % interval (low, high) of each; empty where there are none."""

    any_of: dict[str, float] = field(default_factory=dict)
    all_of: dict[str, float] = field(default_factory=dict)
    any_of_interval: dict[str, tuple[float, float]] = field(default_factory=dict)


def draws(n: int) -> list[int]:
    """The k of pass@k for ``n`` rollouts of an example: 1, 2, 4, … and ``n``; none for ``n`` < 2.

    >>> draws(6), draws(1)
    ([1, 2, 4, 6], [])
    """
    return sorted({1 << power for power in range(n.bit_length())} | {n}) if n > 1 else []


def pass_rates(successes: Sequence[float] | np.ndarray, examples: Sequence[Hashable], n: int) -> PassRates:
    """pass@k and pass^k for k = 1, 2, 4, … and ``n``, averaged over the examples whose ``n`` values are all known.

    ``successes`` are 1, 0 or NaN, one for each rollout. Empty for ``n`` < 2 or when no example is complete.
    """
    if not draws(n):
        return PassRates()
    numbers, example = np.asarray(successes, float), numbered(examples)
    is_known = ~np.isnan(numbers)
    is_complete = (np.bincount(example) == n) & (
        np.bincount(example[~is_known], minlength=int(example.max(initial=-1)) + 1) == 0
    )
    sums = np.bincount(example, weights=np.where(is_known, numbers, 0.0))
    counts = [round(count) for count in sums[is_complete].tolist()]
    if not counts:
        return PassRates()
    ks = draws(n)
    by_k = {str(k): [pass_at_k(n, count, k) for count in counts] for k in ks}
    return PassRates(
        {k: mean(rates) for k, rates in by_k.items()},
        {str(k): mean(pass_all_k(n, count, k) for count in counts) for k in ks},
        {k: share_interval(rates) for k, rates in by_k.items()},
    )


Z95 = 1.959964
"""The 97.5 % quantile of the normal distribution."""


def share_interval(values: Sequence[float]) -> tuple[float, float]:
    """Wilson interval (95 %) of the mean of independent values between 0 and 1, one for each example.

    The number of values is replaced by the effective one, p (1 - p) over the squared standard error, which is larger
    where every value is itself a mean (at p = 0 and p = 1 by the number itself, the widest case), and is corrected for
    the uncertainty of that error by the ratio of the normal quantile to Student's.

    *Source*: Wilson 1927; the effective size: Korn and Graubard 1998, "Confidence intervals for proportions with small
    expected number of positive counts estimated from survey data".

    >>> low, high = share_interval([0.0] * 20)
    >>> round(low, 3), round(high, 3)
    (0.0, 0.18)
    """
    size, p = len(values), mean(values)
    variance = math.fsum((value - p) ** 2 for value in values) / max(1, size - 1) / size
    spread = p * (1 - p)
    effective = spread / variance if variance > 0 and spread > 0 else size
    freedom = max(1, size - 1)
    student = Z95 + (Z95**3 + Z95) / (4 * freedom) + (5 * Z95**5 + 16 * Z95**3 + 3 * Z95) / (96 * freedom**2)
    effective = max(1.0, min(effective, 4 * size)) * (Z95 / student) ** 2  # a few examples may have far too small a one
    z = Z95
    center = (p + z * z / (2 * effective)) / (1 + z * z / effective)
    half = z / (1 + z * z / effective) * math.sqrt(spread / effective + z * z / (4 * effective * effective))
    return max(0.0, center - half), min(1.0, center + half)


def percentile(values: Sequence[float], percent: float) -> float:
    """The value below which ``percent`` (0 to 100) of the known values lie, interpolated; NaN when there is none."""
    every = np.asarray(values, float)
    numbers = np.sort(every[~np.isnan(every)])
    if not len(numbers):
        return NAN
    position = (len(numbers) - 1) * percent / 100
    low = math.floor(position)
    high = min(low + 1, len(numbers) - 1)
    return float(numbers[low] + (numbers[high] - numbers[low]) * (position - low))
