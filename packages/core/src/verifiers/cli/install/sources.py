"""Choose the source of an environment: the arguments of ``vf-install`` -> packages to install, the
most likely first.

The order: a git repository, if any is named; a project folder; a member of the surrounding
workspace; a file or folder that needs no installation; an installed package; a package index.
Installs nothing. A repository is inspected in a shallow clone without a checkout, so that a missing
branch, folder or version is reported before the installer starts; the installer then fetches ``NAME
@ git+URL@BRANCH#subdirectory=FOLDER``.
"""

from __future__ import annotations

import os
import re
import shlex
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from verifiers.cli.install.installer import without_logins
from verifiers.cli.install.project_files import (
    Project,
    find_workspace,
    is_project,
    project_of,
    read_project,
)
from verifiers.environments import registry
from verifiers.environments.local_sources import (
    PYPROJECT,
    at_path,
    in_folder,
    normalize_name,
    read_toml,
    table_at,
)
from verifiers.environments.registry import EnvironmentId, FoundEnvironment, parse_env_id
from verifiers.errors import ConfigError, RunError, UnknownEnvironment, UsageError
from verifiers.runtime.bounded import TooLong, run_captured
from verifiers.runtime.decoding import decode_toml
from verifiers.runtime.install_lines import CORE, origin_of, repository_url
from verifiers.runtime.suggest import close_matches, closest
from verifiers.runtime.values import option

PARENTS = ("packages/envs", "environments")
"""Folders of environments in repositories."""
_URL = re.compile(r"(https?|ssh|git|file)://[^\s#]+")
_SCP = re.compile(r"(?P<user>[\w.-]+@)(?P<host>[\w.-]+):(?P<path>[^\s#/][^\s#]*)")
_BRANCH = re.compile(r"[\w./+-]+")
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class InstallSettings:
    """The flags of ``vf-install``."""

    path: str = option("./environments", "Folder of environments.", "-p", metavar="DIR")
    from_repo: bool = option(False, "Install from the git repository of verifiers.", "-r")
    repo: str | None = option(None, "Install from this git repository.", metavar="URL")
    branch: str | None = option(
        None, "Branch or tag of the repository [main].", "-b", metavar="NAME"
    )
    subdirectory: str | None = option(
        None,
        "Folder in the repository [packages/envs/NAME, else environments/NAME].",
        metavar="DIR",
    )
    upgrade: bool = option(False, "Reinstall, in the newest version.")
    yes: bool = option(False, "Install a package that it would ask about.", "-y")
    no_editable: bool = option(False, "Copy a folder instead of linking to it.")
    agent: str | None = option(
        None,
        "Install an agent program (NAME or NAME@VERSION) into a folder of its own.",
        metavar="NAME",
    )
    taskset: str | None = option(
        None,
        "Install a taskset of verifiers 0.4 (a package or a folder) with its own Python.",
        metavar="PACKAGE",
    )
    list_installed: bool = option(False, "List the installed environments and exit.", key="list")
    dry_run: bool = option(False, "Print the command; run nothing, send no request.")


@dataclass(frozen=True)
class Request(InstallSettings):
    """The arguments of ``vf-install``."""

    text: str = ""


@dataclass(frozen=True, slots=True)
class Package:
    """A package to install, and the environments that it must then provide."""

    requirement: tuple[str, ...]
    """Arguments of the installer: a requirement, or ``-e`` and a folder."""
    distribution: str | None
    env_ids: tuple[str, ...]
    """Ids that must resolve afterwards."""
    version: str | None = None
    """The requested version."""
    is_local: bool = False
    index_url: str | None = None
    """The only index it may come from."""
    check_first: bool = False
    """Whether to inspect the wheel first: a name in the index belongs to anyone."""


@dataclass(frozen=True, slots=True)
class Installed:
    """The environment is already installed."""

    env_id: str


