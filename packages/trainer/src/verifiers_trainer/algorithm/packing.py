"""Pack samples into rows of token arrays: equally many on every rank, of nearly equal size, without
padding.

Samples are laid end to end into rows of at most ``max_tokens``, first fit in decreasing order; the
number of rows is rounded up to a multiple of the ranks and the samples are dealt again, largest
first into the emptiest row. Ranks without a row get a filler: one token of weight zero that runs a
real forward and backward pass, because sharded training hangs when ranks run different numbers of
them. A sample never spans rows and is never cut.

The rollouts of a group begin with the same prompt, and often have more in common. With
``share_prompts`` equal tokens after equal tokens are one node of a tree (``prefix_tree``) that is
computed once, and it is nodes that fill a row. Every sample is in its row from its first to its
last token all the same: only the forward pass knows about nodes.

``samples`` decides which tokens carry loss, ``aggregation`` how much each weighs.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import numpy as np

from verifiers_trainer.algorithm.prefix_tree import Tree, node_ids, trees
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

    Two samples that begin with [1, 7], of whose seven tokens five are computed::

        PackedRow(token_ids=[1, 7, 2, 1, 7, 9, 4], position_ids=[0, 1, 2, 0, 1, 2, 3], seq_ids=[0, 0, 0, 1, 1, 1, 1],
                  node_ids=[0, 1, 2, 0, 1, 3, 4], ..., sample_indices=[3, 5])
    """

    token_ids: np.ndarray  # int32 [T]
    position_ids: np.ndarray  # int32 [T], from 0 in every sample
    seq_ids: np.ndarray  # int32 [T], from 0: which sample of the row
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
    # int32 [T], from 0: the node of the prefix tree that computes a token; None: each its own
    node_ids: np.ndarray | None = None
    component: np.ndarray | None = None  # int32 [T]: index in COMPONENTS; None = 0 throughout
    # uint8 [bytes]: the files of the images of the row's only sample, end to end
    images: np.ndarray | None = None
    image_ends: np.ndarray | None = None  # int32 [images]: where each ends in `images`
    # int32 [1]: the adapter that computes the row; None: there is one, or none
    adapter: np.ndarray | None = None
    # int32 [samples of the row]: the teacher that scores each; None = 0 throughout
    teachers: np.ndarray | None = None
    # int32 [P]: what teachers read in place of the first prompts of the samples, end to end; None:
    # what the policy read
    teacher_prompts: np.ndarray | None = None
    # int32 [samples of the row, 2]: how many of its first tokens that replaces, and where it ends in
    # `teacher_prompts`
    teacher_bounds: np.ndarray | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_computed(self) -> int:
        """Tokens of the forward pass, which computes common prefixes once."""
        return self.num_tokens if self.node_ids is None else int(self.node_ids.max()) + 1

    @property
    def is_filler(self) -> bool:
        return not len(self.sample_indices)

    def to_tensors(self, device: torch.device | str = "cpu") -> dict[str, torch.Tensor]:
        """The arrays [T] as tensors on ``device``, integers as int64; without those of whole
        samples and absent fields."""
        import torch

        tensors = {}
        for field in fields(self):
            array = getattr(self, field.name)
            if array is not None and field.name not in OF_SAMPLES:
                tensor = torch.from_numpy(array)
                if array.dtype == np.int32:
                    tensor = tensor.long()
                tensors[field.name] = sent(tensor, device)
        return tensors


OF_SAMPLES = ("sample_indices", "teachers", "teacher_prompts", "teacher_bounds")
"""Fields of a row that say something of whole samples; `teacher_view` reads them on the host."""


