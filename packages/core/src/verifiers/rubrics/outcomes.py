"""What scoring returns: the reward and the metrics of one rollout, or of the rollouts of a group."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from verifiers.rollouts.state import State
from verifiers.types import AttributeDict

NAN = math.nan


class _Scores(AttributeDict):
    """``get("format")`` also finds the metric of the function ``format_reward_func``; so with any
    other name."""

    __slots__ = ()

    def get(self, name: str, default: object = None) -> Any:
        """The value of ``name``, or of the function ``<name>_reward_func``, or ``default``."""
        return super().get(name, super().get(f"{name}_reward_func", default))


class RolloutScore(_Scores):
    """``{"reward": float, "metrics": {name: float}, **metrics}``; NaN is unknown. A metric never
    hides ``reward``.

    >>> score = RolloutScore(1.0, {"correct": 1.0, "format_reward_func": 0.5})
    >>> score["reward"], score.get("correct", 0), score.get("format", 0), score.get("length", 0)
    (1.0, 1.0, 0.5, 0)
    """

    def __init__(self, reward: float, metrics: dict[str, float] | None = None):
        metrics = {} if metrics is None else metrics
        super().__init__({**metrics, "reward": reward, "metrics": metrics})

    @classmethod
    def of(cls, state: State) -> RolloutScore:
        """The score recorded in a scored state."""
        reward = state.record.reward
        return cls(NAN if reward is None else reward, dict(state.record.metrics))


class RolloutScores(_Scores):
    """``RolloutScore`` with one list item per rollout; missing metrics are NaN.

    >>> states = [vf.State(prompt="?", completion="no"), vf.State(prompt="?", completion="yes")]
    >>> rubric = vf.Rubric()
    >>> rubric.add_reward_func(lambda completion: float(completion == "yes"))
    >>> rubric.score_group_sync(states)["reward"]
    [0.0, 1.0]
    """

    def __init__(self, reward: list[float], metrics: dict[str, list[float]] | None = None):
        metrics = {} if metrics is None else metrics
        super().__init__({**metrics, "reward": reward, "metrics": metrics})

    @classmethod
    def of(cls, states: Sequence[State]) -> RolloutScores:
        """The scores recorded in scored states, in their order."""
        names = dict.fromkeys(name for state in states for name in state.record.metrics)
        metrics = {
            name: [state.record.metrics.get(name, NAN) for state in states] for name in names
        }
        return cls([RolloutScore.of(state)["reward"] for state in states], metrics)
