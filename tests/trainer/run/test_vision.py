"""Training a model that takes images: what is trained, that it sees, and that a killed run goes on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import verifiers as vf
from support.fake_vllm import FakeVLLM
from support.tiny_vision import (
    KINDS,
    asked,
    colour_env,
    length,
    odd_lengths,
    picture,
    vision_folder,
)
from support.training import files_hash, losses_of, metrics_of, run, small_config, toy_env
from support.training_child import SAVED, child_context, train_in_child
from verifiers.errors import ConfigError, ModelRefused, VerifiersError
from verifiers_trainer.engines.processing import Processing, language_part, processing_of
from verifiers_trainer.policy.exporting import export
from verifiers_trainer.policy.folder_client import folder_client, load_folder
from verifiers_trainer.trainer import RLTrainer

EXACT = 1e-5


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    return {kind: vision_folder(kind, tmp_path_factory.mktemp(kind)) for kind in KINDS}


def trainer_of(model: object, folder: Path, env: vf.Environment | None = None, **settings):
    # each step has tokens of its own weights, which are compared: late ones have no log_ratio_abs
    settings = {"max_seq_len": 128, "max_steps": 2, "max_off_policy_steps": 0} | settings
    env = env or odd_lengths()
    return RLTrainer(str(model), env, small_config(folder, **settings))


def weights(model) -> dict[str, torch.Tensor]:
    return {name: weight.detach().clone() for name, weight in model.named_parameters()}


def changed(before: dict[str, torch.Tensor], model) -> set[str]:
    after = dict(model.named_parameters())
    return {name for name, weight in before.items() if not torch.equal(weight, after[name])}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("use_lora", [True, False])
def test_the_part_that_computes_text_is_trained_on_what_was_sampled(
    kind, use_lora, folders, tmp_path
):
    trainer = trainer_of(folders[kind], tmp_path, use_lora=use_lora)
    before = weights(trainer.model)
    log = run(trainer)
    for step in log.steps:
        assert step["sampler/log_ratio_abs"] < EXACT
        assert step["canary/sight"] > 100 * EXACT
    moved = changed(before, trainer.model)
    part = {id(weight) for weight in language_part(trainer.model).parameters()}
    head = {id(weight) for weight in trainer.model.get_output_embeddings().parameters()}
    of_text = {n for n, weight in trainer.model.named_parameters() if id(weight) in part | head}
    assert moved
    assert moved <= of_text
    if use_lora:
        assert all("lora" in name for name in moved)
    assert all((row.position_ids == 0).sum() == 1 for row in trainer.newest.rows)


def test_train_vision_trains_what_sees(folders, tmp_path):
    trainer = trainer_of(folders["qwen2_5_vl"], tmp_path, use_lora=False, train_vision=True)
    before = weights(trainer.model)
    run(trainer)
    assert any("visual" in name for name in changed(before, trainer.model))


def test_train_vision_is_refused_for_a_model_of_text(tmp_path):
    with pytest.raises(ConfigError, match="Qwen3ForCausalLM takes no images"):
        RLTrainer("builtin:tiny", toy_env(), small_config(tmp_path, train_vision=True))


@pytest.mark.parametrize(("kind", "is_packed"), [("idefics3", True), ("qwen2_5_vl", False)])
def test_prompts_of_text_alone_train_on_such_a_model(kind, is_packed, folders, tmp_path):
    """Packed as those of a model of text, but where the class has positions of its own."""
    env = vf.SingleTurnEnv(
        dataset=[{"question": f"q{n}"} for n in range(4)],
        rubric=vf.Rubric([length]),
    )
    trainer = trainer_of(folders[kind], tmp_path, env)
    log = run(trainer)
    assert all(step["sampler/log_ratio_abs"] < EXACT for step in log.steps)
    assert all((step["packing/rows"] < 8) == is_packed for step in log.steps)
    assert all("canary/sight" not in step for step in log.steps)


class Looks(vf.MultiTurnEnv):
    """Shows another picture after each answer."""

    async def env_response(self, messages, state, **_):
        return asked("next:", picture("green", len(state["trajectory"])))


@pytest.mark.parametrize("history", ["template", "exact"])
def test_pictures_of_later_turns_are_trained_with_the_tokens_that_stand_for_them(
    history, folders, tmp_path
):
    env = Looks(
        dataset=[{"prompt": asked("look", picture("red", n), "well?")} for n in range(8)],
        max_turns=2,
        rubric=vf.Rubric([length]),
    )
    trainer = trainer_of(folders["qwen2_5_vl"], tmp_path, env, history=history, max_seq_len=256)
    log = run(trainer)
    assert all(step["sampler/log_ratio_abs"] < EXACT for step in log.steps)
    rows = [row for row in trainer.newest.rows if not row.is_filler]
    numbers = {len(row.image_ends) for row in rows}
    assert numbers == ({2} if history == "exact" else numbers & {1, 2})


# --- the policy sees ------------------------------------------------------------------------------


def without_pixels(monkeypatch) -> None:
    """The placeholders keep their embedding: nothing puts features in their place."""
    stock = Processing.arguments

    def arguments(self, *args, **options):
        made = stock(self, *args, **options)
        return {name: value for name, value in made.items() if not name.startswith("pixel")}

    monkeypatch.setattr(Processing, "arguments", arguments)


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_whose_policy_gets_no_pixels_ends_before_it_samples(
    kind, folders, tmp_path, monkeypatch
):
    without_pixels(monkeypatch)
    with pytest.raises(ConfigError, match="the policy does not see its images"):
        run(trainer_of(folders[kind], tmp_path))
    assert not (tmp_path / "metrics.jsonl").exists()


def test_a_policy_that_goes_blind_ends_the_run(folders, tmp_path, monkeypatch):
    env = Looks(  # no prompt has an image, so the first batch shows it
        dataset=[{"question": "well?"}] * 8,
        max_turns=2,
        rubric=vf.Rubric([length]),
    )
    without_pixels(monkeypatch)
    with pytest.raises(ConfigError, match="the policy does not see its images"):
        run(trainer_of(folders["idefics3"], tmp_path, env, max_seq_len=256))


# --- files ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("use_lora", [True, False])
def test_a_checkpoint_is_a_model_that_sees(use_lora, folders, tmp_path):
    settings = {"save_strategy": "steps", "save_steps": 1}
    run(trainer_of(folders["qwen2_5_vl"], tmp_path / "run", use_lora=use_lora, **settings))
    client = folder_client(str(tmp_path / "run"))
    results = colour_env(4).evaluate_sync(
        client, client.model, num_examples=2, sampling_args={"max_tokens": 3}
    )
    assert [state["error"] for state in results["state"]] == [None] * 2
    export(str(tmp_path / "run"), tmp_path / "merged", merged=True)
    model, _ = load_folder(tmp_path / "merged")
    assert processing_of(model).never


RUN = {"deterministic": True, "max_steps": 4, "save_strategy": "steps", "save_steps": 2}
RUN |= {"max_seq_len": 128, "max_off_policy_steps": 1}


def test_a_killed_run_ends_as_one_that_was_not(folders, tmp_path):
    children = child_context()
    common = {**RUN, "environment": "tiny_vision:odd_lengths", "model": str(folders["qwen2_5_vl"])}
    assert train_in_child(children, tmp_path / "whole", **common) == 0
    killed = tmp_path / "killed"
    assert train_in_child(children, killed, "checkpoint.before_rename:2", **common) == -9
    assert train_in_child(children, killed, **common) == 0
    assert losses_of(tmp_path / "killed") == losses_of(tmp_path / "whole")
    end = "checkpoint-4"
    first, second = (files_hash(tmp_path / name / end, *SAVED) for name in ("whole", "killed"))
    assert first == second
    assert [row["canary/sight"] for row in metrics_of(tmp_path / "killed") if "loss" in row]
    assert json.loads((tmp_path / "whole" / end / "MANIFEST.json").read_text())


# --- a vLLM server --------------------------------------------------------------------------------


def serving(folder: Path, **options) -> FakeVLLM:
    model, tokenizer = load_folder(folder)
    return FakeVLLM(model, tokenizer, name=str(folder), **options)


def test_a_server_is_sent_the_parts_and_its_expanded_prompt_is_trained(folders, tmp_path):
    with serving(folders["idefics3"]) as server:
        options = {"inference": server.url, "use_lora": False, "max_off_policy_steps": 0}
        trainer = trainer_of(folders["idefics3"], tmp_path, **options)
        log = run(trainer)
        placeholders = {str(token) for token in processing_of(trainer.model).never}
    assert all(step["sampler/log_ratio_abs"] < EXACT for step in log.steps)
    asked_for = [body for body in server.bodies if "messages" in body]
    assert any(part["type"] == "image_url" for part in asked_for[-1]["messages"][-1]["content"])
    assert all(placeholders <= body["logit_bias"].keys() for body in asked_for)


def test_prompt_ids_that_are_not_expanded_are_refused_with_both_counts(folders, tmp_path):
    with serving(folders["idefics3"]) as server:
        trainer = trainer_of(folders["idefics3"], tmp_path, inference=server.url)
        image = processing_of(trainer.model).processor.image_token_id
        server.shown_prompt = lambda ids: [
            token for n, token in enumerate(ids) if token != image or ids[n - 1] != image
        ]
        with pytest.raises(ModelRefused, match="have 1 placeholders, and the processor makes 4"):
            run(trainer)


def test_exact_history_on_a_server_takes_text_only(folders, tmp_path):
    with serving(folders["idefics3"]) as server:
        trainer = trainer_of(
            folders["idefics3"], tmp_path, inference=server.url, history="exact", max_steps=1
        )
        with pytest.raises(VerifiersError, match="history='exact' on a vLLM server"):
            run(trainer)
