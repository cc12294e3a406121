"""Parse the command line of ``vf-eval`` into a `CommandLine`, with all of its problems at once.

``options`` declares the flags (``cli.common.flags``). Besides there are ``@ FILE.toml`` and dotted
keys such as ``--env.args.max_turns 5``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import click

from verifiers.cli.common.command import long_flags, version_option
from verifiers.cli.common.completion import environments, how_to
from verifiers.cli.common.flags import click_options, read_flags
from verifiers.cli.common.reader import Assignment, read_words, store, unknown_option
from verifiers.cli.common.streams import EPILOG
from verifiers.cli.evaluate.options import REPLACED, CommandSettings, EvalSettings
from verifiers.runtime.suggest import SIMILAR, close_match

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
    line.flags = read_flags(EvalSettings, values, line.problems)
    line.command = CommandSettings(**read_flags(CommandSettings, values, line.problems))
    return line


def click_command() -> click.Command:
    """The click command; `parse` reports unknown options together."""
    targets = click.Argument(
        ["targets"],
        nargs=-1,
        type=click.UNPROCESSED,
        metavar="ENV_ID",
        shell_complete=environments,
    )
    options = [*click_options(EvalSettings), *click_options(CommandSettings)]
    return click.Command(
        "vf-eval",
        params=[targets, *options, version_option("vf-eval")],
        help=ABOUT,
        epilog=f"{EPILOG}\n\n{how_to('vf-eval')}",
        context_settings={"ignore_unknown_options": True, "max_content_width": 110},
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
