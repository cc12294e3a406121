"""A root file system of a session's own, writable: over the read-only root of the outer sandbox, or
over an image's.

``enter``: folders that exist only to hold mounts are made anew in memory, so the code can add files
to them; what is mounted (the system programs, the interpreter, ``/proc``, ``/dev``) is mounted
again, as read-only as it was.

``enter_image``: the root is an overlay of the image, which stays as it is, and of changes in
memory; where the kernel mounts no overlay, it is a copy of the image in memory. Of the outer
sandbox only the interpreter, the agents, ``/proc`` and ``/dev`` are mounted again; no system
program of the host.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat

from . import kernel

CHANGES = "/opt/sandbox/changes"
"""Where the code sees the files that differ from those of the image, as an overlay keeps them;
read-only. Beside a copy it is an empty folder that is younger than every copied file, and the image
itself is in its place too."""


def enter(folder: str, mounts: dict[str, str]) -> None:
    """Make ``folder`` the root of this process. ``mounts``: path inside -> folder of the session to
    mount there."""
    _mirror("/", folder, os.stat("/").st_dev, {*mounts, "/sandbox"})
    for inside, source in mounts.items():
        os.makedirs(folder + inside, exist_ok=True)
        kernel.mount(source, folder + inside, None, kernel.MS_BIND)
    os.chroot(folder)


def enter_image(
    folder: str, image: str, changes: str, mounts: dict[str, str], left_out: set[str]
) -> None:
    """Make the root file system ``image`` that of this process. ``changes``: a folder of the
    session, which the code can read at ``CHANGES``; ``left_out``: paths of the outer sandbox that
    are not those of the image.

    *Raises* OSError when neither an overlay can be mounted nor a copy of the image fits into the
    session's files.
    """
    safe = kernel.MS_NOSUID | kernel.MS_NODEV
    for name in ("upper", "work"):
        os.makedirs(f"{changes}/{name}")
    layers = f"lowerdir={image},upperdir={changes}/upper,workdir={changes}/work,userxattr"
    try:
        kernel.mount("overlay", folder, "overlay", safe, layers)
        left_out = {*left_out, image}
    # Linux before 5.11, a container that forbids it, an image on two overlays already
    except OSError as refusal:
        _copy(image, folder, refusal)
        os.rmdir(f"{changes}/upper")
        os.mkdir(f"{changes}/upper")
    _mirror("/", folder, os.stat("/").st_dev, {*mounts, *left_out, "/sandbox"})
    for inside, source in {**mounts, CHANGES: f"{changes}/upper"}.items():
        os.makedirs(folder + inside, exist_ok=True)
        kernel.mount(source, folder + inside, None, kernel.MS_BIND)
    read_only = kernel.MS_BIND | kernel.MS_REMOUNT | kernel.MS_RDONLY
    kernel.mount("none", folder + CHANGES, None, read_only | safe)
    os.chroot(folder)


def _copy(image: str, folder: str, refusal: OSError) -> None:
    """Copy the files, links and folders of an image. *Raises* OSError when they do not fit."""

    def copy_one(source: str, target: str) -> None:
        # a pipe has no content, and reading it would wait
        if stat.S_ISREG(os.lstat(source).st_mode):
            shutil.copy2(source, target)

    try:
        shutil.copytree(image, folder, symlinks=True, copy_function=copy_one, dirs_exist_ok=True)
    except OSError as error:  # also a list of what could not be copied
        why = error.args[0][0][2] if isinstance(error, shutil.Error) else error
        size_mb = os.statvfs(folder).f_blocks * os.statvfs(folder).f_frsize >> 20
        raise OSError(
            errno.ENOSPC,
            f"the kernel refuses an overlay ({refusal.strerror}), and the image cannot be copied"
            f" into the {size_mb} MB of the sandbox's files (memory_gb, disk_size_gb, or memory_mb"
            f" of a task): {why}",
        ) from error


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
            # a file that bubblewrap made has no name any more, and the kernel mounts none such
            # again
            else:
                shutil.copyfile(entry.path, target)
        else:
            os.makedirs(target, 0o755, exist_ok=True)
            if os.stat(entry.path).st_dev == device:
                _mirror(entry.path, folder, device, left_out)
            else:
                kernel.mount(entry.path, target, None, kernel.MS_BIND | kernel.MS_REC)
