"""Compute the loss of every token of a packed row: policy loss, correction for the sampler, penalty
to a reference.

    loss_t = correction_t · policy_loss_t + beta · k(π, ref)_t - entropy_coef · H(π)_t      (``Objective``)

That is component "rl". Tokens of the others have another loss: "ce" is ``sft``, "ref_kl"
``distill`` or ``gkd``.

Tensors are one packed row, shape [T]; entry t describes token t given the tokens before it.
Notation: π the trained policy, μ the policy that sampled, o the policy when the batch was built; ρ
= π/μ; r = π/o when ``log_old`` is given, else r = ρ; A the advantage; sg stops the gradient. Values
at masked positions, NaN and -inf included, have no effect on value or gradient. Where π = μ every
loss has gradient exactly -A with respect to log π.

With ``loss="ppo"``, ``anchor="recomputed"`` and ``tis_cap`` this is decoupled PPO (arXiv
2110.00641): the clip is around the policy of the batch, and the weight min(o/μ, C) accounts for the
policy that sampled.

``aggregation`` computes the weights of the tokens, ``advantages`` the advantages. Log-ratios are
clamped to ±20 before ``exp``; inside that range the formulas are exactly those of the papers.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from verifiers.errors import ConfigError
from verifiers_trainer.algorithm.registry import (
    Registry,
    call,
    check_parameters,
    keyword_parameters,
    name_and_position,
)
from verifiers_trainer.algorithm.samples import COMPONENTS, NOT_SAMPLED

MAX_LOG_RATIO = 20.0

LOSSES = Registry("loss")


@dataclass(frozen=True, slots=True)
class LossInput:
    """The arguments of a loss: one row, every tensor of shape [T], log-probabilities in nats.

    Example, one prompt token and two sampled tokens, the second twice as likely as when it was
    sampled::

        LossInput(log_pi=tensor([0., -.69, -.69]), log_mu=tensor([0., -.69, -1.39]), advantage=tensor([0., 1., 1.]),
                  loss_mask=tensor([False, True, True]), seq_ids=tensor([0, 0, 0]))
    """

    log_pi: Tensor  # float [T], the only tensor that carries a gradient
    log_mu: Tensor  # float [T]
    advantage: Tensor  # float [T]
    loss_mask: Tensor  # bool [T]
    seq_ids: Tensor  # int64 [T], from 0: which sample of the row a token belongs to
    log_old: Tensor | None = None  # float [T]
    log_ref: Tensor | None = None  # float [T], under the reference policy, or the teacher
    component: Tensor | None = None  # int64 [T], index in COMPONENTS; None = 0 throughout
    reverse_kl: Tensor | None = (
        None  # float [T], KL(π‖teacher) over the vocabulary; it carries a gradient too
    )
    forward_kl: Tensor | None = None  # float [T], KL(teacher‖π)
    entropy: Tensor | None = None  # float [T], H(π) over the vocabulary

    @classmethod
    def of(
        cls,
        row: Mapping[str, Tensor],
        log_pi: Tensor,
        anchor: str = "sampler",
        kl: Sequence[Tensor | None] = (),
        entropy: Tensor | None = None,
    ) -> LossInput:
        """The tensors of a ``PackedRow`` beside the trained policy's log-probabilities ``log_pi``
        [T].

        ``anchor="recomputed"`` gives ``log_old``: the policy when the batch was built, which is the
        trained policy while the row holds no ``old_logprobs``. That policy also replaces μ for
        trained text that no policy sampled.
        """
        log_old = row.get("old_logprobs", log_pi.detach())
        log_mu = torch.where(row["version"] != NOT_SAMPLED, row["sampler_logprobs"], log_old)
        recomputed = log_old if anchor == "recomputed" else None
        terms = log_pi, log_mu, row["advantage"], row["loss_mask"], row["seq_ids"], recomputed
        read = row.get("reference_logprobs"), row.get("component")
        reverse_kl, forward_kl = kl or (None, None)
        return cls(*terms, *read, reverse_kl, forward_kl, entropy)

    def without_masked(self) -> LossInput:
        """The same row with zeros at masked positions, without gradient to the values that were
        there."""
        names = "log_pi log_mu advantage log_old log_ref reverse_kl forward_kl entropy".split()
        masked = {
            name: torch.where(self.loss_mask, tensor, tensor.new_zeros(()))
            for name in names
            if (tensor := getattr(self, name)) is not None
        }
        return replace(self, **masked)

    @property
    def log_rho(self) -> Tensor:
        """log ρ = log π - log μ, clamped."""
        return _clamp(self.log_pi - self.log_mu)

    @property
    def log_r(self) -> Tensor:
        """log r: against ``log_old`` if there is any, else against ``log_mu``; clamped."""
        return _clamp(self.log_pi - (self.log_mu if self.log_old is None else self.log_old))


LossFunction = Callable[..., Tensor]


def register_loss(name: str) -> Callable[[LossFunction], LossFunction]:
    """A decorator: register ``function(row, *, parameters) -> losses [T]``, masked; or a class of
    which each run has an object that is called like it, and may have a state (``state``)."""

    def add(loss: LossFunction) -> LossFunction:
        return LOSSES.register(name)(loss if isinstance(loss, type) else _masked(loss))

    return add


def resolve_loss(choice: str | LossFunction, **parameters: object) -> Callable[[LossInput], Tensor]:
    """The loss for a registered name, "package.module:function" or a function, with its parameters
    bound.

    Registered names are those of ``LOSSES`` and of ``OBJECTIVES``. The result maps a `LossInput` to
    losses [T], zero where masked. *Raises* ConfigError for an unknown name or parameter.

    >>> loss = resolve_loss("ppo", epsilon_low=0.2)
    """
    function = function_of(choice)
    check_parameters("loss", str(choice), function, parameters)
    if isinstance(function, type):
        function = function()
    is_masked = any(function is registered for registered in LOSSES.values())
    return functools.partial(function if is_masked else _masked(function), **parameters)


def loss_parameters(choice: str | LossFunction) -> frozenset[str] | None:
    """Names of the parameters a loss takes; None when it takes any keyword."""
    return keyword_parameters(function_of(choice))


def function_of(choice: str | LossFunction) -> LossFunction:
    """The function behind a name of ``resolve_loss``, without parameters. *Raises* ConfigError."""
    objective = named_objective(choice)
    return LOSSES.resolve(choice if objective is None else objective.loss, OBJECTIVES)


def _per_token(losses: object, function: LossFunction, row: LossInput) -> Tensor:
    """The losses of a function. *Raises* ConfigError for another shape than [T], as a mean or a sum
    would broadcast and train something else; and for losses that no gradient flows through."""
    if isinstance(losses, Tensor) and losses.shape == row.log_pi.shape:
        if row.log_pi.requires_grad and not losses.requires_grad:
            raise ConfigError(
                f"the loss {name_and_position(function)} returned a tensor without a gradient:"
                " compute it from log_pi, without detach(), item() or no_grad",
                key="loss",
            )
        return losses
    returned = (
        f"shape {list(losses.shape)}" if isinstance(losses, Tensor) else type(losses).__name__
    )
    raise ConfigError(
        f"the loss {name_and_position(function)} returned {returned} for"
        f" {len(row.log_pi)} tokens: return a tensor with one number per token, without mean or"
        " sum; the setting aggregation combines them",
        key="loss",
    )


def kl_penalty(log_pi: Tensor, log_ref: Tensor, loss_mask: Tensor, kind: str = "k3") -> Tensor:
    """Estimate of KL(π‖ref) per token [T], zero where masked, from d = log ref - log π.

    k1 = -d, k2 = d²/2, k3 = e^d - d - 1. Source: J. Schulman, "Approximating KL divergence" (2020).
    *Raises* ConfigError for another ``kind``.
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
    """Factor per token [T], without gradient, for the gap between sampler and trainer; 1 without
    any option.

    With log o = ``log_old`` (sg(log π) when absent): ``tis_cap`` C gives min(o/μ, C). A whole
    sample is dropped (0) when the product of o/μ exceeds ``sequence_mask_cap``, when exp(mean log
    o/μ) lies outside ``geo_mask``, or when its mean advantage is negative and mean(log μ - log π)
    exceeds ``opsm_delta``.
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


# --- shared pieces --------------------------------------------------------------------------------


def _clamp(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def _masked(function: LossFunction) -> LossFunction:
    @functools.wraps(function)
    def masked(row: LossInput, **parameters: object) -> Tensor:
        losses = call("loss", function, row.without_masked(), **parameters)
        losses = _per_token(losses, function, row)
        return torch.where(row.loss_mask, losses, torch.zeros_like(losses))

    return masked


def _keep(row: LossInput, losses: Tensor, low: float, high: float) -> Tensor:
    rho = row.log_rho.detach().exp()
    return torch.where((rho >= low) & (rho <= high), losses, torch.zeros_like(losses))


def _trust_region(row: LossInput, keep: Tensor, penalty: float, ratio_cap: float | None) -> Tensor:
    rho = row.log_rho.exp()
    gain = rho if ratio_cap is None else rho.detach().clamp(max=ratio_cap) * row.log_pi
    gains = torch.where(keep, gain * row.advantage, torch.zeros_like(gain))
    return -gains + penalty * row.log_rho.square()


def _sequence_sum(row: LossInput, values: Tensor) -> Tensor:
    """Sum of the unmasked ``values`` over each token's sample [T]."""
    masked = torch.where(row.loss_mask, values, torch.zeros_like(values))
    sums = masked.new_zeros(int(row.seq_ids.max()) + 1).index_add(0, row.seq_ids, masked)
    return sums[row.seq_ids]


