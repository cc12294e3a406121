"""A base in four bits under an adapter: the same for trainer and engine, small, saved and resumed
exactly; what it excludes is refused before anything is sampled."""

from __future__ import annotations

import importlib.util
import json

import pytest
import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM

from support.fake_vllm import FakeVLLM
from support.families import tiny_config
from support.training import (
    losses_of,
    metrics_of,
    run,
    small_config,
    small_policy,
    small_trainer,
    toy_env,
)
from verifiers.errors import ConfigError
from verifiers_trainer import RLTrainer, get_model, get_tokenizer
from verifiers_trainer.engines.embedded.engine import share_parameters
from verifiers_trainer.policy import quantization
from verifiers_trainer.policy.adapter_files import BASE
from verifiers_trainer.policy.adapters import load_adapter
from verifiers_trainer.policy.builtin_models import build_tiny_tokenizer
from verifiers_trainer.policy.exporting import export
from verifiers_trainer.policy.folder_client import load_folder

TINY = "builtin:tiny"
QLORA = {"use_lora": True, "quantize": "nf4", "lora_rank": 4, "learning_rate": 1e-2}
IDS = torch.arange(1, 40).unsqueeze(0)


def trainer(folder, model=TINY, **settings):
    return RLTrainer(model, toy_env(), small_config(folder, **{**QLORA, **settings}))


@torch.no_grad()
def logits(model):
    return model.eval()(IDS).logits


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """(folder of a run of four steps, its trainer)."""
    folder = tmp_path_factory.mktemp("run")
    trained = trainer(folder, max_steps=4, save_strategy="steps", save_steps=2, deterministic=True)
    run(trained)
    return folder, trained


def test_the_base_takes_a_third_and_its_head_and_norms_stay_as_they_are():
    model, full = get_model(TINY, quantize="nf4"), get_model(TINY)
    layers = dict(full.named_parameters())
    for name, parameter in model.named_parameters():
        is_matrix = name.endswith("proj.weight")
        assert parameter.dtype == (torch.uint8 if is_matrix else torch.float32), name
        if not is_matrix:
            assert torch.equal(parameter, layers[name])
        assert not (is_matrix and parameter.requires_grad)
    assert model.get_memory_footprint() < 0.35 * full.get_memory_footprint()
    assert model.name_or_path == TINY
    assert not quantization.is_quantized(full)
    # four bits are another model, though a near one
    difference = (logits(model).log_softmax(-1) - logits(full).log_softmax(-1)).abs().mean()
    assert 1e-4 < difference < 0.2


def test_trainer_and_engine_compute_the_same_and_share_the_four_bits(trained):
    folder, trainer = trained
    replica = share_parameters(trainer.model)
    ours = {id(parameter) for parameter in trainer.model.parameters()}
    assert {id(parameter) for parameter in replica.parameters()} == ours
    with torch.inference_mode():
        sampled = replica(IDS).logits
    learning = trainer.model.train()(IDS).logits
    assert learning.requires_grad
    torch.testing.assert_close(sampled, learning.detach(), atol=1e-5, rtol=0)
    assert max(row["sampler/log_ratio_abs"] for row in metrics_of(folder)) < 1e-5


def has_the_kernel():
    if importlib.util.find_spec("bitsandbytes") is None:
        return False
    from bitsandbytes.functional import has_avx512bf16

    return has_avx512bf16()


@pytest.mark.skipif(not has_the_kernel(), reason="this CPU has no AVX512-BF16")
def test_without_the_guard_sampling_would_rewrite_the_trainers_weights():
    """Negative control of ``compute_exactly``."""
    model = get_model(TINY, quantize="nf4")
    expected = logits(model)
    torch.testing.assert_close(logits(share_parameters(model)), expected)
    for layer in model.modules():
        if hasattr(layer, "support_avx512bf16_for_cpu"):
            layer.support_avx512bf16_for_cpu = True
    logits(share_parameters(model))
    layers = [p for p in model.parameters() if p.dtype == torch.uint8]
    assert all(layer.quant_state.packing_format_for_cpu for layer in layers)
    assert (logits(model) - expected).abs().max() > 1e-3


def test_only_the_adapter_moves(trained):
    _, trainer = trained
    fresh = dict(get_model(TINY, quantize="nf4").named_parameters())
    for name, parameter in trainer.model.get_base_model().named_parameters():
        name = name.replace(".base_layer", "")
        if "lora_" in name:
            assert parameter.dtype == torch.float32
            assert "lora_A" in name or parameter.abs().max() > 0
        else:
            assert torch.equal(parameter, fresh[name]), name


def test_a_resumed_run_is_equal_bit_for_bit(trained, tmp_path):
    folder, _ = trained
    settings = {"save_strategy": "steps", "save_steps": 2, "deterministic": True}
    run(trainer(tmp_path, max_steps=2, **settings))
    assert losses_of(tmp_path) == losses_of(folder)[:2]
    run(trainer(tmp_path, max_steps=4, **settings), resume_from_checkpoint=True)
    assert losses_of(tmp_path) == losses_of(folder)
    for name in ("adapter_model.safetensors", BASE):
        ours, others = (path / "checkpoint-4" / name for path in (tmp_path, folder))
        if name == BASE:
            assert json.loads(ours.read_text())["quantize"] == "nf4"
        else:
            assert ours.read_bytes() == others.read_bytes()


