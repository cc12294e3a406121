"""Base of the backends that count as available once code in a session of theirs has answered."""

from __future__ import annotations

from abc import ABC, abstractmethod

from verifiers.errors import SandboxError
from verifiers.sandbox.host.session import Session
from verifiers.sandbox.protocol import Availability, SandboxSpec


class ProbedBackend(ABC):
    """A ``SandboxBackend`` but for ``capabilities``."""

    name: str
    probe = """
import os
with open("/proc/self/status") as file:
    status = {name: value.strip() for name, _, value in (line.partition(":") for line in file)}
assert int(status["CapEff"], 16) == 0, "the code has capabilities"
assert status.get("NoNewPrivs", "1") == "1", "the code can gain privileges"
assert not os.path.exists(HOST_FILE), "a file of the host is visible"
os.getpid() < 100, os.listdir("/sandbox/home")
"""
    """Run in a session, with the path of a file of the host as ``HOST_FILE``."""
    probe_value = "(True, [])"
    """What it must answer."""
    probe_s = 20.0
    probe_spec = SandboxSpec()
    failure = "a session was not isolated"
    answered = "a session in {} answered"

    def __init__(self) -> None:
        self._availability: Availability | None = None

    @abstractmethod
    async def open(self, spec: SandboxSpec) -> Session:
        """As that of a ``SandboxBackend``."""

    async def available(self) -> Availability:
        if self._availability is None:
            self._availability = await self._probe()
        return self._availability

    async def _probe(self) -> Availability:
        code = self.probe.replace("HOST_FILE", repr(__file__))
        try:
            sandbox = await self.open(self.probe_spec)
            try:
                result = await sandbox.exec(code, timeout_s=self.probe_s)
            finally:
                await sandbox.close()
        except (SandboxError, OSError) as error:
            return Availability(False, str(error))
        if result.value != self.probe_value:
            return Availability(False, f"{self.failure}: {result.error or result.value}")
        return Availability(True, self.answered.format(self.name))
