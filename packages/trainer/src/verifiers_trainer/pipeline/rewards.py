"""Rewards of scored rollouts: the hook ``compute_rewards`` and its default.

A rollout is scored once and keeps its raw scores. Its reward is their weighted sum under the
rubric's present weights, so weights may change during training without scoring again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

from verifiers.environments.base import Environment
from verifiers.errors import ConfigError
from verifiers.rollouts.author_code import maybe_await
from verifiers.rollouts.state import State
from verifiers.rollouts.values import number
from verifiers.rubrics.scoring import weighted
from verifiers_trainer.pipeline import subclass_hooks

_scored: ContextVar[Mapping[int, State] | None] = ContextVar(
    "verifiers_scored_rollouts", default=None
)
"""id(completion) -> its rollout, while a hook runs."""


async def decide(
    hook: Callable[..., object], states: Sequence[State], arguments: Mapping[str, object]
) -> None:
    """Set the reward of every scored rollout to the result of ``hook``; None and NaN are unknown.

    A rollout that failed through no fault of the model keeps its unknown reward and is not passed
    to the hook. Raises ``ConfigError``
    for a wrong number of rewards, and the errors of the hook.
    """
    alive = [state for state in states if has_reward(state)]
    if not alive:
        return
    token = _scored.set({id(state["completion"]): state for state in alive})
    columns = {
        f"{name}s": [state[name] for state in alive] for name in ("prompt", "completion", "answer")
    }
    try:
        rewards = await maybe_await(
            subclass_hooks.call(hook, {**columns, "states": alive, **arguments})
        )
    finally:
        _scored.reset(token)
    if len(rewards) != len(alive):
        raise ConfigError(
            f"compute_rewards returned {len(rewards)} rewards for {len(alive)} completions"
        )
    for state, reward in zip(alive, rewards, strict=True):
        state["reward"] = math.nan if reward is None else number(float(reward))


def has_reward(state: State) -> bool:
    """Whether a rollout is given a reward: it did not fail, or by the model's own doing."""
    error = state["error"]
    return error is None or error.scorable


def recorded(
    env: Environment, completions: Sequence[object], prompts: Sequence[object]
) -> list[float]:
    """The rewards of completions: from their recorded scores, or from the rubric for those that
    have none."""
    states_by_id = _scored.get() or {}
    states = [states_by_id.get(id(completion)) for completion in completions]
    missing = [index for index, state in enumerate(states) if state is None]
    fresh: dict[int, float] = {}
    if missing:
        scores: Any = env.rubric.score_rollouts_sync(
            prompts=[_prompt(prompts[index]) for index in missing],
            completions=[completions[index] for index in missing],
            answers=[_answer(prompts[index]) for index in missing],
            states=[{} for _ in missing],
        )
        fresh = dict(zip(missing, scores["reward"], strict=True))
    return [
        fresh[index] if state is None else reward_of(env, state)
        for index, state in enumerate(states)
    ]


def reward_of(env: Environment, state: State) -> float:
    """The weighted sum of a rollout's scores with the present weights; NaN when a weighted score is
    unknown.

    A rubric that overrides scoring keeps its computed reward.
    """
    rubric = env.for_row(state).rubric
    if rubric.scores_itself:
        reward = state["reward"]
        return math.nan if reward is None else float(reward)
    weights = rubric.plan().weights
    return weighted(weights, state.record) if weights else 0.0  # all weights 0: as was asked


def _prompt(prompt: object) -> object:
    return prompt["prompt"] if isinstance(prompt, Mapping) and "prompt" in prompt else prompt


def _answer(prompt: object) -> Any:
    return prompt.get("answer", "") if isinstance(prompt, Mapping) else ""
