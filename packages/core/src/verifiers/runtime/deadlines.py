"""Time limits on the running task: thousands at a time cost one timer."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self

TICK_S = 0.25
"""Seconds between checks of long ``Deadline``s."""
COARSE_FROM_S = 5.0
"""Limits of at least this length are checked at ticks; they expire at most 5 % late."""


class Deadline:
    """A single-use time limit on the task that enters it. ``limit_s`` None sets no limit.

    ``with Deadline(limit_s) as deadline:`` stops its body as ``asyncio.timeout`` does: the task is
    cancelled, and the block raises ``TimeoutError``. Most of the thousands of limits on rollouts
    and requests never expire, yet a timer for each would have to be scheduled and cancelled; here a
    limit of five seconds or more is an entry in a dictionary that is checked four times a second. A
    long limit therefore expires up to ``TICK_S`` late, never early. Shorter limits use one timer
    each.

    *Raises* TimeoutError at the end of the block when the limit expired inside and nothing else
    cancelled the task.
    """

    __slots__ = ("_cancelling", "_timer", "expired", "limit_s", "task")

    def __init__(self, limit_s: float | None):
        self.limit_s = limit_s
        self.expired = False
        """Whether the limit expired inside the block, whether or not the cancellation
        took effect."""
        self._timer: _Ticker | asyncio.TimerHandle | None = None

    def __enter__(self) -> Self:
        loop = asyncio.get_running_loop()
        self.task = task = asyncio.current_task(loop)
        """The task that entered the block and is cancelled by the limit."""
        if task is None:
            raise RuntimeError("a time limit requires a running task")
        self._cancelling = task.cancelling()
        limit_s = self.limit_s
        if limit_s is None:
            return self
        if limit_s >= COARSE_FROM_S:
            self._timer = ticker = _TICKERS.get(loop) or _new_ticker(loop)
            ticker.add(self, loop.time() + limit_s)
        else:
            self._timer = loop.call_later(max(limit_s, 0.0), self.expire)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool | None:
        timer, self._timer = self._timer, None
        if type(timer) is _Ticker:
            timer.waiting.pop(self, None)
        elif timer is not None:
            timer.cancel()  # type: ignore[union-attr]  # the other kind of timer is a handle
        if self.expired and self.task is not None:
            # undo the cancellation by this limit, unless the task was also cancelled otherwise
            is_alone = self.task.uncancel() <= self._cancelling
            if is_alone and kind is asyncio.CancelledError:
                raise TimeoutError from error
        return None

    def expire(self) -> None:
        """Cancel the task because the limit has passed."""
        self.expired = True
        if self.task is not None:
            self.task.cancel()


class _Ticker:
    """The limits of five seconds or more on one event loop; ticks while any is active."""

    __slots__ = ("_is_ticking", "_loop", "waiting")

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self.waiting: dict[Deadline, float] = {}
        """Limit -> time at which it expires, on the loop's clock."""
        self._loop = loop
        self._is_ticking = False

    def add(self, deadline: Deadline, when: float) -> None:
        self.waiting[deadline] = when
        if not self._is_ticking:
            self._is_ticking = True
            self._loop.call_later(TICK_S, self._tick)

    def _tick(self) -> None:
        now = self._loop.time()
        for deadline in [deadline for deadline, when in self.waiting.items() if when <= now]:
            del self.waiting[deadline]
            deadline.expire()
        self._is_ticking = bool(self.waiting)
        if self._is_ticking:
            self._loop.call_later(TICK_S, self._tick)


_TICKERS: dict[asyncio.AbstractEventLoop, _Ticker] = {}


def _new_ticker(loop: asyncio.AbstractEventLoop) -> _Ticker:
    for closed in [key for key in tuple(_TICKERS) if key.is_closed()]:
        _TICKERS.pop(closed, None)
    return _TICKERS.setdefault(loop, _Ticker(loop))
