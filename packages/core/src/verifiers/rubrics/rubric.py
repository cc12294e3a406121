"""``Rubric``: the reward of a rollout as a weighted sum of functions, and how the functions run.

A rubric declares functions, weights, a parser and objects; ``check_arguments`` verifies before a run that every
argument has a source. Scoring writes rewards and metrics into the state. The individual stage (``score_individual``)
runs as soon as a rollout ends, the group stage (``score_group_stage``) when the last rollout of its group has ended;
``score_rollout`` and ``score_group`` are both stages in one call.

A function receives arguments by parameter name, by precedence from core names, class objects, provider objects and
dataset columns. Message lists are copied, so that functions cannot change those of the rollout. A value must be a
finite int, float, bool or numpy scalar; anything else is a ``ScoringError`` naming the function.

An unknown reward is NaN, never 0. A failed function gives an unknown value: its metric is NaN, the reward that needs it
is NaN, and the ``ScoringError`` is recorded in ``state["error"]`` unless that has an earlier error. Functions are not
called for rollouts that ended in an error that is not scorable; group functions receive only the other rollouts, so
that siblings keep their rewards.

Worker threads and processes are in ``runtime``; older call forms are in ``legacy.scoring``.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import math
import os
import traceback
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any, SupportsFloat, SupportsIndex, TypedDict, Unpack

import numpy as np

from verifiers import compat
from verifiers.errors import ConfigError, EnvironmentFault, RunError, ScoringError
from verifiers.rollouts.author_code import decorated
from verifiers.rollouts.state import State
from verifiers.rubrics.advantages import centered_advantages
from verifiers.rubrics.scores import RolloutScore, RolloutScores
from verifiers.runtime.calls import blocking, is_awaitable
from verifiers.runtime.processes import ProcessPool, process_pool, require_isolatable
from verifiers.runtime.signatures import spell_out
from verifiers.runtime.suggest import SIMILAR, check_keywords, close_match
from verifiers.runtime.worker_threads import Raised, call_in_thread, workers
from verifiers.storage.identity import Free, Identified, describe

if TYPE_CHECKING:
    from verifiers.parsers import Parser

logger = logging.getLogger("verifiers.rubrics")
Semaphore = AbstractAsyncContextManager[Any]

SINGULAR = ("prompt", "completion", "answer", "state", "task", "info")
PLURAL = {"prompts": "prompt", "completions": "completion", "answers": "answer", "tasks": "task", "infos": "info"} | {
    "states": "state"
}

NAN = math.nan
SUCCESS = "success"
"""Metric that repeats the value of the function that a rubric names as its success: 1 or 0."""

CLEANUP_LIMIT_S = 60.0
ISOLATED_LIMIT_S = 300.0
"""Time limit of an isolated function whose rubric has none: isolated functions are expected to hang occasionally."""
_MISSING: Any = object()


class ExtraAttributes(TypedDict):
    """Keywords of a subclass that become attributes. Empty for type checkers, so that they report misspellings."""


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
        funcs: Reward functions. A function declares what it needs by name: ``prompt``, ``completion``,
            ``answer``, ``state``, ``info``, ``task``, ``parser``, or any column of the row; plural names
            (``completions``, ``states``, …) receive the whole group. It returns a number, and may be async.
        weights: Weight of each function in the reward; default 1. A function of weight 0 is recorded as a
            metric alone.
        parser: Reads answers out of completions; functions receive it as ``parser``.
        parallelize_scoring: Run the functions of one rollout concurrently.
        timeout_s: Time limit of one call of a function, in seconds; None = no limit. Beyond it the reward is
            unknown.
        success: Name of the function whose value says whether the task was solved: 1 or 0, whatever the reward
            adds to it. It is recorded as the metric ``success``, and is what pass@k and an audit count. A
            subclass may set it as a class attribute, and any rubric after construction: ``rubric.success =
            "exact_match"``.

    A subclass may pass on further keywords, which become attributes.

    *Raises* ConfigError when the numbers of weights and functions differ, for two functions of the same
    name, and for an unknown keyword.

    >>> def short(completion):
    ...     return float(len(completion[-1].content) < 10)
    >>> vf.Rubric(funcs=[short], weights=[0.5]).score_rollout_sync(
    ...     prompt="Name a colour.", completion=[vf.AssistantMessage("red")], answer="", state={}
    ... )["reward"]
    0.5
    """

    success: str | None = None
    """Name of the function that says whether the task was solved."""
    score_rollouts: Callable[..., Any]
    """Columns of rollouts in, ``RolloutScores`` out; this and the next five are older, see ``legacy.scoring``."""
    score_rollouts_sync: Callable[..., RolloutScores]
    score_nothing: Callable[[State], None]
    dummy_score_rollout: Callable[..., Any]
    dummy_score_group: Callable[..., Any]
    cleanup: Callable[..., Any]

    @spell_out(ExtraAttributes, {})
    def __init__(
        self,
        funcs: Sequence[Callable[..., Any]] | None = None,
        weights: Sequence[float] | None = None,
        parser: Parser | None = None,
        parallelize_scoring: Annotated[bool, Free("only how fast")] = False,
        timeout_s: float | None = 300.0,
        success: Annotated[str | None, Free("only what a statistic counts; no reward depends on it")] = None,
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
        self._declared: tuple[list[Callable[..., Any]], list[float]] = ([], [])
        """What ``funcs`` and ``weights`` held when ``_functions`` was built."""
        self._group_weight = 1.0
        self._cleanup: list[tuple[Callable[..., Any], str]] = []
        self._advantage: RewardFunction | None = None
        self._plan: Plan | None = None
        self._planned_success: object = None
        self._add_functions(funcs, weights)
        self._add_decorated()
        if success is not None:
            self.success = success
        _set_extra_attributes(self, kwargs)

    def identity(self) -> dict[str, Any]:
        """As ``Identified``; ``funcs`` are all registered functions in order, including methods of a subclass."""
        registered = {
            "funcs": [
                {"name": f.name, **describe(f.function), "is_group": f.is_group, "isolated": f.isolated}
                for f in self.functions
            ],
            "weights": [f.weight for f in self.functions],
            "group_weights": self.get_group_weights(),
        }
        if self._advantage is not None:
            registered["advantage"] = describe(self._advantage.function)
        return super().identity() | registered

    def __repr__(self) -> str:
        functions = [f.name if f.weight == 1 else f"{f.weight:g} * {f.name}" for f in self._functions]
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
        self, func: Callable[..., Any], weight: float = 1.0, isolated: bool = False, stage: str | None = None
    ) -> None:
        """Add a function.

        ``isolated`` runs it in a worker process that is killed after ``timeout_s``. ``stage`` ("rollout" or "group")
        is needed when its parameter names do not determine it. *Raises* ConfigError for a duplicate name or an invalid
        weight or signature.
        """
        own = [f for f in self._own_functions() if f.rubric is self]
        function = RewardFunction.of(func, _new_name(func, {f.name for f in own}), weight, self, isolated, stage)
        self._functions = [*own, function]
        self._funcs.append(func)
        self._weights.append(weight)
        self._declared = list(self._funcs), list(self._weights)
        self.changed()

    def add_metric(
        self, func: Callable[..., Any], weight: float = 0.0, isolated: bool = False, stage: str | None = None
    ) -> None:
        """Add a function whose value is recorded and, at weight 0, does not affect the reward."""
        self.add_reward_func(func, weight, isolated, stage)

    def add_class_object(self, name: str, obj: object) -> None:
        """Functions that declare a parameter ``name`` receive ``obj``."""
        self.class_objects[name] = obj

    def add_score_object_provider(self, provider: Callable[[State], Mapping[str, Any]]) -> None:
        """``provider(state) -> {name: object}``, called once per rollout for its individual functions."""
        self.score_object_providers.append(provider)
        self.changed()

    def add_group_score_object_provider(self, provider: Callable[[list[State]], Mapping[str, Any]]) -> None:
        """``provider(states) -> {name: object}``, called once per group for the group functions."""
        self.group_score_object_providers.append(provider)
        self.changed()

    def add_cleanup_handler(self, handler: Callable[..., Any], stage: str = "rollout") -> None:
        """``handler(state)``, or ``handler(states)`` with ``stage="group"``, after every scoring pass."""
        self._cleanup.append((handler, stage))

    @property
    def functions(self) -> tuple[RewardFunction, ...]:
        """The functions that are called, in declaration order: those of ``funcs`` with their ``weights``.

        *Raises* ConfigError when the two lists differ in length, and as ``add_reward_func``.
        """
        return tuple(self._own_functions())

    @property
    def funcs(self) -> Sequence[Callable[..., Any]]:
        """The functions, a list that may be changed or assigned together with ``weights``."""
        return self._funcs

    @funcs.setter
    def funcs(self, funcs: Sequence[Callable[..., Any]]) -> None:
        self._funcs = funcs if isinstance(funcs, list) else list(funcs)

    @property
    def weights(self) -> Sequence[float]:
        """One weight per function, a list that may be changed or assigned."""
        return self._weights

    @weights.setter
    def weights(self, weights: Sequence[float]) -> None:
        self._weights = weights if isinstance(weights, list) else list(weights)

    def get_reward_func_names(self) -> list[str]:
        """Names of all functions, including metrics, in declaration order. An override decides, as of the next two."""
        return [f.name for f in self.functions]

    def get_reward_funcs(self) -> list[Callable[..., Any]]:
        return list(self._funcs)

    def get_reward_weights(self) -> list[float]:
        return list(self._weights)

    @property
    def has_group_rewards(self) -> bool:
        """Whether a function scores whole groups."""
        return any(f.is_group for f in self.functions) or any(
            overrides(self, Rubric, name) for name in ("score_group", "score_rollouts")
        )

    @property
    def scores_itself(self) -> bool:
        """Whether ``score_rollout``, ``score_group`` or ``score_rollouts`` of its own replaces the functions."""
        names = ("score_rollout", "score_group", "score_rollouts")
        return any(overrides(self, Rubric, name) for name in names)

    @property
    def advantage_function(self) -> RewardFunction | None:
        return self._advantage

    @property
    def has_advantages(self) -> bool:
        """Whether an ``@advantage`` method replaces the default formula."""
        return self.advantage_function is not None

    @property
    def success_metric(self) -> str | None:
        """The function that says whether the task was solved: ``success``, else a function called "success".

        *Raises* ConfigError when no function has that name.
        """
        name, names = self.success, self.get_reward_func_names()
        if not isinstance(name, str):  # none, or a reward function of a subclass that is called success
            return SUCCESS if SUCCESS in names else None
        if name not in names:
            near = close_match(name, names)
            hint = f"did you mean {near!r}?" if near else f"the functions are: {', '.join(names) or 'none'}"
            raise ConfigError(f"success={name!r} names no function of the rubric; {hint}", key="success")
        if name != SUCCESS and SUCCESS in names:
            raise ConfigError(
                f"success={name!r}, but another function is named 'success', whose metric it would replace; rename it",
                key="success",
            )
        return name

    def get_group_weights(self) -> list[float]:
        """The factor on this rubric's reward, as a list of one. A ``RubricGroup`` has one per child."""
        return [self._group_weight]

    def set_group_weights(self, weights: Sequence[float]) -> None:
        """Set the factor on this rubric's reward. *Raises* ConfigError unless it is one finite number in a list."""
        if len(weights) != 1:
            raise ConfigError(f"a plain rubric has one group weight, not {len(weights)}")
        self._group_weight = finite_weight(weights[0], type(self).__name__)
        self.changed()

    def check_arguments(self, columns: set[str]) -> None:
        """*Raises* ConfigError naming a required parameter that no core name, object or dataset column supplies.

        Functions of a rubric with object providers are not checked: provided names are known only at run time.
        """
        for f in self.functions:
            core = set(PLURAL) if f.is_group else set(SINGULAR)
            available = core | columns | set(f.rubric.class_objects) | {"parser"}
            provided = f.rubric.group_score_object_providers if f.is_group else f.rubric.score_object_providers
            if not provided and (missing := f.parameters.missing(available)):
                raise ConfigError(unsupplied(f.name, missing[0], available), function=f.name)
        _ = self.success_metric  # a misspelt name is refused before a run

    def check_needs(self) -> None:
        """*Raises* ConfigError when something beside the data is missing, a judge's key for instance. Before a run."""

    def changed(self) -> None:
        """Discard the compiled plan; called when functions or weights change."""
        self._plan = None

    def plan(self) -> Plan:
        """The compiled functions and effective weights; a scoring pass reads it once, at its start."""
        functions = self._own_functions()
        if self._plan is None or self._planned_success is not self.success:
            self._planned_success = self.success
            self._plan = Plan.of(
                functions,
                {f.name: weight for f in functions if (weight := self._group_weight * f.weight) != 0},
                [self],
                self.parallelize_scoring,
                self._advantage,
                self.success_metric,
            )
        return self._plan

    def renamed(self, function: RewardFunction, name: str) -> RewardFunction:
        """A copy of one of its functions with another name, for a group in which two functions share a name."""
        return function.under(name)

    def cleanup_handlers(self) -> list[tuple[Callable[..., Any], str]]:
        """(handler, stage) pairs in the order they run.

        A ``cleanup(state)`` of a subclass stands for those of rollouts, which its ``super().cleanup(state)`` runs.
        """
        handlers = self.declared_cleanup_handlers()
        if not overrides(self, Rubric, "cleanup") or any(handler == self.cleanup for handler, _ in handlers):
            return handlers
        return [(self.cleanup, "rollout"), *(pair for pair in handlers if pair[1] == "group")]

    def declared_cleanup_handlers(self) -> list[tuple[Callable[..., Any], str]]:
        """Likewise, of decorated methods and ``add_cleanup_handler`` alone."""
        return list(self._cleanup)

    # --- scoring

    def scorer_of(self, state: State) -> Rubric:
        """The rubric that scores a rollout: this one, unless a subclass delegates to others.

        *Raises* EnvironmentFault when no rubric does; a run leaves such a rollout unscored.
        """
        return self

    def by_scorer(self, states: Sequence[State]) -> Sequence[tuple[Rubric | None, Sequence[State]]]:
        """Rollouts grouped by the rubric that scores them, None for unscored rollouts."""
        return [(self, states)]

    async def score_individual(self, state: State) -> None:
        """Metrics of the individual functions, and the reward when no function scores groups."""
        try:
            scorer = self.scorer_of(state)
        except EnvironmentFault:
            return leave_unscored([state])
        if scorer is not self:
            await scorer.score_individual(state)
        elif overrides(self, Rubric, "score_rollout"):
            await score_by_override(self, state)
        elif overrides(self, Rubric, "score_rollouts"):
            return  # it scores the whole group, in the group stage
        else:
            await individual_stage(self.plan(), state)

    async def score_group_stage(self, states: Sequence[State]) -> None:
        """Group metrics, the rewards that need them, advantages, then the cleanup handlers.

        ``states`` are all rollouts of one example, after ``score_individual``.
        """
        for scorer, members in self.by_scorer(states):
            if scorer is None:
                leave_unscored(members)
                continue
            if scorer is not self:
                await scorer.score_group_stage(members)
                continue
            try:
                await self._score_group_of(members)
            finally:
                await self.run_cleanup(members)

    async def _score_group_of(self, states: Sequence[State]) -> None:
        if overrides(self, Rubric, "score_group"):
            await score_group_by_override(self, states)
        elif overrides(self, Rubric, "score_rollouts"):
            await compat.load(compat.SCORE_COLUMNS)(self, states)
        else:
            await group_stage(self.plan(), states)

    async def score_rollout(self, *args: Any, score_sem: Semaphore | None = None, **fields: Any) -> RolloutScore:
        """Score one rollout in place: ``score_rollout(state)``, or by ``prompt=, completion=, answer=, state=``.

        *Raises* ConfigError when a function scores whole groups.
        """
        if len(args) != 1 or fields or not isinstance(args[0], State):
            score: RolloutScore = await compat.load(compat.SCORE_FIELDS)(self, args, fields, score_sem)
            return score
        (state,) = args
        if (scorer := self.scorer_of(state)) is not self:
            return await scorer.score_rollout(state, **({} if score_sem is None else {"score_sem": score_sem}))
        if group_functions := [f.name for f in self.functions if f.is_group]:
            name = group_functions[0]
            raise ConfigError(f"{name!r} scores whole groups; call score_group(states)", function=name)
        try:
            async with score_sem or nullcontext():
                await individual_stage(self.plan(), state)
        finally:
            await self.run_cleanup([state])
        return RolloutScore.of(state)

    async def score_group(self, states: Sequence[Any], score_sem: Semaphore | None = None) -> RolloutScores:
        """Score rollouts of one example in place, with group functions and advantages."""
        if not all(isinstance(state, State) for state in states):
            scores: RolloutScores = await compat.load(compat.SCORE_DICTS)(self, states, score_sem)
            return scores
        for state in states:
            self.scorer_of(state)  # raises before any rollout is scored
        for scorer, members in self.by_scorer(states):
            if scorer is self:
                await self._score_members(members, score_sem)
            elif scorer is not None:
                await scorer.score_group(members, **({} if score_sem is None else {"score_sem": score_sem}))
        return RolloutScores.of(states)

    def score_rollout_sync(self, *args: Any, **kwargs: Any) -> RolloutScore:
        """``score_rollout``, blocking."""
        return blocking(lambda: self.score_rollout(*args, **kwargs))

    def score_group_sync(self, *args: Any, **kwargs: Any) -> RolloutScores:
        """``score_group``, blocking."""
        return blocking(lambda: self.score_group(*args, **kwargs))

    async def run_cleanup(self, states: Sequence[State]) -> None:
        """Run the cleanup handlers, each within 60 s and shielded from cancellation; a failure is logged."""
        for scorer, members in self.by_scorer(states):
            if scorer is self:
                if (handlers := self.cleanup_handlers()) and (pending := [s for s in members if not s.cleaned_up]):
                    await asyncio.shield(self.call_cleanup_handlers(handlers, pending))
            elif scorer is not None:
                await scorer.run_cleanup(members)

    async def teardown(self) -> None:
        """Run the ``@teardown`` methods; called when the environment closes."""
        for name, function, _ in decorated(self, "teardown"):
            await self._call_handler(name, function)

    # --- implementation

    async def _score_members(self, states: Sequence[State], score_sem: Semaphore | None) -> None:
        plan = self.plan()

        async def score_one(state: State) -> None:
            async with score_sem or nullcontext():
                await individual_stage(plan, state)

        try:
            await each(score_one(state) for state in states)
            async with score_sem or nullcontext():
                await group_stage(plan, states)
        finally:
            await self.run_cleanup(states)

    async def call_cleanup_handlers(
        self, handlers: Sequence[tuple[Callable[..., Any], str]], states: Sequence[State]
    ) -> None:
        """Call each handler with its states; a failure is logged."""
        for handler, stage in handlers:
            for subject in [list(states)] if stage == "group" else states:
                await self._call_handler(function_name(handler), handler, subject)

    async def _call_handler(self, name: str, handler: Callable[..., Any], *args: object) -> None:
        try:
            await call(handler, *args, limit_s=CLEANUP_LIMIT_S)
        except RunError:
            raise
        except Exception:  # a failing handler must not discard a scored rollout
            logger.exception("the handler %r of %s failed", name, type(self).__name__)

    def _own_functions(self) -> list[RewardFunction]:
        """The functions of ``funcs``, built again when the lists have changed."""
        cls: Any = type(self)
        overridden = _overridden_lists(cls)
        funcs, weights = self._lists(overridden) if overridden else (self._funcs, self._weights)
        if funcs != self._declared[0] or weights != self._declared[1]:
            self._functions = self._rebuilt(funcs, weights)
            self._declared = list(funcs), list(weights)
            self.changed()
        return self._functions

    def _lists(self, overridden: Mapping[str, str]) -> tuple[list[Callable[..., Any]], list[float]]:
        funcs = getattr(self, overridden["get_reward_funcs"])() if "get_reward_funcs" in overridden else self._funcs
        if "get_reward_weights" in overridden:
            return list(funcs), list(getattr(self, overridden["get_reward_weights"])())
        return list(funcs), self._weights

    def _rebuilt(self, funcs: Sequence[Callable[..., Any]], weights: Sequence[float]) -> list[RewardFunction]:
        if len(funcs) != len(weights):
            raise ConfigError(
                f"the rubric has {len(funcs)} functions and {len(weights)} weights; change both lists, or use "
                "add_reward_func(func, weight)"
            )
        cls: Any = type(self)
        names = _overridden_lists(cls).get("get_reward_func_names")
        given = getattr(self, names)() if names else [None] * len(funcs)
        known = list(self._functions)
        built: list[RewardFunction] = []
        for func, weight, name in zip(funcs, weights, given, strict=True):
            match = next((f for f in known if f.function == func), None)
            if match is not None:
                known.remove(match)
            name = name or (match.name if match else _new_name(func, {f.name for f in built}))
            isolated, stage = (match.isolated, "group" if match.is_group else None) if match else (False, None)
            built.append(RewardFunction.of(func, name, weight, self, isolated, stage))
        return built

    def _add_functions(self, funcs: Sequence[Callable[..., Any]] | None, weights: Sequence[float] | None) -> None:
        functions = list(funcs or ())
        weights = [1.0] * len(functions) if weights is None else list(weights)
        if len(weights) != len(functions):
            raise ConfigError(
                f"{len(functions)} reward functions and {len(weights)} weights; give one weight per function"
            )
        for func, weight in zip(functions, weights, strict=True):
            self.add_reward_func(func, weight)

    def _add_decorated(self) -> None:
        """Register the decorated methods of a subclass, rewards first."""
        for kind in ("reward", "metric"):
            for _, function, options in decorated(self, kind):
                self.add_reward_func(function, options.weight, stage=options.stage)
        self._cleanup += [(function, options.stage or "rollout") for _, function, options in decorated(self, "cleanup")]
        advantages = decorated(self, "advantage")
        if len(advantages) > 1:
            raise ConfigError(f"two @advantage methods: {advantages[0][0]!r} and {advantages[1][0]!r}; keep one")
        for name, function, _ in advantages:
            self._advantage = RewardFunction.of(function, name, 0.0, self, False, "group")


