"""Games from the lists of names of a public dataset: loaded once, on first use, and cut into two
disjoint parts.

Construction fetches nothing. There is no fallback to the shipped names (``games``): a dataset that
cannot be read is an error.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from verifiers.errors import DatasetError
from vf_alphabet_sort.games import Name, Settings, deal, game_key, make_row


class PublicGames:
    """A game per row of a dataset's ``train`` split, from its ``names`` column (lists of names),
    in seeded order.

    Rows with too few names are skipped. ``held_out()`` and ``train()`` raise DatasetError when the
    dataset cannot be loaded, has no such column, or gives too few games.
    """

    def __init__(self, name: str, settings: Settings, seed: int, num_train: int, num_held_out: int):
        self.name, self.settings, self.seed = name, settings, seed
        self.num_train, self.num_held_out = num_train, num_held_out
        self._games: list[dict[str, object]] | None = None

    def held_out(self) -> list[dict[str, Any]]:
        return self._read()[: self.num_held_out]

    def train(self) -> list[dict[str, Any]]:
        return self._read()[self.num_held_out : self.num_held_out + self.num_train]

    def _read(self) -> list[dict[str, object]]:
        if self._games is None:
            rng = random.Random(f"alphabet-sort/{self.settings}/{self.seed}")
            games = list({game_key(row): row for row in self._all_games(rng)}.values())
            if len(games) <= self.num_held_out:
                raise DatasetError(
                    f"the dataset {self.name!r} gives {len(games)} games of these settings, too few"
                    f" for num_eval_examples={self.num_held_out} and a training set"
                )
            rng.shuffle(games)
            self._games = games
        return self._games

    def _all_games(self, rng: random.Random) -> Iterator[dict[str, object]]:
        for names_text in self._lists():
            different = {"".join(name).lower(): name for name in map(split_name, names_text)}
            names = list(different.values())
            sizes = self.settings.draw(rng)
            by_last = rng.random() < 0.5
            if len(names) >= sum(sizes):
                yield make_row(deal(rng.sample(names, len(names)), sizes), by_last)

    def _lists(self) -> list[list[str]]:
        import datasets

        try:
            table = datasets.load_dataset(self.name, split="train")
        except Exception as error:
            raise DatasetError(
                f"alphabet-sort cannot load the dataset {self.name!r} ({type(error).__name__}:"
                f" {error}); without a network, leave dataset_name out to use the shipped names"
            ) from error
        if "names" not in table.column_names:
            raise DatasetError(
                f"the dataset {self.name!r} has the columns {', '.join(table.column_names)};"
                " alphabet-sort reads lists of names from one called names"
            )
        return table["names"]


def split_name(text: str) -> Name:
    """First and last name of ``Vladimir Drinfeld`` (at the last space) or ``VladimirDrinfeld`` (at
    the first capital after a lower-case letter); a single name has an empty first name.

    >>> split_name("VladimirDrinfeld"), split_name("Jean-Paul Sartre"), split_name("Plato")
    (('Vladimir', 'Drinfeld'), ('Jean-Paul', 'Sartre'), ('', 'Plato'))
    """
    first, _, last = text.strip().rpartition(" ")
    if first:
        return first.replace(" ", ""), last
    for i in range(1, len(last)):
        if last[i - 1].islower() and last[i].isupper():
            return last[:i], last[i:]
    return "", last
