"""Models whose layers carry a state (convolutions, linear attention, Mamba) in the embedded engine."""

from __future__ import annotations

import asyncio
import copy
import json
import random

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.models.lfm2 import modeling_lfm2

import verifiers as vf
from support.embedded import ask, complete, forward_logprobs, sampled_logprobs, serving
from support.families import tiny_config
from verifiers.errors import ConfigError
from verifiers_trainer.engines.embedded import kv_cache
from verifiers_trainer.engines.embedded.cache_checks import CacheAbilities, measured
from verifiers_trainer.engines.embedded.model_inputs import ForwardPass
from verifiers_trainer.policy.builtin_models import build_tiny_tokenizer
from verifiers_trainer.policy.forward_checks import PACKING_TOLERANCE, check_packing

STATES = ["lfm2", "qwen3_next", "falcon_h1", "mamba2", "minimax"]
EXACT = 1e-5


def model_of(name: str):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(name)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.mul_(4)  # away from uniform, so that a wrong state shows
    return model


def abilities_of(model) -> CacheAbilities:
    with torch.inference_mode():
        return measured(ForwardPass(model), model.config.vocab_size, model.device)


@pytest.mark.parametrize("name", STATES)
async def test_rows_that_join_leave_and_share_a_prompt_are_sampled_exactly(name):
    model, rng = model_of(name), random.Random(0)
    texts = ["x y" * rng.randint(1, 12) for _ in range(5)]
    bodies = [
        ask(rng.choice(texts), max_tokens=rng.randint(1, 14), seed=seed, ignore_eos=True)
        for seed in range(16)
    ]
    with serving(model, concurrency=6) as engine:
        responses = await complete(engine, *bodies)
    for response in responses:
        apart = sampled_logprobs(response) - forward_logprobs(model, response)
        assert apart.abs().max() < EXACT


@pytest.mark.parametrize("name", ["lfm2", "falcon_h1"])
async def test_a_row_in_flight_keeps_its_state_over_an_update(name):
    model = model_of(name)
    body = ask("some words", max_tokens=40, seed=1, ignore_eos=True, stream=False)
    weights = {0: copy.deepcopy(model)}
    with serving(model) as engine:
        steps, loop, is_far = [], asyncio.get_running_loop(), asyncio.Event()

        def count(module, arguments):
            steps.append(module)
            if len(steps) == 8:
                loop.call_soon_threadsafe(is_far.set)

        engine._replica.get_input_embeddings().register_forward_pre_hook(count)
        reply = asyncio.create_task(complete(engine, body))
        await is_far.wait()
        with engine.pause(), torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.1)
            engine.set_version(1)
        (response,) = await reply
    weights[1] = model
    choice = response["choices"][0]
    spans = choice["weight_versions"]
    assert [span["version"] for span in spans] == [0, 1]
    prompt, ids = response["prompt_token_ids"], choice["token_ids"]
    cache, logits = DynamicCache(config=model.config), []
    for number in range(len(ids)):  # as it was decoded: the prompt at once, then single tokens
        columns = prompt if number == 0 else [ids[number - 1]]
        version = 0 if number < spans[0]["end"] else 1
        with torch.no_grad():
            out = weights[version](torch.tensor([columns]), past_key_values=cache)
        logits.append(out.logits[0, -1])
    expected = torch.stack(logits).log_softmax(-1).gather(1, torch.tensor(ids)[:, None])[:, 0]
    assert (sampled_logprobs(response) - expected).abs().max() < EXACT


# --- what a class does wrong ----------------------------------------------------------------------


@pytest.mark.parametrize("name", STATES)
def test_these_classes_join_pad_and_continue(name):
    abilities = abilities_of(model_of(name))
    assert abilities.joins
    assert abilities.pads
    assert abilities.continues or name == "minimax"


async def test_prompts_are_prefilled_by_length_where_a_class_masks_no_padding(monkeypatch):
    monkeypatch.setattr(modeling_lfm2, "apply_mask_to_padding_states", lambda states, mask: states)
    model = model_of("lfm2")
    with torch.no_grad():  # the embedding of padding is not 0
        model.get_input_embeddings().weight[0] = model.get_input_embeddings().weight[1]
    assert abilities_of(model) == CacheAbilities(joins=True, pads=False, continues=True)
    with serving(model) as engine:
        responses = await complete(engine, *[ask("x" * n, seed=n) for n in (3, 3, 9, 21)])
    for response in responses:
        apart = sampled_logprobs(response) - forward_logprobs(model, response)
        assert apart.abs().max() < EXACT


async def test_rows_decode_by_length_where_states_cannot_be_joined(monkeypatch):
    def forget(layer, other):
        for mine, theirs in zip(layer.states, other.states, strict=True):
            for number, tensor in mine.items():
                if tensor is not None:
                    mine[number] = torch.cat([tensor, torch.zeros_like(theirs[number])])

    monkeypatch.setattr(kv_cache.StateLayer, "append_rows", forget)
    model = model_of("lfm2")
    assert not abilities_of(model).joins
    with serving(model) as engine:
        responses = await complete(engine, *[ask("x" * n, seed=n) for n in (3, 3, 9, 21)])
    for response in responses:
        apart = sampled_logprobs(response) - forward_logprobs(model, response)
        assert apart.abs().max() < EXACT


def test_a_cache_that_gives_something_else_is_refused_before_anything_is_sampled(monkeypatch):
    def lose(layer, rows, cut_left):
        for states in layer.states:
            for number, tensor in states.items():
                if tensor is not None:
                    states[number] = torch.zeros_like(tensor.index_select(0, rows))

    monkeypatch.setattr(kv_cache.StateLayer, "select", lose)
    with pytest.raises(ConfigError, match=r"other log-probabilities than without.*vLLM server"):
        abilities_of(model_of("lfm2"))


# --- training -------------------------------------------------------------------------------------


def test_a_leak_as_small_as_rounding_keeps_samples_apart():
    """Random weights hand on little of a state; trained ones hand on more."""
    leak = check_packing(AutoModelForCausalLM.from_config(tiny_config("lfm2")))
    assert leak.tolerance < leak.difference < PACKING_TOLERANCE


class AskedAgain(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **kwargs):
        return [{"role": "user", "content": "Another" * len(state["trajectory"])}]


@pytest.mark.parametrize("history", ["template", "exact"])
def test_several_turns_and_stop_strings_train_exactly(tmp_path, history):
    torch.manual_seed(0)
    tokenizer, model_config = build_tiny_tokenizer(), tiny_config("lfm2")
    model_config.vocab_size = len(tokenizer)  # a random model samples ids of padding rows too
    model = AutoModelForCausalLM.from_config(model_config)
    env = AskedAgain(
        dataset=[{"question": f"Number {n}"} for n in range(4)],
        rubric=vf.Rubric(funcs=[lambda completion: float(len(str(completion)) % 7)]),
        max_turns=2,
    )
    config = vf.RLConfig(
        run_name="r",
        output_dir=str(tmp_path),
        use_lora=False,
        rollouts_per_example=4,
        batch_size=8,
        max_steps=2,
        max_tokens=8,
        max_seq_len=128,
        stop=["e"],
        history=history,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = vf.RLTrainer(model, env, config, tokenizer)
    trainer.train()
    assert not trainer.args.packing
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    apart = [line["sampler/log_ratio_abs"] for line in lines if "loss" in line]
    assert max(value for value in apart if value is not None) < EXACT
