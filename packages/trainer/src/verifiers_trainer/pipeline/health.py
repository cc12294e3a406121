"""End a run that cannot train: too many rollouts fail, or no batch has a learning signal.

Both meters only count; their errors are ``TooManyFaults`` and ``NoLearningSignal``.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence

import numpy as np

from verifiers.errors import NoLearningSignal, TooManyFaults
from verifiers_trainer.algorithm.batch import Group, reward_histogram
from verifiers_trainer.settings.config import RLConfig

log = logging.getLogger(__name__)


class FaultMeter:
    """Counts failed rollouts over the last four batches: those with an error, and an unknown reward or advantage."""

    def __init__(self, config: RLConfig):
        self.advantage = config.advantage
        self.min_rollouts, self.max_fraction = config.batch_size, config.max_error_fraction
        self._recent: deque[bool] = deque(maxlen=4 * config.batch_size)
        self._kinds: set[str] = set()

    def add(self, group: Group) -> None:
        """Count a group; the first failure of each kind is logged. Raises ``TooManyFaults`` above the bound."""
        values = group.values(self.advantage)
        errors = [r.error for r, value in zip(group.rollouts, values, strict=True) if r.error and np.isnan(value).any()]
        for error in errors:
            kind = error.partition(":")[0]
            if kind not in self._kinds:
                self._kinds.add(kind)
                log.warning("a rollout of example %s failed and is not trained on: %s", group.example_id, error)
        self._recent.extend([True] * len(errors) + [False] * (len(group.rollouts) - len(errors)))
        failed, total = sum(self._recent), len(self._recent)
        if errors and total >= self.min_rollouts and failed > self.max_fraction * total:
            raise TooManyFaults(
                f"{failed} of the last {total} rollouts failed, the last with {errors[-1]}; training stops "
                f"(max_error_fraction={self.max_fraction:g})",
                cause=errors[-1],
                count=failed,
            )


class SignalMeter:
    """Counts batches in a row without a learning signal; logs when the streak begins, and its length when it ends."""

    def __init__(self, config: RLConfig):
        self.config, self._in_a_row = config, 0

    def note_batch(self) -> None:
        """Count a batch with a learning signal: the streak ends."""
        if self._in_a_row > 1:
            log.warning("skipped %d batches in a row without a learning signal; this one has one", self._in_a_row)
        self._in_a_row = 0

    def note_nothing(self, groups: Sequence[Group]) -> None:
        """Count a batch without a learning signal. Raises ``NoLearningSignal`` after ``no_signal_steps`` of them."""
        self._in_a_row += 1
        if any(not group.is_dead(self.config) for group in groups):
            reason = "all rollouts were overlong or truncated"
            advice = "Raise max_seq_len, max_tokens or max_completion_len"
        else:
            own = self.config.advantage == "environment"
            reason = "the environment's advantages were all 0" if own else "no group had two different rewards"
            advice = (
                "Make the task easier or harder, raise rollouts_per_example or the temperature, or check the reward "
                "function"
            )
        histogram = reward_histogram(groups)
        counts = ", ".join(f"{value:g} x {count}" for value, count in list(histogram.items())[:8])
        if self._in_a_row == 1:
            log.warning("skipped batch: %s (rewards: %s); sampling replacements", reason, counts)
        limit = self.config.no_signal_steps
        if limit and self._in_a_row >= limit:
            raise NoLearningSignal(
                f"no learning signal: in each of the last {limit} batches {reason} (rewards of the last: "
                f"{counts}). {advice}",
                histogram=histogram,
            )
