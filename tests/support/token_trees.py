"""Samples over random trees of tokens: a group whose members part ways at several depths."""

from __future__ import annotations

import numpy as np

from support.tiny_models import VOCABULARY
from verifiers_trainer.algorithm.samples import NOT_SAMPLED, Sample


def tree_samples(depth: int, seed: int = 0, *, group: int = 0, prompt: int = 6) -> list[Sample]:
    """A prompt without loss, then ``depth`` levels at which every branch parts into one to three;
    loss on the first token and about two of three, each sample with an advantage of its own."""
    rng = np.random.default_rng(seed)
    beginnings = [rng.integers(3, VOCABULARY, prompt)]
    trained = [np.zeros(prompt, bool)]
    for _ in range(depth):
        continued, masks = [], []
        for beginning, mask in zip(beginnings, trained, strict=True):
            for _ in range(int(rng.integers(1, 4))):
                new = rng.integers(3, VOCABULARY, int(rng.integers(1, 6)))
                continued.append(np.concatenate([beginning, new]))
                masks.append(np.concatenate([mask, rng.random(len(new)) < 2 / 3]))
        beginnings, trained = continued, masks
    samples = []
    for number, (ids, mask) in enumerate(zip(beginnings, trained, strict=True)):
        mask[[prompt, -1]] = True
        samples.append(
            Sample(
                ids.astype(np.int32),
                mask,
                np.where(mask, -rng.uniform(0.1, 3, len(ids)), 0).astype(np.float32),
                np.where(mask, 4, NOT_SAMPLED).astype(np.int32),
                np.where(mask, rng.normal(), 0).astype(np.float32),
                rollout=number,
                group=group,
            )
        )
    return samples


def edges(samples: list[Sample]) -> int:
    """Edges of the trie over the samples' tokens: how many prefixes there are."""
    prefixes = set()
    for sample in samples:
        ids = sample.token_ids.tolist()
        prefixes |= {tuple(ids[: end + 1]) for end in range(len(ids))}
    return len(prefixes)
