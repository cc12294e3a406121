"""The embedded engine: the policy it samples is the trainer's, before, during and
after an update."""

from __future__ import annotations

import asyncio
import copy
import gc
import math
import random
import threading
import time
from contextlib import nullcontext

import pytest
import torch
from transformers import AutoModelForCausalLM

from support.embedded import (
    ask,
    complete,
    forward_logprobs,
    post,
    sampled_logprobs,
    serving,
    small_model,
)
from support.families import tiny_config
from support.threads import no_new_thread
from verifiers.errors import ConfigError, EndpointUnreachable
from verifiers_trainer.engines.embedded import model_inputs
from verifiers_trainer.engines.embedded.engine import (
    EmbeddedEngine,
    share_parameters,
    shares_parameters,
)
from verifiers_trainer.engines.embedded.gate import StepGate
from verifiers_trainer.engines.protocol import Engine
from verifiers_trainer.policy.builtin_models import build_tiny_model, build_tiny_tokenizer
from verifiers_trainer.policy.logprobs import install_logprob_forward, uninstall

MODES = ("padded", "static", "deterministic")
TEXTS = ["a", "some words", "a much longer prompt than the others " * 2, "b", "some words"]


def change_weights(model) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.add_(
                    0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
                )


# --- the distribution -----------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("mode", MODES)
async def test_sampled_logprobs_are_those_of_a_plain_forward_pass(mode, temperature):
    model = small_model()
    with serving(model, mode=mode) as engine:
        responses = await complete(engine, *[ask(text, temperature=temperature) for text in TEXTS])
    for response in responses:
        assert len(response["choices"][0]["token_ids"]) >= 1
        difference = sampled_logprobs(response) - forward_logprobs(model, response, temperature)
        assert difference.abs().max() < 1e-4


async def test_raw_logprobs_would_be_noticed():
    """Negative control of the test above: log-probs without the temperature are far away."""
    model = small_model()
    with serving(model) as engine:
        (response,) = await complete(engine, ask(temperature=0.7, seed=1, ignore_eos=True))
    assert (sampled_logprobs(response) - forward_logprobs(model, response, 1.0)).abs().mean() > 0.05


async def test_rows_that_join_and_leave_a_running_batch_do_not_disturb_each_other():
    model = small_model()
    generator = random.Random(0)
    bodies = [
        ask("x" * generator.randint(1, 90), max_tokens=generator.randint(1, 60), seed=i)
        for i in range(40)
    ]
    with serving(model, concurrency=6) as engine:
        responses = await complete(engine, *bodies)
    for response in responses:
        assert (sampled_logprobs(response) - forward_logprobs(model, response)).abs().max() < 1e-4


async def test_a_cache_budget_of_one_request_serves_many_one_after_the_other():
    with serving(kv_bytes=1) as engine:
        responses = await complete(
            engine, *[ask(f"{i}", max_tokens=4, ignore_eos=True) for i in range(12)]
        )
    assert [response["usage"]["completion_tokens"] for response in responses] == [4] * 12


async def test_one_seed_gives_one_completion_and_another_seed_another():
    with serving() as engine:
        same, again, other_seed = await complete(engine, ask(seed=5), ask(seed=5), ask(seed=6))
    ids = [response["choices"][0]["token_ids"] for response in (same, again, other_seed)]
    assert ids[0] == ids[1] != ids[2]


# --- updates --------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
async def test_a_repeated_prompt_after_an_update_is_sampled_from_the_new_weights(mode):
    model = small_model()
    with serving(model, mode=mode) as engine:
        body = ask("a prompt that fills several blocks of the cache " * 3, seed=1)
        (before,) = await complete(engine, body)
        with engine.pause():
            change_weights(model)
            engine.set_version(1)
        (after,) = await complete(engine, body)
    assert (sampled_logprobs(after) - forward_logprobs(model, after)).abs().max() < 1e-4
    assert (sampled_logprobs(before) - forward_logprobs(model, before)).abs().mean() > 0.01, (
        "the update did nothing"
    )
    assert [span["version"] for span in after["choices"][0]["weight_versions"]] == [1]


