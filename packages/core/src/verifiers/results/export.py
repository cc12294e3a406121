"""Results as a dataset, a run directory, a file of JSON lines, Parquet or CSV, or trajectories.

Each takes the rollouts as the journal encodes them (``rows.journal_rows``), one or a batch at a
time, and appears whole (``storage.files.replacing``). A folder, JSON lines, Parquet and trajectories
are read again as they were. A table has a type for each column: values that do not fit one are JSON
text, a struct has null for a key that an object lacks, and a lone surrogate, which UTF-8 cannot
encode, is its escape. What a row of a Parquet file has otherwise is in its column ``_verifiers``.
CSV, data sets and frames have no such column, and are not read again.
"""

from __future__ import annotations

import csv
import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verifiers.errors import ConfigError
from verifiers.results.rows import (
    RolloutOutput,
    encoded_output,
    example_key,
    journal_rows,
    json_ready,
    remainder_of,
    with_remainder,
)
from verifiers.results.statistics import mean
from verifiers.runtime.decoding import decode_json
from verifiers.runtime.json import encode_row, in_utf8
from verifiers.storage.directory import METADATA_NAME, RESULTS_NAME
from verifiers.storage.files import atomic_write, replacing
from verifiers.storage.images import IMAGES_NAME, set_aside, write_images
from verifiers.storage.journal import Journal

if TYPE_CHECKING:
    import pyarrow as pa


JSON_TEXT = {b"verifiers": b"json"}
"""Mark of a column of a Parquet file that is JSON text."""
OF_THE_RUN = {b"verifiers": b"run"}
"""Mark of a column of a Parquet file that is a fact of the run; a rollout that is read lacks it."""
STRUCTURED = frozenset("info metrics error timing token_usage tool_defs".split())
"""Columns of lists and objects, whose texts are JSON in files without marks too."""
TEXTS_ALONE = frozenset(("trajectory", "env_args"))
"""Columns that are JSON text always: a turn has parts of many shapes, and a text can be grouped."""
FILLED = "prompt completion timing token_usage tool_defs trajectory".split()
"""Columns in which an absent field and null mean the same."""
REMAINDER = "_verifiers"
"""Column of a Parquet file: what reading the others would give otherwise, as JSON text."""
MAX_STRUCT_FIELDS = 1_000
"""Fields of a column of objects above which it is JSON text: its keys are data."""
BATCH_SIZE = 2_000
"""Rollouts that are in memory while a Parquet file is written."""


def rows_to_dataset(rows: Sequence[Mapping[str, object]], first: Iterable[str] = ()) -> Any:
    """A ``datasets.Dataset`` with the columns of all rollouts, these ``first``; unknown numbers are
    null."""
    from datasets import Dataset

    plain = [in_utf8(encoded_output(row)) for row in rows]
    names = dict.fromkeys(first) | dict.fromkeys(name for row in plain for name in row)
    return Dataset.from_dict(
        {name: _arrow_column(name, [row.get(name) for row in plain]) for name in names}
    )


def facts_of_run(metadata: Mapping[str, object]) -> dict[str, object]:
    """What a row of a table says of its run: environment and model, so that tables of several runs
    can be joined."""
    return {name: metadata[name] for name in ("env_id", "model") if metadata.get(name)}


def average_rewards(outputs: Sequence[RolloutOutput], siblings: int | None) -> list[float]:
    """Mean known reward of each rollout's group: one example, or ``siblings`` in a row."""
    keys = [n // siblings if siblings else example_key(output) for n, output in enumerate(outputs)]
    groups: dict[object, list[float]] = {}
    for key, output in zip(keys, outputs, strict=True):
        groups.setdefault(key, []).append(output["reward"])
    averages = {key: mean(rewards) for key, rewards in groups.items()}
    return [averages[key] for key in keys]


OTHER_FILES = frozenset(".json .txt .xlsx .tsv .feather .arrow .pkl .html .md .gz .zip".split())
"""Suffixes of files that are not written; another suffix is part of a folder's name."""


def save(
    rollouts: Callable[[], Iterator[RolloutOutput]],
    metadata: Mapping[str, object],
    path: str | Path,
) -> None:
    """Write the results of a run to ``path``: one ``.parquet``, ``.csv`` or ``.jsonl`` file, else
    a run directory.

    ``rollouts()`` yields them in order, and is called again where a format needs it. *Raises*
    ConfigError when the directory already holds results.
    """
    target = Path(path)
    if target.suffix in OTHER_FILES:
        raise ConfigError(
            f"results are saved as a folder, .jsonl, .parquet or .csv, not as {target.suffix}",
            path=str(target),
        )
    if write := _FILES.get(target.suffix):
        target.parent.mkdir(parents=True, exist_ok=True)
        with replacing(target) as new:
            write(rollouts, new, facts_of_run(metadata))
        return
    if (target / RESULTS_NAME).exists():
        raise ConfigError(
            f"{target / RESULTS_NAME} already exists; save into another directory", path=str(target)
        )
    target.mkdir(parents=True, exist_ok=True)
    with replacing(target / RESULTS_NAME) as new, Journal.open(new) as journal:
        journal.images_folder = target / IMAGES_NAME
        for rows in _batches(rollouts()):
            journal.append_sync(rows)
    _write_metadata(metadata, target)


Rollouts = Callable[[], Iterator[RolloutOutput]]


def _write_lines(rollouts: Rollouts, file: Path, facts: Mapping[str, object]) -> None:
    with file.open("xb") as opened:
        opened.writelines(encode_row(row) + b"\n" for row in journal_rows(rollouts()))


def _write_csv(rollouts: Rollouts, file: Path, facts: Mapping[str, object]) -> None:
    names = dict.fromkeys(itertools.chain.from_iterable(journal_rows(rollouts())))
    names |= dict.fromkeys(facts)
    with file.open("x", encoding="utf-8", errors="backslashreplace", newline="") as opened:
        writer = csv.DictWriter(opened, list(names), lineterminator="\n")
        writer.writeheader()
        for row in journal_rows(rollouts()):
            writer.writerow({name: _as_cell(value) for name, value in {**facts, **row}.items()})


def _as_cell(value: object) -> object:
    """A value in a cell of a CSV file: lists and objects as JSON."""
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict | list) else value


