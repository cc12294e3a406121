"""The calls around a transfer of weights into a server's memory, common to its backends.

    pause -> start_weight_update -> update_weights while the backend sends -> finish_weight_update -> resume

Older servers have ``update_weights`` alone. The version label is set at the end, so a server with
an incomplete update never has it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from verifiers_trainer.engines.vllm.control import Server
from verifiers_trainer.engines.vllm.features import UPDATE_BRACKETS
from verifiers_trainer.engines.vllm.weights.protocol import Deadline, post
from verifiers_trainer.engines.vllm.weights.reload import (
    forget_prefixes,
    name_weights,
    pause,
    resume,
)


def transfer(
    server: Server,
    version: int,
    label: int,
    features: frozenset[str],
    deadline: Deadline,
    send: Callable[[], None],
) -> None:
    """Run ``send`` inside an update. On ``WeightSyncError`` the server stays paused."""
    brackets = UPDATE_BRACKETS in features
    pause(server, deadline)
    if brackets:
        post(server, "/start_weight_update", {}, "starting the weight update", deadline)
    send()
    if brackets:
        closing = {"weight_version": str(label)}
        stage = f"finishing the update to version {version}"
        post(server, "/finish_weight_update", closing, stage, deadline)
    forget_prefixes(server, deadline)
    if not brackets:
        name_weights(server, version, label, deadline)
    resume(server, deadline)


def metadata(tensors: dict[str, Any]) -> dict[str, list[Any]]:
    """Names, dtypes and shapes of the tensors to transfer, in order."""
    return {
        "names": list(tensors),
        "dtype_names": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()],
        "shapes": [list(tensor.shape) for tensor in tensors.values()],
    }
