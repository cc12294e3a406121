"""A key/value cache for a left-padded batch whose rows join and leave.

Every row ends in the same column, so one forward pass appends one column to all. Rows are dropped,
columns no row uses are cut off on the left, and two batches are joined aligned at their right ends.
Buffers grow geometrically, so most appends copy nothing. It stores attention states only, so it
cannot serve models with recurrent or convolutional state.
"""

from __future__ import annotations

from typing import cast

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

_HEADROOM = 64


class BufferLayer(CacheLayerMixin):
    """A layer: buffers [B, H, capacity, D] of which the first ``length`` columns are in use."""

    is_sliding = False
    keys: torch.Tensor
    values: torch.Tensor

    def __init__(self, **kwargs: object):
        super().__init__()
        self.length = 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.keys = _grown(key_states[:, :, :0], key_states.shape[2])
        self.values = _grown(value_states[:, :, :0], value_states.shape[2])
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ):
        """Append columns [B, H, q, D]; returns views of all columns in use."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        end = self.length + key_states.shape[2]
        if end > self.keys.shape[2]:
            extra = max(end - self.length, self.length // 2)
            self.keys = _grown(self.keys[:, :, : self.length], extra)
            self.values = _grown(self.values[:, :, : self.length], extra)
        self.keys[:, :, self.length : end] = key_states
        self.values[:, :, self.length : end] = value_states
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = (
        get_max_length  # its name in transformers 5.8, which SkyRL 0.3 and verl 0.9 require
    )


class BatchCache(Cache):
    """The layers of a batch; all have the same rows and columns."""

    def __init__(self) -> None:
        super().__init__(layer_class_to_replicate=BufferLayer)

    @property
    def buffers(self) -> list[BufferLayer]:
        return cast(list[BufferLayer], self.layers)

    @property
    def length(self) -> int:
        """Columns in use."""
        return self.get_seq_length()

    @property
    def bytes_per_token(self) -> int:
        """Bytes one column of a row takes over all layers."""
        states = [state for layer in self.buffers for state in (layer.keys, layer.values)]
        return sum(state.shape[1] * state.shape[3] * state.element_size() for state in states)

    def truncate(self, length: int) -> None:
        """Drop all columns after the first ``length``."""
        for layer in self.buffers:
            layer.length = min(layer.length, length)

    def select(self, rows: torch.Tensor, cut_left: int = 0) -> None:
        """Keep ``rows`` (int64, repeats allowed) and drop the first ``cut_left`` columns."""
        for layer in self.buffers:
            layer.keys = _grown(layer.keys[:, :, cut_left : layer.length].index_select(0, rows), 0)
            layer.values = _grown(
                layer.values[:, :, cut_left : layer.length].index_select(0, rows), 0
            )
            layer.length -= cut_left

    def repeat_shifted(self, starts: list[int]) -> None:
        """Repeat the only row ``len(starts)`` times, the n-th moved right by ``starts[n]`` columns.

        The columns do not become more: what moves past the end is dropped, and zeros come in on the
        left.
        """
        for layer in self.buffers:
            length = layer.length
            keys = layer.keys.new_zeros(len(starts), *layer.keys.shape[1:])
            values = layer.values.new_zeros(len(starts), *layer.values.shape[1:])
            for row, start in enumerate(starts):
                keys[row, :, start:length] = layer.keys[0, :, : max(0, length - start)]
                values[row, :, start:length] = layer.values[0, :, : max(0, length - start)]
            layer.keys, layer.values = keys, values

    def append_rows(self, other: BatchCache) -> None:
        """Add the rows of ``other``; the shorter of the two is padded with zeros on the left."""
        for mine, theirs in zip(self.buffers, other.buffers, strict=True):
            length = max(mine.length, theirs.length)
            mine.keys = _joined(mine.keys, mine.length, theirs.keys, theirs.length)
            mine.values = _joined(mine.values, mine.length, theirs.values, theirs.length)
            mine.length = length


def _grown(states: torch.Tensor, extra: int) -> torch.Tensor:
    """A buffer that starts with ``states`` and has room for ``extra`` more columns and some."""
    batch, heads, length, width = states.shape
    buffer = states.new_empty(batch, heads, length + extra + _HEADROOM, width)
    buffer[:, :, :length] = states
    return buffer


def _joined(a: torch.Tensor, a_length: int, b: torch.Tensor, b_length: int) -> torch.Tensor:
    length = max(a_length, b_length)
    buffer = a.new_empty(a.shape[0] + b.shape[0], a.shape[1], length + _HEADROOM, a.shape[3])
    # Padding must be finite: masked attention still multiplies it by zero.
    buffer[: a.shape[0], :, : length - a_length] = 0
    buffer[a.shape[0] :, :, : length - b_length] = 0
    buffer[: a.shape[0], :, length - a_length : length] = a[:, :, :a_length]
    buffer[a.shape[0] :, :, length - b_length : length] = b[:, :, :b_length]
    return buffer