def _write_metadata(metadata: Mapping[str, object], folder: Path) -> None:
    content = json.dumps(json_ready({**metadata, "path_to_save": str(folder)}), indent=2)
    atomic_write(folder / METADATA_NAME, content.encode() + b"\n")


def write_trajectories(
    documents: Iterable[Mapping[str, object]], metadata: Mapping[str, object], folder: Path
) -> None:
    """Write each document as a file of a new folder. *Raises* ConfigError for a folder that has
    files."""
    if folder.is_dir() and any(folder.iterdir()):
        raise ConfigError(f"{folder} has files; write into another folder", path=str(folder))
    folder.parent.mkdir(parents=True, exist_ok=True)
    with replacing(folder) as new:
        new.mkdir()
        for number, document in enumerate(documents):
            line, images = set_aside(encode_row(document))
            write_images(new / IMAGES_NAME, images)
            atomic_write(new / f"{number:06}.json", line + b"\n")
        _write_metadata({**metadata, "path_to_save": str(folder)}, new)


def _batches(rollouts: Iterator[RolloutOutput]) -> Iterator[list[dict[str, object]]]:
    rows = journal_rows(rollouts)
    while batch := list(itertools.islice(rows, BATCH_SIZE)):
        yield batch


# --- Parquet --------------------------------------------------------------------------------------


def _write_parquet(rollouts: Rollouts, file: Path, facts: Mapping[str, object]) -> None:
    """Write one row group for ``BATCH_SIZE`` rollouts; reads them twice where later batches have
    other columns or types."""
    types: dict[str, pa.DataType | None] = {}
    while not _write_batches(_batches(rollouts()), types, file, facts):
        pass  # again, with the types of all


_FILES: dict[str, Callable[[Rollouts, Path, Mapping[str, object]], None]] = {
    ".parquet": _write_parquet,
    ".csv": _write_csv,
    ".jsonl": _write_lines,
}


def _write_batches(
    batches: Iterator[Sequence[Mapping[str, object]]],
    types: dict[str, pa.DataType | None],
    file: Path,
    facts: Mapping[str, object],
) -> bool:
    """Write a Parquet file of columns of these types, those of the first batch where there are none
    yet.

    ``types`` is extended by what the rollouts have, None for JSON text; returns whether the file
    has these types.
    """
    import pyarrow as pa
    from pyarrow import parquet

    writer, fits = None, True
    try:
        for rows in batches:
            plain: list[dict[str, object]] = in_utf8(rows)
            before, inferred = dict(types), {}
            columns = {
                name: [row.get(name) for row in plain]
                for name in dict.fromkeys(itertools.chain.from_iterable(plain))
            }
            for name, values in columns.items():
                earlier_type = None if name in TEXTS_ALONE else types.get(name, pa.null())
                types[name], inferred[name] = _common_type(earlier_type, values)
            fits = fits and types == (before or types)
            if not fits:
                continue
            absent = [None] * len(rows)
            arrays = {
                name: _of_type(kind, columns.get(name, absent), inferred.get(name))
                for name, kind in types.items()
            }
            read = [_as_read(types[name] is None, name, array) for name, array in arrays.items()]
            remainders = [
                remainder_of(row, dict(zip(arrays, values, strict=True)))
                for row, values in zip(rows, zip(*read, strict=True), strict=True)
            ]
            arrays[REMAINDER] = pa.array(
                [encode_row(each).decode() if each else None for each in remainders], pa.string()
            )
            marks = {name: JSON_TEXT for name, kind in types.items() if kind is None}
            marks[REMAINDER] = JSON_TEXT
            for name in facts.keys() - types.keys():
                arrays[name], marks[name] = pa.array([facts[name]] * len(rows)), OF_THE_RUN
            schema = pa.schema(
                pa.field(name, array.type, metadata=marks.get(name))
                for name, array in arrays.items()
            )
            writer = writer or parquet.ParquetWriter(str(file), schema)
            writer.write_table(pa.Table.from_arrays(list(arrays.values()), schema=schema))
        if writer is None:
            parquet.write_table(pa.table({}), file)
    finally:
        if writer is not None:
            writer.close()
    return fits


