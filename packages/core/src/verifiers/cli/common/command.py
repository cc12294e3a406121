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
from dataclasses import dataclass, field
from typing import Annotated, Any, NoReturn, TextIO

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
from verifiers.runtime.values import Range
from verifiers.runtime.values import option as setting

SCHEMA = 1
COMMON = ("json", "verbose", "quiet")


@dataclass(slots=True)
class Call:
    """A call of a command: its arguments, its output stream, and its results."""

    words: list[str]
    """Positional arguments."""
    options: dict[str, Any]
    """Values of the command's options, by name, but for its settings."""
    json: bool = False
    verbose: bool = False
    quiet: bool = False
    out: TextIO = field(default_factory=lambda: sys.stdout)
    facts: dict[str, object] = field(default_factory=dict)
    """Values of the command's keys in the JSON object."""
    exit_code: int = 0
    """Exit code of an action that raises nothing."""
    settings: list[object] = field(default_factory=list)
    """The command's settings, where it has a class of them."""

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
class SmallCommand:
    """A command: its name, usage and options, the keys of its JSON object, and its action."""

    name: str
    about: str
    metavar: str
    options: Sequence[click.Option] | type
    """A dataclass that declares them (``cli.common.flags``), which the action gets, or click's."""
    keys: Sequence[str]
    action: Callable[..., None]
    """``action(call)`` or ``action(call, settings)``."""
    complete: Completer | None = None
    """Shell completion of its arguments; by default file paths where the usage names a PATH."""

    def main(self) -> NoReturn:
        """The entry point."""
        begin(self.click_command, self.name)
        sys.exit(self.run(sys.argv[1:]))

    def run(self, argv: Iterable[str]) -> int:
        """Run one command line; returns the exit code."""
        argv = list(argv)
        call = Call([], {}, json="--json" in argv, verbose=bool({"-v", "--verbose"} & {*argv}))
        code, error = 0, None
        try:
            with results_stream(call.json) as call.out:
                try:
                    self._read(argv, call)
                    self.action(call, *call.settings)
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
        common = [
            option("--json", "Print one JSON object on stdout."),
            option("-v --verbose", "Show the traceback of an error."),
            option("-q --quiet", "Suppress notices."),
            version_option(self.name),
        ]
        complete = self.complete or (paths if "PATH" in self.metavar else None)
        settings: dict[str, Any] = {"type": click.UNPROCESSED, "shell_complete": complete}
        words = click.Argument(["words"], nargs=-1, metavar=self.metavar, **settings)
        return click.Command(
            self.name,
            params=[words, *self._options(), *common],
            help=self.about,
            epilog=f"{EPILOG}\n\n{how_to(self.name)}",
            context_settings={"ignore_unknown_options": True, "max_content_width": 110},
        )

    def _options(self) -> Sequence[click.Option]:
        return click_options(self.options) if isinstance(self.options, type) else self.options

    def _read(self, argv: list[str], call: Call) -> None:
        """Fill ``call`` from the command line. *Raises* ``ConfigError`` for all unknown options."""
        problems: list[str] = []
        options = long_flags(self._parse(argv, call, problems))
        unknown = [word for word in call.words if word.startswith("-") and len(word) > 1]
        flags = [word.partition("=")[0] for word in unknown]
        raise_together([unknown_option(flag, options, self.name) for flag in flags] + problems)

    def _parse(self, argv: list[str], call: Call, problems: list[str]) -> click.Command:
        """Fill ``call``; unknown options are among its words, sentences about values are appended
        to ``problems``."""
        command = self.click_command()
        try:
            with command.make_context(self.name, argv) as context:
                values = dict(context.params)
        except click.UsageError as error:
            raise ConfigError(error.format_message()) from None
        call.words = list(values.pop("words"))
        call.json, call.verbose, call.quiet = (values.pop(name) for name in COMMON)
        call.options = values
        if isinstance(self.options, type):
            of_fields = Fields.of(self.options).by_name(read_flags(self.options, values, problems))
            call.settings = [self.options(**of_fields)]
        return command


def option(flags: str, help_: str, default: object = None, **settings: Any) -> click.Option:
    """An option, ``option("-o --out", "Where.", ".")``, whose help names its default; a flag
    without default and settings."""
    if default is None:
        # False would let an option stand without its value
        is_flag = None if settings else True
        return click.Option(flags.split(), help=help_, is_flag=is_flag, **settings)
    if not help_.endswith("]."):
        text = f"{default:g}" if isinstance(default, float) else default
        help_ = f"{help_.rstrip('.')} [{text}]."
    return click.Option(flags.split(), help=help_, default=default, **settings)


Port = Annotated[int, Range(ge=0, le=65535)]


@dataclass(frozen=True)
class Listening:
    """Settings of a command that serves."""

    host: str = setting("127.0.0.1", "Address to listen on.", metavar="ADDRESS")
    port: Port = setting(8000, "Port; 0 is any free one.")


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
