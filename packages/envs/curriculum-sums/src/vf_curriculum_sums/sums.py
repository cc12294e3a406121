"""Sums in five levels of difficulty: questions and answers. Pure functions of (levels, count,
seed)."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from verifiers.errors import ConfigError

MAX_MISSES = 1000
"""Consecutive repeated sums after which a level is considered exhausted."""


@dataclass(frozen=True, slots=True)
class Level:
    """Terms, bounds and operators of a level, for example ``Level(3, 1, 99, "+-")``."""

    terms: int
    least: int
    most: int
    operators: str


LEVELS: dict[int, Level] = {
    1: Level(2, 1, 50, "+"),
    2: Level(2, 1, 99, "+-"),
    3: Level(3, 10, 99, "+-"),
    4: Level(3, 2, 99, "+-*"),
    5: Level(4, 10, 999, "+-*"),
}
"""``difficulty`` -> level; ``*`` occurs at most once in a sum."""


def make_sum(level: Level, rng: random.Random) -> tuple[str, int]:
    """A sum and its value, for example ``("12 + 7 * 3", 33)``."""
    numbers = [rng.randint(level.least, level.most) for _ in range(level.terms)]
    signs = [rng.choice("+-" if "-" in level.operators else "+") for _ in numbers[1:]]
    if "*" in level.operators:
        index = rng.randrange(len(signs))
        signs[index] = "*"
        numbers[index + 1] = rng.randint(2, 9)
    text = str(numbers[0]) + "".join(
        f" {sign} {number}" for sign, number in zip(signs, numbers[1:], strict=True)
    )
    return text, value_of(numbers, signs)


def value_of(numbers: list[int], signs: list[str]) -> int:
    """The value, multiplication first.

    >>> value_of([12, 7, 3], ["+", "*"])
    33
    """
    terms = [numbers[0]]
    for sign, number in zip(signs, numbers[1:], strict=True):
        if sign == "*":
            terms[-1] *= number
        else:
            terms.append(number if sign == "+" else -number)
    return sum(terms)


def generate_rows(
    min_difficulty: int,
    max_difficulty: int,
    num_held_out: int,
    num_train: int,
    seed: int,
    shown: Iterable[str] = (),
) -> Any:
    """(held-out rows, training rows): rows cycle through the levels; all sums are distinct and none
    is in ``shown``.

    A row is ``question``, ``answer`` and ``difficulty``. *Raises* ConfigError when a level has too
    few sums.
    """
    levels = range(min_difficulty, max_difficulty + 1)
    generators = {level: random.Random(f"curriculum-sums/{level}/{seed}") for level in levels}
    seen: set[str] = set(shown)

    def rows(count: int) -> list[dict[str, Any]]:
        return [_new_row(levels[i % len(levels)], generators, seen) for i in range(count)]

    held_out = rows(num_held_out)
    return held_out, rows(num_train)


def _new_row(
    difficulty: int, generators: dict[int, random.Random], seen: set[str]
) -> dict[str, object]:
    for _ in range(MAX_MISSES):
        text, value = make_sum(LEVELS[difficulty], generators[difficulty])
        if text not in seen:
            seen.add(text)
            return {"question": f"What is {text}?", "answer": str(value), "difficulty": difficulty}
    raise ConfigError(
        f"difficulty {difficulty} has too few different sums for num_train_examples and"
        " num_eval_examples"
    )
