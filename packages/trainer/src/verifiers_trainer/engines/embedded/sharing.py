"""A second module over the same parameters: what lets the trainer and the sampler run one set of weights."""

from __future__ import annotations

import copy
from typing import Any

import torch

from verifiers.errors import ConfigError


def share_parameters(model: torch.nn.Module) -> Any:
    """A copy of ``model`` whose parameters *are* those of ``model``; an update in place is seen by both at once.

    Everything else is the copy's own: configuration, mode (evaluation), hooks, buffers, and the stock ``forward``
    even when one was put on the original's instance. Gradient checkpointing is off. Of a PEFT model the wrapped
    transformers model is returned, its adapter layers in place.

    Raises ConfigError for an adapter that is not made of layers (prompt learning).
    """
    if isinstance(model, torch.nn.parallel.DistributedDataParallel):
        model = model.module
    replica: Any = copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})
    replica.__dict__.pop("forward", None)
    if hasattr(replica, "get_base_model"):
        if getattr(replica.active_peft_config, "is_prompt_learning", False):
            raise ConfigError("the embedded engine cannot serve prompt-learning adapters; use LoRA or a vLLM server")
        replica = replica.get_base_model()
        replica.__dict__.pop("forward", None)
    if getattr(replica, "is_activation_checkpointing", False):
        replica.activation_checkpointing_disable()
    replica.config.use_cache = True
    return replica.eval()


def shares_parameters(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    """Whether every parameter of ``one`` is also one of ``other``'s; False once something replaced a Parameter."""
    parameter_ids = {id(parameter) for parameter in other.parameters()}
    return all(id(parameter) in parameter_ids for parameter in one.parameters())
