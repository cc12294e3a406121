"""What is checked before torch is imported: the limits of a setting, and the rules over the sizes of a batch.

A line in ``fields`` names the values that its setting may have and whether a resume may change it. This module imports
neither torch nor transformers, so that ``static_fields`` can check a file without them.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from typing import Any

from verifiers.runtime.suggest import closest

UNCOMPARED = ("none", "environment")
"""Advantages without a baseline of the trainer's own, for which one rollout is a group."""


@dataclass(frozen=True, slots=True)
class Between:
    """A number in [``low``, ``high``]; a whole number where ``low`` is one.

    ``zero=False`` excludes 0. ``none=False`` excludes None where the type allows it for a value that is derived.
    """

    low: float
    high: float
    zero: bool = True
    none: bool = True

    def problem(self, name: str, value: Any) -> str | None:
        """Return why ``value`` is not allowed for the setting ``name``; None when it is."""
        is_whole = isinstance(self.low, int)
        is_number = isinstance(value, int if is_whole else (int, float)) and not isinstance(value, bool)
        if not is_number or not self.low <= value <= self.high:
            kind = "a whole number" if is_whole else "a number"
            return f"{name} is {value!r}; it must be {kind} in [{self.low:g}, {self.high:g}]"
        if value == 0 and not self.zero:
            return f"{name} is 0; it must be {self.low:g} or at least 1"
        return None


class OneOf:
    """One of several strings, or of the members of an enumeration by value."""

    none = True

    def __init__(self, *choices: str | enum.Enum):
        self.choices = tuple(str(getattr(choice, "value", choice)) for choice in choices)

    def problem(self, name: str, value: object) -> str | None:
        """Return why ``value`` is not allowed for the setting ``name``; None when it is."""
        text = getattr(value, "value", value)
        if text in self.choices:
            return None
        return f"{name} is {text!r}{closest(str(text), self.choices)}; it must be one of {', '.join(self.choices)}"


class Unsupported:
    """A field of transformers that this trainer does not implement: the alternative, and the values that disable it."""

    none = False

    def __init__(self, instead: str, *off: object):
        self.instead, self.off = instead, off

    def problem(self, name: str, value: object) -> str | None:
        """Return why ``value`` is not allowed for the setting ``name``; None when it disables the field."""
        if value in self.off:
            return None
        return f"{name} is {value!r}, which this trainer does not support: {self.instead}"


@dataclass(frozen=True, slots=True)
class MayChange:
    """A resumed training may change the setting, or, with ``keys``, only those entries of it."""

    because: str
    keys: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class OnceSet:
    """Must match from the time it has a value: a resumed training may set what was None."""


@dataclass(frozen=True, slots=True)
class SamplingArgument:
    """A sampling argument that is a setting.

    ``reshapes``: whether it makes the sampled distribution differ from the trained one.
    """

    reshapes: bool


# --- the sizes of a batch ---------------------------------------------------------------------------------------------


def check_batch(config: Any, world_size: int) -> list[str]:
    """Check the divisibility of the batch and the group size, and that each update has a rollout."""
    problems = []
    group, batch, per_device = config.rollouts_per_example, config.batch_size, config.micro_batch_size
    if not all(isinstance(number, int) for number in (group, batch, per_device)):
        return []  # reported by check_fields
    if group < 2 and config.advantage not in UNCOMPARED:
        problems.append(f"rollouts_per_example is {group}: a group baseline needs at least 2 siblings")
    divisors = {"rollouts_per_example": group, "micro_batch_size x processes": per_device * world_size}
    not_divisors = [f"{name} = {d}" for name, d in divisors.items() if d > 0 and batch > 0 and batch % d]
    if not_divisors:
        step = math.lcm(*(d for d in divisors.values() if d > 0))
        below, above = batch // step * step, (batch // step + 1) * step
        near = f"{below} or {above}" if below else f"{above}"
        divisor = " and ".join(not_divisors)
        problems.append(
            f"batch_size {batch}{config.batch_is} is not divisible by {divisor}; the nearest that are: {near}"
        )
    updates = config.updates_per_batch
    if isinstance(updates, int) and updates > batch:
        problems.append(f"updates_per_batch {updates} divides a batch of {batch} rollouts: use at most that")
    if isinstance(config.max_concurrent, int) and 0 < config.max_concurrent < group:
        problems.append(
            f"max_concurrent {config.max_concurrent} is below rollouts_per_example = {group}, but the siblings of an "
            f"example start together; use at least {group}"
        )
    return problems
