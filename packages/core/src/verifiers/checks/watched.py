"""Run a coroutine on a separate thread and detect when its event loop is blocked.

Python cannot stop a synchronous hook that never returns: the daemon thread is abandoned, and
``Hanging`` carries the frame that blocks.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from types import FrameType
from typing import Any

from verifiers.runtime.calls import CLEANUP_S, run_in_private_loop

LOOK_EVERY_S = 0.2


class Hanging(Exception):
    """The event loop was blocked for the time limit; ``frame``: the innermost of its thread."""

    def __init__(self, frame: FrameType | None):
        super().__init__("the event loop is blocked")
        self.frame = frame


def run_watched(
    work: Callable[[], Coroutine[Any, Any, None]], is_watched: Callable[[], bool], limit_s: float
) -> None:
    """Run ``work()`` to its end and re-raise its exceptions.

    Raises ``Hanging`` when the event loop is blocked for ``limit_s`` seconds while ``is_watched()``
    holds.
    """
    thread = _LoopThread(work)
    thread.start()
    turned = time.monotonic()
    try:
        while thread.is_alive():
            thread.turned.clear()
            thread.ask(thread.turned.set)  # shows that the loop runs
            thread.join(LOOK_EVERY_S)
            if thread.turned.is_set() or not is_watched():
                turned = time.monotonic()
            elif time.monotonic() - turned > limit_s:
                raise Hanging(sys._current_frames().get(thread.ident or 0))
    except Hanging:
        raise
    except BaseException:  # an interrupt of the caller: cancel the work first, then re-raise
        thread.cancel()
        thread.join(CLEANUP_S)
        raise
    if thread.failure is not None:
        raise thread.failure


class _LoopThread(threading.Thread):
    def __init__(self, work: Callable[[], Coroutine[Any, Any, None]]):
        super().__init__(name="verifiers-check", daemon=True)
        self.turned = threading.Event()
        self.failure: BaseException | None = None
        self._work, self._caller = work, contextvars.copy_context()
        self._running: tuple[asyncio.AbstractEventLoop, asyncio.Task[None]] | None = None

    def run(self) -> None:
        try:
            self._caller.run(run_in_private_loop, self._work, self._begin)
        except BaseException as error:  # noqa: BLE001  carried to the calling thread and raised there
            self.failure = error

    def _begin(self, loop: asyncio.AbstractEventLoop, task: asyncio.Task[None]) -> None:
        self._running = loop, task

    def cancel(self) -> None:
        if self._running is not None:
            self.ask(self._running[1].cancel)

    def ask(self, action: Callable[[], object]) -> None:
        """Schedule a callback in the loop."""
        if self._running is not None:
            # the loop is closed: the work has already ended
            with contextlib.suppress(RuntimeError):
                self._running[0].call_soon_threadsafe(action)
