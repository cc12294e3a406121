"""``torch_compile``: the decoder layers are compiled in place, each as a region of its own.

A layer's call is replaced by a compiled one that is switched by state, below what wraps the model:
autocast, gradient checkpointing, the log-probability forward. The embedded engine's copy of the
model and the checks run the layers as they are written.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

if TYPE_CHECKING:
    from verifiers_trainer.settings.config import RLConfig

log = logging.getLogger(__name__)


@contextmanager
def compiled_layers(model: nn.Module, config: RLConfig) -> Iterator[None]:
    """Compile the layers for the block, if ``config.torch_compile``: sizes are variables, so that
    rows of other lengths are no reason to compile again.

    A layer is compiled when a row of a form first reaches it: with or without a mask or a gradient.
    """
    layers = [part for part in model.modules() if isinstance(part, GradientCheckpointingLayer)]
    layers = layers if config.torch_compile else []
    backend, mode = config.torch_compile_backend or "inductor", config.torch_compile_mode
    for layer in layers:
        layer.compile(dynamic=True, backend=backend, mode=mode)
    if layers:
        log.info(
            "torch_compile: %d layers are compiled by %s in the first steps, which take longer",
            *(len(layers), backend),
        )
    try:
        yield
    finally:
        for layer in layers:
            layer._compiled_call_impl = None


@contextmanager
def as_written(model: nn.Module) -> Iterator[None]:
    """Run compiled layers uncompiled for the block: hooks inside them are called."""
    compiled = [part for part in model.modules() if part._compiled_call_impl is not None]
    calls = [part._compiled_call_impl for part in compiled]
    for part in compiled:
        part._compiled_call_impl = None
    try:
        yield
    finally:
        for part, call in zip(compiled, calls, strict=True):
            part._compiled_call_impl = call
