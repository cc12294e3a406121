"""Samples that begin with the same tokens, as a tree: what they have in common is computed once.

Sorted by their tokens, samples with a common prefix are neighbours, and the tree is told by the
length of the prefix that each has in common with the sample before it: the tokens after that prefix
are new nodes. A node is computed once for all samples below it; a token attends to the nodes on its
own path alone, so every log-probability is that of the sample by itself. Losses, advantages and
weights remain those of the samples: two siblings that drew the same first tokens share the forward
pass of these tokens and each has its own loss on them.

``packing`` lays trees into rows, ``policy.logprobs`` computes them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from verifiers_trainer.algorithm.samples import Sample

WORTH_SHARING = 4
"""Samples with different prompts share a prefix that is at least one part in so many of the longer:
a tree is attended to through a mask, which costs the square of the row's length."""


@dataclass(frozen=True, slots=True)
class Tree:
    """Samples that are computed together, in the order of their tokens."""

    members: tuple[int, ...]
    """Positions in the list of samples."""
    common: tuple[int, ...]
    """Tokens that each has in common with the member before it; 0 for the first."""
    size: int
    """Nodes: tokens to compute."""


@dataclass(frozen=True, slots=True)
class Nodes:
    """The C nodes of a row of T tokens, in an order in which a node follows its ancestors.

    Two samples [1, 7, 2] and [1, 7, 9, 4]: nodes 1, 7, 2, 9, 4; node ``9`` follows node ``7``::

        Nodes(token=[0, 1, 2, 5, 6], parent=[-1, 0, 1, 1, 3], first=[0, 0, 0, 1, 1], last=[1, 1, 0, 1, 1])
    """

    token: np.ndarray  # int64 [C]: the first token of the row that it stands for
    parent: np.ndarray  # int64 [C]: the node before it; -1 where a sample begins
    first: np.ndarray  # int64 [C]: the first sample of the row below it ...
    last: np.ndarray  # int64 [C]: ... and the last; every sample between them is below it too

    @classmethod
    def of(cls, node_ids: np.ndarray, position_ids: np.ndarray) -> Nodes:
        """Of the node of each token, and its position in its sample, both int [T]."""
        seq_ids = np.cumsum(position_ids == 0) - 1
        _, token = np.unique(node_ids, return_index=True)
        parent = np.where(position_ids[token] == 0, -1, node_ids[token - 1])
        last = np.zeros(len(token), np.int64)
        last[node_ids] = seq_ids  # samples are numbered upwards: the last one remains
        return cls(token, parent, seq_ids[token], last)


def trees(samples: Sequence[Sample], used: Sequence[int], max_tokens: int) -> list[Tree]:
    """The samples ``used`` as trees of at most ``max_tokens`` nodes; a longer sample is one alone.

    Samples with one prompt share it and what follows it; others share a prefix if it is a
    considerable part of them, see ``WORTH_SHARING``. Logits are divided by the temperature, so
    only samples of one temperature are together. A tree with too many nodes is cut between two
    samples.
    """
    order = sorted(used, key=lambda i: (samples[i].inv_temperature, _sortable(samples[i]), i))
    return list(_runs(samples, order, max_tokens))


def _runs(samples: Sequence[Sample], order: Sequence[int], max_tokens: int) -> Iterator[Tree]:
    members: list[int] = []
    common: list[int] = []
    size = 0
    for i in order:
        num_common = _shared_length(samples[members[-1]], samples[i]) if members else 0
        added = samples[i].num_tokens - num_common
        if members and (not num_common or size + added > max_tokens):
            yield Tree(tuple(members), tuple(common), size)
            members, common, size = [], [], 0
            num_common, added = 0, samples[i].num_tokens
        members.append(i)
        common.append(num_common)
        size += added
    if members:
        yield Tree(tuple(members), tuple(common), size)


def _sortable(sample: Sample) -> bytes:
    """Bytes in the order of the tokens; a prefix comes before what continues it."""
    return sample.token_ids.astype(">u4").tobytes()


def _shared_length(before: Sample, sample: Sample) -> int:
    """The length of the common prefix of two samples; 0 if sharing it is not worth while."""
    if before.inv_temperature != sample.inv_temperature:
        return 0
    common = common_length(before.token_ids, sample.token_ids)
    prompt = min(int(before.loss_mask.argmax()), int(sample.loss_mask.argmax()))
    part = math.ceil(max(before.num_tokens, sample.num_tokens) / WORTH_SHARING)
    return common if common >= min(prompt, part) else 0


def common_length(before: np.ndarray, ids: np.ndarray) -> int:
    """The length of the common prefix of two arrays of token ids."""
    num = min(len(before), len(ids))
    different = np.flatnonzero(before[:num] != ids[:num])
    return int(different[0]) if len(different) else num


def node_ids(lengths: Sequence[int], common: Sequence[int]) -> np.ndarray:
    """int32 [T], the node of each token of samples laid end to end: of so many tokens each, of
    which the first ``common`` are those of the sample before.

    >>> node_ids([3, 4, 2], [0, 2, 0]).tolist()
    [0, 1, 2, 0, 1, 3, 4, 5, 6]
    """
    paths = []
    path = np.zeros(0, np.int32)
    num_nodes = 0
    for length, num_common in zip(lengths, common, strict=True):
        new = np.arange(num_nodes, num_nodes + length - num_common, dtype=np.int32)
        path = np.concatenate([path[:num_common], new])
        num_nodes += len(new)
        paths.append(path)
    return np.concatenate(paths)
