"""Copy folders into a sandbox and out of it, as tar archives that the sandbox's own ``tar`` packs
and unpacks.

Promise: an archive out of a sandbox is untrusted, and this process never unpacks it. It is
unpacked in another sandbox, below the folder that it belongs to: ``tar`` refuses names with ``..``,
strips a leading ``/``, and makes links that point elsewhere last. What a sandbox can send is
bounded (64 MB, ``SandboxLimit`` above).
"""

from __future__ import annotations

import io
import os
import secrets
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from verifiers.errors import SandboxError
from verifiers.sandbox.protocol import ExecResult, Sandbox

TRANSFER_S = 120.0
_UNPACK = '{ [ -d "$2" ] || mkdir -p "$2"; } && tar -C "$2" -xf "$1" && rm -f "$1"'
_REPLACE = f'mkdir -p "$2" && find "$2" -mindepth 1 -delete && {_UNPACK}'
_PACK = """path=$1; shift
if [ -d "$path" ]; then cd "$path"; name=.; else cd "$(dirname "$path")"; name=$(basename "$path"); fi || exit 77
[ -e "$name" ] || exit 77
tar "$@" -cf "$0" -- "$name"
[ -s "$0" ] && echo "$name"
"""
MISSING = 77
"""Exit code of ``_PACK`` when there is nothing at the path."""


_PACK_ALL = r"""
look() { stat=; read -r stat 2>/dev/null < "/proc/$1/stat" || return 0; set -- ${stat##*) }
         state=$1; above=$2; group=$3; }
look $$; own=$group; look $PPID; is_first=$above
for folder in /proc/[0-9]*; do
    number=${folder#/proc/}
    case $number in 1|$$|$PPID) continue;; esac
    look $number; [ -n "$stat" ] && [ "$state" != Z ] || continue
    if [ "$is_first" = 1 ] || [ "$group" = "$own" ]; then echo "$stat"; exit 78; fi
done
if [ "$is_first" = 1 ]; then tar -P -cf "$0" --exclude="$0" -- "$PWD" /tmp && echo all
else tar -cf "$0" . && echo own; fi
"""
"""Packs the files of a sandbox where no process of the code runs beside its worker: the working
folder, and ``/tmp`` where that is the sandbox's own, as process 1 shows."""
_UNPACK_ALL = 'tar -pP -xf "$0" && rm -f "$0"'
PROCESSES = 78
"""Exit code of ``_PACK_ALL`` where a process runs in the background."""
_VARIABLES = "[name for name in globals() if not name.startswith('_')]"


class Packed(NamedTuple):
    """A file or folder out of a sandbox."""

    archive: bytes
    is_folder: bool
    """A folder's archive holds what is in it, a file's the file."""


def pack(files: Sequence[tuple[Path, str]]) -> bytes:
    """Return a tar archive of files and folders of this machine, each under a path of its own,
    without owners.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = Path(folder, "a.txt").write_text("one")
    ...     archive = pack([(Path(folder), "data")])
    >>> tarfile.open(fileobj=io.BytesIO(archive)).getnames()
    ['data', 'data/a.txt']
    """
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for path, inside in files:
            archive.add(path, inside, filter=_without_owner)
    return packed.getvalue()


def _without_owner(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    if os.path.basename(member.name) in ("__pycache__", ".DS_Store"):
        return None
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member


async def put(sandbox: Sandbox, archive: bytes, folder: str, replace: bool = False) -> None:
    """Unpack an archive in a folder of the sandbox; ``replace`` deletes what the folder holds
    first.

    *Raises* SandboxError with the message of ``tar`` when the archive cannot be unpacked.
    """
    path = _temporary()
    await sandbox.write_file(path, archive)
    script = _REPLACE if replace else _UNPACK
    result = await sandbox.exec(["sh", "-c", script, "put", path, folder], timeout_s=TRANSFER_S)
    if result.exit_code != 0:
        raise SandboxError(
            f"An archive could not be unpacked in {folder} of the sandbox: {_why(result)}"
        )


async def copy_files(source: Sandbox, target: Sandbox) -> None:
    """Copy the working folder and ``/tmp`` of a sandbox into another that was opened alike.

    *Raises* SandboxError where more than files would have to be copied: a process in the
    background, or variables of the Python interpreter; SandboxLimit above 64 MB.
    """
    variables = (await source.exec(_VARIABLES, timeout_s=TRANSFER_S)).value
    if variables not in (None, "[]"):
        raise SandboxError(
            "The sandbox cannot be copied for a branch: its Python interpreter holds the variables"
            f" {variables[:200]}, and files alone are copied; run code as commands, or fork before it"
        )
    path = _temporary()
    packed = await source.exec(["sh", "-c", _PACK_ALL, path], timeout_s=TRANSFER_S)
    if packed.exit_code == PROCESSES:
        name = packed.stdout.partition("(")[2].rpartition(")")[0]
        raise SandboxError(
            f"The sandbox cannot be copied for a branch: the process {name!r} runs in the background,"
            " and files alone are copied; end it before the fork"
        )
    if packed.exit_code != 0:
        raise SandboxError(f"The files of a sandbox could not be packed: {_why(packed)}")
    try:
        archive = await source.read_file(path)
    finally:
        await source.exec(["rm", "-f", path], timeout_s=TRANSFER_S)
    await target.write_file(path, archive)
    result = await target.exec(["sh", "-c", _UNPACK_ALL, path], timeout_s=TRANSFER_S)
    if result.exit_code != 0:
        raise SandboxError(f"The files of a sandbox could not be unpacked: {_why(result)}")


async def take(sandbox: Sandbox, path: str, options: Sequence[str] = ()) -> Packed | None:
    """Pack a file or folder of the sandbox; None when there is none. Unreadable files of a folder
    are left out.

    ``options`` are those of ``tar``, such as ``--exclude=*.o``.

    *Raises* SandboxError when nothing was packed, SandboxLimit above 64 MB.
    """
    target = _temporary()
    result = await sandbox.exec(["sh", "-c", _PACK, target, path, *options], timeout_s=TRANSFER_S)
    if result.exit_code == MISSING:
        return None
    if result.exit_code != 0:
        raise SandboxError(f"{path} of the sandbox could not be packed: {_why(result)}")
    try:
        return Packed(await sandbox.read_file(target), result.stdout == ".\n")
    finally:
        await sandbox.exec(["rm", "-f", target], timeout_s=TRANSFER_S)


def _temporary() -> str:
    """A name that code in the sandbox cannot guess and prepare."""
    return f"/tmp/.transfer-{secrets.token_hex(8)}.tar"


def _why(result: ExecResult) -> str:
    lines = (result.error or result.stderr).strip().splitlines()
    return lines[-1][:300] if lines else "it ended without a message"
