"""The model of time and memory against numbers computed by hand, and published sizes.

``distributed/test_sharded_runs`` compares it with what two processes exchanged, ``policy/test_sizes``
with torch's accounting of memory.
"""

import dataclasses
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verifiers_trainer.cli.throughput import (
    Exchange,
    PlannedRun,
    best_split,
    decode_s,
    exchange,
    exchange_s,
    generate_s,
    memory,
    step_time,
    sync_bytes,
    sync_s,
    train_flops,
    train_s,
    trainer_memory,
)
from verifiers_trainer.policy.sizes import Architecture
from verifiers_trainer.settings.fields import Settings

SMALL = Architecture(
    layers=2, width=4, mlp_width=8, heads=2, kv_heads=1, head_width=2, vocabulary=10
)
PARAMETERS = 348
INPUTS = {
    "prompt_tokens": 6, "completion_tokens": 4, "longest_tokens": 0, "env_s": 0, "surplus": 1, "trained": 1,
    "flops": 1e6, "bytes_per_s": 1e5, "memory": 1e6, "utilisation": 0.5, "bandwidth_share": 0.5,
    "decode_overhead_s": 0.01, "token_overhead_s": 0, "row_overhead_s": 0, "flash": 0, "link_bytes_per_s": 1e4,
    "call_s": 0, "sync_bytes_per_s": 1e4, "trainers": 1, "samplers": 1, "shared": 0, "shards": 0,
}  # fmt: skip
VALUES = dataclasses.asdict(Settings()) | {
    "batch_size": 4, "rollouts_per_example": 2, "use_lora": False, "max_off_policy_steps": 1,
    "gradient_checkpointing": False, "micro_batch_tokens": 1024, "max_seq_len": 64,
}  # fmt: skip


def planned(inputs=(), server=(), model=SMALL, is_accelerator=True, **values):
    return PlannedRun(model, VALUES | values, INPUTS | dict(inputs), dict(server), is_accelerator)


def near(value):
    return pytest.approx(value, rel=1e-9)


@pytest.mark.parametrize(
    ("model", "parameters"),
    [
        # Llama 3 8B, Qwen2.5 0.5B, Qwen3 0.6B, SmolLM2 135M
        (Architecture(32, 4096, 14336, 32, 8, 128, 128256, tied=False), 8_030_261_248),
        (Architecture(24, 896, 4864, 14, 2, 64, 151936, qkv_bias=True), 494_032_768),
        (Architecture(28, 1024, 3072, 16, 8, 128, 151936, qk_norm=True), 596_049_920),
        (Architecture(30, 576, 1536, 9, 3, 64, 49152), 134_515_008),
    ],
)
def test_the_number_of_weights_is_that_of_the_published_model(model, parameters):
    assert model.parameters == parameters


def test_sizes_by_hand():
    assert SMALL.parameters == 10 * 4 + 2 * (16 + 8 + 8 + 16 + 96 + 8) + 4 == PARAMETERS
    assert SMALL.adapter_parameters(3) == 2 * 3 * (8 + 6 + 6 + 8 + 12 + 12 + 12)
    assert SMALL.kv_numbers == 8  # keys and values, two layers, two wide


# --- training -------------------------------------------------------------------------------------


def test_operations_of_a_trained_token():
    attention = 2 * 2 * 4 * 10
    assert train_flops(planned(), 10) == 6 * 348 + 3 * attention == 2568
    twice = {"gradient_checkpointing": True, "beta": 0.1}
    assert train_flops(planned(**twice), 10) == 2568 + 2 * (2 * 348 + attention)
    own = {"teacher": "self", "loss": "gkd", "num_iterations": 2}
    taught = planned({"context_tokens": 7, "prompt_tokens": 3, "completion_tokens": 4}, **own)
    assert train_flops(taught, 10) == 2 * 2568 + 2 * 348 + attention + 2 * 2 * (
        2 * 348 + 2 * attention
    )
    lora = planned(use_lora=True, lora_rank=1)
    assert train_flops(lora, 10) == 4 * 348 + 2 * SMALL.adapter_parameters(1) + 480


