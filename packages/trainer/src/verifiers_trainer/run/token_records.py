"""The tokens of trained rollouts as ``completions/step-<n>.jsonl`` keeps them, for reading the
numbers in the text.

Whole rollouts are kept, in the order of the batch, until a bound on the sampled tokens of a step is
reached. Numbers that are equal for all tokens of a turn are written once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from verifiers.rollouts.rollout import Rollout
from verifiers_trainer.algorithm.batch import TrainBatch
from verifiers_trainer.algorithm.packing import sample_spans
from verifiers_trainer.algorithm.samples import RolloutSamples, turn_spans

DIGITS = 4


def token_records(
    batch: TrainBatch,
    rank: int,
    row_logprobs: Sequence[torch.Tensor],
    max_tokens: int,
    texts: Callable[[Sequence[int]], list[str]],
) -> dict[tuple[int, int], list[dict[str, object]]]:
    """(group of the batch, rollout of the group) -> its turns, of at most ``max_tokens`` sampled
    tokens together.

    ``row_logprobs``: log π [T] of each row of ``rank`` as the step computed them; the tokens of
    other ranks' rows have none. ``texts`` gives the text of each token.
    """
    recorded, tokens_left = {}, max_tokens
    for number, (group, samples) in enumerate(zip(batch.groups, batch.samples_G, strict=True)):
        for sibling, (rollout, rollout_samples) in enumerate(
            zip(group.rollouts, samples, strict=True)
        ):
            if 0 < rollout.num_sampled <= tokens_left:
                tokens_left -= rollout.num_sampled
                recorded[number, sibling] = rollout, rollout_samples
    needed = {
        sample.rollout for _, its_samples in recorded.values() for sample in its_samples.samples
    }
    flat = [
        sample
        for samples in batch.samples_G
        for its_samples in samples
        for sample in its_samples.samples
    ]
    logprobs = _policy_logprobs(
        batch, rank, row_logprobs, {i for i, s in enumerate(flat) if s.rollout in needed}
    )
    first = {id(sample): number for number, sample in enumerate(flat)}
    return {
        key: _turns(
            rollout,
            its_samples,
            [first[id(sample)] for sample in its_samples.samples],
            batch.weights,
            logprobs,
            texts,
        )
        for key, (rollout, its_samples) in recorded.items()
    }


def _policy_logprobs(
    batch: TrainBatch, rank: int, row_logprobs: Sequence[torch.Tensor], needed: set[int]
) -> dict[int, dict[str, np.ndarray]]:
    """Sample -> ``policy_logprobs`` and, where the batch has them, ``old_logprobs``; float32, of
    its tokens."""
    by_sample: dict[int, dict[str, np.ndarray]] = {}
    if not row_logprobs:  # an update without a trained token computes no row
        return by_sample
    for row, logprobs in zip(batch.rows_R[rank], row_logprobs, strict=True):
        spans = [span for span in sample_spans(row) if span[0] in needed]
        if not spans:
            continue
        log_pi = logprobs.float().cpu().numpy()
        for sample, start, end in spans:
            by_sample[sample] = {"policy_logprobs": log_pi[start:end]}
            if row.old_logprobs is not None:
                by_sample[sample]["old_logprobs"] = row.old_logprobs[start:end]
    return by_sample


def _turns(
    rollout: Rollout,
    samples: RolloutSamples,
    numbers: Sequence[int],
    weights: Sequence[np.ndarray],
    logprobs: dict[int, dict[str, np.ndarray]],
    texts: Callable[[Sequence[int]], list[str]],
) -> list[dict[str, Any]]:
    records = []
    earlier: list[int] = []
    for index, (turn, (which, start, end)) in enumerate(
        zip(rollout.turns, turn_spans(rollout, samples), strict=True)
    ):
        ids, prompt = turn.completion_ids.tolist(), turn.prompt_ids.tolist()
        num_known = len(earlier) if prompt[: len(earlier)] == earlier else 0
        earlier = [*prompt, *ids]
        record: dict[str, object] = {
            "prompt_tokens": turn.num_prompt,
            "prompt_ids": prompt[num_known:],  # after the tokens of the turn before
            "completion_ids": ids,
            "texts": texts(ids),
            "completion_logprobs": _shortest(turn.sampler_logprobs),  # exported as sampled
            "version": _once(np.broadcast_to(np.asarray(turn.version), len(ids)).tolist()),
            "mask": 0,
        }
        if turn.acting_role:
            record["role"] = turn.acting_role
        if rollout.turn_rewards:
            record["reward"] = rollout.turn_rewards[index]
        if which >= 0 and ids:
            sample = samples.samples[which]
            record["mask"] = _once(sample.loss_mask[start:end].astype(int).tolist())
            record["advantage"] = _once(_rounded(sample.advantages[start:end]))
            record["weight"] = _once(
                [float(f"{weight:.4g}") for weight in weights[numbers[which]][start:end].tolist()]
            )
            for name, values in logprobs.get(numbers[which], {}).items():
                record[name] = _rounded(values[start:end])
        records.append(record)
    return records


def _shortest(values: np.ndarray) -> list[float]:
    """The numbers with the fewest digits that give them back."""
    return [float(str(value)) for value in values]


def _rounded(values: np.ndarray) -> list[float]:
    return np.round(values.astype(np.float64), DIGITS).tolist()


def _once(values: Sequence[object]) -> object:
    """The value that all have, else all of them."""
    return values[0] if values and values.count(values[0]) == len(values) else values
