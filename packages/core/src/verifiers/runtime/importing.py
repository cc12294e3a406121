"""Import a module from its file, whether or not its folder is on the path.

The promise: the modules of each file are a namespace: what it imports from the files beside it, at
once or later inside a function, is found there, whatever another file has imported under that name.
A file that changed, or a file that it imported, is run again when it is loaded again. Installed
modules come first.

Names of modules are those of the files, so classes pickle and have the same name in every run; the
namespace that imported last is that in ``sys.modules``.
"""

from __future__ import annotations

import builtins
import hashlib
import importlib
import importlib.util
import linecache
import os
import sys
import threading
import types
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, NamespaceLoader, PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType

from verifiers.runtime.bounded import MAX_ROW_BYTES, TooLong, read_file


def import_source(file: Path, module: str, root: Path) -> ModuleType:
    """Import ``module`` from ``file``; ``root`` is the folder that holds it or its top-level
    package.

    A name that an installed module has is not taken from it. ``root`` is appended to ``sys.path``,
    last, for what does not import by a statement.
    """
    key = os.path.realpath(file), os.path.realpath(root)
    with _LOCK:
        namespace = _NAMESPACES.get(key)
        if namespace is None or namespace.has_changed():
            namespace = _NAMESPACES[key] = _Namespace(root)
    return namespace.load(file, module)


def digests_of(file: Path) -> Mapping[str, str]:
    """Path -> SHA-256 of the sources that were run for a file that was imported, also those that it
    imports later."""
    path = os.path.realpath(file)
    return next((ns.digests for (main, _), ns in _NAMESPACES.items() if main == path), {})


def paths_without_namespaces() -> list[str]:
    """``sys.path`` without the folders that were appended for a file in them."""
    return [path for path in sys.path if path not in _APPENDED]


def names_in_namespaces() -> set[str]:
    """The names of the loaded modules that are of a namespace."""
    return _OWNERS.keys() & sys.modules.keys()


