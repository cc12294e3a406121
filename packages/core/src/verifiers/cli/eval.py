"""``vf-eval``: evaluate a model in one or several environments; the same command goes on after an interruption.

The order is the promise: everything that can be wrong with the command, its files, the environments, the endpoint and
the output folder is found and said in one paragraph before the first rollout. Results go to stdout, everything else
to stderr. The heavy parts are imported after the command line has been read, so that ``--help`` is quick.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import sys
import traceback
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, TextIO

import click

from verifiers.cli.arguments import CommandLine, parse
from verifiers.cli.options import EvalSettings, contradictions, layered
from verifiers.cli.toml_args import Entry, dump, environment_defaults, read_files
from verifiers.errors import ConfigError, RunError, UsageError, VerifiersError

if TYPE_CHECKING:
    from verifiers.cli.display import Display
    from verifiers.cli.planning import Prepared
    from verifiers.cli.summary import Report

UNEXPECTED = 3
LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


def main() -> None:
    """The entry point."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    sys.exit(run_command(sys.argv[1:]))


def run_command(argv: Sequence[str]) -> int:
    """Run one command line; the exit code."""
    try:
        line = parse(argv)
    except click.exceptions.Exit as done:
        return done.exit_code
    with _results_stream(line.command.json) as out:
        from verifiers.cli.summary import Report

        report = Report()
        try:
            _Command(line, list(argv), report, out).run()
        except KeyboardInterrupt:
            report.exit_code = 130
        except BrokenPipeError:  # the reader of our stdout left; there is nobody to tell
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        except Exception as error:  # noqa: BLE001 - the last handler: every failure becomes one paragraph and a code
            _fail(report, error, line.command.verbose)
        if line.command.json:
            print(report.to_json(), file=out)
    return report.exit_code


class _Command:
    """One command line being carried out."""

    def __init__(self, line: CommandLine, argv: list[str], report: Report, out: TextIO):
        self.line, self.argv, self.report, self.out = line, argv, report, out
        self.command = line.command
        self.remaining: list[Prepared] = []

    def run(self) -> None:
        """Everything in order; failures raise."""
        entries = resolve(self.line)
        if self.command.dump_config:
            from verifiers.cli.models import named

            print(dump([(env_id, named(settings)) for env_id, settings in entries]), end="", file=self.out)
            return
        from verifiers.cli.display import make_display
        from verifiers.dual import run_in_private_loop

        display = make_display(self.command.progress, self.command.quiet)
        with _logging_to(display, self.command.verbose, self.command.quiet):
            prepared = _prepare_all(entries)
            for note in dict.fromkeys(p.choice.note for p in prepared if p.choice.note):
                display.note(note)
            if self.command.dry_run:
                print("\n".join(line for p in prepared for line in p.plan_lines()), file=self.out)
                return
            self.remaining = prepared
            run_in_private_loop(lambda: self._supervised(display))

    async def _supervised(self, display: Display) -> None:
        from verifiers.cli.display import ticking
        from verifiers.cli.interrupt import interruptible

        task = asyncio.current_task()
        assert task is not None
        with interruptible(task, display.note) as interrupt:
            try:
                async with ticking(display):
                    await self._evaluate_all(display)
            except asyncio.CancelledError:
                if interrupt.signum is None:
                    raise
                self.report.exit_code = interrupt.exit_code
                display.finish(interrupt.exit_code)
                self._say_how_to_resume("interrupted")

    async def _evaluate_all(self, display: Display) -> None:
        clients = {id(p.choice.client): p.choice.client for p in self.remaining}
        try:
            await _connect_all(self.remaining, display)
            while self.remaining:
                await self._evaluate(self.remaining[0], display)
                self.remaining = self.remaining[1:]
        finally:
            for client in clients.values():
                if hasattr(client, "aclose"):
                    await client.aclose()

    async def _evaluate(self, prepared: Prepared, display: Display) -> None:
        """One run; a ``RunError`` is reported and the next run goes on."""
        from verifiers.run_directory import is_complete
        from verifiers.runner import Progress

        prepared.locate()  # again: an earlier entry may have taken the place
        progress = Progress()
        if prepared.path is not None and prepared.path.exists():
            state = "complete already" if is_complete(prepared.path) else "unfinished; it goes on"
            display.note(f"{prepared.env_id}: the run in {prepared.path} is {state}")
        path = None if prepared.path is None else str(prepared.path)
        display.begin(prepared.label, progress, {"env_id": prepared.env_id, "model": prepared.choice.model, "path": path})
        try:
            results = await prepared.env.a_evaluate(
                client=prepared.choice.client,
                model=prepared.choice.model,
                sampling_args=prepared.settings.sampling(),
                num_examples=prepared.settings.num_examples,
                rollouts_per_example=prepared.settings.rollouts_per_example,
                results_path=prepared.path,
                preflight=not prepared.checked,
                progress=progress,
                on_progress=lambda outputs, _: display.rows(outputs),
                **prepared.options(),
            )
        except (RunError, UsageError) as error:
            display.finish(error.exit_code)
            _fail(self.report, error, self.command.verbose)
            if isinstance(error, RunError) and progress.done:
                self._say_how_to_resume("stopped")
            return
        verdict = _verdict(prepared, results)
        display.finish(UNEXPECTED if verdict else 0)
        self._show(prepared, results)
        if verdict:
            _fail(self.report, RunError(f"{prepared.env_id}: {verdict}"), self.command.verbose)

    def _show(self, prepared: Prepared, results: Any) -> None:
        from verifiers.cli.summary import print_summary, run_facts

        self.report.runs.append(run_facts(results))
        if not self.command.json:
            if len(self.report.runs) > 1:
                print(file=self.out)
            notes = _notes(prepared)
            print_summary(results, samples=not self.command.abbreviated_summary, notes=notes, stream=self.out)
            self.out.flush()

    def _say_how_to_resume(self, what: str) -> None:
        """What is kept, and the command that goes on."""
        current = self.remaining[0]
        if current.path is None or not current.path.exists():
            print(f"vf-eval: {what}; nothing was saved", file=sys.stderr)
            return
        words = [word for word in self.argv if word != "--fresh"]
        left = [prepared.env_id for prepared in self.remaining]
        if self.line.targets and len(left) < len(self.line.targets):
            words = [",".join(left) if word.split(",")[: len(self.line.targets)] == self.line.targets else word for word in words]
        if current.settings.fresh and len(left) == 1:
            words += ["--resume", str(current.path)]
        command = shlex.join(["vf-eval", *words])
        print(f"vf-eval: {what}; finished rollouts are in {current.path}\nto go on: {command}", file=sys.stderr)


