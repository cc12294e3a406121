"""Test doubles that are part of the product: scripted clients, a fake server, a byte tokenizer,
recorded conversations.

    from verifiers.testing import ScriptedClient
    results = env.evaluate(ScriptedClient(["42"]), model="scripted")

The project's own suite tests through them and mocks no client.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from verifiers.runtime.failpoints import failpoint
    from verifiers.testing.connection import Behaviour, Hit
    from verifiers.testing.differences import Difference
    from verifiers.testing.replaying import Replay, replay
    from verifiers.testing.scripted import (
        RecordingClient,
        ReplayClient,
        ScriptedClient,
        scripted_logprobs,
    )
    from verifiers.testing.server import FakeServer
    from verifiers.testing.tokenizer import ByteTokenizer
    from verifiers.testing.units import make_state, run_rollout_sync

_HOME = {
    "Behaviour": "testing.connection",
    "ByteTokenizer": "testing.tokenizer",
    "Difference": "testing.differences",
    "FakeServer": "testing.server",
    "Hit": "testing.connection",
    "RecordingClient": "testing.scripted",
    "Replay": "testing.replaying",
    "ReplayClient": "testing.scripted",
    "ScriptedClient": "testing.scripted",
    "failpoint": "runtime.failpoints",
    "make_state": "testing.units",
    "replay": "testing.replaying",
    "run_rollout_sync": "testing.units",
    "scripted_logprobs": "testing.scripted",
}
__all__ = [
    "Behaviour",
    "ByteTokenizer",
    "Difference",
    "FakeServer",
    "Hit",
    "RecordingClient",
    "Replay",
    "ReplayClient",
    "ScriptedClient",
    "failpoint",
    "make_state",
    "replay",
    "run_rollout_sync",
    "scripted_logprobs",
]


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})


if not TYPE_CHECKING:  # so that a misspelt name is an error

    def __getattr__(name: str) -> object:
        if name not in _HOME:
            raise AttributeError(f"module 'verifiers.testing' has no attribute {name!r}")
        return getattr(importlib.import_module(f"verifiers.{_HOME[name]}"), name)
