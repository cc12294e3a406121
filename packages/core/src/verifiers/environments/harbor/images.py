"""Root file systems of images without a container engine: found by name, unpacked once into the user's cache.

A source is a folder with a root file system, a tar archive of one (``docker export``), an archive of an image (``docker
save``), or a layout of the Open Container Initiative, as a folder or an archive (``skopeo copy … oci:…``). The latter
two bring the variables and the work folder of the image along.

Promise: nothing is downloaded or executed. An archive is unpacked below one new folder: names that lead out of it are
refused, links are followed as if that folder were the root, device files are left out. A folder appears in the cache
under its name only when it is complete, and layers are checked against their digests.

*Source*: https://github.com/opencontainers/image-spec (``layer.md``, ``image-layout.md``, ``config.md``).
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import logging
import os
import platform
import re
import shutil
import stat
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, cast

from verifiers.errors import ConfigError
from verifiers.runtime.folders import user_cache_folder
from verifiers.sandbox.host.mounts import IMAGE_ENVIRONMENT
from verifiers.sandbox.host.zygotes import owner

HOST = "host"
"""In place of an image: this machine's system programs, read-only."""
SUFFIXES = ("", ".tar", ".tar.gz", ".tgz", ".tar.xz")
MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}
"""Name of this machine -> in an image's index."""
MAX_LINKS = 40
WHITEOUT, OPAQUE = ".wh.", ".wh..wh..opq"
CHUNK = 2**20
DONE = "image.json"

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
        self._found: dict[str, Image] = {}

    def find(self, name: str, task: str) -> Image:
        """The image of a ``FROM``, unpacked if it is not yet. *Raises* ConfigError that says how to provide it."""
        if name not in self._found:
            self._found[name] = _find(name, self._images, task)
        return self._found[name]


def _find(name: str, images: Images, task: str) -> Image:
    source = _source(name, images, task)
    if source == HOST:
        return Image()
    path = Path(source).expanduser().resolve()
    if not path.exists():
        raise ConfigError(f"task {task}: of its image {name!r}, {path} is not there", example_id=task, path=str(path))
    try:
        root, config = _prepared(path, name)
    except (ConfigError, tarfile.TarError, OSError, EOFError) as error:
        raise ConfigError(f"task {task}: its image {name!r} cannot be read from {path}: {error}", path=str(path)) from (
            error
        )
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
        place = f'images={{"{name}": "{plain}.tar"}}'
    else:
        found = [path for end in SUFFIXES if (path := Path(images).expanduser() / f"{plain}{end}").exists()]
        if found:
            return str(found[0])
        place = f"images={os.fspath(images)!r} with the file {plain}.tar in it"
    raise ConfigError(
        f"task {task}: its image {name!r} is not here, and none is downloaded; make it where it is with `docker save "
        f"{name} -o {plain}.tar` (without Docker: `skopeo copy docker://{name} oci-archive:{plain}.tar`) and pass "
        f'{place}, or pass images={{"{name}": "host"}} to use this machine\'s system programs in its place',
        example_id=task,
    )


# --- the cache ----------------------------------------------------------------------------------------------------


def _prepared(path: Path, name: str) -> tuple[Path, dict[str, Any]]:
    """(root folder, configuration) of a source."""
    is_layout = (path / "oci-layout").is_file()
    if path.is_dir() and not is_layout:
        if not any((path / one).is_dir() for one in ("bin", "usr")):
            raise ConfigError("it is no root file system, which has a folder bin or usr, and no layout of an image")
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
    return folder / "root", json.loads((folder / DONE).read_text(encoding="utf-8"))


def _key(path: Path, name: str) -> str:
    """A digest that changes with a source: of its size and time, of a folder those of all its files."""
    digest = hashlib.sha256(f"{path}\0{name}\0{owner()}\0".encode())
    below = (Path(folder, name) for folder, folders, files in os.walk(path) for name in (*folders, *files))
    for file in [path] if path.is_file() else sorted(below):
        known = file.lstat()
        digest.update(f"{file}\0{known.st_mode}\0{known.st_size}\0{known.st_mtime_ns}\0".encode(errors="replace"))
    return digest.hexdigest()[:24]


