"""How well a judge agrees with labels, and what the mean is once the judge's measured errors are
taken out.

A judge that calls 5% of the wrong answers right moves every mean that it gives, always in the same
direction: no number of rollouts averages that out. Some labelled rollouts measure its errors, and
the mean over all rollouts is corrected by them. Values and labels are yes or no. Pure functions.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from verifiers.errors import ConfigError
from verifiers.results.distributions import NORMAL
from verifiers.results.statistics import clustered_stderr

THRESHOLD = 0.5
"""A judge's value from which it is a yes."""
_WORDS = {
    **dict.fromkeys(("yes", "true", "right", "correct", "pass", "1"), True),
    **dict.fromkeys(("no", "false", "wrong", "incorrect", "fail", "0"), False),
}


@dataclass(frozen=True, slots=True)
class Agreement:
    """A judge against labels. Shares are 0 to 1; NaN if they are unknown.

    ``sensitivity``: of the labelled yes, how many the judge calls yes; ``specificity``: of the
    labelled no, how many it
    calls no. ``judged_mean``: its share of yes over all rollouts; ``corrected_mean``, ``low``,
    ``high``: the share without its errors, with a 95% interval.
    """

    metric: str
    labels: str
    num_labelled: int
    num_rollouts: int
    true_yes: int
    false_yes: int
    false_no: int
    true_no: int
    kappa: float
    kappa_stderr: float
    sensitivity: float
    specificity: float
    judged_mean: float
    corrected_mean: float
    low: float
    high: float

    @property
    def accuracy(self) -> float:
        """The share of labelled rollouts that the judge agrees with."""
        return (self.true_yes + self.true_no) / self.num_labelled

    def to_dict(self) -> dict[str, object]:
        """JSON values; unknown numbers are None."""
        fields = dataclasses.asdict(self) | {"accuracy": self.accuracy}
        return {name: None if value != value else value for name, value in fields.items()}


def agreement(
    values: Sequence[float],
    labels: Sequence[bool | None],
    examples: Sequence[Hashable],
    *,
    metric: str = "reward",
    column: str = "labels",
    threshold: float = THRESHOLD,
) -> Agreement:
    """Compare a judge's ``values`` (NaN: unknown) with ``labels`` (None: not labelled), one per
    rollout.

    ``examples``: the example of each rollout; siblings are not independent, and widen the interval.
    *Raises* ConfigError when no rollout has both.
    """
    judged_rows = [
        (value >= threshold, label, key)
        for value, label, key in zip(values, labels, examples, strict=True)
        if value == value
    ]
    pairs = [(judged, label) for judged, label, _ in judged_rows if label is not None]
    if not pairs:
        raise ConfigError(f"no rollout has both {metric!r} and a label in {column!r}", key=column)
    cells = ((True, True), (True, False), (False, True), (False, False))
    true_yes, false_yes, false_no, true_no = map(pairs.count, cells)
    yes, no = (true_yes, true_yes + false_no), (true_no, true_no + false_yes)
    sensitivity, specificity = _share(*yes), _share(*no)
    verdicts, _, keys = zip(*judged_rows, strict=True)
    judged_mean = _share(sum(verdicts), len(verdicts))
    stderr = clustered_stderr([float(verdict) for verdict in verdicts], keys)
    if stderr > 0:
        effective = min(len(verdicts), judged_mean * (1 - judged_mean) / stderr**2)
    else:
        effective = len(set(keys))
    corrected, low, high = corrected_share(judged_mean, effective, yes, no)
    kappa, kappa_stderr = cohens_kappa(*zip(*pairs, strict=True))
    return Agreement(
        metric, column, len(pairs), len(judged_rows), true_yes, false_yes, false_no, true_no, kappa, kappa_stderr,
        sensitivity, specificity, judged_mean, corrected, low, high,
    )  # fmt: skip


