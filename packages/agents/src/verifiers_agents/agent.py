"""Agent programs as data: what to call, with which files and variables, and in which dialect it
speaks.

Names are looked up in ``BUILTIN``, then among the entry points of the group ``verifiers.agents`` of
the installed distributions, whose value is an ``Agent``. Programs are installed by ``vf-install
--agent NAME`` into a folder of their own (``agents_folder``), one for each version; nothing is
downloaded here, and no program is part of this library.
"""

from __future__ import annotations

import glob
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path

from verifiers.errors import ConfigError
from verifiers.runtime.decoding import read_json
from verifiers.runtime.folders import user_cache_folder
from verifiers.runtime.installed import Broken, entry_points
from verifiers.runtime.suggest import closest
from verifiers_agents import programs

ENTRY_POINTS = "verifiers.agents"
FOLDER_VARIABLE = "VF_AGENTS"
_VERSION = re.compile(r"[0-9A-Za-z][0-9A-Za-z.+!_-]{0,99}")
"""A version that is the name of a folder."""


@dataclass(frozen=True, slots=True)
class Agent:
    """An agent program. Texts may hold placeholders: ``{prompt}``, ``{base_url}`` (ends in
    ``/v1``), ``{root_url}`` (without it), ``{model}``, ``{program}`` (the file found by
    ``executable``), ``{package}`` (its installed folder), ``{home}`` and ``{work}``, all as paths
    inside the sandbox. The word ``{args}`` of a command is where further arguments go.

    >>> agent = vf.Agent("mine", command=("python", "agent.py", "{prompt}"))
    >>> agent.filled({"prompt": "Fix it.", "model": "policy"}).command
    ('python', 'agent.py', 'Fix it.')
    """

    name: str
    """Name of the agent."""
    command: tuple[str, ...]
    """The program and its arguments."""
    dialect: str | None = None
    """The dialect that it speaks; None: any."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Path -> text; ``~/`` is the home folder, other relative paths are in the work folder."""
    registry: str = ""
    """"npm" or "pypi"; "" when it is not installed by this library."""
    package: str = ""
    """Name of its package in the registry."""
    further_packages: tuple[str, ...] = ()
    """Requirements to install beside it: what it imports and does not declare."""
    executable: str = ""
    """Pattern of the program's file below the installed folder."""
    needs: tuple[str, ...] = ()
    """Programs of the host that it runs with, such as "node"."""
    min_version: str = ""
    """Oldest version that works."""
    tested_version: str = ""
    """The version that was tested."""
    note: str = ""
    """What a user should know before installing it, such as its licence."""

    def with_arguments(self, arguments: Sequence[str]) -> Agent:
        """The agent with further arguments, which replace the word ``{args}`` of its command.

        *Raises* ConfigError when its command takes none.
        """
        if arguments and "{args}" not in self.command:
            raise ConfigError(
                f"the command of the agent {self.name!r} has no place for agent_args",
                key="agent_args",
            )
        words = ((word,) if word != "{args}" else tuple(arguments) for word in self.command)
        return replace(self, command=tuple(chain.from_iterable(words)))

    def filled(self, values: Mapping[str, str]) -> Agent:
        """The agent with ``command``, ``environment`` and ``files`` filled in."""
        return replace(
            self,
            command=tuple(fill(word, values) for word in self.command),
            environment={name: fill(value, values) for name, value in self.environment.items()},
            files={path: fill(text, values) for path, text in self.files.items()},
        )


def fill(text: str, values: Mapping[str, str]) -> str:
    """The text with each ``{name}`` of ``values`` replaced; other braces stay."""
    return re.sub(r"\{(\w+)\}", lambda match: values.get(match[1], match[0]), text)


@dataclass(frozen=True, slots=True)
class Installed:
    """An installed version of an agent."""

    folder: Path
    version: str
    program: Path | None
    """None for an agent without ``executable``."""


