"""Load saved results: a run directory or a results file, of this version or of 0.1, complete or
not; a folder of several runs; or trajectories of any author (``atif``).

A rollout that was run again counts once, by its newest line. Rollouts are returned in the order of
their examples. Loading never writes. Of a large file the numbers are loaded, and the texts when
they are asked for (``stored``).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from verifiers.errors import ConfigError, JournalError
from verifiers.results.atif import load_trajectories
from verifiers.results.branches import whole_rows
from verifiers.results.export import read_parquet
from verifiers.results.index_file import open_index
from verifiers.results.labels import LABEL, completion_hash, read_labels
from verifiers.results.outputs import GenerateOutputs
from verifiers.results.rows import (
    RUN_COLUMNS,
    RUN_FACTS,
    RolloutOutput,
    check_num_metrics,
    fill_advantages,
    keep_columns,
    saved_row,
)
from verifiers.results.run_metadata import FACTS, GenerateMetadata
from verifiers.results.stored import StoredOutputs
from verifiers.rollouts.values import number
from verifiers.runtime.bounded import MAX_ROW_BYTES, open_file
from verifiers.runtime.gc import fewer_collections
from verifiers.runtime.json import decode_row
from verifiers.storage.directory import (
    RESULTS_NAME,
    evaluations_below,
    read_metadata,
    saved_config,
    trainings_below,
)
from verifiers.storage.images import StoredImages
from verifiers.storage.journal import journal_lines, read_journal
from verifiers.storage.sets import set_of

LARGE_BYTES = 32 * 1024**2
"""Size of a file from which on its texts stay on disk: some 20,000 short rollouts."""
COMMON_FACTS = (
    "env_id env_args env_version model base_url sampling_args seed success_metric pass_threshold"
).split()
"""Facts of several runs that are those of their results where the runs agree."""
PLAN_SIZES = ("num_examples", "rollouts_per_example")


def load_results(path: str | Path, state_columns: Sequence[str] | None = None) -> GenerateOutputs:
    """The results in a run directory or a results file; while a run writes, those that are durable.

    Args:
        path: A run directory, or a results file (``.jsonl``, ``.parquet``); or a folder of runs,
            however deep; or a file of an ATIF trajectory, or a folder of them, whose unknown
            rewards are NaN.
        state_columns: Names of the extra columns to load; None = all.

    A file of ``LARGE_BYTES`` or more is indexed: ``results.reward``, ``results.summary()`` and the
    other numbers take 60 to 100 bytes of memory per rollout, ``results["completions"]`` reads that
    column, ``results.rollouts()`` yields one rollout at a time, and ``results.outputs`` reads and
    keeps all of them. The file must stay until then.

    The rollouts of a folder of runs have the columns ``run_path`` (relative to the folder),
    ``set`` (``name/id`` of the set of runs, None without one), ``env_id``, ``env_args`` and
    ``model`` of their run, in place of a state column of that name.
    The metadata has the settings in which the runs agree, and the status ``complete`` if each has
    it. An example has its siblings within a run. The rollouts are in memory.

    Rollouts outside the plan of the last run (of edited or removed examples) are left out. *Raises*
    ConfigError when there are no results, JournalError with file and line for a damaged file.

    >>> from verifiers.testing import ScriptedClient
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     env = vf.SingleTurnEnv(dataset=[{"question": "1 + 1"}])
    ...     _ = env.evaluate(ScriptedClient("2"), "m", results_path=folder)
    ...     vf.load_results(folder)["completions"]
    [[{'role': 'assistant', 'content': '2'}]]
    """
    source = Path(path)
    file = source / RESULTS_NAME if source.is_dir() else source
    if not file.is_file() and (folders := evaluations_below(source)):
        return _of_runs(source, folders, state_columns)
    is_run = file.is_file() and file.suffix != ".json"
    trajectories = [] if is_run else load_trajectories(source)
    if not file.is_file() and not trajectories:
        if source.is_dir() and trainings_below(source):
            raise ConfigError(
                f"{source} is of a training, which has a file of rollouts for each step: give one"
                " of its completions/step-N.jsonl"
            )
        raise ConfigError(
            f"{file} does not exist; give a run directory (with {RESULTS_NAME}), a folder of them,"
            " a results file or ATIF trajectories"
        )
    if file.suffix == ".csv":
        raise ConfigError(
            f"{file} is for other programs (pandas.read_csv); load_results reads a run directory, a"
            " .jsonl or a .parquet file, which results.save(path) also writes",
            path=str(file),
        )
    is_parquet = file.suffix == ".parquet"
    stored = read_metadata(file.parent) or {}
    metric_names = list(stored.get("avg_metrics") or ())
    outside = frozenset(stored.get("outside_plan") or ())
    config = saved_config(file.parent)
    facts = {name: value for name, value in stored.items() if name in FACTS or name in PLAN_SIZES}
    facts.setdefault("status", "running" if config else FACTS["status"])
    fills_advantages = not config.get("independent_scoring")
    if is_run and file.stat().st_size >= LARGE_BYTES and not is_parquet:
        return _indexed(file, metric_names, outside, facts, state_columns, fills_advantages)
    rows = trajectories or [
        (f"{file}:{line}", row)
        for line, row in _newest(read_parquet(file) if is_parquet else _rows(file))
        if row.get("rollout_key") not in outside
    ]
    outputs, names = [], set[str]()
    for location, row in rows:
        outputs.append(output := saved_row(row, location, metric_names))
        names.update(output["metrics"])
        check_num_metrics(names, location)
    _add_labels(outputs, [row for _, row in rows], read_labels(file.parent))
    if state_columns is not None:
        for output in outputs:
            keep_columns(output, state_columns)
    ids = np.fromiter((output["example_id"] for output in outputs), object, len(outputs))
    siblings = np.array([number(output.get("sibling")) for output in outputs])
    outputs = [outputs[index] for index in in_order(ids, siblings).tolist()]
    if fills_advantages:
        fill_advantages(outputs)
    return GenerateOutputs(outputs, GenerateMetadata.of(outputs, **facts))


def _of_runs(
    source: Path, folders: Sequence[Path], state_columns: Sequence[str] | None
) -> GenerateOutputs:
    """The rollouts of several runs, run after run. *Raises* as ``load_results``."""
    outputs: list[RolloutOutput] = []
    runs: list[GenerateMetadata] = []
    for folder in folders:
        results = load_results(folder, state_columns)
        runs.append(results.metadata)
        facts = {name: results.metadata[name] for name in RUN_FACTS}
        run_set = set_of(folder)
        facts["set"] = None if run_set is None else run_set.label
        for output in results.rollouts():
            output.update(run_path=folder.relative_to(source).as_posix(), **facts)
            outputs.append(output)
    common = {
        name: runs[0][name] for name in COMMON_FACTS if all(m[name] == runs[0][name] for m in runs)
    }
    statuses = [metadata["status"] for metadata in runs]
    metadata = GenerateMetadata.of(
        outputs,
        **common,
        status=next((status for status in statuses if status != "complete"), "complete"),
        time=sum(metadata["time"] for metadata in runs),
        state_columns=list(
            dict.fromkeys(
                [*(name for metadata in runs for name in metadata["state_columns"]), *RUN_COLUMNS]
            )
        ),
        path_to_save=source,
    )
    costs = [metadata["cost_usd"] for metadata in runs]
    metadata["cost_usd"] = None if None in costs else sum(costs)
    return GenerateOutputs(outputs, metadata)


def _indexed(
    file: Path,
    metric_names: Sequence[str],
    outside: Collection[str],
    facts: Mapping[str, object],
    state_columns: Sequence[str] | None,
    fills_advantages: bool,
) -> StoredOutputs:
    """The results of a large file. *Raises* as ``load_results``."""
    with fewer_collections():
        index = open_index(file, metric_names)
    if index.failure is not None:
        raise index.failure
    skipped = [*index.replaced, *(row for row in index.keys.find(outside).tolist() if row >= 0)]
    index.keys.forget_order()
    numbers = np.delete(np.arange(len(index)), skipped)
    ids, siblings = index.columns["example"], np.asarray(index.columns["sibling"])[numbers]
    is_mixed = isinstance(ids, list)  # by another program
    ids = np.fromiter(ids, object, len(ids)) if is_mixed else np.asarray(ids)
    numbers = numbers[in_order(ids[numbers], siblings)]
    labels = None
    if (labels_by_key := read_labels(file.parent)) and not (
        len(index) and LABEL in index.stored(0)
    ):
        labels = {}
        for key, (digest, label) in labels_by_key.items():
            number = index.newest(key)
            if (
                number is not None
                and completion_hash(index.stored(number).get("completion")) == digest
            ):
                labels[number] = label
    return StoredOutputs(index, numbers, facts, state_columns, labels, fills_advantages)


def _add_labels(
    outputs: Sequence[RolloutOutput],
    rows: Sequence[Mapping[str, object]],
    labels: Mapping[str, tuple[str, bool]],
) -> None:
    """The column ``label`` where a person labelled rollouts and the run has no such column of its
    own."""
    if not labels or any(LABEL in row for row in rows):
        return
    for output, row in zip(outputs, rows, strict=True):
        digest, label = labels.get(str(row.get("rollout_key")), ("", None))
        is_same = bool(digest) and digest == completion_hash(row.get("completion"))
        output[LABEL] = label if is_same else None


def _rows(file: Path) -> Iterator[dict[str, object]]:
    with open_file(file) as lines:
        first = lines.readline(MAX_ROW_BYTES)
    if b'"crc32":' in first:
        yield from whole_rows(read_journal(file), str(file))
    else:
        yield from _plain_rows(file)


def _plain_rows(file: Path) -> Iterator[dict[str, object]]:
    """Read lines without checksums; an invalid last line without a newline is an interrupted write
    and is skipped."""
    images = StoredImages(file.parent)
    with open_file(file) as lines:
        for number, line in enumerate(journal_lines(lines, file), 1):
            if not line.strip():
                continue
            try:
                yield images.restored(decode_row(line))
            except ValueError as error:
                if not line.endswith(b"\n"):
                    return
                raise JournalError(
                    f"{file}:{number}: this line is not a saved rollout ({error}); restore the file"
                    " or remove the line",
                    path=str(file),
                    line=number,
                ) from error


def _newest(rows: Iterator[dict[str, object]]) -> list[tuple[int, dict[str, object]]]:
    """(line, row) of the newest row of each rollout."""
    by_key: dict[object, tuple[int, dict[str, object]]] = {}
    for line, row in enumerate(rows, 1):
        key = row.get("rollout_key")
        key = key if isinstance(key, str) else line
        by_key.pop(key, None)
        by_key[key] = line, row
    return list(by_key.values())


def in_order(ids: np.ndarray, siblings: np.ndarray) -> np.ndarray:
    """The order of rollouts by example and sibling; as they are where an id is no number, which
    another program wrote."""
    siblings = np.fmax(siblings, 0)  # NaN counts as 0
    if ids.dtype == object:
        if not all(isinstance(each, int) for each in ids):
            return np.arange(len(ids))
        order = sorted(range(len(ids)), key=lambda index: (ids[index], siblings[index]))
        return np.array(order, np.int64)
    return np.lexsort((siblings, ids))
