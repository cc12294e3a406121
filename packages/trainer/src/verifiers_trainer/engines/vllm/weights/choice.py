"""Select the weight transfer method from the model, the devices and the servers' features.

Raises ``ConfigError`` for a method that cannot work, before any transfer.
"""

from __future__ import annotations

from dataclasses import dataclass

from packaging.version import Version

from verifiers.errors import ConfigError
from verifiers_trainer.engines.vllm.features import (
    FIRST,
    IPC,
    NCCL_ID,
    PAUSE_KEEP,
    UPDATE_BRACKETS,
    WEIGHT_LABEL,
)

METHODS = ("auto", "lora_dir", "reload", "nccl", "ipc")
NEEDS: dict[str, tuple[str, ...]] = {
    "lora_dir": (),
    "reload": (PAUSE_KEEP, WEIGHT_LABEL),
    "nccl": (PAUSE_KEEP, WEIGHT_LABEL, NCCL_ID),
    "ipc": (PAUSE_KEEP, WEIGHT_LABEL, UPDATE_BRACKETS, IPC),
}
"""Method -> required features. The label identifies the weights of a restarted server."""


@dataclass(frozen=True, slots=True)
class Situation:
    """The inputs of the choice."""

    features: frozenset[str]
    """Of the oldest server."""
    version: str
    """Of the oldest server, as it reports it."""
    has_adapter: bool
    adapter_refused: str | None
    """Why the adapter cannot be served as files; None when it can."""
    is_quantized: bool
    """Whether the adapter's base is in four bits, into which nothing is merged."""
    on_cuda: bool
    """Whether the trainer's weights are on a CUDA device."""
    same_device: bool
    """Whether a server computes on that device too."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A method of ``METHODS`` (never "auto"), and the reason."""

    method: str
    reason: str


def choose(method: str, situation: Situation) -> Choice:
    """Select the transfer method. Raises ``ConfigError`` when ``method`` cannot work here."""
    if method == "auto":
        return _automatic(situation)
    if (problem := impossible(method, situation)) is not None:
        instead = _automatic(situation)
        raise ConfigError(
            f"weight_sync={method!r} cannot be used: {problem}; use {instead.method!r}, or 'auto'"
        )
    return Choice(method, "as configured")


def _automatic(situation: Situation) -> Choice:
    if situation.has_adapter and situation.adapter_refused is None:
        return Choice("lora_dir", "only the adapter moves, as files under a new name each time")
    if situation.is_quantized:
        raise ConfigError(
            "the base is in four bits (quantize), so that the adapter alone can be sent, and the"
            f" server cannot load it: {situation.adapter_refused}"
        )
    merged = ""
    if situation.has_adapter:
        merged = f"the adapter is merged, since {situation.adapter_refused}; "
    by_speed = (
        ("nccl", "all weights move, by a broadcast to the server's GPUs"),
        ("ipc", "all weights move, on the one GPU that trainer and server share"),
        ("reload", "all weights move, as files that the server reads again"),
    )
    for method, reason in by_speed:
        if impossible(method, situation) is None:
            return Choice(method, merged + reason)
    raise ConfigError(
        f"the inference server (vLLM {situation.version}) cannot take new weights:"
        f" {impossible('reload', situation)}; use a newer server, or train an adapter"
        " (use_lora=True)"
    )


def impossible(method: str, situation: Situation) -> str | None:
    """Why a method cannot be used in a situation; None when it can."""
    lacking = [feature for feature in NEEDS[method] if feature not in situation.features]
    if lacking:
        first = max((FIRST[feature] for feature in lacking), key=Version)
        return f"the server is vLLM {situation.version}, and it needs {first} or newer"
    if method == "lora_dir":
        return situation.adapter_refused if situation.has_adapter else "no adapter is trained"
    if situation.is_quantized:
        return "the base is in four bits, so that the adapter alone can be sent"
    if method in ("nccl", "ipc") and not situation.on_cuda:
        return "the trained weights are not on a CUDA device"
    if method == "nccl" and situation.same_device:
        return "trainer and server are on the same device, where NCCL hangs or fails"
    if method == "ipc" and not situation.same_device:
        return "trainer and server are not known to be on the same device"
    return None
