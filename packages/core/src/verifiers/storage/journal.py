"""The journal: an append-only file of rows where *acknowledged* means *on disk*.

Guarantees: when ``append`` returns, its rows survive kill -9 and power loss. The rows of one
``append`` are recovered together or not at all. A damaged row is reported, never returned. After a
failed write or fsync the content of the disk is unknown, so every later ``append`` fails with the
same error; everything acknowledged stays readable.

A line is one JSON object, ASCII only, ended by ``\\n``; its last key is ``crc32``, the checksum of
every byte of the line before ``,"crc32":``. When ``append`` gets several rows, each also has
``"write_part":[i,n]`` (row i of n) just before the checksum. Readers get rows without these two
keys.

The images of rows (``storage.images``) are files beside the journal, durable before the row that
refers to them is written; readers get rows with their images.

Group commit: one thread writes all rows that arrived during the last commit with one ``write`` and
one fsync. While several callers append concurrently it first waits ``linger_s``, so that they share
a commit.

Here a *row* is any JSON object. Rows are never rewritten.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import errno
import os
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, TypeAlias
from zlib import crc32

from verifiers.errors import ConfigError, JournalError, UsageError
from verifiers.runtime.bounded import TooLong, lines_of, open_file
from verifiers.runtime.failpoints import failpoint
from verifiers.runtime.json import encode_row
from verifiers.storage.files import HeldFile, sync_file, sync_folder, write_all
from verifiers.storage.images import IMAGES_NAME, StoredImages, set_aside, write_images

Row: TypeAlias = Mapping[str, Any]
RESERVED_KEYS = frozenset(("write_part", "crc32"))
"""Keys that the journal adds to a line; rows may not have them."""

MAX_LINGER_S = 0.05
"""Upper limit of ``linger_s``, in seconds."""


class Journal:
    """An open journal; opened by ``Journal.open``, closed by ``close`` or a ``with`` block.

    ``append`` may be called from any event loop and any thread of the process that opened it, not
    from a forked child.

    >>> async def record(path):
    ...     with Journal.open(path) as journal:
    ...         await journal.append({"example_id": 0, "reward": 1.0})
    """

    def __init__(self, path: str | os.PathLike[str], linger_s: float = 0.005):
        if not 0 <= linger_s <= MAX_LINGER_S:
            raise ConfigError(
                f"linger_s={linger_s} must be between 0 and {MAX_LINGER_S} seconds.", key="linger_s"
            )
        self.path = Path(path)
        self.num_recovered = 0
        """Rows found when the journal was opened."""
        self.images_folder = self.path.parent / IMAGES_NAME
        self.cut_bytes = 0
        """Bytes of an unfinished write that opening removed from the end."""
        self._linger_s = linger_s
        self._file: HeldFile | None = None
        self._durable_bytes = 0
        self._lock = threading.Lock()  # protects the next four
        self._changed = threading.Condition(self._lock)
        self._pending: list[_Append] = []
        self._closing = False
        self._cause: Exception | None = None
        self._writer: threading.Thread | None = None

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        on_row: Callable[[dict[str, object]], None] | None = None,
        linger_s: float = 0.005,
        checked: tuple[int, int] = (0, 0),
    ) -> Journal:
        """Open for appending, exclusively (the file is locked); create the file when it does not
        exist.

        ``on_row`` receives each recovered row in order; rows are not held in memory. An unfinished
        write at the end (an unterminated line, an incomplete group of rows) is truncated, and the
        rest is made durable. ``checked``: bytes and rows at the start that an index has checked,
        which are not read again.

        *Raises* RunBusy when another process or journal has it open, JournalError with file and
        line for any other damage (the file is not changed), ConfigError when the file cannot be
        opened for writing.
        """
        journal = cls(path, linger_s)
        existed = journal.path.exists()
        try:
            journal._file = HeldFile(journal.path)
        except OSError as error:
            raise ConfigError(
                f"{path} cannot be opened for writing: {error.strerror}.", path=str(path)
            ) from error
        try:
            journal._recover(on_row, *checked)
            if not existed:
                sync_folder(journal.path.parent)
        except OSError as error:
            journal._file.release()
            raise journal._failure(error) from error
        except BaseException:  # an interrupt, too: the file's lock is released; raised again
            journal._file.release()
            raise
        journal._writer = threading.Thread(
            target=journal._run_writer, name=f"journal {path}", daemon=True
        )
        journal._writer.start()
        return journal

    async def append(self, rows: Row | Iterable[Row]) -> None:
        """Return when the rows are on disk. The rows of a call are one write: all are recovered,
        or none.

        Cancelling the wait does not undo the write. Rows are encoded before the first suspension
        and may be changed afterwards.

        *Raises* JournalError when this or an earlier write or fsync failed, UsageError for a closed
        journal, an empty row or a reserved key.
        """
        lines, images = _lines(rows)
        if lines:
            loop = asyncio.get_running_loop()
            waiter = loop.create_future()
            self._submit((lines, images, loop, waiter))
            await waiter

    def append_sync(self, rows: Row | Iterable[Row]) -> None:
        """``append``, blocking the calling thread; not for use inside an event loop."""
        lines, images = _lines(rows)
        if lines:
            waiter: concurrent.futures.Future[None] = concurrent.futures.Future()
            self._submit((lines, images, None, waiter))
            waiter.result()

    def close(self) -> None:
        """Write pending rows, stop the writer and release the file. Blocks for one
        commit at most. *Raises* JournalError when the file was deleted or cut meanwhile."""
        if self._file is None or self._file.fd < 0:
            return
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._writer is not None:
            self._writer.join()
        try:
            failpoint("journal.finish")
            if self._cause is None:
                self._check_place(self._durable_bytes)
        finally:
            self._file.release()

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _recover(
        self, on_row: Callable[[dict[str, object]], None] | None, start: int, num_rows: int
    ) -> None:
        fd, images = self._open_fd(), StoredImages(self.path.parent)
        with open_file(self.path) as file:
            size = os.fstat(fd).st_size
            file.seek(start)
            self._durable_bytes, self.num_recovered = start, num_rows
            for ends, bodies in _whole_writes(file, self.path, size - start, num_rows + 1):
                self._durable_bytes = start + ends[-1]
                self.num_recovered += len(bodies)
                if on_row is not None:
                    for body in bodies:
                        on_row(_decoded(body, self.path, images))
        failpoint("journal.open")
        self.cut_bytes = size - self._durable_bytes
        if self.cut_bytes:
            os.ftruncate(fd, self._durable_bytes)
        sync_file(fd)  # rows of a killed process may still be in the page cache

    def _open_fd(self) -> int:
        if self._closing or self._file is None or self._file.fd < 0:
            raise UsageError(
                f"{self.path} is closed, or was opened by another process; use Journal.open here."
            )
        return self._file.fd

    def _submit(self, append: _Append) -> None:
        with self._lock:  # a third of the time of entering the condition, which is Python
            if self._cause is not None:
                raise self._failure(self._cause) from self._cause
            self._open_fd()
            self._pending.append(append)
            if len(self._pending) == 1:  # the writer waits only while nothing is pending
                self._changed.notify()

    def _run_writer(self) -> None:
        last_batch_size = 0
        while True:
            with self._changed:
                while not self._pending and not self._closing:
                    self._changed.wait()
                if last_batch_size > 1 and not self._closing:
                    self._changed.wait(self._linger_s)
                batch, self._pending = self._pending, []
            if not batch:
                return
            last_batch_size = len(batch)
            self._commit(batch)
            self._acknowledge(batch)

    def _commit(self, batch: list[_Append]) -> None:
        if self._cause is not None:
            return
        assert self._file is not None
        content = b"".join([lines for lines, _, _, _ in batch])
        try:
            for _, images, _, _ in batch:
                write_images(self.images_folder, images)
            failpoint("journal.before_write")
            write_all(self._file.fd, content)
            failpoint("journal.after_write")
            sync_file(self._file.fd)
            failpoint("journal.after_fsync")
            self._check_place(self._durable_bytes + len(content))
            self._durable_bytes += len(content)
        except Exception as cause:  # noqa: BLE001  every waiter gets the error
            with self._changed:
                self._cause = cause
            # best effort: unacknowledged rows should not count on resume
            with contextlib.suppress(OSError):
                os.ftruncate(self._file.fd, self._durable_bytes)

    def _check_place(self, num_bytes: int) -> None:
        """*Raises* JournalError when rows are lost because another program deleted, replaced or cut
        the file. A deleted journal is written again, with every acknowledged row."""
        assert self._file is not None
        opened = os.fstat(self._file.fd)
        try:
            there = os.stat(self.path, follow_symlinks=False)
            if not os.path.samestat(there, opened):
                self._raise_lost("replaced", "")
        except FileNotFoundError:
            try:
                with open(self.path, "xb") as file, open(os.dup(self._file.fd), "rb") as deleted:
                    deleted.seek(0)
                    while remaining := self._durable_bytes - file.tell():
                        file.write(deleted.read(min(remaining, 2**20)))
                    file.flush()
                    sync_file(file.fileno())
                sync_folder(self.path.parent)
            except OSError as error:
                self._raise_lost("deleted", f" ({error.strerror})")
            raise JournalError(
                f"{self.path} was deleted while it was being written; it was written again with"
                " every acknowledged row. Run the same command again.",
                path=str(self.path),
            ) from None
        if opened.st_size < num_bytes:
            self._raise_lost("cut", "")

    def _raise_lost(self, what: str, why: str) -> NoReturn:
        raise JournalError(
            f"{self.path} was {what} by another program while the run wrote it{why}: restore it, or"
            " run the same command again, which repeats what is not in it.",
            path=str(self.path),
        )

    def _acknowledge(self, batch: list[_Append]) -> None:
        by_loop: dict[asyncio.AbstractEventLoop | None, list[_Waiter]] = defaultdict(list)
        for _, _, loop, waiter in batch:
            by_loop[loop].append(waiter)
        for loop, waiters in by_loop.items():
            if loop is None:
                self._settle(waiters, self._cause)
            else:
                with contextlib.suppress(RuntimeError):  # that loop is closed, with its waiters
                    loop.call_soon_threadsafe(self._settle, waiters, self._cause)

    def _settle(self, waiters: list[_Waiter], cause: Exception | None) -> None:
        for waiter in waiters:
            if waiter.done():  # its caller was cancelled
                continue
            if cause is None:
                waiter.set_result(None)
            else:
                failure = self._failure(cause)
                failure.__cause__ = cause
                waiter.set_exception(failure)

    def _failure(self, cause: Exception) -> JournalError:
        if isinstance(cause, JournalError):  # says itself what is left
            return JournalError(str(cause), path=str(self.path))
        return JournalError(
            f"{self.path} could not be written ({cause}); every acknowledged row is in it. "
            "Free space or repair the disk, then run the same command again.",
            path=str(self.path),
        )


_Waiter: TypeAlias = "asyncio.Future[None] | concurrent.futures.Future[None]"
_Append: TypeAlias = "tuple[bytes, dict[str, bytes], asyncio.AbstractEventLoop | None, _Waiter]"


def read_journal(path: str | os.PathLike[str]) -> Iterator[dict[str, object]]:
    """The rows of a journal in order, one at a time; while another process writes it, those durable
    at the call.

    Never changes the file. *Raises* FileNotFoundError; JournalError with file and line for damage.
    """
    images = StoredImages(Path(path).parent)
    for _, bodies in scan_journal(path):
        for body in bodies:
            yield _decoded(body, Path(path), images)


def scan_journal(
    path: str | os.PathLike[str], start: int = 0, first_line: int = 1
) -> Iterator[tuple[list[int], list[bytes]]]:
    """Each complete write from byte ``start`` on: end offsets of its lines, and its rows as JSON.

    ``start`` is 0 or the end of a write, ``first_line`` the number of the line there. Otherwise as
    ``read_journal``.
    """
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        try:
            sync_file(file.fileno())
        except OSError as error:
            # these: nothing to flush
            if error.errno not in (errno.EINVAL, errno.EROFS, errno.ENOTSUP):
                raise JournalError(
                    f"{path} could not be flushed before reading ({error}).", path=str(path)
                ) from error
        file.seek(start)
        for ends, bodies in _whole_writes(file, Path(path), size - start, first_line):
            yield [start + end for end in ends], bodies


def _lines(rows: Row | Iterable[Row]) -> tuple[bytes, dict[str, bytes]]:
    """The lines of an append, and the images that they refer to."""
    images: dict[str, bytes] = {}
    if isinstance(rows, Mapping):
        return _line(rows, images), images
    rows = list(rows)
    if len(rows) == 1:
        return _line(rows[0], images), images
    parts = (b',"write_part":[%d,%d]' % (number, len(rows)) for number in range(1, len(rows) + 1))
    lines = [_line(row, images, part) for row, part in zip(rows, parts, strict=True)]
    return b"".join(lines), images


def _line(row: Row, images: dict[str, bytes], part: bytes = b"") -> bytes:
    if not row or "crc32" in row or "write_part" in row:
        raise UsageError(
            f"a journal row needs a key, and none of {sorted(RESERVED_KEYS)}; this one has"
            f" {sorted(row)}."
        )
    encoded, images_of_row = set_aside(encode_row(row))
    images.update(images_of_row)
    body = encoded[:-1] + part
    return b'%b,"crc32":%d}\n' % (body, crc32(body))


def journal_lines(file: BinaryIO, path: Path) -> Iterator[bytes]:
    """The lines of an open file of rows. *Raises* JournalError for an impossible length."""
    try:
        yield from lines_of(file)
    except TooLong as error:
        raise JournalError(f"{error}; restore the file", path=str(path)) from error


def _whole_writes(
    file: BinaryIO, path: Path, size: int, first_line: int = 1
) -> Iterator[tuple[list[int], list[bytes]]]:
    """Each complete write within the next ``size`` bytes: relative ends of its lines, and its rows.

    Stops at an unfinished write at the end. *Raises* JournalError for any other damage.
    """
    end, expected = 0, 0
    bodies: list[bytes] = []
    ends: list[int] = []
    # a binary file splits at \n only
    for number, line in enumerate(journal_lines(file, path), first_line):
        end += len(line)
        if end > size or not line.endswith(b"\n"):
            return
        tail = line.rfind(b',"crc32":')
        if tail < 0 or line[tail:] != b',"crc32":%d}\n' % crc32(line[:tail]):
            raise _damage(path, number, "its checksum does not match")
        body, index, total = _without_part(line[:tail])
        if index != len(bodies) + 1 or (bodies and total != expected):
            raise _damage(path, number, "the rows written together with it are not complete")
        bodies.append(body + b"}")
        ends.append(end)
        expected = total
        if index == total:
            yield ends, bodies
            bodies, ends = [], []


def _without_part(body: bytes) -> tuple[bytes, int, int]:
    if not body.endswith(b"]") or (start := body.rfind(b',"write_part":[')) < 0:
        return body, 1, 1
    index, _, total = body[start + len(b',"write_part":[') : -1].partition(b",")
    if not (index.isdigit() and total.isdigit()):  # a value of the row that only looks like the key
        return body, 1, 1
    return body[:start], int(index), int(total)


def _decoded(body: bytes, path: Path, images: StoredImages) -> dict[str, object]:
    try:
        return images.decode(body)
    except ValueError as error:
        raise JournalError(
            f"{path} has a row that is not a JSON object ({error}).", path=str(path)
        ) from error


def _damage(path: Path, number: int, what: str) -> JournalError:
    return JournalError(
        f"{path}:{number}: this row is damaged ({what}). The file was not changed: restore it from"
        " a copy, or move it away and run the command again.",
        path=str(path),
        line=number,
    )
