"""``LoopThread``: an event loop in its own thread, which locates blocking code when a wait times
out.

Every wait is bounded. A loop that does not respond is blocked by code that should have awaited;
``where_blocked`` returns its line.
"""

from __future__ import annotations

import asyncio
import math
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any

ANSWER_S = 5.0
"""Seconds a loop may take to respond before it counts as blocked, and its thread to end."""


class LoopThread:
    """``start``, then ``wait`` for coroutines from other threads, then ``stop``; starts nothing
    when constructed."""

    def __init__(self, name: str):
        self._name = name
        self._thread: threading.Thread | None = None
        self.loop: asyncio.AbstractEventLoop | None = None
        """Set by ``start``; not reset by ``stop``."""

    @property
    def is_running(self) -> bool:
        """Whether the thread is started and not stopped."""
        return self._thread is not None

    def start(self) -> None:
        """Start the thread; return when the loop runs."""
        ready = threading.Event()
        self._thread = threading.Thread(
            target=self._serve, args=(ready,), name=self._name, daemon=True
        )
        self._thread.start()
        ready.wait()

    def wait(
        self,
        work: Coroutine[Any, Any, Any],
        timeout_s: float,
        late: Callable[[], BaseException],
        progressed: Callable[[], float] = lambda: -math.inf,
    ) -> Any:
        """Run ``work`` on the loop and return its result; raise ``late()`` after ``timeout_s``
        seconds.

        Where the work waits for others, ``progressed`` says when any of them was last finished (on
        the monotonic clock), and the seconds count from there.
        """
        assert self.loop is not None
        future = asyncio.run_coroutine_threadsafe(work, self.loop)
        started = time.monotonic()
        while (remaining_s := max(started, progressed()) + timeout_s - time.monotonic()) > 0:
            try:
                return future.result(timeout=remaining_s)
            except FutureTimeout:
                if future.done():  # a TimeoutError of the work itself
                    raise
        future.cancel()
        raise late() from None

    def where_blocked(self) -> str | None:
        """The line that blocks the loop, as "file:line (function)"; None when it is not blocked."""
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
        """Stop the loop and, unless it is blocked, the thread; idempotent."""
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
