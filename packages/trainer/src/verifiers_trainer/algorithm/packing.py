"""Pack samples into rows of token arrays: equally many on every rank, of nearly equal size, without
padding.

Samples are laid end to end into rows of at most ``max_tokens``, first fit in decreasing order; the
number of rows is rounded up to a multiple of the ranks and the samples are dealt again, largest
first into the emptiest row. Ranks without a row get a filler: one token of weight zero that runs a
real forward and backward pass, because sharded training hangs when ranks run different numbers of
them. A sample never spans rows and is never cut.

The rollouts of a group begin with the same prompt. With ``share_prompts`` that prompt is laid once,
followed by one branch for each sample. The log-probabilities stay the same, because a branch
attends to its prompt and itself alone (``policy.logprobs`` builds that mask); prompts carry no
loss, so no loss is dropped.

``samples`` decides which tokens carry loss, ``aggregation`` how much each weighs.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np

from verifiers_trainer.algorithm.samples import COMPONENTS, NOT_SAMPLED, Sample

if TYPE_CHECKING:
    import torch
    from numpy.typing import DTypeLike


@dataclass(frozen=True, slots=True, eq=False)
class PackedRow:
    """Several samples end to end, T tokens together; entry t describes token t given the tokens
    before it.

    Example, a sample of three tokens and one of two::

        PackedRow(token_ids=[1, 7, 2, 1, 9], position_ids=[0, 1, 2, 0, 1], seq_ids=[0, 0, 0, 1, 1],
                  loss_mask=[F, T, T, F, T], sampler_logprobs=[0, -.1, -.7, 0, -.2], ..., sample_indices=[4, 0])

    Two samples that share the prompt [1, 7]: the prompt, then the tokens of each after it::

        PackedRow(token_ids=[1, 7, 2, 9, 4], position_ids=[0, 1, 2, 2, 3], seq_ids=[0, 0, 1, 2, 2],
                  prompt_seq_ids=[0, 0, 0, 0, 0], ..., sample_indices=[3, 5])
    """

    token_ids: np.ndarray  # int32 [T]
    # int32 [T], from 0 in every sample; after a shared prompt they continue from its end
    position_ids: np.ndarray
    seq_ids: np.ndarray  # int32 [T], from 0: which sample of the row; a shared prompt counts as one
    loss_mask: np.ndarray  # bool [T], False on the first token of every sample
    sampler_logprobs: np.ndarray  # float32 [T], nats, under the policy that sampled the token
    advantage: np.ndarray  # float32 [T]
    weight: np.ndarray  # float32 [T]
    inv_temperature: np.ndarray  # float32 [T]
    version: np.ndarray  # int32 [T]
    # int32 [samples of the row]: position in the list given to `pack`; empty in a filler
    sample_indices: np.ndarray
    reference_logprobs: np.ndarray | None = None  # float32 [T], nats, under the reference policy
    # float32 [T], nats, under the trained policy when the batch was built
    old_logprobs: np.ndarray | None = None
    # int32 [T]: seq id of the shared prompt before a token, else its own
    prompt_seq_ids: np.ndarray | None = None
    component: np.ndarray | None = None  # int32 [T]: index in COMPONENTS; None = 0 throughout

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def is_filler(self) -> bool:
        return not len(self.sample_indices)

    def to_tensors(self, device: torch.device | str = "cpu") -> dict[str, torch.Tensor]:
        """The arrays [T] as tensors on ``device``, integers as int64; without ``sample_indices``
        and absent fields."""
        import torch

        tensors = {}
        for field in fields(self):
            array = getattr(self, field.name)
            if array is not None and field.name != "sample_indices":
                tensor = torch.from_numpy(array)
                if array.dtype == np.int32:
                    tensor = tensor.long()
                tensors[field.name] = sent(tensor, device)
        return tensors


def sent(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """``tensor`` of the host on ``device``, without waiting for the work that CUDA has queued: the
    driver copies what is not pinned before it returns, which others do not promise."""
    return tensor.to(device, non_blocking=str(device).startswith("cuda"))


def sample_spans(row: PackedRow) -> list[tuple[int, int, int]]:
    """(sample, start, end) of each sample of a row, as `pack` numbers them; without the prompt that
    several share.

    The tokens from ``start`` to before ``end`` are the last of the sample.
    """
    if row.is_filler:
        return []
    bounds = [0, *(np.flatnonzero(np.diff(row.seq_ids)) + 1).tolist(), row.num_tokens]
    prompts = set()
    if row.prompt_seq_ids is not None:
        prompts = set(row.prompt_seq_ids[row.prompt_seq_ids != row.seq_ids].tolist())
    spans = [
        (start, end)
        for start, end in itertools.pairwise(bounds)
        if int(row.seq_ids[start]) not in prompts
    ]
    return [(int(sample), *span) for sample, span in zip(row.sample_indices, spans, strict=True)]


def forward_arguments(
    row: Mapping[str, torch.Tensor], packed: PackedRow | None = None
) -> dict[str, torch.Tensor]:
    """The arguments of the log-probability forward (``policy.logprobs``), of a row's tensors.

    With the row itself, ``packed``, what decides the layout stays on the host, so that the forward
    does not wait for the device.
    """
    layout = row if packed is None else packed.to_tensors()
    arguments = {
        "input_ids": row["token_ids"].unsqueeze(0),  # [1, T]
        "position_ids": layout["position_ids"].unsqueeze(0),  # [1, T]
        "inv_temperature": row["inv_temperature"],
        "loss_mask": layout["loss_mask"],
    }
    if "prompt_seq_ids" in row:
        arguments |= {"seq_ids": layout["seq_ids"], "prompt_seq_ids": layout["prompt_seq_ids"]}
    return arguments


def pack(
    samples: Sequence[Sample],
    weights: Sequence[np.ndarray],
    *,
    max_tokens: int,
    world: int = 1,
    packing: bool = True,
    share_prompts: bool = False,
) -> list[list[PackedRow]]:
    """Rows for each of ``world`` ranks: ``rows_R[rank][i]``, as many on every rank and at least
    one.

    ``weights`` are those of `aggregation.step_weights`, one array [T] per sample. Samples whose
    weights are all zero are left out; every other sample is in exactly one row. ``packing=False``
    gives each sample its own row. ``share_prompts`` lays siblings with the same prompt after one
    copy of it; the gradient is the same.

    *Raises* ValueError for a sample longer than ``max_tokens``, and for a sample whose first token
    carries loss.
    """
    used = [i for i, weight in enumerate(weights) if weight.any()]
    for i in used:
        sample = samples[i]
        if sample.num_tokens > max_tokens:
            raise ValueError(
                f"sample {i} has {sample.num_tokens} tokens and a row holds {max_tokens}; "
                "raise micro_batch_tokens or lower max_seq_len"
            )
        if sample.loss_mask[0]:
            raise ValueError(f"sample {i} carries loss on its first token, which nothing predicts")
        if len(weights[i]) != sample.num_tokens:
            raise ValueError(
                f"sample {i} has {sample.num_tokens} tokens and {len(weights[i])} weights"
            )
    if share_prompts and packing:
        total = sum(samples[i].num_tokens for i in used)
        parts = shared_prompt_parts(samples, used, min(max_tokens, math.ceil(total / world)))
    else:
        parts = [Part((i,), 0, samples[i].num_tokens) for i in used]
    sizes = [part.size for part in parts]
    bins = _bins(sizes, max_tokens, world) if packing else [[index] for index in range(len(parts))]
    rows = [_row(samples, weights, [parts[index] for index in indices]) for indices in bins]
    target = max(1, math.ceil(len(rows) / world)) * world
    rows += [filler_row() for _ in range(target - len(rows))]
    return _deal(rows, world)


def fill(rows_R: Sequence[Sequence[PackedRow]], max_tokens: int) -> float:
    """Tokens in rows over the tokens the rows could hold; 1.0 is perfect."""
    rows = [row for rows in rows_R for row in rows]
    return sum(row.num_tokens for row in rows if not row.is_filler) / (len(rows) * max_tokens)


def shared(
    rows_R: Sequence[Sequence[PackedRow]], samples: Sequence[Sample], weights: Sequence[np.ndarray]
) -> float:
    """Fraction of the samples' tokens saved by sharing prompts; 0 when no prompt is shared."""
    total = sum(
        sample.num_tokens for sample, weight in zip(samples, weights, strict=True) if weight.any()
    )
    in_rows = sum(row.num_tokens for rows in rows_R for row in rows if not row.is_filler)
    return 1 - in_rows / total if total else 0.0


