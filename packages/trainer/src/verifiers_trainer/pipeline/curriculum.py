"""Schedules over a run: the difficulty of the rows, and the weight of each reward function.

Both are functions of epoch and step alone, so a resumed run continues exactly. The rows of a
difficulty are sampled like any others (``custom_batches``); rewards are recomputed from recorded
scores, without scoring again (``rewards``).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from verifiers.environments.base import Environment
from verifiers.errors import ConfigError
from verifiers.rollouts.state import State
from verifiers.rollouts.values import number
from verifiers.rubrics import Rubric, RubricGroup
from verifiers_trainer.pipeline import rewards
from verifiers_trainer.policy import preparation

MISSING = "easy"
"""Difficulty of a row without the column."""
DEFAULT = "default"
"""Key of the weights of epochs that the schedule does not name."""


# --- difficulty -----------------------------------------------------------------------------------


def difficulty_at(schedule: Sequence[Sequence[Any]] | None, epochs: float) -> Any:
    """The difficulty after ``epochs`` passes: that of the first entry with a higher threshold, else
    of the last.

    >>> difficulty_at([(1.0, "easy"), (2.5, "hard")], 0.5), difficulty_at([(1.0, "easy"), (2.5, "hard")], 3)
    ('easy', 'hard')
    """
    if not schedule:
        return None
    return next(
        (difficulty for threshold, difficulty in schedule if epochs < threshold), schedule[-1][1]
    )


def reader_of(
    key: str | Callable[[Mapping[str, object]], object],
) -> Callable[[Mapping[str, object]], object]:
    """A function from a row to its difficulty, from a column name, a function, or the import path
    of a function.

    Raises ``ConfigError`` for a path that cannot be imported.
    """
    if callable(key):
        return key
    module, colon, name = str(key).partition(":")
    if not colon:
        return lambda row: row.get(key, MISSING)
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"difficulty_key {key!r} cannot be loaded: {error}") from error


def rows_of(
    rows: Iterable[Any],
    difficulty: object,
    key: str | Callable[[Mapping[str, Any]], Any] = "difficulty",
) -> list[Any]:
    """The rows of a difficulty: a value, a list of values, or a function of the row; all of them
    for None.

    Raises ``ConfigError``, listing the available difficulties, when no row has it.
    """
    rows = list(rows)
    if difficulty is None:
        return rows
    read = reader_of(key)
    if callable(difficulty):
        matching = [row for row in rows if difficulty(row)]
    else:
        difficulties = list(difficulty) if isinstance(difficulty, list | tuple) else [difficulty]
        matching = [row for row in rows if read(row) in difficulties]
    if not matching:
        available = ", ".join(sorted({repr(read(row)) for row in rows})[:8])
        raise ConfigError(
            f"no row has the difficulty {difficulty!r} (difficulty_key={key!r}); available:"
            f" {available}"
        )
    return matching


def check_difficulties(
    rows: Sequence[object],
    schedule: Sequence[Sequence[object]],
    key: str | Callable[[Mapping[str, object]], object],
) -> None:
    """Raise ``ConfigError`` for an entry of the schedule without rows, before training starts."""
    for _, difficulty in schedule:
        rows_of(rows, difficulty, key)


# --- reward weights -------------------------------------------------------------------------------


class RewardWeights:
    """The weights of the reward functions by epoch: ``RewardWeights(env, {0: [1, 0], "default":
    {"style": 0.5}})``.

    A list gives the weights of a group's rubrics, or of the functions of a single rubric, in their
    order; a mapping gives them by name. Other epochs have the weights of "default", or else the
    rubric's. Raises ``ConfigError`` for weights that do not fit a rubric of ``env``.
    """

    def __init__(self, env: Environment, schedule: Mapping[Any, Any]):
        self.env = env
        self._by_epoch = {
            key if key == DEFAULT else int(key): weights for key, weights in schedule.items()
        }
        for member in preparation.members(env):
            for weights in self._by_epoch.values():
                effective_weights(member.rubric, weights)

    def decide(self, epoch: int, states: Sequence[State]) -> None:
        """Set the reward of every scored rollout to the sum of its scores under the weights of
        ``epoch``."""
        weights = self._by_epoch.get(epoch, self._by_epoch.get(DEFAULT))
        for state in states:
            if weights is not None and rewards.has_reward(state):
                rubric = self.env.for_row(state).rubric
                effective = effective_weights(rubric, weights)
                # credit per turn reads it: the sum of turns' rewards may have gained or lost weight
                turn_sum = replace(rubric.plan(), weights=effective).turn_sum
                state.record.note_turn_sum(turn_sum, effective)
                # all weights 0 is what was asked for
                reward = rewards.weighted(effective, state.record) if effective else 0.0
                state["reward"] = number(reward)

    def weights_of(self, epoch: int, state: State) -> Mapping[str, float]:
        """The weight of each function with nonzero weight in ``epoch``, in the environment of this
        rollout."""
        weights = self._by_epoch.get(epoch, self._by_epoch.get(DEFAULT))
        rubric = self.env.for_row(state).rubric
        return rubric.plan().weights if weights is None else effective_weights(rubric, weights)


def effective_weights(
    rubric: Rubric, weights: Mapping[str, float] | Sequence[float]
) -> dict[str, float]:
    """Function -> nonzero weight. Raises ``ConfigError`` when ``weights`` does not
    fit the rubric."""
    if isinstance(rubric, RubricGroup) and not (
        isinstance(weights, Mapping) and weights.keys() - set(rubric.names)
    ):
        previous = rubric.get_group_weights()
        try:
            rubric.set_group_weights(weights)
            return dict(rubric.plan().weights)
        finally:
            rubric.set_group_weights(previous)
    names, base = rubric.get_reward_func_names(), rubric.plan().weights
    if isinstance(weights, Mapping) or len(weights) == len(names):
        listed = names
    else:
        listed = [n for n in names if n in base]
    by_name = (
        dict(weights) if isinstance(weights, Mapping) else dict(zip(listed, weights, strict=False))
    )
    if len(by_name) != len(weights) or by_name.keys() - set(names):
        raise ConfigError(
            f"reward_weights_schedule has {weights!r}, and the rubric has the functions"
            f" {', '.join(names)}: give a weight for each, or weights by their names"
        )
    return {
        name: weight for name in names if (weight := float(by_name.get(name, base.get(name, 0.0))))
    }
