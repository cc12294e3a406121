"""One optimizer step's batch, shared among the ranks: each gets the rows that it trains, and nothing of the texts.

Rows travel as safetensors, bit for bit; nothing that is read here is executed. How processes reach each other is
``ranks``'; which rows a rank trains, ``packing``'s.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

import numpy as np
from safetensors.numpy import load, save

from verifiers_trainer.algorithm.batch import Group, TrainBatch
from verifiers_trainer.algorithm.packing import PackedRow
from verifiers_trainer.distributed.ranks import Ranks

NAMES = tuple(field.name for field in fields(PackedRow))


def next_batch(ranks: Ranks, make: Callable[[], TrainBatch], timeout_s: float) -> TrainBatch:
    """The batch that ``make`` gives on rank 0. The others have their own rows of it, and no groups or statistics.

    Raises what ``make`` raises, on every rank, and ``RunError`` after ``timeout_s`` seconds without a batch.
    """
    if ranks.world == 1:
        return make()
    made: list[TrainBatch] = []

    def describe() -> dict[str, Any]:
        made.append(make())
        batch = made[0]
        return {"num_tokens": batch.num_tokens, "newest": max((group.index for group in batch.groups), default=-1)}

    told = ranks.share(describe, "the batch of the next step", timeout_s)
    parts = [to_bytes(rows) for rows in made[0].rows_R] if made else None
    own = ranks.scatter(parts, "the rows of the next step")
    if made:
        return made[0]
    rows_R: list[list[PackedRow]] = [[] for _ in range(ranks.world)]
    rows_R[ranks.rank] = from_bytes(own)
    newest = Group(told["newest"], -1, ())  # for the place in the data; who played what, rank 0 knows
    return TrainBatch(rows_R, (newest,), (), {}, told["num_tokens"])


def to_bytes(rows: Sequence[PackedRow]) -> bytes:
    """Rows as one safetensors file: ``<place>.<name>`` -> array."""
    arrays = {}
    for place, row in enumerate(rows):
        for name in NAMES:
            if (array := getattr(row, name)) is not None:
                arrays[f"{place}.{name}"] = np.ascontiguousarray(array)
    return save(arrays)


def from_bytes(written: bytes) -> list[PackedRow]:
    """The rows that ``to_bytes`` wrote, in their order."""
    rows: dict[int, dict[str, np.ndarray]] = {}
    for key, array in load(written).items():
        place, _, name = key.partition(".")
        rows.setdefault(int(place), {})[name] = array
    return [PackedRow(**rows[place]) for place in sorted(rows)]
