"""A forward pass over a left-padded batch, with the inputs that each kind of model and attention
expects.

A pass can be aborted between two layers, so that a weight update does not wait for a long pass. The
cache is restored and the whole pass is repeated: no pass mixes weights.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import Cache
from transformers.modeling_layers import GradientCheckpointingLayer

from verifiers.errors import ConfigError
from verifiers_trainer.engines.embedded.kv_cache import (
    BatchCache,
    cache_of,
    has_states,
    kinds_of_layers,
)
from verifiers_trainer.engines.lora import LoraWeights, RowAdapters
from verifiers_trainer.engines.processing import Images, processing_of

if TYPE_CHECKING:
    from transformers.modeling_utils import PreTrainedModel


NOTHING: Mapping[str, torch.Tensor] = {}


class Interrupted(Exception):
    """The forward pass was aborted."""


class ForwardPass:
    """Calls ``model`` on the next columns of a batch; returns the logits of the last column.

    ``autocast_dtype`` computes in a lower precision than the weights, as mixed-precision training
    does: all but the head of ``model``, which is changed to run in the precision of its weight, as
    the trainer's does. ``give_up`` is called before the parts of each layer; the pass raises
    Interrupted once it returns True.

    Raises ConfigError for a model whose class has a cache that is not known here.
    """

    def __init__(
        self,
        model: Any,
        autocast_dtype: torch.dtype | None = None,
        give_up: Callable[[], bool] = lambda: False,
    ):
        new_cache = cache_of(model)
        parameters = inspect.signature(type(model).forward).parameters
        names = [name for name in ("past_key_values", "cache_params") if name in parameters]
        if isinstance(new_cache, str) or not names:
            kind = f"{new_cache} layers" if isinstance(new_cache, str) else "a state of its own"
            raise ConfigError(
                f"the embedded engine cannot serve {type(model).__name__} ({kind}); use a vLLM"
                " server"
            )
        self.new_cache = new_cache
        """Makes an empty cache."""
        self.has_states = has_states(model)
        """Whether passes change states in place: they cannot be undone."""
        self._cache_name = names[0]
        self._takes_positions = "position_ids" in parameters
        self.name = type(model).__name__
        self.dtype: torch.dtype = autocast_dtype or next(model.parameters()).dtype
        self._model = model
        self._autocast_dtype = autocast_dtype
        # A 4D mask skips transformers' mask building in every step; it is equivalent for plain
        # attention only.
        self.takes_ready_mask = takes_ready_mask(model)
        self._options = {"logits_to_keep": 1} if model._supports_logits_to_keep() else {}
        if autocast_dtype is not None:
            keep_precision(model.get_output_embeddings())
        if (head := model.get_output_embeddings()) is not None:
            # torch multiplies a slice of the hidden states by one copy of a frozen weight per row:
            # with SmolLM2-135M under LoRA and eight prompts, half of the prefill's time.
            head.register_forward_pre_hook(
                lambda module, arguments: (arguments[0].contiguous(), *arguments[1:])
            )
        self._row_adapters = RowAdapters(model)
        self._give_up = give_up
        self.is_interruptible = True
        for part in interruptible_parts(model):
            part.register_forward_pre_hook(self._check)

    def __call__(
        self,
        ids_BT: torch.Tensor,
        cache: BatchCache,
        starts_B: torch.Tensor | None,
        deltas_B: torch.Tensor | None = None,
        arguments: Mapping[str, torch.Tensor] = NOTHING,
    ) -> torch.Tensor:
        """Logits [B, V] of the last of the columns ``ids_BT``, which are appended to ``cache``.

        ``starts_B`` is the first column of each row that is not padding; None when there is no
        padding. ``deltas_B``: how far the positions of a row are from its columns, None for 0.
        ``arguments`` are those of a prompt with images. Raises Interrupted, with ``cache``
        unchanged.
        """
        options = {**self._options, **arguments}
        return self._append(ids_BT, cache, starts_B, options, deltas_B)[:, -1]

    @contextlib.contextmanager
    def with_adapters(self, adapters: Sequence[LoraWeights | None]) -> Iterator[None]:
        """In the block, row i of a pass is computed with ``adapters[i]``."""
        if not any(adapters):
            yield
            return
        with self._row_adapters.of(adapters):
            yield

    def of_images(
        self, ids_1T: torch.Tensor, images: Images
    ) -> tuple[dict[str, torch.Tensor], int]:
        """(The further arguments of a prompt with images, how far the positions of what follows it
        are from its columns)."""
        processing = processing_of(self._model)
        assert processing is not None
        arguments = processing.arguments(self._model, ids_1T, images)
        positions = arguments.get("position_ids")
        return arguments, 0 if positions is None else int(positions.max()) + 1 - ids_1T.shape[1]

    def every_position(self, ids_BT: torch.Tensor, cache: BatchCache) -> torch.Tensor:
        """Logits [B, T, V] of all columns ``ids_BT``, without padding, appended to ``cache``."""
        return self._append(ids_BT, cache, None, {})

    def _check(self, module: torch.nn.Module, arguments: object) -> None:
        if self.is_interruptible and self._give_up():
            raise Interrupted

    def _append(
        self,
        ids_BT: torch.Tensor,
        cache: BatchCache,
        starts_B: torch.Tensor | None,
        options: Mapping[str, object],
        deltas_B: torch.Tensor | None = None,
    ) -> torch.Tensor:
        past, width = cache.length, ids_BT.shape[1]
        columns_T = torch.arange(past, past + width, device=ids_BT.device)
        positions_BT, mask = columns_T.unsqueeze(0), None
        if starts_B is not None:
            positions_BT = (columns_T - starts_B.unsqueeze(1)).clamp_(min=0)
            mask = self._mask(columns_T, past + width, starts_B)
        if deltas_B is not None:
            positions_BT = positions_BT + deltas_B.unsqueeze(1)
        # a pass over states is repeated on an empty cache, or not interrupted
        was_interruptible = self.is_interruptible
        self.is_interruptible = was_interruptible and not (self.has_states and past)
        try:
            logits_BTV = self._logits(ids_BT, positions_BT, mask, cache, options)
        except Interrupted:
            cache.truncate(past)
            raise
        finally:
            self.is_interruptible = was_interruptible
        cache.length = past + width
        return logits_BTV

    def without_cache(self, ids_BT: torch.Tensor) -> torch.Tensor:
        """Logits [B, T, V] of all columns ``ids_BT``, without padding, in one pass that stores
        nothing."""
        positions_BT = torch.arange(ids_BT.shape[1], device=ids_BT.device).unsqueeze(0)
        return self._logits(ids_BT, positions_BT, None, None, {})

    def one_column(
        self, token_B: torch.Tensor, position_B: torch.Tensor, mask: torch.Tensor, cache: Cache
    ) -> torch.Tensor:
        """Logits [B, V] after a token of each row, which stands at its own position; ``mask`` is
        bool [B, 1, 1, columns]. Nothing on the host depends on a tensor's values."""
        inputs = token_B.unsqueeze(1), position_B.unsqueeze(1)
        return self._logits(*inputs, mask, cache, self._options)[:, -1]

    def _logits(
        self,
        ids_BT: torch.Tensor,
        positions_BT: torch.Tensor,
        mask: torch.Tensor | None,
        cache: Cache | None,
        options: Mapping[str, object],
    ) -> torch.Tensor:
        arguments: dict[str, object] = {"use_cache": cache is not None}
        if cache is not None:
            arguments[self._cache_name] = cache
        if self._takes_positions:
            arguments["position_ids"] = positions_BT
        arguments |= options
        lower = self._autocast_dtype is not None
        # No cached casts: they must not outlive a weight update, nor be memory of a CUDA graph.
        with torch.autocast(ids_BT.device.type, self._autocast_dtype, lower, cache_enabled=False):
            logits_BTV: torch.Tensor = self._model(
                input_ids=ids_BT, attention_mask=mask, **arguments
            ).logits
        return logits_BTV

    def _mask(self, columns_T: torch.Tensor, total: int, starts_B: torch.Tensor) -> torch.Tensor:
        keys_K = torch.arange(total, device=columns_T.device)
        valid_BK = keys_K >= starts_B.unsqueeze(1)
        if not self.takes_ready_mask:
            return valid_BK.to(torch.int64)
        if len(columns_T) == 1:
            return valid_BK[:, None, None, :]
        causal_TK = keys_K <= columns_T.unsqueeze(1)
        # A padding column attends to itself: an empty attention row would become NaN and spread.
        itself_TK = keys_K == columns_T.unsqueeze(1)
        return ((valid_BK[:, None, :] & causal_TK) | itself_TK).unsqueeze(1)


