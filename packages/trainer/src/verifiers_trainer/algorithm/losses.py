"""Per-token policy losses: log-probabilities, advantages and a mask in; one number per token out, to be minimised.

Every function here is pure. Tensors are one packed row, shape [T]; entry t describes token t given the tokens before
it. Notation: π the trained policy, μ the policy that sampled, o the policy when the batch was built; ρ = π/μ;
r = π/o when ``log_old`` is given, else r = ρ; A the advantage; sg stops the gradient. Whatever stands at a masked
position, NaN and -inf included, has no effect on value or gradient. Where π = μ every loss has gradient exactly -A
with respect to log π.

Reduction is not done here (`aggregation` computes the weights), nor are advantages (`advantages`). Log-ratios are
clamped to ±20 before ``exp``; inside that range the formulas are exactly the papers'.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from verifiers.errors import ConfigError
from verifiers_trainer.algorithm.registry import Registry, check_parameters, keyword_parameters

MAX_LOG_RATIO = 20.0

LOSSES = Registry("loss")


@dataclass(frozen=True, slots=True)
class LossInput:
    """What a loss sees of one row; every tensor has shape [T].

    Example, one prompt token and two sampled ones, the second twice as likely as when it was sampled::

        LossInput(log_pi=tensor([0., -.69, -.69]), log_mu=tensor([0., -.69, -1.39]), advantage=tensor([0., 1., 1.]),
                  loss_mask=tensor([False, True, True]), seq_ids=tensor([0, 0, 0]))
    """

    log_pi: Tensor  # the only one that carries a gradient
    log_mu: Tensor
    advantage: Tensor
    loss_mask: Tensor  # bool
    seq_ids: Tensor  # integers from 0: which sample of the row a token belongs to
    log_old: Tensor | None = None

    def without_masked(self) -> LossInput:
        """The same row with zeros at masked positions, cut off from whatever stood there."""

        def keep(values: Tensor) -> Tensor:
            return torch.where(self.loss_mask, values, values.new_zeros(()))

        old = None if self.log_old is None else keep(self.log_old)
        return replace(
            self, log_pi=keep(self.log_pi), log_mu=keep(self.log_mu), advantage=keep(self.advantage), log_old=old
        )

    @property
    def log_rho(self) -> Tensor:
        """log ρ = log π - log μ, clamped."""
        return _clamp(self.log_pi - self.log_mu)

    @property
    def log_r(self) -> Tensor:
        """log r: against ``log_old`` when there is one, else against ``log_mu``; clamped."""
        return _clamp(self.log_pi - (self.log_mu if self.log_old is None else self.log_old))


LossFunction = Callable[..., Tensor]


def register_loss(name: str) -> Callable[[LossFunction], LossFunction]:
    """A decorator: enter ``function(row: LossInput, *, parameters) -> [T]`` under ``name``, made safe for masks."""

    def enter(function: LossFunction) -> LossFunction:
        return LOSSES.register(name)(_masked(function))

    return enter


def resolve_loss(choice: str | LossFunction, **parameters: Any) -> Callable[[LossInput], Tensor]:
    """The loss for a registered name, "package.module:function" or a function, with its parameters bound.

    The result maps a `LossInput` to losses [T], zero where masked. Raises ConfigError for an unknown name or
    parameter.

    >>> loss = resolve_loss("ppo", epsilon_low=0.2)
    """
    function = LOSSES.resolve(choice)
    check_parameters("loss", str(choice), function, parameters)
    return functools.partial(_masked(function), **parameters)


def loss_parameters(choice: str | LossFunction) -> frozenset[str] | None:
    """Names of the parameters a loss takes; None when it takes any keyword."""
    return keyword_parameters(LOSSES.resolve(choice))


def kl_penalty(log_pi: Tensor, log_ref: Tensor, loss_mask: Tensor, kind: str = "k3") -> Tensor:
    """Estimate of KL(π‖ref) per token [T], zero where masked, from d = log ref - log π.

    k1 = -d, k2 = d²/2, k3 = e^d - d - 1. Source: J. Schulman, "Approximating KL divergence" (2020).
    Raises ConfigError for another ``kind``.
    """
    if kind not in KL_TYPES:
        raise ConfigError(f"unknown kl_type {kind!r}; known: {', '.join(KL_TYPES)}")
    zero = torch.zeros_like(log_pi)
    d = _clamp(torch.where(loss_mask, log_ref, zero) - torch.where(loss_mask, log_pi, zero))
    return torch.where(loss_mask, KL_TYPES[kind](d), zero)


KL_TYPES: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": lambda d: -d,
    "k2": lambda d: d.square() / 2,
    "k3": lambda d: torch.expm1(d) - d,
}


def correction(
    row: LossInput,
    *,
    tis_cap: float | None = None,
    sequence_mask_cap: float | None = None,
    geo_mask: tuple[float, float] | None = None,
    opsm_delta: float | None = None,
) -> Tensor:
    """Factor per token [T], without gradient, for the gap between sampler and trainer; 1 when nothing is asked for.

    With o = ``log_old`` (sg(log π) when absent): ``tis_cap`` C gives min(o/μ, C). A whole sample is dropped (0) when
    the product of o/μ exceeds ``sequence_mask_cap``, when exp(mean log o/μ) lies outside ``geo_mask``, or when its
    mean advantage is negative and mean(log μ - log π) exceeds ``opsm_delta``.
    """
    row = row.without_masked()
    log_pi = row.log_pi.detach()
    gap = _clamp((log_pi if row.log_old is None else row.log_old) - row.log_mu)
    factor = torch.ones_like(gap) if tis_cap is None else gap.exp().clamp(max=tis_cap)
    keep = row.loss_mask
    if sequence_mask_cap is not None:
        keep = keep & (_sequence_sum(row, gap) <= math.log(sequence_mask_cap))
    if geo_mask is not None:
        mean = _sequence_mean(row, gap)
        keep = keep & (mean >= math.log(geo_mask[0])) & (mean <= math.log(geo_mask[1]))
    if opsm_delta is not None:
        drifted = _sequence_mean(row, row.log_mu - log_pi) > opsm_delta
        keep = keep & ~(drifted & (_sequence_mean(row, row.advantage) < 0))
    return torch.where(keep, factor, torch.zeros_like(factor))


# --- shared pieces ----------------------------------------------------------------------------------------------


def _clamp(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def _masked(function: LossFunction) -> LossFunction:
    if getattr(function, "masks_itself", False):
        return function

    @functools.wraps(function)
    def masked(row: LossInput, **parameters: Any) -> Tensor:
        losses = function(row.without_masked(), **parameters)
        return torch.where(row.loss_mask, losses, torch.zeros_like(losses))

    masked.masks_itself = True  # type: ignore[attr-defined]
    return masked


def _keep(row: LossInput, losses: Tensor, low: float, high: float) -> Tensor:
    rho = row.log_rho.detach().exp()
    return torch.where((rho >= low) & (rho <= high), losses, torch.zeros_like(losses))


def _trust_region(row: LossInput, keep: Tensor, penalty: float, ratio_cap: float | None) -> Tensor:
    rho = row.log_rho.exp()
    gain = rho if ratio_cap is None else rho.detach().clamp(max=ratio_cap) * row.log_pi
    return -torch.where(keep, gain * row.advantage, torch.zeros_like(gain)) + penalty * row.log_rho.square()


def _sequence_sum(row: LossInput, values: Tensor) -> Tensor:
    """Sum of the kept ``values`` of a token's sample, at each of its tokens [T]."""
    kept = torch.where(row.loss_mask, values, torch.zeros_like(values))
    sums = kept.new_zeros(int(row.seq_ids.max()) + 1).index_add(0, row.seq_ids, kept)
    return sums[row.seq_ids]


