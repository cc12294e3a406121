"""Find the source of an environment in a local folder: by id below ``./environments`` and ``.``, or
by path.

A module file, a package, or a project folder (with ``pyproject.toml``) is found; nothing is
imported. A source that cannot be an environment is reported with its file and line.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from verifiers.errors import ConfigError, EnvironmentLoadError, UnknownEnvironment, UsageError
from verifiers.runtime import decoding
from verifiers.runtime.bounded import read_file
from verifiers.runtime.importing import import_source
from verifiers.runtime.places import short_path
from verifiers.runtime.suggest import SIMILAR, close_match, closest
from verifiers.runtime.syntax import parse_python

GROUP = "verifiers.environments"
LOADER = "load_environment"
PYPROJECT = "pyproject.toml"


@dataclass(frozen=True, slots=True)
class LocalSource:
    """Where a local environment is: ``LocalSource(Path("/w/environments/sums.py"), "sums",
    Path("/w/environments"))``.

    ``root`` is the folder that holds the module or its top-level package.
    """

    file: Path
    module: str
    root: Path
    attribute: str = LOADER
    version: str | None = None

    @property
    def env_id(self) -> str:
        """The id of an environment that was named by its path: ``sums``."""
        return normalize_name(self.module.rpartition(".")[2]).removeprefix("vf-")

    def problem(self, star: bool = True) -> UsageError | None:
        """Why importing the file would not give the loader, with file and line; None when it would.
        Imports nothing.

        ``star``: ``import *`` may give it.
        """
        path = short_path(self.file)
        try:
            tree = parse_python(read_file(self.file))
        except SyntaxError as error:
            return EnvironmentLoadError(
                f"{path}:{error.lineno}: SyntaxError: {error.msg}", file=path, line=error.lineno
            )
        except (OSError, ValueError) as error:
            return EnvironmentLoadError(f"{path} cannot be read: {error}", file=path)
        return missing_loader(tree, path, self.attribute.partition(".")[0], star)

    def load(self) -> ModuleType:
        """Import the module from its file. A name that another module has is not taken from it."""
        return import_source(self.file, self.module, self.root)


def at_path(text: str) -> LocalSource | None:
    """The environment at a path; None when ``text`` is none.

    A path ends with ``.py`` or begins with ``.``, ``/`` or ``~``; ``folder/name`` is a path when
    there is an environment. *Raises* ``UnknownEnvironment`` when nothing is there.
    """
    is_path = text.endswith(".py") or text.startswith((".", "/", "~"))
    if not is_path and "/" not in text:
        return None
    path = Path(os.path.expanduser(text))
    if os.path.isfile(path):
        return _in_its_project(_of_file(path)) if path.suffix == ".py" else None
    if os.path.isdir(path) and (source := _in_project(path, path.resolve().name)) is not None:
        return source
    if os.path.isfile(f"{path}.py"):
        return _in_its_project(_of_file(Path(f"{path}.py")))
    if not is_path:
        return None
    if os.path.isdir(path):
        raise UnknownEnvironment(
            f"the folder {text} holds no environment: neither {path.resolve().name}.py, nor a"
            f" package of this name, nor a {PYPROJECT} with an entry point in {GROUP}",
            env_id=text,
        )
    beside = [
        os.path.join(path.parent, python_file.name) for python_file in _python_files(path.parent)
    ]
    raise UnknownEnvironment(
        f"{text!r} is no environment id, and there is no file or folder {text}"
        + closest(os.path.normpath(text), beside).replace('"', "'"),
        env_id=text,
    )


def harbor_tasks(text: str) -> Path | None:
    """The folder of a task, or of tasks, in Harbor's format at a path; None for any other text."""
    path = Path(os.path.expanduser(text)).resolve()
    is_path = "/" in text or text == "."
    if not is_path or not path.is_dir() or os.path.isfile(path / PYPROJECT):
        return None
    is_task = os.path.isfile(path / "task.toml") or any(path.glob("*/task.toml"))
    return path if is_task else None


def in_folder(base: Path, name: str) -> LocalSource | None:
    """The environment ``name`` (an id without owner and version) in ``base``; None when it has
    none."""
    base = base.expanduser()
    names = list(dict.fromkeys(module_names(name)))
    for module in names:
        if os.path.isfile(base / f"{module}.py"):
            return _of_file(base / f"{module}.py")
    folders = dict.fromkeys(
        (name, normalize_name(name), *names, *(n.replace("_", "-") for n in names))
    )
    for folder in folders:
        if (
            os.path.isdir(base / folder)
            and (source := _in_project(base / folder, name)) is not None
        ):
            return source
    return None


def names_in(base: Path) -> list[str]:
    """The ids of the files and folders in ``base`` that may be environments, for suggestions."""
    files = [path.stem for path in _python_files(base)]
    folders = [path.name for path in base.iterdir() if path.is_dir()] if base.is_dir() else []
    return [
        normalize_name(n)
        for n in (*files, *(f for f in folders if in_folder(base, f) is not None))
        if n[0] != "_"
    ]


