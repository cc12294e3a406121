"""Ctrl-C and SIGTERM for commands, and a watchdog for an interpreter that is held.

The first signal cancels the work and gives it ``GRACE_S``; the second leaves at once, and so does the end of the grace.
Rollouts are durable when they are counted, so leaving at once loses none of them.

The handlers are Python's own (``signal.signal``), not the event loop's: the loop runs its handlers between callbacks,
so author code that keeps the loop busy would keep Ctrl-C from ever arriving. Only commands use this module.
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
"""Seconds that cancelled work may take to clean up."""
HELD_S = 60.0
"""Seconds without a turn of the event loop after which the stack of what holds it is printed."""


class Interrupt:
    """Whether and by which signal the command was interrupted."""

    def __init__(self, task: asyncio.Task[Any], say: Callable[[str], None]):
        self.signum: int | None = None
        self._task, self._say = task, say
        self._loop = task.get_loop()

    @property
    def exit_code(self) -> int:
        """By convention 128 + the signal: 130 for Ctrl-C, 143 for SIGTERM."""
        return 128 + self.signum if self.signum is not None else 0

    def handle(self, signum: int, _: FrameType | None) -> None:
        """The signal handler: cancel, or leave when that was asked for before."""
        if self.signum is not None:
            self._leave("leaving at once")
        self.signum = signum
        self._loop.call_soon_threadsafe(self._cancel)
        late = threading.Timer(GRACE_S, self._leave, [f"the clean-up did not end within {GRACE_S:g} s"])
        late.daemon = True
        late.start()

    def _cancel(self) -> None:
        self._say("stopping: nothing new is started, what is finished is kept (Ctrl-C again leaves at once)")
        self._task.cancel()

    def _leave(self, reason: str) -> None:
        os.write(2, f"\n{reason}; what was counted as done is saved\n".encode())
        os._exit(self.exit_code)


@contextmanager
def interruptible(task: asyncio.Task[Any], say: Callable[[str], None]) -> Iterator[Interrupt]:
    """Within the block SIGINT and SIGTERM cancel ``task``; the handlers before it are put back at the end.

    A signal that the parent process told us to ignore (``nohup``, a background job of a script) stays ignored.
    """
    interrupt = Interrupt(task, say)
    in_main = threading.current_thread() is threading.main_thread()  # elsewhere Python allows no handlers
    heeded = [n for n in (signal.SIGINT, signal.SIGTERM) if in_main and signal.getsignal(n) is not signal.SIG_IGN]
    before = {number: signal.signal(number, interrupt.handle) for number in heeded}
    try:
        yield interrupt
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def watched() -> Iterator[Callable[[], None]]:
    """A function to call from every turn of the loop: when it is not called for ``HELD_S``, the stack is printed.

    The watchdog runs outside the interpreter, so it speaks even when C code holds it; it ends nothing.
    """

    try:
        stderr = sys.__stderr__.fileno()  # type: ignore[union-attr]  # None in a program without a console
    except (AttributeError, OSError, ValueError):  # no real stderr to print on
        yield lambda: None
        return

    def alive() -> None:
        faulthandler.dump_traceback_later(HELD_S, repeat=True, file=stderr)

    alive()
    try:
        yield alive
    finally:
        faulthandler.cancel_dump_traceback_later()
