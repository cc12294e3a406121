"""The index of a large journal, kept beside it in ``results.index``: the next process need not
decode each line.

A cache, never trusted over the journal. It is a sequence of parts, each of some rows in the order
of the journal. A part is used when its seal fits: a keyed hash of the part, of the bytes of the
journal that it covers and of the seal before it, with a key that only this user has. So an index
that another user wrote is not believed, nor read beyond its first numbers, and a journal that lost
its last lines, or got others there, is read from where it differs. Absent, damaged, of another user,
machine or version, the index is made anew. Deleting it loses nothing.

Parts are appended while the run continues, so that a killed run has them; what does not fit is cut
off first.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import struct
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import msgspec
import numpy as np

from verifiers.results.columns import smallest
from verifiers.results.heads import VALUES
from verifiers.results.index import RowIndex
from verifiers.runtime.bounded import MAX_ROW_BYTES, open_file, read_file
from verifiers.runtime.failpoints import failpoint
from verifiers.runtime.folders import user_cache_folder
from verifiers.storage.files import write_all

INDEX_NAME = "results.index"
KEY_NAME = "index.key"
_FORMAT = f"results.index 7 {' '.join(VALUES)}".encode()
"""Changes with what a part holds; the seals of another format do not fit."""
_HEAD = struct.Struct(">QQ32s")
"""Before each part: the end of what it covers in the journal, the part's size, and its seal: half of
these two numbers, half of everything."""
_SEAL_BYTES = 16
_CHUNK_BYTES = 2**20
_KEY_BYTES = 32


class IndexFile:
    """The kept parts of the index of a journal."""

    def __init__(self, index: RowIndex):
        self._index, self.path = index, index.path.with_name(INDEX_NAME)
        self._rows, self._size, self._end, self._seal = 0, 0, 0, b""
        """What the parts cover: rows, their own bytes, bytes of the journal; and the last seal."""

    @property
    def num_missing(self) -> int:
        """Indexed rows that no part has."""
        return len(self._index) - self._rows

    def restore(self) -> None:
        """Fill an empty index with the parts that fit the journal; without the file,
        or key, none."""
        with (
            contextlib.suppress(OSError),
            open_file(self.path, flags=os.O_NOFOLLOW) as file,
            open_file(self._index.path) as rows,
        ):
            key, size = _user_key(), os.fstat(rows.fileno()).st_size
            while len(head := file.read(_HEAD.size)) == _HEAD.size:
                end, num_bytes, seal = _HEAD.unpack(head)
                if not self._end < end <= size:
                    return
                claims = self._seal_of_numbers(key, end, num_bytes)
                if not hmac.compare_digest(seal[:_SEAL_BYTES], claims):  # not ours: nothing is read
                    return
                if num_bytes > min(end - self._end, MAX_ROW_BYTES):
                    return
                content = file.read(num_bytes)
                if not hmac.compare_digest(seal, self._sealed(key, rows, end, content)):
                    return
                self._index.add_part(_unpacked(content), end)
                self._note(end, num_bytes, seal)

    def append(self) -> None:
        """Write the rows that no part has. *Raises* OSError; TypeError: as ``RowIndex.part``."""
        index = self._index
        if not index.is_journal or index.failure is not None or not self.num_missing:
            return
        key = _user_key(is_made=True)
        flags = os.O_CREAT | os.O_NOFOLLOW
        with open_file(self.path, "r+b", flags) as file, open_file(index.path) as rows:
            content = _packed(index.part(self._rows))
            seal = self._sealed(key, rows, index.end, content)
            os.ftruncate(file.fileno(), self._size)
            failpoint("index.append")
            os.lseek(file.fileno(), self._size, os.SEEK_SET)
            write_all(file.fileno(), _HEAD.pack(index.end, len(content), seal) + content)
        self._note(index.end, len(content), seal)

    def _note(self, end: int, num_bytes: int, seal: bytes) -> None:
        self._rows, self._size = len(self._index), self._size + _HEAD.size + num_bytes
        self._end, self._seal = end, seal

    def _seal_of_numbers(self, key: bytes, end: int, num_bytes: int) -> bytes:
        """The first half of the seal of the next part."""
        head = _FORMAT + self._seal + _HEAD.pack(end, num_bytes, b"")
        return hmac.digest(key, b"numbers " + head, "sha256")[:_SEAL_BYTES]

    def _sealed(self, key: bytes, rows: IO[bytes], end: int, content: bytes) -> bytes:
        """The seal of the next part, and of the journal's bytes up to ``end``."""
        seal = hmac.new(key, _FORMAT + self._seal + _HEAD.pack(end, len(content), b""), "sha256")
        seal.update(content)
        rows.seek(self._end)
        missing = end - self._end
        while missing and (chunk := rows.read(min(missing, _CHUNK_BYTES))):
            seal.update(chunk)
            missing -= len(chunk)
        claims = self._seal_of_numbers(key, end, len(content))
        return claims + seal.digest()[:_SEAL_BYTES]


def open_index(file: Path, metric_names: Sequence[str] = ()) -> RowIndex:
    """The index of a results file, read to its end; damage is its ``failure``. *Raises* OSError."""
    index = RowIndex(file, metric_names)
    IndexFile(index).restore()
    index.read()
    return index


def _user_key(is_made: bool = False) -> bytes:
    """The key of this user's seals, which is made once. *Raises* OSError."""
    path = user_cache_folder() / KEY_NAME
    if is_made and not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        fd, new_file = tempfile.mkstemp(dir=path.parent)
        try:
            os.write(fd, secrets.token_bytes(_KEY_BYTES))
            with contextlib.suppress(FileExistsError):  # another process was first
                os.link(new_file, path)
        finally:
            os.close(fd)
            os.unlink(new_file)
    key = read_file(path)
    if len(key) != _KEY_BYTES:
        raise OSError(f"{path} has {len(key)} bytes in place of {_KEY_BYTES}; delete it")
    return key


def _packed(part: dict[str, Any]) -> bytes:
    """A part of an index as bytes; each column in its smallest type."""
    packed: dict[str, object] = {"names": part["names"]}
    for group in ("columns", "metrics", "usage"):
        columns = {
            name: smallest(values, values.dtype.str[1:]) for name, values in part[group].items()
        }
        packed[group] = {
            name: (values.dtype.str, values.tobytes()) for name, values in columns.items()
        }
    return msgspec.msgpack.encode(packed)


def _unpacked(content: bytes) -> dict[str, object]:
    part: dict[str, Any] = msgspec.msgpack.decode(content)
    for group in ("columns", "metrics", "usage"):
        part[group] = {
            name: np.frombuffer(values, kind) for name, (kind, values) in part[group].items()
        }
    return part
