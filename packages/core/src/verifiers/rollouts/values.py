"""The numbers of a rollout: what counts as one, and its times."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeVar

import numpy as np

from verifiers.types import AttributeDict

T = TypeVar("T")

LARGEST = 1e19
"""The largest reward or metric: float32, in which training computes, still holds its square, and
statistics add up as many as there are."""


def number(value: object) -> float:
    """A number as float; NaN for anything else, and beyond ``LARGEST``."""
    if isinstance(value, int | float | np.integer | np.floating) and -LARGEST <= value <= LARGEST:
        return float(value)
    return math.nan


def numbers(values: Mapping[str, object] | None) -> dict[str, float]:
    """The numbers of a mapping, by name."""
    return {name: number(value) for name, value in (values or {}).items()}


def known_number(value: object) -> float | None:
    """A number as float; None for what ``number`` does not know."""
    as_number = number(value)
    return None if math.isnan(as_number) else as_number


def counts(values: Mapping[str, object] | None) -> dict[str, Any]:
    """The counts of a mapping as they are; None for what is no number."""
    return {
        name: None if known_number(value) is None else value
        for name, value in (values or {}).items()
    }


_READ_AND_SAMPLED = (
    ("input_tokens", "output_tokens"),
    ("prompt_tokens", "completion_tokens"),
    ("judge_input_tokens", "judge_output_tokens"),
)


def reported(usage: Mapping[str, T] | None) -> dict[str, T]:
    """The counts of tokens that a server reported: no model answers without having read a token, so
    that 0 of them are no count.

    >>> reported({"input_tokens": 0, "output_tokens": 0}), reported({"input_tokens": 7})
    ({}, {'input_tokens': 7})
    """
    counted = dict(usage or {})
    for read, sampled in _READ_AND_SAMPLED:
        if counted.get(read) == 0:
            del counted[read]
            if counted.get(sampled) == 0:
                del counted[sampled]
    return counted


def text(value: object) -> str | None:
    """A text as it is, None as None, and another value as its text."""
    return value if value is None or isinstance(value, str) else str(value)


class Timing(AttributeDict):
    """Where a rollout's time went, in milliseconds, and when it began (epoch seconds).

    >>> timing = vf.Timing(model_ms=12.5)
    >>> timing.model_ms, timing["total_ms"]
    (12.5, 0.0)
    """

    _ZERO = dict.fromkeys(
        (
            "setup_ms generation_ms model_ms env_ms scoring_ms total_ms overhead_ms start_time"
        ).split(),
        0.0,
    )

    def __init__(self, **times: float):
        dict.__init__(self, self._ZERO, **times)

    @classmethod
    def read(cls, times: Mapping[str, object] | None) -> Timing:
        """The times of a saved rollout, of which those that are no numbers are NaN."""
        return cls.of(numbers(times))

    @classmethod
    def of(cls, times: Mapping[str, float] | None) -> Timing:
        """These times alone, without a zero for each that is not among them."""
        timing = cls.__new__(cls)
        timing.update(times or {})
        return timing


class Fork(AttributeDict):
    """Where a rollout is in the tree of its group, by the numbers of siblings. The third, which
    shares the first turn of the second: ``Fork(2, parent=1, turn=1)``. ``parent`` None: it began at
    the prompt; ``turn`` counts the turns it shares, so is the number of its first own turn."""

    sibling: int
    parent: int | None
    turn: int

    def __init__(self, sibling: int, parent: int | None = None, turn: int = 0):
        dict.__init__(self, sibling=sibling, parent=parent, turn=turn)

    @property
    def tree(self) -> int:
        """The sibling that its tree began with: a parent began at the prompt."""
        return self.sibling if self.parent is None else self.parent

    @classmethod
    def read(cls, saved: Mapping[str, Any] | None) -> Fork | None:
        """The fork of a saved rollout. *Raises* KeyError or TypeError for another shape."""
        if saved is None:
            return None
        parent = saved["parent"]
        return cls(
            int(saved["sibling"]), None if parent is None else int(parent), int(saved["turn"])
        )


def tree_number(fork: Mapping[str, object] | None) -> float:
    """The number of a rollout's tree in its group; NaN if it has none."""
    return math.nan if (read := Fork.read(fork)) is None else float(read.tree)
