"""Compute the log-probabilities that stay fixed while a batch is trained: under its old policy and
the reference.

They are computed once for a batch, row by row, without gradient, by the same chunked head that
trains, and stored in the rows (``old_logprobs``, ``reference_logprobs``). ``losses`` compares the
trained policy with them. A checkpoint between the steps of a batch has them: the weights that they
are of have changed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from safetensors.numpy import load, save

from verifiers_trainer.algorithm.packing import PackedRow, forward_arguments
from verifiers_trainer.algorithm.samples import NOT_SAMPLED

FIXED = ("old_logprobs", "reference_logprobs")
Forward = Callable[..., Any]
"""A model with the log-probability forward installed, or a callable with the same arguments."""


def annotate(
    rows: list[PackedRow],
    device: torch.device | str,
    *,
    old: Forward | None = None,
    reference: Forward | None = None,
) -> None:
    """Store the log-probabilities [T] of ``old`` and ``reference`` in the rows that lack them, in
    place in the list."""
    for index, row in enumerate(rows):
        lacking = {
            name: model
            for name, model in zip(FIXED, (old, reference), strict=True)
            if model is not None and getattr(row, name) is None
        }
        if not lacking:
            continue
        arguments = forward_arguments(row.to_tensors(device))
        with torch.no_grad():
            computed = {name: model(**arguments).logprobs for name, model in lacking.items()}
        arrays = {name: values.float().cpu().numpy() for name, values in computed.items()}
        rows[index] = replace(row, **arrays)


def needs_old(rows: Sequence[PackedRow], steps_per_batch: int, anchor: str) -> bool:
    """Whether these rows are compared with the policy of the batch after it has changed.

    In the first step of a batch both are the same policy, so a batch of a step
    (``steps_per_batch=1``) needs no forward pass. Otherwise ``anchor="recomputed"`` needs it, and
    so does trained text that no policy sampled.
    """
    if steps_per_batch == 1:
        return False
    return anchor == "recomputed" or any(
        ((row.version == NOT_SAMPLED) & row.loss_mask).any() for row in rows
    )


def to_bytes(rows_S: Sequence[Sequence[PackedRow]]) -> bytes:
    """The stored log-probabilities of the rows of each step, as a safetensors file."""
    arrays = {
        f"{step}.{index}.{name}": array
        for step, rows in enumerate(rows_S)
        for index, row in enumerate(rows)
        for name in FIXED
        if (array := getattr(row, name)) is not None
    }
    return save(arrays)


def restore(rows_S: Sequence[list[PackedRow]], data: bytes) -> None:
    """Store what ``to_bytes`` gave in equal rows. *Raises* ValueError when they are others."""
    for key, array in load(data).items():
        step, index, name = key.split(".")
        rows, number = rows_S[int(step)], int(index)
        if number >= len(rows) or rows[number].num_tokens != len(array):
            raise ValueError(
                f"the rows of step {step} of the batch are others than those it was saved with"
            )
        rows[number] = replace(rows[number], **{name: array})