def test_training_and_the_exchange_are_divided_by_hand():
    update = 28 * 348 / 1e5
    # a group's prompt once
    assert train_s(planned()) == near(28 * 2568 / 5e5 + update)
    two = {"trainers": 2}
    assert train_s(planned(two)) == near(14 * 2568 / 5e5 + update + 4 * 348 / 1e4)
    assert train_s(planned({"computed_tokens": 21})) == near(84 * 2568 / 5e5 + update)
    assert train_s(planned({"row_overhead_s": 3}, micro_batch_tokens=10)) == near(9 + update)
    assert exchange_s(planned()) == 0
    assert exchange(planned(two)) == Exchange(reduced=4 * 348, reductions=1)
    # of shards the exchange is with each of two rows of ten, while an accelerator computes
    shards = planned(two | {"shards": 1}, micro_batch_tokens=10)
    assert exchange(shards).reductions == 2 * (2 + 1)
    assert train_s(shards) == near(exchange_s(shards) + update / 2)
    assert train_s(replace(shards, is_accelerator=False)) > exchange_s(shards)


# --- generation -----------------------------------------------------------------------------------


def test_decoding_reads_weights_and_cache_or_multiplies():
    assert decode_s(planned(), 8, 8) == near((2 * 348 + 8 * 8 * 16) / 5e4 + 0.01)
    fast = planned({"bytes_per_s": 1e9})
    assert decode_s(fast, 8, 8) == near(2 * 348 * 8 / 5e5 + 0.01)
    requests = planned({"token_overhead_s": 0.5})
    assert decode_s(requests, 8, 8) == near(decode_s(planned(), 8, 8) + 4)


def test_generation_by_hand():
    seconds, concurrent = generate_s(planned())
    prompts_s = 2 * 348 * 4 * 6 / 2 / 5e5  # two siblings share a prompt of 6
    # two batches are in flight
    assert concurrent == near(8)
    assert seconds == near(4 * 4 / 8 * decode_s(planned(), 8, 8) + prompts_s)
    assert generate_s(planned({"surplus": 3}))[0] == near(3 * seconds)


def test_a_batch_takes_as_many_decoding_steps_as_its_longest_rollout():
    alone = {"max_off_policy_steps": 0}
    spread = planned({"longest_tokens": 20, "prompt_tokens": 0}, **alone)
    # 16 tokens in 20 steps
    assert generate_s(spread) == (near(20 * decode_s(spread, 0.8, 2)), near(0.8))
    ahead = planned({"longest_tokens": 20, "prompt_tokens": 0})
    assert generate_s(ahead) == (near(10 * decode_s(ahead, 1.6, 2)), near(1.6))
    equal = planned({"prompt_tokens": 0}, **alone)
    assert generate_s(equal)[0] < generate_s(spread)[0]


def test_rollouts_that_wait_are_bounded_by_how_many_are_in_flight():
    slow = planned({"env_s": 1000})
    assert generate_s(slow)[0] == pytest.approx(1000 * 4 / 8, rel=1e-3)
    assert generate_s(planned({"env_s": 1000}, max_concurrent=2))[0] == pytest.approx(
        2000, rel=1e-3
    )
    assert step_time(slow).bottleneck == "the environment"


def test_a_small_cache_bounds_how_many_decode_together():
    # of weights and three rollouts of ten tokens
    small = planned({"memory": (2 * 348 + 3 * 10 * 16) / 0.9}, max_seq_len=10)
    assert generate_s(small)[1] == pytest.approx(3)
    assert memory(small)["inference"]["key/value cache"] == near(3 * 10 * 16)
    assert memory(planned())["inference"]["key/value cache"] == near(8 * 10 * 16)


RUNS = st.builds(
    lambda values, **inputs: planned(inputs, **values),
    st.fixed_dictionaries(
        {
            "batch_size": st.sampled_from([8, 64, 512]),
            "rollouts_per_example": st.sampled_from([1, 2, 8]),
            "max_off_policy_steps": st.integers(0, 4),
            "max_concurrent": st.integers(8, 4096),
        }
    ),
    prompt_tokens=st.integers(0, 100),
    completion_tokens=st.integers(1, 1000),
    longest_tokens=st.integers(0, 3000),
    env_s=st.sampled_from([0.0, 1.0, 1e4]),
    surplus=st.floats(1, 10),
    samplers=st.integers(0, 3),
)


