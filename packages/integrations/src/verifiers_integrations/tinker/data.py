"""Convert the samples of a step to data of the service, and its outputs to statistics of the ratio.

The datum of a sample of T tokens: ``model_input`` is ids[:-1]; ``target_tokens``, ``logprobs`` and
``advantages`` are [T-1], entry t for token t+1. Prompt and environment positions have
log-probability and advantage zero: the zero advantage is the mask.

The hosted service minimises the sum of its loss over tokens, and each term is proportional to its
advantage. The weight of a token (``aggregation``) is therefore multiplied into its advantage, which
is exact for clipped losses too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from verifiers_trainer.algorithm.packing import PackedRow
from verifiers_trainer.algorithm.samples import carries_loss


def datum(sdk: Any, row: PackedRow) -> Any:
    """Convert one sample to a ``Datum``."""
    mask = carries_loss(row.loss_mask, row.weight)[1:]
    arrays = {
        "target_tokens": row.token_ids[1:].astype(np.int64),
        "logprobs": np.where(mask, row.sampler_logprobs[1:], 0.0).astype(np.float32),
        "advantages": np.where(mask, row.advantage[1:] * row.weight[1:], 0.0).astype(np.float32),
    }
    return sdk.Datum(
        model_input=sdk.ModelInput.from_ints(row.token_ids[:-1].tolist()),
        loss_fn_inputs={name: sdk.TensorData.from_numpy(array) for name, array in arrays.items()},
    )


def ratio_stats(
    rows: Sequence[PackedRow], outputs: Sequence[Any], version: int
) -> dict[str, float]:
    """Return statistics of the ratio of the trained policy to the sampler, by the log-probabilities
    of the service, named as by ``RatioMeter``. Empty when the service returns none."""
    ratios, current = [], []
    for row, output in zip(rows, outputs, strict=True):
        if "logprobs" not in output:
            return {}
        mask = carries_loss(row.loss_mask, row.weight)[1:]
        logprobs = np.asarray(output["logprobs"].to_numpy(), np.float64)[: len(mask)]
        d = np.clip(logprobs[mask] - row.sampler_logprobs[1:][mask], -20, 20)
        ratios.append(d)
        current.append(d[row.version[1:][mask] == version])
    d, on_policy = np.concatenate(ratios), np.concatenate(current)
    return {
        "ratio/mean": float(np.exp(d).mean()),
        "ratio/max": float(np.exp(d).max()),
        "sampler/log_ratio_abs": float(np.abs(on_policy).mean()) if on_policy.size else math.nan,
        "sampler/mismatch_kl": (
            float((np.expm1(on_policy) - on_policy).mean()) if on_policy.size else math.nan
        ),
    }
