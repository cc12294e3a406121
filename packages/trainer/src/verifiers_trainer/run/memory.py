"""What to change when a device's memory does not suffice, and what that is estimated to free.

The estimate counts the activations of a packed row as ``vf-train --plan`` does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from verifiers.errors import RunError
from verifiers_trainer.algorithm.packing import PackedRow, sample_spans
from verifiers_trainer.policy.preparation import has_packed_kernel
from verifiers_trainer.policy.sizes import FLOAT32, HALF, Architecture, RowPass

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
    architecture = _architecture(model)
    has_adapter = hasattr(model, "peft_config")
    is_half = config.bf16 or config.fp16 or model.dtype.itemsize == HALF
    tokens = max((row.num_computed for row in rows), default=0)
    longest = max((end - start for row in rows for _, start, end in sample_spans(row)), default=0)

    def gigabytes(tokens: int, checkpointing: bool) -> str:
        passes = RowPass(
            rank=config.lora_rank if has_adapter else None,
            number=HALF if is_half else FLOAT32,
            checkpointing=checkpointing,
            masked=config.packing and not has_packed_kernel(model),
        )
        return f"{passes.row_bytes(architecture, tokens) / 1e9:.2g} GB"

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
        f"out of memory in a step whose longest row has {tokens} tokens, which takes about"
        f" {now} besides weights by estimate: {change}, and go on with --resume"
        f" ({str(error).splitlines()[0] if str(error) else type(error).__name__})"
    )


def _architecture(model: PreTrainedModel) -> Architecture:
    """The sizes of any model; of those that its configuration lacks, usual ones."""
    text = model.config.get_text_config()
    names = "num_hidden_layers hidden_size intermediate_size num_attention_heads vocab_size"
    names += " num_key_value_heads head_dim model_type"
    sizes = {name: getattr(text, name, None) for name in names.split()}
    usual = {"num_attention_heads": 1, "intermediate_size": 4 * text.hidden_size}
    return Architecture.of(usual | {name: size for name, size in sizes.items() if size})


def release(model: torch.nn.Module) -> None:
    """Free what a step that failed has left on the device, so that its weights can be saved."""
    model.zero_grad(set_to_none=True)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
