"""Read run files of prime-rl: the three files of 2025, the single file of v0.3 and v0.4, or an
orchestrator file.

Every key is converted to its counterpart or named in the error; none is skipped. A file with a
model and a trainer section but no LoRA table trains all weights, as in prime-rl. Loads no model and
no environment.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verifiers.cli.common.reader import TomlFile
from verifiers.errors import ConfigError
from verifiers_trainer.cli.settings import SAMPLING

WITHOUT = "a key of prime-rl without a counterpart here"
ARGS = ("trainer", "args")
NUMBERS = {
    "max_steps": "max_steps",
    "batch_size": "batch_size",
    "micro_batch_size": "micro_batch_size",
    "seq_len": "max_seq_len",
    "rollouts_per_example": "rollouts_per_example",
    "max_concurrent": "max_concurrent",
    "max_inflight_rollouts": "max_concurrent",
    "group_size": "rollouts_per_example",
    "mask_truncated_completions": "mask_truncated_completions",
    "zero_truncated_completions": "zero_truncated_completions",
    "oversampling_factor": "oversample",
    "max_async_level": "max_off_policy_steps",
}
"""Keys of an orchestrator -> settings; ``max_steps`` and ``seq_len`` are also top-level keys of the
single file."""
OF_THE_RUN = {"rollouts_per_example", "max_concurrent"}
"""Keys of an orchestrator that files of 2025 have in ``[environment.args]``."""
SAMPLED = {name: (*ARGS, name) for name in SAMPLING} | {
    "max_completion_tokens": (*ARGS, "max_tokens")
}
EVALUATION = {
    "interval": "steps",
    "num_examples": "num_examples",
    "rollouts_per_example": "rollouts_per_example",
    "group_size": "rollouts_per_example",
    "eval_base_model": "on_start",
}
"""Keys of ``[orchestrator.eval]`` -> keys of ``[eval]``; all but the first also of its
environment."""
LOSSES = {"default": "ipo", "ipo": "ipo", "grpo": "grpo", "gspo": "gspo", "cispo": "cispo"}
"""``trainer.loss.type`` -> ``loss``."""
OPTIM = {"lr": "learning_rate", "weight_decay": "weight_decay", "max_norm": "max_grad_norm"}
LORA = {
    "rank": "lora_rank",
    "alpha": "lora_alpha",
    "dropout": "lora_dropout",
    "target_modules": "lora_target_modules",
    "modules_to_save": "lora_modules_to_save",
}
PARALLEL = {"tp": "tensor_parallel_size", "dp": "data_parallel_size"}
SERVER = ("gpu_memory_utilization", "enable_lora", "max_lora_rank")
SERVER_MODEL = (
    "enable_auto_tool_choice",
    "tool_call_parser",
    "max_model_len",
    "enforce_eager",
    "dtype",
)
"""Keys of an inference server and of its model that are vLLM flags of the same name."""
IMPLEMENTATIONS = {"liger_kernel": True, "hf": False, "auto": None}
"""``model.impl`` -> ``use_liger``; None leaves the default."""
EVERY_LAYER: tuple[dict[str, Any], ...] = (
    {},
    {"freq": 1},
    {"mode": "full"},
    {"mode": "full", "freq": 1},
)
"""Forms of ``[trainer.model.ac]`` that are ``gradient_checkpointing``."""
GPUS = {"inference_gpu_ids": "inference", "trainer_gpu_ids": "trainer"}
DEPLOYMENT = {"num_infer_gpus": ("inference", "gpus"), "num_train_gpus": ("trainer", "gpus")}
WANDB = ("project", "name")
TOP_LEVEL_KEYS = {
    "environment",
    "orchestrator",
    "optim",
    "parallel",
    "deployment",
    "seq_len",
    "micro_batch_size",
    *GPUS,
}
"""Top-level keys that only files of prime-rl have."""


@dataclass(slots=True)
class _Reading:
    """The document read so far, and the problems of the files."""

    document: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    source: str = ""

    def set(self, path: tuple[str, ...], value: object, key: str) -> None:
        table = self.document
        for name in path[:-1]:
            table = table.setdefault(name, {})
        if table.setdefault(path[-1], value) != value:
            earlier = table[path[-1]]
            self.problems.append(
                f"{self.source}: {key} is {value!r}, but {earlier!r} earlier; give it once"
            )

    def refuse(self, key: str) -> None:
        self.problems.append(f"{self.source}: {key}: {WITHOUT}")


def read(*paths: str | Path) -> dict[str, Any]:
    """Read a run from one file, or from the files of orchestrator, trainer and inference server
    together.

    Returns a document in the canonical format: ``model``, ``env`` (one table, or a list of them),
    ``trainer.args``, ``inference``, ``wandb``; keys that the files do not have are absent. *Raises*
    ConfigError with every key without a counterpart and every contradiction.
    """
    return read_tables(*((str(path), TomlFile.read(path).document) for path in paths))


def read_tables(*files: tuple[str, Mapping[str, object]]) -> dict[str, object]:
    """Read (place, TOML document) pairs; see ``read``."""
    reading = _Reading()
    for source, tables in files:
        reading.source = source
        _read_file(tables, reading)
    _move_to_the_run(reading.document)
    if reading.problems:
        raise ConfigError("\n".join(reading.problems))
    return reading.document


def _read_file(tables: Mapping[str, object], reading: _Reading) -> None:
    """Read a file. *Raises* ConfigError for one that is not of prime-rl."""
    source, num_before = reading.source, len(reading.problems)
    if isinstance(tables.get("model"), str) or isinstance(tables.get("env"), str):
        raise ConfigError(
            f"{source} is a file of vf-train, not of prime-rl, whose model is a table: vf-train @"
            f" {source}"
        )
    before = copy.deepcopy(reading.document)
    try:
        _read_tables(tables, reading)
    except (AttributeError, LookupError, TypeError) as error:
        raise ConfigError(
            f"{source} is no file of prime-rl: a value has another shape"
            f" ({type(error).__name__}: {error})"
        ) from error
    problems = reading.problems[num_before:]
    if problems and reading.document == before and all(p.endswith(WITHOUT) for p in problems):
        reading.problems.insert(
            num_before, f"{source} is perhaps no file of prime-rl: none of its keys counts here"
        )


def _move_to_the_run(document: dict[str, Any]) -> None:
    """Move the keys ``OF_THE_RUN`` from the arguments of the environment, unless the run has its
    own value."""
    environment = document.get("env")
    args = environment["args"] if isinstance(environment, dict) else {}
    for name in OF_THE_RUN & args.keys() - document.get("trainer", {}).get("args", {}).keys():
        document.setdefault("trainer", {}).setdefault("args", {})[name] = args.pop(name)


def is_prime_rl(tables: Mapping[str, object]) -> bool:
    """Return whether a TOML document is a file of prime-rl: its model is a table, or it has a key
    of prime-rl only."""
    model = tables.get("model")
    if model is not None:
        return isinstance(model, Mapping)
    return bool(tables.keys() & TOP_LEVEL_KEYS)


def _read_tables(tables: Mapping[str, Any], reading: _Reading) -> None:
    for key, value in tables.items():
        if key in GPUS:
            reading.set((GPUS[key], "gpus"), len(value), key)
        elif key == "deployment":
            _pick(value, DEPLOYMENT, key, reading)
        elif key == "model" and isinstance(value, Mapping):
            _read_model(value, reading, key)
        elif key == "orchestrator":
            _read_orchestrator(value, reading, "orchestrator.")
        elif key == "trainer":
            _read_trainer(value, reading, "trainer.")
        elif key == "inference":
            _read_inference(value, reading, "inference.")
        elif key == "optim":
            _read_trainer({key: value}, reading, "")
        elif key == "parallel":
            _read_inference({key: value}, reading, "")
        else:
            _read_orchestrator({key: value}, reading, "")
    args = reading.document.get("trainer", {}).get("args", {})
    trains = tables.keys() & {"orchestrator", "trainer", "optim"} and "model" in reading.document
    if trains and "use_lora" not in args:
        # without that table prime-rl trains all weights
        reading.set((*ARGS, "use_lora"), False, "model.lora")


def _read_orchestrator(table: Mapping[str, Any], reading: _Reading, above: str) -> None:
    for key, value in sorted(table.items(), key=lambda item: item[0] == "eval"):  # last: reads env
        if key in NUMBERS:
            reading.set((*ARGS, NUMBERS[key]), value, above + key)
        elif key == "environment":
            reading.set(("env",), _environment(value, reading, above + key), above + key)
        elif key == "env":
            entries = value if isinstance(value, list) else [value]
            tables = [_environment(entry, reading, above + key) for entry in entries]
            reading.set(("env",), tables[0] if len(tables) == 1 else tables, above + key)
        elif key == "train":
            for name in value.keys() - {"env", "sampling"}:
                reading.refuse(f"{above}{key}.{name}")
            _read_orchestrator(
                {k: v for k, v in value.items() if k in ("env", "sampling")},
                reading,
                f"{above}{key}.",
            )
        elif key == "eval" and isinstance(value, Mapping):
            _read_evaluation(value, reading, above + key)
        elif key == "sampling":
            _pick(value, SAMPLED, above + key, reading)
        elif key == "wandb":
            _pick(value, {name: ("wandb", name) for name in WANDB}, above + key, reading)
        elif key == "ckpt":
            _pick(value, {"interval": (*ARGS, "save_steps")}, above + key, reading)
        elif key == "model":
            _read_model(value, reading, above + key)
        elif key != "lora_name":
            # name of the adapter; here adapters are named after policy versions
            reading.refuse(above + key)


def _read_trainer(table: Mapping[str, object], reading: _Reading, above: str) -> None:
    for key, value in table.items():
        if key == "optim":
            _pick(
                value, {name: (*ARGS, ours) for name, ours in OPTIM.items()}, above + key, reading
            )
        elif key == "model":
            _read_model(value, reading, above + key)
        elif key == "loss" and isinstance(value, Mapping):
            _read_loss(value, reading, above + key)
        else:
            reading.refuse(above + key)


def _read_evaluation(table: Mapping[str, object], reading: _Reading, above: str) -> None:
    """Read when, how much and how to evaluate. The environment is the one that trains, and its
    held-out rows."""
    paths = {name: ("eval", ours) for name, ours in EVALUATION.items()}
    tables = table.get("env", [])
    for number, entry in enumerate(tables if isinstance(tables, list) else [tables]):
        environment = _of_taskset(entry)
        trained = reading.document.get("env")
        evaluated = {name: environment.get(name) for name in ("id", "args")}
        if number or not isinstance(trained, dict) or evaluated["id"] not in (None, trained["id"]):
            reading.problems.append(
                f"{reading.source}: {above}.env: a training file evaluates in the environment that"
                " it trains; evaluate in another with vf.RLTrainer(eval_env=…), or its checkpoints"
                " with vf-eval"
            )
            break
        if evaluated["args"] not in (None, trained["args"]):
            reading.refuse(f"{above}.env.args")
        shares = {name: value for name, value in environment.items() if name in EVALUATION}
        _pick(shares, paths, f"{above}.env", reading)
    _pick(
        {name: value for name, value in table.items() if name not in ("env", "sampling")},
        paths,
        above,
        reading,
    )
    sampled = {name: ("eval", "sampling_args", path[-1]) for name, path in SAMPLED.items()}
    _pick(table.get("sampling", {}), sampled, f"{above}.sampling", reading)


def _read_loss(table: Mapping[str, Any], reading: _Reading, above: str) -> None:
    """Read the kind of the loss and its penalty. *Refuses* a function of prime-rl's own form."""
    neutral = {"adv_tau": 1.0, "teacher_tau": 0.0, "type": "default"}
    kind = table.get("type", "default")
    if kind in LOSSES:
        reading.set((*ARGS, "loss"), LOSSES[kind], f"{above}.type")
    else:
        reading.problems.append(
            f"{reading.source}: {above}.type is {kind!r}; it may be {', '.join(LOSSES)}, and a"
            " function of yours is trainer.args.loss = 'module:function'"
        )
    penalty = {"kl_tau": (*ARGS, "loss_kwargs", "log_ratio_penalty")}
    _pick(
        {
            name: value
            for name, value in table.items()
            if name != "type" and neutral.get(name) != value
        },
        penalty if LOSSES.get(kind) == "ipo" else {},
        above,
        reading,
    )


