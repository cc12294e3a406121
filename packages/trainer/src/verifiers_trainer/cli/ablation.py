"""``[[ablation]]`` of a training file: a run for each combination of values, one after the other, and
the mean over the seeds.

Each run is this command again, in a process and a folder of its own, so that a repeated command
continues where it was stopped.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from verifiers.cli.common.reader import TomlFile, listed_values, raise_together
from verifiers.errors import ConfigError
from verifiers.results.trainings import Seeds, compare_seeds, edge_rewards
from verifiers_trainer.cli.first_checks import check_first
from verifiers_trainer.cli.launch_processes import Child, Signals, wait_for
from verifiers_trainer.cli.sources import read_arguments
from verifiers_trainer.run.metrics_files import METRICS, read_metrics

ARGS = "trainer.args."
SEED = f"{ARGS}seed"
FOLDER = "outputs/ablation"
"""Folder of the runs without ``--output-dir`` and ``run_name``."""


@dataclass(frozen=True, slots=True)
class Combination:
    """The values of a run: ``Combination({"trainer.args.seed": 0})``."""

    values: Mapping[str, Any]

    @property
    def words(self) -> list[str]:
        """The values as arguments of ``vf-train``."""
        return [f"--{key}={json.dumps(value)}" for key, value in self.values.items()]

    @property
    def name(self) -> str:
        """The name of its folder: ``seed=0,learning_rate=0.001``."""
        pairs = (f"{_short(key)}={value}" for key, value in self.values.items())
        return ",".join(pairs).replace("/", "_")


def combinations(words: Sequence[str]) -> list[Combination]:
    """The runs of the ``[[ablation]]`` tables of a command line's files, in order; none without
    such a table, or if flags set all that they vary, as in each of the runs.

    *Raises* ConfigError for a table without ``sweep``, or without lists in it.
    """
    files, assignments, _ = read_arguments(words)
    flags = {setting.key for setting in assignments}
    problems: list[str] = []
    runs: list[Combination] = []
    for path in files:
        file = TomlFile.read(path)
        tables = file.document.get("ablation", [])
        for number, table in enumerate(tables if isinstance(tables, list) else [tables]):
            section = f"[[ablation]] number {number + 1}"
            sweep = table.get("sweep") if isinstance(table, dict) else None
            if not isinstance(sweep, dict) or not sweep:
                problems.append(
                    f"{file.location('ablation', number)}: {section} sweeps nothing: add"
                    " [ablation.sweep] with a list of values to try"
                )
                continue
            fixed = dict(_leaves({k: v for k, v in table.items() if k != "sweep"}))
            axes = []
            for key, values in _leaves(sweep):
                try:
                    listed = listed_values(_short(key), values, f"[ablation.sweep] of {section}")
                except ConfigError as error:
                    problems.append(f"{file.location('ablation', number, 'sweep')}: {error}")
                    continue
                axes.append([(key, value) for value in listed])
            for pairs in product(*axes):
                values = fixed | dict(pairs)
                run = Combination({k: v for k, v in values.items() if k not in flags})
                if run not in runs:
                    runs.append(run)
    raise_together(problems)
    return runs if any(run.values for run in runs) else []  # all set: one run of the ablation


def _leaves(table: Mapping[str, object], above: str = "") -> Iterator[tuple[str, object]]:
    """(dotted key, value) of a table; a key at its top is one of ``[trainer.args]``."""
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{above}{key}.")
        else:
            yield (f"{above}{key}" if above else f"{ARGS}{key}"), value


def _short(key: str) -> str:
    return key.removeprefix(ARGS)


def run_all(
    runs: Sequence[Combination],
    words: Sequence[str],
    options: Sequence[str],
    output_dir: str | None,
    echo: Callable[[str], None],
    answer: Callable[[str], None],
    result: dict[str, object],
) -> int:
    """Train every combination, ``answer`` the means, and return the exit code of the first that
    failed.

    ``options`` are passed to each run, whose lines are echoed. *Raises* ConfigError, before the
    first run, for a setting that any of them may not have.
    """
    for run in runs:
        check_first([*words, *run.words])
    folder = Path(output_dir or _folder_of(words))
    for number, run in enumerate(runs, 1):
        echo(f"run {number} of {len(runs)}: {run.name}")
        arguments = [*words, *run.words, f"--output-dir={folder / run.name}", *options]
        command = [sys.executable, "-P", "-m", "verifiers_trainer.cli.train", *arguments]
        with Signals() as signals:
            child = Child(run.name, command, {}, echo)
            try:
                code = wait_for(child, signals)
            finally:
                child.stop()
        if code:
            echo(f"{run.name} ended with {code}; the same command continues with it")
            return code
    rows = [_result_of(run, folder / run.name) for run in runs]
    result.update(run_dir=str(folder), runs=rows)
    answer("\n" + table_of(runs, rows))
    return 0


def _folder_of(words: Sequence[str]) -> str:
    for path in reversed(read_arguments(words)[0]):
        args = TomlFile.read(path).document.get("trainer", {}).get("args", {})
        if isinstance(args, dict) and args.get("run_name"):
            return f"outputs/{args['run_name']}"
    return FOLDER


def _result_of(run: Combination, folder: Path) -> dict[str, object]:
    """The settings of a run with its last rewards, None if it has none."""
    rows = read_metrics(folder / METRICS) if (folder / METRICS).is_file() else []
    ends = edge_rewards(rows)
    evaluated = [row["eval_reward"] for row in rows if row.get("eval_reward") is not None]
    return {
        "settings": {_short(key): value for key, value in run.values.items()},
        "run_dir": str(folder),
        "reward": ends[1] if ends else None,
        "eval_reward": evaluated[-1] if evaluated else None,
    }


def table_of(runs: Sequence[Combination], rows: Sequence[Mapping[str, object]]) -> str:
    """A line for each combination but for its seed: the mean over the seeds ± their standard
    deviation, and each; and how far every other one is from the first."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for run, row in zip(runs, rows, strict=True):
        name = Combination({k: v for k, v in run.values.items() if k != SEED}).name
        groups.setdefault(name or "all", []).append(row)
    width = max(map(len, groups))
    texts: dict[str, list[str]] = {name: [] for name in groups}
    differences = []
    for label, key in (("reward", "reward"), ("evaluated", "eval_reward")):
        seeds = [
            Seeds(name, tuple(row[key] for row in members if row[key] is not None))
            for name, members in groups.items()
        ]
        for of_setting in seeds:
            if of_setting.values:
                texts[of_setting.name].append(f"{label} {of_setting.summary}")
        if any(of_setting.values for of_setting in seeds):
            differences += [(label, difference) for difference in compare_seeds(seeds)]
    lines = ["means over the seeds ± their standard deviation; each seed"]
    lines += [f"{name:{width}}  " + "  ".join(parts) for name, parts in texts.items()]
    if differences:
        lines.append(f"difference to {next(iter(groups))}, by Welch's t test over the seeds")
        lines += [f"{d.seeds.name:{width}}  {label} {d}" for label, d in differences]
    return "\n".join(lines)
