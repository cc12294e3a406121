"""Share weights on one GPU: the server's workers open the trainer's memory by CUDA IPC handles.

A chunk of tensors is copied, its handles are sent, and all copies stay allocated until the server
has finished the update: a handle of freed memory would read other data. A chunk is closed *before*
the tensor that would exceed its size. The handles are pickled in the body, which the server must allow
(``VLLM_ALLOW_INSECURE_SERIALIZATION=1``); use it on loopback only.
"""

from __future__ import annotations

import base64
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import torch

from verifiers_trainer.engines.vllm.control import Server
from verifiers_trainer.engines.vllm.weights.protocol import Deadline, LabelledSync, label_of, post
from verifiers_trainer.engines.vllm.weights.transfer import metadata, transfer

CHUNK_BYTES = 2**30

Handle = Callable[[torch.Tensor], Any]
"""The handle of a tensor's memory, as the receiving process opens it."""


class IpcSync(LabelledSync):
    """``weights`` returns the tensors to share; ``handle`` creates the handle of a tensor."""

    def __init__(
        self,
        run: int,
        model: str,
        weights: Callable[[], dict[str, torch.Tensor]],
        features: frozenset[str],
        handle: Handle | None = None,
        chunk_bytes: int = CHUNK_BYTES,
    ):
        super().__init__(run, model)
        self._weights, self._features = weights, features
        self._handle, self._chunk_bytes = handle or cuda_handle, chunk_bytes
        self._ready: dict[str, int] = {}
        """Server URL -> its number of repairs at initialisation."""

    def push(self, server: Server, version: int, deadline: Deadline) -> str:
        if self._ready.get(server.url) != server.serving.repairs:
            body = {"init_info": {"packed": False}}
            stage = "making the server ready for shared memory"
            post(server, "/init_weight_transfer_engine", body, stage, deadline)
            self._ready[server.url] = server.serving.repairs

        held: list[dict[str, torch.Tensor]] = []  # their memory must stay allocated to the end

        def send() -> None:
            for chunk in chunks(self._weights(), self._chunk_bytes):
                held.append(
                    {name: tensor.detach().clone().contiguous() for name, tensor in chunk.items()}
                )
                self._hand_over(server, held[-1], version, deadline)

        transfer(server, version, label_of(self._run, version), self._features, deadline, send)
        return self._model

    def close(self, servers: list[Server]) -> None:
        self._ready.clear()

    def _hand_over(
        self, server: Server, copies: dict[str, torch.Tensor], version: int, deadline: Deadline
    ) -> None:
        handles = [self._handle(copy) for copy in copies.values()]
        pickled = base64.b64encode(pickle.dumps(handles)).decode("ascii")
        info = {**metadata(copies), "ipc_handles_pickled": pickled}
        stage = f"handing over the weights of version {version}"
        post(server, "/update_weights", {"update_info": info}, stage, deadline)


def chunks(tensors: dict[str, torch.Tensor], size: int) -> Iterator[dict[str, torch.Tensor]]:
    """The tensors in parts of at most ``size`` bytes; a larger tensor is a part of its own.

    >>> [list(part) for part in chunks({"a": torch.zeros(3), "b": torch.zeros(2), "c": torch.zeros(1)}, 12)]
    [['a'], ['b', 'c']]
    """
    part: dict[str, torch.Tensor] = {}
    num_bytes = 0
    for name, tensor in tensors.items():
        needed = tensor.numel() * tensor.element_size()
        if part and num_bytes + needed > size:
            yield part
            part, num_bytes = {}, 0
        part[name], num_bytes = tensor, num_bytes + needed
    if part:
        yield part


def cuda_handle(tensor: torch.Tensor) -> dict[str, tuple[object, ...]]:
    """Physical device -> what ``rebuild_cuda_tensor`` takes."""
    from torch.multiprocessing.reductions import reduce_tensor

    _, arguments = reduce_tensor(tensor)
    return {str(torch.cuda.get_device_properties(tensor.device).uuid): arguments}
