"""Fail points: named points in the code where a test kills the process or injects a disk error, to
test crash safety.

``VF_FAILPOINT=journal.after_write:3`` sends SIGKILL to this process at the third pass of that fail
point; ``journal.after_write:3:raise`` raises ``OSError(EIO)`` there once, and ``…:3:ENOSPC`` that
error. Unset, a pass costs one comparison. Passes are counted per process, and one fail point is
armed at a time.

Fail points: ``journal.open`` (recovered, before truncation), ``journal.before_write``,
``journal.after_write`` (before the fsync), ``journal.after_fsync``, ``journal.finish``,
``index.append`` (what does not fit is cut off), ``append_lines.before_write``,
``atomic_write.before_rename`` and ``replacing.before_rename``.

Only tests arm fail points.
"""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from verifiers.errors import ConfigError

VARIABLE = "VF_FAILPOINT"


@dataclass(slots=True)
class _Armed:
    name: str
    at_pass: int
    errno: int | None  # None: SIGKILL
    num_passes: int = 0

    def pass_by(self) -> None:
        self.num_passes += 1
        if self.num_passes != self.at_pass:
            return
        if self.errno is None:
            os.kill(os.getpid(), signal.SIGKILL)
        else:
            raise OSError(self.errno, f"{os.strerror(self.errno)} (failpoint {self.name})")


def failpoint(name: str) -> None:
    """Pass the fail point ``name``: does nothing unless it is armed and this is the armed pass.

    *Raises* OSError when armed to raise.
    """
    if _armed is not None and _armed.name == name:
        _armed.pass_by()


@contextmanager
def armed(spec: str) -> Iterator[None]:
    """Arm ``name:n``, ``name:n:raise`` or ``name:n:ERRNO`` in this process for the duration of a
    ``with`` block."""
    global _armed
    before, _armed = _armed, _parsed(spec)
    try:
        yield
    finally:
        _armed = before


def _parsed(spec: str) -> _Armed | None:
    if not spec:
        return None
    name, _, after_name = spec.partition(":")
    at_pass, _, effect = after_name.partition(":")
    code = errno.EIO if effect == "raise" else getattr(errno, effect, None) if effect else None
    if not name or not at_pass.isdecimal() or int(at_pass) < 1 or (effect and code is None):
        raise ConfigError(
            f"{VARIABLE}={spec!r} is not name:n, name:n:raise or name:n:ERRNO with n >= 1; unset it"
            " outside tests.",
            key=VARIABLE,
        )
    return _Armed(name, int(at_pass), code)


_armed = _parsed(os.environ.get(VARIABLE, ""))
