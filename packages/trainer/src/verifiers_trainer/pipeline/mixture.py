"""Several environments in one run: which of them the n-th group uses, so that each gets its share.

Shares are of the groups that are begun, exact to one group at every moment: the environment furthest below its share
comes next. Which rows of an environment come, and in which order, is as with one environment alone.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from verifiers.data.examples import Example
from verifiers.environments.base import Environment
from verifiers.environments.group import EnvGroup, route_of
from verifiers.errors import ConfigError
from verifiers_trainer.pipeline.schedule import Schedule


def joined(environments: Sequence[Environment], names: Sequence[str | None] | None = None) -> Environment:
    """One environment of several: each under its name, its id, or ``env_<n>``; a name that repeats gets a number."""
    if len(environments) == 1:
        return environments[0]
    given = list(names) if names else [None] * len(environments)
    called = [
        name or getattr(env, "env_id", None) or f"env_{place}"
        for place, (name, env) in enumerate(zip(given, environments, strict=True))
    ]
    return EnvGroup(list(environments), env_names=distinct(called))


def distinct(names: Sequence[str]) -> list[str]:
    """The names, those that repeat with a number.

    >>> distinct(["sums", "wordle", "sums"])
    ['sums', 'wordle', 'sums-2']
    """
    taken: list[str] = []
    for name in names:
        number, called = 1, name
        while called in taken:
            number += 1
            called = f"{name}-{number}"
        taken.append(called)
    return taken


def member_of(env: Environment, row: Mapping[str, Any]) -> str:
    """The member of a group of environments that a row belongs to; "" where there is no group."""
    return (route_of(row) or [""])[0] if isinstance(env, EnvGroup) else ""


class MixtureSchedule(Schedule):
    """Groups from several environments by ``weights``: ``{"gsm8k": 3, "wordle": 1}`` gives three of four to gsm8k.

    Raises ``ConfigError`` for names that are not the group's, and for an environment without rows.
    """

    def __init__(
        self, env: Environment, examples: Sequence[Example], weights: Mapping[str, float], seed: int, shuffle: bool
    ):
        super().__init__(examples, seed, shuffle)
        names = list(env.env_names) if isinstance(env, EnvGroup) else []
        if set(weights) != set(names):
            there = ", ".join(names) or "none: this is one environment"
            raise ConfigError(f"env_weights names {', '.join(weights)}, and the environments are: {there}")
        self.names = names
        self._rows: dict[str, list[Example]] = {name: [] for name in names}
        for example in examples:
            self._rows[member_of(env, example.row)].append(example)
        if empty := [name for name, rows in self._rows.items() if not rows]:
            raise ConfigError(f"the environment {empty[0]!r} of env_weights has no rows to train on")
        shares = np.array([float(weights[name]) for name in names])
        self._shares = shares / shares.sum()
        self._counts = np.zeros(len(names), np.int64)
        self._places: list[tuple[str, int]] = []
        """By group index: the environment, and how many groups of it came before."""

    def example(self, index: int) -> Example:
        name, place = self._place(index)
        rows = self._rows[name]
        epoch, place = divmod(place, len(rows))
        order = list(range(len(rows)))
        if self.shuffle:
            random.Random(f"{self.seed}:{name}:{epoch}").shuffle(order)
        return rows[order[place]]

    def seed_of(self, index: int) -> int:
        name, place = self._place(index)
        return self.seed * 1_000_003 + place // len(self._rows[name])

    def _place(self, index: int) -> tuple[str, int]:
        while len(self._places) <= index:
            deficits = self._shares * (len(self._places) + 1) - self._counts
            member = int(np.argmax(deficits))
            self._places.append((self.names[member], int(self._counts[member])))
            self._counts[member] += 1
        return self._places[index]
