"""When a run ends before its last step: too many rollouts fail, no batch ever had a signal, or the
task is solved.

Both meters only count; their errors are ``TooManyFaults`` and ``NoLearningSignal``. A solved task
is not an error, and a run whose rewards have ever differed inside a group is not ended for lack of
a signal: it warns, at growing intervals.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from statistics import NormalDist

import numpy as np

from verifiers.errors import NoLearningSignal, TooManyFaults
from verifiers.results.coverage import Coverage
from verifiers.rollouts.rollout import Rollout
from verifiers.types import StopReason
from verifiers_trainer.algorithm.batch import Group, TrainBatch
from verifiers_trainer.algorithm.statistics import reward_histogram
from verifiers_trainer.pipeline.schedule import Signal
from verifiers_trainer.settings.config import RLConfig

log = logging.getLogger(__name__)

ADVICE = (
    "Make the task easier or harder, raise rollouts_per_example or the temperature, or check the"
    " reward function"
)
ADVICE_UNKNOWN = (
    "Correct what leaves rewards unknown: an unknown reward is in no group's comparison"
)
ADVICE_CUT = "Raise max_seq_len, max_tokens or max_completion_len"
EXCLUSIONS = {
    "cut": ("were overlong or truncated", ADVICE_CUT),
    "nan": ("had an advantage of NaN", "Correct the function that computes the advantages"),
    "empty": ("had no token to train", "Look for turns without a completion"),
}
"""Why rollouts of groups with a signal carry no loss, and what to do."""
MAX_KINDS = 20
"""Kinds of failures that are logged each by itself."""
NO_SIGNAL_ROLLOUTS = 4096
"""Rollouts without any signal since the start of a run that end it, and at least one pass over a
set of up to four times as many."""
SOLVED_ROLLOUTS = 512
"""Rollouts in a row with the best reward that make a task solved, and at least one pass over a set
of up to ``NO_SIGNAL_ROLLOUTS``: with 512 the rate of other rewards is below 0.6 % at 95 %
confidence."""
CONFIDENCE = 0.95


class FaultMeter:
    """Counts failed rollouts over the last four batches: those with an error, and an unknown reward
    or advantage."""

    def __init__(self, config: RLConfig):
        self.advantage = config.advantage
        self.min_rollouts, self.max_fraction = config.batch_size, config.max_error_fraction
        self._recent: deque[str | None] = deque(maxlen=4 * config.batch_size)
        """The cause of each failed rollout, None for another."""
        self._kinds: set[str] = set()

    def add(self, group: Group) -> None:
        """Count a group; the first failure of each kind is logged. Raises ``TooManyFaults`` above
        the bound."""
        values = group.values(self.advantage)
        pairs = zip(group.rollouts, values, strict=True)
        faults = [
            record for record, value in pairs if record.error is not None and np.isnan(value).any()
        ]
        for record in faults:
            kind = cause_text(record)
            if kind not in self._kinds and len(self._kinds) < MAX_KINDS:
                self._kinds.add(kind)
                log.warning(
                    "a rollout of example %s failed and is not trained on: %s",
                    group.example_id,
                    record.error.text,
                )
        self._recent.extend(cause_text(record) for record in faults)
        self._recent.extend([None] * (len(group.rollouts) - len(faults)))
        causes = Counter(cause for cause in self._recent if cause is not None)
        total = len(self._recent)
        failed = causes.total()
        if faults and total >= self.min_rollouts and failed > self.max_fraction * total:
            last = faults[-1].error.text
            raise TooManyFaults(
                f"{failed} of the last {total} rollouts failed: {counted(causes)}; the last with"
                f" {last}; training stops (max_error_fraction={self.max_fraction:g})",
                cause=last,
                count=failed,
            )


def cause_text(rollout: Rollout) -> str:
    """The cause of an unknown reward; "not scored" without an error."""
    return "not scored" if rollout.error is None else rollout.error.cause_and_place


def counted(causes: Counter[str]) -> str:
    """Causes, the most frequent first: ``48 x ValueError in right (sums.py:12), 1 x TimeoutError in
    slow``."""
    counts = causes.most_common(4)
    if len(counts) == 1:
        return counts[0][0]
    return ", ".join(f"{count} x {cause}" for cause, count in counts)


class Unscored:
    """Counts unknown rewards: ``49 of 96 rollouts unscored: ValueError in right (sums.py:12)``; ""
    without any."""

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
            f"{num_unscored} of {self._num_rollouts} rollouts unscored: {counted(self._causes)}"
            if num_unscored
            else ""
        )


class SignalMeter:
    """Counts batches in a row without a learning signal, warns of them, and decides when they end
    the run.

    ``signal`` is the part of the counts that a checkpoint saves. One pass over the set is
    ``rollouts_per_pass`` rollouts; ``may_be_solved`` is False if a subclass or a schedule of
    difficulties selects the rows, because other rows may follow. ``no_prompt_fits``: a sentence if no
    prompt of the dataset fits ``max_seq_len``.
    """

    def __init__(
        self,
        config: RLConfig,
        signal: Signal,
        rollouts_per_pass: int = 0,
        may_be_solved: bool = True,
        no_prompt_fits: str = "",
    ):
        self.config, self.signal = config, signal
        self._no_prompt_fits = no_prompt_fits
        self._per_pass, self._may_be_solved = rollouts_per_pass, may_be_solved
        self._since = time.monotonic()
        self._histogram: Counter[float] = Counter()
        """Rewards of the streak, rounded to three digits; NaN counts the unknown rewards."""
        self._unscored = Unscored()
        self._finding = ""
        self._trains_own_rewards = config.credit == "turn" and config.gamma == 0
        """Whether a turn is trained by its own reward alone, and none has been looked for yet."""

    def note(self, batch: TrainBatch) -> tuple[bool, Mapping[str, float]]:
        """Count a batch; whether it is trained on, and its numbers for ``metrics.jsonl`` if it has
        no signal. Raises ``NoLearningSignal`` at once when no prompt fits."""
        is_step = batch.num_tokens > 0 or (self._keeps and bool(batch.groups))
        groups, numbers = [*batch.groups, *batch.discarded], {}
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        if self._no_prompt_fits and rollouts and all(map(_is_unasked, rollouts)):
            raise NoLearningSignal(self._no_prompt_fits)
        if batch.num_tokens and any(not group.is_dead(self.config) for group in batch.groups):
            self.note_batch(groups)
        elif groups:
            excluded = [rollout.excluded for group in batch.samples_G for rollout in group]
            numbers = self.note_nothing(groups, excluded)
        return is_step, numbers

    def note_batch(self, groups: Sequence[Group]) -> None:
        """Count a batch with a learning signal: the streak ends."""
        signal = self.signal
        if signal.batches > 1:
            log.warning(
                "skipped %d batches in a row without a learning signal; this one has one",
                signal.batches,
            )
        self._see(groups)
        signal.was_live, signal.batches, signal.rollouts, signal.at_best = True, 0, 0, 0
        self._since = time.monotonic()
        self._histogram.clear()
        self._unscored = Unscored()

    def note_nothing(
        self, groups: Sequence[Group], excluded: Sequence[str | None] = ()
    ) -> dict[str, float]:
        """Count a batch without a learning signal, and warn of it; return its numbers, for
        ``metrics.jsonl``. ``excluded``: as in ``RolloutSamples``, of each rollout."""
        signal = self.signal
        self._see(groups)
        signal.batches += 1
        self._unscored.add(groups)
        signal.rollouts += sum(len(group.rollouts) for group in groups)
        for reward, count in reward_histogram(groups).items():
            self._histogram[math.nan if math.isnan(reward) else reward] += (
                count  # one key for every unknown
            )
        if any(not group.is_dead(self.config) for group in groups):
            num_unknown = sum(int(np.isnan(group.rewards).sum()) for group in groups)
            counts_of = {
                "cut": excluded.count("overlong") + excluded.count("truncated"),
                "nan": excluded.count("unscored") - num_unknown,
                "empty": excluded.count("empty"),
            }
            causes = [kind for kind, count in counts_of.items() if count > 0] or ["cut"]
            all_or_number = {kind: counts_of[kind] if causes[1:] else "all" for kind in causes}
            reason = ", ".join(f"{all_or_number[k]} rollouts {EXCLUSIONS[k][0]}" for k in causes)
            if "cut" in causes and self.config.mask_truncated_completions:
                reason += ", which mask_truncated_completions leaves out"
            advice = ". ".join(EXCLUSIONS[kind][1] for kind in causes)
        else:
            is_environments = self.config.advantage == "environment"
            if is_environments:
                reason = "the environment's advantages were all 0"
            else:
                reason = "no group had two different rewards"
            advice = ADVICE_UNKNOWN if str(self._unscored) else ADVICE
        coverage = Coverage.of(rollout for group in groups for rollout in group.rollouts)
        if sentences := [text for kind, text in coverage.warnings().items() if kind != "unscored"]:
            reason = "; ".join([reason, *sentences])
            advice = advice if str(self._unscored) else "Correct that first"
        if unscored := str(self._unscored):
            reason = f"{unscored}; {reason}"
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        if num_unasked := sum(map(_is_unasked, rollouts)):
            reason = (
                f"the first prompt of {num_unasked} of {len(rollouts)} rollouts does not fit"
                f" max_seq_len = {self.config.max_seq_len}; {reason}"
            )
            advice = "Raise max_seq_len, or shorten the prompts"
        elapsed_s, bound = time.monotonic() - self._since, self._success_bound()
        counts = ", ".join(
            f"{value:g} x {count}" for value, count in list(sorted(self._histogram.items()))[:8]
        )
        if math.isfinite(bound):
            counts += (
                f"; a reward above {signal.lowest:g} in at most {bound:.2g} of the rollouts, at 95"
                " % confidence"
            )
        if signal.batches & (signal.batches - 1) == 0:  # 1, 2, 4, 8, ...
            log.warning(
                "%s: %s (%d batches, %d rollouts, %.0f s since the last one with a signal;"
                " rewards: %s)",
                (
                    "a step without a learning signal"
                    if self._keeps
                    else "skipped batch, sampling replacements"
                ),
                reason,
                signal.batches,
                signal.rollouts,
                elapsed_s,
                counts,
            )
        since = (
            "since the last one with a signal" if signal.was_live else "since the start of the run"
        )
        self._finding = (
            f"no learning signal in {signal.batches} batches ({signal.rollouts} rollouts) {since}:"
            f" {reason} (rewards: {counts}). {advice}"
        )
        return coverage.metrics() | {
            "dead/batches": signal.batches,
            "dead/rollouts": signal.rollouts,
            "dead/seconds": elapsed_s,
            "dead/reward": _mean(groups),
            "dead/success_bound": bound,
        }

    def is_solved(self) -> bool:
        """Whether the last rollouts all had the best reward of a run that has seen a lower reward,
        which is logged.

        Raises ``NoLearningSignal`` when it is not, and no batch since the start of the run had a
        signal, or ``no_signal_steps`` batches in a row had none.
        """
        signal = self.signal
        enough = min(max(SOLVED_ROLLOUTS, self._per_pass), NO_SIGNAL_ROLLOUTS)
        is_over = self._is_over()
        never = self._keeps or not self._may_be_solved or self.config.no_signal_steps == 0
        at_best = signal.at_best >= (min(enough, signal.rollouts) if is_over else enough)
        if not never and at_best and signal.lowest < signal.best:
            log.warning(
                "solved: the last %d rollouts all had the best reward of the run, %g; training ends"
                " here",
                signal.at_best,
                signal.best,
            )
            return True
        if is_over:
            raise NoLearningSignal(self._finding, histogram=dict(self._histogram))
        return False

    def _see(self, groups: Sequence[Group]) -> None:
        """Count the known rewards of finished groups, and look for rewards of turns in the first
        that need them."""
        signal = self.signal
        if self._trains_own_rewards:
            of_several = [
                record for group in groups for record in group.rollouts if len(record.turns) > 1
            ]
            if of_several and not any(record.turn_rewards for record in of_several):
                log.warning(
                    "gamma=0 trains the last turn of each rollout alone, because the environment"
                    " gives its turns no rewards: give them some, or raise gamma (1 = every turn"
                    " shares in the reward)"
                )
            self._trains_own_rewards = not of_several
        for group in sorted(groups, key=lambda group: group.index):
            rewards = group.rewards[~np.isnan(group.rewards)]
            if not rewards.size:
                continue
            if rewards.max() > signal.best:
                signal.best, signal.at_best = float(rewards.max()), 0
            signal.lowest = min(signal.lowest, float(rewards.min()))
            signal.at_best = signal.at_best + rewards.size if rewards.min() == signal.best else 0

    @property
    def _keeps(self) -> bool:
        return self.config.zero_variance == "keep"

    def _is_over(self) -> bool:
        """Whether the streak of batches without a signal is as long as a run may have."""
        if (limit := self.config.no_signal_steps) is not None:
            return 0 < limit <= self.signal.batches
        small = self._per_pass if self._per_pass <= 4 * NO_SIGNAL_ROLLOUTS else 0
        is_long = self.signal.rollouts >= max(NO_SIGNAL_ROLLOUTS, small)
        return is_long and not self.signal.was_live and not self._keeps

    def _success_bound(self) -> float:
        """The upper bound of the share of rewards above the lowest of the run; NaN when all or none
        are known."""
        counts = {
            reward: count for reward, count in self._histogram.items() if not math.isnan(reward)
        }
        total = sum(counts.values())
        above = sum(
            count for reward, count in counts.items() if reward > round(self.signal.lowest, 3)
        )
        return math.nan if above == total else upper_bound(above, total)


def upper_bound(successes: int, trials: int) -> float:
    """The one-sided upper bound of a rate at 95 % confidence: exact for no success, else Wilson's
    (1927).

    >>> round(upper_bound(0, 500), 4), round(upper_bound(5, 500), 3)
    (0.006, 0.021)
    """
    if successes == 0:
        return float(1 - (1 - CONFIDENCE) ** (1 / trials))
    rate, z = successes / trials, NormalDist().inv_cdf(CONFIDENCE)
    centre = rate + z * z / (2 * trials)
    spread = z * math.sqrt(rate * (1 - rate) / trials + (z / (2 * trials)) ** 2)
    return float((centre + spread) / (1 + z * z / trials))


def _mean(groups: Sequence[Group]) -> float:
    means = [
        rollout.reward
        for group in groups
        for rollout in group.rollouts
        if not math.isnan(rollout.reward)
    ]
    return sum(means) / len(means) if means else math.nan


def _is_unasked(rollout: Rollout) -> bool:
    """Whether the first prompt was too long, so that the model was never asked."""
    is_too_long = rollout.stop == StopReason.PROMPT_TOO_LONG.value
    return is_too_long and not rollout.transcript.turns
