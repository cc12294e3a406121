"""The finished rollouts of a run, with or without a journal, by their index in the plan.

A rollout is acknowledged (counted, reported, returned) only after its bytes are durable, where
there is a journal. Those of an earlier run and of this run are returned in the same format. Those
of a large run are not held in memory: ``large_store``.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from verifiers.errors import JournalError
from verifiers.results import GenerateMetadata, GenerateOutputs, fill_advantages
from verifiers.results.branches import whole_rows, without_copies
from verifiers.results.coverage import FIRST, Coverage
from verifiers.results.rows import (
    DISK_FIELDS,
    RolloutOutput,
    output_to_state,
    row_for_disk,
    saved_row,
    set_advantage,
    state_to_output,
)
from verifiers.results.run_metadata import Measurements
from verifiers.rollouts.author_code import maybe_await
from verifiers.rollouts.rollout import Rollout
from verifiers.rollouts.state import State
from verifiers.runs.plan import Job, Pending, Plan
from verifiers.runtime.calls import num_positional
from verifiers.storage.configurations import rollout_key
from verifiers.storage.directory import RunDirectory
from verifiers.storage.journal import Journal

METADATA_EVERY_S = 10.0
"""Seconds between writes of ``metadata.json`` during a run."""
REPORT_EVERY_S = 1.0
"""Seconds between updates of the metadata passed to ``on_progress``."""
COST_SHARE = 0.02
"""Largest share of the run time spent on computing metadata; a long run computes it less often."""
SERVED_MODELS = "served_models"
"""Column of a rollout, and fact of a run: names under which the server answered, where the
requested name is not all."""
LARGE_PLAN = 20_000
"""Rollouts of a plan from which on they are not held."""


def is_large(plan: Plan, directory: RunDirectory | None, keep_states: bool) -> bool:
    """Whether the rollouts of a run are not held: where the run is saved and its states are not
    kept."""
    return directory is not None and not keep_states and len(plan) >= LARGE_PLAN


class RunStore:
    """The finished rollouts (and states) of a run; ``metadata(rows, status)`` summarises them."""

    def __init__(
        self,
        plan: Plan,
        metadata: Callable[[RunStore, Measurements, str], GenerateMetadata],
        logger: logging.Logger,
        directory: RunDirectory | None = None,
        *,
        state_columns: Sequence[str] = (),
        keep_states: bool = False,
        fills_advantages: bool = True,
        on_progress: Callable[..., object] | Sequence[Callable[..., object]] | None = None,
        on_first: Callable[[RunStore], Awaitable[None]] | None = None,
    ):
        self.plan, self.logger, self.directory = plan, logger, directory
        self.state_columns, self.keep_states = state_columns, keep_states
        self.fills_advantages, self.on_progress = fills_advantages, on_progress
        self.journal: Journal | None = None
        self.work: Pending | None = None
        """What is pending, once the plan was compared with what is saved."""
        self.saved: dict[str, tuple[int, Mapping[str, Any]]] = {}
        """Key -> (line, row) of the newest saved rollouts; those of the plan move to ``rows``."""
        self.num_saved = 0
        """Different rollouts that were saved before this run."""
        self.rows: dict[int, RolloutOutput] = {}
        """By index in the plan."""
        self.states: dict[int, State] = {}
        self.num_turns = 0
        """Model turns stored by this call."""
        self.without_tokens: Counter[str] = Counter()
        """Reason -> stored turns without token data."""
        self.coverage, self._on_first = Coverage(), on_first
        self._metadata_of = metadata
        self._metadata: GenerateMetadata | None = None
        self._next_report = 0.0
        self._next_write = time.monotonic() + METADATA_EVERY_S

    def open(self, stack: ExitStack) -> None:
        """Open the journal, and read what is saved there. *Raises* JournalError for damage."""
        if self.directory is None:
            return
        file, rows = self.directory.results_file, list[dict[str, Any]]()
        self.journal = stack.enter_context(self.directory.open_journal(rows.append))
        for line, row in enumerate(whole_rows(rows, str(file)), 1):
            if not isinstance(key := row.get("rollout_key"), str):
                raise no_key(file, line)
            self.saved[key] = line, row
        self.num_saved = len(self.saved)

    def find(self, keys: Sequence[str]) -> Sequence[Any]:
        """See ``Saved``: each with its line."""
        return [self.saved.pop(key, None) for key in keys]

    def has_error(self, rollout: Any) -> bool:
        """See ``Saved``."""
        return bool(rollout[1].get("error"))

    def take(self, position: int, example_id: int, rollout: Any) -> None:
        """Add a saved rollout of an earlier run, matched by content; the index of its example may
        differ.

        *Raises* JournalError that names the line of a row of another shape.
        """
        assert self.directory is not None
        line, row = rollout
        output = saved_row(row, f"{self.directory.results_file}:{line}")
        self.coverage.add(Rollout.from_json(output), row.get("attempts") or 1)
        for name in DISK_FIELDS:
            output.pop(name, None)
        output["example_id"] = example_id
        self.rows[position] = output

    def outside(self) -> list[str]:
        """Keys of saved rollouts that ``find`` was not asked for."""
        return list(self.saved)

    def in_order(self) -> list[RolloutOutput]:
        """The finished rollouts, in the order of the plan."""
        return [self.rows[index] for index in sorted(self.rows)]

    def measurements(self) -> Measurements:
        """What the statistics need of the finished rollouts."""
        return Measurements.of(self.in_order())

    def served_models(self, requested: str) -> dict[str, int]:
        """Name of a model -> rollouts that it answered; empty when all were answered under the
        requested name."""
        plain = [requested]
        names = [row.get(SERVED_MODELS) or plain for row in self.rows.values() if row["completion"]]
        return other_than(requested, Counter(itertools.chain.from_iterable(names)))

    def metadata(self, status: str) -> GenerateMetadata:
        """Statistics of the finished rollouts, and facts of the run."""
        return self._metadata_of(self, self.measurements(), status)

    async def store(self, jobs: list[Job], states: list[State]) -> None:
        """Return once these are durable; several are stored atomically."""
        outputs = [state_to_output(state, self.state_columns) for state in states]
        for output, state in zip(outputs, states, strict=True):
            if names := self._note_turns(state):
                output[SERVED_MODELS] = names
        if self.journal is not None:
            together = zip(outputs, jobs, states, strict=True)
            rows = [
                row_for_disk(output, job.example.hash, job.sibling, state.attempts)
                for output, job, state in together
            ]
            await self.journal.append(without_copies(rows))
        self._keep(jobs, outputs, states)
        for state in states:
            self.coverage.add(state.record, state.attempts)
        if self._on_first is not None and self.coverage.rollouts >= FIRST:
            look, self._on_first = self._on_first, None
            await look(self)
        if self.on_progress is not None or time.monotonic() >= self._next_write:
            await self._report(jobs, outputs)

    def _keep(self, jobs: list[Job], outputs: list[RolloutOutput], states: list[State]) -> None:
        """Add rollouts that are durable."""
        for output, job, state in zip(outputs, jobs, states, strict=True):
            self.rows[job.position] = output
            if self.keep_states:
                self.states[job.position] = state

    def _note_turns(self, state: State) -> list[str]:
        """Count the turns, and those without tokens, by reason.

        Returns the names under which the server answered; none when each is the requested name.
        """
        turns, requested = state.record.transcript.turns, state.record.model
        self.num_turns += len(turns)
        names: set[str] = set()
        for turn in turns:
            if model := getattr(turn.response, "model", ""):
                names.add(str(model))
            # by the texts of the tokens
            if not turn.has_tokens and not turn.extras.get("logprobs"):
                missing = getattr(turn.response, "tokens_missing", "")
                self.without_tokens[missing or "the client returns none"] += 1
        return [] if names <= {requested} else sorted(names)

    def complete(self, jobs: list[Job], states: list[State]) -> None:
        """Copy the advantages of siblings, after they were stored, to their outputs."""
        for job, state in zip(jobs, states, strict=True):
            set_advantage(self.rows[job.position], state.record.advantage)

    def outputs(self) -> GenerateOutputs:
        """The results that the run returns, still without metadata."""
        rows = self.in_order()
        if self.fills_advantages:
            fill_advantages(rows)
        states = [self._state(index) for index in sorted(self.rows)] if self.keep_states else None
        return GenerateOutputs(outputs=rows, metadata=GenerateMetadata(), states=states)

    def write_metadata(self, metadata: GenerateMetadata) -> None:
        """Write ``metadata.json`` if there is a run directory. *Raises* JournalError when it cannot
        be written."""
        if self.directory is None:
            return
        try:
            self.directory.write_metadata(dict(metadata))
        except OSError as error:
            raise JournalError(
                f"{self.directory.path}/metadata.json could not be written ({error}); every"
                " acknowledged rollout is saved. Free space or repair the disk, then run the same"
                " command again.",
                path=str(self.directory.path),
            ) from error

    def _state(self, index: int) -> State:
        row = self.rows[index]
        if (state := self.states.get(index)) is None:
            return output_to_state(row)
        # some siblings are from an earlier run
        if state.record.advantage is None and row["advantage"] is not None:
            state.record.advantage = row["advantage"]
            for step in state.record.transcript:
                step["advantage"] = (
                    row["advantage"] if step["advantage"] is None else step["advantage"]
                )
        return state

    async def _report(self, jobs: list[Job], outputs: list[RolloutOutput]) -> None:
        now = time.monotonic()
        if now >= self._next_write and self.directory is not None:
            self.write_metadata(self.metadata("running"))
            self._next_write = _next_time(now, METADATA_EVERY_S)
        if self.on_progress is None:
            return
        if self._metadata is None or now >= self._next_report:
            self._metadata = self.metadata("running")
            self._next_report = _next_time(now, REPORT_EVERY_S)
        callbacks: Any = self.on_progress
        for callback in callbacks if isinstance(callbacks, list | tuple) else [callbacks]:
            # the older form: all, new, metadata
            every = [self.in_order()] if num_positional(callback) >= 3 else []
            try:
                await maybe_await(callback(*every, _with_keys(jobs, outputs), self._metadata))
            except Exception as error:  # noqa: BLE001 - a display must not stop a run; it is logged
                self.logger.warning("on_progress raised %s: %s", type(error).__name__, error)


def other_than(requested: str, counts: Mapping[str, int]) -> dict[str, int]:
    """The counts of each name of a model; empty when the requested name is the only name."""
    return {} if counts.keys() <= {requested} else dict(sorted(counts.items()))


def no_key(file: Path, line: int) -> JournalError:
    """The error for a line of a journal that is not a saved rollout."""
    return JournalError(
        f"{file}:{line}: this line is not a saved rollout (it has no rollout_key); restore the file"
        " or remove the line",
        line=line,
    )


def _with_keys(jobs: list[Job], outputs: list[RolloutOutput]) -> list[RolloutOutput]:
    """The outputs with their keys on disk: ``rollout_key example_hash sibling``."""
    return [
        RolloutOutput(
            row,
            rollout_key=rollout_key(job.example.hash, job.sibling),
            example_hash=job.example.hash,
            sibling=job.sibling,
        )
        for job, row in zip(jobs, outputs, strict=True)
    ]


def _next_time(started: float, every_s: float) -> float:
    """When to repeat work that began at ``started`` (monotonic clock) and ends now, in keeping with
    ``COST_SHARE``."""
    done = time.monotonic()
    return done + max(every_s, (done - started) / COST_SHARE)
