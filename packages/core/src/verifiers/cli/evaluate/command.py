"""``vf-eval``: evaluate a model in one or several environments; the same command resumes an
interrupted run.

A command line is read (``arguments``), its files and flags become evaluations (``entries``), each is
prepared without a request (``preparing``), all are a set (``sets``), and they are run one after the
other (``running``). Every problem of the command, its files, the environments, the endpoint and the
output folder is reported in one paragraph before the first rollout. Results go to stdout,
everything else to stderr. Heavy modules are imported after the command line has been parsed, so
that ``--help`` is fast.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TextIO

import click

from verifiers.cli.common.completion import begin
from verifiers.cli.common.reader import raise_together
from verifiers.cli.common.streams import (
    HAS_FINDINGS,
    INTERRUPTED,
    discard_stdout,
    fail,
    results_stream,
)
from verifiers.cli.evaluate.arguments import CommandLine, click_command, parse
from verifiers.cli.evaluate.entries import resolve

if TYPE_CHECKING:
    from verifiers.cli.evaluate.summary import Report


def main() -> None:
    """The entry point."""
    begin(click_command, "vf-eval")
    sys.exit(run_command(sys.argv[1:]))


def run_command(argv: Sequence[str]) -> int:
    """Run one command line; returns the exit code."""
    try:
        line = parse(argv)
    except click.exceptions.Exit as exit_:
        return exit_.exit_code
    with results_stream(line.command.json) as out:
        from verifiers.cli.evaluate.summary import Report

        report = Report()
        try:
            _Command(line, list(argv), report, out).run()
        except KeyboardInterrupt:  # before the first rollout; later `interrupt` handles the signal
            report.exit_code = INTERRUPTED
            print("vf-eval: interrupted; nothing was run", file=sys.stderr)
        except BrokenPipeError:
            discard_stdout()
        except Exception as error:  # noqa: BLE001 - the last handler: every failure becomes one paragraph and a code
            report.failed(*fail(error, command="vf-eval", verbose=line.command.verbose))
        if line.command.json:
            print(report.to_json(), file=out)
    return report.exit_code


@dataclass(frozen=True, slots=True)
class _Command:
    """Does what one command line asks."""

    line: CommandLine
    argv: Sequence[str]
    report: Report
    out: TextIO

    def run(self) -> None:
        """*Raises* the error of the first step that fails."""
        if self.line.command.schema:
            self._schema()
        elif self.line.command.replay is not None:
            self._replay(self.line.command.replay)
        elif self.line.command.dump_config:
            self._dump_config()
        else:
            self._evaluate()

    def _evaluate(self) -> None:
        """Prepare all evaluations, then run them, or say what would be run."""
        from verifiers.cli.evaluate.display import logging_to, make_display
        from verifiers.cli.evaluate.preparing import prepare_all
        from verifiers.cli.evaluate.running import Runner
        from verifiers.cli.evaluate.sets import CommandSet
        from verifiers.runtime.calls import run_in_private_loop

        command, evaluations = self.line.command, resolve(self.line)
        display = make_display(command.progress, command.quiet)
        if command.check:
            from verifiers.cli.evaluate.checking import check_all

            # the reports contain the logged messages
            with logging_to(display, command.verbose, quiet=True):
                check_all(evaluations, display)
        with logging_to(display, command.verbose, command.quiet):
            runs = CommandSet.of(self.line, evaluations)
            prepare_all(evaluations, runs)
            for note in dict.fromkeys(run.choice.note for run in runs.prepared if run.choice.note):
                display.note(note)
            if command.detect is not None:
                from verifiers.cli.evaluate.detecting import detect_lines

                self._print("detect", "\n".join(detect_lines(runs.prepared, command.detect)))
            elif command.dry_run:
                lines = [] if runs.planned is None else [runs.line(), ""]
                lines += [line for run in runs.prepared for line in run.plan_lines()]
                self._print("plan", "\n".join(lines))
            else:
                runner = Runner(self.line, self.argv, runs, display, self.report, self.out)
                run_in_private_loop(runner.run)

    def _schema(self) -> None:
        from verifiers.cli.evaluate.schema import eval_schema

        raise_together(self.line.problems)
        self._print("file_schema", eval_schema())

    def _dump_config(self) -> None:
        from verifiers.cli.evaluate.models import with_names
        from verifiers.cli.evaluate.toml_args import dump

        runs = [(each.env_id, with_names(each.settings)) for each in resolve(self.line)]
        self._print("config", dump(runs))

    def _replay(self, reference: str) -> None:
        """Show the first difference between a saved rollout and what today's code makes of its
        replies. *Raises* ConfigError."""
        from verifiers.cli.evaluate.display import logging_to, make_display
        from verifiers.cli.evaluate.replay import SavedRollout, replayed
        from verifiers.runtime.calls import run_in_private_loop

        saved = SavedRollout.of(reference)
        evaluation = saved.evaluation(self.line)
        display = make_display("plain", self.line.command.quiet)
        with logging_to(display, self.line.command.verbose, self.line.command.quiet):
            replay = run_in_private_loop(lambda: replayed(saved, evaluation, self.line.flags))
        if replay.difference is not None:
            self.report.exit_code = HAS_FINDINGS
        if self.line.command.json:
            self.report.texts["replay"] = replay.to_json()
        else:
            print(f"{reference}: {replay}", file=self.out)

    def _print(self, key: str, text: str) -> None:
        """Output text that is the result: on stdout, or under ``key`` of the JSON object."""
        if self.line.command.json:
            self.report.texts[key] = text
        else:
            print(text.rstrip("\n"), file=self.out)


if __name__ == "__main__":
    main()
