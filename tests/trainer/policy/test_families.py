"""Model families that differ from Llama where it matters to training: attention that their class
lacks, randomness of training mode that is no module, linear layers that return tuples."""

import json
import math

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import verifiers as vf
from verifiers_trainer.policy.loading import get_model, get_tokenizer
from verifiers_trainer.policy.preparation import prepare, save_merged, save_weights

BASE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 256,
}
FAMILIES = {
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 256},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "seed_oss": {},
    "gemma2": {"query_pre_attn_scalar": 16, "sliding_window": 8},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8},
    "phimoe": {"num_local_experts": 4, "router_jitter_noise": 0.3},
    "mixtral": {"num_local_experts": 4, "router_jitter_noise": 0.3},
}
DROPS = {"gpt2": "resid_pdrop", "opt": "dropout", "seed_oss": "residual_dropout"}


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    tokenizer = get_tokenizer("builtin:tiny")

    def folder(name):
        path = tmp_path_factory.mktemp(name)
        ends = {
            f"{kind}_token_id": getattr(tokenizer, f"{kind}_token_id")
            for kind in ("bos", "eos", "pad")
        }
        config = AutoConfig.for_model(
            name, vocab_size=64 * math.ceil(len(tokenizer) / 64), **BASE, **ends, **FAMILIES[name]
        )
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(path)
        tokenizer.save_pretrained(path)
        return path

    return folder


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss"])
def test_a_class_without_sdpa_is_loaded_with_what_transformers_takes(folder_of, name):
    model = get_model(str(folder_of(name)))
    assert model.config._attn_implementation == "eager"


def settings(tmp_path, **fields):
    return vf.RLConfig(
        run_name="r", output_dir=str(tmp_path), use_lora=False, report_to="none", **fields
    )


def training_outputs(model):
    tokens = torch.arange(5, 17)[None]
    model.train()
    with torch.no_grad():
        return [model(input_ids=tokens).logits for _ in range(2)]


@pytest.mark.parametrize("name", DROPS)
def test_nothing_is_drawn_in_training_mode_and_the_saved_configuration_keeps_its_numbers(
    folder_of, tmp_path, name
):
    model = get_model(str(folder_of(name)))
    for config_name in (DROPS[name], "attention_dropout"):
        if hasattr(model.config, config_name):
            setattr(model.config, config_name, 0.3)
    for module in model.modules():  # as a model that was loaded with these numbers
        if isinstance(getattr(module, "dropout", None), float):
            module.dropout = 0.3
        if isinstance(getattr(module, "residual_dropout", None), float):
            module.residual_dropout = 0.3
    first, again = training_outputs(model)
    assert not torch.equal(first, again), "negative control: it draws"

    model = prepare(model, settings(tmp_path), None)

    first, again = training_outputs(model)
    assert torch.equal(first, again)
    for number, save in enumerate((save_weights, save_merged)):
        save(model, tmp_path / str(number))
        saved = json.loads((tmp_path / str(number) / "config.json").read_text())
        assert saved[DROPS[name]] == 0.3
    assert getattr(model.config, DROPS[name]) == 0.0


@pytest.mark.parametrize(
    ("name", "is_read_outside_of_training"), [("phimoe", True), ("mixtral", False)]
)
def test_a_router_with_a_jitter_draws_nothing_and_routes_as_the_model_that_is_saved(
    folder_of, tmp_path, name, is_read_outside_of_training
):
    folder, tokens = folder_of(name), torch.arange(5, 17)[None]
    stock = AutoModelForCausalLM.from_pretrained(folder).eval()
    expected = stock(input_ids=tokens).logits
    first, again = training_outputs(get_model(str(folder)))
    assert not torch.equal(first, again), "negative control: it draws"

    model = prepare(get_model(str(folder)), settings(tmp_path), None)

    for output in training_outputs(model):
        assert torch.equal(output, expected)
    assert model.training
    # negative control: with the number at 0 Phi's router chooses otherwise
    for module in stock.modules():
        if hasattr(module, "router_jitter_noise"):
            module.router_jitter_noise = 0.0
    differs = not torch.equal(stock(input_ids=tokens).logits, expected)
    assert differs == is_read_outside_of_training


@pytest.mark.parametrize("name", ["gpt2", "gemma2"])
def test_such_a_family_trains_and_sampler_and_trainer_agree(folder_of, tmp_path, name):
    def vowels(completion):
        text = completion[-1].content
        return sum(letter in "aeiou " for letter in text) / max(1, len(text))

    rows = [{"question": f"Number {n}"} for n in range(8)]
    env = vf.SingleTurnEnv(dataset=rows, rubric=vf.Rubric(funcs=[vowels]))
    config = settings(
        tmp_path,
        rollouts_per_example=4,
        batch_size=8,
        max_steps=2,
        max_tokens=6,
        max_seq_len=64,
        save_strategy="no",
        disable_tqdm=True,
    )
    vf.RLTrainer(str(folder_of(name)), env, config).train()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    apart = [line["sampler/log_ratio_abs"] for line in lines if "loss" in line]
    assert max(value for value in apart if value is not None) < 1e-5
