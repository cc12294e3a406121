"""Siblings of a group begin with the same prompt: which samples may share one copy of it in a row.

The rollouts of a group differ after their first prompt. Laid out as that prompt once and one branch for each sample,
a group of G computes its prompt once and not G times; what is computed for a token does not change, because a branch
sees its prompt and itself alone (`logprobs` makes that mask). Prompts carry no loss, so none is lost.

Here is only who shares. Rows are made in `packing`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from verifiers_trainer.algorithm.samples import Sample


@dataclass(frozen=True, slots=True)
class Part:
    """What goes into a row in one piece: samples that share their first ``prompt`` tokens, or one that stands alone."""

    members: tuple[int, ...]
    prompt: int
    """Tokens of the shared prompt; 0 for a sample that stands alone."""
    size: int
    """Tokens in the row."""


def alone(samples: Sequence[Sample], used: Sequence[int]) -> list[Part]:
    """Every sample by itself."""
    return [Part((i,), 0, samples[i].num_tokens) for i in used]


def shared(samples: Sequence[Sample], used: Sequence[int], most: int) -> list[Part]:
    """Samples of one group with equal prompts together, in parts of at most ``most`` tokens where more than one is in.

    The prompt is what stands before the first token with loss. In decreasing order of length, first fit: few parts.
    """
    siblings: dict[tuple[int, float, bytes], list[int]] = {}
    for i in used:
        prompt = samples[i].token_ids[: _prompt_len(samples[i])]
        siblings.setdefault((samples[i].group, samples[i].inv_temperature, prompt.tobytes()), []).append(i)
    return [part for members in siblings.values() for part in _parts(samples, members, most)]


def _prompt_len(sample: Sample) -> int:
    return int(sample.loss_mask.argmax())


def _parts(samples: Sequence[Sample], members: Sequence[int], most: int) -> Iterator[Part]:
    prompt = _prompt_len(samples[members[0]])
    open_parts: list[tuple[list[int], int]] = []
    for i in sorted(members, key=lambda i: (-samples[i].num_tokens, i)):
        own = samples[i].num_tokens - prompt
        for place, (together, size) in enumerate(open_parts):
            if size + own <= most:
                open_parts[place] = ([*together, i], size + own)
                break
        else:
            open_parts.append(([i], prompt + own))
    for together, size in open_parts:
        yield Part(tuple(together), prompt if len(together) > 1 else 0, size)
