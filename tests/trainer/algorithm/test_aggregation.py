"""Per-token weights: golden reductions, who is in a denominator, and gradients no split can change.

Source: aggregation.py, together with packing.py and logprobs.py for the last part.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from support.tiny_models import VOCABULARY, tiny_gpt2, tiny_llama, tiny_qwen3
from verifiers.errors import ConfigError
from verifiers.rollouts.turn import Turn
from verifiers_trainer.algorithm.aggregation import AGGREGATIONS, step_weights
from verifiers_trainer.algorithm.losses import LossInput, resolve_loss
from verifiers_trainer.algorithm.packing import pack
from verifiers_trainer.algorithm.samples import Sample, rollout_samples
from verifiers_trainer.policy.logprobs import install_logprob_forward

GOLDEN = json.loads((Path(__file__).parents[1] / "data" / "golden_losses.json").read_text())
EVERY_AGGREGATION = pytest.mark.parametrize("name", list(AGGREGATIONS))


def sample(trained: int, rollout: int = 0, group: int = 0, prompt: int = 1) -> Sample:
    turn = Turn(np.ones(prompt), np.full(trained, 5), np.full(trained, -1.0))
    return rollout_samples([turn], 1.0, rollout=rollout, group=group).samples[0]


def masked(sample: Sample) -> Sample:
    return replace(sample, loss_mask=np.zeros(sample.num_tokens, bool))


@pytest.mark.parametrize("loss_name", ["ppo", "cispo", "gspo"])
@pytest.mark.parametrize("name", ["token_mean", "sequence_mean", "constant_length", "sequence_sum"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-5)])
def test_golden_reductions(name, loss_name, dtype, tolerance):
    samples = [sample(3, rollout=0), sample(2, rollout=1)]
    weights = step_weights(samples, name, max_len=3).weights
    # without the prompt token
    weight = torch.tensor(np.concatenate([w[1:] for w in weights]), dtype=dtype)
    inputs = GOLDEN["inputs"]
    log_pi = torch.tensor(inputs["log_pi"], dtype=dtype, requires_grad=True)
    row = LossInput(
        log_pi,
        torch.tensor(inputs["log_mu"], dtype=dtype),
        torch.tensor(inputs["A"], dtype=dtype),
        torch.ones(5, dtype=torch.bool),
        torch.tensor(inputs["seq"]),
    )
    value = (
        weight * resolve_loss(loss_name, **GOLDEN["losses"][loss_name]["parameters"])(row)
    ).sum()
    (grad,) = torch.autograd.grad(value, log_pi)
    expected = GOLDEN["reductions"][name][loss_name]
    assert value.item() == pytest.approx(expected["value"], rel=tolerance, abs=tolerance)
    np.testing.assert_allclose(
        grad.numpy(), expected["dloss_dlogp"], rtol=tolerance, atol=tolerance
    )


def test_prompt_mean_gives_every_group_the_same_weight():
    samples = [sample(2, 0, 0), sample(6, 1, 0), sample(1, 2, 1)]
    result = step_weights(samples, "prompt_mean")
    assert [w.max() for w in result.weights] == pytest.approx([1 / 16, 1 / 16, 1 / 2])
    assert result.num_tokens == 9


@pytest.mark.parametrize("name", ["token_mean", "sequence_mean", "prompt_mean"])
def test_means_sum_to_one_over_the_step(name):
    samples = [sample(3, 0, 0, prompt=4), sample(2, 1, 0), sample(7, 1, 0), sample(1, 2, 1)]
    assert sum(w.sum() for w in step_weights(samples, name).weights) == pytest.approx(1.0)


@EVERY_AGGREGATION
def test_a_forked_rollout_counts_once_and_its_samples_share_its_weight(name):
    forked = step_weights([sample(4, 0), sample(2, 0), sample(6, 1)], name, max_len=10)
    unforked = step_weights([sample(6, 0), sample(6, 1)], name, max_len=10)
    assert forked.num_tokens == unforked.num_tokens == 12
    assert forked.weights[0].sum() + forked.weights[1].sum() == pytest.approx(
        unforked.weights[0].sum()
    )
    assert forked.weights[2].sum() == pytest.approx(unforked.weights[1].sum())


@EVERY_AGGREGATION
def test_what_carries_no_loss_is_in_no_denominator(name):
    trained = [sample(3, 0, 0), sample(2, 1, 0)]
    before, after, sibling = (masked(sample(*sizes)) for sizes in [(5, 2, 1), (9, 3, 1), (4, 4, 0)])
    alone = step_weights(trained, name, max_len=10)
    among = step_weights([before, *trained, after, sibling], name, max_len=10)
    for weight, expected in zip(among.weights[1:3], alone.weights, strict=True):
        np.testing.assert_array_equal(weight, expected)
    assert not any(among.weights[i].any() for i in (0, 3, 4))
    assert among.num_tokens == 5


@EVERY_AGGREGATION
def test_a_step_without_kept_tokens_is_no_signal(name):
    result = step_weights([masked(sample(3))], name, max_len=10)
    assert result.num_tokens == 0
    assert not result.weights[0].any()
    assert step_weights([], name, max_len=10).num_tokens == 0


def test_wrong_names_and_a_missing_length_say_what_to_do():
    with pytest.raises(ConfigError, match="known: token_mean"):
        step_weights([], "tokenmean")
    with pytest.raises(ConfigError, match="max_completion_len"):
        step_weights([], "constant_length")


# --- the invariant: the gradient does not depend on how the step was laid out ---------------------


def ragged_samples(model, count: int = 13) -> list[Sample]:
    """Rollouts of 4 to 23 tokens in three groups, sampled by a policy near ``model``, on which the
    log-probability forward is installed. Rollout 1 is forked, rollout 2 carries no loss."""
    install_logprob_forward(model)
    rng = np.random.default_rng(0)
    samples: list[Sample] = []
    for rollout in range(count):
        turns = []
        for _ in range(2 if rollout == 1 else 1):
            prompt, completion = (
                rng.integers(3, VOCABULARY, rng.integers(2, 12)) for _ in range(2)
            )
            turns.append(Turn(prompt, completion, -rng.uniform(0.1, 3.0, len(completion))))
        made = rollout_samples(
            turns, float(rng.normal()), rollout=rollout, group=rollout // 5, temperature=0.7
        )
        for sample in map(masked, made.samples) if rollout == 2 else made.samples:
            with torch.no_grad():
                out = model(
                    input_ids=torch.from_numpy(sample.token_ids).long(), inv_temperature=1 / 0.7
                )
            near = (
                out.logprobs.numpy() + rng.normal(0, 0.05, sample.num_tokens)
            ) * sample.loss_mask
            samples.append(replace(sample, sampler_logprobs=near.astype(np.float32)))
    return samples


def step_gradient(
    model, samples, aggregation, *, loss="cispo", world=1, num_chunks=None, **layout
) -> torch.Tensor:
    """The averaged gradient of one step as ``world`` data-parallel ranks would compute it."""
    weights = step_weights(samples, aggregation, max_len=16).weights
    loss_of, total = resolve_loss(loss), None
    for rank_rows in pack(samples, weights, world=world, **layout):
        model.zero_grad()
        for row in rank_rows:
            tensors = row.to_tensors()
            out = model(
                input_ids=tensors["token_ids"],
                position_ids=tensors["position_ids"],
                inv_temperature=tensors["inv_temperature"],
                loss_mask=tensors["loss_mask"],
                num_chunks=num_chunks,
            )
            names = ("sampler_logprobs", "advantage", "loss_mask", "seq_ids")
            losses = loss_of(LossInput(out.logprobs, *(tensors[n] for n in names)))
            (world * (tensors["weight"] * losses).sum()).backward()
        gradient = torch.cat([p.grad.flatten() for p in model.parameters()]) / world
        total = gradient if total is None else total + gradient
    assert total is not None
    return total


LAYOUTS = {
    "one sample per row": {"max_tokens": 64, "packing": False},
    "small rows": {"max_tokens": 24},
    "two ranks": {"max_tokens": 64, "world": 2},
    "three ranks, a filler": {"max_tokens": 512, "world": 3},
    "more ranks than samples": {"max_tokens": 512, "world": 16},
    "one chunk": {"max_tokens": 512, "num_chunks": 1},
    "seven chunks": {"max_tokens": 64, "num_chunks": 7},
    "more chunks than tokens": {"max_tokens": 24, "num_chunks": 60},
}


@pytest.mark.parametrize(
    ("build", "tolerance"), [(tiny_gpt2, 1e-9), (tiny_llama, 1e-5), (tiny_qwen3, 1e-5)]
)
def test_the_gradient_does_not_depend_on_layout(build, tolerance):
    model = build()
    samples = ragged_samples(model)
    reference = step_gradient(model, samples, "sequence_mean", max_tokens=512)
    for name, layout in LAYOUTS.items():
        difference = (
            step_gradient(model, samples, "sequence_mean", **layout) - reference
        ).norm() / reference.norm()
        assert difference < tolerance, name
    order = np.random.default_rng(1).permutation(len(samples))
    shuffled = step_gradient(model, [samples[i] for i in order], "sequence_mean", max_tokens=64)
    assert (shuffled - reference).norm() / reference.norm() < tolerance


@EVERY_AGGREGATION
@pytest.mark.parametrize("loss", ["ppo", "gspo", "vespo"])
def test_the_gradient_does_not_depend_on_layout_for_any_aggregation(name, loss):
    model = tiny_gpt2()
    samples = ragged_samples(model, 8)
    reference = step_gradient(model, samples, name, loss=loss, max_tokens=512)
    split = step_gradient(model, samples, name, loss=loss, max_tokens=24, world=3)
    assert (split - reference).norm() / reference.norm() < 1e-9


def test_a_denominator_of_each_row_would_depend_on_layout():
    """Negative control: averaging inside every row, as trainers that split a batch used to do."""
    model = tiny_gpt2()
    samples = ragged_samples(model, 8)

    def local_mean(max_tokens: int) -> torch.Tensor:
        model.zero_grad()
        (rows,) = pack(samples, step_weights(samples, "token_mean").weights, max_tokens=max_tokens)
        for row in rows:
            t = row.to_tensors()
            out = model(input_ids=t["token_ids"], position_ids=t["position_ids"])
            losses = resolve_loss("cispo")(
                LossInput(
                    out.logprobs,
                    t["sampler_logprobs"],
                    t["advantage"],
                    t["loss_mask"],
                    t["seq_ids"],
                )
            )
            (losses.sum() / t["loss_mask"].sum() / len(rows)).backward()
        return torch.cat([p.grad.flatten() for p in model.parameters()])

    reference = local_mean(512)
    assert (local_mean(24) - reference).norm() / reference.norm() > 1e-2


def test_dead_masked_and_filler_rows_leave_the_gradient_untouched():
    model = tiny_gpt2()
    samples = ragged_samples(model)
    without = [s for s in samples if s.num_trained]
    reference = step_gradient(model, without, "token_mean", max_tokens=64)
    assert torch.allclose(
        step_gradient(model, samples, "token_mean", max_tokens=64), reference, rtol=0, atol=0
    )
    nothing = step_gradient(
        model, [s for s in samples if not s.num_trained], "token_mean", max_tokens=64, world=2
    )
    assert not nothing.any()
    # the filler reached every parameter, as sharded training needs
    assert len(nothing) == len(reference)
