"""``TrainSettings`` as TOML in the canonical format: reading it back gives the same settings."""

from __future__ import annotations

import dataclasses
import datetime
import enum
import json
import re
from collections.abc import Mapping
from typing import Any

from transformers import TrainingArguments

from verifiers_trainer.cli.settings import TrainSettings
from verifiers_trainer.config import RLConfig

SHARED = (
    *("learning_rate", "lr_scheduler_type", "warmup_steps", "max_steps", "max_grad_norm", "seed"),
    *("save_steps", "eval_strategy", "eval_steps"),
)
"""Fields of transformers whose defaults are worth seeing."""
SECRET = ("hub_token",)
PART_OF_BATCH_SIZE = ("gradient_accumulation_steps", "per_device_train_batch_size")


def to_toml(settings: TrainSettings, config: RLConfig) -> str:
    """The run in full: what was given, then what follows for every field that was not. Secrets are left out.

    ``output_dir`` is there when it was given, or when no ``run_name`` leads to it again.
    """
    given = {name: value for name, value in settings.config.items() if name not in SECRET}
    if settings.algorithm != "rl":  # said in the terms of RLConfig, where batch_size is all the rollouts of a step
        config = config.private_copy()
        config.problems(config.world_size)
        given = {name: _plain(getattr(config, name)) for name in given if name not in PART_OF_BATCH_SIZE}
    filled = {name: _plain(getattr(config, name)) for name in _shown_fields() if name not in given}
    if "run_name" not in given:
        filled["output_dir"] = config.output_dir
    document = {
        "model": settings.model,
        "env": {"id": settings.env_id, "args": dict(settings.env_args)},
        "trainer": {"args": given | {name: value for name, value in filled.items() if value is not None}},
    }
    return write_toml(document)


def _shown_fields() -> list[str]:
    inherited = {field.name for field in dataclasses.fields(TrainingArguments)}
    return [f.name for f in dataclasses.fields(RLConfig) if f.init and (f.name in SHARED or f.name not in inherited)]


def _plain(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        return value.value
    return getattr(value, "__name__", value)  # a function is its name


def write_toml(document: Mapping[str, Any]) -> str:
    """A TOML document: plain keys first, then one table per nested mapping; mappings inside tables' values inline.

    >>> print(write_toml({"model": "x", "env": {"id": "y", "args": {"a": [1, 2.5]}}}), end="")
    model = "x"
    <BLANKLINE>
    [env]
    id = "y"
    <BLANKLINE>
    [env.args]
    a = [1, 2.5]
    """
    return "\n".join(_tables(document, ())).lstrip("\n") + "\n"


def _tables(table: Mapping[str, Any], above: tuple[str, ...]) -> list[str]:
    nested = {key: value for key, value in table.items() if isinstance(value, Mapping) and len(above) < 2}
    lines = [f"{_key(key)} = {_value(value)}" for key, value in table.items() if key not in nested]
    if above and lines:
        lines = ["", f"[{'.'.join(map(_key, above))}]", *lines]
    for key, value in nested.items():
        lines += _tables(value, (*above, key))
    return lines


def _key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _text(key)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, datetime.datetime | datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{_key(key)} = {_value(member)}" for key, member in value.items()) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_value, value)) + "]"
    raise TypeError(f"TOML has no {type(value).__name__}")


def _text(text: str) -> str:
    """A basic string: JSON's escapes are TOML's, except that TOML also wants DEL escaped."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
