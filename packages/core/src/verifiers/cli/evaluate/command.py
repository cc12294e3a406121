"""``vf-eval``: evaluate a model in one or several environments; the same command resumes an
interrupted run.

Every problem of the command, its files, the environments, the endpoint and the output folder is
reported in one paragraph before the first rollout. Results go to stdout, everything else to stderr.
Heavy modules are imported after the command line has been parsed, so that ``--help`` is fast.
"""

from __future__ import annotations

import asyncio
import math
import shlex
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TextIO

import click

from verifiers.cli.common.completion import begin
from verifiers.cli.common.reader import raise_together
from verifiers.cli.common.streams import (
    HAS_FINDINGS,
    INTERRUPTED,
    UNEXPECTED,
    discard_stdout,
    fail,
    results_stream,
)
from verifiers.cli.evaluate.arguments import CommandLine, click_command, parse
from verifiers.cli.evaluate.entries import resolve
from verifiers.cli.evaluate.options import Evaluation
from verifiers.errors import BudgetExhausted, RunError, UsageError, VerifiersError

if TYPE_CHECKING:
    from verifiers.cli.evaluate.display import Display
    from verifiers.cli.evaluate.exporting import Exports
    from verifiers.cli.evaluate.planning import Prepared
    from verifiers.cli.evaluate.sets import CommandSet
    from verifiers.cli.evaluate.summary import Report
    from verifiers.results.outputs import GenerateOutputs
    from verifiers.runs.rollout import Progress


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


