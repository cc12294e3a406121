"""A declared reward function, and the arguments that it receives by parameter name.

By precedence they come from core names, class objects, the parser, provider objects and dataset
columns. Message lists are copied, so that functions cannot change those of the rollout.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, SupportsFloat, SupportsIndex

from verifiers.errors import ConfigError, ScoringError
from verifiers.rollouts.state import State
from verifiers.runtime.processes import ProcessPool, require_isolatable
from verifiers.runtime.suggest import SIMILAR, close_match
from verifiers.types import RewardFunc

SINGULAR = ("prompt", "completion", "answer", "state", "task", "info")
PLURAL = {f"{name}s": name for name in SINGULAR}
ISOLATED_LIMIT_S = 300.0
"""Time limit of an isolated function whose rubric has none: isolated functions are expected to hang
occasionally."""


@dataclass(frozen=True, slots=True, eq=False)
class RewardFunction:
    """A function of a rubric. Called with an ``ArgumentResolver``, it runs the function and returns
    the raw value."""

    function: Callable[..., Any]
    name: str
    weight: float
    is_group: bool
    """Called once per group, with lists; returns a list."""
    isolated: bool
    """Runs in a worker process that is killed at the time limit."""
    required: tuple[str, ...]
    """Names of the parameters without a default."""
    optional: tuple[str, ...]
    takes_all: bool
    """It has ``**kwargs`` and receives every available value."""
    rubric: Any = field(repr=False)
    """The rubric that registered it: source of its parser, objects and ``timeout_s``."""
    is_async: bool

    @classmethod
    def of(
        cls,
        function: RewardFunc,
        name: str,
        weight: float,
        rubric: object,
        isolated: bool = False,
        stage: str | None = None,
    ) -> RewardFunction:
        """*Raises* ConfigError for an invalid weight or signature."""
        if not callable(function):
            raise ConfigError(f"a reward function must be callable, not {type(function).__name__}")
        required, optional, takes_all = _parameters(function, name)
        is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
            getattr(function, "__call__", None)  # noqa: B004  an object whose __call__ is a coroutine function
        )
        if isolated and is_async:
            raise ConfigError(
                f"{name!r} is a coroutine function and cannot run isolated", function=name
            )
        if isolated:
            require_isolatable(function, name)
        return cls(
            function,
            name,
            finite_weight(weight, name),
            _scores_groups(required + optional, name, stage),
            isolated,
            required,
            optional,
            takes_all,
            rubric,
            is_async,
        )

    def under(self, name: str, function: Callable[..., object] | None = None) -> RewardFunction:
        """A copy with another name, and with another callable of the same parameters if there is
        any."""
        return replace(self, name=name, function=self.function if function is None else function)

    @property
    def time_limit_s(self) -> float | None:
        """Limit for the worker thread, in seconds; None for an isolated function, whose process
        enforces it."""
        return None if self.isolated else self.rubric.timeout_s

    def missing(self, columns: Iterable[str]) -> dict[str, str]:
        """Required parameters that no core name, object or dataset column supplies, with the error
        message of each.

        Empty for a rubric with object providers, whose names are known only at run time.
        """
        rubric = self.rubric
        if rubric.group_score_object_providers if self.is_group else rubric.score_object_providers:
            return {}
        available = {
            *(PLURAL if self.is_group else SINGULAR),
            *columns,
            *rubric.class_objects,
            "parser",
        }
        return {
            name: unsupplied(self.name, name, available)
            for name in self.required
            if name not in available
        }

    def __call__(self, resolver: ArgumentResolver) -> Any:
        arguments = resolver.arguments(self)
        if self.isolated:
            assert resolver.processes is not None, (
                f"{self.name!r} is not among the functions of its resolver"
            )
            limit_s = ISOLATED_LIMIT_S if self.rubric.timeout_s is None else self.rubric.timeout_s
            return resolver.processes.call(self.function, arguments, limit_s, self.name)
        return self.function(**arguments)


def function_name(function: Callable[..., object]) -> str:
    """``__name__`` of a function, of the function a partial wraps, or of a callable
    object's class."""
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__name__", None) or type(function).__name__


def new_name(func: Callable[..., object], names: set[str]) -> str:
    """The name of a function beside those of ``names``; lambdas are numbered. *Raises* ConfigError
    for a duplicate."""
    name = function_name(func)
    if name == "<lambda>" and name in names:
        name = free_name(name, names)
    if name in names:
        raise ConfigError(
            f"two reward functions are named {name!r}; rename one of them", function=name
        )
    return name


def free_name(name: str, names: set[str]) -> str:
    """The first of ``name_2``, ``name_3``, … that is not among ``names``."""
    numbered = (f"{name}_{number}" for number in range(2, len(names) + 3))
    return next(free for free in numbered if free not in names)


