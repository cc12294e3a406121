"""The index of a large journal, kept beside it in ``results.index``: the next process need not decode each line.

A cache, never trusted over the journal: it is used when the journal begins with the very bytes that were indexed, by
their CRC-32; lines after them are read from the journal. Absent, damaged or of another version, the whole journal is
read. Deleting it loses nothing.

One line of JSON with the names and types of the columns, the columns, and the CRC-32 of all before it in four bytes.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np

from verifiers.results.index import RowIndex
from verifiers.runtime.bounded import read_file
from verifiers.runtime.json import decode_row, encode_row
from verifiers.storage.files import atomic_write

INDEX_NAME = "results.index"
FORMAT = 1
"""Changes with the columns; an index of another format is not used."""
_CHUNK_BYTES = 2**20
_SMALLER = {"d": "bhif", "Q": "", "q": "bhi", "i": "bh", "I": "BH"}
"""Type of a column in memory -> smaller types, in which it is stored when every value survives."""


def open_index(file: Path, metric_names: Sequence[str] = ()) -> RowIndex:
    """The index of a results file, read to its end. *Raises* OSError; damage of the file is its ``failure``."""
    index = RowIndex(file, metric_names)
    try:
        _restore(index, file)
    except (OSError, ValueError, LookupError, TypeError):  # absent or damaged: the journal is read instead
        index = RowIndex(file, metric_names)
    index.read()
    return index


def keep_index(index: RowIndex) -> None:
    """Write the index of a journal beside it, replacing one that covers less of it. *Raises* OSError."""
    if not index.is_journal or index.failure is not None or index.kept_end == index.end:
        return
    names, columns = index.content()
    stored = {name: _stored(column) for name, column in columns.items()}
    header = {
        "format": FORMAT,
        "rows": len(index),
        "bytes": index.end,
        "crc32": index.checksum,
        "names": names,
        "columns": [[name, columns[name].typecode, values.dtype.str] for name, values in stored.items()],
    }
    content = b"".join([encode_row(header), b"\n", *(values.tobytes() for values in stored.values())])
    atomic_write(index.path.with_name(INDEX_NAME), content + crc32(content).to_bytes(4, "big"))
    index.kept_end = index.end


def _restore(index: RowIndex, file: Path) -> None:
    """Fill an empty index from the kept one. *Raises* OSError, ValueError when there is none that fits the journal."""
    content = memoryview(read_file(file.with_name(INDEX_NAME), os.stat(file).st_size))  # no index is as long
    if crc32(content[:-4]).to_bytes(4, "big") != content[-4:]:
        raise ValueError("the index is damaged")
    line_end = bytes(content[: 2**26]).index(b"\n")
    header = decode_row(bytes(content[:line_end]))
    if header["format"] != FORMAT or _checksum(file, header["bytes"]) != header["crc32"]:
        raise ValueError("the index is of another version or of another journal")
    columns: dict[str, array[Any]] = {}
    start = line_end + 1
    for name, typecode, stored_type in header["columns"]:
        values = np.frombuffer(content, np.dtype(stored_type), header["rows"], start)
        columns[name] = array(typecode, values.astype(typecode).tobytes())
        start += values.nbytes
    index.restore(header["names"], columns, header["bytes"], header["crc32"])


def _stored(column: array[Any]) -> Any:
    """A column as an array of the smallest type that holds every value."""
    values = np.array(column)
    with np.errstate(invalid="ignore", over="ignore"):
        for typecode in _SMALLER[column.typecode]:
            smaller = values.astype(typecode)
            if np.array_equal(smaller.astype(column.typecode), values, equal_nan=column.typecode == "d"):
                return smaller
    return values


def _checksum(file: Path, num_bytes: int) -> int:
    """The CRC-32 of the first bytes of a file; -1 when it has fewer."""
    checksum = 0
    with open(file, "rb") as stream:
        while num_bytes and (chunk := stream.read(min(num_bytes, _CHUNK_BYTES))):
            checksum, num_bytes = crc32(chunk, checksum), num_bytes - len(chunk)
    return -1 if num_bytes else checksum
