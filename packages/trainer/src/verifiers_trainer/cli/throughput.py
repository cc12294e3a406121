"""A model of the time of a training step and of the memory of a device: arithmetic on sizes and
speeds, without torch.

Sources of the formulas: a token's forward pass takes 2 operations per parameter, its backward pass
2 more, and 2 per trained parameter (Kaplan et al. 2020, arXiv 2001.08361, table 1); attention adds
12 x layers x width x context to both passes (Chowdhery et al. 2022, arXiv 2204.02311, appendix B),
halved here since it is causal. A decoding step reads the weights and the cached keys and values
once (Pope et al. 2022, arXiv 2211.05102, section 2). Rollouts in flight are the rate times the
duration of one (Little 1961). Activations are those of ``packing.row_bytes``. A ring all-reduce
moves 2 x (n - 1) / n of the gradients (Patarasuk and Yuan 2009).

A CPU differs, by measurement (docs/scale.md): it computes in 32 bits, reads memory and then
multiplies, so that both times add up, attention is the whole matrix of a packed row, a decoding
step has an overhead for each layer, and so has each sampled token for its request. An engine
computes the equal prompts of siblings once.

A batch waits for its longest rollout, which decodes with ever fewer others, since a finished
rollout holds its slot: of its group until the siblings have finished, of its batch until that is
trained. The longest of n that may end at every token with the same probability is expected to be
the n-th harmonic number times as long as the mean (Eisenberg 2008, "On the expectation of the
maximum of IID geometric random variables"), up to the bound on a rollout. The pipeline starts a
batch's rollouts when weights are served, and needs all of them k batches later, when they reach the
allowed lag k. So k + 1 batches take no less time than the longest rollout and the training of its
batch, also on a device that both share, of which each then has half: with k = 0 the two alternate,
and every batch ahead divides the wait by one more.

Not modelled: pipeline bubbles, padding, tensor parallelism, experts, evaluations and checkpoints.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from verifiers_trainer.algorithm.packing import row_bytes

FLOAT32, HALF = 4, 2
"""Bytes of a number."""
ADAMW_BYTES = 2 * FLOAT32
"""State of AdamW for a trained parameter: two moments."""
ADAMW_TRAFFIC = 7 * FLOAT32
"""Bytes that one update of AdamW moves per trained parameter: reads weight, gradient, two moments,
writes all but the gradient."""
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
        """Queries of a token, over all heads."""
        return self.heads * self.head_width

    @property
    def kv_width(self) -> int:
        """Keys of a token, over all heads; values are as many."""
        return self.kv_heads * self.head_width

    @property
    def parameters(self) -> int:
        """Number of weights."""
        attention = 2 * self.width * (self.attention_width + self.kv_width)
        biases = (self.attention_width + 2 * self.kv_width) * self.qkv_bias
        norms = 2 * self.width + 2 * self.head_width * self.qk_norm
        layer = attention + biases + 3 * self.width * self.mlp_width + norms
        return self.embedding_parameters + self.layers * layer + self.width

    @property
    def embedding_parameters(self) -> int:
        """Weights of embedding and head."""
        return self.vocabulary * self.width * (1 if self.tied else 2)

    def adapter_parameters(self, rank: int) -> int:
        """Weights of a LoRA adapter on every linear layer but the head: rank x (inputs + outputs)
        each."""
        attention = 2 * (self.width + self.attention_width) + 2 * (self.width + self.kv_width)
        return self.layers * rank * (attention + 3 * (self.width + self.mlp_width))

    @property
    def kv_numbers(self) -> int:
        """Keys and values of a token, over all layers."""
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
    """Seconds of a sampled token beside its operations, where the engine shares the device with
    requests and loop."""
    row_overhead_s: float = 0.03
    """Seconds of forward and backward pass of a packed row beside its operations: launches. The
    least on an accelerator."""
    is_accelerator: bool = True
    """Whether it computes in 16 bits, reads memory while it multiplies, and has flash attention: no
    CPU."""

    @property
    def number_bytes(self) -> int:
        """Bytes of a number that it computes with."""
        return HALF if self.is_accelerator else FLOAT32

    def together_s(self, one_s: float, other_s: float) -> float:
        """Seconds of two kinds of work that an accelerator does at the same time."""
        return max(one_s, other_s) if self.is_accelerator else one_s + other_s


@dataclass(frozen=True, slots=True)
class Workload:
    """A rollout, on average, and how many a batch takes."""

    batch_size: float
    group_size: int
    prompt_tokens: float
    completion_tokens: float
    """Sampled tokens, over all turns."""
    env_s: float = 0.0
    """Seconds in which it waits for its environment, scoring included."""
    surplus: float = 1.0
    """Rollouts generated for each of ``batch_size``, those that are dropped included."""
    trained: float = 1.0
    """Share of ``batch_size`` that is trained: a batch may be short of groups, and rollouts are
    left out of it."""
    shares_prompts: bool = True
    computed_tokens: float | None = None
    """Tokens that one pass computes for a rollout. None: its own, and its share of a prompt where
    that is shared."""
    length_spread: float = 0.0
    """0: every rollout samples as many tokens; 1: each may end at every token with the same
    probability."""
    most_tokens: float = math.inf
    """Sampled tokens at which a rollout is cut off."""

    @property
    def tokens(self) -> float:
        """Prompt and sampled tokens of a rollout."""
        return self.prompt_tokens + self.completion_tokens

    def longest_tokens(self, count: float) -> float:
        """Sampled tokens of the longest of ``count`` rollouts, as expected."""
        longest = self.completion_tokens * (1 + self.length_spread * longest_excess(count))
        return max(self.completion_tokens, min(longest, self.most_tokens))

    @property
    def trained_tokens(self) -> float:
        """Tokens that one pass computes for a batch."""
        estimate = self.completion_tokens + self.prompt_tokens / (
            self.group_size if self.shares_prompts else 1
        )
        return self.batch_size * self.trained * (self.computed_tokens or estimate)


@dataclass(frozen=True, slots=True)
class Placement:
    """Devices and how the two sides work together."""

    trainers: int = 1
    """Processes that train, each on one device."""
    samplers: int = 0
    """Devices of inference servers; 0: the first trainer's device samples too."""
    off_policy: int = 1
    """Batches that generation may be ahead; 0: generation and training alternate."""
    waits: bool = True
    """Whether a batch waits for rollouts that would become too old; else they are dropped and count
    in ``surplus``."""
    in_flight: int = 1024
    """Most rollouts at a time."""
    cache_bytes: float = math.inf
    """Bound on the keys and values of a device, beside what fits."""
    shards: bool = False
    """Whether weights, gradients and the optimizer's state are divided among the trainers."""
    link_bytes_per_s: float = 100e9
    """Of one device to the others."""
    sync_bytes_per_s: float = 1e9
    """From the trainer's weights to the serving weights: through a disk or a link."""


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
    passes: int = 1
    """Times that each rollout is trained on; the extra forward passes are computed once."""
    steps_per_batch: int = 1


