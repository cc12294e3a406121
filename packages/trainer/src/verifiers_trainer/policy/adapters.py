"""Saved adapters: reading one with its base model, merging it, and a base that other programs load.

An adapter's file names its base as an absolute folder or as a repository. A base that is in no file
(``builtin:tiny``, a model made in a script) is written beside the run, once.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from verifiers.errors import ConfigError
from verifiers.runtime.decoding import read_json
from verifiers.storage.files import replacing, share_modes
from verifiers_trainer.distributed import fsdp
from verifiers_trainer.policy import builtin_models
from verifiers_trainer.policy.loading import get_model

if TYPE_CHECKING:
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase

ADAPTER, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
BASE = "base-"
"""Beginning of the name of a folder with a written base; a hash of the base follows."""


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


def load_adapter(
    folder: Path,
    *,
    is_trainable: bool = False,
    use_liger: bool = True,
    model_kwargs: dict[str, Any] | None = None,
) -> Any:
    """The base model of a saved adapter with the adapter around it; keywords as in ``get_model``.

    *Raises* ``ConfigError``, which names the adapter's file where its base cannot be loaded.
    """
    from peft import PeftModel

    base = read_adapter(folder)["base_model_name_or_path"]
    try:
        model = get_model(base, use_liger, model_kwargs)
    except ConfigError as error:
        raise ConfigError(
            f"{folder / ADAPTER}: the base model of the adapter: {error} (a relative path is read"
            " from the folder you work in: write the whole path as its base_model_name_or_path)"
        ) from error
    return PeftModel.from_pretrained(model, str(folder), is_trainable=is_trainable)


def merge(model: Any) -> Any:
    """The base of ``model`` with its adapter merged into the weights, in place.

    A head tied to the embeddings is untied where the adapter covers either of them.
    """
    _untie_adapted(model)
    return model.merge_and_unload()


def _untie_adapted(model: Any) -> None:
    """Give each adapted layer weights of its own: merging an adapter into a shared weight would
    change both layers."""
    adapted = [layer for layer in model.modules() if hasattr(layer, "get_base_layer")]
    fsdp.untie(model, [layer.get_base_layer() for layer in adapted])


# --- the base -------------------------------------------------------------------------------------


def make_base_absolute(model: Any) -> None:
    """Name the base of the adapters in ``model`` by its absolute folder, or by its repository."""
    for described in model.peft_config.values():
        name = str(described.base_model_name_or_path or "")
        if name == builtin_models.SMOLLM2:
            described.base_model_name_or_path = str(builtin_models.smollm2_folder())
        elif os.path.isdir(path := os.path.expanduser(name)):
            described.base_model_name_or_path = os.path.abspath(path)


def record_base(model: Any, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Name a base for the adapters in ``model`` that peft and transformers load: that which it
    names if there is one, else a copy of the base, written once into ``folder``."""
    make_base_absolute(model)
    for described in model.peft_config.values():
        name = str(described.base_model_name_or_path or "")
        # a model that was merged has the name of its adapter's folder, which is no base
        if name in ("", builtin_models.TINY) or adapter_folder(name) is not None:
            described.base_model_name_or_path = str(_written_base(model, tokenizer, folder))


def _written_base(model: Any, tokenizer: PreTrainedTokenizerBase, folder: Path) -> Path:
    base = model.get_base_model()
    state = _state_of_base(model)
    digest = hashlib.sha256(base.config.to_json_string().encode())
    for name in sorted(state):
        content = state[name].detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        digest.update(name.encode())
        digest.update(content.numpy().tobytes())
    location = folder.absolute() / f"{BASE}{digest.hexdigest()[:8]}"
    if not location.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        with replacing(location) as new:
            base.save_pretrained(new, state_dict=state)
            tokenizer.save_pretrained(new)
            share_modes(new.iterdir())
    return location


def _state_of_base(model: Any) -> dict[str, torch.Tensor]:
    """The weights of the base by the names that they have without an adapter."""
    prefix = getattr(model.base_model, "prefix", "lora_")
    state = {}
    for name, value in model.get_base_model().state_dict().items():
        if prefix not in name and ".modules_to_save." not in name:
            state[name.replace(".base_layer.", ".").replace(".original_module.", ".")] = value
    return state
