"""One resource per running event loop, closed when that loop shuts down.

The promise: `PerLoop.here` gives the calling loop its own resource, made on first use, so that one client object
serves many blocking calls, each with a private loop, from any thread. The resource is closed by `aclose` or, when
nobody calls that, by the loop's own ``shutdown_asyncgens`` (``asyncio.run`` and our blocking calls run it), because an
asynchronous generator holds it open. A loop that is closed without that step drops its resource unclosed.

This module knows nothing of HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class PerLoop(Generic[T]):
    """``make()`` runs inside the loop on first use there; ``close(resource)`` is awaited in the same loop."""

    __slots__ = ("_close", "_held", "_make")

    def __init__(self, make: Callable[[], T], close: Callable[[T], Awaitable[None]]):
        self._make = make
        self._close = close
        self._held: dict[asyncio.AbstractEventLoop, tuple[T, AsyncGenerator[None, None]]] = {}

    def here(self) -> T:
        """The running loop's resource. Raises: ``RuntimeError`` outside a loop, and whatever ``make`` raises."""
        loop = asyncio.get_running_loop()
        held = self._held.get(loop)
        return held[0] if held is not None else self._open(loop)

    async def aclose(self) -> None:
        """Close the running loop's resource; the next `here` makes another."""
        if held := self._held.get(asyncio.get_running_loop()):
            await held[1].aclose()

    @property
    def num_open(self) -> int:
        """Loops that hold a resource now."""
        return len(self._held)

    def _open(self, loop: asyncio.AbstractEventLoop) -> T:
        for other in [other for other in tuple(self._held) if other.is_closed()]:  # other threads add and remove too
            self._held.pop(other, None)
        resource = self._make()
        holder = self._hold(loop)
        self._held[loop] = (resource, holder)
        with contextlib.suppress(StopIteration):  # to the first yield, which registers it with this loop's shutdown
            holder.__anext__().send(None)
        return resource

    async def _hold(self, loop: asyncio.AbstractEventLoop) -> AsyncGenerator[None, None]:
        try:
            yield
        finally:
            resource, _ = self._held.pop(loop)
            await self._close(resource)
