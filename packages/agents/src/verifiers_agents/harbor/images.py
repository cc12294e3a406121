"""Root file systems of images without a container engine: found by name, unpacked once into the
user's cache.

A source is a folder with a root file system, a tar archive of a root (``docker export``), an
archive of an image (``docker save``), or a layout of the Open Container Initiative, as a folder or
an archive (``skopeo copy … oci:…``). The latter two bring the variables and the work folder of the
image along.

Promise: nothing is downloaded or executed. An archive is unpacked below one new folder: names that
lead out of it are refused, links are followed as if that folder were the root, device files are
left out (``sandbox.unpacking``). A folder appears in the cache under its name only when it is
complete: archives have their end marks, layers their digests. What is unpacked is bounded by the
size of its source (``MAX_RATIO``).

*Source*: https://github.com/opencontainers/image-spec (``layer.md``, ``image-layout.md``,
``config.md``).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import lzma
import os
import platform
import re
import shutil
import tarfile
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, cast

from verifiers.errors import ConfigError
from verifiers.runtime.bounded import open_file, read_stream
from verifiers.runtime.decoding import decode_message, read_json
from verifiers.runtime.folders import user_cache_folder
from verifiers.sandbox.host.mounts import IMAGE_ENVIRONMENT
from verifiers.sandbox.host.zygotes import owner
from verifiers.sandbox.unpacking import Budget, Stream, decompressed, members, unpack
from verifiers.storage.files import atomic_write

HOST = "host"
"""In place of an image: this machine's system programs, read-only."""
SUFFIXES = ("", ".tar", ".tar.gz", ".tgz", ".tar.xz")
MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}
"""Name of this machine -> in an image's index."""
MAX_RATIO, SMALL = 100, 2**24
"""A source may unpack to so many times its size, and to ``SMALL`` bytes more."""
MAX_PARTS = 10_000
"""Most files of an image's archive; a root file system has more."""
MAX_JSON_BYTES = 2**22
CHUNK = 2**20
DONE = "image.json"
MALFORMED = (
    AttributeError,
    EOFError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
    zlib.error,
    lzma.LZMAError,
)
"""Errors of reading what a stranger wrote; nested JSON and links in a circle are a RuntimeError."""

Images = Mapping[str, str | os.PathLike[str]] | str | os.PathLike[str]
"""Image of a ``FROM`` -> "host" or a source; or a folder with a source for each image."""
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Image:
    """What a Dockerfile starts from."""

    root: Path | None = None
    """Its root file system; None for the programs of this machine."""
    env: Mapping[str, str] = field(default_factory=dict)
    workdir: str = "/"


class ImageStore:
    """The images that ``images=`` names; each is looked for once."""

    def __init__(self, images: Images):
        self._images = images
        self._by_name: dict[str, Image] = {}

    def find(self, name: str, task: str) -> Image:
        """The image of a ``FROM``, unpacked if it is not yet. *Raises* ConfigError that says how to
        provide it."""
        if name not in self._by_name:
            self._by_name[name] = _find(name, self._images, task)
        return self._by_name[name]


def _find(name: str, images: Images, task: str) -> Image:
    source = _source(name, images, task)
    if source == HOST:
        return Image()
    path = Path(source).expanduser().resolve()
    if not path.exists():
        raise ConfigError(
            f"task {task}: of its image {name!r}, {path} is not there",
            example_id=task,
            path=str(path),
        )
    try:
        root, config = _prepared(path, name)
    except (*MALFORMED, ConfigError, tarfile.TarError, OSError) as error:
        reason = (
            f"it is damaged ({type(error).__name__}: {error})"
            if isinstance(error, MALFORMED)
            else error
        )
        raise ConfigError(
            f"task {task}: its image {name!r} cannot be read from {path}: {reason}", path=str(path)
        ) from error
    pairs = (str(entry).partition("=") for entry in config.get("Env") or ())
    env = {"PATH": IMAGE_ENVIRONMENT["PATH"], **{key: value for key, _, value in pairs}}
    return Image(root, env, str(config.get("WorkingDir") or "/"))


def file_name(image: str) -> str:
    """The name of an image's source in a folder of images, without an ending.

    >>> file_name("ghcr.io/org/tool:1.0")
    'ghcr.io_org_tool_1.0'
    """
    return re.sub(r"[^\w.-]", "_", image).lstrip(".")


