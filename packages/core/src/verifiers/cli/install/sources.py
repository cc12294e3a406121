"""Where an environment comes from: the words of ``vf-install`` become packages to install, the likeliest first.

The order: a repository, where one is asked for; a folder; a member of the workspace around; what is installed
already; a package index. Reads files, and asks git about a repository; installs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verifiers.cli.install.project_files import Project, find_workspace, is_project, read_project, read_toml
from verifiers.cli.install.repositories import repository_of
from verifiers.environments import registry
from verifiers.environments.registry import EnvironmentId, normalize_name, parse_env_id
from verifiers.errors import ConfigError, UnknownEnvironment, UsageError
from verifiers.runtime.suggest import close_matches


@dataclass(frozen=True, slots=True)
class Request:
    """What the command line asks for."""

    text: str
    path: str = "environments"
    from_repo: bool = False
    repo: str | None = None
    branch: str | None = None
    subdirectory: str | None = None
    upgrade: bool = False
    editable: bool = True
    look: bool = True
    """Whether a repository may be contacted, to see which of its folders is there."""


@dataclass(frozen=True, slots=True)
class Package:
    """Something to install, and the environment it should then offer."""

    requirement: tuple[str, ...]
    """The installer's words: a requirement, or ``-e`` and a folder."""
    distribution: str | None
    env_ids: tuple[str, ...]
    """Ids that must resolve afterwards."""
    version: str | None = None
    """The version that was asked for."""
    is_local: bool = False
    index_url: str | None = None
    """The only index it may come from."""
    check_first: bool = False
    """Its name proves nothing: look into the wheel before it is installed."""


@dataclass(frozen=True, slots=True)
class Installed:
    """The environment is there already."""

    env_id: str


def choose(request: Request) -> Installed | Sequence[Package]:
    """What satisfies a request: nothing to do, or packages to try in turn.

    Raises: ``UsageError`` when the words make no sense or the environment is in none of these places; ``RunError``
    when git fails.
    """
    from_repo = request.from_repo or request.repo is not None
    if not from_repo and (request.branch or request.subdirectory):
        raise ConfigError("--branch and --subdirectory choose inside a repository; add --from-repo or --repo URL")
    folder = Path(request.text).expanduser()
    if request.text and not from_repo and is_project(folder):
        return [_local(read_project(folder), request.editable)]
    wanted = _parse(request.text)
    name = normalize_name(wanted.name)
    name = name.removeprefix("vf-") or name
    if from_repo:
        return [_from_repository(request, wanted, name)]
    if (project := _find_project(name, Path(request.path).expanduser())) is not None:
        return [_local(project, request.editable, name, wanted)]
    if not request.upgrade and _is_installed(wanted):
        return Installed(request.text)
    return _from_index(wanted, name)


def known_ids() -> list[str]:
    """Ids that are installed, or members of the workspace around the working directory."""
    workspace = find_workspace(Path.cwd())
    members = [env_id for project in workspace.projects() for env_id in project.env_ids] if workspace else []
    return sorted({*members, *(info.id for info in registry.list_environments())})


def unknown(wanted_text: str, why: str) -> UnknownEnvironment:
    """The error for an environment that is nowhere, with the ids most like it."""
    name = parse_env_id(wanted_text).name
    suggestions = close_matches(name, known_ids())
    hint = f"; did you mean {' or '.join(map(repr, suggestions))}?" if suggestions else ""
    return UnknownEnvironment(f"{why}{hint}", env_id=name, suggestions=suggestions)


def _parse(text: str) -> EnvironmentId:
    try:
        return parse_env_id(text)
    except UnknownEnvironment as error:
        folder = Path(text).expanduser()
        if text and folder.exists():
            why = "has neither pyproject.toml nor setup.py" if folder.is_dir() else "is a file; name its folder"
            raise ConfigError(f"{text} cannot be installed: it {why}", path=text) from None
        raise UnknownEnvironment(f"{error}; and there is no folder {text!r}", **error.facts) from None


def _local(project: Project, editable: bool, name: str | None = None, wanted: EnvironmentId | None = None) -> Package:
    version = wanted.version if wanted else None
    if version not in (None, "latest") and project.version not in (None, version):
        raise ConfigError(
            f"{project.folder} holds version {project.version}, and {version} was asked for; leave @{version} out, or "
            "name another folder with --path",
            path=str(project.folder),
        )
    ids = (name,) if name else project.env_ids or (project.name or project.folder.resolve().name,)
    place = str(project.folder)
    if not place.startswith(("/", ".")):
        place = f"./{place}"  # so that it never reads as an option or as the name of a package
    return Package(("-e", place) if editable else (place,), project.name, ids, _exact(version), is_local=True)


def _find_project(name: str, base: Path) -> Project | None:
    """The environment's folder below ``base``, else a member of the workspace around."""
    module = name.replace("-", "_")
    for folder in (name, module, f"vf-{name}", f"vf_{module}"):
        if is_project(base / folder):
            return read_project(base / folder)
    workspace = find_workspace(Path.cwd())
    return next((p for p in workspace.projects() if p.offers(name)), None) if workspace else None


def _from_repository(request: Request, wanted: EnvironmentId, name: str) -> Package:
    repository = repository_of(name, name.replace("-", "_"), request.repo, request.branch, request.subdirectory)
    project = Project(Path(repository.folders[0]), f"vf-{name}", None)
    folder = repository.folders[0]
    if request.look:
        folder, project = repository.find()
    version = _exact(wanted.version)
    if version is not None and project.version not in (None, version):
        raise ConfigError(f"branch {repository.branch} holds version {project.version}, and {version} was asked for")
    distribution = project.name or f"vf-{name}"
    ids = (name,) if request.subdirectory is None or not project.env_ids else project.env_ids
    return Package((repository.requirement(distribution, folder),), distribution, ids, version)


def _is_installed(wanted: EnvironmentId) -> bool:
    try:
        found = registry.find(wanted)
    except UsageError:
        return False
    return found.distribution is not None and wanted.version in (None, "latest", found.version)


def _from_index(wanted: EnvironmentId, name: str) -> Sequence[Package]:
    index_url = _index_of(wanted) if wanted.owner else None
    version = _exact(wanted.version)
    pin = f"=={version}" if version else ""
    return [
        Package((f"{distribution}{pin}",), distribution, (name,), version, index_url=index_url, check_first=bare)
        for distribution, bare in ((f"vf-{name}", False), (name, index_url is None))
    ]


def _index_of(wanted: EnvironmentId) -> str:
    """The index that an owner's environments come from. Raises: ``ConfigError`` when none is configured."""
    for folder in (Path.cwd(), *Path.cwd().parents):
        indexes: Any = read_toml(folder)
        for key in ("tool", "verifiers", "install", "indexes"):
            indexes = indexes.get(key) if isinstance(indexes, dict) else None
        if isinstance(indexes, dict):
            url = next((url for owner, url in indexes.items() if owner.lower() == (wanted.owner or "").lower()), None)
            if isinstance(url, str):
                return url
    raise ConfigError(
        f"no index is known for the owner {wanted.owner!r}, and a name alone does not prove who owns a package; write "
        f'{wanted.owner} = "URL" under [tool.verifiers.install.indexes] in pyproject.toml, or ask for {wanted.name!r} '
        "without the owner"
    )


def _exact(version: str | None) -> str | None:
    return None if version == "latest" else version
