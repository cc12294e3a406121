"""Files that survive power loss, and files that only one process may hold.

Promises: after ``atomic_write`` returns, the new content is on disk, and a reader or a restart sees the old content or
the new, never a mixture. A ``HeldFile`` belongs to one open at a time on this machine, ends with the process however
it ends, and is not kept alive by forked children.

Does not guard against a disk that lies about flushing, nor against programs that ignore advisory locks; locks on
network file systems are as good as the file system's own.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import weakref
from pathlib import Path
from typing import Any

from verifiers.errors import ConfigError, RunBusy
from verifiers.runtime.failpoints import failpoint

LOCK_NAME = "run.lock"
"""The file of a run directory whose lock says that the run is being written, with its holder's pid and host inside."""


def atomic_write(path: str | os.PathLike[str], content: bytes) -> None:
    """Replace the file at ``path`` by ``content``: all of it, or nothing, also after a power cut.

    Pattern: write a hidden neighbour, fsync it, rename it over the target, fsync the folder. Rename is atomic inside
    one file system, which is why the neighbour is not in ``/tmp``; the last fsync makes the new name durable.

    Trade-offs: two fsyncs, so milliseconds and not microseconds: for small files that change rarely. Permissions and
    hard links of the old file are not carried over, a symbolic link is replaced by a file. Two processes that write
    one path at once leave the content of one of them. Killed in between, a neighbour ``.<name>.<pid>.tmp`` may stay.

    Raises: ``OSError`` with the old file untouched, the neighbour removed.

    Example: ``atomic_write(run / "metadata.json", b'{"status": "complete"}')``
    """
    path = Path(path)
    neighbour = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        fd = os.open(neighbour, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        try:
            write_all(fd, content)
            sync_file(fd)
        finally:
            os.close(fd)
        failpoint("atomic_write.before_rename")
        os.replace(neighbour, path)
    except BaseException:  # whatever it was, no half file stays beside the old one; raised again
        neighbour.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def write_all(fd: int, content: bytes) -> None:
    """Write every byte, in one call unless the system takes fewer. Raises: ``OSError``."""
    written = os.write(fd, content)
    while written < len(content):
        written += os.write(fd, memoryview(content)[written:])


def sync_file(fd: int) -> None:
    """Return when the file's content is on disk. Raises: ``OSError``; never call it again after that."""
    if hasattr(fcntl, "F_FULLFSYNC"):  # macOS: fsync leaves the bytes in the drive's cache
        fcntl.fcntl(fd, fcntl.F_FULLFSYNC)
    else:
        os.fdatasync(fd)


def sync_folder(folder: str | os.PathLike[str]) -> None:
    """Return when the names inside a folder are on disk. Raises: ``OSError``."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class HeldFile:
    """An open file under an exclusive advisory lock (``flock``); ``fd`` is -1 once released or in a forked child.

    A child made by ``fork`` shares its parent's lock, and would keep it after the parent's death: the descriptor is
    therefore closed in the child at once, which leaves the parent's lock in place.

    Raises: ``RunBusy`` when another open file has the lock, ``OSError`` when the file cannot be opened,
    ``ConfigError`` when its file system has no locks.
    """

    __slots__ = ("__weakref__", "fd", "path")

    def __init__(self, path: Path):
        self.path = path
        self.fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self.release()
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                raise _busy(path) from None
            raise ConfigError(
                f"{path} is on a file system without locks ({error.strerror}); use a local disk."
            ) from error
        _held.add(self)

    def release(self) -> None:
        """Close the file and give up its lock; nothing when that was done before."""
        fd, self.fd = self.fd, -1
        _held.discard(self)
        if fd >= 0:
            os.close(fd)

    def write_holder(self) -> None:
        """Make this process's pid and host the file's content, for the message of ``RunBusy``."""
        os.ftruncate(self.fd, 0)
        write_all(self.fd, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode() + b"\n")


def _busy(path: Path) -> RunBusy:
    holder: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError):  # no lock file, or its holder is just writing it: nobody to name
        holder = json.loads((path.parent / LOCK_NAME).read_bytes())
    pid, host = holder.get("pid"), holder.get("host")
    who = f"process {pid} on {host}" if pid else "another process"
    return RunBusy(
        f"{path.parent} is being written by {who}: wait for it, stop it, or choose another folder.",
        pid=pid,
        host=host,
        path=str(path),
    )


_held: weakref.WeakSet[HeldFile] = weakref.WeakSet()


def _release_in_child() -> None:
    for held in list(_held):
        held.release()


os.register_at_fork(after_in_child=_release_in_child)