def cohens_kappa(first: Sequence[Hashable], second: Sequence[Hashable]) -> tuple[float, float]:
    """(kappa, standard error) of two raters: 1 for full agreement, 0 for that of chance, NaN when
    both never vary.

    *Source*: Cohen 1960, "A coefficient of agreement for nominal scales", with its large-sample
    error.

    >>> kappa, _ = cohens_kappa([1, 1, 0, 0, 1, 0], [1, 1, 0, 0, 0, 0])
    >>> round(kappa, 3)
    0.667
    """
    n = len(first)
    observed = sum(a == b for a, b in zip(first, second, strict=True)) / n
    by_chance = sum(first.count(value) * second.count(value) for value in {*first, *second}) / n**2
    if by_chance == 1:
        return math.nan, math.nan
    stderr = math.sqrt(observed * (1 - observed) / n) / (1 - by_chance)
    return (observed - by_chance) / (1 - by_chance), stderr


def corrected_share(
    judged: float, num_judged: float, yes: tuple[int, int], no: tuple[int, int]
) -> tuple[float, float, float]:
    """(share, low, high) of yes behind a judge's share ``judged`` of ``num_judged`` (effective)
    independent verdicts.

    ``yes``: (judged yes, all) of those labelled yes; ``no``: (judged no, all) of those labelled no.
    The errors' own uncertainty is part of the interval. NaN without labels of both kinds, and for a
    judge no better than chance.

    *Source*: Rogan and Gladen 1978, "Estimating prevalence from the results of a screening test";
    interval: Lang and Reiczigel 2014, "Confidence limits for prevalence of disease adjusted for
    estimated sensitivity and specificity".

    >>> share, low, high = corrected_share(0.5, 1000, (90, 100), (80, 100))
    >>> round(share, 3), round(low, 2), round(high, 2)
    (0.429, 0.34, 0.51)
    """
    if not yes[1] or not no[1]:
        return math.nan, math.nan, math.nan
    share = _rogan_gladen(judged, yes[0] / yes[1], no[0] / no[1])
    z = NORMAL.inv_cdf(0.975)
    n, n_yes, n_no = num_judged + z * z, yes[1] + 2, no[1] + 2
    q = (num_judged * judged + z * z / 2) / n
    sensitivity, specificity = (yes[0] + 1) / n_yes, (no[0] + 1) / n_no
    if math.isnan(share) or sensitivity + specificity <= 1:
        return math.nan, math.nan, math.nan
    p = _rogan_gladen(q, sensitivity, specificity)
    from_yes = sensitivity * (1 - sensitivity) / n_yes
    from_no = specificity * (1 - specificity) / n_no
    shift = 2 * z * z * (p * from_yes - (1 - p) * from_no)
    variance = q * (1 - q) / n + p * p * from_yes + (1 - p) ** 2 * from_no
    half = z * math.sqrt(variance) / (sensitivity + specificity - 1)
    return share, max(0.0, p + shift - half), min(1.0, p + shift + half)


def _rogan_gladen(judged: float, sensitivity: float, specificity: float) -> float:
    if sensitivity + specificity <= 1:
        return math.nan
    return min(1.0, max(0.0, (judged + specificity - 1) / (sensitivity + specificity - 1)))


def _share(part: int, total: int) -> float:
    return part / total if total else math.nan


def label_of(output: Mapping[str, object], column: str) -> bool | None:
    """The label of a rollout in ``column``, ``human`` or ``info.human``; None without a label.

    *Raises* ConfigError for a value that is neither yes nor no.

    >>> label_of({"info": {"human": "yes"}}, "info.human"), label_of({"info": {}}, "info.human")
    (True, None)
    """
    value: object = output
    for name in column.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    if value is None or value != value:
        return None
    if isinstance(value, bool):
        return value
    word = f"{value:g}" if isinstance(value, int | float) else str(value).strip().lower()
    if word not in _WORDS:
        raise ConfigError(
            f"the label {value!r} in {column!r} is neither yes nor no (true, false, 1, 0, pass,"
            " fail)"
        )
    return _WORDS[word]
