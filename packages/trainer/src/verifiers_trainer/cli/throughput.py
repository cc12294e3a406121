"""The time of a training step and the memory of a device: arithmetic on settings, sizes and speeds,
without torch.

Sources of the formulas: a token's forward pass takes 2 operations per parameter, its backward pass
2 more, and 2 per trained parameter (Kaplan et al. 2020, arXiv 2001.08361, table 1); attention adds
12 x layers x width x context to both passes (Chowdhery et al. 2022, arXiv 2204.02311, appendix B),
halved here since it is causal. A decoding step reads the weights and the cached keys and values
once (Pope et al. 2022, arXiv 2211.05102, section 2). Rollouts in flight are the rate times the
duration of one (Little 1961). A ring all-reduce moves 2 x (n - 1) / n of the gradients to a device,
a gather or a scatter (n - 1) / n (Patarasuk and Yuan 2009). The bytes of a row are in
``policy.sizes``.

A CPU differs, by measurement (docs/reference/measured-plans.md): it computes in 32 bits, reads
memory and then multiplies, so that both times add up, attention is the whole matrix of a packed
row, and each layer of a decoding step and each sampled token has an overhead.

Not modelled: pipeline bubbles, padding, experts, evaluations and checkpoints, and how a batch's
slots empty: it takes no fewer decoding steps than its longest rollout, shared with the batches
ahead.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from verifiers_trainer.algorithm.batch import ROW_TOKENS, ROW_TOKENS_CPU
from verifiers_trainer.engines.vllm.features import FIRST
from verifiers_trainer.engines.vllm.weights.choice import Situation, choose
from verifiers_trainer.policy.sizes import ADAMW_BYTES, FLOAT32, HALF, Architecture, RowPass
from verifiers_trainer.settings.fields import SELF

ADAMW_TRAFFIC = 7 * FLOAT32
"""Bytes that one update of AdamW moves per trained parameter: reads weight, gradient, two moments,
writes all but the gradient."""
USABLE = 0.9
"""Share of a device's memory that may be planned: the rest is of its driver and of fragments."""
EMBEDDED_CACHE_SHARE, EMBEDDED_CACHE_CPU = 0.3, 2 * 2**30
"""The embedded engine's cache: a share of the memory that training leaves on an accelerator, bytes
on a CPU."""
SHARED_SERVER = 0.4
"""``gpu_memory_utilization`` of a server on the trainer's device, where none is set."""


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """All that time and memory are computed from."""

    model: Architecture
    values: Mapping[str, Any]
    """The trainer's settings, with defaults."""
    inputs: Mapping[str, float]
    """By the names of ``--plan-with``."""
    server: Mapping[str, Any]
    """``[inference.args]``."""
    is_accelerator: bool = True
    """Whether it computes in 16 bits, and reads memory while it multiplies: no CPU."""

    @property
    def number(self) -> int:
        """Bytes of a number that layers compute with."""
        return HALF if self.is_accelerator else FLOAT32

    @property
    def rank(self) -> int | None:
        """Of the LoRA adapter; None: all weights are trained."""
        return self.values["lora_rank"] if self.values["use_lora"] else None

    @property
    def base_bytes(self) -> float:
        """Of the model's weights on the trainer's device, in the precision that layers compute in
        or in four bits."""
        return self.model.base_bytes(self.number, self.values["quantize"])

    @property
    def trained(self) -> int:
        """Number of weights with a gradient, of one adapter."""
        model = self.model
        return model.parameters if self.rank is None else model.adapter_parameters(self.rank)

    @property
    def num_adapters(self) -> int:
        """Adapters over one base; 1 without any, too."""
        return int(self.inputs["roles"]) if self.values["lora_per_role"] else 1

    @property
    def trained_number(self) -> int:
        """Bytes of such a weight."""
        return FLOAT32 if self.values["master_weights"] == "fp32" else self.number

    @property
    def trainers(self) -> int:
        return int(self.inputs["trainers"])

    @property
    def samplers(self) -> int:
        """Devices that sample beside the trainer; 0: the embedded engine."""
        return 1 if self.inputs["shared"] else int(self.inputs["samplers"])

    @property
    def server_share(self) -> float:
        """Share of the first trainer's device that vLLM takes; 0: vLLM has devices of its own."""
        set_share = self.server.get("gpu_memory_utilization", SHARED_SERVER)
        return set_share if self.inputs["shared"] else 0.0

    @property
    def overlaps(self) -> bool:
        """Whether a batch is generated while another is trained."""
        has_devices = self.samplers > 0 and not self.server_share
        return has_devices and self.values["max_off_policy_steps"] > 0

    @property
    def num_batches(self) -> int:
        """Batches in flight."""
        return self.values["max_off_policy_steps"] + 1

    @property
    def in_flight(self) -> int:
        """Rollouts at a time."""
        return min(self.values["max_concurrent"], self.values["batch_size"] * self.num_batches)

    @property
    def generated(self) -> float:
        """Rollouts that are sampled for a batch."""
        return self.values["batch_size"] * self.inputs["surplus"]

    @property
    def steps_per_batch(self) -> int:
        return self.values["updates_per_batch"] * self.values["num_iterations"]

    @property
    def extra_forwards(self) -> int:
        """Forward passes of a batch beside those of its gradients: a reference, old
        log-probabilities."""
        recomputes = self.values["anchor"] == "recomputed" or self.steps_per_batch > 1
        return bool(self.values["beta"] and not self.teaches_itself) + recomputes

    @property
    def teaches_itself(self) -> bool:
        """Whether the policy is a teacher; other teachers are models of sizes that are not known."""
        teacher = self.values["teacher"]
        return SELF in (teacher.values() if isinstance(teacher, Mapping) else [teacher])

    @property
    def teacher_forwards(self) -> int:
        """Forward passes of a batch in which the policy reads it as its own teacher."""
        if not self.teaches_itself:
            return 0
        return self.values["num_iterations"] if self.values["loss"] == "gkd" else 1

    @property
    def teacher_length(self) -> float:
        """Tokens of such a pass for each token of the policy's."""
        length = self.inputs["prompt_tokens"] + self.inputs["completion_tokens"]
        return 1 + self.inputs["context_tokens"] / max(1.0, length)

    @property
    def has_reference_copy(self) -> bool:
        """Whether a frozen copy of what is trained is held, as the reference or the teacher."""
        synced = bool(self.values["sync_ref_model"])
        if self.values["teacher"] is not None:
            return self.teaches_itself and synced
        return bool(self.values["beta"]) and (self.rank is None or synced)

    @property
    def longest_rollout(self) -> int:
        """Most tokens of a rollout."""
        prompt, completion = self.values["max_prompt_len"], self.values["max_completion_len"]
        bound = prompt + completion if prompt and completion else math.inf
        return min(self.values["max_seq_len"], bound)

    @property
    def row_tokens(self) -> int:
        """Tokens of a packed row, as far as rollouts fit."""
        of_batch = self.values["micro_batch_size"] * self.values["max_seq_len"]
        bound = ROW_TOKENS if self.is_accelerator else ROW_TOKENS_CPU
        bound = of_batch if self.inputs["flash"] else bound
        return self.values["micro_batch_tokens"] or min(bound, of_batch)

    @property
    def longest_row(self) -> int:
        """Tokens of the longest row that may occur: it holds the longest rollout, whatever its
        bound."""
        packed = self.row_tokens if self.values["packing"] else 0
        return max(packed, self.longest_rollout)

    @property
    def row(self) -> RowPass:
        return RowPass(
            self.rank,
            self.number,
            bool(self.values.get("gradient_checkpointing")),
            masked=self.values["packing"] and not self.inputs["flash"],
        )

    @property
    def sync(self) -> str:
        """How weights reach what samples, as the trainer chooses it with a server of today."""
        if not self.samplers:
            return "shared"
        refusal = self.values["lora_modules_to_save"] and "it trains whole modules too"
        situation = Situation(
            features=frozenset(FIRST),
            version="of today",
            has_adapter=self.rank is not None,
            is_quantized=bool(self.values["quantize"]),
            adapter_refused=refusal or None,
            on_cuda=self.is_accelerator,
            same_device=bool(self.server_share),
        )
        return choose(self.values["weight_sync"], situation).method

    @property
    def trained_tokens(self) -> float:
        """Tokens that one pass of a trainer computes for a batch."""
        x, values = self.inputs, self.values
        shares = values["packing"] and values["share_prompts"]
        prompt = x["prompt_tokens"] / (values["rollouts_per_example"] if shares else 1)
        tokens = x.get("computed_tokens") or x["completion_tokens"] + prompt
        return values["batch_size"] * x["trained"] * tokens / self.trainers

    @property
    def num_rows(self) -> int:
        """Packed rows of that."""
        return max(1, math.ceil(self.trained_tokens / self.row_tokens))

    def together_s(self, one_s: float, other_s: float) -> float:
        """Seconds of two kinds of work that an accelerator does at the same time."""
        return max(one_s, other_s) if self.is_accelerator else one_s + other_s

    def compute_s(self, operations: float) -> float:
        """Seconds of training's or of a prompt's operations."""
        return operations / (self.inputs["flops"] * self.inputs["utilisation"])


