"""Of older versions' utilities: what the commands do, called from Python."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path
from typing import Any

from verifiers.environments.registry import find, normalize_name, parse_env_id
from verifiers.errors import ConfigError, UnknownEnvironment


def normalize_package_name(name: str) -> str:
    """The module of an environment's name: lower case, runs of ``-``, ``_`` and ``.`` as one ``_``."""
    return normalize_name(name).replace("-", "_")


def is_hub_env(env_id: str) -> bool:
    """Whether an id names an owner."""
    return parse_env_id(env_id).owner is not None


def check_hub_env_installed(env_id: str, version: str | None = None) -> bool:
    """Whether an environment is installed, in the version asked for (by argument or in the id)."""
    wanted = parse_env_id(env_id)
    try:
        found = find(wanted)
    except UnknownEnvironment:
        return False
    return (version or wanted.version) in (None, "latest", found.version)


def install_from_hub(env_id: str) -> bool:
    """``vf-install ENV_ID``; whether it went well."""
    return _install([env_id])


def install_from_local(env_id: str, env_dir: str | Path = "./environments") -> bool:
    """``vf-install ENV_ID -p ENV_DIR``; whether it went well."""
    return _install([env_id, "-p", str(env_dir)])


def install_from_repo(env_id: str, branch: str = "main") -> bool:
    """``vf-install ENV_ID --from-repo -b BRANCH``; whether it went well."""
    return _install([env_id, "--from-repo", "-b", branch])


def print_results(results: Any, num_samples: int = 1) -> None:
    """The summary of a run on stdout, with its best and worst rollout unless ``num_samples`` is 0."""
    from verifiers.cli.evaluate.summary import print_summary, run_facts

    print_summary(results, run_facts(results), samples=num_samples > 0, notes=(), stream=sys.stdout)


def load_toml_config(path: str | Path) -> list[dict[str, Any]]:
    """The evaluations of a TOML file: each ``[[eval]]`` with the settings at the top level below it.

    *Raises* ConfigError when the file cannot be read. What the settings mean is ``vf-eval``'s to check.
    """
    try:
        document = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}", path=str(path)) from error
    entries = document.pop("eval", [])
    return [document | entry for entry in entries] or [document]


def _install(words: list[str]) -> bool:
    from verifiers.cli.install.command import COMMAND

    return COMMAND.run(words) == 0
