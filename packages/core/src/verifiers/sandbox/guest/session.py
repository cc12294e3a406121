"""A session: separate namespaces, files and limits, with a supervisor as its first process.

The supervisor (PID 1 of its namespace) handles requests from the host over ``control``: start a
worker on a connection, kill all processes, report why the last worker ended. Model-written code
runs only in workers, which can neither read the supervisor's memory nor signal it; when it ends,
the kernel kills all processes in the namespace.
"""

from __future__ import annotations

import json
import os
import select
import socket
from collections.abc import Mapping
from typing import Any

from . import kernel, root
from .supervisor import TICK_S, Supervisor, restrict

ROOT = "/sandbox"
HOME = f"{ROOT}/home"
UID = 1000
MAX_MESSAGE = 4096


def enter(control: socket.socket, settings: dict[str, object]) -> None:
    """Enter new namespaces and start the supervisor there; returns in the calling process, which
    must exit."""
    try:
        kernel.unshare(kernel.ALL_NAMESPACES)
        _map_user()
        if os.fork():
            return
        _mount_files(settings)
        restrict(settings)
    except OSError as error:
        control.send(json.dumps({"failed": str(error)}).encode())
        raise
    _SessionSupervisor(control, settings).run()


def _map_user() -> None:
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{UID} {UID} 1"),
        ("gid_map", f"{UID} {UID} 1"),
    ):
        with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
            file.write(text)


def _mount_files(settings: dict[str, Any]) -> None:
    """Mount writable files, ``/proc`` and terminals of the session over the read-only files of the
    outer sandbox."""
    kernel.mount("none", "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
    safe = kernel.MS_NOSUID | kernel.MS_NODEV
    kernel.mount(
        "tmpfs", ROOT, "tmpfs", safe, f"size={settings['file_mb']}m,nr_inodes=100k,mode=0755"
    )
    for name in ("home", "tmp", "shm"):
        os.mkdir(f"{ROOT}/{name}", 0o700)
    kernel.mount(f"{ROOT}/tmp", "/tmp", None, kernel.MS_BIND)
    kernel.mount(f"{ROOT}/shm", "/dev/shm", None, kernel.MS_BIND)
    kernel.mount(
        "devpts",
        "/dev/pts",
        "devpts",
        kernel.MS_NOSUID | kernel.MS_NOEXEC,
        "newinstance,ptmxmode=0666",
    )
    kernel.mount("proc", "/proc", "proc", safe | kernel.MS_NOEXEC)
    # Nested namespaces would grant the code capabilities inside them.
    with open("/proc/sys/user/max_user_namespaces", "w", encoding="ascii") as file:
        file.write("0")
    socket.sethostname("sandbox")
    kernel.raise_loopback()
    mounts = {"/tmp": f"{ROOT}/tmp", HOME: HOME}
    if settings["image"] is not None:
        os.mkdir(f"{ROOT}/root", 0o755)
        root.enter_image(
            f"{ROOT}/root", settings["image"], f"{ROOT}/changes", mounts, set(settings["left_out"])
        )
    elif settings["writable_root"]:
        os.mkdir(f"{ROOT}/root", 0o755)
        root.enter(f"{ROOT}/root", mounts)
    os.chdir(HOME)


class _SessionSupervisor(Supervisor):
    """A supervisor that handles requests of the host, each one datagram with file descriptors."""

    def __init__(self, control: socket.socket, settings: Mapping[str, object]):
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
                    os._exit(0)  # the host closed its end
                self._handle(json.loads(data)["op"], fds)
            self.reap()
            tick_s = self.check_limits()

    def _handle(self, op: str, fds: list[int]) -> None:
        if op == "cause":
            self.await_worker()
            self._control.send(json.dumps({"cause": self.cause}).encode())
        else:
            self.kill()
        if op == "worker":
            self.start_worker(
                socket.socket(fileno=os.dup(fds[0])), fds[1], [self._control.fileno(), fds[0]]
            )
        for fd in fds:
            os.close(fd)
