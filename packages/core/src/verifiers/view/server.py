"""Run the server: bind a local socket, serve the application, open a browser."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
import webbrowser
from collections.abc import Callable
from typing import Any

import uvicorn

from verifiers.clients.http import open_file_limit
from verifiers.errors import ConfigError
from verifiers.runtime.origins import is_loopback
from verifiers.view.app import make_app
from verifiers.view.library import Library

MAX_IDLE_S = 120.0
TICKS = 10
"""Tenths of a second between two looks at idle connections."""


class Server:
    """A bound server with its ``url``; ``run`` serves until the process is interrupted or ``stop``
    is called.

    Raises: ``ConfigError`` when the address cannot be bound, or is not a loopback address and
    ``allow_remote`` is false.
    """

    def __init__(
        self, library: Library, host: str = "127.0.0.1", port: int = 0, allow_remote: bool = False
    ):
        if not allow_remote and not is_loopback(host):
            raise ConfigError(
                f"--host {host} shows the runs to everyone who can reach this machine; allow it"
                " with --allow-remote, or keep 127.0.0.1 and use a tunnel (ssh -L)"
            )
        self._library = library
        self._socket = _bind(host, port)
        self.port: int = self._socket.getsockname()[1]
        url_host = f"[{host}]" if ":" in host else host
        self.url = f"http://{url_host}:{self.port}/"
        config = uvicorn.Config(
            make_app(library, host),
            log_level="error",
            access_log=False,
            server_header=False,
            date_header=False,
            timeout_graceful_shutdown=2,
            ws="none",
            lifespan="off",
        )
        self._server = _Uvicorn(config)

    def run(self, started: Callable[[], None] | None = None) -> None:
        """Serve; ``started`` is called in a thread once connections are accepted."""
        self._library.catalog.search()  # the first page needs it
        if started is not None:
            threading.Thread(target=self._call_when_open, args=(started,), daemon=True).start()
        try:
            self._server.run(sockets=[self._socket])
        finally:
            self._socket.close()

    def stop(self) -> None:
        """Make ``run`` return soon; callable from any thread."""
        self._server.should_exit = True

    def _call_when_open(self, started: Callable[[], None]) -> None:
        with socket.create_connection(self._socket.getsockname()[:2], timeout=10):
            started()


class _Uvicorn(uvicorn.Server):
    """Closes connections that wait for a request too long, or are too many; uvicorn has no limit."""

    def __init__(self, config: uvicorn.Config):
        super().__init__(config)
        self._idle: dict[Any, float] = {}

    async def on_tick(self, counter: int) -> bool:
        if counter % TICKS == 0:
            now = time.monotonic()
            cycles = {c: getattr(c, "cycle", None) for c in self.server_state.connections}
            idle = [c for c, cycle in cycles.items() if cycle is None or cycle.response_complete]
            self._idle = {connection: self._idle.get(connection, now) for connection in idle}
            oldest_first = sorted(self._idle, key=self._idle.__getitem__)
            for number, connection in enumerate(oldest_first):
                is_surplus = len(idle) - number > open_file_limit() // 2
                if is_surplus or now - self._idle[connection] > MAX_IDLE_S:
                    connection.transport.close()
        return await super().on_tick(counter)


def open_browser(url: str) -> bool:
    """Open ``url`` in a graphical browser; false without one: a text browser needs the terminal."""
    has_screen = os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    if sys.platform.startswith("linux") and not has_screen:
        return False
    return webbrowser.open(url)


def _bind(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM
        )[0]
        bound = socket.socket(family, kind, protocol)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
            bound.listen(128)
        except OSError:
            bound.close()
            raise
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"cannot listen on {host}, port {port}: {error}; choose another with --host and --port"
        ) from error
    return bound