@given(RUNS, st.floats(1, 4))
def test_what_never_shortens_a_step(run, factor):
    before = step_time(run).step_s * (1 - 1e-6)
    for name in ("longest_tokens", "surplus", "env_s", "prompt_tokens"):
        changed = replace(run, inputs={**run.inputs, name: run.inputs[name] * factor})
        assert step_time(changed).step_s >= before, name
    larger = replace(run, values={**run.values, "batch_size": 2 * run.values["batch_size"]})
    assert step_time(larger).step_s >= before


# --- the whole step -------------------------------------------------------------------------------


def test_generation_and_training_overlap_only_on_devices_of_their_own():
    overlapped = step_time(planned())
    generation, training, sync = overlapped.generate_s, overlapped.train_s, 4 * 348 / 1e4
    assert overlapped.sync_s == near(sync)
    assert overlapped.step_s == near(max(generation, training) + sync)
    assert overlapped.bottleneck == "training"
    embedded = step_time(planned({"samplers": 0}))
    assert embedded.step_s == near(embedded.generate_s + training)
    alternating = step_time(planned(max_off_policy_steps=0))
    assert alternating.step_s == near(alternating.generate_s + training + sync)
    shared = step_time(planned({"shared": 1, "memory": 1e5}))
    assert shared.step_s == near(shared.generate_s + training + shared.sync_s)


def test_measured_speeds_replace_the_formulas():
    speeds = {"train_tokens_per_s": 14, "sampled_tokens_per_s": 2, "sync_s": 0.25, "other_s": 0.5}
    time = step_time(planned(speeds | {"surplus": 2, "samplers": 4}))
    assert (time.generate_s, time.train_s) == (near(4 * 2 * 4 / 8), near(2.0))
    assert time.step_s == near(4.0 + 0.25 + 0.5)
    assert step_time(planned(speeds, num_iterations=2)).train_s == near(2 * 2.0)
    assert time.bottleneck == "generation"


@pytest.mark.parametrize(
    ("run", "method", "size", "seconds"),
    [
        (planned({"samplers": 0}), "shared", 0, 0),
        (planned(), "nccl", 4 * 348, 4 * 348 / 1e4),
        (planned({"shared": 1}), "ipc", 4 * 348, 2 * 4 * 348 / 1e5),
        (planned(weight_sync="reload"), "reload", 4 * 348, 2 * 4 * 348 / 1e4),
        (planned(is_accelerator=False), "reload", 4 * 348, 2 * 4 * 348 / 1e4),
        (planned(master_weights="model"), "nccl", 2 * 348, 2 * 348 / 1e4),
        (planned(use_lora=True, lora_rank=1), "lora_dir", 4 * 128, 2 * 4 * 128 / 1e4),
        (
            planned(use_lora=True, lora_rank=1, lora_modules_to_save=["lm_head"]),
            "nccl",
            2 * 348,
            2 * 348 / 1e4,
        ),
        (
            planned({"trainers": 2, "shards": 1}),
            "nccl",
            4 * 348,
            4 * 348 / 1e4 + 4 * 348 / 2 / 1e4,
        ),
    ],
)
def test_weights_travel_by_the_transport_that_the_trainer_chooses(run, method, size, seconds):
    assert SMALL.adapter_parameters(1) == 128
    assert (run.sync, sync_bytes(run), sync_s(run)) == (method, near(size), near(seconds))


@pytest.mark.parametrize(
    ("rollouts", "generated_s", "trained_s"),
    [(16, 3.31, 4.31), (32, 5.48, 9.24)],  # 24 sampled tokens each
)
def test_a_model_of_135_million_weights_takes_what_was_measured(rollouts, generated_s, trained_s):
    """CPU seconds of one core, medians of three steps of ``builtin:smollm2-135m`` with LoRA
    (docs/reference/measured-plans.md)."""
    cpu = {
        "flops": 2e11, "bytes_per_s": 2e10, "memory": 2e10, "utilisation": 0.35, "bandwidth_share": 0.6,
        "decode_overhead_s": 0.005, "row_overhead_s": 0.03, "prompt_tokens": 73, "completion_tokens": 23,
        "samplers": 0,
    }  # fmt: skip
    model = Architecture(30, 576, 1536, 9, 3, 64, 49152)
    run = planned(
        cpu, model=model, is_accelerator=False, batch_size=rollouts, rollouts_per_example=8,
        use_lora=True, lora_rank=16, micro_batch_tokens=512, max_off_policy_steps=0,
    )  # fmt: skip
    time = step_time(run)
    assert time.generate_s == pytest.approx(generated_s, rel=0.15)
    assert time.train_s == pytest.approx(trained_s, rel=0.25)
    assert time.bottleneck == "training"


