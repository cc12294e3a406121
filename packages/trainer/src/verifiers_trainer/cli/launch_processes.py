"""Child processes of a command: started together, logged line by line, and ended with everything they started.

A child leads a session of its own, so that a signal reaches its whole tree, and Ctrl-C in the terminal reaches the
parent alone. On Linux a child also gets a signal when its parent dies, however that happens.
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
    """One child. ``show`` gets its lines (stdout and stderr, or stderr alone with ``own_stdout``), on a thread.

    With ``own_stdout``, its stdout is collected in ``written``.
    """

    def __init__(
        self,
        name: str,
        words: Sequence[str],
        variables: Mapping[str, str],
        show: Callable[[str], None] | None = None,
        own_stdout: bool = False,
    ):
        self.name = name
        self.last_lines: deque[str] = deque(maxlen=LAST_LINES)
        self.written = ""
        self._show = show
        piped = show is not None
        self.process = subprocess.Popen(
            list(words),
            env={**os.environ, **variables},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if piped else sys.stderr,
            stderr=subprocess.PIPE if own_stdout else subprocess.STDOUT if piped else None,
            start_new_session=True,
            preexec_fn=_end_with_parent(),
        )
        self._readers: list[threading.Thread] = []
        if piped:
            self._start(self._read, self.process.stderr if own_stdout else self.process.stdout)
        if own_stdout:
            self._start(self._keep, self.process.stdout)

    @property
    def exit_code(self) -> int | None:
        """None while it runs; of one that a signal ended, 128 + the signal's number."""
        code = self.process.poll()
        return code if code is None or code >= 0 else 128 - code

    def send(self, number: int) -> None:
        """A signal to the child alone."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)

    def stop(self, grace_s: float = TERM_GRACE_S) -> None:
        """End it and all that it started; what is not gone in time is killed. Calling it again does nothing."""
        if self.process.poll() is None:
            self._signal_tree(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(grace_s)
        self._signal_tree(signal.SIGKILL)  # also what an ended leader left behind
        self.process.wait()
        for reader in self._readers:
            reader.join(timeout=2.0)

    def _signal_tree(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)

    def _start(self, reads: Callable[[IO[bytes]], None], stream: IO[bytes] | None) -> None:
        assert stream is not None
        self._readers.append(threading.Thread(target=reads, args=(stream,), daemon=True))
        self._readers[-1].start()

    def _keep(self, stream: IO[bytes]) -> None:
        self.written = stream.read().decode("utf-8", "replace")

    def _read(self, stream: IO[bytes]) -> None:
        assert self._show is not None
        for raw in stream:
            line = raw.decode("utf-8", "replace").rstrip("\n")
            self.last_lines.append(line)
            self._show(line)


def _end_with_parent() -> Callable[[], None] | None:
    """A call that ends a forked child with its parent; None where the system has none."""
    if not sys.platform.startswith("linux"):
        return None
    set_option = ctypes.CDLL(None).prctl

    def ask() -> None:
        set_option(_PR_SET_PDEATHSIG, signal.SIGTERM)

    return ask


class Signals:
    """Notes SIGINT and SIGTERM for the length of a ``with`` block: ``received`` has their numbers, in order."""

    NUMBERS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self.received: list[int] = []

    def __enter__(self) -> Signals:
        self._before = {number: signal.signal(number, self._note) for number in self.NUMBERS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: object) -> None:
        self.received.append(number)


def wait_until(
    ready: Callable[[], bool], child: Child, signals: Signals, timeout_s: float, poll_s: float = 0.2
) -> bool:
    """Whether ``ready`` held before the child ended, a signal came, or the time was over."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if child.exit_code is not None or signals.received:
            return False
        if ready():
            return True
        time.sleep(poll_s)
    return False
