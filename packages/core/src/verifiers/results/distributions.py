"""Student's t and the binomial distribution, for tests and intervals. Pure functions; core needs no
scipy for them."""

from __future__ import annotations

import functools
import math
from statistics import NormalDist

NORMAL = NormalDist()
_PRECISION = 1e-15
_TINY = 1e-300
_MAX_TERMS = 10_000


def t_cdf(t: float, df: float) -> float:
    """P(T <= t) for Student's t with ``df`` > 0 degrees of freedom.

    >>> round(t_cdf(2.776445, 4), 6)
    0.975
    """
    if math.isinf(t):
        return float(t > 0)
    tail = 0.5 * beta_cdf(df / (df + t * t), df / 2, 0.5)
    return 1.0 - tail if t > 0 else tail


@functools.lru_cache(maxsize=1024)
def t_quantile(probability: float, df: float) -> float:
    """The t with P(T <= t) = ``probability``, 0 < probability < 1; 1.96 for 0.975 and many degrees
    of freedom.

    >>> round(t_quantile(0.975, 4), 3), round(t_quantile(0.975, 1e6), 2)
    (2.776, 1.96)
    """
    if probability < 0.5:
        return -t_quantile(1.0 - probability, df)
    low, high = 0.0, 1.0
    while t_cdf(high, df) < probability:
        low, high = high, high * 2
    while high - low > 1e-12 * max(1.0, high):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        low, high = (middle, high) if t_cdf(middle, df) < probability else (low, middle)
    return (low + high) / 2


def sign_test(won: int, lost: int) -> float:
    """Two-sided p of ``won`` against ``lost`` fair coins; for 0/1 values of pairs it is the exact
    test of McNemar.

    *Source*: McNemar 1947, with the binomial distribution instead of chi-squared.

    >>> round(sign_test(5, 0), 6), sign_test(3, 3)
    (0.0625, 1.0)
    """
    total, fewer = won + lost, min(won, lost)
    if total == 0:
        return 1.0
    return min(1.0, 2.0 * beta_cdf(0.5, total - fewer, fewer + 1))


def beta_cdf(x: float, a: float, b: float) -> float:
    """The regularised incomplete beta function I_x(a, b), 0 <= x <= 1, by its continued fraction.

    *Source*: DLMF 8.17.22, evaluated by the modified algorithm of Lentz.
    """
    if x <= 0.0 or x >= 1.0:
        return float(x >= 1.0)
    if x > (a + 1) / (a + b + 2):  # the fraction converges fast on the other side
        return 1.0 - beta_cdf(1.0 - x, b, a)
    log_front = (
        math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    )
    numerator, denominator = 1.0, 0.0
    fraction = 1.0
    for term in range(_MAX_TERMS):
        half, is_odd = divmod(term, 2)
        if term == 0:
            factor = 1.0
        elif is_odd:
            factor = -(a + half) * (a + b + half) * x / ((a + 2 * half) * (a + 2 * half + 1))
        else:
            factor = half * (b - half) * x / ((a + 2 * half - 1) * (a + 2 * half))
        denominator = 1.0 / _not_zero(1.0 + factor * denominator)
        numerator = _not_zero(1.0 + factor / numerator)
        fraction *= numerator * denominator
        if term and abs(1.0 - numerator * denominator) < _PRECISION:
            break
    return math.exp(log_front) * (fraction - 1.0) / a


def _not_zero(value: float) -> float:
    return value if abs(value) > _TINY else _TINY
