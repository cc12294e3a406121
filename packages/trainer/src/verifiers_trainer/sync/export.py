"""The weights of a policy as an inference server knows them: checkpoint names, adapters merged, tied ones once.

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
    merged = {name: layer for name, layer in base.named_modules() if hasattr(layer, "get_base_layer")}
    whole = {name: layer for name, layer in base.named_modules() if hasattr(layer, "modules_to_save")}
    inside = tuple(f"{name}." for name in (*merged, *whole))
    tied = set(getattr(base, "all_tied_weights_keys", None) or ())
    seen: set[int] = set()
    for name, tensor in base.state_dict().items():
        if name.startswith(inside) or name in tied:
            continue
        if tensor.data_ptr() and id(tensor) not in seen:
            seen.add(id(tensor))
            yield name, tensor.detach()
    for name, layer in whole.items():
        trained = layer.modules_to_save[layer.active_adapters[0]]
        yield from ((f"{name}.{part}", tensor.detach()) for part, tensor in trained.state_dict().items())
    for name, layer in merged.items():
        if not any(name.startswith(f"{other}.") for other in (*whole, *(m for m in merged if m != name))):
            yield from ((f"{name}.{part}", tensor) for part, tensor in _merged(layer).items())


def _merged(layer: Any) -> dict[str, torch.Tensor]:
    """Weight and bias of a layer with its adapter added; a copy."""
    with torch.no_grad():
        twin = copy.deepcopy(layer)
        twin.merge()
    return {name: tensor.detach() for name, tensor in twin.get_base_layer().state_dict().items()}


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
        if found := sorted(targets & {"embed_tokens", "lm_head", "wte"}):
            return f"it adapts {', '.join(found)}"
    return None
