"""Saved adapters: reading one with its base model, training it further, merging it, and a base that
other programs load.

An adapter's file names its base as an absolute folder or as a repository. A base that is in no file
(``builtin:tiny``, a model made in a script) is written beside the run, once.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
import logging
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from verifiers.errors import ConfigError
from verifiers.storage.files import replacing, share_modes
from verifiers_trainer.distributed import fsdp
from verifiers_trainer.engines.processing import save_texts
from verifiers_trainer.engines.role_adapters import roles_of, set_roles
from verifiers_trainer.engines.role_client import adapter_name
from verifiers_trainer.policy import builtin_models, quantization
from verifiers_trainer.policy.adapter_files import (
    ADAPTER,
    SETTINGS,
    adapter_folder,
    base_quantization,
    read_adapter,
    role_folders,
)
from verifiers_trainer.policy.loading import get_model

if TYPE_CHECKING:
    from peft import PeftConfig
    from transformers import PreTrainedModel
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase

    from verifiers_trainer.settings.config import RLConfig

log = logging.getLogger(__name__)

BASE = "base-"
"""Beginning of the name of a folder with a written base; a hash of the base follows."""


def load_adapter(
    folder: Path,
    *,
    is_trainable: bool = False,
    use_liger: bool = True,
    model_kwargs: dict[str, Any] | None = None,
    quantize: Literal["nf4"] | None = None,
    name: str = "default",
) -> Any:
    """The base model of a saved adapter with the adapter around it, of that ``name`` in peft;
    keywords as in ``get_model``.

    The base of an adapter that was trained on four bits is in four bits without ``quantize`` too.

    *Raises* ``ConfigError``, which names the adapter's file where its base cannot be loaded.
    """
    from peft import PeftModel

    base = read_adapter(folder)["base_model_name_or_path"]
    try:
        quantize = quantize or base_quantization(folder)
        model = get_model(base, use_liger, model_kwargs, quantize)
    except ConfigError as error:
        raise ConfigError(
            f"{folder / ADAPTER}: the base model of the adapter: {error} (a relative path is read"
            " from the folder you work in: write the whole path as its base_model_name_or_path)"
        ) from error
    return PeftModel.from_pretrained(
        model, str(folder), adapter_name=name, is_trainable=is_trainable
    )


# --- a run that begins with a saved adapter -------------------------------------------------------


def adopt_settings(model: object, config: RLConfig) -> None:
    """Where ``model`` names a saved adapter that is trained further, make its rank, scale and
    layers those of the settings.

    *Raises* ``ConfigError`` for settings of another adapter, and for ``merge_adapter`` where there
    is none.
    """
    folder = adapter_folder(model)
    if roles := role_folders(model):
        _require_per_role(str(model), roles, config)
        folder = next(iter(roles.values()))
    elif folder is not None and config.lora_per_role and not config.merge_adapter:
        raise ConfigError(
            f"{folder} is one adapter, and lora_per_role trains one for each role: set"
            " merge_adapter=True, which merges it into their base first"
        )
    if folder is None:
        if config.merge_adapter:
            raise ConfigError(
                f"merge_adapter=True, and the model {model!r} is not the folder of a saved adapter:"
                " leave merge_adapter out"
            )
        return
    if config.merge_adapter:
        return
    instead = "or set merge_adapter=True, which merges it into its base first"
    if config.is_given("use_lora") and not config.use_lora:
        raise ConfigError(
            f"{folder} is an adapter, and use_lora=False trains all weights: leave use_lora out to"
            f" train the adapter further, {instead}"
        )
    if config.lora_config is not None:
        raise ConfigError(f"{folder} has an adapter: leave lora_config out, {instead}")
    described = read_adapter(folder)
    if quantize := base_quantization(folder):
        config.derive(quantize=quantize)
    values = {setting: described.get(name) for setting, name in SETTINGS.items()}
    for setting, value in values.items():
        setting_value = getattr(config, setting)
        if config.is_given(setting) and _as_set(setting_value) != _as_set(value):
            raise ConfigError(
                f"{setting} is {setting_value!r}, and that of the adapter in {folder} is"
                f" {value!r}: leave {setting} out, {instead}"
            )
        if isinstance(value, list):
            values[setting] = sorted(value)
    config.derive(use_lora=True, **{n: value for n, value in values.items() if value is not None})


def _require_per_role(folder: str, roles: Mapping[str, Path], config: RLConfig) -> None:
    """Raise ``ConfigError`` unless a run on the adapters of ``roles`` trains these further."""
    if config.merge_adapter:
        raise ConfigError(
            f"merge_adapter=True merges one adapter, and {folder} has those of {', '.join(roles)}:"
            f" name one of them as the model, such as {next(iter(roles.values()))}"
        )
    if not config.lora_per_role:
        raise ConfigError(
            f"{folder} has the adapters of the roles {', '.join(roles)}: set lora_per_role=True to"
            " train them further, or name one of them as the model, such as"
            f" {next(iter(roles.values()))}"
        )


def _as_set(value: object) -> object:
    return frozenset(value) if isinstance(value, list) else value


def start_from(folder: Path, config: RLConfig) -> Any:
    """The model that a run on a saved adapter trains: the adapter with its base, or with
    ``merge_adapter`` an ordinary model that it is merged into. Says which.

    *Raises* as ``load_adapter``.
    """
    described = read_adapter(folder)
    base = described["base_model_name_or_path"]
    options: Any = {
        "use_liger": config.use_liger,
        "model_kwargs": config.model_init_kwargs,
        "quantize": config.quantize,
    }
    if config.merge_adapter:
        model = merge_precisely(load_adapter(folder, **options)).requires_grad_(True)
        # what is made of it has this base, and not that of the adapter
        model.name_or_path = model.config.name_or_path = str(folder.absolute())
        log.info("begins with %s merged into %s", folder, base)
        return model
    model = load_adapter(folder, is_trainable=True, **options)
    model.begins_trained = True
    targets = described.get("target_modules") or ()
    log.info(
        "trains the adapter %s further: rank %s, alpha %s, on %s of %s",
        *(folder, described.get("r"), described.get("lora_alpha")),
        *(targets if isinstance(targets, str) else ", ".join(sorted(targets)), base),
    )
    return model


# --- adapters of roles -----------------------------------------------------------------------------


def with_role_adapters(
    model: PreTrainedModel, described: PeftConfig, roles: Sequence[str], seed: int
) -> Any:
    """``model`` with a new adapter for each of ``roles``. All have the first weights of an ordinary
    run's, so that they do not depend on who else is trained.

    *Raises* ``ConfigError`` for what is no plain LoRA, and for layers of experts, whose rows are no
    longer those of the batch.
    """
    from peft import get_peft_model

    if getattr(described, "modules_to_save", None):
        raise ConfigError(
            "lora_per_role trains adapters alone, and modules_to_save trains modules beside them:"
            " leave it out"
        )
    first, *later = map(adapter_name, roles)
    torch.manual_seed(seed)
    adapted: Any = get_peft_model(model, copy.copy(described), adapter_name=first)
    for name in later:
        torch.manual_seed(seed)
        # with the layers that peft has made of the description
        adapted.add_adapter(name, copy.deepcopy(adapted.peft_config[first]))
    base = adapted.get_base_model()
    names = [name for name, layer in base.named_modules() if hasattr(layer, "lora_A")]
    if of_experts := [name for name in names if kind_of_layer(base, name) == "experts"]:
        raise ConfigError(
            f"lora_per_role computes rows with adapters of their own, and {of_experts[0]} is of"
            " experts, which see no rows: set lora_target_modules to other layers"
        )
    set_roles(adapted, roles)
    return adapted


def load_role_adapters(roles: Mapping[str, Path], **options: Any) -> Any:
    """The base model of saved adapters of ``roles``, with all of them around it, frozen;
    ``options``: those of ``load_adapter``.

    *Raises* ``ConfigError`` as ``load_adapter``, and for adapters of several bases.
    """
    bases = {str(read_adapter(folder)["base_model_name_or_path"]) for folder in roles.values()}
    if len(bases) > 1:
        raise ConfigError(
            f"the adapters {', '.join(map(str, roles.values()))} have different bases,"
            f" {' and '.join(sorted(bases))}: they are not of one training"
        )
    model: Any = None
    for role, folder in roles.items():
        if model is None:
            model = load_adapter(folder, name=adapter_name(role), **options)
        else:
            model.load_adapter(str(folder), adapter_name=adapter_name(role))
    set_roles(model, tuple(roles))
    return model.requires_grad_(False)


def start_from_roles(roles: Mapping[str, Path], config: RLConfig) -> Any:
    """The model that a run on saved adapters of roles trains further.

    *Raises* ``ConfigError`` as ``load_role_adapters``, and for other roles than the run's.
    """
    if roles.keys() != set(config.adapter_roles):
        raise ConfigError(
            f"{next(iter(roles.values())).parent} has the adapters of {', '.join(roles)}, and the"
            f" environment trains {', '.join(config.adapter_roles)}: begin with their base"
        )
    ordered = {role: roles[role] for role in config.adapter_roles}
    model = load_role_adapters(
        ordered,
        use_liger=config.use_liger,
        model_kwargs=config.model_init_kwargs,
        quantize=config.quantize,
    )
    set_roles(model, config.adapter_roles)
    model.begins_trained = True
    log.info("trains the adapters of %s further", ", ".join(ordered))
    return model


def require_one_adapter(model: Any, *, merged: bool) -> None:
    """Raise ``ConfigError`` where one model is to be made of the adapters of several roles."""
    if merged and (roles := roles_of(model)):
        raise ConfigError(
            f"one merged model cannot be all of the roles {', '.join(roles)}, which have adapters"
            " of their own: leave --merged (merged=True) out, and merge the adapter that you need"
        )


def record_quantization(model: Any, folder: Path) -> None:
    """Write beside each adapter that was saved to ``folder`` which base it was trained on, if that
    was in four bits."""
    names = [adapter_name(role) for role in roles_of(model)] or [""]
    for name in names:
        quantization.record_base(model, folder / name)


def begins_trained(model: object) -> bool:
    """Whether the adapter of ``model`` was trained before the run."""
    return getattr(model, "begins_trained", False) is True


# --- what a new adapter covers ---------------------------------------------------------------------


def default_targets(model: nn.Module) -> str | list[str]:
    """The layers of ``model`` that get an adapter by default: every linear layer but the head, and
    none that computes without its adapter.

    A Mamba layer gives the weight of its ``out_proj`` to a fused kernel, and others multiply by a
    layer's weight: an adapter on such a layer would be trained and never used. peft refuses some
    of them.
    """
    linear = {
        name: layer
        for name, layer in model.named_modules()
        if isinstance(layer, (nn.Linear, Conv1D)) and layer is not _head(model)
    }
    bypassed = {name for name in linear if is_bypassed(model, name)}
    bypassed |= {name for name, layer in linear.items() if _is_special(model, layer)}
    ends = {name: name.rpartition(".")[2] for name in linear}
    # a number is the end of the name of any list's module
    ambiguous = {ends[name] for name in bypassed} | {end for end in ends.values() if end.isdigit()}
    if not ambiguous:
        return "all-linear"
    spelled = {name for name in linear if ends[name] in ambiguous} - bypassed
    return sorted(spelled | set(ends.values()) - ambiguous)


def _head(model: object) -> nn.Module | None:
    head: nn.Module | None = getattr(model, "get_output_embeddings", lambda: None)()
    return head


def is_bypassed(model: nn.Module, name: str) -> bool:
    """Whether the module that holds the layer ``name`` reads its weight, and not its dtype alone,
    instead of calling it."""
    parent, _, attribute = name.rpartition(".")
    try:
        source = inspect.getsource(type(model.get_submodule(parent)))
    except (OSError, TypeError):  # a class without a source file
        return False
    reads = source.split(f"self.{attribute}.weight")[1:]
    return any(not rest_of_line.startswith(_OF_A_TENSOR) for rest_of_line in reads)


_OF_A_TENSOR = (".dtype", ".device", ".shape")
"""What is read of a weight without its values."""


def _is_special(model: nn.Module, layer: nn.Module) -> bool:
    """Whether a linear layer computes something of its own, as a router that returns two tensors."""
    kind = type(layer)
    return kind.__module__ == type(model).__module__ and "forward" in vars(kind)


_KINDS = {
    "mixers": "Mamba DeltaNet DeltaAttention LinearAttention LightningAttention ShortConv SSM"
    " Recurrent LSTM Rwkv Mixer",
    "attention": "Attention Attn",
    "MLP": "MLP Mlp FeedForward FFN Dense",
    "experts": "Expert Moe MoE Router",
}
"""Kind of a layer -> what the class of a module that holds it is named; the first that fits."""


def covered(model: Any) -> str:
    """What the adapter of ``model`` covers, by kind with the number of layers, and what of it has
    none: ``12 layers of attention, 8 of mixers; none of experts``."""
    base = model.get_base_model()
    counts: Counter[str] = Counter()
    for name, layer in base.named_modules():
        if hasattr(layer, "lora_A") or hasattr(layer, "base_layer"):
            counts[kind_of_layer(base, name)] += 1
    listed = ", ".join(f"{count} of {kind}" for kind, count in counts.most_common())
    listed = listed.replace(" of ", " layers of ", 1)
    # fused experts are one parameter for all: no linear layer that an adapter could wrap
    fused = any(
        parameter.ndim == 3 and "expert" in name for name, parameter in base.named_parameters()
    )
    return f"{listed or 'no layer'}{'; none of the experts' * (fused and not counts['experts'])}"


def kind_of_layer(base: nn.Module, name: str) -> str:
    """What holds the layer ``name``: one of ``_KINDS``, else ``other kinds``. *Raises*
    AttributeError for a layer that the model has not."""
    while name:
        name = name.rpartition(".")[0]
        if name.endswith("experts") or ".experts." in name:
            return "experts"
        owner = type(base.get_submodule(name)).__name__
        for kind, words in _KINDS.items():
            if any(word in owner for word in words.split()):
                return kind
    return "other kinds"


# --- merging --------------------------------------------------------------------------------------


def merge_precisely(model: Any) -> PreTrainedModel:
    """As ``merge``, computed in float32, with the precision of the base."""
    quantization.require_mergeable(model, "leave --merged or merge_adapter out")
    dtype = next(model.get_base_model().parameters()).dtype
    return merge(model.float()).to(dtype)


def merge(model: Any) -> PreTrainedModel:
    """The base of ``model`` with its adapter merged into the weights, in place.

    A head tied to the embeddings is untied where the adapter covers either of them. *Raises*
    ``ConfigError`` for a base in four bits.
    """
    quantization.require_mergeable(model, "save the adapter alone")
    _untie_adapted(model)
    return model.merge_and_unload()


def _untie_adapted(model: Any) -> None:
    """Give each adapted layer weights of its own: merging an adapter into a shared weight would
    change both layers."""
    adapted = [layer for layer in model.modules() if hasattr(layer, "get_base_layer")]
    fsdp.untie(model, [layer.get_base_layer() for layer in adapted])


# --- the base -------------------------------------------------------------------------------------


def make_base_absolute(model: Any) -> None:
    """Name the base of the adapters in ``model`` by its absolute folder, or by its repository."""
    for described in model.peft_config.values():
        name = str(described.base_model_name_or_path or "")
        if name == builtin_models.SMOLLM2:
            described.base_model_name_or_path = str(builtin_models.smollm2_folder())
        elif os.path.isdir(path := os.path.expanduser(name)):
            described.base_model_name_or_path = os.path.abspath(path)


def record_base(model: Any, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Name a base for the adapters in ``model`` that peft and transformers load: that which it
    names if there is one, else a copy of the base, written once into ``folder``."""
    make_base_absolute(model)
    written: str | None = None
    for described in model.peft_config.values():
        name = str(described.base_model_name_or_path or "")
        # a model that was merged has the name of its adapter's folder, which is no base
        if name in ("", builtin_models.TINY) or adapter_folder(name) is not None:
            if written is None:
                base, state = model.get_base_model(), _state_of_base(model)
                written = str(written_base(base, state, tokenizer, folder))
            described.base_model_name_or_path = written


def written_base(
    base: PreTrainedModel,
    state: dict[str, torch.Tensor],
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
) -> Path:
    """The folder in ``folder`` of a model that is in no file, with the weights ``state``; written
    if it is not there."""
    digest = hashlib.sha256(base.config.to_json_string().encode())
    for name in sorted(state):
        content = state[name].detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        digest.update(name.encode())
        digest.update(content.numpy().tobytes())
    location = folder.absolute() / f"{BASE}{digest.hexdigest()[:8]}"
    if not location.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        with replacing(location) as new, quantization.saved_as_given(base):
            base.save_pretrained(new, state_dict=state)
            save_texts(base, tokenizer, new)
            share_modes(new.iterdir())
    return location


def _state_of_base(model: Any) -> dict[str, torch.Tensor]:
    """The weights of the base by the names that they have without an adapter."""
    prefix = getattr(model.base_model, "prefix", "lora_")
    state = {}
    for name, value in model.get_base_model().state_dict().items():
        if prefix not in name and ".modules_to_save." not in name:
            state[name.replace(".base_layer.", ".").replace(".original_module.", ".")] = value
    return state