def steps_of(model):
    """The times of the forward passes of a model, in the engine too; and a wait for the middle of a
    reply."""
    steps, is_far = [], threading.Event()

    def step(module, args):
        steps.append(time.monotonic())
        if len(steps) == 20:
            is_far.set()

    model.model.register_forward_pre_hook(step)
    return steps, lambda: asyncio.to_thread(is_far.wait, 30)


@pytest.mark.parametrize("mode", MODES)
async def test_a_request_in_flight_survives_an_update_and_its_spans_are_the_switch_points(mode):
    """Weights of zero give exactly uniform log-probs, so the log-probs themselves show where the
    switch was."""
    model = small_model()
    vocabulary, (_, begun) = model.config.vocab_size, steps_of(model)
    with serving(model, mode=mode, max_seq_len=1024) as engine:
        running = asyncio.create_task(complete(engine, ask(max_tokens=400, ignore_eos=True)))
        await begun()
        with engine.pause():
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.zero_()
            engine.set_version(7)
        (response,) = await running
    logprobs = sampled_logprobs(response)
    uniform = (logprobs + math.log(vocabulary)).abs() < 1e-5
    switch = int(uniform.to(torch.int).argmax())
    assert 0 < switch < 400
    assert uniform[switch:].all()
    assert response["choices"][0]["weight_versions"] == [
        {"version": 0, "start": 0, "end": switch},
        {"version": 7, "start": switch, "end": 400},
    ]


@pytest.mark.parametrize("mode", MODES)
async def test_no_token_is_computed_inside_a_pause(mode):
    model = small_model()
    steps, begun = steps_of(model)
    with serving(model, mode=mode, max_seq_len=1024) as engine:
        running = asyncio.create_task(complete(engine, ask(max_tokens=300, ignore_eos=True)))
        await begun()
        with engine.pause():
            held = len(steps)
            await asyncio.sleep(0.1)
            assert len(steps) == held > 0
        await running
        assert len(steps) > held


def test_a_pause_goes_before_the_next_step_of_a_busy_loop():
    gate, counted, stop = StepGate(), [0], threading.Event()

    def loop() -> None:
        while not stop.is_set():
            with gate.step():
                counted[0] += 1
                time.sleep(0.001)

    thread = threading.Thread(target=loop)
    thread.start()
    waits = []
    for _ in range(20):
        begun = time.monotonic()
        with gate.pause():
            waits.append(time.monotonic() - begun)
    stop.set()
    thread.join()
    assert sorted(waits)[10] < 0.02
    assert counted[0] > 0


def test_overlapping_pauses_release_the_loop_when_the_last_one_leaves():
    gate = StepGate()
    entered = threading.Event()
    with gate.pause():
        with gate.pause():
            thread = threading.Thread(target=lambda: gate.step().__enter__() or entered.set())
            thread.start()
        assert not entered.wait(0.05)
    assert entered.wait(5)
    thread.join()


# --- determinism ----------------------------------------------------------------------------------


async def test_deterministic_mode_is_bitwise_equal_under_any_arrival_order_and_concurrency():
    model = small_model()
    bodies = [
        ask(text * n, seed=31 * n + i, max_tokens=16)
        for n in (1, 3)
        for i, text in enumerate(TEXTS)
    ]

    async def run(order: list[int], at_once: int) -> dict[int, tuple]:
        seen = {}
        with serving(model, mode="deterministic", concurrency=at_once) as engine:
            for start in range(0, len(order), at_once):
                part = order[start : start + at_once]
                for index, response in zip(
                    part, await complete(engine, *[bodies[i] for i in part]), strict=True
                ):
                    bits = sampled_logprobs(response).numpy().tobytes()
                    seen[index] = (response["choices"][0]["token_ids"], bits)
        return seen

    order = list(range(len(bodies)))
    reference = await run(order, 1)
    shuffled = random.Random(3).sample(order, len(order))
    assert await run(shuffled, len(bodies)) == reference
    assert await run(order[::-1], 3) == reference


