"""Transfer weights through a folder of safetensors files that servers reload; needs a shared disk
only.

    pause -> reload_weights -> reset the prefix cache -> label the new weights -> resume

A server whose update fails stays paused: its weights may be incomplete.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from verifiers.errors import WeightSyncError
from verifiers_trainer.engines.vllm.control import Server
from verifiers_trainer.engines.vllm.weights.protocol import (
    Deadline,
    LabelledSync,
    label_of,
    new_folder,
    post,
)


def pause(server: Server, deadline: Deadline) -> None:
    """Pause the server between two tokens; requests in flight wait and continue later."""
    query = {"mode": "keep", "clear_cache": "true"}
    server.call(
        "POST", "/pause", stage="pausing generation", timeout_s=deadline.left_s, query=query
    )


def forget_prefixes(server: Server, deadline: Deadline) -> None:
    """Drop every cached prefix, also of requests in flight: older weights computed it."""
    stage = "resetting the prefix cache"
    answer = server.call(
        "POST",
        "/reset_prefix_cache",
        stage=stage,
        timeout_s=deadline.left_s,
        query={"reset_running_requests": "true"},
    )
    if isinstance(answer, dict) and answer.get("success") is False:
        reason = "refused, so that new requests would be answered from old prefixes"
        raise WeightSyncError(
            f"{stage}: {server.url} {reason}", stage=stage, response=str(answer), url=server.url
        )


def resume(server: Server, deadline: Deadline) -> None:
    """Resume the server. Raises ``WeightSyncError`` if it is not paused: it was restarted."""
    stage = "resuming generation"
    answer = server.call("GET", "/is_paused", stage=stage, timeout_s=deadline.left_s)
    if isinstance(answer, dict) and answer.get("is_paused") is False:
        reason = "is not paused, so it was restarted during the update"
        raise WeightSyncError(
            f"{stage}: {server.url} {reason}", stage=stage, response=str(answer), url=server.url
        )
    server.call("POST", "/resume", stage=stage, timeout_s=deadline.left_s)


def name_weights(server: Server, version: int, label: int, deadline: Deadline) -> None:
    """Set the label of the server's weights."""
    stage = f"naming the weights of version {version}"
    post(server, "/update_weight_version", {"new_version": str(label)}, stage, deadline)


class ReloadSync(LabelledSync):
    """Folders ``weights-v<N>`` below ``folder``; ``write`` puts the whole model into a folder."""

    keeps_files = True

    def __init__(self, folder: Path, run: int, model: str, write: Callable[[Path], None]):
        super().__init__(run, model)
        self.folder, self._write = folder.absolute(), write
        self._current: Path | None = None

    def prepare(self, version: int) -> None:
        """Write the model's files. Raises ``WeightSyncError`` when the folder cannot be written."""
        target = self.folder / f"weights-v{version}"
        with new_folder(target, f"writing the weights of version {version}") as temporary:
            self._write(temporary)
        before, self._current = self._current, target
        if before is not None and before != target:
            shutil.rmtree(before, ignore_errors=True)

    def push(self, server: Server, version: int, deadline: Deadline) -> str:
        pause(server, deadline)
        call = {"method": "reload_weights", "kwargs": {"weights_path": str(self._current)}}
        stage = f"reloading the weights of version {version}"
        post(server, "/collective_rpc", call | {"timeout": deadline.left_s}, stage, deadline)
        forget_prefixes(server, deadline)
        name_weights(server, version, label_of(self._run, version), deadline)
        resume(server, deadline)
        return self._model

    def close(self, servers: list[Server]) -> None:
        if self._current is not None:
            shutil.rmtree(self._current, ignore_errors=True)
            self._current = None
