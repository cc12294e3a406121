"""The place of a training run in its data: the example of the n-th group, the solved examples, and what a checkpoint
keeps of them.

The example of a group is a function of its index alone, so a resumed run continues the same order. When groups are
begun, and which of them a batch takes, is decided in ``pipeline``.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from verifiers.data.examples import Example
from verifiers_trainer.algorithm.batch import Group

SOLVED_SHARE = 0.9
"""Of the best reward seen, what a group's mean must reach for its example to count as solved by it."""
SOLVED_TIMES = 2
"""Groups in a row that must solve an example before it is left out."""


class Schedule:
    """Chooses the example of the n-th group: pass after pass over the examples, each shuffled by (seed, pass)."""

    may_skip = True
    """Whether groups may be left out of the order."""

    def __init__(self, examples: Sequence[Example], seed: int, shuffle: bool):
        self.examples, self.seed, self.shuffle = examples, seed, shuffle
        self._orders: dict[int, list[int]] = {}

    def example(self, index: int) -> Example:
        """The example of group ``index``."""
        epoch, place = divmod(index, len(self.examples))
        return self.examples[self._order(epoch)[place]]

    def seed_of(self, index: int) -> int:
        """The sampling seed of the pass that group ``index`` belongs to."""
        return self.seed * 1_000_003 + index // len(self.examples)

    def _order(self, epoch: int) -> list[int]:
        if epoch not in self._orders:
            order = list(range(len(self.examples)))
            if self.shuffle:
                random.Random(f"{self.seed}:{epoch}").shuffle(order)
            self._orders = {epoch: order} | {e: o for e, o in self._orders.items() if e >= epoch - 1}
        return self._orders[epoch]


def digest(examples: Sequence[Example]) -> str:
    """One hash of all examples and their order: indices mean the same examples only where it is equal."""
    total = hashlib.sha256()
    for example in examples:
        total.update(example.hash.encode())
    return total.hexdigest()[:16]


@dataclass
class Solved:
    """Which examples the policy solves already, counted in the order in which batches use their groups."""

    best_reward: float = 0.0
    """The best reward of the run; nothing counts as solved while none is above 0."""
    streaks: dict[int, int] = field(default_factory=dict)
    """Example -> groups in a row that solved it."""

    def count(self, groups: Iterable[Group]) -> None:
        """Take notice of finished groups; those without a known reward say nothing."""
        found = [(group, known) for group in groups if (known := group.rewards[~np.isnan(group.rewards)]).size]
        self.best_reward = max([self.best_reward, *(float(known.max()) for _, known in found)])
        for group, known in sorted(found, key=lambda pair: pair[0].index):
            is_solved = 0 < SOLVED_SHARE * self.best_reward <= known.mean()
            self.streaks[group.example_id] = self.streaks.get(group.example_id, 0) + 1 if is_solved else 0

    def __contains__(self, example_id: int) -> bool:
        return self.streaks.get(example_id, 0) >= SOLVED_TIMES

    def __len__(self) -> int:
        return sum(streak >= SOLVED_TIMES for streak in self.streaks.values())


@dataclass
class PipelineState:
    """What a checkpoint keeps of the pipeline."""

    next_index: int = 0
    """Index of the next group to begin."""
    delivered: int = 0
    """Batches handed to the trainer."""
    base: int = 0
    """Index after the newest group that a batch has used; what lies beyond it was begun for the batches to come."""
    ready: list[Group] = field(default_factory=list)
    """Finished groups not yet trained."""
    discarded: list[Group] = field(default_factory=list)
    """Finished groups without a learning signal, kept until a batch has counted them."""
    requeue: list[int] = field(default_factory=list)
    """Indices of groups whose rollouts were running when the run stopped; they are run again."""
    skipped: list[int] = field(default_factory=list)
    """Indices from ``base`` on that were left out, because their examples are solved."""
    solved: Solved = field(default_factory=Solved)
