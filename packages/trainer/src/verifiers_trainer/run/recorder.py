"""Numbers of a step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from verifiers_trainer.distributed import deepspeed

PEAK_FLOPS = {"B200": 2250e12, "H200": 989e12, "H100": 989e12, "L40S": 362e12, "A100": 312e12}
"""Dense bf16 operations per second of a device, by a part of its name, as its maker states them."""


def device_numbers(model: torch.nn.Module, tokens_per_s: float) -> dict[str, float]:
    """``memory/peak`` in bytes and, for a device that is known, ``throughput/mfu``; nothing without CUDA."""
    if not torch.cuda.is_available():
        return {}
    counts = [(deepspeed.size(parameter).numel(), parameter.requires_grad) for parameter in model.parameters()]
    parameters, trained = sum(n for n, _ in counts), sum(n for n, is_trained in counts if is_trained)
    share = flops_utilisation(parameters, trained, tokens_per_s, torch.cuda.get_device_name())
    numbers = {"memory/peak": float(torch.cuda.max_memory_allocated())}
    return numbers if share is None else numbers | {"throughput/mfu": share}


def flops_utilisation(parameters: int, trained: int, tokens_per_s: float, device: str) -> float | None:
    """Share of a device's peak that training uses; None for a device whose peak is not known here.

    A token costs two operations for each parameter forwards, two backwards, and two more for each that is trained
    (Kaplan et al. 2020, arXiv 2001.08361); attention over the context is not counted. Rows and rollouts of one process.
    """
    peak = next((flops for name, flops in PEAK_FLOPS.items() if name in device), None)
    return None if peak is None else (4 * parameters + 2 * trained) * tokens_per_s / peak


def alarms(numbers: Mapping[str, Any]) -> dict[str, str]:
    """What is out of order in a step's numbers: alarm name -> one sentence."""
    total = numbers.get("rollouts/generated", 0) or math.nan
    groups = (numbers.get("groups/live", 0) + numbers.get("groups/dead", 0)) or math.nan
    rules = {
        "mismatch": (
            numbers.get("sampler/mismatch_kl", math.nan) > 0.05,
            "sampler and trainer disagree about tokens of the same weights (sampler/mismatch_kl above 0.05)",
        ),
        "ratio": (
            numbers.get("ratio/kept", math.nan) < 0.5,
            "more than half of the tokens are too far from the policy that sampled them (ratio/kept below 0.5): lower "
            "the learning rate or max_off_policy_steps",
        ),
        "dead_groups": (
            numbers.get("groups/dead", 0) / groups > 0.8,
            "more than 80 % of the groups have equal rewards: the task is too easy or too hard for this model",
        ),
        "errors": (numbers.get("rollouts/errors", 0) / total > 0.1, "more than 10 % of the rollouts failed"),
        "fill": (
            numbers.get("packing/rows", 0) > 1 and numbers.get("packing/fill", math.nan) < 0.7,
            "rows are less than 70 % full (packing/fill): raise micro_batch_tokens",
        ),
        "waiting": (
            numbers.get("time/wait_generation", 0) > 0.8 * numbers.get("time/step", math.inf),
            "more than 80 % of the step was spent waiting for rollouts",
        ),
    }
    return {name: sentence for name, (holds, sentence) in rules.items() if holds}
