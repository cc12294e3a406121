"""Detect side effects of building an environment: threads, signal handlers, connections, global
random state.

``Watch`` is a context manager; after the block ``effects`` describes each side effect. Network use
and opened files are observed through one audit hook, which Python cannot remove: the first watch installs it, and it
does nothing while no watch is active. Threads that existed before the block are ignored; new
threads are observed.
"""

from __future__ import annotations

import random
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

NETWORK_EVENTS = frozenset(("socket.connect", "socket.bind", "socket.getaddrinfo", "socket.sendto"))
IPV6_PROBE = ("::1", 0)
"""Address that urllib3 binds and closes on import to detect IPv6; it contacts no host."""
HARMLESS_THREADS = ("tqdm",)
"""Packages whose helper threads are not reported."""

_watches: list[Watch] = []
_install_once = threading.Lock()
_installed: list[bool] = []


class Watch:
    """``with Watch() as watch: …``, then ``watch.effects``."""

    def __init__(self) -> None:
        self.effects: list[str] = []
        self.changed_random_state = False
        self.opened: dict[str, None] = {}
        """Paths of the files that any thread opened, in order."""
        self._contacts: dict[str, None] = {}

    def __enter__(self) -> Watch:
        _install()
        self._threads = set(threading.enumerate())
        self._foreign = {thread.ident for thread in self._threads} - {threading.get_ident()}
        self._handlers = _signal_handlers()
        self._random = _random_state()
        _watches.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        _watches.remove(self)
        for thread in threading.enumerate():
            package = type(thread).__module__.partition(".")[0]
            is_new = thread not in self._threads and thread.is_alive()
            if is_new and package not in HARMLESS_THREADS:
                self.effects.append(f"it starts the thread {thread.name!r}")
        for number, handler in _signal_handlers().items():
            if handler is not self._handlers[number]:
                self.effects.append(f"it installs a handler of {signal.Signals(number).name}")
        self.effects += [f"it uses the network ({contact})" for contact in self._contacts]
        self.changed_random_state = _random_state() != self._random

    def record(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Record a network event; called by the audit hook on the thread that caused it."""
        if threading.get_ident() in self._foreign:
            return
        address = arguments[0] if event == "socket.getaddrinfo" else arguments[1]
        if event == "socket.bind" and address[:2] == IPV6_PROBE:
            return
        # a str address is a Unix socket
        if event == "socket.getaddrinfo" or isinstance(address, tuple):
            host = address if event == "socket.getaddrinfo" else address[0]
            self._contacts[f"{event.partition('.')[2]} {host}"] = None


@contextmanager
def moved_random_state() -> Iterator[None]:
    """Advance the global random generators for the block, so that seeding them is detected; restore
    them after it."""
    numpy = sys.modules.get("numpy")
    saved, saved_numpy = random.getstate(), numpy.random.get_state() if numpy is not None else None
    random.random()
    if numpy is not None:
        numpy.random.random()
    try:
        yield
    finally:
        random.setstate(saved)
        if numpy is not None:
            numpy.random.set_state(saved_numpy)


def _install() -> None:
    with _install_once:
        if not _installed:
            sys.addaudithook(_hook)
            _installed.append(True)


def _hook(event: str, arguments: tuple[object, ...]) -> None:
    if not _watches:
        return
    for watch in list(_watches):
        if event == "open" and isinstance(arguments[0], str):
            watch.opened[arguments[0]] = None
        elif event in NETWORK_EVENTS:
            watch.record(event, arguments)


def _signal_handlers() -> dict[int, object]:
    return {int(number): signal.getsignal(number) for number in signal.valid_signals()}


def _random_state() -> tuple[object, ...]:
    """The state of the global random generators, comparable with ``==``."""
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return (random.getstate(),)
    name, keys, *details = numpy.random.get_state()
    return (random.getstate(), name, keys.tobytes(), *details)
