"""Compute how much each token counts in one optimizer step: weights over the whole batch, computed
once on rank 0.

The loss of a row is ``world · Σ_t weight_t · loss_t`` (data-parallel training averages gradients
over ranks). Every denominator is a sum over the step on all ranks, so no split into rows, order or
number of ranks changes the gradient. The components of the loss have denominators of their own.
Only masks and identities are read here.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from verifiers.errors import ConfigError
from verifiers_trainer.algorithm.samples import Sample


@dataclass(frozen=True, slots=True)
class StepWeights:
    """Weights of all tokens of a batch.

    Example, two rollouts of three and two trained tokens under "token_mean"::

        StepWeights(weights=([0, .2, .2, .2], [0, .2, .2]), num_tokens=5)
    """

    weights: tuple[np.ndarray, ...]  # float64 [T] per sample, 0 if no loss is taken
    num_tokens: int
    """Tokens with loss; 0: the optimizer step must not be taken."""


def step_weights(
    samples: Sequence[Sample], aggregation: str, *, max_len: int | None = None
) -> StepWeights:
    """The weight of every token of every sample of an optimizer step, over all ranks.

    Trained tokens are those with loss. Rollouts and groups without such a token are in no
    denominator; a forked rollout counts once and its samples share its weight. ``max_len`` (tokens)
    is the constant of "constant_length". Denominators count the samples of a component
    (`Sample.component`) and of an adapter (`Sample.adapter`) alone, so that each is a mean of its
    own: what one role does weighs nothing in the gradient of another's adapter.

    *Raises* ConfigError for an unknown name and for "constant_length" without ``max_len``.
    """
    if aggregation not in AGGREGATIONS:
        raise ConfigError(f"unknown aggregation {aggregation!r}; known: {', '.join(AGGREGATIONS)}")
    if aggregation == "constant_length" and not max_len:
        raise ConfigError(
            "aggregation 'constant_length' needs max_len; set max_completion_len or max_seq_len"
        )
    counts: defaultdict[object, _Counts] = defaultdict(lambda: _Counts(max_len or 0))
    for sample in samples:
        if sample.num_trained:
            counts[sample.component, sample.adapter].add(sample)
    weigh = AGGREGATIONS[aggregation]
    weights = tuple(
        (
            np.where(sample.loss_mask, weigh(sample, counts[sample.component, sample.adapter]), 0.0)
            if sample.num_trained
            else np.zeros(sample.num_tokens)
        )
        for sample in samples
    )
    return StepWeights(weights, sum(count.num_tokens for count in counts.values()))


@dataclass(slots=True)
class _Counts:
    """Trained tokens of a component by rollout and by group, of those that have any."""

    max_len: int
    rollouts: Counter[int] = field(default_factory=Counter)
    groups: Counter[int] = field(default_factory=Counter)
    num_tokens: int = 0

    def add(self, sample: Sample) -> None:
        self.rollouts[sample.rollout] += sample.num_trained
        self.groups[sample.group] += sample.num_trained
        self.num_tokens += sample.num_trained


AGGREGATIONS: dict[str, Callable[[Sample, _Counts], float]] = {
    "token_mean": lambda sample, counts: 1 / counts.num_tokens,
    "sequence_mean": lambda sample, counts: (
        1 / (len(counts.rollouts) * counts.rollouts[sample.rollout])
    ),
    "constant_length": lambda sample, counts: 1 / (len(counts.rollouts) * counts.max_len),
    "sequence_sum": lambda sample, counts: 1 / len(counts.rollouts),
    "prompt_mean": lambda sample, counts: 1 / (len(counts.groups) * counts.groups[sample.group]),
}
"""Weight of a trained token of a sample.

Source: Dr. GRPO, arXiv 2503.20783, for constant_length; DAPO, arXiv 2503.14476, for token_mean."""
