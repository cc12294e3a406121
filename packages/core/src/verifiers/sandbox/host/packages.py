"""Find the files of installed distributions, and of their dependencies, that code in a sandbox may
import.

This module installs nothing. Only these files are visible inside: an environment package in the
same site-packages, with its answers, is not.
"""

from __future__ import annotations

import importlib.metadata
import re
from functools import lru_cache
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from verifiers.errors import ConfigError

HIDDEN = re.compile(r"(\.pth|^__pycache__|^\.\.)$|^_?_?editable_")


def require(packages: tuple[str, ...]) -> None:
    """*Raises* ConfigError naming every package that is not installed, and the command to install
    them."""
    missing = [name for name in packages if _distribution(name) is None]
    if missing:
        raise ConfigError(
            f"The sandbox needs {', '.join(missing)}, which {'are' if missing[1:] else 'is'} not"
            f" installed; install with: pip install {' '.join(missing)}",
            names=missing,
        )


def import_names(packages: tuple[str, ...]) -> list[str]:
    """Import names of these distributions: ``sklearn`` for ``scikit-learn``."""
    return [name for package in packages for name in _top_levels(package)]


@lru_cache
def folders(packages: tuple[str, ...]) -> dict[str, Path]:
    """Top-level name in site-packages -> file or folder, of the packages and their dependencies."""
    require(packages)
    return {entry.name: entry for name in _closure(packages) for entry in _entries(name)}


def _distribution(name: str) -> importlib.metadata.Distribution | None:
    try:
        return importlib.metadata.distribution(name)
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return None


def _closure(packages: tuple[str, ...]) -> list[str]:
    """The packages and their installed dependencies, without extras."""
    closure: dict[str, None] = {}
    pending = [canonicalize_name(name) for name in packages]
    while pending:
        name = pending.pop()
        distribution = _distribution(name)
        if name in closure or distribution is None:
            continue
        closure[name] = None
        for text in distribution.requires or ():
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                pending.append(canonicalize_name(requirement.name))
    return list(closure)


def _entries(name: str) -> list[Path]:
    distribution = importlib.metadata.distribution(name)
    tops = {
        Path(file).parts[0]
        for file in distribution.files or ()
        if not HIDDEN.search(Path(file).parts[0])
    }
    paths = [Path(str(distribution.locate_file(top))) for top in sorted(tops)]
    return [path for path in paths if path.exists()]


def _top_levels(name: str) -> list[str]:
    """Its packages, or its modules when it has no package (a script beside a package is not an
    import name)."""
    entries = [
        path for path in _entries(canonicalize_name(name)) if path.name.split(".")[0].isidentifier()
    ]
    packages = [path.name for path in entries if (path / "__init__.py").exists()]
    return packages or [
        path.name.split(".")[0] for path in entries if path.suffix in (".py", ".so")
    ]
