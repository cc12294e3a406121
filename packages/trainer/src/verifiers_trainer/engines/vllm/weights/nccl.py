"""Broadcast all weights to the servers' GPUs over NCCL and HTTP, without importing vllm.

The trainer is rank 0 of a group with all workers of a server, joined by a unique id that is sent
over HTTP. Both sides enter the group at the same time and begin with one all-reduce of a single
fp32 zero. Weights are sent packed, the bytes of tensor after tensor; a chunk is sent once it
*exceeds* the buffer size. ``nccl_library`` implements ``Collective`` with NCCL.

Trainer and server must not share a device, which NCCL does not support (``choice`` rejects it).
"""

from __future__ import annotations

import base64
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, Protocol

import torch

from verifiers.errors import WeightSyncError
from verifiers_trainer.engines.vllm.control import Server
from verifiers_trainer.engines.vllm.weights.protocol import Deadline, LabelledSync, label_of
from verifiers_trainer.engines.vllm.weights.transfer import metadata, transfer

BUFFER_BYTES = 2**30
"""Bytes that a packed chunk exceeds before it is sent; equal on both sides."""
UNIQUE_ID_BYTES = 128


class Collective(Protocol):
    """A group of ranks that the trainer is rank 0 of."""

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sum over all ranks, in place."""

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Send to all other ranks."""

    def abort(self) -> None:
        """Leave the group at once, also when another rank hangs."""


class Collectives(Protocol):
    """A factory of groups."""

    def unique_id(self) -> bytes:
        """A new group's id, 128 bytes."""

    def join(self, unique_id: bytes, world_size: int) -> Collective:
        """Enter a group as rank 0; returns when all ranks have."""


class NcclSync(LabelledSync):
    """``weights`` returns the tensors to send, on the device that sends them."""

    def __init__(
        self,
        run: int,
        model: str,
        weights: Callable[[], dict[str, torch.Tensor]],
        features: frozenset[str],
        collectives: Collectives,
        buffer_bytes: int = BUFFER_BYTES,
    ):
        super().__init__(run, model)
        self._weights, self._features = weights, features
        self._collectives, self._buffer_bytes = collectives, buffer_bytes
        self._groups: dict[str, Collective] = {}
        """URL of a server -> the group with its workers."""
        self._repairs_at_join: dict[str, int] = {}
        """Server URL -> its number of repairs when it joined: a restarted server is in no group."""

    def push(self, server: Server, version: int, deadline: Deadline) -> str:
        label = label_of(self._run, version)
        is_present = self._repairs_at_join.get(server.url) == server.serving.repairs
        if not is_present or not self.holds(server, deadline):
            self._leave(server.url)
        try:
            group = self._groups.get(server.url) or self._join(server, deadline)

            def send() -> None:
                self._send(server, group, version, deadline)

            transfer(server, version, label, self._features, deadline, send)
        except WeightSyncError:
            self._leave(server.url)  # other ranks may be blocked; the next push joins a new group
            raise
        return self._model

    def close(self, servers: list[Server]) -> None:
        for url in list(self._groups):
            self._leave(url)

    def _leave(self, url: str) -> None:
        if (group := self._groups.pop(url, None)) is not None:
            group.abort()

    def _join(self, server: Server, deadline: Deadline) -> Collective:
        stage = "asking for the number of workers"
        reply = server.call("GET", "/get_world_size", stage=stage, timeout_s=deadline.left_s)
        world_size, unique_id = int(reply["world_size"]) + 1, self._collectives.unique_id()
        info = {
            "nccl_unique_id_b64": base64.b64encode(unique_id).decode("ascii"),
            "rank_offset": 1,
            "world_size": world_size,
            "packed": True,
            "packed_buffer_size_bytes": self._buffer_bytes,
        }
        stage = "joining the group of the server's workers"
        path, body = "/init_weight_transfer_engine", {"init_info": info}
        answer = server.begin("POST", path, body, stage=stage, timeout_s=deadline.left_s)
        group = within(
            lambda: self._collectives.join(unique_id, world_size), server, stage, deadline, answer
        )
        device = next(iter(self._weights().values())).device
        zero = torch.zeros(1, dtype=torch.float32, device=device)
        within(
            lambda: group.all_reduce(zero), server, f"{stage} (first all-reduce)", deadline, answer
        )
        self._result(server, answer, stage, deadline)
        self._groups[server.url], self._repairs_at_join[server.url] = group, server.serving.repairs
        return group

    def _send(self, server: Server, group: Collective, version: int, deadline: Deadline) -> None:
        tensors, stage = self._weights(), f"sending the weights of version {version}"
        path, body = "/update_weights", {"update_info": metadata(tensors)}
        answer = server.begin("POST", path, body, stage=stage, timeout_s=deadline.left_s)

        def broadcast() -> None:
            for chunk in packed_chunks(tensors, self._buffer_bytes):
                group.broadcast(chunk)

        within(broadcast, server, stage, deadline, answer)
        self._result(server, answer, stage, deadline)

    def _result(
        self, server: Server, answer: Future[object], stage: str, deadline: Deadline
    ) -> object:
        started = time.monotonic()
        try:
            return answer.result(timeout=deadline.left_s)
        except FutureTimeout:
            raise server.failure("did not answer in time", stage, started) from None


def within(
    work: Callable[[], object],
    server: Server,
    stage: str,
    deadline: Deadline,
    answer: Future[object] | None = None,
) -> Any:
    """Run ``work`` in its own thread and return its result: a hanging collective cannot be
    interrupted.

    Raises ``WeightSyncError`` at the deadline, or as soon as ``answer``, the call it belongs to,
    has failed.
    """
    started, outcome = time.monotonic(), Future[Any]()

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:  # noqa: BLE001 - raised again in the caller's thread
            outcome.set_exception(error)

    threading.Thread(target=run, name="verifiers-collective", daemon=True).start()
    while True:
        try:
            return outcome.result(timeout=min(0.1, deadline.left_s))
        except FutureTimeout:
            if outcome.done():
                raise
        except WeightSyncError:
            raise
        except (RuntimeError, OSError) as error:
            raise server.failure(f"the collective failed: {error}", stage, started) from error
        if answer is not None and answer.done() and (refusal := answer.exception()) is not None:
            raise refusal
        if deadline.is_over:
            raise server.failure("the server's workers did not join in time", stage, started)


def packed_chunks(tensors: dict[str, torch.Tensor], buffer_bytes: int) -> Iterator[torch.Tensor]:
    """uint8 [n] chunks of all tensors' bytes in order; a chunk is closed by the tensor with which
    it exceeds the size.

    >>> [len(c) for c in packed_chunks({"a": torch.zeros(3), "b": torch.zeros(2), "c": torch.zeros(1)}, 12)]
    [20, 4]
    """
    parts: list[torch.Tensor] = []
    size = 0
    for tensor in tensors.values():
        parts.append(tensor.contiguous().view(-1).view(torch.uint8))
        size += parts[-1].numel()
        if size > buffer_bytes:
            yield torch.cat(parts)
            parts, size = [], 0
    if parts:
        yield torch.cat(parts)
