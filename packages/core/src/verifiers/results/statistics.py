"""Statistics of rewards: means, clustered standard errors, pass@k, percentiles. Pure functions.

NaN is an unknown value: it is skipped, never counted as zero.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence

NAN = math.nan


def known(values: Iterable[float]) -> list[float]:
    """The values that are not NaN."""
    return [value for value in values if not math.isnan(value)]


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


def pass_rates(
    rewards: Sequence[float], examples: Sequence[Hashable], n: int, threshold: float
) -> tuple[dict[str, float], dict[str, float]]:
    """pass@k and pass^k for k = 1, 2, 4, … <= n, averaged over the examples whose ``n`` rewards are all known.

    Keys are ``str(k)``. Both are empty for ``n`` < 2 or when no example is complete.
    """
    if n < 2:
        return {}, {}
    by_example: dict[Hashable, list[float]] = {}
    for reward, example in zip(rewards, examples, strict=True):
        by_example.setdefault(example, []).append(reward)
    counts = [
        sum(reward >= threshold for reward in group)
        for group in by_example.values()
        if len(group) == n and len(known(group)) == n
    ]
    if not counts:
        return {}, {}
    ks = [1 << power for power in range(n.bit_length())]
    any_of = {str(k): mean(pass_at_k(n, count, k) for count in counts) for k in ks}
    all_of = {str(k): mean(pass_all_k(n, count, k) for count in counts) for k in ks}
    return any_of, all_of


def percentile(values: Iterable[float], percent: float) -> float:
    """The value below which ``percent`` (0 to 100) of the known values lie, interpolated; NaN when there is none."""
    numbers = sorted(known(values))
    if not numbers:
        return NAN
    position = (len(numbers) - 1) * percent / 100
    low = math.floor(position)
    high = min(low + 1, len(numbers) - 1)
    return numbers[low] + (numbers[high] - numbers[low]) * (position - low)
