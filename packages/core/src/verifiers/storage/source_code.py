"""Hashes of the source files of an author's objects, and of what those import beside themselves."""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import sys
import types
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from verifiers.runtime.bounded import open_file, read_file
from verifiers.runtime.distributions import packages
from verifiers.runtime.importing import names_in_namespaces
from verifiers.runtime.syntax import parse_python
from verifiers.storage.described import STABLE_MODULES

_NOT_AUTHORS = STABLE_MODULES | {"__main__", *packages()}
"""Modules that are not hashed: a script that is run usually holds more than the environment."""
_LIBRARIES = ("site-packages", "dist-packages")


def source_hashes(
    objects: Iterable[object], digests: Mapping[str, str] | None = None
) -> dict[str, str]:
    """File name, relative to its package or folder -> 16 hex digits of the SHA-256 of its content;
    never raises.

    The files are those of the modules that define the objects (functions, classes, or instances,
    which stand for their classes), and what these modules import, also inside functions, from
    beside themselves: from the same package, or for a module without a package from the same
    folder. Installed libraries, modules imported by a computed name and data files are not
    included. ``digests``: path -> SHA-256 of files as they were when they were run.
    """
    pending = list(filter(None, (_author_file(module_name(value)) for value in objects)))
    paths: dict[Path, str] = {}
    in_namespaces = names_in_namespaces()
    while pending:
        module, path = pending.pop()
        if path in paths:
            continue
        root, prefix = _root(module, path)
        paths[path] = (prefix / path.relative_to(root)).as_posix() if path != root else path.name
        for name in {*_names_of_values(module), *_imported_names(module, path)}:
            if name in sys.modules and name not in in_namespaces:
                imported = _author_file(name)
            else:  # a function will import it, or others may have modules of the name too
                imported = _file_below(name, root.parent if prefix.parts else root)
            if imported is not None and _is_beside(imported[1], root):
                pending.append(imported)
    hashes: dict[str, str] = {}
    for path, label in sorted(paths.items()):
        digest = (digests or {}).get(str(path), "")[:16] or _digest(path)
        if digest is not None:
            hashes[label if label not in hashes else f"{path.parent.name}/{label}"] = digest
    return hashes


def module_name(value: object) -> str | None:
    """The name of the module that defines a function or a class, or an instance's class."""
    while isinstance(value, functools.partial | types.MethodType):
        value = value.func if isinstance(value, functools.partial) else value.__func__
    owner: object = value if isinstance(value, type | types.FunctionType) else type(value)
    owner = inspect.unwrap(owner) if isinstance(owner, types.FunctionType) else owner
    name = getattr(owner, "__module__", None)
    return name if isinstance(name, str) else None


def _names_of_values(module: str) -> Iterator[str]:
    """The modules that define what a loaded module holds."""
    for value in list(vars(sys.modules[module]).values()) if module in sys.modules else ():
        name = value.__name__ if isinstance(value, types.ModuleType) else module_name(value)
        if name is not None:
            yield name


def _imported_names(module: str, path: Path) -> Iterator[str]:
    """The modules that a module's source imports, with their packages; some may be other names."""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    try:
        stat = path.stat()
        statements = _import_statements(path, stat.st_mtime_ns, stat.st_size)
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        # changed since it was imported
        return
    for node in statements:
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            start = package.rsplit(".", node.level - 1)[0] if node.level else ""
            base = ".".join(filter(None, (start, node.module)))
            names = [f"{base}.{alias.name}" for alias in node.names]
        for name in names:
            parts = name.split(".")
            yield from (".".join(parts[:end]) for end in range(1, len(parts) + 1))


@functools.lru_cache(maxsize=4096)
def _import_statements(
    path: Path, mtime_ns: int, size_bytes: int
) -> tuple[ast.Import | ast.ImportFrom, ...]:
    tree = parse_python(read_file(path))
    return tuple(node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom))


def _author_file(name: str | None) -> tuple[str, Path] | None:
    """The name and the source file of a loaded module that is an author's."""
    if name is None or name.partition(".")[0] in _NOT_AUTHORS:
        return None
    file = getattr(sys.modules.get(name), "__file__", None)
    return (name, Path(file).resolve()) if isinstance(file, str) and file.endswith(".py") else None


def _file_below(name: str, base: Path) -> tuple[str, Path] | None:
    """The name and the source file of a module below ``base``."""
    path = base.joinpath(*name.split("."))
    files = (path.with_name(f"{path.name}.py"), path / "__init__.py")
    return next(((name, file.resolve()) for file in files if file.is_file()), None)


def _root(module: str, path: Path) -> tuple[Path, Path]:
    """(folder that holds what belongs to the module, prefix of its labels)."""
    top = sys.modules.get(module.partition(".")[0])
    for folder in map(Path, getattr(top, "__path__", ())):
        if path.is_relative_to(folder.resolve()):
            return folder.resolve(), Path(folder.name)
    return (path if any(part in _LIBRARIES for part in path.parts) else path.parent), Path()


def _is_beside(path: Path, root: Path) -> bool:
    if not path.is_relative_to(root):
        return False
    return not any(part in _LIBRARIES for part in path.relative_to(root).parts)


def _digest(path: Path) -> str | None:
    try:
        stat = path.stat()
        return _hash(path, stat.st_mtime_ns, stat.st_size)
    except OSError:  # removed since it was imported
        return None


@functools.lru_cache(maxsize=4096)
def _hash(path: Path, mtime_ns: int, size_bytes: int) -> str:
    with open_file(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]
