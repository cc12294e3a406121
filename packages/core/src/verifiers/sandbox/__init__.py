"""Sandboxes: code that a model wrote runs in one of these, never beside the run itself.

    backend = await backend_for("auto")           # bubblewrap, else sandlock, else SandboxUnavailable
    sandbox = await backend.open(SandboxSpec(packages=("numpy",)))

``auto`` never falls back to something weaker; ``unsafe_subprocess`` isolates nothing and must be asked for by name.
"""

from __future__ import annotations

from verifiers.sandbox.choice import BACKENDS, backend_for, register
from verifiers.sandbox.protocol import Availability, ExecResult, Sandbox, SandboxBackend, SandboxSpec

__all__ = [
    "BACKENDS",
    "Availability",
    "ExecResult",
    "Sandbox",
    "SandboxBackend",
    "SandboxSpec",
    "backend_for",
    "register",
]
