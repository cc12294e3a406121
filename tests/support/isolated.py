"""The sandbox that isolates with a root of its own, or a skip with the reason."""

import asyncio
import functools
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

import verifiers as vf
from verifiers.sandbox import Sandbox, SandboxSpec, backend_for


@functools.cache
def _refusal() -> str | None:
    try:
        asyncio.run(backend_for("bubblewrap"))
    except vf.SandboxUnavailable as error:
        return str(error)
    return None


def bubblewrap_or_skip() -> str:
    if (why := _refusal()) is not None:
        pytest.skip(why)
    return "bubblewrap"


def in_sandbox(use: Callable[[Sandbox], Awaitable[Any]], spec: SandboxSpec) -> Any:
    """What ``use`` returns of an open sandbox, which is closed afterwards."""
    name = bubblewrap_or_skip()

    async def run() -> Any:
        sandbox = await (await backend_for(name)).open(spec)
        try:
            return await use(sandbox)
        finally:
            await sandbox.close()

    return asyncio.run(run())