def read_parquet(file: Path) -> Iterator[dict[str, object]]:
    """The saved rollouts in a file that `save` wrote. *Raises* ConfigError for another file."""
    import pyarrow as pa
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(str(file)) as opened:
            strings = [field for field in opened.schema_arrow if pa.types.is_string(field.type)]
            texts = {
                field.name
                for field in strings
                if field.name in STRUCTURED or JSON_TEXT.items() <= (field.metadata or {}).items()
            }
            of_rollouts = [
                field.name
                for field in opened.schema_arrow
                if not OF_THE_RUN.items() <= (field.metadata or {}).items()
            ]
            for batch in opened.iter_batches(BATCH_SIZE, columns=of_rollouts):
                names = batch.schema.names
                columns = [
                    _as_read(name in texts, name, batch.column(name), REMAINDER not in names)
                    for name in names
                ]
                for values in zip(*columns, strict=True):
                    row = dict(zip(names, values, strict=True))
                    remainder = row.pop(REMAINDER, None)
                    yield row if remainder is None else with_remainder(row, remainder)
    except (pa.ArrowException, ValueError, TypeError) as error:
        raise ConfigError(
            f"{file} cannot be read as saved rollouts ({error})", path=str(file)
        ) from error


def _as_read(is_text: bool, name: str, array: pa.Array, is_older: bool = False) -> list[object]:
    """The values of a column as they are read; ``is_older``: a file without ``REMAINDER``."""
    values: list[Any] = array.to_pylist()
    if is_text:
        values = [None if value is None else decode_json(value) for value in values]
    if name in FILLED if is_older else name in ("prompt", "completion"):
        return [_without_nulls(value) for value in values]
    return values


def _without_nulls(value: object) -> object:
    """Without the fields that a struct of Arrow adds to an object that lacks them."""
    if isinstance(value, list):
        return [_without_nulls(part) for part in value]
    if isinstance(value, dict):
        return {name: _without_nulls(part) for name, part in value.items() if part is not None}
    return value


def _of_type(
    kind: pa.DataType | None, values: Sequence[object], inferred: pa.Array | None
) -> pa.Array:
    """Values as an Arrow array of a type, None for JSON text; ``inferred``: of their type."""
    import pyarrow as pa

    if kind is None:
        return pa.array(_texts(values), pa.string())
    return inferred if inferred is not None and inferred.type == kind else pa.array(values, kind)


def _common_type(merged: pa.DataType | None, values: Sequence[object]) -> tuple[object, object]:
    """(the Arrow type of the values and of those before them, of type ``merged``; the values as an
    array of their own).

    Both are None when no single type fits.
    """
    import pyarrow as pa

    if merged is None:
        return None, None
    try:
        array = pa.array(values)
        if array.type == merged:
            return merged, array
        schemas = [pa.schema([pa.field("", kind)]) for kind in (merged, array.type)]
        common = pa.unify_schemas(schemas, promote_options="permissive").field(0).type
    except (pa.ArrowException, OverflowError):  # mixed types
        return None, None
    return (None, None) if _is_unfit(common) else (common, array)


def _arrow_column(name: str, values: list[object]) -> list[object]:
    """The values, or their JSON texts when no single Arrow type that Parquet supports fits them."""
    import pyarrow as pa

    try:
        if name not in TEXTS_ALONE and not _is_unfit(pa.array(values).type):
            return values
    except (pa.ArrowException, OverflowError):  # mixed types become JSON texts
        pass
    return _texts(values)


def _texts(values: Sequence[object]) -> list[object]:
    return [None if value is None else json.dumps(value) for value in values]


def _is_unfit(kind: pa.DataType) -> bool:
    """Whether Parquet has no such type, or it has so many fields that its keys are data."""
    return _num_fields(kind) > MAX_STRUCT_FIELDS


def _num_fields(kind: pa.DataType) -> float:
    """Fields of a type and of those within it; without end for a struct without fields."""
    if str(kind).startswith("struct") and not kind.num_fields:
        return math.inf
    return sum(1 + _num_fields(kind.field(index).type) for index in range(kind.num_fields))
