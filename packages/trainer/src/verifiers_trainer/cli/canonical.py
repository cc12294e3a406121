"""``TrainSettings`` as TOML in the canonical format: reading it back gives the same settings."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

from transformers import TrainingArguments

from verifiers_trainer.cli.settings import TrainSettings
from verifiers_trainer.cli.toml_text import write_toml
from verifiers_trainer.settings.config import RLConfig

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
        "env": [table.to_dict() for table in settings.mixture]
        or {"id": settings.env_id, "args": dict(settings.env_args)},
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
