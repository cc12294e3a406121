"""What to change when a device's memory does not suffice, and what that is estimated to free.

The estimate counts the activations of a packed row as ``vf-train --plan`` does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from verifiers.errors import RunError
from verifiers_trainer.algorithm.packing import PackedRow, row_bytes, sample_spans

if TYPE_CHECKING:
    from transformers.modeling_utils import PreTrainedModel

    from verifiers_trainer.settings.config import RLConfig

OF_A_TRAINED_WEIGHT = 16
"""Bytes: itself, its gradient and AdamW's moments, in float32."""


def out_of_memory(
    error: BaseException, model: PreTrainedModel, config: RLConfig, rows: Sequence[PackedRow]
) -> RunError:
    """The error of a run whose device had too little memory for a step on ``rows``: in a sentence
    what was asked for, the setting to change, and its effect."""
    text = model.config.get_text_config()
    number = 2 if config.bf16 or config.fp16 or model.dtype.itemsize == 2 else 4
    tokens = max((row.num_tokens for row in rows), default=0)
    longest = max((end - start for row in rows for _, start, end in sample_spans(row)), default=0)

    def gigabytes(tokens: int, checkpointing: bool) -> str:
        shape = text.num_hidden_layers, text.hidden_size, number
        return f"{row_bytes(tokens, *shape, checkpointing) / 1e9:.2g} GB"

    now = gigabytes(tokens, bool(config.gradient_checkpointing))
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    if not config.gradient_checkpointing:
        change = f"set gradient_checkpointing = true (about {gigabytes(tokens, True)})"
    elif 2 * longest <= tokens:
        half = gigabytes(tokens // 2, True)
        change = f"set micro_batch_tokens = {tokens // 2} (about {half})"
    elif not config.use_lora:
        change = (
            f"set use_lora = true (frees about {OF_A_TRAINED_WEIGHT * trained / 1e9:.2g} GB of"
            " gradients and optimizer state)"
        )
    else:
        change = f"lower max_seq_len: the longest sample has {longest} tokens"
    return RunError(
        f"out of memory in a step whose longest row has {tokens} tokens, with activations of about"
        f" {now} by estimate: {change}, and go on with --resume"
        f" ({str(error).splitlines()[0] if str(error) else type(error).__name__})"
    )


def release(model: torch.nn.Module) -> None:
    """Free what a step that failed has left on the device, so that its weights can be saved."""
    model.zero_grad(set_to_none=True)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
