"""Base classes of environments. Each is imported on first use: a command that only finds
environments needs none."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from verifiers.environments.base import Environment
    from verifiers.environments.group import EnvGroup
    from verifiers.environments.multi_turn import MultiTurnEnv
    from verifiers.environments.python import PythonEnv
    from verifiers.environments.sandbox import SandboxEnv
    from verifiers.environments.single_turn import SingleTurnEnv
    from verifiers.environments.stateful_tool import StatefulToolEnv
    from verifiers.environments.tool import ToolEnv

__all__ = [
    "EnvGroup",
    "Environment",
    "HarborEnv",
    "MultiTurnEnv",
    "PythonEnv",
    "SandboxEnv",
    "SingleTurnEnv",
    "StatefulToolEnv",
    "ToolEnv",
]

_LAZY = {
    "EnvGroup": "group",
    "Environment": "base",
    "MultiTurnEnv": "multi_turn",
    "PythonEnv": "python",
    "SandboxEnv": "sandbox",
    "SingleTurnEnv": "single_turn",
    "StatefulToolEnv": "stateful_tool",
    "ToolEnv": "tool",
}


def __getattr__(name: str) -> object:
    if name == "HarborEnv":
        from verifiers.runtime.installed import public_name

        return public_name(name)
    if name not in _LAZY:
        raise AttributeError(f"module 'verifiers.environments' has no attribute {name!r}")
    return getattr(importlib.import_module(f"verifiers.environments.{_LAZY[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