# --- training -------------------------------------------------------------------------------------


def train_flops(run: PlannedRun, context: float) -> float:
    """Operations of a token in rollouts of ``context`` tokens: forward, backward, and the extra
    forward passes, those of a teacher with its context."""
    model, passes = run.model, run.values["num_iterations"]
    attention = 2 * model.layers * model.attention_width * context
    forwards = run.extra_forwards + passes * run.row.checkpointing
    both = 4 * model.parameters + 2 * run.trained + 3 * attention
    operations = passes * both + forwards * (2 * model.parameters + attention)
    if run.teacher_forwards:
        longer = run.teacher_length
        taught = longer * (2 * model.parameters + longer * attention)
        operations += run.teacher_forwards * taught
    return operations


@dataclass(frozen=True, slots=True)
class Exchange:
    """What a trainer's collectives of a batch move to its device: bytes of weights and of
    gradients, and calls."""

    gathered: float = 0.0
    reduced: float = 0.0
    gathers: int = 0
    reductions: int = 0


def exchange(run: PlannedRun) -> Exchange:
    """What a batch's optimizer steps exchange.

    Whole copies reduce their gradients once a step. Shards gather every layer for each forward and
    for each backward pass of a row, and what is outside the layers, embedding and head, once for
    both; they reduce with every row, since gradients that wait would be held whole.
    """
    model, share = run.model, (run.trainers - 1) / run.trainers
    gradients = share * FLOAT32 * run.trained
    if not run.inputs["shards"]:
        count = run.steps_per_batch * (run.trainers > 1)
        return Exchange(reduced=2 * gradients * count, reductions=count)
    passes = run.num_rows * run.values["num_iterations"]
    forwards = passes + run.num_rows * (run.extra_forwards + run.teacher_forwards)
    adapters = 0 if run.rank is None else run.trained
    in_layers = model.layers * model.layer_parameters + adapters
    gathered = (passes + forwards) * in_layers + forwards * model.root_parameters
    return Exchange(
        gathered=share * run.number * gathered,
        reduced=passes * gradients,
        gathers=passes * model.layers + forwards * (model.layers + 1),
        reductions=passes * (model.layers + (run.rank is None)),
    )


