"""The model of time and memory against numbers computed by hand, and against published sizes of models."""

from dataclasses import replace

import numpy as np
import pytest

from verifiers_trainer.cli.throughput import (
    Architecture,
    DeviceSpeed,
    MeasuredSpeed,
    Placement,
    PlannedRun,
    Training,
    Workload,
    best_split,
    decode_s,
    exchange_s,
    generate_s,
    longest_excess,
    sampler_memory,
    step_time,
    sync_bytes,
    train_flops,
    train_s,
    trainer_memory,
)
from verifiers_trainer.policy.builtin_models import build_tiny_model

SMALL = Architecture(layers=2, width=4, mlp_width=8, heads=2, kv_heads=1, head_width=2, vocabulary=10)
DEVICE = DeviceSpeed(
    flops=1e6, bytes_per_s=1e5, memory=1e6, utilisation=0.5, bandwidth_share=0.5, decode_overhead_s=0.01,
    row_overhead_s=0.0,
)  # fmt: skip
WORK = Workload(batch_size=4, group_size=2, prompt_tokens=6, completion_tokens=4)
ALL = Training()
SERVER = Placement(trainers=1, samplers=1, link_bytes_per_s=1e4, sync_bytes_per_s=1e4)


def planned(work: Workload = WORK, placement: Placement = SERVER, measured: MeasuredSpeed | None = None) -> PlannedRun:
    return PlannedRun(SMALL, DEVICE, work, ALL, placement, measured or MeasuredSpeed())


def near(value: float) -> object:
    return pytest.approx(value, rel=1e-9)


@pytest.mark.parametrize(
    ("model", "parameters"),
    [
        (Architecture(32, 4096, 14336, 32, 8, 128, 128256, tied=False), 8_030_261_248),  # Llama 3 8B
        (Architecture(24, 896, 4864, 14, 2, 64, 151936, qkv_bias=True), 494_032_768),  # Qwen2.5 0.5B
        (Architecture(28, 1024, 3072, 16, 8, 128, 151936, qk_norm=True), 596_049_920),  # Qwen3 0.6B
        (Architecture(30, 576, 1536, 9, 3, 64, 49152), 134_515_008),  # SmolLM2 135M
    ],
)
def test_the_number_of_weights_is_that_of_the_published_model(model, parameters):
    assert model.parameters == parameters


def test_sizes_by_hand():
    assert SMALL.parameters == 10 * 4 + 2 * (16 + 8 + 8 + 16 + 96 + 8) + 4 == 348
    assert SMALL.adapter_parameters(3) == 2 * 3 * (8 + 6 + 6 + 8 + 12 + 12 + 12)
    assert SMALL.kv_numbers == 8  # keys and values, two layers, two wide


def test_an_adapter_has_the_weights_that_peft_adds():
    peft = pytest.importorskip("peft")
    model = build_tiny_model()
    whole = sum(p.numel() for p in model.parameters())
    config = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    added = sum(p.numel() for p in peft.get_peft_model(model, config).parameters()) - whole
    sizes = Architecture(3, 128, 256, 4, 4, 32, model.config.vocab_size, qk_norm=True)
    assert (sizes.parameters, sizes.adapter_parameters(4)) == (whole, added)


def test_operations_of_a_trained_token():
    attention = 2 * 2 * 4 * 10
    assert train_flops(SMALL, ALL, 10) == 6 * 348 + 3 * attention == 2568
    twice = Training(checkpointing=True, extra_forwards=1)
    assert train_flops(SMALL, twice, 10) == 2568 + 2 * (2 * 348 + attention)
    assert train_flops(SMALL, Training(rank=1), 10) == 4 * 348 + 2 * SMALL.adapter_parameters(1) + 480


def test_training_and_the_exchange_are_divided_by_hand():
    one, two = Placement(trainers=1), Placement(trainers=2, link_bytes_per_s=1e4)
    update = 28 * 348 / 1e5
    assert train_s(SMALL, DEVICE, WORK, ALL, one) == near(28 * 2568 / 5e5 + update)  # a group's prompt once
    assert train_s(SMALL, DEVICE, WORK, ALL, two) == near(14 * 2568 / 5e5 + update)
    assert train_s(SMALL, DEVICE, WORK, ALL, replace(two, shards=True)) == near(14 * 2568 / 5e5 + update / 2)
    assert exchange_s(SMALL, ALL, one) == 0
    assert exchange_s(SMALL, ALL, two) == near(4 * 348 / 1e4)
    launches = replace(DEVICE, row_overhead_s=3.0)
    assert train_s(SMALL, launches, WORK, Training(row_tokens=10), one) == near(3 * 3.0 + update)  # 28 tokens


def test_decoding_reads_weights_and_cache_or_multiplies():
    assert decode_s(SMALL, DEVICE, 8, 8) == near((2 * 348 + 8 * 8 * 16) / 5e4 + 0.01)
    assert decode_s(SMALL, replace(DEVICE, bytes_per_s=1e9), 8, 8) == near(2 * 348 * 8 / 5e5 + 0.01)
    requests = replace(DEVICE, token_overhead_s=0.5)
    assert decode_s(SMALL, requests, 8, 8) == near(decode_s(SMALL, DEVICE, 8, 8) + 4)


