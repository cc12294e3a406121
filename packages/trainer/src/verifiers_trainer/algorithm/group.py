"""``Group``: the sibling rollouts of an example, and what of them is compared."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from verifiers.errors import ConfigError
from verifiers.results.statistics import mean
from verifiers.rollouts.rollout import Rollout
from verifiers.rollouts.values import Fork
from verifiers_trainer.algorithm.credit import CreditSettings, Siblings, has_signal
from verifiers_trainer.algorithm.samples import is_overlong
from verifiers_trainer.algorithm.tree import Tree


class GroupSettings(CreditSettings, Protocol):
    """What decides which rewards of a group count; ``RLConfig`` documents each."""

    @property
    def component(self) -> str: ...  # "rl", "ce" or "ref_kl"

    loss: Any
    teacher: Any  # None: there is none
    max_seq_len: int  # tokens, also below
    max_completion_len: int | None
    zero_truncated_completions: bool
    overlong: Any  # "mask" or "drop"


def apply_length_rules(rollout: Rollout, settings: GroupSettings) -> Rollout:
    """Apply the length limits to the reward of a rollout: the only function where length changes a
    reward.

    With ``overlong="drop"`` the reward of a rollout that is too long becomes NaN (unknown). With
    ``zero_truncated_completions`` a rollout that a limit cut gets the reward 0, unless it failed.
    The reward of a role changes by its own turns.
    """
    if rollout.role_rewards:
        parts = {
            role: apply_length_rules(rollout.of_role(role), settings)
            for role in rollout.role_rewards
        }
        rollout = replace(rollout, role_rewards={role: part.reward for role, part in parts.items()})
    if settings.overlong == "drop" and is_overlong(
        rollout.turns, settings.max_seq_len, settings.max_completion_len
    ):
        return replace(rollout, reward=math.nan)
    if is_zeroed(rollout, settings):
        return replace(rollout, reward=0.0, turn_sum="", turn_sum_weight=None)
    return rollout


def is_zeroed(rollout: Rollout, settings: GroupSettings) -> bool:
    """Whether ``zero_truncated_completions`` gives the rollout and its turns the reward 0."""
    is_cut = rollout.is_truncated and rollout.error is None
    return settings.zero_truncated_completions and is_cut


@dataclass(frozen=True)
class Group:
    """The sibling rollouts of an example. ``index`` counts groups as their rollouts began."""

    index: int
    example_id: int
    rollouts: tuple[Rollout, ...]
    env: str = ""
    """Name of the environment of the group's rollouts; empty if there is only one environment."""
    weights: Mapping[str, float] = field(default_factory=dict)
    """Weight of each reward function in the reward; empty if that is not known."""
    component: str = ""
    """The part of the loss that trains it, one of ``COMPONENTS``; empty: that of ``loss``."""

    @property
    def records(self) -> tuple[Rollout, ...]:
        """``rollouts`` under its name in version 0.2.0."""
        return self.rollouts

    @property
    def rewards(self) -> np.ndarray:
        """float64 [G], NaN where unknown."""
        return np.array([rollout.reward for rollout in self.rollouts])

    @property
    def scores(self) -> np.ndarray:
        """float64 [G, F], a column for each reward function with a weight; a row of NaN if the
        reward is unknown. Of a function that does not apply to a rollout the mean of its siblings,
        which is neither better nor worse.

        *Raises* ConfigError when the weights of the reward functions are unknown.
        """
        if not self.weights:
            raise ConfigError(
                "advantage 'gdpo' compares the scores of each reward function, and of these"
                " rollouts only the reward is known: use mean_std"
            )
        columns = [
            [rollout.metrics.get(name, math.nan) for name in self.weights]
            for rollout in self.rollouts
        ]
        scores = np.array(columns, np.float64)
        scores[np.isnan(self.rewards)] = math.nan
        for column, name in enumerate(self.weights):
            is_left_out = [name in rollout.not_applicable for rollout in self.rollouts]
            if any(is_left_out):
                number = mean(scores[:, column])
                scores[is_left_out & ~np.isnan(self.rewards), column] = np.nan_to_num(number)
        return scores

    @property
    def advantages(self) -> np.ndarray:
        """float64 [G], the advantages that the environment computed; NaN if the reward is
        unknown, or it failed.

        *Raises* ConfigError if it computed none.
        """
        return np.array([self._advantage_of(rollout) for rollout in self.rollouts])

    def _advantage_of(self, rollout: Rollout) -> float:
        value = rollout.advantage
        if math.isnan(rollout.reward) or (
            rollout.error is not None and (value is None or math.isnan(value))
        ):
            return math.nan
        if value is None or not math.isfinite(value):
            raise ConfigError(
                "advantage='environment', and the environment gave a rollout of example"
                f" {self.example_id} with the reward {rollout.reward:g} the advantage {value}:"
                " compute a number for each in the rubric's @vf.advantage method, or set"
                " advantage='mean'"
            )
        return value

    def values(self, choice: object) -> np.ndarray:
        """What an advantage is computed from: rewards [G], scores [G, F] ("gdpo"), or the
        environment's advantages."""
        if choice == "gdpo":
            return self.scores
        if choice == "environment":
            return self.advantages
        return self.rewards

    def limited(self, settings: GroupSettings) -> Group:
        """The group under the length rules, which may be applied more than once."""
        return replace(
            self, rollouts=tuple(apply_length_rules(rollout, settings) for rollout in self.rollouts)
        )

    def siblings(self, settings: GroupSettings) -> list[Siblings]:
        """What is compared in the group: its rollouts or, if roles have rewards of their own, what
        each role did."""
        if self.component_of(settings) != "rl":
            values = np.array(
                [1.0 if rollout.error is None else math.nan for rollout in self.rollouts]
            )
            return [Siblings(values, np.zeros(0), is_compared=False)]
        roles = dict.fromkeys(role for rollout in self.rollouts for role in rollout.role_rewards)
        return [self._siblings_of(role, settings) for role in roles or ("",)]

    def _siblings_of(self, role: str, settings: GroupSettings) -> Siblings:
        members = [
            n for n, rollout in enumerate(self.rollouts) if not role or role in rollout.role_rewards
        ]
        rollouts = tuple(
            self.rollouts[n].of_role(role) if role else self.rollouts[n] for n in members
        )
        part = replace(self, rollouts=rollouts, weights={role: 1.0} if role else self.weights)
        values, turn_rewards = part.values(settings.advantage), []
        if settings.credit == "turn":
            turn_rewards = [self._turn_rewards(rollout, settings) for rollout in rollouts]
            values = values - np.array([self._of_turns(rollout) for rollout in rollouts])
        return Siblings(
            values,
            np.array([rollout.num_sampled for rollout in rollouts], np.float64),
            turn_rewards,
            np.array(list(part.weights.values())) if settings.advantage == "gdpo" else None,
            role=role,
            members=members,
            tree=_tree_of(rollouts),
        )

    def _turn_rewards(self, rollout: Rollout, settings: GroupSettings) -> np.ndarray:
        """The environment's rewards of a rollout's turns [turns], as they weigh in its reward."""
        turn_rewards = () if is_zeroed(rollout, settings) else rollout.turn_rewards
        rewards = np.array(turn_rewards or [0.0] * len(rollout.turns), np.float64)
        return rewards * self._weight_of_turns(rollout)

    def _of_turns(self, rollout: Rollout) -> float:
        """The part of a rollout's reward that is the sum of its turns' rewards."""
        if not rollout.turn_sum:
            return 0.0
        return self._weight_of_turns(rollout) * rollout.metrics[rollout.turn_sum]

    def _weight_of_turns(self, rollout: Rollout) -> float:
        """The weight of the sum of the turns' rewards in the rollout's; 1 without such a sum.

        *Raises* ConfigError when it is not known.
        """
        if not rollout.turn_sum:
            return 1.0
        weight = self.weights.get(rollout.turn_sum, rollout.turn_sum_weight)
        if weight is None:
            raise ConfigError(
                f"credit='turn' weighs the turns' rewards as {rollout.turn_sum!r} weighs in the"
                f" reward, and of a rollout of example {self.example_id} that weight is not known:"
                " pass weights= to its Group, or set credit='rollout'"
            )
        return weight

    @functools.cached_property
    def oldest_version(self) -> int | None:
        """Policy version of the oldest token; None without tokens."""
        return min(
            (v for rollout in self.rollouts if (v := rollout.oldest_version) is not None),
            default=None,
        )

    def is_dead(self, settings: GroupSettings) -> bool:
        """Whether the group has no signal: too few known rewards, or all of them equal. Only "rl"
        reads rewards.

        With rewards for each role: whether no role has a signal.
        """
        return not has_signal(self.siblings(settings), settings)

    def component_of(self, settings: GroupSettings) -> str:
        """The part of the loss that trains the group. *Raises* ConfigError if none can."""
        component = self.component or settings.component
        if component == "rl" != settings.component:
            raise ConfigError(
                f"the group of example {self.example_id} has the component 'rl', and the loss"
                f" {settings.loss!r} reads no rewards: set a loss that does, such as loss='cispo',"
                " and the component of each other group"
            )
        if component == "ref_kl" and settings.teacher is None:
            raise ConfigError(
                f"the group of example {self.example_id} has the component 'ref_kl', and there is"
                " no teacher to be near to: set teacher"
            )
        return component


def _tree_of(rollouts: Sequence[Rollout]) -> Tree | None:
    """Which of these are branches of others among them; None if none is."""
    forks = [rollout.fork or Fork(-1) for rollout in rollouts]
    if all(fork.parent is None for fork in forks):
        return None
    at = {fork.sibling: number for number, fork in enumerate(forks)}
    return Tree(
        [-1 if fork.parent is None else at.get(fork.parent, -1) for fork in forks],
        [rollout.num_shared_turns for rollout in rollouts],
        [len(rollout.turns) for rollout in rollouts],
    )