# --- before the run -------------------------------------------------------------------------------------------------


def resolve(line: CommandLine) -> list[tuple[str, EvalSettings]]:
    """The evaluations a command line asks for, each with all its settings.

    Precedence, high to low: flags, dotted keys, ``[[eval]]``, the file's top level, the environment's own defaults.
    Raises: ``ConfigError`` that names everything wrong, or the one error there is.
    """
    from verifiers.cli.planning import check_loader, from_run, offer_folder

    file = read_files(line.files)
    problems: list[str | VerifiersError] = [*line.problems, *file.problems]
    if file.entries and line.targets:
        problems.append(f"{line.targets[0]!r} and the [[eval]] of a file both say what to evaluate; give one of them")
    entries = file.entries or [Entry(env_id) for env_id in line.targets]
    if not entries and not problems:
        problems.append(_nothing_to_evaluate(line))
    resolved: list[tuple[str, EvalSettings]] = []
    for entry in entries:
        given = layered(layered(layered(file.common, entry.given), line.dotted), line.given)
        try:
            offer_folder(entry.env_id, given.get("env_dir_path", EvalSettings().env_dir_path))
            broken: list[str] = []
            given = layered(environment_defaults(entry.env_id, broken), given)
            problems += broken
            check_loader(entry.env_id, given.get("env_args", {}))
            settings = from_run(EvalSettings(**given), given)
        except UsageError as error:
            problems.append(error)
            settings = EvalSettings(**given)
        problems += contradictions(settings)
        resolved.append((entry.env_id, settings))
    _raise_together(problems)
    return resolved


def _raise_together(problems: Sequence[str | VerifiersError]) -> None:
    """One error as it is; several as one ``ConfigError`` with a line for each."""
    texts = list(dict.fromkeys(map(str, problems)))
    if len(texts) == 1 and isinstance(problems[0], VerifiersError):
        raise problems[0]
    if texts:
        lines = texts[0] if len(texts) == 1 else "".join(f"\n  {text}" for text in texts)
        raise ConfigError(lines if len(texts) == 1 else f"{len(texts)} things to correct:{lines}", names=texts)


def _nothing_to_evaluate(line: CommandLine) -> str:
    from verifiers.registry import list_environments

    if line.files:
        return f"{', '.join(line.files)} has no [[eval]]: add one with an env_id, or name an environment"
    installed = ", ".join(info.id for info in list_environments()) or "none; vf-install installs one"
    hint = f" (--resume took {line.given['resume']!r} for its folder)" if line.given.get("resume") else ""
    return f"name an environment: vf-eval ENV_ID{hint}; installed: {installed}"