def _fill(folder: Path, path: Path, name: str) -> None:
    """Unpack a source into ``folder/root``."""
    root = folder / "root"
    root.mkdir()
    config: dict[str, Any] = {}
    if not path.is_dir():
        with tarfile.open(path) as archive:
            if (read := _reader(archive)) is not None:
                config = _layers(read, name, root)
            else:
                unpack(archive, root)
    elif (path / "oci-layout").is_file():
        config = _layers(lambda inside: _open_below(path, inside), name, root)
    else:
        with tempfile.TemporaryFile() as packed:
            with tarfile.open(fileobj=packed, mode="w") as archive:
                archive.add(path, ".")
            packed.seek(0)
            with tarfile.open(fileobj=packed) as archive:
                unpack(archive, root)
    if not any(os.path.lexists(root / one) for one in ("bin", "usr")):
        raise ConfigError("it holds no root file system: no folder bin or usr")
    _own(root)
    (folder / DONE).write_text(json.dumps(config), encoding="utf-8")


# --- archives and layouts of images -------------------------------------------------------------------------------

Read = Callable[[str], BinaryIO]
"""Open a file of an image's archive or layout by its path."""


def _reader(archive: tarfile.TarFile) -> Read | None:
    """Open files of an archive of an image; None for an archive of a root file system."""
    members = {PurePosixPath(member.name).as_posix(): member for member in archive}
    if "manifest.json" not in members and "oci-layout" not in members:
        return None

    def read(inside: str) -> BinaryIO:
        member = members.get(inside)
        opened = archive.extractfile(member) if member is not None else None
        if opened is None:
            raise ConfigError(f"it has no file {inside}")
        return cast(BinaryIO, opened)

    return read


def _open_below(folder: Path, inside: str) -> BinaryIO:
    path = (folder / inside).resolve()
    if not path.is_relative_to(folder) or not path.is_file():
        raise ConfigError(f"it has no file {inside}")
    return path.open("rb")


def _json(read: Read, inside: str) -> Any:
    with read(inside) as file:
        return json.loads(file.read())


def _layers(read: Read, name: str, root: Path) -> dict[str, Any]:
    """Unpack the layers of an image, and return its configuration."""
    try:
        manifests = _json(read, "manifest.json")
    except ConfigError:
        config, layers = _of_layout(read, name)
    else:
        one = _only_fitting(manifests, lambda entry: name in (entry.get("RepoTags") or ()), name)
        config, layers = one["Config"], one["Layers"]
    for layer in layers:
        with _checked(read, layer) as file, tarfile.open(fileobj=file) as archive:
            unpack(archive, root)
    with _checked(read, config) as file:
        return dict(json.loads(file.read()).get("config") or {})


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
        manifest = _json(read, _blob(_only_fitting(manifest["manifests"], is_for_this_machine, platform.machine())))
    return _blob(manifest["config"]), [_blob(layer) for layer in manifest["layers"]]


def _only_fitting(entries: list[Any], fits: Callable[[Any], bool], what: str) -> Any:
    fitting = entries if len(entries) == 1 else [entry for entry in entries if fits(entry)]
    if len(fitting) != 1:
        raise ConfigError(f"of its {len(entries)} images, {len(fitting)} are {what}")
    return fitting[0]


def _blob(described: Mapping[str, Any]) -> str:
    digest = str(described["digest"])
    if not re.fullmatch(r"sha256:[0-9a-f]{64}", digest):
        raise ConfigError(f"the digest {digest!r} is none of sha256")
    return f"blobs/{digest.replace(':', '/')}"


@contextlib.contextmanager
def _checked(read: Read, inside: str) -> Iterator[BinaryIO]:
    """A file whose content has the digest that its path names, if it names one."""
    expected = re.fullmatch(r"blobs/sha256/([0-9a-f]{64})", inside)
    with read(inside) as file:
        if expected is not None:
            digest = hashlib.sha256()
            while chunk := file.read(CHUNK):
                digest.update(chunk)
            if digest.hexdigest() != expected[1]:
                raise ConfigError(f"{inside} is damaged: its content has another digest")
            file.seek(0)
        yield file


