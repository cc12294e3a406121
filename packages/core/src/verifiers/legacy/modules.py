"""Lazy modules for the module names of older versions, such as ``verifiers.utils.data_utils``.

``import verifiers`` registers them, a few microseconds each; on first use the modules that now
define the names are imported. The tables are ``compat.MODULES`` and ``compat.MODULE_NAMES``; no
files of these names exist. Modules that still exist (``verifiers.types``, ``verifiers.clients``)
receive, on import, a fallback for names that older versions defined in them.

A known but unavailable name raises an ``ImportError`` with the reason, because ``from … import …``
would drop the text of an ``AttributeError``.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import TYPE_CHECKING, Any

from verifiers import compat as compat

if TYPE_CHECKING:
    from importlib.abc import Loader, MetaPathFinder
else:  # importlib.abc imports tempfile and shutil, which would be a third of ``import verifiers``
    Loader = MetaPathFinder = object

ADAPTED = {
    "clients.protocol": "verifiers.legacy.classes:adapt_clients",
    "rubrics.rubric": "verifiers.legacy.scoring:adapt_rubrics",
    "environments.base": "verifiers.legacy.classes:adapt_environments",
    "environments.tool": "verifiers.legacy.classes:adapt_tool_environments",
    "environments.group_rubric": "verifiers.legacy.scoring:adapt_group_rubric",
    "rollouts.values": "verifiers.legacy.timing:adapt_timing",
    "rollouts.state": "verifiers.legacy.awaited:finish_states",
    "results.outputs": "verifiers.legacy.awaited:finish_results",
    "results.rows": "verifiers.legacy.timing:adapt_rows",
}
"""Module -> the function that gives its classes their older forms; called with the module once it
is imported."""
PACKAGE = "verifiers"


class OlderModule(ModuleType):
    """A module of an older version; its names are resolved on first use and cached."""

    def __init__(self, name: str, is_package: bool):
        super().__init__(name, f"An older name; see {PACKAGE}.compat.")
        self.__spec__ = ModuleSpec(name, None, is_package=is_package)
        if is_package:
            self.__path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name == "__all__":
            return [
                public for public in dir(self) if not public.startswith("_") and self._has(public)
            ]
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
        names = {
            name
            for home in homes
            for name in getattr(home, "__all__", None) or _defined_names(home)
        }
        return sorted(names | compat.MODULE_NAMES.get(short, {}).keys())


def register() -> None:
    """Register the modules of ``compat.MODULES``, and the fallback of modules that still exist."""
    parents = {name.rpartition(".")[0] for name in compat.MODULES}
    for short in compat.MODULES:
        name = f"{PACKAGE}.{short}"
        module = sys.modules.setdefault(name, OlderModule(name, short in parents))
        parent, _, last = name.rpartition(".")
        if parent in sys.modules:  # an existing parent sets the attribute on its import
            setattr(sys.modules[parent], last, module)
    if not any(isinstance(finder, _RealModules) for finder in sys.meta_path):
        sys.meta_path.insert(0, _RealModules())
        for path in _RealModules.paths & sys.modules.keys():
            _add_older_forms(sys.modules[path])


def resolve(module: str, name: str) -> Any:
    """The current value of ``name`` in an older or existing module.

    *Raises* ImportError for a known but unavailable name, AttributeError for an unknown name.
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
    if substitute := compat.SUBSTITUTES.get(short, {}).get(name):
        raise ImportError(
            f"{module}.{name} is not in this version; instead: {substitute}", name=module
        )
    root = sys.modules[PACKAGE]
    if name in {*dir(root), *compat.NAMES, *compat.LATER}:
        return _value(module, PACKAGE, name)
    raise AttributeError(f"module {module!r} has no attribute {name!r}")


class _RealModules(MetaPathFinder):
    """Finds existing modules of ``compat.MODULE_NAMES`` and ``ADAPTED``; adds the older forms on
    loading."""

    paths = frozenset(
        f"{PACKAGE}.{short}"
        for short in {*compat.MODULE_NAMES, *ADAPTED}
        if short not in compat.MODULES
    )

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if (
            short := fullname.removeprefix(f"{PACKAGE}.")
        ) != fullname and short in compat.LATER_MODULES:
            raise ModuleNotFoundError(f"{fullname}: {compat.LATER_MODULES[short]}", name=fullname)
        spec = PathFinder.find_spec(fullname, path, target) if fullname in self.paths else None
        if spec is not None and spec.loader is not None:
            spec.loader = _WithOlderNames(spec.loader)
        return spec


class _WithOlderNames(Loader):
    """Loads a module with its original loader, then adds its older names and adapts its classes."""

    def __init__(self, loader: Loader):
        self._loader = loader

    def __getattr__(self, name: str) -> object:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        _add_older_forms(module)


def _add_older_forms(module: ModuleType) -> None:
    short = module.__name__.removeprefix(f"{PACKAGE}.")
    if short in compat.MODULE_NAMES:
        _add_fallback(module)
    if short in ADAPTED:
        compat.load(ADAPTED[short])(module)


def _add_fallback(module: ModuleType) -> None:
    """Set a ``__getattr__`` that also resolves older names."""
    original = module.__dict__.get("__getattr__")

    def find(name: str) -> Any:
        if original is not None:
            try:
                return original(name)
            except AttributeError:  # not a lazy name of the module: try the older names
                pass
        return resolve(module.__name__, name)

    module.__dict__["__getattr__"] = find


def _value(module: str, home: str, name: str) -> object:
    try:
        return getattr(importlib.import_module(home), name)
    except AttributeError as error:
        raise ImportError(str(error), name=module) from error


def _load(module: str, home: str) -> ModuleType:
    try:
        return importlib.import_module(home)
    except ModuleNotFoundError as error:
        if error.name != home:  # the module exists, but an import of it failed
            raise
        reason = f"{home} does not exist in this version"
        from verifiers.runtime.distributions import packages
        from verifiers.runtime.install_lines import install_line

        if distribution := packages().get(home):
            reason = (
                f"it is in {distribution}, which is not installed: {install_line(distribution)}"
            )
        raise ModuleNotFoundError(f"{module}: {reason}", name=module) from None


def _defined_names(home: ModuleType) -> set[str]:
    """The public names defined in a module without ``__all__``."""
    return {
        name
        for name, value in vars(home).items()
        if not name.startswith("_")
        and getattr(value, "__module__", home.__name__) == home.__name__
        and not isinstance(value, ModuleType)
    }
