"""What is minimised: the anchor of ratios, corrections for the sampler, several steps on a batch,
losses by name."""

from __future__ import annotations

import copy
import inspect
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from support.training import first_batch, run, small_policy, small_trainer, toy_env
from verifiers.errors import ConfigError
from verifiers_trainer.algorithm.losses import (
    BOUNDS,
    LOSSES,
    OBJECTIVES,
    LossInput,
    Objective,
    kl_penalty,
    resolve_loss,
)
from verifiers_trainer.algorithm.packing import forward_arguments
from verifiers_trainer.grpo import GRPOConfig
from verifiers_trainer.policy.logprobs import install_logprob_forward
from verifiers_trainer.settings.config import RLConfig
from verifiers_trainer.settings.cross_field_rules import ANCHORED_ON_BATCH, ANCHORED_ON_SAMPLER

GOLDEN = json.loads((Path(__file__).parents[1] / "data" / "golden_losses.json").read_text())
INPUTS = GOLDEN["inputs"]


def row(old=None, dtype=torch.float64):
    tensors = {name: torch.tensor(INPUTS[name], dtype=dtype) for name in ("log_pi", "log_mu", "A")}
    log_old = None if old is None else torch.tensor(old, dtype=dtype).log()
    mask, seq = torch.ones(5, dtype=torch.bool), torch.tensor(INPUTS["seq"])
    return LossInput(
        tensors["log_pi"].requires_grad_(), tensors["log_mu"], tensors["A"], mask, seq, log_old
    )


def gradient(objective, tokens, log_ref=None):
    made = objective(replace(tokens, log_ref=log_ref))
    (computed,) = torch.autograd.grad(made.losses.sum(), tokens.log_pi)
    return made, computed


def settled(kind=RLConfig, **settings):
    config = kind(**settings)
    config.resolve()
    return config


# --- reshaped sampling ----------------------------------------------------------------------------

LOGITS = torch.tensor([1.2, 0.4, 0.1, -0.6, -1.5], dtype=torch.float64)
REWARDS = torch.tensor([-1.0, 0.5, 2.0, -0.3, 1.0], dtype=torch.float64)
TOP = torch.tensor([True, True, True, False, False])


def expected_gradient(config, log_mu):
    """-∂/∂logits of the expected loss of one token drawn from μ, with the policy of the batch that
    of now."""
    logits = LOGITS.clone().requires_grad_()
    mu = log_mu.exp()
    objective = Objective.of(resolve_loss(config.loss, **config.loss_parameters()), config)
    total = torch.zeros((), dtype=torch.float64)
    for token in range(len(mu)):
        if mu[token] == 0:
            continue
        log_pi = logits.log_softmax(-1)[token : token + 1]
        tensors = (
            log_mu[token : token + 1],
            REWARDS[token : token + 1],
            torch.tensor([True]),
            torch.tensor([0]),
        )
        old = log_pi.detach() if config.anchor == "recomputed" else None
        total = total + mu[token] * objective(LossInput(log_pi, *tensors, old)).losses.sum()
    return -torch.autograd.grad(total, logits)[0]


def policy_gradient(drawn):
    """Σ π·A·∇log π over the tokens that can be drawn; the gradient of log π by the logits is
    one-hot minus π."""
    pi = np.exp(LOGITS.numpy()) / np.exp(LOGITS.numpy()).sum()
    terms = [
        pi[a] * REWARDS[a].item() * (np.eye(len(pi))[a] - pi) for a in range(len(pi)) if drawn[a]
    ]
    return np.sum(terms, axis=0)


RESHAPED = {
    "top-k": ({"top_k": 3}, LOGITS.masked_fill(~TOP, -math.inf).log_softmax(-1)),
    "penalty": ({"frequency_penalty": 0.4}, (LOGITS - 0.4 * TOP).log_softmax(-1)),
}
RIGHT = ["cispo", "importance_sampling", "masked_is", *sorted(ANCHORED_ON_BATCH)]


