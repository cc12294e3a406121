"""``vf-install``: install an environment by id, folder or repository, and import it.

Prints each command before running it, with a warning that installing runs the environment's code.
The exit code is 0 only when the environment resolves and imports. A package of the index, whose
name may belong to an unrelated project, is inspected before it is installed: a package that would
write over another package is refused, and when it does not declare the environment, or its name may
deceive, the user is asked (``look_alikes``). ``sources`` chooses the packages, ``installer`` runs
the commands.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import importlib_metadata

from verifiers.cli.common.command import Call, SmallCommand, one_word
from verifiers.cli.common.completion import items, paths
from verifiers.cli.install import installer, look_alikes
from verifiers.cli.install.installed import Resolved, check_installed
from verifiers.cli.install.installer import Finished, Installer
from verifiers.cli.install.sources import (
    Installed,
    InstallSettings,
    Package,
    Request,
    choose,
    known_ids,
    unknown,
)
from verifiers.environments import local_sources, registry
from verifiers.environments.registry import FoundEnvironment
from verifiers.errors import ConfigError, RunError
from verifiers.runtime.bounded import read_file
from verifiers.runtime.installed import headers, part
from verifiers.runtime.syntax import parse_python
from verifiers.runtime.terminal import escape_control

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

ABOUT = """Install an environment into this Python.

\b
  vf-install reverse-text
  vf-install ./environments/word_game
  vf-install math-python --repo https://example.org/environments.git
  vf-install --list
  vf-install --agent codex
  vf-install --taskset reverse-text

