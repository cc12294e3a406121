"""``LoopThread``: an event loop in its own thread, and what blocks it when a wait times out.

Every wait is bounded. A loop that does not even answer is blocked by code that should have awaited, and the line it
stands at is known. What runs on the loop, and what to say of it, is the caller's.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any

ANSWER_S = 5.0
"""How long a loop may take to answer before it counts as blocked, and its thread to end."""


class LoopThread:
    """``start``, then ``wait`` for coroutines from other threads, then ``stop``; starts nothing when constructed."""

    def __init__(self, name: str):
        self._name = name
        self._thread: threading.Thread | None = None
        self.loop: asyncio.AbstractEventLoop | None = None
        """Set once started, and kept when stopped."""

    @property
    def is_running(self) -> bool:
        """Whether it was started and not stopped."""
        return self._thread is not None

    def start(self) -> None:
        """Begin; returns when the loop runs."""
        ready = threading.Event()
        self._thread = threading.Thread(target=self._serve, args=(ready,), name=self._name, daemon=True)
        self._thread.start()
        ready.wait()

    def wait(self, work: Coroutine[Any, Any, Any], timeout_s: float, late: Callable[[], BaseException]) -> Any:
        """What ``work`` returns or raises; when that takes longer than ``timeout_s``, raises what ``late`` makes."""
        assert self.loop is not None
        future = asyncio.run_coroutine_threadsafe(work, self.loop)
        try:
            return future.result(timeout=timeout_s)
        except FutureTimeout:
            if future.done():  # a TimeoutError of the work itself
                raise
            future.cancel()
            raise late() from None

    def where_blocked(self) -> str | None:
        """The place, as "file:line (function)", that blocks the loop; None when it is not blocked."""
        assert self.loop is not None
        answered = threading.Event()
        self.loop.call_soon_threadsafe(answered.set)
        if answered.wait(ANSWER_S) or self._thread is None or self._thread.ident is None:
            return None
        frame = sys._current_frames().get(self._thread.ident)
        if frame is None:
            return "an unknown place"
        return f"{frame.f_code.co_filename}:{frame.f_lineno} ({frame.f_code.co_name})"

    def stop(self) -> None:
        """End the loop and, unless it is blocked, the thread; calling it again does nothing."""
        thread, self._thread = self._thread, None
        if thread is not None and self.loop is not None:
            self.loop.call_soon_threadsafe(self.loop.stop)
            thread.join(timeout=ANSWER_S)

    def _serve(self, ready: threading.Event) -> None:
        self.loop = loop = asyncio.new_event_loop()
        asyncio.set_event_loop(loop)
        loop.call_soon(ready.set)
        loop.run_forever()
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()