def _sequence_mean(row: LossInput, values: Tensor) -> Tensor:
    return _sequence_sum(row, values) / _sequence_sum(row, torch.ones_like(values)).clamp(min=1)


# --- the losses -----------------------------------------------------------------------------------


@register_loss("ppo")
def ppo(
    row: LossInput,
    *,
    epsilon_low: float = 0.2,
    epsilon_high: float | None = None,
    delta: float | None = None,
    dual_clip: float | None = None,
) -> Tensor:
    """-min(r·A, clip(r, 1-ε, 1+ε_high)·A). ``delta`` bounds the unclipped r from above;
    ``dual_clip`` c > 1 bounds the loss of a negative advantage by -c·A.

    Source: GRPO, arXiv 2402.03300 (objective of PPO, 1707.06347); clip-higher, 2503.14476; dual
    clip, 1912.09729.
    """
    r = row.log_r.exp()
    high = epsilon_low if epsilon_high is None else epsilon_high
    unclipped = r if delta is None else r.clamp(max=delta)
    loss = -torch.minimum(
        unclipped * row.advantage, r.clamp(1 - epsilon_low, 1 + high) * row.advantage
    )
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
    """-sg(clip(ρ, floor, cap))·A·log π: a bounded gradient for every token; then the keep-mask on
    ρ.

    Source: MiniMax-M1, arXiv 2506.13585, equation 4.
    """
    weight = row.log_rho.detach().exp().clamp(ratio_floor, ratio_cap)
    return _keep(row, -weight * row.advantage * row.log_pi, mask_ratio_low, mask_ratio_high)


