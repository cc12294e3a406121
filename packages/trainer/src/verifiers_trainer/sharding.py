"""Policies that are split over the processes (FSDP2): their whole tensors, one after the other, and the way back.

A split parameter is a ``DTensor``: each process holds its rows of it. Whole ones are needed by the engine and the
weight sync (``WholeCopy``) and by files (``WholeCopy`` again, ``whole_state`` for the optimizer), and come in when a
checkpoint is read (``scatter``). So a checkpoint does not show how the run was split: any number of processes, split
or not, goes on from it.

    for name, tensor in whole_tensors(model): ...     every process iterates to the end; one whole tensor at a time

Gathering is a collective: **every process must call it, in the same order**, outside of any rank-0-only block. With
a model that is not split nothing is sent, so callers need not ask. Which splits are accepted is ``adopt``'s; it makes
accelerate split on a CPU too, which it does not do by itself, so that what runs on GPUs can be tried without one.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin, parse_flag_from_env
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, distribute_tensor

from verifiers.errors import ConfigError

log = logging.getLogger(__name__)

CHECKPOINT_WRAPPER = "_checkpoint_wrapped_module."
"""What accelerate's activation checkpointing puts into the names of parameters."""


def is_split(model: nn.Module) -> bool:
    """Whether this process holds only parts of the parameters."""
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


# --- out: whole tensors -----------------------------------------------------------------------------------------


def whole(tensor: Tensor) -> Tensor:
    """The whole of a tensor, without gradient; the tensor itself when it is not split. Every process calls it."""
    return tensor.full_tensor().detach() if isinstance(tensor, DTensor) else tensor.detach()


def whole_tensors(model: nn.Module, *, trained_only: bool = False) -> Iterator[tuple[str, Tensor]]:
    """(name, whole tensor) of every parameter, tied ones once, on every process and on its own device.

    One at a time: what is yielded may be dropped before the next is gathered, so that memory holds one tensor more.
    """
    forget_whole(model)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad or not trained_only:
            yield name.replace(CHECKPOINT_WRAPPER, ""), whole(parameter)


def whole_state(optimizer: Any, *, keep: bool) -> dict[str, Any] | None:
    """An optimizer's ``state_dict`` with whole tensors on the CPU where ``keep`` is set, None elsewhere."""
    state = optimizer.state_dict()
    kept: dict[Any, dict[str, Any]] = {}
    for parameter, values in state["state"].items():
        for name, value in values.items():
            gathered = whole(value) if isinstance(value, Tensor) else value
            if keep:
                kept.setdefault(parameter, {})[name] = gathered.cpu() if isinstance(value, Tensor) else value
    return {**state, "state": kept} if keep else None


class WholeCopy:
    """Rank 0's own whole copy of a policy that is split: what the engine computes with, or servers and files get.

    It is made before the model is split, and is an ordinary module, with its adapter if there is one. ``refresh``
    brings it up to the policy, a tensor at a time. On the other processes ``model`` is None.
    """

    def __init__(self, model: nn.Module, *, keep: bool, device: torch.device):
        self.model: Any = None
        if keep:
            self.model = copy.deepcopy(model).to(device)
        self._own = dict(self.model.named_parameters()) if keep else {}

    @torch.no_grad()
    def refresh(self, model: nn.Module, *, trained_only: bool = True) -> None:
        """Take over the weights of the policy, in place; of those that are not trained, only when asked."""
        for name, tensor in whole_tensors(model, trained_only=trained_only):
            if self.model is None:
                continue
            own = self._own[name]
            if own.dtype != tensor.dtype:  # accelerate keeps trained weights in float32 where it computes in less
                own.data = torch.empty_like(own, dtype=tensor.dtype)
            own.copy_(tensor)


# --- in: whole tensors into the parts of this process -----------------------------------------------------------


def part_like(tensor: Tensor, target: Tensor) -> Tensor:
    """``tensor`` as ``target`` is split; every process has it whole, and nothing is sent."""
    if not isinstance(target, DTensor):
        return tensor
    tensor = tensor.to(target.device)
    return distribute_tensor(tensor, target.device_mesh, target.placements, src_data_rank=None)