def _sequence_mean(row: LossInput, values: Tensor) -> Tensor:
    return _sequence_sum(row, values) / _sequence_sum(row, torch.ones_like(values)).clamp(min=1)


# --- the losses -------------------------------------------------------------------------------------------------


@register_loss("ppo")
def ppo(
    row: LossInput,
    *,
    epsilon_low: float = 0.2,
    epsilon_high: float | None = None,
    delta: float | None = None,
    dual_clip: float | None = None,
) -> Tensor:
    """-min(r·A, clip(r, 1-ε, 1+ε_high)·A). ``delta`` bounds the unclipped r from above; ``dual_clip`` c > 1 bounds
    the loss of a negative advantage by -c·A.

    Source: GRPO, arXiv 2402.03300 (objective of PPO, 1707.06347); clip-higher, 2503.14476; dual clip, 1912.09729.
    """
    r = row.log_r.exp()
    high = epsilon_low if epsilon_high is None else epsilon_high
    unclipped = r if delta is None else r.clamp(max=delta)
    loss = -torch.minimum(unclipped * row.advantage, r.clamp(1 - epsilon_low, 1 + high) * row.advantage)
    if dual_clip is None:
        return loss
    return torch.where(row.advantage < 0, torch.minimum(loss, -dual_clip * row.advantage), loss)