def exchange_s(run: PlannedRun) -> float:
    """Seconds of that."""
    moved = exchange(run)
    calls = (moved.gathers + moved.reductions) * run.inputs["call_s"]
    return (moved.gathered + moved.reduced) / run.inputs["link_bytes_per_s"] + calls


def train_s(run: PlannedRun) -> float:
    """Seconds in which a trainer computes its share of a batch and updates the weights, with the
    exchange, which an accelerator with shards does meanwhile."""
    x, passes, tokens = run.inputs, run.values["num_iterations"], run.trained_tokens
    if "train_tokens_per_s" in x:
        compute, update = passes * tokens / x["train_tokens_per_s"], 0.0
    else:
        context = x["prompt_tokens"] + x["completion_tokens"]
        if not run.is_accelerator:
            context = 2 * min(tokens, run.row_tokens)  # not causal
        operations = run.compute_s(tokens * train_flops(run, context))
        compute = run.together_s(operations, passes * run.num_rows * x["row_overhead_s"])
        weights = run.trained * run.num_adapters
        update = run.steps_per_batch * ADAMW_TRAFFIC * weights / x["bytes_per_s"]
    if x["shards"]:
        return run.together_s(compute, exchange_s(run)) + update / run.trainers
    return compute + exchange_s(run) + update


