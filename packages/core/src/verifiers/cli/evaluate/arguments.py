"""The command line of ``vf-eval`` -> what was asked for, with everything that is wrong with it named at once.

Click reads the flags and prints the help; values are checked by the table of ``options``, as those of a file are.
Understood besides the flags: ``@ FILE.toml``, and dotted keys like ``--env.args.max_turns 5``.
"""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import click

import verifiers
from verifiers.cli.common.completion import Completer, environments, how_to, paths, words
from verifiers.cli.common.kinds import Kind
from verifiers.cli.evaluate.options import COMMAND_SETTINGS, EXPORT_FORMATS, REPLACED, SETTINGS, CommandSettings
from verifiers.runtime.suggest import close_match

ABOUT = """Evaluate a model in an environment and save every rollout.

\b
  vf-eval reverse-text -m gpt-4.1-mini -n 20
  vf-eval reverse-text -b http://127.0.0.1:8000/v1
  vf-eval reverse-text,alphabet-sort -m local
  vf-eval @ evals.toml

The same command continues a run that was interrupted.
"""
EXIT_CODES = "Exit codes: 0 done, 2 something to correct, 3 the run failed, 130 interrupted (143 by SIGTERM)."

DOTTED = {
    "env.args": "env_args",
    "env-args": "env_args",
    "args": "env_args",
    "sampling-args": "sampling_args",
    "sampling": "sampling_args",
    "extra-env-kwargs": "extra_env_kwargs",
}
"""What may stand before the last dot of a dotted key -> the setting it goes into."""


@dataclass(slots=True)
class CommandLine:
    """What a command line asks for. ``problems``: one sentence for each thing wrong with it."""

    targets: list[str] = field(default_factory=list)
    """Environment ids."""
    files: list[str] = field(default_factory=list)
    given: dict[str, Any] = field(default_factory=dict)
    """Settings by name, from flags."""
    dotted: dict[str, Any] = field(default_factory=dict)
    command: CommandSettings = field(default_factory=CommandSettings)
    problems: list[str] = field(default_factory=list)


def parse(argv: Iterable[str]) -> CommandLine:
    """Read a command line. ``--help`` and ``--version`` print and raise ``click.exceptions.Exit``."""
    argv, line = list(argv), CommandLine()
    rest = _take_special(argv, line)
    try:
        with click_command().make_context("vf-eval", rest) as context:
            values = dict(context.params)
    except click.UsageError as error:
        line.problems.append(error.format_message())
        line.command = CommandSettings(json="--json" in argv)
        return line
    _take_positional(values.pop("targets"), line)
    for name, value in values.items():
        if value is None or value == ():
            continue
        kind: Kind = ({**SETTINGS, **COMMAND_SETTINGS})[name].metadata["kind"]
        try:
            checked = kind.check(value if kind.is_flag or kind.repeats else kind.from_text(value))
        except ValueError as error:
            line.problems.append(f"{spelling(name)} {error}")
            continue
        if name in COMMAND_SETTINGS:
            line.command = dataclasses.replace(line.command, **{name: checked})
        else:
            line.given[name] = checked
    return line


def spelling(name: str) -> str:
    """The long flag of a setting."""
    flags: Sequence[str] = ({**SETTINGS, **COMMAND_SETTINGS})[name].metadata["flags"]
    return next(flag.partition("/")[0] for flag in flags if flag.startswith("--"))


def click_command() -> click.Command:
    """The command as click knows it; unknown options are left for `parse` to name together."""
    options: list[click.Parameter] = [click.Argument(["targets"], nargs=-1, type=click.UNPROCESSED, metavar="ENV_ID",
                                                     shell_complete=environments)]  # fmt: skip
    options += [_option(field) for field in (*SETTINGS.values(), *COMMAND_SETTINGS.values())]
    options.append(_version_option())
    return click.Command(
        "vf-eval",
        params=options,
        help=ABOUT,
        epilog=f"{EXIT_CODES}\n\n{how_to('vf-eval')}",
        context_settings={"ignore_unknown_options": True, "max_content_width": 110},
    )


