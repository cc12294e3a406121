"""``vf-train @ FILE --plan``: what a run will take, from its file and its model's ``config.json``,
without torch.

Every input has an origin: a setting, the model, a data sheet, an earlier run, a value that the
caller gives, or an assumption. ``throughput`` has the arithmetic.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verifiers.cli.common.reader import raise_together
from verifiers.errors import ConfigError
from verifiers.runtime.decoding import read_json
from verifiers.runtime.suggest import closest
from verifiers_trainer.algorithm.batch import ROW_TOKENS, ROW_TOKENS_CPU
from verifiers_trainer.cli.settings import TrainSettings, read_settings
from verifiers_trainer.cli.sources import read_words
from verifiers_trainer.cli.throughput import (
    Architecture,
    DeviceSpeed,
    MeasuredSpeed,
    Placement,
    PlannedRun,
    StepTime,
    Training,
    Workload,
    best_split,
    longest_excess,
    sampler_memory,
    step_time,
    trainer_memory,
)
from verifiers_trainer.distributed.devices import DATA_SHEETS, sheet_of
from verifiers_trainer.policy import builtin_models
from verifiers_trainer.run.metrics_files import METRICS, read_metrics
from verifiers_trainer.settings import recipes
from verifiers_trainer.settings.fields import Settings, field_names

CPU = "cpu"
CPU_LAYER_S, CPU_TOKEN_S = 1.7e-4, 1.5e-4
"""Overhead of a decoding step for each layer, and of a sampled token, on a CPU: measured, see
docs/scale.md."""
SMOLLM2_SIZES = Architecture(30, 576, 1536, 9, 3, 64, 49152)
EMBEDDED_CACHE_SHARE, EMBEDDED_CACHE_CPU = 0.3, 2 * 2**30
"""The embedded engine's cache: a share of the memory that training leaves on an accelerator, bytes
on a CPU."""
MEANINGS = {
    "prompt_tokens": "tokens of a rollout's prompt",
    "completion_tokens": "sampled tokens of a rollout, over all turns",
    "length_spread": "of completions: 0 = of equal length, 1 = may end at every token",
    "env_s": "seconds in which a rollout waits for its environment",
    "surplus": "rollouts generated for each of batch_size, dropped ones included",
    "trained": "share of batch_size that is trained",
    "computed_tokens": "tokens computed for a trained rollout, with its share of prompts",
    "flops": "operations per second of a device",
    "bytes_per_s": "bandwidth of its memory",
    "memory": "bytes of its memory",
    "utilisation": "share of the operations that training reaches",
    "bandwidth_share": "share of the bandwidth that decoding reaches",
    "decode_overhead_s": "seconds of a decoding step beside reading",
    "token_overhead_s": "seconds of a sampled token beside its operations",
    "row_overhead_s": "least seconds of a packed row",
    "link_bytes_per_s": "of a device to the other trainers",
    "sync_bytes_per_s": "of weights to the servers",
    "train_tokens_per_s": "computed tokens of one trainer process",
    "sampled_tokens_per_s": "of one inference device",
    "sampled_batch": "batch_size at that speed",
    "sampled_off_policy": "batches that generation was ahead at that speed",
    "sync_s": "seconds in which a batch's weights are pushed",
    "other_s": "seconds of a step that are none of the above",
    "trainers": "processes that train",
    "samplers": "inference devices; 0: the first trainer's",
    "run_trainers": "processes that trained the earlier run",
    "run_samplers": "inference devices of the earlier run",
    "shards": "1: weights and optimizer are divided among the trainers",
}
"""Names of ``--plan-with``."""
MEASURED, ASSUMED = "measured", "assumed"


@dataclass(frozen=True, slots=True)
class PlanInput:
    """A number that the plan is computed from, and where it comes from."""

    value: float
    origin: str


@dataclass(frozen=True, slots=True)
class CapacityPlan:
    """Expected time and memory of a run."""

    settings: TrainSettings
    device: str
    model: Architecture
    inputs: Mapping[str, PlanInput]
    training: Training
    placement: Placement
    time: StepTime
    memory: Mapping[str, Mapping[str, float]]
    """Bytes: device -> what holds them."""
    best: tuple[Placement, StepTime]
    """Division of the same devices with the shortest step."""
    max_steps: int

    def to_dict(self) -> dict[str, Any]:
        """Return the object of ``--json``."""
        return {
            "inputs": {
                name: {"value": item.value, "origin": item.origin}
                for name, item in self.inputs.items()
            },
            "step_s": self.time.step_s,
            "generate_s": self.time.generate_s,
            "train_s": self.time.train_s,
            "sync_s": self.time.sync_s,
            "bottleneck": self.time.bottleneck,
            "memory": {side: dict(parts) for side, parts in self.memory.items()},
            "fastest": {"trainers": self.best[0].trainers, "samplers": self.best[0].samplers},
        }


def capacity_plan(
    words: Sequence[str],
    device: str | None = None,
    run: str | None = None,
    overrides: Sequence[str] = (),
) -> CapacityPlan:
    """Return the plan of a command line of ``vf-train``.

    ``device`` is a name that ``sheet_of`` reads, or "cpu"; ``run`` a folder with the metrics
    of an earlier run on such devices; ``overrides`` values of ``MEANINGS``, as ``name=value``.
    *Raises* ``ConfigError``.
    """
    assignments, problems = read_words(words)
    settings, more = read_settings(assignments)
    raise_together([*problems, *more])
    values = _values(settings)
    device = device or CPU
    model = architecture(settings.model)
    inputs = _inputs(settings, values, model, device, run, overrides)
    number = {name: item.value for name, item in inputs.items()}
    plan_values = {
        field.name: number[field.name]
        for field in dataclasses.fields(DeviceSpeed)
        if field.name in number
    }
    speed = DeviceSpeed(**plan_values, is_accelerator=device != CPU)
    work = Workload(
        batch_size=values["batch_size"],
        group_size=values["rollouts_per_example"],
        prompt_tokens=number["prompt_tokens"],
        completion_tokens=number["completion_tokens"],
        env_s=number["env_s"],
        surplus=number["surplus"],
        trained=number["trained"],
        shares_prompts=values["packing"] and values["share_prompts"],
        computed_tokens=number.get("computed_tokens"),
        length_spread=number["length_spread"],
        most_tokens=_most_tokens(values, number["completion_tokens"]),
    )
    steps_per_batch = values["updates_per_batch"] * values["num_iterations"]
    bound = ROW_TOKENS if speed.is_accelerator else ROW_TOKENS_CPU
    training = Training(
        rank=values["lora_rank"] if values["use_lora"] else None,
        checkpointing=bool(values.get("gradient_checkpointing")),
        extra_forwards=bool(values["beta"])
        + (values["anchor"] == "recomputed" or steps_per_batch > 1),
        row_tokens=values["micro_batch_tokens"]
        or min(bound, values["micro_batch_size"] * values["max_seq_len"]),
        passes=values["num_iterations"],
        steps_per_batch=steps_per_batch,
    )
    placement = Placement(
        trainers=int(number["trainers"]),
        samplers=int(number["samplers"]),
        off_policy=values["max_off_policy_steps"],
        waits=values["stale_policy"] == "wait",
        in_flight=values["max_concurrent"],
        shards=bool(number["shards"]),
        link_bytes_per_s=number["link_bytes_per_s"],
        sync_bytes_per_s=number["sync_bytes_per_s"],
    )
    if work.batch_size % placement.trainers:
        raise ConfigError(
            f"batch_size {work.batch_size} is not divisible by the {placement.trainers} trainers"
        )
    measured = MeasuredSpeed(
        number.get("train_tokens_per_s"), number.get("sampled_tokens_per_s"), number.get("sampled_batch"),
        number.get("sampled_off_policy"), number.get("sync_s"), number.get("other_s", 0.0),
    )  # fmt: skip
    memory = {"trainer": trainer_memory(model, speed, training, placement)}
    if not placement.samplers:
        held = sum(memory["trainer"][name] for name in ("weights", "gradients", "optimizer"))
        share = EMBEDDED_CACHE_SHARE * max(0.0, speed.memory - held)
        cache_bytes = share if speed.is_accelerator else EMBEDDED_CACHE_CPU
        placement = dataclasses.replace(placement, cache_bytes=cache_bytes)
    sampler = sampler_memory(model, speed, work, placement)
    if placement.samplers:
        memory["inference"] = sampler
    else:
        memory["trainer"]["key/value cache"] = sampler["key/value cache"]
    planned = PlannedRun(model, speed, work, training, placement, measured)
    return CapacityPlan(
        settings, device, model, inputs, training, placement, step_time(planned), memory, best_split(planned),
        values["max_steps"],
    )  # fmt: skip


# --- inputs ---------------------------------------------------------------------------------------


def _values(settings: TrainSettings) -> dict[str, Any]:
    """The settings with defaults; those of GRPO derive values from each other, which needs
    transformers."""
    if settings.algorithm == "rl":
        recipe = recipes.settings_of(settings.config.get("recipe"))
        return {**dataclasses.asdict(Settings()), **recipe, **settings.config}
    from verifiers_trainer.grpo import GRPOConfig

    config = GRPOConfig(**settings.config)
    raise_together(config.problems())
    return {name: getattr(config, name) for name in field_names()}


def _inputs(
    settings: TrainSettings,
    values: Mapping[str, Any],
    model: Architecture,
    device: str,
    run: str | None,
    overrides: Sequence[str],
) -> dict[str, PlanInput]:
    """Every number, the later origin before the earlier: assumed, data sheet, setting, measured,
    given."""
    inputs = {name: PlanInput(value, ASSUMED) for name, value in _assumed(values).items()}
    inputs |= {
        name: PlanInput(value, origin)
        for name, (value, origin) in _of_device(device, model).items()
    }
    for side, name in (("trainer", "trainers"), ("inference", "samplers")):
        if side in settings.gpus and device != CPU:
            inputs[name] = PlanInput(settings.gpus[side], "setting")
    overridden = {name: PlanInput(value, "given") for name, value in _overrides(overrides).items()}
    if run is not None:
        placed = {**inputs, **overridden}
        counts = [
            int(placed[f"run_{n}"].value if f"run_{n}" in overridden else placed[n].value)
            for n in SIDES
        ]
        inputs |= {
            name: PlanInput(value, MEASURED) for name, value in read_run(Path(run), *counts).items()
        }
    return inputs | overridden


SIDES = ("trainers", "samplers")
OVERHEADS = ("decode_overhead_s", "token_overhead_s", "row_overhead_s")


def _bounds(values: Mapping[str, Any]) -> tuple[float, float, float]:
    """(assumed tokens of a prompt, most sampled tokens of a turn, of a rollout)."""
    longest = values["max_seq_len"]
    prompt = min(values["max_prompt_len"] or longest, longest / 4)
    turn = min(
        bound
        for bound in (values["max_tokens"], values["max_completion_len"], longest - prompt)
        if bound
    )
    return prompt, turn, longest - prompt


def _most_tokens(values: Mapping[str, Any], completion_tokens: float) -> float:
    """At which a rollout is cut off: the bound on a turn, where one turn may hold the mean of a
    rollout."""
    _, turn, rollout = _bounds(values)
    return turn if completion_tokens <= turn else rollout


def _assumed(values: Mapping[str, Any]) -> dict[str, float]:
    prompt, turn, _ = _bounds(values)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": turn / 2,
        "length_spread": 1.0,
        "env_s": 0.0,
        "surplus": 1.5 if values["zero_variance"] == "drop" else 1.0,
        "trained": 1.0,
        **_defaults(DeviceSpeed, "utilisation", "bandwidth_share", *OVERHEADS),
        **_defaults(Placement, "link_bytes_per_s", "sync_bytes_per_s"),
        "trainers": 1,
        "samplers": 0,
        "shards": 0,
    }


def _defaults(kind: type[DeviceSpeed] | type[Placement], *names: str) -> dict[str, float]:
    return {field.name: field.default for field in dataclasses.fields(kind) if field.name in names}  # type: ignore[misc]


def _of_device(name: str, model: Architecture) -> dict[str, tuple[float, str]]:
    if name == CPU:
        if hasattr(os, "sysconf"):
            memory = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
        else:
            memory = 16e9
        speeds = {"flops": 2e11, "bytes_per_s": 2e10}
        overheads = {
            "decode_overhead_s": CPU_LAYER_S * model.layers,
            "token_overhead_s": CPU_TOKEN_S,
        }
        return {key: (value, ASSUMED) for key, value in (speeds | overheads).items()} | {
            "memory": (memory, "machine")
        }
    if counted := re.fullmatch(r"(\d+) ?[x×] ?(.+)", name, re.IGNORECASE):
        number, device = counted.groups()
        raise ConfigError(
            f"--plan-on names one device, not {name!r}: --plan-on {device!r} --plan-with"
            f" trainers={number}"
        )
    if (sheet := sheet_of(name)) is None:
        names = ", ".join((*DATA_SHEETS, CPU))
        raise ConfigError(
            f"--plan-on: there is no data sheet of {name!r}; give one of {names}, and --plan-with"
            " flops=…"
        )
    numbers = {"flops": sheet.flops, "bytes_per_s": sheet.bytes_per_s, "memory": sheet.memory}
    return {key: (value, "data sheet") for key, value in numbers.items()} | {
        "samplers": (1, ASSUMED)
    }


def _overrides(words: Sequence[str]) -> dict[str, float]:
    numbers = {}
    for word in words:
        name, _, text = word.partition("=")
        if name not in MEANINGS:
            raise ConfigError(
                f"--plan-with: there is no input {name!r}{closest(name, MEANINGS)}:"
                f" {', '.join(MEANINGS)}"
            )
        try:
            numbers[name] = float(text)
        except ValueError:
            raise ConfigError(f"--plan-with {word}: {text!r} is not a number") from None
        least = 0 if name in ZERO_ALLOWED else 1 if name.endswith("trainers") else 1e-12
        if not least <= numbers[name] < math.inf:
            raise ConfigError(f"--plan-with {word}: {name} must be at least {least:g}")
    return numbers


ZERO_ALLOWED = frozenset(
    [
        *"length_spread env_s samplers run_samplers shards sync_s other_s prompt_tokens".split(),
        *OVERHEADS,
    ]
)


def read_run(folder: Path, trainers: int = 1, samplers: int = 0) -> dict[str, float]:
    """Return the inputs that an earlier run measured: its batches after the first, which warms up.

    Without inference devices of its own, a run generates while the trainer waits; with them, all
    the time when it had to wait at all, and otherwise at least as fast. *Raises* ``ConfigError``
    for a folder without two batches.
    """
    path = folder if folder.suffix == ".jsonl" else folder / METRICS
    batches = _batches(read_metrics(path))[1:] if path.is_file() else []
    if not batches:
        raise ConfigError(f"--plan-from: {path} has no two batches of a training run")
    steps = [row for batch in batches for row in batch.steps]
    count = len(batches)

    def total(name: str) -> float:
        return sum(row.get(name) or 0.0 for row in steps)

    def computed(rows: Sequence[Mapping[str, float]]) -> float:  # by one trainer
        return sum(row["throughput/train_tokens_per_s"] * row["time/train"] for row in rows)

    step = total("time/step") - total("time/checkpoint") - total("time/eval")
    train = total("time/train")
    wait, sync = total("time/wait_generation"), total("time/sync")
    sampled_s = step - sync if samplers else wait
    listed = sum(batch.listed for batch in batches)
    generated = sum(batch.generated for batch in batches)
    size = sum(batch.size for batch in batches)
    trained = sum(batch.total("rollouts/trained") for batch in batches)
    completion = sum(batch.total("tokens/completion") for batch in batches) / listed
    numbers = {
        "prompt_tokens": sum(batch.total("tokens/prompt") for batch in batches) / listed,
        "completion_tokens": completion,
        "surplus": generated / size,
        "trained": trained / size,
        "computed_tokens": (
            trainers * sum(computed(batch.first_pass) for batch in batches) / trained
        ),
        "train_tokens_per_s": computed(steps) / train,
        "sync_s": sync / count,
        "other_s": max(0.0, step - wait - train - sync) / count,
    }
    longest = (
        sum(max(row.get("tokens/longest") or 0.0 for row in batch.first_pass) for batch in batches)
        / count
    )
    if longest and (excess := longest_excess(listed / count)):
        numbers["length_spread"] = max(0.0, longest / completion - 1) / excess
    if sampled_s > 0:
        numbers["sampled_tokens_per_s"] = generated * completion / sampled_s / max(1, samplers)
        numbers["sampled_batch"] = size / count
        ages = [age for row in steps if (age := row.get("staleness/max")) is not None]
        if ages:
            numbers["sampled_off_policy"] = max(ages)
    return numbers


@dataclass(frozen=True, slots=True)
class _MeasuredBatch:
    """The lines of a batch's optimizer steps in ``metrics.jsonl``."""

    steps: list[dict[str, Any]]
    unlisted: float
    """Rollouts of batches without any signal before it, which no step lists."""

    @property
    def first_pass(self) -> list[dict[str, Any]]:
        """Steps that train each rollout once; later passes repeat their numbers."""
        return [row for row in self.steps if row.get("batch/pass", 1) == 1]

    def total(self, name: str) -> float:
        """The sum over the batch's rollouts, trained or dropped."""
        return sum(row.get(name) or 0.0 for row in self.first_pass)

    @property
    def listed(self) -> float:
        """Rollouts that the numbers are about."""
        return self.total("rollouts/generated")

    @property
    def group_size(self) -> float:
        return self.listed / (self.total("groups/live") + self.total("groups/dead"))

    @property
    def generated(self) -> float:
        """Rollouts that were generated for the batch, those that became too old and batches without
        signal included."""
        return (
            self.listed
            + self.unlisted
            + self.group_size * (self.steps[0].get("groups/dropped_stale") or 0)
        )

    @property
    def size(self) -> float:
        """``batch_size`` of the run, of which a short batch has a part."""
        in_batch = self.listed - self.group_size * self.total("groups/backfilled")
        return in_batch / self.steps[0].get("batch/fill", 1.0)


