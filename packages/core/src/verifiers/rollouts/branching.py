"""``Branching``: at which turn the rollouts of a group fork, and into how many.

A group of n siblings is n / ``branches`` trees: the first rollout of a tree runs as always, and the
others leave it before one of its turns, which each of them takes anew. A turn's number is known
beforehand; the turn of the highest entropy, and what an author's function likes best, once the
first rollout has ended, so that a snapshot is taken before every turn and the best one kept.

``runs.branching`` grows the trees, ``forks`` copies a state.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from verifiers.errors import ConfigError, RolloutError
from verifiers.rollouts.author_code import Hook
from verifiers.rollouts.forks import cleaned_up
from verifiers.rollouts.state import State
from verifiers.rollouts.turn import Turn

ENTROPY = "entropy"
Worth = Callable[[Any], float]
"""A turn, as authors see it -> how much is to be learnt from taking it anew; NaN: nothing."""


@dataclass(frozen=True, slots=True)
class Branching:
    """Where a rollout forks, into how many branches, and what a group may sample.

    >>> vf.Branching(at=1, branches=4).branches
    4
    """

    at: int | str | Worth
    """The number of the turn that each branch takes anew, at least 1 (0 is the first turn);
    ``"entropy"`` for the turn whose sampled tokens have the highest entropy (estimated by their
    mean negative log-probability); or a function of a turn: the turn of its highest value."""
    branches: int
    """Rollouts of a tree, the first included; at least 2."""
    tokens: int | None = None
    """Sampled tokens that a group may cost, so that it compares with a flat group of that cost:
    siblings are rollouts of their own as far as this pays for them, and branches else. None: as
    many branches as there can be."""

    def __post_init__(self) -> None:
        is_number = isinstance(self.at, int) and not isinstance(self.at, bool)
        if not (is_number or self.at == ENTROPY or callable(self.at)) or (
            is_number and self.at < 1  # type: ignore[operator]
        ):
            raise ConfigError(
                f"branching: at={self.at!r} is none of a turn's number from 1 on (0, the first turn,"
                " is what siblings take anew without branches), 'entropy' and a function of a turn",
                key="branching",
            )
        for name, least in (("branches", 2), ("tokens", 1)):
            value = getattr(self, name)
            if value is None and name == "tokens":
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ConfigError(
                    f"branching: {name}={value!r} must be a whole number from {least} on",
                    key="branching",
                )

    @classmethod
    def of(cls, value: object) -> Branching | None:
        """Branching, its fields as a mapping (such as from the command line), or None. *Raises*
        ConfigError for anything else."""
        if value is None or isinstance(value, cls):
            return value
        if not isinstance(value, Mapping) or not {"at", "branches"} <= value.keys() <= {
            "at",
            "branches",
            "tokens",
        }:
            raise ConfigError(
                f"branching={value!r} must have at and branches, and may have tokens:"
                " vf.Branching(at=1, branches=4)",
                key="branching",
            )
        return cls(**value)

    @property
    def turn(self) -> int | None:
        """The turn, where it is known beforehand."""
        return self.at if isinstance(self.at, int) else None

    @property
    def worth(self) -> Worth:
        """How much a turn is worth to be taken anew."""
        return self.at if callable(self.at) else entropy

    def num_branches(self, rollout: list[Turn], turn: int, num_siblings: int, tokens: float) -> int:
        """How many of ``num_siblings`` leave a rollout at ``turn``, where these and it may sample
        ``tokens``: a rollout of its own is expected to cost as much as this one."""
        costs = [len(each.completion_ids) for each in rollout]
        shared, in_all = sum(costs[:turn]), sum(costs)
        if not shared:
            return num_siblings
        spare = tokens - in_all - num_siblings * (in_all - shared)
        return num_siblings - min(num_siblings, max(0, int(spare // shared)))


def entropy(turn: Any) -> float:
    """An estimate of the mean entropy of a turn's sampled tokens, in nats: the mean of their
    negative log-probabilities; NaN if the server returned none.

    *Source*: of where to branch: ARPO, arXiv 2507.19849, section 3.1.
    """
    logprobs = turn.sampler_logprobs
    return -float(logprobs.mean()) if len(logprobs) else math.nan


class Snapshots:
    """The snapshot of a running rollout from which its branches go on; ``State.before_call``."""

    def __init__(self, branching: Branching):
        self.branching = branching
        self.best: State | None = None
        """A branch of the rollout, before the turn that is worth the most; None if there is
        none."""
        self.failure: RolloutError | None = None
        """Why a snapshot could not be taken."""
        self.is_taken = asyncio.Event()
        """Set when the snapshot is taken whose turn is known beforehand."""
        self._newest: State | None = None
        self._most = -math.inf

    async def take(self, state: State) -> None:
        """Take a snapshot before a model call, where one is wanted; a failure is kept, and does not
        concern the rollout itself."""
        turn, num_turns = self.branching.turn, len(state.record.transcript)
        await self.judge(state)
        if not num_turns or turn not in (None, num_turns):
            return
        try:
            (snapshot,) = await state.fork(1)
        except RolloutError as error:
            self.failure = error
            return
        if turn is None:
            self._newest = snapshot
        else:
            self.best = snapshot
            self.is_taken.set()

    async def judge(self, state: State) -> None:
        """Keep the snapshot before the newest turn if that turn is worth the most so far."""
        snapshot, self._newest = self._newest, None
        if snapshot is None:
            return
        turns, worth = state.record.transcript.turns, math.nan
        if len(turns) > len(snapshot.record.transcript):
            try:
                with Hook(state, "branching", timing=None):
                    worth = float(self.branching.worth(turns[-1]))
            except RolloutError as error:  # of an author's function
                self.failure = error
        if worth > self._most:
            self._most = worth
            snapshot, self.best = self.best, snapshot
        await cleaned_up([snapshot] if snapshot is not None else [])

    async def close(self) -> None:
        """Close the snapshots that no branch continues."""
        unused = [state for state in (self.best, self._newest) if state is not None]
        self.best = self._newest = None
        await cleaned_up(unused)
