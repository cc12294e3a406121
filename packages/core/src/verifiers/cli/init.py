"""``vf-init``: a new environment package that works: it loads, evaluates offline, and its test passes.

Promise: nothing is written when anything is wrong, a new folder appears whole or not at all, and no file that is there
is replaced, except a README with ``--rewrite-readme``. Installs nothing (``vf-install`` does); what the files say is
in ``scaffold``.
"""

from __future__ import annotations

import os
import secrets
import shlex
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import click

from verifiers.cli.command import Call, SmallCommand, one_word
from verifiers.cli.project_files import Workspace, find_workspace
from verifiers.cli.scaffold import TEMPLATES, Names, parse_name, render
from verifiers.errors import ConfigError
from verifiers.suggest import closest

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
    """Create what the command line asks for. Raises: ``ConfigError``, with nothing written."""
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
    )
    done = write_package(target, files, replaceable=[README] if call.options["rewrite_readme"] else [])
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


def write_package(target: Target, files: Mapping[str, str], replaceable: Iterable[str] = ()) -> dict[str, str]:
    """Write the files that are not there; what became of each: "written", "kept" or "replaced".

    Raises: ``ConfigError`` when a file would lie outside the base folder, or cannot be written; nothing has changed.
    """
    _check_places(target, files)
    done = {name: "kept" if os.path.lexists(target.folder / name) else "written" for name in files}
    done |= {name: "replaced" for name in replaceable if done.get(name) == "kept"}
    wanted = {name: text for name, text in files.items() if done[name] != "kept"}
    created: list[Path] = []
    try:
        _make_folders(target.base, created)
        if os.path.lexists(target.folder):
            _fill_in(target.folder, wanted, created)
        else:
            _appear(target.folder, wanted, created)
    except BaseException as error:
        for path in reversed(created):
            _remove(path)
        if isinstance(error, OSError):
            raise ConfigError(
                f"{target.folder} cannot be written: {error.strerror or error}. Nothing was changed.",
                path=str(target.folder),
            ) from error
        raise
    return done


def _check_places(target: Target, files: Iterable[str]) -> None:
    """Refuse links that lead elsewhere, and files where folders are needed (and the reverse)."""
    home = target.base.resolve() / target.folder.name
    if target.folder.resolve() != home:
        raise ConfigError(
            f"{target.folder} leads to {target.folder.resolve()}, outside {target.base}; remove the link or choose "
            "another folder with --path",
            path=str(target.folder),
        )
    for name in files:
        place = target.folder / name
        if place.resolve() != home / name:
            raise ConfigError(f"{place} leads to {place.resolve()}; remove the link first", path=str(place))
        if place.is_dir():
            raise ConfigError(f"{place} is a folder, and a file belongs there", path=str(place))
        for parent in place.parents:
            if parent.exists() and not parent.is_dir():
                raise ConfigError(f"{parent} is a file, and a folder belongs there", path=str(parent))


def _appear(folder: Path, texts: Mapping[str, str], created: list[Path]) -> None:
    """A folder that is not there: written beside its place under a hidden name, then renamed."""
    hidden = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.tmp")
    created.append(hidden)
    hidden.mkdir()
    for name, text in texts.items():
        (hidden / name).parent.mkdir(parents=True, exist_ok=True)
        (hidden / name).write_text(text, encoding="utf-8", newline="\n")
    os.rename(hidden, folder)  # refuses a folder that came into being meanwhile, unless it is empty


def _fill_in(folder: Path, texts: Mapping[str, str], created: list[Path]) -> None:
    """Add to a folder that is there. A file is created only where there is none; a README is replaced last."""
    readme = None
    for name, text in texts.items():
        place = folder / name
        if place.exists():
            readme = place, text
            continue
        _make_folders(place.parent, created)
        with place.open("x", encoding="utf-8", newline="\n") as file:
            created.append(place)
            file.write(text)
    if readme is not None:
        from verifiers.durable import atomic_write

        atomic_write(readme[0], readme[1].encode())


def _make_folders(folder: Path, created: list[Path]) -> None:
    missing = [one for one in (folder, *folder.parents) if not one.exists()]
    for one in reversed(missing):
        one.mkdir()
        created.append(one)


def _remove(path: Path) -> None:
    """Take back what this call created; a folder that others have written into stays."""
    if path.name.endswith(".tmp") and path.name.startswith("."):
        shutil.rmtree(path, ignore_errors=True)
    elif path.is_dir():
        if not any(path.iterdir()):
            path.rmdir()
    else:
        path.unlink(missing_ok=True)


def _has_verifiers(workspace: Workspace) -> bool:
    return any(project.name == "verifiers" for project in workspace.projects())


def _tell(call: Call, names: Names, target: Target, done: Mapping[str, str]) -> None:
    """What was written, what was kept, and what to do next."""
    kept = [name for name, what in done.items() if what == "kept"]
    call.say(f"{names.id} in {target.shown}")
    for name, what in done.items():
        call.say(f"  {what:<9} {name}")
    if kept:
        call.note(f"vf-init: {len(kept)} files were there already and are as they were")
        if README in kept:
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
            help="Folder the package's folder goes into [packages/envs of a workspace, else ./environments].",
        ),
        click.Option(["--multi-file"], is_flag=True, help="Data and rewards in modules of their own."),
        click.Option(["--rewrite-readme"], is_flag=True, help="Replace a README that is there."),
        click.Option(
            ["--template"],
            default="single",
            metavar="NAME",
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
