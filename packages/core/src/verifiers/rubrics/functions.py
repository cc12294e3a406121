"""One reward function: its parameters, the arguments of a call by parameter name, its weight, and checks of its value.

``Parameters.of(function, name)`` reads the signature once, when a function is registered; an ``ArgumentResolver`` looks
the values up at each call. Sources by precedence: core names, class objects, provider objects, dataset columns.
Message lists are copied, so that functions cannot change those of the rollout.

A value must be a finite int, float, bool or numpy scalar; anything else is a ``ScoringError`` naming the function.
When and where functions run is decided in ``scoring``.
"""

from __future__ import annotations

import functools
import inspect
import math
import os
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from verifiers.errors import ConfigError, RunError, ScoringError
from verifiers.rollouts.state import State
from verifiers.runtime.processes import ProcessPool, process_pool, require_isolatable
from verifiers.runtime.suggest import SIMILAR, close_match

SINGULAR = ("prompt", "completion", "answer", "state", "task", "info")
PLURAL = {"prompts": "prompt", "completions": "completion", "answers": "answer", "tasks": "task", "infos": "info"} | {
    "states": "state"
}
_MISSING: Any = object()


@dataclass(frozen=True, slots=True)
class Parameters:
    """The parameter names of a function. ``takes_all``: it has ``**kwargs`` and receives every available value."""

    required: tuple[str, ...]
    optional: tuple[str, ...]
    takes_all: bool

    @classmethod
    def of(cls, function: Callable[..., Any], name: str) -> Parameters:
        """*Raises* ConfigError for positional-only parameters, ``*args``, or an unreadable signature."""
        try:
            parameters = inspect.signature(function).parameters.values()
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{name!r} has no readable signature; wrap it in a function", function=name) from error
        required: list[str] = []
        optional: list[str] = []
        takes_all = False
        for parameter in parameters:
            if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.VAR_POSITIONAL):
                raise ConfigError(
                    f"{name!r} declares {str(parameter)!r}, but arguments are passed by name; "
                    "declare the names it needs, or **kwargs",
                    function=name,
                )
            if parameter.kind is parameter.VAR_KEYWORD:
                takes_all = True
            else:
                (required if parameter.default is parameter.empty else optional).append(parameter.name)
        return cls(tuple(required), tuple(optional), takes_all)

    def is_group(self, name: str, stage: str | None) -> bool:
        """Whether the function scores a whole group: by ``stage`` when given, else by its plural parameter names.

        *Raises* ConfigError when it mixes singular and plural names, or when ``stage`` contradicts them.
        """
        declared = self.required + self.optional
        singular = [p for p in declared if p in SINGULAR]
        plural = [p for p in declared if p in PLURAL]
        if singular and plural:
            raise ConfigError(
                f"{name!r} declares {singular[0]!r} (one rollout) and {plural[0]!r} (a group); "
                "write two functions, one for each",
                function=name,
            )
        if stage == "group" and singular:
            raise ConfigError(f"{name!r} scores a group and gets {singular[0] + 's'!r}, not {singular[0]!r}")
        return stage == "group" or (stage is None and bool(plural))

    def missing(self, available: set[str]) -> list[str]:
        """The required names that are not in ``available``."""
        return [name for name in self.required if name not in available]


