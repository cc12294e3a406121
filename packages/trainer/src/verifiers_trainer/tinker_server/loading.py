"""Opens a `Service` by the name of its model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from verifiers_trainer.policy.adapters import written_base
from verifiers_trainer.policy.builtin_models import SMOLLM2
from verifiers_trainer.policy.folder_client import MAX_SEQ_LEN, load_folder, model_folder
from verifiers_trainer.policy.loading import get_model, get_tokenizer, local_folder
from verifiers_trainer.tinker_server.service import Service

LOCAL = "local"
"""The name of ``builtin:smollm2-135m`` for ``vf-serve``."""
MAX_ROWS = 32


def open_service(
    model_name: str,
    folder: Path,
    *,
    name: str | None = None,
    max_seq_len: int | None = None,
    max_rows: int | None = None,
) -> Service:
    """The service of a model, not started: a hub id, a folder (of a training run too), a builtin
    name or ``local``. Clients know it as ``name``.

    *Raises* ``ConfigError``; RunBusy when another server has the run folder.
    """
    model_name = SMOLLM2 if model_name == LOCAL else model_name
    model: Any  # transformers' ``to`` has no types
    if Path(model_name).expanduser().is_dir():
        saved = model_folder(model_name)
        model, tokenizer = load_folder(saved)
        # an adapter of the folder is merged: the base of further ones is in no file
        is_whole = not (saved / "adapter_config.json").is_file()
        base = saved.absolute() if is_whole else None
    else:
        device = torch.accelerator.current_accelerator(check_available=True)
        model, tokenizer = get_model(model_name), get_tokenizer(model_name)
        model = model.to(device or torch.device("cpu"))
        base = local_folder(model_name)
    if base is None:
        folder.mkdir(parents=True, exist_ok=True)
        base = written_base(model, model.state_dict(), tokenizer, folder)
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None) or MAX_SEQ_LEN
    return Service(
        model,
        tokenizer,
        folder,
        model_name=name or model_name,
        base_name=str(base),
        max_seq_len=min(limit, MAX_SEQ_LEN) if max_seq_len is None else max_seq_len,
        max_rows=max_rows or MAX_ROWS,
    )
