"""Unpack tar archives of strangers and of sandboxes with the rights of this process.

Promise: outside the folder nothing is written, linked, deleted or changed in its mode, whatever
names, links and order an archive has: each part of a path is opened below its parent, and the
kernel follows no link. A damaged header or a missing end mark refuses the archive. What it unpacks
to is bounded by a ``Budget``, and a header by ``MAX_HEADER``.

``tarfile.extractall`` does not promise this: its filters resolve paths as text, so names beyond the
system's longest path defeat them before Python 3.11.13 and 3.12.11 (CVE-2025-4517), and it changes
modes through links.
"""

from __future__ import annotations

import bz2
import contextlib
import errno
import gzip
import hashlib
import io
import lzma
import os
import stat
import tarfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

CHUNK = 2**20
MAX_HEADER = 2**20
"""Bytes of the headers of a member, with its extended headers."""
MAX_DEPTH, MAX_PATH, MAX_LINKS = 256, 3072, 40
"""Folders and characters of a path below the root, and links on the way."""
WHITEOUT, OPAQUE = ".wh.", ".wh..wh..opq"
_FOLDER = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0) | getattr(os, "O_NOFOLLOW", 0)
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0)
_OPENERS: dict[bytes, Callable[[BinaryIO], Any]] = {
    b"\x1f\x8b": gzip.open,
    b"BZh": bz2.open,
    b"\xfd7zXZ\x00": lzma.open,
}
"""First bytes of a compressed file -> how to open it."""


class BadArchive(tarfile.ReadError):
    """An archive that is damaged, too large, or leads out of its folder."""


class Budget:
    """Bytes that may still be read and made: of an archive, or of all layers of an image."""

    def __init__(self, num_bytes: int):
        self._num_bytes = self._bytes_left = num_bytes

    def spend(self, num_bytes: int) -> None:
        """*Raises* BadArchive when the budget is exceeded."""
        self._bytes_left -= num_bytes
        if self._bytes_left < 0:
            raise BadArchive(
                f"it unpacks to more than {self._num_bytes} bytes, too much for its size"
            )


class Stream:
    """The bytes of an archive in their order, as the file that ``tarfile`` reads: bounded, and with
    a digest."""

    def __init__(self, file: BinaryIO, budget: Budget):
        self._file, self.budget = file, budget
        self._digest = hashlib.sha256()
        self._position = 0
        self._header_bytes: int | None = None

    def begin_header(self) -> None:
        """Bound what is read until ``end_header``, which ``tarfile`` holds in memory."""
        self._header_bytes = MAX_HEADER

    def end_header(self) -> None:
        self._header_bytes = None

    def read(self, num_bytes: int) -> bytes:
        if self._header_bytes is not None:
            self._header_bytes -= num_bytes
            if num_bytes < 0 or self._header_bytes < 0:
                raise BadArchive(f"it is damaged: a header is longer than {MAX_HEADER} bytes")
        content = self._file.read(num_bytes)
        self.budget.spend(len(content))
        self._digest.update(content)
        self._position += len(content)
        return content

    def tell(self) -> int:
        return self._position

    def seek(self, position: int) -> None:
        """Skip to a later position. *Raises* BadArchive for an earlier position, which a damaged
        size leads to."""
        if position < self._position:
            raise BadArchive("it is damaged: a member has a size below 0")
        header_bytes, self._header_bytes = self._header_bytes, None
        while self._position < position and self.read(min(CHUNK, position - self._position)):
            pass
        self._header_bytes = header_bytes

    def hexdigest(self) -> str:
        """The SHA-256 of all bytes that were read or skipped."""
        return self._digest.hexdigest()


