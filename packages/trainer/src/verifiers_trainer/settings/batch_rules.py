"""The rules over the sizes of a batch, which are checked before torch is imported."""

from __future__ import annotations

import math
from typing import Any

UNCOMPARED = ("none", "environment")
"""Advantages without a baseline of the trainer's own, for which one rollout is a group."""


def check_batch(config: Any, world_size: int) -> list[str]:
    """Check the divisibility of the batch and the group size, and that each update
    has a rollout."""
    problems = []
    group = config.rollouts_per_example
    batch = config.batch_size
    per_device = config.micro_batch_size
    if not all(isinstance(number, int) for number in (group, batch, per_device)):
        return []  # reported by check_fields
    if group < 2 and config.advantage not in UNCOMPARED:
        problems.append(
            f"rollouts_per_example is {group}: a group baseline needs at least 2 siblings"
        )
    divisors = {
        "rollouts_per_example": group,
        "micro_batch_size x processes": per_device * world_size,
    }
    not_divisors = [
        f"{name} = {d}" for name, d in divisors.items() if d > 0 and batch > 0 and batch % d
    ]
    if not_divisors:
        step = math.lcm(*(d for d in divisors.values() if d > 0))
        below, above = batch // step * step, (batch // step + 1) * step
        near = f"{below} or {above}" if below else f"{above}"
        divisor = " and ".join(not_divisors)
        problems.append(
            f"batch_size {batch}{config.batch_is} is not divisible by {divisor}; the nearest that"
            f" are: {near}"
        )
    updates = config.updates_per_batch
    if isinstance(updates, int) and updates > batch:
        problems.append(
            f"updates_per_batch {updates} divides a batch of {batch} rollouts: use at most that"
        )
    if isinstance(config.max_concurrent, int) and 0 < config.max_concurrent < group:
        problems.append(
            f"max_concurrent {config.max_concurrent} is below rollouts_per_example = {group}, but"
            f" the siblings of an example start together; use at least {group}"
        )
    return problems
