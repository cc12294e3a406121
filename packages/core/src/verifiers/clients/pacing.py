"""Pace the requests to an endpoint whose rates are given, so that it refuses none of them.

The promise: requests start in order of arrival and evenly over the minute, so that no window of any
length holds more of them, or more of their tokens, than its share; all clients of the process whose
base URL, key and rates are the same share one pace, in whatever event loop they run.

A request counts as providers count it: its text, its ``max_tokens``, and what the answer had beyond
that once it is there. Attempts count, answers from a cache do not.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
import time
from collections import deque
from collections.abc import Mapping

from verifiers.clients.payload import MAX_TOKENS_ALIASES
from verifiers.types import ModelRequest, Response

MARGIN = 1.03
"""How much longer than its share a request takes: clocks differ, and networks delay unevenly."""
CHARS_PER_TOKEN = 4
"""Of text, as providers estimate it before they count."""

_Turn = tuple[asyncio.AbstractEventLoop, "asyncio.Future[None]"]


class Pace:
    """The rates of one endpoint; None = no limit. May be used from several event loops at once."""

    def __init__(self, requests_per_minute: float | None, tokens_per_minute: float | None):
        self._s_per_request = 60 * MARGIN / requests_per_minute if requests_per_minute else 0.0
        self._s_per_token = 60 * MARGIN / tokens_per_minute if tokens_per_minute else 0.0
        self._lock = threading.Lock()
        self._queue: deque[_Turn] = deque()
        self._next_request_s = self._next_token_s = 0.0
        self._mean_sampled = 0.0

    async def wait(self, request: ModelRequest) -> int:
        """Wait until the request may start; the tokens that it counts for, for `settle`."""
        loop = asyncio.get_running_loop()
        turn: _Turn = (loop, loop.create_future())
        with self._lock:
            self._queue.append(turn)
            is_first = len(self._queue) == 1
        try:
            if not is_first:
                await turn[1]
            while (pause_s := self._pause_s()) > 0:  # noqa: ASYNC110 - no event but the time
                await asyncio.sleep(pause_s)
            return self._start(request)
        finally:
            self._end(turn)

    def settle(self, num_tokens: int, response: Response) -> None:
        """Count what an answer had beyond the ``num_tokens`` of its request."""
        usage = response.usage
        if not self._s_per_token or not usage.prompt_tokens:
            return
        with self._lock:
            weight = 0.1 if self._mean_sampled else 1.0
            self._mean_sampled += weight * (usage.completion_tokens - self._mean_sampled)
            excess = max(0, usage.prompt_tokens + usage.completion_tokens - num_tokens)
            self._next_token_s += excess * self._s_per_token

    def _pause_s(self) -> float:
        with self._lock:
            return max(self._next_request_s, self._next_token_s) - time.monotonic()

    def _start(self, request: ModelRequest) -> int:
        """Count a request that starts now."""
        arguments = request.sampling_args
        limits = [arguments[name] for name in MAX_TOKENS_ALIASES if arguments.get(name)]
        with self._lock:
            sampled = limits[0] if limits else round(self._mean_sampled)
            num_chars = _num_chars(request.prompt) + _num_chars(request.tools)
            num_tokens = num_chars // CHARS_PER_TOKEN + int(sampled)
            now = time.monotonic()
            self._next_request_s = now + self._s_per_request
            self._next_token_s = max(now, self._next_token_s) + num_tokens * self._s_per_token
        return num_tokens

    def _end(self, turn: _Turn) -> None:
        """Leave the queue; the next in it has its turn, unless its event loop stands still."""
        with self._lock:
            if turn not in self._queue:  # its loop stood still when it had its turn
                return
            was_first = self._queue[0] is turn
            self._queue.remove(turn)
            while was_first and self._queue:
                loop, future = self._queue[0]
                with contextlib.suppress(RuntimeError):  # the loop is closed
                    loop.call_soon_threadsafe(_give, future)
                    if loop.is_running():
                        return
                self._queue.popleft()


@functools.lru_cache(maxsize=256)
def pace_of(
    base_url: str,
    key: str,
    requests_per_minute: float | None,
    tokens_per_minute: float | None,
) -> Pace | None:
    """Return the pace that the process has for an endpoint, a key (or its variable) and rates; None
    without a rate."""
    if requests_per_minute is None and tokens_per_minute is None:
        return None
    return Pace(requests_per_minute, tokens_per_minute)


def _give(turn: asyncio.Future[None]) -> None:
    if not turn.done():
        turn.set_result(None)


def _num_chars(content: object) -> int:
    """Characters of the texts in messages or tools; images and sounds in them count once the
    server has."""
    if isinstance(content, str):
        return 0 if content.startswith("data:") else len(content)
    if isinstance(content, Mapping):
        return sum(_num_chars(value) for name, value in content.items() if name != "data")
    return sum(map(_num_chars, content)) if isinstance(content, list | tuple) else 0
