"""Write ``metrics.jsonl`` and ``completions/step-<n>.jsonl`` of a training run.

A line of ``metrics.jsonl`` is one optimizer step, one evaluation, or one batch without a learning
signal (``dead/*``, after the step before it), flushed when written; NaN is null. Resuming from step
n drops the lines after n. ``completions/dropped-<n>.jsonl`` has the finished rollouts that were
generated for step n and not trained on; images of rollouts are stored once, in
``completions/images``, as a run stores them. The learning curve is drawn from ``metrics.jsonl``.
Trackers such as wandb receive the same metrics through ``trackers``.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from verifiers.results import print_prompt_completions_sample
from verifiers.rollouts.rollout import Rollout
from verifiers.runtime.bounded import MAX_ROW_BYTES, read_text
from verifiers.runtime.decoding import decode_json
from verifiers.runtime.json import encode_row
from verifiers.storage.files import append_lines, atomic_write, remove_leftovers, replacing
from verifiers.storage.images import IMAGES_NAME, set_aside, write_images
from verifiers_trainer.algorithm.batch import Group, TrainBatch
from verifiers_trainer.algorithm.statistics import IMITATES

log = logging.getLogger(__name__)
METRICS = "metrics.jsonl"
COMPLETIONS = "completions"


class MetricsFile:
    """Appends one JSON object per step to ``<folder>/metrics.jsonl``; the file is created with the
    first line."""

    def __init__(self, folder: Path):
        self.path = folder / METRICS
        self._before: list[str] = []
        self._is_training = False

    @property
    def holds_earlier(self) -> bool:
        """Whether the file has lines of an earlier run: more than this object wrote."""
        return self.path.is_file() and len(read_metrics(self.path)) > len(self._before)

    def resume(self, step: int) -> None:
        """Drop the lines, and the dropped rollouts, of steps after ``step``, which are trained
        again."""
        if self.path.is_file():
            remaining = [row for row in read_metrics(self.path) if row["step"] <= step]
            atomic_write(self.path, "".join(_line(row) for row in remaining).encode("ascii"))
        remove_leftovers(self.path.parent / COMPLETIONS)
        for later in self.path.parent.glob(f"{COMPLETIONS}/dropped-*.jsonl"):
            if int(later.stem.removeprefix("dropped-")) > step:
                later.unlink()

    def start(self, anew: bool) -> None:
        """Begin training; ``anew`` rewrites this object's lines, after an earlier run's file was
        moved aside."""
        if anew and self._before:
            atomic_write(self.path, "".join(self._before).encode("ascii"))
        self._before, self._is_training = [], True

    def write(self, step: int, version: int, values: Mapping[str, object]) -> None:
        """Append one line."""
        line = _line({"step": step, "policy_version": version, "time": time.time(), **values})
        if step == 0 and not self._is_training:
            self._before.append(line)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        append_lines(self.path, line.encode("ascii"), is_durable=False)


def _line(row: Mapping[str, object]) -> str:
    plain = {key: _plain(value) for key, value in row.items()}
    return json.dumps(plain, allow_nan=False) + "\n"


def _plain(value: object) -> Any:
    value = value.item() if hasattr(value, "item") else value
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a ``metrics.jsonl``. An incomplete last line is skipped, and what is no line of a
    run with a warning: a power cut may leave it."""
    rows = []
    for number, line in enumerate(read_text(path, MAX_ROW_BYTES).split("\n")[:-1], 1):
        try:
            row = decode_json(line)
        except ValueError:
            row = None
        if isinstance(row, dict) and type(row.get("step")) is int:
            rows.append(row)
        else:
            log.warning("%s:%d is damaged and left out", path, number)
    return rows