def test_generation_by_hand():
    seconds, concurrent = generate_s(SMALL, DEVICE, WORK, SERVER)
    busy = 4 * ((2 * 348 + 8 * 8 * 16) / 5e4 + 0.01) + 8 * 2 * 348 * 3 / 5e5  # two siblings share a prompt of 6
    assert (seconds, concurrent) == (near(4 * busy / 8), near(8))  # two batches are in flight
    assert generate_s(SMALL, DEVICE, replace(WORK, surplus=3.0), SERVER)[0] == near(3 * seconds)


def test_the_longest_of_a_batch_is_that_of_drawn_lengths():
    draw = np.random.default_rng(0)
    for count, mean in ((8, 40), (128, 100), (512, 20)):
        longest = draw.geometric(1 / mean, (2_000, count)).max(axis=1).mean()
        work = replace(WORK, batch_size=count, completion_tokens=mean, length_spread=1.0)
        assert work.longest_tokens == pytest.approx(longest, rel=0.03)
        assert replace(work, most_tokens=2 * mean).longest_tokens == 2 * mean
        assert replace(work, length_spread=0.0).longest_tokens == mean
    assert longest_excess(4) == pytest.approx(1 / 2 + 1 / 3 + 1 / 4, abs=0.01)
    assert longest_excess(1) == pytest.approx(0, abs=0.1)


def test_a_synchronous_batch_waits_for_its_longest_rollout():
    """By hand: each step of lengths 2, 4, 4, 6, of which ever fewer decode."""
    alone = replace(SERVER, off_policy=0)
    spread = replace(WORK, length_spread=0.5 / longest_excess(4))
    assert spread.longest_tokens == near(6)
    equal, (seconds, concurrent) = generate_s(SMALL, DEVICE, WORK, alone), generate_s(SMALL, DEVICE, spread, alone)
    living = [sum(length > step for length in (2, 4, 4, 6)) for step in range(6)]
    prompts = equal[0] - 4 * decode_s(SMALL, DEVICE, 4, 8)
    assert seconds == near(sum(decode_s(SMALL, DEVICE, count, 8) for count in living) + prompts)
    assert concurrent == near(sum(living) / 6)
    assert seconds > equal[0]
    assert generate_s(SMALL, DEVICE, spread, SERVER) == generate_s(SMALL, DEVICE, WORK, SERVER)  # negative control


def test_rollouts_that_wait_are_bounded_by_how_many_are_in_flight():
    slow = replace(WORK, env_s=1000.0)
    seconds, concurrent = generate_s(SMALL, DEVICE, slow, SERVER)
    assert seconds == pytest.approx(1000 * 4 / 8, rel=1e-3)
    assert concurrent < 0.01
    assert generate_s(SMALL, DEVICE, slow, replace(SERVER, in_flight=2))[0] == pytest.approx(2000, rel=1e-3)
    assert step_time(planned(slow)).bottleneck == "the environment"


def test_a_small_cache_bounds_how_many_decode_together():
    small = replace(DEVICE, memory=(2 * 348 + 3 * 10 * 16) / 0.9)  # of weights and three rollouts of ten tokens
    assert generate_s(SMALL, small, WORK, SERVER)[1] == pytest.approx(3)
    assert sampler_memory(SMALL, small, WORK, SERVER)["key/value cache"] == near(3 * 10 * 16)
    bounded = replace(SERVER, cache_bytes=2 * 10 * 16)
    assert generate_s(SMALL, DEVICE, WORK, bounded)[1] == pytest.approx(2)
    assert sampler_memory(SMALL, DEVICE, WORK, SERVER)["key/value cache"] == near(8 * 10 * 16)


def test_generation_and_training_overlap_only_on_devices_of_their_own():
    overlapped = step_time(planned())
    generation, training, sync = overlapped.generate_s, overlapped.train_s, 2 * 348 / 1e4
    assert overlapped.step_s == near(max(generation, training) + sync)
    assert overlapped.bottleneck == "training"
    assert step_time(planned(placement=replace(SERVER, samplers=0))).step_s == near(generation + training)
    alternating = step_time(planned(placement=replace(SERVER, off_policy=0)))
    assert alternating.step_s == near(alternating.generate_s + training + sync)
    assert alternating.generate_s > generation  # half as many in flight


def test_measured_speeds_replace_the_formulas():
    measured = MeasuredSpeed(train_tokens_per_s=14, sampled_tokens_per_s=2, sync_s=0.25, other_s=0.5)
    time = step_time(planned(replace(WORK, surplus=2.0), replace(SERVER, samplers=4), measured))
    assert (time.generate_s, time.train_s) == (near(4 * 2 * 4 / 8), near(2.0))
    assert time.step_s == near(4.0 + 0.25 + 0.5)
    assert time.bottleneck == "generation"


