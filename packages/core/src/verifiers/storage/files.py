"""Durable atomic writes, lines that are appended whole, and files locked by one process.

Guarantees: after ``atomic_write`` returns, and after a block of ``replacing``, the new content is
on disk; a reader or a restart sees the old or the new content, never a mixture. No link is followed
to where something is written. A ``HeldFile`` has one holder at a time on this machine; its lock
ends with the process, and forked children do not keep it.

Not covered: disks that report a flush too early, programs that ignore advisory locks, and network
file systems with unreliable locks.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import socket
import stat
import tempfile
import threading
import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from verifiers.errors import ConfigError, RunBusy
from verifiers.runtime.bounded import open_regular
from verifiers.runtime.decoding import decode_json, read_record
from verifiers.runtime.failpoints import failpoint

_CHUNK_BYTES = 2**16
LOCK_NAME = "run.lock"
"""Lock file of a run directory that is being written; contains the pid and host of the holder."""


def atomic_write(path: str | os.PathLike[str], content: bytes) -> None:
    """Replace the file at ``path`` by ``content``, completely or not at all, even after a power
    cut.

    Writes a hidden file in the same folder, fsyncs it, renames it over the target, fsyncs the
    folder. Rename is atomic inside one file system, so the temporary file is not in ``/tmp``; the
    last fsync makes the new name durable.

    Two fsyncs take milliseconds: for small files that change rarely. Permissions and hard links of
    the old file are lost, a symbolic link is replaced by a file. Neither it nor a link in the place
    of the temporary file is followed. Of two concurrent writers, one wins. A kill may leave a
    temporary file ``.<name>.<pid>.tmp``.

    *Raises* OSError, with the old file unchanged and the temporary file removed.

    Example: ``atomic_write(run / "metadata.json", b'{"status": "complete"}')``
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.unlink(missing_ok=True)  # of a killed process with this pid, or a planted link
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            write_all(fd, content)
            sync_file(fd)
        finally:
            os.close(fd)
        failpoint("atomic_write.before_rename")
        os.replace(temporary, path)
    except BaseException as error:  # remove the partial file; raised again
        temporary.unlink(missing_ok=True)
        _name(error, path)
        raise
    sync_folder(path.parent)


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield the path at which the block writes a file or a folder, of any size and with any
    library, which then takes the place of ``path``.

    It is in a new folder that only this user may enter, beside ``path``: no other process can plant
    a link there. Everything is fsynced and renamed when the block ends; when it raises, ``path``
    stays as it was. A link in the place of ``path`` is replaced. A folder that is replaced is away
    for the moment between two renames. A kill may leave a folder ``.<name>.<random>.tmp``.

    *Raises* OSError; IsADirectoryError for a file in the place of a folder.
    """
    path = Path(path)
    private = Path(tempfile.mkdtemp(".tmp", f".{path.name[:40]}.", path.parent))
    try:
        written = private / path.name
        yield written
        for folder, _, names in os.walk(written):
            for name in names:
                _sync_path(os.path.join(folder, name))
            sync_folder(folder)
        if not written.is_dir():
            _sync_path(written)
        failpoint("replacing.before_rename")
        if written.is_dir() and os.path.lexists(path):
            os.rename(path, private / ".replaced")
        os.replace(written, path)
        sync_folder(path.parent)
    finally:
        shutil.rmtree(private, ignore_errors=True)


def share_modes(paths: Iterable[Path]) -> None:
    """Give the files among ``paths``, of one file system, the mode of a new file; safetensors
    leaves its files to their owner alone. Links and folders stay as they are. *Raises* OSError."""
    files = [path for path in paths if path.is_file() and not path.is_symlink()]
    if not files:
        return
    # a new file, as the umask cannot be read without setting it for all threads
    probe = files[0].with_name(f".mode.{os.getpid()}.{threading.get_ident()}.tmp")
    fd = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        mode = stat.S_IMODE(os.fstat(fd).st_mode)
    finally:
        os.close(fd)
        probe.unlink()
    for path in files:
        path.chmod(mode)


def append_lines(path: str | os.PathLike[str], lines: bytes, *, is_durable: bool = True) -> None:
    """Append whole lines of JSON to a file that several processes may append to; ``is_durable``:
    they are on disk afterwards.

    What a full disk or a kill left of an earlier line is cut off first; a last line that only lacks
    its end gets it. A symbolic link is not followed. *Raises* OSError; nothing of the lines is then
    in the file.
    """
    is_new = not os.path.lexists(path)
    fd = open_regular(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW)
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(fd, fcntl.LOCK_EX)
        _end_last_line(fd)
        size = os.fstat(fd).st_size
        try:
            failpoint("append_lines.before_write")
            write_all(fd, lines)
            if is_durable:
                sync_file(fd)
        except OSError as error:
            os.ftruncate(fd, size)
            _name(error, path)
            raise
    finally:
        os.close(fd)
    if is_new and is_durable:
        sync_folder(Path(path).parent)


def _name(error: BaseException, path: str | os.PathLike[str]) -> None:
    """Add the file that was to be written to an error of the disk: calls on an open file name none."""
    if isinstance(error, OSError) and error.errno is not None and error.filename is None:
        error.filename = os.fspath(path)


def _end_last_line(fd: int) -> None:
    """End a last line that is whole JSON, and cut off any other that has no end."""
    start = end = os.fstat(fd).st_size
    unfinished = b""
    while start and b"\n" not in unfinished:
        start, before = max(0, start - _CHUNK_BYTES), start
        unfinished = os.pread(fd, before - start, start) + unfinished
    unfinished = unfinished.rpartition(b"\n")[2]
    if not unfinished:
        return
    try:
        decode_json(unfinished)
    except ValueError:
        os.ftruncate(fd, end - len(unfinished))
    else:
        write_all(fd, b"\n")


def remove_leftovers(folder: Path) -> None:
    """Remove what killed processes left of ``atomic_write`` and ``replacing`` in a folder that no
    other process writes."""
    for leftover in folder.glob(".*.tmp"):
        if leftover.is_dir() and not leftover.is_symlink():
            shutil.rmtree(leftover, ignore_errors=True)
        else:
            leftover.unlink(missing_ok=True)


def write_all(fd: int, content: bytes) -> None:
    """Write every byte, in one call unless the system writes fewer. *Raises* OSError."""
    written = os.write(fd, content)
    while written < len(content):
        written += os.write(fd, memoryview(content)[written:])


def sync_file(fd: int) -> None:
    """Return when the file's content is on disk. *Raises* OSError; do not retry after it."""
    if hasattr(fcntl, "F_FULLFSYNC"):  # macOS: fsync leaves the bytes in the drive's cache
        fcntl.fcntl(fd, fcntl.F_FULLFSYNC)
    else:
        os.fdatasync(fd)


