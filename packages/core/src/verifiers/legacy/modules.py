"""Modules of older versions as lazy objects: ``from verifiers.utils.data_utils import …`` works, from one table.

``import verifiers`` registers them. A lazy module costs a few microseconds until it is used; then the modules that have
its names today are imported. The tables are ``compat.MODULES`` and ``compat.MODULE_NAMES``; there are no files of these
names. Modules that still exist (``verifiers.types``, ``verifiers.clients``) do not know about this: when one is
imported, it gets a fallback for the names that older versions kept in it.

A known name that is not available here is an ``ImportError`` that says why: ``from … import …`` would drop the text of
an ``AttributeError``.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from verifiers import compat as compat

PACKAGE = "verifiers"
TRAINER = "verifiers_trainer"


class OlderModule(ModuleType):
    """A module of an older version; its names are resolved on first use and cached."""

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
        """Whether a name is available in this installation."""
        try:
            return hasattr(self, name)
        except ImportError:
            return False

    def __dir__(self) -> list[str]:
        short = self.__name__.removeprefix(f"{PACKAGE}.")
        homes = [_load(self.__name__, home) for home in compat.MODULES[short].split()]
        shown = {name for home in homes for name in getattr(home, "__all__", None) or _defined_names(home)}
        return sorted(shown | compat.MODULE_NAMES.get(short, {}).keys())


def register() -> None:
    """Register the modules of ``compat.MODULES`` and the fallback of those that still exist."""
    parents = {name.rpartition(".")[0] for name in compat.MODULES}
    for short in compat.MODULES:
        name = f"{PACKAGE}.{short}"
        module = sys.modules.setdefault(name, OlderModule(name, short in parents))
        parent, _, last = name.rpartition(".")
        if parent in sys.modules:  # a real parent that is not imported yet sets the attribute when it is
            setattr(sys.modules[parent], last, module)
    if not any(isinstance(finder, _RealModules) for finder in sys.meta_path):
        sys.meta_path.insert(0, _RealModules())


def resolve(module: str, name: str) -> Any:
    """The present value of ``name`` in a module, older or real.

    *Raises* ImportError for a known name that is not available here, AttributeError for an unknown one.
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
        loaded = _load(module, home)
        if hasattr(loaded, name):
            compat.note(module, home)
            return getattr(loaded, name)
    root = sys.modules[PACKAGE]
    if name in {*dir(root), *compat.NAMES, *compat.LATER}:
        return _value(module, PACKAGE, name)
    raise AttributeError(f"module {module!r} has no attribute {name!r}")


class _RealModules(MetaPathFinder):
    """Finds the modules of ``compat.MODULE_NAMES`` that exist, and has their loader add the older names."""

    paths = frozenset(f"{PACKAGE}.{short}" for short in compat.MODULE_NAMES if short not in compat.MODULES)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path, target) if fullname in self.paths else None
        if spec is not None and spec.loader is not None:
            spec.loader = _WithOlderNames(spec.loader)
        return spec


class _WithOlderNames(Loader):
    """Loads a module with its own loader, then gives it a ``__getattr__`` that also resolves older names."""

    def __init__(self, loader: Loader):
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        first = module.__dict__.get("__getattr__")

        def find(name: str) -> Any:
            if first is not None:
                try:
                    return first(name)
                except AttributeError:  # not a lazy name of the module itself: maybe an older one
                    pass
            return resolve(module.__name__, name)

        module.__dict__["__getattr__"] = find


def _value(module: str, home: str, name: str) -> Any:
    try:
        return getattr(importlib.import_module(home), name)
    except AttributeError as error:
        raise ImportError(str(error), name=module) from error


def _load(module: str, home: str) -> ModuleType:
    try:
        return importlib.import_module(home)
    except ModuleNotFoundError as error:
        if error.name != home:  # the module exists, and something that it imports does not
            raise
        why = f"this edition has no {home}"
        if home == TRAINER:
            why = (
                "it is in the trainer, which is not installed: pip install 'verifiers[rl]', or in a checkout: "
                "uv sync --group train"
            )
        raise ModuleNotFoundError(f"{module}: {why}", name=module) from None


def _defined_names(home: ModuleType) -> set[str]:
    """The public names that a module without ``__all__`` defines itself."""
    return {
        name
        for name, value in vars(home).items()
        if not name.startswith("_")
        and getattr(value, "__module__", home.__name__) == home.__name__
        and not isinstance(value, ModuleType)
    }
