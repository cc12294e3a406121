"""A root file system of a session's own, writable, over the read-only one of the outer sandbox.

Folders that exist only to hold mounts are made anew in memory, so the code can add files to them; what is mounted (the
system programs, the interpreter, ``/proc``, ``/dev``) is mounted again, as read-only as it was.
"""

from __future__ import annotations

import os
import shutil

from . import kernel


def enter(folder: str, places: dict[str, str]) -> None:
    """Make ``folder`` the root of this process. ``places``: path inside -> folder of the session to mount there."""
    _mirror("/", folder, os.stat("/").st_dev, {*places, "/sandbox"})
    for inside, source in places.items():
        os.makedirs(folder + inside, exist_ok=True)
        kernel.mount(source, folder + inside, None, kernel.MS_BIND)
    os.chroot(folder)


def _mirror(path: str, folder: str, device: int, left_out: set[str]) -> None:
    """Repeat the entries of ``path`` below ``folder``."""
    for entry in os.scandir(path):
        target = folder + entry.path
        if entry.path in left_out:
            continue
        if entry.is_symlink():
            os.symlink(os.readlink(entry.path), target)
        elif not entry.is_dir():
            if entry.stat().st_nlink:
                os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
                kernel.mount(entry.path, target, None, kernel.MS_BIND)
            else:  # a file that bubblewrap made has no name any more, and the kernel mounts none such again
                shutil.copyfile(entry.path, target)
        else:
            os.mkdir(target, 0o755)
            if os.stat(entry.path).st_dev == device:
                _mirror(entry.path, folder, device, left_out)
            else:
                kernel.mount(entry.path, target, None, kernel.MS_BIND | kernel.MS_REC)
