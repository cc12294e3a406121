"""Problems of a published set, by its short name: loaded once, on first use, as a training and a held-out part.

Nothing is fetched when the object is made, and nothing else is ever taken in its place: a set that cannot be fetched is
an error that says what works offline.
"""

from __future__ import annotations

import random
from typing import Any

from verifiers.errors import ConfigError, DatasetError
from verifiers.runtime.suggest import closest

TRAIN_AND_TEST = ("arithmetic", "gsm8k", "math", "openbookqa")
"""Sets that are published with a training and a test split; the others have one."""
FEW, CUT = 500, 100
"""A set of one split with at most FEW rows is held out whole; of a larger one CUT rows are, unless asked otherwise."""


class PublishedSet:
    """``split`` is the one to train on, ``eval_split`` the one to evaluate on; None: as the set is published.

    Where both are the same split it is cut in two, by ``seed``. ``train()`` and ``held_out()`` raise DatasetError when
    the set cannot be fetched, and when nothing is left for them. *Raises* ConfigError for a name that is no set.
    """

    def __init__(
        self, name: str, split: str | None, eval_split: str | None, seed: int, num_train: int, num_held_out: int
    ):
        from verifiers.data.example_sets import HUB_SETS

        known = ("arithmetic", *HUB_SETS)
        if name not in known:
            hint = closest(name, known) or ";"
            raise ConfigError(f"dataset_name {name!r} is no set{hint} the names are: {', '.join(known)}")
        default = "train" if name == "arithmetic" else HUB_SETS[name].split
        self.name, self.seed = name, seed
        self.split = split or default
        self.eval_split = eval_split or ("test" if name in TRAIN_AND_TEST else self.split)
        self.num_train, self.num_held_out = num_train, num_held_out
        self._loaded: dict[str, list[dict[str, Any]]] = {}

    def held_out(self) -> list[dict[str, Any]]:
        return self._rows(self.eval_split)[: self._cut()]

    def train(self) -> list[dict[str, Any]]:
        start = self._cut() if self.split == self.eval_split else 0
        rows = self._rows(self.split)[start:]
        if not rows:
            raise DatasetError(
                f"all {start} problems of {self.name!r} are held out for evaluation; to train on some of them, give a "
                "num_eval_examples below that"
            )
        return rows if self.num_train < 0 else rows[: self.num_train]

    def _cut(self) -> int:
        """How many rows of the evaluation split are held out."""
        rows = len(self._rows(self.eval_split))
        if self.num_held_out >= 0:
            return min(self.num_held_out, rows)
        return CUT if self.split == self.eval_split and rows > FEW else rows

    def _rows(self, split: str) -> list[dict[str, Any]]:
        if split not in self._loaded:
            import verifiers as vf

            try:
                rows = vf.load_example_dataset(self.name, split).to_list()
            except DatasetError as error:
                raise DatasetError(
                    f"{error}; or leave dataset_name out: math-python then plays the problems it ships"
                ) from error
            rows = list({row["question"]: row for row in rows}.values())
            random.Random(f"math-python/{self.seed}").shuffle(rows)
            self._loaded[split] = rows
        return self._loaded[split]