@pytest.mark.parametrize("how", RESHAPED)
@pytest.mark.parametrize("loss", RIGHT)
def test_a_reshaped_distribution_gives_the_policy_gradient_of_what_it_can_draw(loss, how):
    settings, log_mu = RESHAPED[how]
    computed = expected_gradient(settled(loss=loss, **settings), log_mu)
    np.testing.assert_allclose(computed, policy_gradient(log_mu.exp() > 0), atol=1e-9)


@pytest.mark.parametrize(
    ("loss", "further"), [("ppo", {}), ("gspo", {}), ("ipo", {"loss_kwargs": {"delta": 0.1}})]
)
def test_anchored_on_the_sampler_a_clip_drops_tokens_from_the_first_step_on(loss, further):
    """Negative control: as in version 0.2.0, with the check passed by."""
    # the kept mass is 0.72
    log_mu = LOGITS.masked_fill(torch.arange(5) > 1, -math.inf).log_softmax(-1)
    computed = expected_gradient(settled(loss=loss, **further), log_mu)
    assert np.abs(computed.numpy() - policy_gradient(log_mu.exp() > 0)).max() > 0.05


@pytest.mark.parametrize(
    "loss", sorted(ANCHORED_ON_SAMPLER - {"cispo", "distill", "masked_is", "importance_sampling"})
)
def test_a_loss_that_measures_the_distance_to_the_sampler_is_refused(loss):
    with pytest.raises(
        ConfigError, match=rf"with top_p the ratio.*{loss!r} drops tokens.*use cispo, .* or ppo"
    ):
        settled(loss=loss, top_p=0.9)
    settled(loss=loss)


@pytest.mark.parametrize("kind", [RLConfig, GRPOConfig])
def test_a_clip_is_anchored_on_the_batch_unless_the_caller_decides(kind, caplog):
    config = settled(kind, loss="ppo", top_p=0.9, min_p=0.1)
    assert (config.anchor, config.tis_cap) == ("recomputed", 2.0)
    assert (
        "min_p, top_p: tokens are not sampled from the distribution that is trained; anchor = rec"
        in caplog.text
    )
    config.top_p, config.min_p = 1.0, 0.0
    config.resolve()
    assert (config.anchor, config.tis_cap) == ("sampler", None)
    assert settled(kind, loss="ppo", top_p=0.9, tis_cap=3.0).tis_cap == 3.0
    with pytest.raises(
        ConfigError, match="drops tokens whose ratio is far from 1: leave anchor out"
    ):
        settled(kind, loss="ppo", top_p=0.9, anchor="sampler")
    with pytest.raises(
        ConfigError, match="geo_mask takes the gap between sampler and trainer for an error"
    ):
        settled(kind, loss="ppo", top_p=0.9, geo_mask=[0.9, 1.1])


def test_with_top_k_every_token_is_trained_in_the_first_step(tmp_path):
    log = run(small_trainer(tmp_path, loss="ppo", top_k=20, max_steps=1))
    # the mass of 20 of 110 tokens, far below the clip at 0.8
    assert 0 < log.steps[0]["ratio/mean"] < 0.8
    assert log.steps[0]["correction/factor"] == pytest.approx(log.steps[0]["ratio/mean"], rel=1e-4)


# --- losses by name -------------------------------------------------------------------------------

BY_NAME = {
    "ppo": {"loss": "ppo"},
    "ppo_dual_clip": {"loss": "ppo", "dual_clip": 3.0},
    "cispo": {"loss": "cispo", "mask_ratio_low": 0.0, "mask_ratio_high": math.inf},
    "cispo_keep_mask": {"loss": "cispo"},
    "masked_is": {"loss": "masked_is"},
    "importance_sampling": {
        "loss": "importance_sampling",
        "mask_ratio_low": 0.0,
        "mask_ratio_high": math.inf,
    },
    "reinforce": {"loss": "reinforce"},
    "dppo_tv": {"loss": "dppo_tv", "loss_kwargs": {"ratio_cap": None}},
    "dppo_tv_capped": {"loss": "dppo_tv"},
    "dppo_kl": {"loss": "dppo_kl", "loss_kwargs": {"ratio_cap": None}},
    "gspo": {"loss": "gspo"},
    "sapo": {"loss": "sapo"},
    "vespo": {"loss": "vespo"},
    "ipo": {"loss": "ipo", "loss_kwargs": {"delta": 0.1}},
}