@register_loss("masked_is")
def masked_is(
    row: LossInput, *, mask_ratio_low: float = 0.125, mask_ratio_high: float = 8.0
) -> Tensor:
    """-ρ·A where low <= ρ <= high, else 0.

    Source: IcePop in Ring-1T, arXiv 2510.18855, there with [0.5, 5] and as a factor of PPO's
    clipped term: the mask is on o/μ. In the first update of a batch, where o = π, both have the
    same gradient; ``loss="masked_is"`` has no clip in later steps, and masks by their π. As one
    equation it is INTELLECT-3's, arXiv 2512.16144, equation 1.
    """
    return _keep(row, -row.log_rho.exp() * row.advantage, mask_ratio_low, mask_ratio_high)


@register_loss("importance_sampling")
def importance_sampling(
    row: LossInput, *, mask_ratio_low: float = 0.0, mask_ratio_high: float = math.inf
) -> Tensor:
    """-ρ·A, the unbiased per-token estimate; then the keep-mask on ρ.

    Source: off-policy policy gradient, Precup et al. 2000.
    """
    return _keep(row, -row.log_rho.exp() * row.advantage, mask_ratio_low, mask_ratio_high)


@register_loss("reinforce")
def reinforce(row: LossInput) -> Tensor:
    """-A·log π, without correction for the sampling policy. Source: Williams 1992."""
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
    """-k·A·sg(min(ρ, cap))·log π + τ·log²ρ, k = 0 once the probability has moved more than δ in the
    direction of A.

    Without a cap (None) the first term is -k·A·ρ; then one rare token with A < 0 can carry a
    gradient of any size. Source: DPPO with total variation, arXiv 2602.04879.
    """
    with torch.no_grad():
        shift = row.log_pi.exp() - row.log_mu.exp()
        blocked = ((row.advantage > 0) & (shift > delta_high)) | (
            (row.advantage < 0) & (shift < -delta_low)
        )
    return _trust_region(row, ~blocked, log_ratio_penalty, ratio_cap)


