"""Run the server: bind a local socket, serve the application, open a browser."""

from __future__ import annotations

import os
import socket
import sys
import threading
import webbrowser
from collections.abc import Callable

import uvicorn

from verifiers.errors import ConfigError
from verifiers.view.app import make_app
from verifiers.view.guard import is_loopback
from verifiers.view.library import Library


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
        self._server = uvicorn.Server(config)

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


def open_browser(url: str) -> bool:
    """Open ``url`` in a graphical browser; false where there is none (a text browser would take
    over the terminal)."""
    if sys.platform.startswith("linux") and not (
        os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    ):
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