class _Command:
    """Executes one command line."""

    def __init__(self, line: CommandLine, argv: list[str], report: Report, out: TextIO):
        self.line, self.argv, self.report, self.out = line, argv, report, out
        self.command = line.command
        self.remaining: list[Prepared] = []
        self.facts: dict[int, Mapping[str, Any]] = {}
        """Index of a run that has results -> its facts."""
        self.runs: CommandSet
        """All runs of the command."""

    def run(self) -> None:
        """Run all steps in order. *Raises* the error of the first that fails."""
        if self.command.schema:
            from verifiers.cli.evaluate.schema import eval_schema

            raise_together(self.line.problems)
            self._print("file_schema", eval_schema())
            return
        if self.command.replay is not None:
            self._replay(self.command.replay)
            return
        evaluations = resolve(self.line)
        if self.command.dump_config:
            from verifiers.cli.evaluate.models import with_names
            from verifiers.cli.evaluate.toml_args import dump

            runs = [
                (evaluation.env_id, with_names(evaluation.settings)) for evaluation in evaluations
            ]
            self._print("config", dump(runs))
            return
        from verifiers.cli.evaluate.display import logging_to, make_display
        from verifiers.runtime.calls import run_in_private_loop

        display = make_display(self.command.progress, self.command.quiet)
        if self.command.check:
            from verifiers.cli.evaluate.checking import check_all

            # the reports contain the logged messages
            with logging_to(display, self.command.verbose, quiet=True):
                check_all(evaluations, display)
        with logging_to(display, self.command.verbose, self.command.quiet):
            from verifiers.cli.evaluate.sets import CommandSet

            self.runs = CommandSet.of(self.line, evaluations)
            prepared = _prepare_all(evaluations, self.runs)
            for note in dict.fromkeys(p.choice.note for p in prepared if p.choice.note):
                display.note(note)
            if self.command.detect is not None:
                from verifiers.cli.evaluate.detecting import detect_lines

                self._print("detect", "\n".join(detect_lines(prepared, self.command.detect)))
                return
            if self.command.dry_run:
                lines = [] if self.runs.planned is None else [self.runs.line(), ""]
                lines += [line for p in prepared for line in p.plan_lines()]
                self._print("plan", "\n".join(lines))
                return
            self.remaining = prepared
            run_in_private_loop(lambda: self._supervised(display))

    def _replay(self, reference: str) -> None:
        """Show the first difference between a saved rollout and what today's code makes of its
        replies. *Raises* ConfigError."""
        from verifiers.cli.evaluate.display import logging_to, make_display
        from verifiers.cli.evaluate.replay import SavedRollout, replayed
        from verifiers.runtime.calls import run_in_private_loop

        saved = SavedRollout.of(reference)
        evaluation = saved.evaluation(self.line)
        display = make_display("plain", self.command.quiet)
        with logging_to(display, self.command.verbose, self.command.quiet):
            replay = run_in_private_loop(lambda: replayed(saved, evaluation, self.line.flags))
        if replay.difference is not None:
            self.report.exit_code = HAS_FINDINGS
        if self.command.json:
            self.report.texts["replay"] = replay.to_json()
        else:
            print(f"{reference}: {replay}", file=self.out)

    def _print(self, key: str, text: str) -> None:
        """Output text that is the result: on stdout, or under ``key`` of the JSON object."""
        if self.command.json:
            self.report.texts[key] = text
        else:
            print(text.rstrip("\n"), file=self.out)

    async def _supervised(self, display: Display) -> None:
        from verifiers.cli.common.interrupt import interruptible
        from verifiers.cli.evaluate.display import ticking

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
        everything = tuple(self.remaining)
        try:
            await _connect_all(self.runs, display)
            if note := self.runs.open():
                display.note(note)
            display.plan([p.label for p in everything], [p.num_rollouts for p in everything])
            while self.remaining:
                await self._evaluate(self.remaining[0], display)
                self.remaining = self.remaining[1:]
            self._show_table()
        finally:
            if len(everything) > 1 or self.runs.is_set:
                self.report.set = self.runs.facts()
            self.runs.close()
            await _close_all(everything, display)

    async def _evaluate(self, prepared: Prepared, display: Display) -> None:
        """A run; a ``RunError`` is reported and the next run starts. A complete run of a set is
        read from disk."""
        from verifiers.cli.evaluate.exporting import Exports
        from verifiers.runs.rollout import Progress

        if self.runs.is_exhausted and not self.runs.has_results(prepared):
            return
        progress, exports = Progress(), Exports(prepared.env_id, prepared.settings.export)
        try:
            prepared.locate()  # again: an earlier entry may have created the same directory
            exports.folder = prepared.path or exports.folder
            if self.runs.has_results(prepared):
                results = await self._read(prepared, display, progress, exports)
            else:
                limits = self.runs.left_for(prepared)
                if limits is None:
                    self._end_spent()
                    return
                options = {**prepared.options(), **limits, **self.runs.repeats(prepared)}
                results = await self._run(prepared, display, progress, exports, options)
        except (RunError, UsageError) as error:
            display.finish(error.exit_code)
            self._fail(error, prepared)
            if exports.results is not None:  # the run counts
                self._show(prepared, exports.results, progress, None)
            self.runs.note_spent(prepared, None)
            if isinstance(error, RunError) and progress.done and not self.runs.is_set:
                self._say_how_to_resume("stopped")
            return
        self.runs.note_spent(prepared, results.metadata.spent)
        verdict = _verdict(prepared, results)
        display.finish(UNEXPECTED if verdict else 0)
        self._show(prepared, results, progress, exports.written)
        self.runs.note_complete(prepared)
        if verdict:
            self._fail(RunError(f"{prepared.env_id}: {verdict}"), prepared)

    def _end_spent(self) -> None:
        """Nothing is left of the limits of all runs: none begins."""
        self.runs.is_exhausted = True
        error = BudgetExhausted(self.runs.exhausted())
        self.report.failed(*fail(error, command="vf-eval", verbose=self.command.verbose))

    async def _read(
        self, prepared: Prepared, display: Display, progress: Progress, exports: Exports
    ) -> GenerateOutputs:
        """A complete run of a set, as it is on disk, with the copies that the command asks for."""
        from verifiers.results.loading import load_results
        from verifiers.runs.copies import hand_over
        from verifiers.runs.options import parse

        assert prepared.path is not None
        results = load_results(prepared.path)
        progress.total = progress.done = progress.resumed = results.metadata.num_rollouts
        display.begin(prepared.label, progress, _event_facts(prepared))
        options, _ = parse(prepared.env, {**prepared.options(), "on_results": exports})
        await hand_over(results, options)
        return results

    async def _run(
        self,
        prepared: Prepared,
        display: Display,
        progress: Progress,
        exports: Exports,
        options: Mapping[str, Any],
    ) -> GenerateOutputs:
        from verifiers.storage.directory import is_complete

        if prepared.path is not None and prepared.path.exists():
            state = "complete already" if is_complete(prepared.path) else "unfinished; resuming it"
            display.note(f"{prepared.env_id}: the run in {prepared.path} is {state}")
        display.begin(prepared.label, progress, _event_facts(prepared))
        results: GenerateOutputs = await prepared.env.a_evaluate(
            client=prepared.choice.client,
            model=prepared.choice.model,
            sampling_args=prepared.settings.sampling(),
            num_examples=prepared.settings.num_examples,
            rollouts_per_example=prepared.settings.rollouts_per_example,
            results_path=prepared.path,
            preflight=not prepared.checked,
            progress=progress,
            on_progress=lambda outputs, _: display.rows(outputs),
            on_results=exports,
            **options,
        )
        return results

    def _show(
        self,
        prepared: Prepared,
        results: GenerateOutputs,
        progress: Progress,
        exported: Mapping[str, str] | None,
    ) -> None:
        from verifiers.cli.evaluate.summary import print_summary, run_facts, throughput
        from verifiers.clients.payload import left_to_server

        rates = throughput(
            progress.done - progress.resumed, progress.output_tokens, results.metadata["time"]
        )
        summary = results.summary()
        sent = {**prepared.env.sampling_args, **prepared.settings.sampling()}
        facts = run_facts(
            results,
            summary,
            throughput=rates,
            exported=exported,
            left_to_server=left_to_server(sent, results.metadata["base_url"]),
        )
        self.report.runs.append(facts)
        # the id that was typed tells two files of a name apart
        self.facts[self.runs.prepared.index(prepared)] = {**facts, "env_id": prepared.env_id}
        if not self.command.json:
            if len(self.report.runs) > 1:
                print(file=self.out)
            notes = _notes(prepared, results)
            samples = not self.command.abbreviated_summary
            print_summary(
                results, facts, samples=samples, notes=notes, stream=self.out, summary=summary
            )
            self.out.flush()

    def _show_table(self) -> None:
        """A line for each run of the command, when there are several, and the set."""
        from verifiers.cli.evaluate.summary import print_table, table_rows
        from verifiers.runtime.redaction import redacted

        prepared = self.runs.prepared
        if self.runs.is_set and not self.command.json:
            print(f"\n{self.runs.line()}", file=self.out)
        if not self.command.json and len(prepared) > 1:
            facts = [
                self.facts.get(index, {"env_id": run.env_id, "model": run.choice.model})
                for index, run in enumerate(prepared)
            ]
            varied = [redacted(run.evaluation.combination) for run in prepared]
            print(file=self.out)
            print_table(table_rows(facts, varied, self.runs.states), self.out)
        if self.runs.is_set and not self.runs.is_done:
            self._say_how_to_repeat()

    def _fail(self, error: VerifiersError, prepared: Prepared) -> None:
        code, facts = fail(error, command="vf-eval", verbose=self.command.verbose)
        self.report.failed(code, facts)
        self.runs.note_failure(prepared, code, facts)

    def _say_how_to_repeat(self) -> None:
        """Print the command that runs what failed or is pending, and nothing else."""
        is_pending = not self.runs.is_complete
        words = self._words() + ([] if is_pending else ["--retry-errors"])
        what = "what failed or is pending" if is_pending else "the rollouts with errors"
        print(f"to run {what}, and nothing else: {self._command(words)}", file=sys.stderr)

    def _words(self) -> list[str]:
        """The words of the command, without those that begin a new run."""
        words = [word for word in self.argv if word not in ("--fresh", "--new")]
        is_fresh = self.runs.prepared[0].settings.fresh
        return [*words, "--no-fresh"] if self.line.files and is_fresh else words  # a file set it

    def _command(self, words: list[str]) -> str:
        from verifiers.runtime.redaction import HIDDEN, redacted_words

        command = shlex.join(["vf-eval", *redacted_words(words)])
        hint = f"\nvf-eval: write the secrets again where {HIDDEN} stands"
        return command + (hint if HIDDEN in command else "")

    def _say_how_to_resume(self, what: str) -> None:
        """Print where the finished rollouts are, and the command that resumes the run."""
        if not self.remaining:
            print(f"vf-eval: {what}; every run is complete", file=sys.stderr)
            return
        current, words = self.remaining[0], self._words()
        if self.runs.is_set and self.runs.is_open:
            print(
                f"vf-eval: {what}; {self.runs.line()}\nto resume: {self._command(words)}",
                file=sys.stderr,
            )
            return
        if current.path is None or not current.path.exists():
            print(f"vf-eval: {what}; nothing was saved", file=sys.stderr)
            return
        env_ids, targets = [prepared.env_id for prepared in self.remaining], self.line.targets
        if targets and len(env_ids) < len(targets):
            words = [",".join(env_ids) if word.split(",") == targets else word for word in words]
        if current.settings.fresh and len(env_ids) == 1:
            words += ["--resume", str(current.path)]
        print(
            f"vf-eval: {what}; finished rollouts are in {current.path}"
            f"\nto resume: {self._command(words)}",
            file=sys.stderr,
        )


