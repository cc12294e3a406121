"""What a way of moving weights is: prepare once in the trainer, then bring one server after another up to date.

The caller holds the weights still while any of this runs. Deadlines are absolute, on the monotonic clock.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Protocol

from verifiers_trainer.engines.vllm.control import Server

VERSIONS_PER_RUN = 2**20


@dataclass(frozen=True, slots=True)
class Deadline:
    """A moment by which something must have happened."""

    at: float

    @classmethod
    def after(cls, timeout_s: float) -> Deadline:
        return cls(time.monotonic() + timeout_s)

    @property
    def left_s(self) -> float:
        """Seconds until then; at least a hundredth, so that the call that exceeds it says what it waited for."""
        return max(0.01, self.at - time.monotonic())

    @property
    def is_over(self) -> bool:
        return time.monotonic() >= self.at


class WeightSync(Protocol):
    """One way of moving weights."""

    @property
    def name(self) -> str:
        """As in the setting ``weight_sync``."""

    @property
    def keeps_files(self) -> bool:
        """Whether a push sends what ``prepare`` wrote, and not the weights as they are by then."""

    @property
    def names_weights(self) -> bool:
        """Whether requests name the weights they want, so that an answer proves which ones gave it."""

    def prepare(self, version: int) -> None:
        """Make the present weights available as policy ``version``."""

    def push(self, server: Server, version: int, deadline: Deadline) -> str:
        """Bring ``server`` to ``version``, from whatever it has; returns the name that requests must ask for.

        Raises ``WeightSyncError``, after which the server may be half way.
        """

    def holds(self, server: Server, deadline: Deadline) -> bool:
        """Whether ``server`` has weights of this run."""

    def retire(self, servers: list[Server], version: int) -> None:
        """Free what no request can need any more, now that ``version`` is served."""

    def close(self, servers: list[Server]) -> None:
        """Free everything, as far as the servers still answer."""


def label_of(run: int, version: int) -> int:
    """How a server is told whose weights it has: a number that no other run uses.

    >>> label_of(3, 7), run_and_version(label_of(3, 7))
    (3145735, (3, 7))
    """
    return run * VERSIONS_PER_RUN + version


def run_and_version(label: int) -> tuple[int, int]:
    """The run and the policy version that a label stands for."""
    return divmod(label, VERSIONS_PER_RUN)


def has_label_of(server: Server, run: int, deadline: Deadline) -> bool:
    """Whether ``server`` says that its weights are a run's."""
    answer = server.call("GET", "/weight_info", stage="asking whose weights it has", timeout_s=deadline.left_s)
    label = str((answer or {}).get("weight_version"))
    return label.isdigit() and run_and_version(int(label))[0] == run
