"""Decoding in slots against the padded loop: equal tokens and log-probabilities for equal requests."""

from __future__ import annotations

import copy
import time
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model

from support.embedded import small_model
from support.host_values import HostValues
from support.tiny_models import tiny_llama
from verifiers_trainer.engines.embedded import engine as engines
from verifiers_trainer.engines.embedded import static
from verifiers_trainer.engines.embedded.engine import EmbeddedEngine, share_parameters
from verifiers_trainer.engines.embedded.padded import PaddedGenerator
from verifiers_trainer.engines.embedded.static import StaticGenerator, bucket, not_covered
from verifiers_trainer.engines.requests import GenerationRequest, SamplingParams
from verifiers_trainer.policy.builtin_models import build_tiny_tokenizer

VOCABULARY = 110
CAPACITY = 96


def recorded(step):
    """A graph without a GPU: two steps to warm up, then one that runs again with the tensors and
    sizes it began with, into the tensors of its first result."""
    step()
    step()
    drawn = step()

    def replay():
        for before, now in zip(drawn, step(), strict=True):
            if before is not None:
                before.copy_(now)

    return replay, drawn


def decode(ids):
    return "".join(chr(97 + token % 26) for token in ids)


@contextmanager
def running(kind, model, version=lambda: 0, **options):
    """A started loop, and the list of what it finishes."""
    finished, options = [], {"max_rows": 8, "kv_bytes": 2**26, **options}
    if kind is StaticGenerator:
        options = {"max_seq_len": CAPACITY, "capture": None, "is_ahead": False, **options}
    loop = kind(
        share_parameters(model), decode=decode, version=version, max_batch_tokens=256, **options
    )
    loop.start(finished.extend, 30)
    try:
        yield loop, finished
    finally:
        loop.stop()


def generated(kind, model, requests, delays=(), **options):
    """What each of ``requests`` got, by name; request n is sent after ``delays[n]`` seconds."""
    with running(kind, model, **options) as (loop, finished):
        for request, delay in zip(requests, [*delays, *[0.0] * len(requests)], strict=False):
            time.sleep(delay)
            loop.submit(request)
        wait(lambda: len(finished) == len(requests))
    return {generation.request.request_id: generation for generation in finished}


