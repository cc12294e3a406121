"""Several environments in one run: assign each group to an environment according to
``env_weights``.

The environment furthest below its share of the started groups comes next, so shares are exact to
one group. Rows of an environment are ordered as with one environment alone.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import numpy as np

from verifiers.data.examples import Example
from verifiers.environments.base import Environment
from verifiers.environments.group import EnvGroup, route_of
from verifiers.errors import ConfigError
from verifiers_trainer.pipeline.schedule import Schedule


def joined(
    environments: Sequence[Environment], names: Sequence[str | None] | None = None
) -> Environment:
    """Join environments into a group, each under its name, its id, or ``env_<n>``; repeated names
    get a number."""
    if len(environments) == 1:
        return environments[0]
    aliases = list(names) if names else [None] * len(environments)
    env_names = [
        name or getattr(env, "env_id", None) or f"env_{index}"
        for index, (name, env) in enumerate(zip(aliases, environments, strict=True))
    ]
    return EnvGroup(list(environments), env_names=distinct(env_names))


def distinct(names: Sequence[str]) -> list[str]:
    """The names, repeated names with a number.

    >>> distinct(["sums", "wordle", "sums"])
    ['sums', 'wordle', 'sums-2']
    """
    unique: list[str] = []
    for name in names:
        number, candidate = 1, name
        while candidate in unique:
            number += 1
            candidate = f"{name}-{number}"
        unique.append(candidate)
    return unique


def member_of(env: Environment, row: Mapping[str, object]) -> str:
    """The member of an environment group that a row belongs to; "" for a single environment."""
    return (route_of(row) or [""])[0] if isinstance(env, EnvGroup) else ""


class MixtureSchedule(Schedule):
    """Groups from several environments by ``weights``: ``{"gsm8k": 3, "wordle": 1}`` assigns three
    of four to gsm8k.

    Raises ``ConfigError`` for names other than the group's, and for an environment without rows.
    """

    def __init__(
        self,
        env: Environment,
        examples: Sequence[Example],
        weights: Mapping[str, float],
        seed: int,
        shuffle: bool,
    ):
        super().__init__(examples, seed, shuffle)
        names = list(env.env_names) if isinstance(env, EnvGroup) else []
        if set(weights) != set(names):
            available = ", ".join(names) or "none: this is one environment"
            raise ConfigError(
                f"env_weights names {', '.join(weights)}, and the environments are: {available}"
            )
        self.names = names
        self._rows: dict[str, list[Example]] = {name: [] for name in names}
        for example in examples:
            self._rows[member_of(env, example.row)].append(example)
        if empty := [name for name, rows in self._rows.items() if not rows]:
            raise ConfigError(
                f"the environment {empty[0]!r} of env_weights has no rows to train on"
            )
        shares = np.array([float(weights[name]) for name in names])
        self._shares = shares / shares.sum()
        self._counts = np.zeros(len(names), np.int64)
        self._positions: list[tuple[str, int]] = []
        """By group index: the environment, and the number of its earlier groups."""

    def example(self, index: int) -> Example:
        name, position = self._position(index)
        rows = self._rows[name]
        epoch, position = divmod(position, len(rows))
        order = list(range(len(rows)))
        if self.shuffle:
            random.Random(f"{self.seed}:{name}:{epoch}").shuffle(order)
        return rows[order[position]]

    def seed_of(self, index: int) -> int:
        name, position = self._position(index)
        return self.seed * 1_000_003 + position // len(self._rows[name])

    def _position(self, index: int) -> tuple[str, int]:
        while len(self._positions) <= index:
            deficits = self._shares * (len(self._positions) + 1) - self._counts
            member = int(np.argmax(deficits))
            self._positions.append((self.names[member], int(self._counts[member])))
            self._counts[member] += 1
        return self._positions[index]
