"""The interface of a weight transfer: prepare once in the trainer, then push to one server after
another.

The caller must not change the weights during these calls. Deadlines are absolute, on the monotonic
clock.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Protocol

from verifiers_trainer.engines.vllm.control import Server

VERSIONS_PER_RUN = 2**20


@dataclass(frozen=True, slots=True)
class Deadline:
    """A point in time on the monotonic clock."""

    at: float

    @classmethod
    def after(cls, timeout_s: float) -> Deadline:
        return cls(time.monotonic() + timeout_s)

    @property
    def left_s(self) -> float:
        """Seconds until then; at least 0.01, so that the call that exceeds it raises
        its own error."""
        return max(0.01, self.at - time.monotonic())

    @property
    def is_over(self) -> bool:
        return time.monotonic() >= self.at


class WeightSync(Protocol):
    """A weight transfer method."""

    @property
    def name(self) -> str:
        """As in the setting ``weight_sync``."""

    @property
    def keeps_files(self) -> bool:
        """Whether a push sends the files of ``prepare``, not the weights at the time
        of the push."""

    @property
    def names_weights(self) -> bool:
        """Whether requests name the weights, so that a response identifies them."""

    def prepare(self, version: int) -> None:
        """Make the present weights available as policy ``version``."""

    def push(self, server: Server, version: int, deadline: Deadline) -> str:
        """Push ``version`` to ``server``, whatever weights it has; return the model name for
        requests.

        Raises ``WeightSyncError``, after which the server's weights may be incomplete.
        """

    def holds(self, server: Server, deadline: Deadline) -> bool:
        """Whether ``server`` has weights of this run."""

    def retire(self, servers: list[Server], version: int) -> None:
        """Free versions that no request can need once ``version`` is served."""

    def close(self, servers: list[Server]) -> None:
        """Free all resources, also on the servers that respond."""


class LabelledSync:
    """Base of the transfers of all weights, which servers label with the run and the version."""

    keeps_files = False
    names_weights = False

    def __init__(self, run: int, model: str):
        self._run, self._model = run, model

    def prepare(self, version: int) -> None:
        """No-op: weights are read when they are sent."""

    def holds(self, server: Server, deadline: Deadline) -> bool:
        return has_label_of(server, self._run, deadline)

    def retire(self, servers: list[Server], version: int) -> None:
        """No-op: older versions use no resources."""


def post(server: Server, path: str, body: object, stage: str, deadline: Deadline) -> Any:
    """The answer of a control route. Raises ``WeightSyncError`` that names the stage."""
    return server.call("POST", path, body, stage=stage, timeout_s=deadline.left_s)


def label_of(run: int, version: int) -> int:
    """The label of a version's weights on a server, unique to the run.

    >>> label_of(3, 7), run_and_version(label_of(3, 7))
    (3145735, (3, 7))
    """
    return run * VERSIONS_PER_RUN + version


def run_and_version(label: int) -> tuple[int, int]:
    """The run and the policy version of a label."""
    return divmod(label, VERSIONS_PER_RUN)


def has_label_of(server: Server, run: int, deadline: Deadline) -> bool:
    """Whether the label of ``server``'s weights belongs to ``run``."""
    answer = server.call(
        "GET", "/weight_info", stage="asking whose weights it has", timeout_s=deadline.left_s
    )
    label = str((answer or {}).get("weight_version"))
    return label.isdigit() and run_and_version(int(label))[0] == run
