"""Rows of generated problems: as many as asked for, all different, held out or not, by a seed.

The kinds take turns. Whether a problem is held out depends on its kind and its numbers alone, so a held-out problem and
a training problem are never the same, whatever the seeds and counts.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence
from typing import Any

from vf_math_python.kinds import KINDS, Draw

HELD_OUT_PARTS = 5
"""One of so many sets of numbers is held out."""
MAX_DRAWS = 20_000
"""Draws for one row until a kind is taken to be used up."""


def is_held_out(name: str, numbers: Sequence[int]) -> bool:
    """Whether a problem belongs to the evaluation set."""
    digest = hashlib.sha256(f"{name}{tuple(numbers)}".encode()).digest()
    return int.from_bytes(digest[:4]) % HELD_OUT_PARTS == 0


def generate_rows(count: int, seed: int, held_out: bool) -> list[dict[str, Any]]:
    """``count`` rows with ``question``, ``answer`` (LaTeX) and ``info``.

    Raises: ``ValueError`` when no kind has another problem.
    """
    generator = random.Random(f"math-python/{seed}/{held_out}")
    left = {name: _problems(name, generator, held_out) for name in KINDS}
    rows: list[dict[str, Any]] = []
    while len(rows) < count:
        if not left:
            raise ValueError(f"there are {len(rows)} different generated problems, fewer than {count}")
        names = list(left)
        generator.shuffle(names)
        for name in names[: count - len(rows)]:
            row = next(left[name], None)
            if row is None:
                del left[name]
            else:
                rows.append(row)
    return rows


def _problems(name: str, generator: random.Random, held_out: bool) -> Iterator[dict[str, Any]]:
    """The different problems of one kind, until ``MAX_DRAWS`` draws in a row gave none."""
    seen: set[str] = set()
    failures = 0
    while failures < MAX_DRAWS:
        draw = Draw(generator)
        problem = KINDS[name](draw)
        if problem is None or problem[0] in seen or is_held_out(name, draw.numbers) is not held_out:
            failures += 1
            continue
        failures = 0
        question, answer = problem
        seen.add(question)
        info = {"topic": "generated", "name": name, "written": False, "numbers": list(draw.numbers)}
        yield {"question": question, "answer": answer, "info": info}