@torch.no_grad()
def scatter(tensors: Mapping[str, Tensor], targets: Mapping[str, Tensor]) -> tuple[list[str], list[str]]:
    """Copy whole tensors into the split ones of the same names; returns the names (missing, unexpected).

    Raises ``ValueError`` for another shape.
    """
    for name in tensors.keys() & targets.keys():
        if tensors[name].shape != targets[name].shape:
            raise ValueError(f"{name} is {list(tensors[name].shape)} there and {list(targets[name].shape)} here")
        targets[name].copy_(part_like(tensors[name], targets[name]))
    return sorted(targets.keys() - tensors.keys()), sorted(tensors.keys() - targets.keys())


@contextmanager
def in_place_of(parameters: Iterable[tuple[Tensor, Tensor]]) -> Iterator[None]:
    """Inside, each split parameter has the values of the tensor it comes with, which is split likewise."""
    pairs = [(_local(parameter), _local(other)) for parameter, other in parameters]
    with torch.no_grad():
        kept = [mine.clone() for mine, _ in pairs]
        for mine, other in pairs:
            mine.copy_(other)
        try:
            yield
        finally:
            for (mine, _), before in zip(pairs, kept, strict=True):
                mine.copy_(before)


def forget_whole(model: nn.Module) -> None:
    """Drop the whole weights that a forward pass left in the place of the split ones; the next one gathers them anew.

    Left there, they are rounded to the precision of computing, and what is done to them is lost.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


# --- which splits there are -------------------------------------------------------------------------------------


def adopt(accelerator: Any) -> bool:
    """Whether the launcher's file splits the model; made to work where accelerate alone would not.

    Raises ``ConfigError`` for a kind that is not supported.
    """
    state = accelerator.state
    if state.distributed_type == DistributedType.MULTI_CPU and parse_flag_from_env("ACCELERATE_USE_FSDP"):
        if torch.accelerator.is_available():  # torch would split over the accelerators that training does not use
            log.warning("the model is not split: it is trained on the CPU of a machine that has an accelerator")
            return False
        state.fsdp_plugin = FullyShardedDataParallelPlugin()  # reads what the launcher set
        state.distributed_type = DistributedType.FSDP
    if state.distributed_type != DistributedType.FSDP:
        require_supported(state.distributed_type)
        return False
    require_supported(state.distributed_type, state.fsdp_plugin.fsdp_version)
    precision = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(state.mixed_precision)
    if precision is not None:  # accelerate's own would sum gradients, and round log-probabilities, in half precision
        state.fsdp_plugin.mixed_precision_policy = MixedPrecisionPolicy(
            param_dtype=precision, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
    return True


def require_supported(kind: DistributedType, fsdp_version: int = 2) -> None:
    """Raise ``ConfigError`` for a way of splitting a model that this trainer does not know."""
    if kind == DistributedType.FSDP and fsdp_version != 2:
        raise ConfigError(
            f"fsdp_version {fsdp_version} is not supported: set fsdp_version: 2, as configs/fsdp2.yaml does"
        )
    if kind in (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM):
        raise ConfigError(
            f"the launcher's configuration splits the model by {kind.value}, which is not supported: use FSDP2 "
            "(configs/fsdp2.yaml), or distributed_type MULTI_GPU where every process can hold the model"
        )


def require_launchable(optimizers: Iterable[Any]) -> None:
    """Raise ``ConfigError`` for what the launcher has set and this trainer cannot do, before anything is loaded.

    On a CPU accelerate would train without DeepSpeed and say nothing; optimizers given under FSDP hold parameters that
    are replaced.
    """
    for flag, kind in (
        ("ACCELERATE_USE_DEEPSPEED", DistributedType.DEEPSPEED),
        ("ACCELERATE_USE_MEGATRON_LM", DistributedType.MEGATRON_LM),
    ):
        if parse_flag_from_env(flag):
            require_supported(kind)
    if parse_flag_from_env("ACCELERATE_USE_FSDP") and any(given is not None for given in optimizers):
        raise ConfigError(
            "optimizers= cannot be given under FSDP, which replaces the parameters they hold: use optim, learning_rate "
            "and the other fields of the configuration"
        )
