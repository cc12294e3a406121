"""Results as a dataset, a run directory, one JSON Lines file or one Parquet file.

A column whose values do not fit one Arrow type is written as JSON text, never dropped. Tables have
the escape of a lone surrogate, which UTF-8 cannot encode; JSON Lines have itself.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verifiers.errors import ConfigError
from verifiers.results.atif import to_trajectory
from verifiers.results.rows import (
    RolloutOutput,
    content_hash,
    example_key,
    json_ready,
    row_for_disk,
)
from verifiers.results.statistics import mean
from verifiers.runtime.decoding import decode_message
from verifiers.runtime.json import encode_row, in_utf8
from verifiers.storage.directory import METADATA_NAME, RESULTS_NAME
from verifiers.storage.files import atomic_write
from verifiers.storage.journal import Journal

if TYPE_CHECKING:
    import pyarrow as pa


JSON_TEXT = {b"verifiers": b"json"}
"""Mark of a column of a Parquet file that is JSON text."""
STRUCTURED = frozenset("info metrics error timing token_usage tool_defs".split())
"""Columns of lists and objects, whose texts are JSON in files without marks too."""
FILLED = "prompt completion timing token_usage tool_defs trajectory".split()
"""Columns in which an absent field and null mean the same."""
BATCH_SIZE = 2_000
"""Rollouts that are in memory while a Parquet file is written."""


def rows_to_dataset(rows: Sequence[Mapping[str, Any]]) -> Any:
    """A ``datasets.Dataset`` with the columns of all rollouts; unknown numbers are null."""
    from datasets import Dataset

    plain = [in_utf8(json_ready(row)) for row in rows]
    names = dict.fromkeys(name for row in plain for name in row)
    return Dataset.from_dict(
        {name: _arrow_column([row.get(name) for row in plain]) for name in names}
    )


def average_rewards(outputs: Sequence[RolloutOutput], siblings: int | None) -> list[float]:
    """Mean known reward of each rollout's group: one example, or ``siblings`` in a row."""
    keys = [n // siblings if siblings else example_key(output) for n, output in enumerate(outputs)]
    groups: dict[Any, list[float]] = {}
    for key, output in zip(keys, outputs, strict=True):
        groups.setdefault(key, []).append(output["reward"])
    averages = {key: mean(rewards) for key, rewards in groups.items()}
    return [averages[key] for key in keys]


OTHER_FILES = frozenset(".json .txt .xlsx .tsv .feather .arrow .pkl .html .md .gz .zip".split())
"""Suffixes of files that are not written; another suffix is part of a folder's name."""


def save(
    rollouts: Callable[[], Iterator[RolloutOutput]], metadata: Mapping[str, Any], path: str | Path
) -> None:
    """Write the results of a run to ``path``: one ``.parquet``, ``.csv`` or ``.jsonl`` file, else
    a run directory.

    ``rollouts()`` yields them in order, and is called again where a format needs it. *Raises*
    ConfigError when the directory already holds results.
    """
    target = Path(path)
    if target.suffix == ".parquet":
        target.parent.mkdir(parents=True, exist_ok=True)
        _write_parquet(rollouts, target)
        return
    if target.suffix == ".csv":
        frame = rows_to_dataset(list(rollouts())).to_pandas()
        for name in frame.columns:
            frame[name] = frame[name].map(_as_cell)
        frame.to_csv(target, index=False)
        return
    rows = _disk_rows(rollouts())
    if target.suffix == ".jsonl":
        target.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(target, b"".join(encode_row(row) + b"\n" for row in rows))
        return
    if target.suffix in OTHER_FILES:
        raise ConfigError(
            f"results are saved as a folder, .jsonl, .parquet or .csv, not as {target.suffix}",
            path=str(target),
        )
    if (target / RESULTS_NAME).exists():
        raise ConfigError(
            f"{target / RESULTS_NAME} already exists; save into another directory", path=str(target)
        )
    target.mkdir(parents=True, exist_ok=True)
    with Journal.open(target / RESULTS_NAME) as journal:
        journal.append_sync(rows)
    _write_metadata(metadata, target)


def _as_cell(value: object) -> object:
    """A value in a cell of a CSV file: arrays and objects as JSON."""
    if not isinstance(value, Mapping | list) and not hasattr(value, "tolist"):
        return value
    return json.dumps(json_ready(value), ensure_ascii=False, default=lambda array: array.tolist())


def _write_metadata(metadata: Mapping[str, Any], folder: Path) -> None:
    content = json.dumps(json_ready({**metadata, "path_to_save": str(folder)}), indent=2)
    atomic_write(folder / METADATA_NAME, content.encode() + b"\n")


def trajectories(
    rollouts: Iterable[RolloutOutput],
    states: Sequence[Mapping[str, Any]] | None,
    metadata: Mapping[str, Any],
    folder: str | Path | None,
) -> list[dict[str, Any]]:
    """The rollouts as ATIF trajectories, in their order; each also as a file in ``folder``.

    *Raises* ConfigError for a folder that has files.
    """
    names = str(metadata.get("env_id") or ""), str(metadata.get("model") or "")
    documents = []
    for output, state in zip(rollouts, states or itertools.repeat({})):  # noqa: B905  without end
        turns = {"trajectory": state["trajectory"]} if "trajectory" in state else {}
        documents.append(to_trajectory({**turns, **output}, *names))
    if folder is not None:
        target = Path(folder)
        if target.is_dir() and any(target.iterdir()):
            raise ConfigError(f"{target} has files; write into another folder", path=str(target))
        target.mkdir(parents=True, exist_ok=True)
        for number, document in enumerate(documents):
            atomic_write(target / f"{number:06}.json", encode_row(document) + b"\n")
        _write_metadata(metadata, target)
    return documents


def _disk_rows(outputs: Iterable[RolloutOutput]) -> list[dict[str, Any]]:
    counts: dict[str, int] = {}
    rows = []
    for output in outputs:
        example_hash = output.get("example_hash") or content_hash(output)
        sibling = output.get("sibling", counts.get(example_hash, 0))
        counts[example_hash] = sibling + 1
        rows.append(row_for_disk(output, example_hash, sibling, output.get("attempts") or 1))
    return rows


def _write_parquet(rollouts: Callable[[], Iterator[RolloutOutput]], target: Path) -> None:
    """Write one row group for ``BATCH_SIZE`` rollouts; reads them twice where later batches have
    other columns or types.

    The file appears whole, or not at all.
    """
    hidden = target.with_name(f".{target.name}.tmp")
    types: dict[str, pa.DataType | None] = {}
    try:
        while not _write_batches(rollouts(), types, hidden):
            pass  # again, with the types of all
        hidden.replace(target)
    finally:
        hidden.unlink(missing_ok=True)


def _write_batches(
    rollouts: Iterator[RolloutOutput], types: dict[str, pa.DataType | None], file: Path
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
        for columns in _batches(rollouts):
            before, inferred = dict(types), {}
            for name, values in columns.items():
                types[name], inferred[name] = _common_type(types.get(name, pa.null()), values)
            fits = fits and types == (before or types)
            if not fits:
                continue
            schema = pa.schema(
                pa.field(name, pa.string(), metadata=JSON_TEXT)
                if kind is None
                else pa.field(name, kind)
                for name, kind in types.items()
            )
            writer = writer or parquet.ParquetWriter(str(file), schema)
            absent = [None] * len(next(iter(columns.values())))
            arrays = [
                _of_type(kind, columns.get(name, absent), inferred.get(name))
                for name, kind in types.items()
            ]
            writer.write_table(pa.Table.from_arrays(arrays, schema=schema))
        if writer is None:
            parquet.write_table(pa.table({}), file)
    finally:
        if writer is not None:
            writer.close()
    return fits


def read_parquet(file: Path) -> Iterator[dict[str, Any]]:
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
            for batch in opened.iter_batches(BATCH_SIZE):
                for row in batch.to_pylist():
                    for name in texts:
                        row[name] = None if row[name] is None else decode_message(row[name])
                    for name in FILLED:
                        row[name] = _without_nulls(row.get(name))
                    yield row
    except (pa.ArrowException, ValueError) as error:
        raise ConfigError(
            f"{file} cannot be read as saved rollouts ({error})", path=str(file)
        ) from error


def _without_nulls(value: object) -> Any:
    """Without the fields that a struct of Arrow adds to an object that lacks them."""
    if isinstance(value, list):
        return [_without_nulls(part) for part in value]
    if isinstance(value, dict):
        return {name: _without_nulls(part) for name, part in value.items() if part is not None}
    return value


def _batches(rollouts: Iterator[RolloutOutput]) -> Iterator[dict[str, list[Any]]]:
    """Column -> JSON values of ``BATCH_SIZE`` rollouts; None if a rollout lacks the column."""
    while batch := [in_utf8(json_ready(row)) for row in itertools.islice(rollouts, BATCH_SIZE)]:
        names = dict.fromkeys(name for row in batch for name in row)
        yield {name: [row.get(name) for row in batch] for name in names}


def _of_type(kind: pa.DataType | None, values: list[Any], inferred: pa.Array | None) -> pa.Array:
    """Values as an Arrow array of a type, None for JSON text; ``inferred``: of their type."""
    import pyarrow as pa

    if kind is None:
        return pa.array(_texts(values), pa.string())
    return inferred if inferred is not None and inferred.type == kind else pa.array(values, kind)


def _common_type(merged: pa.DataType | None, values: list[Any]) -> tuple[Any, Any]:
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
    return (None, None) if _has_empty_struct(common) else (common, array)


def _arrow_column(values: list[Any]) -> list[Any]:
    """The values, or their JSON texts when no single Arrow type that Parquet supports fits them."""
    import pyarrow as pa

    try:
        if not _has_empty_struct(pa.array(values).type):
            return values
    except (pa.ArrowException, OverflowError):  # mixed types become JSON texts
        pass
    return _texts(values)


def _texts(values: list[Any]) -> list[Any]:
    return [None if value is None else json.dumps(value) for value in values]


def _has_empty_struct(arrow_type: pa.DataType) -> bool:
    if str(arrow_type).startswith("struct") and not arrow_type.num_fields:
        return True
    return any(_has_empty_struct(arrow_type.field(i).type) for i in range(arrow_type.num_fields))
