"""Games: the names and user message of each turn, and the right list after it.

A game is a dataset row of ``make_row``, whose ``info`` contains all later user messages. Games from
the shipped names are a pure function of (settings, count, seed); the last names of held-out games
do not occur in training games.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import resources
from typing import Any, TypeAlias

from verifiers.errors import ConfigError

Name: TypeAlias = tuple[str, str]
"""First and last name; shown joined, as in ``VladimirDrinfeld``."""

FIRST_TAG = "alphabetical_sorted"
LATER_TAG = "combined_alphabetical_sorted"
NEW_MARK = " // new name!"

HELD_OUT_EVERY = 5
"""Every fifth last name is used in held-out games only."""

MAX_MISSES = 1000
"""Consecutive repeated games after which the settings are considered exhausted."""

FIRST_PROMPT = """\
Sort these names alphabetically by {key} name. Each is written as first name and last name joined, such as AdaLovelace.

{names}

Answer in exactly this format, one name per line:
<alphabetical_sorted>
Name1
Name2
</alphabetical_sorted>"""

LATER_PROMPT = """\
Merge these new names into your sorted list, still alphabetically by {key} name.

{names}

Answer with the whole list and write // new name! after each name that is new in this message, in exactly this format:
<combined_alphabetical_sorted>
Name1
Name2 // new name!
</combined_alphabetical_sorted>"""


@dataclass(frozen=True, slots=True)
class Settings:
    """Bounds of the number of turns and of new names per turn, both drawn uniformly."""

    min_turns: int = 1
    max_turns: int = 3
    min_names_per_turn: int = 1
    max_names_per_turn: int = 5

    @property
    def max_names(self) -> int:
        return self.max_turns * self.max_names_per_turn

    def draw(self, rng: random.Random) -> list[int]:
        """The number of new names in each turn of a game."""
        turns = rng.randint(self.min_turns, self.max_turns)
        return [rng.randint(self.min_names_per_turn, self.max_names_per_turn) for _ in range(turns)]


def make_row(turns: list[list[Name]], by_last: bool) -> dict[str, object]:
    """The dataset row of a game; ``turns`` holds the new names of each turn in displayed order.

    ``info``: ``sort_by``; ``follow_ups``, the user messages after the first; ``targets``, the right
    lines of each turn joined by newlines.
    """
    sort_by = "last" if by_last else "first"
    messages, targets = [], []
    names: list[Name] = []
    for number, new in enumerate(turns):
        names += new
        lines = [
            first + last + (NEW_MARK if number and (first, last) in new else "")
            for first, last in sorted(names, key=lambda name: sort_key(name, by_last))
        ]
        names_text = "\n".join(first + last for first, last in new)
        messages.append(
            (LATER_PROMPT if number else FIRST_PROMPT).format(key=sort_by.upper(), names=names_text)
        )
        targets.append("\n".join(lines))
    info = {"sort_by": sort_by, "follow_ups": messages[1:], "targets": targets}
    return {"question": messages[0], "answer": targets[-1], "info": info}


def sort_key(name: Name, by_last: bool) -> tuple[str, str]:
    """Case-insensitive key; ties are broken by the other part of the name; a single part is used as
    both."""
    first, last = name[0].lower() or name[1].lower(), name[1].lower()
    return (last, first) if by_last else (first, last)


@functools.cache
def load_names(file: str) -> tuple[str, ...]:
    """The shipped ``first_names.txt`` or ``last_names.txt``: 1,000 names each, most frequent first
    (see DATA.md)."""
    return tuple((resources.files(__package__) / file).read_text(encoding="ascii").split())


def generate_games(
    settings: Settings, count: int, seed: int, held_out: bool
) -> list[dict[str, object]]:
    """``count`` different games from the shipped names; first and last names are unique within a
    game.

    *Raises* ConfigError when the settings allow fewer different games, or need more names than
    there are.
    """
    last_names = [
        n
        for i, n in enumerate(load_names("last_names.txt"))
        if (i % HELD_OUT_EVERY == 0) == held_out
    ]
    first_names = load_names("first_names.txt")
    most = len(load_names("last_names.txt")) // HELD_OUT_EVERY
    if settings.max_names > most:
        raise ConfigError(
            f"max_turns={settings.max_turns} times max_names_per_turn={settings.max_names_per_turn}"
            f" is {settings.max_names} names; alphabet-sort has different names for games of at"
            f" most {most}"
        )
    rng = random.Random(f"alphabet-sort/{settings}/{held_out}/{seed}")
    rows: dict[str, dict[str, Any]] = {}
    misses = 0
    while len(rows) < count:
        sizes = settings.draw(rng)
        names = zip(
            rng.sample(first_names, sum(sizes)), rng.sample(last_names, sum(sizes)), strict=True
        )
        row = make_row(deal(names, sizes), by_last=rng.random() < 0.5)
        misses = misses + 1 if game_key(row) in rows else 0
        rows.setdefault(game_key(row), row)
        if misses > MAX_MISSES:
            which = "num_eval_examples" if held_out else "num_train_examples"
            raise ConfigError(
                f"{which}={count} is more than the {len(rows)} different games of these settings"
            )
    return list(rows.values())


def game_key(row: dict[str, Any]) -> str:
    """Identity of a game: all user messages, in order."""
    return "\n".join([row["question"], *row["info"]["follow_ups"]])


def deal(names: Iterable[Name], sizes: list[int]) -> list[list[Name]]:
    """The names divided into turns of these sizes."""
    stream = iter(names)
    return [[next(stream) for _ in range(size)] for size in sizes]
