"""Tinker: sampling and training on a service, environments, rewards and batches here.

    trainer = TinkerTrainer("reverse-text", TinkerConfig(model="Qwen/Qwen3-8B", learning_rate=4e-5))
    trainer.train()

``TinkerClient`` is a client over a service's sampling client, for evaluations and for one's own loop;
``TinkerTrainer`` a whole run on the SDK alone: this package's pipeline, advantages, samples and checkpoints, and the
service's forward, backward and optimizer step; ``cookbook`` gives rollouts to tinker-cookbook's own loop. As a command:
``python -m verifiers_trainer.integrations.tinker @ file.toml``, with the key in TINKER_API_KEY.

Run with SDK 0.24.1 against the server of skyrl 0.3.0 (JAX on a CPU); the hosted service was not.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from verifiers_trainer.integrations.tinker.client import TinkerClient
    from verifiers_trainer.integrations.tinker.cookbook import VerifiersGroupBuilder, to_trajectory_group
    from verifiers_trainer.integrations.tinker.settings import TinkerConfig
    from verifiers_trainer.integrations.tinker.trainer import TinkerTrainer

__all__ = ["TinkerClient", "TinkerConfig", "TinkerTrainer", "VerifiersGroupBuilder", "to_trajectory_group"]

_WHERE = {
    "TinkerClient": "client",
    "TinkerConfig": "settings",
    "TinkerTrainer": "trainer",
    "VerifiersGroupBuilder": "cookbook",
    "to_trajectory_group": "cookbook",
}


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_WHERE[name]}"), name)