def test_an_adapter_says_what_it_was_trained_on_and_is_loaded_with_that(trained, tmp_path):
    folder, trainer = trained
    trainer.export(tmp_path / "of-trainer")
    export(str(folder), tmp_path / "of-run")
    expected = logits(trainer.model)
    for target in (tmp_path / "of-trainer", tmp_path / "of-run"):
        facts = json.loads((target / BASE).read_text())
        assert facts["quantize"] == "nf4"
        assert facts["quantization_config"]["bnb_4bit_quant_type"] == "nf4"
        described = json.loads((target / "adapter_config.json").read_text())
        assert facts["base_model_name_or_path"] == described["base_model_name_or_path"]
        assert "base" not in {p.name for p in target.iterdir() if p.is_dir()}
        assert torch.equal(logits(load_adapter(target)), expected)
        assert torch.equal(logits(load_folder(target)[0]), expected)  # vf-eval -m FOLDER, a teacher
    # negative control: without the file the adapter is put on the full base, another policy
    (tmp_path / "of-run" / BASE).unlink()
    described["base_model_name_or_path"] = TINY
    (tmp_path / "of-run" / "adapter_config.json").write_text(json.dumps(described))
    assert (logits(load_adapter(tmp_path / "of-run")) - expected).abs().max() > 1e-3


def test_a_run_on_such_an_adapter_is_in_four_bits_again(trained, tmp_path):
    before = trained[1]
    before.export(tmp_path / "adapter")
    further = RLTrainer(
        str(tmp_path / "adapter"), toy_env(), small_config(tmp_path / "run", use_lora=True)
    )
    assert further.args.quantize == "nf4"
    assert quantization.is_quantized(further.model)
    assert torch.equal(logits(further.model), logits(before.model))
    run(further)


def test_a_file_that_says_nothing_is_refused(trained, tmp_path):
    trained[1].export(tmp_path / "adapter")
    (tmp_path / "adapter" / BASE).write_text("{}")
    with pytest.raises(ConfigError, match="has no quantize"):
        load_adapter(tmp_path / "adapter")


def test_a_server_gets_the_adapter_alone(tmp_path, caplog):
    base = get_model(TINY, quantize="nf4")  # as a server with --quantization bitsandbytes has it
    caplog.set_level("INFO")
    with FakeVLLM(base, get_tokenizer(TINY)) as server:
        log = run(trainer(tmp_path, inference=server.url, max_off_policy_steps=0))
        assert "21 layers are in four bits" in caplog.text
        assert "weights reach the server by lora_dir" in caplog.text
        assert all(step["sampler/log_ratio_abs"] < 1e-5 for step in log.steps)
        assert [path for path, _ in server.calls].count("/v1/load_lora_adapter") == 3
    with FakeVLLM(base, get_tokenizer(TINY), lora=False) as server:
        with trainer(tmp_path / "refused", inference=server.url) as refused:
            with pytest.raises(ConfigError, match=r"server cannot load it.*without adapters"):
                refused.start_engine()


# --- what cannot work -----------------------------------------------------------------------------

REFUSED = {
    "use_lora=False trains all weights": {"use_lora": False},
    "merge_adapter=True": {"merge_adapter": True},
    "has a quantization_config": {"model_init_kwargs": {"quantization_config": {}}},
    "weight_sync='nccl' sends whole weights": {"weight_sync": "nccl"},
    "quantize must be one of nf4, or None, not 'int3'": {"quantize": "int3"},
}


@pytest.mark.parametrize("sentence", REFUSED)
def test_settings_that_cannot_work_are_refused_before_anything_is_loaded(tmp_path, sentence):
    with pytest.raises(ConfigError, match=sentence):
        trainer(tmp_path, model="no/such-model", **REFUSED[sentence])


@pytest.mark.parametrize("kind", ["FSDP", "DEEPSPEED"])
def test_a_launcher_that_splits_the_model_is_refused(tmp_path, monkeypatch, kind):
    config = small_config(tmp_path, **QLORA)
    assert config.private_copy().problems() == []
    monkeypatch.setenv(f"ACCELERATE_USE_{kind}", "true")
    [problem] = config.private_copy().problems()
    assert "would split the four-bit weights" in problem


def test_a_class_that_reads_the_weight_of_a_layer_is_refused(tmp_path):
    model = AutoModelForCausalLM.from_config(tiny_config("mamba2"))
    model.save_pretrained(tmp_path / "model")
    build_tiny_tokenizer().save_pretrained(tmp_path / "model")
    with pytest.raises(ConfigError, match=r"reads the weight of .*out_proj instead of calling it"):
        trainer(tmp_path / "run", model=str(tmp_path / "model"))


def test_a_loaded_model_is_not_quantised(tmp_path):
    with pytest.raises(ConfigError, match="is: give its name"):
        trainer(tmp_path, model=small_policy())


def test_a_model_in_four_bits_is_not_trained_without_an_adapter(tmp_path):
    with pytest.raises(ConfigError, match="which have no gradient"):
        small_trainer(tmp_path, model=get_model(TINY, quantize="nf4"))
    config = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    model = small_trainer(tmp_path, model=get_model(TINY, quantize="nf4"), peft_config=config).model
    assert quantization.is_quantized(model)


def test_nothing_is_merged_into_four_bits(trained, tmp_path):
    folder, trainer = trained
    for merged in (
        lambda: trainer.export(tmp_path / "merged", merged=True),
        lambda: export(str(folder), tmp_path / "merged", merged=True),
    ):
        with pytest.raises(ConfigError, match="nothing is merged into them"):
            merged()
    assert not (tmp_path / "merged").exists()


def test_a_whole_layer_in_four_bits_is_not_trained(tmp_path):
    with pytest.raises(ConfigError, match=r"trains o_proj whole, and .*o_proj is in four"):
        trainer(tmp_path, lora_target_modules=["q_proj"], lora_modules_to_save=["o_proj"])


def test_without_bitsandbytes_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"verifiers-trainer\[quantize\]|quantize"):
        trainer(tmp_path)
