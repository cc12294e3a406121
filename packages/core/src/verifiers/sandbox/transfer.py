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