@register_loss("dppo_kl")
def dppo_kl(
    row: LossInput,
    *,
    delta: float = 0.05,
    log_ratio_penalty: float = 0.0,
    ratio_cap: float | None = None,
) -> Tensor:
    """As `dppo_tv`, with k = 0 if the Bernoulli KL(μ‖π) of the token exceeds δ and π moves
    further away.

    Source: DPPO with binary KL, arXiv 2602.04879.
    """
    with torch.no_grad():
        p_pi, p_mu = row.log_pi.exp(), row.log_mu.exp()
        rest_pi, rest_mu = (1 - p_pi).clamp(min=1e-12), (1 - p_mu).clamp(min=0)
        divergence = p_mu * (row.log_mu - row.log_pi) + torch.xlogy(rest_mu, rest_mu / rest_pi)
        away = ((row.advantage > 0) & (p_pi > p_mu)) | ((row.advantage < 0) & (p_pi < p_mu))
    return _trust_region(row, ~((divergence > delta) & away), log_ratio_penalty, ratio_cap)


@register_loss("ipo")
def ipo(row: LossInput, *, delta: float = 0.3, log_ratio_penalty: float = 1e-3) -> Tensor:
    """-[|π - μ| <= δ]·A·ρ + τ·log²ρ: as `dppo_tv`, masked whatever the sign of A. The bound is
    inclusive up to 1e-6.

    Source: INTELLECT policy optimization of prime-rl (docs.primeintellect.ai/prime-rl/ipo), from
    the total-variation mask of DPPO, arXiv 2602.04879, and the squared log-ratio penalty of Kimi
    K2.5, arXiv 2602.02276.
    """
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
    return torch.maximum(
        -s * row.advantage, -s.clamp(1 - epsilon_low, 1 + epsilon_high) * row.advantage
    )


@register_loss("sapo")
def sapo(row: LossInput, *, temperature_pos: float = 1.0, temperature_neg: float = 1.05) -> Tensor:
    """-(4/τ)·σ(τ(r-1))·A: a smooth gate in place of the clip, τ by the sign of A. Meant for
    aggregation "sequence_mean".

    Source: SAPO, arXiv 2511.20347.
    """
    positive = row.advantage > 0
    tau = torch.where(positive, temperature_pos, temperature_neg).to(row.advantage.dtype)
    return -4 / tau * torch.sigmoid(tau * (row.log_r.exp() - 1)) * row.advantage


@register_loss("vespo")
def vespo(
    row: LossInput,
    *,
    k_pos: float = 2.0,
    lambda_pos: float = 3.0,
    k_neg: float = 3.0,
    lambda_neg: float = 2.0,
) -> Tensor:
    """-sg(W^k·exp(λ·(1 - W)))·A·log π with W the ratio of the whole sample, log W in [log 1e-8,
    20].

    Source: VESPO, variational sequence-level soft policy optimization, arXiv 2602.10693: its
    reshaping kernel φ(W) = W^c1·exp(c2·(1 - W)) with c1 = k and c2 = λ, each by the sign of A.
    """
    positive = row.advantage > 0
    dtype = row.advantage.dtype
    k = torch.where(positive, k_pos, k_neg).to(dtype)
    lam = torch.where(positive, lambda_pos, lambda_neg).to(dtype)
    log_w = _sequence_sum(row, row.log_r.detach()).clamp(math.log(1e-8), MAX_LOG_RATIO)
    return -(lam + k * log_w - lam * log_w.exp()).exp() * row.advantage * row.log_pi