def sent(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """``tensor`` of the host on ``device``, without waiting for the work that CUDA has queued: the
    driver copies what is not pinned before it returns, which others do not promise."""
    return tensor.to(device, non_blocking=str(device).startswith("cuda"))


def sample_spans(row: PackedRow) -> list[tuple[int, int, int]]:
    """(sample, start, end) of each sample of a row, as `pack` numbers them."""
    if row.is_filler:
        return []
    bounds = [*np.flatnonzero(row.position_ids == 0).tolist(), row.num_tokens]
    spans = itertools.pairwise(bounds)
    return [(int(sample), *span) for sample, span in zip(row.sample_indices, spans, strict=True)]


IN_LAYOUT = ("node_ids", "images", "image_ends", "adapter")
"""Fields of a row that the forward pass reads on the host, where a row has them."""


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
    arguments |= {name: layout[name] for name in IN_LAYOUT if name in row}
    return arguments


def image_arrays(images: Sequence[bytes]) -> dict[str, np.ndarray]:
    """Files of images as the fields of a row; nothing of none."""
    if not images:
        return {}
    ends = np.cumsum([len(content) for content in images], dtype=np.int32)
    return {"images": np.frombuffer(bytearray(b"".join(images)), np.uint8), "image_ends": ends}


def image_files(images: np.ndarray | None, image_ends: np.ndarray | None) -> tuple[bytes, ...]:
    """The files of ``image_arrays``."""
    if images is None or image_ends is None:
        return ()
    content = images.tobytes()
    bounds = itertools.pairwise([0, *image_ends.tolist()])
    return tuple(content[start:end] for start, end in bounds)


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
    gives each sample its own row. With ``share_prompts`` a row holds ``max_tokens`` nodes of prefix
    trees, which may be the tokens of more samples; the gradient is the same. A sample with images
    has its own row, and so have the others then.

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
    packing = packing and not any(samples[i].images for i in used)
    if share_prompts and packing:
        total = sum(samples[i].num_tokens for i in used)
        parts = trees(samples, used, min(max_tokens, math.ceil(total / world)))
    else:
        parts = [Tree((i,), (0,), samples[i].num_tokens) for i in used]
    sizes = [part.size for part in parts]
    bins = _bins(sizes, max_tokens, world) if packing else [[index] for index in range(len(parts))]
    rows = [_row(samples, weights, [parts[index] for index in indices]) for indices in bins]
    target = max(1, math.ceil(len(rows) / world)) * world
    rows += [filler_row() for _ in range(target - len(rows))]
    return _deal(rows, world)


def fill(rows_R: Sequence[Sequence[PackedRow]], max_tokens: int) -> float:
    """Tokens in rows over the tokens the rows could hold; 1.0 is perfect."""
    rows = [row for rows in rows_R for row in rows]
    return sum(row.num_computed for row in rows if not row.is_filler) / (len(rows) * max_tokens)


def shared(
    rows_R: Sequence[Sequence[PackedRow]], samples: Sequence[Sample], weights: Sequence[np.ndarray]
) -> float:
    """Fraction of the samples' tokens saved by computing common prefixes once; 0 without any."""
    total = sum(
        sample.num_tokens for sample, weight in zip(samples, weights, strict=True) if weight.any()
    )
    computed = sum(row.num_computed for rows in rows_R for row in rows if not row.is_filler)
    return 1 - computed / total if total else 0.0


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
    samples: Sequence[Sample], weights: Sequence[np.ndarray], parts: Sequence[Tree]
) -> PackedRow:
    members = [i for part in parts for i in part.members]
    in_row = [samples[i] for i in members]
    lengths = [sample.num_tokens for sample in in_row]
    common = [num for part in parts for num in part.common]
    components = [COMPONENTS.index(sample.component) for sample in in_row]

    def concatenated(name: str) -> np.ndarray:
        return np.concatenate([getattr(sample, name) for sample in in_row])

    def repeated(values: Sequence[float] | np.ndarray, dtype: DTypeLike) -> np.ndarray:
        return np.repeat(np.asarray(values, dtype), lengths)

    return PackedRow(
        token_ids=concatenated("token_ids"),
        position_ids=np.concatenate([np.arange(length, dtype=np.int32) for length in lengths]),
        seq_ids=repeated(np.arange(len(members)), np.int32),
        loss_mask=concatenated("loss_mask"),
        sampler_logprobs=concatenated("sampler_logprobs"),
        advantage=concatenated("advantages"),
        weight=np.concatenate([weights[i] for i in members]).astype(np.float32),
        inv_temperature=repeated([sample.inv_temperature for sample in in_row], np.float32),
        version=concatenated("versions"),
        sample_indices=np.array(members, np.int32),
        node_ids=node_ids(lengths, common) if any(common) else None,
        component=repeated(components, np.int32) if any(components) else None,
        adapter=None if in_row[0].adapter is None else np.array([in_row[0].adapter], np.int32),
        **image_arrays([file for sample in in_row for file in sample.images]),
        **_of_teachers(in_row),
    )


def _of_teachers(samples: Sequence[Sample]) -> dict[str, np.ndarray]:
    """What teachers of the samples read, as the fields of a row; nothing where there is one that
    reads what the policy read."""
    fields = {}
    if any(sample.teacher for sample in samples):
        fields["teachers"] = np.array([sample.teacher for sample in samples], np.int32)
    prompts = [sample.teacher_prompt for sample in samples]
    if any(prompt is not None for prompt in prompts):
        none = np.zeros(0, np.int32)
        replaced = [
            0 if prompt is None else sample.num_prompt
            for sample, prompt in zip(samples, prompts, strict=True)
        ]
        ends = np.cumsum([0 if prompt is None else len(prompt) for prompt in prompts])
        parts = [none if prompt is None else prompt for prompt in prompts]
        fields["teacher_prompts"] = np.concatenate(parts).astype(np.int32)
        fields["teacher_bounds"] = np.stack([replaced, ends], axis=1).astype(np.int32)
    return fields


def _deal(rows: Sequence[PackedRow], world: int) -> list[list[PackedRow]]:
    """Largest rows first, ``world`` at a time and in alternating direction: equal counts, nearly
    equal tokens.

    The i-th rows of all ranks have similar sizes, which matters where ranks wait for each other in
    every row.
    """
    order = sorted(range(len(rows)), key=lambda i: (-rows[i].num_computed, i))
    rows_R: list[list[PackedRow]] = [[] for _ in range(world)]
    for start in range(0, len(order), world):
        block = order[start : start + world]
        ranks = range(world) if (start // world) % 2 == 0 else range(world - 1, -1, -1)
        for rank, i in zip(ranks, block, strict=True):
            rows_R[rank].append(rows[i])
    return rows_R
