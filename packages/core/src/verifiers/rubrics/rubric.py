"""``Rubric``: declared reward functions, whose weighted sum is the reward of a rollout.

A rubric declares functions, weights, a parser and objects; ``check_arguments`` verifies before a
run that every argument has a source. ``scoring`` runs the functions: the individual stage
(``score_individual``) as soon as a rollout ends, the group stage (``score_group_stage``) when the
last rollout of its group has ended; ``score_rollout`` and ``score_group`` are both stages in one
call.

Older call forms, and subclasses that override older methods, are the concern of ``legacy.scoring``,
which adapts each class when it is made.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, TypedDict, Unpack

from verifiers.errors import ConfigError, RunError
from verifiers.rollouts.author_code import decorated
from verifiers.rollouts.state import State
from verifiers.rubrics.arguments import RewardFunction, finite_weight, function_name, new_name
from verifiers.rubrics.scoring import (
    SUCCESS,
    Plan,
    RolloutScore,
    RolloutScores,
    call,
    each,
    score,
    score_group,
)
from verifiers.runtime.calls import blocking
from verifiers.runtime.signatures import set_extra_attributes, spell_out
from verifiers.runtime.suggest import close_match
from verifiers.storage.described import describe
from verifiers.storage.identity import Free, Identified

if TYPE_CHECKING:
    from verifiers.parsers import Parser

logger = logging.getLogger("verifiers.rubrics")
Semaphore = AbstractAsyncContextManager[Any]
Handler = tuple[Callable[..., Any], str]  # its stage: "rollout" or "group"
CLEANUP_LIMIT_S = 60.0


class ExtraAttributes(TypedDict):
    """Keywords of a subclass that become attributes. Empty for type checkers, so that they report
    misspellings."""


class ScoringOptions(TypedDict, total=False):
    """Parameters of ``Rubric`` that its subclasses pass on unchanged."""

    parallelize_scoring: bool
    timeout_s: float | None
    success: str | None


class RubricOptions(ScoringOptions, total=False):
    """The parameters of ``Rubric``, for the constructors of its subclasses."""

    funcs: Sequence[Callable[..., Any]] | None
    weights: Sequence[float] | None
    parser: Parser | None


class Rubric(Identified):
    """Reward functions with weights.

    Args:
        funcs: Reward functions. A function declares what it needs by name: ``prompt``,
            ``completion``, ``answer``, ``state``, ``info``, ``task``, ``parser``, or any column of
            the row; plural names (``completions``, ``states``, …) receive the whole group. It
            returns a number, and may be async; ``vf.NOT_APPLICABLE`` leaves a rollout to the other
            functions and out of the metric's mean, and so does None of a function of weight 0.
        weights: Weight of each function in the reward; default 1. A function of weight 0 is
            recorded as a metric alone.
        parser: Reads answers out of completions; functions receive it as ``parser``.
        parallelize_scoring: Run the functions of a rollout concurrently.
        timeout_s: Time limit of a call of a function, in seconds; None = no limit. Beyond it the
            reward is unknown.
        success: Name of the function whose value says whether the task was solved: 1 or 0, whatever
            the reward adds to it. It is recorded as the metric ``success``, and is what pass@k and
            an audit count. A subclass may set it as a class attribute, and any rubric after
            construction: ``rubric.success = "exact_match"``.

    A subclass may pass on further keywords, which become attributes.

    *Raises* ConfigError when the numbers of weights and functions differ, for two functions of the
    same name, and for an unknown keyword.

    >>> def short(completion):
    ...     return float(len(completion[-1].content) < 10)
    >>> state = vf.State(prompt="Name a colour.", completion=[vf.AssistantMessage("red")])
    >>> vf.Rubric(funcs=[short], weights=[0.5]).score_rollout_sync(state)["reward"]
    0.5
    """

    success: str | None = None
    """Name of the function that says whether the task was solved."""
    scores_itself: bool = False
    """Whether code of a subclass scores rollouts in place of the functions."""
    scores_groups: bool = False
    """Whether that code scores whole groups."""

    if TYPE_CHECKING:  # older methods, which ``legacy.scoring`` adds
        cleanup: Callable[..., Any]
        dummy_score_group: Callable[..., Any]
        dummy_score_rollout: Callable[..., Any]
        score_nothing: Callable[[State], None]
        score_rollouts: Callable[..., Any]
        score_rollouts_sync: Callable[..., RolloutScores]

    @spell_out(ExtraAttributes, {})
    def __init__(
        self,
        funcs: Sequence[Callable[..., Any]] | None = None,
        weights: Sequence[float] | None = None,
        parser: Parser | None = None,
        parallelize_scoring: Annotated[bool, Free("only how fast")] = False,
        timeout_s: float | None = 300.0,
        success: Annotated[
            str | None, Free("only what a statistic counts; no reward depends on it")
        ] = None,
        **kwargs: Unpack[ExtraAttributes],
    ):
        self._parser = parser
        self.parallelize_scoring = parallelize_scoring
        self.timeout_s = timeout_s
        self.class_objects: dict[str, Any] = {}
        """Parameter name -> object passed to functions that declare it."""
        self.score_object_providers: list[Callable[..., Any]] = []
        self.group_score_object_providers: list[Callable[..., Any]] = []
        self._funcs: list[Callable[..., Any]] = []
        self._weights: list[float] = []
        self._functions: list[RewardFunction] = []
        """What ``funcs`` and ``weights`` declared when they were last read."""
        self._group_weight = 1.0
        self._cleanup: list[Handler] = []
        self._advantage: RewardFunction | None = None
        for name, values in (("funcs", funcs), ("weights", weights)):
            if not isinstance(values, Iterable | None):
                raise ConfigError(f"{name} must be a list, not {values!r}: {name}=[…]", key=name)
        functions = list(funcs or ())
        weights = [1.0] * len(functions) if weights is None else list(weights)
        if len(weights) != len(functions):
            raise ConfigError(
                f"{len(functions)} reward functions and {len(weights)} weights; give one weight per"
                " function"
            )
        for func, weight in zip(functions, weights, strict=True):
            self.add_reward_func(func, weight)
        self._add_decorated()
        if success is not None:
            self.success = success
        set_extra_attributes(self, kwargs)

    def identity(self) -> dict[str, Any]:
        """As ``Identified``; ``funcs`` are all registered functions in order, including methods of
        a subclass."""
        registered = {
            "funcs": [
                {
                    "name": f.name,
                    **describe(f.function),
                    "is_group": f.is_group,
                    "isolated": f.isolated,
                }
                for f in self.functions
            ],
            "weights": [f.weight for f in self.functions],
            "group_weights": self.get_group_weights(),
        }
        if self._advantage is not None:
            registered["advantage"] = describe(self._advantage.function)
        return super().identity() | registered

    def __repr__(self) -> str:
        functions = [
            f.name if f.weight == 1 else f"{f.weight:g} * {f.name}" for f in self._functions
        ]
        return f"{type(self).__name__}({', '.join(functions)})"

    # --- declarations

    @functools.cached_property
    def logger(self) -> logging.Logger:
        """Named after its class."""
        return logging.getLogger(f"{type(self).__module__}.{type(self).__name__}")

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
        func: Callable[..., Any],
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
        func: Callable[..., Any],
        weight: float = 0.0,
        isolated: bool = False,
        stage: str | None = None,
    ) -> None:
        """Add a function whose value is recorded and, at weight 0, does not affect the reward."""
        self.add_reward_func(func, weight, isolated, stage)

    def add_class_object(self, name: str, obj: object) -> None:
        """Functions that declare a parameter ``name`` receive ``obj``."""
        self.class_objects[name] = obj

    def add_score_object_provider(self, provider: Callable[[State], Mapping[str, Any]]) -> None:
        """``provider(state) -> {name: object}``, called once per rollout for its individual
        functions."""
        self.score_object_providers.append(provider)

    def add_group_score_object_provider(
        self, provider: Callable[[list[State]], Mapping[str, Any]]
    ) -> None:
        """``provider(states) -> {name: object}``, called once per group for the group functions."""
        self.group_score_object_providers.append(provider)

    def add_cleanup_handler(self, handler: Callable[..., Any], stage: str = "rollout") -> None:
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
    def funcs(self) -> Sequence[Callable[..., Any]]:
        """The functions, a list that may be changed or assigned together with ``weights``."""
        return self._funcs

    @funcs.setter
    def funcs(self, funcs: Sequence[Callable[..., Any]]) -> None:
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

    def get_reward_funcs(self) -> list[Callable[..., Any]]:
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

    # --- scoring

    async def score_individual(self, state: State) -> None:
        """Metrics of the individual functions, and the reward when no function scores groups."""
        await score(self.plan(), state)

    async def score_group_stage(self, states: Sequence[State]) -> None:
        """Group metrics, the rewards that need them, advantages, then the cleanup handlers.

        ``states`` are all rollouts of an example, after ``score_individual``.
        """
        try:
            await score_group(self.plan(), states)
        finally:
            await self.run_cleanup(states)

    async def score_rollout(self, state: State, score_sem: Semaphore | None = None) -> RolloutScore:
        """Score one rollout in place. *Raises* ConfigError when a function scores whole groups."""
        plan = self.plan()
        for f in plan.functions:
            if f.is_group:
                raise ConfigError(
                    f"{f.name!r} scores whole groups; call score_group(states)", function=f.name
                )
        try:
            async with score_sem or nullcontext():
                await score(plan, state)
        finally:
            await self.run_cleanup([state])
        return RolloutScore.of(state)

    async def score_group(
        self, states: Sequence[State], score_sem: Semaphore | None = None
    ) -> RolloutScores:
        """Score rollouts of an example in place; ``score_sem`` limits how many at a time."""
        plan, slot = self.plan(), score_sem or nullcontext()

        async def score_one(state: State) -> None:
            async with slot:
                await score(plan, state)

        try:
            await each(score_one(state) for state in states)
            async with slot:
                await score_group(plan, states)
        finally:
            await self.run_cleanup(states)
        return RolloutScores.of(states)

    def score_rollout_sync(self, *args: Any, **kwargs: Any) -> RolloutScore:
        """``score_rollout``, blocking."""
        return blocking(lambda: self.score_rollout(*args, **kwargs))

    def score_group_sync(self, *args: Any, **kwargs: Any) -> RolloutScores:
        """``score_group``, blocking."""
        return blocking(lambda: self.score_group(*args, **kwargs))

    async def run_cleanup(self, states: Sequence[State]) -> None:
        """Run the cleanup handlers, each within 60 s and shielded from cancellation; a failure is
        logged."""
        pending = [state for state in states if not state.cleaned_up]
        if pending and (handlers := self.cleanup_handlers()):
            await asyncio.shield(self.call_cleanup_handlers(handlers, pending))

    async def call_cleanup_handlers(
        self, handlers: Sequence[Handler], states: Sequence[State]
    ) -> None:
        """Call each handler with its states; a failure is logged."""
        for handler, stage in handlers:
            for subject in [list(states)] if stage == "group" else states:
                await self._call_handler(function_name(handler), handler, subject)

    async def teardown(self) -> None:
        """Run the ``@teardown`` methods; called when the environment closes."""
        for name, function, _ in decorated(self, "teardown"):
            await self._call_handler(name, function)

    # --- implementation

    async def _call_handler(self, name: str, handler: Callable[..., Any], *args: object) -> None:
        try:
            await call(handler, *args, limit_s=CLEANUP_LIMIT_S)
        except RunError:
            raise
        except Exception:  # a failing handler must not discard a scored rollout
            logger.exception("the handler %r of %s failed", name, type(self).__name__)

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