def gradient_of(config):
    loss = resolve_loss(config.loss, **config.loss_parameters())
    return gradient(Objective.of(loss, config), row())[1]


@pytest.mark.parametrize("golden", sorted(BY_NAME))
def test_a_loss_that_is_named_in_the_settings_gives_the_golden_gradient(golden):
    expected = GOLDEN["losses"][golden]["dloss_dlogp"]
    assert gradient_of(settled(**BY_NAME[golden])).tolist() == pytest.approx(
        expected, rel=1e-9, abs=1e-12
    )


def test_every_loss_can_be_named_and_trains(tmp_path):
    losses_named = {settings["loss"] for settings in BY_NAME.values()}
    # test_imitation, test_teacher
    without_rewards = {name for name, row in OBJECTIVES.items() if row.component != "rl"}
    assert set(LOSSES) - losses_named - without_rewards <= {"dro"}
    for name in LOSSES.keys() - without_rewards:
        (step,) = run(small_trainer(tmp_path / name, loss=name, max_steps=1)).steps
        assert math.isfinite(step["loss"])
        assert step["grad_norm"] > 0, name


def test_clips_of_ppo_reach_it():
    two_sided = GOLDEN["losses"]["ppo_two_sided"]
    delta = two_sided["parameters"]["delta"]
    assert gradient_of(settled(loss="ppo", delta=delta)).tolist() == pytest.approx(
        two_sided["dloss_dlogp"]
    )
    higher = GOLDEN["losses"]["ppo_clip_higher"]
    parameters = higher["parameters"]
    config = settled(
        loss="ppo", epsilon=parameters["epsilon_low"], epsilon_high=parameters["epsilon_high"]
    )
    assert gradient_of(config).tolist() == pytest.approx(higher["dloss_dlogp"])


def test_a_loss_keeps_its_own_bounds_unless_others_are_given():
    # a bound of tokens, 0.2, would never clip a sequence's ratio
    gspo = {"epsilon_low": 3e-4, "epsilon_high": 4e-4}
    assert settled(loss="gspo").loss_parameters() == gspo
    icepop = {"mask_ratio_low": 0.125, "mask_ratio_high": 8.0}
    assert settled(GRPOConfig, loss_type="masked_is").loss_parameters() == icepop
    assert settled(loss="dppo_kl").loss_parameters() == {"ratio_cap": 5.0}
    assert settled(loss="dapo").loss_parameters() == {"epsilon_low": 0.2, "epsilon_high": 0.28}
    assert (
        settled(loss="dapo", loss_kwargs={"epsilon_high": 0.3}).loss_parameters()["epsilon_high"]
        == 0.3
    )


@pytest.mark.parametrize("name", ["gspo", "masked_is"])
def test_bounds_of_a_loss_are_the_defaults_of_its_function(name):
    signature = inspect.signature(LOSSES[name]).parameters
    assert settled(loss=name).loss_parameters() == {
        parameter: signature[parameter].default for parameter in OBJECTIVES[name].reads.values()
    }


@pytest.mark.parametrize("kind", [RLConfig, GRPOConfig])
@pytest.mark.parametrize("name", ["ppo", "grpo", "dapo", "dr_grpo", "bnpo", "gspo"])
def test_epsilon_alone_is_both_bounds_of_the_clip(kind, name):
    assert settled(kind, loss=name, epsilon=0.01).loss_parameters() == {
        "epsilon_low": 0.01,
        "epsilon_high": 0.01,
    }
    both = settled(kind, loss=name, epsilon=0.01, epsilon_high=0.02)
    assert both.loss_parameters() == {"epsilon_low": 0.01, "epsilon_high": 0.02}
    low = settled(kind, loss=name).loss_parameters()["epsilon_low"]
    settings_made = settled(kind, loss=name, epsilon_high=0.5)
    assert settings_made.loss_parameters() == {"epsilon_low": low, "epsilon_high": 0.5}
    none = settled(kind, loss=name, epsilon_high=None)
    assert none.loss_parameters() == {"epsilon_low": low, "epsilon_high": low}


