"""Load the policy: a causal language model and its tokenizer, by hub id, local folder or builtin
name.

Nothing is placed on a device, wrapped in an adapter or seeded here. A tokenizer without a chat
template is returned unchanged, and refused where a conversation is first rendered.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from verifiers.errors import ConfigError
from verifiers_trainer.distributed.launcher import warn_of_unused_split
from verifiers_trainer.policy import builtin_models
from verifiers_trainer.policy.adapter_files import require_one_model

if TYPE_CHECKING:
    from transformers.modeling_utils import PreTrainedModel
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase


def get_model_and_tokenizer(
    model_name: str, use_liger: bool = True, model_kwargs: dict[str, object] | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model and the tokenizer of ``model_name``; see ``get_model`` and ``get_tokenizer``.

    Args:
        model_name: A hub id, a local folder, ``builtin:tiny`` or ``builtin:smollm2-135m``.
        use_liger: As in ``get_model``.
        model_kwargs: As in ``get_model``.
    """
    return get_model(model_name, use_liger, model_kwargs), get_tokenizer(model_name)


def get_model(
    model_name: str,
    use_liger: bool = True,
    model_kwargs: dict[str, Any] | None = None,
    quantize: Literal["nf4"] | None = None,
) -> PreTrainedModel:
    """A causal language model, by hub id, local folder, ``builtin:tiny`` or
    ``builtin:smollm2-135m``; one that takes images where its type has no class for text alone.

    Args:
        model_name: A hub id, a local folder, ``builtin:tiny`` or ``builtin:smollm2-135m``.
        use_liger: Patch in Liger's layer kernels (norm, MLP, rotary; never its fused loss) on CUDA
            when they are installed.
        model_kwargs: Keywords of ``from_pretrained``, which override the defaults: float32 on a CPU
            and bfloat16 where there is an accelerator; FlashAttention 3 or 2 when it is importable
            on CUDA and the class supports it, else what transformers takes for the class: ``sdpa``,
            or ``eager`` where it has nothing else.
        quantize: "nf4" holds the linear layers but the head in four bits, to train an adapter on;
            the model is then on the device, where there is an accelerator.

    Raises ConfigError when the model cannot be loaded; the cause is chained.
    """
    import torch

    from verifiers_trainer.policy import quantization

    warn_of_unused_split()
    builtin = _builtin_name(model_name)
    dtype = torch.bfloat16 if torch.accelerator.is_available() else torch.float32
    kwargs = {"dtype": dtype, **(model_kwargs or {})}
    if builtin == builtin_models.TINY:
        model = builtin_models.build_tiny_model(seed=kwargs.pop("seed", 0))
        if quantize is not None:
            return quantization.quantized(model, kwargs)
        return model if kwargs["dtype"] == "auto" else model.to(kwargs["dtype"])
    if "attn_implementation" not in kwargs and (flash := _flash_attention(kwargs["dtype"])):
        kwargs["attn_implementation"] = flash
    if quantize is not None:
        kwargs |= quantization.keywords(str(source_of(model_name)), kwargs["dtype"])
    if builtin == builtin_models.SMOLLM2:
        model, _ = builtin_models.load_smollm2(**kwargs)
    else:
        _require_folder(model_name)
        require_one_model(model_name)
        try:
            model = _loaded(_auto_class(model_name), model_name, kwargs, model_kwargs or {})
        except (OSError, ValueError) as error:
            message = f"cannot load the model {model_name!r}: {_first_line(error)}"
            raise ConfigError(message, model=model_name) from error
    if use_liger:
        _apply_liger(model)
    quantization.compute_exactly(model)
    return model


def get_tokenizer(model_name: str) -> PreTrainedTokenizerBase:
    """The tokenizer of ``model_name``. A missing pad token is set to the end token: the trainer
    never reads pad ids.

    Args:
        model_name: A hub id, a local folder, ``builtin:tiny`` or ``builtin:smollm2-135m``.

    Raises ConfigError when the model cannot be loaded; the cause is chained.
    """
    from transformers import AutoTokenizer

    builtin = _builtin_name(model_name)
    if builtin == builtin_models.TINY:
        return builtin_models.build_tiny_tokenizer()
    _require_folder(model_name)
    try:
        tokenizer = AutoTokenizer.from_pretrained(source_of(model_name), trust_remote_code=False)
    except (OSError, ValueError) as error:
        message = f"cannot load the tokenizer of {model_name!r}: {_first_line(error)}"
        raise ConfigError(message, model=model_name) from error
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


