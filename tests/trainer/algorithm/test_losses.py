"""Losses against the golden numbers, on policy, under masks, and as learners. Source: losses.py."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from verifiers.errors import ConfigError
from verifiers_trainer.algorithm.losses import (
    LOSSES,
    OBJECTIVES,
    LossInput,
    correction,
    kl_penalty,
    loss_parameters,
    register_loss,
    resolve_loss,
)

GOLDEN = json.loads((Path(__file__).parents[1] / "data" / "golden_losses.json").read_text())
VARIANTS = {
    "ppo_dual_clip": "ppo",
    "ppo_two_sided": "ppo",
    "ppo_clip_higher": "ppo",
    "cispo_keep_mask": "cispo",
    "cispo_relative_0.8_1.2": "cispo",
    "masked_is_icepop": "masked_is",
    "dppo_tv_capped": "dppo_tv",
    "dppo_tv_tis20": "dppo_tv",
}
PRECISIONS = pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-5)]
)
EVERY_LOSS = pytest.mark.parametrize("name", list(LOSSES))
REWARDED = [
    name for name in LOSSES if OBJECTIVES.get(name) is None or OBJECTIVES[name].component == "rl"
]
"""The others learn from answers or a teacher: ``test_oracle`` has their equations."""
EVERY_POLICY_GRADIENT = pytest.mark.parametrize("name", REWARDED)


def golden_row(dtype: torch.dtype = torch.float64) -> LossInput:
    inputs = GOLDEN["inputs"]
    return LossInput(
        log_pi=torch.tensor(inputs["log_pi"], dtype=dtype, requires_grad=True),
        log_mu=torch.tensor(inputs["log_mu"], dtype=dtype),
        advantage=torch.tensor(inputs["A"], dtype=dtype),
        loss_mask=torch.ones(5, dtype=torch.bool),
        seq_ids=torch.tensor(inputs["seq"]),
    )


def beside_a_teacher(row: LossInput, bad: torch.Tensor | float = 0.0) -> LossInput:
    """The row with a teacher, for the losses that need one; ``bad`` is added to all that the
    teacher gives."""
    log_pi = torch.where(row.loss_mask, row.log_pi, 0.0)
    log_ref = row.log_mu - 0.3
    gap = log_pi - log_ref.nan_to_num(0.0, 0.0, 0.0)
    return replace(
        row, log_ref=log_ref + bad, reverse_kl=gap.square() + bad, forward_kl=gap.abs() + bad
    )


def golden_loss(name: str):
    return resolve_loss(VARIANTS.get(name, name), **GOLDEN["losses"][name]["parameters"])


def gradient(loss, row: LossInput) -> torch.Tensor:
    (grad,) = torch.autograd.grad(loss(row).sum(), row.log_pi, retain_graph=True)
    return grad


def close(actual: torch.Tensor, expected: list[float], tolerance: float) -> bool:
    expected = torch.tensor(expected, dtype=torch.float64)
    return torch.allclose(actual.detach().double(), expected, rtol=tolerance, atol=tolerance)


@PRECISIONS
@pytest.mark.parametrize("name", list(GOLDEN["losses"]))
def test_golden_losses_and_gradients(name, dtype, tolerance):
    row, loss = golden_row(dtype), golden_loss(name)
    assert close(loss(row), GOLDEN["losses"][name]["loss"], tolerance)
    assert close(gradient(loss, row), GOLDEN["losses"][name]["dloss_dlogp"], tolerance)


def test_every_registered_loss_has_a_golden_entry():
    assert set(REWARDED) == {VARIANTS.get(name, name) for name in GOLDEN["losses"]}


@PRECISIONS
@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_golden_kl_penalties(kind, dtype, tolerance):
    row = golden_row(dtype)
    value = kl_penalty(row.log_pi, row.log_mu, row.loss_mask, kind)
    (grad,) = torch.autograd.grad(value.sum(), row.log_pi)
    assert close(value, GOLDEN["kl"][kind]["value"], tolerance)
    assert close(grad, GOLDEN["kl"][kind]["dvalue_dlogp"], tolerance)


def test_kl_penalty_ignores_masked_tokens():
    log_pi = torch.tensor([-1.0, -2.0], requires_grad=True)
    value = kl_penalty(log_pi, torch.tensor([math.nan, -1.0]), torch.tensor([False, True]))
    (grad,) = torch.autograd.grad(value.sum(), log_pi)
    assert value[0] == 0
    assert grad[0] == 0
    assert value[1] > 0
    assert torch.isfinite(grad).all()


@PRECISIONS
@pytest.mark.parametrize("name", GOLDEN["on_policy"]["losses"])
def test_on_policy_gradient_is_minus_the_advantage_for_golden_variants(name, dtype, tolerance):
    row = golden_row(dtype)
    row = replace(row, log_mu=row.log_pi.detach())
    assert close(
        gradient(golden_loss(name), row), GOLDEN["on_policy"]["expected_dloss_dlogp"], tolerance
    )


@EVERY_POLICY_GRADIENT
def test_on_policy_gradient_is_minus_the_advantage_with_defaults(name):
    generator = torch.Generator().manual_seed(0)
    log_pi = -3 * torch.rand(40, generator=generator, dtype=torch.float64)
    row = LossInput(
        log_pi=log_pi.requires_grad_(),
        log_mu=log_pi.detach().clone(),
        advantage=torch.randn(40, generator=generator, dtype=torch.float64),
        loss_mask=torch.ones(40, dtype=torch.bool),
        seq_ids=torch.arange(40) // 7,
    )
    assert torch.allclose(gradient(resolve_loss(name), row), -row.advantage, rtol=0, atol=1e-12)


@EVERY_LOSS
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_nothing_at_a_masked_position_reaches_value_or_gradient(name, poison):
    row = golden_row()
    mask = torch.tensor([True, False, True, True, False])
    bad = torch.where(mask, 0.0, torch.tensor(poison, dtype=torch.float64))
    log_pi = (row.log_pi.detach() + bad).requires_grad_()
    dirty = replace(
        row, log_pi=log_pi, log_mu=row.log_mu + bad, advantage=row.advantage + bad, loss_mask=mask
    )
    dirty, clean = beside_a_teacher(dirty, bad), beside_a_teacher(replace(row, loss_mask=mask))
    loss = resolve_loss(name)
    assert torch.equal(loss(dirty), loss(clean))
    assert torch.equal(gradient(loss, dirty), gradient(loss, clean))
    assert not loss(dirty)[~mask].any()
    assert not gradient(loss, dirty)[~mask].any()


def test_masking_by_multiplication_would_leak_the_nan():
    log_pi = torch.tensor([-1.0, math.nan], requires_grad=True)
    mask = torch.tensor([1.0, 0.0])
    assert not torch.isfinite((-log_pi * mask).sum())


@EVERY_LOSS
def test_extreme_ratios_stay_finite(name):
    log_pi = torch.tensor([0.0, -200.0, -1e-9, -90.0], requires_grad=True)
    row = LossInput(
        log_pi=log_pi,
        log_mu=torch.tensor([-200.0, 0.0, -1e-9, -2.0]),
        advantage=torch.tensor([1.0, -1.0, 1.0, -1.0]),
        loss_mask=torch.ones(4, dtype=torch.bool),
        seq_ids=torch.tensor([0, 1, 2, 3]),
    )
    row = beside_a_teacher(row)
    loss = resolve_loss(name)
    assert torch.isfinite(loss(row)).all()
    assert torch.isfinite(gradient(loss, row)).all()


@pytest.mark.parametrize("name", ["ppo", "gspo", "sapo", "vespo", "dro"])
def test_a_recomputed_anchor_replaces_the_sampler_in_r(name):
    row = golden_row()
    loss = resolve_loss(name)
    recomputed = loss(replace(row, log_old=row.log_mu, log_mu=row.log_mu - 1))
    assert torch.equal(recomputed, loss(row))


@pytest.mark.parametrize("name", ["cispo", "masked_is", "importance_sampling"])
def test_losses_in_rho_keep_the_sampler_as_anchor(name):
    row = golden_row()
    loss = resolve_loss(name)
    assert torch.equal(loss(replace(row, log_old=row.log_pi.detach())), loss(row))


def test_correction_without_options_is_one_on_kept_tokens():
    row = golden_row()
    assert correction(row).tolist() == [1.0] * 5
    mask = torch.tensor([True, False, True, True, True])
    assert correction(replace(row, loss_mask=mask)).tolist() == [1.0, 0.0, 1.0, 1.0, 1.0]


def test_correction_caps_tokens_and_drops_sequences():
    row = golden_row()  # products of the ratio: 1.5625 and 10; geometric means: 1.16 and 3.16
    assert torch.allclose(
        correction(row, tis_cap=1.4)[:3], torch.tensor([1.25, 1.4, 0.8333333333333334]).double()
    )
    assert correction(row, sequence_mask_cap=2.0).tolist() == [1, 1, 1, 0, 0]
    assert correction(row, geo_mask=(0.5, 2.0)).tolist() == [1, 1, 1, 0, 0]
    assert not correction(row, tis_cap=1.4).requires_grad
    drifted = replace(row, log_pi=row.log_pi.detach() - 2)
    # the positive sample stays
    assert correction(drifted, opsm_delta=0.5).tolist() == [1, 1, 1, 0, 0]


def test_unknown_loss_names_the_nearest():
    with pytest.raises(ConfigError, match="did you mean 'cispo'"):
        resolve_loss("cipso")


def test_unknown_parameter_names_the_allowed_ones():
    with pytest.raises(ConfigError, match=r"no parameter epsilon; it takes delta, .*epsilon_low"):
        resolve_loss("ppo", epsilon=0.1)
    with pytest.raises(ConfigError, match="takes no parameters"):
        resolve_loss("reinforce", beta=1)
    assert loss_parameters("gspo") == {"epsilon_low", "epsilon_high"}


def test_unknown_kl_type_is_refused():
    with pytest.raises(ConfigError, match="k1, k2, k3"):
        kl_penalty(torch.zeros(1), torch.zeros(1), torch.ones(1, dtype=torch.bool), "k4")


def test_a_function_or_an_import_path_serves_as_loss_and_is_masked():
    def twice(row: LossInput, *, factor: float = 2.0):
        return -factor * row.advantage * row.log_pi

    row = replace(golden_row(), loss_mask=torch.tensor([True, True, True, True, False]))
    assert resolve_loss(twice)(row)[-1] == 0
    assert torch.allclose(resolve_loss(twice, factor=1.0)(row), resolve_loss("reinforce")(row))
    assert torch.equal(
        resolve_loss("verifiers_trainer.algorithm.losses:cispo")(row), resolve_loss("cispo")(row)
    )


@pytest.mark.parametrize(
    ("combine", "returned"),
    [
        (torch.mean, r"shape \[\]"),
        (torch.sum, r"shape \[\]"),
        (lambda losses: losses[:, None], r"shape \[5, 1\]"),
        (lambda losses: losses[1:], r"shape \[4\]"),
        (lambda losses: losses.tolist(), "list"),
        (lambda losses: None, "NoneType"),
    ],
)
def test_a_loss_that_is_not_one_number_per_token_is_refused(combine, returned):
    """Negative control: a mean broadcasts over the row."""

    def mine(row: LossInput):
        return combine(-row.advantage * row.log_pi)

    line = f"test_losses.py:{mine.__code__.co_firstlineno}"
    with pytest.raises(ConfigError, match=rf"'mine' .*{line}\) returned {returned} for 5 tokens"):
        resolve_loss(mine)(golden_row())

    row = replace(golden_row(), loss_mask=torch.tensor([True, True, True, True, False]))
    row.log_pi.requires_grad_()
    broadcast = torch.where(row.loss_mask, (-row.advantage * row.log_pi).mean(), 0.0)
    (gradient,) = torch.autograd.grad(broadcast.sum(), row.log_pi)
    assert gradient[-1] != 0  # it reaches the masked token
    (gradient,) = torch.autograd.grad(resolve_loss("reinforce")(row).sum(), row.log_pi)
    assert gradient[-1] == 0


@pytest.mark.parametrize("cut", [lambda losses: losses.detach(), lambda losses: losses > 0])
def test_a_loss_without_a_gradient_is_refused(cut):
    """Negative control: torch's own sentence names neither the loss nor its line."""

    def mine(row: LossInput):
        return cut(-row.advantage * row.log_pi)

    row = golden_row()
    resolve_loss(mine)(replace(row, log_pi=row.log_pi.detach()))  # an evaluation needs none
    row.log_pi.requires_grad_()
    with pytest.raises(RuntimeError, match="does not require grad"):
        mine(row).float().sum().backward()
    line = f"test_losses.py:{mine.__code__.co_firstlineno}"
    with pytest.raises(ConfigError, match=rf"'mine' .*{line}\) returned a tensor without a grad"):
        resolve_loss(mine)(row)


