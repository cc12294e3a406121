"""The adapters of roles: a PEFT model with a LoRA adapter for each role that is trained, over one
frozen base (``lora_per_role``).

Of a training it is one model with one optimizer. A packed row has the samples of one role
(``PackedRow.adapter``), and ``select`` makes its adapter the one that computes. The embedded engine
computes rows of all roles in one pass with ``weights_of``: the very parameters that are trained.

A role is a number, its place in ``roles_of``. In peft an adapter is named by ``adapter_name``, and
a saved one is a folder of that name (``adapter_files.role_folders``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.nn import Parameter
from transformers.pytorch_utils import Conv1D

from verifiers.errors import ConfigError
from verifiers_trainer.engines.lora import LoraWeights, LowRank
from verifiers_trainer.engines.role_client import adapter_name

_ROLES = "adapter_roles"
"""Attribute of the model below the adapters."""


def set_roles(model: Any, roles: Sequence[str]) -> None:
    """Make the adapters of the PEFT ``model``, which has one for each of ``roles``, those of roles:
    all are trained, and the first computes.

    *Raises* ``ConfigError`` for adapters that are not plain LoRA on linear layers, with one scale.
    """
    base = model.get_base_model()
    setattr(base, _ROLES, tuple(roles))
    for role in roles:
        _weights(base, role)
    select(base, 0)
    for parameters in parameters_of(model).values():
        for parameter in parameters:
            parameter.requires_grad_(True)


def roles_of(model: Any) -> tuple[str, ...]:
    """The roles with an adapter of their own; none of a model without."""
    roles: tuple[str, ...] = getattr(_base_of(model), _ROLES, ())
    return roles


def _base_of(model: Any) -> Any:
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def select(base: nn.Module, number: int) -> None:
    """Compute with the adapter of a role until another is selected: what is computed again for the
    gradient (gradient checkpointing) needs it after the forward pass."""
    name = adapter_name(roles_of(base)[number])
    for _, layer in _layers(base):
        if layer.active_adapters != [name]:
            # not ``set_adapter``, which takes the gradient from the adapters of the other roles
            layer._active_adapter = [name]


def parameters_of(model: Any) -> dict[str, list[Parameter]]:
    """The trained weights of each role."""
    base = _base_of(model)
    return {
        role: [
            part[adapter_name(role)].weight
            for _, layer in _layers(base)
            for part in (layer.lora_A, layer.lora_B)
        ]
        for role in roles_of(base)
    }


def weights_of(model: Any) -> dict[str, LoraWeights]:
    """The adapter of each role, made of the parameters themselves: an update in place is theirs
    too. Empty for a model without."""
    base = _base_of(model)
    return {role: _weights(base, role) for role in roles_of(base)}


def without_adapters(base: nn.Module) -> None:
    """Take the adapters out of a copy of the model, which has the names of the stock layers then."""
    for name, layer in _layers(base):
        base.set_submodule(name, layer.get_base_layer())


def _layers(base: nn.Module) -> list[tuple[str, Any]]:
    """(name, layer) of every layer with an adapter."""
    return [entry for entry in base.named_modules() if hasattr(entry[1], "lora_A")]


def _weights(base: nn.Module, role: str) -> LoraWeights:
    name = adapter_name(role)
    layers, scales = {}, set()
    for layer_name, layer in _layers(base):
        is_plain = (
            isinstance(layer.get_base_layer(), nn.Linear | Conv1D)
            and {name} <= layer.lora_A.keys() & layer.lora_B.keys()
            and name not in layer.lora_variant
            and not layer.lora_bias.get(name)
        )
        if not is_plain:
            raise ConfigError(
                f"lora_per_role takes plain LoRA on linear layers, and the adapter of {layer_name}"
                " is another: leave it out of lora_config or peft_config"
            )
        layers[layer_name] = LowRank(layer.lora_A[name].weight, layer.lora_B[name].weight)
        scales.add(layer.scaling[name])
    if len(scales) != 1:
        raise ConfigError(
            f"lora_per_role scales all layers alike, and these adapters have {len(scales)} scales:"
            " leave rank_pattern and alpha_pattern out"
        )
    return LoraWeights(layers, scales.pop(), version=None)
