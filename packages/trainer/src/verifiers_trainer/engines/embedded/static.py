"""Generation in slots of fixed addresses, for accelerators: a step is one CUDA graph.

Where the padded loop launches the kernels of every layer from Python for each token, this loop
replays a graph. Row n of the batch is slot n of a cache whose memory never moves; its position is
data, so a row joins by a copy of its prompt's keys and leaves by no copy at all. The step has no
branch that depends on a value on the device, and runs as it is where nothing is captured.

Prompts, sampling, pauses and the bookkeeping of rows are those of ``padded``. The host may be a
step ahead: the next step is launched before the tokens of the last are read. A row that has ended
meanwhile computes a token that is dropped.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from verifiers_trainer.engines.embedded.batch import Batch
from verifiers_trainer.engines.embedded.kv_cache import BatchCache, BufferLayer
from verifiers_trainer.engines.embedded.model_inputs import (
    ForwardPass,
    attends_to_everything,
    takes_ready_mask,
)
from verifiers_trainer.engines.embedded.padded import Computed, PaddedGenerator
from verifiers_trainer.engines.embedded.sampling import Drawn, SamplingTable, TokenCounts, draw
from verifiers_trainer.engines.processing import placeholder_ids
from verifiers_trainer.engines.requests import Generation, GenerationRequest, SamplingParams

if TYPE_CHECKING:
    from transformers.modeling_utils import PreTrainedModel

log = logging.getLogger(__name__)

_SMALLEST_ROWS, _SMALLEST_COLUMNS = 8, 128
"""Of a captured step."""
_MOST_CAPTURED = 256
"""Captured steps that are kept: each has memory of its own on the device."""
_NEUTRAL = SamplingParams(max_tokens=1)

Step = Callable[[], Drawn]
Capture = Callable[[Step], tuple[Callable[[], object], Drawn]]
"""Records a step: (what replays it, the tensors that a replay fills)."""


def not_covered(model: PreTrainedModel) -> str | None:
    """Why ``model`` cannot be decoded in slots; None when it can."""
    config, name = model.config.get_text_config(), type(model).__name__
    if not (config._attn_implementation.startswith("flash_attention") or takes_ready_mask(model)):
        return f"{name} has other attention than full attention by SDPA"
    if placeholder_ids(model.config):
        return f"{name} takes images"
    if not attends_to_everything(model):
        return f"{name} has layers without full attention"
    if any(getattr(config, key, None) for key in ("num_experts", "num_local_experts")):
        return f"{name} chooses experts on the host"
    if len({parameter.device for parameter in model.parameters()}) > 1:
        return f"{name} is spread over several devices"
    if getattr(model, "is_loaded_in_4bit", False):
        return f"{name} has layers in four bits"
    if any(isinstance(part, torch.nn.Dropout) and part.p for part in model.modules()):
        return f"the dropout of {name} may draw while a step is captured, which torch refuses"
    return None


def bucket(size: int, smallest: int, largest: int) -> int:
    """The next size for which a step is captured: a quarter more than ``size`` at most.

    >>> [bucket(size, 128, 2000) for size in (1, 128, 129, 513, 1100, 1800)]
    [128, 128, 256, 640, 1280, 2000]
    """
    step = max(smallest, 1 << max(0, (size - 1).bit_length() - 3))
    return min(largest, -(-size // step) * step)


class LowWeights:
    """Copies of a model's float32 weights in the precision of autocast, which would otherwise cast
    all of them in every step: 6 bytes of memory traffic more per parameter and token.

    The head keeps its precision, and so do embeddings and norms.
    """

    def __init__(self, model: PreTrainedModel, dtype: torch.dtype):
        weights = {id(parameter): parameter for parameter in model.parameters()}
        self.model = copy.deepcopy(model, {**weights})
        head = set(self.model.get_output_embeddings().modules())
        layers = [
            layer
            for layer in self.model.modules()
            if isinstance(layer, torch.nn.Linear)
            and layer not in head
            and layer.weight.dtype == torch.float32
        ]
        self._sources = [layer.weight.detach() for layer in layers]
        self._copies = [source.to(dtype) for source in self._sources]
        for layer, weight in zip(layers, self._copies, strict=True):
            layer.weight = torch.nn.Parameter(weight, requires_grad=False)
        self._stamp = -1

    def refresh(self, stamp: int) -> None:
        """Copy again, unless it was done with this ``stamp``."""
        if stamp != self._stamp:
            torch._foreach_copy_(self._copies, self._sources)
            self._stamp = stamp


class SlotLayer(CacheLayerMixin):
    """Keys and values of a layer, [rows, H, capacity, D]; a pass writes one column of each row."""

    is_sliding = False
    keys: torch.Tensor
    values: torch.Tensor

    def __init__(self, like: BufferLayer, rows: int, capacity: int):
        super().__init__()
        # zeros, not empty: masked attention multiplies by zero, which garbage survives
        self.keys, self.values = (
            states.new_zeros(rows, states.shape[1], capacity, states.shape[3])
            for states in (like.keys, like.values)
        )
        self.is_initialized = True
        self.index: tuple[Any, ...] = ()
        """Where a pass writes: rows, all heads, the column of each row."""
        self.columns = 0
        """Columns that a pass reads."""

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """No-op: the memory is there from the beginning."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write [B, H, 1, D]; returns views of the columns to read."""
        self.keys[self.index] = key_states[:, :, 0]
        self.values[self.index] = value_states[:, :, 0]
        window = slice(len(key_states)), slice(None), slice(self.columns)
        return self.keys[window], self.values[window]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.columns, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length  # as in ``kv_cache``


