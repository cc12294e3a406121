"""Base of the small commands: read the arguments, run the action, print text or one JSON object,
exit.

Every command built on it has ``--json``, ``-v``, ``-q``, ``--version`` and ``--help``, reports all
unknown options at once, prints only results on stdout and exits with 130 on Ctrl-C. The action is a
function. ``vf-eval``, which has files, dotted keys and displays, does not use it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, Generic, NoReturn, TextIO, TypeVar

import click

from verifiers.cli.common.completion import Completer, begin, how_to, paths
from verifiers.cli.common.flags import click_options, read_flags
from verifiers.cli.common.reader import Fields, raise_together, unknown_option
from verifiers.cli.common.streams import (
    EPILOG,
    INTERRUPTED,
    discard_stdout,
    fail,
    results_stream,
)
from verifiers.errors import ConfigError
from verifiers.runtime.terminal import escape_control
from verifiers.runtime.values import Range, option

SCHEMA = 1
S = TypeVar("S")


@dataclass(frozen=True)
class CommonSettings:
    """The flags of every command."""

    json: bool = option(False, "Print one JSON object on stdout.")
    verbose: bool = option(False, "Show the traceback of an error.", "-v")
    quiet: bool = option(False, "Suppress notices.", "-q")


@dataclass(frozen=True)
class NoSettings:
    """The flags of a command that has none of its own."""


@dataclass(slots=True)
class Call:
    """A call of a command: its arguments, its output stream, and its results."""

    words: list[str]
    """Positional arguments."""
    json: bool = False
    verbose: bool = False
    quiet: bool = False
    out: TextIO = field(default_factory=lambda: sys.stdout)
    facts: dict[str, object] = field(default_factory=dict)
    """Values of the command's keys in the JSON object."""
    exit_code: int = 0
    """Exit code of an action that raises nothing."""
    unchecked: list[str] = field(default_factory=list)
    """Arguments after a bare ``--``, of a command that passes them on."""

    def say(self, text: str) -> None:
        """Print a result as text; omitted with ``--json``, where the object holds it."""
        if not self.json:
            print(escape_control(text), file=self.out)

    def note(self, text: str) -> None:
        """Print a notice on stderr; omitted with ``-q``."""
        if not self.quiet:
            print(escape_control(text), file=sys.stderr, flush=True)

    def answer_now(self, text: str, **facts: object) -> None:
        """Print the result of an action that then runs until a signal ends it."""
        if self.json:
            print(_answer(facts), file=self.out)
            self.json = False
        else:
            self.say(text)
        self.out.flush()


def _answer(facts: dict[str, object], exit_code: int = 0, error: object = None) -> str:
    """The JSON object of a command."""
    content = {"schema": SCHEMA, "ok": exit_code == 0, "exit_code": exit_code, **facts}
    return json.dumps(content | {"error": error})


