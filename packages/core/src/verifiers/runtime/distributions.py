"""What the other distributions of this project provide, by the groups of their entry points.

An installed distribution says so itself. One that is not installed cannot: ``distributions.json``
has a copy of what each would say, so that a message can name it. ``docs/reference_pages.py`` writes
the file from the ``pyproject.toml`` of each; nothing here names one.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path

NAMES = "verifiers.names"
"""Group of the names of ``verifiers`` that other distributions define: ``vf.AgentEnv``."""
HEAVY_NAMES = "verifiers.heavy_names"
"""Those that ``from verifiers import *`` leaves out, because their import takes seconds."""
COMMANDS = "verifiers.commands"
"""Group of the commands whose programs other distributions have."""
PARTS = "verifiers.parts"
"""Group of what a command or an option of ``verifiers`` calls in another distribution."""
COLLECTIONS = "verifiers.collections"
"""Group of the loaders of other libraries' environments: ``v1`` loads ``v1:NAME``."""
SANDBOXES = "verifiers.sandboxes"
"""Group of the sandbox backends: name -> class."""
MODEL_RESOLVERS = "verifiers.model_resolvers"
"""Group of the functions that return the client of a live model or of a folder of weights."""


@dataclass(frozen=True, slots=True)
class Provided:
    """What a distribution provides under a name, whether it is installed or not.

    Example: ``Provided("verifiers-jails", "verifiers_jails.zoo:Cage", "zoo")``
    """

    distribution: str
    value: str
    """``module:attribute``, as in its entry point."""
    extra: str = ""
    """The extra of the distribution that it needs."""

    @property
    def package(self) -> str:
        return self.value.partition(":")[0].partition(".")[0]


@functools.cache
def provided(group: str) -> dict[str, Provided]:
    """Name -> what the distributions of this project provide in a group of entry points."""
    return {
        name: Provided(distribution, *content.split(" "))
        for distribution, groups in _recorded().items()
        for name, content in groups.get(group, {}).items()
    }


def distributions() -> tuple[str, ...]:
    """The names of the distributions that stand above ``verifiers``, without the environments."""
    return tuple(_recorded())


def packages() -> dict[str, str]:
    """Import name -> name of each of ``distributions``."""
    return {name.replace("-", "_"): name for name in _recorded()}


@functools.cache
def _recorded() -> dict[str, dict[str, dict[str, str]]]:
    """Distribution -> group -> name -> ``module:attribute``, and after a space its extra."""
    content = Path(__file__).with_name("distributions.json").read_text(encoding="utf-8")
    recorded: dict[str, dict[str, dict[str, str]]] = json.loads(content)
    return recorded
