"""Open a dataset of any accepted type: its rows, by split if it has any.

Accepted: ``datasets.Dataset``, ``DatasetDict`` (or a dict of such tables by split), a DataFrame of
pandas or polars, a list of dicts, a dict of columns, the path of a JSONL, JSON, CSV,
Excel or Parquet file, and a function without arguments that returns one of these. Only a Parquet file and a
DataFrame import ``datasets``, and a workbook of Excel ``pandas``.
"""

from __future__ import annotations

import csv
import shlex
import threading
import zipfile
from collections.abc import Callable, Mapping, Sequence
from io import TextIOWrapper
from pathlib import Path
from typing import Any, Protocol, TypeAlias, TypeGuard

from verifiers.errors import DatasetError
from verifiers.runtime.bounded import encoding_of, open_file
from verifiers.runtime.decoding import decode_json
from verifiers.runtime.install_lines import install_line

EVAL_SPLITS = ("test", "validation")
ACCEPTED = (
    "a datasets.Dataset or DatasetDict, a DataFrame, a list of dicts, a dict of columns, the path"
    " of a .jsonl, .json, .csv, .xlsx or .parquet file, or a function that returns one of these"
)


class HubTable(Protocol):
    """A ``datasets.Dataset``, for type checkers: an object with ``column_names``."""

    @property
    def column_names(self) -> object: ...


DatasetLike: TypeAlias = (
    HubTable | Sequence[Mapping[str, Any]] | Mapping[str, Any] | str | Path | Callable[[], Any]
)
"""The types of ``ACCEPTED``; a mapping is a dict of columns, or of tables by split."""


class Source:
    """A dataset as passed, opened once on first use: a builder function is called once."""

    def __init__(self, dataset: DatasetLike):
        self.dataset = dataset
        self._lock = threading.Lock()
        self._opened: dict[str, Rows] | Rows | None = None

    def opened(self) -> dict[str, Rows] | Rows:
        """The rows, or the rows by split. Raises: ``DatasetError`` when they cannot be read."""
        with self._lock:
            if self._opened is None:
                self._opened = _open(self.dataset() if is_builder(self.dataset) else self.dataset)
            return self._opened

    def train(self) -> Rows:
        """Return the training rows: all, or those of the split ``train``."""
        opened = self.opened()
        if not isinstance(opened, dict):
            return opened
        if "train" not in opened:
            raise DatasetError(
                f"the dataset has the splits {', '.join(opened)} and no split 'train'; pass one of"
                f" them, for example dataset[{next(iter(opened), 'train')!r}]"
            )
        return opened["train"]

    def evaluation(self) -> Rows | None:
        """Return the rows of the split ``test``, else ``validation``; None without either."""
        opened = self.opened()
        if not isinstance(opened, dict):
            return None
        return next((opened[split] for split in EVAL_SPLITS if split in opened), None)

    def only_evaluation(self) -> Rows:
        """The rows of an ``eval_dataset``: of its evaluation split, else of ``train``, else all."""
        rows = self.evaluation()
        return rows if rows is not None else self.train()


def is_builder(dataset: object) -> TypeGuard[Callable[[], object]]:
    """Return whether ``dataset`` is a function that returns a dataset."""
    return callable(dataset) and not hasattr(dataset, "column_names")


class Rows(Protocol):
    """Opened rows: column names, length, and access by position."""

    columns: tuple[str, ...]

    def __len__(self) -> int: ...

    def read(self, positions: Sequence[int]) -> list[dict[str, Any]]:
        """Return the rows at ``positions`` as new dicts with shared values."""
        ...

    def column(self, name: str) -> list[Any]:
        """Return one value per row, None where absent."""
        ...


class ListRows:
    """Rows of a list of dicts; an absent key stays absent."""

    def __init__(self, rows: Sequence[Mapping[str, object]]):
        self._rows = rows
        self.columns = tuple(dict.fromkeys(name for row in rows for name in row))

    def __len__(self) -> int:
        return len(self._rows)

    def read(self, positions: Sequence[int]) -> list[dict[str, Any]]:
        return [dict(self._rows[position]) for position in positions]

    def column(self, name: str) -> list[object]:
        return [row.get(name) for row in self._rows]


class HubRows:
    """Rows of a ``datasets.Dataset``, decoded on access: a large dataset is in memory once. Images
    are the bytes of their files."""

    def __init__(self, dataset: Any):
        self._dataset = _with_stored_images(dataset.with_format(None))
        self.columns = tuple(dataset.column_names)

    def __len__(self) -> int:
        return len(self._dataset)

    def read(self, positions: Sequence[int]) -> list[dict[str, object]]:
        return _rows_of(self._dataset[list(positions)])

    def column(self, name: str) -> list[object]:
        return list(self._dataset[name])