_LISTS = ("get_reward_funcs", "get_reward_weights", "get_reward_func_names")


@functools.lru_cache(maxsize=256)
def _overridden_lists(cls: type[Rubric]) -> dict[str, str]:
    """Which of ``_LISTS`` a subclass overrides -> the name of the override, which may have a leading underscore."""
    spelt = {name: (name, f"_{name}") for name in _LISTS}
    overridden = {
        name: next((s for s in spellings if getattr(cls, s) is not getattr(Rubric, s)), "")
        for name, spellings in spelt.items()
    }
    return {name: spelling for name, spelling in overridden.items() if spelling}


def _new_name(func: Callable[..., Any], names: set[str]) -> str:
    """The name of a function beside those of ``names``; lambdas are numbered. *Raises* ConfigError for a duplicate."""
    name = function_name(func)
    if name == "<lambda>" and name in names:
        name = next(numbered for n in range(2, len(names) + 3) if (numbered := f"<lambda>_{n}") not in names)
    if name in names:
        raise ConfigError(f"two reward functions are named {name!r}; rename one of them", function=name)
    return name


def _set_extra_attributes(rubric: Rubric, keywords: Mapping[str, Any]) -> None:
    """Set the keywords of a subclass that are not parameters of ``Rubric`` as attributes.

    *Raises* ConfigError for an unknown keyword of a class of this library; of a subclass for one that resembles a
    parameter, unless the subclass declares it, and for one that would hide a method or property.
    """
    cls: Any = type(rubric)
    parameters = compat.parameters_of(cls)
    if keywords and cls.__module__.partition(".")[0] == "verifiers":
        check_keywords(keywords, parameters, cls.__name__)
    for name, value in keywords.items():
        if name not in parameters and (near := close_match(name, parameters)):
            raise ConfigError(f"{cls.__name__} has no parameter {name!r}; did you mean {near!r}?", key=name)
        member = inspect.getattr_static(cls, name, None)
        if callable(member) or isinstance(member, property | staticmethod | classmethod):
            raise ConfigError(f"{name!r} would hide {cls.__name__}.{name}; choose another name", key=name)
        setattr(rubric, name, value)