ENV is an id (name, vf-name, owner/name, name@version), a folder or a wheel. An id is searched in --path, in the
surrounding uv workspace, among the installed packages, where verifiers itself came from, and in the package index. A
single file needs no installation: vf-eval FILE.py
"""
RUNS_CODE = (
    "installing an environment runs its code on this machine, with your rights: install what you"
    " trust"
)


def run(call: Call, settings: InstallSettings) -> None:
    """Install the environment. *Raises* ``UsageError``, ``RunError``: a tool or import failed."""
    if settings.list_installed:
        _list(call)
        return
    if settings.agent:
        part("install_agent", "vf-install --agent")(call, settings.agent, settings)
        return
    if settings.taskset:
        part("install_taskset", "vf-install --taskset")(call, settings.taskset, settings)
        return
    request = _request(call, settings)
    choice = choose(request)
    if isinstance(choice, Installed):
        (resolved,) = check_installed([choice.env_id])
        outcome = "is installed already; nothing to do (--upgrade looks for a newer one)"
        _print_result(call, resolved, None, outcome)
        return
    if isinstance(choice, FoundEnvironment):
        registry.import_loader(request.text, choice)
        call.facts["entry_point"] = f"{choice}:{choice.attribute}"
        call.say(f"{choice.env_id} ({choice}) imports, and needs no installation")
        call.say(f"try it: vf-eval {request.text}")
        return
    tool = installer.find_installer()
    if settings.dry_run:
        _plan(call, tool, request, choice)
        return
    before = installer.installed_library()
    versions = {name: version for name, (version, _) in _by_name().items()}
    call.note(f"vf-install: {RUNS_CODE}")
    package, command = _install_first(call, tool, request, choice)
    if installer.installed_library() != before:
        raise RunError(
            f"{command}\nreplaced the running verifiers library; reinstall it, and report the"
            f" package {package.distribution or request.text}"
        )
    _check_others(command, versions)
    resolved, *_ = check_installed(package.env_ids)
    if resolved.distribution:
        command += _add_extras(call, tool, resolved.distribution)
    if package.version is not None and _plain(resolved.version or "") != _plain(package.version):
        raise RunError(
            f"version {package.version} was requested, and {resolved.version} was installed"
        )
    _print_result(call, resolved, command, "is installed and imports")
    _note_of_project(call, package, resolved.distribution)


def _note_of_project(call: Call, package: Package, distribution: str | None) -> None:
    """Say how to keep the package where this Python is that of a uv project, whose ``uv sync``
    removes what its lock does not hold."""
    project = Path(sys.prefix).parent
    lock = project / "uv.lock"
    if distribution is None or sys.prefix == sys.base_prefix or not lock.is_file():
        return
    if f'name = "{distribution}"' in read_file(lock).decode(errors="replace"):
        return
    words = ["--editable" if word == "-e" else word for word in package.requirement]
    call.note(
        f"vf-install: {lock} does not hold {distribution}, so `uv sync` removes it and"
        f" `uv sync --inexact` keeps it; to make it part of the project:"
        f" {installer.command_line(['uv', 'add', *words])}"
    )


def _add_extras(call: Call, tool: Installer, distribution: str) -> str:
    """Install the extras of ``verifiers`` that the package asks for; returns the command, to be
    appended.

    Says where the package requires another version of it.
    """
    for requirement in installer.unmet_by_library(distribution):
        version = installer.library_version()
        call.note(
            f"vf-install: {distribution} requires {requirement}; verifiers {version} takes its place"
        )
    extras = installer.lacking_extras(distribution)
    if not extras:
        return ""
    finished, command = _run_all(call, [(tool.install(*extras), False)])
    finished.check()
    return f" && {command}"


def _by_name() -> dict[str, tuple[str, Any]]:
    """Name -> version and distribution; the first of a name that is on the path twice."""
    installed = {}
    distributions: list[Any] = list(importlib_metadata.distributions())
    for distribution in reversed(distributions):
        about = headers(distribution)
        if name := about.get("Name"):
            installed[name] = about.get("Version", ""), distribution
    return installed


def _check_others(command: str, before: dict[str, str]) -> None:
    """*Raises* ``RunError`` when a distribution that ``command`` installed took something from a
    distribution that was there."""
    installed = _by_name()
    present = [distribution for name, (_, distribution) in installed.items() if name in before]
    for name, (version, distribution) in installed.items():
        if before.get(name) == version:
            continue
        if conflict := look_alikes.conflict(distribution, present):
            raise RunError(
                f"{command}\ninstalled another package's parts: {conflict}; uninstall {name}"
            )


def _plain(version: str) -> str:
    """A normalised version, in which 1.2, v1.2 and 1.2.0 are equal."""
    parts = version.lower().removeprefix("v").split(".")
    while len(parts) > 1 and parts[-1] and not parts[-1].strip("0"):
        parts.pop()
    return ".".join(parts)


# --- installing -----------------------------------------------------------------------------------


def _install_first(
    call: Call, tool: Installer, request: Request, packages: Sequence[Package]
) -> tuple[Package, str]:
    """Install the first package that exists; returns it and the command, as one line.

    *Raises* ``UnknownEnvironment`` when none exists; ``RunError`` when the installer fails for
    another reason.
    """
    refusals: list[str] = []
    for package in packages:
        if package.check_first and (refusal := _refusal(call, tool, request, package)):
            refusals.append(refusal)
            continue
        finished, commands = _install(call, tool, request, package)
        if not package.is_local and package.distribution and finished.lacks(package.distribution):
            refusals.append(_absent(package, finished))
            continue
        finished.check()
        return package, commands
    where = packages[0].index_url or "the package index"
    why = f"no environment {request.text!r} in {where}: {'; '.join(refusals)}"
    raise unknown(request.text, why)


def _install(
    call: Call, tool: Installer, request: Request, package: Package
) -> tuple[Finished, str]:
    """Run a package's commands, up to the first that fails; returns its outcome, and the commands
    as one line."""
    finished, commands = _run_all(call, _commands(tool, request, package))
    if finished.refuses_library and package.distribution and not tool.is_uv:
        finished, commands = _run_all(
            call, [(tool.install_without_dependencies(*package.requirement), False)]
        )
        if finished.code == 0:
            finished, more = _run_all(call, [(tool.dependencies_of(package.distribution), False)])
            commands = f"{commands} && {more}"
    return finished, commands


def _run_all(call: Call, commands: Sequence[tuple[list[str], bool]]) -> tuple[Finished, str]:
    """Run commands up to the first that fails."""
    finished: Finished | None = None
    for command, one_index in commands:
        call.note(f"+ {installer.command_line(command)}")
        finished = installer.run(command, echo=_echo(call), one_index=one_index)
        if finished.code:
            break
    assert finished is not None
    return finished, " && ".join(installer.command_line(command) for command, _ in commands)


def _commands(tool: Installer, request: Request, package: Package) -> list[tuple[list[str], bool]]:
    """(command, whether it may use only one index), in order."""
    upgrade = package.distribution if request.upgrade else None
    last = tool.install(*package.requirement, upgrade=None if package.index_url else upgrade)
    if package.index_url is None:
        return [(last, False)]
    alone = tool.install_alone_from(package.index_url, package.requirement[0], request.upgrade)
    return [(alone, True), (last, False)]  # the second installs the package's dependencies


def _refusal(call: Call, tool: Installer, request: Request, package: Package) -> str | None:
    """Why the package must not be installed; None when it declares the environment, or the user
    agrees.

    Runs no code of it. *Raises* ``RunError`` when it cannot be downloaded.
    """
    (requirement,) = package.requirement
    with tempfile.TemporaryDirectory(prefix="vf-install-") as folder:
        command = tool.unpack(requirement, folder)
        call.note(f"+ {installer.command_line(command)}    # only to look into it")
        finished = installer.run(command, echo=_echo(call))
        if finished.lacks(package.distribution or ""):
            return _absent(package, finished)
        if finished.lacks_wheel:
            why = "and cannot be inspected without running its code"
            doubts = [f"{requirement} has no wheel, {why}"]
        else:
            finished.check()
            distributions: list[Any] = list(importlib_metadata.distributions(path=[folder]))
            for distribution in distributions:
                present: Any = importlib_metadata.distributions()
                if conflict := look_alikes.conflict(distribution, present):
                    return f"{conflict}, so it was not installed"
            doubts = list(filter(None, map(look_alikes.other_origin, distributions)))
            offered = [env_id for d in distributions for env_id in look_alikes.offered(d)]
            if package.env_ids[0] not in offered:
                if not _binds_loader(Path(folder), package.env_ids[0].replace("-", "_")):
                    return _not_an_environment(package, offered)
                summaries = (d.metadata.get("Summary") for d in distributions)
                about = next((f" ({summary})" for summary in summaries if summary), "")
                group = local_sources.GROUP
                doubts.append(
                    f"{requirement}{about} of the package index declares no entry point in {group}"
                )
    if similar := look_alikes.look_alike(package.env_ids[0], known_ids()):
        doubts.append(
            f"{requirement} of the package index is not {similar!r}, the known environment of almost"
            " its name"
        )
    doubt = "; ".join(doubts)
    if not doubt or request.yes or _agrees(call, doubt):
        return None
    return f"{doubt}, and was not installed; --yes installs it"


def _not_an_environment(package: Package, offered: Sequence[str]) -> str:
    (requirement,), missing = package.requirement, "and was not installed"
    if offered:
        ids = ", ".join(map(repr, offered))
        return f"{requirement} declares {ids} and not {package.env_ids[0]!r}, {missing}"
    return f"{requirement} is not an environment, {missing}"


def _agrees(call: Call, doubt: str) -> bool:
    """Ask on a terminal; elsewhere the answer is no."""
    if call.json or not (sys.stdin.isatty() and sys.stderr.isatty()):
        return False
    return click.confirm(escape_control(f"vf-install: {doubt}. Install it?"), err=True)


def _absent(package: Package, finished: Finished) -> str:
    is_offline = "not found in the cache" in finished.text
    offline = " in the cache, and the installer is offline" if is_offline else ""
    return f"there is no {package.requirement[0]}{offline}"


def _binds_loader(folder: Path, module: str) -> bool:
    """Whether an unpacked wheel has a module of this name that binds the loader; runs no code."""
    for name in (module, f"vf_{module}"):
        for file in (folder / f"{name}.py", folder / name / "__init__.py"):
            with contextlib.suppress(OSError, SyntaxError, ValueError):
                if local_sources.binds_loader(parse_python(read_file(file))):
                    return True
    return False


def _echo(call: Call) -> bool:
    """Whether to show the installer's output: on a terminal, or with ``-v``."""
    return call.verbose or (sys.stderr.isatty() and not call.quiet)