@pytest.mark.parametrize("kind", [RLConfig, GRPOConfig])
def test_epsilon_high_is_the_cap_of_cispo(kind):
    config = settled(kind, loss_type="cispo", epsilon_high=1.2, beta=0.0, mask_ratio_high=100.0)
    assert config.loss_parameters()["ratio_cap"] == 1.2
    rho = torch.tensor(INPUTS["rho"], dtype=torch.float64).clamp(max=1.2)
    assert torch.allclose(
        gradient_of(config), -rho * torch.tensor(INPUTS["A"], dtype=torch.float64)
    )
    with pytest.raises(ConfigError, match=r"epsilon_high is 0.2, the cap of the ratio: at least 1"):
        settled(kind, loss="cispo", epsilon_high=0.2)
    with pytest.raises(
        ConfigError, match="ratio_cap and epsilon_high are one bound of the loss 'cispo'"
    ):
        settled(kind, loss="cispo", epsilon_high=2.0, ratio_cap=3.0)


def own_loss(row, *, epsilon_low=0.2):
    return -row.log_pi * row.advantage


@pytest.mark.parametrize("kind", [RLConfig, GRPOConfig])
@pytest.mark.parametrize("name", [*OBJECTIVES, own_loss, f"{__name__}:own_loss"])
def test_a_bound_that_the_loss_does_not_read_is_refused(kind, name):
    values = {
        "epsilon": 0.1,
        "epsilon_high": 1.5,
        "delta": 9.0,
        "dual_clip": 3.0,
        "ratio_cap": 4.0,
        "ratio_floor": 0.1,
    }
    values |= {"mask_ratio_low": 0.2, "mask_ratio_high": 7.0}
    assert values.keys() == BOUNDS.keys()
    reads = OBJECTIVES[name].reads if name in OBJECTIVES else {"epsilon": "epsilon_low"}
    needed = {"teacher": "t"} if name in ("distill", "gkd") else {}
    for bound, value in values.items():
        if bound in reads:
            assert (
                settled(kind, loss=name, **needed, **{bound: value}).loss_parameters()[reads[bound]]
                == value
            )
        else:
            listed = ", ".join(reads) or "none"
            with pytest.raises(
                ConfigError, match=f"{bound} is {value}, a bound that the loss .* reads: {listed}$"
            ):
                settled(kind, loss=name, **needed, **{bound: value})


def test_without_its_cap_one_rare_token_carries_any_gradient():
    """Negative control of the cap: token 5 was sampled with probability 0.02 and has 0.3 now."""
    capped, free = (
        gradient_of(settled(**BY_NAME[name]))[4] for name in ("dppo_tv_capped", "dppo_tv")
    )
    assert float(free) > 7
    assert float(capped) < 2.6


# --- what does not go together --------------------------------------------------------------------


@pytest.mark.parametrize("loss", sorted(ANCHORED_ON_SAMPLER))
def test_a_correction_on_a_loss_that_has_the_sampler_in_it_is_refused(loss):
    for anchor in ("sampler", "recomputed"):
        with pytest.raises(ConfigError, match="would count twice: leave tis_cap out, or use ppo"):
            settled(loss=loss, tis_cap=2.0, anchor=anchor)


@pytest.mark.parametrize("loss", sorted({OBJECTIVES[name].loss for name in ANCHORED_ON_BATCH}))
def test_a_correction_needs_the_anchor_of_the_batch(loss):
    with pytest.raises(ConfigError, match="would count twice: set anchor='recomputed'"):
        settled(loss=loss, tis_cap=2.0)
    settled(loss=loss, tis_cap=2.0, anchor="recomputed")


