"""Schedules over a run: the difficulty of the rows, and the weight of each reward function.

Both are functions of the place in the run alone (epoch, step), so a resumed run continues exactly. The rows of a
difficulty are sampled like any others (``custom_batches``); rewards are weighted again from recorded scores and never
scored again (``rewards``).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from verifiers.environments.base import Environment
from verifiers.environments.group import EnvGroup
from verifiers.errors import ConfigError
from verifiers.rollouts.state import State
from verifiers.rubrics import Rubric, RubricGroup
from verifiers_trainer.pipeline import rewards

MISSING = "easy"
"""Difficulty of a row that has none."""
DEFAULT = "default"
"""Key of the weights of epochs that the schedule does not name."""


# --- difficulty -------------------------------------------------------------------------------------------------


def difficulty_at(schedule: Sequence[Sequence[Any]] | None, epochs: float) -> Any:
    """The difficulty after ``epochs`` passes: of the first entry whose threshold is higher, else of the last.

    >>> difficulty_at([(1.0, "easy"), (2.5, "hard")], 0.5), difficulty_at([(1.0, "easy"), (2.5, "hard")], 3)
    ('easy', 'hard')
    """
    if not schedule:
        return None
    return next((difficulty for threshold, difficulty in schedule if epochs < threshold), schedule[-1][1])


def reader_of(key: Any) -> Callable[[Mapping[str, Any]], Any]:
    """What gives the difficulty of a row: a column, a function, or the import path of one.

    Raises ``ConfigError`` for a path that leads nowhere.
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


def rows_of(rows: Iterable[Any], difficulty: Any, key: Any = "difficulty") -> list[Any]:
    """The rows of a difficulty: a value, a list of values, or a function of the row; all of them for None.

    Raises ``ConfigError``, naming the difficulties there are, when no row has it.
    """
    rows = list(rows)
    if difficulty is None:
        return rows
    read = reader_of(key)
    if callable(difficulty):
        found = [row for row in rows if difficulty(row)]
    else:
        wanted = list(difficulty) if isinstance(difficulty, list | tuple) else [difficulty]
        found = [row for row in rows if read(row) in wanted]
    if not found:
        there = ", ".join(sorted({repr(read(row)) for row in rows})[:8])
        raise ConfigError(f"no row has the difficulty {difficulty!r} (difficulty_key={key!r}); there are: {there}")
    return found


def check_difficulties(rows: Sequence[Any], schedule: Sequence[Sequence[Any]], key: Any) -> None:
    """Raise ``ConfigError`` for an entry of the schedule that no row belongs to: now, and not hours later."""
    for _, difficulty in schedule:
        rows_of(rows, difficulty, key)


# --- reward weights ---------------------------------------------------------------------------------------------


class RewardWeights:
    """The weights of the reward functions by epoch: ``RewardWeights(env, {0: [1, 0], "default": {"style": 0.5}})``.

    A list gives the weights of a group's rubrics, or of the functions of a single rubric, in their order; a
    mapping gives them by name. Epochs that are not named have the weights of "default", or else the rubric's own.
    Raises ``ConfigError`` for weights that do not fit a rubric of ``env``.
    """

    def __init__(self, env: Environment, schedule: Mapping[Any, Any]):
        self.env = env
        self._by_epoch = {key if key == DEFAULT else int(key): weights for key, weights in schedule.items()}
        for member in members(env):
            for weights in self._by_epoch.values():
                effective_weights(member.rubric, weights)

    def decide(self, epoch: int, states: Sequence[State]) -> None:
        """Set the reward of every scored rollout to the sum of its scores under the weights of ``epoch``."""
        weights = self._by_epoch.get(epoch, self._by_epoch.get(DEFAULT))
        for state in states:
            if weights is not None and state["error"] is None:
                own = effective_weights(self.env.for_row(state).rubric, weights)
                state["reward"] = rewards.weighted(own, state["metrics"])

    def weights_of(self, epoch: int, state: State) -> Mapping[str, float]:
        """The weight of each function that counts in ``epoch``, for the environment of this rollout."""
        weights, rubric = self._by_epoch.get(epoch, self._by_epoch.get(DEFAULT)), self.env.for_row(state).rubric
        return rubric.plan().weights if weights is None else effective_weights(rubric, weights)


def effective_weights(rubric: Rubric, given: Any) -> dict[str, float]:
    """Function -> weight, of those that count. Raises ``ConfigError`` when ``given`` does not fit the rubric."""
    if isinstance(rubric, RubricGroup) and not (isinstance(given, Mapping) and given.keys() - set(rubric.names)):
        own = rubric.get_group_weights()
        try:
            rubric.set_group_weights(given)
            return dict(rubric.plan().weights)
        finally:
            rubric.set_group_weights(own)
    names, base = rubric.get_reward_func_names(), rubric.plan().weights
    listed = names if isinstance(given, Mapping) or len(given) == len(names) else [n for n in names if n in base]
    by_name = dict(given) if isinstance(given, Mapping) else dict(zip(listed, given, strict=False))
    if len(by_name) != len(given) or by_name.keys() - set(names):
        raise ConfigError(
            f"reward_weights_schedule gives {given!r}, and the rubric has the functions {', '.join(names)}: give a "
            "weight for each, or weights by their names"
        )
    return {name: weight for name in names if (weight := float(by_name.get(name, base.get(name, 0.0))))}


def members(env: Environment) -> list[Environment]:
    """The environments that run rollouts: the members of a group, also of nested groups, or the one itself."""
    return [inner for member in env.envs for inner in members(member)] if isinstance(env, EnvGroup) else [env]
