"""Trees of rollouts: which turns of a group are compared with which.

A branch is a rollout that shares the turns of another, its parent, up to the turn at which it left.
The turns between two forks are a *segment*. Segments that begin at one fork are *siblings*: they
continue the same past, so that their difference is theirs alone. The value of a segment is the mean
of the known leaves below it, the rollouts that go through it, and its advantage the difference to
its siblings:

    A(s) = V(s) - mean of V over the siblings of s, s included,    V(s) = mean of the known R below s

The roots of a group are siblings, with the prompt as their past: without forks A is the advantage
of rollouts that are compared in their group. An unknown reward is left out of every mean; a segment
without a known leaf is unknown itself.

Each rollout trains its whole path, so a segment counts as often as leaves are below it: with the
shares of the leaves that is E[grad log pi(segment) A(segment)] over the tree, the policy gradient
with a baseline that reads the past alone. The prefix tree of a packed row computes it once.

*Source*: Tree-GRPO, arXiv 2509.21240, eq. 4 to 6 (advantages inside a tree and between trees);
TreePO, arXiv 2508.17445, section 2.3 (a node's mean of leaves as its value); ARPO, arXiv
2507.19849, section 3.2 (shared tokens get the mean over the branches).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Segment:
    """Turns ``start`` to before ``end`` of a rollout, and of all ``leaves`` that go through them."""

    rollout: int
    start: int
    end: int
    leaves: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Tree:
    """The forks among n rollouts. Two branches that left rollout 0 after its first turn::

        Tree(parents=[-1, 0, 0], turns=[0, 1, 1], num_turns=[3, 2, 3])

    *Raises* ValueError for a branch that left at a turn that its parent does not have.
    """

    parents: Sequence[int]  # [n], -1: none, a root
    turns: Sequence[int]  # [n], turns shared with the parent
    num_turns: Sequence[int]  # [n], the shared included

    def __post_init__(self) -> None:
        for number, (parent, turn) in enumerate(zip(self.parents, self.turns, strict=True)):
            if parent >= 0 and turn > min(self.num_turns[parent], self.num_turns[number]):
                raise ValueError(
                    f"rollout {number} left rollout {parent} at turn {turn}, and of these the"
                    f" shorter has {min(self.num_turns[parent], self.num_turns[number])} turns"
                )

    def families(self) -> list[list[Segment]]:
        """The siblings of each fork, those of the group's roots first.

        >>> [len(family) for family in Tree([-1, 0, 0], [0, 1, 1], [3, 2, 3]).families()]
        [1, 3]
        """
        origins = [self._origin(number) for number in range(len(self.parents))]
        branches: dict[int, list[int]] = {}
        for number, (parent, _) in enumerate(origins):
            branches.setdefault(parent, []).append(number)

        def below(number: int, after: int) -> tuple[int, ...]:
            further = [b for b in branches.get(number, ()) if origins[b][1] > after]
            return (number, *(leaf for branch in further for leaf in below(branch, -1)))

        def segment(number: int, start: int) -> Segment:
            forks = (origins[b][1] for b in branches.get(number, ()))
            end = min((turn for turn in forks if turn > start), default=self.num_turns[number])
            return Segment(number, start, end, below(number, start))

        roots = branches.get(-1, [])
        families = [[segment(number, 0) for number in roots]]
        for number in range(len(self.parents)):
            for turn in sorted({origins[b][1] for b in branches.get(number, ())}):
                members = [number, *(b for b in branches[number] if origins[b][1] == turn)]
                families.append([segment(member, turn) for member in members])
        return families

    def _origin(self, number: int) -> tuple[int, int]:
        """(rollout, turn) where a rollout left: of its ancestors the one that took the turn before;
        (-1, 0) if it shares none."""
        parent, turn = self.parents[number], self.turns[number]
        while parent >= 0 and turn <= self.turns[parent]:
            parent = self.parents[parent]
        return (parent, turn) if parent >= 0 and turn > 0 else (-1, 0)


def mean_of_leaves(values: np.ndarray, family: Sequence[Segment]) -> np.ndarray:
    """The value of each segment: the mean over its leaves of ``values`` [n] or [n, F], without those
    that hold a NaN; NaN if there is no other.

    >>> mean_of_leaves(np.array([1.0, 0.0, np.nan]), [Segment(0, 0, 1, (0, 1, 2)), Segment(2, 1, 2, (2,))])
    array([0.5, nan])
    """
    values = np.asarray(values, np.float64)
    unknown = np.isnan(values.reshape(len(values), -1)).any(axis=1)
    means = np.full((len(family), *values.shape[1:]), np.nan)
    for position, segment in enumerate(family):
        if leaves := [leaf for leaf in segment.leaves if not unknown[leaf]]:
            means[position] = values[leaves].mean(axis=0)
    return means
