"""Older ``verifiers.utils.install_utils``: ids of environments, and what is installed."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

from verifiers.environments import registry
from verifiers.environments.local_sources import normalize_name
from verifiers.errors import UnknownEnvironment


def parse_env_id(env_id: str) -> tuple[str, str, str | None]:
    """``owner/name@version`` as (owner, name, version or None). *Raises* UnknownEnvironment, a
    ValueError, for others.

    >>> parse_env_id("owner/name@1.0")
    ('owner', 'name', '1.0')
    """
    parsed = registry.parse_env_id(env_id)
    if parsed.owner is None:
        raise UnknownEnvironment(
            f"{env_id!r} has no owner; write owner/name or owner/name@1.2", env_id=env_id
        )
    return parsed.owner, parsed.name, parsed.version


def normalize_package_name(name: str) -> str:
    """The module name of an environment: lower case, runs of ``-``, ``_`` and ``.``
    as one ``_``."""
    return normalize_name(name).replace("-", "_")


def is_hub_env(env_id: str) -> bool:
    """Whether an environment id has an owner (``owner/name``); a path that begins with ``./`` or
    ``/`` has none."""
    return "/" in env_id and not env_id.startswith(("./", "/"))


def is_installed(env_name: str, version: str | None = None) -> bool:
    """Whether a distribution is installed, in the requested version ("latest" and None: in any)."""
    try:
        installed = metadata.version(env_name)
    except (metadata.PackageNotFoundError, ValueError):
        return False
    return version in (None, "latest", installed)


def check_hub_env_installed(env_id: str, version: str | None = None) -> bool:
    """Whether an environment is installed, in the requested version (argument or part of the id);
    local ids are.

    It is, as a distribution of its name or under its id.
    """
    if not is_hub_env(env_id):
        return True
    requested = registry.parse_env_id(env_id)
    version = version or requested.version
    if is_installed(requested.name, version):
        return True
    try:
        installed = registry.find_installed(requested)
    except UnknownEnvironment:
        return False
    return version in (None, "latest", installed.version)


def install_from_hub(env_id: str) -> bool:
    """``vf-install ENV_ID``; returns whether it succeeded."""
    return _install([env_id])


def install_from_local(env_name: str, env_dir: str | Path = "./environments") -> bool:
    """``vf-install ENV_NAME -p ENV_DIR``; returns whether it succeeded."""
    return _install([env_name, "-p", str(env_dir)])


def install_from_repo(env_name: str, branch: str = "main") -> bool:
    """``vf-install ENV_NAME --from-repo -b BRANCH``; returns whether it succeeded."""
    return _install([env_name, "--from-repo", "-b", branch])


def _install(arguments: list[str]) -> bool:
    from verifiers.cli.install.command import COMMAND

    return COMMAND.run(arguments) == 0
