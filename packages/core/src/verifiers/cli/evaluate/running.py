"""Run the evaluations of a command, one after the other: each is run or read, shown, and counted in its
set."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from verifiers.cli.common.interrupt import interruptible
from verifiers.cli.common.streams import UNEXPECTED, fail
from verifiers.cli.evaluate.arguments import CommandLine
from verifiers.cli.evaluate.continuing import Continuation
from verifiers.cli.evaluate.display import Display, ticking
from verifiers.cli.evaluate.exporting import Exports
from verifiers.cli.evaluate.planning import Prepared
from verifiers.cli.evaluate.preparing import close_all, connect_all
from verifiers.cli.evaluate.sets import FAILED, INTERRUPTED, CommandSet
from verifiers.cli.evaluate.summary import (
    Report,
    print_summary,
    print_table,
    run_facts,
    table_rows,
    throughput,
)
from verifiers.cli.evaluate.verdicts import notes_of, verdict_of
from verifiers.errors import BudgetExhausted, RunError, UsageError, VerifiersError
from verifiers.results.loading import load_results
from verifiers.results.outputs import GenerateOutputs
from verifiers.results.summary import RunSummary
from verifiers.runs.copies import hand_over
from verifiers.runs.options import parse
from verifiers.runs.rollout import Progress
from verifiers.runtime.redaction import redacted
from verifiers.storage.directory import is_complete


class Runner:
    """Runs what a command line has prepared."""

    def __init__(
        self,
        line: CommandLine,
        argv: Sequence[str],
        runs: CommandSet,
        display: Display,
        report: Report,
        out: TextIO,
    ):
        self.command, self.runs, self.display = line.command, runs, display
        self.report, self.out = report, out
        self.hints = Continuation(line, argv, runs)
        self.remaining = list(runs.prepared)
        """The runs that have not ended, the present one first."""
        self.facts: dict[int, RunSummary] = {}
        """Index of a run that has results -> its facts."""

    async def run(self) -> None:
        """Run all; Ctrl-C and SIGTERM end what is running, keep what is finished, and say how to go
        on."""
        task = asyncio.current_task()
        assert task is not None
        with interruptible(task, self.display.note) as interrupt:
            try:
                async with ticking(self.display):
                    await self._evaluate_all()
            except asyncio.CancelledError:
                if interrupt.signum is None:
                    raise
                self.report.exit_code = interrupt.exit_code
                self.display.finish(interrupt.exit_code)
                self.hints.say_how_to_resume("interrupted", self.remaining)

    async def _evaluate_all(self) -> None:
        everything = tuple(self.remaining)
        try:
            await connect_all(self.runs, self.display)
            if note := self.runs.open():
                self.display.note(note)
            self.display.plan([p.label for p in everything], [p.num_rollouts for p in everything])
            while self.remaining:
                await self._evaluate(self.remaining[0])
                self.remaining = self.remaining[1:]
            self._show_table()
        finally:
            if len(everything) > 1 or self.runs.is_set:
                self.report.set = self.runs.facts()
            self.runs.close()
            await close_all(everything, self.display)

    async def _evaluate(self, prepared: Prepared) -> None:
        """A run; a ``RunError`` is reported and the next run starts. A complete run of a set is
        read from disk."""
        if self.runs.used_up and not self.runs.has_results(prepared):
            return
        progress, exports = Progress(), Exports(prepared.env_id, prepared.settings.export)
        try:
            prepared.locate()  # again: an earlier entry may have created the same directory
            exports.folder = prepared.path or exports.folder
            if self.runs.has_results(prepared):
                results = await self._read(prepared, progress, exports)
            else:
                self.runs.used_up = self.runs.limit_reached()
                if self.runs.used_up:
                    self._report(BudgetExhausted(self.runs.exhausted()))
                    return
                options = {
                    **prepared.options(),
                    **self.runs.limits_of(prepared),
                    **self.runs.repeats(prepared),
                }
                results = await self._run(prepared, progress, exports, options)
        except (RunError, UsageError) as error:
            self.display.finish(error.exit_code)
            if isinstance(error, BudgetExhausted):
                self.runs.used_up = self.runs.limit_behind(prepared, error)
                if self.runs.used_up:
                    error = BudgetExhausted(self.runs.exhausted(error), **error.facts)
            self._fail(error, prepared)
            if exports.results is not None:  # the run counts
                self._show(prepared, exports.results, progress, None)
            self.runs.note_spent(prepared, None)
            if isinstance(error, RunError) and progress.done and not self.runs.is_set:
                self.hints.say_how_to_resume("stopped", self.remaining)
            return
        self.runs.note_spent(prepared, results.metadata.spent)
        verdict = verdict_of(prepared, results)
        self.display.finish(UNEXPECTED if verdict else 0)
        self._show(prepared, results, progress, exports.written)
        self.runs.note_complete(prepared)
        if verdict:
            self._fail(RunError(f"{prepared.env_id}: {verdict}"), prepared)

    async def _read(
        self, prepared: Prepared, progress: Progress, exports: Exports
    ) -> GenerateOutputs:
        """A complete run of a set, as it is on disk, with the copies that the command asks for."""
        assert prepared.path is not None
        results = load_results(prepared.path)
        progress.total = progress.done = progress.resumed = results.metadata.num_rollouts
        self.display.begin(prepared.label, progress, prepared.labels)
        options, _ = parse(prepared.env, {**prepared.options(), "on_results": exports})
        await hand_over(results, options)
        return results

    async def _run(
        self,
        prepared: Prepared,
        progress: Progress,
        exports: Exports,
        options: Mapping[str, Any],
    ) -> GenerateOutputs:
        if prepared.path is not None and prepared.path.exists():
            state = "complete already" if is_complete(prepared.path) else "unfinished; resuming it"
            self.display.note(f"{prepared.env_id}: the run in {prepared.path} is {state}")
        self.display.begin(prepared.label, progress, prepared.labels)
        results: GenerateOutputs = await prepared.env.a_evaluate(
            client=prepared.choice.client,
            model=prepared.choice.model,
            sampling_args=prepared.settings.sampling(),
            num_examples=prepared.settings.num_examples,
            rollouts_per_example=prepared.settings.rollouts_per_example,
            results_path=prepared.path,
            preflight=not prepared.checked,
            progress=progress,
            on_progress=lambda outputs, _: self.display.rows(outputs),
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
        rates = throughput(
            progress.done - progress.resumed, progress.output_tokens, results.metadata["time"]
        )
        sent = {**prepared.env.sampling_args, **prepared.settings.sampling()}
        facts = run_facts(results, throughput=rates, exported=exported, sent=sent)
        self.report.runs.append(facts)
        self.facts[self.runs.prepared.index(prepared)] = facts
        if not self.command.json:
            if len(self.report.runs) > 1:
                print(file=self.out)
            notes = notes_of(prepared, results)
            samples = not self.command.abbreviated_summary
            print_summary(results, facts, samples=samples, notes=notes, stream=self.out)
            self.out.flush()

    def _show_table(self) -> None:
        """A line for each run of the command, when there are several, and the set."""
        prepared = self.runs.prepared
        if self.runs.is_set and not self.command.json:
            print(f"\n{self.runs.line()}", file=self.out)
        if not self.command.json and len(prepared) > 1:
            facts = [self.facts.get(index) for index in range(len(prepared))]
            labels = [
                {
                    **redacted(run.evaluation.combination),
                    "env_id": run.env_id,  # as it was typed: it tells two files of a name apart
                    "model": run.choice.model if summary is None else summary["model"],
                }
                for run, summary in zip(prepared, facts, strict=True)
            ]
            print(file=self.out)
            print_table(table_rows(facts, labels, self.runs.states), self.out)
        if self.runs.is_set and not self.runs.is_done:
            self.hints.say_how_to_repeat()

    def _fail(self, error: VerifiersError, prepared: Prepared) -> None:
        is_limit = isinstance(error, BudgetExhausted) and error.is_of_options
        state = INTERRUPTED if is_limit else FAILED
        self.runs.note_end(prepared, *self._report(error), state)

    def _report(self, error: VerifiersError) -> tuple[int, dict[str, object]]:
        code, facts = fail(error, command="vf-eval", verbose=self.command.verbose)
        self.report.failed(code, facts)
        return code, facts