def write_completions(
    folder: Path,
    step: int,
    batch: TrainBatch,
    first_only: bool = False,
    tokens: Mapping[tuple[int, int], Sequence[Mapping[str, object]]] = MappingProxyType({}),
    behaviours: Mapping[tuple[int, int], Sequence[str]] = MappingProxyType({}),
) -> None:
    """Write a step's rollouts: texts, reward, per-function scores, advantage, tokens and policy
    version.

    Groups without a signal come last; no rollout of theirs is ``trained``. ``first_only`` writes
    the first rollout of each group alone. ``tokens``: the turns of ``token_records``.
    ``behaviours``: (index of the group, sibling) -> the metrics ``hacking/…`` of what a rollout shows,
    which are 1.
    """

    def marked(row: dict[str, Any]) -> dict[str, Any]:
        row["metrics"] |= dict.fromkeys(behaviours.get((row["group"], row["sibling"]), ()), 1)
        return row

    def rows() -> Iterator[dict[str, Any]]:
        for number, (group, advantages) in enumerate(
            zip(batch.groups, batch.advantages_G, strict=True)
        ):
            first = batch.first_G[number] if batch.first_G else 0
            for position in range(1 if first_only else len(group.rollouts)):
                row = _row(group, group.rollouts[position], first + position)
                row["advantage"] = _plain(float(advantages[position]))
                if batch.samples_G:
                    reason = batch.samples_G[number][position].excluded
                    row |= (
                        {"trained": True}
                        if reason is None
                        else {"trained": False, "excluded": reason}
                    )
                if (turns := tokens.get((number, position))) is not None:
                    row["turn_tokens"] = turns
                yield row
        yield from _untrained(batch.discarded, first_only)

    _write_rollouts(folder, f"step-{step}", map(marked, rows()))


def append_dropped(
    folder: Path, step: int, groups: Sequence[Group], first_only: bool = False
) -> None:
    """Append the rollouts of groups that no step counts to ``dropped-<step>.jsonl``, without
    advantages."""
    _write_rollouts(folder, f"dropped-{step}", _untrained(groups, first_only), appends=True)


def _untrained(groups: Sequence[Group], first_only: bool) -> Iterator[dict[str, Any]]:
    for group in groups:
        for position, rollout in enumerate(group.rollouts[:1] if first_only else group.rollouts):
            yield _row(group, rollout, position) | {"trained": False, "excluded": "no_signal"}


def _row(group: Group, rollout: Rollout, sibling: int) -> dict[str, Any]:
    return {
        "example_id": group.example_id,
        "group": group.index,
        "sibling": sibling,
        **rollout.text,
        "reward": _plain(rollout.reward),
        "metrics": {name: _plain(float(value)) for name, value in rollout.metrics.items()},
        "advantage": None,
        "stop_condition": rollout.stop,
        **({} if rollout.fork is None else {"fork": dict(rollout.fork)}),
        "error": None if rollout.error is None else rollout.error.text,
        "completion_tokens": rollout.num_sampled,
        "policy_version": rollout.oldest_version,
    }


def _write_rollouts(
    folder: Path, name: str, rows: Iterable[Mapping[str, object]], appends: bool = False
) -> None:
    path = folder / COMPLETIONS / f"{name}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)

    def with_stored_images(row: Mapping[str, object]) -> bytes:
        line, images = set_aside(encode_row(row))
        write_images(path.parent / IMAGES_NAME, images)
        return line + b"\n"

    lines = map(with_stored_images, rows)
    if appends:
        append_lines(path, b"".join(lines), is_durable=False)
        return
    with replacing(path) as written, written.open("wb") as file:
        file.writelines(lines)


def print_completions(batch: TrainBatch, step: int, count: int, first_only: bool = False) -> None:
    """Print up to ``count`` rollouts of a step."""
    records = [
        record
        for group in batch.groups
        for record in (group.rollouts[:1] if first_only else group.rollouts)
    ]
    print_prompt_completions_sample(
        [record.row["prompt"] for record in records],
        [record.completion for record in records],
        [None for _ in records],
        [record.reward for record in records],
        step,
        count,
    )


def reward_name(rows: Iterable[Mapping[str, object]]) -> str:
    """What the reward of the steps is: that of the policy, or of the rollouts that it imitates.

    >>> reward_name([{"reward/mean": 1.0}]), reward_name([{"reward/mean": 1.0, IMITATES: 1}])
    ('reward', "demonstrations' reward")
    """
    return "demonstrations' reward" if any(row.get(IMITATES) for row in rows) else "reward"
