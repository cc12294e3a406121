"""A cache for a left-padded batch whose rows join and leave.

Every row ends in the same column, so one forward pass appends one column to all. Rows are dropped,
columns no row uses are cut off on the left, and two batches are joined aligned at their right ends.

Attention stores a column for each token, in buffers that grow geometrically, so most appends copy
nothing. Recurrent and convolutional layers store a state for each row, whatever its length.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from transformers import cache_utils
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache

if TYPE_CHECKING:
    from transformers.configuration_utils import PreTrainedConfig
    from transformers.modeling_utils import PreTrainedModel

_HEADROOM = 64


class RowsLayer:
    """What a layer does when rows move; without any state, nothing."""

    @property
    def bytes_per_token(self) -> int:
        """Bytes of a column of a row."""
        return 0

    @property
    def bytes_per_row(self) -> int:
        """Bytes of a row beside its columns."""
        return 0

    def truncate(self, length: int) -> None:
        """Drop all columns after the first ``length``."""

    def select(self, rows: torch.Tensor, cut_left: int) -> None:
        """Keep ``rows`` (int64, repeats allowed) and drop the first ``cut_left`` columns."""

    def append_rows(self, other: object) -> None:
        """Add the rows of ``other``; the shorter of the two is padded with zeros on the left."""


class NoLayer(RowsLayer, cache_utils.DummyLayer):
    """A layer that stores nothing: an MLP, or attention with the keys of another layer."""


class BufferLayer(RowsLayer, CacheLayerMixin):
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

    @property
    def bytes_per_token(self) -> int:
        if not self.is_initialized:
            return 0
        states = (self.keys, self.values)
        return sum(state.shape[1] * state.shape[3] * state.element_size() for state in states)

    def truncate(self, length: int) -> None:
        self.length = min(self.length, length)

    def select(self, rows: torch.Tensor, cut_left: int) -> None:
        if self.is_initialized:
            columns = slice(None), slice(None), slice(cut_left, self.length)
            self.keys = _grown(self.keys[columns].index_select(0, rows), 0)
            self.values = _grown(self.values[columns].index_select(0, rows), 0)
            self.length -= cut_left

    def append_rows(self, other: Any) -> None:
        if self.is_initialized:
            self.keys = _joined(self.keys, self.length, other.keys, other.length)
            self.values = _joined(self.values, self.length, other.values, other.length)
            self.length = max(self.length, other.length)


class IndexedLayer(BufferLayer):
    """Sparse attention: keys of an index beside those of the attention, [B, T, D]."""

    indexer_keys: torch.Tensor | None = None
    indexer_position_ids: torch.Tensor | None = None

    def update_indexer(self, indexer_key_states: torch.Tensor) -> torch.Tensor:
        """Append keys [B, q, D]; returns those of all columns."""
        before = [] if self.indexer_keys is None else [self.indexer_keys]
        self.indexer_keys = torch.cat([*before, indexer_key_states], dim=1)
        return self.indexer_keys

    def truncate(self, length: int) -> None:
        super().truncate(length)
        if self.indexer_keys is not None:
            self.indexer_keys = self.indexer_keys[:, :length]

    def select(self, rows: torch.Tensor, cut_left: int) -> None:
        super().select(rows, cut_left)
        if self.indexer_keys is not None:
            self.indexer_keys = self.indexer_keys[:, cut_left:].index_select(0, rows)

    def append_rows(self, other: Any) -> None:
        super().append_rows(other)
        if self.indexer_keys is not None and other.indexer_keys is not None:
            lengths = self.indexer_keys.shape[1], other.indexer_keys.shape[1]
            padded = [
                torch.nn.functional.pad(keys, (0, 0, max(lengths) - keys.shape[1], 0))
                for keys in (self.indexer_keys, other.indexer_keys)
            ]
            self.indexer_keys = torch.cat(padded)


class StateLayer(RowsLayer, cache_utils.LinearAttentionLayer):
    """States of each row, [B, ...]: those that the class computes, and copied with the row.

    A pass changes them in place, so it cannot be undone: ``truncate`` does nothing.
    """

    is_croppable = False

    @property
    def states(self) -> list[dict[int, torch.Tensor | None]]:
        return [self.conv_states, self.recurrent_states]

    @property
    def bytes_per_row(self) -> int:
        tensors = [tensor for states in self.states for tensor in states.values()]
        return sum(tensor.nbytes // len(tensor) for tensor in tensors if tensor is not None)

    def select(self, rows: torch.Tensor, cut_left: int) -> None:
        for states in self.states:
            for number, tensor in states.items():
                if tensor is not None:
                    states[number] = tensor.index_select(0, rows)

    def append_rows(self, other: Any) -> None:
        for mine, theirs in zip(self.states, other.states, strict=True):
            for number, tensor in mine.items():
                if tensor is not None:
                    mine[number] = torch.cat([tensor, cast(torch.Tensor, theirs[number])])


class HybridLayer(StateLayer, BufferLayer):
    """Attention and states in one layer."""

    is_compileable = False

    def __init__(self, number_of_states: int = 1):
        CacheLayerMixin.__init__(self)
        StateLayer.__init__(self, number_of_states=number_of_states)
        self.length = 0

    def lazy_initialization(self, *keys_and_values: Any, **states: Any) -> None:
        """Two tensors of keys and values, or by name those of a state."""
        kind = BufferLayer if keys_and_values else StateLayer
        kind.lazy_initialization(self, *keys_and_values, **states)

    def truncate(self, length: int) -> None:
        BufferLayer.truncate(self, length)

    def select(self, rows: torch.Tensor, cut_left: int) -> None:
        StateLayer.select(self, rows, cut_left)
        BufferLayer.select(self, rows, cut_left)

    def append_rows(self, other: object) -> None:
        StateLayer.append_rows(self, other)
        BufferLayer.append_rows(self, other)


_STORED_BY: dict[type, type[RowsLayer]] = {
    cache_utils.DynamicLayer: BufferLayer,
    cache_utils.DynamicSlidingWindowLayer: BufferLayer,  # the mask is the window
    cache_utils.DynamicIndexedLayer: IndexedLayer,
    cache_utils.LinearAttentionLayer: StateLayer,
    cache_utils.LinearAttentionAndFullAttentionLayer: HybridLayer,
    cache_utils.LinearAttentionAndSlidingWindowAttentionLayer: HybridLayer,
    cache_utils.DummyLayer: NoLayer,
}
"""A layer of a model's own cache -> what stores it here."""


