"""``vf-install --agent NAME``: install an agent program from npm or the Python package index.

Each version goes into a folder of its own below ``agents_folder``, beside this Python and not into
it. The folder gets its name only when it is complete, so an interrupted installation leaves no
agent that half works. No code of the package runs here: npm runs no scripts, and Python packages
are wheels.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from verifiers.cli.common.command import Call
from verifiers.cli.install import installer
from verifiers.cli.install.sources import InstallSettings
from verifiers.errors import ConfigError
from verifiers_agents.agent import (
    Agent,
    agents_folder,
    find_agent,
    find_installed,
    installed_versions,
    version_in,
)


def install_agent(call: Call, name: str, settings: InstallSettings) -> None:
    """Install the agent ``name`` or ``name@version``. *Raises* ConfigError, RunError."""
    if call.words:
        raise ConfigError(f"--agent takes one name and no environment, not {' '.join(call.words)}")
    agent, version = find_agent(name), name.partition("@")[2]
    if not agent.registry:
        raise ConfigError(
            f"the agent {agent.name!r} is not installed by this command: it names no package"
        )
    present = installed_versions(agent)
    if not settings.upgrade and (version in present if version else present):
        installation = find_installed(agent, version)
        _print_result(
            call,
            agent,
            installation.version,
            installation.folder,
            "is installed already (--upgrade looks for a newer one)",
        )
        return
    folder = agents_folder() / agent.name
    if settings.dry_run:
        command = _command(agent, version, folder / (version or "VERSION"))
        call.facts |= {"command": installer.command_line(command), "distribution": agent.package}
        call.say(installer.command_line(command))
        return
    call.note(
        f"vf-install: {agent.package}, {agent.note or 'no licence known'}; none of its code runs"
        " while it is installed; AgentEnv runs it in a sandbox without a network"
    )
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=".installing-", dir=folder))
    try:
        command = _command(agent, version, unfinished)
        call.note(f"+ {installer.command_line(command)}")
        installer.run(command, echo=call.verbose, installs_here=agent.registry == "pypi").check()
        version = version_in(agent, unfinished)
        unfinished.chmod(0o755)  # the user inside a sandbox is another user
        shutil.rmtree(folder / version, ignore_errors=True)
        unfinished.rename(folder / version)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    call.facts["command"] = installer.command_line(command)
    _print_result(call, agent, version, find_installed(agent, version).folder, "is installed")


def _command(agent: Agent, version: str, folder: Path) -> list[str]:
    more = agent.further_packages
    if agent.registry == "npm":
        if shutil.which("npm") is None:
            raise ConfigError(
                f"the agent {agent.name!r} is installed with npm, which is not on the path"
            )
        requirement = f"{agent.package}@{version or 'latest'}"
        flags = ["--ignore-scripts", "--no-audit", "--no-fund"]
        return ["npm", "install", "--prefix", str(folder), *flags, requirement, *more]
    requirement = f"{agent.package}=={version}" if version else agent.package
    return installer.find_installer().into(str(folder), requirement, *more)


def _print_result(call: Call, agent: Agent, version: str, folder: Path, outcome: str) -> None:
    call.facts |= {"distribution": agent.package, "version": version}
    call.say(
        f"{agent.name} {version} {outcome}: {folder}\nuse it: vf.AgentEnv(agent={agent.name!r},"
        " dataset=…, rubric=…)"
    )
