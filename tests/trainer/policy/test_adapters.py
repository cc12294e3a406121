"""Saved adapters load with their base, with this library and without it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from peft import AutoPeftModelForCausalLM, LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

import verifiers as vf
from support.families import tiny_config
from support.training import run, small_config, small_policy, small_trainer, toy_env
from verifiers.errors import ConfigError
from verifiers_trainer import RLTrainer
from verifiers_trainer.cli.launch import served_name
from verifiers_trainer.policy import adapters
from verifiers_trainer.policy.builtin_models import build_tiny_tokenizer
from verifiers_trainer.policy.folder_client import load_folder
from verifiers_trainer.policy.preparation import lora_config

IDS = torch.arange(1, 20).unsqueeze(0)
TARGETS = [
    {"target_modules": ["q_proj", "up_proj"]},
    {"target_modules": ["q_proj", "lm_head"]},
    {"target_modules": ["q_proj", "embed_tokens"]},
    {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
]


def adapted_trainer(folder, model=None, **options):
    """A trainer of an adapter whose weights are no longer 0."""
    options = {"target_modules": ["q_proj"], **options}
    config = LoraConfig(r=4, lora_alpha=8, task_type="CAUSAL_LM", **options)
    trainer = small_trainer(folder, model=model or small_policy(seed=3), peft_config=config)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return trainer


@torch.no_grad()
def logits(model):
    return model.eval()(IDS).logits


def base_of(folder):
    return json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"]


# --- the base that is saved with an adapter -------------------------------------------------------


def with_peft(folder):
    base = AutoModelForCausalLM.from_pretrained(base_of(folder))
    return PeftModel.from_pretrained(base, str(folder))


LOADERS = {
    "peft": with_peft,
    "peft alone": AutoPeftModelForCausalLM.from_pretrained,
    "transformers": AutoModelForCausalLM.from_pretrained,
    "get_model_and_tokenizer": lambda folder: vf.get_model_and_tokenizer(str(folder))[0],
    "vf-eval": lambda folder: load_folder(folder)[0],
}


@pytest.mark.parametrize("options", TARGETS, ids=str)
def test_an_adapter_of_a_model_in_no_file_is_loaded_by_all(tmp_path, monkeypatch, options):
    monkeypatch.chdir(tmp_path)
    trainer = adapted_trainer(Path("run"), **options)
    trainer.save_model("saved")
    base = Path(base_of(Path("saved")))
    assert base.parent == tmp_path / "run"
    expected = logits(trainer.model)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    for name, load in LOADERS.items():
        loaded = logits(load(tmp_path / "saved"))
        torch.testing.assert_close(loaded, expected, atol=1e-4, rtol=1e-4, msg=name)
    # negative control: the adapter changes the model, and the base is that of the trainer
    plain = logits(AutoModelForCausalLM.from_pretrained(base))
    torch.testing.assert_close(plain, logits(small_policy(seed=3)))
    assert (plain - expected).abs().max() > 0.1
    assert AutoTokenizer.from_pretrained(base).get_vocab() == build_tiny_tokenizer().get_vocab()


def test_merging_a_loaded_adapter_of_a_tied_head_as_before_changes_both_layers(
    tmp_path, monkeypatch
):
    """Negative control of the last loader above."""
    trainer = adapted_trainer(tmp_path / "run", **TARGETS[1])
    trainer.save_model(str(tmp_path / "saved"))
    monkeypatch.setattr(adapters, "_untie_adapted", lambda model: None)
    loaded = logits(load_folder(tmp_path / "saved")[0])
    assert (loaded - logits(trainer.model)).abs().max() > 0.1


def test_a_base_is_written_once_and_another_one_beside_it(tmp_path):
    trainer = adapted_trainer(tmp_path / "run")
    trainer.save_model(str(tmp_path / "first"))
    [base] = (tmp_path / "run").glob("base-*")
    written = (base / "model.safetensors").stat()
    assert written.st_mode == (base / "config.json").stat().st_mode
    trainer.save_model(str(tmp_path / "second"))
    adapted_trainer(tmp_path / "run").save_model(str(tmp_path / "third"))
    assert {base_of(tmp_path / name) for name in ("first", "second", "third")} == {str(base)}
    assert (base / "model.safetensors").stat() == written
    adapted_trainer(tmp_path / "run", small_policy(seed=4)).save_model(str(tmp_path / "fourth"))
    assert base_of(tmp_path / "fourth") != str(base)


def test_a_written_base_has_the_dropout_that_it_came_with(tmp_path):
    model = small_policy()
    model.config.attention_dropout = 0.25
    trainer = adapted_trainer(tmp_path / "run", model)
    assert trainer.model.config.attention_dropout == 0
    trainer.save_model(str(tmp_path / "saved"))
    config = json.loads((Path(base_of(tmp_path / "saved")) / "config.json").read_text())
    assert config["attention_dropout"] == 0.25


def test_a_base_in_a_folder_is_named_absolutely_and_not_copied(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    small_policy(seed=5).save_pretrained("models/base")
    build_tiny_tokenizer().save_pretrained("models/base")
    options = {"use_lora": True, "save_strategy": "steps", "save_steps": 1, "max_steps": 1}
    run(small_trainer(Path("run"), model="models/base", **options))
    assert base_of(Path("run/checkpoint-1")) == str(tmp_path / "models/base")
    assert not list(Path("run").glob("base-*"))
    trainer = small_trainer(Path("other"), model="models/base", use_lora=True)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    trainer.save_model(str(tmp_path / "saved"))
    assert base_of(tmp_path / "saved") == str(tmp_path / "models/base")
    vf.get_model_and_tokenizer(str(tmp_path / "saved"))


def test_a_repository_stays_the_base(tmp_path):
    model = small_policy()
    model.name_or_path = model.config.name_or_path = "someone/a-model"
    adapted_trainer(tmp_path / "run", model).save_model(str(tmp_path / "saved"))
    assert base_of(tmp_path / "saved") == "someone/a-model"
    assert not list((tmp_path / "run").glob("base-*"))


def test_a_peft_config_may_be_used_again(tmp_path):
    config = LoraConfig(r=4, target_modules=["q_proj"])
    small_trainer(tmp_path, peft_config=config)
    assert config.base_model_name_or_path is None


# --- a base that is not there ---------------------------------------------------------------------


@pytest.mark.parametrize("base", ["./base", "../elsewhere/base"])
def test_the_error_names_the_adapters_file_and_the_base(tmp_path, monkeypatch, base):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "checkpoint-1"
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": base}))
    (folder / "adapter_model.safetensors").write_bytes(b"")
    with pytest.raises(ConfigError) as caught:
        load_folder(folder)
    assert str(folder / "adapter_config.json") in str(caught.value)
    assert repr(base) in str(caught.value)
    assert "write the whole path" in str(caught.value)


# --- a new run that begins with an adapter --------------------------------------------------------

STEPS = {"save_strategy": "steps", "save_steps": 1, "max_steps": 1}


@pytest.fixture
def saved(tmp_path):
    """(folder of a trained adapter on two kinds of layers, its logits)."""
    trainer = adapted_trainer(tmp_path / "first", target_modules=["q_proj", "up_proj"])
    trainer.save_model(str(tmp_path / "saved"))
    return tmp_path / "saved", logits(trainer.model)


def beginning(folder, saved, **options):
    """A trainer on the saved adapter, with the tokenizer that is saved with it."""
    return RLTrainer(str(saved), toy_env(), small_config(folder, **{"use_lora": True, **options}))


def test_a_new_run_trains_a_saved_adapter_further(saved, tmp_path, caplog):
    folder, expected = saved
    with caplog.at_level("INFO", "verifiers_trainer"):
        trainer = beginning(tmp_path / "second", folder, **STEPS)
    torch.testing.assert_close(logits(trainer.model), expected, atol=1e-5, rtol=1e-5)
    said = f"trains the adapter {folder} further: rank 4, alpha 8, on q_proj, up_proj of "
    assert said + base_of(folder) in caplog.text
    args = trainer.args
    assert (args.lora_rank, args.lora_alpha) == (4, 8)
    assert args.lora_target_modules == ["q_proj", "up_proj"]
    trained = {name for name, p in trainer.model.named_parameters() if p.requires_grad}
    assert len(trained) == 4
    assert all("lora_" in name for name in trained)
    run(trainer)
    after = logits(trainer.model)
    assert (after - expected).abs().max() > 0
    saved_again = tmp_path / "second" / "checkpoint-1"
    assert base_of(saved_again) == base_of(folder)
    torch.testing.assert_close(logits(with_peft(saved_again)), after, atol=1e-4, rtol=1e-4)
    # the run is resumed as any
    resumed = beginning(tmp_path / "second", folder, **STEPS | {"max_steps": 2})
    run(resumed, resume_from_checkpoint=True)
    assert resumed.state.global_step == 2


def test_a_new_run_merges_a_saved_adapter_if_asked(saved, tmp_path, caplog):
    folder, expected = saved
    with caplog.at_level("INFO", "verifiers_trainer"):
        trainer = beginning(tmp_path / "all", folder, merge_adapter=True, use_lora=False)
    assert f"begins with {folder} merged into {base_of(folder)}" in caplog.text
    assert not hasattr(trainer.model, "peft_config")
    torch.testing.assert_close(logits(trainer.model), expected, atol=1e-4, rtol=1e-4)
    another = beginning(tmp_path / "new", folder, merge_adapter=True, lora_rank=2)
    torch.testing.assert_close(logits(another.model), expected, atol=1e-4, rtol=1e-4)
    assert another.model.peft_config["default"].r == 2
    another.save_model(str(tmp_path / "again"))
    assert Path(base_of(tmp_path / "again")).parent == tmp_path / "new"
    loaded = logits(with_peft(tmp_path / "again"))
    torch.testing.assert_close(loaded, expected, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_the_reference_is_the_policy_that_the_run_begins_with(saved, tmp_path):
    folder, expected = saved
    trainer = beginning(tmp_path / "second", folder, beta=0.1)
    for parameter in trainer.model.parameters():
        if parameter.requires_grad:
            parameter.mul_(3)
    reference = trainer.reference(input_ids=IDS).logits
    torch.testing.assert_close(reference, expected, atol=1e-5, rtol=1e-5)
    # negative control: of a new adapter it is the base
    new = small_trainer(tmp_path / "new", model=small_policy(seed=3), use_lora=True, beta=0.1)
    plain = logits(small_policy(seed=3))
    torch.testing.assert_close(new.reference(input_ids=IDS).logits, plain)
    assert (plain - expected).abs().max() > 0.1


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"lora_rank": 8}, "lora_rank is 8, and that of the adapter in {folder} is 4: leave"),
        ({"lora_target_modules": ["q_proj"]}, r"lora_target_modules is \['q_proj'\], and that of"),
        ({"use_lora": False}, "use_lora=False trains all weights: leave use_lora out"),
        ({"lora_config": LoraConfig(r=4)}, "leave lora_config out, or set merge_adapter=True"),
    ],
    ids=str,
)
def test_settings_of_another_adapter_are_refused(saved, tmp_path, options, said):
    with pytest.raises(ConfigError, match=said.format(folder=saved[0])):
        beginning(tmp_path / "second", saved[0], **options)
    same = {"lora_rank": 4, "lora_target_modules": ["up_proj", "q_proj"]}
    beginning(tmp_path / "second", saved[0], **same)  # negative control


def test_nothing_to_merge_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="'builtin:tiny' is not the folder of a saved adapter"):
        small_trainer(tmp_path, model="builtin:tiny", merge_adapter=True)


def test_a_server_is_started_with_the_base_of_an_adapter(saved):
    assert served_name(str(saved[0])) == base_of(saved[0])
    assert served_name("someone/a-model") == "someone/a-model"


# --- what an adapter covers by default ------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "left_out", "covered"),
    [
        ("falcon_h1", {"out_proj"}, {"attention", "mixers", "MLP"}),
        ("nemotron_h", {"out_proj"}, {"attention", "mixers"}),
        ("mamba", {"out_proj", "x_proj", "dt_proj"}, {"mixers"}),
        ("llama4_text", {"router"}, {"attention", "MLP"}),
        ("gpt_oss", set(), {"attention", "none of the experts"}),
        ("gpt2", set(), {"attention", "MLP"}),
        ("gemma3n_text", set(), {"attention", "MLP"}),
    ],
)
def test_the_default_layers_are_those_that_use_their_adapter(name, left_out, covered):
    model = AutoModelForCausalLM.from_config(tiny_config(name))
    adapted = get_peft_model(model, lora_config(vf.RLConfig(run_name="r"), model))
    names = [part for part, layer in adapted.named_modules() if hasattr(layer, "lora_A")]
    assert names
    assert not left_out & {part.rpartition(".")[2] for part in names}
    said = adapters.covered(adapted)
    assert all(kind in said for kind in covered), said
    adapted(IDS[:, :8]).logits.sum().backward()
    unused = [n for n, p in adapted.named_parameters() if p.requires_grad and p.grad is None]
    assert not unused


def test_an_adapter_that_peft_refuses_is_a_sentence(tmp_path):
    model = AutoModelForCausalLM.from_config(tiny_config("mamba2"))
    with pytest.raises(ConfigError, match=r"peft refuses the adapter.*out_proj"):
        small_trainer(tmp_path, model=model, peft_config=LoraConfig(target_modules=["out_proj"]))
