"""``Declarations``: the part of a rubric that holds what it runs: functions, weights, objects, handlers.

``funcs`` and ``weights`` are lists that may be changed or assigned; ``functions`` are the declared
functions that follow from them, and ``plan`` is what one scoring pass runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from verifiers.errors import ConfigError
from verifiers.rollouts.author_code import decorated
from verifiers.rollouts.state import State
from verifiers.rubrics.arguments import RewardFunction, finite_weight, new_name
from verifiers.rubrics.scoring import SUCCESS, Plan
from verifiers.runtime.suggest import close_match

if TYPE_CHECKING:
    from verifiers.parsers import Parser

Handler = tuple[Callable[..., Any], str]  # its stage: "rollout" or "group"


class Declarations:
    """A base class of ``Rubric``."""

    parallelize_scoring: bool
    success: str | None = None
    """Name of the function that says whether the task was solved."""
    scores_groups: bool = False
    """Whether code of a subclass scores whole groups in place of the functions."""

    def __init__(self, parser: Parser | None = None):
        self._parser = parser
        self.class_objects: dict[str, object] = {}
        """Parameter name -> object passed to functions that declare it."""
        self.score_object_providers: list[Callable[..., Any]] = []
        self.group_score_object_providers: list[Callable[..., Any]] = []
        self._funcs: list[Callable[..., object]] = []
        self._weights: list[float] = []
        self._functions: list[RewardFunction] = []
        """What ``funcs`` and ``weights`` declared when they were last read."""
        self._group_weight = 1.0
        self._cleanup: list[Handler] = []
        self._advantage: RewardFunction | None = None

    @property
    def parser(self) -> Parser:
        """The parser passed to the constructor; by default a plain ``Parser()``."""
        if self._parser is None:
            from verifiers.parsers import Parser

            self._parser = Parser()
        return self._parser

    @parser.setter
    def parser(self, parser: Parser) -> None:
        self._parser = parser

    def add_reward_func(
        self,
        func: Callable[..., object],
        weight: float = 1.0,
        isolated: bool = False,
        stage: str | None = None,
    ) -> None:
        """Add a function.

        ``isolated`` runs it in a worker process that is killed after ``timeout_s``. ``stage``
        ("rollout" or "group") is needed when its parameter names do not determine it. *Raises*
        ConfigError for a duplicate name or an invalid weight or signature.
        """
        name = new_name(func, {f.name for f in self._functions})
        function = RewardFunction.of(func, name, weight, self, isolated, stage)
        self._functions = [*self._functions, function]
        self._funcs.append(func)
        self._weights.append(function.weight)

    def add_metric(
        self,
        func: Callable[..., object],
        weight: float = 0.0,
        isolated: bool = False,
        stage: str | None = None,
    ) -> None:
        """Add a function whose value is recorded and, at weight 0, does not affect the reward."""
        self.add_reward_func(func, weight, isolated, stage)

    def add_class_object(self, name: str, obj: object) -> None:
        """Functions that declare a parameter ``name`` receive ``obj``."""
        self.class_objects[name] = obj

    def add_score_object_provider(self, provider: Callable[[State], Mapping[str, object]]) -> None:
        """``provider(state) -> {name: object}``, called once per rollout for its individual
        functions."""
        self.score_object_providers.append(provider)

    def add_group_score_object_provider(
        self, provider: Callable[[list[State]], Mapping[str, object]]
    ) -> None:
        """``provider(states) -> {name: object}``, called once per group for the group functions."""
        self.group_score_object_providers.append(provider)

    def add_cleanup_handler(self, handler: Callable[..., object], stage: str = "rollout") -> None:
        """``handler(state)``, or ``handler(states)`` with ``stage="group"``, after every scoring
        pass."""
        self._cleanup.append((handler, stage))

    @property
    def functions(self) -> tuple[RewardFunction, ...]:
        """The functions that are called, in declaration order: those of ``funcs`` with their
        ``weights``.

        *Raises* ConfigError when the two lists differ in length, and as ``add_reward_func``.
        """
        funcs, weights, names = self.declared()
        if len(funcs) != len(weights):
            raise ConfigError(
                f"the rubric has {len(funcs)} functions and {len(weights)} weights; change both"
                " lists, or use add_reward_func(func, weight)"
            )
        built = [f.function for f in self._functions], [f.weight for f in self._functions]
        if built != (funcs, weights) or (
            names is not None and [f.name for f in self._functions] != names
        ):
            self._functions = self._rebuilt(funcs, weights, names)
        return tuple(self._functions)

    def declared(self) -> tuple[list[Callable[..., Any]], list[float], list[str] | None]:
        """Functions, weights, and names if these differ from the functions' own."""
        return self._funcs, self._weights, None

    @property
    def funcs(self) -> Sequence[Callable[..., object]]:
        """The functions, a list that may be changed or assigned together with ``weights``."""
        return self._funcs

    @funcs.setter
    def funcs(self, funcs: Sequence[Callable[..., object]]) -> None:
        self._funcs = funcs if isinstance(funcs, list) else list(funcs)

    @property
    def weights(self) -> Sequence[float]:
        """A weight per function, a list that may be changed or assigned."""
        return self._weights

    @weights.setter
    def weights(self, weights: Sequence[float]) -> None:
        self._weights = weights if isinstance(weights, list) else list(weights)

    def get_reward_func_names(self) -> list[str]:
        """Names of all functions, including metrics, in declaration order."""
        return [f.name for f in self.functions]

    def get_reward_funcs(self) -> list[Callable[..., object]]:
        return list(self.funcs)

    def get_reward_weights(self) -> list[float]:
        return list(self.weights)

    @property
    def has_group_rewards(self) -> bool:
        """Whether a function scores whole groups."""
        return self.scores_groups or any(f.is_group for f in self.functions)

    @property
    def advantage_function(self) -> RewardFunction | None:
        return self._advantage

    @property
    def has_advantages(self) -> bool:
        """Whether an ``@advantage`` method replaces the default formula."""
        return self.advantage_function is not None

    @property
    def success_metric(self) -> str | None:
        """The function that says whether the task was solved: ``success``, else a function called
        "success".

        *Raises* ConfigError when no function has that name.
        """
        return self.plan().success

    def success_among(self, functions: Sequence[RewardFunction]) -> str | None:
        """``success_metric`` of a rubric with these functions."""
        name, names = self.success, [f.name for f in functions]
        # none, or a reward function of a subclass that is called success
        if not isinstance(name, str):
            return SUCCESS if SUCCESS in names else None
        if name not in names:
            near = close_match(name, names)
            if near:
                hint = f"did you mean {near!r}?"
            else:
                hint = f"the functions are: {', '.join(names) or 'none'}"
            raise ConfigError(
                f"success={name!r} names no function of the rubric; {hint}", key="success"
            )
        if name != SUCCESS and SUCCESS in names:
            raise ConfigError(
                f"success={name!r}, but another function is named 'success', whose metric it would"
                " replace; rename it",
                key="success",
            )
        return name

    def get_group_weights(self) -> list[float]:
        """The factor on this rubric's reward, as a list of one. A ``RubricGroup`` has one per
        child."""
        return [self._group_weight]

    def set_group_weights(self, weights: Sequence[float]) -> None:
        """Set the factor on this rubric's reward. *Raises* ConfigError unless it is one finite
        number in a list."""
        if len(weights) != 1:
            raise ConfigError(f"a plain rubric has one group weight, not {len(weights)}")
        self._group_weight = finite_weight(weights[0], type(self).__name__)

    def check_arguments(self, columns: set[str]) -> None:
        """*Raises* ConfigError naming a required parameter that no core name, object or dataset
        column supplies.

        Functions of a rubric with object providers are not checked: provided names are known only
        at run time.
        """
        _ = self.success_metric  # a misspelt name is refused before a run
        for f in self.functions:
            for message in f.missing(columns).values():
                raise ConfigError(message, function=f.name)

    def check_needs(self) -> None:
        """*Raises* ConfigError when something beside the data is missing, a judge's key for
        instance. Before a run."""

    def plan(self) -> Plan:
        """The functions and effective weights; a scoring pass reads it once, at its start."""
        functions = self.functions
        weights = {
            f.name: weight for f in functions if (weight := self._group_weight * f.weight) != 0
        }
        return Plan(
            functions,
            weights,
            self.parallelize_scoring,
            self._advantage,
            self.success_among(functions),
        )

    def renamed(self, function: RewardFunction, name: str) -> RewardFunction:
        """A copy of one of its functions with another name, for a group in which two functions
        share a name."""
        return function.under(name)

    def cleanup_handlers(self) -> list[Handler]:
        """(handler, stage) pairs in the order they run."""
        return list(self._cleanup)

    def _rebuilt(
        self, funcs: list[Any], weights: list[float], names: list[str] | None
    ) -> list[RewardFunction]:
        """The functions of changed lists; those that were there before stay as they were added."""
        before = list(self._functions)
        built: list[RewardFunction] = []
        for func, weight, name in zip(funcs, weights, names or [""] * len(funcs), strict=True):
            match = next((f for f in before if f.function == func), None)
            if match is None:
                name = name or new_name(func, {f.name for f in built})
                built.append(RewardFunction.of(func, name, weight, self))
            else:
                before.remove(match)
                name = name or match.name
                built.append(replace(match, name=name, weight=finite_weight(weight, name)))
        return built

    def _add_decorated(self) -> None:
        """Register the decorated methods of a subclass, rewards first."""
        for kind in ("reward", "metric"):
            for _, function, options in decorated(self, kind):
                self.add_reward_func(function, options.weight, stage=options.stage)
        self._cleanup += [
            (function, options.stage or "rollout")
            for _, function, options in decorated(self, "cleanup")
        ]
        advantages = decorated(self, "advantage")
        if len(advantages) > 1:
            raise ConfigError(
                f"two @advantage methods: {advantages[0][0]!r} and {advantages[1][0]!r}; keep one"
            )
        for name, function, _ in advantages:
            self._advantage = RewardFunction.of(function, name, 0.0, self, False, "group")