# --- before the run -------------------------------------------------------------------------------


def _prepare_all(evaluations: Sequence[Evaluation], runs: CommandSet) -> list[Prepared]:
    """Load, choose and plan every evaluation; sends no request. *Raises* all problems together."""
    from verifiers.cli.evaluate.models import Choice, choose
    from verifiers.cli.evaluate.planning import load, prepare

    prepared: list[Prepared] = []
    problems: list[str | VerifiersError] = []
    choices: dict[str, Choice] = {}
    for evaluation in evaluations:
        settings = evaluation.settings
        endpoint = repr((settings.model, settings.api_base_url, settings.api_key_var, settings.api_client_type,
                         settings.endpoints_path, settings.header, settings.header_from_state))  # fmt: skip
        try:
            env = load(evaluation.env_id, settings)
            if endpoint not in choices:
                choices[endpoint] = choose(settings)
            prepared.append(prepare(evaluation, env, choices[endpoint], runs.is_set))
        except UsageError as error:
            problems.append(error)
    raise_together(problems)
    runs.locate(prepared)
    return prepared


def _event_facts(prepared: Prepared) -> dict[str, object]:
    path = None if prepared.path is None else str(prepared.path)
    return {"env_id": prepared.env_id, "model": prepared.choice.model, "path": path}