# --- unpacking ----------------------------------------------------------------------------------------------------


def unpack(archive: tarfile.TarFile, root: Path) -> None:
    """Unpack a root file system, or one layer over those below it. *Raises* ConfigError for a name that leads out."""
    folders: dict[str, int] = {}
    for member in archive:
        parts = [part for part in member.name.split("/") if part not in ("", ".")]
        if ".." in parts:
            raise ConfigError(f"its file {member.name!r} leads out of the image")
        if not parts:
            continue
        place = inside_root(root, "/".join(parts[:-1]))
        if os.path.lexists(place) and not os.path.isdir(place):
            raise ConfigError(f"its file {member.name!r} lies in a file")
        os.makedirs(place, exist_ok=True)
        _unpack_one(archive, member, root, place, parts[-1], folders)
    for path, mode in folders.items():
        with contextlib.suppress(FileNotFoundError):  # deleted by a whiteout of the same layer
            os.chmod(path, mode)


def inside_root(root: Path, path: str) -> str:
    """The path of the host of a folder of the image: links are followed as if ``root`` were the root.

    *Raises* ConfigError for links in a circle.
    """
    pending, num_links = path.split("/")[::-1], 0
    resolved: list[str] = []
    while pending:
        part = pending.pop()
        if part in ("", "."):
            continue
        if part == "..":
            resolved = resolved[:-1]
            continue
        here = os.path.join(root, *resolved, part)
        if not os.path.islink(here):
            resolved.append(part)
            continue
        num_links += 1
        if num_links > MAX_LINKS:
            raise ConfigError(f"its links at {path!r} lead in a circle")
        target = os.readlink(here)
        if target.startswith("/"):
            resolved = []
        pending += target.split("/")[::-1]
    return os.path.join(root, *resolved)


def _unpack_one(
    archive: tarfile.TarFile, member: tarfile.TarInfo, root: Path, place: str, name: str, folders: dict[str, int]
) -> None:
    target = os.path.join(place, name)
    if name == OPAQUE:
        for entry in os.listdir(place):
            _delete(os.path.join(place, entry))
    elif name.startswith(WHITEOUT):
        _delete(os.path.join(place, name.removeprefix(WHITEOUT)))
    elif member.isdir():
        if not os.path.isdir(target) or os.path.islink(target):
            _delete(target)
            os.mkdir(target)
        folders[target] = member.mode & 0o777 | 0o700
    elif member.issym():
        _delete(target)
        os.symlink(member.linkname, target)
    elif member.islnk():
        above, _, last = member.linkname.rstrip("/").rpartition("/")
        source = os.path.join(inside_root(root, above), last)
        if last in ("", ".", "..") or not os.path.lexists(source) or stat.S_ISDIR(os.lstat(source).st_mode):
            raise ConfigError(f"its file {member.name!r} is a link to {member.linkname!r}, which is no file before it")
        if not (os.path.lexists(target) and os.path.samestat(os.lstat(source), os.lstat(target))):
            _delete(target)
            os.link(source, target, follow_symlinks=False)
    elif member.isfile():
        _delete(target)
        opened = archive.extractfile(member)
        assert opened is not None
        with opened, open(target, "xb") as file:
            shutil.copyfileobj(cast(io.BufferedReader, opened), file, CHUNK)
        os.chmod(target, member.mode & 0o777 | 0o600)


def _delete(path: str) -> None:
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    elif os.path.lexists(path):
        os.unlink(path)


def _own(root: Path) -> None:
    """Give the files to the user that code runs as; only root runs it as another one."""
    if os.getuid() != 0:
        return
    user = owner()
    os.lchown(root, user, user)
    for folder, folders, files in os.walk(root):
        for name in (*folders, *files):
            os.lchown(os.path.join(folder, name), user, user)