# --- one reward function


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


def finite_weight(weight: SupportsFloat | SupportsIndex | str, name: str) -> float:
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
    if type(value) is float and math.isfinite(value):
        return value
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


def _short_repr(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"a {type(value).__name__} ({text[:57]}…)"


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


# --- the arguments of a call


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

    def arguments(self, parameters: Parameters, rubric: Rubric, name: str) -> dict[str, Any]:
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

    def find(self, name: str, rubric: Rubric) -> Any:
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

    def _all_arguments(self, rubric: Rubric) -> dict[str, Any]:
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
    if name not in ("prompt", "completion"):
        return value
    if value is None and name == "completion":
        return "" if isinstance(state["prompt"], str) else []
    return list(value) if isinstance(value, list) else value


def unsupplied(name: str, parameter: str, available: set[str]) -> str:
    """The error message for a required parameter that no source has."""
    near = close_match(parameter, sorted(available), SIMILAR)
    hint = f"did you mean {near!r}?" if near else f"it can have {', '.join(sorted(available))}"
    return f"reward function {name!r} needs an argument {parameter!r} that nothing supplies; {hint}"


# --- one scoring pass


@dataclass(frozen=True, slots=True)
class Plan:
    """The functions of a rubric in order, with their effective weights (group weight times weight)."""

    individual: tuple[RewardFunction, ...]
    group: tuple[RewardFunction, ...]
    weights: Mapping[str, float]
    """Function name -> effective weight; functions of weight 0 are absent."""
    segments: tuple[tuple[RewardFunction, ...], ...]
    """The individual functions in batches that share a call of a worker thread; a coroutine function is alone."""
    rubrics: tuple[Any, ...]
    """The plain rubrics of the functions."""
    providers: tuple[Any, ...]
    """The rubrics with object providers for single rollouts."""
    group_providers: tuple[Any, ...]
    """The rubrics with object providers for groups."""
    parallel: bool
    advantage: RewardFunction | None
    success: str | None = None
    """Name of the function whose value is also the metric ``success``."""

    @classmethod
    def of(
        cls,
        functions: Sequence[RewardFunction],
        weights: Mapping[str, float],
        rubrics: Sequence[Any],
        parallel: bool,
        advantage: RewardFunction | None,
        success: str | None = None,
    ) -> Plan:
        individual = tuple(f for f in functions if not f.is_group)
        return cls(
            individual,
            tuple(f for f in functions if f.is_group),
            weights,
            tuple((f,) for f in individual) if parallel else _segments(individual),
            tuple(rubrics),
            tuple(r for r in rubrics if r.score_object_providers),
            tuple(r for r in rubrics if r.group_score_object_providers),
            parallel,
            advantage,
            success,
        )


def _segments(functions: Sequence[RewardFunction]) -> tuple[tuple[RewardFunction, ...], ...]:
    segments: list[list[RewardFunction]] = []
    for function in functions:
        if function.is_async or not segments or segments[-1][0].is_async:
            segments.append([])
        segments[-1].append(function)
    return tuple(tuple(segment) for segment in segments)


def can_be_scored(state: State) -> bool:
    """Whether the rollout can have a reward: it has no error, or a scorable one (caused by the model)."""
    error = state["error"]
    return error is None or isinstance(error, ScoringError) or getattr(error, "scorable", False)


async def individual_stage(plan: Plan, state: State) -> None:
    """Write the metrics of the individual functions; without group functions also the final reward."""
    started = perf_counter()
    if isinstance(state["error"], ScoringError):  # from an earlier scoring pass, whose result is replaced
        state["error"] = None
    if can_be_scored(state):
        await _run_individual(plan, state)
    else:
        state["metrics"].update((f.name, NAN) for f in plan.individual)
    if not plan.group:
        _conclude(plan, state)
    state["timing"]["scoring_ms"] += (perf_counter() - started) * 1000


async def group_stage(plan: Plan, states: Sequence[State]) -> None:
    """Run the group functions, then set the rewards that depend on them and the advantages."""
    started = perf_counter()
    if plan.group:
        await _run_group(plan, states, [state for state in states if can_be_scored(state)])
        for state in states:
            _conclude(plan, state)
    if plan.advantage is None:
        _center_advantages(states)
    else:
        await _set_advantages(plan.advantage, states)
    spent = (perf_counter() - started) * 1000
    for state in states:
        state["timing"]["scoring_ms"] += spent


def _conclude(plan: Plan, state: State) -> None:
    """Set ``reward`` and, where the rubric names one, the metric ``success``, from the values of the functions."""
    set_reward(plan, state)
    if plan.success is None or plan.success == SUCCESS:
        return
    value = state["metrics"].get(plan.success, NAN) if can_be_scored(state) else NAN
    if value in (0.0, 1.0) or math.isnan(value):
        state["metrics"][SUCCESS] = value
    else:
        message = f"the success metric {plan.success!r} is {value:g}; it must be 0 or 1"
        _record(state, SUCCESS, ScoringError(message, function=plan.success))


def set_reward(plan: Plan, state: State) -> None:
    """Set ``reward`` = sum of weight * metric, also on turns without a reward.

    NaN when a metric is unknown, and when no function has a weight: what nothing measures is unknown, not 0.
    """
    metrics = state["metrics"]  # by ``sum``, as the trainer does, which Python 3.12 rounds otherwise than a loop
    reward = sum([weight * metrics.get(name, NAN) for name, weight in plan.weights.items()], 0.0)
    state["reward"] = reward if plan.weights and can_be_scored(state) else NAN
    _fill_turns(state, "reward")


def leave_unscored(states: Sequence[State]) -> None:
    """Set rewards and advantages to NaN and metrics to empty, without scoring."""
    for state in states:
        state["reward"] = state["advantage"] = NAN
        state["metrics"] = {}
        _fill_turns(state, "reward")


def _record(state: State, name: str, error: ScoringError) -> None:
    state["metrics"][name] = NAN
    if state["error"] is None:
        state["error"] = error


def _fill_turns(state: State, key: str) -> None:
    """Copy the rollout's value to the turns without one."""
    rollout = state.record
    for turn in rollout.transcript.turns:
        if key == "reward":
            turn.rollout_reward = rollout.reward
        elif turn.advantage is None:
            turn.advantage = rollout.advantage


# --- rubrics that override score_rollout or score_group


def overrides(owner: object, base: type, name: str) -> bool:
    """Whether the class of ``owner``, or the object itself, replaces a method of ``base``."""
    cls = type(owner)
    return (cls is not base and getattr(cls, name) is not getattr(base, name)) or name in owner.__dict__


async def score_by_override(rubric: Rubric, state: State) -> None:
    """Call an overridden ``score_rollout`` with the parameters it declares; record its score in the state.

    It may take the state, or prompt, completion, answer and so on by name, as in older versions.
    """
    declared = inspect.signature(rubric.score_rollout).parameters
    if "prompt" in declared:
        takes_all = any(p.kind is p.VAR_KEYWORD for p in declared.values())
        values = {name: rollout_value(state, name) for name in SINGULAR if takes_all or name in declared}
        score = await rubric.score_rollout(**values)
    else:
        score = await rubric.score_rollout(state, **_semaphore(declared))
    if isinstance(score, Mapping) and (state["reward"] is None or "prompt" in declared):
        metrics = score.get("metrics")
        state["metrics"].update(metrics if isinstance(metrics, Mapping) else {})
        state["reward"] = score.get("reward", NAN)


async def score_group_by_override(rubric: Rubric, states: Sequence[State]) -> None:
    """Call an overridden ``score_group`` with the parameters it declares."""
    await rubric.score_group(list(states), **_semaphore(inspect.signature(rubric.score_group).parameters))


def _semaphore(declared: Mapping[str, Any]) -> dict[str, Any]:
    """A semaphore that never blocks, for overrides that declare one: the caller already holds the real one."""
    return {"score_sem": nullcontext()} if "score_sem" in declared else {}


# --- running the functions


async def _run_individual(plan: Plan, state: State) -> None:
    resolver = ArgumentResolver(state, plan.individual)
    errors = await _provide(plan.providers, "score_object_providers", resolver, state) if plan.providers else {}
    if plan.parallel:
        await each(_run_segment(segment, resolver, state, errors) for segment in plan.segments)
        return
    for segment in plan.segments:
        await _run_segment(segment, resolver, state, errors)


async def _run_segment(
    segment: Sequence[RewardFunction], resolver: ArgumentResolver, state: State, errors: Mapping[int, ScoringError]
) -> None:
    if errors:
        broken = [f for f in segment if id(f.rubric) in errors]
        segment = [f for f in segment if id(f.rubric) not in errors]
        for function in broken:
            _record(state, function.name, errors[id(function.rubric)])
    outcomes = await _outcomes(segment, resolver)
    metrics = state["metrics"]
    for function, outcome in zip(segment, outcomes, strict=True):
        try:
            if isinstance(outcome, Raised):
                raise outcome.error
            metrics[function.name] = finite_value(outcome, function.name)
        except ScoringError as error:
            _record(state, function.name, error)


async def _run_group(plan: Plan, states: Sequence[State], alive: Sequence[State]) -> None:
    for state in states:
        state["metrics"].update((f.name, NAN) for f in plan.group)
    if not alive:
        return
    resolver = GroupArgumentResolver(alive, plan.group)
    errors = await _provide(plan.group_providers, "group_score_object_providers", resolver, list(alive))
    for function in plan.group:
        (outcome,) = (
            (Raised(errors[id(function.rubric)]),)
            if id(function.rubric) in errors
            else await _outcomes((function,), resolver)
        )
        try:
            if isinstance(outcome, Raised):
                raise outcome.error
            values = value_list(outcome, len(alive), function.name)
        except ScoringError as error:
            values = [error] * len(alive)
        for state, value in zip(alive, values, strict=True):
            try:
                if isinstance(value, ScoringError):
                    raise value
                state["metrics"][function.name] = finite_value(value, function.name)
            except ScoringError as error:
                _record(state, function.name, error)


def _center_advantages(states: Sequence[State]) -> None:
    if len(states) == 1:  # a group of one has no siblings to compare with
        (state,) = states
        reward = state["reward"]
        state["advantage"] = NAN if reward is None or math.isnan(reward) else 0.0
        _fill_turns(state, "advantage")
        return
    rewards = [NAN if state["reward"] is None else state["reward"] for state in states]
    for state, advantage in zip(states, centered_advantages(rewards), strict=True):
        state["advantage"] = advantage
        _fill_turns(state, "advantage")


async def _set_advantages(function: RewardFunction, states: Sequence[State]) -> None:
    known = [state for state in states if not (state["reward"] is None or math.isnan(state["reward"]))]
    advantages = await _custom_advantages(function, known) if known else {}
    for state in states:
        state["advantage"] = advantages.get(id(state), NAN)
        _fill_turns(state, "advantage")


async def _custom_advantages(function: RewardFunction, known: Sequence[State]) -> dict[int, float]:
    """``id`` of the state -> advantage, from an ``@advantage`` method that sees the rollouts with a known reward."""
    (outcome,) = await _outcomes((function,), GroupArgumentResolver(known, (function,)))
    try:
        if isinstance(outcome, Raised):
            raise outcome.error
        values = value_list(outcome, len(known), function.name)
        return {id(s): finite_value(value, function.name) for s, value in zip(known, values, strict=True)}
    except ScoringError as error:
        for state in known:
            state["error"] = state["error"] or error
        return {}


async def _outcomes(segment: Sequence[RewardFunction], resolver: ArgumentResolver) -> list[Any]:
    """The value of each function, or ``Raised`` with a ScoringError. *Raises* RunError only."""
    if not segment:
        return []
    if segment[0].is_async:
        outcomes = [await _bounded(segment[0], resolver)]
    else:
        outcomes = await workers().run(segment, resolver)
    for index, outcome in enumerate(outcomes):
        if type(outcome) is float:  # nearly all are
            continue
        if is_awaitable(outcome):  # a synchronous function that returned a coroutine
            outcome = await _bounded(segment[index], resolver, outcome)
        if isinstance(outcome, Raised):
            outcome = Raised(scoring_error(outcome.error, segment[index].name))
        outcomes[index] = outcome
    return outcomes


async def _bounded(function: RewardFunction, resolver: ArgumentResolver, started: Awaitable[Any] | None = None) -> Any:
    limit_s = function.time_limit_s
    try:
        async with asyncio.timeout(limit_s) as scope:
            return await (function(resolver) if started is None else started)
    except (asyncio.CancelledError, KeyboardInterrupt):
        raise
    except BaseException as error:  # noqa: BLE001  a failure of the author's function is recorded on the rollout
        expired = isinstance(error, TimeoutError) and scope.expired()
        return Raised(TimeoutError(f"{function.name!r} did not return within {limit_s:g} s") if expired else error)


async def _provide(
    rubrics: Sequence[Any], attribute: str, resolver: ArgumentResolver, subject: object
) -> dict[int, ScoringError]:
    """Call the object providers; return ``id`` of the rubric -> error for failed providers."""
    errors: dict[int, ScoringError] = {}
    for rubric in rubrics:
        objects: dict[str, Any] = {}
        for provider in getattr(rubric, attribute):
            name = getattr(provider, "__name__", type(provider).__name__)
            try:
                objects.update(await call(provider, subject, limit_s=rubric.timeout_s))
            except Exception as error:  # noqa: BLE001  a failure of the author's provider is recorded on the rollout
                errors[id(rubric)] = scoring_error(error, name)
        resolver.provided[id(rubric)] = objects
    return errors


async def call(function: Callable[..., Any], *args: object, limit_s: float | None = None, **kwargs: object) -> Any:
    """Call an author's callable within ``limit_s``, a synchronous one in a worker thread; its exceptions propagate."""
    if inspect.iscoroutinefunction(function):
        value = function(*args, **kwargs)
    else:
        value = await call_in_thread(function, *args, limit_s=limit_s, **kwargs)
    if is_awaitable(value):
        async with asyncio.timeout(limit_s):
            return await value
    return value


async def each(coroutines: Iterable[Awaitable[object]]) -> None:
    """Run coroutines concurrently until all have ended, then raise the first exception."""
    for outcome in await asyncio.gather(*coroutines, return_exceptions=True):
        if isinstance(outcome, BaseException):
            raise outcome


compat.legacy_methods(Rubric, compat.RUBRIC_METHODS)
compat.legacy_properties(Rubric, compat.RUBRIC_PROPERTIES)
