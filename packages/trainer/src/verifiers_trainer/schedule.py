"""The place of a training run in its data: which example the n-th group plays, and what a checkpoint keeps of it.

Which example a group plays is a function of its index alone, so a resumed run continues the same order. When groups
are begun, and which of them a batch takes, is decided in ``orchestrator``.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from verifiers.dataset import Example
from verifiers_trainer.batch import Group


class Schedule:
    """Which example the n-th group plays: pass after pass over the examples, each shuffled by (seed, pass)."""

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
    """Groups that teach nothing, kept until a batch has counted them."""
    requeue: list[int] = field(default_factory=list)
    """Indices of groups that were being played; they are played anew."""