def find_agent(name: str) -> Agent:
    """The agent of this name; ``name`` may end in ``@VERSION``. *Raises* ConfigError for an unknown
    name."""
    name = name.partition("@")[0]
    if name in programs.BUILTIN:
        return Agent(name, **programs.BUILTIN[name])
    readable = (entry for entry in entry_points(ENTRY_POINTS) if not isinstance(entry, Broken))
    points = {point.name: point for point, _ in readable}
    if name in points:
        agent = points[name].load()
        if not isinstance(agent, Agent):
            raise ConfigError(
                f"the entry point {name!r} ({points[name].value}) is not an Agent", key="agent"
            )
        return agent
    names = sorted({*programs.BUILTIN, *points})
    raise ConfigError(
        f"there is no agent {name!r} (for a program of your own pass command=[…]); known are"
        f" {', '.join(names)}{closest(name, names)}",
        key="agent",
    )


def agents_folder() -> Path:
    """Where agents are installed: the variable ``VF_AGENTS``, else ``agents`` in the user's cache
    folder."""
    folder = os.environ.get(FOLDER_VARIABLE)
    return Path(folder).expanduser().resolve() if folder else user_cache_folder() / "agents"


def find_installed(agent: Agent, version: str = "") -> Installed:
    """The newest installed version of an agent, or the version asked for.

    *Raises* ConfigError with the command to install it, and for programs of the host that it needs.
    """
    for program in agent.needs:
        if shutil.which(program) is None:
            raise ConfigError(
                f"the agent {agent.name!r} runs with {program}, which is not on the path",
                key="agent",
            )
    versions = installed_versions(agent)
    name = f"{agent.name}@{version}" if version else agent.name
    if not versions:
        raise ConfigError(
            f"the agent {agent.name!r} is not installed; install it with: vf-install --agent"
            f" {name}",
            key="agent",
        )
    if version and version not in versions:
        raise ConfigError(
            f"the agent {agent.name!r} is installed in version {', '.join(versions)}, not {version};"
            f" install it with: vf-install --agent {name}",
            key="agent",
        )
    newest = version or max(versions, key=_order)
    if agent.min_version and _order(newest) < _order(agent.min_version):
        raise ConfigError(
            f"the agent {agent.name!r} is installed in version {newest}, and {agent.min_version} or"
            f" later is needed; install it with: vf-install --agent {agent.name}",
            key="agent",
        )
    folder = versions[newest]
    if not agent.executable:
        return Installed(folder, newest, None)
    matches = sorted(glob.glob(str(folder / agent.executable)))
    if not matches:
        raise ConfigError(
            f"the agent {agent.name!r} in {folder} has no {agent.executable}; install it again"
            f" with: vf-install --agent {name}",
            key="agent",
        )
    return Installed(folder, newest, Path(matches[0]))


def installed_versions(agent: Agent) -> dict[str, Path]:
    """Version -> folder of an agent's installed versions."""
    folder = agents_folder() / agent.name
    return {path.name: path for path in sorted(folder.glob("[!.]*")) if path.is_dir()}


def version_in(agent: Agent, folder: Path) -> str:
    """The version of a package that was installed into ``folder``, which names its folder.

    *Raises* ConfigError when it is not there, or when what it calls its version is none.
    """
    version = (
        _npm_version(folder, agent) if agent.registry == "npm" else _python_version(folder, agent)
    )
    if version is None:
        raise ConfigError(f"the package {agent.package} was not installed into {folder}")
    if not _VERSION.fullmatch(version):
        raise ConfigError(
            f"the package {agent.package} has the version {version[:80]!r}, which is none",
            key="agent",
        )
    return version


def _npm_version(folder: Path, agent: Agent) -> str | None:
    file = folder / "node_modules" / agent.package / "package.json"
    try:
        return str(read_json(file)["version"])
    except FileNotFoundError:
        return None
    except (LookupError, OSError, TypeError, ValueError) as error:
        raise ConfigError(f"{file} has no version: {error}", key="agent") from error


def _python_version(folder: Path, agent: Agent) -> str | None:
    pattern = re.compile(
        rf"{re.escape(agent.package.replace('-', '_'))}-(.+)\.dist-info", re.IGNORECASE
    )
    return next(
        (match[1] for path in folder.iterdir() if (match := pattern.fullmatch(path.name))), None
    )


def _order(version: str) -> list[tuple[int, str]]:
    """A key that orders versions by their numbers."""
    return [
        (int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"[.\-+]", version)
    ]
