"""Adapter files in separate folders, which servers load under names that are never reused.

A server keys its prefix cache by the adapter's name, so a reused name would sample from old
weights. Requests name their adapter: those in flight finish on it, and a turn has exactly one
version. A restarted server responds with an unknown-model error.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

from verifiers.errors import WeightSyncError
from verifiers.runtime.bounded import open_file
from verifiers.storage.files import sync_folder
from verifiers_trainer.engines.vllm.control import Server
from verifiers_trainer.engines.vllm.weights.protocol import Deadline, new_folder, post

log = logging.getLogger(__name__)

UNLOAD_S = 10.0
LOADED_ALREADY = "already been loaded"


class LoraDirSync:
    """Folders ``policy-<run>-v<N>`` below ``folder``; ``write`` puts the adapter of the model into
    a folder.

    ``keep`` versions before the newest stay loaded, for requests that began with them.
    """

    keeps_files = True
    names_weights = True

    def __init__(self, folder: Path, run: int, write: Callable[[Path], None], keep: int):
        self.folder, self._run, self._write, self._keep = folder.absolute(), run, write, keep
        self._names: OrderedDict[str, int] = OrderedDict()
        """Adapters whose files exist, oldest first, with their version."""
        self._used: set[str] = set()
        self._current = ""

    def prepare(self, version: int) -> None:
        """Write the adapter's files. Raises ``WeightSyncError`` if the folder cannot be written."""
        name, again = f"policy-{self._run:x}-v{version}", 1
        while name in self._used:
            name, again = f"policy-{self._run:x}-v{version}.{again}", again + 1
        stage = f"writing the adapter of version {version}"
        with new_folder(self.folder / name, stage) as temporary:
            self._write(temporary)
            for file in [path for path in temporary.rglob("*") if path.is_file()]:
                with open_file(file) as opened:
                    os.fsync(opened.fileno())
            sync_folder(temporary)
        self._used.add(name)
        self._names[name] = version
        self._current = name

    def push(self, server: Server, version: int, deadline: Deadline) -> str:
        name = self._current
        body = {"lora_name": name, "lora_path": str(self.folder / name)}
        try:
            stage = f"loading the adapter of version {version}"
            post(server, "/v1/load_lora_adapter", body, stage, deadline)
        except WeightSyncError as error:
            # by an attempt whose response was lost
            if LOADED_ALREADY not in (error.response or ""):
                raise _explained(error) from error
        return name

    def holds(self, server: Server, deadline: Deadline) -> bool:
        listed = server.call(
            "GET", "/v1/models", stage="asking for the adapters", timeout_s=deadline.left_s
        )
        return any(entry["id"] == self._current for entry in listed["data"])

    def retire(self, servers: list[Server], version: int) -> None:
        for name, adapter_version in list(self._names.items()):
            if adapter_version < version - self._keep:
                self._unload(servers, name)

    def close(self, servers: list[Server]) -> None:
        for name in list(self._names):
            self._unload(servers, name)

    def _unload(self, servers: list[Server], name: str) -> None:
        """Unload an adapter and delete its files. Failures are only logged: a loaded adapter costs
        memory alone."""
        path, body, stage = "/v1/unload_lora_adapter", {"lora_name": name}, f"unloading {name}"
        for server in servers:
            try:
                server.call("POST", path, body, stage=stage, timeout_s=UNLOAD_S)
            except WeightSyncError as error:
                log.debug("%s", error)  # the server was restarted or stopped
        del self._names[name]
        shutil.rmtree(self.folder / name, ignore_errors=True)


def _explained(error: WeightSyncError) -> WeightSyncError:
    """The error with advice, when the response shows the cause."""
    if "HTTP 404" in (error.response or ""):
        advice = (
            "the server was started without LoRA updates: start it with vf-vllm, or with"
            " --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"
        )
    elif "rank" in (error.response or ""):
        advice = "start the server with a --max-lora-rank of at least lora_rank"
    else:
        return error
    return WeightSyncError(f"{error}; {advice}", **error.facts)
