"""Reinforcement learning of language models in ``verifiers`` environments.

    import verifiers as vf
    trainer = vf.RLTrainer("builtin:tiny", "reverse-text", vf.RLConfig(batch_size=64, rollouts_per_example=8))
    trainer.train()

Names are imported on first use: ``import verifiers_trainer`` loads no torch. ``__init__.pyi`` lists
them for type checkers and editors.
"""

from __future__ import annotations

import importlib
import logging

from verifiers.legacy import moved
from verifiers_trainer.legacy import MOVED

__version__ = "0.2.0"

_HOME = {
    "GRPOConfig": "grpo",
    "GRPOTrainer": "grpo",
    "RLTrainer": "trainer",
    "RLConfig": "settings.config",
    "get_model": "policy.loading",
    "get_tokenizer": "policy.loading",
    "get_model_and_tokenizer": "policy.loading",
    "grpo_defaults": "grpo",
    "lora_defaults": "grpo",
}

__all__ = sorted(_HOME)

moved.register("verifiers_trainer", MOVED)
# transformers imports bitsandbytes wherever it is installed, which warns that it lacks a kernel
# that ``policy.quantization`` does not use
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'verifiers_trainer' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"verifiers_trainer.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
