"""Where the numbers of a training come from, for ``settings.json`` and its evaluations; see
``verifiers.storage.provenance``."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from verifiers.environments.base import Environment
from verifiers.storage.identity import code_of
from verifiers.storage.own_code import own_code
from verifiers.storage.provenance import environment_facts
from verifiers.storage.weights import weight_hashes
from verifiers_trainer.algorithm.advantages import ADVANTAGES
from verifiers_trainer.algorithm.contexts import CONTEXTS
from verifiers_trainer.algorithm.losses import function_of
from verifiers_trainer.policy.loading import local_folder
from verifiers_trainer.policy.preparation import members
from verifiers_trainer.run.context import TrainingRun
from verifiers_trainer.settings.config import RLConfig
from verifiers_trainer.settings.fields import plain

CALLBACK = "callback"
"""Role of callbacks in ``users_code``: a resumed run may have others, under other names."""


def users_code(
    env: Environment, settings: RLConfig, hooks: Mapping[str, Iterable[object]] | None = None
) -> dict[str, str]:
    """Name -> hash of what a user programmed beside the environment's files: loss, advantage,
    reward functions, and ``hooks`` by role; see ``own_code``."""
    context = settings.teacher_context and CONTEXTS.resolve(settings.teacher_context)
    objects = {
        "loss": [function_of(settings.loss)],
        "advantage": [ADVANTAGES.resolve(settings.advantage)],
        "teacher_context": [context] if context is not None else [],
        "reward function": [f for e in members(env) for f in e.rubric.get_reward_funcs()],
    }
    of_environment = code_of(env)
    hashes = own_code({**objects, **(hooks or {})})
    return {name: hash_ for name, hash_ in hashes.items() if name not in of_environment}


def base_weights(model: Any) -> dict[str, str]:
    """File -> hash of the weights that the model, or the base of its adapter, was loaded from;
    empty where they are in no file."""
    base = model.get_base_model() if hasattr(model, "peft_config") else model
    folder = local_folder(str(getattr(base, "name_or_path", "") or ""))
    return {} if folder is None else weight_hashes(folder)


def facts_of(run: TrainingRun, code: Mapping[str, str], weights: Mapping[str, str]) -> dict:
    """What ``provenance`` records of a training beside versions and command."""
    settings, model = run.settings, run.model
    parameters = list(model.parameters())
    return {
        "environment": environment_facts(run.env),
        "code": dict(code),
        "devices": _devices(settings.device),
        "precision": {
            "weights": _types(p for p in parameters if not p.requires_grad) or None,
            "trained": _types(p for p in parameters if p.requires_grad),
            "mixed": settings.mixed_precision,
        },
        "engine": str(settings.inference),
        "processes": run.ranks.world,
        "model": str(getattr(model, "name_or_path", "") or type(model).__name__),
        "weights": dict(weights),
        "settings": {
            line.name: plain(getattr(settings, line.name)) for line in dataclasses.fields(settings)
        },
    }


def _types(parameters: Iterable[torch.nn.Parameter]) -> str:
    return ", ".join(sorted({str(p.dtype).removeprefix("torch.") for p in parameters}))


def _devices(device: torch.device) -> list[str]:
    if device.type != "cuda":
        return [str(device)]
    return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