@contextmanager
def without_progress_bars() -> Iterator[None]:
    """No bars of transformers inside the block."""
    from transformers.utils import logging

    is_shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if is_shown:
            logging.enable_progress_bar()


def source_of(model_name: str) -> str | Path:
    """What transformers loads for ``model_name``: the folder of ``builtin:smollm2-135m``, else
    itself."""
    is_smollm2 = model_name == builtin_models.SMOLLM2
    return builtin_models.smollm2_folder() if is_smollm2 else model_name


def local_folder(model_name: str) -> Path | None:
    """The folder with the files of ``model_name`` on this machine: itself, or of the hub's cache;
    None for weights that are in no file, and for what is not here."""
    if model_name == builtin_models.SMOLLM2:
        return builtin_models.smollm2_folder()
    if os.path.isdir(path := os.path.expanduser(model_name)):
        return Path(path)
    from huggingface_hub import try_to_load_from_cache

    try:
        config = try_to_load_from_cache(model_name, "config.json")
    except ValueError:  # no name of a repository
        return None
    return Path(config).parent if isinstance(config, str) else None


def missing_folder(model_name: str) -> str | None:
    """Why a model that is named by a path cannot be loaded; None if it can, or is no path."""
    path = os.path.expanduser(model_name)
    is_path = model_name.startswith((".", "/", "~")) or model_name.endswith("/")
    if not is_path or os.path.isdir(path):
        return None
    what = "a file, not a folder," if os.path.exists(path) else "no folder"
    return f"model {model_name!r}: there is {what} {os.path.abspath(path)}"


def _require_folder(model_name: str) -> None:
    if reason := missing_folder(str(model_name)):
        raise ConfigError(reason, model=model_name)


def _builtin_name(model_name: str) -> str | None:
    """``model_name`` if it is a builtin, else None; a misspelt builtin is a ConfigError."""
    if not builtin_models.is_builtin(model_name):
        return None
    builtin_models.require_builtin(model_name)
    return model_name


def _auto_class(model_name: str) -> Any:
    """The auto class that loads the model."""
    from transformers import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
        AutoConfig,
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
    )

    try:
        kind = type(AutoConfig.from_pretrained(model_name, trust_remote_code=False))
    except (OSError, ValueError):
        # an adapter's folder, code of the folder's own, no model: the class that loads it says which
        return AutoModelForCausalLM
    is_of_text = kind in MODEL_FOR_CAUSAL_LM_MAPPING
    sees = kind in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    return AutoModelForImageTextToText if sees and not is_of_text else AutoModelForCausalLM


def _loaded(
    cls: Any, model_name: str, kwargs: Mapping[str, object], of_user: Mapping[str, object]
) -> PreTrainedModel:
    """The model; a class that refuses FlashAttention, which the user did not ask for, gets
    transformers' choice."""
    options = {**builtin_models.SAFE, **kwargs}
    try:
        return cls.from_pretrained(model_name, **options)
    except (ValueError, ImportError) as error:
        is_refusal = "attention" in str(error).lower() and "attn_implementation" in options
        if not is_refusal or "attn_implementation" in of_user:
            raise
        del options["attn_implementation"]
        return cls.from_pretrained(model_name, **options)


def _flash_attention(dtype: object) -> str | None:
    """The newest FlashAttention that is importable, on CUDA in half precision."""
    import torch
    from transformers.utils import is_flash_attn_2_available, is_flash_attn_3_available

    half_precision = (torch.bfloat16, torch.float16, "bfloat16", "float16")
    if not torch.cuda.is_available() or dtype not in half_precision:
        return None
    if is_flash_attn_3_available():
        return "flash_attention_3"
    return "flash_attention_2" if is_flash_attn_2_available() else None


def _apply_liger(model: PreTrainedModel) -> None:
    """Liger's layer kernels, on CUDA, if installed, and for an architecture they know."""
    import torch
    from transformers.integrations.liger import apply_liger_kernel
    from transformers.utils import is_liger_kernel_available

    if torch.cuda.is_available() and is_liger_kernel_available():
        apply_liger_kernel(model, {"cross_entropy": False, "fused_linear_cross_entropy": False})


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n", 1)[0]