def test_stacked_it_would_count_twice():
    """Negative control: the gradient of the token that the sampler found unlikely, with the check
    passed by."""
    once = gradient(Objective(resolve_loss("importance_sampling")), row())[1]
    twice = gradient(Objective(resolve_loss("importance_sampling"), {"tis_cap": 100.0}), row())[1]
    rho = torch.tensor(INPUTS["rho"], dtype=torch.float64)
    assert torch.allclose(twice, once * rho)
    assert float(twice[4] / once[4]) == pytest.approx(15)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"anchor": "recomputed"}, "the loss 'cispo' uses the sampler's log-probabilities only"),
        (
            {"anchor": "recomputed", "loss": "reinforce"},
            "uses the sampler's log-probabilities only",
        ),
        (
            {"anchor": "recomputed", "loss": "ppo"},
            "every ratio of the loss is 1 and nothing corrects",
        ),
        ({"delta": 3.0, "loss": "dppo_kl"}, "its own delta is a key of loss_kwargs"),
        (
            {"geo_mask": [1.1, 1.2]},
            r"geo_mask is \[1.1, 1.2\]; it must be two numbers on both sides of 1",
        ),
        ({"geo_mask": 0.5}, "geo_mask is 0.5"),
        (
            {"num_iterations": 3, "max_steps": 10},
            "max_steps 10 is not a multiple of the 3 steps .*use 9 or 12",
        ),
        ({"num_iterations": 0}, "num_iterations must be a whole number from 1 to 1000000, not 0"),
        ({"beta": -1.0}, "beta must be a number from 0 to 1000000000, not -1.0"),
        ({"kl_type": "k4"}, "kl_type must be one of k1, k2, k3, not 'k4'"),
        ({"gamma": 0.9}, "it needs credit='turn'"),
        ({"credit": "turn", "advantage": "rloo"}, "use 'mean' or 'best' or 'none'"),
        (
            {"ref_model_mixup_alpha": 1.5},
            "ref_model_mixup_alpha must be a number from 0 to 1, not 1.5",
        ),
    ],
    ids=str,
)
def test_what_makes_no_sense_is_refused_with_the_reason(settings, said):
    with pytest.raises(ConfigError, match=said):
        settled(**settings)


def test_what_makes_sense_is_accepted():
    settled(
        loss="ppo",
        anchor="recomputed",
        num_iterations=2,
        max_steps=10,
        tis_cap=2.0,
        delta=3.0,
        dual_clip=3.0,
    )
    settled(loss="cispo", anchor="recomputed", geo_mask=(0.9, 1.1))
    settled(loss="reinforce", anchor="recomputed", tis_cap=2.0)
    settled(loss="ppo", anchor="recomputed", geo_mask=(0.9, 1.1))
    settled(loss="ppo", anchor="recomputed", max_off_policy_steps=0)
    settled(loss=lambda row: row.log_pi, tis_cap=2.0, anchor="recomputed")
    settled(sequence_mask_cap=2.0, opsm_delta=0.1)


# --- the formula ----------------------------------------------------------------------------------


def test_decoupled_ppo_clips_around_the_batch_and_weighs_by_the_sampler():
    old, cap = [0.45, 0.7, 0.11, 0.8, 0.1], 1.1
    tokens = row(old)
    _, computed = gradient(Objective(resolve_loss("ppo"), {"tis_cap": cap}), tokens)
    pi, mu, o = np.array(INPUTS["pi"]), np.array(INPUTS["mu"]), np.array(old)
    advantage, r = np.array(INPUTS["A"]), pi / o
    clipped = ((advantage > 0) & (r > 1.2)) | ((advantage < 0) & (r < 0.8))
    expected = np.where(clipped, 0.0, -r * advantage) * np.minimum(o / mu, cap)
    np.testing.assert_allclose(computed.numpy(), expected, rtol=1e-9)
    assert clipped.any()