def filler_row() -> PackedRow:
    """A token of weight zero that carries no loss."""
    zero, zero_f32 = np.zeros(1, np.int32), np.zeros(1, np.float32)
    return PackedRow(
        token_ids=zero,
        position_ids=zero,
        seq_ids=zero,
        loss_mask=np.zeros(1, bool),
        sampler_logprobs=zero_f32,
        advantage=zero_f32,
        weight=zero_f32,
        inv_temperature=np.ones(1, np.float32),
        version=np.full(1, NOT_SAMPLED, np.int32),
        sample_indices=np.zeros(0, np.int32),
    )


# --- shared prompts -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Part:
    """The unit that is packed: samples that share their first ``prompt`` tokens, or one sample."""

    members: tuple[int, ...]
    """Positions in the list of samples."""
    prompt: int
    """Tokens of the shared prompt; 0 for a sample alone."""
    size: int
    """Tokens in the row."""


def shared_prompt_parts(
    samples: Sequence[Sample], used: Sequence[int], max_tokens: int
) -> list[Part]:
    """Group the samples ``used`` of a group with equal prompts into parts of at most
    ``max_tokens``.

    A longer sample is a part alone. The prompt is everything before the first token with loss.
    First fit in decreasing order of length gives few parts.
    """
    siblings: dict[tuple[int, float, bytes], list[int]] = {}
    for i in used:
        prompt = samples[i].token_ids[: _prompt_len(samples[i])]
        key = samples[i].group, samples[i].inv_temperature, prompt.tobytes()
        siblings.setdefault(key, []).append(i)
    return [part for members in siblings.values() for part in _parts(samples, members, max_tokens)]


