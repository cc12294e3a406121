"""The interface of a weight transfer: prepare once in the trainer, then push to one server after
another.

The caller must not change the weights during these calls. Deadlines are absolute, on the monotonic
clock.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from verifiers.errors import WeightSyncError
from verifiers.storage.files import share_modes, sync_folder
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
    def keeps_files(self) -> bool:
        """Whether a push sends the files of ``prepare``, not the weights at its time."""

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
        stage = "asking whose weights it has"
        answer = server.call("GET", "/weight_info", stage=stage, timeout_s=deadline.left_s)
        label = str((answer or {}).get("weight_version"))
        return version_in_label(label, self._run) is not None

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


def version_in_label(label: str, run: int) -> int | None:
    """The policy version in a server's label; None for another run's label.

    >>> version_in_label("3145735", run=3), version_in_label("3145735", run=4), version_in_label("default", run=3)
    (7, None, None)
    """
    if not label.isdigit():
        return None
    owner, version = run_and_version(int(label))
    return version if owner == run else None


@contextmanager
def new_folder(target: Path, stage: str) -> Iterator[Path]:
    """A temporary folder to write files into; at the end of the block it replaces ``target``.

    Raises ``WeightSyncError`` when it cannot be written.
    """
    temporary = target.with_name(f".tmp-{target.name}")
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        yield temporary
        share_modes(temporary.rglob("*"))  # the server may be another user's
        shutil.rmtree(target, ignore_errors=True)
        os.replace(temporary, target)
        sync_folder(target.parent)
    except OSError as error:
        raise WeightSyncError(
            f"{stage} to {target.parent}: {error}", stage=stage, path=str(target.parent)
        ) from error