@given(
    st.lists(
        st.tuples(*[st.floats(-3, -0.01)] * 3, st.floats(-2, 2), st.booleans()),
        min_size=1,
        max_size=8,
    ),
    st.sampled_from(["ppo", "gspo", "sapo", "reinforce"]),
    st.sampled_from(
        [
            {"tis_cap": 1.5},
            {"sequence_mask_cap": 1.2},
            {"geo_mask": (0.9, 1.1)},
            {"opsm_delta": 0.1},
        ]
    ),
)
def test_a_correction_weighs_or_drops_and_never_turns_a_gradient(rows, loss, correction):
    pi, mu, old, advantage, mask = (
        torch.tensor(column, dtype=None) for column in zip(*rows, strict=True)
    )
    columns = [values.double() for values in (pi, mu, advantage, old)]
    tokens = LossInput(
        columns[0].requires_grad_(), columns[1], columns[2], mask, torch.zeros(len(rows), dtype=int)
    )
    tokens = LossInput(
        tokens.log_pi, tokens.log_mu, tokens.advantage, mask, tokens.seq_ids, columns[3]
    )
    _, plain = gradient(Objective(resolve_loss(loss)), tokens)
    made, corrected = gradient(Objective(resolve_loss(loss), correction), tokens)
    factor = made.metrics["correction/factor"]
    assert torch.allclose(corrected, plain * factor)
    assert bool((factor >= 0).all())
    assert not corrected[~mask].any()
    if "tis_cap" not in correction:
        assert len(set(factor[mask].tolist())) <= 1  # a sequence goes or stays as one


def test_a_dropped_sequence_leaves_nothing_behind_even_where_its_loss_overflows():
    tokens = row([1e-9, 0.9, 0.1, 0.6, 0.3])
    made, _ = gradient(
        Objective(lambda row: row.log_pi * math.inf, {"sequence_mask_cap": 1.0}), tokens
    )
    dropped = made.metrics["correction/factor"] == 0
    assert dropped.tolist() == [False, False, False, True, True]
    assert made.losses[dropped].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_the_penalty_is_added_with_its_weight(kind):
    tokens, log_ref = row(), torch.tensor(INPUTS["log_mu"], dtype=torch.float64)
    made, computed = gradient(
        Objective(resolve_loss("cispo"), beta=0.3, kl_type=kind), tokens, log_ref
    )
    _, plain = gradient(Objective(resolve_loss("cispo")), tokens)
    golden = GOLDEN["kl"][kind]
    np.testing.assert_allclose(
        (computed - plain).numpy(), 0.3 * np.array(golden["dvalue_dlogp"]), rtol=1e-9
    )
    np.testing.assert_allclose(made.metrics["kl_ref"].numpy(), golden["value"], rtol=1e-9)


# --- several steps on a batch ---------------------------------------------------------------------


def test_two_steps_on_a_batch_are_a_hand_written_ppo(tmp_path):
    """Against a loop of a few lines: log-probs of the batch's policy once, then two clipped steps
    of AdamW."""
    settings = {
        "loss": "ppo",
        "anchor": "recomputed",
        "num_iterations": 2,
        "max_steps": 2,
        "learning_rate": 2e-2,
        "deterministic": True,
        "max_off_policy_steps": 0,
        "epsilon": 0.02,
        "max_grad_norm": 1e9,
        "packing": False,
    }
    trainer = small_trainer(tmp_path, **settings)
    model = copy.deepcopy(trainer.model)
    log = run(trainer)
    rows = trainer.batch.rows_R[0]

    install_logprob_forward(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2, betas=(0.9, 0.999), weight_decay=0.0)
    tensors, old, losses, clipped = [packed_row.to_tensors() for packed_row in rows], [], [], 0
    for tensors_of_row in tensors:
        with torch.no_grad():
            old.append(model(**forward_arguments(tensors_of_row)).logprobs)
    for _ in range(2):
        total = 0.0
        optimizer.zero_grad()
        for tensors_of_row, before in zip(tensors, old, strict=True):
            ratio = (model(**forward_arguments(tensors_of_row)).logprobs - before).exp()
            surrogate = torch.minimum(
                ratio * tensors_of_row["advantage"],
                ratio.clamp(0.98, 1.02) * tensors_of_row["advantage"],
            )
            clipped += int(((ratio - 1).abs() > 0.02).sum())
            loss = -(
                tensors_of_row["weight"] * torch.where(tensors_of_row["loss_mask"], surrogate, 0.0)
            ).sum()
            loss.backward()
            total += float(loss)
        optimizer.step()
        losses.append(total)
    assert [step["loss"] for step in log.steps] == pytest.approx(losses, abs=1e-7)
    assert clipped > 0
    for name, parameter in trainer.model.named_parameters():
        assert torch.allclose(parameter, dict(model.named_parameters())[name], atol=2e-6), name


