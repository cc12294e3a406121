"""Sandboxes that need a program or a service: Docker, Podman, gVisor, nsjail, E2B, Modal, Daytona,
Prime Intellect.

    env = vf.PythonEnv(dataset=rows, sandbox="docker")
    env = vf.PythonEnv(dataset=rows, sandbox=verifiers_sandboxes.Docker(options=("--runtime=runsc",)))

Each class is a ``verifiers.sandbox.SandboxBackend``, which ``verifiers`` finds by its name through
an entry point.
"""

from __future__ import annotations

from verifiers_sandboxes.engines import Docker, Podman
from verifiers_sandboxes.gvisor import GVisor
from verifiers_sandboxes.nsjail import Nsjail
from verifiers_sandboxes.services import E2B, Daytona, Modal, PrimeSandboxes

__all__ = ["E2B", "Daytona", "Docker", "GVisor", "Modal", "Nsjail", "Podman", "PrimeSandboxes"]
