"""Several adapters over one frozen model, each with its optimizer, step and version.

    adapters = AdapterSet(model)
    sums, words = adapters.create(LoraOptions(rank=8)), adapters.create(LoraOptions(rank=16))
    adapters.forward_backward(sums, data, "cross_entropy")
    sums.optim_step(AdamSettings(learning_rate=1e-4))

One adapter is computed at a time, alone: what it becomes depends on its own requests and on
nothing that happens to the others, bit for bit. `Adapter.snapshot` is what a generation loop
samples with (``GenerationRequest.adapter``), whatever is trained meanwhile; there rows of all
adapters decode together.

Files are peft's: `Adapter.save` writes what ``PeftModel.from_pretrained`` and ``vf-train`` load,
`AdapterSet.load` reads what they write.

Not covered: experts that are one parameter for all, layers that are read instead of called
(``adapters.default_targets``), dropout, DoRA and whole modules beside the adapter.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from verifiers.errors import ConfigError
from verifiers.runtime.decoding import read_json
from verifiers.storage.files import atomic_write, replacing, share_modes
from verifiers_trainer.algorithm.datum_losses import Datum, check_datum, datum_loss
from verifiers_trainer.engines.embedded.engine import share_parameters
from verifiers_trainer.engines.lora import LoraWeights, LowRank, RowAdapters
from verifiers_trainer.policy.adapter_files import ADAPTER, WEIGHTS, read_adapter
from verifiers_trainer.policy.adapters import default_targets, kind_of_layer
from verifiers_trainer.policy.forward_checks import check_head
from verifiers_trainer.policy.logprobs import install_logprob_forward

if TYPE_CHECKING:
    from transformers import PreTrainedModel

OPTIMIZER = "optimizer.safetensors"
"""Beside a saved adapter: the averages of its optimizer."""
ALPHA = 32
"""``lora_alpha`` of a new adapter, whatever its rank."""
MAX_RANK = 512
ROW_TOKENS = 4096
"""Most tokens of one forward and backward pass, unless one datum is longer."""
_PREFIX = "base_model.model."
_ENDS_OF_MLP = frozenset({"gate_proj", "up_proj", "down_proj", "c_fc", "fc1", "fc2"})
_AVERAGES = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True)
class LoraOptions:
    """What a new adapter is."""

    rank: int = 32
    seed: int = 0
    """Of the A matrices; B is zero, so that a new adapter changes nothing."""
    attention: bool = True
    mlp: bool = True
    head: bool = True
    """Which layers have an adapter; ``attention`` is every layer that is neither MLP nor head."""


@dataclass(frozen=True, slots=True)
class AdamSettings:
    """Of one optimizer step of AdamW, arXiv 1711.05101."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0
    """Norm that the gradient is scaled down to; 0 for no limit."""

    def __post_init__(self) -> None:
        within = {
            "learning_rate": self.learning_rate >= 0,
            "beta1": 0 <= self.beta1 < 1,
            "beta2": 0 <= self.beta2 < 1,
            "eps": self.eps >= 0,
            "weight_decay": self.weight_decay >= 0,
            "grad_clip_norm": self.grad_clip_norm >= 0,
        }
        for name, is_within in within.items():
            if not is_within or not math.isfinite(getattr(self, name)):
                raise ConfigError(f"{name}={getattr(self, name)!r} is out of range", field=name)


@dataclass(frozen=True, slots=True)
class LossResult:
    """What a pass over data gave."""

    loss: float
    """The sum over all tokens."""
    logprobs: list[np.ndarray]
    """Of each datum, float32 [T]: the log-probability of each target."""


