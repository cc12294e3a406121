"""Sandboxes: isolated environments for model-written code.

    backend = await backend_for("auto")           # bubblewrap, else sandlock, else SandboxUnavailable
    sandbox = await backend.open(SandboxSpec(packages=("numpy",)))

``auto`` never falls back to weaker isolation; ``unsafe_subprocess`` isolates nothing and must be
requested by name. Other distributions provide further backends, by entry points of the group
``verifiers.sandboxes``.
"""

from __future__ import annotations

from verifiers.sandbox.choice import BACKENDS, backend_for, register
from verifiers.sandbox.protocol import (
    Availability,
    ExecResult,
    Sandbox,
    SandboxBackend,
    SandboxSpec,
)

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
