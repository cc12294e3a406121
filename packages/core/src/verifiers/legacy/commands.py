"""Older utility functions: the command-line tools as Python functions."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from verifiers.environments.local_sources import normalize_name
from verifiers.environments.registry import find_installed, parse_env_id
from verifiers.errors import UnknownEnvironment, VerifiersError


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
    """The evaluations of a TOML file: its top-level settings updated with each ``[[eval]]`` or ``[[ablation]]``.

    A sweep gives one evaluation for every combination. *Raises* FileNotFoundError; ConfigError, a ValueError, that
    lists every unknown or wrong setting.
    """
    from verifiers.cli.common.reader import raise_together
    from verifiers.cli.evaluate.options import layered
    from verifiers.cli.evaluate.toml_args import read_files

    if not Path(path).is_file():
        raise FileNotFoundError(f"there is no file {path}")
    file = read_files([str(path)])
    problems: list[str | VerifiersError] = [*file.problems]
    if not file.entries and not problems:
        problems.append(f"{path} has neither [[eval]] nor [[ablation]]")
    raise_together(problems)
    return [{"env_id": entry.env_id, **layered(file.common, entry.settings)} for entry in file.entries]


def _install(arguments: list[str]) -> bool:
    from verifiers.cli.install.command import COMMAND

    return COMMAND.run(arguments) == 0
