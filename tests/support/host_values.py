"""Names the operations whose results the host must wait for, where a device computes."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

SYNCHRONISE = ("_local_scalar_dense", "nonzero", "bincount", "equal", "_unique")


class HostValues(TorchDispatchMode):
    """``with HostValues() as seen``: ``seen.names`` has each such operation, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name.startswith(SYNCHRONISE):
            self.names.append(name)
        return func(*args, **(kwargs or {}))
