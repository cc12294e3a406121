"""Load the processor of a model that sees: its tokenizer and its image processor, without that of
videos, which needs torchvision."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verifiers.errors import ConfigError

if TYPE_CHECKING:
    from transformers.configuration_utils import PreTrainedConfig


def load_processor(source: str | Path, config: PreTrainedConfig) -> Any:
    """The processor in the folder or repository ``source`` of a model of ``config``.

    *Raises* ConfigError when it cannot be loaded.
    """
    import transformers
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

    name: Any = PROCESSOR_MAPPING_NAMES.get(config.model_type)
    if not isinstance(name, str):
        raise ConfigError(
            f"transformers has no processor for the model type {config.model_type!r}, which takes"
            " images"
        )
    try:
        return of_images(getattr(transformers, name)).from_pretrained(source)
    except (OSError, ValueError, TypeError, ImportError, KeyError) as error:
        reason = str(error).strip().split("\n", 1)[0]
        raise ConfigError(
            f"cannot load the processor of {str(source)!r}, which prepares its images: {reason}"
        ) from error


def of_images(kind: Any) -> Any:
    """A class of processors without its part for videos; as it is where that is required."""
    parts = [name for name in kind.get_attributes() if "video" not in name]
    parameters = inspect.signature(kind.__init__).parameters
    if any(parameters[n].default is inspect.Parameter.empty for n in parameters if "video" in n):
        return kind
    return type(kind.__name__, (kind,), {"get_attributes": classmethod(lambda cls: parts)})
