"""Modules of older versions as lazy objects: ``from verifiers.utils.data_utils import …`` works, from one table.

``import verifiers`` registers them. One costs a few microseconds until it is used; then the modules that have its names
now are imported. There is no import hook, and there are no files of these names. Which names there are is ``compat``'s
to say.

A name that an older version had and that cannot be had here is an ``ImportError`` that says why: of an
``AttributeError`` the statement ``from … import …`` would keep nothing.
"""

from __future__ import annotations

import importlib
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from verifiers import compat as compat

PACKAGE = "verifiers"
TRAINER = "verifiers_trainer"


class OlderModule(ModuleType):
    """One module of an older version; its names are resolved on first use and kept."""

    def __init__(self, name: str, is_package: bool):
        super().__init__(name, f"An older name; see {PACKAGE}.compat.")
        self.__spec__ = ModuleSpec(name, None, is_package=is_package)
        if is_package:
            self.__path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name == "__all__":
            return [known for known in dir(self) if not known.startswith("_") and self._has(known)]
        value = resolve(self.__name__, name)
        self.__dict__[name] = value
        return value

    def _has(self, name: str) -> bool:
        """Whether a name can be had in this installation."""
        try:
            return hasattr(self, name)
        except ImportError:
            return False

    def __dir__(self) -> list[str]:
        short = self.__name__.removeprefix(f"{PACKAGE}.")
        homes = [_load(self.__name__, home) for home in compat.MODULES[short].split()]
        shown = {name for home in homes for name in getattr(home, "__all__", None) or _own_names(home)}
        return sorted(shown | compat.MODULE_NAMES.get(short, {}).keys())


def register() -> None:
    """Put the modules of ``compat.MODULES`` under their names, and under their parents."""
    parents = {name.rpartition(".")[0] for name in compat.MODULES}
    for short in compat.MODULES:
        name = f"{PACKAGE}.{short}"
        module = sys.modules.setdefault(name, OlderModule(name, short in parents))
        parent, _, last = name.rpartition(".")
        if parent in sys.modules:  # the children of modules that are real and not imported yet have no parent to be in
            setattr(sys.modules[parent], last, module)


def resolve(module: str, name: str) -> Any:
    """The value that ``name`` of a module, older or real, has now.

    *Raises* ImportError for a name that is known and cannot be had here, AttributeError for an unknown one.
    """
    short = module.removeprefix(f"{PACKAGE}.")
    if name.startswith("_"):
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    if target := compat.MODULE_NAMES.get(short, {}).get(name):
        home, _, new = target.partition(":")
        value = _value(module, home, new)
        compat.note(f"{module}.{name}", target.replace(":", "."))
        return value
    for home in compat.MODULES.get(short, "").split():
        found = _load(module, home)
        if hasattr(found, name):
            compat.note(module, home)
            return getattr(found, name)
    if name in _promised():
        return _value(module, PACKAGE, name)
    raise AttributeError(f"module {module!r} has no attribute {name!r}")


def _promised() -> set[str]:
    """Names that ``verifiers`` has, or says something about."""
    root = sys.modules[PACKAGE]
    return {*dir(root), *compat.NAMES, *compat.LATER}


def _value(module: str, home: str, name: str) -> Any:
    try:
        return getattr(importlib.import_module(home), name)
    except AttributeError as error:
        raise ImportError(str(error), name=module) from error


def _load(module: str, home: str) -> ModuleType:
    try:
        return importlib.import_module(home)
    except ModuleNotFoundError as error:
        if error.name != home:  # it is there, and needs something that is not
            raise
        why = f"this edition has no {home}"
        if home == TRAINER:
            why = (
                "it is in the trainer, which is not installed: pip install 'verifiers[rl]', or in a checkout: "
                "uv sync --group train"
            )
        raise ModuleNotFoundError(f"{module}: {why}", name=module) from None


def _own_names(home: ModuleType) -> set[str]:
    """What a module without ``__all__`` defines itself."""
    return {
        name
        for name, value in vars(home).items()
        if not name.startswith("_")
        and getattr(value, "__module__", home.__name__) == home.__name__
        and not isinstance(value, ModuleType)
    }