def _prompt_len(sample: Sample) -> int:
    return int(sample.loss_mask.argmax())


def _parts(samples: Sequence[Sample], members: Sequence[int], max_tokens: int) -> Iterator[Part]:
    prompt = _prompt_len(samples[members[0]])
    open_parts: list[tuple[list[int], int]] = []
    for i in sorted(members, key=lambda i: (-samples[i].num_tokens, i)):
        branch = samples[i].num_tokens - prompt
        for index, (branches, size) in enumerate(open_parts):
            if size + branch <= max_tokens:
                open_parts[index] = ([*branches, i], size + branch)
                break
        else:
            open_parts.append(([i], prompt + branch))
    for branches, size in open_parts:
        yield Part(tuple(branches), prompt if len(branches) > 1 else 0, size)


# --- rows -----------------------------------------------------------------------------------------


def _bins(sizes: Sequence[int], max_tokens: int, world: int) -> list[list[int]]:
    """Indices of ``sizes`` by row: first fit decreasing decides how many, then an even distribution
    where it fits."""
    order = sorted(range(len(sizes)), key=lambda i: (-sizes[i], i))
    first_fit: list[list[int]] = []
    room = np.full(len(order), max_tokens, dtype=np.int64)
    for i in order:
        target = int(np.argmax(room[: len(first_fit) + 1] >= sizes[i]))
        if target == len(first_fit):
            first_fit.append([])
        first_fit[target].append(i)
        room[target] -= sizes[i]
    count = math.ceil(len(first_fit) / world) * world
    return _emptiest_first(order, sizes, max_tokens, count) or first_fit


