"""The images of saved rollouts: each is stored once, by its hash, and rows refer to it.

On disk, a data URL of an image in a row is the reference ``images/<SHA-256>.png``; the file of that
name is beside the file of rows, in the folder ``images``, and is durable before the row is. Who
reads rows gets the data URLs again, so that no other part knows of references. An export has the
data URLs, or an ``images`` folder of its own (``check_stands_alone``).

A file is named by its content and read by that name alone: a reference leads to no other folder,
and a file that was changed is not taken for the image. An image that ``data.images`` would refuse
stays in its row.
"""

from __future__ import annotations

import binascii
import logging
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verifiers.data.images import FORMATS, MAX_IMAGE_BYTES, data_url, image_hash
from verifiers.errors import ConfigError, JournalError
from verifiers.runtime.bounded import TooLong, open_file, read_stream
from verifiers.runtime.json import decode_row
from verifiers.storage.files import atomic_write, sync_folder

log = logging.getLogger(__name__)

IMAGES_NAME = "images"
MAX_HELD_BYTES = 64 * 2**20
"""Data URLs that a reader holds, so that rows with the same image share one text."""
_KEYS = ("url", "image_url", "path")
"""Keys whose value may be an image: those of OpenAI's parts, and of a step of ATIF."""
_MARK = b'":"data:image/'
_DATA_URL = re.compile(rf'"(?:{"|".join(_KEYS)})":"(?=data:image/)'.encode())
_REFERENCE = re.compile(rf"images/([0-9a-f]{{64}}\.(?:{'|'.join(FORMATS.values())}))")
_REFERENCE_MARK = b'":"images/'


def set_aside(line: bytes) -> tuple[bytes, dict[str, bytes]]:
    """The JSON of a row with references in place of data URLs, and the images by the names of their
    files.

    ``line`` is as ``runtime.json.encode_row`` writes it: ASCII, without spaces.
    """
    if _MARK not in line:
        return line, {}
    pieces, images, end = [], dict[str, bytes](), 0
    for match in _DATA_URL.finditer(line):
        start = match.end()
        stop = line.index(b'"', start)
        if file := _file_of(line[start:stop].decode("ascii")):
            name, content = file
            pieces += [line[end:start], f"{IMAGES_NAME}/{name}".encode()]
            images[name], end = content, stop
    return b"".join([*pieces, line[end:]]), images


def _file_of(url: str) -> tuple[str, bytes] | None:
    """The name of the file of an image, and its content; None for a data URL that reading the file
    would not give."""
    try:
        content = binascii.a2b_base64(url.partition(",")[2])
        if data_url(content) != url:
            return None
    except (ConfigError, ValueError):
        return None
    kind = url[len("data:") : url.index(";")]
    return f"{image_hash(content)}.{FORMATS[kind]}", content


def write_images(folder: Path, images: Mapping[str, bytes]) -> None:
    """Write images that the folder lacks; they are durable afterwards. *Raises* OSError; ConfigError
    for a link in the place of the folder."""
    if not images:
        return
    if folder.is_symlink():
        raise ConfigError(f"{folder} is a symbolic link; replace it by a folder")
    if not folder.is_dir():
        folder.mkdir()
        sync_folder(folder.parent)
    for name, content in images.items():
        file = folder / name
        if file.is_symlink() or not file.is_file() or file.stat().st_size != len(content):
            atomic_write(file, content)


class StoredImages:
    """The images beside a file of rows, read where a row refers to them.

    One that is missing, or was changed, is named in the log, and its row keeps the reference.

    Args:
        folder: The folder of the file of rows.
    """

    def __init__(self, folder: Path):
        self.folder = folder / IMAGES_NAME
        self._urls: dict[str, str] = {}
        self._held_bytes = 0
        self._missing: set[str] = set()

    def decode(self, line: bytes) -> dict[str, Any]:
        """The row of a line, with its images. *Raises* ValueError as ``decode_row``."""
        row = decode_row(line)
        return self.restored(row) if _REFERENCE_MARK in line else row

    def restored(self, value: Any) -> Any:
        """A decoded value with data URLs in place of references; the same object."""
        if isinstance(value, dict):
            for key, member in value.items():
                if isinstance(member, str):
                    if key in _KEYS and (match := _REFERENCE.fullmatch(member)):
                        value[key] = self._url(match[1])
                elif isinstance(member, dict | list):
                    self.restored(member)
        elif isinstance(value, list):
            for member in value:
                self.restored(member)
        return value

    def content(self, name: str) -> bytes:
        """The file of an image. *Raises* JournalError that names it where it is missing, is no
        regular file or was changed."""
        file = self.folder / name
        try:
            with open_file(file, flags=os.O_NOFOLLOW) as opened:
                content = read_stream(opened, MAX_IMAGE_BYTES, str(file))
        except FileNotFoundError:
            why = "is missing: it was moved or deleted"
        except (OSError, TooLong) as error:
            why = f"cannot be read: {getattr(error, 'strerror', None) or error}"
        else:
            if image_hash(content) == name.partition(".")[0]:
                return content
            why = "was changed: its content is not that of its name"
        raise JournalError(
            f"the image {file} {why}; restore it, rollouts of this run refer to it", path=str(file)
        )

    def _url(self, name: str) -> str:
        if (url := self._urls.get(name)) is not None:
            return url
        try:
            url = data_url(self.content(name))
        except JournalError as error:
            if name not in self._missing:
                self._missing.add(name)
                log.warning("%s", error)
            return f"{IMAGES_NAME}/{name}"
        if self._held_bytes > MAX_HELD_BYTES:
            self._urls.clear()
            self._held_bytes = 0
        self._urls[name] = url
        self._held_bytes += len(url)
        return url


def stored_name(url: object) -> str | None:
    """The name of the file that a reference names; None for another text."""
    match = _REFERENCE.fullmatch(url) if isinstance(url, str) else None
    return match[1] if match else None


def check_stands_alone(line: bytes) -> bytes:
    """A row that leaves its run, as JSON. *Raises* JournalError that names an image that it lacks."""
    if _REFERENCE_MARK in line and (missing := _missing_in(decode_row(line))):
        raise JournalError(
            f"a rollout lacks its image {missing}, which was moved or deleted from the folder of its"
            " run: restore it and read the results again, or leave that rollout out"
            " (results.filter)",
            path=missing,
        )
    return line


def _missing_in(value: object) -> str:
    if isinstance(value, dict):
        for key, member in value.items():
            if key in _KEYS and stored_name(member):
                return str(member)
        value = [*value.values()]
    members = value if isinstance(value, list) else ()
    return next(filter(None, map(_missing_in, members)), "")
