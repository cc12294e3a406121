"""Open sandboxes in turns, each within a time limit.

Promise: however many rollouts start at once, and however busy the machine is, a sandbox has its
whole time to open: the limit begins when it is its turn.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from verifiers.errors import SandboxUnavailable
from verifiers.runtime.calls import PerLoop

MAX_OPENING = 32
"""Sandboxes of an event loop that are opened at once: enough to use every core and to hide a
service's delay."""


_turns = PerLoop(lambda: asyncio.Semaphore(MAX_OPENING))


@contextlib.asynccontextmanager
async def opening(limit_s: float) -> AsyncIterator[None]:
    """Wait for a turn; the block, which opens a sandbox, then has ``limit_s`` seconds.

    *Raises* SandboxUnavailable when they are over.
    """
    async with _turns.here():
        limit = asyncio.timeout(limit_s)
        try:
            async with limit:
                yield
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise SandboxUnavailable(
                f"the sandbox was not open after {limit_s:g} s (max_startup_wait_seconds)"
            ) from error