# --- sharing --------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
async def test_an_adapter_is_sampled_and_its_updates_are_seen(mode):
    peft = pytest.importorskip("peft")
    base = small_model()
    base.activation_checkpointing_enable()
    base.enable_input_require_grads()
    model = peft.get_peft_model(
        base, peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    )
    model.train()
    with serving(model, mode=mode) as engine:
        for scale in (0.05, 0.1):
            with engine.pause(), torch.no_grad():
                for name, parameter in model.named_parameters():
                    if "lora_B" in name:
                        parameter.normal_(0, scale, generator=torch.Generator().manual_seed(0))
            (response,) = await complete(engine, ask())
            model.eval()
            adapted = forward_logprobs(model, response)
            with model.disable_adapter():
                base_only = forward_logprobs(model, response)
            model.train()
            assert (sampled_logprobs(response) - adapted).abs().max() < 1e-4
            assert (sampled_logprobs(response) - base_only).abs().max() > 0.01
        assert model.training
        assert base.is_activation_checkpointing


def test_the_copy_shares_parameters_and_nothing_else():
    model = small_model()
    engine_model = share_parameters(model)
    assert shares_parameters(engine_model, model)
    assert not shares_parameters(copy.deepcopy(model), model)
    engine_model.config.use_cache = False
    assert model.config.use_cache
    assert {id(buffer) for buffer in engine_model.buffers()}.isdisjoint(
        id(buffer) for buffer in model.buffers()
    )


async def test_a_forward_put_on_the_trained_instance_is_not_the_sampled_one():
    model = small_model()
    stock = copy.deepcopy(model)
    model.forward = lambda *args, **kwargs: pytest.fail(
        "the trainer's forward was called by the engine"
    )
    with serving(model) as engine:
        (response,) = await complete(engine, ask())
    assert (sampled_logprobs(response) - forward_logprobs(stock, response)).abs().max() < 1e-4


def test_replaced_parameters_are_reported():
    model = small_model()
    with serving(model) as engine:
        engine.check_shared()
        model.model.norm.weight = torch.nn.Parameter(torch.ones(64))
        with pytest.raises(ConfigError, match="replaced"):
            engine.check_shared()


def test_prompt_learning_adapters_are_refused():
    peft = pytest.importorskip("peft")
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    with pytest.raises(ConfigError, match="prompt-learning"):
        share_parameters(peft.get_peft_model(small_model(), config))


# --- life cycle -----------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_construction_starts_nothing_and_stop_leaves_nothing(mode):
    with no_new_thread():
        engine = EmbeddedEngine(
            small_model(), build_tiny_tokenizer(), mode=mode, max_seq_len=128, concurrency=4
        )
    with no_new_thread():
        with pytest.raises(EndpointUnreachable, match="start"):
            _ = engine.base_url
        with engine.pause():
            assert not engine.health()
        engine.start(30)
        assert isinstance(engine, Engine)
        assert engine.health()
        engine.stop()
        engine.stop()
        assert not engine.health()


async def test_a_stopped_engine_can_be_started_again():
    engine = EmbeddedEngine(small_model(), build_tiny_tokenizer(), max_seq_len=128, concurrency=4)
    for _ in range(2):
        with engine:
            await complete(engine, ask())
    assert engine.mode == "padded"


def test_a_forgotten_engine_stops_when_it_is_collected():
    with no_new_thread():
        engine = EmbeddedEngine(
            small_model(), build_tiny_tokenizer(), max_seq_len=128, concurrency=4
        )
        engine.start(30)
        del engine
        gc.collect()


@pytest.mark.parametrize(("mode", "paused"), [*((mode, False) for mode in MODES), ("padded", True)])
async def test_stopping_answers_requests_in_flight(mode, paused):
    with serving(mode=mode, max_seq_len=4096) as engine:
        running = asyncio.create_task(post(engine, [ask(max_tokens=4000, ignore_eos=True)]))
        await asyncio.sleep(0.1)
        with engine.pause() if paused else nullcontext():
            await asyncio.to_thread(engine.stop)
        ((status, answer),) = await running
    assert status == 500
    assert "stopped" in answer["error"]["message"]


