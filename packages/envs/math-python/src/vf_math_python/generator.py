"""Rows of generated problems, all different, for training or evaluation, by a seed.

Rows cycle through the kinds. Whether a problem is held out depends only on its kind and its
numbers, so held-out and training problems are disjoint for any seeds and counts.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence
from typing import Any

from vf_math_python.kinds import KINDS, Draw

HELD_OUT_PARTS = 5
"""One in this many sets of numbers is held out."""
MAX_DRAWS = 20_000
"""Consecutive failed draws after which a kind is considered exhausted."""


def is_held_out(name: str, numbers: Sequence[int]) -> bool:
    """Whether a problem belongs to the evaluation set."""
    digest = hashlib.sha256(f"{name}{tuple(numbers)}".encode()).digest()
    return int.from_bytes(digest[:4]) % HELD_OUT_PARTS == 0


def generate_rows(count: int, seed: int, held_out: bool) -> list[dict[str, object]]:
    """``count`` rows with ``question``, ``answer`` (LaTeX) and ``info``.

    *Raises* ValueError when all kinds are exhausted.
    """
    generator = random.Random(f"math-python/{seed}/{held_out}")
    problems = {name: _problems(name, generator, held_out) for name in KINDS}
    rows: list[dict[str, Any]] = []
    while len(rows) < count:
        if not problems:
            raise ValueError(
                f"there are {len(rows)} different generated problems, fewer than {count}"
            )
        names = list(problems)
        generator.shuffle(names)
        for name in names[: count - len(rows)]:
            row = next(problems[name], None)
            if row is None:
                del problems[name]
            else:
                rows.append(row)
    return rows


def _problems(name: str, generator: random.Random, held_out: bool) -> Iterator[dict[str, object]]:
    """The different problems of a kind, until ``MAX_DRAWS`` consecutive draws fail."""
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
