"""Log-probabilities that stand still while a batch is trained: of the policy when it was built, of the reference.

They are computed once for a batch, row by row, without gradient, by the same chunked head that trains, and kept in the
rows (``old_logp``, ``ref_logp``). What a loss does with them is ``losses``' and ``objective``'s.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from verifiers_trainer.algorithm.losses import LossInput
from verifiers_trainer.algorithm.packing import Row
from verifiers_trainer.algorithm.samples import NOT_SAMPLED
from verifiers_trainer.distributed.ranks import Ranks

Forward = Callable[..., Any]
"""A model with the log-probability forward installed, or what stands in for it."""


def forward_arguments(row: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What the log-probability forward takes, of a row's tensors."""
    arguments = {
        "input_ids": row["token_ids"].unsqueeze(0),
        "position_ids": row["position_ids"].unsqueeze(0),
        "inv_temperature": row["inv_temperature"],
        "loss_mask": row["loss_mask"],
    }
    if "prompt_seq_ids" in row:
        arguments |= {"seq_ids": row["seq_ids"], "prompt_seq_ids": row["prompt_seq_ids"]}
    return arguments


def annotate(rows: list[Row], device: Any, *, old: Forward | None = None, reference: Forward | None = None) -> None:
    """Give every row, in place of the list, the log-probabilities that are asked for and not there yet."""
    if old is None and reference is None:
        return
    for place, row in enumerate(rows):
        arguments = forward_arguments(row.to_tensors(device))
        found = {}
        with torch.no_grad():
            if old is not None and row.old_logp is None:
                found["old_logp"] = old(**arguments).logprobs.float().cpu().numpy()
            if reference is not None and row.ref_logp is None:
                found["ref_logp"] = reference(**arguments).logprobs.float().cpu().numpy()
        rows[place] = replace(row, **found)


def needs_old(config: Any, rows: list[Row]) -> bool:
    """Whether the policy of the batch is another than the trained one in some step, and something compares with it.

    In the first step of a batch the two are one, so a batch that is used once needs no pass of its own.
    """
    if config.num_iterations == 1:
        return False
    return config.anchor == "recomputed" or any(((row.version == NOT_SAMPLED) & row.loss_mask).any() for row in rows)


def some_rank_needs_old(config: Any, rows: list[Row], ranks: Ranks) -> bool:
    """`needs_old` of any rank's rows: a forward pass of a model that is split is one that every rank makes."""
    if config.num_iterations == 1:
        return False
    return ranks.any([needs_old(config, rows)], "whose rows need the policy of the batch")[0]


def tokens_of(row: Mapping[str, Tensor], log_pi: Tensor, anchor: str) -> LossInput:
    """What a loss sees of a row's tensors. Trained text that nobody sampled is anchored on the policy of the batch."""
    log_old = row.get("old_logp", log_pi.detach())
    log_mu = torch.where(row["version"] != NOT_SAMPLED, row["mu"], log_old)
    recomputed = log_old if anchor == "recomputed" else None
    return LossInput(log_pi, log_mu, row["advantage"], row["loss_mask"], row["seq_ids"], recomputed)
