"""The index of a large journal, kept beside it in ``results.index``: the next process need not decode each line.

A cache, never trusted over the journal. It is a sequence of parts, one for each block of the columns, in the order of
the journal; a part is used when the journal has the very bytes that were indexed up to its end, by their CRC-32. So a
journal that lost its last lines, or got others there, is read from where it differs. Absent, damaged or of another
version, the whole journal is read. Deleting it loses nothing.

A part is one line of JSON with the names and types of the columns, the columns, and the CRC-32 of both in four bytes.
Parts are appended while the run continues, so that a killed one has them; what does not fit is cut off first. A block
that was written is held no longer: it is read from here when it is asked for, also from a file that was deleted since.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO
from zlib import crc32

import numpy as np

from verifiers.results.columns import Block, BlocksFile, FileBlock
from verifiers.results.index import Mark, RowIndex
from verifiers.runtime.json import decode_row, encode_row

INDEX_NAME = "results.index"
FORMAT = 3
"""Changes with what the columns hold; an index of another format is not used."""
_CHUNK_BYTES = 2**20
_MAX_HEADER_BYTES = 2**26


def open_index(file: Path, metric_names: Sequence[str] = (), *, in_file: bool = False) -> RowIndex:
    """The index of a results file, read to its end. *Raises* OSError; damage of the file is its ``failure``.

    ``in_file``: what the kept index has is not held, but read from there; for a writer of the run.
    """
    index = RowIndex(file, metric_names)
    try:
        _restore(index, file, in_file)
    except (OSError, LookupError):  # absent, or without a column: the journal is read instead
        index = RowIndex(file, metric_names)
    index.read()
    return index


def keep_index(index: RowIndex) -> None:
    """Write the blocks of a journal's index beside it that are not kept there yet, and hold them no longer.

    *Raises* OSError, TypeError: then they are held.
    """
    if not index.is_journal or index.failure is not None:
        return
    for number in range(index.num_kept, len(index.marks)):
        content, starts = _part(index, number)
        file = index.kept_in = index.kept_in or BlocksFile(index.path.with_name(INDEX_NAME))
        file.replace_end(index.kept_bytes, content)
        blocks = {name: np.asarray(block) for name, block in index.blocks(number).items()}
        in_file = {name: FileBlock(file, index.kept_bytes + start, blocks[name]) for name, start in starts.items()}
        index.replace_blocks(number, in_file)
        index.num_kept, index.kept_bytes = number + 1, index.kept_bytes + len(content)


def _part(index: RowIndex, number: int) -> tuple[bytes, dict[str, int]]:
    """One block of the index as it is kept, and where the values of each column start; equal values are stored once."""
    mark = index.marks[number]
    blocks = {name: np.asarray(block) for name, block in index.blocks(number).items()}
    stored = {name: block[:1] if block.strides == (0,) else block for name, block in blocks.items()}
    header = {
        "format": FORMAT,
        "rows": mark.num_rows,
        "bytes": mark.end,
        "crc32": mark.checksum,
        "names": index.new_names(number),
        "columns": [[name, values.dtype.str, len(values)] for name, values in stored.items()],
    }
    line = encode_row(header) + b"\n"
    content = b"".join([line, *(values.tobytes() for values in stored.values())])
    starts, start = {}, len(line)
    for name, values in stored.items():
        if values is blocks[name]:
            starts[name] = start
        start += values.nbytes
    return content + crc32(content).to_bytes(4, "big"), starts


def _restore(index: RowIndex, file: Path, in_file: bool) -> None:
    """Fill an empty index with the kept parts that fit the journal. *Raises* OSError, LookupError."""
    marks: list[Mark] = []
    blocks: list[dict[str, Block]] = []
    names: dict[str, list[str]] = {}
    path = file.with_name(INDEX_NAME)
    with open(path, "rb") as index_file, open(file, "rb") as journal:
        before = Mark(0, 0, 0)
        block_file = BlocksFile(path) if in_file else None
        for mark, new_names, block in _parts(index_file, block_file):
            if _checksum(journal, mark.end - before.end, before.checksum) != mark.checksum:
                break
            before = mark
            for name, values in new_names.items():
                names.setdefault(name, []).extend(values)
            marks.append(mark)
            blocks.append(block)
            index.kept_bytes = index_file.tell()
    index.kept_in = block_file
    if marks:
        index.restore(marks, names, blocks)
        index.num_kept = len(marks)


def _parts(
    file: IO[bytes], block_file: BlocksFile | None
) -> Iterator[tuple[Mark, Mapping[str, list[str]], dict[str, Block]]]:
    """The parts of an index up to its end, or to one that is damaged; ``block_file``: where blocks are left."""
    before = Mark(0, 0, 0)
    while True:
        line = file.readline(_MAX_HEADER_BYTES)
        try:
            header = decode_row(line)
            if header["format"] != FORMAT:
                return
            columns = [(name, np.dtype(kind), size) for name, kind, size in header["columns"]]
            names = header["names"]
            num_names = Counter(before.num_names) + Counter({name: len(values) for name, values in names.items()})
            mark = Mark(header["rows"], header["bytes"], header["crc32"], num_names)
            num_rows = mark.num_rows - before.num_rows
            if num_rows <= 0 or mark.end <= before.end or any(size not in (1, num_rows) for _, _, size in columns):
                return
            start = file.tell()
            content = file.read(sum(kind.itemsize * size for _, kind, size in columns))
            if file.read(4) != crc32(content, crc32(line)).to_bytes(4, "big"):
                return
            block: dict[str, Block] = {}
            place = 0
            for name, kind, size in columns:
                values = np.frombuffer(content, kind, size, place)
                if size == 1:
                    block[name] = np.broadcast_to(values if block_file is None else values.copy(), num_rows)
                else:
                    block[name] = values if block_file is None else FileBlock(block_file, start + place, values)
                place += values.nbytes
        except (ValueError, LookupError, TypeError):
            return
        yield mark, names, block
        before = mark


def _checksum(file: IO[bytes], num_bytes: int, checksum: int) -> int:
    """The CRC-32 with the next bytes of a file; -1 when it has fewer."""
    while num_bytes and (chunk := file.read(min(num_bytes, _CHUNK_BYTES))):
        checksum, num_bytes = crc32(chunk, checksum), num_bytes - len(chunk)
    return -1 if num_bytes else checksum
