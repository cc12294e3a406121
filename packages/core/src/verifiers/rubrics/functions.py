"""One registered reward function: its name, weight and parameters, and the checks of its return value.

A value must be a finite int, float, bool or numpy scalar; anything else is a ``ScoringError`` naming the function.
When and where functions run is decided in ``scoring``.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from verifiers.errors import ConfigError, RunError, ScoringError
from verifiers.rubrics.arguments import ArgumentResolver, Parameters
from verifiers.runtime.processes import require_isolatable

ISOLATED_LIMIT_S = 300.0
"""Time limit of an isolated function whose rubric has none: isolated functions are expected to hang occasionally."""


@dataclass(frozen=True, slots=True, eq=False)
class RewardFunction:
    """A function of a rubric. Called with an ``ArgumentResolver``, it runs the function and returns the raw value."""

    function: Callable[..., Any]
    name: str
    weight: float
    is_group: bool
    """Called once per group, with lists; returns a list."""
    isolated: bool
    """Runs in a worker process that is killed at the time limit."""
    parameters: Parameters
    rubric: Any = field(repr=False)
    """The rubric that registered it: source of its parser, objects and ``timeout_s``."""
    is_async: bool

    @classmethod
    def of(
        cls, function: Callable[..., Any], name: str, weight: float, rubric: object, isolated: bool, stage: str | None
    ) -> RewardFunction:
        """*Raises* ConfigError for an invalid weight or signature."""
        if not callable(function):
            raise ConfigError(f"a reward function must be callable, not {type(function).__name__}")
        parameters = Parameters.of(function, name)
        is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
            getattr(function, "__call__", None)  # noqa: B004  an object whose __call__ is a coroutine function
        )
        if isolated and is_async:
            raise ConfigError(f"{name!r} is a coroutine function and cannot run isolated", function=name)
        if isolated:
            require_isolatable(function, name)
        is_group = parameters.is_group(name, stage)
        return cls(function, name, finite_weight(weight, name), is_group, isolated, parameters, rubric, is_async)

    def under(self, name: str, function: Callable[..., Any] | None = None) -> RewardFunction:
        """A copy with another name, and with another callable of the same parameters when given."""
        return replace(self, name=name, function=self.function if function is None else function)

    @property
    def time_limit_s(self) -> float | None:
        """Limit for the worker thread, in seconds; None for an isolated function, whose process enforces it."""
        return None if self.isolated else self.rubric.timeout_s

    def __call__(self, resolver: ArgumentResolver) -> Any:
        arguments = resolver.arguments(self.parameters, self.rubric, self.name)
        if self.isolated:
            limit_s = ISOLATED_LIMIT_S if self.rubric.timeout_s is None else self.rubric.timeout_s
            return resolver.processes.call(self.function, arguments, limit_s, self.name)
        return self.function(**arguments)


def function_name(function: Callable[..., Any]) -> str:
    """``__name__`` of a function, of the function a partial wraps, or of a callable object's class."""
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__name__", None) or type(function).__name__


def finite_weight(weight: Any, name: str) -> float:
    """The weight as a float. *Raises* ConfigError unless it is a finite number."""
    try:
        number = float(weight)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"the weight of {name!r} is {weight!r}; give a number", function=name) from error
    if not math.isfinite(number):
        raise ConfigError(f"the weight of {name!r} is {weight!r}; give a finite number", function=name)
    return number


def finite_value(value: object, name: str) -> float:
    """The value as a float. *Raises* ScoringError when it is not a finite number."""
    if isinstance(value, np.generic):
        value = value.item()
    if not isinstance(value, (int, float)):
        raise ScoringError(f"reward function {name!r} returned {_short_repr(value)}; return a number", function=name)
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ScoringError(f"reward function {name!r} returned {number}, which is not finite", function=name)
    return number


def value_list(values: object, size: int, name: str) -> Sequence[Any]:
    """The values of a group function. *Raises* ScoringError when they are not a list of group length."""
    if isinstance(values, np.ndarray):
        values = list(values)
    if not isinstance(values, (list, tuple)):
        raise ScoringError(
            f"group function {name!r} returned {_short_repr(values)}; return a list of {size} numbers", function=name
        )
    if len(values) != size:
        raise ScoringError(
            f"group function {name!r} returned {len(values)} values for a group of {size}", function=name
        )
    return values


def scoring_error(error: BaseException, name: str) -> ScoringError:
    """The ``ScoringError`` for a failed function, with the failure as its cause.

    *Raises* the error itself when it ends the run (``RunError``).
    """
    if isinstance(error, RunError):
        raise error
    if isinstance(error, ScoringError):
        error.facts.setdefault("function", name)
        return error
    if isinstance(error, TimeoutError) and not str(error):
        text = "timed out"
    else:
        text = f"raised {type(error).__name__}: {error}" if not isinstance(error, TimeoutError) else str(error)
    failure = ScoringError(f"reward function {name!r}: {text}", function=name)
    failure.__cause__ = error
    return failure


def _short_repr(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"a {type(value).__name__} ({text[:57]}…)"