async def _connect_all(runs: CommandSet, display: Display) -> None:
    """Query every endpoint once: for its model if none was named, and whether it is reachable."""
    prepared = runs.prepared
    answers: dict[int, Any] = {}
    for run in prepared:
        client = run.choice.client
        if run.choice.model is None:
            if id(client) not in answers:
                answers[id(client)] = await run.choice.ask()
                display.note(answers[id(client)].note)
            run.choice = answers[id(client)]
            run.locate()
    if answers:
        runs.locate(prepared)
    connected: set[tuple[int, str | None]] = set()
    for run in prepared:
        endpoint = (id(run.choice.client), run.choice.model)
        if endpoint in connected:
            run.checked = True
            continue
        warning = await run.connect()
        if run.checked:
            connected.add(endpoint)
        if warning:
            display.warn(warning)


async def _close_all(prepared: Sequence[Prepared], display: Display) -> None:
    """Run the environments' teardown handlers and close every client's connections."""
    for run in prepared:
        try:
            await run.env.aclose()
        except Exception as error:  # noqa: BLE001 - author code; results are already saved and printed
            display.warn(f"the teardown of {run.env_id} raised {type(error).__name__}: {error}")
    for client in {id(run.choice.client): run.choice.client for run in prepared}.values():
        await client.aclose()


# --- after the run --------------------------------------------------------------------------------


def _verdict(prepared: Prepared, results: GenerateOutputs) -> str | None:
    """Why a completed run counts as failed; None when it does not."""
    from verifiers.results.run_metadata import errors_by_cause, unscored_by_function

    facts = results.metadata
    if not facts.num_rollouts:
        return None
    if facts.avg_error > (limit := prepared.settings.max_error_rate):
        return (
            f"{facts.avg_error:.0%} of the rollouts ended in an error; --max-error-rate allows"
            f" {limit:.0%}"
        )
    if math.isnan(facts.avg_reward) and prepared.env.score_rollouts and prepared.env.has_reward:
        measured = results.measurements()
        causes = unscored_by_function(measured) | errors_by_cause(measured)
        counts = ", ".join(f"{count} x {cause}" for cause, count in causes.items())
        first = next((error for error in results["errors"] if error is not None), None)
        why = f"; the first: {first['error']}: {first['message']}" if first else ""
        return f"none of {facts.num_rollouts} rollouts could be scored: {counts}{why}"
    return None


def _notes(prepared: Prepared, results: GenerateOutputs) -> list[str]:
    notes = [f"the combination {prepared.varied} of the ablation"] if prepared.varied else []
    if changed := results.metadata.changed_code:
        when = "changed between two sessions of this run"
        notes.append(f"{', '.join(changed)} {when}: its mean is over both versions")
    if cached := results.metadata.cached:
        notes.append(
            f"{cached['hits']:,} of {cached['hits'] + cached['misses']:,} replies are from the"
            f" cache in {cached['folder']}; tokens and cost count them as if they had been sent"
        )
    if stopped := results.metadata.stopped:
        from verifiers.runs.stopping import Decision

        notes.append(Decision(**stopped).sentence())
    # a folder is the user's own model
    if (facts := results.metadata.local_model) and "quantisation" in facts:
        notes.append(
            f"a small local model ({facts['file']}, {facts['quantisation']}, sha256"
            f" {facts['sha256'][:12]}); its scores say little about the environment"
        )
    return notes


if __name__ == "__main__":
    main()