def test_the_best_split_is_the_fastest_of_all():
    run = planned({"samplers": 5}, batch_size=12)
    times = {
        count: step_time(
            replace(run, inputs={**run.inputs, "trainers": count, "samplers": 6 - count})
        ).step_s
        for count in (1, 2, 3, 4)  # 5 does not divide the batch
    }
    assert step_time(best_split(run)).step_s == min(times.values())
    assert min(times.values()) == times[best_split(run).trainers]
    assert len(set(times.values())) == 4


# --- memory ---------------------------------------------------------------------------------------


def test_memory_by_hand():
    held = trainer_memory(planned())
    assert held["weights"] + held["gradients"] + held["optimizer"] == 16 * 348
    in_layers = 2 * SMALL.layer_parameters
    assert held["bf16 copies"] == 2 * in_layers, "autocast's"
    embedded = trainer_memory(planned({"samplers": 0}))
    assert embedded["bf16 copies"] == 2 * 2 * in_layers, "and those of the engine"
    assert "bf16 copies" not in trainer_memory(planned(is_accelerator=False))
    halved = trainer_memory(planned(master_weights="model"))
    assert halved["weights"] + halved["gradients"] + halved["optimizer"] == 8 * 348
    assert trainer_memory(planned(beta=0.1))["reference"] == 4 * 348
    assert "reference" not in trainer_memory(planned(beta=0.1, use_lora=True))


def test_shards_hold_the_embedding_whole_while_a_row_passes():
    two = {"trainers": 2, "shards": 1}
    lora = trainer_memory(planned(two, use_lora=True, lora_rank=1))
    assert lora["weights"] + lora["gradients"] + lora["optimizer"] == near((16 * 128 + 2 * 348) / 2)
    assert lora["gathered weights"] == 2 * (SMALL.root_parameters + 2 * SMALL.layer_parameters)
    assert "whole copy" not in lora, "with a server it is in the host's memory"
    whole = trainer_memory(planned(two | {"samplers": 0}))
    assert whole["gathered weights"] == (
        8 * SMALL.root_parameters + 2 * 2 * SMALL.layer_parameters
    ), "in 16 bits, with its gradient in 16 and in 32"
    assert whole["whole copy"] == 4 * 348


@pytest.mark.parametrize(
    ("values", "inputs", "tokens"),
    [
        ({"micro_batch_tokens": None, "max_seq_len": 4096}, {}, 4096),
        ({"micro_batch_tokens": None, "max_seq_len": 32768}, {}, 32768),
        ({"micro_batch_tokens": None, "max_seq_len": 64}, {}, 512),
        ({"micro_batch_tokens": None, "max_seq_len": 4096}, {"flash": 1}, 8 * 4096),
        ({"micro_batch_tokens": 9000, "max_seq_len": 4096}, {}, 9000),
        ({"micro_batch_tokens": None, "max_seq_len": 64, "packing": False}, {}, 64),
        ({"max_seq_len": 4096, "max_prompt_len": 500, "max_completion_len": 900}, {}, 1400),
    ],
)
def test_the_row_of_the_memory_is_the_longest_that_may_occur(values, inputs, tokens):
    assert planned(inputs, **values).longest_row == tokens


def test_one_card_that_vllm_and_the_trainer_share():
    run = planned({"shared": 1, "memory": 1e5}, {"gpu_memory_utilization": 0.5})
    (parts,) = memory(run).values()
    assert parts["vLLM"] == 0.5e5
    assert run.sync == "ipc"
    assert memory(planned({"shared": 1, "memory": 1e5}))["trainer"]["vLLM"] == 0.4e5
    tiny = memory(planned({"shared": 1, "memory": 1e3}))["trainer"]["vLLM"]
    assert tiny == 2 * 348 + 64 * 16, "of the weights and one rollout, or it does not start"


def test_a_server_on_several_devices_has_a_part_of_its_weights_on_each():
    parts = memory(planned(server={"tensor_parallel_size": 2}))["inference"]
    assert parts["weights"] == 348
