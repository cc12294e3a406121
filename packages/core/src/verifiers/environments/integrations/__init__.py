"""Environments that wrap other libraries, each an optional extra. Classes are imported on first
use.

Accessing a class whose library is not installed raises an ``AttributeError`` that names the extra,
so ``hasattr`` is false. A library that is installed but broken raises its own error in the
constructor.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from verifiers.environments.integrations import extras

if TYPE_CHECKING:
    from verifiers.environments.integrations.gym import EpisodicSumRubric, GymEnv
    from verifiers.environments.integrations.mcp import MCPEnv
    from verifiers.environments.integrations.openenv import OpenEnvEnv
    from verifiers.environments.integrations.reasoning_gym import ReasoningGymEnv
    from verifiers.environments.integrations.textarena import TextArenaEnv

__all__ = ["EpisodicSumRubric", "GymEnv", "MCPEnv", "OpenEnvEnv", "ReasoningGymEnv", "TextArenaEnv"]

_HOMES = {
    "EpisodicSumRubric": ("gym", None),
    "GymEnv": ("gym", extras.GYM),
    "MCPEnv": ("mcp", extras.MCP),
    "OpenEnvEnv": ("openenv", None),
    "ReasoningGymEnv": ("reasoning_gym", extras.REASONING_GYM),
    "TextArenaEnv": ("textarena", extras.TEXTARENA),
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, extra = _HOMES[name]
    if extra is not None and not extra.is_installed:
        raise AttributeError(extra.is_missing_for(f"vf.{name}"))
    return getattr(importlib.import_module(f"{__name__}.{module}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
