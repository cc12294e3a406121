"""Older utility functions: the command-line tools as Python functions."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path
from typing import Any

from verifiers.environments.local_sources import normalize_name
from verifiers.environments.registry import find_installed, parse_env_id
from verifiers.errors import ConfigError, UnknownEnvironment
from verifiers.runtime.bounded import read_text


def normalize_package_name(name: str) -> str:
    """The module name of an environment: lower case, runs of ``-``, ``_`` and ``.`` as one ``_``."""
    return normalize_name(name).replace("-", "_")


def is_hub_env(env_id: str) -> bool:
    """Whether an environment id has an owner (``owner/name``)."""
    return parse_env_id(env_id).owner is not None


def check_hub_env_installed(env_id: str, version: str | None = None) -> bool:
    """Whether an environment is installed, in the requested version (argument or part of the id)."""
    requested = parse_env_id(env_id)
    try:
        installed = find_installed(requested)
    except UnknownEnvironment:
        return False
    return (version or requested.version) in (None, "latest", installed.version)


def install_from_hub(env_id: str) -> bool:
    """``vf-install ENV_ID``; returns whether it succeeded."""
    return _install([env_id])


def install_from_local(env_id: str, env_dir: str | Path = "./environments") -> bool:
    """``vf-install ENV_ID -p ENV_DIR``; returns whether it succeeded."""
    return _install([env_id, "-p", str(env_dir)])


def install_from_repo(env_id: str, branch: str = "main") -> bool:
    """``vf-install ENV_ID --from-repo -b BRANCH``; returns whether it succeeded."""
    return _install([env_id, "--from-repo", "-b", branch])


def print_results(results: object, num_samples: int = 1) -> None:
    """Print the summary of a run, with its best and worst rollout unless ``num_samples`` is 0."""
    from verifiers.cli.evaluate.summary import print_summary, run_facts

    print_summary(results, run_facts(results), samples=num_samples > 0, notes=(), stream=sys.stdout)


def load_toml_config(path: str | Path) -> list[dict[str, Any]]:
    """The evaluations of a TOML file: the top-level settings updated with each ``[[eval]]``.

    *Raises* ConfigError when the file cannot be read. Settings are validated by ``vf-eval``.
    """
    try:
        document = tomllib.loads(read_text(path))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}", path=str(path)) from error
    entries = document.pop("eval", [])
    return [document | entry for entry in entries] or [document]


def _install(arguments: list[str]) -> bool:
    from verifiers.cli.install.command import COMMAND

    return COMMAND.run(arguments) == 0
