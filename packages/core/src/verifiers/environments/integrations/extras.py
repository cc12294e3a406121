"""Optional dependencies of the integrations: whether a library is installed, and the command that
installs it.

Promise: only an absent library is reported as not installed. A library that is installed and fails
to import raises its own error, since reinstalling would not help.
"""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from dataclasses import dataclass
from types import ModuleType

from verifiers.errors import ConfigError
from verifiers.runtime.install_lines import install_line


@dataclass(frozen=True, slots=True)
class Extra:
    """An optional dependency, for example ``Extra("gym", "gymnasium", "Gymnasium")``."""

    name: str
    """The extra of ``verifiers`` that installs it."""
    package: str
    """Name of the package to import."""
    title: str
    """Name for messages."""

    @property
    def is_installed(self) -> bool:
        """Whether the package can be found, without importing it. A plain folder of that name does
        not count."""
        spec = importlib.util.find_spec(self.package)
        return spec is not None and spec.origin is not None

    def is_missing_for(self, user: str) -> str:
        """Return the error message for a missing library."""
        return (
            f"{user} needs {self.title}, which is not installed:"
            f" {install_line('verifiers', self.name)}"
        )

    def load(self, user: str) -> ModuleType:
        """Import the package. *Raises* ConfigError when it is not installed, its own error when it
        is broken."""
        if not self.is_installed:
            raise ConfigError(self.is_missing_for(user))
        with warnings.catch_warnings():
            # caused by source that users cannot change
            warnings.simplefilter("ignore", SyntaxWarning)
            return importlib.import_module(self.package)


GYM = Extra("gym", "gymnasium", "Gymnasium")
MCP = Extra("mcp", "mcp", "the MCP client")
REASONING_GYM = Extra("rg", "reasoning_gym", "Reasoning Gym")
TEXTARENA = Extra("ta", "textarena", "TextArena")
ZMQ = Extra("env-server", "zmq", "pyzmq")
