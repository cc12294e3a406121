"""Read the label of a server's weights after a completion; it then holds for the completion too.

Only the trainer changes labelled weights, so a server that has a label of this run after its
response had it while sampling. However many completions wait, at most one read is running and
another is queued.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable


class LabelReader:
    """``read`` requests the label; call ``after_now`` on one event loop only."""

    def __init__(self, read: Callable[[], Awaitable[str]]):
        self._read = read
        self._under_way: asyncio.Task[str] | None = None
        self._next: asyncio.Task[str] | None = None

    async def after_now(self) -> str:
        """The label, by a request sent after this call."""
        if self._next is None:
            self._next = asyncio.ensure_future(self._ask(self._under_way))
        return await asyncio.shield(self._next)

    async def _ask(self, before: asyncio.Task[str] | None) -> str:
        if before is not None:
            await asyncio.wait([before])
        self._under_way, self._next = self._next, None
        return await self._read()
