"""Gather the whole tensors of a policy that is split over processes, and scatter whole tensors into
its parts.

Under FSDP2 a split parameter is a ``DTensor``: each process holds its rows of it. Parameters of
DeepSpeed are handed to ``deepspeed``. Engine and weight sync need whole tensors (``WholeCopy``),
and so do files (``WholeCopy``, and ``whole_state`` for the optimizer); reading a checkpoint
scatters them (``scatter``). So a checkpoint does not depend on
how the run was split: any number of processes, split or not, resumes from it.

    for name, tensor in whole_tensors(model): ...     every process iterates to the end; one whole tensor at a time

Gathering is a collective: **every process must call it, in the same order**, outside of any
rank-0-only block. For a model that is not split nothing is sent. ``adopt`` checks which splits are
supported, and makes accelerate split on a CPU too, which it does not do by default, so that the
code for GPUs can be tested without a GPU.
"""

from __future__ import annotations

import copy
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin, parse_flag_from_env
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, distribute_tensor

from verifiers.errors import ConfigError
from verifiers_trainer.distributed import deepspeed
from verifiers_trainer.distributed.launcher import FLAGS, warn_of_unused_split

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers.training_args import TrainingArguments

log = logging.getLogger(__name__)

CHECKPOINT_WRAPPER = "_checkpoint_wrapped_module."
"""Inserted into the names of parameters by accelerate's activation checkpointing."""


def is_split(model: nn.Module) -> bool:
    """Whether this process holds only parts of the parameters, even while whole tensors remain
    after a forward pass."""
    return any(isinstance(module, FSDPModule) for module in model.modules()) or deepspeed.is_split(
        model
    )


def is_managed(model: nn.Module) -> bool:
    """Whether weights are set by ``scatter``: those that compute are not those trained."""
    return is_split(model) or any(deepspeed.holds(parameter) for parameter in model.parameters())


def plain(name: str) -> str:
    """The name of a parameter in checkpoint files."""
    return name.replace(CHECKPOINT_WRAPPER, "")


def local_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Every parameter of this process, under all its names (one per module that holds it)."""
    forget_whole(model)
    return dict(model.named_parameters(remove_duplicate=False))


# --- out: whole tensors ---------------------------------------------------------------------------


def full_tensor(tensor: Tensor) -> Tensor:
    """The whole of a tensor, without gradient; the tensor itself when it is not split. Every
    process calls it."""
    if deepspeed.holds(tensor):
        return deepspeed.full_tensor(tensor)
    return tensor.full_tensor().detach() if isinstance(tensor, DTensor) else tensor.detach()


def whole_tensors(model: nn.Module, *, trained_only: bool = False) -> Iterator[tuple[str, Tensor]]:
    """(name, whole tensor) of every parameter, tied parameters once, on every process and on its
    own device.

    One at a time: a yielded tensor may be dropped before the next is gathered, so memory holds one
    whole tensor more.
    """
    if not deepspeed.is_split(model):  # under ZeRO-3 no forward pass leaves whole weights behind
        forget_whole(model)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad or not trained_only:
            yield plain(name), full_tensor(parameter)


def whole_state(optimizer: torch.optim.Optimizer, *, keep: bool) -> dict[str, Any] | None:
    """An optimizer's ``state_dict``, whole, on the CPU, if ``keep`` is set; else None."""
    if deepspeed.is_split_optimizer(optimizer):
        return deepspeed.whole_state(optimizer, keep=keep)
    state = optimizer.state_dict()
    whole_values: dict[object, dict[str, object]] = {}
    for parameter, values in state["state"].items():
        for name, value in values.items():
            gathered = full_tensor(value) if isinstance(value, Tensor) else value
            if keep:
                entry = gathered.cpu() if isinstance(value, Tensor) else value
                whole_values.setdefault(parameter, {})[name] = entry
    return {**state, "state": whole_values} if keep else None