@dataclass(frozen=True, slots=True)
class MeasuredSpeed:
    """Speeds of an earlier run, which replace those of the formulas where they are known."""

    train_tokens_per_s: float | None = None
    """Computed tokens of a trainer process."""
    sampled_tokens_per_s: float | None = None
    """Of one inference device."""
    sampled_batch: float | None = None
    """``batch_size`` of that run: of more rollouts at a time, decoding is faster. None: that of
    this run."""
    sampled_off_policy: float | None = None
    """Batches that its generation was ahead. None: those of this run."""
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
    """Seconds of a batch: generated, trained for all its optimizer steps, weights
    synchronised."""

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
    """Sequences that decode together on one inference device; 0 if the speed was measured."""
    bottleneck: str


def longest_excess(count: float) -> float:
    """By how many means the longest of ``count`` exceeds the mean, with ``length_spread`` 1:
    harmonic number less 1."""
    return max(0.0, math.log(count) + 0.5772 + 1 / (2 * count) - 1 / (12 * count**2) - 1)


def trained_parameters(model: Architecture, training: Training) -> int:
    """Number of weights with a gradient."""
    return model.parameters if training.rank is None else model.adapter_parameters(training.rank)


def train_flops(model: Architecture, training: Training, context: float) -> float:
    """Operations of a token in rollouts of ``context`` tokens: forward, backward, and the extra
    forward passes."""
    attention = 2 * model.layers * model.attention_width * context
    forwards = training.extra_forwards + training.passes * training.checkpointing
    both = 4 * model.parameters + 2 * trained_parameters(model, training) + 3 * attention
    return training.passes * both + forwards * (2 * model.parameters + attention)


def exchange_s(model: Architecture, training: Training, placement: Placement) -> float:
    """Seconds of an all-reduce of the gradients; the gather and scatter of shards move half as
    much again."""
    count = placement.trainers
    moved = 2 * (count - 1) / count * FLOAT32 * trained_parameters(model, training)
    return moved * (1.5 if placement.shards else 1.0) / placement.link_bytes_per_s


