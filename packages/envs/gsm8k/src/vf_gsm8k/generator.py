"""Rows of generated word problems: as many as asked for, all different, held out or not, by a seed.

Promise: the same arguments give the same rows on every machine; the stories take turns, so that any hundred rows have
all kinds of problems; a held-out problem and a training problem never have the same story and numbers, whatever the
seeds and counts. Downloads nothing.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from vf_gsm8k import stories  # noqa: F401  (fills STORIES)
from vf_gsm8k.problem import STORIES, Draw, Problem, is_held_out

MAX_DRAWS = 20_000
"""Draws for one row until the story is taken to be used up."""


def generate_rows(count: int, seed: int, held_out: bool) -> list[dict[str, Any]]:
    """``count`` rows with ``question``, ``answer``, ``solution`` and ``info`` (story, numbers, number of steps).

    Raises: ``ValueError`` when no story has another problem.
    """
    generator = random.Random(f"gsm8k/{seed}/{held_out}")
    told = {name: _problems(name, generator, held_out) for name in STORIES}
    rows: list[dict[str, Any]] = []
    while len(rows) < count:
        if not told:
            raise ValueError(f"the stories have {len(rows)} different problems, fewer than {count}")
        names = list(told)
        generator.shuffle(names)
        for name in names[: count - len(rows)]:
            row = next(told[name], None)
            if row is None:
                del told[name]
            else:
                rows.append(row)
    return rows


def _problems(name: str, generator: random.Random, held_out: bool) -> Iterator[dict[str, Any]]:
    """The different problems of one story, until ``MAX_DRAWS`` draws in a row gave none."""
    seen: set[tuple[int, ...]] = set()
    failures = 0
    while failures < MAX_DRAWS:
        draw = Draw(generator)
        problem = STORIES[name](draw)
        numbers = tuple(draw.numbers)
        if problem is None or numbers in seen or is_held_out(name, numbers) is not held_out:
            failures += 1
            continue
        failures = 0
        seen.add(numbers)
        yield _row(name, numbers, problem)


def _row(name: str, numbers: tuple[int, ...], problem: Problem) -> dict[str, Any]:
    solution = "\n".join([*problem.steps, f"\\boxed{{{problem.answer}}}"])
    info = {"story": name, "numbers": list(numbers), "num_steps": len(problem.steps)}
    return {"question": problem.question, "answer": str(problem.answer), "solution": solution, "info": info}
