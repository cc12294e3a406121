"""Send every rank its rows of a batch; texts stay on rank 0.

Rows travel as safetensors, bit for bit; reading executes no code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

import numpy as np
from safetensors.numpy import load, save

from verifiers.errors import ConfigError
from verifiers_trainer.algorithm.batch import Group, TrainBatch, of_rows
from verifiers_trainer.algorithm.packing import PackedRow
from verifiers_trainer.algorithm.samples import carries_loss
from verifiers_trainer.distributed.ranks import Ranks

NAMES = tuple(field.name for field in fields(PackedRow))


def next_batch(ranks: Ranks, make: Callable[[], TrainBatch | None]) -> TrainBatch | None:
    """The batch that ``make`` returns on rank 0; the other ranks have their rows of it, without
    groups and statistics.

    None on every rank when ``make`` returns None. However long ``make`` takes, the other ranks wait
    while rank 0 is alive. *Raises* on every rank the error of ``make``.
    """
    if ranks.world == 1:
        return make()
    batches: list[TrainBatch] = []  # the batch, on rank 0 alone

    def describe() -> list[dict[str, Any]] | None:
        if (batch := make()) is None:
            return None
        batches.append(batch)
        return [
            {
                "num_tokens": step.num_tokens,
                "newest": max((group.index for group in step.groups), default=-1),
            }
            for step in batch.steps
        ]

    with ranks.alive():
        shared = ranks.share(describe, "the batch of the next step", while_alive=True)
    if shared is None:
        return None
    steps = [
        _step(ranks, batches[0].steps[number] if batches else None, **described)
        for number, described in enumerate(shared)
    ]
    if batches:
        return batches[0]
    rows_R = [[row for step in steps for row in step.rows_R[rank]] for rank in range(ranks.world)]
    groups = tuple(group for step in steps for group in step.groups)
    updates = tuple(steps) if len(steps) > 1 else ()
    return TrainBatch(rows_R, groups, (), {}, sum(step.num_tokens for step in steps), updates)


def batch_of_rows(ranks: Ranks, rows: Sequence[PackedRow]) -> TrainBatch:
    """The batch of rows of the caller's own, of each rank its own; every rank calls it.

    *Raises* ConfigError for what is no row, and if ranks have other numbers of rows.
    """
    if refused := [type(row).__name__ for row in rows if not isinstance(row, PackedRow)]:
        raise ConfigError(
            f"forward_backward got {refused[0]} and takes a batch, or packed rows: make a batch of"
            " groups by batch_of"
        )
    num_tokens = sum(int(carries_loss(row.loss_mask, row.weight).sum()) for row in rows)
    counts_R = ranks.gather([num_tokens, len(rows)], "the rows of the step")
    if len(set(counts_R[:, 1])) > 1:
        numbers = ", ".join(f"{int(count)} on rank {r}" for r, count in enumerate(counts_R[:, 1]))
        raise ConfigError(
            f"forward_backward got other numbers of rows ({numbers}), and processes exchange"
            " their gradients: give every rank as many, or pack(..., world=...)"
        )
    return of_rows(rows, ranks.rank, counts_R[:, 0].astype(int).tolist())


def _step(ranks: Ranks, step: TrainBatch | None, num_tokens: int, newest: int) -> TrainBatch:
    """The ``step`` of rank 0; on the other ranks, where it is None, their rows of it."""
    parts = None if step is None else [to_bytes(rows) for rows in step.rows_R]
    part = ranks.scatter(parts, "the rows of the next step")
    if step is not None:
        return step
    rows_R: list[list[PackedRow]] = [[] for _ in range(ranks.world)]
    rows_R[ranks.rank] = from_bytes(part)
    group = Group(newest, -1, ())  # its index is the position in the data; rank 0 has the rollouts
    return TrainBatch(rows_R, (group,), (), {}, num_tokens)


def to_bytes(rows: Sequence[PackedRow]) -> bytes:
    """Rows as one safetensors file: ``<index>.<name>`` -> array."""
    arrays = {}
    for index, row in enumerate(rows):
        for name in NAMES:
            if (array := getattr(row, name)) is not None:
                arrays[f"{index}.{name}"] = np.ascontiguousarray(array)
    return save(arrays)


def from_bytes(data: bytes) -> list[PackedRow]:
    """The rows of ``to_bytes``, in their order."""
    rows: dict[int, dict[str, np.ndarray]] = {}
    for key, array in load(data).items():
        index, _, name = key.partition(".")
        rows.setdefault(int(index), {})[name] = array
    return [PackedRow(**rows[index]) for index in sorted(rows)]
