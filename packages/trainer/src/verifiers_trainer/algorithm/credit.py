"""Credit: the rewards of groups to an advantage for each rollout, or for each of its turns.

``credit`` is a pure function on arrays, and ``has_signal`` judges a group by the same arrays: what
the siblings were given, before a mean is subtracted. ``Siblings`` are compared with each other: the
rollouts of a group or, if roles have rewards of their own, what one role did in them.

With credit per turn a turn is worth its return: the rewards from it on, discounted by ``gamma``,
with the rollout's reward at the last. It is compared with the returns of the siblings that have a
turn of that number.

Where rollouts are branches of others, the turns between two forks are compared with those that
continue the same past (``tree``): each fork is to the functions here what a group is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from verifiers_trainer.algorithm.advantages import (
    ADVANTAGES,
    AdvantageFunction,
    compute_advantages,
    has_too_few,
    is_dead,
    is_known,
    of_equals,
    one_per_rollout,
)
from verifiers_trainer.algorithm.registry import call
from verifiers_trainer.algorithm.tree import Segment, Tree, mean_of_leaves


class CreditSettings(Protocol):
    """What decides how rewards become advantages; ``RLConfig`` documents each."""

    advantage: Any
    credit: Any  # "rollout" or "turn"; a choice is no ``str`` that may be assigned
    gamma: float
    negative_advantage_weight: float
    min_group_fraction: float
    zero_variance: Any  # "drop" or "keep"


@dataclass(frozen=True, slots=True)
class Siblings:
    """The arrays of n rollouts that are compared with each other.

    Example, two rollouts of two turns and of one, with rewards of turns beside the rollouts'::

        Siblings(values=array([1., 0.]), lengths=array([12., 7.]), turn_rewards=(array([.5, 0.]), array([0.])))
    """

    values: np.ndarray
    """float64 [n]: rewards, or the environment's advantages; [n, F]: scores. NaN: unknown."""
    lengths: np.ndarray
    """float64 [n], sampled tokens."""
    turn_rewards: Sequence[np.ndarray] = ()
    """float64 [turns] of each rollout; credit per turn reads them."""
    weights: np.ndarray | None = None
    """float64 [F], the weight of each reward function ("gdpo")."""
    is_compared: bool = True
    """False: ``values`` are the advantages, of a component of the loss that reads no reward."""
    role: str = ""
    """Whose turns these are; empty: the rollouts have no roles."""
    members: Sequence[int] = ()
    """Of a role: the position in the group of each rollout in which it took a turn."""
    tree: Tree | None = None
    """Which of them are branches of others; None: none."""

    def families(self, gamma: float) -> list[tuple[list[Segment], Siblings]]:
        """The segments of each fork, and what of them is compared: as if each were a rollout of its
        own, whose value is the mean of its leaves."""
        if self.tree is None:
            return [([], self)]
        families = []
        for family in self.tree.families():
            turn_rewards, values = [], mean_of_leaves(self.values, family)
            if self.turn_rewards:
                pairs = [self._after(segment, gamma) for segment in family]
                turn_rewards, values = [pair[0] for pair in pairs], np.array([p[1] for p in pairs])
            lengths = mean_of_leaves(self.lengths, family)
            part = replace(
                self, values=values, lengths=lengths, turn_rewards=turn_rewards, tree=None
            )
            families.append((family, part))
        return families

    def _after(self, segment: Segment, gamma: float) -> tuple[np.ndarray, float]:
        """The rewards of a segment's turns [turns], and the return that follows them, at its last
        turn: means over the known leaves."""
        returns, start, end = self.returns(gamma), segment.start, segment.end
        leaves = [
            n for n in segment.leaves if not np.isnan(np.append(returns[n], self.values[n])).any()
        ]
        if not leaves:
            return np.zeros(end - start), math.nan
        further = [
            gamma * returns[n][end] if len(returns[n]) > end else self.values[n] for n in leaves
        ]
        rewards = np.mean([self.turn_rewards[n][start:end] for n in leaves], axis=0)
        return rewards, float(np.mean(further))

    def returns(self, gamma: float) -> list[np.ndarray]:
        """The return of each turn [turns] of each rollout: Σ_{l>=j} γ^(l-j)·r_l, ``values`` added
        at the last.

        Each sum is rounded once, so that with γ = 1 the order of the rewards does not matter.
        """
        returns = []
        for rewards, reward in zip(self.turn_rewards, self.values, strict=True):
            terms = np.append(rewards, reward)
            turn = np.append(np.arange(len(rewards)), len(rewards) - 1)
            sums = [math.fsum(gamma ** (turn[j:] - j) * terms[j:]) for j in range(len(rewards))]
            returns.append(np.array(sums))
        return returns

    def judged(self, settings: CreditSettings) -> np.ndarray:
        """What `is_dead` judges: the values [n] or [n, F], or with credit per turn the returns [n,
        turns].

        A turn that a rollout does not have holds what the longest rollout has there, so it differs
        from none.
        """
        if settings.credit != "turn":
            return self.values
        rows = [
            # a rollout without turns may be unknown too
            np.append(math.nan if math.isnan(value) else 0.0, r)
            for r, value in zip(self.returns(settings.gamma), self.values, strict=True)
        ]
        complete = [row for row in rows if not np.isnan(row).any()]
        longest = max(complete, key=len, default=np.zeros(1))
        unknown = np.full(len(longest), math.nan)
        filled = [
            unknown if np.isnan(row).any() else np.append(row, longest[len(row) :]) for row in rows
        ]
        return np.array(filled)