@register_loss("cispo")
def cispo(
    row: LossInput,
    *,
    ratio_floor: float = 0.0,
    ratio_cap: float = 5.0,
    mask_ratio_low: float = 0.0,
    mask_ratio_high: float = math.inf,
) -> Tensor:
    """-sg(clip(ρ, floor, cap))·A·log π: every token keeps a gradient, none a large one; then the keep-mask on ρ.

    Source: MiniMax-M1, arXiv 2506.13585, equation 4.
    """
    weight = row.log_rho.detach().exp().clamp(ratio_floor, ratio_cap)
    return _keep(row, -weight * row.advantage * row.log_pi, mask_ratio_low, mask_ratio_high)


@register_loss("masked_is")
def masked_is(row: LossInput, *, mask_ratio_low: float = 0.125, mask_ratio_high: float = 8.0) -> Tensor:
    """-ρ·A where low <= ρ <= high, else nothing.

    Source: IcePop in Ring-1T, arXiv 2510.18855 (there with [0.5, 5]).
    """
    return _keep(row, -row.log_rho.exp() * row.advantage, mask_ratio_low, mask_ratio_high)


@register_loss("importance_sampling")
def importance_sampling(row: LossInput, *, mask_ratio_low: float = 0.0, mask_ratio_high: float = math.inf) -> Tensor:
    """-ρ·A, the unbiased per-token estimate; then the keep-mask on ρ.

    Source: off-policy policy gradient, Precup et al. 2000.
    """
    return _keep(row, -row.log_rho.exp() * row.advantage, mask_ratio_low, mask_ratio_high)


@register_loss("reinforce")
def reinforce(row: LossInput) -> Tensor:
    """-A·log π, no correction for who sampled. Source: Williams 1992."""
    return -row.advantage * row.log_pi


@register_loss("dppo_tv")
def dppo_tv(
    row: LossInput,
    *,
    delta_low: float = 0.2,
    delta_high: float = 0.2,
    log_ratio_penalty: float = 1e-3,
    ratio_cap: float | None = 5.0,
) -> Tensor:
    """-k·A·sg(min(ρ, cap))·log π + τ·log²ρ, k = 0 once the probability has moved more than δ in the direction of A.

    Without a cap (None) the first term is -k·A·ρ; then one rare token with A < 0 can carry a gradient of any size.
    Source: DPPO with total variation, arXiv 2602.04879.
    """
    with torch.no_grad():
        shift = row.log_pi.exp() - row.log_mu.exp()
        blocked = ((row.advantage > 0) & (shift > delta_high)) | ((row.advantage < 0) & (shift < -delta_low))
    return _trust_region(row, ~blocked, log_ratio_penalty, ratio_cap)


