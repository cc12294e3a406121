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

import numpy as np
import torch
from safetensors.numpy import load, save

from verifiers_trainer.algorithm.packing import PackedRow, forward_arguments
from verifiers_trainer.algorithm.samples import NOT_SAMPLED
from verifiers_trainer.algorithm.teacher_view import teacher_views

FIXED = ("old_logprobs", "reference_logprobs")
Forward = Callable[..., Any]
"""A model with the log-probability forward installed, or a callable with the same arguments."""


def annotate(
    rows: list[PackedRow],
    device: torch.device | str,
    *,
    old: Forward | None = None,
    references: Sequence[Forward] = (),
) -> None:
    """Store the log-probabilities [T] of ``old`` and of ``references`` in the rows that lack them,
    in place in the list.

    ``references``: the reference policy, or the teachers by their numbers in the rows; each scores
    what ``teacher_views`` says that it reads.
    """
    for index, row in enumerate(rows):
        lacking: dict[str, np.ndarray] = {}
        with torch.no_grad():
            if old is not None and row.old_logprobs is None:
                lacking["old_logprobs"] = _scores(old, row, device)
            if references and row.reference_logprobs is None:
                scores = np.zeros(row.num_tokens, np.float32)
                for view in teacher_views(row):
                    of_view = _scores(references[view.teacher], view.row, device)
                    is_read = view.index >= 0
                    scores[is_read] = of_view[view.index[is_read]]
                lacking["reference_logprobs"] = scores
        if lacking:
            rows[index] = replace(row, **lacking)


def _scores(model: Forward, row: PackedRow, device: torch.device | str) -> np.ndarray:
    """float32 [T], nats: the log-probabilities of the tokens of a row."""
    scores: np.ndarray = (
        model(**forward_arguments(row.to_tensors(device))).logprobs.float().cpu().numpy()
    )
    return scores


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
