"""``vf-train @ FILE --plan``: what a run will take, from its file and its model's ``config.json``,
without torch.

Every input has an origin: a setting, the model, a data sheet, an earlier run, a value that the
caller gives, or an assumption. ``throughput`` has the arithmetic of time and memory.
"""

from __future__ import annotations

import dataclasses
import importlib.util
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
from verifiers_trainer.cli.settings import TrainSettings, read_settings
from verifiers_trainer.cli.sources import read_words
from verifiers_trainer.cli.throughput import (
    USABLE,
    PlannedRun,
    StepTime,
    best_split,
    exchange,
    memory,
    step_time,
    sync_bytes,
)
from verifiers_trainer.distributed.devices import DATA_SHEETS, sheet_of
from verifiers_trainer.policy import builtin_models
from verifiers_trainer.policy.adapter_files import adapter_folder, base_quantization, read_adapter
from verifiers_trainer.policy.sizes import Architecture
from verifiers_trainer.run.metrics_files import METRICS, read_metrics
from verifiers_trainer.settings import recipes
from verifiers_trainer.settings.fields import Settings, field_names

CPU = "cpu"
CPU_LAYER_S, CPU_TOKEN_S = 1.7e-4, 1.5e-4
"""Overhead of a decoding step for each layer, and of a sampled token, on a CPU: measured, see
docs/reference/measured-plans.md."""
SMOLLM2_SIZES = Architecture(30, 576, 1536, 9, 3, 64, 49152)
MEANINGS = {
    "prompt_tokens": "tokens of a rollout's prompt",
    "completion_tokens": "sampled tokens of a rollout, over all turns",
    "longest_tokens": "sampled tokens of a batch's longest rollout",
    "context_tokens": "tokens of a rollout that its teacher reads, and the policy does not",
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
    "flash": "1: FlashAttention, so that rows hold micro_batch_size x max_seq_len",
    "link_bytes_per_s": "of a device to the other trainers, and to the servers over NCCL",
    "call_s": "seconds of a collective beside its bytes",
    "sync_bytes_per_s": "of weights that pass through files",
    "train_tokens_per_s": "computed tokens of one trainer process",
    "sampled_tokens_per_s": "of one inference device",
    "sync_s": "seconds in which a batch's weights are pushed",
    "other_s": "seconds of a step that are none of the above",
    "trainers": "processes that train",
    "samplers": "inference devices; 0: the embedded engine on the first trainer's",
    "shared": "1: vLLM serves on the trainer's device",
    "run_trainers": "processes that trained the earlier run",
    "run_samplers": "inference devices of the earlier run",
    "roles": "trained roles, with an adapter each",
    "shards": "1: weights and optimizer are divided among the trainers (FSDP2, ZeRO-3)",
}
"""Names of ``--plan-with``."""
FORMER = {
    "length_spread": "longest_tokens says how long a batch's longest rollout is",
    "sampled_batch": "a measured speed is that of every batch size",
    "sampled_off_policy": "a measured speed is that of every lag",
}
"""Names that ``--plan-with`` had -> what replaced them."""
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
    inputs: Mapping[str, PlanInput]
    run: PlannedRun

    @property
    def time(self) -> StepTime:
        return step_time(self.run)

    @property
    def memory(self) -> dict[str, dict[str, float]]:
        """Bytes: device -> what holds them."""
        return memory(self.run)

    @property
    def fits(self) -> bool:
        return fits(self.run)

    def to_dict(self) -> dict[str, object]:
        """Return the object of ``--json``."""
        run, time, fastest = self.run, dataclasses.asdict(self.time), best_split(self.run)
        parts = ("step_s", "generate_s", "train_s", "sync_s", "bottleneck")
        return {
            "inputs": {name: dataclasses.asdict(item) for name, item in self.inputs.items()},
            **{name: time[name] for name in parts},
            "sync": {"method": run.sync, "bytes": sync_bytes(run)},
            "exchange": dataclasses.asdict(exchange(run)),
            "longest_row": run.longest_row,
            "memory": self.memory,
            "fits": self.fits,
            "remedies": [] if self.fits else remedies(run),
            "fastest": {"trainers": fastest.trainers, "samplers": fastest.samplers},
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
    values, device = _values(settings), device or CPU
    model = architecture(_base_of(settings.model, values))
    inputs = _inputs(settings, values, model, device, run, overrides)
    numbers = {name: item.value for name, item in inputs.items()}
    planned = PlannedRun(model, values, numbers, settings.server_args, device != CPU)
    if values["batch_size"] % planned.trainers:
        raise ConfigError(
            f"batch_size {values['batch_size']} is not divisible by the {planned.trainers} trainers"
        )
    return CapacityPlan(settings, device, inputs, planned)


# --- what would fit -------------------------------------------------------------------------------


def fullest(run: PlannedRun) -> float:
    """Bytes on the fullest device."""
    return max(sum(parts.values()) for parts in memory(run).values())


def fits(run: PlannedRun) -> bool:
    return fullest(run) <= USABLE * run.inputs["memory"]


def remedies(run: PlannedRun) -> list[str]:
    """Changes with which the run fits, each with the bytes that the fullest device then holds:
    those that suffice alone, else settings together; empty where even these do not."""
    changes = _changes(run)
    alone = [next((pair for pair in kind if fits(pair[1])), None) for kind in changes]
    if any(alone):
        return [f"{pair[0]}: {_gigabytes(fullest(pair[1]))}" for pair in alone if pair]
    names: list[str] = []
    for number in range(NUM_SETTINGS):
        for name, changed in _changes(run)[number]:
            if not fits(run) and fullest(changed) < fullest(run):
                names, run = [*(n for n in names if n[:9] != name[:9]), name], changed
    return [f"{' and '.join(names)}: {_gigabytes(fullest(run))}"] if fits(run) else []


NUM_SETTINGS = 6
"""Kinds of ``_changes`` that are settings, in the order in which they cost least."""


def _changes(run: PlannedRun) -> list[list[tuple[str, PlannedRun]]]:
    """(what is changed, the run with it) of every kind, in the order in which they are tried."""

    def with_setting(name: str, *values: object) -> list[tuple[str, PlannedRun]]:
        return [
            (
                f"{name} = {str(value).lower()}",
                dataclasses.replace(run, values={**run.values, name: value}),
            )
            for value in values
        ]

    def with_flag(name: str, *values: float) -> list[tuple[str, PlannedRun]]:
        return [
            (
                f"inference.args.{name} = {value}",
                dataclasses.replace(run, server={**run.server, name: value}),
            )
            for value in values
        ]

    def with_inputs(name: str, **values: float) -> tuple[str, PlannedRun]:
        return name, dataclasses.replace(run, inputs={**run.inputs, **values})

    longest, trainers = run.values["max_seq_len"], run.trainers
    changes = [
        with_setting("gradient_checkpointing", True),
        with_setting("micro_batch_tokens", run.longest_rollout),
        with_setting("beta", *[0.0] * run.has_reference_copy),
        with_setting("use_lora", True),
        with_setting("quantize", *["nf4"] * (run.rank is not None)),
        with_setting("max_seq_len", *(longest // 2**k for k in range(1, 9) if longest >> k >= 256)),
    ]
    if not run.is_accelerator:
        return changes
    counts = [n for n in (2, 4, 8, 16, 32) if n > trainers and not run.values["batch_size"] % n]
    sharded = "trainer.gpus = {} with FSDP2 (configs/fsdp2.yaml)"
    changes.append([with_inputs(sharded.format(n), shards=1, trainers=n) for n in counts])
    if run.server_share or not run.samplers:
        changes.append([with_inputs("inference.gpus = 1 for vLLM", shared=0, samplers=1)])
    if run.server_share:
        shares = [n / 10 for n in range(9, 0, -1) if n / 10 < run.server_share]
        changes.append(with_flag("gpu_memory_utilization", *shares))
    elif run.samplers:
        changes.append(with_flag("tensor_parallel_size", 2, 4, 8))
    sheets = sorted(DATA_SHEETS.items(), key=lambda item: item[1].memory)
    changes.append([with_inputs(f"--plan-on {n!r}", memory=sheet.memory) for n, sheet in sheets])
    return changes


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
    values: Mapping[str, object],
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
    if device != CPU and (flash := _has_flash(values)) is not None:
        inputs["flash"] = PlanInput(*flash)
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


def _has_flash(values: Mapping[str, Any]) -> tuple[bool, str] | None:
    """Whether attention will be FlashAttention: as set, else as the trainer chooses where it is
    installed."""
    if attention := (values["model_init_kwargs"] or {}).get("attn_implementation"):
        return "flash" in attention, "setting"
    if any(map(importlib.util.find_spec, ("flash_attn", "flash_attn_interface"))):
        return True, "machine"
    return None


SIDES = ("trainers", "samplers")
OVERHEADS = ("decode_overhead_s", "token_overhead_s", "row_overhead_s")


def _bounds(values: Mapping[str, Any]) -> tuple[float, float]:
    """(assumed tokens of a prompt, most sampled tokens of a turn)."""
    longest = values["max_seq_len"]
    prompt = min(values["max_prompt_len"] or longest, longest / 4)
    turn = min(
        bound
        for bound in (values["max_tokens"], values["max_completion_len"], longest - prompt)
        if bound
    )
    return prompt, turn


def _assumed(values: Mapping[str, object]) -> dict[str, float]:
    prompt, turn = _bounds(values)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": turn / 2,
        "longest_tokens": turn,
        "context_tokens": 0.0,
        "env_s": 0.0,
        "surplus": 1.5 if values["zero_variance"] == "drop" else 1.0,
        "trained": 1.0,
        "utilisation": 0.35,
        "bandwidth_share": 0.6,
        "decode_overhead_s": 0.005,
        "token_overhead_s": 0.0,
        "row_overhead_s": 0.03,
        "link_bytes_per_s": 100e9,
        "call_s": 5e-5,
        "sync_bytes_per_s": 1e9,
        "trainers": 1,
        "samplers": 0,
        "shards": 0,
        "shared": 0,
        "flash": 0,
        "roles": 2 if values["lora_per_role"] else 1,
    }


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
        if name in FORMER:
            raise ConfigError(f"--plan-with: {name} is no input any more: {FORMER[name]}")
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
        *"env_s samplers run_samplers shards shared flash sync_s call_s other_s".split(),
        *"prompt_tokens longest_tokens context_tokens".split(),
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
    longest = sum(
        max(row.get("tokens/longest") or 0.0 for row in batch.first_pass) for batch in batches
    )
    if longest:
        numbers["longest_tokens"] = longest / count
    contexts = [row["teacher/context_tokens"] for row in steps if "teacher/context_tokens" in row]
    if contexts:
        numbers["context_tokens"] = sum(contexts) / len(contexts)
    if sampled_s > 0:
        numbers["sampled_tokens_per_s"] = generated * completion / sampled_s / max(1, samplers)
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


def _base_of(name: str, values: dict[str, object]) -> str:
    """The base of a saved adapter that the run continues, whose rank becomes that of ``values``;
    of any other model itself."""
    folder = adapter_folder(name)
    if folder is None:
        return name
    described = read_adapter(folder)
    if not values["merge_adapter"]:
        quantize = values["quantize"] or base_quantization(folder)
        rank = described.get("r") or values["lora_rank"]
        values |= {"use_lora": True, "lora_rank": rank, "quantize": quantize}
    return str(described["base_model_name_or_path"])


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
        config = config.get("text_config", config)
        for key in config:
            if "num" in key and "experts" in key and config[key]:
                raise ConfigError(
                    f"--plan knows dense models alone, and this one has {key} = {config[key]}"
                )
        return Architecture.of(config)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
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


# --- the table ------------------------------------------------------------------------------------


def plan_text(plan: CapacityPlan) -> str:
    """Return the plan as the command prints it."""
    run, time, moved = plan.run, plan.time, exchange(plan.run)
    listed = {name: plan.inputs[name] for name in MEANINGS if name in plan.inputs}
    for name in _unused(plan):
        listed.pop(name, None)
    together = f", {time.concurrent:.0f} rollouts decode together on a device"
    calls = f"{moved.reductions} reductions" + f", {moved.gathers} gathers" * bool(moved.gathers)
    between = f"{_gigabytes(moved.gathered + moved.reduced)} to each in {calls}"
    pushed = f"{_gigabytes(sync_bytes(run))} by {run.sync}"
    lines = [
        f"model        {plan.settings.model}: {_count(run.model.parameters)} parameters",
        "",
        "INPUTS",
        *(
            f"  {name:<21} {_number(item.value):>10}  {item.origin:<10}  {MEANINGS[name]}"
            for name, item in listed.items()
        ),
        "",
        f"EXPECTED on {plan.device}, devices: {_devices(run)}",
        f"  generation   {_seconds(time.generate_s):>9}   {_count(time.sampled_tokens_per_s)}"
        f" sampled tokens/s{together * bool(time.concurrent)}",
        f"  training     {_seconds(time.train_s):>9}   of it the exchange between trainers"
        f" {_seconds(time.exchange_s)}: {between}",
        f"  weight sync  {_seconds(time.sync_s):>9}   {pushed * (run.sync != 'shared')}".rstrip(),
        f"  other        {_seconds(time.other_s):>9}",
        f"  batch        {_seconds(time.step_s):>9}   generation and training"
        f" {'at the same time' if run.overlaps else 'one after the other'}",
    ]
    batches = math.ceil(run.values["max_steps"] / run.steps_per_batch)
    if batches > 0:
        lines.append(f"  run          {_seconds(time.step_s * batches):>9}   {batches} batches")
    room = USABLE * run.inputs["memory"]
    for side, parts in plan.memory.items():
        held = ", ".join(f"{name} {_gigabytes(size)}" for name, size in parts.items())
        row = f", a row of {run.longest_row:,} tokens" * (side == "trainer")
        total = sum(parts.values())
        fault = "   DOES NOT FIT" * (total > room)
        lines.append(f"  memory of a device ({side}{row}): {_gigabytes(total)} ({held}){fault}")
    lines += ["", f"bottleneck: {time.bottleneck}"]
    if not plan.fits:
        limit = f"{_gigabytes(room)}, {USABLE:.0%} of a device"
        changes = remedies(run) or ["no setting: choose a smaller model or a larger device"]
        lines += ["", f"It would fit ({limit}) with", *(f"  {change}" for change in changes)]
    best = best_split(run)
    if run.samplers and best.trainers != run.trainers:
        lines.append(
            f"faster with the same devices: {best.samplers} for inference and {best.trainers} for"
            f" training, {_seconds(step_time(best).step_s)} a batch"
        )
    origins = [item.origin for item in listed.values()]
    if num_assumed := origins.count(ASSUMED):
        measures = "" if MEASURED in origins else "--plan-from RUN measures most of them, "
        lines.append(
            f"{num_assumed} inputs are assumed: {measures}--plan-with NAME=VALUE gives them"
        )
    return "\n".join(lines)


def _devices(run: PlannedRun) -> str:
    if run.server_share:
        return f"{run.trainers}, and {run.server_share:.0%} of the first one's memory for vLLM"
    if run.samplers:
        return f"{run.samplers} for inference, {run.trainers} for training"
    return f"{run.trainers}, the first one also for inference"


def _unused(plan: CapacityPlan) -> set[str]:
    """Inputs that do not enter this plan, since others replace them."""
    run, x = plan.run, plan.run.inputs
    decoding = {"env_s", "bandwidth_share", "longest_tokens", *OVERHEADS[:2]}
    is_measured = {"train_tokens_per_s", "sampled_tokens_per_s"} <= x.keys()
    is_single = run.trainers == 1
    unused = {
        "run_trainers run_samplers": True,
        " ".join(decoding): "sampled_tokens_per_s" in x,
        "row_overhead_s": "train_tokens_per_s" in x,
        "flops bytes_per_s utilisation": is_measured,
        "sync_bytes_per_s": "sync_s" in x or run.sync not in ("lora_dir", "reload"),
        "call_s shards": is_single,
        "link_bytes_per_s": is_single and run.sync != "nccl",
        "token_overhead_s": run.is_accelerator and not x["token_overhead_s"],
        "flash shared": not run.is_accelerator,
        "roles": not run.values["lora_per_role"],
        "context_tokens": not run.teaches_itself or "train_tokens_per_s" in x,
    }
    return {name for names, is_unused in unused.items() if is_unused for name in names.split()}


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
