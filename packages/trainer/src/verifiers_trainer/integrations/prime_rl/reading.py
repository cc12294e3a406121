"""prime-rl's run files into our document: three files of 2025, one of v0.3 and v0.4, an orchestrator's alone.

Every key has one counterpart, or is named in the error; nothing is skipped. Loads no model and no environment.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verifiers.errors import ConfigError

NUMBERS = {
    "max_steps": "max_steps",
    "batch_size": "batch_size",
    "micro_batch_size": "micro_batch_size",
    "seq_len": "max_seq_len",
    "rollouts_per_example": "rollouts_per_example",
    "mask_truncated_completions": "mask_truncated_completions",
}
"""Keys of an orchestrator -> settings of ours; ``max_steps`` and ``seq_len`` also stand at the top of one file."""
SAMPLING = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty")
PARALLEL = {"tp": "tensor_parallel_size", "dp": "data_parallel_size"}
GPUS = {"inference_gpu_ids": "inference", "trainer_gpu_ids": "trainer"}
WANDB = ("project", "name")


@dataclass(slots=True)
class _Reading:
    """A document in the making, and what of the files has no place in it."""

    document: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    place: str = ""

    def set(self, path: tuple[str, ...], value: Any, key: str) -> None:
        table = self.document
        for name in path[:-1]:
            table = table.setdefault(name, {})
        if table.setdefault(path[-1], value) != value:
            was = table[path[-1]]
            self.problems.append(f"{self.place}: {key} is {value!r}, and was {was!r} before; give it once")

    def refuse(self, key: str) -> None:
        self.problems.append(f"{self.place}: {key}: known to prime-rl, has no counterpart here")


def read(*paths: str | Path) -> dict[str, Any]:
    """The run that one file, or an orchestrator's, a trainer's and an inference server's together, describe.

    A document in the canonical format: ``model``, ``env`` (one table, or a list of them), ``trainer.args``,
    ``inference``, ``wandb``; keys that the files do not have are absent. *Raises* ConfigError that names every key
    without a counterpart and every contradiction.
    """
    files = []
    for path in paths:
        try:
            files.append((str(path), tomllib.loads(Path(path).read_text(encoding="utf-8"))))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise ConfigError(f"{path} cannot be read: {error}", path=str(path)) from error
    return read_tables(*files)


def read_tables(*files: tuple[str, Mapping[str, Any]]) -> dict[str, Any]:
    """As ``read``, of (place, TOML document) pairs."""
    reading = _Reading()
    for place, tables in files:
        reading.place = place
        _read_tables(tables, reading)
    if reading.problems:
        raise ConfigError("\n".join(reading.problems))
    return reading.document


def is_prime_rl(tables: Mapping[str, Any]) -> bool:
    """Whether a TOML document is one of prime-rl's: its model is a table, or it has tables no other format has."""
    model = tables.get("model")
    if model is not None:
        return isinstance(model, Mapping)
    return bool(tables.keys() & {"environment", "orchestrator", *GPUS})


def _read_tables(tables: Mapping[str, Any], reading: _Reading) -> None:
    for key, value in tables.items():
        if key in GPUS:
            reading.set((GPUS[key], "gpus"), len(value), key)
        elif key == "model" and isinstance(value, Mapping):
            _pick(value, {"name": ("model",)}, "model", reading)
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


def _read_orchestrator(table: Mapping[str, Any], reading: _Reading, above: str) -> None:
    for key, value in table.items():
        if key in NUMBERS:
            reading.set(("trainer", "args", NUMBERS[key]), value, above + key)
        elif key == "environment":
            reading.set(("env",), _environment(value, reading, above + key), above + key)
        elif key == "env":
            made = [_environment(entry, reading, above + key) for entry in value]
            reading.set(("env",), made[0] if len(made) == 1 else made, above + key)
        elif key == "sampling":
            _pick(value, {name: ("trainer", "args", name) for name in SAMPLING}, above + key, reading)
        elif key == "wandb":
            _pick(value, {name: ("wandb", name) for name in WANDB}, above + key, reading)
        elif key == "ckpt":
            _pick(value, {"interval": ("trainer", "args", "save_steps")}, above + key, reading)
        elif key == "model":
            _pick(value, {"name": ("model",)}, above + key, reading)
        else:
            reading.refuse(above + key)


def _read_trainer(table: Mapping[str, Any], reading: _Reading, above: str) -> None:
    for key, value in table.items():
        if key == "optim":
            _pick(value, {"lr": ("trainer", "args", "learning_rate")}, above + key, reading)
        elif key == "model":
            _pick(value, {"name": ("model",)}, above + key, reading)
        else:
            reading.refuse(above + key)


def _read_inference(table: Mapping[str, Any], reading: _Reading, above: str) -> None:
    for key, value in table.items():
        if key == "parallel":
            places = {name: ("inference", "args", flag) for name, flag in PARALLEL.items()}
            _pick(value, places, above + key, reading)
        elif key == "model":
            _pick(value, {"name": ("model",)}, above + key, reading)
        else:
            reading.refuse(above + key)


def _pick(table: Any, places: Mapping[str, tuple[str, ...]], above: str, reading: _Reading) -> None:
    if not isinstance(table, Mapping):
        reading.problems.append(f"{reading.place}: {above} must be a table, not {table!r}")
        return
    for key, value in table.items():
        if key in places:
            reading.set(places[key], value, f"{above}.{key}")
        else:
            reading.refuse(f"{above}.{key}")


def _environment(table: Mapping[str, Any], reading: _Reading, above: str) -> dict[str, Any]:
    """``id``, ``args`` as they stand (they are the environment's own), and the name it has in a group."""
    for key in table.keys() - {"id", "args", "name"}:
        reading.refuse(f"{above}.{key}")
    if "id" not in table:
        reading.problems.append(f"{reading.place}: {above} has no id")
    made = {"id": table.get("id", ""), "args": dict(table.get("args") or {})}
    return made | ({"name": table["name"]} if table.get("name") else {})
