"""How far the trained policy is from the one that sampled: the numbers to watch in every step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


class RatioMeter:
    """Sums over the trained tokens of a step, row by row; ``summary`` gives the means. d = log π - log μ.

    ``sampler/*`` are over tokens sampled by the present policy version, where d should be zero: mean |d| and the
    estimate e^d - d - 1 of KL(μ‖π) (J. Schulman, "Approximating KL divergence", 2020).
    """

    def __init__(self, version: int):
        self.version = version
        self.num_tokens, self.num_current = 0, 0
        self.entropy_sum = self.ratio_sum = self.ratio_max = 0.0
        self.abs_sum = self.kl_sum = self.max_abs = 0.0

    def add(self, log_pi: Tensor, log_mu: Tensor, entropy: Tensor | None, row: Mapping[str, Tensor]) -> None:
        """Count one row of T tokens."""
        kept = row["loss_mask"] & (row["weight"] != 0)
        if not kept.any():
            return
        d = (log_pi - log_mu)[kept].double().clamp(-20, 20)
        ratio = d.exp()
        self.num_tokens += d.numel()
        self.ratio_sum += float(ratio.sum())
        self.ratio_max = max(self.ratio_max, float(ratio.max()))
        if entropy is not None:
            self.entropy_sum += float(entropy[kept].sum())
        current = d[row["version"][kept] == self.version]
        if current.numel():
            self.num_current += current.numel()
            self.abs_sum += float(current.abs().sum())
            self.max_abs = max(self.max_abs, float(current.abs().max()))
            self.kl_sum += float(torch.special.expm1(current).sub(current).sum())

    @property
    def mean_abs(self) -> float:
        """Mean |d| over tokens of the present version, in nats; NaN without any."""
        return self.abs_sum / self.num_current if self.num_current else float("nan")

    def summary(self) -> dict[str, Any]:
        """The step's numbers."""
        n = max(1, self.num_tokens)
        return {
            "ratio/mean": self.ratio_sum / n,
            "ratio/max": self.ratio_max,
            "entropy": self.entropy_sum / n,
            "sampler/log_ratio_abs": self.mean_abs,
            "sampler/mismatch_kl": self.kl_sum / self.num_current if self.num_current else float("nan"),
        }
