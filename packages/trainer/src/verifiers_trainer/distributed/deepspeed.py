"""Gather and scatter the tensors of a policy that DeepSpeed splits over processes (ZeRO stages 1, 2
and 3).

Stage 3 leaves each process a piece of every parameter; stages 1 and 2 a whole copy to compute with,
and a piece of the float32 parameter that is trained. ``fsdp`` calls these functions for such
parameters, so that the rest of the trainer sees one kind of split model. DeepSpeed's checkpoint
format is not used: files are those of a run that is not split.

DeepSpeed clips and steps in one call, ``step``. So the gradient norm is known only then; when it is
not finite, DeepSpeed leaves the weights unchanged. The last backward pass of a step is marked before
it.

``adopt`` reads the launcher's settings, and makes accelerate use DeepSpeed on a CPU too, which is
not its default. DeepSpeed is imported when it is used; code that depends on its internals is in the
last section.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

import torch
import torch.distributed as dist
from accelerate.utils import DistributedType, parse_flag_from_env
from torch import Tensor, nn
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from verifiers.errors import ConfigError
from verifiers.runtime.install_lines import install_line
from verifiers_trainer.distributed.launcher import FLAGS

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers.training_args import TrainingArguments

    class Managed(nn.Parameter):
        """A parameter with what DeepSpeed sets on it: ``ds_…`` under stage 3, ``_hp_mapping`` under
        1 and 2."""

        ds_id: int
        ds_shape: torch.Size
        ds_numel: int
        ds_tensor: Tensor
        ds_process_group: dist.ProcessGroup
        _dp_group: dist.ProcessGroup
        _z3_optimizer: Any
        _hp_mapping: Any


log = logging.getLogger(__name__)

logging.getLogger("DeepSpeed").addFilter(
    lambda record: "Setting accelerator to CPU" not in record.getMessage()
)
# accelerate triggers this line on stdout in every training where DeepSpeed is installed, used or
# not

FLAG = FLAGS["DeepSpeed"]
GROUPS = "whole_groups"
"""Attribute of a torch optimizer in which ``remember`` stores its parameters."""


def is_split(model: nn.Module) -> bool:
    """Whether ZeRO-3 has left this process only pieces of the parameters."""
    return any(map(is_in_pieces, model.parameters()))


def is_in_pieces(parameter: object) -> TypeGuard[Managed]:
    """Whether ZeRO-3 has left this process only a piece of a parameter."""
    return hasattr(parameter, "ds_id")


def holds(parameter: object) -> TypeGuard[Managed]:
    """Whether DeepSpeed manages a parameter: under stages 1 and 2 not a frozen one."""
    return hasattr(parameter, "ds_id") or hasattr(parameter, "_hp_mapping")


def size(parameter: Tensor) -> torch.Size:
    """The shape of the whole parameter."""
    return parameter.ds_shape if is_in_pieces(parameter) else parameter.shape


# --- out: whole tensors ---------------------------------------------------------------------------


def full_tensor(parameter: Tensor) -> Tensor:
    """The whole parameter, in float32 where it is trained. Every process calls it."""
    if _is_trained(parameter):
        piece = _piece(parameter)
        return _gathered(parameter, piece.master, piece.start)
    if not is_in_pieces(parameter):
        return parameter.detach()
    import deepspeed

    with deepspeed.zero.GatheredParameters([parameter]):
        return parameter.detach().clone()


def gathered(part: Tensor, parameter: Managed) -> Tensor:
    """Gather a tensor in the layout of ``part`` (stage 3). Every process calls it."""
    piece = _piece(parameter)
    return _gathered(parameter, part[: len(piece.master)], piece.start)


def _gathered(parameter: Managed, values: Tensor, start: int) -> Tensor:
    buffer = torch.zeros(size(parameter).numel(), dtype=values.dtype, device=_device())
    buffer[start : start + len(values)] = values
    # bytes, since -0.0 + 0.0 is 0.0
    dist.all_reduce(buffer.view(torch.uint8), group=_group(parameter))
    return buffer.view(size(parameter))


def whole_state(optimizer: torch.optim.Optimizer, *, keep: bool) -> dict[str, Any] | None:
    """The optimizer's ``state_dict`` as if nothing were split if ``keep`` is set, else None."""
    inner = _inner(optimizer)
    state: dict[int, dict[str, object]] = {}
    groups: list[dict[str, Any]] = []
    for index, number, parameter, piece, flat in _trained(optimizer):
        for name, value in inner.state.get(flat, {}).items():
            if isinstance(value, Tensor) and value.dim():
                entry: Any = _gathered(parameter, piece.within(value), piece.start).cpu()
            else:
                entry = value.clone() if isinstance(value, Tensor) else value
            if keep:
                state.setdefault(index, {})[name] = entry
        if len(groups) == number:
            groups.append({**inner.param_groups[number], "params": []})
        groups[number]["params"].append(index)
    return {"state": state, "param_groups": groups} if keep else None


