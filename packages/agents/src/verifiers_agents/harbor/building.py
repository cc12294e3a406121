"""Follow the steps of a Dockerfile in a sandbox: what they make of a task's image, which every
sandbox of it is given.

Promise: a layer is built once and then put into every sandbox of the task. A command that fails
ends the build with its line and its last message; there is no network, and no system program of
this machine can be changed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from verifiers.errors import ConfigError, SandboxError
from verifiers.runtime.decoding import decode_message
from verifiers.sandbox import ExecResult, Sandbox
from verifiers.sandbox.guest.root import CHANGES
from verifiers.sandbox.host.mounts import IMAGE
from verifiers.sandbox.transfer import pack, put, take
from verifiers_agents.harbor.dockerfile import Copy, Dockerfile
from verifiers_agents.harbor.images import ImageStore

_LEFT_OUT = tuple(
    f"--exclude=./{path}"
    for path in (
        "tmp/.transfer-* proc dev sys bin sbin lib lib64 lib32 usr/bin usr/sbin usr/lib usr/lib64"
        " usr/lib32 usr/libexec usr/share/zoneinfo usr/share/terminfo opt/python opt/packages"
        " opt/sandbox etc/ld.so.cache etc/alternatives etc/localtime"
    ).split()
)
_NEEDED = """for name in bash tar find; do command -v $name > /dev/null || echo $name; done
readlink -m / > /dev/null 2>&1 || echo "readlink -m" """
_PACKED = "/tmp/.changes.tar"
_CHANGED = f"""
import json, os, stat, tarfile
left_out = {"opt/python opt/packages opt/sandbox opt/agent run/verifiers sandbox proc dev tmp".split()!r}
image, deleted = {IMAGE!r}, []
is_copy = os.path.isdir(image)
top = "/" if is_copy else {CHANGES!r}
device, copied_ns = os.stat(top).st_dev, os.stat({CHANGES!r}).st_ctime_ns

def entries(top):
    for folder, folders, files in os.walk(top):
        inside = os.path.relpath(folder, top)
        folders[:] = [name for name in folders if os.path.normpath(os.path.join(inside, name)) not in left_out]
        for name in folders + files:
            yield os.path.join(folder, name), os.path.normpath(os.path.join(inside, name))
        if is_copy and top == "/":
            folders[:] = [name for name in folders if os.lstat(os.path.join(folder, name)).st_dev == device]

def known(path):
    return os.lstat(path) if os.path.lexists(path) else None

def differs(now, before):
    if before is None or now.st_mode != before.st_mode or now.st_ctime_ns > copied_ns:
        return True
    same = now.st_size, now.st_mtime_ns
    return not stat.S_ISDIR(now.st_mode) and same != (before.st_size, before.st_mtime_ns)

with tarfile.open({_PACKED!r}, "w") as packed:
    for path, inner in entries(top):
        now = os.lstat(path)
        if stat.S_ISCHR(now.st_mode) and now.st_rdev == 0:
            deleted.append(inner)
            continue
        if not is_copy and stat.S_ISDIR(now.st_mode) and "user.overlay.opaque" in os.listxattr(path):
            deleted.append(inner)
        if not is_copy or now.st_dev == device and differs(now, known(os.path.join(image, inner))):
            packed.add(path, inner, recursive=False)
if is_copy:
    for path, inner in entries(image):
        now = known("/" + inner)
        if now is None or stat.S_IFMT(now.st_mode) != stat.S_IFMT(os.lstat(path).st_mode):
            deleted.append(inner)
