"""The files of a saved adapter, read without torch; ``adapters`` loads it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

from verifiers.errors import ConfigError
from verifiers.runtime.decoding import read_json
from verifiers_trainer.engines.role_client import PREFIX

ADAPTER, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
SETTINGS = {
    "lora_rank": "r",
    "lora_alpha": "lora_alpha",
    "lora_target_modules": "target_modules",
    "lora_modules_to_save": "modules_to_save",
    "lora_use_rslora": "use_rslora",
}
"""Setting -> its name in an adapter's file."""
BASE, NF4 = "base.json", "nf4"
"""A file beside an adapter whose base was in four bits, and the value of ``quantize`` in it."""


def adapter_folder(model: object) -> Path | None:
    """The folder of a saved adapter that ``model`` names; None for anything else."""
    folder = Path(os.path.expanduser(model)) if isinstance(model, str) else None
    return folder if folder is not None and (folder / ADAPTER).is_file() else None


def role_folders(model: object) -> dict[str, Path]:
    """Role -> the folder of its adapter, of a folder that ``model`` names with the adapters of
    roles (``lora_per_role``); empty for anything else."""
    if not isinstance(model, str) or adapter_folder(model) is not None:
        return {}
    folders = sorted(Path(os.path.expanduser(model)).glob(f"{PREFIX}*"))
    return {
        folder.name.removeprefix(PREFIX): folder
        for folder in folders
        if (folder / ADAPTER).is_file()
    }


def require_one_model(model: object) -> None:
    """Raise ``ConfigError`` where ``model`` names a folder of several, the adapters of roles."""
    if roles := role_folders(model):
        raise ConfigError(
            f"{model} has an adapter for each of the roles {', '.join(roles)}, and one model is"
            f" needed here: name the folder of one, such as {next(iter(roles.values()))}"
        )


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


def base_quantization(folder: Path) -> Literal["nf4"] | None:
    """The setting ``quantize`` with which the adapter in ``folder`` was trained.

    *Raises* ``ConfigError`` for a file that says nothing of it.
    """
    path = folder / BASE
    if not path.is_file():
        return None
    try:
        quantize = read_json(path)["quantize"]
    except (KeyError, OSError, TypeError, ValueError):
        quantize = None
    if quantize != NF4:
        raise ConfigError(f"{path} has no quantize = {NF4!r}: correct it, or remove the file")
    return "nf4"


def tokenizer_source(folder: Path) -> str:
    """Where the tokenizer of a saved model is: that of an adapter without one is its base's."""
    adapters = [adapter_folder(str(folder)), *role_folders(str(folder)).values()]
    adapter = next((each for each in adapters if each is not None), None)
    if adapter is None or (folder / "tokenizer_config.json").is_file():
        return str(folder)
    return str(read_adapter(adapter)["base_model_name_or_path"])