def test_a_loss_that_raises_is_named_with_its_line():
    def fails(row: LossInput):
        return row.log_pi + row.log_ref

    line = fails.__code__.co_firstlineno + 1
    with pytest.raises(
        ConfigError, match=rf"the loss 'fails' .* raised TypeError: .*:{line} in fails\)"
    ):
        resolve_loss(fails)(golden_row())


@pytest.mark.parametrize("path", ["no_such_module:f", "math:no_such_function", "math:pi"])
def test_an_import_path_that_does_not_load_says_so(path):
    with pytest.raises(ConfigError, match=path):
        resolve_loss(path)


def test_a_taken_name_is_refused():
    with pytest.raises(ConfigError, match="already registered"):
        register_loss("ppo")(lambda row: row.log_pi)


@EVERY_POLICY_GRADIENT
def test_a_softmax_policy_learns_a_five_armed_bandit(name):
    """From 0.2 to above 0.9, two optimizer steps per batch of samples, so ratios leave 1."""
    loss, generator = resolve_loss(name), torch.Generator().manual_seed(0)
    rewards = torch.tensor([0.0, 0.0, 1.0, 0.0, 0.0])
    logits = torch.zeros(5, requires_grad=True)
    optimizer = torch.optim.Adam([logits], lr=0.1)
    for _ in range(80):
        policy = torch.log_softmax(logits.detach(), 0)
        arms = torch.multinomial(policy.exp(), 64, replacement=True, generator=generator)
        advantage = rewards[arms] - rewards[arms].mean()
        for _ in range(2):
            log_pi = torch.log_softmax(logits, 0)[arms]
            row = LossInput(
                log_pi, policy[arms], advantage, torch.ones(64, dtype=torch.bool), torch.arange(64)
            )
            optimizer.zero_grad()
            loss(row).mean().backward()
            optimizer.step()
    assert torch.softmax(logits, 0) @ rewards > 0.9
