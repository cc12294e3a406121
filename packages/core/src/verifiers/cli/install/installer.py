"""Run the Python installer: ``uv pip`` where uv is available, else ``pip``, into this interpreter's
environment.

The running ``verifiers`` satisfies every requirement of that name, since packages written for other
versions run under it and the index's ``verifiers`` is another project: every command pins it to its
version, uv gets that version as an override of what packages require (``library_overrides``) and
ignores their ``[tool.uv.sources]`` for it. pip has no overrides; a package that it refuses for that
reason is installed without its dependencies, and these after it. ``sources`` chooses the packages.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import importlib_metadata

from verifiers.errors import ConfigError, RunError
from verifiers.runtime.bounded import read_lines
from verifiers.runtime.folders import user_cache_folder
from verifiers.runtime.install_lines import CORE, LOGIN, install_line
from verifiers.storage.files import atomic_write

if TYPE_CHECKING:
    from packaging.requirements import Requirement

MAX_LAST_LINES = 15
"""Output lines of a failed installer that its error message contains."""
_OTHER_INDEXES = ("UV_INDEX", "UV_EXTRA_INDEX_URL", "UV_FIND_LINKS")


@dataclass(frozen=True, slots=True)
class Finished:
    """The result of an installer command."""

    command: Sequence[str]
    code: int
    last_lines: Sequence[str]

    @property
    def text(self) -> str:
        """The last output lines as one line, without uv's box-drawing characters."""
        return " ".join(re.sub(r"[│╰├─▶×]", " ", " ".join(self.last_lines)).split())

    def lacks(self, distribution: str) -> bool:
        """Whether no index has the distribution, or not in the requested version."""
        name = rf"(?<![\w-]){re.escape(distribution)}"
        return self._failed_with(
            rf"{name} was not found in|there (is|are) no versions? of {name}\b"
            rf"|No matching distribution found for {name}\b(?!-)"
        )

    @property
    def refuses_library(self) -> bool:
        """Whether pip failed because a package requires another version of ``verifiers``."""
        return self._failed_with(r"depends on verifiers(?![\w-])")

    @property
    def lacks_wheel(self) -> bool:
        """Whether it failed because the package has only source distributions."""
        return self._failed_with(r"no usable wheels?|building from source is disabled")

    def _failed_with(self, pattern: str) -> bool:
        return self.code != 0 and re.search(pattern, self.text) is not None

    def check(self) -> None:
        """*Raises* ``RunError`` with the last output lines when the command failed."""
        if self.code:
            lines = "\n  ".join(self.last_lines) or "nothing"
            ended = f"ended with exit code {self.code} and printed:"
            raise RunError(f"{command_line(self.command)}\n{ended}\n  {lines}")


@dataclass(frozen=True, slots=True)
class Installer:
    """How to call the installer: ``Installer(("uv", "pip", "install", "--python", "python3"),
    is_uv=True)``."""

    prefix: tuple[str, ...]
    is_uv: bool

    def install(self, *requirements: str, upgrade: str | None = None) -> list[str]:
        """The command that installs ``requirements``.

        ``upgrade``: a distribution to upgrade to its newest version; others are upgraded only where
        required.
        """
        flags: list[str] = []
        if upgrade and self.is_uv:
            flags = ["--upgrade-package", upgrade, "--reinstall-package", upgrade]
        elif upgrade:
            flags = ["--upgrade"]
        library = _this_library()
        overrides = ["--overrides", str(library_overrides())] if self.is_uv and library else []
        return [*self.prefix, *flags, *requirements, *library, *overrides]

    def dependencies_of(self, distribution: str) -> list[str]:
        """The command of pip that installs what a distribution requires beside ``verifiers``."""
        requirements = [r for r in _requirements(distribution) if not _is_library(r)]
        return [*self.prefix, *map(str, requirements), *_this_library()]

    def install_without_dependencies(self, *requirement: str) -> list[str]:
        """The command that installs one package without its dependencies."""
        return [*self.prefix, "--no-deps", *requirement]

    def install_alone_from(self, index_url: str, requirement: str, upgrade: bool) -> list[str]:
        """The command that installs one package from one index only, without its dependencies."""
        only = ["--no-config", "--default-index"] if self.is_uv else ["--isolated", "--index-url"]
        flags = [*only, index_url, *(["--upgrade"] if upgrade else [])]
        return [*self.prefix, "--no-deps", *flags, requirement]

    def into(self, folder: str, *requirements: str) -> list[str]:
        """The command that installs wheels and their dependencies into ``folder`` alone."""
        return [*self.prefix, "--only-binary", ":all:", "--target", folder, *requirements]

    def unpack(self, requirement: str, folder: str) -> list[str]:
        """The command that unpacks a wheel into ``folder`` without running its code."""
        flags = ["--no-deps", "--only-binary", ":all:", "--target", folder]
        return [*self.prefix, *flags, requirement]


def find_installer() -> Installer:
    """uv, on the path or as a module of this Python, else pip. *Raises* ``ConfigError`` when there
    is none."""
    uv = ["uv"] if shutil.which("uv") else [sys.executable, "-m", "uv"]
    if len(uv) == 1 or importlib.util.find_spec("uv"):
        return Installer((*uv, "pip", "install", "--python", sys.executable), is_uv=True)
    if importlib.util.find_spec("pip"):
        return Installer((sys.executable, "-m", "pip", "install"), is_uv=False)
    raise ConfigError(
        f"neither uv (on the path, or in {sys.executable}) nor pip is available; install one of them"
    )