class WholeCopy:
    """Rank 0's whole copy of a split policy, for the engine, for servers and for files.

    It is made before the model is split, and is an ordinary module, with its adapter if there is
    any. ``refresh`` copies the policy's weights into it, one tensor at a time. On the other
    processes ``model`` is None.
    """

    def __init__(self, model: nn.Module, *, keep: bool, device: torch.device):
        self.model: Any = None
        if keep:
            self.model = copy.deepcopy(model).to(device)
        self._parameters = dict(self.model.named_parameters()) if keep else {}

    @torch.no_grad()
    def refresh(self, model: nn.Module, *, trained_only: bool = True) -> None:
        """Copy the policy's weights, in place; frozen ones only with ``trained_only=False``."""
        for name, tensor in whole_tensors(model, trained_only=trained_only):
            if self.model is None:
                continue
            target = self._parameters[name]
            # accelerate stores trained weights in float32 and computes in less
            if target.dtype != tensor.dtype:
                target.data = torch.empty_like(target, dtype=tensor.dtype)
            target.copy_(tensor)


# --- in: whole tensors into the parts of this process ---------------------------------------------


def part(parameter: Tensor) -> Tensor:
    """This process's part of a trained parameter, without gradient; every process calls it.

    Under stages 1 and 2 of DeepSpeed, which split no parameter, it is a whole copy in float32.
    """
    if deepspeed.holds(parameter):
        if deepspeed.is_in_pieces(parameter):
            return deepspeed.part(parameter)
        return deepspeed.full_tensor(parameter)
    return parameter.detach()


def whole_of_part(tensor: Tensor, parameter: Tensor) -> Tensor:
    """Gather a tensor in the layout of ``part(parameter)``. Every process calls it."""
    if deepspeed.is_in_pieces(parameter):
        return deepspeed.gathered(tensor, parameter)
    return full_tensor(tensor)


def part_like(tensor: Tensor, target: Tensor) -> Tensor:
    """``tensor`` in the layout of ``part(target)``; every process has the whole tensor, so nothing
    is sent.

    *Raises* ValueError for another shape.
    """
    if tensor.shape != deepspeed.size(target):
        raise ValueError(
            f"a tensor has shape {list(tensor.shape)}, its parameter {list(deepspeed.size(target))}"
        )
    if deepspeed.is_in_pieces(target):
        return deepspeed.part_like(tensor, target)
    if not isinstance(target, DTensor):
        return tensor
    tensor = tensor.to(target.device)
    return distribute_tensor(tensor, target.device_mesh, target.placements, src_data_rank=None)


@torch.no_grad()
def scatter(
    tensors: Mapping[str, Tensor], targets: Mapping[str, Tensor]
) -> tuple[list[str], list[str]]:
    """Copy whole tensors into the split tensors of the same names; returns the names (missing,
    unexpected).

    Raises ``ValueError`` for another shape.
    """
    for name in tensors.keys() & targets.keys():
        tensor, target = tensors[name], targets[name]
        if tensor.shape != (shape := deepspeed.size(target)):
            raise ValueError(f"{name} has shape {list(tensor.shape)}, its parameter {list(shape)}")
        if deepspeed.holds(target):
            deepspeed.assign(target, tensor)
        else:
            target.copy_(part_like(tensor, target))
    return sorted(targets.keys() - tensors.keys()), sorted(tensors.keys() - targets.keys())


@contextmanager
def in_place_of(parameters: Iterable[tuple[Tensor, Tensor]]) -> Iterator[None]:
    """Inside the block, each split parameter has the values of its paired tensor, which is split
    the same way."""
    pairs = [(_local(parameter), _local(replacement)) for parameter, replacement in parameters]
    with torch.no_grad():
        saved = [local.clone() for local, _ in pairs]
        for local, source in pairs:
            local.copy_(source)
        try:
            yield
        finally:
            for (local, _), before in zip(pairs, saved, strict=True):
                local.copy_(before)