# --- in: whole tensors into the pieces of this process --------------------------------------------


def part(parameter: object) -> Tensor:
    """This process's float32 piece of a trained parameter of stage 3, padded at its end."""
    from deepspeed.utils import safe_get_local_fp32_param

    return safe_get_local_fp32_param(parameter).detach()


def part_like(value: Tensor, parameter: Managed) -> Tensor:
    """``value`` as ``part`` gives it."""
    piece, padded = _piece(parameter), torch.zeros_like(part(parameter))
    padded[: len(piece.master)] = piece.of(value)
    return padded


@torch.no_grad()
def assign(parameter: Tensor, value: Tensor) -> None:
    """Set a parameter from the whole tensor of every process; then call ``forget_whole``."""
    if _is_trained(parameter):
        piece = _piece(parameter)
        piece.master.copy_(piece.of(value))
    if not is_in_pieces(parameter):
        parameter.copy_(value)
        return
    start = dist.get_rank(group=parameter.ds_process_group) * parameter.ds_tensor.numel()
    local = value.flatten()[start : start + parameter.ds_tensor.numel()]
    parameter.ds_tensor.data[: len(local)].copy_(local)


def load_state(
    optimizer: torch.optim.Optimizer, state: dict[int, dict[str, Any]], groups: list[dict[str, Any]]
) -> None:
    """Restore the result of ``whole_state``. *Raises* ValueError when it does not fit."""
    inner = _inner(optimizer)
    inner.state.clear()
    for index, number, parameter, piece, flat in _trained(optimizer):
        local_state = inner.state[flat]
        on_device = any(inner.param_groups[number].get(flag) for flag in ("fused", "capturable"))
        for name, value in state.get(index, {}).items():
            if not isinstance(value, Tensor) or not value.dim():
                is_moved = on_device and isinstance(value, Tensor)
                local_state[name] = value.to(flat.device) if is_moved else value
                continue
            if value.shape != size(parameter):
                raise ValueError(
                    f"{name} has shape {list(value.shape)}, its parameter {list(size(parameter))}"
                )
            local = local_state.setdefault(
                name, torch.zeros_like(flat, dtype=value.dtype, requires_grad=False)
            )
            piece.within(local).copy_(piece.of(value))
    for group, described in zip(inner.param_groups, groups, strict=True):
        group.update({name: value for name, value in described.items() if name != "params"})


def forget_whole(model: nn.Module) -> None:
    """Drop the whole weights that stage 3 keeps after a forward pass, until the next."""
    for parameter in model.parameters():
        if hasattr(parameter, "_z3_optimizer"):
            parameter._z3_optimizer.parameter_offload.partition_all_parameters()
            return


# --- configuration --------------------------------------------------------------------------------


def load_models_whole() -> None:
    """Make transformers load models unsplit; they are split when training begins.

    Otherwise ``generate`` would also wait for processes that do not generate.
    """
    unset_hf_deepspeed_config()


def require_installed() -> None:
    """Raise ConfigError when the launcher asks for DeepSpeed and it is not installed."""
    if parse_flag_from_env(FLAG) and importlib.util.find_spec("deepspeed") is None:
        raise ConfigError(
            "the launcher's configuration asks for DeepSpeed, which is not installed:"
            f" {install_line('verifiers-trainer', 'deepspeed')}, or use FSDP2 (configs/fsdp2.yaml),"
            " which needs nothing besides torch"
        )


def require_whole(model: nn.Module) -> None:
    """Raise ConfigError for a model that was split when it was constructed."""
    if is_split(model):
        raise ConfigError(
            "the model is split already, by deepspeed.zero.Init: give its name, or make it outside"
            " of that block; the trainer splits it when training begins"
        )


def in_one_precision(model: nn.Module, settings: TrainingArguments) -> None:
    """Make every parameter float32 if DeepSpeed computes so: it accepts one precision per model."""
    if not settings.bf16 and not any(map(holds, model.parameters())):
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.data = parameter.data.float()


