"""A sandbox of a kind that works on this machine, or a skip with the reason."""

import asyncio
import functools
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

import verifiers as vf
from verifiers.sandbox import Sandbox, SandboxSpec, backend_for, choice
from verifiers_sandboxes.remote import RemoteBackend


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


def isolating() -> list[Any]:
    """Parameters: each registered backend that isolates, but for services, which cost money. Others
    than ``bubblewrap`` are slow: up to a second and more per session."""
    names = []
    for name in choice.backend_names():
        try:
            backend = choice._create(name)
        except vf.SandboxUnavailable:  # not installed: its tests skip with this reason
            names.append(name)
            continue
        if "isolation" in backend.capabilities and not isinstance(backend, RemoteBackend):
            names.append(name)
    return [
        name if name == "bubblewrap" else pytest.param(name, marks=pytest.mark.slow)
        for name in names
    ]


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
