"""Statistics of rewards: means, clustered standard errors, pass@k, percentiles. Pure functions.

NaN is an unknown value: it is skipped, never counted as zero.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field

NAN = math.nan


def known(values: Iterable[float]) -> list[float]:
    """The values that are not NaN."""
    numbers = list(values)
    return [number for number in numbers if number == number] if math.isnan(sum(numbers)) else numbers


def mean(values: Iterable[float]) -> float:
    """Mean of the known values; NaN when there is none.

    >>> mean([1.0, math.nan, 0.0])
    0.5
    """
    numbers = known(values)
    return math.fsum(numbers) / len(numbers) if numbers else NAN


def clustered_stderr(values: Sequence[float], clusters: Sequence[Hashable]) -> float:
    """Standard error of the mean of the known values when values of one cluster (example) are correlated.

    sqrt(G/(G-1) * sum over clusters of (sum of deviations in the cluster)^2) / n, for n values in G clusters; with
    one value per cluster it is the usual s/sqrt(n). NaN for fewer than two clusters.

    *Source*: Miller 2024, "Adding Error Bars to Evals", eq. 4, with the small-sample factor of cluster-robust errors.
    """
    center = mean(values)
    sums: dict[Hashable, float] = {}
    num_known = 0
    for value, cluster in zip(values, clusters, strict=True):
        if value == value:  # not NaN
            sums[cluster] = sums.get(cluster, 0.0) + value - center
            num_known += 1
    if len(sums) < 2:
        return NAN
    scale = len(sums) / (len(sums) - 1)
    return math.sqrt(scale * math.fsum(total * total for total in sums.values())) / num_known


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


def pass_rates(successes: Sequence[float], examples: Sequence[Hashable], n: int) -> PassRates:
    """pass@k and pass^k for k = 1, 2, 4, … and ``n``, averaged over the examples whose ``n`` values are all known.

    ``successes`` are 1, 0 or NaN, one for each rollout. Empty for ``n`` < 2 or when no example is complete.
    """
    if not draws(n):
        return PassRates()
    by_example: dict[Hashable, list[float]] = {}
    for success, example in zip(successes, examples, strict=True):
        by_example.setdefault(example, []).append(success)
    counts = [round(sum(group)) for group in by_example.values() if len(group) == n and len(known(group)) == n]
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


def percentile(values: Iterable[float], percent: float) -> float:
    """The value below which ``percent`` (0 to 100) of the known values lie, interpolated; NaN when there is none."""
    numbers = sorted(known(values))
    if not numbers:
        return NAN
    position = (len(numbers) - 1) * percent / 100
    low = math.floor(position)
    high = min(low + 1, len(numbers) - 1)
    return numbers[low] + (numbers[high] - numbers[low]) * (position - low)
