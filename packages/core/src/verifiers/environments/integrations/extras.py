"""The libraries that integrations stand on: whether one is installed, and what to install when it is not.

Promise: "not installed" is said only of a library that is not there. One that is there and fails to import raises its
own error, since installing it once more would not help.
"""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from dataclasses import dataclass
from types import ModuleType

from verifiers.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Extra:
    """An optional dependency, for example ``Extra("gym", "gymnasium", "Gymnasium")``."""

    name: str
    """In ``pip install 'verifiers[name]'``."""
    package: str
    """What is imported."""
    title: str
    """What people call it."""

    @property
    def is_installed(self) -> bool:
        """Whether the package can be found; it is not imported. A bare folder of that name is no package."""
        found = importlib.util.find_spec(self.package)
        return found is not None and found.origin is not None

    def is_missing_for(self, user: str) -> str:
        """The sentence that says so."""
        return f"{user} needs {self.title}, which is not installed: pip install 'verifiers[{self.name}]'"

    def load(self, user: str) -> ModuleType:
        """The imported package. *Raises* ConfigError when it is not installed, its own error when it is broken."""
        if not self.is_installed:
            raise ConfigError(self.is_missing_for(user))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)  # of its source, which its users cannot mend
            return importlib.import_module(self.package)


GYM = Extra("gym", "gymnasium", "Gymnasium")
MCP = Extra("mcp", "mcp", "the MCP client")
REASONING_GYM = Extra("rg", "reasoning_gym", "Reasoning Gym")
TEXTARENA = Extra("ta", "textarena", "TextArena")
