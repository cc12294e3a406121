"""Pass arguments to reward functions by parameter name.

``Parameters.of(function, name)`` reads the signature once, when a function is registered; an ``ArgumentResolver`` looks
the values up at each call. Sources by precedence: core names, class objects, provider objects, dataset columns.
Message lists are copied, so that functions cannot change those of the rollout.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verifiers.errors import ConfigError, ScoringError
from verifiers.rollouts.state import State
from verifiers.runtime.processes import ProcessPool, process_pool
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

    Create it in the event loop: isolated functions run in that loop's worker processes.
    """

    __slots__ = ("columns", "processes", "provided", "state")

    def __init__(self, state: State):
        self.state = state
        self.processes: ProcessPool = process_pool()
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

    def __init__(self, states: Sequence[State]):
        super().__init__(states[0])
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