def _read_inference(table: Mapping[str, object], reading: _Reading, above: str) -> None:
    for key, value in table.items():
        if key == "parallel":
            paths = {name: ("inference", "args", flag) for name, flag in PARALLEL.items()}
            _pick(value, paths, above + key, reading)
        elif key == "model":
            _read_model(value, reading, above + key)
        elif key in SERVER:
            reading.set(("inference", "args", key), value, above + key)
        else:
            reading.refuse(above + key)


def _read_model(table: object, reading: _Reading, above: str) -> None:
    """Read a model table: name, adapter, and flags of the server."""
    paths = {"name": ("model",), "seq_len": (*ARGS, "max_seq_len")}
    paths |= {name: ("inference", "args", name) for name in SERVER_MODEL}
    table_left = dict(table) if isinstance(table, Mapping) else table
    if isinstance(table_left, dict):
        if isinstance(older := table_left.get("experimental"), Mapping) and older.keys() == {
            "lora"
        }:
            _read_lora(
                table_left.pop("experimental")["lora"], reading, f"{above}.experimental.lora"
            )
        if "lora" in table_left:
            _read_lora(table_left.pop("lora"), reading, f"{above}.lora")
        if table_left.get("impl") in IMPLEMENTATIONS:
            liger = IMPLEMENTATIONS[table_left.pop("impl")]
            if liger is not None:
                reading.set((*ARGS, "use_liger"), liger, f"{above}.impl")
        if table_left.get("ac", 0) in EVERY_LAYER:
            table_left.pop("ac")
            reading.set((*ARGS, "gradient_checkpointing"), True, f"{above}.ac")
    _pick(table_left, paths, above, reading)