def choose(request: Request) -> Installed | FoundEnvironment | Sequence[Package]:
    """Resolve a request: already installed, a local source that needs no installation, or packages
    to try in order.

    *Raises* ``UsageError`` for invalid arguments or when no source has the environment;
    ``RunError`` when git fails.
    """
    from_repo = request.from_repo or request.repo is not None
    if not from_repo and (request.branch or request.subdirectory):
        raise ConfigError(
            "--branch and --subdirectory choose inside a repository; add --from-repo or --repo URL"
        )
    folder = Path(request.text).expanduser()
    if folder.suffix == ".whl" and folder.is_file():
        name = folder.name.partition("-")[0].replace("_", "-")
        return [Package((str(folder),), name, (name.removeprefix("vf-"),), is_local=True)]
    if request.text and not from_repo and is_project(folder):
        return [_local(read_project(folder), not request.no_editable)]
    if request.text and not from_repo and (source := at_path(request.text)) is not None:
        return registry.local(source, source.env_id)
    env_id = _parse(request.text)
    name = normalize_name(env_id.name)
    name = name.removeprefix("vf-") or name
    if from_repo:
        return [_from_repository(request, env_id, name)]
    if (project := _find_project(name, Path(request.path).expanduser())) is not None:
        return [_local(project, not request.no_editable, name, env_id)]
    as_found = _needs_no_installation(env_id, request.path) if env_id.version is None else None
    if as_found is not None:
        return as_found
    if not request.upgrade and _is_installed(env_id):
        return Installed(request.text)
    if (package := _beside_the_library(request, env_id, name)) is not None:
        return [package]
    return _from_index(env_id, name)


def known_ids() -> list[str]:
    """Ids of installed environments and of members of the surrounding workspace."""
    workspace = find_workspace(Path.cwd())
    projects = workspace.projects() if workspace else ()
    members = [env_id for project in projects for env_id in project.env_ids]
    return sorted({*members, *(info.id for info in registry.list_environments())})


def unknown(text: str, why: str) -> UnknownEnvironment:
    """The error for an environment that was not found, with suggestions."""
    name = parse_env_id(text).name
    suggestions = close_matches(name, known_ids())
    hint = f"; did you mean {' or '.join(map(repr, suggestions))}?" if suggestions else ""
    return UnknownEnvironment(f"{why}{hint}", env_id=name, suggestions=suggestions)


def _parse(text: str) -> EnvironmentId:
    try:
        return parse_env_id(text)
    except UnknownEnvironment as error:
        folder = Path(text).expanduser()
        if text and folder.exists():
            no_project = "has neither pyproject.toml nor setup.py"
            why = no_project if folder.is_dir() else "is not a Python file"
            raise ConfigError(f"{text} cannot be installed: it {why}", path=text) from None
        message = f"{error}; there is no folder {text!r} either"
        raise UnknownEnvironment(message, **error.facts) from None


def _local(
    project: Project, editable: bool, name: str | None = None, env_id: EnvironmentId | None = None
) -> Package:
    version = env_id.version if env_id else None
    if version not in (None, "latest") and project.version not in (None, version):
        raise ConfigError(
            f"{project.folder} has version {project.version}, and {version} was requested; leave"
            f" @{version} out, or name another folder with --path",
            path=str(project.folder),
        )
    ids = (name,) if name else project.env_ids or (project.name or project.folder.resolve().name,)
    path = str(project.folder)
    if not path.startswith(("/", ".")):
        path = f"./{path}"  # so that it is never parsed as an option or as the name of a package
    return Package(
        ("-e", path) if editable else (path,), project.name, ids, _exact(version), is_local=True
    )


def _find_project(name: str, base: Path) -> Project | None:
    """The environment's folder below ``base``, else a member of the surrounding workspace."""
    module = name.replace("-", "_")
    for folder in (name, module, f"vf-{name}", f"vf_{module}"):
        if is_project(base / folder):
            return read_project(base / folder)
    workspace = find_workspace(Path.cwd())
    return next((p for p in workspace.projects() if p.offers(name)), None) if workspace else None


