"""Where tasksets of verifiers 0.4 are installed: ``vf-install --taskset PACKAGE`` makes a virtual
environment for each, below ``tasksets_folder``.

Their library is named as this one, so they cannot be installed beside it.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from verifiers.cli.common.command import Call
from verifiers.cli.install import installer
from verifiers.cli.install.sources import InstallSettings
from verifiers.environments.local_sources import normalize_name
from verifiers.errors import ConfigError
from verifiers.runtime.folders import user_cache_folder

FOLDER_VARIABLE = "VF_TASKSETS"
LIBRARY = ("verifiers==0.4.0", "mcp==2.0.0")
"""What a taskset runs with: the versions that were run here."""


def tasksets_folder() -> Path:
    """``VF_TASKSETS``, by default in the user's cache."""
    folder = os.environ.get(FOLDER_VARIABLE)
    return Path(folder).expanduser() if folder else user_cache_folder() / "tasksets"


def python_of(taskset: str) -> str:
    """The Python of an installed taskset: of the folder of its name, else of the first that has its
    module. *Raises* ConfigError when it is not installed."""
    of_this_name = tasksets_folder() / normalize_name(taskset)
    module = taskset.replace("-", "_")
    with_module = [
        path.parents[3]
        for pattern in (f"*/lib/python*/site-packages/{module}", f"*/Lib/site-packages/{module}")
        for suffix in ("", ".py")
        for path in sorted(tasksets_folder().glob(pattern + suffix))
    ]
    for folder in (of_this_name, *with_module):
        if (python := _python_in(folder)).exists():
            return str(python)
    raise ConfigError(
        f"the taskset {taskset!r} is not installed: vf-install --taskset {taskset} makes an"
        " environment for it, or python=… names one that has it and verifiers 0.4",
        key="python",
    )


def _python_in(folder: Path) -> Path:
    return folder / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")


def install_taskset(call: Call, requirement: str, settings: InstallSettings) -> None:
    """Install a taskset, by the name of its package or its folder, with its verifiers.

    *Raises* ConfigError, RunError.
    """
    source = Path(requirement).expanduser()
    name = normalize_name(
        source.resolve().name if source.exists() else requirement.partition("=")[0]
    )
    target = tasksets_folder() / name
    package = str(source.resolve()) if source.exists() else requirement
    if _python_in(target).exists() and not settings.upgrade:
        call.facts |= {"distribution": name, "python": str(_python_in(target))}
        call.say(f"{name} is installed already (--upgrade installs it anew): {target}")
        return
    uv = shutil.which("uv") or str(Path(sys.executable).with_name("uv"))
    if not Path(uv).exists():
        raise ConfigError("vf-install --taskset needs uv, which is not on the path")
    folder = target.parent / f".installing-{name}-{os.getpid()}"
    python = str(_python_in(folder))
    commands = [
        [uv, "venv", "--quiet", "--relocatable", "--python", sys.executable, str(folder)],
        [uv, "pip", "install", "--python", python, *LIBRARY, package],
    ]
    if settings.dry_run:
        lines = list(map(installer.command_line, commands))
        call.facts |= {"command": " && ".join(lines), "distribution": name}
        call.say("\n".join(lines))
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        for command in commands:
            call.note(f"+ {installer.command_line(command)}")
            installer.run(command, echo=call.verbose, installs_here=False).check()
        shutil.rmtree(target, ignore_errors=True)
        folder.rename(target)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    call.facts |= {"distribution": name, "python": str(_python_in(target))}
    call.say(
        f"{name} is installed: {target}\nuse it: vf-eval v1:ID, vf.TasksetEnv(ID), with the id of a"
        " taskset in it"
    )
