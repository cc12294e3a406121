"""Statistics of rewards: means, clustered standard errors, pass@k, percentiles. Pure functions.

NaN is an unknown value: it is skipped, never counted as zero.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

NAN = math.nan


def known_values(values: Iterable[float]) -> list[float]:
    """The values that are not NaN."""
    numbers = list(values)
    if not math.isnan(sum(numbers)):
        return numbers
    return [number for number in numbers if number == number]


def mean(values: Iterable[float]) -> float:
    """Mean of the known values; NaN when there is none.

    >>> mean([1.0, math.nan, 0.0])
    0.5
    """
    numbers = _known_array(values)
    return math.fsum(numbers.data) / len(numbers) if len(numbers) else NAN


def known_sum(values: Iterable[float]) -> float:
    """The exact sum of the known values."""
    return math.fsum(_known_array(values).data)


def _known_array(values: Iterable[float]) -> np.ndarray:
    """The known values as an array, of which Python's numbers would take four times the memory."""
    is_array = hasattr(values, "__array__")
    numbers: np.ndarray = np.asarray(values if is_array else list(values), float)
    is_known: np.ndarray = ~np.isnan(numbers)
    return numbers[is_known]  # type: ignore[no-any-return]


def numbered(keys: Iterable[Hashable] | np.ndarray) -> np.ndarray:
    """A number for each key, equal for equal keys: an array.

    >>> numbered(["a", "b", "a"]).tolist()
    [0, 1, 0]
    """
    if isinstance(keys, np.ndarray) and keys.dtype != object:
        return np.unique(keys, return_inverse=True)[1]
    numbers: dict[Hashable, int] = {}
    return np.array([numbers.setdefault(key, len(numbers)) for key in keys], dtype=np.int64)


def _cluster_sums(
    values: Sequence[float] | np.ndarray,
    clusters: Sequence[Hashable] | np.ndarray,
    center: float = 0.0,
) -> np.ndarray:
    """Of each cluster: number of values, of known values, sum of those minus ``center``; [3, G]."""
    numbers, cluster = np.asarray(values, float), numbered(clusters)
    is_known = ~np.isnan(numbers)
    weights = (None, is_known, np.where(is_known, numbers - center, 0.0))
    return np.stack([np.bincount(cluster, each) for each in weights])


def clustered_stderr(
    values: Sequence[float] | np.ndarray, clusters: Sequence[Hashable] | np.ndarray
) -> float:
    """Standard error of the mean of the known values when values of a cluster (example) are
    correlated.

    sqrt(G/(G-1) * sum over clusters of (sum of deviations in the cluster)^2) / n, for n values in G
    clusters; with one value per cluster it is the usual s/sqrt(n). NaN for fewer than two clusters.

    *Source*: Miller 2024, "Adding Error Bars to Evals", eq. 4, with the small-sample factor of
    cluster-robust errors.
    """
    numbers = _known_array(values)
    if not len(numbers):
        return NAN
    _, num_known, sums = _cluster_sums(values, clusters, math.fsum(numbers.data) / len(numbers))
    num_clusters, spread = np.count_nonzero(num_known), math.fsum((sums**2).data)
    if num_clusters > 1:
        return math.sqrt(num_clusters / (num_clusters - 1) * spread) / len(numbers)
    return NAN


def equal_groups(
    values: Sequence[float] | np.ndarray, clusters: Sequence[Hashable] | np.ndarray
) -> dict[str, int]:
    """``groups``: clusters with two known values or more; ``equal_groups``: those of them whose
    known values are equal.

    >>> equal_groups([1.0, 0.0, 1.0, 1.0, 0.5], [0, 0, 1, 1, 2])
    {'groups': 2, 'equal_groups': 1}
    """
    numbers, is_known = numbered(clusters), ~np.isnan(np.asarray(values, float))
    numbers, rewards = numbers[is_known], np.asarray(values, float)[is_known]
    size = int(numbers.max(initial=-1)) + 1
    low, high = np.full(size, np.inf), np.full(size, -np.inf)
    np.minimum.at(low, numbers, rewards)
    np.maximum.at(high, numbers, rewards)
    are_groups = np.bincount(numbers, minlength=size) > 1
    return {
        "groups": int(are_groups.sum()),
        "equal_groups": int((are_groups & (low == high)).sum()),
    }