def _option(setting: dataclasses.Field[Any]) -> click.Option:
    kind: Kind = setting.metadata["kind"]
    meaning = setting.metadata["help"]
    if isinstance(setting.default, str | int | float) and not isinstance(setting.default, bool):
        meaning = f"{meaning.rstrip('.')} [{setting.default}]."
    declared = [*setting.metadata["flags"], setting.name]
    if kind.is_flag:
        return click.Option(declared, is_flag=True, default=None, help=meaning)
    if setting.name == "resume":
        return click.Option(declared, is_flag=False, flag_value="", default=None, metavar=kind.metavar, help=meaning)
    return click.Option(
        declared,
        type=str,
        multiple=kind.repeats,
        default=None,
        metavar=kind.metavar,
        help=meaning,
        shell_complete=_completer(setting),
    )


def _completer(setting: dataclasses.Field[Any]) -> Completer | None:
    """What the shell may offer for a setting's value."""
    metavar: str = setting.metadata["kind"].metavar
    if setting.name == "export":
        return words(EXPORT_FORMATS)
    if setting.name.endswith(("_path", "_dir")):
        return paths
    return words(metavar.split("|")) if "|" in metavar and metavar.islower() else None


def _version_option() -> click.Option:
    def show(context: click.Context, _: click.Parameter, value: bool) -> None:
        if value:
            click.echo(f"vf-eval, verifiers {verifiers.__version__}")
            context.exit()

    return click.Option(
        ["--version"], is_flag=True, is_eager=True, expose_value=False, callback=show, help="Show the version."
    )


def _take_special(argv: list[str], line: CommandLine) -> list[str]:
    """Take ``@ FILE`` and dotted keys out of ``argv``; the rest is click's."""
    rest: list[str] = []
    words = iter(argv)
    for word in words:
        if word.startswith("@"):
            name = word[1:] or next(words, "")
            line.files.append(name)
            if not name:
                line.problems.append("@ needs the name of a TOML file behind it")
            continue
        head, equals, value = word.partition("=")
        if not head.startswith("--") or "." not in head:
            rest.append(word)
            continue
        section, _, key = head[2:].rpartition(".")
        setting = DOTTED.get(section.replace("_", "-"))
        text = value if equals else next(words, None)
        if setting is None or not key:
            match = close_match(section.replace("_", "-"), DOTTED, 0.6)
            line.problems.append(
                f"{head}: no such setting, "
                + (f"did you mean --{match}.{key}?" if match else f"dotted keys begin with --{', --'.join(DOTTED)}")
            )
        elif text is None:
            line.problems.append(f"{head} needs a value")
        else:
            line.dotted[setting] = {**line.dotted.get(setting, {}), key: toml_value(text)}
    return rest


def toml_value(text: str) -> Any:
    """A value as TOML writes it, else the text itself.

    >>> toml_value("5"), toml_value("[1, 2]"), toml_value("true"), toml_value("fast")
    (5, [1, 2], True, 'fast')
    """
    try:
        values = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return values["value"] if values.keys() == {"value"} else text


def _take_positional(words: Iterable[str], line: CommandLine) -> None:
    """Environment ids and files; what begins with a dash is an option that click does not know."""
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
            line.problems.append(f"{word!r}: one more argument than expected; several ids are separated by commas")


def _unknown_option(word: str) -> str:
    name = word.partition("=")[0]
    if name in REPLACED:
        return f"{name} is an option of older versions: {REPLACED[name]}"
    match = close_match(name, _flags(), 0.6) if name.startswith("--") else None
    return f"{name}: no such option" + (f", did you mean {match}?" if match else " (see vf-eval --help)")


def _flags() -> list[str]:
    tables: Iterable[Mapping[str, dataclasses.Field[Any]]] = (SETTINGS, COMMAND_SETTINGS)
    return [
        flag
        for table in tables
        for setting in table.values()
        for flags in setting.metadata["flags"]
        for flag in flags.split("/")
        if flag.startswith("--")
    ] + ["--help", "--version"]