def _sync_path(path: str | os.PathLike[str]) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        sync_file(fd)
    finally:
        os.close(fd)


def sync_folder(folder: str | os.PathLike[str]) -> None:
    """Return when the names inside a folder are on disk. *Raises* OSError."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class HeldFile:
    """An open file under an exclusive advisory lock (``flock``); ``fd`` is -1 once released or in a
    forked child.

    A forked child shares its parent's lock and would hold it after the parent's death. The
    descriptor is therefore closed in the child after the fork, which leaves the parent's lock in
    place.

    *Raises* RunBusy when another open file has the lock, OSError when the file cannot be opened,
    ConfigError when its file system has no locks, or the path is a symbolic link: rows would be
    written wherever it leads.
    """

    __slots__ = ("__weakref__", "fd", "path")

    def __init__(self, path: Path):
        self.path = path
        self.fd = -1
        try:
            self.fd = open_regular(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise ConfigError(
                    f"{path} is a symbolic link; replace it by the file, or link the folder"
                ) from error
            raise
        try:
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self.release()
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                raise _busy(path) from None
            raise ConfigError(
                f"{path} is on a file system without locks ({error.strerror}); use a local disk."
            ) from error
        _locked_files.add(self)

    def release(self) -> None:
        """Close the file and release its lock; repeated calls do nothing."""
        fd, self.fd = self.fd, -1
        _locked_files.discard(self)
        if fd >= 0:
            os.close(fd)

    def write_holder(self) -> None:
        """Write the pid and host of this process to the file, for the message of ``RunBusy``."""
        os.ftruncate(self.fd, 0)
        holder = Holder(os.getpid(), socket.gethostname())
        write_all(self.fd, msgspec.json.encode(holder) + b"\n")


class Holder(msgspec.Struct, frozen=True):
    """The process that holds a lock, as the lock's file says; None if it is unknown."""

    pid: int | None = None
    host: str | None = None

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Holder:
        """Unknown without a file, and with one that is incomplete."""
        try:
            return read_record(path, cls)
        except (OSError, ValueError):
            return cls()


def _busy(path: Path) -> RunBusy:
    holder = Holder.read(path.parent / LOCK_NAME)
    who = f"process {holder.pid} on {holder.host}" if holder.pid else "another process"
    return RunBusy(
        f"{path.parent} is being written by {who}: wait for it, stop it, or choose another folder.",
        pid=holder.pid,
        host=holder.host,
        path=str(path),
    )


_locked_files: weakref.WeakSet[HeldFile] = weakref.WeakSet()


def _release_in_child() -> None:
    for file in list(_locked_files):
        file.release()


os.register_at_fork(after_in_child=_release_in_child)
