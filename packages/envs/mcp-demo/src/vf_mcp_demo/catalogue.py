"""The warehouses' stock, and questions about it. Pure functions of a seed, shared by the server and
the environment.

Every fifth item occurs in held-out questions only, for every seed.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass

from verifiers.errors import ConfigError

WAREHOUSES = ("north", "south", "east", "west")

ITEMS = tuple(
    """
    anvils axes barrels baskets bells blankets boots bottles bricks brooms brushes buckets buttons candles
    chairs chests clocks combs crates cups doors drums fans flutes forks funnels gloves hammers hats hinges
    hoses jars kettles keys knives ladders lamps locks mats mirrors mugs nails nets ovens pans pens pipes plates
    ropes rugs saws scales shovels spoons stools tables tents towels vases wheels
    """.split()
)

HELD_OUT_EVERY = 5


@dataclass(frozen=True, slots=True)
class Item:
    """An article: ``Item("axes", 1250, {"north": 14, "south": 3, "east": 0, "west": 120})``."""

    name: str
    price_cents: int
    stock: dict[str, int]
    """Pieces by warehouse."""


def make_catalogue(seed: int) -> dict[str, Item]:
    """Item name -> item."""
    rng = random.Random(f"mcp-demo/catalogue/{seed}")
    return {
        name: Item(
            name,
            rng.randint(2, 60) * 25,
            {warehouse: rng.randint(0, 250) for warehouse in WAREHOUSES},
        )
        for name in ITEMS
    }


def all_questions(catalogue: dict[str, Item], names: list[str]) -> Iterator[tuple[str, int]]:
    """(question, answer) of every question about these items: one look-up, several, and a
    computation."""
    for name in names:
        item = catalogue[name]
        yield f"How many {name} are there in all warehouses together?", sum(item.stock.values())
        for warehouse in WAREHOUSES:
            stock = item.stock[warehouse]
            yield f"How many {name} are there in the {warehouse} warehouse?", stock
            yield (
                f"What are all {name} in the {warehouse} warehouse worth, in cents?",
                stock * item.price_cents,
            )
    for first, second in itertools.pairwise(names):
        for warehouse in WAREHOUSES:
            together = catalogue[first].stock[warehouse] + catalogue[second].stock[warehouse]
            yield (
                f"How many {first} and {second} together are there in the {warehouse} warehouse?",
                together,
            )


def draw_rows(count: int, seed: int, held_out: bool) -> list[dict[str, object]]:
    """``count`` different questions. *Raises* ConfigError when there are fewer."""
    names = [name for i, name in enumerate(ITEMS) if (i % HELD_OUT_EVERY == 0) == held_out]
    questions = list(all_questions(make_catalogue(seed), names))
    if count > len(questions):
        which = "num_eval_examples" if held_out else "num_train_examples"
        raise ConfigError(f"{which}={count} is more than the {len(questions)} questions there are")
    drawn = random.Random(f"mcp-demo/{held_out}/{seed}").sample(questions, count)
    return [{"question": question, "answer": str(number)} for question, number in drawn]
