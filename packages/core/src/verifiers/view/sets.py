"""Sets of runs for the page: which there are, and one as a table with its change against the set
before it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import TypedDict

from verifiers.errors import ConfigError, JournalError
from verifiers.results.comparison import Measured
from verifiers.results.sets import compare_sets
from verifiers.results.texts import flat
from verifiers.storage.sets import RunSet, SetRun, newest_complete_before, read_set
from verifiers.view.catalog import EVALUATION, Source

_OF_ROWS, _OF_COLUMNS = ("sampling_args", "seed"), ("env_args", "extra_env_kwargs")
"""Settings that tell two models, and two environments, of a set apart."""


def sets_of(sources: Mapping[str, Source]) -> dict[str, tuple[RunSet, dict[str, str]]]:
    """Id -> (set, path of a run in the set -> id of the run), of sets with a run among
    ``sources``; the newest first."""
    by_folder: dict[str, RunSet | None] = {}
    sets: dict[str, tuple[RunSet, dict[str, str]]] = {}
    for source in sources.values():
        if source.kind != EVALUATION or len(source.folder.parts) < 4:
            continue
        folder = source.folder.parents[2]
        if str(folder) not in by_folder:
            by_folder[str(folder)] = None
            with contextlib.suppress(ConfigError):  # damaged: its runs are in the list
                by_folder[str(folder)] = read_set(folder)
        run_set = by_folder[str(folder)]
        path = source.folder.relative_to(folder).as_posix()
        if run_set is None or all(run.path != path for run in run_set.runs):
            continue
        prefix = source.id.removesuffix(f"/{path}")
        set_id = run_set.label if prefix == source.id else prefix
        sets.setdefault(set_id, (run_set, {}))[1][path] = source.id
    newest_first = sorted(sets.items(), key=lambda item: item[1][0].created, reverse=True)
    return dict(newest_first)


class SetSummary(TypedDict):
    """A set as an entry of the list."""

    id: str
    name: str
    set: str
    created: str
    runs: int
    states: dict[str, int]
    complete: bool
    models: list[str]
    environments: list[str]


def summary_of(set_id: str, run_set: RunSet) -> SetSummary:
    """A set as an entry of the list."""
    states = [run_set.state(run) for run in run_set.runs]
    return {
        "id": set_id,
        "name": run_set.name,
        "set": run_set.id,
        "created": run_set.created,
        "runs": len(states),
        "states": {state: states.count(state) for state in dict.fromkeys(states)},
        "complete": run_set.is_complete,
        "models": sorted({run.model for run in run_set.runs}),
        "environments": sorted({run.env_id for run in run_set.runs}),
    }


def table_of(
    set_id: str,
    sets: Mapping[str, tuple[RunSet, dict[str, str]]],
    describe: Callable[[str], Mapping[str, object]],
    measure: Callable[[Sequence[str]], list[Measured]],
) -> dict[str, object]:
    """A set with a cell for each run: its row (the model), its column (the environment), its state
    and numbers, and the change against the newest complete set before it.

    ``describe``: of the id of a run its entry; ``measure``: of several. Raises ``LookupError``.
    """
    if set_id not in sets:
        raise LookupError(f"there is no set of runs {set_id!r}")
    run_set, ids = sets[set_id]
    before = newest_complete_before(run_set)
    baseline = next(
        (pair for pair in sets.values() if before is not None and pair[0].path == before.path), None
    )
    changes: dict[str, dict[str, object]] = {}
    without_partner: list[str] = []
    problem = ""
    if baseline is not None:
        try:
            changes, without_partner = _changes(baseline[1], ids, measure)
        except (ConfigError, JournalError, OSError) as error:
            problem = str(error)
    rows = _labels([run.model for run in run_set.runs], run_set.runs, _OF_ROWS)
    columns = _labels([run.env_id for run in run_set.runs], run_set.runs, _OF_COLUMNS)
    cells = []
    for run, row, column in zip(run_set.runs, rows, columns, strict=True):
        run_id = ids.get(run.path)
        entry = describe(run_id) if run_id is not None else {}
        numbers = {
            name: entry.get(name) for name in ("reward", "stderr", "errors", "unscored", "rollouts")
        }
        cells.append(
            {"row": row, "column": column, "run": run_id, "state": run_set.state(run), **numbers}
            | {"change": changes.get(run_id or "")}
        )
    return {
        **summary_of(set_id, run_set),
        "cells": cells,
        "before": next((key for key, pair in sets.items() if pair is baseline), None),
        "without_partner": without_partner,
        "problem": problem,
    }


def _changes(
    before: Mapping[str, str],
    after: Mapping[str, str],
    measure: Callable[[Sequence[str]], list[Measured]],
) -> tuple[dict[str, dict[str, object]], list[str]]:
    """(id of a run -> its difference to its partner in the set before, ids without one)."""
    runs = measure([*before.values(), *after.values()])
    compared = compare_sets(runs[: len(before)], runs[len(before) :])
    changes: dict[str, dict[str, object]] = {}
    for difference in compared.differences:
        changes[difference.run] = {
            "baseline": difference.baseline,
            "difference": difference.difference,
            "stderr": difference.stderr,
            "verdict": difference.verdict,
            "sentence": difference.sentence(),
        }
    for refused in compared.refused:
        changes[refused.run] = {"baseline": refused.baseline, "sentence": refused.sentence()}
    return changes, [run.name for alone in compared.without_partner for run in alone]


def _labels(names: Sequence[str], runs: Sequence[SetRun], settings: Sequence[str]) -> list[str]:
    """Each name, with those of the settings that differ among the runs of that name."""
    flats = [flat({name: run.settings.get(name) or {} for name in settings}) for run in runs]
    labels = []
    for name, values in zip(names, flats, strict=True):
        same = [each for each, label in zip(flats, names, strict=True) if label == name]
        varied = sorted(
            key
            for key in {key for each in same for key in each}
            if len({repr(each.get(key)) for each in same}) > 1
        )
        texts = [f"{key.partition('.')[2] or key}={values[key]}" for key in varied if key in values]
        labels.append(" · ".join((name, *texts)))
    return labels
