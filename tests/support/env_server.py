"""An ``EnvServer`` of ``vf-serve-env`` on a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from aiohttp import web

from verifiers.clients.serving import open_app
from verifiers_integrations.openenv import EnvServer


@contextmanager
def served(env: Any, **options: Any) -> Iterator[tuple[str, EnvServer]]:
    """(address, server) while the block runs."""
    server = EnvServer(env, **options)
    with served_app(server.app()) as url:
        yield url, server


@contextmanager
def served_app(app: web.Application) -> Iterator[str]:
    """The address of an application while the block runs."""
    loop, started = asyncio.new_event_loop(), threading.Event()
    port: list[int] = []

    async def serve(ended: asyncio.Event) -> None:
        runner = await open_app(app, "127.0.0.1", 0)
        port.append(runner.addresses[0][1])
        started.set()
        await ended.wait()
        await runner.cleanup()

    ended = asyncio.Event()
    thread = threading.Thread(target=lambda: loop.run_until_complete(serve(ended)), daemon=True)
    thread.start()
    assert started.wait(20)
    try:
        yield f"http://127.0.0.1:{port[0]}"
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join(20)
        loop.close()