@register_loss("dro")
def dro(row: LossInput, *, beta: float = 0.1) -> Tensor:
    """-A·log π + β/2·log²r: regression towards the anchor. Source: DRO, arXiv 2405.19107, per
    token."""
    return -row.advantage * row.log_pi + beta / 2 * row.log_r.square()


@register_loss("sft")
def sft(row: LossInput) -> Tensor:
    """-log π: cross-entropy with the tokens of the row, whatever sampled them. The
    component "ce"."""
    return -row.log_pi


@register_loss("distill")
def distill(row: LossInput, *, ratio_cap: float = 5.0) -> Tensor:
    """sg(min(ρ, cap)·(log π - log T))·log π, T the teacher: its gradient is that of KL(π‖T) at each
    token that π sampled, in expectation. The component "ref_kl". *Raises* ConfigError without a
    teacher.

    Source: Lu and Thinking Machines Lab, "On-Policy Distillation" (2025): a policy gradient per
    token, with the reverse KL in place of the advantage.
    """
    if row.log_ref is None:
        raise ConfigError("the loss 'distill' needs a teacher's log-probabilities: set teacher")
    gap = _clamp(row.log_pi.detach() - row.log_ref)
    return row.log_rho.detach().exp().clamp(max=ratio_cap) * gap * row.log_pi


@register_loss("gkd")
def gkd(row: LossInput, *, reverse: float = 1.0) -> Tensor:
    """reverse·KL(π‖T) + (1-reverse)·KL(T‖π) over the whole vocabulary, at each token that π
    sampled. The component "ref_kl". *Raises* ConfigError without a teacher in this process.

    Source: GKD, arXiv 2306.13649, equation 4 with on-policy data alone (λ = 1); there too the
    gradient is not taken through sampling. Its divergence between the two ends is the generalised
    Jensen-Shannon divergence (equation 1), here their weighted sum: they agree for ``reverse`` 1
    and 0.
    """
    if row.reverse_kl is None or row.forward_kl is None:
        raise ConfigError(
            "the loss 'gkd' needs the teacher's whole distribution: set teacher to a folder or a"
            " name"
        )
    return reverse * row.reverse_kl + (1 - reverse) * row.forward_kl


# --- the names ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedObjective:
    """What a name of the setting ``loss`` means: the equation of its source, as settings."""

    loss: str
    """The name in ``LOSSES``."""
    aggregation: str = "token_mean"
    """The ``aggregation`` of the source; an aggregation that the caller sets wins."""
    advantage: str = "mean"
    """The ``advantage`` of the source; an advantage that the caller sets wins."""
    reads: Mapping[str, str] = field(default_factory=dict)
    """Setting of a bound -> the parameter of the loss it sets; any other bound is refused."""
    bounds: Mapping[str, float] = field(default_factory=dict)
    """Bounds of the source unlike the defaults of the settings; those that the caller sets win."""
    ratio: str = "r"
    """The ratio in the loss: "r" (π/o with anchor="recomputed", else π/μ), "ρ" (always π/μ), or ""
    for none."""
    kl: str = "none"
    """The penalty of the source; the settings ``beta`` and ``kl_type`` add it."""
    component: str = "rl"
    """The part of the loss, one of ``COMPONENTS``, that trains the rollouts; only "rl" reads their
    rewards."""
    source: str


_CLIP = {"epsilon": "epsilon_low", "epsilon_high": "epsilon_high"}
_PPO = {**_CLIP, "delta": "delta", "dual_clip": "dual_clip"}
_MASK = {"mask_ratio_low": "mask_ratio_low", "mask_ratio_high": "mask_ratio_high"}
_CAP = {"ratio_cap": "ratio_cap"}
_CISPO = {**_CAP, "ratio_floor": "ratio_floor", **_MASK, "epsilon_high": "ratio_cap"}
BOUNDS: Mapping[str, str] = {**_CISPO, **_PPO}
"""Every setting that is a bound -> its parameter in a loss without a row in ``OBJECTIVES``."""