def _batches(rows: Sequence[dict[str, Any]]) -> list[_MeasuredBatch]:
    batches: list[_MeasuredBatch] = []
    unlisted = 0.0
    for row in rows:
        unlisted = row.get("dead/rollouts", unlisted)  # counts on until a batch has a signal
        if "time/train" in row and row.get("batch/step", 1) == 1:
            batches.append(_MeasuredBatch([row], unlisted))
            unlisted = 0.0
        elif "time/train" in row and batches:
            batches[-1].steps.append(row)
    return batches


# --- the model ------------------------------------------------------------------------------------


def architecture(name: str) -> Architecture:
    """Return the sizes of a model by its name, from its ``config.json``.

    *Raises* ``ConfigError`` for a model whose file is not on this machine, and for a model
    with experts.
    """
    if name == builtin_models.TINY:
        sizes = {
            key: parameter.default
            for key, parameter in inspect.signature(
                builtin_models.build_tiny_model
            ).parameters.items()
        }
        hidden, heads = sizes["hidden"], sizes["heads"]
        num_tokens = builtin_models.NUM_TINY_TOKENS
        return Architecture(
            sizes["layers"],
            hidden,
            2 * hidden,
            heads,
            heads,
            hidden // heads,
            num_tokens,
            qk_norm=True,
        )
    if name == builtin_models.SMOLLM2:
        return SMOLLM2_SIZES
    path = Path(name).expanduser() / "config.json"
    if not path.is_file() and (cached := _cached(name)):
        path = cached
    if not path.is_file():
        raise ConfigError(f"--plan reads the model's config.json, and there is none of {name!r} on this machine; "
                          f"`hf download {name} config.json` fetches it")  # fmt: skip
    try:
        config = read_json(path)
        return _sizes(config.get("text_config", config))
    except (AttributeError, OSError, TypeError, ValueError) as error:
        raise ConfigError(f"{path} is no model's configuration: {error}") from error
    except KeyError as error:
        raise ConfigError(
            f"{path} has no {error.args[0]}: --plan knows dense decoders alone"
        ) from error