@dataclass(frozen=True, slots=True)
class SmallCommand(Generic[S]):
    """A command: its name, usage and options, the keys of its JSON object, and its action."""

    name: str
    about: str
    metavar: str
    options: type[S]
    """The dataclass that declares them (``cli.common.flags``), which the action gets."""
    keys: Sequence[str]
    action: Callable[[Call, S], None]
    complete: Completer | None = None
    """Shell completion of its arguments; by default file paths where the usage names a PATH."""

    def main(self) -> NoReturn:
        """The entry point."""
        begin(self.click_command, self.name)
        sys.exit(self.run(sys.argv[1:]))

    def run(self, argv: Iterable[str]) -> int:
        """Run one command line; returns the exit code."""
        argv = list(argv)
        call = Call([], json="--json" in argv, verbose=bool({"-v", "--verbose"} & {*argv}))
        code, error = 0, None
        try:
            with results_stream(call.json) as call.out:
                try:
                    self.action(call, self._read(argv, call))
                    code = call.exit_code
                except KeyboardInterrupt:
                    code = INTERRUPTED
                    print(f"{self.name}: interrupted", file=sys.stderr)
                except (click.exceptions.Exit, BrokenPipeError):
                    raise
                except Exception as raised:  # noqa: BLE001 - the last handler: every failure becomes a paragraph
                    code, error = fail(raised, command=self.name, verbose=call.verbose)
                if call.json:
                    facts = dict.fromkeys(self.keys) | call.facts
                    print(_answer(facts, code, error), file=call.out)
                call.out.flush()
        except click.exceptions.Exit as exit_:  # after --help and --version
            return exit_.exit_code
        except BrokenPipeError:
            discard_stdout()
        return code

    def click_command(self) -> click.Command:
        """The click command; unknown options are ignored here, and reported together by `run`."""
        flags = [*click_options(self.options), *click_options(CommonSettings)]
        complete = self.complete or (paths if "PATH" in self.metavar else None)
        settings: dict[str, Any] = {"type": click.UNPROCESSED, "shell_complete": complete}
        words = click.Argument(["words"], nargs=-1, metavar=self.metavar, **settings)
        return click.Command(
            self.name,
            params=[words, *flags, version_option(self.name)],
            help=self.about,
            epilog=f"{EPILOG}\n\n{how_to(self.name)}",
            context_settings={"ignore_unknown_options": True, "max_content_width": 110},
        )

    def _read(self, argv: list[str], call: Call) -> S:
        """Fill ``call`` from the command line; returns the settings. *Raises* ``ConfigError`` for
        all unknown options."""
        problems: list[str] = []
        settings = self._parse(argv, call, problems)
        options = long_flags(self.click_command())
        unknown = [word for word in call.words if word.startswith("-") and len(word) > 1]
        flags = [word.partition("=")[0] for word in unknown]
        raise_together([unknown_option(flag, options, self.name) for flag in flags] + problems)
        return settings

    def _parse(self, argv: list[str], call: Call, problems: list[str]) -> S:
        """Fill ``call``; unknown options are among its words, sentences about values are appended
        to ``problems``."""
        try:
            with self.click_command().make_context(self.name, argv) as context:
                values = dict(context.params)
        except click.UsageError as error:
            raise ConfigError(error.format_message()) from None
        call.words = list(values["words"])
        call.json, call.verbose, call.quiet = (
            bool(values[line.name]) for line in fields(CommonSettings)
        )
        declared: type = self.options  # functools.cache wants no type variable
        typed = read_flags(declared, values, problems)
        return self.options(**Fields.of(declared).by_name(typed))


Port = Annotated[int, Range(ge=0, le=65535)]


@dataclass(frozen=True)
class Listening:
    """Settings of a command that serves."""

    host: str = option("127.0.0.1", "Address to listen on.", metavar="ADDRESS")
    port: Port = option(8000, "Port; 0 is any free one.")


def long_flags(command: click.Command) -> list[str]:
    """The flags of a command that begin with two dashes."""
    flags = [flag for option in command.params for flag in (*option.opts, *option.secondary_opts)]
    return [*(flag for flag in flags if flag.startswith("--")), "--help"]


def version_option(name: str) -> click.Option:
    """The flag that prints the version of the installed library and exits."""

    def show(context: click.Context, _: click.Parameter, value: bool) -> None:
        if value:
            from importlib import metadata

            try:
                version = metadata.version("verifiers")
            except metadata.PackageNotFoundError:  # run from its source folder
                version = "(not installed)"
            click.echo(f"{name}, verifiers {version}")
            context.exit()

    return click.Option(
        ["--version"],
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=show,
        help="Show the version.",
    )


def one_word(call: Call, what: str) -> str:
    """The only positional argument. *Raises* ``ConfigError`` when there is not exactly one word."""
    if len(call.words) != 1:
        extra = f", not {len(call.words)}: {' '.join(call.words)}" if call.words else ""
        raise ConfigError(f"give {what}{extra}")
    return call.words[0]
