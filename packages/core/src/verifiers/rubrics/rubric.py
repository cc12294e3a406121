"""``Rubric``: the reward of a rollout as a weighted sum of functions.

A rubric declares functions, weights, a parser and objects; ``check_arguments`` verifies before a run that every
argument has a source. Scoring writes rewards and metrics into the state. The runner calls ``score_individual``
when a rollout ends and ``score_group_stage`` when the last rollout of its group has ended; ``score_rollout`` and
``score_group`` are both stages in one call.

An unknown reward is NaN, never 0. How functions run is in ``scoring``; older call forms are in ``legacy.scoring``.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import TYPE_CHECKING, Annotated, Any, TypedDict, Unpack

from verifiers import compat
from verifiers.errors import ConfigError, EnvironmentFault, RunError
from verifiers.rollouts.decorators import decorated
from verifiers.rollouts.state import State
from verifiers.rubrics import scoring
from verifiers.rubrics.functions import PLURAL, SINGULAR, RewardFunction, finite_weight, function_name, unsupplied
from verifiers.rubrics.scores import RolloutScore, RolloutScores
from verifiers.runtime.signatures import spell_out
from verifiers.runtime.suggest import check_keywords, close_match
from verifiers.runtime.sync_async import blocking
from verifiers.storage.identity import Free, Identified, describe

if TYPE_CHECKING:
    from verifiers.parsers import Parser

CLEANUP_LIMIT_S = 60.0
logger = logging.getLogger("verifiers.rubrics")
Semaphore = AbstractAsyncContextManager[Any]


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
        self._declared: tuple[Any, ...] = ((), ())
        """What ``funcs`` and ``weights`` held when ``_functions`` was built."""
        self._group_weight = 1.0
        self._cleanup: list[tuple[Callable[..., Any], str]] = []
        self._advantage: RewardFunction | None = None
        self._plan: scoring.Plan | None = None
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
        self._declared = (tuple(self._funcs), tuple(self._weights))
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
            scoring.overrides(self, Rubric, name) for name in ("score_group", "score_rollouts")
        )

    @property
    def scores_itself(self) -> bool:
        """Whether ``score_rollout``, ``score_group`` or ``score_rollouts`` of its own replaces the functions."""
        names = ("score_rollout", "score_group", "score_rollouts")
        return any(scoring.overrides(self, Rubric, name) for name in names)

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
            return scoring.SUCCESS if scoring.SUCCESS in names else None
        if name not in names:
            near = close_match(name, names)
            hint = f"did you mean {near!r}?" if near else f"the functions are: {', '.join(names) or 'none'}"
            raise ConfigError(f"success={name!r} names no function of the rubric; {hint}", key="success")
        if name != scoring.SUCCESS and scoring.SUCCESS in names:
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

    def plan(self) -> scoring.Plan:
        """The compiled functions and effective weights; a scoring pass reads it once, at its start."""
        functions = self._own_functions()
        if self._plan is None or self._planned_success is not self.success:
            self._planned_success = self.success
            self._plan = scoring.Plan.of(
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
        is_declared = any(handler == self.cleanup for handler, _ in handlers)
        if is_declared or not scoring.overrides(self, Rubric, "cleanup"):
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

    async def score_individual(self, state: State, score_sem: Semaphore | None = None) -> None:
        """Metrics of the individual functions, and the reward when no function scores groups."""
        if score_sem is not None and type(score_sem) is not nullcontext:
            async with score_sem:
                return await self.score_individual(state)
        try:
            scorer = self.scorer_of(state)
        except EnvironmentFault:
            return scoring.leave_unscored([state])
        if scorer is not self:
            await scorer.score_individual(state)
        elif scoring.overrides(self, Rubric, "score_rollout"):
            await scoring.score_by_override(self, state)
        elif scoring.overrides(self, Rubric, "score_rollouts"):
            return  # it scores the whole group, in the group stage
        else:
            await scoring.individual_stage(self.plan(), state)

    async def score_group_stage(self, states: Sequence[State], score_sem: Semaphore | None = None) -> None:
        """Group metrics, the rewards that need them, advantages, then the cleanup handlers.

        ``states`` are all rollouts of one example, after ``score_individual``.
        """
        for scorer, members in self.by_scorer(states):
            if scorer is None:
                scoring.leave_unscored(members)
                continue
            if scorer is not self:
                await scorer.score_group_stage(members, score_sem)
                continue
            try:
                async with score_sem or nullcontext():
                    if scoring.overrides(self, Rubric, "score_group"):
                        await scoring.score_group_by_override(self, members)
                    elif scoring.overrides(self, Rubric, "score_rollouts"):
                        await compat.load(compat.SCORE_COLUMNS)(self, members)
                    else:
                        await scoring.group_stage(self.plan(), members)
            finally:
                await self.run_cleanup(members)

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
                await scoring.individual_stage(self.plan(), state)
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
                pending = [state for state in members if not state.cleaned_up]
                if pending and (handlers := self.cleanup_handlers()):
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
                await scoring.individual_stage(plan, state)

        try:
            await scoring.each(score_one(state) for state in states)
            async with score_sem or nullcontext():
                await scoring.group_stage(plan, states)
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
            await scoring.call(handler, *args, limit_s=CLEANUP_LIMIT_S)
        except RunError:
            raise
        except Exception:  # a failing handler must not discard a scored rollout
            logger.exception("the handler %r of %s failed", name, type(self).__name__)

    def _own_functions(self) -> list[RewardFunction]:
        """The functions of ``funcs``, built again when the lists have changed."""
        funcs, weights = self._lists()
        if (funcs, weights) != self._declared:
            self._functions = self._rebuilt(funcs, weights)
            self._declared = (funcs, weights)
            self.changed()
        return self._functions

    def _lists(self) -> tuple[tuple[Callable[..., Any], ...], tuple[float, ...]]:
        cls: Any = type(self)
        overrides = _overridden_lists(cls)
        funcs = getattr(self, overrides["get_reward_funcs"])() if "get_reward_funcs" in overrides else self._funcs
        if "get_reward_weights" in overrides:
            return tuple(funcs), tuple(getattr(self, overrides["get_reward_weights"])())
        return tuple(funcs), tuple(self._weights)

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
def _overridden_lists(cls: Any) -> dict[str, str]:
    """Which of ``_LISTS`` a subclass overrides -> the name of the override, which may have a leading underscore."""
    spelt = {name: (name, f"_{name}") for name in _LISTS}
    overrides = {
        name: next((s for s in spellings if getattr(cls, s) is not getattr(Rubric, s)), "")
        for name, spellings in spelt.items()
    }
    return {name: spelling for name, spelling in overrides.items() if spelling}


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


compat.legacy_methods(Rubric, compat.RUBRIC_METHODS)
compat.legacy_properties(Rubric, compat.RUBRIC_PROPERTIES)
