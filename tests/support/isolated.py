"""A sandbox of a kind that works on this machine, or a skip with the reason."""

import asyncio
import functools
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

import verifiers as vf
from verifiers.sandbox import Sandbox, SandboxSpec, backend_for


@functools.cache
def _refusal(name: str) -> str | None:
    try:
        asyncio.run(backend_for(name))
    except vf.SandboxUnavailable as error:
        return str(error)
    return None


def needs_sandbox(name: str = "bubblewrap") -> str:
    """The name of a kind of sandbox that works here."""
    if (why := _refusal(name)) is not None:
        pytest.skip(why)
    return name


def in_sandbox(
    use: Callable[[Sandbox], Awaitable[Any]],
    spec: SandboxSpec | None = None,
    name: str = "bubblewrap",
) -> Any:
    """What ``use`` returns of an open sandbox, which is closed afterwards."""
    needs_sandbox(name)

    async def run() -> Any:
        sandbox = await (await backend_for(name)).open(spec or SandboxSpec())
        try:
            return await use(sandbox)
        finally:
            await sandbox.close()

    return asyncio.run(run())
