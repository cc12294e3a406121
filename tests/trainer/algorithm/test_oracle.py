"""Every name of the setting ``loss`` against the equation of its source, written down again here,
token by token.

The policy is a table of logits by the token before, so that its log-probabilities are exact and
need no model. The rollouts are ragged: several turns with the environment's tokens between them, a
fork, a failed rollout, a truncated one, a group of equal rewards, and a temperature. The oracle
walks over them with plain loops in float64, and knows nothing of samples, rows, weights or masks;
the other side is ``build`` with ``Objective``, as in a training step.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from verifiers.rollouts.rollout import Rollout
from verifiers.rollouts.status import Status
from verifiers.rollouts.turn import Turn
from verifiers_trainer.algorithm.batch import Group, build
from verifiers_trainer.algorithm.losses import (
    LOSSES,
    OBJECTIVES,
    LossInput,
    Objective,
    kl_penalty,
    resolve_loss,
)
from verifiers_trainer.grpo import GRPOConfig
from verifiers_trainer.settings.config import RLConfig

SIZE, TEMPERATURE, LONGEST = 7, 0.7, 16


def table(seed, scale=1.0):
    return scale * torch.randn(
        SIZE, SIZE, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )


SAMPLER = table(0)
OLD, POLICY, REFERENCE = SAMPLER + table(1, 0.15), SAMPLER + table(2, 1.5), SAMPLER + table(3, 0.3)


def logprob(logits, before, token):
    return torch.log_softmax(logits[before] / TEMPERATURE, 0)[token]


# --- the rollouts, as the oracle reads them -------------------------------------------------------


@dataclass
class Played:
    """One rollout: for each sample its turns (new prompt tokens, completion tokens); NaN = the
    rollout failed."""

    samples: list[list[tuple[list[int], list[int]]]]
    reward: float
    truncated: bool = False


GROUPS = [
    [
        Played([[([1, 2], [3, 4, 5])]], 1.0),
        Played([[([1, 2], [0, 6]), ([2, 2, 1], [5, 1, 3, 3]), ([4], [2])]], 0.0),
        Played(
            [[([1, 2], [4])], [([1, 5], [6, 0, 2]), ([3, 3], [1, 1])]], 0.25
        ),  # a fork after the first turn
        Played([[([1, 2], [6, 6])]], math.nan),
    ],
    [
        Played([[([3], [2, 2, 2, 5, 6, 1])]], 0.0),
        Played([[([3], [1])]], 2.0),
        Played([[([3], [4, 0]), ([6], [5, 5, 0])]], 1.5, truncated=True),
        Played([[([3], [0, 0, 4])]], 0.5),
    ],
    [Played([[([5, 6], [2, 3])]], 0.5), Played([[([5, 6], [1])]], 0.5)] * 2,
]


def turns_of(played):
    """The turns as an engine records them: the whole prompt of each, and log-probabilities in
    float32."""
    turns = []
    for sample in played.samples:
        ids = []
        for new, completion in sample:
            ids = [*ids, *new]
            logprobs = [
                float(logprob(SAMPLER, a, b))
                for a, b in zip([ids[-1], *completion], completion, strict=False)
            ]
            last = completion is sample[-1][1] and sample is played.samples[-1]
            turns.append(
                Turn(
                    np.array(ids),
                    np.array(completion),
                    np.float32(logprobs),
                    0,
                    played.truncated and last,
                )
            )
            ids = [*ids, *completion]
    return tuple(turns)


def recorded(played):
    error = "ModelError: the server is gone" if math.isnan(played.reward) else None
    return Rollout(turns_of(played), played.reward, {}, Status("stop", error, played.truncated))


def groups():
    return [
        Group(index, index, tuple(map(recorded, played))) for index, played in enumerate(GROUPS)
    ]


def tokens_of(sample):
    """(token before, token) of every sampled token."""
    return [pair for new, out in sample for pair in zip([new[-1], *out], out, strict=False)]


# --- the equations --------------------------------------------------------------------------------


@dataclass
class Token:
    """What the equations are written in: π carries the gradient; A > 0 or not is known; W is of the
    whole sample."""

    log_pi: torch.Tensor
    log_mu: float
    log_old: float
    advantage: float
    log_ratios: list[torch.Tensor]
    """log r of every token of the sample."""
    log_teacher: float = 0.0
    reverse_kl: torch.Tensor | None = None
    forward_kl: torch.Tensor | None = None

    @property
    def probability(self):
        """π as a number."""
        return math.exp(float(self.log_pi.detach()))

    @property
    def ratio(self):
        """ρ as a number."""
        return float(self.rho.detach())

    @property
    def rho(self):
        return (self.log_pi - self.log_mu).exp()

    @property
    def r(self):
        return (self.log_pi - self.log_old).exp()


def clipped(ratio, advantage, low, high):
    return -torch.minimum(ratio * advantage, torch.clamp(ratio, 1 - low, 1 + high) * advantage)


def cispo(t, low=0.125, high=8.0, cap=5.0):
    kept = low <= t.ratio <= high
    return -min(t.ratio, cap) * t.advantage * t.log_pi * kept


def masked_is(t):
    return -t.rho * t.advantage * (0.125 <= t.ratio <= 8)


def gspo(t, low=3e-4, high=4e-4):
    mean = sum(float(log_ratio.detach()) for log_ratio in t.log_ratios) / len(t.log_ratios)
    return clipped(math.exp(mean) * (t.log_pi - t.log_pi.detach()).exp(), t.advantage, low, high)


def sapo(t, positive=1.0, negative=1.05):
    tau = positive if t.advantage > 0 else negative
    return -(4 / tau) * torch.sigmoid(tau * (t.r - 1)) * t.advantage


def vespo(t, positive=(2, 3), negative=(3, 2)):
    k, lam = positive if t.advantage > 0 else negative
    w = math.exp(sum(float(log_ratio.detach()) for log_ratio in t.log_ratios))
    return -(w**k) * math.exp(lam * (1 - w)) * t.advantage * t.log_pi


def moved_away(t):
    return (t.probability - math.exp(t.log_mu)) * t.advantage > 0


def dppo_tv(t, bound=0.2, cap=5.0):
    blocked = moved_away(t) and abs(t.probability - math.exp(t.log_mu)) > bound
    return (
        -(not blocked) * t.advantage * min(t.ratio, cap) * t.log_pi
        + 1e-3 * (t.log_pi - t.log_mu) ** 2
    )


def dppo_kl(t, bound=0.05, cap=5.0):
    p, q = math.exp(t.log_mu), t.probability
    divergence = p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))
    return (
        -(not (moved_away(t) and divergence > bound)) * t.advantage * min(t.ratio, cap) * t.log_pi
    )


def ipo(t, bound=0.3):
    near = abs(t.probability - math.exp(t.log_mu)) <= bound
    return -near * t.advantage * t.rho + 1e-3 * (t.log_pi - t.log_mu) ** 2


def dro(t):
    return -t.advantage * t.log_pi + 0.1 / 2 * (t.log_pi - t.log_old) ** 2


def distill(t, cap=5.0):
    """The gradient alone means something: ρ·(log π - log T) in front of ∇log π."""
    return min(t.ratio, cap) * (math.log(t.probability) - t.log_teacher) * t.log_pi


def divergences(logits, before):
    """KL(π‖T) and KL(T‖π) after one token."""
    pairs = [
        (logprob(logits, before, token), logprob(REFERENCE, before, token)) for token in range(SIZE)
    ]
    return sum(p.exp() * (p - t) for p, t in pairs), sum(t.exp() * (t - p) for p, t in pairs)


def ppo(t):
    return clipped(t.r, t.advantage, 0.2, 0.2)


def over_tokens(losses_R):
    return sum(sum(losses) for losses in losses_R) / sum(map(len, losses_R))


def over_rollouts(losses_R):
    return sum(sum(losses) / len(losses) for losses in losses_R) / len(losses_R)


def constant(losses_R):
    return sum(sum(losses) for losses in losses_R) / (len(losses_R) * LONGEST)


def centred(rewards):
    return [reward - statistics.mean(rewards) for reward in rewards]


def ones(rewards):
    """Every rollout counts alike: rewards are not read."""
    return [1.0] * len(rewards)


def z_scores(rewards):
    return [c / (statistics.stdev(rewards) + 1e-4) for c in centred(rewards)]


EQUATIONS = {
    "grpo": (ppo, over_rollouts, z_scores),
    "dr_grpo": (ppo, constant, centred),
    "dapo": (lambda t: clipped(t.r, t.advantage, 0.2, 0.28), over_tokens, z_scores),
    "bnpo": (ppo, over_tokens, z_scores),
    "ppo": (ppo, over_tokens, centred),
    "cispo": (cispo, over_tokens, centred),
    "masked_is": (masked_is, over_tokens, centred),
    "importance_sampling": (
        lambda t: -t.rho * t.advantage * (0.125 <= t.ratio <= 8),
        over_tokens,
        centred,
    ),
    "reinforce": (lambda t: -t.advantage * t.log_pi, over_tokens, centred),
    "gspo": (gspo, over_rollouts, z_scores),
    "sapo": (sapo, over_rollouts, z_scores),
    "vespo": (vespo, over_tokens, centred),
    "dppo_tv": (dppo_tv, over_tokens, centred),
    "dppo_kl": (dppo_kl, over_tokens, centred),
    "ipo": (ipo, over_tokens, centred),
    "dro": (dro, over_tokens, centred),
    "sft": (lambda t: -t.log_pi, over_tokens, ones),
    "distill": (distill, over_tokens, ones),
    "gkd": (lambda t: t.reverse_kl, over_tokens, ones),
}
"""Name -> (loss of a token, mean over the batch, advantages of a group)."""
WITHOUT_MASK = {
    "cispo": lambda t: cispo(t, 0.0, math.inf),
    "importance_sampling": lambda t: -t.rho * t.advantage,
}
"""In ``GRPOConfig`` these two have no keep-mask."""
IN_R = {"grpo", "dr_grpo", "dapo", "bnpo", "ppo", "gspo", "sapo", "vespo", "dro"}
"""Losses whose ratio is that to the policy of the batch, with anchor="recomputed"."""


def oracle(
    equation,
    mean,
    advantages,
    *,
    anchor="sampler",
    keep=False,
    beta=0.0,
    kl=None,
    tis_cap=None,
    mask=True,
):
    """(loss, gradient by logits) of the step."""
    logits = POLICY.clone().requires_grad_()
    losses_R = []
    for played in GROUPS:
        scored = [
            rollout_played for rollout_played in played if not math.isnan(rollout_played.reward)
        ]
        if len({rollout_played.reward for rollout_played in scored}) == 1 and not keep:
            continue
        for rollout_played, advantage in zip(
            scored, advantages([k.reward for k in scored]), strict=True
        ):
            if rollout_played.truncated and mask:
                continue  # its reward is in the baseline; its tokens carry no loss
            losses = []
            for sample in rollout_played.samples:
                pairs = tokens_of(sample)
                log_pi = [logprob(logits, *pair) for pair in pairs]
                log_mu = [float(np.float32(float(logprob(SAMPLER, *pair)))) for pair in pairs]
                if anchor == "sampler":
                    log_old = log_mu
                else:
                    log_old = [float(logprob(OLD, *pair)) for pair in pairs]
                ratios = [a - b for a, b in zip(log_pi, log_old, strict=True)]
                for i, pair in enumerate(pairs):
                    teacher = float(logprob(REFERENCE, *pair))
                    kl_t = divergences(logits, pair[0])
                    loss = equation(
                        Token(log_pi[i], log_mu[i], log_old[i], advantage, ratios, teacher, *kl_t)
                    )
                    if tis_cap is not None:
                        loss = loss * min(math.exp(log_old[i] - log_mu[i]), tis_cap)
                    if beta:
                        loss = loss + beta * kl(logprob(REFERENCE, *pair) - log_pi[i])
                    losses.append(loss)
            losses_R.append(losses)
    loss = mean(losses_R)
    loss.backward()
    return loss.detach(), logits.grad


def trained(config):
    """(loss, gradient by logits) of a training step with these settings."""
    logits = POLICY.clone().requires_grad_()
    config.resolve()
    criterion = Objective.of(resolve_loss(config.loss, **config.loss_parameters()), config)
    batch = build(groups(), [], config)
    total = torch.zeros((), dtype=torch.float64)
    for packed in batch.rows_R[0]:
        row = packed.to_tensors()
        before, token = row["token_ids"].long().roll(1), row["token_ids"].long()

        def logprobs(of, before=before, token=token, row=row):
            rows = torch.log_softmax(of[before] * row["inv_temperature"].double()[:, None], -1)
            return rows.gather(1, token[:, None])[:, 0]

        if config.anchor == "recomputed":
            row["old_logprobs"] = logprobs(OLD)
        row["reference_logprobs"] = logprobs(REFERENCE)
        kl = map(
            torch.stack,
            zip(*[divergences(logits, teacher_logits) for teacher_logits in before], strict=True),
        )
        tokens = LossInput.of(row, logprobs(logits), config.anchor, tuple(kl))
        total = total + (row["weight"].double() * criterion(tokens).losses).sum()
    total.backward()
    return total.detach(), logits.grad


def settings(kind=RLConfig, **options):
    if {"distill", "gkd"} & set(map(str, options.values())):
        options["teacher"] = "builtin:tiny"  # not loaded: its log-probabilities are a table here
    shape = {
        "batch_size": 12,
        "rollouts_per_example": 4,
        "micro_batch_size": 4,
        "max_seq_len": 64,
        "max_steps": 2,
    }
    common = {
        "max_completion_len": LONGEST,
        "temperature": TEMPERATURE,
        "mask_truncated_completions": True,
    }
    return kind(
        **{**shape, **common, "share_prompts": False, "beta": 0.0, "use_lora": False, **options}
    )


def assert_same(computed, expected):
    for value, expected_value in zip(computed, expected, strict=True):
        # advantages and weights of rows are float32
        torch.testing.assert_close(value, expected_value, rtol=1e-6, atol=1e-8)
    assert float(expected[1].abs().max()) > 1e-3


def test_every_name_has_an_equation_and_every_loss_a_name():
    assert EQUATIONS.keys() == OBJECTIVES.keys()
    assert {objective.loss for objective in OBJECTIVES.values()} == set(LOSSES)
    assert {name for name, objective in OBJECTIVES.items() if objective.ratio == "r"} == IN_R


@pytest.mark.parametrize("name", EQUATIONS)
@pytest.mark.parametrize("kind", [RLConfig, GRPOConfig])
def test_a_name_trains_the_equation_of_its_source(name, kind):
    equation, *arguments = EQUATIONS[name]
    if kind is GRPOConfig:
        equation = WITHOUT_MASK.get(name, equation)
    rewards_count = OBJECTIVES[name].component == "rl"
    assert_same(
        trained(settings(kind, loss_type=name)),
        oracle(equation, *arguments, keep=not rewards_count),
    )


WRONG = {
    "dr_grpo": [
        lambda t: clipped(t.r, t.advantage, 0.21, 0.2),
        lambda t: clipped(t.r, t.advantage, 0.2, 0.21),
    ],
    "dapo": [ppo, lambda t: clipped(t.r, t.advantage, 0.28, 0.28)],
    "cispo": [
        lambda t: cispo(t, 0, 8),
        lambda t: cispo(t, 0.125, math.inf),
        lambda t: cispo(t, cap=8),
    ],
    "masked_is": [lambda t: -t.rho * t.advantage, lambda t: masked_is(t) * (t.ratio > 0.2)],
    "gspo": [lambda t: gspo(t, 3e-4, 3e-4), lambda t: gspo(t, 4e-4, 4e-4), ppo],
    "sapo": [lambda t: sapo(t, 1.05), lambda t: sapo(t, 1.0, 1.0)],
    "vespo": [lambda t: vespo(t, (3, 2)), lambda t: vespo(t, (2, 3), (2, 3))],
    "dppo_tv": [
        lambda t: dppo_tv(t, bound=0.3),
        lambda t: dppo_tv(t, bound=0.1),
        lambda t: dppo_tv(t, cap=8),
    ],
    "dppo_kl": [
        lambda t: dppo_kl(t, bound=0.5),
        lambda t: dppo_kl(t, bound=0.01),
        lambda t: dppo_kl(t, cap=8),
    ],
    "ipo": [lambda t: ipo(t, 0.05), lambda t: ipo(t, 0.2)],
    "dro": [lambda t: -t.advantage * t.log_pi],
    "gkd": [lambda t: t.log_pi - t.log_teacher, lambda t: t.forward_kl],
    "distill": [
        lambda t: distill(t, 8.0),
        lambda t: distill(t) / t.ratio,
        lambda t: t.rho * t.log_teacher,
    ],
}
"""Equations that are nearly right: bounds a little off, the sign of A ignored, a mask or a cap left
out."""


@pytest.mark.parametrize(
    ("name", "number"), [(name, n) for name, wrong in WRONG.items() for n in range(len(wrong))]
)
def test_an_equation_that_is_a_little_off_is_found(name, number):
    """Negative control: the rollouts reach every branch of every equation."""
    keep = OBJECTIVES[name].component != "rl"
    with pytest.raises(AssertionError):
        assert_same(
            trained(settings(loss=name)),
            oracle(WRONG[name][number], *EQUATIONS[name][1:], keep=keep),
        )


def test_the_share_of_the_reverse_divergence_is_a_parameter():
    expected = oracle(
        lambda t: 0.25 * t.reverse_kl + 0.75 * t.forward_kl, over_tokens, ones, keep=True
    )
    assert_same(trained(settings(loss="gkd", loss_kwargs={"reverse": 0.25})), expected)


@pytest.mark.parametrize("name", sorted(IN_R))
def test_with_a_recomputed_anchor_the_ratio_is_to_the_policy_of_the_batch(name):
    config = settings(loss=name, anchor="recomputed", num_iterations=2)
    assert_same(trained(config), oracle(*EQUATIONS[name], anchor="recomputed"))
    apart = oracle(*EQUATIONS[name])[1] - oracle(*EQUATIONS[name], anchor="recomputed")[1]
    assert float(apart.abs().max()) > 1e-4  # negative control


def test_decoupled_ppo_weighs_by_the_policy_that_sampled():
    config = settings(loss="grpo", anchor="recomputed", tis_cap=1.05)
    assert_same(trained(config), oracle(*EQUATIONS["grpo"], anchor="recomputed", tis_cap=1.05))


KL = {"k2": lambda d: d**2 / 2, "k3": lambda d: d.exp() - d - 1}


@pytest.mark.parametrize("kind", KL)
@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "cispo"])
def test_the_penalty_acts_on_every_trained_token_and_on_kept_groups_of_equal_rewards(name, kind):
    expected = oracle(*EQUATIONS[name], beta=0.04, kl=KL[kind])
    assert_same(trained(settings(loss=name, beta=0.04, kl_type=kind)), expected)
    kept = oracle(*EQUATIONS[name], beta=0.04, kl=KL[kind], keep=True)
    assert_same(trained(settings(loss=name, beta=0.04, kl_type=kind, zero_variance="keep")), kept)
    assert float((kept[1] - expected[1]).abs().max()) > 1e-3  # negative control


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "cispo", "gspo"])
def test_truncated_rollouts_are_trained_where_they_are_not_masked(name):
    config = settings(loss=name, mask_truncated_completions=False)
    assert_same(trained(config), oracle(*EQUATIONS[name], mask=False))


def test_an_aggregation_and_an_advantage_may_be_set_apart_from_the_loss():
    config = settings(loss="grpo", aggregation="token_mean", scale_rewards=False)
    assert_same(trained(config), oracle(ppo, over_tokens, centred))


# --- KL estimators as losses ----------------------------------------------------------------------


def expected_gradient(kind, logits, log_ref):
    """E over π of the estimator's gradient, summed exactly over all tokens; sampling itself carries
    no gradient."""
    log_pi = torch.log_softmax(logits, 0)
    mask = torch.ones(len(logits), dtype=torch.bool)
    value = (log_pi.detach().exp() * kl_penalty(log_pi, log_ref, mask, kind)).sum()
    return torch.autograd.grad(value, logits)[0]


def test_the_gradient_of_k1_is_zero_in_expectation_which_is_why_it_is_refused():
    """k1 = log π - log ref, so E[∇k1] = Σ π ∇log π = ∇Σ π = 0; k2 has ∇KL(π‖ref) and
    k3 ∇KL(ref‖π)."""
    logits, log_ref = POLICY[0].clone().requires_grad_(), torch.log_softmax(REFERENCE[0], 0)
    log_pi = torch.log_softmax(logits, 0)
    reverse = torch.autograd.grad(
        (log_pi.exp() * (log_pi - log_ref)).sum(), logits, retain_graph=True
    )[0]
    forward = torch.autograd.grad((log_ref.exp() * (log_ref - log_pi)).sum(), logits)[0]
    assert float(reverse.abs().max()) > 0.01
    torch.testing.assert_close(
        expected_gradient("k1", logits, log_ref), torch.zeros(SIZE, dtype=torch.float64)
    )
    torch.testing.assert_close(expected_gradient("k2", logits, log_ref), reverse)
    torch.testing.assert_close(expected_gradient("k3", logits, log_ref), forward)