def test_measured_speeds_are_those_of_as_many_rollouts_at_a_time():
    """By hand: the ratio of two predictions, of rollouts of 6 and 4 tokens that decode 2 x batch at a time."""

    def generated_s(batch):
        at_a_time = 2 * batch
        decode = (2 * 348 + at_a_time * (6 + 4 / 2) * 8 * 2) / (1e5 * 0.5) + 0.01
        prompts = at_a_time * (6 / 2) * 2 * 348 / (1e6 * 0.5)
        return batch * (4 * decode + prompts) / at_a_time

    measured = MeasuredSpeed(sampled_tokens_per_s=2, sampled_batch=4)
    of_itself = step_time(planned(measured=measured)).generate_s
    assert of_itself == near(4 * 4 / 2)
    larger = step_time(planned(replace(WORK, batch_size=16), measured=measured)).generate_s
    assert larger == near(16 * 4 / 2 * (generated_s(16) / 16) / (generated_s(4) / 4))
    assert larger < 4 * of_itself  # and of a run whose batch is not known:
    unknown = replace(measured, sampled_batch=None)
    assert step_time(planned(replace(WORK, batch_size=16), measured=unknown)).generate_s == near(4 * of_itself)
    wasteful = planned(replace(WORK, surplus=3.0), measured=measured)
    assert step_time(wasteful).generate_s == near(3 * of_itself)


def test_a_cpu_computes_in_32_bits_and_one_thing_after_the_other():
    cpu = replace(DEVICE, is_accelerator=False, row_overhead_s=3.0)
    assert decode_s(SMALL, cpu, 8, 8) == near(4 * (348 + 8 * 8 * 8) / 5e4 + 2 * 348 * 8 / 5e5 + 0.01)
    flops = 6 * 348 + 3 * (2 * 2 * 4 * 2 * 10)  # a token attends to the ten of its row
    seconds = 28 * flops / 5e5 + 3 * 3.0 + 28 * 348 / 1e5
    assert train_s(SMALL, cpu, WORK, Training(row_tokens=10), Placement()) == near(seconds)
    memory = trainer_memory(SMALL, cpu, Training(rank=1, row_tokens=100), Placement())
    assert memory["weights"] == 4 * (SMALL.adapter_parameters(1) + 348)
    assert sampler_memory(SMALL, cpu, WORK, SERVER) == {"weights": 4 * 348, "key/value cache": near(8 * 10 * 8 * 4)}


@pytest.mark.parametrize(
    ("rollouts", "generated_s", "trained_s"),
    [(16, 3.31, 4.31), (32, 5.48, 9.24)],  # 24 sampled tokens each
)
def test_a_model_of_135_million_weights_takes_what_was_measured(rollouts, generated_s, trained_s):
    """CPU seconds of one core, medians of three steps of ``builtin:smollm2-135m`` with LoRA (docs/scale.md)."""
    model = Architecture(30, 576, 1536, 9, 3, 64, 49152)
    cpu = DeviceSpeed(flops=2e11, bytes_per_s=2e10, memory=2e10, is_accelerator=False)
    work = Workload(batch_size=rollouts, group_size=8, prompt_tokens=73, completion_tokens=23)
    run = PlannedRun(model, cpu, work, Training(rank=16, row_tokens=512), Placement(off_policy=0))
    time = step_time(run)
    assert (time.generate_s, time.train_s) == (
        pytest.approx(generated_s, rel=0.15),
        pytest.approx(trained_s, rel=0.25),
    )
    assert time.bottleneck == "training"


def test_memory_by_hand():
    memory = trainer_memory(SMALL, DEVICE, Training(row_tokens=100), Placement())
    assert memory["weights"] + memory["gradients"] + memory["optimizer"] == 16 * 348
    assert memory["activations"] == 34 * 4 * 2 * 100 + 4 * 10 * 100
    adapter = SMALL.adapter_parameters(1)
    lora = trainer_memory(SMALL, DEVICE, Training(rank=1), Placement(trainers=2, shards=True))
    assert lora["weights"] + lora["gradients"] + lora["optimizer"] == near((16 * adapter + 2 * 348) / 2)
    assert (sync_bytes(SMALL, ALL), sync_bytes(SMALL, Training(rank=1))) == (2 * 348, 4 * adapter)
    recomputed = trainer_memory(SMALL, DEVICE, Training(row_tokens=100, checkpointing=True), Placement())
    assert recomputed["activations"] < memory["activations"]


def test_the_best_split_is_the_fastest_of_all():
    work = replace(WORK, batch_size=12)
    whole = replace(SERVER, trainers=1, samplers=5)
    split, best = best_split(planned(work, whole))
    times = {
        count: step_time(planned(work, replace(whole, trainers=count, samplers=6 - count))).step_s
        for count in (1, 2, 3, 4)  # 5 does not divide the batch
    }
    assert best.step_s == min(times.values()) == times[split.trainers]
    assert len(set(times.values())) == 4
