"""Problems of a published dataset, by its short name: loaded once, on first use, as a training and
a held-out part.

Construction fetches nothing. There is no fallback to other problems: the error of an unavailable
dataset names what works offline.
"""

from __future__ import annotations

import random
from typing import Any

from verifiers.errors import ConfigError, DatasetError
from verifiers.runtime.suggest import closest

TRAIN_AND_TEST = ("arithmetic", "gsm8k", "math", "openbookqa")
"""Datasets with a training and a test split; the others have one."""
FEW, CUT = 500, 100
"""Default held-out part of a dataset with one split: all rows up to FEW, else CUT rows."""


class PublishedSet:
    """``split`` is for training, ``eval_split`` for evaluation; None: the published splits.

    If both are the same split it is divided by ``seed``. ``train()`` and ``held_out()`` raise
    DatasetError when the dataset cannot be fetched or no rows remain. *Raises* ConfigError for an
    unknown name.
    """

    def __init__(
        self,
        name: str,
        split: str | None,
        eval_split: str | None,
        seed: int,
        num_train: int,
        num_held_out: int,
    ):
        from verifiers.data.example_sets import HUB_SETS

        names = ("arithmetic", *HUB_SETS)
        if name not in names:
            hint = closest(name, names) or ";"
            raise ConfigError(f"unknown dataset_name {name!r}{hint} available: {', '.join(names)}")
        default = "train" if name == "arithmetic" else HUB_SETS[name].split
        self.name, self.seed = name, seed
        self.split = split or default
        self.eval_split = eval_split or ("test" if name in TRAIN_AND_TEST else self.split)
        self.num_train, self.num_held_out = num_train, num_held_out
        self._loaded: dict[str, list[dict[str, object]]] = {}

    def held_out(self) -> list[dict[str, Any]]:
        return self._rows(self.eval_split)[: self._cut()]

    def train(self) -> list[dict[str, Any]]:
        start = self._cut() if self.split == self.eval_split else 0
        rows = self._rows(self.split)[start:]
        if not rows:
            raise DatasetError(
                f"all {start} problems of {self.name!r} are held out for evaluation; to train on"
                " some of them, set num_eval_examples below that"
            )
        return rows if self.num_train < 0 else rows[: self.num_train]

    def _cut(self) -> int:
        """Number of held-out rows of the evaluation split."""
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
                    f"{error}; or leave dataset_name out: math-python then uses its own problems"
                ) from error
            rows = list({row["question"]: row for row in rows}.values())
            random.Random(f"math-python/{self.seed}").shuffle(rows)
            self._loaded[split] = rows
        return self._loaded[split]
