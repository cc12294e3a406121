"""A second module over the same parameters, so that trainer and sampler use one set of weights."""

from __future__ import annotations

import copy
from typing import Any

import torch

from verifiers.errors import ConfigError


def share_parameters(model: torch.nn.Module) -> Any:
    """A copy of ``model`` whose parameters *are* those of ``model``; an in-place update affects both.

    Everything else is separate: configuration, mode (evaluation), hooks, buffers, and the class's ``forward`` even
    when the original's instance overrides it. Gradient checkpointing is off. For a PEFT model the wrapped transformers
    model is returned, including its adapter layers.

    Raises ConfigError for prompt-learning adapters, which are not layers.
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
    """Whether every parameter of ``one`` is also one of ``other``'s; False once a Parameter was replaced."""
    parameter_ids = {id(parameter) for parameter in other.parameters()}
    return all(id(parameter) in parameter_ids for parameter in one.parameters())
