"""The policy: loading, preparing and computing log-probabilities with it, and its files in a
checkpoint."""

from __future__ import annotations

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    """A name of ``loading``: until 0.2.0 that module had the path of this package."""
    if name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("verifiers_trainer.policy.loading"), name)
