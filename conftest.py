"""The environments' own tests run on the standard event loop: late in a long session a process start under uvloop hung.

libuv's process-wide signal lock had been lost by then; who loses it is not known yet.
"""

import asyncio
from pathlib import Path

import pytest

ENVIRONMENTS = Path(__file__).parent / "packages" / "envs"


@pytest.fixture(autouse=True)
def standard_loop(request, monkeypatch):
    if ENVIRONMENTS in request.path.parents:
        monkeypatch.setattr("verifiers.dual._new_event_loop", asyncio.new_event_loop)
