"""The evaluations of one command as a set: its folder, what its runs may spend together, and what
became of each.

A command with several evaluations, or with ``--set``, is a set (``storage.sets``). The same command
continues it: complete runs are read from disk, the others resume.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verifiers.cli.evaluate.arguments import CommandLine
from verifiers.cli.evaluate.options import EvalSettings
from verifiers.clients.spending import Amount
from verifiers.errors import BudgetExhausted, ConfigError
from verifiers.results.texts import dollars
from verifiers.runs.budget import spent_in
from verifiers.runs.options import PLAN
from verifiers.runtime.redaction import digested
from verifiers.runtime.values import options_of
from verifiers.storage.directory import is_complete, read_metadata
from verifiers.storage.sets import (
    COMPLETE,
    PENDING,
    RunSet,
    SetDirectory,
    planned_set,
    set_differences,
    set_folder,
    unfinished_sets,
)

if TYPE_CHECKING:
    from verifiers.cli.evaluate.options import Evaluation
    from verifiers.cli.evaluate.planning import Prepared

FAILED, INTERRUPTED = "failed", "interrupted"
LIMITS = {"max_cost": "max_cost_usd", "max_total_tokens": "max_total_tokens"}
"""Setting of a command -> option of a run."""


@dataclass(slots=True)
class CommandSet:
    """The runs of a command; ``name`` is None where they have no folder of their own."""

    name: str | None
    set_id: str | None
    limits: Mapping[str, Any]
    """``max_cost`` and ``max_total_tokens`` of all runs together."""
    prepared: Sequence[Prepared] = ()
    planned: RunSet | None = None
    """Once every model is known."""
    states: list[str] = field(default_factory=list)
    """What became of each run in this command: ``complete``, ``failed``, ``interrupted`` by a limit
    on what is spent, or ``pending``."""
    failures: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Index of a failed run -> its exit code and its error."""
    used_up: str | None = None
    """The limit of all runs (``max_cost``, ``max_total_tokens``) that is used up, so that no other
    begins."""
    _unsaved: dict[int, Amount] = field(default_factory=dict)
    _directory: SetDirectory | None = None

    @classmethod
    def of(cls, line: CommandLine, evaluations: Sequence[Evaluation]) -> CommandSet:
        """*Raises* ConfigError when ``--set`` contradicts the settings of an evaluation."""
        settings = [evaluation.settings for evaluation in evaluations]
        set_id = line.command.set_id
        without_folder = ""
        if not all(each.save_results for each in settings):
            without_folder = "--no-save keeps nothing on disk"
        elif any(each.resume for each in settings):
            without_folder = "--resume PATH names the folder of a single run"
        elif len({each.output_dir for each in settings}) > 1:
            without_folder = "the evaluations have different output folders"
        if set_id is not None and without_folder:
            raise ConfigError(f"--set names the folder of a set, and {without_folder}", key="set")
        is_set = (set_id is not None or len(settings) > 1) and not without_folder
        words = [Path(name).stem for name in line.files] if line.files else line.targets
        limits = evaluations[0].shared if len(settings) > 1 else {}
        return cls("+".join(words) if is_set else None, set_id, limits)

    @property
    def is_open(self) -> bool:
        """Whether the folder exists, and this command has it."""
        return self._directory is not None

    @property
    def is_set(self) -> bool:
        """Whether the runs have a folder of their own."""
        return self.name is not None

    # --- the folder

    def locate(self, prepared: Sequence[Prepared]) -> None:
        """Choose the folder, once every model is known, and give each run its directory; writes
        nothing. *Raises* ConfigError, RunMismatch as the directories do."""
        self.prepared = prepared
        self.states = self.states or [PENDING] * len(prepared)
        if self.name is None or any(run.choice.model is None for run in prepared):
            return
        first = prepared[0].settings
        settings = [_settings_of(run) for run in prepared]
        is_new = any(run.settings.fresh for run in prepared)
        outputs = first.output_dir or "outputs"
        path = set_folder(outputs, self.name, settings, set_id=self.set_id, is_new=is_new)
        if first.resume is not None and not path.exists():
            raise ConfigError(f"--resume: there is no set of these runs in {path.parent}")
        fingerprints = [run.fingerprint() for run in prepared]
        self.planned = planned_set(path, self.name, settings, fingerprints)
        for run, member in zip(prepared, self.planned.runs, strict=True):
            run.locate_in(self.planned.folder(member))

    def open(self) -> str | None:
        """Create and lock the folder; a sentence about a set that exists. *Raises* RunBusy,
        ConfigError."""
        if self.planned is None:
            return None
        is_old = self.planned.path.exists()
        self._directory = SetDirectory(self.planned)
        if not is_old:
            begun = f"set {self.planned.label}: {len(self.prepared)} runs in {self.planned.path}"
            return f"{begun}{self._unfinished_before(self.planned)}"
        return f"{self.line()}; {'nothing is pending' if self.is_complete else 'continuing it'}"

    def _unfinished_before(self, planned: RunSet) -> str:
        """A sentence about the newest unfinished set of other runs: an edited file begins anew."""
        older = [
            run_set
            for run_set in unfinished_sets(planned.path.parent)
            if run_set.fingerprint != planned.fingerprint
        ]
        if not older or self.set_id is not None:
            return ""
        differences = set_differences(older[-1], [run.settings for run in planned.runs])
        return f"; {older[-1].label} is unfinished, and of other runs: {differences}"

    def close(self) -> None:
        """Release the folder."""
        if self._directory is not None:
            self._directory.close()

    @property
    def is_complete(self) -> bool:
        """Whether every run is complete on disk."""
        return self.planned is not None and self.planned.is_complete

    def line(self) -> str:
        """Name, folder and state, in one line."""
        assert self.planned is not None
        counts = f"{self.planned.num_complete} of {len(self.planned.runs)} runs are complete"
        return f"set {self.planned.label} in {self.planned.path}: {counts}"

    def has_results(self, run: Prepared) -> bool:
        """Whether a run is taken as it is: it is complete, and no error is to be repeated."""
        return (
            self.planned is not None
            and run.path is not None
            and is_complete(run.path)
            and not run.settings.retry_errors
        )

    def repeats(self, run: Prepared) -> dict[str, object]:
        """The option of a run of a set that failed: its rollouts with errors run again."""
        if self.planned is None or run.path is None:
            return {}
        failed = (read_metadata(run.path) or {}).get("status") == FAILED
        return {"retry_errors": True} if failed else {}

    # --- the budget

    def limits_of(self, run: Prepared) -> dict[str, Any]:
        """The options of a run that limit what it may spend: those of all runs, with what the others
        have spent of them, or its own where that leaves it less. Without limits of all runs {}.

        *Raises* ConfigError when the cost of a run is unknown.
        """
        if not self.limits:
            return {}
        options: dict[str, Any] = {}
        elsewhere: dict[str, float] = dict.fromkeys(LIMITS, 0)
        for name, limit in self.limits.items():
            limit_of_run, of_others = (
                getattr(run.settings, LIMITS[name]),
                self._spent(name, but=run),
            )
            is_own = limit_of_run < limit and limit_of_run <= limit - of_others
            options[LIMITS[name]] = limit_of_run if is_own else limit
            elsewhere[name] = 0 if is_own else of_others
        return {**options, "spent_elsewhere": tuple(elsewhere.values())}

    def limit_reached(self) -> str | None:
        """The limit of all runs of which nothing is left. *Raises* ConfigError when the cost of a run
        is unknown."""
        return next((name for name in self.limits if self._spent(name) >= self.limits[name]), None)

    def limit_behind(self, run: Prepared, error: BudgetExhausted) -> str | None:
        """The limit of all runs, not of this one alone, into which its next request did not fit."""
        for name, limit in self.limits.items():
            if error.limit == LIMITS[name]:
                return name if self.limits_of(run)[error.limit] == limit else None
        only = [name for name in LIMITS if error.limit == LIMITS[name]]
        return only[0] if only and len(self.prepared) == 1 else None

    def note_spent(self, run: Prepared, spent: Mapping[str, Any] | None) -> None:
        """Count what a run that isn't saved has spent; None: unknown, its whole limit."""
        if run.path is not None or not self.limits:
            return
        if spent is None:
            limits = self.limits_of(run)
            usd, tokens = limits["spent_elsewhere"]
            most = Amount(limits.get("max_total_tokens", tokens), limits.get("max_cost_usd", usd))
            amount = most - Amount(tokens, usd)
        else:
            amount = Amount(spent["tokens"], spent["usd"])
        self._unsaved[self.prepared.index(run)] = amount

    def _spent(self, name: str, but: Prepared | None = None) -> float:
        """What the runs have spent, all or all others, of what a limit is of."""
        total, is_priced = Amount(), "max_cost" in self.limits
        for index, run in enumerate(self.prepared):
            if run is but:
                continue
            if run.path is None:
                total += self._unsaved.get(index, Amount())
            else:
                total += spent_in(run.path, is_priced=is_priced)
        return total.usd if name == "max_cost" else total.tokens

    def exhausted(self, error: Exception | None = None) -> str:
        """A sentence about a limit of all runs, which is used up; ``error``: of the run whose next
        request does not fit."""
        of = "set" if self.is_set else "run" if len(self.prepared) == 1 else "command"
        what = f"stopped: the budget of the {of} is used up"
        if error is not None:
            return f"{what}: {error}"
        amounts = []
        for name, limit in self.limits.items():
            spent = self._spent(name)
            if name == "max_cost":
                amounts.append(f"{dollars(spent, 0)} of {dollars(limit, 0)}")
            else:
                amounts.append(f"{spent:,} of {limit:,} tokens")
        return (
            f"{what}: its runs have spent {' and '.join(amounts)}; those that are pending do not"
            " begin: raise the limit and run the same command again"
        )

    # --- what became of the runs

    def facts(self) -> dict[str, object]:
        """The set as an entry of the JSON object."""
        runs = []
        for index, (run, state) in enumerate(zip(self.prepared, self.states, strict=True)):
            failure = self.failures.get(
                index, {"exit_code": None if state == PENDING else 0, "error": None}
            )
            runs.append({**run.labels, "state": state, **failure})
        if self.planned is None:
            return {"name": None, "id": None, "path": None, "complete": False, "runs": runs}
        return {
            "name": self.planned.name,
            "id": self.planned.id,
            "path": str(self.planned.path),
            "complete": self.is_complete,
            "runs": runs,
        }

    def note_complete(self, run: Prepared) -> None:
        """A run has ended, and its results count."""
        self.states[self.prepared.index(run)] = COMPLETE

    def note_end(
        self, run: Prepared, exit_code: int, error: Mapping[str, object], state: str = FAILED
    ) -> None:
        """The first reason why a run did not complete."""
        index = self.prepared.index(run)
        self.states[index] = state
        self.failures.setdefault(index, {"exit_code": exit_code, "error": dict(error)})

    @property
    def is_done(self) -> bool:
        """Whether nothing failed and nothing is pending."""
        return all(state == COMPLETE for state in self.states)


def _settings_of(run: Prepared) -> dict[str, object]:
    """What two runs of equal settings agree in, without secrets and without the code."""
    settings = run.settings
    values = {
        "env_id": run.env_id,
        "sampling_args": settings.sampling(),
        "order_seed": settings.order_seed,
        **{name: getattr(settings, name) for name in _compared()},
        "model": run.choice.model,
    }
    # a seed of 0 is a setting: it is neither None nor False
    return {
        name: digested(value)
        for name, value in values.items()
        if value is not None and value is not False and value != {}
    }


@functools.cache
def _compared() -> list[str]:
    """The settings by which two sets differ, but for those that are compared as another says."""
    beside = {"max_tokens", "temperature", "sampling_args", "shuffle", "shuffle_seed"}
    options = options_of(EvalSettings).items()
    return [name for name, line in options if line.free in ("", PLAN) and name not in beside]