def keep_precision(head: Any) -> None:
    """Make ``head`` run outside autocast in the precision of its weight: logits of bfloat16 are
    coarse.

    Measured with SmolLM2-135M: 0.026 nats per token between sampler and trainer with one head in
    bfloat16, the other in float32; 0.020 with both in float32. *Source*: MiniMax-M1, arXiv
    2506.13585.
    """
    stock = head.forward

    def forward(hidden: torch.Tensor, *args: object, **keywords: object) -> torch.Tensor:
        with torch.autocast(hidden.device.type, enabled=False):
            logits: torch.Tensor = stock(hidden.to(head.weight.dtype), *args, **keywords)
            return logits

    head.forward = forward


def attends_to_everything(model: PreTrainedModel) -> bool:
    """Whether every layer has full attention, without a window or recurrent state."""
    config = model.config.get_text_config()
    sliding = getattr(config, "sliding_window", None) is not None and getattr(
        config, "use_sliding_window", True
    )
    is_full = kinds_of_layers(config) == {"full_attention"} and not sliding
    return is_full and not has_states(model)


def takes_ready_mask(model: PreTrainedModel) -> bool:
    """Whether a 4D mask of what a token attends to is all that ``model`` needs to know of it."""
    return (
        model.config.get_text_config()._attn_implementation == "sdpa"
        and attends_to_everything(model)
        and getattr(model, "_supports_attention_backend", False)
    )


def interruptible_parts(model: PreTrainedModel) -> list[torch.nn.Module]:
    """The modules of the decoder layers with submodules (attention, experts, MLP), and the head."""
    layers = [
        module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)
    ]
    parts = [part for layer in layers for part in layer.children() if any(part.children())]
    head = model.get_output_embeddings()
    return [*parts, *([head] if head is not None else [])]
