"""``Plan``: what one scoring pass runs, in two stages, which write into the rollouts.

``individual_stage`` runs the functions of a rollout that has ended, ``group_stage`` those that see
all rollouts of an example, and sets the advantages. An unknown reward is NaN, never 0: a failed
function gives an unknown value; its metric is NaN, the reward that needs it is NaN, and the
``ScoringError`` is recorded in ``state["error"]`` unless that has an earlier error. Where a function
does not apply there is no metric, the weighted sum is that of the other functions, and nothing
failed. Functions are not called for rollouts that ended in an error that is not scorable; group
functions receive only the other rollouts, so that siblings keep their rewards.

``running`` calls the functions, ``values`` says what a value is, ``arguments`` what they receive.
"""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter

from verifiers.errors import ScoringError
from verifiers.rollouts.author_code import sums_turns
from verifiers.rollouts.rollout import Rollout
from verifiers.rollouts.state import State
from verifiers.rollouts.values import LARGEST
from verifiers.rubrics.advantages import centered_advantages
from verifiers.rubrics.arguments import ArgumentResolver, RewardFunction
from verifiers.rubrics.running import batches, each, resolver_for, values_of
from verifiers.rubrics.values import NotApplicable, Value, value_or_error

NAN = math.nan
SUCCESS = "success"
"""Metric that repeats the value of the function that a rubric names as its success: 1 or 0."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What one scoring pass runs: the functions in order, and their effective weights (group weight
    times weight)."""

    functions: Sequence[RewardFunction]
    weights: Mapping[str, float]
    """Function name -> effective weight; functions of weight 0 are absent."""
    parallel: bool
    """The individual functions run concurrently."""
    advantage: RewardFunction | None
    success: str | None
    """Name of the function whose value is also the metric ``success``."""

    @property
    def turn_sum(self) -> str:
        """Name of the weighted function that adds up the rewards of the turns (``sums_turns``); ""
        without such a function."""
        sums = (
            f.name for f in self.functions if f.function in sums_turns and f.name in self.weights
        )
        return next(sums, "")

    async def individual_stage(self, state: State) -> None:
        """Write the metrics of the individual functions of a rollout, and its reward where no
        function scores groups."""
        started, rollout = perf_counter(), state.record
        functions = [function for function in self.functions if not function.is_group]
        # 1. forget an earlier scoring pass, whose result is replaced
        if isinstance(rollout.error, ScoringError):
            rollout.error = None
        rollout.not_applicable = []
        # 2. call the functions; of a rollout that failed the metrics are unknown
        if not can_be_scored(rollout):
            rollout.metrics.update((function.name, NAN) for function in functions)
        elif functions:
            resolver = await resolver_for(functions, [state])
            if self.parallel:
                await each(_run([function], resolver) for function in functions)
            else:
                for batch in batches(functions):
                    await _run(batch, resolver)
        # 3. conclude the reward, unless it also depends on the group
        if len(functions) == len(self.functions):
            self._conclude(rollout)
        rollout.timing["scoring_ms"] += (perf_counter() - started) * 1000

    async def group_stage(self, states: Sequence[State]) -> None:
        """Write the metrics of the group functions, the rewards that depend on them and the
        advantages. ``states``: all rollouts of an example, after their individual stage."""
        started = perf_counter()
        if functions := [function for function in self.functions if function.is_group]:
            # 1. call the functions with the rollouts that can be scored; the others are unknown
            for state in states:
                state.record.metrics.update((function.name, NAN) for function in functions)
            if alive := [state for state in states if can_be_scored(state.record)]:
                resolver = await resolver_for(functions, alive)
                for function in functions:
                    await _run([function], resolver)
            # 2. conclude the rewards
            for state in states:
                self._conclude(state.record)
        # 3. compare the rewards
        await _set_advantages(self.advantage, states)
        spent = (perf_counter() - started) * 1000
        for state in states:
            state.record.timing["scoring_ms"] += spent

    def _conclude(self, rollout: Rollout) -> None:
        """Set ``reward``, and the metric ``success`` if the rubric names its function.

        The reward is NaN when a metric is unknown, and when no function has a weight: what nothing
        measures is unknown.
        """
        is_scored = can_be_scored(rollout)
        rollout.note_turn_sum(self.turn_sum, self.weights)
        reward = weighted(self.weights, rollout) if is_scored else NAN
        if self.weights and self.weights.keys() <= set(rollout.not_applicable):
            names = ", ".join(map(repr, self.weights))
            rollout.error = rollout.error or ScoringError(
                f"no weighted reward function applies to this rollout: {names} returned None or"
                " NOT_APPLICABLE",
                function=next(iter(self.weights)),
            )
        if abs(reward) > LARGEST:
            rollout.error = rollout.error or ScoringError(
                f"the weighted sum of the metrics is beyond ±{LARGEST:g}"
            )
            reward = NAN
        _set_reward(rollout, reward)
        if self.success is None or self.success == SUCCESS:
            return
        solved = rollout.metrics.get(self.success, NAN) if is_scored else NAN
        if solved in (0.0, 1.0) or math.isnan(solved):
            _record(rollout, SUCCESS, solved)
            return
        message = f"the success metric {self.success!r} is {solved:g}; it must be 0 or 1"
        _record(rollout, SUCCESS, ScoringError(message, function=self.success))


