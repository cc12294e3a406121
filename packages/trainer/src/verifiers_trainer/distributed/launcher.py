"""The configuration that ``accelerate launch`` was given, where a part of it is silently without
effect.

accelerate reads ``deepspeed_config`` only with ``distributed_type: DEEPSPEED``, and ``fsdp_config``
only with ``FSDP``; with another type every process trains a whole copy of the model. The variables
of the processes do not show the unused part, so the command line of the launcher is read.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

FLAGS = {"FSDP": "ACCELERATE_USE_FSDP", "DeepSpeed": "ACCELERATE_USE_DEEPSPEED"}
"""Environment variable that the launcher sets for each way of splitting."""
SPLITS = {"deepspeed_config": "DEEPSPEED", "fsdp_config": "FSDP"}
"""Section of the launcher's file -> the ``distributed_type`` that reads it."""


@functools.cache
def warn_of_unused_split() -> None:
    """Warn, once and on the first process, of a split of the model that the launcher's file has and
    does not use."""
    if os.environ.get("LOCAL_RANK", "0") != "0" or "ACCELERATE_MIXED_PRECISION" not in os.environ:
        return  # not started by accelerate launch, which sets that variable always
    import psutil  # of accelerate's dependencies

    try:
        parent = psutil.Process().parent()
        words = parent.cmdline() if parent is not None else []
    except psutil.Error as error:
        log.debug("the launcher's command cannot be read: %s", error)
        return
    if (sentence := unused_split(words)) is not None:
        log.warning("%s", sentence)


def unused_split(words: Sequence[str]) -> str | None:
    """The sentence about an unused part of the file in the command ``words`` of the launcher; None
    without a part."""
    from accelerate.commands.config.config_args import default_config_file, load_config_from_file

    if {"--use_deepspeed", "--use-deepspeed", "--use_fsdp", "--use-fsdp"} & set(words):
        return None
    path = _value_of(words, "--config-file") or default_config_file
    if not Path(path).is_file():
        return None
    file: Any = load_config_from_file(path)
    for section, kind in SPLITS.items():
        used = str(getattr(file.distributed_type, "value", file.distributed_type))
        if getattr(file, section, None) and used != kind:
            return (
                f"{path} has a {section}, which has no effect with distributed_type {used}: every"
                f" process trains a whole copy of the model. Set distributed_type: {kind} to"
                " split it"
            )
    return None


def _value_of(words: Sequence[str], flag: str) -> str | None:
    """The value of ``flag``, also spelt with underscores or with an equals sign."""
    for word, after in zip(words, [*words[1:], ""], strict=True):
        name, _, value = word.partition("=")
        if name.replace("_", "-") == flag:
            return value or after
    return None
