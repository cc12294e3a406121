"""``vf-init``: a new environment package that works: it loads, evaluates offline, and its test passes.

Promise: nothing is written when anything is wrong, a new folder appears whole or not at all, and no file that is there
is replaced, except a README with ``--rewrite-readme``. Installs nothing (``vf-install`` does); what the files say is
in ``scaffold``, how they are written in ``writing``.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import click
import importlib_metadata

from verifiers.cli.common.command import Call, SmallCommand, one_word
from verifiers.cli.common.completion import paths, words
from verifiers.cli.common.writing import write_files
from verifiers.cli.install.installer import without_logins
from verifiers.cli.install.project_files import Workspace, find_workspace
from verifiers.cli.scaffold import TEMPLATES, Names, parse_name, render
from verifiers.errors import ConfigError
from verifiers.runtime.suggest import closest

ENVS = Path("packages/envs")
"""Where a workspace keeps its environments, below its root."""
README = "README.md"

ABOUT = """Create an environment package that works, to change into your own.

\b
  vf-init word-game
  vf-init word-game --template multi --multi-file
"""


@dataclass(frozen=True, slots=True)
class Target:
    """Where a new package goes: ``folder`` inside ``base``; ``workspace``: the one it becomes a member of."""

    base: Path
    folder: Path
    workspace: Workspace | None

    @property
    def shown(self) -> str:
        """The folder as the user would write it."""
        here = Path.cwd().resolve()
        place = self.base.resolve() / self.folder.name
        return place.relative_to(here).as_posix() if place.is_relative_to(here) else str(self.folder)


def run(call: Call) -> None:
    """Create what the command line asks for. *Raises* ``ConfigError``, with nothing written."""
    names = parse_name(one_word(call, "the name of the environment: vf-init NAME"))
    template = call.options["template"]
    if template not in TEMPLATES:
        raise ConfigError(
            f"--template must be one of {', '.join(TEMPLATES)}, not {template!r}{closest(template, TEMPLATES)}"
        )
    target = locate(names, call.options["path"])
    files = render(
        names,
        template,
        folder=target.shown,
        multi_file=call.options["multi_file"],
        tests=not call.options["no_tests"],
        member=target.workspace is not None and _has_verifiers(target.workspace),
        source=source_of_library(),
    )
    replaceable = [README] if call.options["rewrite_readme"] else []
    done = write_files(target.base, target.folder, files, replaceable)
    call.facts |= {"id": names.id, "path": str(target.folder), "files": done}
    _tell(call, names, target, done)


def locate(names: Names, path: str | None) -> Target:
    """Where the package goes: ``--path``, else the workspace's folder of environments, else ``./environments``."""
    workspace = find_workspace(Path.cwd())
    if path is not None:
        base = Path(path).expanduser()
        workspace = find_workspace(base)
    elif workspace is not None and (workspace.root / ENVS).is_dir():
        base = workspace.root / ENVS
    else:
        base = Path("environments")
    if workspace is not None and workspace.contains(base / names.id):
        return Target(base, base / names.id, workspace)
    return Target(base, base / names.underscored, None)


def source_of_library() -> str | None:
    """The repository that ``verifiers`` was installed from, as a source for uv; None when it came from elsewhere.

    The public index has another library of this name. A folder of this machine is no source for others, so an
    editable install names none; ``vf-install`` keeps what is installed in any case.
    """
    try:
        origin = json.loads(importlib_metadata.distribution("verifiers").read_text("direct_url.json") or "{}")
    except importlib_metadata.PackageNotFoundError:
        return None
    commit, url = origin.get("vcs_info", {}).get("commit_id"), origin.get("url", "")
    if not commit or without_logins(url) != url:
        return None
    folder = f", subdirectory = {json.dumps(origin['subdirectory'])}" if origin.get("subdirectory") else ""
    return f"{{ git = {json.dumps(url)}, rev = {json.dumps(commit)}{folder} }}"


def _has_verifiers(workspace: Workspace) -> bool:
    return any(project.name == "verifiers" for project in workspace.projects())


def _tell(call: Call, names: Names, target: Target, done: Mapping[str, str]) -> None:
    """Print what was written, what existed already, and what to do next."""
    existing = [name for name, what in done.items() if what == "kept"]
    call.say(f"{names.id} in {target.shown}")
    for name, what in done.items():
        call.say(f"  {what:<9} {name}")
    if existing:
        call.note(f"vf-init: {len(existing)} files existed already and are unchanged")
        if README in existing:
            call.note("vf-init: --rewrite-readme replaces the README")
    where = shlex.quote(target.shown)
    at_default = call.options["path"] is None
    call.say("Next:")
    call.say(f"  vf-install {names.id if at_default else where}")
    call.say(f"  vf-eval {names.id} -n 3")
    if any(name.startswith("tests/") for name in done):
        call.say(f"  python -m pytest {where}")
    if target.workspace is not None:
        call.say("  uv lock     # the workspace has a new member")


COMMAND = SmallCommand(
    name="vf-init",
    about=ABOUT,
    metavar="NAME",
    options=[
        click.Option(
            ["-p", "--path"],
            metavar="DIR",
            shell_complete=paths,
            help="Folder the package's folder goes into [packages/envs of a workspace, else ./environments].",
        ),
        click.Option(["--multi-file"], is_flag=True, help="Data and rewards in modules of their own."),
        click.Option(["--rewrite-readme"], is_flag=True, help="Replace a README that is there."),
        click.Option(
            ["--template"],
            default="single",
            metavar="NAME",
            shell_complete=words(tuple(TEMPLATES)),
            help=f"What to begin with: {', '.join(TEMPLATES)} [single].",
        ),
        click.Option(["--no-tests"], is_flag=True, help="Write no test."),
    ],
    keys=("id", "path", "files"),
    action=run,
)
main = COMMAND.main

if __name__ == "__main__":
    main()
