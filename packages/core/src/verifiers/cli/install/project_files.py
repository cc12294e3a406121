"""Read ``pyproject.toml`` files of a project, and of the uv workspace around a folder.

Executes nothing: a name or version that is computed at build time is None here.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from verifiers.environments.local_sources import (
    GROUP,
    PYPROJECT,
    normalize_name,
    read_toml,
    table_at,
)


@dataclass(frozen=True, slots=True)
class Project:
    """A folder that an installer can build: ``Project(Path("word-game"), "vf-word-game", "0.1.0",
    ("word-game",))``."""

    folder: Path
    name: str | None
    """The distribution's name; None when it is computed at build time."""
    version: str | None
    env_ids: tuple[str, ...] = ()
    """Entry points of the environments' group."""

    def offers(self, name: str) -> bool:
        """Whether it provides the normalised id ``name``: by an entry point, else by its name."""
        offered = {normalize_name(env_id) for env_id in self.env_ids} or {
            normalize_name(self.name or self.folder.name)
        }
        return bool(offered & {name, f"vf-{name}"})


@dataclass(frozen=True, slots=True)
class Workspace:
    """A uv workspace: its root and the globs of its members."""

    root: Path
    members: tuple[str, ...]
    exclude: tuple[str, ...] = ()

    def contains(self, folder: Path) -> bool:
        """Whether ``folder``, existing or not, would be a member."""
        folder = folder.resolve()
        if not folder.is_relative_to(self.root):
            return False
        path = folder.relative_to(self.root).as_posix()
        return any(_matches(path, glob) for glob in self.members) and not any(
            _matches(path, g) for g in self.exclude
        )

    def projects(self) -> Iterator[Project]:
        """The members, sorted by folder. *Raises* ``ConfigError`` for an unreadable file."""
        folders = {folder for glob in self.members for folder in self.root.glob(glob)}
        for folder in sorted(folders):
            if (folder / PYPROJECT).is_file() and self.contains(folder):
                yield read_project(folder)


def find_workspace(start: Path) -> Workspace | None:
    """The uv workspace of ``start``: the nearest ``pyproject.toml``, upwards, that declares one."""
    for folder in (start.resolve(), *start.resolve().parents):
        table = table_at(read_toml(folder), "tool", "uv").get("workspace")
        if isinstance(table, dict):
            return Workspace(folder, _texts(table.get("members")), _texts(table.get("exclude")))
    return None


def is_project(folder: Path) -> bool:
    """Whether the folder has build files."""
    return folder.is_dir() and any((folder / name).is_file() for name in (PYPROJECT, "setup.py"))


def read_project(folder: Path) -> Project:
    """The project in ``folder``. *Raises* ``ConfigError`` for an unreadable ``pyproject.toml``."""
    return project_of(read_toml(folder), folder)


def project_of(document: Mapping[str, object], folder: Path) -> Project:
    """The project that the content of a ``pyproject.toml`` describes."""
    table = table_at(document, "project")
    name, version = (
        table.get(key) if isinstance(table.get(key), str) else None for key in ("name", "version")
    )
    return Project(folder, name, version, tuple(table_at(table, "entry-points", GROUP)))


def _texts(value: object) -> tuple[str, ...]:
    return tuple(text for text in value if isinstance(text, str)) if isinstance(value, list) else ()


def _matches(path: str, glob: str) -> bool:
    """Whether a path matches a glob whose ``*`` does not cross a slash (``**`` does)."""
    parts, globs = path.split("/"), re.sub(r"^\./|/$", "", glob).split("/")
    if "**" in globs:
        return fnmatch.fnmatchcase(path, "/".join(globs))
    return len(parts) == len(globs) and all(map(fnmatch.fnmatchcase, parts, globs))
