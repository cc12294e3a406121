"""The files of a saved adapter, read without torch; ``adapters`` loads it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from verifiers.errors import ConfigError
from verifiers.runtime.decoding import read_json

ADAPTER, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
SETTINGS = {
    "lora_rank": "r",
    "lora_alpha": "lora_alpha",
    "lora_target_modules": "target_modules",
    "lora_modules_to_save": "modules_to_save",
    "lora_use_rslora": "use_rslora",
}
"""Setting -> its name in an adapter's file."""


def adapter_folder(model: object) -> Path | None:
    """The folder of a saved adapter that ``model`` names; None for anything else."""
    folder = Path(os.path.expanduser(model)) if isinstance(model, str) else None
    return folder if folder is not None and (folder / ADAPTER).is_file() else None


def read_adapter(folder: Path) -> dict[str, Any]:
    """The configuration of a saved adapter. *Raises* ``ConfigError`` when it cannot be read or
    names no base, or when the weights are no safetensors: a pickle would be read instead."""
    try:
        described = read_json(folder / ADAPTER)
        base = described["base_model_name_or_path"]
    except (KeyError, OSError, TypeError, ValueError):
        base = None
    if not isinstance(base, str) or not base:
        raise ConfigError(f"{folder / ADAPTER} names no base model (base_model_name_or_path)")
    if not (folder / WEIGHTS).is_file():
        raise ConfigError(f"{folder} has no {WEIGHTS}; save the adapter as safetensors")
    return described


def tokenizer_source(folder: Path) -> str:
    """Where the tokenizer of a saved model is: that of an adapter without one is its base's."""
    if adapter_folder(str(folder)) is None or (folder / "tokenizer_config.json").is_file():
        return str(folder)
    return str(read_adapter(folder)["base_model_name_or_path"])