def _with_stored_images(dataset: Any) -> Any:
    """The dataset with the cells of ``Image`` columns as they are stored, not decoded."""
    for name, feature in (dataset.features or {}).items():
        stored = _stored_feature(feature)
        if stored is not feature:
            dataset = dataset.cast_column(name, stored)
    return dataset


def _stored_feature(feature: Any) -> Any:
    """A column's feature, with its images undecoded; the same object where it has none."""
    if type(feature).__name__ == "Image" and feature.decode:
        return type(feature)(decode=False)
    inner = getattr(feature, "feature", None)
    if inner is not None and (stored := _stored_feature(inner)) is not inner:
        return type(feature)(stored)
    if isinstance(feature, list | dict):
        members = list(feature.values()) if isinstance(feature, dict) else feature
        changed = [_stored_feature(member) for member in members]
        if any(new is not old for new, old in zip(changed, members, strict=True)):
            return (
                dict(zip(feature, changed, strict=True)) if isinstance(feature, dict) else changed
            )
    return feature


def _open(dataset: object) -> dict[str, Rows] | Rows:
    dataset = _without_frame(dataset)
    bases = type(dataset).__mro__
    kinds = {cls.__name__ for cls in bases if cls.__module__.partition(".")[0] == "datasets"}
    if kinds & {"IterableDataset", "IterableDatasetDict"}:
        raise DatasetError(
            "an iterable (streaming) dataset has no length and no stable order; load it without"
            " streaming=True, or pass a part of it: list(dataset.take(1000))"
        )
    if isinstance(dataset, Mapping):
        dataset = dataset if kinds else {k: _without_frame(v) for k, v in dataset.items()}
        is_by_split = "DatasetDict" in kinds or {"train", *EVAL_SPLITS} & dataset.keys()
        if is_by_split and all(_is_table(value) for value in dataset.values()):
            return {str(split): _open_table(table) for split, table in dataset.items()}
        return _open_columns(dataset)
    if "Dataset" in kinds or isinstance(dataset, list | tuple):
        return _open_table(dataset)
    if isinstance(dataset, str | Path):
        return _open_file(Path(dataset))
    raise DatasetError(f"cannot read a dataset from {_described(dataset)}; pass {ACCEPTED}")


def _without_frame(table: object) -> object:
    """The rows of a DataFrame of pandas or polars; any other object as it is."""
    if type(table).__name__ != "DataFrame":
        return table
    if hasattr(table, "to_dicts"):
        return table.to_dicts()
    from datasets import Dataset  # late: it takes a second to import

    return Dataset.from_pandas(table, preserve_index=False)


def _is_table(value: object) -> bool:
    if isinstance(value, list | tuple):
        return bool(value) and all(isinstance(row, Mapping) for row in value)
    return hasattr(value, "column_names")


def _open_table(table: object) -> Rows:
    if not isinstance(table, list | tuple):
        return HubRows(table)
    for position, row in enumerate(table):
        if not isinstance(row, Mapping):
            raise DatasetError(
                f"row {position} of the dataset is {_described(row)}, not a dict", row=position
            )
    return ListRows(table)


def _open_columns(columns: Mapping[str, Any]) -> Rows:
    values: dict[str, list[object]] = {}
    for name, column in columns.items():
        is_sized = hasattr(column, "__len__") and hasattr(column, "__iter__")
        if isinstance(column, str | Mapping) or not is_sized:
            raise DatasetError(
                f"column {name!r} of the dataset is {_described(column)}, not a list; for a single"
                " row write [{...}]"
            )
        values[str(name)] = column.tolist() if hasattr(column, "tolist") else list(column)
    lengths = {name: len(column) for name, column in values.items()}
    if len(set(lengths.values())) > 1:
        lengths_text = ", ".join(f"{name} {length}" for name, length in lengths.items())
        raise DatasetError(f"the columns of the dataset differ in length: {lengths_text}")
    return ListRows(_rows_of(values))


