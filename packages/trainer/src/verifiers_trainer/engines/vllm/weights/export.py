"""Export the weights of a policy for an inference server: checkpoint names, adapters merged.

A head tied to the embeddings is exported under its own name too. Checkpoints omit it, and a server
that is updated layer by layer would keep its old head: measured with vLLM 0.32, 0.37 nats instead
of 1e-5.

Adapters are merged into copies one layer at a time, so that no second model is in memory.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers.modeling_utils import PreTrainedModel


EMBEDDINGS = {"embed_tokens", "lm_head", "wte", "embed_in", "embed_out"}
"""Layers whose adapters work only together with the layers themselves."""


def exported(model: Any) -> dict[str, torch.Tensor]:
    """Checkpoint name -> tensor, in the trainer's precision and on its device."""
    base = model.get_base_model() if hasattr(model, "peft_config") else model
    tensors = dict(_named_weights(base))
    # names in memory are not those of the checkpoint
    if getattr(base, "_weight_conversions", None):
        from transformers.core_model_loading import revert_weight_conversion

        tensors = revert_weight_conversion(base, tensors)
    return tensors


def _named_weights(base: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    copied = {
        name: layer for name, layer in base.named_modules() if hasattr(layer, "modules_to_save")
    }
    merged = {
        name: layer
        for name, layer in base.named_modules()
        if hasattr(layer, "get_base_layer") and not name.startswith(tuple(copied))
    }
    inside = tuple(f"{name}." for name in (*merged, *copied))
    for name, tensor in base.state_dict().items():
        if not name.startswith(inside):
            yield name, tensor.detach()
    for name, layer in copied.items():
        trained = layer.modules_to_save[layer.active_adapters[0]]
        yield from (
            (f"{name}.{part}", tensor.detach()) for part, tensor in trained.state_dict().items()
        )
    for name, layer in merged.items():
        yield from ((f"{name}.{part}", tensor) for part, tensor in _merged(layer).items())


def _merged(layer: Any) -> dict[str, torch.Tensor]:
    """A copy of a layer's weight and bias with the adapter merged."""
    with torch.no_grad():
        copied = copy.deepcopy(layer)
        copied.merge()
    return {name: tensor.detach() for name, tensor in copied.get_base_layer().state_dict().items()}


def apart(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same tensors, contiguous and without shared memory, as safetensors requires."""
    separate: dict[str, torch.Tensor] = {}
    pointers: set[int] = set()
    for name, tensor in tensors.items():
        separate[name] = tensor.clone() if tensor.data_ptr() in pointers else tensor.contiguous()
        pointers.add(tensor.data_ptr())
    return separate


def unservable_adapter(model: object) -> str | None:
    """Why a server cannot load the model's adapter from files; None if it can, or there is none."""
    for peft in getattr(model, "peft_config", {}).values():
        if str(getattr(peft, "peft_type", "")).split(".")[-1] != "LORA":
            return f"it is a {peft.peft_type} adapter"
        if getattr(peft, "use_dora", False):
            return "it is a DoRA adapter"
        if getattr(peft, "modules_to_save", None):
            return "it trains whole modules too (modules_to_save)"
        if getattr(peft, "bias", "none") != "none":
            return "it trains biases"
        if unsupported := sorted(EMBEDDINGS & set(peft.target_modules or ())):
            return f"it adapts {', '.join(unsupported)}"
    return None
