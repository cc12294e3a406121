"""Trainings of several seeds against each other: is one setting better than another by more than a
seed changes?

A training is one number, its last evaluated reward, else the mean reward of its last steps: the
seeds of a setting are a sample of such numbers, and two settings are compared by Welch's t test.
Rollouts or examples of one training are no such sample, however many there are. ``comparison``
compares evaluations, example by example.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, variance
from typing import Any

from verifiers.errors import ConfigError
from verifiers.results.comparison import ALPHA, SAME, holm
from verifiers.results.distributions import t_cdf, t_quantile
from verifiers.runtime.bounded import MAX_FILE_BYTES, read_text
from verifiers.runtime.decoding import decode_json
from verifiers.storage.directory import METRICS_NAME
from verifiers.storage.trainings import SETTINGS_NAME, TrainingSettings

EDGE_STEPS = 10
"""Number of first and of last steps whose rewards are compared."""
SEEDS = ("seed", "data_seed")
"""Settings in which the trainings of one group may differ."""
DERIVED = ("objective", "own_code")
"""What a configuration says of its other settings: a name of a group only where these agree."""
EVALUATED, REWARD = "eval_reward", "reward"


@dataclass(frozen=True, slots=True)
class Training:
    """What a training's folder says of its settings and of its end."""

    name: str
    settings: Mapping[str, object]
    step: int
    max_steps: int | None
    """The steps that it is to have; None where it ended before, because the task is solved."""
    rewards: Mapping[str, float]
    """``eval_reward``, if it was evaluated, and ``reward``, the mean of the last steps."""

    @classmethod
    def read(cls, folder: str | os.PathLike[str]) -> Training:
        """*Raises* ConfigError for a folder without a step, or with files that are not a
        training's."""
        path = Path(folder)
        try:
            stored = TrainingSettings.read(path / SETTINGS_NAME)
            if not stored.configuration:
                raise ValueError(f"{path / SETTINGS_NAME} has no configuration")
            lines = [decode_json(line) for line in _lines(path / METRICS_NAME)]
            settings = {**stored.configuration, "model": stored.model}
            max_steps = stored.max_steps
            rows = [line for line in lines if isinstance(line, dict)]
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{folder} is no training that can be read ({error}): it needs {SETTINGS_NAME} and"
                f" {METRICS_NAME}, which vf-train writes"
            ) from error
        ends = edge_rewards(rows)
        if ends is None:
            raise ConfigError(f"{folder} has no step with a reward yet: train it first")
        evaluated = [row[EVALUATED] for row in rows if row.get(EVALUATED) is not None]
        rewards = {EVALUATED: float(evaluated[-1])} if evaluated else {}
        step = max((row["step"] for row in rows if isinstance(row.get("step"), int)), default=0)
        is_solved = any(row.get("solved") and row.get("step") == step for row in rows)
        is_bounded = max_steps is not None and max_steps > 0 and not is_solved
        return cls(
            str(folder),
            settings,
            step,
            max_steps if is_bounded else None,
            rewards | {REWARD: ends[1]},
        )


def _lines(path: Path) -> list[str]:
    """The whole lines; one that is being written has no end yet."""
    return [line for line in read_text(path, MAX_FILE_BYTES).split("\n")[:-1] if line]