@pytest.mark.parametrize("mode", MODES)
async def test_a_client_that_goes_away_frees_its_place(mode):
    with serving(mode=mode, concurrency=1, max_seq_len=4096) as engine:
        endless = asyncio.create_task(post(engine, [ask(max_tokens=4000, ignore_eos=True)]))
        await asyncio.sleep(0.1)
        endless.cancel()
        begun = time.monotonic()
        await complete(engine, ask(max_tokens=2))
        took = time.monotonic() - begun
    assert took < 1.0, f"the abandoned request kept the engine busy for {took:.1f} s"


@pytest.mark.parametrize("mode", MODES)
async def test_diverged_weights_are_an_error_and_not_a_completion(mode):
    model = small_model()
    with serving(model, mode=mode) as engine:
        with engine.pause(), torch.no_grad():
            model.model.norm.weight.fill_(float("nan"))
        ((status, answer),) = await post(engine, [ask()])
        assert status == 500
        assert "diverged" in answer["error"]["message"]
        with engine.pause(), torch.no_grad():
            model.model.norm.weight.fill_(1.0)
        await complete(engine, ask())


@pytest.mark.parametrize("mode", MODES)
async def test_a_failing_step_fails_its_requests_and_the_engine_goes_on(mode):
    model = small_model()

    def explode(module, args, kwargs):
        if (kwargs["input_ids"] == 1).any():  # the unknown token
            raise RuntimeError("out of memory, say")

    model.model.register_forward_pre_hook(explode, with_kwargs=True)
    with serving(model, mode=mode) as engine:
        ((status, answer),) = await post(engine, [ask("\N{SNOWMAN}")])
        assert status == 500
        assert "out of memory" in answer["error"]["message"]
        ((status, _),) = await post(engine, [ask("fine", max_tokens=1)])
        assert status == 200


# --- configuration --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "fast"}, "mode"),
        ({"max_seq_len": 0}, "max_seq_len"),
        ({"max_seq_len": 100_000}, "4096 positions"),
        ({"concurrency": 0}, "concurrency"),
        ({"tool_call_parser": "pythonic"}, "hermes"),
    ],
)
def test_impossible_options_are_refused_by_name(options, message):
    with pytest.raises(ConfigError, match=message):
        EmbeddedEngine(small_model(), None, **{"max_seq_len": 64, "concurrency": 1, **options})


@pytest.mark.parametrize("mode", ["auto", "continuous"])
def test_the_modes_of_older_versions_are_padded(mode):
    assert (
        EmbeddedEngine(
            small_model(), build_tiny_tokenizer(), mode=mode, max_seq_len=64, concurrency=1
        ).mode
        == "padded"
    )


@pytest.mark.parametrize("name", ["rwkv", "recurrent_gemma"])
def test_a_state_that_is_not_in_a_cache_is_refused_with_the_alternative(name):
    """One class returns its state beside the logits, the other keeps it in its modules."""
    model = AutoModelForCausalLM.from_config(tiny_config(name))
    engine = EmbeddedEngine(model, build_tiny_tokenizer(), max_seq_len=64, concurrency=1)
    with pytest.raises(ConfigError, match="vLLM"):
        engine.start(30)


async def test_other_attention_and_grouped_heads_give_the_same_distribution():
    from transformers import MistralConfig, MistralForCausalLM

    shape = {"vocab_size": 110, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "eos_token_id": 3,
        "sliding_window": 16,
    }
    for attention in ("sdpa", "eager"):
        torch.manual_seed(0)
        model = MistralForCausalLM(
            MistralConfig(**shape, **heads, attn_implementation=attention)
        ).eval()
        with serving(model) as engine:
            for response in await complete(engine, *[ask(text, max_tokens=24) for text in TEXTS]):
                assert (
                    sampled_logprobs(response) - forward_logprobs(model, response)
                ).abs().max() < 1e-4


