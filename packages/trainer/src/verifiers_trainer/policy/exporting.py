"""A saved model for other programs, without the trainer's state: what transformers, peft and vLLM
load."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from verifiers.errors import ConfigError
from verifiers.storage.files import replacing, share_modes
from verifiers_trainer.engines.processing import save_texts
from verifiers_trainer.policy import adapter_files, adapters
from verifiers_trainer.policy.folder_client import model_folder
from verifiers_trainer.policy.loading import get_model, get_tokenizer

AS_SAVED = {"dtype": "auto"}


@contextmanager
def exporting(target: Path) -> Iterator[Path]:
    """A folder to write a model into, which becomes ``target`` when the block ends without an
    error. *Raises* ``ConfigError`` where ``target`` has content."""
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise ConfigError(f"{target} exists: name a new folder to export to")
    target.parent.mkdir(parents=True, exist_ok=True)
    with replacing(target) as new:
        yield new
        share_modes(new.rglob("*.safetensors"))


def export(source: str, target: Path, *, merged: bool = False) -> Path:
    """Write the model of a folder, or of a run's newest checkpoint, to ``target``; returns the
    folder that was read.

    Of adapters of roles: each of them. Of an adapter: the adapter, or if ``merged`` the model that
    it is merged into, computed in float32 and stored in the precision of its base. *Raises*
    ``ConfigError`` without a model, and where ``target`` has content.
    """
    folder = model_folder(source)
    with exporting(target) as new:
        tokenizer = get_tokenizer(adapter_files.tokenizer_source(folder))
        model: Any
        if roles := adapter_files.role_folders(str(folder)):
            model = adapters.load_role_adapters(roles, use_liger=False, model_kwargs=AS_SAVED)
            adapters.require_one_adapter(model, merged=merged)
            adapters.record_base(model, tokenizer, target.parent)
        elif adapter_files.adapter_folder(str(folder)) is None:
            model = get_model(str(folder), use_liger=False, model_kwargs=AS_SAVED)
        else:
            model = adapters.load_adapter(folder, use_liger=False, model_kwargs=AS_SAVED)
            if merged:
                model = adapters.merge_precisely(model)
            else:
                adapters.record_base(model, tokenizer, target.parent)
        model.save_pretrained(new)
        adapters.record_quantization(model, new)
        save_texts(model, tokenizer, new)
    return folder
