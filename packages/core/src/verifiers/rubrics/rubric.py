"""``Rubric``: what a rollout is worth, as a weighted sum of functions of it.

A rubric holds named functions with weights, says what they need before a run starts (``check_arguments``), and scores
finished rollouts in place. The runner calls ``score_individual`` as soon as one rollout ends and ``score_group_stage``
when its last sibling has; everybody else calls ``score_rollout``, ``score_group`` or one of their forms.

An unknown reward is NaN, never 0. This module does not run functions itself (``scoring``, ``workers``) and does not
read the historical call forms (``calls``).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Annotated, Any

from verifiers import compat
from verifiers.errors import ConfigError, RunError
from verifiers.rollouts.decorators import decorated
from verifiers.rollouts.state import State
from verifiers.rubrics import overrides, scoring
from verifiers.rubrics.arguments import PLURAL, SINGULAR, unsupplied
from verifiers.rubrics.attributes import set_extra_attributes
from verifiers.rubrics.functions import RewardFunction, finite_weight, function_name
from verifiers.rubrics.scores import RolloutScore, RolloutScores
from verifiers.runtime.sync_async import blocking, dual
from verifiers.storage.identity import Free, Identified, describe

CLEANUP_LIMIT_S = 60.0
logger = logging.getLogger("verifiers.rubrics")
Semaphore = AbstractAsyncContextManager[Any]


class Rubric(Identified):
    """Reward functions with weights.

    ``timeout_s`` bounds every call of a function, in seconds; None leaves it unbounded. Further keywords become
    attributes. *Raises* ConfigError for weights that do not fit, an empty list, or two functions of one name.

    >>> def short(completion):
    ...     return float(len(completion[-1].content) < 10)
    >>> vf.Rubric(funcs=[short], weights=[0.5]).score_rollout_sync(
    ...     prompt="Name a colour.", completion=[vf.AssistantMessage("red")], answer="", state={}
    ... )["reward"]
    0.5
    """

    def __init__(
        self,
        funcs: Sequence[Callable[..., Any]] | None = None,
        weights: Sequence[float] | None = None,
        parser: Any = None,
        parallelize_scoring: Annotated[bool, Free("only how fast")] = False,
        timeout_s: float | None = 300.0,
        **kwargs: Any,
    ):
        self._parser = parser
        self.parallelize_scoring = parallelize_scoring
        self.timeout_s = timeout_s
        self.class_objects: dict[str, Any] = {}
        """Objects that functions receive by these names."""
        self.score_object_providers: list[Callable[..., Any]] = []
        self.group_score_object_providers: list[Callable[..., Any]] = []
        self._functions: list[RewardFunction] = []
        self._group_weight = 1.0
        self._cleanup: list[tuple[Callable[..., Any], str]] = []
        self._advantage: RewardFunction | None = None
        self._plan: scoring.Plan | None = None
        self._add_given(funcs, weights)
        self._add_decorated()
        set_extra_attributes(self, kwargs)

    def identity(self) -> dict[str, Any]:
        """As every part; ``funcs`` are all registered functions in order, methods of a subclass among them."""
        registered = {
            "funcs": [
                {"name": f.name, **describe(f.function), "is_group": f.is_group, "isolated": f.isolated}
                for f in self._functions
            ],
            "weights": [f.weight for f in self._functions],
            "group_weights": self.get_group_weights(),
        }
        if self._advantage is not None:
            registered["advantage"] = describe(self._advantage.function)
        return super().identity() | registered

    # --- what it holds

    @property
    def parser(self) -> Any:
        """The parser given, else a plain ``Parser()``."""
        if self._parser is None:
            from verifiers.parsers import Parser

            self._parser = Parser()
        return self._parser

    @parser.setter
    def parser(self, parser: Any) -> None:
        self._parser = parser

    def add_reward_func(
        self, func: Callable[..., Any], weight: float = 1.0, isolated: bool = False, stage: str | None = None
    ) -> None:
        """Add a function; ``isolated`` runs it in a killable process, ``stage`` overrules its parameter names."""
        name, taken = function_name(func), {f.name for f in self._functions}
        if name == "<lambda>" and name in taken:
            name = next(numbered for n in range(2, len(taken) + 3) if (numbered := f"<lambda>_{n}") not in taken)
        if name in taken:
            raise ConfigError(f"two reward functions are named {name!r}; rename one of them", function=name)
        self._functions.append(RewardFunction.of(func, name, weight, self, isolated, stage))
        self.changed()

    def add_metric(
        self, func: Callable[..., Any], weight: float = 0.0, isolated: bool = False, stage: str | None = None
    ) -> None:
        """Add a function that is measured and does not count in the reward."""
        self.add_reward_func(func, weight, isolated, stage)

    def add_class_object(self, name: str, obj: Any) -> None:
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
        """The registered functions, in declaration order."""
        return tuple(self._functions)

    @property
    def funcs(self) -> tuple[Callable[..., Any], ...]:
        return tuple(self.get_reward_funcs())

    @property
    def weights(self) -> tuple[float, ...]:
        return tuple(self.get_reward_weights())

    def get_reward_func_names(self) -> list[str]:
        """Names of all functions and metrics, in declaration order."""
        return [f.name for f in self.functions]

    def get_reward_funcs(self) -> list[Callable[..., Any]]:
        return [f.function for f in self.functions]

    def get_reward_weights(self) -> list[float]:
        return [f.weight for f in self.functions]

    @property
    def has_group_rewards(self) -> bool:
        """Whether a function scores whole groups."""
        return any(f.is_group for f in self.functions)

    @property
    def advantage_function(self) -> RewardFunction | None:
        return self._advantage

    @property
    def has_advantages(self) -> bool:
        """Whether an ``@advantage`` method replaces the formula."""
        return self.advantage_function is not None

    def get_group_weights(self) -> list[float]:
        """The weight of this rubric in its sum: one number. A ``RubricGroup`` has one per child."""
        return [self._group_weight]

    def set_group_weights(self, weights: Sequence[float]) -> None:
        """*Raises* ConfigError unless it is one finite number in a list."""
        if len(weights) != 1:
            raise ConfigError(f"a plain rubric has one group weight, not {len(weights)}")
        self._group_weight = finite_weight(weights[0], type(self).__name__)
        self.changed()

    def check_arguments(self, columns: set[str]) -> None:
        """*Raises* ConfigError naming a required parameter that no core name, object or dataset column supplies.

        A rubric with object providers is believed, because what they provide is known only when they run.
        """
        for f in self.functions:
            core = set(PLURAL) if f.is_group else set(SINGULAR)
            available = core | columns | set(f.rubric.class_objects) | {"parser"}
            provided = f.rubric.group_score_object_providers if f.is_group else f.rubric.score_object_providers
            if not provided and (missing := f.parameters.missing(available)):
                raise ConfigError(unsupplied(f.name, missing[0], available), function=f.name)

    def changed(self) -> None:
        """Forget the compiled plan; called when functions or weights change."""
        self._plan = None

    def plan(self) -> scoring.Plan:
        """The compiled functions and effective weights; read once at the start of a scoring pass."""
        if self._plan is None:
            self._plan = scoring.Plan.of(
                self._functions,
                {f.name: weight for f in self._functions if (weight := self._group_weight * f.weight) != 0},
                [self],
                self.parallelize_scoring,
                self._advantage,
            )
        return self._plan

    def renamed(self, function: RewardFunction, name: str) -> RewardFunction:
        """One of its functions under the name that a group gives it, because another rubric's has its own."""
        return function.under(name)

    def cleanup_handlers(self) -> list[tuple[Callable[..., Any], str]]:
        """(handler, stage) in the order they run."""
        return list(self._cleanup)

    # --- scoring

    async def score_individual(self, state: State, score_sem: Semaphore | None = None) -> None:
        """Metrics of the individual functions, and the reward when no function scores groups."""
        if score_sem is not None and type(score_sem) is not nullcontext:
            async with score_sem:
                return await self.score_individual(state)
        if overrides.overrides(self, Rubric, "score_rollout"):
            await overrides.score_by_override(self, state)
        else:
            await scoring.individual_stage(self.plan(), state)

    async def score_group_stage(self, states: Sequence[State], score_sem: Semaphore | None = None) -> None:
        """Group metrics, their rewards, advantages (once), then the cleanup handlers. ``states`` are all siblings."""
        try:
            async with score_sem or nullcontext():
                if overrides.overrides(self, Rubric, "score_group"):
                    await overrides.score_group_by_override(self, states)
                else:
                    await scoring.group_stage(self.plan(), states)
        finally:
            await self.run_cleanup(states)

    async def score_rollout(self, *args: Any, score_sem: Semaphore | None = None, **kwargs: Any) -> RolloutScore:
        """Score one rollout in place: ``score_rollout(state)`` or by ``prompt=, completion=, answer=, state=``.

        *Raises* ConfigError when a function scores whole groups.
        """
        if names := [f.name for f in self.functions if f.is_group]:
            raise ConfigError(f"{names[0]!r} scores whole groups; call score_group(states)", function=names[0])
        call = overrides.rollout_call(args, kwargs, score_sem)
        try:
            async with call.score_sem or nullcontext():
                await scoring.individual_stage(self.plan(), call.state)
        finally:
            await self.run_cleanup([call.state])
        call.write_back()
        return RolloutScore.of(call.state)

    async def score_group(self, states: Sequence[Any], score_sem: Semaphore | None = None) -> RolloutScores:
        """Score siblings of one example in place, with group functions and advantages."""
        wrapped = [overrides.rollout_call((state,), {}, None) for state in states]
        members, plan = [call.state for call in wrapped], self.plan()

        async def one(state: State) -> None:
            async with score_sem or nullcontext():
                await scoring.individual_stage(plan, state)

        try:
            await scoring.each(one(state) for state in members)
            async with score_sem or nullcontext():
                await scoring.group_stage(plan, members)
        finally:
            await self.run_cleanup(members)
        for call in wrapped:
            call.write_back()
        return RolloutScores.of(members)

    def score_rollouts(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        answers: Sequence[Any],
        states: Sequence[Any],
        tasks: Sequence[str] | None = None,
        infos: Sequence[Any] | None = None,
        max_concurrent: int = -1,
        group_size: int | None = None,
        **columns: Sequence[Any],
    ) -> RolloutScores | Awaitable[RolloutScores]:
        """Score rows given as columns; the value, or an awaitable of it under a running loop.

        The rows form groups of ``group_size`` consecutive ones when it is given, else none. At most
        ``max_concurrent`` groups (rows) are scored at a time; -1 means 1,024.
        """
        lists = {"prompt": prompts, "completion": completions, "answer": answers, "task": tasks, "info": infos}
        rows = overrides.rows_of(lists | columns, states)
        return dual(lambda: self._score_rows(rows, group_size, max_concurrent))

    def score_rollouts_sync(self, *args: Any, **kwargs: Any) -> RolloutScores:
        """``score_rollouts``, always blocking."""

        async def make() -> RolloutScores:
            pending: Any = self.score_rollouts(*args, **kwargs)
            scores: RolloutScores = await pending
            return scores

        return blocking(make)

    def score_rollout_sync(self, *args: Any, **kwargs: Any) -> RolloutScore:
        """``score_rollout``, blocking."""
        return blocking(lambda: self.score_rollout(*args, **kwargs))

    def score_group_sync(self, *args: Any, **kwargs: Any) -> RolloutScores:
        """``score_group``, blocking."""
        return blocking(lambda: self.score_group(*args, **kwargs))

    def score_nothing(self, state: State) -> None:
        """Leave a rollout unscored: reward unknown, no metrics."""
        scoring.leave_unscored([state])

    async def dummy_score_rollout(self, state: State) -> RolloutScore:
        """``score_nothing``, with its score."""
        self.score_nothing(state)
        return RolloutScore.of(state)

    async def dummy_score_group(self, states: Sequence[State]) -> RolloutScores:
        """Leave a group unscored."""
        scoring.leave_unscored(states)
        return RolloutScores.of(states)

    async def run_cleanup(self, states: Sequence[State]) -> None:
        """Run the cleanup handlers, each within 60 s and shielded from cancellation; a failure is logged."""
        left = [state for state in states if not state.cleaned_up]
        if left and (handlers := self.cleanup_handlers()):
            await asyncio.shield(self._clean_up(handlers, left))

    async def teardown(self) -> None:
        """Run the ``@teardown`` methods; called when the environment closes."""
        for name, function, _ in decorated(self, "teardown"):
            await self._call_handler(name, function)

    # --- inside

    async def _score_rows(self, rows: list[State], group_size: int | None, max_concurrent: int) -> RolloutScores:
        if group_size is not None and (group_size < 1 or len(rows) % group_size):
            raise ConfigError(f"{len(rows)} rows do not form groups of group_size={group_size}")
        size = group_size or 1
        limit = max_concurrent if max_concurrent > 0 else 1024
        groups = iter([rows[i : i + size] for i in range(0, len(rows), size)])

        async def worker() -> None:
            for group in groups:
                await (self.score_group(group) if group_size else self.score_rollout(group[0]))

        await scoring.each(worker() for _ in range(min(limit, len(rows))))
        return RolloutScores.of(rows)

    async def _clean_up(self, handlers: list[tuple[Callable[..., Any], str]], states: Sequence[State]) -> None:
        for handler, stage in handlers:
            for subject in [list(states)] if stage == "group" else states:
                await self._call_handler(function_name(handler), handler, subject)

    async def _call_handler(self, name: str, handler: Callable[..., Any], *args: Any) -> None:
        try:
            await scoring.call(handler, *args, limit_s=CLEANUP_LIMIT_S)
        except RunError:
            raise
        except Exception:  # an author's handler must not cost a scored rollout
            logger.exception("the handler %r of %s failed", name, type(self).__name__)

    def _add_given(self, funcs: Sequence[Callable[..., Any]] | None, weights: Sequence[float] | None) -> None:
        if funcs is not None and not funcs:
            raise ConfigError("funcs=[] scores nothing; leave funcs out to add functions later")
        given = list(funcs or ())
        chosen = [1.0] * len(given) if weights is None else list(weights)
        if len(chosen) != len(given):
            raise ConfigError(f"{len(given)} reward functions and {len(chosen)} weights; give one weight per function")
        for func, weight in zip(given, chosen, strict=True):
            self.add_reward_func(func, weight)

    def _add_decorated(self) -> None:
        """Register the marked methods of a subclass, rewards first."""
        for kind in ("reward", "metric"):
            for _, function, options in decorated(self, kind):
                self.add_reward_func(function, options.weight, stage=options.stage)
        self._cleanup += [(function, options.stage or "rollout") for _, function, options in decorated(self, "cleanup")]
        advantages = decorated(self, "advantage")
        if len(advantages) > 1:
            raise ConfigError(f"two @advantage methods: {advantages[0][0]!r} and {advantages[1][0]!r}; keep one")
        for name, function, _ in advantages:
            self._advantage = RewardFunction.of(function, name, 0.0, self, False, "group")


compat.alias_methods(Rubric, compat.RUBRIC_METHODS)