def forget_whole(model: nn.Module) -> None:
    """Drop the gathered weights that a forward pass left in place of the split weights; the next
    pass gathers them again.

    They are rounded to the compute precision, and changes made to them are lost.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    deepspeed.forget_whole(model)


def _local(tensor: Tensor) -> Tensor:
    if deepspeed.holds(tensor):
        return tensor.ds_tensor.data
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


@contextmanager
def preserved_ties(model: nn.Module) -> Iterator[None]:
    """Inside the block, ``tie_weights`` ties again the modules that share a parameter now.

    accelerate calls it after it has moved the model to another device; transformers' method expects
    the names of a model without an adapter, and fails with an adapter on a head that is tied to the
    embeddings.
    """
    owners: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                owners.setdefault(id(parameter), []).append((module, name))
    shared = [uses for uses in owners.values() if len(uses) > 1]

    def tie_weights(*_: object, **__: object) -> None:
        for (first, name), *aliases in shared:
            for module, other_name in aliases:
                module._parameters[other_name] = first._parameters[name]

    model.__dict__["tie_weights"] = tie_weights
    try:
        yield
    finally:
        del model.__dict__["tie_weights"]


def untie_originals(model: nn.Module) -> None:
    """Untie the frozen original of each of PEFT's ``modules_to_save`` from a parameter that it
    shares.

    FSDP2 splits such a head separately from the embeddings, and accepts no parameter twice.
    """
    saved = [module for module in model.modules() if hasattr(module, "modules_to_save")]
    originals = [getattr(module, "original_module", None) for module in saved]
    untie(model, [original for original in originals if isinstance(original, nn.Module)])


def untie(model: nn.Module, modules: Iterable[nn.Module]) -> None:
    """Give ``modules`` frozen copies of the parameters that they share with others of ``model``."""
    owners = Counter(
        id(p) for module in model.modules() for p in module._parameters.values() if p is not None
    )
    for module in modules:
        for name, parameter in module._parameters.items():
            if parameter is not None and owners[id(parameter)] > 1:
                copied = nn.Parameter(parameter.detach().clone(), requires_grad=False)
                module._parameters[name] = copied


# --- supported kinds of splitting -----------------------------------------------------------------


def adopt(accelerator: Accelerator, settings: TrainingArguments | None = None) -> bool:
    """Whether the launcher's configuration splits the model; enables it on CPUs, where accelerate
    does not by default.

    Raises ``ConfigError`` for a kind that is not supported.
    """
    if deepspeed.adopt(accelerator, settings):
        return True
    state = accelerator.state
    is_asked = parse_flag_from_env(FLAGS["FSDP"])
    if state.distributed_type == DistributedType.MULTI_CPU and is_asked:
        if deepspeed.warn_of_idle_accelerator():
            return False
        # reads the launcher's variables; without CPU offload, for which torch would look for an
        # accelerator
        state.fsdp_plugin = FullyShardedDataParallelPlugin(cpu_offload=False)
        state.distributed_type = DistributedType.FSDP
    if state.distributed_type != DistributedType.FSDP:
        require_supported(state.distributed_type)
        return False
    require_supported(state.distributed_type, state.fsdp_plugin.fsdp_version)
    precision = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(state.mixed_precision)
    # accelerate's own would sum gradients, and round log-probabilities, in half precision
    if precision is not None:
        state.fsdp_plugin.mixed_precision_policy = MixedPrecisionPolicy(
            param_dtype=precision, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
    return True


def require_supported(kind: DistributedType, fsdp_version: int = 2) -> None:
    """Raise ``ConfigError`` for an unsupported way of splitting the model."""
    if kind == DistributedType.FSDP and fsdp_version != 2:
        raise ConfigError(
            f"fsdp_version {fsdp_version} is not supported: set fsdp_version: 2, as"
            " configs/fsdp2.yaml does"
        )
    if kind == DistributedType.MEGATRON_LM:
        raise ConfigError(
            f"the launcher's configuration splits the model by {kind.value}, which is not"
            " supported: use FSDP2 (configs/fsdp2.yaml), DeepSpeed (configs/zero3.yaml), or"
            " distributed_type MULTI_GPU where every process can hold the model"
        )


def require_launchable(optimizers: Iterable[object]) -> None:
    """Raise ConfigError for launcher settings that this trainer does not support, before anything
    is loaded.

    On a CPU accelerate would silently train without Megatron-LM; and optimizers passed in hold
    parameters that a split replaces or empties.
    """
    warn_of_unused_split()
    if parse_flag_from_env("ACCELERATE_USE_MEGATRON_LM"):
        require_supported(DistributedType.MEGATRON_LM)
    deepspeed.require_installed()
    kind = next((kind for kind, flag in FLAGS.items() if parse_flag_from_env(flag)), None)
    if kind is not None and any(optimizer is not None for optimizer in optimizers):
        raise ConfigError(
            f"optimizers= is not supported under {kind}, which replaces the parameters they hold:"
            " use optim, learning_rate and the other fields of the configuration"
        )