def module_names(name: str) -> Iterator[str]:
    """The names that the module of an id may have."""
    folded = normalize_name(name)
    for spelling in (name, folded, folded.removeprefix("vf-")):
        module = re.sub(r"[-.]", "_", spelling)
        yield module
        yield f"vf_{module}"


def normalize_name(name: str) -> str:
    """Normalize a name for comparison: lower case, runs of ``-``, ``_`` and ``.`` as one ``-``."""
    return re.sub(r"[-_.]+", "-", name).lower()


def read_toml(folder: Path) -> dict[str, object]:
    """The ``pyproject.toml`` in ``folder``; empty when there is none. *Raises* ``ConfigError``:
    unreadable."""
    path = folder / PYPROJECT
    try:
        return decoding.read_toml(path)
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}", path=str(path)) from error


def table_at(document: Mapping[str, object], *keys: str) -> dict[str, Any]:
    """The table at ``keys``; empty when it is missing or not a table."""
    value: object = document
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value if isinstance(value, dict) else {}


# --- files ----------------------------------------------------------------------------------------


def _of_file(file: Path, attribute: str = LOADER, version: str | None = None) -> LocalSource:
    file = file.resolve()
    parts, folder = [file.stem], file.parent
    if file.name == "__init__.py":
        parts, folder = [folder.name], folder.parent
    while (folder / "__init__.py").is_file():
        parts.insert(0, folder.name)
        folder = folder.parent
    return LocalSource(file, ".".join(parts), folder, attribute, version)


def _in_project(folder: Path, name: str) -> LocalSource | None:
    """The environment ``name`` in a project or package folder: the entry point of its project, else
    by file names."""
    document = read_toml(folder)
    version = table_at(document, "project").get("version")
    version = version if isinstance(version, str) else None
    declared = table_at(document, "project", "entry-points", GROUP)
    folded = normalize_name(name).removeprefix("vf-")
    entries = [
        value
        for key, value in declared.items()
        if normalize_name(key).removeprefix("vf-") == folded
    ]
    if not entries and len(declared) == 1:
        entries = list(declared.values())
    roots = (folder / "src", folder)
    if entries and isinstance(entries[0], str):
        module, _, attribute = entries[0].replace(" ", "").partition(":")
        path = module.replace(".", "/")
        for file in (
            root / file for root in roots for file in (f"{path}.py", f"{path}/__init__.py")
        ):
            if file.is_file():
                return _of_file(file, attribute or LOADER, version)
    for module in dict.fromkeys((*module_names(name), *module_names(folder.resolve().name))):
        for file in (
            root / file for root in roots for file in (f"{module}.py", f"{module}/__init__.py")
        ):
            if file.is_file():
                return _of_file(file, version=version)
    if (folder / "__init__.py").is_file():
        return _of_file(folder / "__init__.py", version=version)
    return None


def _in_its_project(source: LocalSource) -> LocalSource:
    """The source with the version and the loader that its project declares."""
    for folder in (source.root, source.root.parent):
        if (folder / PYPROJECT).is_file():
            project = _in_project(folder, source.env_id)
            return project if project is not None and project.file == source.file else source
    return source


def _python_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.py")) if folder.is_dir() else []


# --- what a source binds --------------------------------------------------------------------------


def missing_loader(
    tree: ast.Module, file: str, loader: str, star: bool
) -> UnknownEnvironment | None:
    """The error for a source that does not bind ``loader``; None when it does, or with ``star`` by
    ``import *``."""
    bound = dict(_bound_names(tree))
    if loader in bound or (star and "*" in bound):
        return None
    near = close_match(loader, bound, SIMILAR)
    if near is None:
        return UnknownEnvironment(
            f"{file} does not define {loader}(), which returns the environment; add it", file=file
        )
    return UnknownEnvironment(
        f"{file}:{bound[near]} defines {near}, which is not {loader}: rename it",
        file=file,
        line=bound[near],
    )


def binds_loader(tree: ast.Module) -> bool:
    """Return whether importing this source would bind the loader."""
    return any(name == LOADER for name, _ in _bound_names(tree))


def _bound_names(tree: ast.Module) -> Iterator[tuple[str, int]]:
    for statement in _top_level(tree.body):
        for name in _names_bound_by(statement):
            yield name, statement.lineno


def _top_level(statements: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements that run on import, including those inside ``if``, ``try``
    and ``with``."""
    for statement in statements:
        yield statement
        if isinstance(statement, ast.If | ast.Try | ast.With):
            for part in ("body", "orelse", "finalbody"):
                yield from _top_level(getattr(statement, part, []))
            for handler in getattr(statement, "handlers", []):
                yield from _top_level(handler.body)


def _names_bound_by(statement: ast.stmt) -> set[str]:
    match statement:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return {name}
        case ast.Import(names=names) | ast.ImportFrom(names=names):
            return {alias.asname or alias.name for alias in names}
        case ast.Assign(targets=targets):
            return {target.id for target in targets if isinstance(target, ast.Name)}
        case ast.AnnAssign(target=ast.Name(id=name), value=value) if value is not None:
            return {name}
    return set()
