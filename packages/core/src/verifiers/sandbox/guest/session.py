"""One session: own namespaces, own files, own limits, and a first process that only watches.

The first process (1 in its process namespace) takes orders from the owner over ``control``: start a worker on a
connection, kill everything, say why the last worker ended. Code of a model runs in workers only; they can neither see
into the first process nor signal it, and when it ends, the kernel ends everything in the namespace with it.
"""

from __future__ import annotations

import json
import os
import select
import socket
from typing import Any

from . import kernel
from .supervisor import TICK_S, Warden, restrict

ROOT = "/sandbox"
HOME = f"{ROOT}/home"
UID = 1000
MAX_MESSAGE = 4096


def enter(control: socket.socket, settings: dict[str, Any]) -> None:
    """Go into new namespaces and start the first process there; returns in the caller, which is to exit."""
    try:
        kernel.unshare(kernel.ALL_NAMESPACES)
        _map_user()
        if os.fork():
            return
        _furnish(settings)
        restrict(settings)
    except OSError as error:
        control.send(json.dumps({"failed": str(error)}).encode())
        raise
    _First(control, settings).run()


def _map_user() -> None:
    for name, text in (("setgroups", "deny"), ("uid_map", f"{UID} {UID} 1"), ("gid_map", f"{UID} {UID} 1")):
        with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
            file.write(text)


def _furnish(settings: dict[str, Any]) -> None:
    """The session's own files, processes and devices over those of the outer sandbox, which are read-only."""
    kernel.mount("none", "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
    safe = kernel.MS_NOSUID | kernel.MS_NODEV
    kernel.mount("tmpfs", ROOT, "tmpfs", safe, f"size={settings['file_mb']}m,nr_inodes=100k,mode=0755")
    for name in ("home", "tmp", "shm"):
        os.mkdir(f"{ROOT}/{name}", 0o700)
    kernel.mount(f"{ROOT}/tmp", "/tmp", None, kernel.MS_BIND)
    kernel.mount(f"{ROOT}/shm", "/dev/shm", None, kernel.MS_BIND)
    kernel.mount("devpts", "/dev/pts", "devpts", kernel.MS_NOSUID | kernel.MS_NOEXEC, "newinstance,ptmxmode=0666")
    kernel.mount("proc", "/proc", "proc", safe | kernel.MS_NOEXEC)
    with open("/proc/sys/user/max_user_namespaces", "w", encoding="ascii") as file:
        file.write("0")
    socket.sethostname("sandbox")
    kernel.raise_loopback()
    os.chdir(HOME)


class _First(Warden):
    """The loop of the session's first process."""

    def __init__(self, control: socket.socket, settings: dict[str, Any]):
        super().__init__({**settings, "home": HOME}, (ROOT,))
        self._control = control

    def run(self) -> None:
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        tick_s = TICK_S
        while True:
            if poll.poll(tick_s * 1000):
                data, fds, _, _ = socket.recv_fds(self._control, MAX_MESSAGE, 2)
                if not data:
                    os._exit(0)
                self._obey(json.loads(data)["op"], fds)
            self.reap()
            tick_s = self.watch()

    def _obey(self, op: str, fds: list[int]) -> None:
        if op == "cause":
            self.await_worker()
            self._control.send(json.dumps({"cause": self.cause}).encode())
        else:
            self.kill()
        if op == "worker":
            self.begin(socket.socket(fileno=os.dup(fds[0])), fds[1], [self._control.fileno(), fds[0]])
        for fd in fds:
            os.close(fd)