def solved(
    rewards: Sequence[float] | np.ndarray,
    measured: Sequence[float] | np.ndarray | None,
    threshold: float | None,
) -> np.ndarray:
    """``outputs.successes`` of columns; ``measured``: the metric ``success``, NaN without it."""
    values = np.asarray(rewards, float)
    if threshold is not None:
        values = np.where(np.isnan(values), values, values >= threshold)
    if measured is not None:
        successes = np.asarray(measured, float)
        values = np.where(np.isnan(successes), values, successes)
    is_strict = ((values == 0) | (values == 1) | np.isnan(values)).all()
    return values if is_strict else np.full(len(values), NAN)


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Probability that at least one of ``k`` drawn from ``n`` rollouts is correct: 1 - C(n-c,
    k)/C(n, k).

    *Source*: Chen et al. 2021, eq. 1.

    >>> pass_at_k(4, 1, 2)
    0.5
    """
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


def pass_all_k(n: int, correct: int, k: int) -> float:
    """Probability that all ``k`` of ``n`` rollouts are correct (pass^k): C(c, k)/C(n, k)."""
    return math.comb(correct, k) / math.comb(n, k)


@dataclass(frozen=True, slots=True)
class PassRates:
    """pass@k and pass^k of a run by ``str(k)``, with 95 % intervals (low, high); or empty."""

    any_of: dict[str, float] = field(default_factory=dict)
    all_of: dict[str, float] = field(default_factory=dict)
    any_of_interval: dict[str, tuple[float, float]] = field(default_factory=dict)
    num_examples: dict[str, int] = field(default_factory=dict)
    """Examples behind each rate: those with k known rollouts or more."""
    num_unknown: int = 0
    """Rollouts of which nothing says whether they solved their example."""
    any_of_bounds: dict[str, tuple[float, float]] = field(default_factory=dict)
    """pass@k over all examples, were each unknown rollout unsolved, and were each solved; empty
    where none is unknown."""


def draws(n: int) -> list[int]:
    """The k of pass@k for ``n`` rollouts of an example: 1, 2, 4, … and ``n``; none for ``n`` < 2.

    >>> draws(6), draws(1)
    ([1, 2, 4, 6], [])
    """
    return sorted({1 << power for power in range(n.bit_length())} | {n}) if n > 1 else []


def pass_rates(
    successes: Sequence[float] | np.ndarray,
    examples: Sequence[Hashable] | np.ndarray,
    n: int,
    trees: Sequence[float] | np.ndarray = (),
) -> PassRates:
    """pass@k and pass^k for k = 1, 2, 4, … and ``n``, each averaged over the examples with at least
    k known values: the rates of an example are those of its known rollouts, of any number.

    ``successes`` are 1, 0 or NaN, one for each rollout. Empty for ``n`` < 2 or when no value is
    known.

    A rate is right in the mean where failures (unknown values) depend on the example alone, however
    hard it is, as long as the examples behind it are all. It cannot know what a failed rollout
    would have been: where those that fail inside an example are the wrong ones, no estimate from
    the known values is right, and ``any_of_bounds`` is what they leave possible. Examples with
    fewer than k known values are in no rate; where these are the hard ones, it is too high.

    ``trees`` numbers the rollouts of an example that share turns, NaN for those that share none.
    They are not independent: a draw then takes k different trees, and of each one rollout, so that
    ``n`` is the number of trees.

    *Source*: Chen et al. 2021, eq. 1, with n of each example; the bounds: Manski 1990,
    "Nonparametric bounds on treatment effects".

    >>> rates = pass_rates([1, 0, math.nan, 0, 0, 0], ["a", "a", "a", "b", "b", "b"], 3)
    >>> rates.any_of, rates.num_examples, rates.num_unknown
    ({'1': 0.25, '2': 0.5, '3': 0.0}, {'1': 2, '2': 2, '3': 1}, 1)
    >>> tuple(round(bound, 3) for bound in rates.any_of_bounds["2"])
    (0.333, 0.5)
    """
    if not np.isnan(np.asarray(trees, float)).all():
        return _tree_rates(successes, examples, trees)
    if not draws(n):
        return PassRates()
    num_values, num_known, num_correct = _cluster_sums(successes, examples).astype(int)
    kinds = Counter(zip(num_values.tolist(), num_known.tolist(), num_correct.tolist(), strict=True))
    """(values, known values, correct values) of an example -> number of examples."""
    passed, num_unknown = PassRates(), int((num_values - num_known).sum())
    for k in draws(n):
        any_of: Counter[float] = Counter()
        all_of: Counter[float] = Counter()
        for (_, size, correct), count in kinds.items():
            if size >= k:
                any_of[pass_at_k(size, correct, k)] += count
                all_of[pass_all_k(size, correct, k)] += count
        if not any_of:
            break
        passed.any_of[str(k)] = mean(any_of.elements())
        passed.all_of[str(k)] = mean(all_of.elements())
        passed.any_of_interval[str(k)] = share_interval(any_of)
        passed.num_examples[str(k)] = any_of.total()
        if num_unknown:
            passed.any_of_bounds[str(k)] = _bounds(kinds, k)
    return dataclasses.replace(passed, num_unknown=num_unknown) if passed.any_of else passed


def _tree_rates(
    successes: Sequence[float] | np.ndarray,
    examples: Sequence[Hashable] | np.ndarray,
    trees: Sequence[float] | np.ndarray,
) -> PassRates:
    """``pass_rates`` of rollouts of which some share turns."""
    of_example: dict[int, dict[float, list[float]]] = {}
    singles = -1.0
    for value, example, tree in zip(successes, numbered(examples), trees, strict=True):
        if math.isnan(tree):
            tree, singles = singles, singles - 1
        of_example.setdefault(int(example), {}).setdefault(float(tree), []).append(float(value))
    shares = []  # of each example, of each tree: (share of the known, with unknown 0, with them 1)
    for leaves_of in of_example.values():
        filled = [
            [mean(leaves), *(np.nan_to_num(leaves, nan=x).mean() for x in (0.0, 1.0))]
            for leaves in leaves_of.values()
        ]
        shares.append(np.array(filled, float))
    passed = PassRates()
    num_unknown = int(np.isnan(np.asarray(successes, float)).sum())
    for k in draws(max(map(len, shares), default=0)):
        of_known = [p[~np.isnan(p[:, 0]), 0] for p in shares]
        any_of = Counter(1.0 - _all_of_k(1.0 - p, k) for p in of_known if len(p) >= k)
        if not any_of:
            break
        passed.any_of[str(k)] = mean(any_of.elements())
        passed.all_of[str(k)] = mean(_all_of_k(p, k) for p in of_known if len(p) >= k)
        passed.any_of_interval[str(k)] = share_interval(any_of)
        passed.num_examples[str(k)] = any_of.total()
        if num_unknown:
            low, high = (
                mean(1.0 - _all_of_k(1.0 - p[:, column], k) for p in shares if len(p) >= k)
                for column in (1, 2)
            )
            passed.any_of_bounds[str(k)] = low, high
    return dataclasses.replace(passed, num_unknown=num_unknown) if passed.any_of else passed


def _all_of_k(shares: np.ndarray, k: int) -> float:
    """The mean over all k of the trees [T] of the product of their ``shares``: the probability that
    one rollout of each of k trees has what a share of each has."""
    sums = np.zeros(k + 1)  # elementary symmetric polynomials
    sums[0] = 1.0
    for share in shares:
        sums[1:] = sums[1:] + share * sums[:-1]
    return float(sums[k]) / math.comb(len(shares), k)


def _bounds(kinds: Counter[tuple[int, int, int]], k: int) -> tuple[float, float]:
    """pass@k of the examples with k values or more, with their unknown values all 0, and all 1."""
    lows: Counter[float] = Counter()
    highs: Counter[float] = Counter()
    for (size, num_known, correct), count in kinds.items():
        if size >= k:
            lows[pass_at_k(size, correct, k)] += count
            highs[pass_at_k(size, correct + size - num_known, k)] += count
    return mean(lows.elements()), mean(highs.elements())


Z95 = 1.959964
"""The 97.5 % quantile of the normal distribution."""


def share_interval(values: Sequence[float] | Counter[float]) -> tuple[float, float]:
    """Wilson interval (95 %) of the mean of independent values between 0 and 1, one for each
    example; or their counts.

    The number of values is replaced by the effective number, p (1 - p) over the squared standard
    error, which is larger where every value is itself a mean (at p = 0 and p = 1 by the number
    itself, the widest case), and is corrected for the uncertainty of that error by the ratio of the
    normal quantile to Student's.

    Of 252 simulated cells (5 to 200 examples, shares .01 to .5, 1 to 16 siblings) it held the share
    in at least .93 of the samples in 233; near 0, with siblings that are alike, in .89 at the
    least: one or two examples then carry all that is known of the spread.

    *Source*: Wilson 1927; the effective size: Korn and Graubard 1998, "Confidence intervals for
    proportions with small expected number of positive counts estimated from survey data".

    >>> low, high = share_interval([0.0] * 20)
    >>> round(low, 3), round(high, 3)
    (0.0, 0.18)
    """
    counts = values if isinstance(values, Counter) else Counter(values)
    size, p = counts.total(), mean(counts.elements())
    variance = math.fsum((value - p) ** 2 for value in counts.elements()) / max(1, size - 1) / size
    spread = p * (1 - p)
    effective = spread / variance if variance > 0 and spread > 0 else size
    z, freedom = Z95, max(1, size - 1)
    student = z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
    # a few examples may have far too small a value
    effective = max(1.0, min(effective, 4 * size)) * (Z95 / student) ** 2
    center = (p + z * z / (2 * effective)) / (1 + z * z / effective)
    stderr = math.sqrt(spread / effective + z * z / (4 * effective * effective))
    half = z / (1 + z * z / effective) * stderr
    return max(0.0, center - half), min(1.0, center + half)


def percentile(values: Sequence[float], percent: float) -> float:
    """The value below which ``percent`` (0 to 100) of the known values lie, interpolated; NaN when
    there is none."""
    return percentiles(values, [percent])[0]


def percentiles(values: Sequence[float], percents: Iterable[float]) -> list[float]:
    """``percentile`` for each of ``percents``."""
    numbers = np.sort(np.asarray(values, float))  # NaN last
    numbers = numbers[: len(numbers) - np.count_nonzero(np.isnan(numbers))]
    if not len(numbers):
        return [NAN for _ in percents]
    values_at = []
    for percent in percents:
        position = (len(numbers) - 1) * percent / 100
        low = math.floor(position)
        high = min(low + 1, len(numbers) - 1)
        values_at.append(float(numbers[low] + (numbers[high] - numbers[low]) * (position - low)))
    return values_at
