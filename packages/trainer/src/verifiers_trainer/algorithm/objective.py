"""What is minimised for one row: the policy loss, corrected for who sampled, and the penalty to a reference policy.

    loss_t = correction_t · policy_loss_t + beta · k(π, ref)_t

The formulas are ``losses``'; the weights of the tokens are ``aggregation``'s; where the log-probabilities of the
reference and of the policy at the time of the batch come from, ``anchors``'. With ``loss="ppo"``, ``anchor=
"recomputed"`` and ``tis_cap`` this is decoupled PPO (arXiv 2110.00641): the clip is around the policy of the batch, and
the weight min(o/μ, C) accounts for the one that sampled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from verifiers_trainer.algorithm.losses import LossInput, correction, kl_penalty


@dataclass(frozen=True, slots=True)
class TokenLosses:
    """Numbers of one row, each [T]: what is minimised, and what to log of it."""

    losses: Tensor
    metrics: Mapping[str, Tensor]
    """``kl_ref`` with a penalty, ``correction/factor`` with a correction; without gradient."""


@dataclass(frozen=True, slots=True)
class Objective:
    """A loss, its corrections and a penalty: ``Objective(resolve_loss("ppo"), {"tis_cap": 2.0}, beta=0.01)``."""

    loss: Callable[[LossInput], Tensor]
    corrections: Mapping[str, Any] = field(default_factory=dict)
    """Parameters of ``losses.correction``: what weighs or drops tokens by how far the trainer is from the sampler."""
    beta: float = 0.0
    kl_type: str = "k3"

    @classmethod
    def of(cls, loss: Callable[[LossInput], Tensor], config: Any) -> Objective:
        """The objective that the settings ask for."""
        corrections = {
            "tis_cap": config.tis_cap,
            "sequence_mask_cap": config.sequence_mask_cap,
            "geo_mask": config.geo_mask,
            "opsm_delta": config.opsm_delta,
        }
        asked = {name: value for name, value in corrections.items() if value is not None}
        return cls(loss, asked, config.beta, config.kl_type)

    def __call__(self, tokens: LossInput, log_ref: Tensor | None = None) -> TokenLosses:
        """The losses of a row; ``log_ref`` [T] is needed when there is a penalty."""
        losses, metrics = self.loss(tokens), {}
        if self.corrections:
            factor = correction(tokens, **self.corrections)
            kept = factor > 0  # a dropped sequence may hold what no number times zero removes
            losses = torch.where(kept, losses, torch.zeros_like(losses)) * factor
            metrics["correction/factor"] = factor
        if self.beta:
            assert log_ref is not None
            penalty = kl_penalty(tokens.log_pi, log_ref, tokens.loss_mask, self.kl_type)
            losses = losses + self.beta * penalty
            metrics["kl_ref"] = penalty.detach()
        return TokenLosses(losses, metrics)
