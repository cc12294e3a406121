"""Environments over other libraries, each behind an extra. Classes are imported on first use.

A class whose library is not installed is an ``AttributeError`` that names the extra; so is every use of ``hasattr``
false. A library that is installed and broken is left to fail by itself, in the constructor, with its own error.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from verifiers.environments.integrations import extras

if TYPE_CHECKING:
    from verifiers.environments.integrations.gym import EpisodicSumRubric, GymEnv
    from verifiers.environments.integrations.mcp import MCPEnv
    from verifiers.environments.integrations.reasoning_gym import ReasoningGymEnv
    from verifiers.environments.integrations.textarena import TextArenaEnv

__all__ = ["EpisodicSumRubric", "GymEnv", "MCPEnv", "ReasoningGymEnv", "TextArenaEnv"]

_HOMES = {
    "EpisodicSumRubric": ("gym", None),
    "GymEnv": ("gym", extras.GYM),
    "MCPEnv": ("mcp", extras.MCP),
    "ReasoningGymEnv": ("reasoning_gym", extras.REASONING_GYM),
    "TextArenaEnv": ("textarena", extras.TEXTARENA),
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, extra = _HOMES[name]
    if extra is not None and not extra.is_installed:
        raise AttributeError(extra.is_missing_for(f"vf.{name}"))
    return getattr(importlib.import_module(f"{__name__}.{module}"), name)
