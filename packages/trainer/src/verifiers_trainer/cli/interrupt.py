"""Ctrl-C during training: once = stop after the current step and save; twice = leave at once.

Signal handlers are installed for the duration of the ``with`` block and put back after it. Only the command does this,
never the library.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from types import FrameType
from typing import Any


class Interruption:
    """``requested`` holds the signal that asked the run to stop, None before.

    ``announce`` is called at the first signal, ``leave`` right before the process ends at the second one (it must put
    the terminal in order). Outside the main thread there is nothing to install and the block does nothing.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self, announce: Callable[[], None], leave: Callable[[], None]):
        self.announce, self.leave = announce, leave
        self.requested: int | None = None
        self._before: dict[int, Any] = {}

    @property
    def exit_code(self) -> int:
        """128 + the signal's number: 130 for Ctrl-C, 143 for SIGTERM."""
        return 128 + (self.requested or signal.SIGINT)

    def __enter__(self) -> Interruption:
        try:
            self._before = {number: signal.signal(number, self._note) for number in self.SIGNALS}
        except ValueError:  # not the main thread
            self._before = {}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.requested is not None:
            self.leave()
            os._exit(self.exit_code)  # checkpoints appear whole or not at all, so nothing is lost by leaving here
        self.requested = number
        self.announce()