def train_s(
    model: Architecture,
    device: DeviceSpeed,
    work: Workload,
    training: Training,
    placement: Placement,
) -> float:
    """Seconds in which one trainer computes its share of a batch and updates the weights, without
    the exchange."""
    tokens = work.trained_tokens / placement.trainers
    rows = training.passes * math.ceil(tokens / training.row_tokens)
    # 2: not causal
    context = work.tokens if device.is_accelerator else 2 * min(tokens, training.row_tokens)
    compute = tokens * train_flops(model, training, context) / (device.flops * device.utilisation)
    divided = placement.trainers if placement.shards else 1
    update = ADAMW_TRAFFIC * trained_parameters(model, training) / divided / device.bytes_per_s
    return (
        device.together_s(compute, rows * device.row_overhead_s) + training.steps_per_batch * update
    )


def decode_s(model: Architecture, device: DeviceSpeed, concurrent: float, context: float) -> float:
    """Seconds in which ``concurrent`` sequences of ``context`` tokens get one token each."""
    read = device.number_bytes * (model.parameters + concurrent * context * model.kv_numbers)
    from_memory = read / (device.bytes_per_s * device.bandwidth_share)
    from_matrices = 2 * model.parameters * concurrent / (device.flops * device.utilisation)
    beside = device.decode_overhead_s + concurrent * device.token_overhead_s
    return device.together_s(from_memory, from_matrices) + beside


def cache_tokens(model: Architecture, device: DeviceSpeed, placement: Placement) -> float:
    """Tokens whose keys and values fit beside the weights on an inference device, of nine tenths of
    its memory."""
    free = max(0.0, 0.9 * device.memory - device.number_bytes * model.parameters)
    return min(placement.cache_bytes, free) / (device.number_bytes * model.kv_numbers)


def generate_s(
    model: Architecture,
    device: DeviceSpeed,
    work: Workload,
    placement: Placement,
    training_s: float,
) -> tuple[float, float]:
    """Return (seconds to generate a batch, sequences that decode together on a device, on average).

    The more sequences share a decoding step, the longer it takes, and the fewer steps a batch
    takes: as many share it as the cache holds, unless the batch then took less than ``_least_s``.
    ``training_s`` is the training of a batch.
    """
    count = max(1, placement.samplers)
    context = work.prompt_tokens + work.completion_tokens / 2
    fits = max(1.0, cache_tokens(model, device, placement) / work.tokens)
    prompt_s = (
        2
        * model.parameters
        * work.prompt_tokens
        / work.group_size
        / (device.flops * device.utilisation)
    )
    tokens = work.batch_size * work.surplus * work.completion_tokens / count

    def token_s(concurrent: float) -> float:  # with the prompts computed meanwhile
        return (
            decode_s(model, device, concurrent, context)
            + concurrent * prompt_s / work.completion_tokens
        )

    low, high = 0.0, min(fits, _in_flight(work, placement) / count)
    for _ in range(60):  # halves the distance to the solution
        concurrent = (low + high) / 2
        one_s = token_s(concurrent)
        takes_longer = tokens / concurrent * one_s >= _least_s(work, placement, one_s, training_s)
        low, high = (concurrent, high) if takes_longer else (low, concurrent)
    return tokens / high * token_s(high), high


def _least_s(work: Workload, placement: Placement, token_s: float, training_s: float) -> float:
    """Seconds that a batch takes on any device, with ``token_s`` from one token of a rollout to the
    next.

    A slot is free again when the longest rollout of its group has finished. The longest of the
    batch finishes later; then the batch is trained, and the next rollouts start: all batches in
    flight wait for this together. A batch alone has none of them to fill its slots, and generates
    as many groups in sequence as its unluckiest place needs.
    """
    group_s = work.longest_tokens(work.group_size) * token_s + work.env_s
    tail_s = work.longest_tokens(work.batch_size * work.surplus) * token_s + work.env_s - group_s
    slots_s = work.batch_size * work.surplus / _in_flight(work, placement) * group_s
    alone = replace(placement, off_policy=0)
    alone_s = work.batch_size * work.surplus / _in_flight(work, alone) * group_s + tail_s
    alone_s = max(alone_s, _most_tries(work) * group_s)
    if placement.off_policy == 0:
        return alone_s
    if not placement.waits:
        return slots_s
    return min(alone_s, slots_s + (tail_s + training_s) / (placement.off_policy + 1))


def _most_tries(work: Workload) -> float:
    """Groups that are generated for the unluckiest place of a batch, when each is dropped with the
    same probability.

    The expected maximum of geometric variables (Eisenberg 2008), as the mean of its two bounds; in
    a batch that is short, after which as many places are still empty as are not trained.
    """
    dropped = 1 - work.trained / max(work.trained, work.surplus)
    if not dropped:
        return 1.0
    slots = work.batch_size / work.group_size
    until_full = 0.5 + (1 + longest_excess(slots)) / -math.log(dropped)
    if work.trained < 1:
        return min(until_full, math.log(1 - work.trained) / math.log(dropped))
    return until_full


