"""A model of the time of a training step and of the memory of a device: arithmetic on sizes and speeds, without torch.

Sources of the formulas: a token's forward pass takes 2 operations per parameter, its backward pass 2 more, and 2 per
trained parameter (Kaplan et al. 2020, arXiv 2001.08361, table 1); attention adds 12 x layers x width x context to both
passes (Chowdhery et al. 2022, arXiv 2204.02311, appendix B), halved here since it is causal. A decoding step reads the
weights and the cached keys and values once (Pope et al. 2022, arXiv 2211.05102, section 2). Rollouts in flight are the
rate times the duration of one (Little 1961). Activations are 34 x width bytes per token and layer in 16 bits
(Korthikanti et al. 2022, arXiv 2205.05198, equation 1, without the matrix of attention scores, which flash attention
does not store). A ring all-reduce moves 2 x (n - 1) / n of the gradients (Patarasuk and Yuan 2009).

A CPU differs, by measurement (docs/scale.md): it computes in 32 bits, reads memory and then multiplies, so that both
times add up, attention is the whole matrix of a packed row, a decoding step has an overhead for each layer, and so has
each sampled token for its request. An engine computes the equal prompts of siblings once.

A synchronous batch waits for its longest rollout, which decodes with ever fewer others. The longest of n that may end
at every token with the same probability is expected to be the n-th harmonic number times as long as the mean (Eisenberg
2008, "On the expectation of the maximum of IID geometric random variables"), up to the bound on a rollout.

Not modelled: pipeline bubbles, padding, tensor parallelism, experts, evaluations and checkpoints.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

FLOAT32, HALF = 4, 2
"""Bytes of one number."""
ADAMW_BYTES = 2 * FLOAT32
"""State of AdamW for one trained parameter: two moments."""
ADAMW_TRAFFIC = 7 * FLOAT32
"""Bytes that one update of AdamW moves per trained parameter: reads weight, gradient, two moments, writes all but the
gradient."""
HEAD_ROWS = 256
"""Tokens whose logits exist at a time: the head is computed in parts."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """Sizes of a dense decoder with gated MLPs: Llama, Mistral, Qwen2, Qwen3."""

    layers: int
    width: int
    mlp_width: int
    heads: int
    kv_heads: int
    head_width: int
    vocabulary: int
    tied: bool = True
    """Whether the head is the embedding."""
    qk_norm: bool = False
    qkv_bias: bool = False

    @property
    def attention_width(self) -> int:
        """Queries of one token, over all heads."""
        return self.heads * self.head_width

    @property
    def kv_width(self) -> int:
        """Keys of one token, over all heads; values are as many."""
        return self.kv_heads * self.head_width

    @property
    def parameters(self) -> int:
        """Number of weights."""
        attention = 2 * self.width * (self.attention_width + self.kv_width)
        biases = (self.attention_width + 2 * self.kv_width) * self.qkv_bias
        norms = 2 * self.width + 2 * self.head_width * self.qk_norm
        layer = attention + biases + 3 * self.width * self.mlp_width + norms
        return self.vocabulary * self.width * (1 if self.tied else 2) + self.layers * layer + self.width

    def adapter_parameters(self, rank: int) -> int:
        """Weights of a LoRA adapter on every linear layer but the head: rank x (inputs + outputs) each."""
        attention = 2 * (self.width + self.attention_width) + 2 * (self.width + self.kv_width)
        return self.layers * rank * (attention + 3 * (self.width + self.mlp_width))

    @property
    def kv_numbers(self) -> int:
        """Keys and values of one token, over all layers."""
        return 2 * self.layers * self.kv_width


@dataclass(frozen=True, slots=True)
class DeviceSpeed:
    """What one device can do, and how much of it a run reaches."""

    flops: float
    """Operations per second on 16-bit matrices, without sparsity."""
    bytes_per_s: float
    """Bandwidth of its memory."""
    memory: float
    """Bytes."""
    utilisation: float = 0.35
    """Share of ``flops`` that training and prompts reach."""
    bandwidth_share: float = 0.6
    """Share of ``bytes_per_s`` that decoding reaches."""
    decode_overhead_s: float = 0.005
    """Seconds of a decoding step beside the memory it reads: launches, scheduling, sampling."""
    token_overhead_s: float = 0.0
    """Seconds of a sampled token beside its operations, where the engine shares the device with requests and loop."""
    row_overhead_s: float = 0.03
    """Seconds of forward and backward pass of a packed row beside its operations: launches. The least on an
    accelerator."""
    is_accelerator: bool = True
    """Whether it computes in 16 bits, reads memory while it multiplies, and has flash attention: no CPU."""

    @property
    def number_bytes(self) -> int:
        """Bytes of a number that it computes with."""
        return HALF if self.is_accelerator else FLOAT32

    def together_s(self, one_s: float, other_s: float) -> float:
        """Seconds of two kinds of work that an accelerator does at the same time."""
        return max(one_s, other_s) if self.is_accelerator else one_s + other_s


@dataclass(frozen=True, slots=True)
class Workload:
    """One rollout, on average, and how many a batch takes."""

    batch_size: float
    group_size: int
    prompt_tokens: float
    completion_tokens: float
    """Sampled tokens, over all turns."""
    env_s: float = 0.0
    """Seconds in which it waits for its environment, scoring included."""
    surplus: float = 1.0
    """Rollouts generated for each that is trained."""
    shares_prompts: bool = True
    length_spread: float = 0.0
    """0: every rollout samples as many tokens; 1: each may end at every token with the same probability."""
    most_tokens: float = math.inf
    """Sampled tokens at which a rollout is cut off."""

    @property
    def tokens(self) -> float:
        """Prompt and sampled tokens of a rollout."""
        return self.prompt_tokens + self.completion_tokens

    @property
    def longest_tokens(self) -> float:
        """Sampled tokens of the longest rollout of a batch, as expected."""
        longest = self.completion_tokens * (1 + self.length_spread * longest_excess(self.batch_size * self.surplus))
        return max(self.completion_tokens, min(longest, self.most_tokens))

    @property
    def computed_tokens(self) -> float:
        """Tokens that training computes per rollout: a group's prompt once, where it is shared."""
        copies = self.group_size if self.shares_prompts else 1
        return self.completion_tokens + self.prompt_tokens / copies