def _rows_of(columns: Mapping[str, Sequence[object]]) -> list[dict[str, object]]:
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _open_file(path: Path) -> Rows:
    readers: dict[str, Callable[[Path], Rows]] = {
        ".jsonl": _open_jsonl,
        ".ndjson": _open_jsonl,
        ".json": _open_json,
        ".csv": _open_csv,
        ".xlsx": _open_xlsx,
        ".parquet": _open_parquet,
    }
    reader = readers.get(path.suffix.lower())
    if reader is None or not path.is_file():
        kinds = f"the file type is not one of {', '.join(readers)}"
        why = "there is no such file" if reader else kinds
        raise DatasetError(
            f"cannot read the dataset {str(path)!r}: {why}. For a dataset of a hub, pass"
            " datasets.load_dataset(...)",
            path=str(path),
        )
    try:
        return reader(path)
    except UnicodeDecodeError as error:
        raise DatasetError(
            f"cannot read the dataset {path}: byte 0x{error.object[error.start]:02x} is not UTF-8;"
            f" a table that Excel saved as CSV is in the encoding of Windows: iconv -f cp1252 -t"
            f" utf-8 {shlex.quote(str(path))} > utf-8{path.suffix}",
            path=str(path),
        ) from error
    except (OSError, csv.Error) as error:
        raise DatasetError(f"cannot read the dataset {path}: {error}", path=str(path)) from error


def _open_jsonl(path: Path) -> Rows:
    with _opened_text(path) as file:
        lines = file.read().split("\n")
    rows = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            row = _parsed(line, path, number)
            if not isinstance(row, dict):
                raise DatasetError(
                    f"{path}:{number} is not a JSON object", path=str(path), line=number
                )
            rows.append(row)
    return ListRows(rows)


def _open_json(path: Path) -> Rows:
    with _opened_text(path) as file:
        content = _parsed(file.read(), path, None)
    if not isinstance(content, list | dict):
        raise DatasetError(
            f"{path} holds neither a list of rows nor a dict of columns", path=str(path)
        )
    opened = _open(content)
    if isinstance(opened, dict):
        raise DatasetError(
            f"{path} holds splits ({', '.join(opened)}); write one file for each", path=str(path)
        )
    return opened


def _opened_text(path: Path, newline: str | None = None) -> TextIOWrapper:
    file = open_file(path)
    encoding = encoding_of(file.read(4))
    file.seek(0)
    return TextIOWrapper(file, encoding=encoding, newline=newline)


def _open_csv(path: Path) -> Rows:
    """Read cells as text, as CSV has no types, except an ``example_id`` column of integers."""
    with _opened_text(path, newline="") as file:
        rows: list[dict[str, object]] = []
        header = file.readline()
        file.seek(0)
        delimiter = max(",;\t", key=header.count)
        for row in csv.DictReader(file, delimiter=delimiter):
            if None in row or None in row.values():
                number = len(rows)
                raise DatasetError(
                    f"{path}: row {number} does not have as many cells as the header",
                    path=str(path),
                    row=number,
                )
            rows.append(row)
    return _rows_of_texts(rows)


def _rows_of_texts(rows: list[dict[str, Any]]) -> Rows:
    if all(row.get("example_id", "").isdecimal() for row in rows):
        rows = [row | {"example_id": int(row["example_id"])} for row in rows]
    return ListRows(rows)


def _open_xlsx(path: Path) -> Rows:
    """Read the first sheet as ``_open_csv`` does: cells as text."""
    try:
        import openpyxl  # noqa: F401  what pandas reads it with
    except ImportError as error:
        raise DatasetError(
            f"{path} is a workbook of Excel, which is read with {install_line('verifiers', 'excel')};"
            " or save the sheet as CSV UTF-8",
            path=str(path),
        ) from error
    import pandas

    try:
        table = pandas.read_excel(path, dtype=str, keep_default_na=False)
    except (ValueError, KeyError, zipfile.BadZipFile) as error:
        raise DatasetError(f"{path} is not a readable workbook: {error}", path=str(path)) from error
    return _rows_of_texts([dict(row) for row in table.to_dict("records")])


def _open_parquet(path: Path) -> Rows:
    import datasets
    import pyarrow
    import pyarrow.parquet

    try:
        return HubRows(datasets.Dataset(pyarrow.parquet.read_table(path)))
    except pyarrow.ArrowInvalid as error:
        raise DatasetError(
            f"{path} is not a readable Parquet file: {error}", path=str(path)
        ) from error


def _parsed(text: str, path: Path, line: int | None) -> object:
    try:
        return decode_json(text)
    except ValueError as error:
        location = path if line is None else f"{path}:{line}"
        raise DatasetError(f"{location} is not JSON: {error}", path=str(path), line=line) from error


def _described(value: object) -> str:
    kind = type(value).__name__
    return f"{'an' if kind[:1].lower() in 'aeiou' else 'a'} {kind}"
