"""Read a table of a stranger for ``vf-init --from``: its columns, and the cells of some of them.

The promise: bounded, and data stay data. A file has at most ``MAX_FILE_BYTES``, also unpacked, a
table ``MAX_ROWS`` rows and ``MAX_COLUMNS`` columns; what is more is an error and is never cut. A
workbook and a Parquet file are read row by row. Datasets of environments are read by ``sources``.
"""

from __future__ import annotations

import codecs
import csv
import io
import itertools
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from verifiers.data.sources import Source
from verifiers.errors import DatasetError
from verifiers.runtime.bounded import MAX_FILE_BYTES, encoding_of, open_file, read_file, size_text
from verifiers.runtime.install_lines import install_line

MAX_ROWS = 100_000
MAX_COLUMNS = 1000
_DELIMITERS = ",;\t|"
_SAMPLE_ROWS = 50
_BATCH_ROWS = 1024
_BATCH_BYTES = 2**28


@dataclass(frozen=True, slots=True)
class TextTable:
    """A table: the names of its columns, and its rows, which are read when they are asked for."""

    columns: tuple[str, ...]
    records: Callable[[Sequence[str]], Iterator[Sequence[object] | None]]
    """The cells of the named columns, row by row; None for a row of more cells than the header."""
    encoding: str = "utf-8"
    delimiter: str = ""


def read_table(path: Path) -> TextTable:
    """Open a .csv, .tsv, .jsonl, .json, .xlsx or .parquet file.

    *Raises* ``DatasetError`` when it cannot be read, at once or while its rows are read.
    """
    readers = {
        ".csv": _read_csv,
        ".tsv": _read_csv,
        ".jsonl": _read_objects,
        ".ndjson": _read_objects,
        ".json": _read_objects,
        ".xlsx": _read_workbook,
        ".parquet": _read_parquet,
    }
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise _unreadable(path, f"the file type is not one of {', '.join(readers)}")
    try:
        with open_file(path) as file:
            if file.seek(0, io.SEEK_END) > MAX_FILE_BYTES:
                raise _unreadable(path, f"it is longer than {size_text(MAX_FILE_BYTES)}")
        table = reader(path)
    except OSError as error:
        raise _unreadable(path, error.strerror or str(error)) from error
    if len(table.columns) > MAX_COLUMNS:
        raise _unreadable(path, f"it has more than {MAX_COLUMNS} columns")
    return table


def _read_csv(path: Path) -> TextTable:
    text, encoding = _decoded(read_file(path), path)
    first, _, below = text.partition("\n")
    delimiter = ""
    if first.strip().lower() in {f"sep={mark}" for mark in _DELIMITERS}:  # Excel's own line
        delimiter, text = first.strip("\r\n")[4], below
    if path.suffix.lower() == ".tsv":
        delimiter = "\t"
    delimiter = delimiter or max(_DELIMITERS, key=lambda mark: _regularity(text, mark))
    quoting = csv.QUOTE_MINIMAL
    if delimiter == "\t" and not _is_quoted_well(text, delimiter):
        quoting = csv.QUOTE_NONE  # many programs write tabs without a rule for quotation marks
    rows = _csv_rows(text, delimiter, path, quoting)
    columns = tuple(name.strip() for name in next(rows, []))

    def records(names: Sequence[str]) -> Iterator[Sequence[object] | None]:
        positions = [columns.index(name) for name in names]
        for cells in itertools.islice(_csv_rows(text, delimiter, path, quoting), 1, None):
            if any(cell.strip() for cell in cells[len(columns) :]):
                yield None
            elif cells:
                cells += [""] * (len(columns) - len(cells))
                yield [cells[position] for position in positions]

    return TextTable(columns, records, encoding, delimiter)