def _emptiest_first(
    order: Sequence[int], sizes: Sequence[int], max_tokens: int, count: int
) -> list[list[int]] | None:
    """Largest first into the emptiest of ``count`` rows; None when a row would overflow. Empty rows
    are left out."""
    bins: list[list[int]] = [[] for _ in range(count)]
    heap = [(0, b) for b in range(count)]
    for i in order:
        tokens, b = heap[0]
        if tokens + sizes[i] > max_tokens:
            return None
        bins[b].append(i)
        heapq.heapreplace(heap, (tokens + sizes[i], b))
    return [members for members in bins if members]


def _row(
    samples: Sequence[Sample], weights: Sequence[np.ndarray], parts: Sequence[Part]
) -> PackedRow:
    spans = [span for part in parts for span in _spans(samples, part)]
    lengths = np.array([end - start for _, start, end, _ in spans])
    seq_ids = np.arange(len(spans), dtype=np.int32)
    prompt_offset = np.array([offset for _, _, _, offset in spans], np.int32)
    components = [COMPONENTS.index(samples[i].component) for i, _, _, _ in spans]

    def concatenated(name: str) -> np.ndarray:
        return np.concatenate([getattr(samples[i], name)[start:end] for i, start, end, _ in spans])

    def repeated(values: Sequence[Any] | np.ndarray, dtype: DTypeLike) -> np.ndarray:
        return np.repeat(np.asarray(values, dtype), lengths)

    weight = np.concatenate([weights[i][start:end] for i, start, end, _ in spans])
    positions = [np.arange(start, end, dtype=np.int32) for _, start, end, _ in spans]
    return PackedRow(
        token_ids=concatenated("token_ids"),
        position_ids=np.concatenate(positions),
        seq_ids=repeated(seq_ids, np.int32),
        loss_mask=concatenated("loss_mask"),
        sampler_logprobs=concatenated("sampler_logprobs"),
        advantage=concatenated("advantages"),
        weight=weight.astype(np.float32),
        inv_temperature=repeated([samples[i].inv_temperature for i, _, _, _ in spans], np.float32),
        version=concatenated("versions"),
        sample_indices=np.array([i for part in parts for i in part.members], np.int32),
        prompt_seq_ids=repeated(seq_ids - prompt_offset, np.int32) if prompt_offset.any() else None,
        component=repeated(components, np.int32) if any(components) else None,
    )


def _spans(samples: Sequence[Sample], part: Part) -> list[tuple[int, int, int, int]]:
    """(sample, start, end, offset to the span of its prompt) of each span of a part, in order."""
    if not part.prompt:
        return [(i, 0, samples[i].num_tokens, 0) for i in part.members]
    branches = [
        (i, part.prompt, samples[i].num_tokens, 1 + number) for number, i in enumerate(part.members)
    ]
    return [(part.members[0], 0, part.prompt, 0), *branches]


def _deal(rows: Sequence[PackedRow], world: int) -> list[list[PackedRow]]:
    """Largest rows first, ``world`` at a time and in alternating direction: equal counts, nearly
    equal tokens.

    The i-th rows of all ranks have similar sizes, which matters where ranks wait for each other in
    every row.
    """
    order = sorted(range(len(rows)), key=lambda i: (-rows[i].num_tokens, i))
    rows_R: list[list[PackedRow]] = [[] for _ in range(world)]
    for start in range(0, len(order), world):
        block = order[start : start + world]
        ranks = range(world) if (start // world) % 2 == 0 else range(world - 1, -1, -1)
        for rank, i in zip(ranks, block, strict=True):
            rows_R[rank].append(rows[i])
    return rows_R
