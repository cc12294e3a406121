"""The sandbox that isolates with a root of its own, or a skip with the reason."""

import asyncio
import functools

import pytest

import verifiers as vf
from verifiers.sandbox import backend_for


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
