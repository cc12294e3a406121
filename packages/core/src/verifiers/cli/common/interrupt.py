"""Handle Ctrl-C and SIGTERM in commands, and watch for a blocked event loop.

The first signal asks the work to stop; the second ends the process immediately. Saved data stays
consistent: rollouts are counted when they are durable, and checkpoints appear atomically.

The handlers are installed with ``signal.signal``, not with the event loop: the loop runs its
handlers between callbacks, so author code that blocks the loop would block Ctrl-C too. Only
commands use this module.
"""

from __future__ import annotations

import asyncio
import faulthandler
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

GRACE_S = 10.0
"""Seconds that a cancelled evaluation may take to clean up."""
BLOCKED_S = 60.0
"""Seconds of a blocked event loop after which the stack of the blocking code is printed."""


class Interrupt:
    """Within its ``with`` block, SIGINT and SIGTERM stop the work; previous handlers are restored
    at the end.

    ``stop`` is called at the first signal. ``leave`` is called with the reason right before the
    process exits, at the second signal or, with ``grace_s``, when the work has not ended that many
    seconds after the first signal. A signal that the parent process ignores (``nohup``, a
    background job of a script) stays ignored. Outside the main thread, where Python allows no
    signal handlers, nothing is installed.
    """

    def __init__(
        self, stop: Callable[[], None], leave: Callable[[str], None], grace_s: float | None = None
    ):
        self.signum: int | None = None
        """The first signal received; None before."""
        self._stop, self._leave, self._grace_s = stop, leave, grace_s
        self._before: dict[int, Any] = {}

    @property
    def exit_code(self) -> int:
        """By convention 128 + the signal: 130 for Ctrl-C, 143 for SIGTERM; 0 without a signal."""
        return 128 + self.signum if self.signum is not None else 0

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, signum: int, _: FrameType | None) -> None:
        if self.signum is not None:
            self._end("exiting immediately")
        self.signum = signum
        if self._grace_s is not None:
            late = threading.Timer(
                self._grace_s, self._end, [f"the clean-up did not end within {self._grace_s:g} s"]
            )
            late.daemon = True
            late.start()
        self._stop()

    def _end(self, reason: str) -> None:
        self._leave(reason)
        os._exit(self.exit_code)


def interruptible(task: asyncio.Task[object], say: Callable[[str], None]) -> Interrupt:
    """Within the block the first signal cancels ``task`` and gives it ``GRACE_S`` to clean up."""

    def cancel() -> None:
        say(
            "stopping: no new rollouts start, finished ones are saved (Ctrl-C again exits"
            " immediately)"
        )
        task.cancel()

    def leave(reason: str) -> None:
        os.write(2, f"\n{reason}; finished rollouts are saved\n".encode())

    def stop() -> None:
        task.get_loop().call_soon_threadsafe(cancel)

    return Interrupt(stop, leave, GRACE_S)


@contextmanager
def watched() -> Iterator[Callable[[], None]]:
    """Yield a function to call regularly from the loop; after ``BLOCKED_S`` without a call, the
    stack is printed.

    The watchdog is a C thread of ``faulthandler``, so it works even while C code holds the GIL; it
    stops nothing.
    """

    try:
        stderr = sys.__stderr__.fileno()  # type: ignore[union-attr]  # None in a program without a console
    except (AttributeError, OSError, ValueError):
        # stderr has no file descriptor, which faulthandler needs
        yield lambda: None
        return

    def alive() -> None:
        faulthandler.dump_traceback_later(BLOCKED_S, repeat=True, file=stderr)

    alive()
    try:
        yield alive
    finally:
        faulthandler.cancel_dump_traceback_later()