def _decoded(content: bytes, path: Path) -> tuple[str, str]:
    """The text and its encoding: as declared, else UTF-8, else that of Windows."""
    for encoding in (encoding_of(content[:4]), "cp1252"):
        try:
            text = content.decode(encoding)
        except UnicodeDecodeError:
            if content.startswith((codecs.BOM_UTF8, codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
                break
            continue
        if "\0" in text:
            break
        return text, encoding.removesuffix("-sig")
    raise _unreadable(path, "it is no text in UTF-8, UTF-16 or Windows-1252; save it as CSV UTF-8")


def _is_quoted_well(text: str, delimiter: str) -> bool:
    try:
        for _ in _csv_rows(text, delimiter, Path()):
            pass
    except DatasetError:
        return False
    return True


def _csv_rows(
    text: str, delimiter: str, path: Path, quoting: int = csv.QUOTE_MINIMAL
) -> Iterator[list[str]]:
    file = io.StringIO(text, newline="")
    reader = csv.reader(file, delimiter=delimiter, quoting=quoting, strict=True)  # type: ignore[arg-type]  # one of csv's constants
    try:
        yield from reader
    except csv.Error as error:
        why = f"line {reader.line_num}: {error}; a quotation mark within a cell is written twice"
        raise _unreadable(path, why) from error


def _regularity(text: str, delimiter: str) -> tuple[bool, float, int]:
    """How well a delimiter divides the first rows into as many cells as the header."""
    rows = _csv_rows(text, delimiter, Path())
    lengths: list[int] = []
    try:
        for cells in itertools.islice(filter(None, rows), _SAMPLE_ROWS):
            lengths.append(len(cells))
    except DatasetError:  # a damaged row is reported by the reader, with its line
        pass
    width = lengths[0] if lengths else 0
    return width > 1, lengths.count(width) / max(len(lengths), 1), width


def _read_objects(path: Path) -> TextTable:
    opened = Source(path).opened()
    assert not isinstance(opened, dict)  # a file has no splits

    def records(names: Sequence[str]) -> Iterator[Sequence[object]]:
        yield from zip(*map(opened.column, names), strict=True)

    return TextTable(opened.columns, records)


def _read_workbook(path: Path) -> TextTable:
    """The first sheet, with the values of formulas as Excel saved them."""
    try:
        import openpyxl
    except ImportError as error:
        raise _unreadable(
            path,
            f"a workbook is read with {install_line('verifiers', 'excel')}; or save the sheet as"
            " CSV UTF-8",
        ) from error
    try:
        with zipfile.ZipFile(path) as archive:
            if sum(member.file_size for member in archive.infolist()) > 4 * MAX_FILE_BYTES:
                raise _unreadable(path, f"it unpacks to more than {size_text(4 * MAX_FILE_BYTES)}")
        book = openpyxl.load_workbook(path, read_only=True, data_only=True)
        sheet = book.worksheets[0]
        header = next(sheet.iter_rows(max_row=1, max_col=MAX_COLUMNS + 1, values_only=True), ())
    except DatasetError:
        raise
    except Exception as error:  # a damaged workbook fails anywhere inside openpyxl
        raise _unreadable(path, f"it is no readable workbook: {error}") from error
    while header and header[-1] is None:
        header = header[:-1]
    columns = tuple("" if name is None else str(name).strip() for name in header)

    def records(names: Sequence[str]) -> Iterator[Sequence[object]]:
        positions = [columns.index(name) for name in names]
        try:
            for cells in sheet.iter_rows(2, MAX_ROWS + 2, 1, len(columns), values_only=True):
                if any(cell is not None for cell in cells):
                    padded = (*cells, *[None] * (len(columns) - len(cells)))
                    yield [padded[position] for position in positions]
        except Exception as error:
            raise _unreadable(path, f"it is no readable workbook: {error}") from error

    return TextTable(columns, records)


def _read_parquet(path: Path) -> TextTable:
    import pyarrow
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
        groups = [file.metadata.row_group(number) for number in range(file.num_row_groups)]
    except (pyarrow.ArrowInvalid, pyarrow.ArrowNotImplementedError) as error:
        raise _unreadable(path, f"it is no readable Parquet file: {error}") from error
    too_large = _unreadable(path, f"it unpacks to more than {size_text(4 * MAX_FILE_BYTES)}")
    num_bytes = sum(group.total_byte_size for group in groups)
    if num_bytes > 4 * MAX_FILE_BYTES:
        raise too_large
    # a value that is stored once may be that of every row
    batch_rows = max(1, min(_BATCH_ROWS, _BATCH_BYTES // max(num_bytes, 1)))

    def records(names: Sequence[str]) -> Iterator[Sequence[object]]:
        num_unpacked = 0
        try:
            for batch in file.iter_batches(batch_rows, columns=list(dict.fromkeys(names))):
                num_unpacked += batch.nbytes
                if num_unpacked > 4 * MAX_FILE_BYTES:
                    raise too_large
                yield from zip(*(batch.column(name).to_pylist() for name in names), strict=True)
        except DatasetError:  # a ValueError
            raise
        except (
            OSError,
            ValueError,  # a date or a time that Python has no value for
            KeyError,
            OverflowError,
            pyarrow.ArrowException,
        ) as error:
            raise _unreadable(path, f"it is no readable Parquet file: {error}") from error

    return TextTable(tuple(file.schema_arrow.names), records)


def _unreadable(path: Path, why: str) -> DatasetError:
    return DatasetError(f"cannot read the table {str(path)!r}: {why}", path=str(path))
