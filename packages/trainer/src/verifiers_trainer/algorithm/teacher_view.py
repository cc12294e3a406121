"""What a teacher reads of a packed row: the same completions after another prompt.

A teacher may know more than the policy: its prompt holds an answer, a demonstration, a judge's
words (self-distillation, arXiv 2601.19897 and 2601.20802). A sample then begins, for the teacher,
with a prompt of its own (``Sample.teacher_prompt``), and every token after the
first prompt follows verbatim, those of the environment between turns included. So in a conversation
of several turns each turn is scored given the context at the start and all turns before it.

``teacher_views`` is that rule on arrays: no model, no text. ``policy.logprobs`` and
``old_logprobs`` compute what it gives.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from verifiers_trainer.algorithm.packing import PackedRow, sample_spans
from verifiers_trainer.algorithm.prefix_tree import WORTH_SHARING, common_length, node_ids
from verifiers_trainer.algorithm.samples import NOT_SAMPLED


@dataclass(frozen=True, slots=True, eq=False)
class TeacherView:
    """The samples of a row of T tokens that one teacher scores, as it reads them: V tokens.

    A prompt [1, 15] with the completion [7, 2], which the teacher reads after [1, 4, 4, 15]::

        TeacherView(teacher=0, row=PackedRow(token_ids=[1, 4, 4, 15, 7, 2], ...), index=[-1, -1, 4, 5])
    """

    teacher: int
    """Number of the teacher."""
    row: PackedRow
    """What it reads, V tokens; each token with loss has it here too."""
    index: np.ndarray
    """int64 [T]: where each token of the row is in it; -1 of a prompt that is replaced, and of the
    samples of other teachers."""


def teacher_views(row: PackedRow) -> list[TeacherView]:
    """What each teacher reads of a row; the row itself where one teacher reads what the policy
    read, so that equal models compute equal numbers, to the last bit."""
    teachers = np.zeros(1, np.int32) if row.teachers is None else np.unique(row.teachers)
    if row.teacher_prompts is None and len(teachers) == 1:
        return [TeacherView(int(teachers[0]), row, np.arange(row.num_tokens))]
    of_sample = np.zeros(len(row.sample_indices)) if row.teachers is None else row.teachers
    return [_view(row, int(n), np.flatnonzero(of_sample == n).tolist()) for n in teachers]


def _view(row: PackedRow, teacher: int, members: Sequence[int]) -> TeacherView:
    """What a teacher reads of the samples ``members`` of a row."""
    prompts = np.zeros(0, np.int32) if row.teacher_prompts is None else row.teacher_prompts
    none_replaced = np.zeros((len(row.sample_indices), 2), np.int32)
    bounds = none_replaced if row.teacher_bounds is None else row.teacher_bounds
    spans = sample_spans(row)
    before = [0, *bounds[:, 1].tolist()]
    texts, sources = [], []
    for n in members:
        _, start, end = spans[n]
        replaced, prompt_end = bounds[n].tolist()
        prompt = prompts[before[n] : prompt_end]
        texts.append(np.concatenate([prompt, row.token_ids[start + replaced : end]]))
        nowhere = np.full(len(prompt), -1, np.int64)
        sources.append(np.concatenate([nowhere, np.arange(start + replaced, end)]))
    source = np.concatenate(sources)  # int64 [V]: the token of the row; -1 of another prompt
    lengths = [len(text) for text in texts]
    is_same = source >= 0
    index = np.full(row.num_tokens, -1, np.int64)
    index[source[is_same]] = np.flatnonzero(is_same)
    last = np.repeat(np.cumsum(lengths) - 1, lengths)  # of the same sample: a token of the row

    def moved(values: np.ndarray, of_context: float) -> np.ndarray:
        return np.where(is_same, values[source], of_context).astype(values.dtype)

    seen = replace(
        row,
        token_ids=np.concatenate(texts).astype(np.int32),
        position_ids=np.concatenate([np.arange(length, dtype=np.int32) for length in lengths]),
        seq_ids=np.repeat(np.arange(len(members), dtype=np.int32), lengths),
        loss_mask=moved(row.loss_mask, False),
        sampler_logprobs=moved(row.sampler_logprobs, 0),
        advantage=moved(row.advantage, 0),
        weight=moved(row.weight, 0),
        inv_temperature=row.inv_temperature[source[last]],
        version=moved(row.version, NOT_SAMPLED),
        sample_indices=row.sample_indices[list(members)],
        reference_logprobs=None,
        old_logprobs=None,
        node_ids=None if row.node_ids is None else _nodes(texts),
        component=None if row.component is None else row.component[source[last]],
        teachers=None,
        teacher_prompts=None,
        teacher_bounds=None,
    )
    return TeacherView(teacher, seen, index)


def _nodes(texts: Sequence[np.ndarray]) -> np.ndarray | None:
    """The nodes of samples that begin alike, see ``prefix_tree``; None if none does."""
    common = [0]
    for before, text in itertools.pairwise(texts):
        num = common_length(before, text)
        is_worth = num * WORTH_SHARING >= max(len(before), len(text))
        common.append(num if is_worth else 0)
    return node_ids([len(text) for text in texts], common) if any(common) else None