class BatchCache(Cache):
    """The layers of a batch; all have the same rows and columns.

    Without ``layers`` every layer that a model updates is attention.
    """

    def __init__(self, layers: Sequence[RowsLayer] | None = None) -> None:
        # by name: the cache of a model's own class is a base beside this one and takes no arguments
        if layers is None:
            Cache.__init__(self, layer_class_to_replicate=BufferLayer)
        else:
            Cache.__init__(self, layers=cast(Any, list(layers)))
        self.length = 0
        """Columns in use, which the forward pass counts."""

    @property
    def rows_layers(self) -> list[RowsLayer]:
        return cast(list[RowsLayer], self.layers)

    @property
    def buffers(self) -> list[BufferLayer]:
        return [layer for layer in self.rows_layers if isinstance(layer, BufferLayer)]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.length

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.length + query_length, 0

    @property
    def bytes_per_token(self) -> int:
        """Bytes one column of a row takes over all layers."""
        return sum(layer.bytes_per_token for layer in self.rows_layers)

    @property
    def bytes_per_row(self) -> int:
        """Bytes of a row's states over all layers."""
        return sum(layer.bytes_per_row for layer in self.rows_layers)

    def truncate(self, length: int) -> None:
        """Drop all columns after the first ``length``; states stay as they are."""
        self.length = min(self.length, length)
        for layer in self.rows_layers:
            layer.truncate(length)

    def select(self, rows: torch.Tensor, cut_left: int = 0) -> None:
        """Keep ``rows`` (int64, repeats allowed) and drop the first ``cut_left`` columns."""
        self.length -= cut_left
        for layer in self.rows_layers:
            layer.select(rows, cut_left)

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
        self.length = max(self.length, other.length)
        for mine, theirs in zip(self.rows_layers, other.rows_layers, strict=True):
            mine.append_rows(theirs)


class LinearCache(BatchCache):
    """The cache of MiniMax, whose linear attention keeps its states beside the layers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear_cache: dict[int, torch.Tensor] = {}

    def get_linear_cache(self, layer_idx: int) -> torch.Tensor | None:
        """The state [B, H, D, D] of a layer; None before its first pass."""
        return self.linear_cache.get(layer_idx)

    def set_linear_cache(self, layer_idx: int, linear_cache: torch.Tensor) -> None:
        self.linear_cache[layer_idx] = linear_cache

    @property
    def bytes_per_row(self) -> int:
        return sum(state.nbytes // len(state) for state in self.linear_cache.values())

    def select(self, rows: torch.Tensor, cut_left: int = 0) -> None:
        super().select(rows, cut_left)
        for layer_idx, state in self.linear_cache.items():
            self.linear_cache[layer_idx] = state.index_select(0, rows)

    def append_rows(self, other: BatchCache) -> None:
        super().append_rows(other)
        for layer_idx, state in cast(LinearCache, other).linear_cache.items():
            self.linear_cache[layer_idx] = torch.cat([self.linear_cache[layer_idx], state])


def cache_of(model: PreTrainedModel) -> Callable[[], BatchCache] | str:
    """What makes an empty cache of ``model``; a name of its layers if there is none for them."""
    config = model.config.get_text_config()
    if config.model_type == "minimax":
        from transformers.models.minimax.modeling_minimax import MiniMaxCache

        return type("MiniMaxBatchCache", (LinearCache, MiniMaxCache), {})
    if not has_states(model):
        return BatchCache
    try:
        theirs = DynamicCache(config=config).layers
    except (AttributeError, KeyError, TypeError, ValueError):
        return ", ".join(sorted(kinds_of_layers(config)))
    if unknown := {type(layer).__name__ for layer in theirs if type(layer) not in _STORED_BY}:
        return ", ".join(sorted(unknown))
    makers: list[Callable[[], RowsLayer]] = []
    for layer in theirs:
        states = getattr(layer, "number_of_states", None)
        options = {} if states is None else {"number_of_states": states}
        makers.append(functools.partial(_STORED_BY[type(layer)], **options))
    return lambda: BatchCache([make() for make in makers])


_ATTENTION_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}


def kinds_of_layers(config: PreTrainedConfig) -> set[str]:
    return set(getattr(config, "layer_types", None) or ["full_attention"])


def has_states(model: PreTrainedModel) -> bool:
    """Whether a layer of ``model`` keeps something other than keys and values of attention."""
    kinds = kinds_of_layers(model.config.get_text_config())
    return bool(getattr(model, "_is_stateful", False)) or not kinds <= _ATTENTION_LAYERS


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
