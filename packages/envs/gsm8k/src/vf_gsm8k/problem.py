"""Stories, the templates of word problems: sampling of numbers, the resulting problem, and the
registry of stories.

A story is a function of a ``Draw`` that returns a ``Problem``, or None when the sampled numbers are
inconsistent (a fractional answer, change from too little money); it is then called again. The
numbers identify a problem: two problems of a story with equal numbers are equal, even with
different names in the text.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

HELD_OUT_PARTS = 5
"""One in this many sets of numbers is held out for evaluation."""

PEOPLE = (
    "Ada Ben Carla Dmitri Elif Farah Goran Hana Imani Jonas Kavya Lena Mateo Noor Oskar Priya"
    " Quentin Rosa Samir Tara Uri Vera Wanda Yusuf Zoe Amara Bruno Chiara Dao Emeka Freya Giulia"
    " Hugo Ines Jin Kofi Luca Mei Nadia Omar"
).split()


@dataclass(frozen=True, slots=True)
class Problem:
    """A question, its integer answer, and the steps of its solution, the last of which ends in the
    answer."""

    question: str
    answer: int
    steps: tuple[str, ...]


class Draw:
    """Samples the values of a problem and records the numbers."""

    def __init__(self, generator: random.Random):
        self._generator = generator
        self._unnamed = list(PEOPLE)
        self.numbers: list[int] = []

    def number(self, low: int, high: int, step: int = 1) -> int:
        """An integer from ``low`` to ``high`` inclusive, in steps of ``step``."""
        number = self._generator.randrange(low, high + 1, step)
        self.numbers.append(number)
        return number

    def person(self) -> str:
        """A first name that is not yet used in this problem."""
        name = self._generator.choice(self._unnamed)
        self._unnamed.remove(name)
        return name

    def word(self, words: str) -> str:
        """One of the words, separated by ``|``; it affects the text, not the identity of the
        problem."""
        return self._generator.choice(words.split("|"))


Story = Callable[[Draw], Problem | None]
STORIES: dict[str, Story] = {}
"""Name -> story, in definition order."""


def story(function: Story) -> Story:
    """Register a story under its name."""
    STORIES[function.__name__] = function
    return function


def is_held_out(name: str, numbers: Sequence[int]) -> bool:
    """Whether a problem belongs to the evaluation set; depends only on the story and its numbers.

    >>> is_held_out("change", (3, 4, 20)), is_held_out("change", (3, 4, 21))
    (False, False)
    """
    digest = hashlib.sha256(f"{name}{tuple(numbers)}".encode()).digest()
    return int.from_bytes(digest[:4]) % HELD_OUT_PARTS == 0


def whole(numerator: int, denominator: int) -> int | None:
    """The quotient if it is an integer, else None.

    >>> whole(12, 4), whole(13, 4)
    (3, None)
    """
    return numerator // denominator if numerator % denominator == 0 else None