def adopt(accelerator: Accelerator, settings: TrainingArguments | None) -> bool:
    """Whether DeepSpeed splits the model; if so, write ``settings`` into its configuration.

    *Raises* ConfigError for unsupported settings.
    """
    state, plugin = accelerator.state, getattr(settings, "deepspeed_plugin", None)
    if settings is None or plugin is None:
        return False
    load_models_whole()  # accelerate has just configured the opposite
    if state.distributed_type == DistributedType.NO:
        log.warning("one process on a CPU splits nothing: training continues without DeepSpeed")
        return False
    if state.distributed_type == DistributedType.MULTI_CPU:
        if warn_of_idle_accelerator():
            return False
        state.deepspeed_plugins = plugin
        state.distributed_type = DistributedType.DEEPSPEED
    if not torch.accelerator.is_available():
        if os.environ.get("ACCELERATE_MIXED_PRECISION", "no") != "no" and _is_first():
            log.warning(
                "no accelerator is used, so training computes in float32, not in bf16 or fp16"
            )
        _without_compiler()
    # DeepSpeed's calls
    warnings.filterwarnings("ignore", "`torch.distributed.[a-z_]*` is deprecated", FutureWarning)
    settle(plugin.deepspeed_config, settings)
    return True


def warn_of_idle_accelerator() -> bool:
    """Whether a model on the CPU cannot be split, with a warning: torch and DeepSpeed would use the
    machine's accelerators, which training does not use."""
    if is_there := torch.accelerator.is_available():
        log.warning(
            "the model is not split: it is trained on the CPU of a machine that has an accelerator"
        )
    return is_there


def is_used(accelerator: Accelerator) -> bool:
    """Whether DeepSpeed splits the model of this run, or will when training begins."""
    return accelerator.distributed_type == DistributedType.DEEPSPEED


def mark(accelerator: Accelerator, *, is_last: bool) -> None:
    """Say before a forward pass whether its backward pass is the last before ``step``."""
    engine = accelerator.deepspeed_engine_wrapped.engine
    if engine.managed_gradient_accumulation():
        engine.set_gradient_accumulation_boundary(is_last)


def backward(accelerator: Accelerator, loss: Tensor) -> None:
    """Add gradients, and nothing more: accelerate's ``backward`` takes the step too."""
    accelerator.deepspeed_engine_wrapped.engine.backward(loss)


def step(accelerator: Accelerator) -> None:
    """Clip the gradients of the backward passes and step the optimizer, unless the gradients are
    not finite."""
    accelerator.deepspeed_engine_wrapped.engine.step()


def detach_engine(accelerator: Accelerator) -> Any:
    """Take DeepSpeed's engine from accelerate, which would destroy it at a second training."""
    engine, accelerator.deepspeed_engine_wrapped = accelerator.deepspeed_engine_wrapped, None
    return engine


def settle(config: dict[str, Any], settings: TrainingArguments) -> None:
    """Write the trainer's settings into DeepSpeed's configuration, and warn where they replace
    other values.

    *Raises* ConfigError for unsupported settings.
    """
    split = config["zero_optimization"]
    if split.get("stage") not in (1, 2, 3):
        raise ConfigError(f"zero_stage {split.get('stage')} splits nothing: set it to 1, 2 or 3")
    for section in ("optimizer", "scheduler"):
        if section in config:
            raise ConfigError(
                f"the DeepSpeed configuration has a section {section!r}, which the trainer ignores:"
                " remove it, and use optim, learning_rate and lr_scheduler_type"
            )
    if settings.fp16:
        raise ConfigError("fp16 is not supported under DeepSpeed: use bf16 (mixed_precision: bf16)")
    for kind in ("offload_optimizer", "offload_param"):
        if (device := (split.get(kind) or {}).get("device", "none")) not in ("none", "cpu", None):
            raise ConfigError(f"{kind}_device {device!r} is not supported: set it to cpu or none")
    # the trainer uses torch's; DeepSpeed's would be compiled first
    config["zero_force_ds_cpu_optimizer"] = False
    ours: dict[str, object] = {
        "gradient_accumulation_steps": 1,  # the trainer marks the last backward pass of a step
        "gradient_clipping": float(settings.max_grad_norm or 0.0),
        "train_micro_batch_size_per_gpu": 1,
        "train_batch_size": settings.world_size,
    }
    for name, because in (
        ("gradient_accumulation_steps", "one step per batch"),
        ("gradient_clipping", "max_grad_norm"),
    ):
        if (theirs := config.get(name, "auto")) not in ("auto", ours[name]) and _is_first():
            message = "DeepSpeed's %s is %s (%s); its configuration has %s"
            log.warning(message, name, ours[name], because, theirs)
    if split["stage"] < 3:
        # the step finishes the sums, and no pass is marked: after one marked last these stages drop
        # what was added up before
        ours["managed_gradient_accumulation"] = False
    if split["stage"] == 1:
        split["overlap_comm"] = False  # DeepSpeed requires it then
    config.update(
        ours,
        fp16={"enabled": False},
        bf16={**config.get("bf16", {}), "enabled": bool(settings.bf16)},
    )
    if settings.bf16:  # by default DeepSpeed sums gradients in half precision
        config.setdefault("communication_data_type", "fp32")
        config.setdefault("data_types", {}).setdefault("grad_accum_dtype", "fp32")