def _source(name: str, images: Images, task: str) -> str:
    plain = file_name(name)
    if isinstance(images, Mapping):
        if name in images:
            return os.fspath(images[name])
        usage = f'images={{"{name}": "{plain}.tar"}}'
    else:
        archives = [
            path
            for end in SUFFIXES
            if (path := Path(images).expanduser() / f"{plain}{end}").exists()
        ]
        if archives:
            return str(archives[0])
        usage = f"images={os.fspath(images)!r} with the file {plain}.tar in it"
    raise ConfigError(
        f"task {task}: its image {name!r} is not here, and none is downloaded; make it where it is"
        " with `docker save "
        f"{name} -o {plain}.tar` (without Docker: `skopeo copy docker://{name}"
        f" oci-archive:{plain}.tar`) and pass "
        f'{usage}, or pass images={{"{name}": "host"}} to use this machine\'s system programs in'
        " its place",
        example_id=task,
    )


# --- the cache ------------------------------------------------------------------------------------


def _prepared(path: Path, name: str) -> tuple[Path, dict[str, Any]]:
    """(root folder, configuration) of a source."""
    is_layout = (path / "oci-layout").is_file()
    if path.is_dir() and not is_layout:
        if not any((path / name_of_folder).is_dir() for name_of_folder in ("bin", "usr")):
            raise ConfigError(
                "it is no root file system, which has a folder bin or usr, and no layout of an"
                " image"
            )
        if os.getuid() != 0:
            return path, {}
    folder = user_cache_folder() / "images" / _key(path, name)
    if not (folder / DONE).is_file():
        logger.info("unpacks the image %s of %s into %s", name, path, folder)
        folder.parent.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix=".unpacking-", dir=folder.parent))
        try:
            _fill(unfinished, path, name)
            unfinished.chmod(0o755)
            with contextlib.suppress(OSError):  # another process was first
                unfinished.rename(folder)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    return folder / "root", read_json(folder / DONE)


def _key(path: Path, name: str) -> str:
    """A digest that changes with a source: of its size and time, of a folder those of all its
    files."""
    digest = hashlib.sha256(f"{path}\0{name}\0{owner()}\0".encode())
    below = (
        Path(folder, name)
        for folder, folders, files in os.walk(path)
        for name in (*folders, *files)
    )
    for file in [path] if path.is_file() else sorted(below):
        status = file.lstat()
        digest.update(
            f"{file}\0{status.st_mode}\0{status.st_size}\0{status.st_mtime_ns}\0".encode(
                errors="replace"
            )
        )
    return digest.hexdigest()[:24]


def _fill(folder: Path, path: Path, name: str) -> None:
    """Unpack a source into ``folder/root``."""
    root = folder / "root"
    root.mkdir()
    config: dict[str, object] = {}
    if (path / "oci-layout").is_file():
        num_bytes = sum(blob.stat().st_size for blob in (path / "blobs").rglob("*"))
        config = _layers(lambda inside: _open_below(path, inside), name, root, _budget(num_bytes))
    else:
        with tempfile.TemporaryFile(dir=folder) as packed:
            budget = _pack(path, packed)
            if path.is_file() and (parts := _parts(packed, budget)) is not None:
                config = _layers(
                    lambda inside: _open_part(packed, parts, inside), name, root, budget
                )
            else:
                packed.seek(0)
                unpack(Stream(packed, budget), root, is_layer=True)
    if not any(os.path.lexists(root / folder_name) for folder_name in ("bin", "usr")):
        raise ConfigError("it holds no root file system: no folder bin or usr")
    _give_to_user(root)
    atomic_write(folder / DONE, json.dumps(config).encode("utf-8", "replace"))


# --- archives and layouts of images ---------------------------------------------------------------

Read = Callable[[str], BinaryIO]
"""Open a file of an image's archive or layout by its path."""


def _budget(num_bytes: int) -> Budget:
    return Budget(num_bytes * MAX_RATIO + SMALL)


def _pack(path: Path, packed: BinaryIO) -> Budget:
    """Write the archive of a source, decompressed, into a file; returns what it may unpack to."""
    if path.is_dir():
        with tarfile.open(fileobj=packed, mode="w") as archive:
            archive.add(path, ".")
        return _budget(packed.tell())
    budget = _budget(path.stat().st_size)
    with open_file(path) as file, decompressed(file) as content:
        while chunk := content.read(CHUNK):
            budget.spend(len(chunk))
            packed.write(chunk)
    return _budget(path.stat().st_size)


def _parts(packed: BinaryIO, budget: Budget) -> dict[str, tarfile.TarInfo] | None:
    """The files of an archive of an image by their paths; None for an archive of a root file
    system."""
    packed.seek(0)
    parts = {}
    for _, member in members(Stream(packed, budget)):
        parts[PurePosixPath(member.name).as_posix()] = member
        if len(parts) > MAX_PARTS:
            return None
    return parts if "manifest.json" in parts or "oci-layout" in parts else None