def _cached(name: str) -> Path | None:
    from huggingface_hub import try_to_load_from_cache

    try:
        hit = try_to_load_from_cache(name, "config.json")
    except ValueError:  # not a hub id
        return None
    return Path(hit) if isinstance(hit, str) else None


def _sizes(config: Mapping[str, Any]) -> Architecture:
    if experts := next(
        (key for key in config if "num" in key and "experts" in key and config[key]), None
    ):
        raise ConfigError(
            f"--plan knows dense models alone, and this one has {experts} = {config[experts]}"
        )
    heads, kind = config["num_attention_heads"], config.get("model_type", "")
    return Architecture(
        layers=config["num_hidden_layers"],
        width=config["hidden_size"],
        mlp_width=config["intermediate_size"],
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_width=config.get("head_dim") or config["hidden_size"] // heads,
        vocabulary=config["vocab_size"],
        tied=bool(config.get("tie_word_embeddings", False)),
        qk_norm=kind.startswith("qwen3"),
        qkv_bias=kind.startswith("qwen2"),
    )


# --- the table ------------------------------------------------------------------------------------


def plan_text(plan: CapacityPlan) -> str:
    """Return the plan as the command prints it."""
    lines = [
        f"model        {plan.settings.model}: {_count(plan.model.parameters)} parameters",
        "",
        "INPUTS",
    ]
    listed_inputs = {
        name: plan.inputs[name] for name in MEANINGS if name in plan.inputs.keys() - _unused(plan)
    }
    for name, item in listed_inputs.items():
        lines.append(f"  {name:<21} {_number(item.value):>10}  {item.origin:<10}  {MEANINGS[name]}")
    time, placement = plan.time, plan.placement
    overlap = (
        "at the same time" if placement.samplers and placement.off_policy else "one after the other"
    )
    where = f"{placement.samplers} for inference, {placement.trainers} for training" if placement.samplers else (
        f"{placement.trainers}, the first one also for inference")  # fmt: skip
    lines += [
        "",
        f"EXPECTED on {plan.device}, devices: {where}",
        f"  generation   {_seconds(time.generate_s):>9}   {_count(time.sampled_tokens_per_s)}"
        " sampled tokens/s"
        + (
            f", {time.concurrent:.0f} rollouts decode together on a device"
            if time.concurrent
            else ""
        ),
        (
            f"  training     {_seconds(time.train_s):>9}   of it the exchange of gradients"
            f" {_seconds(time.exchange_s)}"
        ),
        f"  weight sync  {_seconds(time.sync_s):>9}",
        f"  other        {_seconds(time.other_s):>9}",
        f"  batch        {_seconds(time.step_s):>9}   generation and training {overlap}",
    ]
    batches = math.ceil(plan.max_steps / plan.training.steps_per_batch)
    if plan.max_steps > 0:
        lines.append(f"  run          {_seconds(time.step_s * batches):>9}   {batches} batches")
    for side, parts in plan.memory.items():
        listed = ", ".join(f"{name} {_gigabytes(size)}" for name, size in parts.items())
        fits = "" if sum(parts.values()) <= 0.9 * plan.inputs["memory"].value else "   DOES NOT FIT"
        lines.append(
            f"  memory of a device ({side}): {_gigabytes(sum(parts.values()))} ({listed}){fits}"
        )
    lines += ["", f"bottleneck: {time.bottleneck}"]
    split, best = plan.best
    if placement.samplers and split != placement:
        lines.append(
            f"faster with the same devices: {split.samplers} for inference and {split.trainers} for"
            f" training, {_seconds(best.step_s)} a batch"
        )
    origins = [listed_input.origin for listed_input in listed_inputs.values()]
    if num_assumed := origins.count(ASSUMED):
        measures = "" if MEASURED in origins else "--plan-from RUN measures most of them, "
        lines.append(
            f"{num_assumed} inputs are assumed: {measures}--plan-with NAME=VALUE gives them"
        )
    return "\n".join(lines)