def can_be_scored(rollout: Rollout) -> bool:
    """Whether functions are called for a rollout: it has no error, or a scorable error (caused by
    the model)."""
    error = rollout.error
    return error is None or isinstance(error, ScoringError) or getattr(error, "scorable", False)


def weighted(weights: Mapping[str, float], rollout: Rollout) -> float:
    """Σ weight · metric over the functions that apply to a rollout; NaN when a metric of these is
    missing or unknown, and when there is none."""
    left_out, metrics = rollout.not_applicable, rollout.metrics
    terms = [w * metrics.get(name, NAN) for name, w in weights.items() if name not in left_out]
    return sum(terms, 0.0) if terms else NAN


def leave_unscored(states: Sequence[State]) -> None:
    """Set rewards and advantages to NaN and metrics to empty, without scoring."""
    for state in states:
        state.record.advantage = NAN
        state.record.metrics, state.record.not_applicable = {}, []
        _set_reward(state.record, NAN)


async def measure(
    functions: Sequence[RewardFunction], state: State, logger: logging.Logger
) -> None:
    """Add the metrics of ``functions`` whose names the rollout does not have; a failure is logged,
    its value NaN.

    They are the library's own and run in the event loop, where they cost less than a thread.
    """
    resolver = ArgumentResolver([state])
    for function in functions:
        if function.name in state.record.metrics:
            continue
        try:
            value = function(resolver)
            value = value_or_error(await value if inspect.isawaitable(value) else value, function)
            if isinstance(value, ScoringError):
                raise value
            if isinstance(value, NotApplicable):
                continue
        except Exception as error:  # noqa: BLE001 - must not fail the rollout
            logger.warning("monitor metric %s failed: %s", function.name, error)
            value = NAN
        state.record.metrics[function.name] = value


async def _set_advantages(function: RewardFunction | None, states: Sequence[State]) -> None:
    """Set ``advantage``, also on turns without an advantage; an ``@advantage`` method sees the
    rollouts with a known reward."""
    rollouts = [state.record for state in states]
    rewards = [NAN if rollout.reward is None else rollout.reward for rollout in rollouts]
    if function is None:
        advantages = centered_advantages(rewards)
    else:
        advantages = [NAN] * len(states)
        numbers = [number for number, reward in enumerate(rewards) if not math.isnan(reward)]
        if numbers:
            resolver = ArgumentResolver([states[number] for number in numbers])
            (values,) = await values_of([function], resolver)
            errors = [value for value in values if isinstance(value, ScoringError)]
            for number, value in zip(numbers, values, strict=True):
                if errors:
                    rollouts[number].error = rollouts[number].error or errors[0]
                elif isinstance(value, float):
                    advantages[number] = value
    for rollout, advantage in zip(rollouts, advantages, strict=True):
        rollout.advantage = advantage
        for turn in rollout.transcript.turns:
            if turn.advantage is None:
                turn.advantage = advantage


def _set_reward(rollout: Rollout, reward: float) -> None:
    """Set the reward, which also turns show that the environment gave none."""
    rollout.reward = reward
    for turn in rollout.transcript.turns:
        turn.rollout_reward = reward


def _record(rollout: Rollout, name: str, value: Value) -> None:
    """Write the metric of a function; the first failure is the error of the rollout."""
    if isinstance(value, NotApplicable):
        rollout.metrics.pop(name, None)
        rollout.not_applicable = [*dict.fromkeys((*rollout.not_applicable, name))]
        return
    if isinstance(value, ScoringError):
        rollout.error = rollout.error or value
        value = NAN
    rollout.metrics[name] = value


async def _run(batch: Sequence[RewardFunction], resolver: ArgumentResolver) -> None:
    for function, values in zip(batch, await values_of(batch, resolver), strict=True):
        for state, value in zip(resolver.states, values, strict=True):
            _record(state.record, function.name, value)
