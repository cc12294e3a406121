"""Word problems from other sources: the published GSM8K, or the generator ``gsm_symbolic`` of
Reasoning Gym.

Construction reads nothing. There is no fallback to generated problems (``generator``): the error of
an unavailable source names what works offline.
"""

from __future__ import annotations

import random
from typing import Any

from verifiers.errors import ConfigError, DatasetError
from verifiers.runtime.install_lines import install_line

GSM8K = ("gsm8k", "openai/gsm8k")
GSM_SYMBOLIC = "gsm_symbolic"


class PublishedRows:
    """The two published splits, each shuffled by ``seed`` and cut to its count (-1: all).

    ``train()`` and ``held_out()`` raise DatasetError when the dataset cannot be fetched.
    """

    def __init__(self, seed: int, num_train: int, num_held_out: int):
        self.seed, self.num_train, self.num_held_out = seed, num_train, num_held_out

    def train(self) -> list[dict[str, Any]]:
        return self._rows("train", self.num_train)

    def held_out(self) -> list[dict[str, Any]]:
        return self._rows("test", self.num_held_out)

    def _rows(self, split: str, count: int) -> list[dict[str, Any]]:
        import verifiers as vf

        try:
            rows = vf.load_example_dataset("gsm8k", split).to_list()
        except DatasetError as error:
            raise DatasetError(
                f"{error}; or leave dataset_name out: gsm8k then generates its problems"
            ) from error
        rows = [
            {"question": row["question"], "answer": row["answer"].replace(",", "")} for row in rows
        ]
        if count >= 0:
            random.Random(f"gsm8k/{self.seed}").shuffle(rows)
        return rows if count < 0 else rows[:count]


class SymbolicRows:
    """Problems of ``gsm_symbolic``: consecutive entries of a seed, the held-out problems first, no
    question twice.

    *Raises* ConfigError at once when Reasoning Gym is not installed.
    """

    def __init__(self, seed: int, num_train: int, num_held_out: int):
        from importlib.util import find_spec

        if find_spec("reasoning_gym") is None:
            raise ConfigError(
                f"dataset_name={GSM_SYMBOLIC!r} needs Reasoning Gym:"
                f" {install_line('vf-gsm8k', 'offline')}; or leave dataset_name out"
            )
        self.seed, self.num_train, self.num_held_out = seed, num_train, num_held_out
        self._cached: list[dict[str, object]] | None = None

    def held_out(self) -> list[dict[str, Any]]:
        return self._rows()[: self.num_held_out]

    def train(self) -> list[dict[str, Any]]:
        return self._rows()[self.num_held_out :]

    def _rows(self) -> list[dict[str, Any]]:
        if self._cached is None:
            self._cached = list(self._generated())
        return self._cached

    def _generated(self) -> list[dict[str, object]]:
        import reasoning_gym

        count = self.num_train + self.num_held_out
        entries = reasoning_gym.create_dataset(GSM_SYMBOLIC, size=4 * count + 100, seed=self.seed)
        rows: dict[str, dict[str, Any]] = {}
        for index in range(len(entries)):
            entry = entries[index]
            question, _, _ = entry["question"].partition(" Give the result as your final answer")
            rows.setdefault(question, {"question": question, "answer": str(entry["answer"])})
            if len(rows) == count:
                return list(rows.values())
        raise DatasetError(
            f"{GSM_SYMBOLIC} has {len(rows)} different questions for seed {self.seed}, not {count}"
        )