def _unused(plan: CapacityPlan) -> set[str]:
    """Inputs that do not enter this plan, since others replace them."""
    unused = {"run_trainers", "run_samplers"}
    is_measured = {
        name: name in plan.inputs
        for name in ("train_tokens_per_s", "sampled_tokens_per_s", "sync_s")
    }
    is_fixed = is_measured["sampled_tokens_per_s"] and "sampled_batch" not in plan.inputs
    if is_fixed:
        unused |= {"env_s", "bandwidth_share", "decode_overhead_s", "token_overhead_s"}
    if is_measured["train_tokens_per_s"]:
        unused |= {"row_overhead_s"}
    if is_measured["train_tokens_per_s"] and is_fixed:
        unused |= {"flops", "bytes_per_s", "utilisation"}
    if is_measured["sync_s"] or not plan.placement.samplers:
        unused |= {"sync_bytes_per_s"}
    if plan.placement.trainers == 1:
        unused |= {"link_bytes_per_s", "shards"}
    if plan.device != CPU:
        unused |= {"token_overhead_s"} - {
            name for name, item in plan.inputs.items() if item.origin == "given"
        }
    return unused


def _number(value: float) -> str:
    return f"{value:,.0f}" if 100 <= value < 1e6 else f"{value:.3g}"


def _count(value: float) -> str:
    for size, unit in ((1e9, " billion"), (1e6, " million")):
        if value >= size:
            return f"{value / size:.2f}{unit}"
    return f"{value:,.0f}"


def _seconds(value: float) -> str:
    if value >= 5400:
        return f"{value / 3600:.1f} h"
    return f"{value / 60:.1f} min" if value >= 120 else f"{value:.3g} s"


def _gigabytes(size: float) -> str:
    return f"{size / 1e9:.2g} GB" if size < 1e10 else f"{size / 1e9:.0f} GB"
