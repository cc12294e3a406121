"""Run a child Python process and end it with SIGKILL: at a failpoint, or after so many lines of its
output.

The child prints one line per acknowledgement. A line that reached the pipe was printed after the
acknowledgement, so everything in ``Ended.lines`` was promised to somebody. This does not simulate
power loss: what a killed process wrote is still in the page cache (truncate the file at every byte
for that).
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from dataclasses import dataclass

FAILPOINT_VARIABLE = "VF_FAILPOINT"
HELD_UP_AFTER_S = 60.0


@dataclass(frozen=True, slots=True)
class Ended:
    """How a child ended."""

    lines: list[str]
    """What it printed, one entry per line."""
    returncode: int
    """Its exit status; -9 after SIGKILL."""
    stderr: str

    @property
    def killed(self) -> bool:
        return self.returncode == -9


def start_child(code: str, *args: object, failpoint: str | None = None) -> subprocess.Popen[str]:
    """Start ``python -c code args…`` with its output piped and, when given, one failpoint armed."""
    environment = {name: value for name, value in os.environ.items() if name != FAILPOINT_VARIABLE}
    environment["PYTHONUNBUFFERED"] = "1"
    if failpoint:
        environment[FAILPOINT_VARIABLE] = failpoint
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, args)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


def run_child(
    code: str, *args: object, failpoint: str | None = None, kill_after_lines: int | None = None
) -> Ended:
    """Run a child to its end, which is SIGKILL right after line number ``kill_after_lines`` when
    that is given."""
    with start_child(code, *args, failpoint=failpoint) as child:
        watchdog = threading.Timer(HELD_UP_AFTER_S, child.kill)
        watchdog.start()
        try:
            lines: list[str] = []
            assert child.stdout is not None
            assert child.stderr is not None
            for line in child.stdout:
                lines.append(line.rstrip("\n"))
                if len(lines) == kill_after_lines:
                    child.kill()
            stderr = child.stderr.read()
        finally:
            watchdog.cancel()
            child.kill()
    return Ended(lines, child.returncode, stderr)
