"""Updates under load: which weights computed a token, what a pause costs, adapters beside a
reference pass."""

from __future__ import annotations

import asyncio
import copy
import random
import threading
import time
from typing import Any

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from support.embedded import ask, complete, forward_logprobs, sampled_logprobs, serving, small_model
from verifiers.clients import OpenAIChatCompletionsClient
from verifiers.clients.reply import version_spans
from verifiers.rollouts.rollout import Rollout
from verifiers.rollouts.state import TrajectoryStep
from verifiers.types import ModelRequest, UserMessage
from verifiers_trainer.algorithm.samples import rollout_samples
from verifiers_trainer.engines.embedded import padded
from verifiers_trainer.engines.embedded.engine import EmbeddedEngine
from verifiers_trainer.policy.builtin_models import build_tiny_model, build_tiny_tokenizer
from verifiers_trainer.policy.reference import Reference

UPDATES = 4


def change_weights(model: Any, seed: int) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.add_(
                    0.05
                    * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))
                )


def snapshot(model: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@torch.no_grad()
def replayed_logprobs(models: dict[int, Any], response: dict, temperature: float) -> torch.Tensor:
    """What the sampler must have said: each span of tokens by the weights of its version, on keys
    as they then were."""
    prompt, (choice,) = response["prompt_token_ids"], response["choices"]
    ids, cache, parts = prompt + choice["token_ids"], DynamicCache(), []
    done = 0
    for span in choice["weight_versions"]:
        end = len(prompt) + span["end"] - 1  # the pass that samples a token reads the one before it
        columns = torch.tensor([ids[done:end]])
        logits = models[span["version"]](columns, past_key_values=cache, use_cache=True).logits[0]
        logp = torch.log_softmax(
            logits[-(span["end"] - span["start"]) :].float() / temperature, dim=-1
        )
        tokens = choice["token_ids"][span["start"] : span["end"]]
        parts.append(logp.gather(1, torch.tensor(tokens)[:, None])[:, 0])
        done = end
    return torch.cat(parts)


async def load(
    engine: EmbeddedEngine, model: Any, count: int
) -> tuple[list[tuple[float, dict]], dict[int, Any]]:
    """``count`` mixed requests, arriving over time, while the weights change ``UPDATES`` times."""
    rng = random.Random(0)
    weights = {0: snapshot(model)}
    finished = asyncio.Semaphore(0)

    async def timed_ask(index: int) -> tuple[float, dict]:
        await asyncio.sleep(rng.random() * 0.6)
        temperature = rng.choice([1.0, 0.7, 1.4])
        body = ask(
            "x y " * rng.randint(1, 20),
            temperature=temperature,
            max_tokens=rng.randint(1, 60),
            seed=index,
        )
        (response,) = await complete(engine, {**body, "ignore_eos": rng.random() < 0.5})
        finished.release()
        return temperature, response

    async def update() -> None:
        for version in range(1, UPDATES + 1):
            # however slow the machine is, each version samples something
            for _ in range(count // (UPDATES + 2)):
                await finished.acquire()
            with engine.pause():
                change_weights(model, version)
                engine.set_version(version)
            weights[version] = snapshot(model)

    updating = asyncio.create_task(update())
    answers = list(await asyncio.gather(*map(timed_ask, range(count))))
    await updating
    answers.append((1.0, (await complete(engine, ask("after all updates", seed=1)))[0]))
    models = {}
    for version, state in weights.items():
        models[version] = small_model()
        models[version].load_state_dict(state)
    return answers, models


@pytest.mark.parametrize("mode", ["padded", "static"])
async def test_200_mixed_requests_say_which_weights_computed_every_token(mode):
    model = small_model()
    with serving(model, mode=mode, concurrency=48) as engine:
        answers, models = await load(engine, model, 200)
    spans = [len(response["choices"][0]["weight_versions"]) for _, response in answers]
    versions = {
        span["version"]
        for _, response in answers
        for span in response["choices"][0]["weight_versions"]
    }
    assert max(spans) > 1, "no request was in flight at an update"
    assert {0, UPDATES} <= versions
    worst = max(
        (sampled_logprobs(response) - replayed_logprobs(models, response, temperature))
        .abs()
        .max()
        .item()
        for temperature, response in answers
    )
    assert worst < 1e-4


async def test_a_version_label_that_is_one_update_off_would_be_noticed():
    """Negative control of the above: replayed with the neighbouring version's weights, the
    log-probs are far away."""
    model = small_model()
    with serving(model, concurrency=48) as engine:
        answers, models = await load(engine, model, 40)
    shifted = {version: models[min(version + 1, UPDATES)] for version in models}
    told = [
        (t, r) for t, r in answers if r["choices"][0]["weight_versions"][0]["version"] < UPDATES
    ]
    apart = [
        (sampled_logprobs(r) - replayed_logprobs(shifted, r, t)).abs().max().item() for t, r in told
    ]
    assert min(apart) > 1e-3


async def test_a_turn_keeps_the_version_of_each_of_its_tokens_into_the_batch():
    """Weights change twice while one answer is sampled; each token's log-prob is of the weights it
    is labelled with."""
    model = small_model()
    models = {0: copy.deepcopy(model)}
    slow_parts(model, 0.01)
    with serving(model) as engine:
        client = OpenAIChatCompletionsClient(base_url=engine.base_url, api_key=engine.api_key)
        sampling = {"max_tokens": 40, "ignore_eos": True, "return_weight_versions": True}
        request = ModelRequest(
            [UserMessage("count")],
            engine.served_model,
            sampling_args=sampling,
            seed=1,
            require_tokens=True,
        )
        answer = asyncio.create_task(client.complete(request))
        for version in (1, 2):
            await asyncio.sleep(0.25)
            with engine.pause():
                change_weights(model, version)
                engine.set_version(version)
            models[version] = small_model()
            models[version].load_state_dict(model.state_dict())
        response = await answer
        await client.aclose()
    tokens = response.tokens
    assert sorted(set(tokens.version.tolist())) == [0, 1, 2]
    assert response.version == 0
    turn = TrajectoryStep(prompt=[], completion=[], tokens=tokens)
    (sample,) = rollout_samples([turn], 0.0).samples
    sampled = sample.versions[len(turn.prompt_ids) :]
    np.testing.assert_array_equal(sampled, tokens.version)
    assert (np.diff(sampled) >= 0).all()
    assert Rollout((turn,), 0.0).oldest_version == 0  # what staleness counts from
    choice = {
        "token_ids": tokens.completion_ids.tolist(),
        "weight_versions": version_spans(sampled),
    }
    answered = {"prompt_token_ids": tokens.prompt_ids.tolist(), "choices": [choice]}
    replayed = replayed_logprobs(models, answered, 1.0).numpy()
    np.testing.assert_allclose(sample.sampler_logprobs[len(turn.prompt_ids) :], replayed, atol=1e-4)


# --- the pause ------------------------------------------------------------------------------------


def slow_parts(model: Any, seconds: float) -> None:
    """Each attention and MLP takes ``seconds`` more."""
    for layer in model.model.layers:
        for part in (layer.self_attn, layer.mlp):
            part.register_forward_pre_hook(lambda *_: time.sleep(seconds))


async def waits_for_pauses(
    engine: EmbeddedEngine, pauses: int = 6
) -> tuple[list[float], list[dict]]:
    """How long each of ``pauses`` waited while requests were computed, and the answers."""
    running = asyncio.create_task(
        complete(engine, *[ask("z" * (5 + i), max_tokens=6, seed=i) for i in range(4)])
    )
    waits: list[float] = []

    def pause() -> None:
        begun = time.monotonic()
        with engine.pause():
            waits.append(time.monotonic() - begun)

    for _ in range(pauses):
        await asyncio.sleep(0.13)
        await asyncio.to_thread(pause)
    return waits, await running


@pytest.mark.parametrize("mode", ["padded", "static"])
async def test_a_pause_waits_for_a_part_of_a_layer_and_what_was_given_up_is_done_again(
    monkeypatch, mode
):
    """A pass takes 8 parts of 25 ms; a pause waits for one. Negative control: uninterrupted, it
    waits for the rest."""

    def model() -> Any:
        built = build_tiny_model(layers=4, hidden=32, heads=2)
        slow_parts(built, 0.025)
        return built

    with serving(model(), mode=mode) as engine:
        waits, answers = await waits_for_pauses(engine)
    monkeypatch.setattr(padded, "_MAX_INTERRUPTIONS", 0)
    with serving(model(), mode=mode) as engine:
        control_waits, control_answers = await waits_for_pauses(engine)
    assert sum(waits) < 0.6 * sum(control_waits)
    assert [a["choices"][0]["token_ids"] for a in answers] == [
        a["choices"][0]["token_ids"] for a in control_answers
    ]
    plain = build_tiny_model(layers=4, hidden=32, heads=2)
    for answer in answers:
        assert (sampled_logprobs(answer) - forward_logprobs(plain, answer)).abs().max() < 1e-4


async def test_pauses_that_never_end_do_not_stop_the_engine():
    """A pass is given up a few times and then gets its turn."""
    model = build_tiny_model(layers=4, hidden=32, heads=2)
    slow_parts(model, 0.003)
    stop = threading.Event()
    with serving(model) as engine:

        def pause_again_and_again() -> None:
            while not stop.wait(0.004):
                with engine.pause():
                    pass

        thread = threading.Thread(target=pause_again_and_again)
        thread.start()
        try:
            await asyncio.wait_for(complete(engine, ask(max_tokens=5)), 30)
        finally:
            stop.set()
            thread.join()


@pytest.mark.parametrize("max_batch_tokens", [None, 64])
async def test_long_prompts_are_prefilled_in_passes_of_bounded_size(max_batch_tokens):
    model = small_model()
    widths: list[int] = []
    model.model.register_forward_pre_hook(
        lambda module, args, kwargs: widths.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    with serving(model, concurrency=16, max_batch_tokens=max_batch_tokens) as engine:
        widths.clear()
        answers = await complete(
            engine, *[ask("x" * (1 + i), max_tokens=3, seed=i) for i in range(16)]
        )
    assert max(widths) <= (max_batch_tokens or 1024)
    assert (max(widths) > 64) == (max_batch_tokens is None)
    for answer in answers:
        assert (sampled_logprobs(answer) - forward_logprobs(model, answer)).abs().max() < 1e-4


# --- adapters -------------------------------------------------------------------------------------


async def test_a_reference_pass_with_the_adapter_off_does_not_reach_the_engine():
    """The trainer computes base log-probs in its thread while the engine samples the adapter,
    dropout and all."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(
        r=4, lora_dropout=0.5, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    model = peft.get_peft_model(small_model(), config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.1, generator=torch.Generator().manual_seed(0))
    model.train()
    reference, ids = Reference(model), torch.arange(5, 40)[None]
    stop = threading.Event()
    references: list[torch.Tensor] = []

    def reference_passes() -> None:
        while not stop.is_set():
            references.append(reference(input_ids=ids, use_cache=False).logits)

    with serving(model) as engine:
        thread = threading.Thread(target=reference_passes)
        thread.start()
        try:
            answers = await complete(
                engine, *[ask("ab" * i, seed=i, max_tokens=40) for i in range(1, 9)]
            )
        finally:
            stop.set()
            thread.join()
    assert model.training
    model.eval()
    with torch.no_grad(), model.disable_adapter():
        base = model(input_ids=ids, use_cache=False).logits
    assert len(references) > 3
    assert all(torch.equal(logits, base) for logits in references)
    for answer in answers:
        assert (sampled_logprobs(answer) - forward_logprobs(model, answer)).abs().max() < 1e-4
        with model.disable_adapter():
            assert (sampled_logprobs(answer) - forward_logprobs(model, answer)).abs().max() > 0.01


# --- other devices --------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda", "mps"])
async def test_on_an_accelerator_the_sampled_logprobs_are_the_trainers(device):
    there = torch.cuda.is_available() if device == "cuda" else torch.backends.mps.is_available()
    if not there:
        pytest.skip(f"needs {device}")
    model = small_model().to(device)
    with serving(model) as engine:
        answers = await complete(
            engine, *[ask("ab" * i, seed=i, temperature=0.8, top_k=20) for i in range(1, 9)]
        )
        with engine.pause():
            change_weights(model.cpu(), 1)  # in place: Module.to keeps the Parameter objects
            model.to(device)
    assert all(len(sampled_logprobs(answer)) for answer in answers)
    full = EmbeddedEngine(model, build_tiny_tokenizer(), max_seq_len=256, concurrency=8)
    with full:
        (answer,) = await complete(full, ask(seed=1))
    assert (sampled_logprobs(answer) - forward_logprobs(model.cpu(), answer)).abs().max() < 1e-3