def finite_weight(weight: SupportsFloat | SupportsIndex | str, name: str) -> float:
    """The weight as a float. *Raises* ConfigError unless it is a finite number."""
    try:
        number = float(weight)
    except (TypeError, ValueError) as error:
        text = f"the weight of {name!r} is {weight!r}; give a number"
        raise ConfigError(text, function=name) from error
    if not math.isfinite(number):
        raise ConfigError(
            f"the weight of {name!r} is {weight!r}; give a finite number", function=name
        )
    return number


def _parameters(
    function: Callable[..., object], name: str
) -> tuple[tuple[str, ...], tuple[str, ...], bool]:
    """Required names, optional names, and whether there is ``**kwargs``.

    *Raises* ConfigError for positional-only parameters, ``*args``, or an unreadable signature.
    """
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{name!r} has no readable signature; wrap it in a function", function=name
        ) from error
    by_name = [p for p in parameters if p.kind is not p.VAR_KEYWORD]
    for parameter in by_name:
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.VAR_POSITIONAL):
            raise ConfigError(
                f"{name!r} declares {str(parameter)!r}, but arguments are passed by name; "
                "declare the names it needs, or **kwargs",
                function=name,
            )
    required = tuple(p.name for p in by_name if p.default is p.empty)
    return (
        required,
        tuple(p.name for p in by_name if p.default is not p.empty),
        len(by_name) < len(parameters),
    )


def _scores_groups(parameters: Sequence[str], name: str, stage: str | None) -> bool:
    """Whether a function scores a whole group: by ``stage`` if it has a stage, else by its plural
    parameter names.

    *Raises* ConfigError when it mixes singular and plural names, or when ``stage`` contradicts
    them.
    """
    singular = [parameter for parameter in parameters if parameter in SINGULAR]
    plural = [parameter for parameter in parameters if parameter in PLURAL]
    if singular and plural:
        raise ConfigError(
            f"{name!r} declares {singular[0]!r} (one rollout) and {plural[0]!r} (a group); "
            "write two functions, one for each",
            function=name,
        )
    if stage == "group" and singular:
        raise ConfigError(
            f"{name!r} scores a group and gets {singular[0] + 's'!r}, not {singular[0]!r}"
        )
    return stage == "group" or (stage is None and bool(plural))


@dataclass(slots=True)
class ArgumentResolver:
    """Arguments for the functions of a rollout, or for those of a group, which get lists in group
    order. Objects come from the rubric that holds the function."""

    states: Sequence[State]
    processes: ProcessPool | None = None
    """Worker processes of the running loop, if a function is isolated."""
    provided: dict[int, Mapping[str, object] | ScoringError] = field(default_factory=dict)
    """Objects by ``id`` of the rubric whose providers returned them, or the failure
    of a provider."""

    def arguments(self, function: RewardFunction) -> dict[str, Any]:
        """Keyword arguments for a call. *Raises* ScoringError naming a required parameter that
        has no source."""
        rubric, is_group = function.rubric, function.is_group
        core_names: Collection[str] = PLURAL if is_group else SINGULAR
        provided = self.provided.get(id(rubric), {})
        if isinstance(provided, ScoringError):
            raise provided
        every_column = dict.fromkeys(column for state in self.states for column in state.record.row)
        columns = [column for column in every_column if column not in SINGULAR]
        names: Collection[str] = function.required + function.optional
        if function.takes_all:
            names = dict.fromkeys(
                (*core_names, *rubric.class_objects, "parser", *provided, *columns)
            )
        values: dict[str, Any] = {}
        for name in names:
            if name in core_names and is_group:
                values[name] = [rollout_value(state, PLURAL[name]) for state in self.states]
            elif name in core_names:
                values[name] = rollout_value(self.states[0], name)
            elif name in rubric.class_objects:
                values[name] = rubric.class_objects[name]
            elif name == "parser":
                values[name] = rubric.parser
            elif name in provided:
                values[name] = provided[name]
            elif name in columns and is_group:
                values[name] = [state.get(name) for state in self.states]
            elif name in columns:
                values[name] = self.states[0][name]
        for name in function.required:
            if name not in values:
                available = {*core_names, *rubric.class_objects, "parser", *provided, *columns}
                raise ScoringError(
                    unsupplied(function.name, name, available), function=function.name
                )
        return values


def rollout_value(state: State, name: str) -> Any:
    """A core value of a rollout. Message lists are copies; a missing completion is empty."""
    if name == "state":
        return state
    row = state.record.row
    value = state.record.completion if name == "completion" else row[name]
    if value is None and name == "completion":
        return "" if isinstance(row["prompt"], str) else []
    is_messages = name in ("prompt", "completion") and isinstance(value, list)
    return list(value) if is_messages else value


def unsupplied(name: str, parameter: str, available: set[str]) -> str:
    """The error message for a required parameter that no source has."""
    near = close_match(parameter, sorted(available), SIMILAR)
    hint = f"did you mean {near!r}?" if near else f"it can have {', '.join(sorted(available))}"
    return f"reward function {name!r} needs an argument {parameter!r} that nothing supplies; {hint}"
