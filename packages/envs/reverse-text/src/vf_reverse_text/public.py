"""The texts to reverse, read from a public dataset: loaded once, on first use, and cut into two
disjoint parts.

Construction fetches nothing. There is no fallback to generated texts (``texts``): a dataset that
cannot be read is an error.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from verifiers.errors import DatasetError

TEXT_COLUMNS = ("prompt", "question", "text")


class PublicTexts:
    """The different texts of a dataset's ``train`` split within the bounds, shuffled by ``seed``.

    The text of a row is its ``prompt``, ``question`` or ``text`` column, or its last user message.
    ``held_out()`` and ``train()`` raise DatasetError when the dataset cannot be loaded, has no such
    column, or has too few texts for the held-out part and a training part.
    """

    def __init__(
        self,
        name: str,
        min_chars: int | None,
        max_chars: int | None,
        seed: int,
        num_train: int,
        num_held_out: int,
    ):
        self.name, self.seed = name, seed
        self.min_chars, self.max_chars = min_chars or 1, max_chars or float("inf")
        self.num_train, self.num_held_out = num_train, num_held_out
        self._texts: list[str] | None = None

    def held_out(self) -> list[str]:
        return self._read()[: self.num_held_out]

    def train(self) -> list[str]:
        return self._read()[self.num_held_out : self.num_held_out + self.num_train]

    def _read(self) -> list[str]:
        if self._texts is None:
            texts = [
                t
                for t in dict.fromkeys(self._all_texts())
                if self.min_chars <= len(t) <= self.max_chars
            ]
            if len(texts) <= self.num_held_out:
                raise DatasetError(
                    f"the dataset {self.name!r} has {len(texts)} different texts within min_chars"
                    f" and max_chars, too few for num_eval_examples={self.num_held_out} and a"
                    " training set"
                )
            random.Random(f"reverse-text/{self.seed}").shuffle(texts)
            self._texts = texts
        return self._texts

    def _all_texts(self) -> Iterator[str]:
        import datasets

        try:
            rows = datasets.load_dataset(self.name, split="train")
        except Exception as error:
            raise DatasetError(
                f"reverse-text cannot load the dataset {self.name!r} ({type(error).__name__}:"
                f" {error}); without a network, leave dataset_name out to use the generated texts"
            ) from error
        column = next((name for name in TEXT_COLUMNS if name in rows.column_names), None)
        if column is None:
            raise DatasetError(
                f"the dataset {self.name!r} has the columns {', '.join(rows.column_names)};"
                f" reverse-text reads its texts from one of {', '.join(TEXT_COLUMNS)}"
            )
        return map(_text_of, rows[column])


def _text_of(value: Any) -> str:
    if isinstance(value, str):
        return value.strip()
    return next(
        (message["content"].strip() for message in reversed(value) if message["role"] == "user"), ""
    )