def _prepare_all(entries: Sequence[tuple[str, EvalSettings]]) -> list[Prepared]:
    """Load, choose and plan every entry; contacts nobody. Raises: everything wrong together."""
    from verifiers.cli.models import Choice, choose
    from verifiers.cli.planning import load, prepare

    prepared: list[Prepared] = []
    problems: list[str | VerifiersError] = []
    choices: dict[str, Choice] = {}
    for env_id, settings in entries:
        who = repr((settings.model, settings.api_base_url, settings.api_key_var, settings.api_client_type,
                    settings.endpoints_path, settings.header))  # fmt: skip
        try:
            env = load(env_id, settings)
            if who not in choices:
                choices[who] = choose(settings)
            prepared.append(prepare(env_id, env, settings, choices[who]))
        except UsageError as error:
            problems.append(error)
    _raise_together(problems)
    return prepared


async def _connect_all(prepared: Sequence[Prepared], display: Display) -> None:
    """Ask every endpoint for its model, where nobody named it, and whether it is there, once each."""
    asked: dict[int, Any] = {}
    for run in prepared:
        client = run.choice.client
        if run.choice.model is None:
            if id(client) not in asked:
                asked[id(client)] = await run.choice.ask()
                display.note(asked[id(client)].note)
            run.choice = asked[id(client)]
            run.locate()
    warned: dict[tuple[int, str | None], str | None] = {}
    for run in prepared:
        who = (id(run.choice.client), run.choice.model)
        if who in warned:
            run.checked = True
            continue
        warning = await run.connect()
        if run.checked:
            warned[who] = warning
        if warning:
            display.warn(warning)


# --- after the run --------------------------------------------------------------------------------------------------


def _verdict(prepared: Prepared, results: Any) -> str | None:
    """Why a run that came to its end has failed all the same; None when it has not."""
    facts = results.metadata
    if not facts.num_rollouts:
        return None
    if facts.avg_error > prepared.settings.max_error_rate:
        return f"{facts.avg_error:.0%} of the rollouts ended in an error, more than --max-error-rate allows"
    nothing_scored = all(reward != reward for reward in results["rewards"])
    if nothing_scored and prepared.env.score_rollouts:
        first = next((error for error in results["errors"] if error is not None), None)
        why = f": {first['error']}: {first['message']}" if first else ""
        return f"not one of {facts.num_rollouts} rollouts could be scored{why}"
    return None


def _notes(prepared: Prepared) -> list[str]:
    local = getattr(prepared.choice.client, "local_model", None)
    if local is None:
        return []
    facts = local.describe()
    return [
        f"a small local model ({facts['file']}, {facts['quantisation']}, sha256 {facts['sha256'][:12]}); its scores are "
        "no statement about the environment"
    ]


def _fail(report: Report, error: BaseException, verbose: bool) -> None:
    """Say an error in one paragraph, and keep the worst exit code and the first error."""
    from verifiers.cli.summary import error_facts
    from verifiers.messages import escape_control
    from verifiers.redaction import redacted_text

    known = isinstance(error, VerifiersError)
    said = str(error) if known else f"unexpected {type(error).__name__}: {error} (-v shows where)"
    message = escape_control(redacted_text(said))
    if verbose:
        print(redacted_text("".join(traceback.format_exception(error))), file=sys.stderr)
    print(f"vf-eval: {message}", file=sys.stderr)
    report.exit_code = max(report.exit_code, error.exit_code if known else UNEXPECTED)
    report.error = report.error or error_facts(error, message)


@contextlib.contextmanager
def _results_stream(json_only: bool) -> Iterator[TextIO]:
    """Where results go. With ``json_only`` whatever else is printed to stdout, by anybody, goes to stderr."""
    if not json_only:
        yield sys.stdout
        return
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    with os.fdopen(os.dup(kept), "w", encoding="utf-8") as out:
        try:
            with contextlib.redirect_stdout(sys.stderr):
                yield out
        finally:
            out.flush()
            os.dup2(kept, 1)
            os.close(kept)


@contextlib.contextmanager
def _logging_to(display: Display, verbose: bool, quiet: bool) -> Iterator[None]:
    """Show the messages of the ``verifiers`` logger from the level that was asked for. Raises: ``ConfigError``."""
    import logging

    from verifiers.cli.display import LogHandler

    named = os.environ.get("VF_LOG_LEVEL", "").upper()
    if named and named not in LOG_LEVELS:
        raise ConfigError(f"VF_LOG_LEVEL is {named!r}; it must be one of {', '.join(LOG_LEVELS)}")
    logger, handler = logging.getLogger("verifiers"), LogHandler(display)
    level = "DEBUG" if verbose else "ERROR" if quiet else named or "WARNING"
    before = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(level)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before[0])
        logger.propagate = before[1]


if __name__ == "__main__":
    main()
