"""Low-rank adapters of several policies over one model, in one forward pass.

A layer ``y = W x`` of a row that has an adapter gives ``y + scale * B (A x)`` (LoRA, arXiv
2106.09685, equation 3), with the A and B of that row's adapter; a row without one gives ``y``. The
base is neither changed nor copied, so the number of adapters is bounded by their own size alone.

Sampler and trainer compute with the same wrapper, each on a module of its own over the same
parameters. Rows of one pass that have different adapters are multiplied adapter by adapter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from verifiers.errors import ConfigError


@dataclass(frozen=True, slots=True)
class LowRank:
    """The adapter of one layer."""

    a_RI: Tensor
    """[rank, inputs]."""
    b_OR: Tensor
    """[outputs, rank]."""

    def __call__(self, x_NI: Tensor) -> Tensor:
        """B (A x), [..., outputs]."""
        return (x_NI.to(self.a_RI.dtype) @ self.a_RI.T) @ self.b_OR.T


@dataclass(frozen=True, slots=True, eq=False)
class LoraWeights:
    """An adapter; compared by identity."""

    layers: Mapping[str, LowRank]
    """Name of a layer in the model without adapters -> its part."""
    scale: float
    """alpha / rank."""
    version: int | None = 0
    """The policy version, which labels what is sampled with it; None: that of the generation loop,
    of weights that are updated in place."""

    @property
    def tensors(self) -> list[Tensor]:
        """A and B of every layer."""
        return [tensor for layer in self.layers.values() for tensor in (layer.a_RI, layer.b_OR)]

    @property
    def num_bytes(self) -> int:
        """Bytes of the weights."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors)


class RowAdapters:
    """Gives each row of a pass through ``model`` the adapter that ``of`` names for it.

    A layer is wrapped when an adapter first covers it; a model without adapters stays as it is.
    Used by one thread.
    """

    def __init__(self, model: nn.Module):
        self._model = model
        self._wrapped: set[str] = set()
        self._rows: list[tuple[LoraWeights, Tensor | None]] = []
        """The adapters of the present pass, each with its rows, int64; None for every row."""
        self._num_rows = 0

    @contextmanager
    def of(self, adapters: Sequence[LoraWeights | None]) -> Iterator[None]:
        """In the block, row i of a pass has ``adapters[i]``."""
        rows: dict[LoraWeights, list[int]] = {}
        for row, adapter in enumerate(adapters):
            if adapter is not None:
                rows.setdefault(adapter, []).append(row)
        device, self._num_rows = next(self._model.parameters()).device, len(adapters)
        for adapter in rows:
            self._cover(adapter)
        self._rows = [
            (adapter, None)
            if len(its_rows) == len(adapters)
            else (adapter, torch.tensor(its_rows, device=device))
            for adapter, its_rows in rows.items()
        ]
        try:
            yield
        finally:
            self._rows = []

    def _cover(self, adapter: LoraWeights) -> None:
        for name in adapter.layers.keys() - self._wrapped:
            layer = self._model.get_submodule(name)
            # the instance's forward, not a hook: who calls a head in chunks calls its forward
            layer.forward = self._adapted(name, layer.forward)
            self._wrapped.add(name)

    def _adapted(self, name: str, stock: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def forward(x: Tensor, *arguments: object, **keywords: object) -> Tensor:
            y = stock(x, *arguments, **keywords)
            for adapter, rows in self._rows:
                if (layer := adapter.layers.get(name)) is None:
                    continue
                if rows is None:
                    y = (y + layer(x) * adapter.scale).to(y.dtype)
                    continue
                if len(x) != self._num_rows:
                    raise ConfigError(
                        f"the layer {name} computes {len(x)} rows of a batch of {self._num_rows}, so"
                        " that they cannot have adapters of their own: leave the layer out"
                    )
                of_rows = (y[rows] + layer(x[rows]) * adapter.scale).to(y.dtype)
                y = y.index_copy(0, rows, of_rows)
            return y

        return forward
