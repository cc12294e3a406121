"""A training says where its numbers come from, and goes on only with the code that it began with."""

import hashlib
import json
import types
from importlib import metadata

import pytest
import torch
from transformers import TrainerCallback

import verifiers as vf
from support.training import run, small_config, small_policy, small_trainer, toy_env
from verifiers_trainer.policy.builtin_models import build_tiny_tokenizer
from verifiers_trainer.trainer import RLTrainer

SCRIPT = """
from transformers import TrainerCallback
from verifiers_trainer.trainer import RLTrainer

SIGN = 1.0


def mine(row):
    return -SIGN * row.advantage * row.log_pi


def centred(rewards_G, lengths_G):
    return [rewards - rewards.mean() for rewards in rewards_G]


def digits(completion):
    text = completion[-1]["content"] or ""
    return sum(c.isdigit() for c in text) / max(1, len(text))


class Halved(RLTrainer):
    def compute_rewards(self, completions, prompts, **keywords):
        return [reward / 2 for reward in super().compute_rewards(completions, prompts, **keywords)]


class Watch(TrainerCallback):
    def on_step_end(self, args, state, control, **keywords):
        return control
"""
STEPS = {"save_strategy": "steps", "save_steps": 2}


def script(text=SCRIPT):
    """What a script that is run holds: it has no module, and no file is hashed."""
    module = types.ModuleType("a_training_script")
    exec(compile(text, "/train.py", "exec"), vars(module))
    return module