class ArgumentResolver:
    """Arguments for the individual functions of one rollout. Objects come from the rubric that holds the function.

    Create it in the event loop: the isolated ones of ``functions`` run in that loop's worker processes.
    """

    __slots__ = ("columns", "processes", "provided", "state")

    def __init__(self, state: State, functions: Iterable[RewardFunction]):
        self.state = state
        self.processes: ProcessPool | None = None
        for function in functions:
            if function.isolated:
                self.processes = process_pool()
                break
        self.columns: Sequence[str] = state.input_columns
        self.provided: dict[int, Mapping[str, Any]] = {}
        """Provider objects by ``id`` of the rubric whose providers returned them."""

    def arguments(self, parameters: Parameters, rubric: object, name: str) -> dict[str, Any]:
        """Keyword arguments for one call. *Raises* ScoringError naming a required parameter that has no source."""
        if parameters.takes_all:
            values = self._all_arguments(rubric)
            absent = [parameter for parameter in parameters.required if parameter not in values]
        else:
            values = {parameter: self.find(parameter, rubric) for parameter in parameters.required}
            absent = [parameter for parameter, value in values.items() if value is _MISSING]
            for parameter in parameters.optional:
                if (value := self.find(parameter, rubric)) is not _MISSING:
                    values[parameter] = value
        if absent:
            raise ScoringError(unsupplied(name, absent[0], set(self._all_arguments(rubric))), function=name)
        return values

    def find(self, name: str, rubric: Any) -> Any:
        """The value for a parameter name, or the marker ``_MISSING``."""
        if (value := self.core(name)) is not _MISSING:
            return value
        if name in rubric.class_objects:
            return rubric.class_objects[name]
        if name == "parser":
            return rubric.parser
        if name in (provided := self.provided.get(id(rubric), {})):
            return provided[name]
        return self.column(name) if name in self.columns else _MISSING

    def core(self, name: str) -> Any:
        return rollout_value(self.state, name) if name in SINGULAR else _MISSING

    def column(self, name: str) -> Any:
        return self.state[name]

    def core_names(self) -> Sequence[str]:
        return SINGULAR

    def _all_arguments(self, rubric: Any) -> dict[str, Any]:
        provided = self.provided.get(id(rubric), {})
        names = dict.fromkeys((*self.core_names(), *rubric.class_objects, "parser", *provided, *self.columns))
        return {name: self.find(name, rubric) for name in names}


class GroupArgumentResolver(ArgumentResolver):
    """Arguments for group functions: lists in group order."""

    __slots__ = ("states",)

    def __init__(self, states: Sequence[State], functions: Iterable[RewardFunction]):
        super().__init__(states[0], functions)
        self.states = states
        self.columns = [
            name for name in dict.fromkeys(n for s in states for n in s.input_columns) if name not in SINGULAR
        ]

    def core(self, name: str) -> Any:
        if name == "states":
            return list(self.states)
        return [rollout_value(state, PLURAL[name]) for state in self.states] if name in PLURAL else _MISSING

    def column(self, name: str) -> Any:
        return [state.get(name) for state in self.states]

    def core_names(self) -> Sequence[str]:
        return tuple(PLURAL)


def rollout_value(state: State, name: str) -> Any:
    """A core value of one rollout. Message lists are copies; a missing completion is empty."""
    if name == "state":
        return state
    value = state[name]
    if name == "completion" and value is None:
        return "" if isinstance(state["prompt"], str) else []
    return list(value) if name in ("prompt", "completion") and isinstance(value, list) else value


def unsupplied(name: str, parameter: str, available: set[str]) -> str:
    """The error message for a required parameter that no source has."""
    near = close_match(parameter, sorted(available), SIMILAR)
    hint = f"did you mean {near!r}?" if near else f"it can have {', '.join(sorted(available))}"
    return f"reward function {name!r} needs an argument {parameter!r} that nothing supplies; {hint}"


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
            assert resolver.processes is not None, f"{self.name!r} is not among the functions of its resolver"
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
    failure = ScoringError(f"reward function {name!r}: {text}", function=name, **_place(error))
    failure.__cause__ = error
    return failure


def _place(error: BaseException) -> dict[str, Any]:
    """File name and line in the author's function, where the traceback has them."""
    place: dict[str, Any] = {}
    path = None
    for frame, line in traceback.walk_tb(error.__traceback__):
        if path is None and not _is_ours(frame.f_code.co_filename):
            path = frame.f_code.co_filename
        if path == frame.f_code.co_filename:
            place = {"file": os.path.basename(path), "line": line}
    return place


def _is_ours(path: str) -> bool:
    """Whether a file belongs to this package or to the standard library, which call the author's function."""
    return path.startswith((_PACKAGE, "<frozen")) or (
        path.startswith(_STANDARD_LIBRARY) and "site-packages" not in path
    )


_PACKAGE = str(Path(__file__).resolve().parents[1]) + os.sep
_STANDARD_LIBRARY = os.path.dirname(os.__file__) + os.sep


def _short_repr(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"a {type(value).__name__} ({text[:57]}…)"