@dataclass(frozen=True, slots=True)
class Placement:
    """Devices and how the two sides work together."""

    trainers: int = 1
    """Processes that train, each on one device."""
    samplers: int = 0
    """Devices of inference servers; 0: the first trainer's device samples too."""
    off_policy: int = 1
    """Batches that generation may be ahead; 0: generation and training alternate."""
    in_flight: int = 1024
    """Most rollouts at a time."""
    cache_bytes: float = math.inf
    """Bound on the keys and values of a device, beside what fits."""
    shards: bool = False
    """Whether weights, gradients and the optimizer's state are divided among the trainers."""
    link_bytes_per_s: float = 100e9
    """Of one device to the others."""
    sync_bytes_per_s: float = 1e9
    """From the trainer's weights to the serving ones: through a disk or a link."""


@dataclass(frozen=True, slots=True)
class Training:
    """What is trained, and the passes over each token."""

    rank: int | None = None
    """Of the LoRA adapter; None: all weights are trained."""
    checkpointing: bool = False
    """Whether activations are computed again in the backward pass."""
    extra_forwards: int = 0
    """Forward passes beside that of the gradient: old log-probabilities, a reference."""
    row_tokens: int = 1024
    """Tokens of a packed row."""
    steps_per_batch: int = 1


@dataclass(frozen=True, slots=True)
class MeasuredSpeed:
    """Speeds of an earlier run, which replace those of the formulas where they are known."""

    train_tokens_per_s: float | None = None
    """Computed tokens of one trainer process."""
    sampled_tokens_per_s: float | None = None
    """Of one inference device."""
    sampled_batch: float | None = None
    """``batch_size`` of that run: of more rollouts at a time, decoding is faster. None: that of this run."""
    sync_s: float | None = None
    other_s: float = 0.0
    """Seconds of a step that are neither waiting, training nor synchronisation."""


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """All that the time of a step is computed from."""

    model: Architecture
    device: DeviceSpeed
    work: Workload
    training: Training
    placement: Placement
    measured: MeasuredSpeed = MeasuredSpeed()


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of one batch: generated, trained for all its optimizer steps, weights synchronised."""

    generate_s: float
    train_s: float
    exchange_s: float
    """Of gradients between the trainers; a part of ``train_s``."""
    sync_s: float
    other_s: float
    step_s: float
    sampled_tokens_per_s: float
    """Of all inference devices, over ``generate_s``."""
    concurrent: float
    """Sequences that decode together on one inference device; 0 where the speed was measured."""
    bottleneck: str


def longest_excess(count: float) -> float:
    """By how many means the longest of ``count`` exceeds the mean, with ``length_spread`` 1: harmonic number less 1."""
    return max(0.0, math.log(count) + 0.5772 + 1 / (2 * count) - 1)


def trained_parameters(model: Architecture, training: Training) -> int:
    """Number of weights with a gradient."""
    return model.parameters if training.rank is None else model.adapter_parameters(training.rank)


def train_flops(model: Architecture, training: Training, context: float) -> float:
    """Operations of one token in rollouts of ``context`` tokens: forward, backward, and the extra forward passes."""
    attention = 2 * model.layers * model.attention_width * context
    forwards = training.extra_forwards + training.checkpointing
    both = 4 * model.parameters + 2 * trained_parameters(model, training) + 3 * attention
    return both + forwards * (2 * model.parameters + attention)


def exchange_s(model: Architecture, training: Training, placement: Placement) -> float:
    """Seconds of one all-reduce of the gradients; the gather and scatter of shards move half as much again."""
    count = placement.trainers
    moved = 2 * (count - 1) / count * FLOAT32 * trained_parameters(model, training)
    return moved * (1.5 if placement.shards else 1.0) / placement.link_bytes_per_s


def train_s(
    model: Architecture, device: DeviceSpeed, work: Workload, training: Training, placement: Placement
) -> float:
    """Seconds in which one trainer computes its share of a batch and updates the weights, without the exchange."""
    tokens = work.batch_size * work.computed_tokens / placement.trainers
    rows = math.ceil(tokens / training.row_tokens)
    context = work.tokens if device.is_accelerator else 2 * min(tokens, training.row_tokens)  # 2: not causal
    compute = tokens * train_flops(model, training, context) / (device.flops * device.utilisation)
    divided = placement.trainers if placement.shards else 1
    update = ADAMW_TRAFFIC * trained_parameters(model, training) / divided / device.bytes_per_s
    return device.together_s(compute, rows * device.row_overhead_s) + training.steps_per_batch * update


def decode_s(model: Architecture, device: DeviceSpeed, concurrent: float, context: float) -> float:
    """Seconds in which ``concurrent`` sequences of ``context`` tokens get one token each."""
    read = device.number_bytes * (model.parameters + concurrent * context * model.kv_numbers)
    from_memory = read / (device.bytes_per_s * device.bandwidth_share)
    from_matrices = 2 * model.parameters * concurrent / (device.flops * device.utilisation)
    beside = device.decode_overhead_s + concurrent * device.token_overhead_s
    return device.together_s(from_memory, from_matrices) + beside


def cache_tokens(model: Architecture, device: DeviceSpeed, placement: Placement) -> float:
    """Tokens whose keys and values fit beside the weights on an inference device, of nine tenths of its memory."""
    free = max(0.0, 0.9 * device.memory - device.number_bytes * model.parameters)
    return min(placement.cache_bytes, free) / (device.number_bytes * model.kv_numbers)


def generate_s(model: Architecture, device: DeviceSpeed, work: Workload, placement: Placement) -> tuple[float, float]:
    """Return (seconds to generate a batch, sequences that decode together on a device, on average).

    A rollout takes the time of its tokens, of the prompts that the device computes meanwhile, and of its environment.
    As many decode at a time as the first two are of its duration, and as have space in the cache; found by iteration.
    In a synchronous run no other takes the place of one that has finished: there are as many decoding steps more as the
    longest has tokens more than the mean, and fewer sequences in each.
    """
    count = max(1, placement.samplers)
    context = work.prompt_tokens + work.completion_tokens / 2
    fits = max(1.0, cache_tokens(model, device, placement) / work.tokens)
    prompt_s = 2 * model.parameters * work.prompt_tokens / work.group_size / (device.flops * device.utilisation)
    concurrent = min(fits, _in_flight(work, placement) / count)
    for _ in range(60):  # halves the distance to the fixed point at least
        busy_s = work.completion_tokens * decode_s(model, device, concurrent, context) + prompt_s * concurrent
        waiting = _in_flight(work, placement) / count * busy_s / (busy_s + work.env_s)
        concurrent = (concurrent + min(fits, waiting)) / 2
    seconds = work.batch_size * work.surplus * busy_s / concurrent / count
    if placement.off_policy:
        return seconds, concurrent
    tokens = work.batch_size * work.surplus * work.completion_tokens / count
    steps, together = tokens / concurrent, concurrent
    concurrent = tokens / (steps + work.longest_tokens - work.completion_tokens)
    return (
        seconds
        - steps * decode_s(model, device, together, context)
        + tokens / concurrent * decode_s(model, device, concurrent, context)
    ), concurrent


def _in_flight(work: Workload, placement: Placement) -> float:
    return min(placement.in_flight, work.batch_size * (placement.off_policy + 1))


def sync_bytes(model: Architecture, training: Training) -> float:
    """Bytes of one push of weights to a server: the adapter in 32 bits, or all weights in 16."""
    return FLOAT32 * trained_parameters(model, training) if training.rank else HALF * model.parameters


def step_time(run: PlannedRun) -> StepTime:
    """Predict one batch. On devices of their own, generation and training overlap unless the run is synchronous."""
    model, device, work, training, placement = run.model, run.device, run.work, run.training, run.placement
    speed = run.measured
    generation, concurrent = generate_s(model, device, work, placement)
    if speed.sampled_tokens_per_s:
        generation, concurrent = generation * _slower(run), 0.0
    exchange = training.steps_per_batch * exchange_s(model, training, placement)
    if speed.train_tokens_per_s:
        train = work.batch_size * work.computed_tokens / placement.trainers / speed.train_tokens_per_s + exchange
    else:
        train = train_s(model, device, work, training, placement) + exchange
    sync = speed.sync_s if speed.sync_s is not None else 0.0
    if placement.samplers and speed.sync_s is None:
        sync = sync_bytes(model, training) / placement.sync_bytes_per_s
    overlaps = placement.samplers > 0 and placement.off_policy > 0
    step = (max(generation, train) if overlaps else generation + train) + sync + speed.other_s
    waiting = min(generation, work.batch_size * work.surplus * work.env_s / _in_flight(work, placement))
    sides = [{"generation": generation - waiting, "the environment": waiting}]
    sides += [{"training": train - exchange, "the exchange of gradients": exchange}]
    limiting = max(sides, key=lambda side: sum(side.values())) if overlaps else sides[0] | sides[1]
    parts = limiting | {"weight synchronisation": sync, "the rest of the step": speed.other_s}
    return StepTime(
        generate_s=generation,
        train_s=train,
        exchange_s=exchange,
        sync_s=sync,
        other_s=speed.other_s,
        step_s=step,
        sampled_tokens_per_s=work.batch_size * work.surplus * work.completion_tokens / generation,
        concurrent=concurrent,
        bottleneck=max(parts, key=lambda name: parts[name]),
    )


def _slower(run: PlannedRun) -> float:
    """How many times as long as by the formula a measured run generated."""
    model, device, work, placement, speed = run.model, run.device, run.work, run.placement, run.measured
    assert speed.sampled_tokens_per_s is not None
    measured = work if speed.sampled_batch is None else replace(work, batch_size=speed.sampled_batch)
    num_tokens = measured.batch_size * measured.surplus * measured.completion_tokens
    by_formula, _ = generate_s(model, device, measured, placement)
    return num_tokens / (speed.sampled_tokens_per_s * max(1, placement.samplers)) / by_formula


def trainer_memory(
    model: Architecture, device: DeviceSpeed, training: Training, placement: Placement
) -> dict[str, float]:
    """Bytes on one trainer's device, by what holds them, without the copy of the policy that rank 0 has of shards."""
    trained = trained_parameters(model, training)
    frozen = 0 if training.rank is None else model.parameters
    divided = placement.trainers if placement.shards else 1
    number = device.number_bytes
    per_token = 34 * model.width * (number / HALF)
    per_row_token = (
        model.layers * model.width * number + per_token if training.checkpointing else model.layers * per_token
    )
    return {
        "weights": (FLOAT32 * trained + number * frozen) / divided,
        "gradients": FLOAT32 * trained / divided,
        "optimizer": ADAMW_BYTES * trained / divided,
        "activations": per_row_token * training.row_tokens
        + FLOAT32 * model.vocabulary * min(HEAD_ROWS, training.row_tokens),
    }


def sampler_memory(model: Architecture, device: DeviceSpeed, work: Workload, placement: Placement) -> dict[str, float]:
    """Bytes on one inference device: weights, and the cache of the rollouts in flight, as far as it fits."""
    in_flight = _in_flight(work, placement) / max(1, placement.samplers)
    tokens = min(in_flight * work.tokens, cache_tokens(model, device, placement))
    number = device.number_bytes
    return {"weights": number * model.parameters, "key/value cache": number * tokens * model.kv_numbers}


def best_split(run: PlannedRun) -> tuple[Placement, StepTime]:
    """Return the division of all devices between inference and training that has the shortest step.

    A number of trainers must divide the batch.
    """
    placement = run.placement
    total = placement.trainers + placement.samplers
    splits = [
        replace(placement, trainers=trainers, samplers=total - trainers)
        for trainers in range(1, total + (placement.samplers == 0))
        if run.work.batch_size % trainers == 0
    ]
    timed = [(split, step_time(replace(run, placement=split))) for split in splits]
    return min(timed, key=lambda pair: pair[1].step_s)
