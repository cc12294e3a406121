"""Parse the command line of ``vf-eval`` into a `CommandLine`, with all of its problems at once.

Click parses the flags and prints the help; the annotations in ``options`` check values, as they do
for files. Besides flags there are ``@ FILE.toml`` and dotted keys such as ``--env.args.max_turns
5``.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import click

from verifiers.cli.common.command import long_flags, version_option
from verifiers.cli.common.completion import Completer, environments, how_to, paths, words
from verifiers.cli.common.reader import (
    Assignment,
    Fields,
    accept,
    read_words,
    store,
    unknown_option,
)
from verifiers.cli.common.streams import EPILOG
from verifiers.cli.evaluate.options import (
    REPLACED,
    CommandSettings,
    EvalSettings,
    Flag,
    flags_of,
)
from verifiers.runtime.suggest import SIMILAR, close_match
from verifiers.runtime.values import Form, parts

ABOUT = """Evaluate a model in an environment and save every rollout.

\b
  vf-eval reverse-text -m gpt-4.1-mini -n 20
  vf-eval reverse-text -b http://127.0.0.1:8000/v1
  vf-eval reverse-text,alphabet-sort -m local
  vf-eval @ evals.toml

The same command continues a run that was interrupted.
"""
DOTTED: dict[tuple[str, ...], str] = {
    ("env", "args"): "env_args",
    ("env_args",): "env_args",
    ("args",): "env_args",
    ("sampling_args",): "sampling_args",
    ("sampling",): "sampling_args",
    ("extra_env_kwargs",): "extra_env_kwargs",
}
"""Prefix of a dotted key -> the setting (a table) that the remaining parts index."""


@dataclass(slots=True)
class CommandLine:
    """The content of a command line. ``problems``: one sentence for each."""

    targets: list[str] = field(default_factory=list)
    """Environment ids."""
    files: list[str] = field(default_factory=list)
    flags: dict[str, Any] = field(default_factory=dict)
    """Settings by name, from flags."""
    dotted: dict[str, Any] = field(default_factory=dict)
    """Tables by name, from dotted keys."""
    command: CommandSettings = field(default_factory=CommandSettings)
    problems: list[str] = field(default_factory=list)


def parse(argv: Iterable[str]) -> CommandLine:
    """Read a command line. ``--help`` and ``--version`` print and *raise* click's ``Exit``."""
    argv, line = list(argv), CommandLine()
    read = read_words(argv, lambda flag: "." in flag)
    line.files, line.problems = read.files, read.problems
    for setting in read.assignments:
        _take_dotted(setting, line)
    try:
        with click_command().make_context("vf-eval", read.remaining) as context:
            values = dict(context.params)
    except click.UsageError as error:
        line.problems.append(error.format_message())
        line.command = CommandSettings(json="--json" in argv)
        return line
    _take_positional(values.pop("targets"), line)
    values_of: dict[type, dict[str, Any]] = {}
    for owner in (EvalSettings, CommandSettings):
        values_of[owner] = {}
        for name, flag in flags_of(owner).items():
            value = values[name]
            if value is None or value == ():
                continue
            setting = Assignment(
                (name,), value, spelling(flag), value if isinstance(value, str) else None
            )
            try:
                values_of[owner][name] = accept(setting, Fields.of(owner).hints[name])
            except ValueError as error:
                line.problems.append(f"{setting.location} {error}")
    line.flags = values_of[EvalSettings]
    line.command = CommandSettings(**values_of[CommandSettings])
    return line


def spelling(flag: Flag) -> str:
    """The long flag of a setting."""
    return next(name.partition("/")[0] for name in flag.names.split() if name.startswith("--"))


def click_command() -> click.Command:
    """The click command; `parse` reports unknown options together."""
    options: list[click.Parameter] = [click.Argument(["targets"], nargs=-1, type=click.UNPROCESSED, metavar="ENV_ID",
                                                     shell_complete=environments)]  # fmt: skip
    for owner in (EvalSettings, CommandSettings):
        defaults = {setting.name: setting.default for setting in dataclasses.fields(owner)}
        hints = Fields.of(owner).hints
        options += [
            _option(name, flag, hints[name], defaults[name])
            for name, flag in flags_of(owner).items()
        ]
    options.append(version_option("vf-eval"))
    return click.Command(
        "vf-eval",
        params=options,
        help=ABOUT,
        epilog=f"{EPILOG}\n\n{how_to('vf-eval')}",
        context_settings={"ignore_unknown_options": True, "max_content_width": 110},
    )


def _option(name: str, flag: Flag, hint: object, default: object) -> click.Option:
    kinds = list(parts(hint))
    kinds += [
        item for kind in kinds if typing.get_origin(kind) is tuple for item in typing.get_args(kind)
    ]
    form = next((kind for kind in kinds if isinstance(kind, Form)), None)
    choices = next(
        (typing.get_args(kind) for kind in kinds if typing.get_origin(kind) is typing.Literal), ()
    )
    meaning = flag.help
    if isinstance(default, str | int | float) and not isinstance(default, bool):
        meaning = f"{meaning.rstrip('.')} [{default}]."
    declared = [*flag.names.split(), name]
    if bool in kinds:
        return click.Option(declared, is_flag=True, default=None, help=meaning)
    plain = "|".join(choices) or ("TEXT" if str in kinds else "X" if float in kinds else "N")
    metavar = form.metavar if form is not None else plain
    if name == "resume":
        return click.Option(
            declared, is_flag=False, flag_value="", default=None, metavar=metavar, help=meaning
        )
    completer: Completer | None = words(choices) if choices else None
    return click.Option(
        declared,
        type=str,
        multiple=form is not None and form.repeats,
        default=None,
        metavar=metavar,
        help=meaning,
        shell_complete=paths if name.endswith(("_path", "_dir")) else completer,
    )


def _take_dotted(setting: Assignment, line: CommandLine) -> None:
    """Store the value of a dotted key in the table that its prefix names."""
    head = setting.location
    for length in range(len(setting.path) - 1, 0, -1):
        if name := DOTTED.get(setting.path[:length]):
            store(line.dotted.setdefault(name, {}), setting.path[length:], setting.value)
            return
    *section, key = head.removeprefix("--").split(".")
    sections = {".".join(path).replace("_", "-"): path for path in DOTTED}
    match = close_match(".".join(section), sections, SIMILAR)
    sections_hint = f"dotted keys begin with --{', --'.join(sections)}"
    line.problems.append(
        f"{head}: no such setting, {f'did you mean --{match}.{key}?' if match else sections_hint}"
    )


def _take_positional(words: Iterable[str], line: CommandLine) -> None:
    """Sort words into environment ids and files; one with a dash first is an unknown option."""
    plain: list[str] = []
    after_unknown = False
    for word in words:
        if word.startswith("-") and len(word) > 1:
            line.problems.append(_unknown_option(word))
            after_unknown = "=" not in word
        elif after_unknown:
            after_unknown = False  # most likely the unknown option's value
        else:
            plain.append(word)
    for word in plain:
        if word.endswith(".toml"):
            line.files.append(word)
        elif not line.targets:
            line.targets = [name.strip() for name in word.split(",") if name.strip()]
        elif not line.problems:
            line.problems.append(
                f"{word!r}: one more argument than expected; several ids are separated by commas"
            )


def _unknown_option(word: str) -> str:
    name = word.partition("=")[0]
    if name in REPLACED:
        return f"{name} is an option of older versions: {REPLACED[name]}"
    return unknown_option(name, long_flags(click_command()), "vf-eval")
