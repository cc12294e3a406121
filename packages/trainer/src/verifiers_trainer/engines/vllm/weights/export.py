"""The weights of a policy as an inference server knows them: checkpoint names, adapters merged.

A head that is tied to the embeddings is there under its own name too. Checkpoints leave it out, and a server that is
updated layer by layer would go on with the head it had: measured with vLLM 0.32, 0.37 nats instead of 1e-5.

A model with adapters is merged one layer at a time, so that no second model is held. Nothing here changes the model.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch


def exported(model: Any) -> dict[str, torch.Tensor]:
    """Name in a checkpoint -> tensor, in the trainer's own precision and on its device."""
    base = model.get_base_model() if hasattr(model, "peft_config") else model
    tensors = dict(_named_weights(base))
    if getattr(base, "_weight_conversions", None):  # names in memory are not those of the checkpoint
        from transformers.core_model_loading import revert_weight_conversion

        tensors = revert_weight_conversion(base, tensors)
    return tensors


def _named_weights(base: Any) -> Iterator[tuple[str, torch.Tensor]]:
    whole = {name: layer for name, layer in base.named_modules() if hasattr(layer, "modules_to_save")}
    merged = {
        name: layer
        for name, layer in base.named_modules()
        if hasattr(layer, "get_base_layer") and not name.startswith(tuple(whole))
    }
    inside = tuple(f"{name}." for name in (*merged, *whole))
    for name, tensor in base.state_dict().items():
        if not name.startswith(inside):
            yield name, tensor.detach()
    for name, layer in whole.items():
        trained = layer.modules_to_save[layer.active_adapters[0]]
        yield from ((f"{name}.{part}", tensor.detach()) for part, tensor in trained.state_dict().items())
    for name, layer in merged.items():
        yield from ((f"{name}.{part}", tensor) for part, tensor in _merged(layer).items())


def _merged(layer: Any) -> dict[str, torch.Tensor]:
    """Weight and bias of a layer with its adapter added; a copy."""
    with torch.no_grad():
        twin = copy.deepcopy(layer)
        twin.merge()
    return {name: tensor.detach() for name, tensor in twin.get_base_layer().state_dict().items()}


def apart(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same, contiguous and without two names for one memory, as files need it."""
    found: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        found[name] = tensor.clone() if tensor.data_ptr() in seen else tensor.contiguous()
        seen.add(tensor.data_ptr())
    return found


def unservable_adapter(model: Any) -> str | None:
    """Why a server cannot take the adapter of ``model`` as files; None when it can, or when there is none."""
    for peft in getattr(model, "peft_config", {}).values():
        if str(getattr(peft, "peft_type", "")).split(".")[-1] != "LORA":
            return f"it is a {peft.peft_type} adapter"
        if getattr(peft, "use_dora", False):
            return "it is a DoRA adapter"
        if getattr(peft, "modules_to_save", None):
            return "it trains whole modules too (modules_to_save)"
        if getattr(peft, "bias", "none") != "none":
            return "it trains biases"
        targets = set(peft.target_modules or ())
        if found := sorted(targets & {"embed_tokens", "lm_head", "wte", "embed_in", "embed_out"}):
            return f"it adapts {', '.join(found)}"
    return None