def _read_lora(table: object, reading: _Reading, above: str) -> None:
    reading.set((*ARGS, "use_lora"), True, above)
    _pick(table, {name: (*ARGS, ours) for name, ours in LORA.items()}, above, reading)


def _pick(
    table: object, paths: Mapping[str, tuple[str, ...]], above: str, reading: _Reading
) -> None:
    if not isinstance(table, Mapping):
        reading.problems.append(f"{reading.source}: {above} must be a table, not {table!r}")
        return
    for key, value in table.items():
        if key in paths:
            reading.set(paths[key], value, f"{above}.{key}")
        else:
            reading.refuse(f"{above}.{key}")


def _environment(table: Mapping[str, Any], reading: _Reading, above: str) -> dict[str, Any]:
    """Read ``id``, ``args`` (unchanged) and the name in an ``EnvGroup``."""
    table = _of_taskset(table)
    for key in table.keys() - {"id", "args", "name"}:
        reading.refuse(f"{above}.{key}")
    if "id" not in table:
        reading.problems.append(f"{reading.source}: {above} has no id")
    environment = {"id": table.get("id", ""), "args": dict(table.get("args") or {})}
    return environment | ({"name": table["name"]} if table.get("name") else {})


def _of_taskset(table: Mapping[str, Any]) -> Mapping[str, Any]:
    """A table of an environment with the ``id`` and ``args`` of its taskset, as the current layout
    has them: a name, or a table of the id and the settings."""
    taskset = table.get("taskset")
    if "id" in table or not isinstance(taskset, str | Mapping):
        return table
    settings = {"id": taskset} if isinstance(taskset, str) else dict(taskset)
    above = {name: value for name, value in table.items() if name not in ("taskset", "args")}
    identifier = {"id": settings.pop("id")} if "id" in settings else {}
    args = {**settings, **(table.get("args") or {})}
    return above | identifier | ({"args": args} if args else {})
