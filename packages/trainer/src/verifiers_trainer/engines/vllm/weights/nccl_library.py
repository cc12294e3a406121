"""The NCCL functions of a sender, from the library that torch installs. Needs CUDA.

Signatures: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/api.html
"""

from __future__ import annotations

import ctypes
from functools import cached_property
from importlib import metadata
from typing import Any

import torch

from verifiers.errors import ConfigError
from verifiers_trainer.engines.vllm.weights.nccl import UNIQUE_ID_BYTES

DISTRIBUTIONS = ("nvidia-nccl-cu13", "nvidia-nccl-cu12")
SUM, SENDER = 0, 0
"""The operation of an all-reduce; the rank that a broadcast is from."""
DTYPES = {torch.uint8: 1, torch.float32: 7}
"""``ncclDataType_t`` of what is sent."""


class _UniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_byte * UNIQUE_ID_BYTES)]


class NcclLibrary:
    """Creates NCCL groups; implements ``Collectives``. Loads the library at first use."""

    @cached_property
    def functions(self) -> Any:
        """The loaded library. Raises ``ConfigError`` when there is none."""
        failures = []
        for path in _candidates():
            try:
                return ctypes.CDLL(path)
            except OSError as error:
                failures.append(str(error))
        raise ConfigError(
            f"weight_sync='nccl' needs NCCL, which cannot be loaded ({'; '.join(failures)}): use"
            " weight_sync='reload'"
        )

    def unique_id(self) -> bytes:
        identifier = _UniqueId()
        self.check(self.functions.ncclGetUniqueId(ctypes.byref(identifier)))
        return bytes(identifier)

    def join(self, unique_id: bytes, world_size: int) -> NcclGroup:
        """Enter the group on the present CUDA device."""
        identifier, communicator = _UniqueId.from_buffer_copy(unique_id), ctypes.c_void_p()
        self.check(
            self.functions.ncclCommInitRank(ctypes.byref(communicator), world_size, identifier, 0)
        )
        return NcclGroup(self, communicator)

    def check(self, result: int) -> None:
        """Raise ``RuntimeError`` with NCCL's message for an error code."""
        if result:
            self.functions.ncclGetErrorString.restype = ctypes.c_char_p
            raise RuntimeError(f"NCCL: {self.functions.ncclGetErrorString(result).decode()}")


class NcclGroup:
    """A group with this process as rank 0; implements ``Collective``."""

    def __init__(self, library: NcclLibrary, communicator: ctypes.c_void_p):
        self._library, self._communicator = library, communicator

    def all_reduce(self, tensor: torch.Tensor) -> None:
        self._run("ncclAllReduce", tensor, SUM)

    def broadcast(self, tensor: torch.Tensor) -> None:
        self._run("ncclBroadcast", tensor, SENDER)

    def abort(self) -> None:
        self._library.functions.ncclCommAbort(self._communicator)

    def _run(self, name: str, tensor: torch.Tensor, operation: int) -> None:
        """Call a collective on the tensor's stream, in place, and wait for it: its memory may be
        reused afterwards."""
        stream = torch.cuda.current_stream(tensor.device)
        pointer = ctypes.c_void_p(tensor.data_ptr())
        function = getattr(self._library.functions, name)
        size, dtype = ctypes.c_size_t(tensor.numel()), DTYPES[tensor.dtype]
        on = self._communicator, ctypes.c_void_p(stream.cuda_stream)
        self._library.check(function(pointer, pointer, size, dtype, operation, *on))
        stream.synchronize()


def _candidates() -> list[str]:
    paths = []
    for name in DISTRIBUTIONS:
        try:
            files = metadata.files(name) or []
        except metadata.PackageNotFoundError:
            continue
        paths += [str(file.locate()) for file in files if file.name.startswith("libnccl.so")]
    return [*paths, "libnccl.so.2"]
