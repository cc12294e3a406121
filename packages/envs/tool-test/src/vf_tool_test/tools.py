"""The tools of the tasks, and the sampling of their arguments. Their parameter types differ, to
cover tool schemas.

The tools are coroutines that take microseconds, so no thread is needed.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, Literal

Room = Literal["kitchen", "bedroom", "bathroom", "hall"]

ROOMS: tuple[Room, ...] = ("kitchen", "bedroom", "bathroom", "hall")
WORDS = "apple river stone cloud paper green tiger lemon bread music north field glass horse queen salt".split()


async def add(a: int, b: int) -> int:
    """Add two whole numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a + b


async def to_fahrenheit(celsius: float) -> float:
    """Convert a temperature from degrees Celsius to degrees Fahrenheit.

    Args:
        celsius: Degrees Celsius.
    """
    return round(celsius * 9 / 5 + 32, 2)


async def join_words(words: list[str], separator: str) -> str:
    """Join words into one text.

    Args:
        words: The words, in order.
        separator: What stands between two words.
    """
    return separator.join(words)


async def set_lamp(room: Room, on: bool) -> str:
    """Switch the lamp of a room on or off.

    Args:
        room: Where the lamp is.
        on: true switches it on, false off.
    """
    return f"The lamp in the {room} is {'on' if on else 'off'}."


async def count_letter(text: str, letter: str) -> int:
    """Count how often a letter stands in a text.

    Args:
        text: Where to look.
        letter: One letter.
    """
    return text.count(letter)


TOOLS: tuple[Callable[..., Any], ...] = (add, to_fahrenheit, join_words, set_lamp, count_letter)


def draw_arguments(tool: str, rng: random.Random) -> dict[str, object]:
    """Sample arguments for a call of the named tool."""
    match tool:
        case "add":
            return {"a": rng.randint(-99, 999), "b": rng.randint(-99, 999)}
        case "to_fahrenheit":
            return {"celsius": rng.randint(-400, 1200) / 10}
        case "join_words":
            return {
                "words": rng.sample(WORDS, rng.randint(2, 4)),
                "separator": rng.choice(["-", "+", ", ", "/"]),
            }
        case "set_lamp":
            return {"room": rng.choice(ROOMS), "on": rng.random() < 0.5}
        case "count_letter":
            text = " ".join(rng.sample(WORDS, rng.randint(1, 3)))
            return {"text": text, "letter": rng.choice(sorted(set(text) - {" "}))}
    raise KeyError(tool)
