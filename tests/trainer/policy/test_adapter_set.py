"""Several adapters over one model: their files are peft's, and none knows of the others."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file

from verifiers.errors import ConfigError
from verifiers_trainer.algorithm.datum_losses import DATUM_LOSSES, Datum
from verifiers_trainer.policy.adapter_set import AdamSettings, AdapterSet, LoraOptions
from verifiers_trainer.policy.builtin_models import build_tiny_model

ADAM = AdamSettings(learning_rate=1e-2)


@pytest.fixture(scope="module")
def adapters():
    return AdapterSet(build_tiny_model(seed=1))


def datum(seed: int, length: int = 7, **inputs: np.ndarray) -> Datum:
    ids = np.random.default_rng(seed).integers(1, 60, length + 1).astype(np.int32)
    return Datum(ids[:-1], ids[1:], inputs or {"weights": np.ones(length, np.float32)})


def train(adapters, adapter, seed, steps=3):
    """The weights after every step."""
    for step in range(steps):
        data = [datum(100 * seed + step), datum(100 * seed + 50 + step, 11)]
        adapters.forward_backward(adapter, data, "cross_entropy")
        adapter.optim_step(ADAM)
        yield {name: layer.b_OR.detach().clone() for name, layer in adapter.layers.items()}


def test_two_adapters_trained_in_turns_equal_two_runs_bit_for_bit(adapters):
    alone = [list(train(adapters, adapters.create(LoraOptions(4, seed)), seed)) for seed in (1, 2)]
    both = [train(adapters, adapters.create(LoraOptions(4, seed)), seed) for seed in (1, 2)]
    in_turns = list(zip(*both, strict=True))
    for number, run in enumerate(alone):
        for step, weights in enumerate(run):
            for name, value in weights.items():
                assert torch.equal(value, in_turns[step][number][name])
    # the control: another seed's data give other weights
    assert any(not torch.equal(alone[0][-1][name], alone[1][-1][name]) for name in alone[0][-1])


def test_the_base_is_not_changed(adapters):
    before = {name: value.clone() for name, value in adapters.model.state_dict().items()}
    list(train(adapters, adapters.create(LoraOptions(4, 3)), 3))
    for name, value in adapters.model.state_dict().items():
        assert torch.equal(value, before[name])
    assert all(parameter.grad is None for parameter in adapters.model.parameters())


def test_a_saved_adapter_goes_on_as_if_it_had_not_been_saved(adapters, tmp_path):
    adapter = adapters.create(LoraOptions(4, 5))
    steps = train(adapters, adapter, 5, steps=4)
    next(steps), next(steps)
    adapter.save(tmp_path / "a", "base", is_whole=True)
    again, about = adapters.load(tmp_path / "a", with_optimizer=True)
    assert (again.step, about["step"]) == (2, 2)
    without, _ = adapters.load(tmp_path / "a", with_optimizer=False)
    expected = next(steps)
    for each, is_equal in ((again, True), (without, False)):
        data = [datum(502), datum(552, 11)]
        adapters.forward_backward(each, data, "cross_entropy")
        each.optim_step(ADAM)
        got = [torch.equal(layer.b_OR, expected[name]) for name, layer in each.layers.items()]
        assert all(got) == is_equal


def test_peft_computes_the_same_with_a_saved_adapter(adapters, tmp_path):
    adapter = adapters.create(LoraOptions(4, 6))
    list(train(adapters, adapter, 6))
    adapter.save(tmp_path / "a", "base", is_whole=False)
    ids = list(range(3, 20))
    ours = adapters.logprobs(adapter.snapshot(), ids)
    model = PeftModel.from_pretrained(build_tiny_model(seed=1), str(tmp_path / "a")).eval()
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    theirs = logits.gather(-1, torch.tensor(ids[1:])[:, None])[:, 0].numpy()
    assert ours == pytest.approx(theirs, abs=1e-5)
    assert adapters.logprobs(None, ids) != pytest.approx(theirs, abs=1e-2)


@pytest.mark.parametrize("is_scaled_by_root", [False, True])
def test_an_adapter_of_peft_is_brought_in(adapters, tmp_path, is_scaled_by_root):
    config = LoraConfig(
        r=4, lora_alpha=7, target_modules=["q_proj", "down_proj"], use_rslora=is_scaled_by_root
    )
    model = get_peft_model(build_tiny_model(seed=1), config).eval()
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "lora_B" in name:
                value.normal_(generator=torch.Generator().manual_seed(1))
    model.peft_config["default"].base_model_name_or_path = "base"
    model.save_pretrained(str(tmp_path / "a"))
    adapter, _ = adapters.load(tmp_path / "a", with_optimizer=True)
    ids = list(range(3, 20))
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    theirs = logits.gather(-1, torch.tensor(ids[1:])[:, None])[:, 0].numpy()
    assert adapters.logprobs(adapter.snapshot(), ids) == pytest.approx(theirs, abs=1e-5)


def test_exchanged_weights_are_noticed(adapters, tmp_path):
    for seed in (1, 2):
        adapters.create(LoraOptions(4, seed)).save(tmp_path / str(seed), "base", is_whole=True)
    (tmp_path / "1/adapter_model.safetensors").write_bytes(
        (tmp_path / "2/adapter_model.safetensors").read_bytes()
    )
    with pytest.raises(ConfigError, match="other weights than were saved"):
        adapters.load(tmp_path / "1", with_optimizer=True)
    adapters.load(tmp_path / "2", with_optimizer=True)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"use_dora": True}, "use_dora is not supported"),
        ({"r": 5}, "another size"),
        ({"r": None}, "cannot be read"),
        ({"base_model_name_or_path": None}, "names no base"),
    ],
)
def test_other_adapters_are_refused(adapters, tmp_path, change, sentence):
    adapters.create(LoraOptions(4, 1)).save(tmp_path / "a", "base", is_whole=False)
    file = tmp_path / "a/adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(ConfigError, match=sentence):
        adapters.load(tmp_path / "a", with_optimizer=False)


def test_an_adapter_of_another_model_is_refused(adapters, tmp_path):
    adapters.create(LoraOptions(4, 1)).save(tmp_path / "a", "base", is_whole=False)
    file = tmp_path / "a/adapter_model.safetensors"
    save_file(
        {name.replace("layers", "blocks"): value for name, value in load_file(file).items()}, file
    )
    (tmp_path / "a/adapter.json").unlink()
    with pytest.raises(ConfigError, match="another model"):
        adapters.load(tmp_path / "a", with_optimizer=False)


def test_layers_are_chosen_by_kind(adapters):
    ends = {
        kind: {name.rpartition(".")[2] for name in adapters.create(options).layers}
        for kind, options in {
            "attention": LoraOptions(2, mlp=False, head=False),
            "mlp": LoraOptions(2, attention=False, head=False),
            "head": LoraOptions(2, attention=False, mlp=False),
        }.items()
    }
    assert ends == {
        "attention": {"q_proj", "k_proj", "v_proj", "o_proj"},
        "mlp": {"gate_proj", "up_proj", "down_proj"},
        "head": {"lm_head"},
    }
    with pytest.raises(ConfigError, match="no layer"):
        adapters.create(LoraOptions(2, attention=False, mlp=False, head=False))


def by_hand(name, logp, q, advantage, weights):
    """The equations again, in numpy."""
    ratio = np.exp(logp - q)
    clipped = np.clip(ratio, 0.8, 1.2)
    return {
        "cross_entropy": -np.sum(weights * logp),
        "importance_sampling": -np.sum(ratio * advantage),
        "ppo": -np.sum(np.minimum(ratio * advantage, clipped * advantage)),
        "cispo": -np.sum(clipped * advantage * logp),
        "dro": -np.sum(advantage * logp - 0.025 * (logp - q) ** 2),
    }[name]


@pytest.mark.parametrize("name", DATUM_LOSSES)
def test_losses(adapters, name):
    adapter = adapters.create(LoraOptions(4, 1))
    rng = np.random.default_rng(0)
    weights, advantage = (rng.normal(size=7).astype(np.float32) for _ in range(2))
    logp = adapters.logprobs(None, [*datum(9).token_ids, datum(9).target_ids[-1]])
    q = (logp + rng.normal(size=7) / 4).astype(np.float32)
    given = {"weights": weights, "advantages": advantage, "logprobs": q}
    inputs = {field: given[field] for field in DATUM_LOSSES[name].needed}
    result = adapters.forward_backward(adapter, [datum(9, **inputs)], name)
    assert result.loss == pytest.approx(by_hand(name, logp, q, advantage, weights), rel=1e-4)
    assert result.logprobs[0] == pytest.approx(logp, abs=1e-5)
    assert adapter.has_gradient
    # the gradient of B, by finite differences along itself
    layer = adapter.layers["lm_head"]
    gradient = layer.b_OR.grad.clone()
    direction, step = gradient / gradient.norm(), 1e-2
    if name == "cispo":  # whose ratio carries no gradient
        return
    losses = []
    for sign in (1, -1):
        with torch.no_grad():
            layer.b_OR.add_(sign * step * direction)
        losses.append(
            adapters.forward_backward(adapter, [datum(9, **inputs)], name, forward_only=True).loss
        )
        with torch.no_grad():
            layer.b_OR.sub_(sign * step * direction)
    assert (losses[0] - losses[1]) / (2 * step) == pytest.approx(float(gradient.norm()), rel=2e-2)


def test_gradients_add_up_and_a_forward_pass_has_none(adapters):
    one, two = (adapters.create(LoraOptions(4, 1)) for _ in range(2))
    adapters.forward_backward(one, [datum(1), datum(2, 9)], "cross_entropy")
    for each in (datum(1), datum(2, 9)):
        adapters.forward_backward(two, [each], "cross_entropy")
    adapters.forward_backward(two, [datum(3)], "cross_entropy", forward_only=True)
    for name, layer in one.layers.items():
        assert torch.allclose(layer.b_OR.grad, two.layers[name].b_OR.grad, atol=1e-5)


@pytest.mark.parametrize(
    ("changed", "loss", "config", "sentence"),
    [
        ({"inputs": {}}, "cross_entropy", {}, "needs weights"),
        ({"inputs": {"weights": np.ones(3, np.float32)}}, "cross_entropy", {}, "one number for"),
        (
            {"inputs": {"weights": np.full(7, np.nan, np.float32)}},
            "cross_entropy",
            {},
            "no finite number",
        ),
        ({"target_ids": np.full(7, 10**6, np.int32)}, "cross_entropy", {}, "outside of the model"),
        ({"token_ids": np.full(7, -1, np.int32)}, "cross_entropy", {}, "outside of the model"),
        ({}, "gspo", {}, "there is no loss 'gspo'"),
        ({}, "cross_entropy", {"beta": 1.0}, "has no setting 'beta'"),
        ({}, "ppo", {}, "needs "),
    ],
)
def test_what_cannot_be_computed_is_refused_before(adapters, changed, loss, config, sentence):
    adapter, whole = adapters.create(LoraOptions(4, 1)), datum(1)
    parts = {"token_ids": whole.token_ids, "target_ids": whole.target_ids, "inputs": whole.inputs}
    with pytest.raises(ConfigError, match=sentence):
        adapters.forward_backward(adapter, [whole, Datum(**parts | changed)], loss, config)
    assert not adapter.has_gradient


def test_a_step_without_a_whole_gradient_is_refused(adapters):
    adapter = adapters.create(LoraOptions(4, 1))
    with pytest.raises(ConfigError, match="no gradient"):
        adapter.optim_step(ADAM)
    adapters.forward_backward(adapter, [datum(1)], "cross_entropy")
    adapter.drop_gradient("request 3 failed")
    with pytest.raises(ConfigError, match="request 3 failed"):
        adapter.optim_step(ADAM)
    huge = datum(1, weights=np.full(7, 3e38, np.float32))
    adapters.forward_backward(adapter, [huge], "cross_entropy")
    with pytest.raises(ConfigError, match="not finite"):
        adapter.optim_step(ADAM)
    assert adapter.step == 0
    assert all(not layer.b_OR.any() for layer in adapter.layers.values())
    adapters.forward_backward(adapter, [datum(1)], "cross_entropy")
    assert adapter.optim_step(ADAM)["grad_norm"] > 0
