"""Rewards of scored rollouts: the hook ``compute_rewards`` and its default.

A rollout is scored once, and its raw scores are kept. A reward is their weighted sum under the weights that the rubric
has now, so weights may change during training without scoring anything again. The rubric itself is core's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from typing import Any

from verifiers.environments.base import Environment
from verifiers.errors import ConfigError
from verifiers.rollouts.state import State
from verifiers.rubrics import Rubric
from verifiers.rubrics.scoring import overrides
from verifiers.runtime.sync_async import maybe_await
from verifiers_trainer.pipeline import subclass_hooks

_scored: ContextVar[Mapping[int, State] | None] = ContextVar("verifiers_scored_rollouts", default=None)
"""Completions by identity -> their rollouts, while a hook decides on them."""


async def decide(hook: Any, states: Sequence[State], known: Mapping[str, Any]) -> None:
    """Set the reward of every scored rollout to what ``hook`` gives for it; None and NaN are unknown.

    A rollout that failed keeps its unknown reward and is not shown. Raises ``ConfigError`` for another number of
    rewards, and whatever the hook raises.
    """
    alive = [state for state in states if state["error"] is None]
    if not alive:
        return
    token = _scored.set({id(state["completion"]): state for state in alive})
    shown = {f"{name}s": [state[name] for state in alive] for name in ("prompt", "completion", "answer")}
    try:
        rewards = await maybe_await(subclass_hooks.call(hook, {**shown, "states": alive, **known}))
    finally:
        _scored.reset(token)
    if len(rewards) != len(alive):
        raise ConfigError(f"compute_rewards returned {len(rewards)} rewards for {len(alive)} completions")
    for state, reward in zip(alive, rewards, strict=True):
        state["reward"] = math.nan if reward is None else float(reward)


def recorded(env: Environment, completions: Sequence[Any], prompts: Sequence[Any]) -> list[float]:
    """The rewards of completions: from their recorded scores, or from the rubric for those that have none."""
    known = _scored.get() or {}
    states = [known.get(id(completion)) for completion in completions]
    missing = [place for place, state in enumerate(states) if state is None]
    fresh: dict[int, float] = {}
    if missing:
        scores: Any = env.rubric.score_rollouts_sync(
            prompts=[_prompt(prompts[place]) for place in missing],
            completions=[completions[place] for place in missing],
            answers=[_answer(prompts[place]) for place in missing],
            states=[{} for _ in missing],
        )
        fresh = dict(zip(missing, scores["reward"], strict=True))
    return [fresh[place] if state is None else reward_of(env, state) for place, state in enumerate(states)]


def reward_of(env: Environment, state: State) -> float:
    """The weighted sum of a rollout's scores with the present weights; NaN when one that counts is unknown.

    A rubric that overrides scoring keeps the reward it computed.
    """
    rubric = env.for_row(state).rubric
    if overrides(rubric, Rubric, "score_rollout") or overrides(rubric, Rubric, "score_group"):
        reward = state["reward"]
        return math.nan if reward is None else float(reward)
    return weighted(rubric.plan().weights, state["metrics"])


def weighted(weights: Mapping[str, float], scores: Mapping[str, float]) -> float:
    """Σ weight · score; NaN when a score that counts is missing or unknown."""
    return sum((weight * scores.get(name, math.nan) for name, weight in weights.items()), 0.0)


def _prompt(given: Any) -> Any:
    return given["prompt"] if isinstance(given, Mapping) and "prompt" in given else given


def _answer(given: Any) -> Any:
    return given.get("answer", "") if isinstance(given, Mapping) else ""