def run(
    command: Sequence[str],
    *,
    echo: bool,
    one_index: bool = False,
    folder: Path | None = None,
    installs_here: bool = True,
) -> Finished:
    """Run an installer command to completion, in ``folder``.

    ``echo``: copy its output to stderr; ``one_index``: without other indexes; ``installs_here``: it
    installs into this interpreter's environment, not into another project's.
    """
    lines: deque[str] = deque(maxlen=MAX_LAST_LINES)
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=_environment(one_index) if installs_here else {**os.environ, "NO_COLOR": "1"},
        cwd=folder,
    ) as process:
        assert process.stdout is not None
        try:
            for line in map(without_logins, read_lines(process.stdout)):
                if echo:
                    print(line, end="", file=sys.stderr, flush=True)
                if line.strip():
                    lines.append(line.rstrip())
        except BaseException:  # an interrupt, too: it ends the installer and is raised again
            process.terminate()
            raise
    return Finished(command, process.returncode, tuple(lines))


def command_line(command: Sequence[str]) -> str:
    """The command quoted for a shell, without logins."""
    return without_logins(shlex.join(command))


def without_logins(text: str) -> str:
    """The text with the user and password of each URL replaced; a token is often given as the user.

    >>> without_logins("https://me:secret@host/simple, https://token@host, ssh://git@host")
    'https://***@host/simple, https://***@host, ssh://git@host'
    """
    return LOGIN.sub(r"\1***@", text)


def installed_library() -> str:
    """Fingerprint of the installed ``verifiers``: its version, origin and files.

    The version alone is ambiguous: the public index has another library with the same name and
    version. *Raises* ``ConfigError`` when none is installed, because an installer would then fetch
    that other library.
    """
    try:
        library = importlib_metadata.distribution("verifiers")
    except importlib_metadata.PackageNotFoundError:
        raise ConfigError(
            f"verifiers runs from its source folder and is not installed in {sys.executable}, so an"
            " installer would fetch another library of this name from the index; install it first:"
            f" {install_line('verifiers')}"
        ) from None
    texts = (library.read_text(name) or "" for name in ("direct_url.json", "RECORD"))
    return "\n".join([library.version, *texts])


def library_overrides() -> Path:
    """A file for ``uv pip install --overrides``: the running ``verifiers``, whatever packages
    require.

    It is in the user's cache, so that a printed command can be repeated. *Raises* ``ConfigError``.
    """
    (pin,) = _this_library()
    path = user_cache_folder() / "install" / f"{pin.replace('==', '-')}.txt"
    try:
        if not path.is_file():
            path.parent.mkdir(parents=True, exist_ok=True)
            atomic_write(path, f"{pin}\n".encode())
    except OSError as error:
        raise ConfigError(
            f"{path}, which the installer reads, cannot be written: {error}; set XDG_CACHE_HOME",
            path=str(path),
        ) from error
    return path


def library_version() -> str:
    """The version of the running ``verifiers``. *Raises* ``PackageNotFoundError``."""
    return str(importlib_metadata.version(CORE))


def unmet_by_library(distribution: str) -> list[Requirement]:
    """What an installed distribution requires of ``verifiers`` that excludes this version."""
    version, requirements = library_version(), _requirements(distribution)
    return [r for r in requirements if _is_library(r) and version not in r.specifier]


def lacking_extras(distribution: str) -> list[str]:
    """What this Python lacks of the extras of ``verifiers`` that an installed distribution
    requires.

    An override of uv names no extras, so they are left out at first.
    """
    extras = {extra for r in _requirements(distribution) if _is_library(r) for extra in r.extras}
    usual = set(map(str, _requirements(CORE)))
    added = {str(r): r for extra in sorted(extras) for r in _requirements(CORE, extra)}
    return [text for text, r in added.items() if text not in usual and not is_satisfied(r)]


def _requirements(distribution: str, extra: str = "") -> Iterator[Requirement]:
    """What an installed distribution requires on this machine, with one of its extras."""
    from packaging.requirements import Requirement

    for text in importlib_metadata.distribution(distribution).requires or ():
        requirement = Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
            requirement.marker = None
            yield requirement


def is_satisfied(requirement: Requirement) -> bool:
    """Whether this Python has the distribution, in a version that is required."""
    try:
        return importlib_metadata.version(requirement.name) in requirement.specifier
    except importlib_metadata.PackageNotFoundError:
        return False


def _is_library(requirement: Requirement) -> bool:
    from packaging.utils import canonicalize_name

    return canonicalize_name(requirement.name) == CORE


def _this_library() -> list[str]:
    try:
        return [f"{CORE}=={library_version()}"]
    except importlib_metadata.PackageNotFoundError:  # run from its source folder
        return []


def _environment(one_index: bool) -> Mapping[str, str]:
    environment = {**os.environ, "NO_COLOR": "1"}
    if _this_library():
        environment["UV_NO_SOURCES_PACKAGE"] = "verifiers"
    for name in _OTHER_INDEXES if one_index else ():
        environment.pop(name, None)
    return environment