@pytest.mark.parametrize("mode", ["padded", "static"])
async def test_autocast_samples_in_the_lower_precision_and_sees_updates(mode):
    """Casts cached across steps would keep the old weights; entering autocast anew in each step
    does not."""
    model = build_tiny_model(layers=1, hidden=64, heads=2)
    with serving(model, mode=mode, autocast_dtype=torch.bfloat16) as engine:
        for _ in range(2):
            (response,) = await complete(engine, ask())
            with torch.autocast("cpu", dtype=torch.bfloat16):
                expected = forward_logprobs(model, response)
            assert (sampled_logprobs(response) - expected).abs().mean() < 0.02
            with engine.pause():
                change_weights(model)


def trained_logprobs(model, response, full_head):
    """Log-probs of the answered tokens as the trainer with ``bf16=True`` computes them."""
    prompt, tokens = response["prompt_token_ids"], response["choices"][0]["token_ids"]
    install_logprob_forward(model, full_head=full_head)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        logprobs = model(input_ids=torch.tensor([prompt + tokens])).logprobs[len(prompt) :]
    uninstall(model)
    return logprobs


async def off_by(model, full_head=False):
    """Mean difference of sampler and trainer under bf16 autocast, in nats per token."""
    bodies = [ask(f"say {number}", seed=number) for number in range(16)]
    with serving(model, autocast_dtype=torch.bfloat16) as engine:
        responses = await complete(engine, *bodies)
    pairs = [(sampled_logprobs(r), trained_logprobs(model, r, full_head)) for r in responses]
    return float(torch.cat([sampled - trained for sampled, trained in pairs]).abs().mean())


@pytest.mark.parametrize("full_head", [False, True])
async def test_under_autocast_sampler_and_trainer_run_the_head_in_the_weights_precision(full_head):
    model = small_model()
    assert await off_by(model, full_head) < 3e-4
    assert "forward" not in model.lm_head.__dict__


async def test_a_head_in_bf16_alone_makes_them_disagree(monkeypatch):
    """Negative control: as in version 0.2.0."""
    monkeypatch.setattr(model_inputs, "keep_precision", lambda head: None)
    assert await off_by(small_model()) > 1e-3


@pytest.mark.real
@pytest.mark.slow  # half a minute of CPU to load the weights and to sample
async def test_smollm2_samples_its_own_distribution():
    from verifiers_trainer.policy.loading import get_model_and_tokenizer

    pytest.importorskip("gguf", reason="needs the extra verifiers-trainer[smollm2]")
    try:
        model, tokenizer = get_model_and_tokenizer("builtin:smollm2-135m")
    except ConfigError as error:
        pytest.skip(str(error))
    with EmbeddedEngine(model, tokenizer, max_seq_len=256, concurrency=4) as engine:
        body = ask("What is the capital of France?", temperature=0.7, max_tokens=16)
        responses = await complete(engine, body, {**body, "temperature": 0})
    difference = sampled_logprobs(responses[0]) - forward_logprobs(model, responses[0], 0.7)
    assert difference.abs().mean() < 1e-4
    assert "Paris" in responses[1]["choices"][0]["message"]["content"]


# --- threads of the process -----------------------------------------------------------------------


@pytest.fixture
def three_threads(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def threads_while_serving(**options) -> int:
    with serving(small_model(), **options):
        return torch.get_num_threads()


def test_a_small_model_runs_on_one_thread_until_the_engine_stops(three_threads):
    assert threads_while_serving() == 1
    assert torch.get_num_threads() == 3


def test_a_large_model_keeps_the_threads_of_the_process(three_threads, monkeypatch):
    monkeypatch.setattr("verifiers_trainer.engines.embedded.threads.SMALL_PARAMETERS", 0)
    assert threads_while_serving() == 3


def test_the_users_number_of_threads_wins_over_the_default(three_threads, monkeypatch):
    assert threads_while_serving(threads=2) == 2
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert threads_while_serving() == 3