def _beside_the_library(request: Request, env_id: EnvironmentId, name: str) -> Package | None:
    """The environment of the folder, or the commit, that ``verifiers`` itself was installed from."""
    library = origin_of(CORE) if env_id.owner is None else None
    origin = library.beside(f"vf-{name}") if library else None
    if origin is None or (origin.folder is None and not origin.commit):
        return None
    version = _exact(env_id.version)
    if origin.folder is not None:
        project = read_project(origin.folder)
        is_it = version in (None, project.version)
        return _local(project, not request.no_editable, name, env_id) if is_it else None
    repository = Repository(origin.url, origin.commit, (origin.subdirectory,))
    project = Project(Path(origin.subdirectory), f"vf-{name}", None)
    if not request.dry_run:  # a clone, to find the environment's folder
        try:
            _, project = repository.find()
        except UnknownEnvironment:
            return None
    if project.version is not None and version not in (None, project.version):
        return None
    distribution = project.name or f"vf-{name}"
    requirement = repository.requirement(distribution, origin.subdirectory)
    return Package((requirement,), distribution, (name,), version)


def _from_repository(request: Request, env_id: EnvironmentId, name: str) -> Package:
    repository = _repository_of(request, name)
    folder = repository.folders[0]
    project = Project(Path(folder), f"vf-{name}", None)
    if not request.dry_run:  # a clone, to find the environment's folder
        folder, project = repository.find()
    version = _exact(env_id.version)
    if version is not None and project.version not in (None, version):
        raise ConfigError(
            f"branch {repository.branch} has version {project.version}, and {version} was requested"
        )
    distribution = project.name or f"vf-{name}"
    ids = (name,) if request.subdirectory is None or not project.env_ids else project.env_ids
    return Package((repository.requirement(distribution, folder),), distribution, ids, version)


def _needs_no_installation(env_id: EnvironmentId, env_dir: str) -> FoundEnvironment | None:
    """The file or folder of an environment without a project. *Raises* ``UsageError`` for a source
    that has a mistake."""
    if (source := in_folder(Path(env_dir), env_id.name)) is not None:
        return registry.local(source, env_id.without_version)
    source = in_folder(Path(), env_id.name)
    if source and source.problem() is None:
        return registry.local(source, env_id.without_version)
    return None


def _is_installed(env_id: EnvironmentId) -> bool:
    try:
        location = registry.find_installed(env_id)
    except UsageError:
        return False
    versions = (None, "latest", location.version)
    return location.distribution is not None and env_id.version in versions


def _from_index(env_id: EnvironmentId, name: str) -> Sequence[Package]:
    index_url = _index_of(env_id) if env_id.owner else None
    version = _exact(env_id.version)
    pin = f"=={version}" if version else ""
    return [
        Package(
            (f"{distribution}{pin}",),
            distribution,
            (name,),
            version,
            index_url=index_url,
            check_first=index_url is None,
        )
        for distribution in (f"vf-{name}", name)
    ]


def _index_of(env_id: EnvironmentId) -> str:
    """The package index of an owner. *Raises* ``ConfigError`` when none is configured."""
    for folder in (Path.cwd(), *Path.cwd().parents):
        indexes = table_at(read_toml(folder), "tool", "verifiers", "install", "indexes")
        for owner, url in indexes.items():
            if owner.lower() == (env_id.owner or "").lower() and isinstance(url, str):
                return url
    raise ConfigError(
        f"no index is configured for the owner {env_id.owner!r}, and a name alone does not prove"
        f' who owns a package; write {env_id.owner} = "URL" under [tool.verifiers.install.indexes]'
        f" in pyproject.toml, or request {env_id.name!r} without the owner"
    )


def _exact(version: str | None) -> str | None:
    return None if version == "latest" else version


# --- git repositories -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Repository:
    """A branch or commit of a repository, and the candidate folders of the environment in it."""

    url: str
    branch: str
    folders: tuple[str, ...]

    def requirement(self, distribution: str, folder: str) -> str:
        """For the installer: ``vf-x @ git+https://…@main#subdirectory=packages/envs/x``."""
        return f"{distribution} @ git+{self.url}@{self.branch}#subdirectory={folder}"

    def find(self) -> tuple[str, Project]:
        """The first folder that exists, and its project.

        *Raises* ``RunError`` when git fails; ``UnknownEnvironment`` when none of the folders
        exists.
        """
        with _shallow_clone(self.url, self.branch) as clone:
            for folder in self.folders:
                if text := _file(clone, f"{folder}/{PYPROJECT}"):
                    return folder, _project(text, folder, self)
            folders = [folder for parent in PARENTS for folder in _names(clone, parent)]
        name = PurePosixPath(self.folders[0]).name
        raise UnknownEnvironment(
            f"branch {self.branch} of {without_logins(self.url)} has no {PYPROJECT} in"
            f" {' or '.join(self.folders)}" + closest(name, folders),
            env_id=name,
        )


