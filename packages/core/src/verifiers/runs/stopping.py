"""Stop an evaluation once it is decided: its mean is known well enough, or its difference to a
saved run is.

The rule reads finished examples in the order of the plan and skips none, so that quick rollouts do
not count before slow rollouts; with a shuffled plan the examples are a random sample, and the
interval is valid at whatever time the run stops (``results.sequential``). Rollouts that already run
are finished and saved.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from verifiers.errors import ConfigError, RunError
from verifiers.results.comparison import Measured, incomparable_because
from verifiers.results.loading import load_results
from verifiers.results.outputs import measured
from verifiers.results.rows import RolloutOutput
from verifiers.results.sequential import NUM_POINTS, ConfidenceSequence
from verifiers.results.statistics import mean
from verifiers.runs.options import RunOptions
from verifiers.runs.plan import Job, Plan
from verifiers.storage.directory import saved_config

MIN_STEPS = 10
"""Candidate means within the half-width that is asked for, so that their spacing does
not matter."""


@dataclass(frozen=True, slots=True)
class Decision:
    """What the rule concluded; stored as ``stopped`` in the metadata of a run that it ended."""

    low: float
    high: float
    num_examples: int
    against: str | None
    """The saved run, when the interval is of the difference to it."""
    is_decided: bool = True

    def sentence(self) -> str:
        """
        >>> Decision(0.41, 0.47, 200, None).sentence()
        'decided after 200 examples: the mean is between 0.410 and 0.470 (95%, valid at any time)'
        """
        if self.against is None:
            what = "the mean is between"
        else:
            what = f"the difference to {self.against} is between"
        decided = "decided after" if self.is_decided else "not decided with all"
        return (
            f"{decided} {self.num_examples} examples: {what} {self.low:.3f} and {self.high:.3f}"
            " (95%, valid at any time)"
        )


class StoppingRule:
    """Decides whether a plan needs more examples. ``half_width``: of the interval of the mean
    reward; ``against``: a saved run, whose difference is decided when its interval excludes 0.

    *Raises* ConfigError for a saved run that cannot be compared.
    """

    def __init__(
        self,
        plan: Plan,
        reward_range: tuple[float, float],
        *,
        half_width: float | None = None,
        against: str | None = None,
        run: Measured | None = None,
    ):
        self.plan, self.half_width, self.against = plan, half_width, against
        low, high = reward_range
        self.problem: str | None = None
        """Why the interval is not valid: the run is to fail with it."""
        self._baseline: dict[Hashable, Sequence[float]] | None = None
        if against is not None:
            self._baseline = _rewards_of(against, plan, run)
            low, high = low - high, high - low
        if half_width is None:
            steps = NUM_POINTS
        else:
            steps = max(NUM_POINTS, round(MIN_STEPS * (high - low) / half_width))
        self._sequence = ConfidenceSequence(low, high, num_points=steps)
        self._next, self._position = 0, 0

    def update(self, rows: Mapping[int, RolloutOutput]) -> bool:
        """Read further finished examples of ``rows`` (index in the plan -> rollout); whether it is
        decided."""
        while self.problem is None and not self.is_decided and self._next < len(self.plan.examples):
            count = self.plan.siblings[self._next]
            example_hash = self.plan.examples[self._next].hash
            if not self._is_read(example_hash):
                self._next, self._position = self._next + 1, self._position + count
                continue
            group = [rows.get(self._position + n) for n in range(count)]
            if None in group:
                break
            self._read(example_hash, [row["reward"] for row in group if row is not None])
            self._next, self._position = self._next + 1, self._position + count
        return self.is_decided

    def _is_read(self, example_hash: str) -> bool:
        """Whether an example says something: without a saved run each, else those of that run."""
        return self._baseline is None or example_hash in self._baseline

    def _read(self, example_hash: str, rewards: list[float]) -> None:
        value = mean(rewards)
        if self._baseline is not None:
            value -= mean(self._baseline[example_hash])
        if value != value:  # unknown here, or in the saved run
            return
        try:
            self._sequence.add(value)
        except ConfigError as error:
            self.problem = (
                f"{error}: give the range of the rewards (reward_range, --reward-range LOW,HIGH)"
            )

    @property
    def is_decided(self) -> bool:
        """Whether no further example is needed."""
        low, high = self._sequence.interval()
        if self.half_width is not None:
            return (high - low) / 2 <= self.half_width
        return low > 0 or high < 0

    def decision(self) -> Decision | None:
        """What was concluded; None while it is open."""
        return self.so_far() if self.is_decided else None

    def so_far(self) -> Decision:
        """The present interval."""
        return Decision(
            *self._sequence.interval(), self._sequence.num_values, self.against, self.is_decided
        )

    def conclude(self, rows: Mapping[int, RolloutOutput]) -> Decision:
        """The interval at the end of the run. *Raises* RunError when its rewards are outside their
        range."""
        self.update(rows)
        if self.problem is not None:
            raise RunError(self.problem)
        return self.so_far()

    def until_decided(
        self, jobs: Iterable[Job], rows: Mapping[int, RolloutOutput]
    ) -> Iterator[Job]:
        """The jobs, example by example, until it is decided, without those of examples that it does
        not read.

        ``rows`` grows meanwhile.
        """
        last_hash = None
        for job in jobs:
            if job.example.hash != last_hash:
                if self.update(rows) or self.problem is not None:
                    return
                last_hash = job.example.hash
            if self._is_read(job.example.hash):
                yield job


def rule_of(
    options: RunOptions, plan: Plan, is_scored: bool, run: Callable[[], Measured]
) -> StoppingRule | None:
    """The rule of a run by its options; None when it runs its whole plan. *Raises* ConfigError."""
    if options.until_half_width is None and options.until_decided is None:
        return None
    if not is_scored:
        raise ConfigError(
            "score_rollouts=False leaves every reward unknown, so that none can stop the run"
        )
    low, high = options.reward_range
    return StoppingRule(
        plan,
        (low, high),
        half_width=options.until_half_width,
        against=None if options.until_decided is None else str(options.until_decided),
        run=run(),
    )


def _rewards_of(path: str, plan: Plan, run: Measured | None) -> dict[Hashable, Sequence[float]]:
    """Example hash -> rewards of a saved run. *Raises* ConfigError when it cannot be compared with
    ``run``."""
    (baseline,) = measured([(str(path), load_results(path), saved_config(path))])
    rewards = dict(baseline.values["reward"])
    if run is not None:
        hashes = {example.hash: [0.0] for example in plan.examples}
        present = Measured(run.name, run.env_id, {"reward": hashes}, run.model, run.config)
        if because := incomparable_because(baseline, present, ("reward",))[0]:
            raise ConfigError(
                f"the run in {path} cannot be compared with this one: {'; '.join(because)}",
                path=path,
            )
    return rewards