def test_the_second_step_compares_with_the_first_ones_policy(tmp_path):
    log = run(
        small_trainer(
            tmp_path, num_iterations=2, max_steps=4, learning_rate=1e-2, max_off_policy_steps=0
        )
    )
    means = [abs(step["ratio/mean"] - 1) for step in log.steps]
    assert means[0] < 1e-4
    assert means[2] < 1e-4
    assert means[1] > 1e-4  # negative control: one step later the same tokens are off-policy
    assert [step["reward/mean"] for step in log.steps[:2]] == [log.steps[0]["reward/mean"]] * 2


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_the_lag_counts_batches_and_not_steps(tmp_path, lag):
    log = run(small_trainer(tmp_path, num_iterations=3, max_steps=12, max_off_policy_steps=lag))
    ages = [step["staleness/max"] for step in log.steps]
    assert max(ages) <= lag
    assert len(log.steps) == 12
    if lag:
        assert max(ages) > 0


def test_a_batch_is_never_cut_by_a_checkpoint(tmp_path):
    trainer = small_trainer(
        tmp_path, num_iterations=2, max_steps=4, save_strategy="steps", save_steps=1
    )
    run(trainer)
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == [
        "checkpoint-2",
        "checkpoint-4",
    ]
    every = small_trainer(tmp_path / "one", max_steps=2, save_strategy="steps", save_steps=1)
    run(every)
    assert sorted(path.name for path in (tmp_path / "one").glob("checkpoint-*")) == [
        "checkpoint-1",
        "checkpoint-2",
    ]


RUN = {
    "deterministic": True,
    "num_iterations": 2,
    "loss": "ppo",
    "anchor": "recomputed",
    "tis_cap": 2.0,
}


@pytest.mark.parametrize("lag", [0, 1])
def test_a_resumed_run_ends_as_one_that_was_not_stopped(tmp_path, lag):
    settings = {**RUN, "max_off_policy_steps": lag, "save_strategy": "steps", "save_steps": 2}
    uninterrupted = run(small_trainer(tmp_path / "whole", max_steps=6, **settings))
    run(small_trainer(tmp_path / "parts", max_steps=2, **settings))
    resumed = run(
        small_trainer(tmp_path / "parts", max_steps=6, **settings), resume_from_checkpoint=True
    )
    assert resumed.losses == uninterrupted.losses[2:]


def test_a_single_step_needs_no_pass_of_its_own_for_the_anchor(tmp_path):
    """In the first step the policy of the batch is the policy: the gradient is -A, and the
    correction o/μ is 1."""
    trainer = small_trainer(tmp_path, loss="ppo", anchor="recomputed", tis_cap=2.0, max_steps=1)
    (step,) = run(trainer).steps
    assert all(packed_row.old_logprobs is None for packed_row in trainer.batch.rows_R[0])
    assert step["correction/factor"] == pytest.approx(1, abs=1e-4)


