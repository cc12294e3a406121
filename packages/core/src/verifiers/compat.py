"""Every historical spelling of core, in one place; the rest of the code knows only the canonical names.

Each table maps an old name to the canonical one. Using an old name logs one debug line per process; giving both
spellings of one thing is a ``ConfigError``.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Mapping
from typing import Any

from verifiers.errors import ConfigError

log = logging.getLogger("verifiers.compat")

ENVIRONMENT_PARAMETERS = {"oai_tools": "tool_defs"}

RUN_OPTIONS = {
    "num_samples": "n_samples",
    "num_generations": "rollouts_per_example",
    "group_size": "rollouts_per_example",
    "max_concurrent_requests": "max_concurrent",
    "push_to_hf_hub": "push_to_hub",
    "hf_hub_dataset_name": "hub_name",
}

SAMPLING_ARGS = {"max_new_tokens": "max_tokens", "max_completion_tokens": "max_tokens"}

NAMES = {
    "Error": "RolloutError",
    "InvalidModelResponseError": "MalformedResponse",
    "GenerateInputs": "RolloutInput",
    "ModelResponse": "Response",
    "ChatMessage": "Message",
}
"""Old names of ``verifiers`` itself, resolved by its ``__getattr__``."""


def rename(given: Mapping[str, Any], table: Mapping[str, str], where: str = "the call") -> dict[str, Any]:
    """``given`` with canonical names. Raises ``ConfigError`` when both spellings of one thing are given."""
    renamed = {name: value for name, value in given.items() if name not in table}
    for old in given.keys() & table.keys():
        new = table[old]
        if new in renamed:
            raise ConfigError(f"{where}: {old!r} is the older name of {new!r}; give one of them", key=old)
        note(old, new)
        renamed[new] = given[old]
    return renamed


@functools.cache
def note(old: str, new: str) -> None:
    """Log once per process that an older spelling was used."""
    log.debug("%s is the older spelling of %s", old, new)


@functools.cache
def parameters_of(cls: type) -> tuple[str, ...]:
    """The constructor parameters of ``cls`` and of its bases, by name."""
    names: dict[str, None] = {}
    for base in cls.__mro__:
        constructor = base.__dict__.get("__init__")
        if inspect.isfunction(constructor):
            for parameter in list(inspect.signature(constructor).parameters.values())[1:]:
                if parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
                    names[parameter.name] = None
    return tuple(names)
