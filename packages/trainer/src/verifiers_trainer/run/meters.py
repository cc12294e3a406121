"""The numbers to watch in every step: how far the policy is from the one that sampled, and how many rollouts fail.

Meters count; what a number means for the run is said in their own terms only (``TooManyFaults``, ``NoLearningSignal``,
``alarms``). They change neither loss nor batch.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verifiers.errors import NoLearningSignal, TooManyFaults
from verifiers_trainer.algorithm.batch import Group, reward_histogram
from verifiers_trainer.distributed import deepspeed
from verifiers_trainer.settings.config import RLConfig

log = logging.getLogger(__name__)

PEAK_FLOPS = {"B200": 2250e12, "H200": 989e12, "H100": 989e12, "L40S": 362e12, "A100": 312e12}
"""Dense bf16 operations per second of a device, by a part of its name, as its maker states them."""


class RatioMeter:
    """Sums over the trained tokens of a step, row by row; ``summary`` gives the means. d = log π - log μ.

    ``sampler/*`` are over tokens sampled by the present policy ``version``, where d should be zero: mean |d| and the
    estimate e^d - d - 1 of KL(μ‖π) (J. Schulman, "Approximating KL divergence", 2020). ``ratio/kept`` is the share of
    tokens inside the bounds ``kept``, ``ratio/capped`` the share above ``cap``. The sums stay on the device until
    ``summary`` asks for them, so that counting a row waits for nothing.
    """

    NAMES = ("tokens", "entropy", "ratio", "inside", "capped", "current", "abs", "kl")

    def __init__(self, version: int, kept: tuple[float, float] = (0.125, 8.0), cap: float = 5.0):
        self.version, self.kept, self.cap = version, kept, cap
        self._sums: list[Tensor] = []
        self._maxima: list[Tensor] = []
        self._others: dict[str, list[Tensor]] = {}
        self._read: tuple[dict[str, float], float, float] | None = None

    def add(
        self,
        log_pi: Tensor,
        log_mu: Tensor,
        entropy: Tensor | None,
        row: Mapping[str, Tensor],
        others: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Count one row of T tokens; of ``others``, each [T], the mean is part of the summary."""
        counted = row["loss_mask"] & (row["weight"] != 0)
        current = counted & (row["version"] == self.version)
        d = torch.where(counted, log_pi - log_mu, 0.0).double().clamp(-20, 20)
        ratio = d.exp()
        inside = (ratio >= self.kept[0]) & (ratio <= self.kept[1])
        zero = d.new_zeros(())
        sums = [
            counted.sum(),
            torch.where(counted, entropy, 0.0).sum() if entropy is not None else zero,
            torch.where(counted, ratio, 0.0).sum(),
            (inside & counted).sum(),
            ((ratio > self.cap) & counted).sum(),
            current.sum(),
            torch.where(current, d.abs(), 0.0).sum(),
            torch.where(current, torch.special.expm1(d) - d, 0.0).sum(),
        ]
        self._sums.append(torch.stack([value.double() for value in sums]))
        maxima = [torch.where(counted, ratio, 0.0).max(), torch.where(current, d.abs(), 0.0).max()]
        self._maxima.append(torch.stack(maxima))
        for name, values in (others or {}).items():
            self._others.setdefault(name, []).append(torch.where(counted, values, 0.0).double().sum())
        self._read = None

    def _totals(self) -> tuple[dict[str, float], float, float]:
        """(sums by name, largest ratio, largest |d| of the present version)."""
        if self._read is None:
            values = torch.stack(self._sums).sum(0).tolist() if self._sums else [0.0] * len(self.NAMES)
            largest = torch.stack(self._maxima).amax(0).tolist() if self._maxima else [0.0, 0.0]
            self._read = dict(zip(self.NAMES, values, strict=True)), largest[0], largest[1]
        return self._read

    def merge(self, gather: Callable[[list[float]], np.ndarray]) -> None:
        """Count what other processes counted as well; ``gather`` gives the numbers of all, [processes, numbers]."""
        sums, ratio_max, abs_max = self._totals()
        others = [float(torch.stack(values).sum()) for values in self._others.values()]
        found = gather([*sums.values(), *others, ratio_max, abs_max])
        totals, largest = found[:, :-2].sum(0).tolist(), found[:, -2:].max(0).tolist()
        self._others = {
            name: [torch.tensor(total, dtype=torch.float64)]
            for name, total in zip(self._others, totals[len(self.NAMES) :], strict=True)
        }
        self._read = dict(zip(self.NAMES, totals, strict=False)), largest[0], largest[1]

    @property
    def num_current(self) -> int:
        """Tokens of the present version."""
        return int(self._totals()[0]["current"])

    @property
    def mean_abs(self) -> float:
        """Mean |d| over tokens of the present version, in nats; NaN without any."""
        sums = self._totals()[0]
        return sums["abs"] / sums["current"] if sums["current"] else math.nan

    @property
    def max_abs(self) -> float:
        """Largest |d| over tokens of the present version, in nats; 0 without any."""
        return self._totals()[2]

    def summary(self) -> dict[str, Any]:
        """The step's numbers."""
        sums, ratio_max, _ = self._totals()
        n = max(1.0, sums["tokens"])
        return {
            "ratio/mean": sums["ratio"] / n,
            "ratio/max": ratio_max,
            "ratio/kept": sums["inside"] / n,
            "ratio/capped": sums["capped"] / n,
            "entropy": sums["entropy"] / n,
            "sampler/log_ratio_abs": self.mean_abs,
            "sampler/mismatch_kl": sums["kl"] / sums["current"] if sums["current"] else math.nan,
            **{name: float(torch.stack(values).sum()) / n for name, values in self._others.items()},
        }


class FaultMeter:
    """Counts failed rollouts over the last four batches. A failed rollout has an error and an unknown reward."""

    def __init__(self, config: RLConfig):
        self.at_least, self.allowed = config.batch_size, config.max_error_fraction
        self._recent: deque[bool] = deque(maxlen=4 * config.batch_size)
        self._kinds: set[str] = set()

    def add(self, group: Group) -> None:
        """Count a group; the first failure of each kind is logged. Raises ``TooManyFaults`` above the bound."""
        errors = [record.error for record in group.rollouts if record.error is not None and math.isnan(record.reward)]
        for error in errors:
            kind = error.partition(":")[0]
            if kind not in self._kinds:
                self._kinds.add(kind)
                log.warning("a rollout of example %s failed, and is not trained: %s", group.example_id, error)
        self._recent.extend([True] * len(errors) + [False] * (len(group.rollouts) - len(errors)))
        failed, seen = sum(self._recent), len(self._recent)
        if errors and seen >= self.at_least and failed > self.allowed * seen:
            raise TooManyFaults(
                f"{failed} of the last {seen} rollouts failed, the last with {errors[-1]}; training stops "
                f"(max_error_fraction={self.allowed:g})",
                cause=errors[-1],
                count=failed,
            )


class SignalMeter:
    """Counts batches in a row that teach nothing; says so when that begins, and how many it were when it ends."""

    def __init__(self, config: RLConfig):
        self.config, self._in_a_row = config, 0

    def note_batch(self) -> None:
        """A batch with something to learn."""
        if self._in_a_row > 1:
            log.warning("%d batches in a row taught nothing; now one does again", self._in_a_row)
        self._in_a_row = 0

    def note_nothing(self, groups: Sequence[Group]) -> None:
        """A batch of ``groups`` that teach nothing. Raises ``NoLearningSignal`` after ``no_signal_steps`` of them."""
        self._in_a_row += 1
        if any(not group.is_dead(self.config) for group in groups):
            found = "all rollouts were overlong or truncated"
            advice = "Raise max_seq_len, max_tokens or max_completion_len"
        else:
            found = "no group had two different rewards"
            advice = (
                "Make the task easier or harder, raise rollouts_per_example or the temperature, or check the reward "
                "function"
            )
        histogram = reward_histogram(groups)
        shown = ", ".join(f"{value:g} x {count}" for value, count in list(histogram.items())[:8])
        if self._in_a_row == 1:
            log.warning("a batch teaches nothing: %s (rewards: %s); others are played instead", found, shown)
        limit = self.config.no_signal_steps
        if limit and self._in_a_row >= limit:
            raise NoLearningSignal(
                f"there is nothing to learn from: in each of the last {limit} batches {found} (rewards of the last: "
                f"{shown}). {advice}",
                histogram=histogram,
            )


def device_numbers(model: torch.nn.Module, tokens_per_s: float) -> dict[str, float]:
    """``memory/peak`` in bytes and, for a device that is known, ``throughput/mfu``; nothing without CUDA."""
    if not torch.cuda.is_available():
        return {}
    counts = [(deepspeed.size(parameter).numel(), parameter.requires_grad) for parameter in model.parameters()]
    parameters, trained = sum(n for n, _ in counts), sum(n for n, is_trained in counts if is_trained)
    share = flops_utilisation(parameters, trained, tokens_per_s, torch.cuda.get_device_name())
    numbers = {"memory/peak": float(torch.cuda.max_memory_allocated())}
    return numbers if share is None else numbers | {"throughput/mfu": share}


def flops_utilisation(parameters: int, trained: int, tokens_per_s: float, device: str) -> float | None:
    """Share of a device's peak that training uses; None for a device whose peak is not known here.

    A token costs two operations for each parameter forwards, two backwards, and two more for each that is trained
    (Kaplan et al. 2020, arXiv 2001.08361); attention over the context is not counted. Rows and rollouts of one process.
    """
    peak = next((flops for name, flops in PEAK_FLOPS.items() if name in device), None)
    return None if peak is None else (4 * parameters + 2 * trained) * tokens_per_s / peak


def alarms(numbers: Mapping[str, Any]) -> dict[str, str]:
    """What is out of order in a step's numbers: alarm name -> one sentence."""
    total = numbers.get("rollouts/generated", 0) or math.nan
    groups = (numbers.get("groups/live", 0) + numbers.get("groups/dead", 0)) or math.nan
    rules = {
        "mismatch": (
            numbers.get("sampler/mismatch_kl", math.nan) > 0.05,
            "sampler and trainer disagree about tokens of the same weights (sampler/mismatch_kl above 0.05)",
        ),
        "ratio": (
            numbers.get("ratio/kept", math.nan) < 0.5,
            "more than half of the tokens are too far from the policy that sampled them (ratio/kept below 0.5): lower "
            "the learning rate or max_off_policy_steps",
        ),
        "dead_groups": (
            numbers.get("groups/dead", 0) / groups > 0.8,
            "more than 80 % of the groups have equal rewards: the task is too easy or too hard for this model",
        ),
        "errors": (numbers.get("rollouts/errors", 0) / total > 0.1, "more than 10 % of the rollouts failed"),
        "fill": (
            numbers.get("packing/rows", 0) > 1 and numbers.get("packing/fill", math.nan) < 0.7,
            "rows are less than 70 % full (packing/fill): raise micro_batch_tokens",
        ),
        "waiting": (
            numbers.get("time/wait_generation", 0) > 0.8 * numbers.get("time/step", math.inf),
            "more than 80 % of the step was spent waiting for rollouts",
        ),
    }
    return {name: sentence for name, (holds, sentence) in rules.items() if holds}
