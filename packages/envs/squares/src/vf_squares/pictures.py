"""Pictures of coloured squares, their questions and their answers, all drawn by a seed."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from PIL import Image, ImageDraw

COLOURS = {
    "red": (220, 30, 30),
    "green": (30, 160, 60),
    "blue": (40, 80, 220),
    "yellow": (240, 210, 40),
    "black": (20, 20, 20),
}
POSITIONS = {
    "top left": (0, 0),
    "top right": (2, 0),
    "centre": (1, 1),
    "bottom left": (0, 2),
    "bottom right": (2, 2),
}
"""Position -> column and row in a grid of three by three."""
CELLS = tuple((column, row) for row in range(3) for column in range(3))
MAX_SQUARES = 5
PALEST = 255
KINDS = ("colour", "count", "position")

MIN_SIDE, MAX_SIDE = 500, 900

Square = tuple[str, int, int, int, int, int]
"""A colour, the column and the row of its cell, and, in thousandths of the cell: how far it is from
the cell's left and top edge, and its side."""


def picture(squares: Sequence[Sequence[Any]], background: Sequence[int], size: int) -> Image.Image:
    """The squares on a background of one colour, RGB, ``size`` pixels wide and high; the same
    arguments give the same pixels."""
    image = Image.new("RGB", (size, size), tuple(background))
    draw = ImageDraw.Draw(image)
    for colour, column, row, x_offset, y_offset, side in squares:
        x, y = (number * size // 3 for number in (column, row))
        inner_x, inner_y, width = (
            value * (size // 3) // 1000 for value in (x_offset, y_offset, side)
        )
        corner = x + inner_x, y + inner_y
        opposite = corner[0] + width - 1, corner[1] + width - 1
        draw.rectangle((*corner, *opposite), fill=COLOURS[colour])
    return image


def _square(rng: random.Random, colour: str, column: int, row: int) -> Square:
    """A square of random size somewhere in its cell."""
    side = rng.randint(MIN_SIDE, MAX_SIDE)
    x_offset, y_offset = (rng.randint(0, 1000 - side) for _ in range(2))
    return colour, column, row, x_offset, y_offset, side


def generate_tasks(count: int, kinds: Sequence[str], seed: int) -> list[dict[str, Any]]:
    """``count`` tasks, the kinds in turn: question, answer, and what ``picture`` draws (``info``)."""
    makers: dict[str, Callable[[random.Random], tuple[str, str, list[Square]]]] = {
        "colour": _colour,
        "count": _count,
        "position": _position,
    }
    tasks = []
    for number in range(count):
        # a task does not change with the number of tasks
        kind = kinds[number % len(kinds)]
        rng = random.Random(f"{seed} {kind} {number}")
        question, answer, squares = makers[kind](rng)
        background = [rng.randint(PALEST - 30, PALEST) for _ in range(3)]
        info = {"kind": kind, "squares": squares, "background": background}
        tasks.append({"question": question, "answer": answer, "info": info})
    return tasks


def _colour(rng: random.Random) -> tuple[str, str, list[Square]]:
    colour = rng.choice(list(COLOURS))
    question = f"Which colour has the square? Answer with one word: {', '.join(COLOURS)}."
    return question, colour, [_square(rng, colour, *rng.choice(CELLS))]


def _count(rng: random.Random) -> tuple[str, str, list[Square]]:
    cells = rng.sample(CELLS, rng.randint(1, MAX_SQUARES))
    squares = [_square(rng, rng.choice(list(COLOURS)), *cell) for cell in cells]
    question = f"How many squares are there? Answer with a number from 1 to {MAX_SQUARES}."
    return question, str(len(squares)), squares


def _position(rng: random.Random) -> tuple[str, str, list[Square]]:
    position = rng.choice(list(POSITIONS))
    question = f"Where is the square? Answer with one of: {', '.join(POSITIONS)}."
    return question, position, [_square(rng, rng.choice(list(COLOURS)), *POSITIONS[position])]