OBJECTIVES: Mapping[str, NamedObjective] = {
    "grpo": NamedObjective(
        loss="ppo",
        aggregation="sequence_mean",
        advantage="mean_std",
        reads=_PPO,
        kl="k3, beta 0.04",
        source="GRPO, arXiv 2402.03300, equation 3",
    ),
    "dr_grpo": NamedObjective(
        loss="ppo", aggregation="constant_length", reads=_PPO, source="Dr. GRPO, arXiv 2503.20783"
    ),
    "dapo": NamedObjective(
        loss="ppo",
        advantage="mean_std",
        reads=_PPO,
        bounds={"epsilon": 0.2, "epsilon_high": 0.28},
        source="DAPO, arXiv 2503.14476, equation 8",
    ),
    "bnpo": NamedObjective(
        loss="ppo",
        advantage="mean_std",
        reads=_PPO,
        source="a name of GRPO scripts: GRPO as one mean over all tokens",
    ),
    "ppo": NamedObjective(loss="ppo", reads=_PPO, source="PPO, arXiv 1707.06347, equation 7"),
    "cispo": NamedObjective(
        loss="cispo",
        reads=_CISPO,
        ratio="ρ",
        source="MiniMax-M1, arXiv 2506.13585, equation 4 (there with mean_std)",
    ),
    "masked_is": NamedObjective(
        loss="masked_is",
        reads=_MASK,
        bounds={"mask_ratio_low": 0.125, "mask_ratio_high": 8.0},
        ratio="ρ",
        source="IcePop in Ring-1T, arXiv 2510.18855 (there a factor of PPO's clip)",
    ),
    "importance_sampling": NamedObjective(
        loss="importance_sampling", reads=_MASK, ratio="ρ", source="Precup et al. 2000"
    ),
    "reinforce": NamedObjective(loss="reinforce", ratio="", source="Williams 1992"),
    "gspo": NamedObjective(
        loss="gspo",
        aggregation="sequence_mean",
        advantage="mean_std",
        reads=_CLIP,
        bounds={"epsilon": 3e-4, "epsilon_high": 4e-4},
        source="GSPO-token, arXiv 2507.18071, equation 14",
    ),
    "sapo": NamedObjective(
        loss="sapo",
        aggregation="sequence_mean",
        advantage="mean_std",
        source="SAPO, arXiv 2511.20347",
    ),
    "vespo": NamedObjective(loss="vespo", source="VESPO, arXiv 2602.10693"),
    "dppo_tv": NamedObjective(
        loss="dppo_tv", reads=_CAP, ratio="ρ", source="DPPO with total variation, arXiv 2602.04879"
    ),
    "dppo_kl": NamedObjective(
        loss="dppo_kl", reads=_CAP, ratio="ρ", source="DPPO with binary KL, arXiv 2602.04879"
    ),
    "ipo": NamedObjective(
        loss="ipo",
        ratio="ρ",
        source="prime-rl: mask of arXiv 2602.04879 with δ 0.3, penalty of arXiv 2602.02276",
    ),
    "dro": NamedObjective(loss="dro", source="DRO, arXiv 2405.19107"),
    "sft": NamedObjective(
        loss="sft",
        advantage="none",
        ratio="",
        component="ce",
        source="maximum likelihood of finished rollouts",
    ),
    "distill": NamedObjective(
        loss="distill",
        advantage="none",
        reads=_CAP,
        ratio="ρ",
        component="ref_kl",
        source="On-Policy Distillation, Thinking Machines Lab 2025",
    ),
    "gkd": NamedObjective(
        loss="gkd",
        advantage="none",
        ratio="",
        component="ref_kl",
        source="GKD, arXiv 2306.13649, equation 4 with λ 1 (there JSD between the two ends)",
    ),
}
"""Every name of the setting ``loss`` with what it means. ``settings`` derives from it,
docs/reference/losses.md shows it, and tests/trainer/algorithm/test_oracle.py holds each row against
its source."""


