"""Open the weight transfer of a run, selected from model, machine and servers."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file

from verifiers.errors import ConfigError, WeightSyncError
from verifiers.runtime.http_clients import is_loopback_url
from verifiers_trainer.engines.vllm.control import Server
from verifiers_trainer.engines.vllm.weights.choice import Choice, Situation, choose
from verifiers_trainer.engines.vllm.weights.export import apart, exported, unservable_adapter
from verifiers_trainer.engines.vllm.weights.protocol import WeightSync
from verifiers_trainer.settings.config import RLConfig

if TYPE_CHECKING:
    from transformers.modeling_utils import PreTrainedModel

log = logging.getLogger(__name__)

LOAD, ASK_S = "/v1/load_lora_adapter", 10.0
INFERENCE_DEVICES = "VF_INFERENCE_DEVICES"
"""Variable of a launcher with the servers' devices, in the format of ``CUDA_VISIBLE_DEVICES``."""


def open_sync(
    model: PreTrainedModel,
    config: RLConfig,
    servers: Sequence[Server],
    run: int,
    features: frozenset[str],
    version: str,
) -> WeightSync:
    """Select the transfer of the weights of ``model`` to ``servers``, and log the method and the
    reason.

    run: number that identifies this run's weights; features: common to all servers; version:
    vLLM's, of the oldest server. Raises ``ConfigError``.
    """
    require_whole(model)  # checked again in every push: a launcher may split the model later
    situation = Situation(
        features=features,
        version=version or "of an unknown version",
        has_adapter=hasattr(model, "peft_config"),
        adapter_refused=unservable_adapter(model) or _without_adapters(model, servers),
        is_quantized=getattr(model, "is_loaded_in_4bit", False),
        on_cuda=next(model.parameters()).is_cuda,
        same_device=shares_device(
            [server.url for server in servers], next(model.parameters()).device
        ),
    )
    choice = choose(config.weight_sync, situation)
    log.info("weights reach the server by %s: %s", choice.method, choice.reason)
    return _open(choice, model, config, servers, run, features)


def _without_adapters(model: object, servers: Sequence[Server]) -> str | None:
    """Why a server cannot load adapters at run time: it was started without. None if all can."""
    for server in servers if hasattr(model, "peft_config") else ():
        try:
            server.call("GET", LOAD, stage="asking whether adapters can be loaded", timeout_s=ASK_S)
        except WeightSyncError as error:
            # a route that exists answers 405: it takes POST alone
            if "HTTP 404" in (error.response or ""):
                return (
                    f"{server.url} was started without adapters (vf-vllm --max-lora-rank N switches"
                    " them on)"
                )
    return None


def _open(
    choice: Choice,
    model: PreTrainedModel,
    config: RLConfig,
    servers: Sequence[Server],
    run: int,
    features: frozenset[str],
) -> WeightSync:
    folder = Path(config.sync_dir) if config.sync_dir else config.folder / "sync"
    if choice.method == "lora_dir":
        from verifiers_trainer.engines.vllm.weights.lora_dir import LoraDirSync

        def write_adapter(target: Path) -> None:
            require_whole(model)
            # an adapter on embeddings is not served
            model.save_pretrained(target, save_embedding_layers=False)

        return LoraDirSync(folder, run, write_adapter, keep=config.max_off_policy_steps + 1)
    served = _served_model(servers)

    def weights() -> dict[str, torch.Tensor]:
        require_whole(model)
        return exported(model)

    if choice.method == "reload":
        from verifiers_trainer.engines.vllm.weights.reload import ReloadSync

        def write_all(target: Path) -> None:
            save_file(apart(weights()), target / "model.safetensors", metadata={"format": "pt"})
            model.config.save_pretrained(target)

        return ReloadSync(folder, run, served, write_all)
    if choice.method == "nccl":
        from verifiers_trainer.engines.vllm.weights.nccl import NcclSync
        from verifiers_trainer.engines.vllm.weights.nccl_library import NcclLibrary

        return NcclSync(run, served, weights, features, NcclLibrary())
    from verifiers_trainer.engines.vllm.weights.ipc import IpcSync

    return IpcSync(run, served, weights, features)


def require_whole(model: PreTrainedModel) -> None:
    """Raise ``ConfigError`` when this process holds only parts of the parameters: a push would send
    just these.

    Under FSDP2 the trainer passes a whole copy to the engine (``fsdp.WholeCopy``).
    """
    kinds = map(_split_by, (*model.modules(), *model.parameters()))
    if (kind := next(filter(None, kinds), None)) is not None:
        raise ConfigError(
            "this process holds only parts of the model, which is sharded over processes by"
            f" {kind}, and a server would get just these: train with RLTrainer under FSDP2"
            " (configs/fsdp2.yaml), which gathers whole weights, or with DDP"
        )


def _split_by(part: object) -> str | None:
    """The method that split a module or parameter, or None; detected by attributes, without
    importing the classes."""
    if hasattr(part, "ds_id") or hasattr(part, "ds_tensor"):
        return "ZeRO-3"
    if hasattr(part, "full_tensor") and hasattr(part, "placements"):
        return (
            "FSDP2" if any(not placement.is_replicate() for placement in part.placements) else None
        )
    return "FSDP" if type(part).__name__ in ("FullyShardedDataParallel", "FlatParameter") else None


def _served_model(servers: Sequence[Server]) -> str:
    """The name of the base model. Raises ``ConfigError`` when the servers disagree on it."""
    names = {server.serving.model for server in servers}
    if len(names) > 1:
        raise ConfigError(
            f"the inference servers serve different models: {', '.join(sorted(names))}"
        )
    return names.pop()


def shares_device(urls: list[str], device: torch.device | str) -> bool:
    """Whether a server is known to compute on the trainer's CUDA device.

    True when a launcher declares it, or when the server is on this machine and the machine has one
    device.
    """
    if torch.device(device).type != "cuda" or not any(map(is_loopback_url, urls)):
        return False
    mine = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if (theirs := os.environ.get(INFERENCE_DEVICES)) is not None:
        index = torch.device(device).index or 0
        ours = mine.split(",") if mine else list(map(str, range(torch.cuda.device_count())))
        return ours[index] in theirs.split(",")
    return _num_physical_devices() == 1


def _num_physical_devices() -> int:
    """CUDA devices of the machine, those hidden from this process included."""
    return int(torch.cuda._raw_device_count_nvml())
