"""Environments inside a git repository: which folder of which branch, found before anything is installed.

Looks with a shallow clone into a temporary folder; nothing of the repository is executed. The installer fetches it
again by the URL that `Checkout.requirement` gives.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import importlib_metadata

from verifiers.cli.install.installer import without_logins
from verifiers.cli.install.project_files import PYPROJECT, Project, project_of
from verifiers.errors import ConfigError, RunError, UnknownEnvironment
from verifiers.runtime.suggest import closest

PARENTS = ("packages/envs", "environments")
"""Where repositories keep their environments."""
_URL = re.compile(r"(https?|ssh|git|file)://[^\s#]+")
_SCP = re.compile(r"(?P<user>[\w.-]+@)(?P<host>[\w.-]+):(?P<path>[^\s#/][^\s#]*)")
_BRANCH = re.compile(r"[\w./+-]+")


@dataclass(frozen=True, slots=True)
class Repository:
    """A branch of a repository, and the folders in it where the environment may be."""

    url: str
    branch: str
    folders: tuple[str, ...]

    def requirement(self, distribution: str, folder: str) -> str:
        """What an installer is given: ``vf-x @ git+https://…@main#subdirectory=packages/envs/x``."""
        return f"{distribution} @ git+{self.url}@{self.branch}#subdirectory={folder}"

    def find(self) -> tuple[str, Project]:
        """The first folder that is there, and its project.

        Raises: ``RunError`` when git fails; ``UnknownEnvironment`` when none of the folders is there.
        """
        with _shallow_clone(self.url, self.branch) as clone:
            for folder in self.folders:
                if text := _file(clone, f"{folder}/{PYPROJECT}"):
                    return folder, _project(text, folder, self)
            there = [name for parent in PARENTS for name in _names(clone, parent)]
        wanted = PurePosixPath(self.folders[0]).name
        raise UnknownEnvironment(
            f"branch {self.branch} of {without_logins(self.url)} has no {PYPROJECT} in {' or '.join(self.folders)}"
            + closest(wanted, there),
            env_id=wanted,
        )


def repository_of(name: str, module: str, url: str | None, branch: str | None, subdirectory: str | None) -> Repository:
    """The repository that the command line means. Raises: ``ConfigError`` for words that cannot be used."""
    branch = branch or "main"
    if not _BRANCH.fullmatch(branch) or branch.startswith("-") or ".." in branch:
        raise ConfigError(f"--branch {branch!r} is no name of a branch or tag")
    folders: tuple[str, ...] = (f"{PARENTS[0]}/{name}", f"{PARENTS[1]}/{module}")
    if subdirectory is not None:
        path = PurePosixPath(subdirectory)
        if path.is_absolute() or ".." in path.parts or not re.fullmatch(r"[\w./+-]+", subdirectory):
            raise ConfigError(f"--subdirectory {subdirectory!r} must be a folder inside the repository")
        folders = (path.as_posix(),)
    return Repository(git_url(url) if url else _default_url(), branch, folders)


def git_url(text: str) -> str:
    """A URL that git and installers read alike, also for ``git@host:path`` and a local folder.

    Raises: ``ConfigError`` for anything else.
    """
    text = text.removeprefix("git+")
    if match := _SCP.fullmatch(text):
        return f"ssh://{match['user']}{match['host']}/{match['path']}"
    if _URL.fullmatch(text):
        return text
    if Path(text).expanduser().is_dir():
        return Path(text).expanduser().resolve().as_uri()
    raise ConfigError(f"--repo {text!r} is neither a URL (https, ssh, git, file) nor a folder that is there")


def _default_url() -> str:
    """The repository of the installed library. Raises: ``ConfigError`` when its metadata names none."""
    try:
        urls = importlib_metadata.metadata("verifiers").get_all("Project-URL") or []
    except importlib_metadata.PackageNotFoundError:
        urls = []
    for entry in urls:
        label, _, url = entry.partition(",")
        if label.strip().lower() in ("repository", "source", "source code") and _URL.fullmatch(url.strip()):
            return str(url).strip()
    raise ConfigError("the installed verifiers names no repository of its own; say which one with --repo URL")


@contextmanager
def _shallow_clone(url: str, branch: str) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="vf-install-") as folder:
        clone = Path(folder) / "repository"
        _git("clone", "--quiet", "--depth=1", "--no-checkout", f"--branch={branch}", "--", url, str(clone))
        yield clone


def _git(*words: str) -> str:
    try:
        done = subprocess.run(
            ["git", *words],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            env={**os.environ, "GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"},
        )
    except FileNotFoundError:
        raise ConfigError("installing from a repository needs git, and there is none on the path") from None
    if done.returncode:
        said = "; ".join(line.strip() for line in done.stderr.splitlines() if line.strip()) or "nothing"
        raise RunError(without_logins(f"git {words[0]} ended with exit code {done.returncode}: {said}"))
    return done.stdout


def _names(clone: Path, folder: str) -> Sequence[str]:
    listed = _git("-C", str(clone), "ls-tree", "--name-only", "HEAD", f"{folder}/")
    return [PurePosixPath(line).name for line in listed.splitlines()]


def _file(clone: Path, path: str) -> str | None:
    if not _git("-C", str(clone), "ls-tree", "HEAD", path).strip():
        return None
    return _git("-C", str(clone), "show", f"HEAD:{path}")


def _project(text: str, folder: str, repository: Repository) -> Project:
    try:
        return project_of(tomllib.loads(text), Path(folder))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{folder}/{PYPROJECT} of {without_logins(repository.url)} is not TOML: {error}") from error