# --- arguments and output -------------------------------------------------------------------------


def _request(call: Call, settings: InstallSettings) -> Request:
    if not call.words:
        ids = ", ".join(known_ids()) or "none"
        raise ConfigError(f"give an environment: vf-install ENV; known here: {ids}")
    return Request(text=one_word(call, "one environment: vf-install ENV"), **vars(settings))


def _plan(call: Call, tool: Installer, request: Request, packages: Sequence[Package]) -> None:
    """Print the commands without running them; sends no request."""
    plans = [
        [installer.command_line(command) for command, _ in _commands(tool, request, p)]
        for p in packages
    ]
    call.facts |= {"command": " && ".join(plans[0]), "distribution": packages[0].distribution}
    call.say("\n".join(plans[0]))
    for plan in plans[1:]:
        call.say("if that package does not exist, and this one is an environment:")
        call.say("\n".join(plan))


def _print_result(call: Call, resolved: Resolved, command: str | None, outcome: str) -> None:
    call.facts |= {name: fact for name, fact in asdict(resolved).items() if name != "id"}
    call.facts["command"] = command
    name = local_sources.normalize_name(registry.parse_env_id(resolved.id).name).removeprefix("vf-")
    source = f" ({resolved.distribution} {resolved.version})" if resolved.distribution else ""
    call.say(f"{name}{source} {outcome}")
    call.say(f"try it: vf-eval {name}")


