"""Older ``verifiers.utils.metric_utils``: numbers of saved rollouts that arrive in turn.

Runs have their statistics in ``GenerateMetadata``; these classes are for code that shows them while
it runs.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any, Protocol, runtime_checkable

from verifiers.rollouts.values import reported

Output = Mapping[str, Any]


@runtime_checkable
class Metric(Protocol):
    """Takes rollouts and gives a value of all so far."""

    def add_output(self, output: Output) -> None: ...

    def add_outputs(self, outputs: Iterable[Output]) -> None: ...

    def compute(self) -> Any: ...

    def reset(self) -> None: ...


class _Collected:
    def add_output(self, output: Output) -> None:
        """Take one rollout."""
        raise NotImplementedError(f"{type(self).__name__} must define add_output(self, output)")

    def add_outputs(self, outputs: Iterable[Output]) -> None:
        """Take several rollouts."""
        for output in outputs:
            self.add_output(output)


class MeanMetric(_Collected, ABC):
    """The mean of ``extract(output)``; None is skipped, and the mean of nothing is 0.0.

    >>> metric = RewardMetric()
    >>> metric.add_outputs([{"reward": 1.0}, {}])
    >>> metric.compute(), metric.count
    (0.5, 2)
    """

    def __init__(self) -> None:
        self.reset()

    @abstractmethod
    def extract(self, output: Output) -> float | None:
        """The number of a rollout, None to skip it."""

    def add_output(self, output: Output) -> None:
        """Take one rollout."""
        value = self.extract(output)
        if value is not None:
            self.total += value
            self.count += 1

    def compute(self) -> float:
        """The mean so far."""
        return self.total / self.count if self.count else 0.0

    def reset(self) -> None:
        """Forget the rollouts."""
        self.total, self.count = 0.0, 0


class RewardMetric(MeanMetric):
    """Mean reward; a rollout without a reward counts as 0.0, and an unknown reward (None, NaN) is
    skipped."""

    def extract(self, output: Output) -> float | None:
        reward = output.get("reward", 0.0)
        return None if reward is None or math.isnan(reward) else float(reward)


class ErrorRateMetric(MeanMetric):
    """Share of rollouts with an error."""

    def extract(self, output: Output) -> float | None:
        return float(output.get("error") is not None)


class _TokensMetric(MeanMetric):
    key = ""

    def extract(self, output: Output) -> float | None:
        count = reported(output.get("token_usage")).get(self.key)
        return None if count is None else float(count)


class InputTokensMetric(_TokensMetric):
    """Mean of ``token_usage["input_tokens"]``; rollouts without it are skipped."""

    key = "input_tokens"


class OutputTokensMetric(_TokensMetric):
    """Mean of ``token_usage["output_tokens"]``; rollouts without it are skipped."""

    key = "output_tokens"


class FinalInputTokensMetric(_TokensMetric):
    """Mean of ``token_usage["final_input_tokens"]``; rollouts without it are skipped."""

    key = "final_input_tokens"


class FinalOutputTokensMetric(_TokensMetric):
    """Mean of ``token_usage["final_output_tokens"]``; rollouts without it are skipped."""

    key = "final_output_tokens"


class EnvMetrics(_Collected):
    """Means by the names in ``output["metrics"]``; what is no number, or unknown, is skipped."""

    def __init__(self) -> None:
        self.reset()

    def add_output(self, output: Output) -> None:
        """Take one rollout."""
        for name, value in (output.get("metrics") or {}).items():
            if isinstance(value, int | float) and not math.isnan(value):
                self._values.setdefault(name, []).append(float(value))

    def compute(self) -> dict[str, float]:
        """The means so far."""
        return {name: sum(values) / len(values) for name, values in self._values.items()}

    def reset(self) -> None:
        """Forget the rollouts."""
        self._values: dict[str, list[float]] = {}


class PassAtKMetric(_Collected):
    """(pass@k, pass^k) for k = 1, 2, 4, … up to ``rollouts_per_example``, over the examples that
    have all rollouts.

    A rollout passes at a reward of ``threshold`` or more. Unbiased over n rollouts of which c pass:
    1 - C(n-c,k)/C(n,k) and C(c,k)/C(n,k); means over examples. Source: arXiv 2107.03374, section
    2.1.

    >>> metric = PassAtKMetric(2)
    >>> metric.add_outputs([{"example_id": 0, "reward": 1.0}, {"example_id": 0, "reward": 0.0}])
    >>> metric.compute()
    ({'1': 0.5, '2': 1.0}, {'1': 0.5, '2': 0.0})
    """

    def __init__(self, rollouts_per_example: int, threshold: float = 0.5):
        self.rollouts_per_example, self.threshold = rollouts_per_example, threshold
        self.reset()

    def add_output(self, output: Output) -> None:
        """Take one rollout."""
        reward = output.get("reward") or 0.0
        self._passed.setdefault(output.get("example_id"), []).append(reward >= self.threshold)

    def compute(self) -> tuple[dict[str, float], dict[str, float]]:
        """The two rates so far; empty for single rollouts, and while no example is complete."""
        n = self.rollouts_per_example
        counts = [sum(passed) for passed in self._passed.values() if len(passed) == n]
        if n <= 1 or not counts:
            return {}, {}
        any_of, all_of = {}, {}
        k = 1
        while k <= n:
            ways = math.comb(n, k)
            any_of[str(k)] = sum(1 - math.comb(n - c, k) / ways for c in counts) / len(counts)
            all_of[str(k)] = sum(math.comb(c, k) / ways for c in counts) / len(counts)
            k *= 2
        return any_of, all_of

    def reset(self) -> None:
        """Forget the rollouts."""
        self._passed: dict[object, list[bool]] = {}