def trainer_of(folder, text=SCRIPT, watches=True, **settings):
    held = script(text)
    return held.Halved(
        small_policy(),
        toy_env(held.digits),
        small_config(folder, loss=held.mine, advantage=held.centred, **STEPS | settings),
        processing_class=build_tiny_tokenizer(),
        callbacks=[held.Watch()] if watches else [],
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run of two steps with code of its own."""
    folder = tmp_path_factory.mktemp("run")
    run(trainer_of(folder, max_steps=2))
    return folder


@pytest.mark.parametrize(
    ("before", "after", "named"),
    [
        ("-SIGN * row", "SIGN * row", "loss mine changed"),
        ("SIGN = 1.0", "SIGN = -1.0", "loss mine changed"),
        ("rewards.mean()", "rewards.max()", "advantage centred changed"),
        ("max(1, len(text))", "max(2, len(text))", "reward function digits changed"),
        ("reward / 2", "reward / 3", "trainer Halved changed"),
        ("return control", "return None", "callback Watch changed"),
    ],
)
def test_another_function_of_the_same_name_is_refused(folder, before, after, named):
    assert before in SCRIPT
    other = trainer_of(folder, SCRIPT.replace(before, after), max_steps=4)
    with pytest.raises(vf.RunMismatch, match=rf"other code: {named}.*accept_changed_code"):
        other.train(resume_from_checkpoint=True)


def test_a_trainer_without_its_subclass_is_refused(folder):
    held = script()
    plain = small_trainer(
        folder,
        toy_env(held.digits),
        loss=held.mine,
        advantage=held.centred,
        **STEPS | {"max_steps": 4},
    )
    with pytest.raises(vf.RunMismatch, match="trainer Halved changed"):
        plain.train(resume_from_checkpoint=True)


def test_the_same_code_on_another_line_goes_on_without_its_callback(folder):
    moved = SCRIPT.replace("SIGN = 1.0", "# the sign\n\nSIGN = 1.0")
    run(trainer_of(folder, moved, watches=False, max_steps=2), resume_from_checkpoint=True)


def test_changed_code_that_is_accepted_is_recorded(tmp_path):
    run(trainer_of(tmp_path, max_steps=2))
    flipped = SCRIPT.replace("SIGN = 1.0", "SIGN = -1.0")
    run(
        trainer_of(tmp_path, flipped, max_steps=4, accept_changed_code=True),
        resume_from_checkpoint=True,
    )
    state = json.loads((tmp_path / "checkpoint-4" / "rl_state.json").read_text())
    assert state["configuration"]["changed_code"] == ["loss mine"]
    record = json.loads((tmp_path / "settings.json").read_text())["provenance"]
    (earlier,) = record["earlier"]
    assert earlier["code"]["loss mine"] != record["code"]["loss mine"]


def test_a_file_that_is_edited_during_the_run_is_the_one_that_it_began_with(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    source = tmp_path / "a_loss_module.py"
    source.write_text("def mine(row):\n    return -row.advantage * row.log_pi\n")

    class Edit(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            source.write_text("def mine(row):\n    return row.advantage * row.log_pi\n")

    trainer = small_trainer(
        tmp_path / "run",
        loss="a_loss_module:mine",
        callbacks=[Edit()],
        **STEPS | {"max_steps": 2},
    )
    run(trainer)
    saved = json.loads((tmp_path / "run" / "checkpoint-2" / "rl_state.json").read_text())
    original = b"def mine(row):\n    return -row.advantage * row.log_pi\n"
    assert (
        saved["configuration"]["own_code"]["a_loss_module.py"]
        == hashlib.sha256(original).hexdigest()[:16]
    )


# --- the record -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    small_policy().save_pretrained(folder)
    build_tiny_tokenizer().save_pretrained(folder)
    (folder / "optimizer.safetensors").write_text("no part of the model")
    return folder


def test_the_record_of_a_training_and_of_its_evaluations(tmp_path, model_folder):
    settings = STEPS | {"max_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
    config = small_config(
        tmp_path, **settings, use_lora=True, eval_num_examples=2, hub_token="a-secret-token"
    )
    with RLTrainer(str(model_folder), toy_env(), config) as trainer:
        trainer.train()
        trainer.evaluate(num_examples=1)

    text = (tmp_path / "settings.json").read_text()
    assert "a-secret-token" not in text
    record = json.loads(text)["provenance"]
    assert record["packages"]["torch"] == metadata.version("torch")
    assert record["packages"]["peft"] == metadata.version("peft")
    assert record["engine"] == "EmbeddedEngine"
    assert record["processes"] == 1
    assert record["precision"]["trained"] == "float32"
    assert record["devices"]
    assert record["settings"]["logging_steps"] == 1  # may change on resume
    digest = hashlib.sha256((model_folder / "model.safetensors").read_bytes()).hexdigest()
    assert record["weights"] == {"model.safetensors": digest}

    for step, name in ((2, "step-2"), (2, "step-2-2")):
        metadata_ = json.loads((tmp_path / "eval" / name / "metadata.json").read_text())
        assert metadata_["model"] == f"{tmp_path} step {step}"
        assert metadata_["provenance"]["policy"] == {
            "run": str(tmp_path),
            "step": step,
            "version": step,
        }
        for shared in ("weights", "packages", "code", "devices", "precision", "engine"):
            assert metadata_["provenance"][shared] == record[shared]


def test_another_base_below_an_adapter_is_another_run(tmp_path, model_folder, tmp_path_factory):
    settings = STEPS | {"use_lora": True}
    run(RLTrainer(str(model_folder), toy_env(), small_config(tmp_path, **settings, max_steps=2)))

    other = tmp_path_factory.mktemp("other")
    model = small_policy()
    torch.nn.init.constant_(model.model.norm.weight, 1.5)
    model.save_pretrained(other)
    build_tiny_tokenizer().save_pretrained(other)
    longer = small_config(tmp_path, **settings, max_steps=4)
    with pytest.raises(vf.RunMismatch, match="base_weights was"):
        RLTrainer(str(other), toy_env(), longer).train(resume_from_checkpoint=True)

    # the same weights in another folder are the same
    moved = tmp_path_factory.mktemp("moved")
    small_policy().save_pretrained(moved)
    build_tiny_tokenizer().save_pretrained(moved)
    run(RLTrainer(str(moved), toy_env(), longer), resume_from_checkpoint=True)