class Adapter:
    """An adapter that is trained: weights, gradient, optimizer."""

    def __init__(self, layers: Mapping[str, LowRank], scale: float, rank: int):
        self.rank, self.scale = rank, scale
        self.step = 0
        """Optimizer steps so far; also the version of what is sampled."""
        self.layers = layers
        self.has_gradient = False
        self.broken: str | None = None
        """Why the gradient is incomplete; the next optimizer step is refused with it."""
        self._optimizer = torch.optim.AdamW(self.parameters())

    def parameters(self) -> list[Tensor]:
        """A and B of every layer, in the order of the layers' names."""
        return [
            tensor
            for _, layer in sorted(self.layers.items())
            for tensor in (layer.a_RI, layer.b_OR)
        ]

    @property
    def trained(self) -> LoraWeights:
        """The weights themselves, with their gradient."""
        return LoraWeights(self.layers, self.scale, self.step)

    def snapshot(self) -> LoraWeights:
        """A copy of the weights, which later steps do not change."""
        layers = {
            name: LowRank(layer.a_RI.detach().clone(), layer.b_OR.detach().clone())
            for name, layer in self.layers.items()
        }
        return LoraWeights(layers, self.scale, self.step)

    def drop_gradient(self, why: str | None = None) -> None:
        """Forget the gradient; the next step is refused if it is said ``why``."""
        self._optimizer.zero_grad()
        self.has_gradient, self.broken = False, why

    def optim_step(self, settings: AdamSettings) -> dict[str, float]:
        """Take a step with the gradient so far, which begins anew; return its norm.

        *Raises* ``ConfigError``, with unchanged weights, without a gradient or with one that is
        incomplete or not finite.
        """
        why, has_gradient = self.broken, self.has_gradient
        if why is not None:
            self.drop_gradient()
            raise ConfigError(f"the gradient is incomplete, nothing was trained: {why}")
        if not has_gradient:
            raise ConfigError("there is no gradient: call forward_backward before optim_step")
        limit = settings.grad_clip_norm or math.inf
        norm = float(torch.nn.utils.clip_grad_norm_(self.parameters(), limit))
        if not math.isfinite(norm):
            self.drop_gradient()
            raise ConfigError("the gradient is not finite, nothing was trained: lower the rate")
        for group in self._optimizer.param_groups:
            group["lr"] = settings.learning_rate
            group["betas"] = (settings.beta1, settings.beta2)
            group["eps"], group["weight_decay"] = settings.eps, settings.weight_decay
        self._optimizer.step()
        self.drop_gradient()
        self.step += 1
        return {"grad_norm": norm}

    # --- files ------------------------------------------------------------------------------------

    def save(self, folder: Path, base: str, *, is_whole: bool, **described: object) -> str:
        """Write the adapter of the model ``base`` as peft's files, with ``is_whole`` its optimizer
        too; return the digest of the weights. ``described`` goes into ``adapter.json``, beside step
        and digest."""
        tensors = {
            f"{_PREFIX}{name}.lora_{letter}.weight": tensor.detach().cpu().contiguous()
            for name, layer in self.layers.items()
            for letter, tensor in (("A", layer.a_RI), ("B", layer.b_OR))
        }
        digest = digest_of(tensors)
        with replacing(folder) as new:
            new.mkdir()
            save_file(tensors, new / WEIGHTS, {"format": "pt"})
            if is_whole:
                save_file(self._averages(), new / OPTIMIZER)
            config = {
                "peft_type": "LORA",
                "task_type": "CAUSAL_LM",
                "base_model_name_or_path": base,
                "r": self.rank,
                "lora_alpha": self.scale * self.rank,
                "target_modules": sorted(self.layers),
                "lora_dropout": 0.0,
                "bias": "none",
                "fan_in_fan_out": False,
                "inference_mode": True,
            }
            atomic_write(new / ADAPTER, json.dumps(config, indent=1).encode())
            about = {"step": self.step, "digest": digest, **described}
            atomic_write(new / ABOUT, json.dumps(about, indent=1).encode())
            share_modes(new.iterdir())
        return digest

    def _averages(self) -> dict[str, Tensor]:
        """Empty before the first step."""
        states = [self._optimizer.state.get(parameter, {}) for parameter in self.parameters()]
        return {
            f"{index}.{name}": state[name].contiguous()
            for index, state in enumerate(states)
            for name in (*_AVERAGES, "step")
            if state
        }

    def load_averages(self, path: Path) -> None:
        """Continue with a saved optimizer. *Raises* ``ConfigError``."""
        try:
            tensors = load_file(path)
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path} cannot be read as an optimizer: {error}") from error
        parameters = self.parameters()
        for index, parameter in enumerate(parameters if tensors else ()):
            names = [f"{index}.{name}" for name in (*_AVERAGES, "step")]
            if not tensors.keys() >= set(names) or tensors[names[0]].shape != parameter.shape:
                raise ConfigError(f"{path} is the optimizer of another adapter")
            *averages, step = (tensors[name] for name in names)
            self._optimizer.state[parameter] = {
                "step": step,
                **{
                    name: average.to(parameter.device)
                    for name, average in zip(_AVERAGES, averages, strict=True)
                },
            }


