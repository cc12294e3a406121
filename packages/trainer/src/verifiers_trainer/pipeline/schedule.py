"""The order of examples in a training run, which of them are passed over, and the pipeline state of
a checkpoint.

The example of a group is a function of its index alone, so a resumed run continues the same order.
``pipeline`` decides when groups are started and which of them a batch takes.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from verifiers.data.examples import Example
from verifiers.runs.plan import numbered
from verifiers_trainer.algorithm.batch import Group
from verifiers_trainer.settings.config import RLConfig

SOLVED_SHARE = 0.9
"""Fraction of the run's best reward that a group's mean must reach to solve its example."""
SOLVED_TIMES = 2
"""Consecutive groups that must solve an example before it is skipped."""
IN_POOL = (0.2, 0.8)
"""Shares of the run's range of rewards between which a group's mean keeps its example in the
pool."""
MAX_REST = 7
"""Most visits in a row at which an example outside the pool is passed over."""


class Schedule:
    """Chooses the example of the n-th group: pass after pass over the examples, each shuffled by
    (seed, pass)."""

    may_skip = True
    """Whether groups of solved examples may be skipped."""

    def __init__(self, examples: Sequence[Example], seed: int, shuffle: bool):
        counts: dict[str, int] = {}
        self.examples = [numbered(example, counts) for example in examples]
        """Equal rows are numbered in the order of the dataset, as in an evaluation: each has seeds
        of its own."""
        self.seed, self.shuffle = seed, shuffle
        self._orders: dict[int, list[int]] = {}

    def example(self, index: int) -> Example:
        """The example of group ``index``."""
        epoch, position = divmod(index, len(self.examples))
        return self.examples[self._order(epoch)[position]]

    def seed_of(self, index: int) -> int:
        """The sampling seed of the pass that group ``index`` belongs to."""
        return self.seed * 1_000_003 + index // len(self.examples)

    def _order(self, epoch: int) -> list[int]:
        if epoch not in self._orders:
            order = list(range(len(self.examples)))
            if self.shuffle:
                random.Random(f"{self.seed}:{epoch}").shuffle(order)
            self._orders = {epoch: order} | {
                e: o for e, o in self._orders.items() if e >= epoch - 1
            }
        return self._orders[epoch]


def digest(examples: Sequence[Example]) -> str:
    """A hash of all examples and their order: group indices are comparable only between equal
    digests."""
    total = hashlib.sha256()
    for example in examples:
        total.update(example.hash.encode())
    return total.hexdigest()[:16]


@dataclass
class Solved:
    """The examples that the policy solves, counted in the order in which batches use
    their groups."""

    best_reward: float = 0.0
    """The best reward of the run; nothing counts as solved while none is above 0."""
    streaks: dict[int, int] = field(default_factory=dict)
    """Example id -> number of consecutive groups that solved it."""

    def count(self, groups: Iterable[Group]) -> None:
        """Count finished groups; those without a known reward are ignored."""
        pairs = _scored(groups)
        self.best_reward = max([self.best_reward, *(float(rewards.max()) for _, rewards in pairs)])
        for group, rewards in pairs:
            is_solved = 0 < SOLVED_SHARE * self.best_reward <= rewards.mean()
            self.streaks[group.example_id] = (
                self.streaks.get(group.example_id, 0) + 1 if is_solved else 0
            )

    def __contains__(self, example_id: int) -> bool:
        return self.streaks.get(example_id, 0) >= SOLVED_TIMES

    def __len__(self) -> int:
        return sum(streak >= SOLVED_TIMES for streak in self.streaks.values())

    def passes_over(self, example_id: int) -> bool:
        """Whether this visit of an example starts no group."""
        return example_id in self

    @property
    def numbers(self) -> dict[str, float]:
        """The metrics of a batch."""
        return {"examples/solved": len(self)}


@dataclass(frozen=True, slots=True)
class Measured:
    """What the groups of one example have shown."""

    mean: float
    """Mean reward of its newest group."""
    outside: int
    """Consecutive groups whose mean was outside ``IN_POOL``."""
    visits_left: int
    """Visits at which it is still passed over."""


@dataclass
class Pool:
    """The examples that are neither always nor never solved, which are sampled first.

    After n groups in a row with a mean outside ``IN_POOL`` an example is passed over at its next
    2ⁿ - 1 visits, at most ``MAX_REST``, and then measured again: the policy may have learned it, or
    forgotten it. An example that was never measured is not passed over.
    """

    lowest: float = math.inf
    best: float = -math.inf
    """The extreme rewards of the run, which the shares are of."""
    measured: dict[int, Measured] = field(default_factory=dict)
    """By example id."""

    def count(self, groups: Iterable[Group]) -> None:
        """Measure the examples of finished groups; those without a known reward are ignored."""
        pairs = _scored(groups)
        for _, rewards in pairs:
            self.lowest = min(self.lowest, float(rewards.min()))
            self.best = max(self.best, float(rewards.max()))
        for group, rewards in pairs:
            mean = float(rewards.mean())
            before = self.measured.get(group.example_id, Measured(mean, 0, 0))
            outside = 0 if self._side(mean) == "" else before.outside + 1
            visits_left = min(2**outside - 1, MAX_REST)
            self.measured[group.example_id] = Measured(mean, outside, visits_left)

    def passes_over(self, example_id: int) -> bool:
        """Whether this visit of an example starts no group; counts the visit."""
        measured = self.measured.get(example_id)
        if measured is None or not measured.visits_left:
            return False
        self.measured[example_id] = replace(measured, visits_left=measured.visits_left - 1)
        return True

    @property
    def numbers(self) -> dict[str, float]:
        """The metrics of a batch: measured examples in the pool, above and below it."""
        sides = [self._side(measured.mean) for measured in self.measured.values()]
        names = {"examples/in_pool": "", "examples/easy": "easy", "examples/hard": "hard"}
        return {name: sides.count(side) for name, side in names.items()}

    def _side(self, mean: float) -> str:
        """ "easy" or "hard" of a mean outside the pool, else ""; while all rewards of the run are
        equal nothing is known of any."""
        if not self.lowest < self.best:
            return ""
        share = (mean - self.lowest) / (self.best - self.lowest)
        return "hard" if share < IN_POOL[0] else "easy" if share > IN_POOL[1] else ""


def _scored(groups: Iterable[Group]) -> list[tuple[Group, np.ndarray]]:
    """The groups with a known reward, in the order of their indices, each with these rewards."""
    return [
        (group, rewards)
        for group in sorted(groups, key=lambda group: group.index)
        if (rewards := group.rewards[~np.isnan(group.rewards)]).size
    ]


@dataclass
class Signal:
    """What the rewards of the run have shown so far, for the rules that end it
    (``health.SignalMeter``)."""

    was_live: bool = False
    """Whether a batch with a learning signal was ever delivered."""
    lowest: float = math.inf
    best: float = -math.inf
    """The extreme rewards of the run."""
    batches: int = 0
    rollouts: int = 0
    """Batches without a learning signal since the last batch with it, and their rollouts."""
    at_best: int = 0
    """Rollouts in a row with the best reward."""


@dataclass
class PipelineState:
    """The state of the pipeline that a checkpoint saves."""

    next_index: int = 0
    """Index of the next group to start."""
    delivered: int = 0
    """Number of batches returned to the trainer."""
    base: int = 0
    """Index after the newest group that a batch used; groups from here on belong to
    later batches."""
    ready: list[Group] = field(default_factory=list)
    """Finished groups not yet trained on; first those of a batch whose last step is to come."""
    in_training: int = 0
    """How many groups of ``ready`` are of that batch."""
    discarded: list[Group] = field(default_factory=list)
    """Finished groups without a learning signal, until a batch counts them."""
    requeue: list[int] = field(default_factory=list)
    """Indices of groups that were running when the run stopped; they are run again."""
    skipped: list[int] = field(default_factory=list)
    """Indices from ``base`` on that were skipped, because their examples are solved, or rest."""
    solved: Solved = field(default_factory=Solved)
    pool: Pool = field(default_factory=Pool)
    signal: Signal = field(default_factory=Signal)


def amid_batch(state: PipelineState, version: int, settings: RLConfig) -> bool:
    """Whether the newest batch was returned, and its last optimizer step is not taken at
    ``version``."""
    return state.delivered > version // settings.steps_per_batch


def forget_batch(state: PipelineState, version: int, settings: RLConfig) -> None:
    """Count no batch that was returned, and that the checkpoint does not hold."""
    state.delivered = min(state.delivered, version // settings.steps_per_batch)