def _repository_of(request: Request, name: str) -> Repository:
    """The repository of the command line. *Raises* ``ConfigError`` for invalid arguments."""
    branch, subdirectory = request.branch or "main", request.subdirectory
    if not _BRANCH.fullmatch(branch) or branch.startswith("-") or ".." in branch:
        raise ConfigError(f"--branch {branch!r} is not the name of a branch or tag")
    folders: tuple[str, ...] = (f"{PARENTS[0]}/{name}", f"{PARENTS[1]}/{name.replace('-', '_')}")
    if subdirectory is not None:
        path = PurePosixPath(subdirectory)
        if path.is_absolute() or ".." in path.parts or not re.fullmatch(r"[\w./+-]+", subdirectory):
            raise ConfigError(
                f"--subdirectory {subdirectory!r} must be a folder inside the repository"
            )
        folders = (path.as_posix(),)
    return Repository(git_url(request.repo) if request.repo else _default_url(), branch, folders)


def git_url(text: str) -> str:
    """A URL for git and installers, also from ``git@host:path`` or a local folder.

    *Raises* ``ConfigError`` for other texts.
    """
    text = text.removeprefix("git+")
    if match := _SCP.fullmatch(text):
        return f"ssh://{match['user']}{match['host']}/{match['path']}"
    if _URL.fullmatch(text):
        return text
    if Path(text).expanduser().is_dir():
        return Path(text).expanduser().resolve().as_uri()
    raise ConfigError(
        f"--repo {text!r} is neither a URL (https, ssh, git, file) nor an existing folder"
    )


def _default_url() -> str:
    """The repository of the installed library. *Raises* ``ConfigError`` when it is unknown."""
    if (url := repository_url()) is None:
        raise ConfigError(
            "--from-repo needs the repository of verifiers, which neither the metadata of the"
            " installed one nor the place that it came from names; name it with --repo URL"
        )
    return url


@contextmanager
def _shallow_clone(url: str, branch: str) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="vf-install-") as folder:
        clone = Path(folder) / "repository"
        branch_flag = () if _COMMIT.fullmatch(branch) else (f"--branch={branch}",)
        _git("clone", "--quiet", "--depth=1", "--no-checkout", *branch_flag, "--", url, str(clone))
        if not branch_flag:  # a commit is no branch to clone
            _git("-C", str(clone), "fetch", "--quiet", "--depth=1", "origin", branch)
            _git("-C", str(clone), "update-ref", "--no-deref", "HEAD", "FETCH_HEAD")
        yield clone


def _git(*words: str) -> str:
    environment = {**os.environ, "GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"}
    try:
        process = run_captured(["git", *words], env=environment)
    except FileNotFoundError:
        message = "installing from a repository needs git, which is not on the path"
        raise ConfigError(message) from None
    except TooLong as error:
        raise RunError(without_logins(f"git {shlex.join(words)}: {error}")) from error
    if process.returncode:
        lines = filter(None, map(str.strip, process.stderr.splitlines()))
        reason = "; ".join(lines) or "no message"
        text = f"git {words[0]} ended with exit code {process.returncode}: {reason}"
        raise RunError(without_logins(text))
    return process.stdout


def _names(clone: Path, folder: str) -> Sequence[str]:
    listed = _git("-C", str(clone), "ls-tree", "--name-only", "HEAD", f"{folder}/")
    return [PurePosixPath(line).name for line in listed.splitlines()]


def _file(clone: Path, path: str) -> str | None:
    if not _git("-C", str(clone), "ls-tree", "HEAD", path).strip():
        return None
    return _git("-C", str(clone), "show", f"HEAD:{path}")


def _project(text: str, folder: str, repository: Repository) -> Project:
    try:
        return project_of(decode_toml(text), Path(folder))
    except ValueError as error:
        raise ConfigError(
            f"{folder}/{PYPROJECT} of {without_logins(repository.url)} is not TOML: {error}"
        ) from error
