"""Launch bubblewrap when the host process is root: become an unprivileged user first, keeping
access to the mounts.

``launch.py FD SOURCES COMMAND …`` enters new user and mount namespaces, waits until the host has
written the user maps, binds each source (a JSON list of paths) to ``STAGE/<index>``, becomes the
unprivileged user and executes the command. Otherwise the code would run as the host's root user:
without capabilities, but exempt from the process limit.
"""

from __future__ import annotations

import json
import os
import sys

from . import kernel

STAGE = "/tmp"
UID = 1000


def main() -> None:
    fd, sources, command = int(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3:]
    kernel.unshare(kernel.CLONE_NEWUSER | kernel.CLONE_NEWNS)
    os.write(fd, b"?")
    if os.read(fd, 1) != b"!":
        sys.exit("the host process did not write the user map")
    os.close(fd)
    kernel.mount("none", "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
    opened = [os.open(source, os.O_PATH) for source in sources]
    kernel.mount("tmpfs", STAGE, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "mode=0755")
    for number, source in enumerate(opened):
        _bind(source, f"{STAGE}/{number}")
    os.setgroups([])
    os.setresgid(UID, UID, UID)
    os.setresuid(UID, UID, UID)
    os.execv(command[0], command)


def _bind(source: int, target: str) -> None:
    path = f"/proc/self/fd/{source}"
    if os.path.isdir(path):
        os.mkdir(target)
    else:
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY))
    kernel.mount(path, target, None, kernel.MS_BIND | kernel.MS_REC)
    os.close(source)
