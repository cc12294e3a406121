"""``vf-init``: create a working environment package: it loads, evaluates offline, and its test
passes.

Guarantees: after an error nothing has been written, a new folder appears atomically, and no
existing file is replaced, except a README with ``--rewrite-readme``. ``vf-install`` installs the
package; ``scaffold`` renders the files, ``writing`` writes them.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from verifiers.cli.common.command import Call, SmallCommand, one_word
from verifiers.cli.common.writing import write_files
from verifiers.cli.install.project_files import Workspace, find_workspace
from verifiers.cli.scaffold import TABLE, TEMPLATES, Names, Template, parse_name, render
from verifiers.errors import ConfigError
from verifiers.runtime.install_lines import CORE, origin_of
from verifiers.runtime.values import option

if TYPE_CHECKING:
    from verifiers.cli.table import Questions

ENVS = Path("packages/envs")
"""Folder of the environments in a workspace."""
README = "README.md"
JUDGE = "gpt-4.1-nano"
"""Default judge of a package made with ``--judge``, as of ``JudgeRubric``."""

ABOUT = """Create a working environment package as a starting point.

\b
  vf-init word-game
  vf-init word-game --template multi --multi-file
  vf-init capitals --from capitals.csv
"""


@dataclass(frozen=True, slots=True)
class Target:
    """Location of a new package: ``folder`` in ``base``; ``workspace``: which it joins, if any."""

    base: Path
    folder: Path
    workspace: Workspace | None

    @property
    def relative(self) -> str:
        """The folder relative to the working directory, where it lies inside."""
        here = Path.cwd().resolve()
        path = self.base.resolve() / self.folder.name
        return path.relative_to(here).as_posix() if path.is_relative_to(here) else str(self.folder)


@dataclass(frozen=True)
class InitSettings:
    """The flags of ``vf-init``."""

    path: str | None = option(
        None,
        "Parent of the package's folder [packages/envs of a workspace, else ./environments].",
        "-p",
        metavar="DIR",
    )
    multi_file: bool = option(False, "Put data and rewards into separate modules.")
    rewrite_readme: bool = option(False, "Replace an existing README.")
    template: Template = option("single", f"Template: {', '.join(TEMPLATES)}.", metavar="NAME")
    no_tests: bool = option(False, "Write no test.")
    table: str | None = option(
        None,
        "Make it of a table of questions and answers: .csv, .tsv, .jsonl, .json, .xlsx, .parquet.",
        key="from",
        metavar="FILE",
    )
    question_column: str | None = option(
        None, "Column of the questions [seen from the names].", metavar="NAME"
    )
    answer_column: str | None = option(
        None, "Column of the answers [seen from the names].", metavar="NAME"
    )
    answer_separator: str | None = option(
        None, "What separates several right answers in a cell, or none [seen from the cells]."
    )
    judge: bool = option(False, "Ask a model about answers that are not exactly right.")


def run(call: Call, settings: InitSettings) -> None:
    """Create the package. *Raises* ``ConfigError``, with nothing written."""
    names = parse_name(one_word(call, "the name of the environment: vf-init NAME"))
    questions = questions_of(settings)
    target = locate(names, settings.path)
    if questions is not None and os.path.lexists(target.folder):
        raise ConfigError(
            f"{target.relative} exists; --from makes a new package: choose another name, or remove"
            " the folder",
            path=str(target.folder),
        )
    workspace = target.workspace
    files = render(
        names,
        TABLE if questions else settings.template,
        folder=target.relative,
        multi_file=settings.multi_file,
        tests=not settings.no_tests,
        member=workspace is not None and any(p.name == CORE for p in workspace.projects()),
        source=source_of_library(target.folder),
        questions=questions,
        judge_model=JUDGE if settings.judge else None,
    )
    replaceable = [README] if settings.rewrite_readme else []
    outcomes = write_files(target.base, target.folder, files, replaceable)
    call.facts |= {"id": names.id, "path": str(target.folder), "files": outcomes}
    if questions is not None:
        call.facts["table"] = questions.facts()
    _print_result(call, settings, names, target, outcomes, questions)


def questions_of(settings: InitSettings) -> Questions | None:
    """The questions of ``--from``; None without it.

    *Raises* ``ConfigError``, also for an option that needs it or does not go with it.
    """
    flags = ("judge", "question_column", "answer_column", "answer_separator")
    if settings.table is None:
        for name in flags:
            if getattr(settings, name) not in (None, False):
                raise ConfigError(f"--{name.replace('_', '-')} needs a table: --from FILE")
        return None
    if settings.template != "single" or settings.multi_file:
        raise ConfigError(
            "--from makes a package of its own, with several modules: leave out --template and"
            " --multi-file"
        )
    separator = settings.answer_separator
    from verifiers.cli.table import read_questions  # loads numpy

    return read_questions(
        Path(settings.table).expanduser(),
        settings.question_column,
        settings.answer_column,
        "" if separator == "none" else separator,
    )


def locate(names: Names, path: str | None) -> Target:
    """Its location: in ``--path``, else the workspace's environments, else ``./environments``."""
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


def source_of_library(folder: Path) -> str | None:
    """Where ``verifiers`` was installed from, as a source for uv in the project in ``folder``; None
    when unknown.

    The public index has another library of this name: on a machine where a folder does not exist,
    uv fails instead of installing that project.
    """
    origin = origin_of(CORE)
    if origin is None:
        return None
    if origin.folder is not None:
        path = os.path.relpath(origin.folder, folder.resolve())
        editable = ", editable = true" if origin.is_editable else ""
        advice = "on another machine: its clone, or git and subdirectory"
        return f"{{ path = {json.dumps(path)}{editable} }}  # {advice}"
    if not origin.commit:
        return f"{{ url = {json.dumps(origin.url)} }}"
    parts = {"git": origin.url, "rev": origin.commit, "subdirectory": origin.subdirectory}
    assignments = (f"{name} = {json.dumps(value)}" for name, value in parts.items() if value)
    return f"{{ {', '.join(assignments)} }}"


def _print_result(
    call: Call,
    settings: InitSettings,
    names: Names,
    target: Target,
    outcomes: Mapping[str, str],
    questions: Questions | None,
) -> None:
    """Print the outcome for each file, what became of a table, and the next commands."""
    call.say(f"{names.id} in {target.relative}")
    for name, outcome in outcomes.items():
        call.say(f"  {outcome:<9} {name}")
    for sentence in questions.sentences(has_judge=settings.judge) if questions else ():
        call.say(sentence)
    if existing := [name for name, outcome in outcomes.items() if outcome == "kept"]:
        call.note(f"vf-init: {len(existing)} files existed already and are unchanged")
        if README in existing:
            call.note("vf-init: --rewrite-readme replaces the README")
    where = shlex.quote(target.relative)
    call.say("Next:")
    call.say(f"  vf-install {names.id if settings.path is None else where}")
    call.say(f"  vf-eval {names.id} -n 3")
    if any(name.startswith("tests/") for name in outcomes):
        call.say(f"  python -m pytest {where}")
    if target.workspace is not None:
        call.say("  uv lock     # the workspace has a new member")


COMMAND = SmallCommand(
    name="vf-init",
    about=ABOUT,
    metavar="NAME",
    options=InitSettings,
    keys=("id", "path", "files", "table"),
    action=run,
)
main = COMMAND.main

if __name__ == "__main__":
    main()