def named_objective(choice: str | LossFunction) -> NamedObjective | None:
    """The row of a name; None for a function, an import path, or a loss registered elsewhere."""
    return OBJECTIVES.get(choice) if isinstance(choice, str) else None


def bounds_read(choice: str | LossFunction) -> Mapping[str, str]:
    """Settings of bounds that a loss reads -> its parameters; a function's among its keywords."""
    if (objective := named_objective(choice)) is not None:
        return objective.reads
    accepted = loss_parameters(choice) or ()
    return {setting: parameter for setting, parameter in BOUNDS.items() if parameter in accepted}


# --- the objective --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TokenLosses:
    """Losses and metrics of the tokens of a row, each [T]."""

    losses: Tensor
    metrics: Mapping[str, Tensor]
    """``kl_ref`` with a penalty, ``correction/factor`` with a correction; without gradient."""


class ObjectiveSettings(Protocol):
    """What ``Objective.of`` reads."""

    tis_cap: float | None
    sequence_mask_cap: float | None
    geo_mask: Sequence[float] | None
    opsm_delta: float | None
    beta: float
    kl_type: Any  # "k1", "k2" or "k3"
    entropy_coef: float

    @property
    def component(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Objective:
    """A loss, its corrections and a penalty: ``Objective(resolve_loss("ppo"), {"tis_cap": 2.0},
    beta=0.01)``."""

    loss: Callable[[LossInput], Tensor]
    corrections: Mapping[str, Any] = field(default_factory=dict)
    """Parameters of ``correction``, which weighs or drops tokens by the gap to the sampler."""
    beta: float = 0.0
    kl_type: str = "k3"
    component: str = "rl"
    """The component of ``loss``."""
    entropy_coef: float = 0.0
    """Weight of the entropy of the policy at each token, over the whole vocabulary: a sampled -log
    π would have no gradient in expectation. Source: A3C, arXiv 1602.01783, section 4; PPO, arXiv
    1707.06347, equation 9."""

    @classmethod
    def of(cls, loss: Callable[[LossInput], Tensor], settings: ObjectiveSettings) -> Objective:
        """The objective with the corrections and the penalty of ``settings``."""
        parameters = {
            "tis_cap": settings.tis_cap,
            "sequence_mask_cap": settings.sequence_mask_cap,
            "geo_mask": settings.geo_mask,
            "opsm_delta": settings.opsm_delta,
        }
        corrections = {name: value for name, value in parameters.items() if value is not None}
        penalty = settings.beta, settings.kl_type
        return cls(loss, corrections, *penalty, settings.component, settings.entropy_coef)

    def __call__(self, tokens: LossInput) -> TokenLosses:
        """The losses of a row; its ``log_ref`` is needed when there is a penalty, or a teacher."""
        losses, metrics = self.loss(tokens), {}
        if self.corrections:
            factor = correction(tokens, **self.corrections)
            # the loss of a dropped sample may be infinite, and inf times 0 is NaN
            used = factor > 0
            losses = torch.where(used, losses, torch.zeros_like(losses)) * factor
            metrics["correction/factor"] = factor
        if self.beta:
            assert tokens.log_ref is not None
            penalty = kl_penalty(tokens.log_pi, tokens.log_ref, tokens.loss_mask, self.kl_type)
            losses = losses + self.beta * penalty
            metrics["kl_ref"] = penalty.detach()
        if self.entropy_coef:
            assert tokens.entropy is not None
            losses = losses - self.entropy_coef * torch.where(tokens.loss_mask, tokens.entropy, 0.0)
        if self.component == "ref_kl":
            gap = tokens.log_pi if tokens.log_ref is None else tokens.log_pi - tokens.log_ref
            divergence = gap if tokens.reverse_kl is None else tokens.reverse_kl
            metrics["kl_teacher"] = divergence.detach()
        if tokens.component is not None:
            for name, loss in {"ce": sft, "ref_kl": distill}.items():
                its = tokens.component == COMPONENTS.index(name)
                if name != self.component and its.any():
                    losses = torch.where(its, loss(tokens), losses)
        return TokenLosses(losses, metrics)
