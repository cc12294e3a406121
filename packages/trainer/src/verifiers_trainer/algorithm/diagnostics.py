"""Measure how far the trained policy is from the policy that sampled, over the tokens of an
optimizer step.

The numbers go to ``metrics.jsonl``; they change neither loss nor batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verifiers_trainer.algorithm.packing import PackedRow
from verifiers_trainer.algorithm.samples import NOT_SAMPLED, carries_loss

MIN_COMPARED = 8
"""Tokens below which nothing is said of a disagreement: of one token the mean is its own error."""


class RatioMeter:
    """Sums over the trained tokens of a step, row by row; ``summary`` gives the means. d = log π -
    log μ.

    ``sampler/*`` are over the answers that the present policy ``version`` sampled whole, where d
    should be zero: mean
    |d| and the estimate e^d - d - 1 of KL(μ‖π) (J. Schulman, "Approximating KL divergence", 2020). An answer that was
    begun earlier follows its own beginning as other weights computed it. ``ratio/kept`` is the
    share of tokens inside the ``bounds``, ``ratio/capped`` the share above ``cap``. The sums stay
    on the device until ``summary`` asks for them, so that counting a row waits for nothing.
    """

    NAMES = tuple(
        "tokens entropy ratio inside capped current abs kl d d2 x x2 xd xd2 x2d2".split()
    )  # x: the mean of log π and log μ

    def __init__(
        self,
        version: int,
        bounds: tuple[float, float] = (0.125, 8.0),
        cap: float = 5.0,
        num_tokens: int = 0,
        device: torch.device | str = "cpu",
    ):
        """``num_tokens``: of the rows to come, whose values are kept in blocks of that size. They
        outlive the activations of their row, and small tensors among these would keep the C
        library's heap from shrinking."""
        self.version, self.bounds, self.cap = version, bounds, cap
        self._d = torch.empty(num_tokens, dtype=torch.float64, device=device)
        self._current = torch.empty(num_tokens, dtype=torch.bool, device=device)
        self._num_kept = 0
        self._sums: list[Tensor] = []
        self._maxima: list[Tensor] = []
        self._extra_terms: dict[str, list[Tensor]] = {}
        self._read: tuple[dict[str, float], float, float] | None = None
        self.rows: list[tuple[PackedRow | Mapping[str, Tensor], Tensor, Tensor]] = []
        """(row, d [T], whether the present version sampled the token [T]) of this process."""
        self.is_shared = False
        """Whether it counts the tokens of all processes."""

    def add(
        self,
        log_pi: Tensor,
        log_mu: Tensor,
        entropy: Tensor | None,
        row: Mapping[str, Tensor],
        values_by_name: Mapping[str, Tensor] | None = None,
        packed: PackedRow | None = None,
    ) -> None:
        """Count a row of T tokens; the mean of each of ``values_by_name`` [T] is in the summary.

        ``packed``: the arrays that the tensors of ``row`` are of, kept in their place.
        """
        counted = carries_loss(row["loss_mask"], row["weight"])
        current = counted & (_oldest(row) == self.version)
        d = torch.where(counted, log_pi - log_mu, 0.0).double().clamp(-20, 20)
        ratio = d.exp()
        inside = (ratio >= self.bounds[0]) & (ratio <= self.bounds[1])
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
        same = torch.where(current, d, 0.0)
        x = torch.where(current, (log_pi + log_mu) / 2, 0.0).double().clamp(-50, 0)
        terms = (same, same**2, x, x**2, x * same, x * same**2, (x * same) ** 2)
        sums += [term.sum() for term in terms]
        self._keep(row if packed is None else packed, same, current)
        self._sums.append(torch.stack([value.double() for value in sums]))
        maxima = [torch.where(counted, ratio, 0.0).max(), torch.where(current, d.abs(), 0.0).max()]
        self._maxima.append(torch.stack(maxima))
        for name, values in (values_by_name or {}).items():
            self._extra_terms.setdefault(name, []).append(
                torch.where(counted, values, 0.0).double().sum()
            )
        self._read = None

    def _keep(self, row: PackedRow | Mapping[str, Tensor], d: Tensor, current: Tensor) -> None:
        start, end = self._num_kept, self._num_kept + len(d)
        if end <= len(self._d):
            self._d[start:end], self._current[start:end] = d, current
            d, current, self._num_kept = self._d[start:end], self._current[start:end], end
        self.rows.append((row, d, current))

    def _totals(self) -> tuple[dict[str, float], float, float]:
        """(sums by name, largest ratio, largest |d| of the present version)."""
        if self._read is None:
            values, largest = [0.0] * len(self.NAMES), [0.0, 0.0]
            if self._sums:
                values = torch.stack(self._sums).sum(0).tolist()
                largest = torch.stack(self._maxima).amax(0).tolist()
            self._read = dict(zip(self.NAMES, values, strict=True)), largest[0], largest[1]
        return self._read

    def merge(self, gather: Callable[[list[float]], np.ndarray]) -> None:
        """Count what other processes counted too; ``gather`` gives all numbers [processes, n]."""
        self.is_shared = True
        sums, ratio_max, abs_max = self._totals()
        sums_by_name = [float(torch.stack(values).sum()) for values in self._extra_terms.values()]
        gathered = gather([*sums.values(), *sums_by_name, ratio_max, abs_max])
        totals, largest = gathered[:, :-2].sum(0).tolist(), gathered[:, -2:].max(0).tolist()
        self._extra_terms = {
            name: [torch.tensor(total, dtype=torch.float64)]
            for name, total in zip(self._extra_terms, totals[len(self.NAMES) :], strict=True)
        }
        self._read = dict(zip(self.NAMES, totals, strict=False)), largest[0], largest[1]

    def extend(self, later: RatioMeter) -> None:
        """Count what ``later``, of the same step and the same processes, counted too."""
        (sums, *largest), (more, *larger) = self._totals(), later._totals()
        ratio_max, abs_max = map(max, largest, larger)
        for name, values in later._extra_terms.items():
            self._extra_terms.setdefault(name, []).extend(values)
        self._sums, self._maxima = self._sums + later._sums, self._maxima + later._maxima
        self._read = {name: sums[name] + more[name] for name in sums}, ratio_max, abs_max
        self.rows += later.rows

    def of_adapter(self, number: int) -> RatioMeter:
        """What this process has counted of the rows of one adapter (``PackedRow.adapter``)."""
        part = RatioMeter(self.version, self.bounds, self.cap)
        for sums, maxima, entry in zip(self._sums, self._maxima, self.rows, strict=True):
            row = entry[0]
            adapter = row.get("adapter") if isinstance(row, Mapping) else row.adapter
            if adapter is not None and int(adapter[0]) == number:
                part._sums.append(sums)
                part._maxima.append(maxima)
                part.rows.append(entry)
        return part

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

    def disagreement(self, noise: float) -> float:
        """How far sampler and trainer are apart on the tokens of the present version, as a multiple
        of the ``noise`` (nats per token) that rounding explains; NaN, unknown, of fewer than
        ``MIN_COMPARED`` tokens.

        The larger of two: the mean |d|, less its standard error, so that no single token decides;
        and ``sharpness``, in units of 1 % or of twice its standard error.
        """
        sums, n = self._totals()[0], self.num_current
        if n < MIN_COMPARED:
            return math.nan
        apart = max(0.0, self.mean_abs - math.sqrt(sums["d2"]) / n) / noise
        slope, error = self.sharpness()
        return max(apart, abs(slope) / max(0.01, 2 * error))

    def sharpness(self) -> tuple[float, float]:
        """Slope of d over log-probability, with its standard error (White 1980, of no slope): b
        if the tokens look sampled at (1 + b/2) / (1 - b/2) times the temperature trained at."""
        sums, n = self._totals()[0], max(1, self.num_current)
        mean = sums["x"] / n
        spread = sums["x2"] - n * mean**2
        if spread <= 1e-6 * n:
            return 0.0, math.inf
        around = sums["x2d2"] - 2 * mean * sums["xd2"] + mean**2 * sums["d2"]
        return (sums["xd"] - mean * sums["d"]) / spread, math.sqrt(max(0.0, around)) / spread

    def furthest(
        self, count: int = 3
    ) -> tuple[dict[int, float], list[tuple[int, int, int, float]]]:
        """Of this process's tokens of the present version: mean |d| by number of the answer within
        its sample, and (token id, place in the sample, answer, d) of those furthest apart."""
        by_answer: dict[int, list[float]] = {}
        tokens = []
        for packed, d, current in self.rows:
            row = packed if isinstance(packed, Mapping) else packed.to_tensors(d.device)
            sampled, sample_of = row["version"] != NOT_SAMPLED, row["seq_ids"]
            starts = sampled.clone()
            starts[1:] &= ~sampled[:-1] | (sample_of[1:] != sample_of[:-1])
            answers = starts.cumsum(0)
            first = answers.new_full((int(sample_of.max()) + 1,), len(answers))
            first.scatter_reduce_(0, sample_of[sampled], answers[sampled], "amin")
            for index in current.nonzero().flatten().tolist():
                answer = int(answers[index] - first[sample_of[index]]) + 1
                by_answer.setdefault(answer, []).append(abs(float(d[index])))
                ids = int(row["token_ids"][index]), int(row["position_ids"][index])
                tokens.append((*ids, answer, float(d[index])))
        tokens.sort(key=lambda token: -abs(token[3]))
        means = {answer: sum(apart) / len(apart) for answer, apart in sorted(by_answer.items())}
        return means, tokens[:count]

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
            **{name: float(torch.stack(v).sum()) / n for name, v in self._extra_terms.items()},
        }


def _oldest(row: Mapping[str, Tensor]) -> Tensor:
    """Oldest version of the answer that each token [T] is in: a sample's run of sampled tokens."""
    version = row["version"]
    newest = torch.iinfo(version.dtype).max
    oldest = version.new_full((len(version) + 1,), newest)
    answer, sampled = _answers(row), version != NOT_SAMPLED
    return oldest.scatter_reduce(0, answer, torch.where(sampled, version, newest), "amin")[answer]


def _answers(row: Mapping[str, Tensor]) -> Tensor:
    """Number of the answer that each token [T] is in or before."""
    sample, sampled = row["seq_ids"], row["version"] != NOT_SAMPLED
    begins = torch.cat([sampled.new_ones(1), ~sampled[1:] | (sample[1:] != sample[:-1])])
    return begins.cumsum(0)