def wait(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def request(name, length, seed=None, on_token=None, **rules):
    ids = np.random.default_rng(length).integers(10, VOCABULARY, length).astype(np.int32)
    rules = {"max_tokens": 12, "seed": hash(name) if seed is None else seed, **rules}
    return GenerationRequest(str(name), ids, SamplingParams(**rules), on_token)


def same(first, second, atol=2e-5):
    assert first.keys() == second.keys()
    for name, generation in first.items():
        twin = second[name]
        assert generation.error is twin.error is None
        assert generation.token_ids.tolist() == twin.token_ids.tolist(), name
        assert (generation.finish_reason, generation.stop_text) == (
            twin.finish_reason,
            twin.stop_text,
        )
        np.testing.assert_allclose(generation.logprobs, twin.logprobs, atol=atol)
        for ours, theirs in zip(generation.alternatives, twin.alternatives, strict=True):
            np.testing.assert_allclose(ours.logprobs, theirs.logprobs, atol=atol)


rules = st.fixed_dictionaries(
    {"max_tokens": st.integers(1, 20)},
    optional={
        "temperature": st.sampled_from([0.0, 0.7, 1.3]),
        "top_p": st.sampled_from([0.5, 0.9]),
        "top_k": st.sampled_from([1, 5]),
        "min_p": st.sampled_from([0.05]),
        "repetition_penalty": st.sampled_from([1.3]),
        "presence_penalty": st.sampled_from([0.5]),
        "frequency_penalty": st.sampled_from([0.7]),
        "stop": st.sampled_from([("a",), ("bc", "q")]),
        "stop_token_ids": st.sampled_from([(20, 21, 22), (1,)]),
        "min_tokens": st.integers(0, 6),
        "logit_bias": st.sampled_from([((20, 3.0),), ((30, -5.0), (31, 2.0), (32, 1.0))]),
        "top_logprobs": st.integers(0, 3),
        "prompt_logprobs": st.sampled_from([None, 2]),
    },
)
requests_of = st.lists(st.tuples(st.integers(1, 40), rules), min_size=1, max_size=12)
modes = st.sampled_from([(None, False), (None, True), (recorded, False), (recorded, True)])
MODELS = {
    "llama": small_model(),
    "grouped": tiny_llama(vocab_size=VOCABULARY),
    "lora": get_peft_model(
        small_model(seed=1),
        LoraConfig(
            r=4, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM"
        ),
    ),
}


@settings(max_examples=30, deadline=None, phases=[Phase.explicit, Phase.generate])
@given(
    st.sampled_from(sorted(MODELS)),
    requests_of,
    st.lists(st.sampled_from([0.0, 0.0, 0.004, 0.02])),
    modes,
    st.integers(1, 8),
)
def test_tokens_and_logprobs_are_those_of_the_padded_loop(model, asked, delays, mode, max_rows):
    """With filters, penalties and stop rules, rows that join and leave, and steps that are recorded
    or launched ahead."""
    requests = [request(n, length, **kind) for n, (length, kind) in enumerate(asked)]
    expected = generated(PaddedGenerator, MODELS[model], requests)
    capture, is_ahead = mode
    slots = generated(
        StaticGenerator, MODELS[model], requests, delays,
        max_rows=max_rows, capture=capture, is_ahead=is_ahead,
    )  # fmt: skip
    same(expected, slots)


@pytest.mark.parametrize("name", sorted(MODELS))
@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_in_half_precision_they_differ_by_the_rounding_of_attention_alone(name, autocast):
    """Padding moves the columns of a row, whose sum then rounds otherwise: tokens are equal until
    one is drawn so close to the border that it shows."""
    model = MODELS[name] if autocast else copy.deepcopy(MODELS[name]).bfloat16()
    rows = [request(n, 1 + 7 * n % 40, temperature=(1.0, 0.7)[n % 2]) for n in range(10)]
    expected = generated(PaddedGenerator, model, rows, autocast_dtype=autocast)
    slots = generated(
        StaticGenerator, model, rows, autocast_dtype=autocast, capture=recorded, is_ahead=True
    )
    equal = 0
    for key, theirs in expected.items():
        ours = slots[key]
        num = min(len(ours.token_ids), len(theirs.token_ids))
        differs = ours.token_ids[:num] != theirs.token_ids[:num]
        first = int(differs.argmax()) if differs.any() else num
        np.testing.assert_allclose(ours.logprobs[:first], theirs.logprobs[:first], atol=0.05)
        equal += first == num
    assert equal >= 7


# --- a step ---------------------------------------------------------------------------------------


def test_a_step_has_no_branch_on_the_host(monkeypatch):
    """With every rule at once: a graph would repeat what the first step decided."""
    names = []

    def watched(step):
        with HostValues() as seen:
            drawn = step()
        names.extend(seen.names)
        return step, drawn

    everything = {
        "temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.3,
        "presence_penalty": 0.5, "min_tokens": 3, "stop_token_ids": (3,), "logit_bias": ((20, 1.0),),
        "top_logprobs": 2,
    }  # fmt: skip
    rows = [request(0, 5, **everything), request(1, 9, temperature=0.0)]
    assert all(
        g.error is None
        for g in generated(StaticGenerator, MODELS["llama"], rows, capture=watched).values()
    )
    assert names == []
    with HostValues() as seen:  # negative control
        bool(torch.ones(1).any())
    assert seen.names


def test_steps_are_captured_once_for_each_size_and_form():
    captured = []

    def counted(step):
        captured.append(step)
        return recorded(step)

    rows = [request(n, 20, max_tokens=30) for n in range(6)]
    with running(StaticGenerator, MODELS["llama"], capture=counted) as (loop, finished):
        for number in range(1, 4):
            for row in rows:
                loop.submit(row)
            wait(lambda number=number: len(finished) == 6 * number)
    assert len(captured) == 1, "6 rows and fewer are 8, and 96 columns are one size"
    assert [bucket(n, 8, 50) for n in (1, 8, 9, 40, 41)] == [8, 8, 16, 40, 48]


def test_captured_steps_are_bounded_in_number(monkeypatch):
    """Each keeps memory of the device; what is dropped is captured again."""
    forms = [{"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.05}, {"presence_penalty": 0.5}]
    rows = [request(n, 8, **rules) for n, rules in enumerate(forms * 2)]
    most = {}
    for bound in (1, 256):  # the second is the negative control
        monkeypatch.setattr(static, "_MOST_CAPTURED", bound)
        with running(StaticGenerator, MODELS["llama"], capture=recorded) as (loop, finished):
            for number, row in enumerate(rows, start=1):
                loop.submit(row)
                wait(lambda number=number: len(finished) == number)
            most[bound] = len(loop._slots._graphs), len(loop._slots._tables)
        same(
            generated(PaddedGenerator, MODELS["llama"], rows),
            {generation.request.request_id: generation for generation in finished},
        )
    assert most[1] == (2, 2)
    assert most[256] == (4, 4)


def test_a_step_has_no_cached_casts():
    """A graph's memory would be in a cache of autocast, and a cast of other weights in a graph."""
    seen = set()

    def watched(module, hidden, output):
        seen.add((output.dtype, torch.is_autocast_cache_enabled()))

    options = {"autocast_dtype": torch.bfloat16, "capture": recorded}
    with running(StaticGenerator, MODELS["llama"], **options) as (loop, finished):
        loop._low.model.model.layers[0].mlp.down_proj.register_forward_hook(watched)
        loop.submit(request(0, 5))
        wait(lambda: finished)
    assert seen == {(torch.bfloat16, False)}


def test_a_model_whose_steps_cannot_be_captured_is_computed_as_it_is(caplog):
    def refuses(step):
        step()
        try:
            raise RuntimeError("operation not permitted when stream is capturing")
        finally:
            raise RuntimeError("the capture was invalidated")  # as torch.cuda.graph ends

    rows = [request(n, 3 * n + 1, temperature=0.8, repetition_penalty=1.2) for n in range(5)]
    expected = generated(PaddedGenerator, MODELS["llama"], rows)
    same(expected, generated(StaticGenerator, MODELS["llama"], rows, capture=refuses))
    assert caplog.text.count("cannot be captured") == 1
    assert "slower: operation not permitted" in caplog.text


# --- slots ----------------------------------------------------------------------------------------


def test_slots_divide_the_memory_and_more_requests_wait(monkeypatch):
    model = MODELS["llama"]
    with running(PaddedGenerator, model) as (loop, _):
        slot_bytes = CAPACITY * loop._token_bytes
    rows = [request(n, 10) for n in range(7)]
    expected = generated(PaddedGenerator, model, rows)
    with running(StaticGenerator, model, kv_bytes=int(3.5 * slot_bytes)) as (loop, finished):
        assert loop._slots.rows == 3
        for row in rows:
            loop.submit(row)
        wait(lambda: len(finished) == 7)
    same(expected, {generation.request.request_id: generation for generation in finished})


def out_of_memory(fails):
    """What raises when ``fails`` of its arguments, as an allocation on a full device."""

    def raises(original):
        def call(*arguments, **options):
            if fails(*arguments):
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            return original(*arguments, **options)

        return call

    return raises


def test_fewer_rows_run_where_the_memory_was_taken_meanwhile(monkeypatch, caplog):
    caplog.set_level("INFO")
    full = out_of_memory(lambda layer, like, rows, capacity: rows > 3)
    monkeypatch.setattr(static.SlotLayer, "__init__", full(static.SlotLayer.__init__))
    rows = [request(n, 10) for n in range(5)]
    expected = generated(PaddedGenerator, MODELS["llama"], rows)
    same(expected, generated(StaticGenerator, MODELS["llama"], rows))
    assert "2 rows of 96 tokens decode together" in caplog.text


@pytest.mark.parametrize("kind", [PaddedGenerator, StaticGenerator])
def test_a_device_out_of_memory_fails_requests_with_the_setting_to_change(kind, monkeypatch):
    with running(kind, MODELS["llama"]) as (loop, finished):
        full = out_of_memory(lambda ids, *_: ids.shape[1] > 50)
        monkeypatch.setattr(loop, "_forward", full(loop._forward))
        loop.submit(request(0, 60))
        wait(lambda: finished)
        assert "lower embedded_concurrency (rows)" in finished.pop().error
        monkeypatch.undo()
        loop.submit(request(0, 60))
        wait(lambda: finished)
    assert finished[0].error is None


def test_the_cache_leaves_what_training_has_yet_to_take(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, 2000))
    cuda = torch.device("cuda")
    assert [engines.default_kv_bytes(cuda, n) for n in (0, 500, 5000)] == [300, 150, 75]


@pytest.mark.parametrize("is_ahead", [False, True])
def test_what_a_diverged_model_left_in_a_slot_reaches_no_later_row(is_ahead):
    """Masked attention multiplies by zero, which leaves no number no number."""
    model = small_model(seed=2)
    layer = model.model.layers[0].self_attn.v_proj.weight
    rows = [request(0, 4), request(1, 60, max_tokens=30)]  # the first is masked there
    expected = generated(PaddedGenerator, model, rows)
    with running(StaticGenerator, model, is_ahead=is_ahead) as (loop, finished):

        def diverge_and_recover():
            good = layer.detach().clone()

            def diverge(*_):
                with torch.no_grad():
                    layer.fill_(torch.nan)

            loop.submit(request(0, 62, max_tokens=30, on_token=diverge))
            wait(lambda: len(finished) == 1)
            assert "diverged" in finished.pop().error
            with loop.pause(), torch.no_grad():
                layer.copy_(good)

        diverge_and_recover()
        for row in rows:
            loop.submit(row)
        wait(lambda: len(finished) == 2)
        same(expected, {generation.request.request_id: generation for generation in finished})
        # negative control: slots as they were
        finished.clear()
        diverge_and_recover()
        loop._slots.has_diverged = False
        for row in rows:
            loop.submit(row)
        wait(lambda: len(finished) == 2)
        assert any(generation.error for generation in finished)


def test_an_aborted_row_frees_its_slot_while_a_step_is_ahead():
    sampled = []
    rows = [
        request(0, 5, max_tokens=CAPACITY - 5, on_token=lambda *_: sampled.append(1)),
        request(1, 5, max_tokens=CAPACITY - 5),
    ]
    with running(StaticGenerator, MODELS["llama"], is_ahead=True, max_rows=2) as (loop, finished):
        for row in rows:
            loop.submit(row)
        wait(lambda: sampled)
        with loop.pause():
            loop.abort("0")
            loop.submit(request("third", 5, max_tokens=2))
        wait(lambda: len(finished) == 3)
    reasons = {g.request.request_id: g.finish_reason for g in finished}
    assert reasons["0"] == "abort"
    assert reasons["third"] == "length"
    expected = generated(PaddedGenerator, MODELS["llama"], rows[1:])
    same(expected, {g.request.request_id: g for g in finished if g.request is rows[1]})


# --- which loop -----------------------------------------------------------------------------------


def engine_of(model, mode="static"):
    return EmbeddedEngine(model, build_tiny_tokenizer(), mode=mode, max_seq_len=64, concurrency=2)


def test_slots_are_used_where_set_and_on_a_cpu_not_by_themselves():
    assert engine_of(small_model()).mode == "static"
    assert engine_of(MODELS["lora"]).mode == "static"
    assert engine_of(small_model(), "auto").mode == "padded"


def test_what_slots_do_not_cover_is_decoded_padded_and_said(caplog):
    from transformers import MistralConfig, MistralForCausalLM

    caplog.set_level("INFO")
    shape = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 32}
    heads = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    windowed = MistralForCausalLM(MistralConfig(**shape, **heads, sliding_window=8)).eval()
    engine = engine_of(windowed)
    engine.start(30)
    engine.stop()
    assert engine.mode == "padded"
    assert "in mode padded: slots do not cover the model, MistralForCausalLM" in caplog.text
    assert not_covered(tiny_llama(attention="eager"))
    assert not_covered(tiny_llama()) is None
    apart = tiny_llama()
    apart.lm_head.to("meta")
    assert "several devices" in not_covered(apart)
    lora = LoraConfig(target_modules="all-linear", lora_dropout=0.1, task_type="CAUSAL_LM")
    assert "dropout" in not_covered(get_peft_model(tiny_llama(), lora))


def test_a_model_with_flash_attention_decodes_with_sdpa():
    model = small_model()
    model.config._attn_implementation = "flash_attention_2"
    engine = engine_of(model)
    assert engine.mode == "static"
    engine.start(30)  # with a forward pass, which flash attention cannot do on a CPU
    engine.stop()
    assert model.config._attn_implementation == "flash_attention_2"