class Slots:
    """The cache, and the state that a step reads and changes.

    rows: the slots. capacity: most columns of a slot. vocabulary: tokens that the model knows.
    capture: records steps, one for each size of batch and length; None runs them as they are.
    """

    def __init__(
        self,
        forward: ForwardPass,
        like: BatchCache,
        rows: int,
        capacity: int,
        vocabulary: int,
        capture: Capture | None,
    ):
        self.rows, self.capacity, self.vocabulary = rows, capacity, vocabulary
        self._forward, self._capture = forward, capture
        self._captures = capture is not None
        self._layers = [SlotLayer(layer, rows, capacity) for layer in like.buffers]
        self._cache = Cache(layers=[*self._layers])
        self.device = self._layers[0].keys.device
        self._state = torch.zeros(3, rows, dtype=torch.int64, device=self.device)
        """Of each row: its last token, the position of that, and the number of sampled tokens."""
        self._columns = torch.arange(capacity, device=self.device)
        self._slots = torch.arange(rows, device=self.device)
        self.has_diverged = False
        """Whether a slot may hold what is no number, which masked attention spreads: from then on a
        row clears its slot."""
        self._tables: dict[tuple[object, ...], tuple[SamplingTable, TokenCounts | None]] = {}
        self._graphs: dict[tuple[object, ...], tuple[Callable[[], object], Drawn]] = {}

    def padded(self, rows: int) -> int:
        """The rows that a step of ``rows`` computes."""
        return rows if self._capture is None else bucket(rows, _SMALLEST_ROWS, self.rows)

    def seat(self, cache: BatchCache, starts_B: torch.Tensor, first: int) -> None:
        """Copy the rows of a left-padded ``cache`` into the slots from ``first`` on."""
        width, rows = cache.length, slice(first, first + len(starts_B))
        if width > self.capacity:
            raise ValueError(f"a prompt of {width} tokens is longer than a slot, {self.capacity}")
        columns_BT = (starts_B.unsqueeze(1) + self._columns[:width]).clamp_(max=width - 1)
        index = torch.arange(len(starts_B), device=self.device).unsqueeze(1), columns_BT
        for layer, theirs in zip(self._layers, cache.buffers, strict=True):
            for slots, states in ((layer.keys, theirs.keys), (layer.values, theirs.values)):
                moved = states[:, :, :width].transpose(1, 2)[index].transpose(1, 2)
                slots[rows, :, :width] = moved
                if self.has_diverged:
                    slots[rows, :, width:] = 0

    def move(self, sources: np.ndarray, targets: np.ndarray, longest: int) -> None:
        """Copy rows of at most ``longest`` columns to other slots."""
        columns = self.capacity if self.has_diverged else longest
        from_, to = (torch.from_numpy(rows).to(self.device) for rows in (sources, targets))
        for layer in self._layers:
            for slots in (layer.keys, layer.values):
                slots[to, :, :columns] = slots[from_, :, :columns]

    def load(
        self, state_3B: np.ndarray, table: SamplingTable, counts: TokenCounts | None
    ) -> tuple[SamplingTable, TokenCounts | None]:
        """Set the state of the rows; returns the table and the counts that steps are to use."""
        self._state[:, : state_3B.shape[1]] = torch.from_numpy(state_3B).to(self.device)
        if self._capture is None:
            return table, counts
        if len(self._graphs) > _MOST_CAPTURED:
            self._graphs.clear()
            self._tables.clear()
        in_use = self._tables.setdefault(table.form, (table, counts))
        if in_use[0] is not table:
            in_use[0].copy_from(table)
            if in_use[1] is not None and counts is not None:
                in_use[1].copy_from(counts)
        return in_use

    def step(
        self, rows: int, longest: int, table: SamplingTable, counts: TokenCounts | None
    ) -> Drawn:
        """The next token of the first ``rows`` slots, none of which needs more than ``longest``
        columns; a later step overwrites it where steps are captured."""
        if not self._captures:
            return self._run(rows, longest, table, counts)
        assert self._capture is not None
        columns = bucket(longest, _SMALLEST_COLUMNS, self.capacity)
        key = (columns, table.form)
        if key not in self._graphs:
            changed = [self._state, *([] if counts is None else [counts.output_BV])]
            before = [tensor.clone() for tensor in changed]
            self._forward.is_interruptible = False
            try:
                self._graphs[key] = self._capture(lambda: self._run(rows, columns, table, counts))
            except RuntimeError as error:
                log.warning(
                    "steps of this model cannot be captured, which makes them slower: %s",
                    error.__context__ or error,  # the end of a failed capture fails as well
                )
                self._captures = False
                self._graphs.clear()
            finally:
                self._forward.is_interruptible = True
                for tensor, value in zip(changed, before, strict=True):
                    tensor.copy_(value)
            if not self._captures:
                return self._run(rows, longest, table, counts)
        replay, drawn = self._graphs[key]
        replay()
        return drawn

    def _run(
        self, rows: int, columns: int, table: SamplingTable, counts: TokenCounts | None
    ) -> Drawn:
        token_B, position_B, counter_B = self._state[:, :rows]
        mask = (self._columns[:columns] <= position_B.unsqueeze(1))[:, None, None]
        for layer in self._layers:
            layer.columns = columns
            layer.index = self._slots[:rows], slice(None), position_B
        logits_BV = self._forward.one_column(token_B, position_B, mask, self._cache)
        drawn = draw(logits_BV, table, counter_B, counts)
        if counts is not None:
            counts.add(drawn.tokens)
        token_B.copy_(drawn.tokens)
        counter_B.add_(1)
        position_B.add_(1).clamp_(max=self.capacity - 1)  # of rows that have ended
        return drawn