def _is_first() -> bool:
    """Whether this is rank 0, the only rank that logs."""
    return os.environ.get("RANK", "0") == "0"


def remember(optimizer: torch.optim.Optimizer) -> None:
    """Store the parameters of a torch optimizer before DeepSpeed replaces them."""
    setattr(optimizer, GROUPS, [list(group["params"]) for group in optimizer.param_groups])


def is_split_optimizer(optimizer: torch.optim.Optimizer) -> bool:
    """Whether DeepSpeed replaced its parameters."""
    return hasattr(getattr(getattr(optimizer, "optimizer", None), "optimizer", None), GROUPS)


# --- inside DeepSpeed -----------------------------------------------------------------------------


class Piece(NamedTuple):
    """This process's piece of a trained parameter."""

    master: Tensor
    """The piece's float32 values: a view of the trained tensor."""
    start: int
    """Index in the whole, flattened parameter of the piece's first element."""
    offset: int
    """Index of the piece in flat tensors as long as the tensor that ``master`` is a view of."""
    flat: Tensor | None
    """That flat tensor; None under stages 1 and 2, where the parameter does not reference it."""

    def of(self, value: Tensor) -> Tensor:
        """The piece's elements of a whole tensor."""
        return value.flatten()[self.start : self.start + len(self.master)]

    def within(self, flat: Tensor) -> Tensor:
        """The parameter's elements of a flat tensor."""
        return flat[self.offset : self.offset + len(self.master)]


def _is_trained(parameter: object) -> TypeGuard[Managed]:
    if hasattr(parameter, "ds_id"):
        zero = getattr(parameter, "_z3_optimizer", None)
        return zero is not None and parameter.ds_id in zero.grad_position
    return hasattr(parameter, "_hp_mapping")


def _piece(parameter: Managed) -> Piece:
    if is_in_pieces(parameter):
        zero = parameter._z3_optimizer
        number, offset, piece_size = zero.grad_position[parameter.ds_id]
        start = dist.get_rank(group=parameter.ds_process_group) * piece_size
        length = max(0, min(piece_size, parameter.ds_numel - start))  # the rest is padding
        flat = zero.fp32_partitioned_groups_flat[number]
        return Piece(flat.detach()[offset : offset + length], start, offset, flat)
    mapping = parameter._hp_mapping
    if mapping is None:  # all of it is on other processes
        return Piece(torch.empty(0, device=parameter.device), 0, 0, None)
    offset = mapping.hp_fragment_address.start
    return Piece(mapping.hp_fragment.detach(), mapping.lp_fragment_address.start, offset, None)


def _trained(optimizer: torch.optim.Optimizer) -> Iterator[tuple[int, int, Managed, Piece, Tensor]]:
    """(number, its group's, parameter, its piece, the flat tensor that the optimizer knows), in the
    unsplit order."""
    inner, index = _inner(optimizer), 0
    for number, parameters in enumerate(getattr(inner, GROUPS)):
        for parameter in parameters:
            piece = _piece(parameter)
            flat = inner.param_groups[number]["params"][0] if piece.flat is None else piece.flat
            yield index, number, parameter, piece, flat
            index += 1


def _inner(optimizer: Any) -> Any:
    """torch's optimizer, within DeepSpeed's, within accelerate's."""
    return optimizer.optimizer.optimizer


def _group(parameter: Managed) -> dist.ProcessGroup:
    return parameter.ds_process_group if is_in_pieces(parameter) else parameter._dp_group


def _device() -> torch.device:
    from deepspeed.accelerator import get_accelerator

    return torch.device(get_accelerator().current_device_name())


def _without_compiler() -> None:
    """On a CPU make processes communicate by gloo alone: for shared memory DeepSpeed would compile
    an extension.

    DeepSpeed waits forever for the lock file that a killed compilation leaves.
    """
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