# --- generation -----------------------------------------------------------------------------------


def decode_s(run: PlannedRun, concurrent: float, context: float) -> float:
    """Seconds in which ``concurrent`` sequences of ``context`` tokens get one token each."""
    x, model = run.inputs, run.model
    weights = run.number * model.parameters if run.samplers else run.base_bytes
    read = weights + run.number * concurrent * context * model.kv_numbers
    from_memory = read / (x["bytes_per_s"] * x["bandwidth_share"])
    beside = x["decode_overhead_s"] + concurrent * x["token_overhead_s"]
    return run.together_s(from_memory, run.compute_s(2 * model.parameters * concurrent)) + beside


def generate_s(run: PlannedRun) -> tuple[float, float]:
    """Return (seconds to generate a batch, sequences that decode together on a device, on average).

    As many decode together as are in flight and fit into the cache. A batch takes no fewer decoding
    steps than its longest rollout has tokens, and no less time than that and its environment; the
    batches in flight share both.
    """
    x, count = run.inputs, max(1, run.samplers)
    tokens, completion = x["prompt_tokens"] + x["completion_tokens"], x["completion_tokens"]
    limit = min(max(1.0, cache_tokens(run) / tokens), run.in_flight / count)
    sampled = run.generated * completion / count
    longest = max(x["longest_tokens"], completion) / run.num_batches
    steps = max(sampled / limit, longest)
    context = x["prompt_tokens"] + completion / 2
    step_s = decode_s(run, sampled / steps, context)
    rollout_s = completion * decode_s(run, limit, context) + x["env_s"]
    slots_s = run.generated * rollout_s / run.in_flight
    prompts = run.generated * x["prompt_tokens"] / run.values["rollouts_per_example"] / count
    seconds = max(steps * step_s, slots_s, longest * step_s + x["env_s"] / run.num_batches)
    return seconds + run.compute_s(2 * run.model.parameters * prompts), sampled / steps


# --- weights --------------------------------------------------------------------------------------


def sync_bytes(run: PlannedRun) -> float:
    """Bytes of a push: the adapter as a file, or all weights in the trainer's precision."""
    if run.sync == "lora_dir":
        return FLOAT32 * run.trained
    number = run.trained_number if run.rank is None else run.number
    return 0.0 if run.sync == "shared" else number * run.model.parameters


