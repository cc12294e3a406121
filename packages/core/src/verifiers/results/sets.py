"""Compare two sets of runs, such as the evaluations of two nights. No I/O.

A run is paired with the run of the same environment, environment arguments, model and sampling
arguments; a run without such a partner is named. The p-values are adjusted over all pairs, by
Holm's method, so that among equal nights at most one in twenty has a verdict.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

from verifiers.errors import ConfigError
from verifiers.results.comparison import (
    DETECT,
    Comparison,
    Difference,
    Measured,
    compare_runs,
)
from verifiers.results.texts import flat
from verifiers.storage.configurations import fingerprint

SETTINGS = ("env_args", "sampling_args")
"""Settings of a run, beside its environment and model, that its partner has too."""


@dataclass(frozen=True, slots=True)
class SetComparison(Comparison):
    """The result of ``compare_sets``: the differences of the pairs, and runs without a partner."""

    without_partner: tuple[tuple[Measured, ...], tuple[Measured, ...]] = ((), ())
    """Of the baseline set, and of the other set."""

    def to_dict(self) -> dict[str, object]:
        """As of ``Comparison``, with ``without_partner``: two lists of names."""
        names = [[run.name for run in alone] for alone in self.without_partner]
        return {**Comparison.to_dict(self), "without_partner": names}

    def __str__(self) -> str:
        labels = dict(zip((run.name for run in self.runs), _labels(self.runs), strict=True))
        num_pairs = len({d.run for d in self.differences}) + len(self.refused)
        lines = [f"{num_pairs} pair{'s' * (num_pairs != 1)} of runs; p is adjusted for all of them"]
        for difference in sorted(self.differences, key=_worst_first):
            lines += ["", labels[difference.run], *_difference_lines(difference)]
        for pair in self.refused:
            lines += ["", labels[pair.run], f"  {pair.sentence()}"]
            lines += [f"  {pair.baseline} and {pair.run}"]
        for alone, side in zip(self.without_partner, ("second", "first"), strict=True):
            if alone:
                lines += ["", f"without a partner in the {side} set:"]
                lines += [f"  {labels[run.name]} · {run.name}" for run in alone]
        return "\n".join(lines)

    __repr__ = __str__


def compare_sets(
    before: Sequence[Measured],
    after: Sequence[Measured],
    metrics: Sequence[str] = ("reward",),
    *,
    detect: float = DETECT,
    anyway: bool = False,
    one_sided: bool = False,
) -> SetComparison:
    """Compare the runs of ``after`` with their partners in ``before``; options as of
    ``compare_runs``. A run that is compared with its exact copy is never refused.

    *Raises* ConfigError if no run has a partner.
    """
    pairs = pair_runs(before, after)
    if not pairs:
        first, second = _labels([before[0], after[0]])
        raise ConfigError(
            "no run has a partner in the other set: none has the same environment, arguments, model"
            f" and sampling. {first} is in the first, {second} in the second; two runs that are"
            " named themselves are compared, whatever their models: vf-compare RUN RUN"
        )
    names = {run.name for pair in pairs for run in pair}
    pairs = [pair for pair in pairs if _has_values(pair, metrics)]
    compared = compare_runs(
        [*before, *after],
        metrics,
        detect=detect,
        anyway=anyway,
        pairs=[_as_complete(*pair) for pair in pairs],
        one_sided=one_sided,
    )
    if not pairs:
        raise ConfigError("no pair of runs has a rollout to compare")
    alone = [tuple(run for run in runs if run.name not in names) for runs in (before, after)]
    return SetComparison(
        compared.runs, compared.differences, compared.refused, (alone[0], alone[1])
    )


def pair_runs(
    before: Sequence[Measured], after: Sequence[Measured]
) -> list[tuple[Measured, Measured]]:
    """(baseline, run) of each pair, in the order of ``before``.

    Several runs of the same settings are paired with those whose configuration is equal first, else
    in their order.
    """
    partners: dict[int, int] = {}  # indices
    for key in (_key_with_configuration, _key):
        unpaired: dict[str, list[int]] = {}
        for index, run in enumerate(after):
            if index not in partners.values():
                unpaired.setdefault(key(run), []).append(index)
        for index, run in enumerate(before):
            if index not in partners and (candidates := unpaired.get(key(run))):
                partners[index] = candidates.pop(0)
    return [(before[index], after[partners[index]]) for index in sorted(partners)]


def partners_within(runs: Sequence[Measured]) -> list[tuple[Measured, Measured]]:
    """(baseline, run) of the runs of one list that have equal environment, arguments, model and
    sampling, as those of two nights: each with the first of them."""
    first: dict[str, Measured] = {}
    return [(first[key], run) for run in runs if first.setdefault(key := _key(run), run) is not run]


def _key(run: Measured) -> str:
    settings = {name: run.config.get(name) or {} for name in SETTINGS}
    return fingerprint({"env_id": run.env_id, "model": run.model, **settings})


def _key_with_configuration(run: Measured) -> str:
    return f"{_key(run)} {fingerprint(run.config)}"


def _as_complete(baseline: Measured, run: Measured) -> tuple[Measured, Measured]:
    """The pair; of an exact copy, which cannot differ, it doesn't matter what ended it early."""
    if (baseline.stopped or run.stopped) and repr(baseline.values) == repr(run.values):
        return dataclasses.replace(baseline, stopped=None), dataclasses.replace(run, stopped=None)
    return baseline, run


def _has_values(pair: tuple[Measured, Measured], metrics: Sequence[str]) -> bool:
    return any(run.values.get(metric) for run in pair for metric in metrics)


def _labels(runs: Sequence[Measured]) -> list[str]:
    """Environment and model of each run, with the settings in which the runs differ."""
    flats = [flat({name: run.config.get(name) or {} for name in SETTINGS}) for run in runs]
    names = sorted({name for values in flats for name in values})
    varied = [name for name in names if len({repr(values.get(name)) for values in flats}) > 1]
    labels = []
    for run, values in zip(runs, flats, strict=True):
        settings = [f"{name}={values[name]}" for name in varied if name in values]
        labels.append(" · ".join((run.env_id or "?", run.model or "?", *settings)))
    return labels


def _worst_first(difference: Difference) -> tuple[float, float]:
    p = 1.0 if math.isnan(difference.p_adjusted) else difference.p_adjusted
    return (p if difference.difference < 0 else 2.0 - p), difference.difference


def _difference_lines(difference: Difference) -> list[str]:
    means = f"{difference.baseline_mean:.3f} to {difference.run_mean:.3f}"
    interval = f", {text}" if (text := difference.interval()) else ""
    p = f"{difference.test}, p = {difference.p:.3g}, adjusted {difference.p_adjusted:.3g}"
    lines = [
        f"  {difference.metric}: {difference.sentence()}",
        f"  from {means}: {difference.difference:+.3f}{interval}",
        f"  {p}",
        f"  {difference.baseline} and {difference.run}",
    ]
    if any(difference.unpaired):
        only_a, only_b = difference.unpaired
        lines.append(f"  left out: {only_a} examples only in the first set, {only_b} in the second")
    return lines + [f"  note: {note}" for note in difference.notes]