def _open_part(packed: BinaryIO, parts: Mapping[str, tarfile.TarInfo], inside: str) -> BinaryIO:
    packed.seek(0)
    with tarfile.open(fileobj=packed, mode="r:") as archive:
        opened = archive.extractfile(parts[inside]) if inside in parts else None
    if opened is None:
        raise ConfigError(f"it has no file {inside}")
    return cast(BinaryIO, opened)


def _open_below(folder: Path, inside: str) -> BinaryIO:
    path = (folder / inside).resolve()
    if not path.is_relative_to(folder) or not path.is_file():
        raise ConfigError(f"it has no file {inside}")
    return open_file(path)


def _json(read: Read, inside: str) -> Any:
    with _checked(read, inside) as file:
        return decode_message(read_stream(file, MAX_JSON_BYTES, inside))


def _layers(read: Read, name: str, root: Path, budget: Budget) -> dict[str, object]:
    """Unpack the layers of an image, and return its configuration."""
    try:
        manifests = _json(read, "manifest.json")
    except ConfigError:
        path, layers = _of_layout(read, name)
    else:
        image = _only_fitting(manifests, lambda entry: name in (entry.get("RepoTags") or ()), name)
        path, layers = image["Config"], image["Layers"]
    described = _json(read, path)
    digests = (described.get("rootfs") or {}).get("diff_ids") or [None] * len(layers)
    if len(digests) != len(layers):
        raise ConfigError(
            f"it is damaged: it has {len(layers)} layers, and its {path} names {len(digests)}"
        )
    for layer, digest in zip(layers, digests, strict=True):
        with _checked(read, layer) as file, decompressed(file) as content:
            stream = Stream(content, budget)
            unpack(stream, root, is_layer=True)
            if digest not in (None, f"sha256:{stream.hexdigest()}"):
                raise ConfigError(f"{layer} is damaged: its content has another digest")
    return dict(described.get("config") or {})


def _of_layout(read: Read, name: str) -> tuple[str, list[str]]:
    """(path of the configuration, paths of the layers)."""

    def is_named(entry: Mapping[str, Any]) -> bool:
        reference = (entry.get("annotations") or {}).get("org.opencontainers.image.ref.name")
        return reference in (name, name.rpartition(":")[2])

    def is_for_this_machine(entry: Mapping[str, Any]) -> bool:
        machine = (entry.get("platform") or {}).get("architecture")
        return bool(machine == MACHINES.get(platform.machine(), platform.machine()))

    described = _only_fitting(_json(read, "index.json")["manifests"], is_named, name)
    manifest = _json(read, _blob(described))
    if "manifests" in manifest:
        manifest = _json(
            read,
            _blob(_only_fitting(manifest["manifests"], is_for_this_machine, platform.machine())),
        )
    return _blob(manifest["config"]), [_blob(layer) for layer in manifest["layers"]]


def _only_fitting(entries: Sequence[object], fits: Callable[[Any], bool], what: str) -> Any:
    fitting = entries if len(entries) == 1 else [entry for entry in entries if fits(entry)]
    if len(fitting) != 1:
        raise ConfigError(f"of its {len(entries)} images, {len(fitting)} are {what}")
    return fitting[0]


def _blob(described: Mapping[str, object]) -> str:
    digest = str(described["digest"])
    if not re.fullmatch(r"sha256:[0-9a-f]{64}", digest):
        raise ConfigError(f"the digest {digest!r} is none of sha256")
    return f"blobs/{digest.replace(':', '/')}"


@contextlib.contextmanager
def _checked(read: Read, inside: str) -> Iterator[BinaryIO]:
    """A file whose content has the digest that its path names, if it names any."""
    expected = re.fullmatch(r"(?:blobs/sha256/)?([0-9a-f]{64})(?:\.json)?", inside)
    with read(inside) as file:
        if expected is not None:
            digest = hashlib.sha256()
            while chunk := file.read(CHUNK):
                digest.update(chunk)
            if digest.hexdigest() != expected[1]:
                raise ConfigError(f"{inside} is damaged: its content has another digest")
            file.seek(0)
        yield file


def _give_to_user(root: Path) -> None:
    """Give the files to the user that code runs as; only root runs it as another user."""
    if os.getuid() != 0:
        return
    user = owner()
    os.lchown(root, user, user)
    for _, folders, files, folder in os.fwalk(root):
        for name in (*folders, *files):
            os.chown(name, user, user, dir_fd=folder, follow_symlinks=False)
