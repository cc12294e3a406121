"""Inference engines that the trainer samples from. Importing this package does not import torch."""

from __future__ import annotations

import importlib
from typing import Any

from verifiers_trainer.engines.protocol import Engine

_LAZY = {
    "EmbeddedEngine": "verifiers_trainer.engines.embedded.engine",
    "VLLMEngine": "verifiers_trainer.engines.vllm.engine",
}

__all__ = ["EmbeddedEngine", "Engine", "VLLMEngine"]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