class _Namespace:
    """The modules that one file has imported from its folder."""

    def __init__(self, root: Path):
        self.root = os.path.realpath(root)
        self.modules: dict[str, ModuleType] = {}
        self.digests: dict[str, str] = {}
        """Path -> SHA-256 of the source that was run."""
        self.builtins = {**vars(builtins), "__import__": self._import}

    def has_changed(self) -> bool:
        """Whether a file is no longer what was run."""
        return any(_digest(path) != digest for path, digest in self.digests.items())

    def load(self, file: Path, module: str) -> ModuleType:
        """Import the module; what was imported from its folder is kept only if it succeeds."""
        top, _, submodule = module.partition(".")
        top_file = file
        if submodule or file.name == "__init__.py":
            top_file = Path(self.root, top, "__init__.py")
        self.activate()
        loaded = sys.modules.get(top)
        if top in sys.stdlib_module_names or (loaded is not None and top not in self.modules):
            if not _is_file(loaded, top_file):
                top = f"local_file_{top}"
            elif top not in self.modules:
                del sys.modules[top]  # of another namespace of this file
        token = _importing.set(self)
        try:
            if top not in self.modules:
                self._run(top, top_file)
            return importlib.import_module(f"{top}.{submodule}" if submodule else top)
        except BaseException:  # as the import statement does; re-raised
            for name in self.modules:
                sys.modules.pop(name, None)
            self.modules.clear()
            self.digests.clear()
            raise
        finally:
            _importing.reset(token)

    def _run(self, name: str, file: Path) -> None:
        folders = [str(file.parent)] if file.name == "__init__.py" else None
        spec = importlib.util.spec_from_file_location(
            name, file, loader=_Loader(name, str(file), self), submodule_search_locations=folders
        )
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)

    def add(self, module: ModuleType) -> None:
        """Own a module that is being imported."""
        self.modules[module.__name__] = module
        _OWNERS[module.__name__] = self

    def activate(self) -> None:
        """Let imports find the modules of this namespace, and its folder before those of others."""
        global _active
        with _LOCK:
            if _active is self:
                return
            for name in [name for name in sys.modules if self._replaces(name)]:
                del sys.modules[name]
            sys.modules.update(self.modules)
            _OWNERS.update(dict.fromkeys(self.modules, self))
            _ROOTS.add(self.root)
            if self.root not in map(os.path.realpath, sys.path):
                _APPENDED.add(self.root)
                sys.path.append(self.root)
            _active = self
            importlib.invalidate_caches()

    def _replaces(self, name: str) -> bool:
        """Whether a module of another namespace has a name that a file of this namespace has."""
        owner, top = _OWNERS.get(name), name.partition(".")[0]
        return owner is not None and owner is not self and (top in self.modules or self.has(top))

    def has(self, top: str) -> bool:
        """Whether the folder has a module of this name."""
        path = os.path.join(self.root, top)
        return os.path.isfile(f"{path}.py") or os.path.isdir(path)

    def _import(
        self,
        name: str,
        globals: Mapping[str, object] | None = None,
        locals: Mapping[str, object] | None = None,
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> ModuleType:
        """``__import__`` of the modules of this namespace."""
        self.activate()
        token = _importing.set(self)
        try:
            return builtins.__import__(name, globals, locals, fromlist or (), level)
        finally:
            _importing.reset(token)


class _Loader(SourceFileLoader):
    """Runs the source as it is now, without the cache of bytecode, which goes by whole seconds."""

    def __init__(self, name: str, path: str, namespace: _Namespace):
        super().__init__(name, path)
        self.namespace = namespace

    def get_code(self, fullname: str) -> types.CodeType:
        source, path = self.get_data(self.path), os.path.realpath(self.path)
        self.namespace.digests[path] = hashlib.sha256(source).hexdigest()
        linecache.checkcache(self.path)
        code: types.CodeType = self.source_to_code(source, self.path)
        return code

    def exec_module(self, module: ModuleType) -> None:
        self.namespace.add(module)
        vars(module)["__builtins__"] = self.namespace.builtins
        super().exec_module(module)


class _Folder(NamespaceLoader):
    """A folder without ``__init__.py``: it has no other place, though another namespace has a
    folder of this name on ``sys.path``."""

    def __init__(self, name: str, folders: Sequence[str], namespace: _Namespace):
        super().__init__(name, list(folders), lambda *_: None)
        self.namespace = namespace

    def exec_module(self, module: ModuleType) -> None:
        self.namespace.add(module)


class _Finder(MetaPathFinder):
    """Finds modules in the folder of the namespace that imports, if no installed module has the
    name."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        namespace, top = _importing.get(), fullname.partition(".")[0]
        if namespace is None or not namespace.has(top):
            return None
        if path is None:
            entries = [entry for entry in sys.path if os.path.realpath(entry) not in _ROOTS]
            if PathFinder.find_spec(fullname, entries, target) is not None:
                return None
            path = [namespace.root]
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is None and spec.submodule_search_locations:
            folders = list(spec.submodule_search_locations)
            if all(os.path.realpath(folder).startswith(namespace.root) for folder in folders):
                spec.loader = loader = _Folder(fullname, folders, namespace)
                spec.submodule_search_locations = loader._path  # type: ignore[attr-defined]
        if spec is None or not isinstance(spec.loader, SourceFileLoader):
            return spec
        if os.path.realpath(spec.loader.path).startswith(namespace.root + os.sep):
            spec.loader = _Loader(fullname, spec.loader.path, namespace)
        return spec


def _is_file(module: ModuleType | None, file: Path) -> bool:
    origin = getattr(module, "__file__", None)
    return origin is not None and os.path.realpath(origin) == os.path.realpath(file)


def _digest(path: str) -> str | None:
    try:
        return hashlib.sha256(read_file(path, MAX_ROW_BYTES)).hexdigest()
    except (OSError, TooLong):
        return None


_LOCK = threading.RLock()
_NAMESPACES: dict[tuple[str, str], _Namespace] = {}
_OWNERS: dict[str, _Namespace] = {}
"""Name in ``sys.modules`` -> the namespace whose module it is."""
_ROOTS: set[str] = set()
_APPENDED: set[str] = set()
_active: _Namespace | None = None
"""The namespace whose modules are in ``sys.modules``."""
_importing: ContextVar[_Namespace | None] = ContextVar("verifiers_importing", default=None)
sys.meta_path.insert(0, _Finder())
