"""Read bytes of others up to a limit: files, replies, output of child processes.

The promise: a reader holds at most its limit and one chunk, whatever the sender announces or
compresses: decoded bytes count. What is longer is an error and is never cut, except the end of a
child's stderr, which only explains an error. A file is regular: a pipe or a device in its place,
which would be waited for or never ends, is an error.

Results and datasets have as many rows as their user made, so only their lines are limited.
"""

from __future__ import annotations

import codecs
import errno
import os
import signal
import stat
import subprocess
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from io import BufferedReader
from os import PathLike
from typing import IO, TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from _typeshed import SupportsRead

MAX_FILE_BYTES = 64 * 2**20
"""Limit of a file that is read whole: settings, metadata, manifests."""
MAX_ROW_BYTES = 2**30
"""Limit of one line of results or of a dataset."""
MAX_OUTPUT_BYTES = 16 * 2**20
"""Limit of the output of a child process, and of a status reply."""
MAX_LINE_BYTES = 64 * 2**10
"""Longest line of a child process; a longer line is read in parts."""
_CHUNK_BYTES = 2**16


class TooLong(ValueError):
    """What is read is longer than its limit."""

    def __init__(self, what: str, max_bytes: int):
        super().__init__(f"{what} is longer than {size_text(max_bytes)}")


def size_text(num_bytes: int) -> str:
    """A limit for people.

    >>> size_text(64 * 2**20), size_text(1500)
    ('64 MiB', '1500 bytes')
    """
    if num_bytes >= 2**20 and num_bytes % 2**20 == 0:
        return f"{num_bytes >> 20} MiB"
    return f"{num_bytes} bytes"


def open_regular(path: str | PathLike[str], flags: int) -> int:
    """``os.open`` of a regular file. A link to such a file is followed, unless ``flags`` say
    otherwise. *Raises* OSError, also for a pipe, a socket or a device."""
    fd = os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY, 0o666)
    kind = os.fstat(fd).st_mode
    if stat.S_ISREG(kind):
        return fd
    os.close(fd)
    if stat.S_ISDIR(kind):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise OSError(errno.EINVAL, "it is no regular file; remove it or name another", str(path))


def open_file(path: str | PathLike[str], mode: str = "rb", flags: int = 0) -> BufferedReader:
    """``open`` of a regular file in a binary mode, with further ``flags`` of ``os.open``. *Raises*
    as ``open_regular``."""
    opener = lambda name, mode_flags: open_regular(name, mode_flags | flags)  # noqa: E731
    return cast(BufferedReader, open(path, mode, opener=opener))


def lines_of(file: IO[bytes], max_bytes: int = MAX_ROW_BYTES) -> Iterator[bytes]:
    """The lines of an open file, with their ends. *Raises* OSError; TooLong."""
    while line := file.readline(max_bytes + 1):
        if len(line) > max_bytes:
            raise TooLong(f"a line of {file.name}", max_bytes)
        yield line


def read_file(path: str | PathLike[str], max_bytes: int = MAX_FILE_BYTES) -> bytes:
    """The content of a regular file. *Raises* OSError; TooLong."""
    with open_file(path) as file:
        return read_stream(file, max_bytes, str(path))


def read_text(path: str | PathLike[str], max_bytes: int = MAX_FILE_BYTES) -> str:
    """The text of a UTF-8 file, or of UTF-16 with its mark, with line ends as ``\\n``. *Raises*
    OSError; TooLong; UnicodeDecodeError."""
    content = read_file(path, max_bytes)
    text = content.decode(encoding_of(content[:4]))
    return text.replace("\r\n", "\n").replace("\r", "\n") if "\r" in text else text


def encoding_of(beginning: bytes) -> str:
    """The encoding that the first bytes of a text declare, as programs of Windows write it; else
    UTF-8."""
    is_utf_16 = beginning.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    return "utf-16" if is_utf_16 else "utf-8-sig"


def read_stream(stream: SupportsRead[bytes], max_bytes: int, what: str) -> bytes:
    """What a binary stream (a file, a pipe, a ``urlopen`` reply) still holds. *Raises* as
    ``stream.read``; TooLong."""
    chunks, num_bytes = [], 0
    while chunk := stream.read(_CHUNK_BYTES):
        chunks.append(chunk)
        num_bytes += len(chunk)
        if num_bytes > max_bytes:
            raise TooLong(what, max_bytes)
    return b"".join(chunks)


async def read_chunks(chunks: AsyncIterator[bytes], max_bytes: int, what: str) -> bytes:
    """The chunks of a decoded body (aiohttp: ``response.content.iter_any()``). *Raises* as the
    chunks; TooLong."""
    held, num_bytes = [], 0
    async for chunk in chunks:
        held.append(chunk)
        num_bytes += len(chunk)
        if num_bytes > max_bytes:
            raise TooLong(what, max_bytes)
    return held[0] if len(held) == 1 else b"".join(held)


def read_lines(stream: IO[bytes]) -> Iterator[str]:
    """The lines of a child process as text; a line above ``MAX_LINE_BYTES`` comes in parts."""
    while line := stream.readline(MAX_LINE_BYTES):
        yield line.decode("utf-8", "replace")


def run_captured(
    command: Sequence[str], limit_s: float | None = None, **popen: object
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end: its stdout, and the last ``MAX_LINE_BYTES`` of its stderr.

    *Raises* OSError; TooLong when stdout exceeds ``MAX_OUTPUT_BYTES``: the child is killed, as it
    is after ``limit_s`` seconds, then with its own children.
    """
    pipes: dict[str, Any] = {
        "stdin": subprocess.DEVNULL,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
    }
    if limit_s is not None:
        pipes["start_new_session"] = True  # its own children may hold the pipes open
    with subprocess.Popen(command, **pipes | popen) as process:
        assert process.stdout is not None
        errors = bytearray()
        clock = threading.Timer(limit_s or 0.0, os.killpg, (process.pid, signal.SIGKILL))
        if limit_s is not None:
            clock.start()
        reader = threading.Thread(target=_keep_end, args=(process.stderr, errors), daemon=True)
        reader.start()
        try:
            output = read_stream(process.stdout, MAX_OUTPUT_BYTES, f"the output of {command[0]}")
            process.wait()
        except BaseException:  # includes interrupts: end the child with this call, then re-raise
            process.kill()
            raise
        finally:
            clock.cancel()
            reader.join()
    texts = (output.decode("utf-8", "replace"), errors.decode("utf-8", "replace"))
    return subprocess.CompletedProcess(command, process.returncode, *texts)


def _keep_end(stream: IO[bytes], end: bytearray) -> None:
    while line := stream.readline(MAX_LINE_BYTES):
        end += line
        del end[:-MAX_LINE_BYTES]
