"""A frozen base in four bits under an adapter (QLoRA, arXiv 2305.14314): every linear layer but the
head is stored as nf4 and multiplied in the precision of the rest.

bitsandbytes stores and multiplies; it is imported when a model is quantised. Trainer and embedded
engine compute with the same four-bit layers, and nothing is ever merged into them. An adapter is
saved with a file that names its base and says this (``adapter_files.BASE``), and is loaded with a
base in four bits again.
"""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verifiers.errors import ConfigError
from verifiers.runtime.install_lines import install_line
from verifiers_trainer.policy.adapter_files import BASE, NF4
from verifiers_trainer.policy.checkpoint_files import write_json

if TYPE_CHECKING:
    import torch
    from transformers.modeling_utils import PreTrainedModel


def keywords(source: str, dtype: object) -> dict[str, Any]:
    """Keywords of ``from_pretrained`` with which the model in ``source`` is quantised while it is
    read: blocks of 64 weights, whose scales are quantised too. None for a model whose files are.

    *Raises* ``ConfigError`` without bitsandbytes.
    """
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ConfigError(
            "quantize='nf4' needs bitsandbytes, which is not installed; install the extra:"
            f" {install_line('verifiers-trainer', 'quantize')}"
        )
    from transformers import BitsAndBytesConfig, PreTrainedConfig

    if "quantization_config" in PreTrainedConfig.get_config_dict(source)[0]:
        return {}
    options: dict[str, Any] = {"bnb_4bit_quant_type": NF4, "bnb_4bit_use_double_quant": True}
    if dtype != "auto":
        options["bnb_4bit_compute_dtype"] = dtype
    return {"quantization_config": BitsAndBytesConfig(load_in_4bit=True, **options)}


def quantized(model: PreTrainedModel, options: Mapping[str, Any]) -> Any:
    """A model that is in no file, quantised; ``options`` of ``from_pretrained``."""
    name = model.name_or_path
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        options = {**options, **keywords(folder, options["dtype"])}
        model = type(model).from_pretrained(folder, **options)
    model.config.name_or_path = model.name_or_path = name
    compute_exactly(model)
    return model


def is_quantized(model: object) -> bool:
    """Whether layers of ``model``, or of the base of its adapter, are in four bits."""
    return getattr(model, "is_loaded_in_4bit", False) is True


def compute_exactly(model: torch.nn.Module) -> None:
    """Multiply in the precision of the inputs on a CPU too.

    In evaluation, on a CPU with AVX512-BF16, bitsandbytes rewrites the weights in place for a
    kernel in bfloat16 without a backward pass: those of the trainer, which shares them.
    """
    for layer in model.modules():
        if hasattr(layer, "support_avx512bf16_for_cpu"):
            vars(layer)["support_avx512bf16_for_cpu"] = False


@contextmanager
def saved_as_given(model: Any) -> Iterator[None]:
    """Within it ``save_pretrained`` writes the ``state_dict`` that it is given of a model in four
    bits too, for which transformers would take all that the model holds, adapters included."""
    quantizer = getattr(model, "hf_quantizer", None)
    model.hf_quantizer = None
    try:
        yield
    finally:
        model.hf_quantizer = quantizer


def record_base(model: Any, folder: Path) -> None:
    """Write beside an adapter which base it was trained on, if that was in four bits."""
    if not is_quantized(model):
        return
    facts = {
        "base_model_name_or_path": model.active_peft_config.base_model_name_or_path,
        "quantize": NF4,
        "quantization_config": model.config.quantization_config.to_dict(),
        "bitsandbytes": metadata.version("bitsandbytes"),
    }
    write_json(folder / BASE, facts)


def require_adapter(model: object) -> None:
    """Raise ``ConfigError`` for a model in four bits that has no adapter to train."""
    if is_quantized(model) and not hasattr(model, "peft_config"):
        raise ConfigError(
            "the model is in four bits, which have no gradient: train an adapter (use_lora=True)"
        )


def layers_of(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """The layers in four bits, by name."""
    return {
        name: layer
        for name, layer in model.named_modules()
        if hasattr(getattr(layer, "weight", None), "quant_state")
    }


def require_adaptable(model: torch.nn.Module, modules_to_save: Set[str]) -> None:
    """Raise ``ConfigError`` where a layer in four bits would be trained whole."""
    for name in layers_of(model):
        if whole_modules := sorted(modules_to_save & set(name.split("."))):
            raise ConfigError(
                f"lora_modules_to_save trains {', '.join(whole_modules)} whole, and {name} is in"
                " four bits, which have no gradient: adapt it (lora_target_modules) instead"
            )


def require_mergeable(model: object, instead: str) -> None:
    """Raise ``ConfigError`` where an adapter would be merged into four bits, which round it away;
    ``instead`` says what to do."""
    if is_quantized(model):
        raise ConfigError(
            "the base of the adapter is in four bits (quantize='nf4'), and nothing is merged into"
            f" them: {instead}"
        )
