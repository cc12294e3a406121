"""One resource per running event loop, closed when that loop shuts down.

``PerLoop.here`` returns the resource of the calling loop and creates it on first use. One client object
can thereby serve many blocking calls, each with a private loop, from any thread. ``aclose`` closes the resource;
otherwise the loop's ``shutdown_asyncgens`` does (called by ``asyncio.run`` and by blocking calls), because an
asynchronous generator owns the resource. A loop that is closed without it drops its resource unclosed.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class PerLoop(Generic[T]):
    """``make()`` runs inside the loop on first use there; ``close(resource)`` is awaited in the same loop."""

    __slots__ = ("_close", "_make", "_resources")

    def __init__(self, make: Callable[[], T], close: Callable[[T], Awaitable[None]]):
        self._make = make
        self._close = close
        self._resources: dict[asyncio.AbstractEventLoop, tuple[T, AsyncGenerator[None, None]]] = {}

    def here(self) -> T:
        """The running loop's resource. *Raises* RuntimeError outside a loop, and the exceptions of ``make``."""
        loop = asyncio.get_running_loop()
        entry = self._resources.get(loop)
        return entry[0] if entry is not None else self._open(loop)

    async def aclose(self) -> None:
        """Close the running loop's resource; the next ``here`` creates another."""
        if entry := self._resources.get(asyncio.get_running_loop()):
            await entry[1].aclose()

    @property
    def num_open(self) -> int:
        """Number of loops that currently have a resource."""
        return len(self._resources)

    def _open(self, loop: asyncio.AbstractEventLoop) -> T:
        for other in [other for other in tuple(self._resources) if other.is_closed()]:  # copy: other threads add too
            self._resources.pop(other, None)
        resource = self._make()
        owner = self._lifetime(loop)
        self._resources[loop] = (resource, owner)
        with contextlib.suppress(StopIteration):  # runs to the first yield, which registers it with the loop's shutdown
            owner.__anext__().send(None)
        return resource

    async def _lifetime(self, loop: asyncio.AbstractEventLoop) -> AsyncGenerator[None, None]:
        try:
            yield
        finally:
            resource, _ = self._resources.pop(loop)
            await self._close(resource)
