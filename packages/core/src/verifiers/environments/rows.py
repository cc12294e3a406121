"""``Rows``: the part of an environment that holds its rows, read on first use."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from verifiers.data.examples import RowFormat, Table
from verifiers.data.kept_rows import read_kept_rows
from verifiers.data.sources import DatasetLike
from verifiers.environments.settings import recorded
from verifiers.rollouts.contract import LoadedFrom

if TYPE_CHECKING:
    from datasets import Dataset


class Rows:
    """A base class of ``Environment``: the training and the evaluation set."""

    env_id: str
    env_args: dict[str, Any]
    loaded_from: LoadedFrom | None

    def _take_rows(
        self,
        dataset: DatasetLike | None,
        eval_dataset: DatasetLike | None,
        *,
        system_prompt: str | None,
        few_shot: Sequence[Mapping[str, object]] | None,
        message_type: str,
        question_key: str,
        answer_key: str,
    ) -> None:
        """Say where the rows come from and how they become prompts; reads none."""
        self.row_format = RowFormat(
            system_prompt=system_prompt,
            few_shot=few_shot,
            message_type=message_type,
            question_key=question_key,
            answer_key=answer_key,
            default_task=lambda: self.env_id or "default",
        )
        self._tables = Table.pair(dataset, eval_dataset, self.row_format)

    def warn_once(self, message: str) -> None:
        """Defined by ``Environment``."""
        raise NotImplementedError

    @property
    def train_table(self) -> Table | None:
        """The training examples, or None; read on first use."""
        return self._tables[0]

    @property
    def eval_table(self) -> Table:
        """The evaluation examples; the training examples, with one warning, when there are none."""
        if self._tables[1] is not None:
            return self._tables[1]
        self.warn_once(
            f"{self.env_id or type(self).__name__} has no evaluation set; its training set is used"
        )
        return self._tables[0]  # type: ignore[return-value]  # one of the two exists

    def get_dataset(self, n: int = -1, seed: int | None = None) -> Dataset:
        """The training set as a ``datasets.Dataset``: ``n`` rows (-1 = all), shuffled by ``seed``;
        changes nothing.

        Raises ``DatasetError`` when there is no training set.
        """
        return Table.required(self.train_table, self).take(n, seed).to_hf()

    def get_eval_dataset(self, n: int = -1, seed: int | None = None) -> Dataset:
        """The evaluation set as a ``datasets.Dataset``; see ``get_dataset``."""
        return self.eval_table.take(n, seed).to_hf()

    @property
    def dataset(self) -> Dataset | None:
        """The formatted training set; None without a set."""
        return None if self.train_table is None else self.get_dataset()

    @property
    def eval_dataset(self) -> Dataset | None:
        """The formatted evaluation set; None without a set."""
        return None if self._tables[1] is None else self.get_eval_dataset()

    def sample_prompts(self, n: int, seed: int | None = None) -> list[dict[str, Any]]:
        """``n`` training rows without replacement, reshuffled when exhausted, from a private
        generator."""
        return Table.required(self.train_table, self).sample(n, seed)

    @recorded
    def set_keep_rows(self, path: str | os.PathLike[str]) -> None:
        """Keep only the training rows that a file of ``vf-audit --keep`` lists, by their content
        hash.

        *Raises* ConfigError for a file that cannot be read, for a file of another environment or of
        other arguments, and when it lists rows that the training set does not have.
        """
        self._tables = self._kept_rows("keep_rows", path), self._tables[1]

    @recorded
    def set_keep_eval_rows(self, path: str | os.PathLike[str]) -> None:
        """Evaluate on the training rows that a file of ``vf-audit --keep`` lists; *raises* as
        ``set_keep_rows``."""
        self._tables = self._tables[0], self._kept_rows("keep_eval_rows", path)

    def _kept_rows(self, key: str, path: str | os.PathLike[str]) -> Table:
        selection = read_kept_rows(path, key)
        table = self._tables[0] if self._tables[0] is not None else self.eval_table
        rows = selection.of(
            table, self.env_id, self.env_args if self.loaded_from is not None else None, key
        )
        setattr(self, key, selection.digest)  # part of the identity, whatever the file is called
        return rows
