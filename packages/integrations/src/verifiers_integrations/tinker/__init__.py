"""Tinker: sample and train on a service; environments, rewards and batches run locally.

    trainer = TinkerTrainer("reverse-text", TinkerConfig(model="Qwen/Qwen3-8B", learning_rate=4e-5))
    trainer.train()

``TinkerClient`` is a client over a sampling client of the service, for evaluations and custom
loops; ``TinkerTrainer`` is a complete run: pipeline, advantages, samples and checkpoints of this
package, and forward, backward and optimizer step of the service; ``cookbook`` converts rollouts for
the loop of tinker-cookbook. As a command: ``python -m verifiers_integrations.tinker @ file.toml``,
with the key in TINKER_API_KEY.

Tested with SDK 0.24.1 and 0.25.0 against the servers of skyrl 0.3.0 and 0.4.0 (JAX on a CPU), and
with 0.38.0 against ``vf-serve --tinker``; not against the hosted service.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from verifiers_integrations.tinker.client import TinkerClient
    from verifiers_integrations.tinker.cookbook import VerifiersGroupBuilder, to_trajectory_group
    from verifiers_integrations.tinker.settings import TinkerConfig
    from verifiers_integrations.tinker.trainer import TinkerTrainer

__all__ = [
    "TinkerClient",
    "TinkerConfig",
    "TinkerTrainer",
    "VerifiersGroupBuilder",
    "to_trajectory_group",
]

_MODULES = {
    "TinkerClient": "client",
    "TinkerConfig": "settings",
    "TinkerTrainer": "trainer",
    "VerifiersGroupBuilder": "cookbook",
    "to_trajectory_group": "cookbook",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
