"""Child processes of a command: started together, logged line by line, and stopped with all their
descendants.

A child leads a new session, so that a signal reaches its process group, and Ctrl-C in the terminal
reaches only the parent. On Linux a child also gets SIGTERM when its parent dies for any reason.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import IO

LAST_LINES = 15
TERM_GRACE_S = 20.0
_PR_SET_PDEATHSIG = 1


class Child:
    """A child process. ``show`` gets its output lines on a thread: stdout and stderr, or only
    stderr.

    ``separate_stdout``: collect stdout in ``stdout`` instead.
    """

    def __init__(
        self,
        name: str,
        words: Sequence[str],
        variables: Mapping[str, str],
        show: Callable[[str], None] | None = None,
        separate_stdout: bool = False,
    ):
        self.name = name
        self.last_lines: deque[str] = deque(maxlen=LAST_LINES)
        self.stdout = ""
        self._show = show
        piped = show is not None
        self.process = subprocess.Popen(
            list(words),
            env={**os.environ, **variables},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if piped else sys.stderr,
            stderr=subprocess.PIPE if separate_stdout else subprocess.STDOUT if piped else None,
            start_new_session=True,
            preexec_fn=_end_with_parent(),
        )
        self._readers: list[threading.Thread] = []
        if piped:
            self._start(self._read, self.process.stderr if separate_stdout else self.process.stdout)
        if separate_stdout:
            self._start(self._collect, self.process.stdout)

    @property
    def exit_code(self) -> int | None:
        """The exit code; None while it runs, 128 + the signal number after a signal."""
        code = self.process.poll()
        return code if code is None or code >= 0 else 128 - code

    def send(self, number: int) -> None:
        """Send a signal to the child only, not to its process group."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)

    def stop(self, grace_s: float = TERM_GRACE_S) -> None:
        """Terminate the process group of the child; kill it after ``grace_s`` seconds. A second
        call does nothing."""
        if self.process.poll() is None:
            self._signal_tree(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(grace_s)
        self._signal_tree(signal.SIGKILL)  # descendants may outlive the leader
        self.process.wait()
        for reader in self._readers:
            reader.join(timeout=2.0)

    def _signal_tree(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)

    def _start(self, read: Callable[[IO[bytes]], None], stream: IO[bytes] | None) -> None:
        assert stream is not None
        self._readers.append(threading.Thread(target=read, args=(stream,), daemon=True))
        self._readers[-1].start()

    def _collect(self, stream: IO[bytes]) -> None:
        self.stdout = stream.read().decode("utf-8", "replace")

    def _read(self, stream: IO[bytes]) -> None:
        assert self._show is not None
        for raw in stream:
            line = raw.decode("utf-8", "replace").rstrip("\n")
            self.last_lines.append(line)
            self._show(line)


def _end_with_parent() -> Callable[[], None] | None:
    """Return a function for a forked child that makes it exit with its parent; None if the OS
    has none."""
    if not sys.platform.startswith("linux"):
        return None
    set_option = ctypes.CDLL(None).prctl

    def request_signal() -> None:
        set_option(_PR_SET_PDEATHSIG, signal.SIGTERM)

    return request_signal


class Signals:
    """Records SIGINT and SIGTERM inside a ``with`` block: ``received`` has their
    numbers, in order."""

    NUMBERS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self.received: list[int] = []

    def __enter__(self) -> Signals:
        self._before = {number: signal.signal(number, self._record) for number in self.NUMBERS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _record(self, number: int, frame: object) -> None:
        self.received.append(number)


def wait_until(
    ready: Callable[[], bool], child: Child, signals: Signals, timeout_s: float, poll_s: float = 0.2
) -> bool:
    """Return whether ``ready`` became true before the child exited, a signal arrived, or the
    timeout passed."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if child.exit_code is not None or signals.received:
            return False
        if ready():
            return True
        time.sleep(poll_s)
    return False


def wait_for(
    child: Child, signals: Signals, is_lost: Callable[[], bool] = lambda: False
) -> int | None:
    """The exit code of a child that receives the signals too: after the first it saves its last
    whole step, the second ends it at once. None when ``is_lost`` before."""
    num_forwarded = 0
    while (code := child.exit_code) is None:
        if is_lost():
            return None
        while num_forwarded < len(signals.received):
            child.send(signals.received[num_forwarded])
            num_forwarded += 1
        wait_until(is_lost, child, Signals(), 0.5)
    return code
