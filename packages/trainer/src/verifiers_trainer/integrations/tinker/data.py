"""Rows of a step as the service's data, and what its answer says about them. Arrays in, arrays out.

Layout of a datum, of a sample of T tokens: ``model_input`` is ids[:-1]; ``target_tokens``, ``logprobs`` and
``advantages`` are [T-1], entry t about token t+1. Prompt and environment positions have log-prob and advantage zero:
the zero advantage is the mask.

The hosted service minimises the sum over tokens of its loss, each term proportional to its advantage. So the weight of
a token in the step (``aggregation``) is multiplied into its advantage, with nothing lost for a clipped loss either.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from verifiers_trainer.algorithm.packing import PackedRow


def datum(sdk: Any, row: PackedRow) -> Any:
    """One sample as a ``Datum``."""
    trained = row.loss_mask[1:]
    arrays = {
        "target_tokens": row.token_ids[1:].astype(np.int64),
        "logprobs": np.where(trained, row.sampler_logprobs[1:], 0.0).astype(np.float32),
        "advantages": np.where(trained, row.advantage[1:] * row.weight[1:], 0.0).astype(np.float32),
    }
    return sdk.Datum(
        model_input=sdk.ModelInput.from_ints(row.token_ids[:-1].tolist()),
        loss_fn_inputs={name: sdk.TensorData.from_numpy(array) for name, array in arrays.items()},
    )


def ratio_stats(rows: Sequence[PackedRow], outputs: Sequence[Any], version: int) -> dict[str, float]:
    """How far the trained policy is from the one that sampled, by the service's log-probabilities; names and meaning
    are ``RatioMeter``'s. Empty when the service returns none."""
    ratios, current = [], []
    for row, output in zip(rows, outputs, strict=True):
        if "logprobs" not in output:
            return {}
        trained = row.loss_mask[1:]
        now = np.asarray(output["logprobs"].to_numpy(), np.float64)[: len(trained)]
        d = np.clip(now[trained] - row.sampler_logprobs[1:][trained], -20, 20)
        ratios.append(d)
        current.append(d[row.version[1:][trained] == version])
    d, own = np.concatenate(ratios), np.concatenate(current)
    return {
        "ratio/mean": float(np.exp(d).mean()),
        "ratio/max": float(np.exp(d).max()),
        "sampler/log_ratio_abs": float(np.abs(own).mean()) if own.size else math.nan,
        "sampler/mismatch_kl": float((np.expm1(own) - own).mean()) if own.size else math.nan,
    }
