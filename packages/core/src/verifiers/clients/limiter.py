"""Limit the requests in flight to one endpoint: a 429 halves the limit, successes raise it again.

The promise: `AdaptiveLimiter` admits in order of arrival, cuts once per round trip (late refusals
of requests sent
before the last cut do not cut again) and recovers: doubling per round trip up to half the level at
which it was first cut, then one more per round trip.

It does not sleep, does not count attempts and never refuses: requests over the limit wait.
"""

from __future__ import annotations

import asyncio
from collections import deque


class AdaptiveLimiter:
    """A limiter of an event loop. Pair each `enter` with one `leave`.

    Example: ``ticket = limiter.enter_now() or await limiter.enter()`` … ``limiter.leave()``
    """

    __slots__ = (
        "_ceiling",
        "_epoch",
        "_succeeded_since_cut",
        "_waiting",
        "in_flight",
        "limit",
        "maximum",
        "num_cuts",
    )

    def __init__(self, maximum: int):
        self.maximum = maximum
        self.limit = float(maximum)
        self.in_flight = 0
        self.num_cuts = 0
        self._epoch = 1
        self._ceiling = float(maximum)
        self._succeeded_since_cut = True
        self._waiting: deque[asyncio.Future[None]] = deque()

    def enter_now(self) -> int:
        """Return a ticket (1 or more) below the limit and without a queue, else 0."""
        if self.in_flight < self.limit and not self._waiting:
            self.in_flight += 1
            return self._epoch
        return 0

    async def enter(self) -> int:
        """Wait for admission; return a ticket."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.leave()
            raise
        return self._epoch

    def leave(self) -> None:
        """Release a slot and admit the next in the queue."""
        self.in_flight -= 1
        self._admit()

    def refused(self, ticket: int) -> None:
        """Record a 429 for the request with this ticket."""
        if ticket != self._epoch:
            return
        if self._succeeded_since_cut:
            self._ceiling = min(self.limit, float(max(self.in_flight, 2)))
        self.limit = max(1.0, min(self.limit, float(self.in_flight)) / 2)
        self._succeeded_since_cut = False
        self._epoch += 1
        self.num_cuts += 1

    def succeeded(self) -> None:
        """Record a success."""
        self._succeeded_since_cut = True
        if self.limit < self.maximum:
            step = 1.0 if self.limit < self._ceiling / 2 else 1.0 / self.limit
            self.limit = min(float(self.maximum), self.limit + step)

    def _admit(self) -> None:
        while self._waiting and self.in_flight < self.limit:
            turn = self._waiting.popleft()
            if not turn.done():
                self.in_flight += 1
                turn.set_result(None)