print(json.dumps(deleted))
"""
"""Pack what differs from the image. An overlay keeps it: a deleted file is a device file without a
number, and a folder that replaces that of the image has a mark. In a copy it is what is younger
than the copy, or is not in the image so."""


@dataclass(frozen=True, slots=True)
class Layer:
    """What the steps of a Dockerfile make of its image: paths to delete, then an archive to unpack
    in ``/``."""

    archive: bytes = b""
    deleted: tuple[str, ...] = ()

    async def put(self, sandbox: Sandbox) -> None:
        """Put it into a sandbox of the image."""
        if self.deleted:
            gone = [f"/{path}" for path in self.deleted]
            result = await sandbox.exec(["rm", "-rf", "--", *gone], timeout_s=60.0)
            if result.exit_code != 0:
                raise SandboxError(
                    f"what a RUN deleted could not be deleted again: {last_line(result)}"
                )
        if self.archive:
            await put(sandbox, self.archive, "/")


def start(image: str, images: ImageStore, task: str) -> Dockerfile:
    """The build that begins with an image. *Raises* ConfigError that says how to provide an image
    that is not here."""
    entry = images.find(image, task)
    return Dockerfile(image=image, root=entry.root, workdir=entry.workdir, env=dict(entry.env))


async def layer_of(
    build: Dockerfile, opened: Callable[[], Awaitable[Sandbox]], task: str, timeout_s: float
) -> Layer:
    """What the steps of a Dockerfile make of its image; ``opened`` opens an empty sandbox of it,
    where commands are run or the image is to be checked.

    *Raises* ConfigError for a command that fails, and for an image without a program that every
    task needs.
    """
    copies = [step for step in build.steps if isinstance(step, Copy)]
    if build.root is None and len(copies) == len(build.steps):
        files = [pair for step in copies for pair in step.files]
        return Layer(await asyncio.to_thread(_packed, files) if files else b"")
    sandbox = await opened()
    try:
        return await _built(sandbox, build, task, timeout_s)
    finally:
        await sandbox.close()


async def _built(sandbox: Sandbox, build: Dockerfile, task: str, timeout_s: float) -> Layer:
    if build.root is not None:
        await _check_programs(sandbox, build, task)
    await sandbox.exec(["mkdir", "-p", *build.folders, "/tmp"], timeout_s=timeout_s)
    for step in build.steps:
        if isinstance(step, Copy):
            await put(sandbox, _packed(step.files), "/")
            continue
        variables = [f"{name}={value}" for name, value in step.env]
        inside = ["sh", "-c", 'mkdir -p "$0" && cd "$0" && exec "$@"', step.workdir, *step.argv]
        result = await sandbox.exec(["env", *variables, *inside], timeout_s=timeout_s)
        if result.exit_code != 0:
            unchanged = "" if build.root is not None else " and changes no system program"
            raise ConfigError(
                f"task {task}: the RUN in line {step.line} of its Dockerfile failed in the sandbox,"
                f" which has no network{unchanged}: {last_line(result)}",
                example_id=task,
            )
    if build.root is not None:
        return await _changes(sandbox, timeout_s)
    packed = await take(sandbox, "/", ["--one-file-system", *_LEFT_OUT])
    assert packed is not None, "the root folder exists"
    return Layer(packed.archive)


async def _check_programs(sandbox: Sandbox, build: Dockerfile, task: str) -> None:
    checked = await sandbox.exec(["sh", "-c", _NEEDED], timeout_s=60.0)
    if checked.exit_code is not None and not checked.error:
        missing = checked.stdout.splitlines()
    else:
        missing = ["sh"]
    if missing:
        raise ConfigError(
            f"task {task}: its image {build.image!r} has no {', '.join(missing)}, which the sandbox"
            " of a task needs",
            example_id=task,
        )


async def _changes(sandbox: Sandbox, timeout_s: float) -> Layer:
    """The files of a sandbox that differ from its image."""
    await sandbox.restart()
    result = await sandbox.exec(_CHANGED, timeout_s=timeout_s)
    if result.error or result.timed_out:
        raise SandboxError(f"what the Dockerfile made could not be packed: {last_line(result)}")
    return Layer(await sandbox.read_file(_PACKED), tuple(decode_message(result.stdout)))


def last_line(result: ExecResult) -> str:
    """The last line that a command printed, for a message."""
    lines = (result.error or result.stderr or result.stdout).strip().splitlines()
    return lines[-1][:300] if lines else f"exit code {result.exit_code}"


def _packed(files: Iterable[tuple[Path, str]]) -> bytes:
    return pack([(path, inside.lstrip("/") or ".") for path, inside in files])
