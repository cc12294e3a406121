"""Compare runs example by example: differences, intervals, tests, and why two runs cannot be
compared. No I/O.

The unit is the example: the siblings of an example are averaged first, so its standard error is
clustered over them, and the difference of two runs is taken within each example that both have. The
interval is Student's t. The p-value is exact if that is possible: McNemar's test for 0/1 values,
sign flips for at most ``MAX_FLIPPED`` examples that differ; else the t test. Over several metrics,
environments and runs the p-values are adjusted by Holm's method.

With unequal numbers of rollouts a difference is skewed even between equal models (one rollout that
is rarely right, against the mean of sixteen), so that a sign is no coin and the spread of few
examples says too little: the standard error is then at least that of rollouts which both runs could
have drawn, and the test is the t test.

A verdict is never "no difference": it says how many examples would show a difference of a given
size. Unknown values (NaN) are left out; an example without a known value in one of the runs is not
a pair.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from verifiers.errors import ConfigError
from verifiers.results.distributions import NORMAL, sign_test, t_cdf, t_quantile
from verifiers.results.statistics import known_values, mean
from verifiers.results.texts import flat_settings

ALPHA = 0.05
POWER = 0.8
DETECT = 0.05
"""Size of a difference for which a comparison names the number of examples that would show it."""
MAX_FLIPPED = 16
"""Examples that differ, up to which every sign pattern is tried."""
MAX_SETTING_CHARS = 60
SAME = 1e-9
UNDECIDED = "not distinguishable"
ONE_SIDED = "one-sided"
MEASURE = ("reward_functions", "reward_weights", "group_weights", "rubric", "parser")
"""Parts of a configuration that define what the reward measures."""
TASK = ("env_args", "env_version", "system_prompt", "message_type", "code", "environment")
"""Parts of a configuration that define the task, beside its rows."""

Values = Mapping[Any, Sequence[float]]
"""Example -> the values of its rollouts; NaN where unknown."""


@dataclass(frozen=True, slots=True)
class Measured:
    """A run as a comparison needs it: names, settings, and values by metric and example."""

    name: str
    env_id: str
    values: Mapping[str, Values]
    model: str = ""
    config: Mapping[str, object] = field(default_factory=dict)
    """The configuration that its rollouts share; empty when unknown."""
    status: str = "complete"
    stopped: Mapping[str, object] | None = None
    """What a stopping rule concluded that ended it before its plan: ``low high num_examples
    against is_decided``; None if none did."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A metric of a run minus that of the baseline, over the examples of both.

    ``difference ± stderr``: mean over the examples, and its standard error; ``low`` to ``high``:
    its 95% interval; ``p``: of ``test``; ``p_adjusted``: by Holm's method over the comparison. All
    in units of the metric. NaN if it is unknown.
    """

    env_id: str
    baseline: str
    run: str
    metric: str
    num_examples: int
    rollouts: tuple[int, int]
    """Known values in the pairs: of the baseline, of the run."""
    baseline_mean: float
    run_mean: float
    difference: float
    stderr: float
    low: float
    high: float
    p: float
    p_adjusted: float
    test: str
    won: int
    lost: int
    equal: int
    unpaired: tuple[int, int]
    """Examples of only one of the two: of the baseline, of the run."""
    largest: float
    """As `largest_difference` of the values."""
    detect: float
    """A size of difference, and how many examples would show it at 80% (None: unknown)."""
    examples_needed: int | None
    notes: tuple[str, ...] = ()

    @property
    def verdict(self) -> str:
        """``better``, ``worse`` (of a metric ``higher``, ``lower``) or ``not distinguishable``, at
        5% overall."""
        if not self.p_adjusted < ALPHA:
            return UNDECIDED
        up, down = ("better", "worse") if self.metric == "reward" else ("higher", "lower")
        return up if self.difference > 0 else down

    def sentence(self) -> str:
        """The verdict as a sentence; without a distinction it names how many examples would do."""
        counted = _examples(self.num_examples)
        if self.verdict != UNDECIDED:
            return f"{self.verdict} (p {_p_text(self.p_adjusted)})"
        if self.test.endswith(ONE_SIDED) and self.difference > 0:
            return f"not worse with {counted}"
        text = f"{UNDECIDED} with {counted}"
        if self.low > 0 or self.high < 0:
            text += f" (p {_p_text(self.p_adjusted)}; it decides where the interval says otherwise)"
        if self.num_examples and self.equal == self.num_examples:
            return f"{text}, of which none differs"
        if self.examples_needed is None:
            return f"{text}; their spread is unknown"
        if self.examples_needed <= self.num_examples:
            return f"{text}, which would show a difference of {self.detect:g}"
        return f"{text}; {self.examples_needed:,} would do for a difference of {self.detect:g}"

    def interval(self) -> str:
        """The 95% interval in words; empty if it is unknown or has no width."""
        if not self.stderr > 0:
            return ""
        if max(-self.low, self.high) > self.largest:
            return f"too few examples for an interval within ±{self.largest:g}"
        return f"95% from {self.low:+.3f} to {self.high:+.3f}"

    def to_dict(self) -> dict[str, object]:
        """JSON values; unknown numbers are None."""
        content = dataclasses.asdict(self)
        content["verdict"] = self.verdict
        content |= {"sentence": self.sentence(), "interval": self.interval()}
        return {
            name: None if isinstance(v, float) and not math.isfinite(v) else v
            for name, v in content.items()
        }


@dataclass(frozen=True, slots=True)
class Incomparable:
    """Two runs that were not compared, and every reason."""

    baseline: str
    run: str
    because: tuple[str, ...]

    def sentence(self) -> str:
        return f"not comparable because {'; '.join(self.because)}"


@dataclass(frozen=True, slots=True)
class Comparison:
    """The result of ``compare_runs``: the differences of the pairs, and pairs that were refused."""

    runs: tuple[Measured, ...]
    differences: tuple[Difference, ...]
    refused: tuple[Incomparable, ...]

    def to_dict(self) -> dict[str, object]:
        """JSON values: ``runs``, ``differences``, ``refused``."""
        names = ("name", "env_id", "model", "status")
        return {
            "runs": [{name: getattr(run, name) for name in names} for run in self.runs],
            "differences": [difference.to_dict() for difference in self.differences],
            "refused": [dataclasses.asdict(pair) for pair in self.refused],
            "settings": self.settings(),
        }

    def settings(self) -> dict[str, list[Any]]:
        """Each setting that differs -> its value in each run, None if it is not set."""
        flats = [{"model": run.model, **flat_settings(run.config)} for run in self.runs]
        names = sorted({name for values in flats for name in values})
        values_by_name = {name: [values.get(name) for values in flats] for name in names}
        return {n: v for n, v in values_by_name.items() if any(value != v[0] for value in v)}

    def __str__(self) -> str:
        letters, lines = {}, []
        for number, run in enumerate(self.runs):
            letters[run.name] = chr(ord("A") + number) if number < 26 else f"R{number + 1}"
            size = sum(map(len, run.values["reward"].values()))
            counts = f"{len(run.values['reward'])} examples, {size} rollouts"
            about = f"{run.env_id or '?'} · {run.model or '?'} · {counts} · {run.name}"
            lines.append(f"{letters[run.name]}  {about}")
        for name, values in self.settings().items():
            texts = (str("not set" if v is None else v)[:MAX_SETTING_CHARS] for v in values)
            pairs = zip(letters.values(), texts, strict=True)
            lines.append(f"   {name}: {', '.join(f'{letter} {value}' for letter, value in pairs)}")
        for difference in self.differences:
            a, b = letters[difference.baseline], letters[difference.run]
            lines += ["", *_difference_lines(difference, a, b)]
        for pair in self.refused:
            lines += ["", f"{letters[pair.baseline]} and {letters[pair.run]}: {pair.sentence()}"]
        return "\n".join(lines)

    __repr__ = __str__


def _difference_lines(difference: Difference, a: str, b: str) -> list[str]:
    is_known = not math.isnan(difference.stderr)
    stderr = f" ± {difference.stderr:.3f} (standard error)" if is_known else ""
    interval = f", {interval}" if (interval := difference.interval()) else ""
    counts = f"won {difference.won}, lost {difference.lost}, {difference.equal} equal"
    p = f"p = {difference.p:.3g}, adjusted {difference.p_adjusted:.3g}"
    lines = [
        f"{b} − {a}  {difference.metric}: {difference.sentence()}",
        f"  means        {a} {difference.baseline_mean:.3f}, {b} {difference.run_mean:.3f}",
        f"  difference   {difference.difference:+.3f}{stderr}{interval}",
        f"  examples     {difference.num_examples}: {b} {counts}",
        f"  test         {difference.test}, {p}",
    ]
    if any(difference.unpaired):
        only_a, only_b = difference.unpaired
        lines.append(f"  left out     {only_a} examples only in {a}, {only_b} only in {b}")
    return lines + [f"  note         {note}" for note in difference.notes]


def compare_runs(
    runs: Sequence[Measured],
    metrics: Sequence[str] = ("reward",),
    *,
    detect: float = DETECT,
    anyway: bool = False,
    pairs: Sequence[tuple[Measured, Measured]] | None = None,
    one_sided: bool = False,
) -> Comparison:
    """Compare every run with the first run of its environment, or with the first of all when each
    has its own.

    ``detect``: the size of a difference for which the verdict names the examples needed.
    ``anyway``: compare runs that measure differently or have other settings of the task too; the
    reasons become notes. ``pairs``: (baseline, run) to compare instead. ``one_sided``: ask only
    whether a run is lower than its baseline.

    *Raises* ConfigError for fewer than two runs, and for a metric that no run has.
    """
    if len(runs) < 2:
        raise ConfigError("a comparison needs two runs; name another one beside it")
    for metric in metrics:
        if not any(metric in run.values for run in runs):
            names = dict.fromkeys(name for run in runs for name in run.values)
            raise ConfigError(
                f"no run has the metric {metric!r}; they have {', '.join(names)}", key=metric
            )
    differences: list[Difference] = []
    refused: list[Incomparable] = []
    for baseline, run in _pairs(runs) if pairs is None else pairs:
        because, notes = incomparable_because(baseline, run, metrics)
        for member in (baseline, run):
            reason, note = _ended_by_a_rule(member)
            because, notes = because + reason, notes + note
        if because and (not anyway or not _shared(baseline, run, metrics)):
            refused.append(Incomparable(baseline.name, run.name, tuple(because)))
            continue
        for metric in metrics:
            if metric in baseline.values and metric in run.values:
                although = (*notes, *(f"compared although {reason}" for reason in because))
                differences.append(
                    paired_difference(baseline, run, metric, detect=detect, notes=although)
                )
    if one_sided:
        differences = [_lower_only(difference) for difference in differences]
    least = [_least_p(difference, one_sided) for difference in differences]
    adjusted = zip(differences, holm([d.p for d in differences], least), strict=True)
    differences = [dataclasses.replace(d, p_adjusted=p) for d, p in adjusted]
    return Comparison(tuple(runs), tuple(differences), tuple(refused))


def _lower_only(difference: Difference) -> Difference:
    """With the p-value against "not lower": each test is symmetric, so half of it or the rest."""
    half = difference.p / 2
    p = half if difference.difference < 0 else 1 - half
    p = 1.0 if difference.p == 1 else p  # as when none differs
    test = f"{difference.test}, {ONE_SIDED}"
    return dataclasses.replace(difference, p=p, test=test)


def _least_p(difference: Difference, one_sided: bool) -> float:
    """The smallest p that the test can give with as many examples that differ; 0 if any can be."""
    if "exact" not in difference.test:
        return 0.0
    return min(1.0, (1 if one_sided else 2) / 2.0 ** (difference.won + difference.lost))


def _pairs(runs: Sequence[Measured]) -> list[tuple[Measured, Measured]]:
    baselines: dict[str, Measured] = {}
    for run in runs:
        baselines.setdefault(run.env_id, run)
    pairs = [(baselines[run.env_id], run) for run in runs if baselines[run.env_id] is not run]
    alone = [run for env_id, run in baselines.items() if not any(pair[0] is run for pair in pairs)]
    return pairs + [(runs[0], run) for run in alone if run is not runs[0]]


def incomparable_because(
    baseline: Measured, run: Measured, metrics: Sequence[str]
) -> tuple[list[str], list[str]]:
    """(reasons against a comparison, notes on a possible comparison)."""
    if baseline.env_id != run.env_id:
        names = f"{baseline.env_id or '?'} and {run.env_id or '?'}"
        return [f"they are of two environments, {names}"], []
    because, notes = [], []
    task = _differing(baseline.config, run.config, TASK)
    if not _shared(baseline, run, metrics):
        why = f" ({', '.join(task)} differ)" if task else ""
        because.append(f"they have no example in common{why}")
    elif "env_args" in task:
        arguments = f"{baseline.config['env_args']} and {run.config['env_args']}"
        because.append(f"env_args differ: {arguments}")
    elif task:
        notes.append(f"{', '.join(task)} differ")
    if "reward" in metrics and (measure := _differing(baseline.config, run.config, MEASURE)):
        because.append(f"their rewards measure differently ({', '.join(measure)} differ)")
    for member in (baseline, run):
        if member.status != "complete":
            notes.append(f"{member.name} is {member.status}")
    return because, notes


def _ended_by_a_rule(run: Measured) -> tuple[list[str], list[str]]:
    """(reasons against a comparison, notes on it) of a run that a stopping rule ended.

    A rule that waits for a difference ends at the one time that shows it: between equal models a
    test that is looked at after every example "finds" one in far more than 5% of the runs.
    """
    stopped = run.stopped or {}
    if not stopped.get("is_decided", bool(stopped)):
        return [], []
    if stopped.get("against") is None:
        note = (
            f"{run.name} ended once its mean was known well enough: p and interval, which are of a"
            " fixed number of examples, hold for many examples alone"
        )
        return [], [note]
    reason = (
        f"{run.name} ended as soon as it differed from {stopped['against']} (--until-decided), and"
        " p and interval hold for a number of examples that no result has set: its own interval,"
        f" valid at any time, has the difference to {stopped['against']} between"
        f" {stopped['low']:.3f} and {stopped['high']:.3f}; for a p-value run the same examples to"
        " the end, or compare a new run"
    )
    return [reason], []


def _differing(a: Mapping[str, object], b: Mapping[str, object], parts: Sequence[str]) -> list[str]:
    return [part for part in parts if part in a and part in b and a[part] != b[part]]


def _shared(baseline: Measured, run: Measured, metrics: Sequence[str]) -> bool:
    both = [metric for metric in metrics if metric in baseline.values and metric in run.values]
    return any(baseline.values[metric].keys() & run.values[metric].keys() for metric in both)


def paired_difference(
    baseline: Measured,
    run: Measured,
    metric: str,
    *,
    detect: float = DETECT,
    notes: Sequence[str] = (),
) -> Difference:
    """The difference of a metric over the examples of both runs."""
    before, after = baseline.values[metric], run.values[metric]
    shared = before.keys() & after.keys()
    pairs = [
        (known_values(before[key]), known_values(after[key])) for key in before if key in shared
    ]
    unknown = sum(not a or not b for a, b in pairs)
    pairs = [(a, b) for a, b in pairs if a and b]
    differences = np.array([mean(b) - mean(a) for a, b in pairs])
    is_binary = all(len(a) == len(b) == 1 and {*a, *b} <= {0.0, 1.0} for a, b in pairs)
    is_balanced = all(len(a) == len(b) for a, b in pairs)
    least_stderr = 0.0 if is_balanced else pooled_stderr(pairs)
    stderr, low, high = t_interval(differences, least_stderr)
    sd = float(differences.std(ddof=1)) if len(pairs) > 1 else math.nan
    left_out = [f"{_examples(unknown)} without a known value left out"] if unknown else []
    test, p = _tested(differences, stderr, is_binary, is_balanced)
    return Difference(
        env_id=run.env_id,
        baseline=baseline.name,
        run=run.name,
        metric=metric,
        num_examples=len(pairs),
        rollouts=(sum(len(a) for a, _ in pairs), sum(len(b) for _, b in pairs)),
        baseline_mean=mean([mean(a) for a, _ in pairs]),
        run_mean=mean([mean(b) for _, b in pairs]),
        difference=mean(differences.tolist()),
        stderr=stderr,
        low=low,
        high=high,
        p=p,
        p_adjusted=p,
        test=test,
        won=int((differences > SAME).sum()),
        lost=int((differences < -SAME).sum()),
        equal=int((abs(differences) <= SAME).sum()),
        unpaired=(len(before) - len(shared), len(after) - len(shared)),
        largest=largest_difference(value for a, b in pairs for value in (*a, *b)),
        detect=detect,
        examples_needed=examples_needed(sd, detect),
        notes=(*notes, *left_out),
    )


def largest_difference(values: Iterable[float]) -> float:
    """The largest difference of two means: 1 if every known value is from 0 to 1; else infinite."""
    return 1.0 if all(0 <= value <= 1 for value in known_values(values)) else math.inf


def pooled_stderr(pairs: Sequence[tuple[Sequence[float], Sequence[float]]]) -> float:
    """Standard error of the mean difference if each example's rollouts are draws of one
    distribution.

    The square root of sum over examples of S² (1/a + 1/b), over their number; S² is the variance of
    the a + b rollouts of both runs. It is also the standard deviation of the difference when the
    rollouts of each example are permuted.

    *Source*: Fisher 1935, The Design of Experiments, section 21.
    """
    variances = [float(np.var([*a, *b], ddof=1)) * (1 / len(a) + 1 / len(b)) for a, b in pairs]
    return math.sqrt(math.fsum(variances)) / len(pairs) if pairs else math.nan


def t_interval(values: np.ndarray, least_stderr: float = 0.0) -> tuple[float, float, float]:
    """(standard error, low, high) of the mean of independent ``values`` [n], with 95%; NaN for
    fewer than two.

    A standard normal quantile in place of Student's would be too narrow for few values: with five
    it misses 12% of the true means instead of 5%.
    """
    n = len(values)
    if n < 2:
        return math.nan, math.nan, math.nan
    center = float(values.mean())
    stderr = max(float(values.std(ddof=1)) / math.sqrt(n), least_stderr)
    half = t_quantile(1 - ALPHA / 2, n - 1) * stderr
    return stderr, center - half, center + half


def _tested(
    differences: np.ndarray, stderr: float, is_binary: bool, is_balanced: bool
) -> tuple[str, float]:
    """(name of the test, two-sided p) of the hypothesis that the differences [n] have mean 0."""
    changed = differences[abs(differences) > SAME]
    signs = int((changed > 0).sum()), int((changed < 0).sum())
    if not len(differences):
        return "none", math.nan
    if is_binary:
        return "McNemar, exact", sign_test(*signs)
    if len(changed) <= MAX_FLIPPED and (is_balanced or len(differences) == 1 or not len(changed)):
        return "sign flips, exact", sign_flip_test(changed)
    if not stderr:  # all differ by the same amount
        return "sign test, exact", sign_test(*signs)
    t = float(differences.mean()) / stderr
    return "t test", 2 * t_cdf(-abs(t), len(differences) - 1)


def sign_flip_test(differences: np.ndarray) -> float:
    """Exact two-sided p of the sum of ``differences`` [n], n <= ``MAX_FLIPPED``, among its 2^n sign
    patterns.

    *Source*: Fisher 1935, The Design of Experiments, section 21.

    >>> sign_flip_test(np.array([0.5, 0.25, 0.125, 1.0]))
    0.125
    """
    sums = np.zeros(1)
    for difference in differences:
        sums = np.concatenate((sums + difference, sums - difference))
    observed = abs(float(differences.sum()))
    return float((abs(sums) >= observed * (1 - 1e-9) - SAME).mean())


def holm(p_values: Sequence[float], least: Sequence[float] | None = None) -> list[float]:
    """The p-values adjusted for being several: below alpha, all such are true with probability 1 -
    alpha. NaN stays.

    ``least``: the smallest p that each test can give. A test that cannot give a p as small as
    another's cannot be wrong in its place, and does not count for it: one of two equal runs, say.

    *Source*: Holm 1979, "A simple sequentially rejective multiple test procedure"; for ``least``
    Westfall and Wolfinger 1997, "Multiple tests with discrete distributions".

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    >>> holm([0.01, 1.0, 1.0], least=[0.0, 1.0, 1.0])
    [0.01, 1.0, 1.0]
    """
    adjusted = list(p_values)
    order = sorted((p, index) for index, p in enumerate(p_values) if not math.isnan(p))
    highest = 0.0
    for rank, (p, index) in enumerate(order):
        further = sum(least is None or least[i] <= p * (1 + SAME) for _, i in order[rank + 1 :])
        highest = max(highest, min(1.0, p * (1 + further)))
        adjusted[index] = highest
    return adjusted


def examples_needed(sd: float, difference: float) -> int | None:
    """How many examples show a true mean ``difference`` of values with standard deviation ``sd``;
    None without spread.

    The t test at level ``ALPHA`` then finds it with probability ``POWER``.

    >>> examples_needed(0.2, 0.05)
    128
    """
    if not sd > 0:
        return None
    z = NORMAL.inv_cdf(1 - ALPHA / 2) + NORMAL.inv_cdf(POWER)
    n = max(2, math.ceil((z * sd / abs(difference)) ** 2))
    while True:  # Student's quantiles depend on n; they fall with it, so that this ends
        quantiles = t_quantile(1 - ALPHA / 2, n - 1) + t_quantile(POWER, n - 1)
        if (quantiles * sd / abs(difference)) ** 2 <= n:
            return n
        n += 1


def _p_text(p: float) -> str:
    return f"= {p:.2g}" if p >= 1e-4 else "< 0.0001"


def _examples(count: int) -> str:
    return f"{count:,} example{'' if count == 1 else 's'}"
