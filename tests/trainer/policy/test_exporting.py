"""``vf-train --export`` and ``trainer.export`` write what transformers and peft load."""

from __future__ import annotations

import json

import pytest
import torch
from peft import AutoPeftModelForCausalLM, LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from support.training import run, small_policy, small_trainer
from verifiers.errors import ConfigError
from verifiers_trainer.cli.train import train_command
from verifiers_trainer.policy.builtin_models import build_tiny_model, build_tiny_tokenizer

IDS = torch.arange(1, 20).unsqueeze(0)
STEPS = {"max_steps": 1, "save_strategy": "steps", "save_steps": 1, "learning_rate": 0.1}


@torch.no_grad()
def logits(model):
    return model.eval()(IDS).logits


def close(a, b):
    return torch.allclose(a, b, atol=1e-4, rtol=1e-4)


def trained(folder, **options):
    trainer = small_trainer(folder, model=small_policy(seed=3), **STEPS, **options)
    run(trainer)
    return trainer


@pytest.fixture(scope="module")
def adapter_run(tmp_path_factory):
    """(folder of a run, its trainer with an adapter on the head, which is tied)."""
    folder = tmp_path_factory.mktemp("run")
    config = LoraConfig(r=4, target_modules=["q_proj", "lm_head"], task_type="CAUSAL_LM")
    return folder, trained(folder, peft_config=config)


def command(capsys, *words):
    with pytest.raises(SystemExit) as ended:
        train_command.main(list(map(str, words)), prog_name="vf-train")
    return ended.value.code or 0, capsys.readouterr()


def test_a_merged_adapter_is_an_ordinary_model(adapter_run, tmp_path, capsys):
    folder, trainer = adapter_run
    target = tmp_path / "new" / "merged"
    code, shown = command(capsys, "--export", folder, target, "--merged", "--json")
    assert code == 0
    answer = json.loads(shown.out)
    assert (answer["exported"], answer["checkpoint"]) == (str(target), f"{folder}/checkpoint-1")
    assert close(logits(AutoModelForCausalLM.from_pretrained(target)), logits(trainer.model))
    assert not close(logits(small_policy(seed=3)), logits(trainer.model))  # it was trained
    assert AutoTokenizer.from_pretrained(target).get_vocab() == build_tiny_tokenizer().get_vocab()
    names = {path.name for path in target.iterdir()}
    assert "model.safetensors" in names
    assert not names & {"adapter_config.json", "optimizer.safetensors", "trainer_state.json"}
    assert len({path.stat().st_mode for path in target.iterdir()}) == 1
    trainer.export(tmp_path / "of-trainer", merged=True)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "of-trainer")
    assert close(logits(loaded), logits(trainer.model))


def test_an_adapter_is_exported_with_a_base_that_peft_loads(adapter_run, tmp_path, capsys):
    folder, trainer = adapter_run
    assert command(capsys, "--export", folder / "checkpoint-1", tmp_path / "cli")[0] == 0
    trainer.export(tmp_path / "of-trainer")
    for target in (tmp_path / "cli", tmp_path / "of-trainer"):
        base = json.loads((target / "adapter_config.json").read_text())["base_model_name_or_path"]
        model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), target)
        assert close(logits(model), logits(trainer.model))
        assert not (target / "optimizer.safetensors").exists()


def test_an_adapter_of_an_older_version_gets_a_base_beside_the_export(tmp_path, capsys):
    model = get_peft_model(build_tiny_model(), LoraConfig(r=4, init_lora_weights=False))
    model.save_pretrained(tmp_path / "old")
    target = tmp_path / "new" / "exported"
    assert command(capsys, "--export", tmp_path / "old", target)[0] == 0
    assert [path.parent for path in target.parent.glob("base-*/model.safetensors")]
    assert close(logits(AutoPeftModelForCausalLM.from_pretrained(target)), logits(model))


def test_a_whole_model_is_exported_without_the_trainers_state(tmp_path, capsys):
    trainer = trained(tmp_path / "run")
    assert command(capsys, "--export", tmp_path / "run", tmp_path / "exported", "--merged")[0] == 0
    target = tmp_path / "exported"
    assert close(logits(AutoModelForCausalLM.from_pretrained(target)), logits(trainer.model))
    assert not (target / "optimizer.safetensors").exists()


def test_a_folder_with_content_is_not_replaced(adapter_run, tmp_path, capsys):
    folder, trainer = adapter_run
    (tmp_path / "mine").write_text("x")
    code, shown = command(capsys, "--export", folder, tmp_path, "--merged")
    assert code == 2
    assert f"{tmp_path} exists: name a new folder" in shown.err
    with pytest.raises(ConfigError, match="exists: name a new folder"):
        trainer.export(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
    (tmp_path / "empty").mkdir()
    trainer.export(tmp_path / "empty")  # negative control
    assert (tmp_path / "empty/adapter_config.json").is_file()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--merged"], "--merged needs --export"),
        (["--export", "{empty}", "{out}"], "holds no model"),
        (["--export", "{empty}", "{out}", "--model", "x"], "no settings: --model x"),
    ],
)
def test_what_cannot_be_exported_is_said(tmp_path, capsys, words, said):
    (tmp_path / "empty").mkdir()
    places = {"empty": tmp_path / "empty", "out": tmp_path / "out"}
    code, shown = command(capsys, *(word.format(**places) for word in words))
    assert code == 2
    assert said in shown.err
    assert not (tmp_path / "out").exists()