def _list(call: Call) -> None:
    """Print the installed environments, one per line."""
    if call.words:
        raise ConfigError(f"--list takes no environment, not {' '.join(call.words)}")
    infos = registry.list_environments()
    audits = {info.id: _audit_of(info.id) for info in infos}
    call.facts["environments"] = [asdict(info) | {"audit": audits[info.id]} for info in infos]
    columns = ("id", "version", "distribution")
    widths = [max((len(getattr(info, name)) for info in infos), default=0) for name in columns]
    for info in infos:
        pairs = zip(columns, widths, strict=True)
        cells = [f"{getattr(info, name):<{width}}" for name, width in pairs]
        call.say("  ".join([*cells, audits[info.id] or "not audited"]))
        if info.summary:
            call.say(f"    {info.summary}")
    if not infos:
        call.note("vf-install: no environment is installed")
    broken = registry.broken_environments()
    call.facts["broken"] = [
        {"id": entry.name, "path": entry.path, "reason": entry.reason} for entry in broken
    ]
    for entry in broken:
        call.note(f"broken: {entry.name or 'environments'} of {entry.path}: {entry.reason}")


def _audit_of(env_id: str) -> str | None:
    """The certificate of an environment in words; None without a certificate."""
    from verifiers.checks.audit.certificate import read_certificate
    from verifiers.errors import UsageError

    try:
        certificate = read_certificate(env_id)
    except UsageError:
        # two distributions offer it, or a local file hides it: the list says no more about it
        return None
    return None if certificate is None else str(certificate)


def _complete(
    context: click.Context, parameter: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Ids of installed environments and workspace members; paths when none matches."""
    offers = items(env_id for env_id in known_ids() if env_id.startswith(incomplete))
    return offers or paths(context, parameter, incomplete)


COMMAND = SmallCommand(
    name="vf-install",
    about=ABOUT,
    metavar="ENV",
    options=InstallSettings,
    keys=("command", "distribution", "version", "entry_point"),
    action=run,
    complete=_complete,
)
main = COMMAND.main

if __name__ == "__main__":
    main()
