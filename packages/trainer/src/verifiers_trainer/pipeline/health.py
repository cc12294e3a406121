"""End a run that cannot train: too many rollouts fail, or no batch has a learning signal.

Both meters only count; their errors are ``TooManyFaults`` and ``NoLearningSignal``.
"""

from __future__ import annotations

import logging
import math
from collections import Counter, deque
from collections.abc import Iterable, Sequence

import numpy as np

from verifiers.errors import NoLearningSignal, TooManyFaults
from verifiers.types import Rollout
from verifiers_trainer.algorithm.batch import Group, reward_histogram
from verifiers_trainer.settings.config import RLConfig

log = logging.getLogger(__name__)

ADVICE = "Make the task easier or harder, raise rollouts_per_example or the temperature, or check the reward function"
ADVICE_UNKNOWN = "Correct what leaves rewards unknown: an unknown reward is in no group's comparison"
MAX_KINDS = 20
"""Kinds of failures that are logged one by one."""


class FaultMeter:
    """Counts failed rollouts over the last four batches: those with an error, and an unknown reward or advantage."""

    def __init__(self, config: RLConfig):
        self.advantage = config.advantage
        self.min_rollouts, self.max_fraction = config.batch_size, config.max_error_fraction
        self._recent: deque[str | None] = deque(maxlen=4 * config.batch_size)
        """The cause of each failed rollout, None for another."""
        self._kinds: set[str] = set()

    def add(self, group: Group) -> None:
        """Count a group; the first failure of each kind is logged. Raises ``TooManyFaults`` above the bound."""
        values = group.values(self.advantage)
        pairs = zip(group.rollouts, values, strict=True)
        faults = [record for record, value in pairs if record.error is not None and np.isnan(value).any()]
        for record in faults:
            kind = cause_text(record)
            if kind not in self._kinds and len(self._kinds) < MAX_KINDS:
                self._kinds.add(kind)
                log.warning("a rollout of example %s failed and is not trained on: %s", group.example_id, record.error)
        self._recent.extend(cause_text(record) for record in faults)
        self._recent.extend([None] * (len(group.rollouts) - len(faults)))
        causes, total = Counter(cause for cause in self._recent if cause is not None), len(self._recent)
        failed = causes.total()
        if faults and total >= self.min_rollouts and failed > self.max_fraction * total:
            raise TooManyFaults(
                f"{failed} of the last {total} rollouts failed: {counted(causes)}; the last with {faults[-1].error}; "
                f"training stops (max_error_fraction={self.max_fraction:g})",
                cause=faults[-1].error,
                count=failed,
            )


def cause_text(rollout: Rollout) -> str:
    """The cause of an unknown reward; "not scored" without an error."""
    return rollout.cause or ("not scored" if rollout.error is None else rollout.error.partition(":")[0])


def counted(causes: Counter[str]) -> str:
    """Causes, the most frequent first: ``48 x ValueError in right (sums.py:12), 1 x TimeoutError in slow``."""
    counts = causes.most_common(4)
    return counts[0][0] if len(counts) == 1 else ", ".join(f"{count} x {cause}" for cause, count in counts)


class Unscored:
    """Counts unknown rewards: ``49 of 96 rollouts unscored: ValueError in right (sums.py:12)``; "" without any."""

    def __init__(self, groups: Iterable[Group] = ()):
        self._num_rollouts, self._causes = 0, Counter[str]()
        self.add(groups)

    def add(self, groups: Iterable[Group]) -> None:
        """Count the rollouts of groups."""
        rollouts = [record for group in groups for record in group.rollouts]
        self._num_rollouts += len(rollouts)
        self._causes.update(cause_text(record) for record in rollouts if math.isnan(record.reward))

    def __str__(self) -> str:
        num_unscored = self._causes.total()
        return (
            f"{num_unscored} of {self._num_rollouts} rollouts unscored: {counted(self._causes)}" if num_unscored else ""
        )


class SignalMeter:
    """Counts batches in a row without a learning signal; logs when the streak begins, and its length when it ends."""

    def __init__(self, config: RLConfig):
        self.config, self._in_a_row = config, 0
        self._unscored = Unscored()

    def note_batch(self) -> None:
        """Count a batch with a learning signal: the streak ends."""
        if self._in_a_row > 1:
            log.warning("skipped %d batches in a row without a learning signal; this one has one", self._in_a_row)
        self._in_a_row = 0
        self._unscored = Unscored()

    def note_nothing(self, groups: Sequence[Group]) -> None:
        """Count a batch without a learning signal. Raises ``NoLearningSignal`` after ``no_signal_steps`` of them."""
        self._in_a_row += 1
        self._unscored.add(groups)
        limit = self.config.no_signal_steps
        unknown = f"{self._unscored}; " if str(self._unscored) else ""
        if any(not group.is_dead(self.config) for group in groups):
            reason = "all rollouts were overlong or truncated"
            advice = "Raise max_seq_len, max_tokens or max_completion_len"
        else:
            own = self.config.advantage == "environment"
            reason = "the environment's advantages were all 0" if own else "no group had two different rewards"
            advice = ADVICE_UNKNOWN if unknown else ADVICE
        histogram = reward_histogram(groups)
        counts = ", ".join(f"{value:g} x {count}" for value, count in list(histogram.items())[:8])
        if self._in_a_row == 1:
            log.warning("skipped batch: %s (%srewards: %s); sampling replacements", reason, unknown, counts)
        if limit and self._in_a_row >= limit:
            raise NoLearningSignal(
                f"no learning signal: {unknown}in each of the last {limit} batches {reason} (rewards of the last: "
                f"{counts}). {advice}",
                histogram=histogram,
            )
