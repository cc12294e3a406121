"""Reaper: run one command, and end whatever it leaves behind, daemons included (Linux).

The command has this process's streams, environment and process group. A process whose parent has
ended becomes a child of the reaper, also in a session of its own. When the command ends, and on
SIGUSR1, all of them are killed; SIGTERM to the group is the command's affair.
"""

from __future__ import annotations

import os
import signal

from . import kernel
from .supervisor import end_descendants


def reap(command: list[str]) -> None:
    """Run ``command`` to its end. Does not return."""
    kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
    pid = os.posix_spawnp(command[0], command, os.environ)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, lambda *_: _end(1))
    for stream in (0, 1, 2):  # the command alone holds them, so that their end is seen
        os.close(stream)
    while True:
        ended, status = os.waitpid(-1, 0)
        if ended == pid:
            _end(os.waitstatus_to_exitcode(status) % 256)


def _end(code: int) -> None:
    end_descendants()
    os._exit(code)
