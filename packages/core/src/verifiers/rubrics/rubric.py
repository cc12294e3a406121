"""``Rubric``: declared reward functions, whose weighted sum is the reward of a rollout.

A rubric declares functions, weights, a parser and objects (``declarations``); ``check_arguments``
verifies before a run that every argument has a source. What it declares becomes a ``Plan``, whose
stages run the functions (``scoring``): the individual stage as soon as a rollout ends
(``score_individual``), the group stage when the last rollout of its group has ended
(``score_group_stage``); ``score_rollout`` and ``score_group`` are all of it in one call.

Older call forms, and subclasses that override older methods, are the concern of ``legacy.scoring``,
which adapts each class when it is made.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import TYPE_CHECKING, Annotated, Any, TypedDict, Unpack

from verifiers.errors import ConfigError, RunError
from verifiers.rollouts.author_code import decorated
from verifiers.rollouts.state import State
from verifiers.rubrics.arguments import function_name
from verifiers.rubrics.declarations import Declarations, Handler
from verifiers.rubrics.outcomes import RolloutScore, RolloutScores
from verifiers.rubrics.running import call, each
from verifiers.runtime.calls import blocking
from verifiers.runtime.signatures import set_extra_attributes, spell_out
from verifiers.storage.described import describe
from verifiers.storage.identity import Free, Identified

if TYPE_CHECKING:
    from verifiers.parsers import Parser
    from verifiers.rubrics.scoring import Plan

logger = logging.getLogger("verifiers.rubrics")
Semaphore = AbstractAsyncContextManager[Any]
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

    funcs: Sequence[Callable[..., object]] | None
    weights: Sequence[float] | None
    parser: Parser | None


class Rubric(Declarations, Identified):
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

    scores_itself: bool = False
    """Whether code of a subclass scores rollouts in place of the functions."""

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
        funcs: Sequence[Callable[..., object]] | None = None,
        weights: Sequence[float] | None = None,
        parser: Parser | None = None,
        parallelize_scoring: Annotated[bool, Free("only how fast")] = False,
        timeout_s: float | None = 300.0,
        success: Annotated[
            str | None, Free("only what a statistic counts; no reward depends on it")
        ] = None,
        **kwargs: Unpack[ExtraAttributes],
    ):
        super().__init__(parser)
        self.parallelize_scoring = parallelize_scoring
        self.timeout_s = timeout_s
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

    @functools.cached_property
    def logger(self) -> logging.Logger:
        """Named after its class."""
        return logging.getLogger(f"{type(self).__module__}.{type(self).__name__}")

    # --- scoring

    async def score_individual(self, state: State) -> None:
        """Metrics of the individual functions, and the reward when no function scores groups."""
        await self.plan().individual_stage(state)

    async def score_group_stage(self, states: Sequence[State]) -> None:
        """Group metrics, the rewards that need them, advantages, then the cleanup handlers.

        ``states`` are all rollouts of an example, after ``score_individual``.
        """
        try:
            await self.plan().group_stage(states)
        finally:
            await self.run_cleanup(states)

    async def score_rollout(self, state: State, score_sem: Semaphore | None = None) -> RolloutScore:
        """Score one rollout in place. *Raises* ConfigError when a function scores whole groups, and
        for a judge that no function asks."""
        plan = self._scoring_plan()
        for f in plan.functions:
            if f.is_group:
                raise ConfigError(
                    f"{f.name!r} scores whole groups; call score_group(states)", function=f.name
                )
        try:
            async with score_sem or nullcontext():
                await plan.individual_stage(state)
        finally:
            await self.run_cleanup([state])
        return RolloutScore.of(state)

    async def score_group(
        self, states: Sequence[State], score_sem: Semaphore | None = None
    ) -> RolloutScores:
        """Score rollouts of an example in place; ``score_sem`` limits how many at a time. *Raises*
        ConfigError for a judge that no function asks."""
        plan, slot = self._scoring_plan(), score_sem or nullcontext()

        async def score_one(state: State) -> None:
            async with slot:
                await plan.individual_stage(state)

        try:
            await each(score_one(state) for state in states)
            async with slot:
                await plan.group_stage(states)
        finally:
            await self.run_cleanup(states)
        return RolloutScores.of(states)

    def _scoring_plan(self) -> Plan:
        """The plan of a pass that no run begins, which would have asked for what is missing."""
        plan = self.plan()
        if not plan.functions:
            self.check_needs()
        return plan

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

    async def _call_handler(self, name: str, handler: Callable[..., object], *args: object) -> None:
        try:
            await call(handler, *args, limit_s=CLEANUP_LIMIT_S)
        except RunError:
            raise
        except Exception:  # a failing handler must not discard a scored rollout
            logger.exception("the handler %r of %s failed", name, type(self).__name__)