class _Header(tarfile.TarInfo):
    """``tarfile`` takes a damaged header for the end of an archive; here only the end mark is."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> _Header:
        is_end_mark = len(buf) == tarfile.BLOCKSIZE and not any(buf)
        try:
            return super().frombuf(buf, encoding, errors)
        except tarfile.HeaderError as error:
            if is_end_mark:
                raise
            raise BadArchive(f"it is cut short, damaged or not a tar archive: {error}") from error


def decompressed(file: BinaryIO) -> BinaryIO:
    """The content of a file that may be compressed with gzip, bzip2 or xz."""
    start = file.read(8)
    file.seek(0)
    opener = next((opener for magic, opener in _OPENERS.items() if start.startswith(magic)), None)
    return file if opener is None else cast(BinaryIO, opener(file))


def members(stream: Stream) -> Iterator[tuple[tarfile.TarFile, tarfile.TarInfo]]:
    """The members of an archive up to its end mark, each with the archive to read its content from.

    *Raises* tarfile.TarError for every damage.
    """
    stream.begin_header()
    with (
        _damage(),
        tarfile.open(fileobj=cast(BinaryIO, stream), mode="r:", tarinfo=_Header) as archive,
    ):
        while (member := archive.next()) is not None:
            stream.end_header()
            if member.size < 0:
                raise BadArchive(f"it is damaged: {member.name!r} has a size below 0")
            yield archive, member
            held = cast(Any, archive)  # the types omit its lists, which grow without an end
            held.members.clear()
            held.pax_headers.clear()
            stream.begin_header()
        stream.end_header()
        if len(second := stream.read(tarfile.BLOCKSIZE)) < tarfile.BLOCKSIZE or any(second):
            raise BadArchive("it is cut short: its end mark is missing")
        while stream.read(CHUNK):  # a compressed file has its check sum at its end
            pass


@contextlib.contextmanager
def _damage() -> Iterator[None]:
    """Raise what damaged bytes lead to as BadArchive; nested headers are a RecursionError."""
    try:
        yield
    except (EOFError, ValueError, RecursionError, zlib.error, lzma.LZMAError) as error:
        raise BadArchive(f"it is damaged: {error}") from error


def unpack(stream: Stream, folder: Path, *, is_layer: bool = False) -> list[str]:
    """Unpack an archive below a folder, over what is there; returns the names of members that were
    left out.

    ``is_layer``: it is a root file system, or a layer over those below it. Its whiteouts delete,
    its links may lead anywhere (inside, they are followed as if the folder were the root), and a
    name that leads out refuses it. Otherwise, what leads out of the folder is left out, and no
    folder is deleted.

    Devices and pipes are never made. *Raises* tarfile.TarError; OSError.
    """
    unpacking = _Unpacking(folder, is_layer)
    try:
        with _damage():
            for archive, member in members(stream):
                try:
                    if member.sparse is not None:
                        stream.budget.spend(member.size)
                    unpacking.add(archive, member)
                except _LeadsOut:
                    if is_layer:
                        raise
                    unpacking.left_out.append(member.name)
        if not is_layer:
            unpacking.drop_links()
    finally:
        unpacking.close()
    return unpacking.left_out


def unpack_sent(archive: bytes, folder: Path) -> list[str]:
    """Unpack an archive that a sandbox sent below a folder, which is made; returns the names that
    were left out.

    *Raises* tarfile.TarError for what is no archive, or would need more bytes than were sent;
    OSError.
    """
    folder.mkdir(parents=True, exist_ok=True)
    return unpack(Stream(io.BytesIO(archive), Budget(len(archive))), folder)


class _LeadsOut(BadArchive):
    """A member that leads out of the folder, or that takes the position of another."""


class _Unpacking:
    def __init__(self, folder: Path, is_layer: bool):
        self._root = os.open(folder, _FOLDER)
        self._is_layer = is_layer
        self._mask = 0o777 if is_layer else 0o755
        self._links: list[tuple[str, str]] = []
        """(folder, name) of each link that was made; the path of the folder has no links, which may
        be deleted before."""
        self.left_out: list[str] = []

    def close(self) -> None:
        os.close(self._root)

    def add(self, archive: tarfile.TarFile, member: tarfile.TarInfo) -> None:
        parts = [part for part in member.name.split("/") if part not in ("", ".")]
        if ".." in parts:
            raise _LeadsOut(f"its file {member.name!r} leads out of the image")
        if not parts:
            return
        with self._folder("/".join(parts[:-1]), member.name, is_made=True) as (parent, above):
            self._make(archive, member, parent, above, parts[-1])

    def _make(
        self, archive: tarfile.TarFile, member: tarfile.TarInfo, parent: int, above: str, name: str
    ) -> None:
        if self._is_layer and name.startswith(WHITEOUT):
            self._white_out(member, parent, name)
        elif member.isdir():
            self._make_folder(member, parent, name)
        elif member.issym():
            self._delete(parent, name)
            os.symlink(member.linkname, name, dir_fd=parent)
            self._links.append((above, name))
        elif member.islnk():
            self._link(member, parent, above, name)
        elif member.isfile():
            self._delete(parent, name)
            with os.fdopen(os.open(name, _NEW_FILE, 0o600, dir_fd=parent), "wb") as file:
                _copy(archive, member, file)
                os.fchmod(file.fileno(), member.mode & self._mask | 0o600)

    def _white_out(self, member: tarfile.TarInfo, parent: int, name: str) -> None:
        hidden = name.removeprefix(WHITEOUT)
        if name == OPAQUE:
            for entry in os.listdir(parent):
                self._delete(parent, entry)
        elif hidden in ("", ".", ".."):
            raise _LeadsOut(f"its file {member.name!r} leads out of the image")
        else:
            self._delete(parent, hidden)

    def _make_folder(self, member: tarfile.TarInfo, parent: int, name: str) -> None:
        if not _is_folder(parent, name):
            self._delete(parent, name)
            os.mkdir(name, 0o700, dir_fd=parent)
        folder = os.open(name, _FOLDER, dir_fd=parent)
        try:
            os.fchmod(folder, member.mode & self._mask | 0o700)
        finally:
            os.close(folder)

    def _link(self, member: tarfile.TarInfo, parent: int, above: str, name: str) -> None:
        source_folder, _, source = member.linkname.rstrip("/").rpartition("/")
        refusal = _LeadsOut(
            f"its file {member.name!r} is a link to {member.linkname!r}, which is no file before it"
        )
        if source in ("", ".", ".."):
            raise refusal
        try:
            with self._folder(source_folder, member.name) as (origin, _):
                status = os.stat(source, dir_fd=origin, follow_symlinks=False)
                if stat.S_ISDIR(status.st_mode):
                    raise refusal
                if _is_same(status, parent, name):
                    return
                self._delete(parent, name)
                os.link(source, name, src_dir_fd=origin, dst_dir_fd=parent, follow_symlinks=False)
        except FileNotFoundError:
            raise refusal from None
        if stat.S_ISLNK(status.st_mode):
            self._links.append((above, name))

    def _delete(self, parent: int, name: str) -> None:
        """Delete what is at a name, a folder only in a layer."""
        try:
            os.unlink(name, dir_fd=parent)
            return
        except FileNotFoundError:
            return
        except (IsADirectoryError, PermissionError):  # the latter on macOS
            if not _is_folder(parent, name):
                raise
        if not self._is_layer:
            raise _LeadsOut(f"{name!r} is a folder already")
        for _, folders, files, here in os.fwalk(name, topdown=False, dir_fd=parent):
            for entry in files:
                os.unlink(entry, dir_fd=here)
            for entry in folders:
                (os.rmdir if _is_folder(here, entry) else os.unlink)(entry, dir_fd=here)
        os.rmdir(name, dir_fd=parent)

    def drop_links(self) -> None:
        """Delete the links that lead out of the folder, as the kernel of the host would follow them
        now."""
        for above, name in self._links:
            try:
                with self._folder(above, name) as (parent, _):
                    target = os.readlink(name, dir_fd=parent)
                    way, _, last = target.rpartition("/")
                    try:
                        if target.startswith("/"):
                            raise _LeadsOut(f"{name!r} leads out")
                        way = target if last in ("", ".", "..") else way
                        with self._folder(f"{above}/{way}", name, is_host=True):
                            continue
                    except (OSError, BadArchive):
                        os.unlink(name, dir_fd=parent)
                        self.left_out.append(f"{above}/{name}".lstrip("/"))
            except (OSError, BadArchive):
                continue  # a later member took its position

    @contextlib.contextmanager
    def _folder(
        self, path: str, name: str, *, is_made: bool = False, is_host: bool = False
    ) -> Iterator[tuple[int, str]]:
        """(a descriptor of a folder below the root, its path without links), whose links are
        followed as if the root were that of a machine.

        ``is_made``: missing folders are made; ``is_host``: as a host follows links, which may not
        lead out. ``name`` is the member that an error names. *Raises* BadArchive;
        FileNotFoundError.
        """
        descriptors, names = [self._root], [""]
        pending, num_links = path.split("/")[::-1], 0
        try:
            while pending:
                part = pending.pop()
                if part in ("", "."):
                    continue
                if part == "..":
                    if len(descriptors) > 1:
                        os.close(descriptors.pop())
                        names.pop()
                    elif is_host:
                        raise _LeadsOut(f"{name!r} leads out")
                    continue
                try:
                    descriptors.append(os.open(part, _FOLDER, dir_fd=descriptors[-1]))
                except FileNotFoundError:
                    if not is_made:
                        raise
                    os.mkdir(part, 0o755, dir_fd=descriptors[-1])
                    pending.append(part)
                    continue
                except OSError as error:
                    if error.errno not in (errno.ENOTDIR, errno.ELOOP):
                        raise
                    target = _link_target(descriptors[-1], part)
                    if target is None:
                        raise _LeadsOut(f"its file {name!r} lies in a file") from None
                    num_links += 1
                    if num_links > MAX_LINKS:
                        raise _LeadsOut(f"its links at {path!r} lead in a circle") from None
                    if target.startswith("/"):
                        if is_host:
                            raise _LeadsOut(f"{name!r} leads out") from None
                        while len(descriptors) > 1:
                            os.close(descriptors.pop())
                        names = [""]
                    pending += target.split("/")[::-1]
                    continue
                names.append(part)
                if len(names) > MAX_DEPTH or len("/".join(names)) > MAX_PATH:
                    raise _LeadsOut(
                        f"its file {name[:100]!r} lies deeper than {MAX_DEPTH} folders or"
                        f" {MAX_PATH} characters"
                    )
            yield descriptors[-1], "/".join(names[1:])
        finally:
            for descriptor in descriptors[1:]:
                os.close(descriptor)


def _link_target(folder: int, name: str) -> str | None:
    """The target of a link; None for what is no link."""
    try:
        return os.readlink(name, dir_fd=folder)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return None


def _is_folder(parent: int, name: str) -> bool:
    try:
        return stat.S_ISDIR(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode)
    except FileNotFoundError:
        return False


def _is_same(status: os.stat_result, parent: int, name: str) -> bool:
    try:
        return os.path.samestat(status, os.stat(name, dir_fd=parent, follow_symlinks=False))
    except FileNotFoundError:
        return False


def _copy(archive: tarfile.TarFile, member: tarfile.TarInfo, file: io.BufferedWriter) -> None:
    """Write the content of a member; zeros stay holes, as in a sparse file."""
    content = archive.extractfile(member)
    assert content is not None, "a regular file has content"
    with content:
        while chunk := content.read(CHUNK):
            if chunk.count(0) == len(chunk):
                file.seek(len(chunk), os.SEEK_CUR)
            else:
                file.write(chunk)
    file.truncate(member.size)