def edge_rewards(rows: Sequence[Mapping[str, Any]]) -> tuple[float, float, int] | None:
    """Return (mean reward of the first steps, of the last steps, number of steps in each); None
    without rewards.

    >>> edge_rewards([{"reward/mean": 0.0}, {"reward/mean": 1.0}])
    (0.0, 1.0, 1)
    """
    rewards = [float(row["reward/mean"]) for row in rows if row.get("reward/mean") is not None]
    if not rewards:
        return None
    edge = max(1, min(EDGE_STEPS, len(rewards) // 2))
    return fmean(rewards[:edge]), fmean(rewards[-edge:]), edge


# --- groups of seeds ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Seeds:
    """The trainings of one setting, which differ in their seed alone."""

    name: str
    values: tuple[float, ...]
    """A number for each seed; an unknown one is left out."""

    @property
    def summary(self) -> str:
        """The mean ± the standard deviation, and each."""
        if not self.values:
            return "unknown"
        spread = f" ± {math.sqrt(variance(self.values)):.3f}" if len(self.values) > 1 else ""
        each = " ".join(f"{value:.3f}" for value in self.values)
        return f"{fmean(self.values):.3f}{spread} ({each})"


@dataclass(frozen=True, slots=True)
class SeedDifference:
    """How a setting's seeds differ from the seeds of the first."""

    baseline: Seeds
    seeds: Seeds
    difference: float
    """Of the means; NaN without values."""
    low: float
    high: float
    """The 95% interval of the difference between the settings; NaN if it is unknown."""
    p: float
    """Two-sided, adjusted for the number of comparisons (Holm); NaN if it is unknown."""

    @property
    def verdict(self) -> str:
        """ "better", "worse", "not distinguishable" or "unknown"."""
        if math.isnan(self.p):
            return "unknown"
        if self.p >= ALPHA:
            return "not distinguishable"
        return "better" if self.difference > 0 else "worse"

    def __str__(self) -> str:
        if math.isnan(self.p):
            few = min(len(self.baseline.values), len(self.seeds.values)) < 2
            why = (
                "two seeds of each are the least that show what a seed changes"
                if few
                else "the seeds of each are equal, which shows nothing of what a seed changes"
            )
            return f"unknown: {why}"
        return (
            f"{self.difference:+.3f}, 95% from {self.low:+.3f} to {self.high:+.3f},"
            f" p = {self.p:.2g}: {self.verdict}"
        )

    def to_dict(self) -> dict[str, object]:
        """As in ``--json``; unknown numbers are None."""
        numbers = {"difference": self.difference, "low": self.low, "high": self.high, "p": self.p}
        return {
            "baseline": self.baseline.name,
            "name": self.seeds.name,
            "values": [list(self.baseline.values), list(self.seeds.values)],
            **{name: None if math.isnan(value) else value for name, value in numbers.items()},
            "verdict": self.verdict,
        }


def welch(a: Sequence[float], b: Sequence[float]) -> tuple[float, float, float, float]:
    """(mean of ``b`` - mean of ``a``, 95% low, high, two-sided p) of two samples of any spread; the
    last three are NaN for samples of one value, or of equal values.

    *Source*: Welch 1947, "The generalization of Student's problem when several different
    population variances are involved"; degrees of freedom by Satterthwaite 1946.
    """
    difference = fmean(b) - fmean(a) if len(a) and len(b) else math.nan
    unknown = difference, math.nan, math.nan, math.nan
    if min(len(a), len(b)) < 2:
        return unknown
    of_a, of_b = variance(a) / len(a), variance(b) / len(b)
    stderr = math.sqrt(of_a + of_b)
    if not stderr > SAME:
        return unknown
    df = (of_a + of_b) ** 2 / (of_a**2 / (len(a) - 1) + of_b**2 / (len(b) - 1))
    half = t_quantile(1 - ALPHA / 2, df) * stderr
    p = 2 * t_cdf(-abs(difference) / stderr, df)
    return difference, difference - half, difference + half, p


def compare_seeds(groups: Sequence[Seeds]) -> list[SeedDifference]:
    """Every group of seeds with the first, p adjusted for their number."""
    baseline, *compared = groups
    differences = [
        SeedDifference(baseline, seeds, *welch(baseline.values, seeds.values)) for seeds in compared
    ]
    adjusted = holm([difference.p for difference in differences])
    return [replace(item, p=p) for item, p in zip(differences, adjusted, strict=True)]


def by_settings(trainings: Sequence[Training]) -> tuple[str, list[Seeds]]:
    """(the name of the number, the groups of seeds): trainings whose settings differ in nothing
    but the seed, in their order, named by what differs between the groups.

    The number is ``eval_reward`` if all were evaluated. *Raises* ConfigError for a training that is
    there twice, of one seed and with the same rewards: it shows nothing of what a seed changes.
    """
    groups: dict[str, list[Training]] = {}
    for training in trainings:
        pairs = sorted((k, repr(v)) for k, v in training.settings.items() if k not in SEEDS)
        members = groups.setdefault(repr(pairs), [])
        for member in members:
            if (_seeds_of(member), member.rewards) == (_seeds_of(training), training.rewards):
                raise ConfigError(
                    f"{member.name} and {training.name} are one training twice, with equal settings,"
                    f" seed {training.settings.get(SEEDS[0])} and rewards, and would count as two"
                    " seeds: leave one of them out"
                )
        members.append(training)
    first = [members[0].settings for members in groups.values()]
    keys = sorted({key for settings in first for key in settings if key not in SEEDS})
    varied = [key for key in keys if len({repr(settings.get(key)) for settings in first}) > 1]
    not_derived = [key for key in varied if key not in DERIVED]
    # equal names of two functions of one's own: only what follows from them tells them apart
    if len({repr([settings.get(key) for key in not_derived]) for settings in first}) == len(first):
        varied = not_derived
    metric = EVALUATED if all(EVALUATED in t.rewards for t in trainings) else REWARD
    return metric, [
        Seeds(
            ",".join(f"{key}={_short(settings.get(key))}" for key in varied) or "all",
            tuple(training.rewards[metric] for training in members),
        )
        for settings, members in zip(first, groups.values(), strict=True)
    ]


def _seeds_of(training: Training) -> tuple[object, ...]:
    return tuple(training.settings.get(name) for name in SEEDS)


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