def _in_flight(work: Workload, placement: Placement) -> float:
    return min(placement.in_flight, work.batch_size * (placement.off_policy + 1))


def sync_bytes(model: Architecture, training: Training) -> float:
    """Bytes of a push of weights to a server: the adapter in 32 bits, or all weights in 16."""
    return (
        FLOAT32 * trained_parameters(model, training) if training.rank else HALF * model.parameters
    )


def step_time(run: PlannedRun) -> StepTime:
    """Predict one batch. On devices of their own, generation and training overlap unless the run is
    synchronous."""
    work, placement, speed = run.work, run.placement, run.measured
    exchange = run.training.steps_per_batch * exchange_s(run.model, run.training, placement)
    train = _train_s(run)
    generation, concurrent = generate_s(run.model, run.device, work, placement, train)
    if speed.sampled_tokens_per_s:
        generation, concurrent = generation * _slower(run, speed.sampled_tokens_per_s), 0.0
    sync = speed.sync_s if speed.sync_s is not None else 0.0
    if placement.samplers and speed.sync_s is None:
        sync = sync_bytes(run.model, run.training) / placement.sync_bytes_per_s
    overlaps = placement.samplers > 0 and placement.off_policy > 0
    step = (max(generation, train) if overlaps else generation + train) + sync + speed.other_s
    waiting = min(
        generation, work.batch_size * work.surplus * work.env_s / _in_flight(work, placement)
    )
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


def _train_s(run: PlannedRun) -> float:
    """Seconds of a batch's training, measured where that is known, with the exchange
    of gradients."""
    work, training, placement = run.work, run.training, run.placement
    exchange = training.steps_per_batch * exchange_s(run.model, training, placement)
    if run.measured.train_tokens_per_s:
        tokens = training.passes * work.trained_tokens / placement.trainers
        return tokens / run.measured.train_tokens_per_s + exchange
    return train_s(run.model, run.device, work, training, placement) + exchange


def _slower(run: PlannedRun, sampled_tokens_per_s: float) -> float:
    """How many times as long as by the formula a run generated that had this measured speed."""
    batch, ahead = run.measured.sampled_batch, run.measured.sampled_off_policy
    earlier = replace(
        run,
        work=run.work if batch is None else replace(run.work, batch_size=batch),
        placement=run.placement if ahead is None else replace(run.placement, off_policy=int(ahead)),
    )
    work, placement = earlier.work, earlier.placement
    num_tokens = work.batch_size * work.surplus * work.completion_tokens
    by_formula, _ = generate_s(run.model, run.device, work, placement, _train_s(earlier))
    return num_tokens / (sampled_tokens_per_s * max(1, placement.samplers)) / by_formula


def trainer_memory(
    model: Architecture, device: DeviceSpeed, training: Training, placement: Placement
) -> dict[str, float]:
    """Bytes on one trainer's device, by what holds them, without the copy of the policy that rank 0
    has of shards."""
    trained = trained_parameters(model, training)
    frozen = 0 if training.rank is None else model.parameters
    divided = placement.trainers if placement.shards else 1
    number = device.number_bytes
    shape = model.layers, model.width, number
    # autocast casts what is trained in float32, but for embedding and head; the engine has its own
    cast = trained if frozen else model.parameters - model.embedding_parameters
    copies = (1 + (placement.samplers == 0)) * HALF * cast if number < FLOAT32 else 0
    return {
        "weights": (FLOAT32 * trained + number * frozen) / divided,
        "gradients": FLOAT32 * trained / divided,
        "optimizer": ADAMW_BYTES * trained / divided,
        **({"bf16 copies": copies / divided} if copies else {}),
        "activations": (
            row_bytes(training.row_tokens, *shape, training.checkpointing)
            + FLOAT32 * model.vocabulary * min(HEAD_ROWS, training.row_tokens)
        ),
    }


def sampler_memory(
    model: Architecture, device: DeviceSpeed, work: Workload, placement: Placement
) -> dict[str, float]:
    """Bytes on one inference device: weights, and the cache of the rollouts in flight, as far as it
    fits."""
    in_flight = _in_flight(work, placement) / max(1, placement.samplers)
    tokens = min(in_flight * work.tokens, cache_tokens(model, device, placement))
    number = device.number_bytes
    return {
        "weights": number * model.parameters,
        "key/value cache": number * tokens * model.kv_numbers,
    }


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
