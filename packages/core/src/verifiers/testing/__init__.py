"""Test doubles that are part of the product: scripted clients, a fake server, a byte tokenizer,
recorded conversations.

    from verifiers.testing import ScriptedClient
    results = env.evaluate(ScriptedClient(["42"]), model="scripted")

The project's own suite tests through them and mocks no client.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOME = {
    "Behaviour": "connection",
    "FakeServer": "server",
    "Hit": "connection",
    "ByteTokenizer": "tokenizer",
    "RecordingClient": "scripted",
    "ReplayClient": "scripted",
    "ScriptedClient": "scripted",
    "make_state": "units",
    "run_rollout_sync": "units",
    "scripted_logprobs": "scripted",
}
__all__ = sorted([*_HOME, "failpoint"])


def __getattr__(name: str) -> Any:
    if name == "failpoint":
        return importlib.import_module("verifiers.runtime.failpoints").failpoint
    if name not in _HOME:
        raise AttributeError(f"module 'verifiers.testing' has no attribute {name!r}")
    return getattr(importlib.import_module(f"verifiers.testing.{_HOME[name]}"), name)
