"""The reference policy of the KL penalty ``beta``: the policy before training.

With a new adapter it is the base model with the adapter disabled, and takes no memory. Otherwise
(also of an adapter that was trained before), and with ``sync_ref_model``, it is a frozen copy of
the trained parameters, substituted for a forward pass of this module object alone: the engine has
separate module objects and does not see it.

With ``sync_ref_model`` the copy follows the policy: every ``ref_model_sync_steps`` steps ref ←
α·policy + (1-α)·ref, with α = ``ref_model_mixup_alpha`` (TR-DPO, arXiv 2404.09656). A copy is part
of every checkpoint, bit for bit. The copy of a model that is split over processes is split the same
way: create it after the split.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.func import functional_call

from verifiers.errors import ConfigError
from verifiers_trainer.algorithm.teacher_view import TeacherView
from verifiers_trainer.distributed import fsdp
from verifiers_trainer.policy.adapters import begins_trained
from verifiers_trainer.policy.checkpoint_files import reading
from verifiers_trainer.policy.logprobs import TeacherStates, find_causal_lm, states_of

if TYPE_CHECKING:
    from verifiers_trainer.settings.config import RLConfig

FILE = "reference.safetensors"


class Reference:
    """Callable like the model, with the reference's weights; ``model`` has the log-probability
    forward installed."""

    def __init__(self, model: nn.Module, *, sync_steps: int | None = None, alpha: float = 0.5):
        self.model, self.sync_steps, self.alpha = model, sync_steps, alpha
        self.weights: dict[str, Tensor] | None = None
        """Frozen values of the trained parameters; None: the adapter is disabled instead."""
        is_base = hasattr(model, "peft_config") and not begins_trained(model)
        if sync_steps is not None or not is_base:
            self.weights = {name: fsdp.part(trained).clone() for name, trained in _trained(model)}

    @classmethod
    def of(cls, model: nn.Module, config: RLConfig) -> Reference | None:
        """The reference for these settings; None, with nothing allocated, without a penalty."""
        if not config.beta:
            return None
        steps = config.ref_model_sync_steps if config.sync_ref_model else None
        return cls(model, sync_steps=steps, alpha=config.ref_model_mixup_alpha)

    def __call__(self, **arguments: Tensor) -> object:
        """Run the model's forward with the reference's weights, without gradient."""
        was_training = self.model.training
        self.model.eval()
        try:
            with torch.no_grad():
                if self.weights is None:
                    with _adapter_off(self.model):
                        return self.model(**arguments)
                if fsdp.is_split(self.model):
                    return self._run_split(arguments)
                # DeepSpeed may have changed the policy's layers to half precision
                in_dtype = {
                    name: self.weights[name].to(parameter.dtype)
                    for name, parameter in _trained(self.model)
                }
                return functional_call(self.model, in_dtype, (), arguments)
        finally:
            self.model.train(was_training)

    @property
    def identity(self) -> str:
        """As a teacher (``teacher.SELF`` with ``sync_ref_model``), which the checkpoint has."""
        return "self, synced"

    def states(
        self, view: TeacherView, device: torch.device | str, top_k: int | None
    ) -> TeacherStates:
        """The whole distributions of the reference as a teacher; see ``logprobs.states_of``."""
        head = None if self.weights is None else self._copied_head()
        return states_of(self.model, view, device, forward=self, head=head, top_k=top_k)

    def _copied_head(self) -> Callable[[Tensor], Tensor] | None:
        """The head with the reference's weights; None if it is not trained."""
        head = find_causal_lm(self.model).get_output_embeddings()
        copies = {id(p): (self.weights or {})[name] for name, p in _trained(self.model)}
        if not any(id(parameter) in copies for parameter in head.parameters()):
            return None
        if type(head) is not nn.Linear or fsdp.is_split(self.model):
            raise ConfigError(
                "a synced teacher's whole distributions need its head as one linear layer, and"
                f" this one is {'split' if type(head) is nn.Linear else type(head).__name__}: set"
                " loss='distill', or leave sync_ref_model out"
            )
        return _Linear(*(copies.get(id(p), p) for p in (head.weight, head.bias)))

    def _run_split(self, arguments: Mapping[str, object]) -> object:
        """Run a split model, whose forward gathers its parameters, with the reference's values."""
        assert self.weights is not None
        fsdp.forget_whole(self.model)
        pairs = [(parameter, self.weights[name]) for name, parameter in _trained(self.model)]
        try:
            with fsdp.in_place_of(pairs):
                return self.model(**arguments)
        finally:
            fsdp.forget_whole(self.model)

    def after_step(self, step: int) -> None:
        """Move towards the policy if the ``step``-th step is one of ``sync_steps``."""
        if self.sync_steps is None or step % self.sync_steps:
            return
        assert self.weights is not None
        with torch.no_grad():
            for name, parameter in _trained(self.model):
                self.weights[name].mul_(1 - self.alpha).add_(fsdp.part(parameter), alpha=self.alpha)

    def state(self, *, keep: bool = True) -> dict[str, Tensor]:
        """The copy as whole CPU tensors where ``keep`` is set, else empty; every rank of a split
        run calls it."""
        parameters = dict(_trained(self.model)) if self.weights else {}
        gathered = (
            (name, fsdp.whole_of_part(weight, parameters[name]))
            for name, weight in (self.weights or {}).items()
        )
        return {fsdp.plain(name): weight.cpu().contiguous() for name, weight in gathered if keep}

    def save(self, folder: Path, state: dict[str, Tensor] | None = None) -> None:
        """Write the copy, if there is any; for a split model pass the gathered ``state``."""
        if self.weights is not None:
            save_file(self.state() if state is None else state, folder / FILE)

    def load(self, folder: Path) -> None:
        """Read what ``save`` wrote. *Raises* CheckpointError when it is missing or does not fit."""
        if self.weights is None:
            return
        with reading(folder):
            saved = load_file(folder / FILE)
            if saved.keys() != set(map(fsdp.plain, self.weights)):
                raise ValueError(f"{FILE} does not hold the parameters that are trained")
            for name, parameter in _trained(self.model):
                self.weights[name].copy_(fsdp.part_like(saved[fsdp.plain(name)], parameter))


@dataclass(frozen=True, slots=True)
class _Linear:
    """A linear layer of these weights."""

    weight: Tensor
    bias: Tensor | None

    def __call__(self, hidden: Tensor) -> Tensor:
        return nn.functional.linear(hidden, self.weight, self.bias)


@contextmanager
def _adapter_off(model: Any) -> Iterator[None]:
    """Disable the adapter; afterwards restore ``requires_grad`` of every parameter, which PEFT
    alone does not do."""
    flags = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        with model.disable_adapter():
            yield
    finally:
        for parameter, requires_grad in flags:
            parameter.requires_grad_(requires_grad)


def _trained(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [entry for entry in model.named_parameters() if entry[1].requires_grad]
