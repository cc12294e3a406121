"""``Interruption``: SIGINT and SIGTERM end a training at once, after its last whole step is saved.

Rollouts under way are dropped, and begin again when the run is resumed. In one process the first
signal raises in the main thread where it is, also in a forward pass; where that would leave half a
step or half a checkpoint (``held``) it raises at the end of that. Several processes write a
checkpoint together: there rank 0 raises where it waits for rollouts (``raising``), and else the
step is finished first.

A handler that a program has set itself is left alone.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

DEFAULTS = {
    signal.SIGTERM: (signal.SIG_DFL,),
    signal.SIGINT: (signal.SIG_DFL, signal.default_int_handler),
}
ECHO_S = 3.0
"""Seconds in which a launcher may pass on a signal that its processes have got already."""


class Interruption:
    """Within its ``with`` block a signal ends the training; handlers are restored at the end."""

    def __init__(self, raises_anywhere: bool):
        """raises_anywhere: whether this process may end without the others."""
        self.signum: int | None = None
        """The first signal received; None before."""
        self.announce: Callable[[], None] = _announce
        """Called at the first signal."""
        self.leave: Callable[[], None] = _announce_leaving
        """Called when a second signal ends the process."""
        self._raises_anywhere = raises_anywhere
        self._num_held, self._may_raise = 0, False
        self._received_at = 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interruption:
        self.signum, self._num_held, self._may_raise = None, 0, self._raises_anywhere
        if threading.current_thread() is threading.main_thread():
            for number, defaults in DEFAULTS.items():
                if signal.getsignal(number) in defaults:
                    self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    def _handle(self, signum: int, _: FrameType | None) -> None:
        if self.signum is not None:
            self._again(signum)
            return
        self.signum, self._received_at = signum, time.monotonic()
        self.announce()
        self.check()

    def _again(self, signum: int) -> None:
        is_launched = "LOCAL_RANK" in os.environ
        if is_launched and time.monotonic() - self._received_at < ECHO_S:
            return
        if hasattr(sys, "ps1") or "ipykernel" in sys.modules:  # the session of a person continues
            raise KeyboardInterrupt
        self.leave()
        os._exit(128 + signum)

    def check(self) -> None:
        """Raise KeyboardInterrupt if a signal has come, and may end the training here."""
        if self.signum is not None and self._may_raise and not self._num_held:
            self._may_raise = False  # once: what follows saves the step
            raise KeyboardInterrupt

    @contextmanager
    def held(self) -> Iterator[None]:
        """In the block no signal raises; one that came does at its end, unless an error ends it."""
        self.hold()
        try:
            yield
        except (
            BaseException
        ):  # counted as released, so that no signal is raised over it; raised again
            self._num_held -= 1
            raise
        self.release()

    def hold(self) -> None:
        """Let no signal raise until ``release``."""
        self._num_held += 1

    def release(self) -> None:
        """End what ``hold`` began, and raise if a signal came."""
        self._num_held = max(0, self._num_held - 1)
        self.check()

    @contextmanager
    def raising(self) -> Iterator[None]:
        """In the block a signal raises, also of several processes: the error reaches all of them."""
        before, self._may_raise = self._may_raise, True
        try:
            self.check()
            yield
        finally:
            self._may_raise = self._may_raise and before


def exit_of(code: int) -> BaseException:
    """What a program raises that ends by a signal, by its exit code, 128 + the signal."""
    return KeyboardInterrupt() if code == 128 + signal.SIGINT else SystemExit(code)


def _announce() -> None:
    # not by a stream: the signal may have come while it is written
    os.write(2, b"stopping: the last whole step is saved; a second signal ends at once\n")


def _announce_leaving() -> None:
    os.write(2, b"ending at once; what is saved stays\n")
