"""Rows of generated word problems, all different, for training or evaluation, by a seed.

Equal arguments give equal rows on every machine. Rows cycle through the stories, so that any
hundred rows contain all kinds of problems. Held-out and training problems never share story and
numbers, for any seeds and counts. Offline.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from vf_gsm8k import stories  # noqa: F401  (fills STORIES)
from vf_gsm8k.problem import STORIES, Draw, Problem, is_held_out

MAX_DRAWS = 20_000
"""Consecutive failed draws after which a story is considered exhausted."""


def generate_rows(count: int, seed: int, held_out: bool) -> list[dict[str, object]]:
    """``count`` rows with ``question``, ``answer``, ``solution`` and ``info`` (story, numbers,
    number of steps).

    *Raises* ValueError when all stories are exhausted.
    """
    generator = random.Random(f"gsm8k/{seed}/{held_out}")
    problems = {name: _problems(name, generator, held_out) for name in STORIES}
    rows: list[dict[str, Any]] = []
    while len(rows) < count:
        if not problems:
            raise ValueError(f"the stories have {len(rows)} different problems, fewer than {count}")
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
    """The different problems of a story, until ``MAX_DRAWS`` consecutive draws fail."""
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
    return {
        "question": problem.question,
        "answer": str(problem.answer),
        "solution": solution,
        "info": info,
    }
