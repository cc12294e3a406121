"""The model of time and memory against numbers computed by hand, a simulation of the pipeline, and
published sizes."""

import math
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from verifiers_trainer.cli.throughput import (
    Architecture,
    DeviceSpeed,
    MeasuredSpeed,
    Placement,
    PlannedRun,
    Training,
    Workload,
    _most_tries,
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

SMALL = Architecture(
    layers=2, width=4, mlp_width=8, heads=2, kv_heads=1, head_width=2, vocabulary=10
)
DEVICE = DeviceSpeed(
    flops=1e6, bytes_per_s=1e5, memory=1e6, utilisation=0.5, bandwidth_share=0.5, decode_overhead_s=0.01,
    row_overhead_s=0.0,
)  # fmt: skip
WORK = Workload(batch_size=4, group_size=2, prompt_tokens=6, completion_tokens=4)
ALL = Training()
SERVER = Placement(trainers=1, samplers=1, link_bytes_per_s=1e4, sync_bytes_per_s=1e4)


def planned(
    work: Workload = WORK, placement: Placement = SERVER, measured: MeasuredSpeed | None = None
) -> PlannedRun:
    return PlannedRun(SMALL, DEVICE, work, ALL, placement, measured or MeasuredSpeed())


def near(value: float) -> object:
    return pytest.approx(value, rel=1e-9)


def near_all(values: tuple[float, ...]) -> tuple[object, ...]:
    return tuple(near(value) for value in values)


@pytest.mark.parametrize(
    ("model", "parameters"),
    [
        (
            Architecture(32, 4096, 14336, 32, 8, 128, 128256, tied=False),
            8_030_261_248,
        ),  # Llama 3 8B
        (
            Architecture(24, 896, 4864, 14, 2, 64, 151936, qkv_bias=True),
            494_032_768,
        ),  # Qwen2.5 0.5B
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
    total = sum(p.numel() for p in model.parameters())
    config = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    added = sum(p.numel() for p in peft.get_peft_model(model, config).parameters()) - total
    sizes = Architecture(3, 128, 256, 4, 4, 32, model.config.vocab_size, qk_norm=True)
    assert (sizes.parameters, sizes.adapter_parameters(4)) == (total, added)


def test_operations_of_a_trained_token():
    attention = 2 * 2 * 4 * 10
    assert train_flops(SMALL, ALL, 10) == 6 * 348 + 3 * attention == 2568
    twice = Training(checkpointing=True, extra_forwards=1)
    assert train_flops(SMALL, twice, 10) == 2568 + 2 * (2 * 348 + attention)
    assert (
        train_flops(SMALL, replace(twice, passes=3), 10)
        == 3 * (2568 + 2 * 348 + attention) + 2 * 348 + attention
    )
    assert (
        train_flops(SMALL, Training(rank=1), 10) == 4 * 348 + 2 * SMALL.adapter_parameters(1) + 480
    )


def test_training_and_the_exchange_are_divided_by_hand():
    single, two = Placement(trainers=1), Placement(trainers=2, link_bytes_per_s=1e4)
    update = 28 * 348 / 1e5
    # a group's prompt once
    assert train_s(SMALL, DEVICE, WORK, ALL, single) == near(28 * 2568 / 5e5 + update)
    assert train_s(SMALL, DEVICE, WORK, ALL, two) == near(14 * 2568 / 5e5 + update)
    assert train_s(SMALL, DEVICE, WORK, ALL, replace(two, shards=True)) == near(
        14 * 2568 / 5e5 + update / 2
    )
    assert train_s(SMALL, DEVICE, replace(WORK, computed_tokens=21), ALL, single) == near(
        84 * 2568 / 5e5 + update
    )
    assert exchange_s(SMALL, ALL, single) == 0
    assert exchange_s(SMALL, ALL, two) == near(4 * 348 / 1e4)
    assert train_s(SMALL, DEVICE, WORK, Training(passes=2), single) == near(
        2 * 28 * 2568 / 5e5 + update
    )
    launches = replace(DEVICE, row_overhead_s=3.0)
    # 28 tokens
    assert train_s(SMALL, launches, WORK, Training(row_tokens=10), single) == near(3 * 3.0 + update)


def test_decoding_reads_weights_and_cache_or_multiplies():
    assert decode_s(SMALL, DEVICE, 8, 8) == near((2 * 348 + 8 * 8 * 16) / 5e4 + 0.01)
    assert decode_s(SMALL, replace(DEVICE, bytes_per_s=1e9), 8, 8) == near(2 * 348 * 8 / 5e5 + 0.01)
    requests = replace(DEVICE, token_overhead_s=0.5)
    assert decode_s(SMALL, requests, 8, 8) == near(decode_s(SMALL, DEVICE, 8, 8) + 4)


def test_generation_by_hand():
    seconds, concurrent = generate_s(SMALL, DEVICE, WORK, SERVER, 0.0)
    # two siblings share a prompt of 6
    busy = 4 * ((2 * 348 + 8 * 8 * 16) / 5e4 + 0.01) + 8 * 2 * 348 * 3 / 5e5
    assert (seconds, concurrent) == (near(4 * busy / 8), near(8))  # two batches are in flight
    assert generate_s(SMALL, DEVICE, replace(WORK, surplus=3.0), SERVER, 0.0)[0] == near(
        3 * seconds
    )


def test_the_longest_of_a_batch_is_that_of_drawn_lengths():
    draw = np.random.default_rng(0)
    for count, mean in ((8, 40), (128, 100), (512, 20)):
        longest = draw.geometric(1 / mean, (2_000, count)).max(axis=1).mean()
        work = replace(WORK, batch_size=count, completion_tokens=mean, length_spread=1.0)
        assert work.longest_tokens(count) == pytest.approx(longest, rel=0.03)
        assert replace(work, most_tokens=2 * mean).longest_tokens(count) == 2 * mean
        assert replace(work, length_spread=0.0).longest_tokens(count) == mean
    assert longest_excess(4) == pytest.approx(1 / 2 + 1 / 3 + 1 / 4, abs=0.01)
    assert longest_excess(1) == pytest.approx(0, abs=0.1)


def test_a_synchronous_batch_waits_for_its_longest_rollout():
    """By hand: each step of lengths 2, 4, 4, 6, of which ever fewer decode."""
    alone = replace(SERVER, off_policy=0)
    spread = replace(WORK, length_spread=0.5 / longest_excess(4))
    assert spread.longest_tokens(4) == near(6)
    equal = generate_s(SMALL, DEVICE, WORK, alone, 0.0)
    seconds, concurrent = generate_s(SMALL, DEVICE, spread, alone, 0.0)
    living = [sum(length > step for length in (2, 4, 4, 6)) for step in range(6)]
    prompts = equal[0] - 4 * decode_s(SMALL, DEVICE, 4, 8)
    assert seconds == near(sum(decode_s(SMALL, DEVICE, count, 8) for count in living) + prompts)
    assert concurrent == near(sum(living) / 6)
    assert seconds > equal[0]


def test_batches_in_flight_share_the_wait_for_the_longest_rollout_and_for_training():
    """By hand: two batches of four in flight, so that half of the six steps are a batch's."""
    spread = replace(WORK, length_spread=0.5 / longest_excess(4), prompt_tokens=0)
    seconds, concurrent = generate_s(SMALL, DEVICE, spread, SERVER, 0.0)
    one_s = decode_s(SMALL, DEVICE, 4 * 4 / 3, 2)
    assert (seconds, concurrent) == (near(3 * one_s), near(4 * 4 / 3))
    trained = generate_s(SMALL, DEVICE, spread, SERVER, 0.02)
    assert trained[0] == near((6 * decode_s(SMALL, DEVICE, trained[1], 2) + 0.02) / 2)
    assert generate_s(SMALL, DEVICE, spread, SERVER, 1e9) == generate_s(
        SMALL, DEVICE, spread, replace(SERVER, off_policy=0), 0.0
    )  # all have finished before the training has
    dropping = replace(SERVER, waits=False)
    equal = replace(spread, group_size=1, length_spread=0.0)
    assert generate_s(SMALL, DEVICE, replace(spread, group_size=1), dropping, 9.0) == near_all(
        generate_s(SMALL, DEVICE, equal, SERVER, 0.0)
    )


@dataclass
class SimulatedGroup:
    number: int
    version: int
    tokens_left: list[int]
    dropped: bool


@dataclass
class Simulation:
    """The pipeline's rules with drawn lengths, one decoding step after the other
    (``pipeline/pipeline.py``).

    A training step and a decoding step that share a device each have half of it.
    """

    batch: int
    group: int
    ahead: int
    in_flight: int = 1024
    dropped: float = 0.0
    train_s: float = 0.0
    own_devices: bool = False
    mean: int = 100
    step_s: float = 1.0
    sequence_s: float = 0.01
    time: float = 0.0
    version: int = 0
    started: int = 0
    delivered: int = 0
    tokens: int = 0
    ready: list[SimulatedGroup] = field(default_factory=list)
    running: list[SimulatedGroup] = field(default_factory=list)

    def run(self, num_batches: int) -> tuple[float, float]:
        """(seconds of a batch, rollouts generated for each of a batch), the first five batches left
        out."""
        self.draw = np.random.default_rng(0)
        self._start()
        marks, training_s = [], 0.0
        while len(marks) < num_batches:
            if not training_s and self._is_ready():
                self.ready = self.ready[self.batch // self.group :]
                self.delivered, training_s = self.delivered + 1, self.train_s or 1e-12
                self._start()
            seconds = self._decode()
            shared_s = min(training_s, seconds or training_s)
            self.time += (
                max(seconds, shared_s) if self.own_devices or not seconds else seconds + shared_s
            )
            if training_s and training_s - shared_s <= 0:
                self.version += 1
                marks.append((self.time, self.tokens))
                self._start()
            training_s -= shared_s
        count, (first, last) = num_batches - 6, (marks[5], marks[-1])
        return (last[0] - first[0]) / count, (last[1] - first[1]) / count / self.mean / self.batch

    def _start(self) -> None:
        while True:
            running = len(self.running) * self.group
            allowed = (self.ahead + self.version + 1) * self.batch
            admitted = self.delivered * self.batch + len(self.ready) * self.group + running
            if min(self.in_flight - running, allowed - admitted) < self.group:
                return
            lengths = self.draw.geometric(1 / self.mean, self.group).tolist()
            self.started += 1
            self.running.append(
                SimulatedGroup(
                    self.started, self.version, lengths, self.draw.random() < self.dropped
                )
            )

    def _is_ready(self) -> bool:
        size = self.batch // self.group
        versions = sorted(group.version for group in [*self.running, *self.ready[size:]])
        oldest = self.version + 1 - self.ahead
        stale = any(version < oldest + number // size for number, version in enumerate(versions))
        return len(self.ready) >= size and not (self.running and stale)

    def _decode(self) -> float:
        count = sum(len(group.tokens_left) for group in self.running)
        for group in self.running:
            group.tokens_left = [
                tokens_left - 1 for tokens_left in group.tokens_left if tokens_left > 1
            ]
        finished = [group for group in self.running if not group.tokens_left]
        self.running = [group for group in self.running if group.tokens_left]
        self.ready += [group for group in finished if not group.dropped]
        self.ready.sort(key=lambda group: group.number)  # the oldest are trained first
        self.tokens += count
        if finished:
            self._start()
        return self.step_s + self.sequence_s * count if count else 0.0


SIMULATED = [
    Simulation(64, 8, 0), Simulation(64, 8, 1), Simulation(64, 8, 3), Simulation(64, 1, 1),
    Simulation(64, 8, 0, in_flight=32), Simulation(64, 8, 1, in_flight=96),
    Simulation(64, 8, 0, dropped=0.2), Simulation(64, 8, 0, dropped=0.4), Simulation(128, 16, 1, dropped=0.4),
    Simulation(64, 8, 0, train_s=150), Simulation(64, 8, 1, train_s=150), Simulation(64, 8, 2, train_s=150),
    Simulation(64, 8, 1, train_s=150, own_devices=True), Simulation(64, 8, 1, train_s=400, own_devices=True),
    Simulation(64, 8, 1, train_s=150, dropped=0.3, own_devices=True), Simulation(64, 8, 1, train_s=2000),
    Simulation(64, 8, 1, train_s=300, sequence_s=0.1, own_devices=True),
]  # fmt: skip


@pytest.mark.parametrize(
    "simulation",
    SIMULATED,
    ids=lambda case: f"{case.batch}-{case.ahead}-{case.dropped}-{case.train_s}",
)
def test_a_batch_takes_as_long_as_in_a_simulation_of_the_pipeline(simulation):
    seconds, surplus = simulation.run(num_batches=60)
    per_token = 2 * 8 * simulation.mean / 2  # bytes that a sequence of half the mean reads
    device = replace(
        DEVICE, flops=1e15, bytes_per_s=per_token / simulation.sequence_s, bandwidth_share=1.0, memory=1e9,
        decode_overhead_s=simulation.step_s - 2 * 348 / (per_token / simulation.sequence_s),
    )  # fmt: skip
    work = Workload(
        simulation.batch,
        simulation.group,
        0,
        simulation.mean,
        surplus=max(1.0, surplus),
        length_spread=1.0,
    )
    placement = Placement(
        samplers=int(simulation.own_devices),
        off_policy=simulation.ahead,
        in_flight=simulation.in_flight,
        sync_bytes_per_s=math.inf,
    )
    speed = MeasuredSpeed(train_tokens_per_s=work.trained_tokens / max(simulation.train_s, 1e-9))
    planned_s = step_time(PlannedRun(SMALL, device, work, ALL, placement, speed)).step_s
    assert planned_s == pytest.approx(seconds, rel=0.13)
    equal = replace(work, length_spread=0.0)
    without = step_time(PlannedRun(SMALL, device, equal, ALL, placement, speed)).step_s
    assert without < 0.87 * seconds  # negative control


def tries(slots: int, dropped: float, most_groups: float) -> tuple[float, float, int]:
    """(rounds until every place is filled or the groups are used up, groups, filled places); groups
    of equal length."""
    empty, rounds, groups = slots, 0.0, 0.0
    while empty and groups < most_groups:
        begun = min(empty, most_groups - groups)
        filled = DRAW.binomial(begun, 1 - dropped)
        # the last may be a part
        empty, rounds, groups = empty - filled, rounds + begun / empty, groups + begun
    return rounds, groups, slots - empty


DRAW = np.random.default_rng(0)


@pytest.mark.parametrize(
    ("dropped", "most"), [(0.3, math.inf), (0.5, math.inf), (0.7, 2), (0.9, 2), (0.9, 4)]
)
def test_a_batch_alone_has_its_rounds_of_groups(dropped, most):
    """``most`` is the setting ``oversample``: the last rounds of a batch that stays short have its
    last groups."""
    rounds, groups, filled = np.mean([tries(32, dropped, most * 32) for _ in range(500)], axis=0)
    work = Workload(32 * 8, 8, 0, 100, surplus=groups / 32, trained=filled / 32)
    assert _most_tries(work) == pytest.approx(rounds, rel=0.2)


RUNS = st.builds(
    planned,
    st.builds(
        Workload,
        batch_size=st.sampled_from([8, 64, 512]),
        group_size=st.sampled_from([1, 2, 8]),
        prompt_tokens=st.integers(0, 100),
        completion_tokens=st.integers(1, 1000),
        env_s=st.sampled_from([0.0, 1.0, 1e4]),
        surplus=st.floats(1, 10),
        length_spread=st.floats(0, 2),
        most_tokens=st.sampled_from([500.0, math.inf]),
    ),
    st.builds(
        Placement,
        samplers=st.integers(0, 3),
        off_policy=st.integers(0, 4),
        in_flight=st.integers(8, 4096),
        sync_bytes_per_s=st.just(1e4),
        waits=st.booleans(),
    ),
)


@given(RUNS, st.floats(1, 4))
def test_what_never_shortens_a_step(run, factor):
    def at_least_as_long(**changes: float) -> bool:
        return step_time(replace(run, work=replace(run.work, **changes))).step_s >= step_time(
            run
        ).step_s * (1 - 1e-6)

    assert at_least_as_long(length_spread=run.work.length_spread * factor)
    assert at_least_as_long(most_tokens=run.work.most_tokens * factor)
    assert at_least_as_long(surplus=run.work.surplus * factor)
    assert at_least_as_long(env_s=run.work.env_s * factor)
    assert at_least_as_long(prompt_tokens=run.work.prompt_tokens * factor)
    assert at_least_as_long(completion_tokens=run.work.completion_tokens * factor)
    assert at_least_as_long(batch_size=run.work.batch_size * 2)


@given(RUNS, st.integers(1, 4))
def test_what_never_lengthens_a_step(run, number):
    def at_most_as_long(**changes: int) -> bool:
        changed = replace(run, placement=replace(run.placement, **changes))
        return step_time(changed).step_s <= step_time(run).step_s * (1 + 1e-6)

    assert at_most_as_long(in_flight=run.placement.in_flight * number)
    assert at_most_as_long(off_policy=run.placement.off_policy + number)
    assert at_most_as_long(waits=False)
    if run.placement.samplers:
        assert at_most_as_long(samplers=run.placement.samplers + number)
    assert step_time(run).generate_s >= generate_s(SMALL, DEVICE, run.work, run.placement, 0.0)[
        0
    ] * (1 - 1e-6)


def test_rollouts_that_wait_are_bounded_by_how_many_are_in_flight():
    slow = replace(WORK, env_s=1000.0)
    seconds, concurrent = generate_s(SMALL, DEVICE, slow, SERVER, 0.0)
    assert seconds == pytest.approx(1000 * 4 / 8, rel=1e-3)
    assert concurrent < 0.01
    assert generate_s(SMALL, DEVICE, slow, replace(SERVER, in_flight=2), 0.0)[0] == pytest.approx(
        2000, rel=1e-3
    )
    assert step_time(planned(slow)).bottleneck == "the environment"


def test_a_small_cache_bounds_how_many_decode_together():
    # of weights and three rollouts of ten tokens
    small = replace(DEVICE, memory=(2 * 348 + 3 * 10 * 16) / 0.9)
    assert generate_s(SMALL, small, WORK, SERVER, 0.0)[1] == pytest.approx(3)
    assert sampler_memory(SMALL, small, WORK, SERVER)["key/value cache"] == near(3 * 10 * 16)
    bounded = replace(SERVER, cache_bytes=2 * 10 * 16)
    assert generate_s(SMALL, DEVICE, WORK, bounded, 0.0)[1] == pytest.approx(2)
    assert sampler_memory(SMALL, DEVICE, WORK, SERVER)["key/value cache"] == near(8 * 10 * 16)


def test_generation_and_training_overlap_only_on_devices_of_their_own():
    overlapped = step_time(planned())
    generation, training, sync = overlapped.generate_s, overlapped.train_s, 2 * 348 / 1e4
    assert overlapped.step_s == near(max(generation, training) + sync)
    assert overlapped.bottleneck == "training"
    assert step_time(planned(placement=replace(SERVER, samplers=0))).step_s == near(
        generation + training
    )
    alternating = step_time(planned(placement=replace(SERVER, off_policy=0)))
    assert alternating.step_s == near(alternating.generate_s + training + sync)
    assert alternating.generate_s > generation  # half as many in flight


def test_measured_speeds_replace_the_formulas():
    measured = MeasuredSpeed(
        train_tokens_per_s=14, sampled_tokens_per_s=2, sync_s=0.25, other_s=0.5
    )
    time = step_time(planned(replace(WORK, surplus=2.0), replace(SERVER, samplers=4), measured))
    assert (time.generate_s, time.train_s) == (near(4 * 2 * 4 / 8), near(2.0))
    assert time.step_s == near(4.0 + 0.25 + 0.5)
    twice = replace(planned(measured=measured), training=Training(passes=2))
    assert step_time(twice).train_s == near(2 * 2.0)
    assert time.bottleneck == "generation"


def test_measured_speeds_are_those_of_as_many_rollouts_at_a_time():
    """By hand: the ratio of two predictions, of rollouts of 6 and 4 tokens that decode 2 x batch at
    a time."""

    def generated_s(batch):
        at_a_time = 2 * batch
        decode = (2 * 348 + at_a_time * (6 + 4 / 2) * 8 * 2) / (1e5 * 0.5) + 0.01
        prompts = at_a_time * (6 / 2) * 2 * 348 / (1e6 * 0.5)
        return batch * (4 * decode + prompts) / at_a_time

    measured = MeasuredSpeed(train_tokens_per_s=1e15, sampled_tokens_per_s=2, sampled_batch=4)
    of_itself = step_time(planned(measured=measured)).generate_s
    assert of_itself == near(4 * 4 / 2)
    larger = step_time(planned(replace(WORK, batch_size=16), measured=measured)).generate_s
    assert larger == near(16 * 4 / 2 * (generated_s(16) / 16) / (generated_s(4) / 4))
    assert larger < 4 * of_itself  # and of a run whose batch is not known:
    unknown = replace(measured, sampled_batch=None)
    assert step_time(planned(replace(WORK, batch_size=16), measured=unknown)).generate_s == near(
        4 * of_itself
    )
    wasteful = planned(replace(WORK, surplus=3.0), measured=measured)
    assert step_time(wasteful).generate_s == near(3 * of_itself)


def test_a_cpu_computes_in_32_bits_and_one_thing_after_the_other():
    cpu = replace(DEVICE, is_accelerator=False, row_overhead_s=3.0)
    assert decode_s(SMALL, cpu, 8, 8) == near(
        4 * (348 + 8 * 8 * 8) / 5e4 + 2 * 348 * 8 / 5e5 + 0.01
    )
    flops = 6 * 348 + 3 * (2 * 2 * 4 * 2 * 10)  # a token attends to the ten of its row
    seconds = 28 * flops / 5e5 + 3 * 3.0 + 28 * 348 / 1e5
    assert train_s(SMALL, cpu, WORK, Training(row_tokens=10), Placement()) == near(seconds)
    memory = trainer_memory(SMALL, cpu, Training(rank=1, row_tokens=100), Placement())
    assert memory["weights"] == 4 * (SMALL.adapter_parameters(1) + 348)
    assert sampler_memory(SMALL, cpu, WORK, SERVER) == {
        "weights": 4 * 348,
        "key/value cache": near(8 * 10 * 8 * 4),
    }


@pytest.mark.parametrize(
    ("rollouts", "generated_s", "trained_s"),
    [(16, 3.31, 4.31), (32, 5.48, 9.24)],  # 24 sampled tokens each
)
def test_a_model_of_135_million_weights_takes_what_was_measured(rollouts, generated_s, trained_s):
    """CPU seconds of one core, medians of three steps of ``builtin:smollm2-135m`` with LoRA
    (docs/scale.md)."""
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
    in_layers = SMALL.parameters - SMALL.embedding_parameters
    assert memory["bf16 copies"] == 2 * 2 * in_layers, "autocast's, and those of the engine"
    elsewhere = trainer_memory(SMALL, DEVICE, Training(row_tokens=100), Placement(samplers=1))
    assert elsewhere["bf16 copies"] == 2 * in_layers
    on_cpu = replace(DEVICE, is_accelerator=False)
    assert "bf16 copies" not in trainer_memory(SMALL, on_cpu, Training(), Placement())
    adapter = SMALL.adapter_parameters(1)
    lora = trainer_memory(SMALL, DEVICE, Training(rank=1), Placement(trainers=2, shards=True))
    assert lora["weights"] + lora["gradients"] + lora["optimizer"] == near(
        (16 * adapter + 2 * 348) / 2
    )
    assert (sync_bytes(SMALL, ALL), sync_bytes(SMALL, Training(rank=1))) == (2 * 348, 4 * adapter)
    recomputed = trainer_memory(
        SMALL, DEVICE, Training(row_tokens=100, checkpointing=True), Placement()
    )
    assert recomputed["activations"] < memory["activations"]


def test_the_best_split_is_the_fastest_of_all():
    work = replace(WORK, batch_size=12)
    undivided = replace(SERVER, trainers=1, samplers=5)
    split, best = best_split(planned(work, undivided))
    times = {
        count: step_time(
            planned(work, replace(undivided, trainers=count, samplers=6 - count))
        ).step_s
        for count in (1, 2, 3, 4)  # 5 does not divide the batch
    }
    assert best.step_s == min(times.values()) == times[split.trainers]
    assert len(set(times.values())) == 4
