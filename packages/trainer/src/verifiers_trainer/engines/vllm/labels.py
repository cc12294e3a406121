"""Whose weights a server has, asked after a completion has come: what was read then holds for the completion too.

Weights change under a label only by the trainer's own doing, so that a server which carries a label of this run after
it answered carried it while it sampled. However many completions wait, one question is under way and one is to follow.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable


class LabelReader:
    """``read`` asks the server; ``after_now`` is called on one event loop only."""

    def __init__(self, read: Callable[[], Awaitable[str]]):
        self._read = read
        self._under_way: asyncio.Task[str] | None = None
        self._next: asyncio.Task[str] | None = None

    async def after_now(self) -> str:
        """The label, by a question that was sent after this call."""
        if self._next is None:
            self._next = asyncio.ensure_future(self._ask(self._under_way))
        return await asyncio.shield(self._next)

    async def _ask(self, before: asyncio.Task[str] | None) -> str:
        if before is not None:
            await asyncio.wait([before])
        self._under_way, self._next = self._next, None
        return await self._read()
