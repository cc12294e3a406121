"""Where a training run's numbers and texts go: ``metrics.jsonl`` and ``completions/step-<n>.jsonl``, always.

A line of ``metrics.jsonl`` is one optimizer step (or one evaluation), flushed when written; NaN is null. Resuming a run
from step n drops the lines after n, so the file reads as one run. The learning curve is drawn from this file. Trackers
such as wandb get the same numbers through ``trackers``.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verifiers.results import print_prompt_completions_sample
from verifiers.runtime.json import encode_row
from verifiers.storage.files import atomic_write
from verifiers_trainer.algorithm.batch import TrainBatch

METRICS = "metrics.jsonl"
COMPLETIONS = "completions"


class MetricsFile:
    """Appends one JSON object per step to ``<folder>/metrics.jsonl``; the file is opened at the first line."""

    def __init__(self, folder: Path):
        self.path = folder / METRICS
        self._before: list[str] = []
        self._is_training = False

    @property
    def holds_earlier(self) -> bool:
        """Whether there are lines that this object did not write before it trains: those of an earlier run."""
        return self.path.is_file() and len(read_metrics(self.path)) > len(self._before)

    def resume(self, step: int) -> None:
        """Drop the lines of steps after ``step``; they will be trained again."""
        if self.path.is_file():
            kept = [row for row in read_metrics(self.path) if row["step"] <= step]
            atomic_write(self.path, "".join(_line(row) for row in kept).encode("ascii"))

    def start(self, anew: bool) -> None:
        """Training begins; ``anew``: in a file with what this object wrote before (an earlier run's was moved away)."""
        if anew and self._before:
            atomic_write(self.path, "".join(self._before).encode("ascii"))
        self._before, self._is_training = [], True

    def write(self, step: int, version: int, values: Mapping[str, Any]) -> None:
        """Append one line."""
        line = _line({"step": step, "policy_version": version, "time": time.time(), **values})
        if step == 0 and not self._is_training:
            self._before.append(line)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="ascii") as file:
            file.write(line)


def _line(row: Mapping[str, Any]) -> str:
    plain = {key: _plain(value) for key, value in row.items()}
    return json.dumps(plain, allow_nan=False) + "\n"


def _plain(value: Any) -> Any:
    value = value.item() if hasattr(value, "item") else value
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a ``metrics.jsonl``; an unfinished last line is left out."""
    lines = path.read_text(encoding="ascii").split("\n")[:-1]
    return [json.loads(line) for line in lines]


def write_completions(folder: Path, step: int, batch: TrainBatch, first_only: bool = False) -> None:
    """The rollouts a step trained on: texts, reward, per-function scores, advantage, tokens and policy version.

    ``first_only`` leaves out all siblings of an example but the first.
    """
    path = folder / COMPLETIONS / f"step-{step}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        for group, advantages in zip(batch.groups, batch.advantages_G, strict=True):
            siblings = list(zip(group.rollouts, advantages, strict=True))
            for record, advantage in siblings[:1] if first_only else siblings:
                row = {
                    "example_id": group.example_id,
                    **record.text,
                    "reward": _plain(record.reward),
                    "metrics": {name: _plain(float(value)) for name, value in record.metrics.items()},
                    "advantage": _plain(float(advantage)),
                    "stop_condition": record.stop,
                    "error": record.error,
                    "completion_tokens": record.num_sampled,
                    "policy_version": record.oldest_version,
                }
                file.write(encode_row(row) + b"\n")


def print_completions(batch: TrainBatch, step: int, count: int, first_only: bool = False) -> None:
    """Show up to ``count`` rollouts of a step on the terminal."""
    records = [record for group in batch.groups for record in (group.rollouts[:1] if first_only else group.rollouts)]
    print_prompt_completions_sample(
        [record.text["prompt"] for record in records],
        [record.text["completion"] for record in records],
        [None for _ in records],
        [record.reward for record in records],
        step,
        count,
    )