class SlotBatch(Batch):
    """Rows that decode in slots: row n of the transcript is slot n."""

    def __init__(self, slots: Slots, joined: Batch):
        self._slots = slots
        self.transcript = joined.transcript
        slots.seat(joined.cache, joined.starts, 0)
        self._refresh()

    def compact(self) -> None:
        """Move the last living rows to the slots of ended rows."""
        alive = self.transcript.alive
        rows = np.arange(self.living)
        holes, last = np.flatnonzero(~alive[rows]), len(rows) + np.flatnonzero(alive[len(rows) :])
        self._slots.move(last, holes, self._longest)
        rows[holes] = last
        self.transcript.select(rows)
        self._refresh()

    def join(self, other: Batch) -> None:
        self._slots.seat(other.cache, other.starts, self.rows)
        self.transcript.extend(other.transcript)
        self._refresh()

    def launch(self, ahead: int) -> Drawn:
        """Compute the next token of every row, ``ahead`` tokens after those in the transcript."""
        rows = self._slots.padded(self.rows)
        drawn = self._slots.step(rows, self._longest + ahead, self.table, self._counts)
        return drawn.each(lambda part: part[: self.rows])

    @property
    def _longest(self) -> int:
        """Tokens of the longest living row."""
        lengths_B = self._lengths + self.transcript.counts
        return int(lengths_B[self.transcript.alive].max())

    def _refresh(self) -> None:
        transcript, rows = self.transcript, self._slots.padded(self.rows)
        requests, device = transcript.requests, self._slots.device
        self._lengths = np.array([len(request.prompt_ids) for request in requests])
        params = [request.params for request in requests] + [_NEUTRAL] * (rows - self.rows)
        table, counts = SamplingTable.build(params, device), None
        outputs = transcript.outputs()
        if table.penalties is not None:
            nothing = [np.empty(0, np.int32)] * (rows - self.rows)
            prompts = [request.prompt_ids for request in requests] + nothing
            counts = TokenCounts(prompts, outputs + nothing, self._slots.vocabulary, device)
        last = [tokens[-1] for tokens in outputs]
        positions = self._lengths + transcript.counts - 1
        state_3B = np.stack([last, positions, transcript.counts]).astype(np.int64)
        self.table, self._counts = self._slots.load(state_3B, table, counts)


class _Ahead(NamedTuple):
    """A step whose tokens were not read yet."""

    drawn: Drawn
    version: int
    is_ready: Any = None
    """An event after which ``drawn`` is on the host; None: it is."""