def sync_s(run: PlannedRun) -> float:
    """Seconds of a push: files are written and read, a broadcast passes the link, and memory of the
    same device is copied. Shards are gathered first, whatever comes then."""
    x, pushed = run.inputs, sync_bytes(run)
    by_method = {"nccl": pushed / x["link_bytes_per_s"], "ipc": 2 * pushed / x["bytes_per_s"]}
    gathered = run.trained_number * run.trained * (run.trainers - 1) / run.trainers * x["shards"]
    seconds = by_method.get(run.sync, 2 * pushed / x["sync_bytes_per_s"])
    return seconds + gathered / x["link_bytes_per_s"]


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of a batch: generated, trained for all its optimizer steps, weights
    synchronised; and what takes most of it."""

    generate_s: float
    train_s: float
    exchange_s: float
    """Between the trainers; a part of ``train_s`` where they wait for it."""
    sync_s: float
    other_s: float
    step_s: float
    sampled_tokens_per_s: float
    """Of all inference devices, over ``generate_s``."""
    concurrent: float
    """Sequences that decode together on one inference device; 0 if the speed was measured."""
    bottleneck: str


def step_time(run: PlannedRun) -> StepTime:
    """Predict one batch. On devices of their own, generation and training overlap unless the run is
    synchronous."""
    x, train, exchanged = run.inputs, train_s(run), exchange_s(run)
    sampled = run.generated * x["completion_tokens"]
    if "sampled_tokens_per_s" in x:
        generation = sampled / (x["sampled_tokens_per_s"] * max(1, run.samplers))
        concurrent = 0.0
    else:
        generation, concurrent = generate_s(run)
    sync, other_s = x.get("sync_s", sync_s(run)), x.get("other_s", 0.0)
    waiting = min(generation, run.generated * x["env_s"] / run.in_flight)
    sampling = {"generation": generation - waiting, "the environment": waiting}
    between = min(exchanged, train)
    training = {"training": train - between, "the exchange between trainers": between}
    if run.overlaps:
        parts = dict(sampling if generation > train else training)
    else:
        parts = sampling | training
    parts |= {"weight synchronisation": sync, "the rest of the step": other_s}
    step = max(generation, train) if run.overlaps else generation + train
    return StepTime(
        generation, train, exchanged, sync, other_s, step + sync + other_s,
        sampled / generation, concurrent, max(parts, key=lambda name: parts[name]),
    )  # fmt: skip


def best_split(run: PlannedRun) -> PlannedRun:
    """Return the run with the division of its devices between inference and training that has the
    shortest step. A number of trainers must divide the batch."""
    total = run.trainers + run.samplers
    if run.server_share:
        return run
    splits = [
        replace(run, inputs={**run.inputs, "trainers": count, "samplers": total - count})
        for count in range(1, total + (run.samplers == 0))
        if run.values["batch_size"] % count == 0
    ]
    return min(splits, key=lambda split: step_time(split).step_s)


# --- memory ---------------------------------------------------------------------------------------


def cache_tokens(run: PlannedRun) -> float:
    """Tokens whose keys and values a sampling device has room for."""
    number, memory = run.number, run.inputs["memory"]
    if run.samplers:
        number /= run.server.get("tensor_parallel_size", 1)
        free = (run.server_share or USABLE) * memory - number * run.model.parameters
    elif run.is_accelerator:
        held = trainer_memory(run)
        reserved = sum(held[name] for name in ("weights", "gradients", "optimizer"))
        free = EMBEDDED_CACHE_SHARE * (memory - reserved)
    else:
        free = EMBEDDED_CACHE_CPU
    return max(0.0, free) / (number * run.model.kv_numbers)


def memory(run: PlannedRun) -> dict[str, dict[str, float]]:
    """Bytes on the fullest device of each side, by what holds them, in a step with the longest row
    that may occur."""
    trainer, number = trainer_memory(run), run.number
    tokens = run.inputs["prompt_tokens"] + run.inputs["completion_tokens"]
    cached = min(run.in_flight / max(1, run.samplers) * tokens, cache_tokens(run))
    if not run.samplers:
        return {"trainer": trainer | {"key/value cache": number * cached * run.model.kv_numbers}}
    number /= run.server.get("tensor_parallel_size", 1)
    server = {
        "weights": number * run.model.parameters,
        # of one rollout at least, or the server does not start
        "key/value cache": number * max(cached, run.longest_rollout) * run.model.kv_numbers,
    }
    if not run.server_share:
        return {"trainer": trainer, "inference": server}
    of_server = max(run.server_share * run.inputs["memory"], sum(server.values()))
    return {"trainer": trainer | {"vLLM": of_server}}


def trainer_memory(run: PlannedRun) -> dict[str, float]:
    """Bytes on the first trainer's device, by what holds them."""
    model, number, row = run.model, run.number, run.row
    shards = bool(run.inputs["shards"])
    stored = run.trained_number * run.trained * run.num_adapters
    frozen = 0 if run.rank is None else run.base_bytes
    divided = run.trainers if shards else 1
    activations = row.activation_bytes(model, run.longest_row)
    parts = {
        "weights": (stored + frozen) / divided,
        "gradients": stored / divided,
        "optimizer": ADAMW_BYTES / FLOAT32 * stored / divided,
        "reference": stored / divided * run.has_reference_copy,
        "activations": activations,
        "logits and passes": row.row_bytes(model, run.longest_row) - activations,
    }
    if shards:
        # embedding and head are whole until the backward pass ends, with their gradient in both
        # precisions, and two layers: that which computes and the next
        of_root = number + (number + FLOAT32) * (run.rank is None)
        layers = 2 * number * model.layer_parameters
        parts["gathered weights"] = of_root * model.root_parameters + layers
        parts["whole copy"] = (stored + frozen) * (run.samplers == 0)
    elif number < run.trained_number:
        # autocast casts what is trained in float32, but for embedding and head; the engine has its
        # own
        cast = run.trained if frozen else model.layers * model.layer_parameters
        parts["bf16 copies"] = (1 + (run.samplers == 0)) * number * cast
    return {name: size for name, size in parts.items() if size}
