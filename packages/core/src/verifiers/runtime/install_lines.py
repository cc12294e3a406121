"""Where the distributions of this project were installed from, and the commands that install more
from there.

They are on no public index, where ``verifiers`` is another project: installing a plain name could
take that project. ``direct_url.json`` (PEP 610) holds where an installed distribution came from; a
distribution that is not installed comes from the same place as ``verifiers``.
"""

from __future__ import annotations

import importlib.util
import re
import shlex
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from verifiers.runtime.decoding import decode_json

if TYPE_CHECKING:
    from importlib.metadata import Distribution

CORE = "verifiers"
LOGIN = re.compile(r"(https?://)[^/\s@]+@")
"""The name and the key in a URL; its group is what stands before them."""
_SOURCE_LABELS = ("repository", "source", "source code")


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a distribution came from: ``folder``, or ``url`` of a git repository (with ``commit``)
    or of an archive."""

    folder: Path | None = None
    is_editable: bool = False
    """Whether the folder itself is imported, not a copy."""
    url: str = ""
    """Without user and password."""
    commit: str = ""
    subdirectory: str = ""

    @property
    def reference(self) -> str:
        """What follows ``NAME @`` in a requirement."""
        if not self.commit:
            return self.url
        return f"git+{self.url}@{self.commit}" + (
            f"#subdirectory={self.subdirectory}" if self.subdirectory else ""
        )

    def beside(self, distribution: str) -> Origin | None:
        """The origin of another distribution of the same repository; None when it cannot be
        derived."""
        name = _folder(distribution)
        if self.folder is not None:
            folder = self.folder.parent / name
            return replace(self, folder=folder) if folder.is_dir() else None
        parent = PurePosixPath(self.subdirectory).parent
        return replace(self, subdirectory=str(parent / name)) if self.subdirectory else None


def install_line(distribution: str, extra: str = "") -> str:
    """The shell command that installs a distribution with any of its extras:
    ``install_line("verifiers", "math")``.

    ``uv pip install -e '…/packages/core[math]'`` in a checkout, ``pip install 'verifiers[math] @
    git+…'`` where it came from git. ``pip`` where this Python has it, else ``uv pip``.
    """
    command = "pip install" if importlib.util.find_spec("pip") else "uv pip install"
    return f"{command} {requirement(distribution, extra)}"


def requirement(distribution: str, extra: str = "") -> str:
    """The arguments of ``pip install`` for it, quoted for a shell.

    They are a plain name where it was installed by its name from an index: the installer then keeps
    what is installed.
    """
    suffix = f"[{extra}]" if extra else ""
    library = origin_of(CORE)
    origin = origin_of(distribution) or (library.beside(distribution) if library else None)
    if origin is None:
        if _installed(distribution):
            return shlex.quote(f"{distribution}{suffix}")
        unknown = Origin(
            url=repository_url() or "REPOSITORY", commit="main", subdirectory="packages/core"
        )
        origin = unknown.beside(distribution) or unknown
    if origin.folder is not None:
        return f"{'-e ' if origin.is_editable else ''}{shlex.quote(f'{origin.folder}{suffix}')}"
    return shlex.quote(f"{distribution}{suffix} @ {origin.reference}")


def origin_of(distribution: str) -> Origin | None:
    """Where an installed distribution came from; None when its metadata does not say, or the place
    is gone."""
    installed = _installed(distribution)
    if installed is None:
        folder = Path(__file__).resolve().parents[3]  # run from its source folder
        is_source = distribution == CORE and (folder / "pyproject.toml").is_file()
        return Origin(folder, is_editable=True) if is_source else None
    try:
        return _read(decode_json(installed.read_text("direct_url.json") or "{}"))
    except (ValueError, KeyError, AttributeError):  # not what PEP 610 describes
        return None


def repository_url() -> str | None:
    """The git repository of the installed ``verifiers``: that of its ``[project.urls]``, else where
    it came from.

    For a checkout it is the URL of its folder. None when nothing says it.
    """
    library = _installed(CORE)
    for entry in (library.metadata.get_all("Project-URL") if library else None) or []:
        label, _, url = str(entry).partition(",")
        if label.strip().lower() in _SOURCE_LABELS and re.match(
            r"(https?|ssh|git|file)://\S", url.strip()
        ):
            return url.strip()
    origin = origin_of(CORE)
    if origin is None:
        return None
    if origin.folder is not None:
        root = origin.folder.parent.parent
        return root.as_uri() if (root / ".git").exists() else None
    return origin.url if origin.commit else None


def _folder(distribution: str) -> str:
    """Its folder in ``packages`` of the repository, by its name: ``verifiers-NAME`` is in ``NAME``,
    an environment ``vf-NAME`` in ``envs/NAME``."""
    if distribution == CORE:
        return "core"
    if distribution.startswith(f"{CORE}-"):
        return distribution.removeprefix(f"{CORE}-")
    return f"envs/{distribution.removeprefix('vf-')}"


def _read(facts: dict[str, Any]) -> Origin | None:
    """The origin that the content of a ``direct_url.json`` describes."""
    from urllib.parse import unquote, urlsplit

    url = LOGIN.sub(r"\1", facts.get("url", ""))
    path = Path(unquote(urlsplit(url).path))
    if "dir_info" in facts:
        return Origin(path, bool(facts["dir_info"].get("editable"))) if path.is_dir() else None
    if "vcs_info" in facts:
        return Origin(
            url=url,
            commit=facts["vcs_info"]["commit_id"],
            subdirectory=facts.get("subdirectory", ""),
        )
    return Origin(url=url) if url and (not url.startswith("file:") or path.is_file()) else None


def _installed(distribution: str) -> Distribution | None:
    from importlib import metadata  # late: it imports email

    try:
        return metadata.distribution(distribution)
    except metadata.PackageNotFoundError:
        return None
