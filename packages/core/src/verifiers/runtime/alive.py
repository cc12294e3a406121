"""Whether a process of this machine runs."""

from __future__ import annotations

import os


def is_alive(pid: int) -> bool:
    """Whether a process with this id runs, also a process of another user.

    >>> is_alive(os.getpid()), is_alive(2**22 + 1)
    (True, False)
    """
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):  # the process belongs to another user
        return True
    return True