class StaticGenerator(PaddedGenerator):
    """The loop of ``PaddedGenerator`` over slots.

    max_seq_len: most tokens of a slot; ``kv_bytes`` are divided into slots of that size. capture:
    how steps are captured, None for not at all. is_ahead: whether a step is launched before the
    tokens of the last are read.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        max_seq_len: int,
        capture: Capture | None,
        is_ahead: bool,
        **options: Any,
    ):
        dtype = options.get("autocast_dtype")
        self._low = None if dtype is None else LowWeights(model, dtype)
        super().__init__(model if self._low is None else self._low.model, **options)
        self._max_seq_len, self._capture, self._is_ahead = max_seq_len, capture, is_ahead
        self._pending: _Ahead | None = None

    def submit(self, request: GenerationRequest) -> None:
        if request.adapter is not None:  # a captured step has the adapters of its capture
            raise ValueError("slots compute one policy for all: use mode padded for adapters")
        super().submit(request)

    def _prepare(self, cache: BatchCache) -> None:
        super()._prepare(cache)
        fitting = self._kv_bytes // (self._max_seq_len * self._token_bytes)
        rows, size = max(1, min(self._max_rows, fitting)), self._max_seq_len
        while True:
            try:
                self._slots = Slots(
                    self._forward, cache, rows, size, self._vocabulary, self._capture
                )
                break
            except torch.OutOfMemoryError:  # another process has taken what was free
                if rows == 1:
                    raise
                rows //= 2
        self._max_rows, gigabytes = rows, rows * size * self._token_bytes / 1e9
        log.info("%d rows of %d tokens decode together: %.2g GB", rows, size, gigabytes)

    def _compute(self, passes: Callable[[], Computed]) -> tuple[Computed, int]:
        def on_present_weights() -> Computed:
            if self._low is not None:
                self._low.refresh(self._gate.num_pauses)
            return passes()

        return super()._compute(on_present_weights)

    def _opened(self, joined: Batch) -> Batch:
        self._pending = None  # of a batch whose rows have all ended
        return SlotBatch(self._slots, joined)

    def _decode(self, batch: Batch) -> None:
        assert isinstance(batch, SlotBatch)
        before, self._pending = self._pending, None
        drawn, version = self._compute(lambda: batch.launch(int(before is not None)))
        launched = _Ahead(drawn, version) if self._capture is None else _on_host(drawn, version)
        if self._is_ahead:
            self._pending = launched
        else:
            before = launched
        if before is not None:
            finished = self._finished_by(before)
            self._settle()
            self._report(finished)

    def _drain(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None and self._batch is not None:
            self._report(self._finished_by(pending))

    def _finished_by(self, step: _Ahead) -> list[Generation]:
        """The completions that ``step`` has finished."""
        assert self._batch is not None
        if step.is_ready is not None:
            step.is_ready.synchronize()
        finished = self._batch.transcript.append(step.drawn, step.version)
        self._slots.has_diverged |= any(generation.error for generation in finished)
        return finished

    def _fail(self, joining: list[GenerationRequest], error: str) -> None:
        self._pending = None
        super()._fail(joining, error)


def _on_host(drawn: Drawn, version: int) -> _Ahead:
    """``drawn`` on its way to the host: the next step overwrites it on the device."""
    if drawn.tokens.device.type != "cuda":
        return _Ahead(drawn.each(torch.clone), version)

    def copied(part: torch.Tensor) -> torch.Tensor:
        pinned = torch.empty_like(part, device="cpu", pin_memory=True)
        return pinned.copy_(part, non_blocking=True)

    copies, is_ready = drawn.each(copied), torch.cuda.Event()
    is_ready.record()
    return _Ahead(copies, version, is_ready)


def cuda_graphs(device: torch.device) -> Capture:
    """Records steps as CUDA graphs, which share their memory: one is replayed at a time.

    They are replayed in the stream that the trainer's kernels are in, so that the device computes
    a step before the update that the host starts after it.
    """
    pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(device)

    def record(step: Step) -> tuple[Callable[[], object], Drawn]:
        usual, graph = torch.cuda.current_stream(device), torch.cuda.CUDAGraph()
        try:
            stream.wait_stream(usual)
            with torch.cuda.stream(stream):  # kernels load and choose their algorithms
                step()
                step()
            usual.wait_stream(stream)
            # the training thread may allocate meanwhile
            with torch.cuda.graph(graph, pool, stream, capture_error_mode="thread_local"):
                drawn = step()
        finally:
            torch.cuda.set_stream(usual)  # a capture that fails leaves its own in force
        return graph.replay, drawn

    return record
