"""How many threads torch's CPU kernels use: one for a small model, whose kernels are shorter than
waking another.

torch keeps the number for each thread that has computed already, so it is set where the computation
is.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from transformers.modeling_utils import PreTrainedModel

SMALL_PARAMETERS = 2_000_000
"""Largest model, in parameters, that runs on one thread of a CPU where nothing says otherwise."""


def default_threads(model: PreTrainedModel) -> int:
    """Threads of torch's CPU kernels for ``model``; those of the process where it is large, or the
    user chose them."""
    if model.device.type != "cpu" or "OMP_NUM_THREADS" in os.environ:
        return torch.get_num_threads()
    is_small = sum(parameter.numel() for parameter in model.parameters()) <= SMALL_PARAMETERS
    return 1 if is_small else torch.get_num_threads()


@contextmanager
def threads_for(model: PreTrainedModel) -> Iterator[None]:
    """Compute with ``default_threads(model)`` in this thread; the earlier number afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(default_threads(model))
    try:
        yield
    finally:
        torch.set_num_threads(before)
