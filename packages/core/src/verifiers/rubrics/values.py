"""What a reward function says of a rollout: a finite number, that it does not apply, or its failure.

A value must be a finite int, float, bool or numpy scalar; anything else is a ``ScoringError`` naming
the function. ``NOT_APPLICABLE`` (of weight 0 also None) says that the function has nothing to say.
"""

from __future__ import annotations

import math
import os
import traceback
from collections.abc import Sequence
from decimal import Decimal
from enum import Enum
from fractions import Fraction

import numpy as np

from verifiers.errors import RunError, ScoringError, message_of
from verifiers.rollouts.state import State
from verifiers.rollouts.values import LARGEST, number
from verifiers.rubrics.arguments import RewardFunction
from verifiers.runtime.places import is_library
from verifiers.types import StopReason


class NotApplicable(Enum):
    """The type of ``NOT_APPLICABLE``."""

    NOT_APPLICABLE = "not applicable"


NOT_APPLICABLE = NotApplicable.NOT_APPLICABLE
"""The value of a reward function for a rollout that it does not apply to: the reward is that of the
other functions, and the metric leaves the rollout out of its mean."""
Value = float | NotApplicable | ScoringError
"""What a function says of a rollout."""


def value_or_error(value: object, function: RewardFunction) -> Value:
    """The value of a function as a float; the error unless it is a finite number, of at most
    ``LARGEST``, or says that the function does not apply."""
    if isinstance(value, NotApplicable) or (value is None and function.weight == 0):
        return NOT_APPLICABLE
    if isinstance(value, np.generic):
        value = value.item()
    elif isinstance(value, Decimal | Fraction):
        value = float(value)
    if not isinstance(value, (int, float)):
        problem = f"{_short_repr(value)}; return a number, or vf.NOT_APPLICABLE"
    else:
        if not math.isnan(usable := number(value)):
            return usable
        is_finite = isinstance(value, int) or math.isfinite(value)
        problem = f"a number beyond ±{LARGEST:g}" if is_finite else f"{value}, which is not finite"
    name = function.name
    return ScoringError(f"reward function {name!r} returned {problem}", function=name)


def values_of_group(values: object, size: int, function: RewardFunction) -> Sequence[Value]:
    """The values of a group function; an error for all rollouts unless they are a list of group
    length."""
    name = function.name
    if isinstance(values, np.ndarray):
        values = list(values)
    if not isinstance(values, (list, tuple)):
        problem = f"returned {_short_repr(values)}; return a list of {size} numbers"
    elif len(values) != size:
        problem = f"returned {len(values)} values for a group of {size}"
    else:
        return [value_or_error(value, function) for value in values]
    return [ScoringError(f"group function {name!r} {problem}", function=name)] * size


def _short_repr(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"a {type(value).__name__} ({text[:57]}…)"


def scoring_error(error: BaseException, name: str, state: State | None = None) -> ScoringError:
    """The ``ScoringError`` for a failed function, with the failure as its cause; if ``state`` has no
    completion because its prompt is too long, it says so.

    *Raises* the error itself when it ends the run (``RunError``).
    """
    if isinstance(error, RunError):
        raise error
    if isinstance(error, ScoringError):
        error.facts.setdefault("function", name)
        return error
    if isinstance(error, TimeoutError):
        text = message_of(error) or "timed out"
    else:
        text = f"raised {type(error).__name__}: {message_of(error)}"
    message = f"reward function {name!r}: {text}"
    record = None if state is None else state.record
    if (
        record is not None
        and record.stop == StopReason.PROMPT_TOO_LONG.value
        and not record.transcript.turns
    ):
        message = (
            "the first prompt does not fit the context of the model, so there is no completion to"
            f" score; {message}"
        )
    failure = ScoringError(message, function=name, **_location(error))
    failure.__cause__ = error
    return failure


def _location(error: BaseException) -> dict[str, object]:
    """File name and line in the author's function, if the traceback has them."""
    location: dict[str, object] = {}
    path = None
    for frame, line in traceback.walk_tb(error.__traceback__):
        if path is None and not is_library(frame.f_code.co_filename):
            path = frame.f_code.co_filename
        if path == frame.f_code.co_filename:
            location = {"file": os.path.basename(path), "line": line}
    return location