ABOUT = "adapter.json"
"""Beside a saved adapter: step, digest, and what the one who saved it knows."""


def digest_of(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 of names and values."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name].contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


class AdapterSet:
    """Adapters over ``model``, whose weights are frozen. Used by one thread.

    max_seq_len: most tokens of a datum.

    *Raises* ``ConfigError`` for a model whose log-probabilities cannot be computed.
    """

    def __init__(self, model: PreTrainedModel, *, max_seq_len: int = 4096):
        model.requires_grad_(False)
        self.model = model
        """The model without adapters; nothing of it is changed."""
        self.max_seq_len = max_seq_len
        self.vocabulary: int = model.config.get_text_config().vocab_size
        self._module = share_parameters(model)
        self._module.config.use_cache = False
        install_logprob_forward(self._module)
        if not check_head(self._module).ok:
            install_logprob_forward(self._module, full_head=True)
        self._rows = RowAdapters(self._module)
        head = model.get_output_embeddings()
        self._head = next(name for name, each in model.named_modules() if each is head)
        self._device = next(model.parameters()).device

    def create(self, options: LoraOptions) -> Adapter:
        """A new adapter, which changes nothing yet. *Raises* ``ConfigError``."""
        if not 1 <= options.rank <= MAX_RANK:
            raise ConfigError(f"rank={options.rank} must be from 1 to {MAX_RANK}", field="rank")
        names = self._targets(options)
        if not names:
            raise ConfigError("no layer of the model is of the kinds that are to be trained")
        generator = torch.Generator().manual_seed(options.seed)
        layers = {}
        for name in sorted(names):
            outputs, inputs = _sizes(self.model.get_submodule(name))
            # uniform on ±1/√inputs: Kaiming's bound with a = √5, as peft begins
            a_RI = (torch.rand(options.rank, inputs, generator=generator) * 2 - 1) / inputs**0.5
            layers[name] = self._layer(a_RI, torch.zeros(outputs, options.rank))
        return Adapter(layers, ALPHA / options.rank, options.rank)

    def _layer(self, a_RI: Tensor, b_OR: Tensor) -> LowRank:
        """On the device, in float32: steps are smaller than the precision of bfloat16."""
        parts = (part.to(self._device, torch.float32, copy=True) for part in (a_RI, b_OR))
        return LowRank(*(part.requires_grad_() for part in parts))

    def _targets(self, options: LoraOptions) -> list[str]:
        covered = default_targets(self.model)
        is_chosen = {"head": options.head, "mlp": options.mlp, "attention": options.attention}
        return [
            name
            for name, layer in self.model.named_modules()
            if isinstance(layer, nn.Linear | Conv1D)
            and is_chosen.get(kind := self.kind(name))
            and (kind == "head" or covered == "all-linear" or _ends_with(name, covered))
        ]

    def kind(self, name: str) -> str:
        """``head``, ``mlp``, ``experts`` or ``attention``: the kind of a layer, by its name."""
        if name == self._head:
            return "head"
        try:
            kind = kind_of_layer(self.model, name)
        except AttributeError:  # the end of a name, as peft's files may have it
            return "mlp" if name in _ENDS_OF_MLP else "attention"
        # rows of experts are no longer those of the batch
        return {"MLP": "mlp", "experts": "experts"}.get(kind, "attention")

    def load(self, folder: Path, *, with_optimizer: bool) -> tuple[Adapter, dict[str, object]]:
        """(a saved adapter, what was saved with it); one of peft too, which has no optimizer.

        *Raises* ``ConfigError`` for files that cannot be read, another model's adapter, or weights
        that are not those that were saved.
        """
        described = read_adapter(folder)
        unsupported = {
            "use_dora": described.get("use_dora"),
            "modules_to_save": described.get("modules_to_save"),
            "rank_pattern": described.get("rank_pattern"),
            "alpha_pattern": described.get("alpha_pattern"),
            "bias": described.get("bias", "none") != "none",
            "peft_type": described.get("peft_type", "LORA") != "LORA",
        }
        if names := [name for name, value in unsupported.items() if value]:
            raise ConfigError(f"{folder / ADAPTER}: {names[0]} is not supported by an adapter set")
        try:
            rank, alpha = int(described["r"]), float(described["lora_alpha"])
            tensors = load_file(folder / WEIGHTS)
        except (KeyError, OSError, TypeError, ValueError) as error:
            raise ConfigError(f"{folder} cannot be read as an adapter: {error}") from error
        scale = alpha / (math.sqrt(rank) if described.get("use_rslora") else rank)
        adapter = Adapter(self._layers_of(tensors, rank, folder), scale, rank)
        about = _about(folder)
        if (digest := about.get("digest")) is not None and digest != digest_of(tensors):
            raise ConfigError(
                f"{folder / WEIGHTS} has other weights than were saved there: it was exchanged"
            )
        if isinstance(step := about.get("step"), int):
            adapter.step = step
        if with_optimizer and (folder / OPTIMIZER).is_file():
            adapter.load_averages(folder / OPTIMIZER)
        return adapter, about

    def _layers_of(
        self, tensors: Mapping[str, Tensor], rank: int, folder: Path
    ) -> dict[str, LowRank]:
        layers = {}
        modules = dict(self.model.named_modules())
        names = {
            name.removeprefix(_PREFIX).rpartition(".lora_")[0]
            for name, value in tensors.items()
            if not self._is_of_base(name, value)
        }
        for name in sorted(names):
            parts = [tensors.get(f"{_PREFIX}{name}.lora_{letter}.weight") for letter in "AB"]
            module = modules.get(name)
            if None in parts or not isinstance(module, nn.Linear | Conv1D):
                raise ConfigError(
                    f"{folder / WEIGHTS} is an adapter of another model: this one has no layer"
                    f" {name!r} with an A and a B"
                )
            outputs, inputs = _sizes(module)
            a_RI, b_OR = parts
            assert a_RI is not None
            assert b_OR is not None
            if a_RI.shape != (rank, inputs) or b_OR.shape != (outputs, rank):
                raise ConfigError(f"{folder / WEIGHTS} has another size of {name!r} than the model")
            layers[name] = self._layer(a_RI, b_OR)
        if not layers:
            raise ConfigError(f"{folder / WEIGHTS} has no adapter of a layer")
        return layers

    def _is_of_base(self, name: str, value: Tensor) -> bool:
        """Whether it is a weight of the base, which peft saves beside the adapter of a head."""
        plain = name.removeprefix(_PREFIX).replace(".base_layer", "")
        weight = self.model.state_dict().get(plain)
        return weight is not None and torch.equal(weight.cpu(), value.to(weight.dtype))

    # --- passes -----------------------------------------------------------------------------------

    def forward_backward(
        self,
        adapter: Adapter,
        data: Sequence[Datum],
        loss: str,
        config: Mapping[str, float] | None = None,
        *,
        forward_only: bool = False,
    ) -> LossResult:
        """The loss of ``data`` (`DATUM_LOSSES`); its gradient is added to the adapter's, unless
        ``forward_only``.

        *Raises* ``ConfigError`` for data or a loss that cannot be computed, before anything is.
        """
        kind, settings = datum_loss(loss, config or {})
        for datum in data:
            check_datum(datum, loss, self.vocabulary, self.max_seq_len)
        total, logprobs = 0.0, []
        for row in _rows(data):
            with torch.set_grad_enabled(not forward_only), self._rows.of([adapter.trained]):
                of_data = self._logprobs(row)
                losses = [
                    kind.function(logp, self._on_device(datum.inputs), settings)
                    for logp, datum in zip(of_data, row, strict=True)
                ]
                loss_of_row = torch.stack(losses).sum()
                if not forward_only:
                    loss_of_row.backward()
                    adapter.has_gradient = True
            total += float(loss_of_row.detach())
            logprobs += [logp.detach().float().cpu().numpy() for logp in of_data]
        return LossResult(total, logprobs)

    def logprobs(self, weights: LoraWeights | None, ids: Sequence[int]) -> np.ndarray:
        """float32 [T-1]: the log-probability of each token of ``ids`` but the first."""
        array = np.asarray(ids, np.int32)
        datum = Datum(array[:-1], array[1:], {})
        with torch.no_grad(), self._rows.of([weights]):
            (logprobs_T,) = self._logprobs([datum])
        return logprobs_T.float().cpu().numpy()

    def _logprobs(self, row: Sequence[Datum]) -> list[Tensor]:
        """Of each datum [T], from one pass over all of them."""
        ids, labels, positions = [], [], []
        for datum in row:
            # the last target has no token of its own in the input
            ids += [datum.token_ids, datum.target_ids[-1:]]
            labels += [datum.token_ids[:1], datum.target_ids]
            positions.append(np.arange(datum.num_tokens + 1))
        arguments = {
            name: torch.from_numpy(np.concatenate(arrays).astype(np.int64)).to(self._device)
            for name, arrays in (
                ("input_ids", ids),
                ("labels", labels),
                ("position_ids", positions),
            )
        }
        logprobs: Tensor = self._module(**arguments).logprobs
        lengths = [datum.num_tokens + 1 for datum in row]
        return [part[1:] for part in logprobs.split(lengths)]

    def _on_device(self, inputs: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
        return {
            name: torch.from_numpy(array.astype(np.float32)).to(self._device)
            for name, array in inputs.items()
        }


def _rows(data: Sequence[Datum]) -> Iterable[list[Datum]]:
    """``data`` in their order, as many together as have ``ROW_TOKENS`` tokens."""
    row: list[Datum] = []
    for datum in data:
        if row and sum(each.num_tokens + 1 for each in [*row, datum]) > ROW_TOKENS:
            yield row
            row = []
        row.append(datum)
    if row:
        yield row


def _about(folder: Path) -> dict[str, object]:
    if not (folder / ABOUT).is_file():
        return {}
    try:
        about = read_json(folder / ABOUT)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder / ABOUT} cannot be read: {error}") from error
    if not isinstance(about, dict):
        raise ConfigError(f"{folder / ABOUT} is no JSON object")
    return about


def _sizes(layer: nn.Module) -> tuple[int, int]:
    """(outputs, inputs) of a linear layer."""
    if isinstance(layer, Conv1D):
        return layer.weight.shape[1], layer.weight.shape[0]
    assert isinstance(layer, nn.Linear)
    return layer.out_features, layer.in_features


def _ends_with(name: str, targets: str | list[str]) -> bool:
    return any(name == target or name.endswith(f".{target}") for target in targets)