@register_loss("dppo_kl")
def dppo_kl(
    row: LossInput, *, delta: float = 0.05, log_ratio_penalty: float = 0.0, ratio_cap: float | None = None
) -> Tensor:
    """As `dppo_tv`, with k = 0 where the Bernoulli KL(μ‖π) of the token exceeds δ and π moves further away.

    Source: DPPO with binary KL, arXiv 2602.04879.
    """
    with torch.no_grad():
        pi, mu = row.log_pi.exp(), row.log_mu.exp()
        rest_pi, rest_mu = (1 - pi).clamp(min=1e-12), (1 - mu).clamp(min=0)
        divergence = mu * (row.log_mu - row.log_pi) + torch.xlogy(rest_mu, rest_mu / rest_pi)
        away = ((row.advantage > 0) & (pi > mu)) | ((row.advantage < 0) & (pi < mu))
    return _trust_region(row, ~((divergence > delta) & away), log_ratio_penalty, ratio_cap)


@register_loss("ipo")
def ipo(row: LossInput, *, delta: float = 0.1, log_ratio_penalty: float = 1e-3) -> Tensor:
    """-[|π - μ| <= δ]·A·ρ + τ·log²ρ: the two-sided sibling of `dppo_tv`. The bound is inclusive up to 1e-6."""
    with torch.no_grad():
        near = (row.log_pi.exp() - row.log_mu.exp()).abs() <= delta + 1e-6
    return _trust_region(row, near, log_ratio_penalty, None)


@register_loss("gspo")
def gspo(row: LossInput, *, epsilon_low: float = 3e-4, epsilon_high: float = 4e-4) -> Tensor:
    """max(-s·A, -clip(s, 1-ε, 1+ε_high)·A) with the length-normalised ratio of the whole sample,
    s = exp(sg(mean log r) + log π - sg(log π)). Meant for aggregation "sequence_mean".

    Source: GSPO-token, arXiv 2507.18071, equation 14.
    """
    log_s = _sequence_mean(row, row.log_r.detach())
    s = (log_s + row.log_pi - row.log_pi.detach()).exp()
    return torch.maximum(-s * row.advantage, -s.clamp(1 - epsilon_low, 1 + epsilon_high) * row.advantage)


@register_loss("sapo")
def sapo(row: LossInput, *, temperature_pos: float = 1.0, temperature_neg: float = 1.05) -> Tensor:
    """-(4/τ)·σ(τ(r-1))·A: a smooth gate in place of the clip, τ by the sign of A. Source: SAPO, arXiv 2511.20347."""
    positive = row.advantage > 0
    tau = torch.where(positive, temperature_pos, temperature_neg).to(row.advantage.dtype)
    return -4 / tau * torch.sigmoid(tau * (row.log_r.exp() - 1)) * row.advantage


@register_loss("vespo")
def vespo(
    row: LossInput, *, k_pos: float = 2.0, lambda_pos: float = 3.0, k_neg: float = 3.0, lambda_neg: float = 2.0
) -> Tensor:
    """-sg(exp(λ + k·log W - λ·W))·A·log π with W the ratio of the whole sample, log W in [log 1e-8, 20].

    Source: VESPO, variational sequence-level soft policy optimisation; (k, λ) by the sign of A.
    """
    positive = row.advantage > 0
    dtype = row.advantage.dtype
    k = torch.where(positive, k_pos, k_neg).to(dtype)
    lam = torch.where(positive, lambda_pos, lambda_neg).to(dtype)
    log_w = _sequence_sum(row, row.log_r.detach()).clamp(math.log(1e-8), MAX_LOG_RATIO)
    return -(lam + k * log_w - lam * log_w.exp()).exp() * row.advantage * row.log_pi


@register_loss("dro")
def dro(row: LossInput, *, beta: float = 0.1) -> Tensor:
    """-A·log π + β/2·log²r: regression towards the anchor. Source: DRO, arXiv 2405.19107, per token."""
    return -row.advantage * row.log_pi + beta / 2 * row.log_r.square()