def test_trained_text_that_nobody_sampled_is_anchored_on_the_policy_of_the_batch(tmp_path):
    trainer = small_trainer(tmp_path)
    batch = first_batch(trainer)
    trainer.close()
    row_tensors = batch.rows_R[0][0].to_tensors()
    row_tensors["version"] = torch.full_like(row_tensors["version"], -2)
    log_pi = torch.linspace(-2, -1, len(row_tensors["sampler_logprobs"]))
    assert torch.equal(LossInput.of(row_tensors, log_pi, "sampler").log_mu, log_pi)
    row_tensors["old_logprobs"] = log_pi - 1
    assert torch.equal(LossInput.of(row_tensors, log_pi, "sampler").log_mu, log_pi - 1)
    assert LossInput.of(row_tensors, log_pi, "sampler").log_old is None
    assert torch.equal(LossInput.of(row_tensors, log_pi, "recomputed").log_old, log_pi - 1)


def test_a_policy_learns_with_several_steps_on_a_batch_a_correction_and_a_reference(tmp_path):
    trainer = small_trainer(
        tmp_path,
        **{**RUN, "deterministic": False},
        beta=1e-3,
        sync_ref_model=True,
        ref_model_sync_steps=4,
        batch_size=32,
        rollouts_per_example=8,
        learning_rate=4e-3,
        max_tokens=6,
        max_steps=64,
    )
    log = run(trainer)
    rewards = [step["reward/mean"] for step in log.steps]
    assert sum(rewards[:3]) / 3 < 0.3
    assert sum(rewards[-4:]) / 4 > 0.8


def test_kl_of_equal_policies_is_zero_for_every_kind():
    same, mask = torch.tensor([-0.5, -1.5]), torch.tensor([True, True])
    assert all(
        kl_penalty(same, same, mask, kind).tolist() == [0.0, 0.0] for kind in ("k1", "k2", "k3")
    )


# --- entropy --------------------------------------------------------------------------------------


def test_a_bonus_for_entropy_has_the_gradient_of_the_entropy_and_a_sampled_one_has_none():
    """In expectation over what the policy says after one token, with its probabilities, by the
    whole vocabulary."""
    logits = torch.randn(
        5, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    ).requires_grad_()

    def gradient_of(loss):
        return torch.autograd.grad(loss, logits)[0]

    def entropy():
        log_p = logits.log_softmax(-1)
        return -(log_p.exp() * log_p).sum()

    def expected(loss_of_token):
        p = logits.softmax(-1).detach()
        return sum(p[token] * loss_of_token(token) for token in range(5))

    def bonus(token):
        log_pi = logits.log_softmax(-1)[token : token + 1]
        tokens = LossInput(log_pi, log_pi.detach(), log_pi.detach() * 0, torch.ones(1, dtype=torch.bool),
                           torch.zeros(1, dtype=torch.int64), entropy=entropy()[None])  # fmt: skip
        return Objective(resolve_loss("reinforce"), entropy_coef=0.3)(tokens).losses.sum()

    torch.testing.assert_close(gradient_of(expected(bonus)), -0.3 * gradient_of(entropy()))
    sampled = gradient_of(expected(lambda token: 0.3 * logits.log_softmax(-1)[token]))
    # what log π of the sampled token has
    assert sampled.abs().max() < 1e-12 < gradient_of(entropy()).abs().max()


@pytest.mark.parametrize("coefficient", [0.0, 0.3])
def test_a_run_on_the_bonus_alone_becomes_less_certain(tmp_path, coefficient):
    """Rewards of 0 without a baseline: nothing but the bonus moves the policy."""
    env = toy_env(reward=lambda completion, **_: 0.0)
    settings = {
        "advantage": "none",
        "loss": "reinforce",
        "max_steps": 6,
        "learning_rate": 1e-2,
        "deterministic": True,
    }
    policy = small_policy()
    with torch.no_grad():
        policy.lm_head.weight.mul_(20)  # certain at first
    entropies = [
        row["entropy"]
        for row in run(
            small_trainer(tmp_path, env, policy, entropy_coef=coefficient, **settings)
        ).steps
    ]
    assert (entropies[-1] > entropies[0] + 0.05) is (coefficient > 0)