def has_signal(siblings: Sequence[Siblings], settings: CreditSettings) -> bool:
    """Whether a group, given as what is compared in it, teaches anything: different rewards, enough
    of them known."""
    function = ADVANTAGES.resolve(settings.advantage)
    return any(
        not part.is_compared
        or not is_dead(family.judged(settings), settings.min_group_fraction, function)
        for part in siblings
        for _, family in part.families(settings.gamma)
    )


def credit(
    siblings: Sequence[Siblings], settings: CreditSettings
) -> list[list[float | np.ndarray]]:
    """For each of ``siblings`` the advantage of each rollout: one number, or with credit per turn,
    and in a tree, an array [turns].

    All groups of a batch together, because advantages such as "gdpo" read the others. NaN = not
    trained: an unknown reward, and all of a group without a signal, unless ``zero_variance`` keeps
    it. Negative advantages are multiplied by ``negative_advantage_weight``.
    """
    forks = [part.families(settings.gamma) if part.is_compared else [] for part in siblings]
    compared = [family for families in forks for _, family in families]
    if settings.credit == "turn":
        credited = [_of_turns(family, settings) for family in compared]
    else:
        credited = _of_rollouts(compared, settings)
    if (weight := settings.negative_advantage_weight) != 1:
        credited = [
            [np.where(np.less(a, 0), np.multiply(a, weight), a)[()] for a in part]
            for part in credited
        ]
    remaining = iter(credited)
    return [
        _on_paths(part, [(segments, next(remaining)) for segments, _ in families])
        if part.is_compared
        else list(part.values)
        for part, families in zip(siblings, forks, strict=True)
    ]


def _on_paths(
    part: Siblings, credited: Sequence[tuple[Sequence[Segment], list[Any]]]
) -> list[float | np.ndarray]:
    """The advantages of segments, one number or an array [turns of the segment] each, as those of
    the turns of each known rollout that goes through them."""
    if part.tree is None:
        return credited[0][1]
    paths = [np.full(num_turns, math.nan) for num_turns in part.tree.num_turns]
    is_compared = is_known(part.values)
    for segments, advantages in credited:
        for segment, advantage in zip(segments, advantages, strict=True):
            for leaf in segment.leaves:
                if is_compared[leaf]:
                    paths[leaf][segment.start : segment.end] = advantage
    return list(paths)


def _of_rollouts(compared: Sequence[Siblings], settings: CreditSettings) -> list[list[object]]:
    advantages = compute_advantages(
        settings.advantage,
        [part.values for part in compared],
        lengths_G=[part.lengths for part in compared],
        min_group_fraction=settings.min_group_fraction,
        keep_dead=settings.zero_variance == "keep",
        weights_G=[part.weights for part in compared if part.weights is not None] or None,
    )
    return [list(part) for part in advantages]


def _of_turns(part: Siblings, settings: CreditSettings) -> list[Any]:
    judged, returns = part.judged(settings), part.returns(settings.gamma)
    function, fraction = ADVANTAGES.resolve(settings.advantage), settings.min_group_fraction
    if not is_dead(judged, fraction, function):
        return turn_advantages(returns, choice=settings.advantage)
    is_kept = settings.zero_variance == "keep" and not has_too_few(judged, fraction, function)
    value = of_equals(function) if is_kept else math.nan
    return [
        np.full(len(r), value if usable else math.nan)
        for r, usable in zip(returns, is_known(judged), strict=True)
    ]


def turn_advantages(
    returns: Sequence[np.ndarray], *, choice: str | AdvantageFunction = "mean"
) -> list[np.ndarray]:
    """The advantage of each turn [turns] of siblings, from their ``returns`` [turns].

    ``choice`` is what "mean", "best" and "none" are for whole rollouts: the return minus the mean
    of that turn; 1 for the best return of that turn and NaN for the others, and for all if they are
    equal; the return itself. A function ``(rewards_G, lengths_G)`` of the caller's is called with the
    returns of each turn as a group [siblings that have it]. A sibling with a NaN is unknown: it
    gets NaN and is not compared.

    >>> turn_advantages([np.array([1.0, 1.0]), np.array([0.0])])
    [array([0.5, 0. ]), array([-0.5])]
    >>> turn_advantages([np.array([0.0, 1.0]), np.array([1.0, 0.0])], choice="best")
    [array([nan,  1.]), array([ 1., nan])]
    """
    usable = [r for r in returns if not np.isnan(r).any()]
    by_turn = [
        np.array([r[turn] for r in usable if len(r) > turn])
        for turn in range(max(map(len, usable), default=0))
    ]

    if choice not in ADVANTAGES:
        return _by_function(ADVANTAGES.resolve(choice), returns, by_turn)

    def of(value: float, siblings: np.ndarray) -> float:
        if choice == "best":
            return 1.0 if value == siblings.max() > siblings.min() else math.nan
        return value if choice == "none" else value - siblings.mean()

    return [
        (
            np.full(len(r), math.nan)
            if np.isnan(r).any()
            else np.array([of(*pair) for pair in zip(r, by_turn, strict=False)], float)
        )
        for r in returns
    ]


def _by_function(
    function: AdvantageFunction, returns: Sequence[np.ndarray], by_turn: Sequence[np.ndarray]
) -> list[np.ndarray]:
    """The advantages of an author's function for the returns of each turn, put back to the turns of
    each sibling. *Raises* ConfigError for another form."""
    computed = one_per_rollout(call("advantage", function, by_turn, None), function, by_turn)
    columns = [iter(turn) for turn in computed]
    return [
        np.full(len(r), math.nan)
        if np.isnan(r).any()
        else np.array([next(column) for _, column in zip(r, columns, strict=False)], float)
        for r in returns
    ]
