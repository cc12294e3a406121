"""One session: own namespaces, own files, own limits, and a first process that only watches.

The first process (1 in its process namespace) takes orders from the owner over ``control``: start a worker on a
connection, kill everything, say why the last worker ended. Code of a model runs in workers only; they can neither see
into the first process nor signal it, and when it ends, the kernel ends everything in the namespace with it.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import signal
import socket
import sys
import time
import traceback
from typing import Any

from . import kernel, limits, seccomp, worker

ROOT = "/sandbox"
HOME = f"{ROOT}/home"
UID = 1000
MAX_FILES = 1024
OWN_PROCESSES = 3
"""First process, worker and its output thread: not counted against the code."""
TICK_S, BUSY_TICK_S = 1.0, 0.1
ENDING_TICK_S, ENDING_TICKS = 0.002, 250
MAX_MESSAGE = 4096


def enter(control: socket.socket, settings: dict[str, Any]) -> None:
    """Go into new namespaces and start the first process there; returns in the caller, which is to exit."""
    try:
        kernel.unshare(kernel.ALL_NAMESPACES)
        _map_user()
        if os.fork():
            return
        _furnish(settings)
        _restrict(settings)
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


def _restrict(settings: dict[str, Any]) -> None:
    kernel.drop_privileges()
    kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
    for name, value in (
        (resource.RLIMIT_NPROC, settings["num_processes"] + OWN_PROCESSES),
        (resource.RLIMIT_NOFILE, MAX_FILES),
        (resource.RLIMIT_MEMLOCK, 0),
    ):
        limits.bound(name, value)
    program = seccomp.instructions()
    if program is not None:
        kernel.install_filter(program)


class _First:
    """The loop of the session's first process."""

    def __init__(self, control: socket.socket, settings: dict[str, Any]):
        self._control = control
        self._settings = settings
        self._worker: int | None = None
        self._cause: str | None = None
        self._alone_kb = _held_kb(os.getpid())

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
            self._reap()
            tick_s = self._watch()

    def _obey(self, op: str, fds: list[int]) -> None:
        if op == "cause":
            self._await_worker()
            self._control.send(json.dumps({"cause": self._cause}).encode())
        else:
            self.kill()
        if op == "worker":
            self._cause = None
            self._worker = os.fork()
            if not self._worker:
                self._control.close()
                _work(fds, self._settings)
        for fd in fds:
            os.close(fd)

    def kill(self) -> None:
        """Everything but this process, which the kernel leaves out."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while True:
                self._took(*os.waitpid(-1, 0))
        self._worker = None

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                self._took(*ended)

    def _await_worker(self) -> None:
        """It has closed its connection, so it is about to end; one that is not is ended."""
        for _ in range(ENDING_TICKS):
            self._reap()
            if self._worker is None:
                return
            time.sleep(ENDING_TICK_S)
        self.kill()

    def _took(self, pid: int, status: int) -> None:
        if pid == self._worker:
            self._worker = None
            self._cause = self._cause or _cause(status)

    def _watch(self) -> float:
        """Hold the processes to what they may have together; the seconds until the next look."""
        others = [int(name) for name in os.listdir("/proc") if name.isdigit() and name != "1"]
        if len(others) > self._settings["num_processes"] + OWN_PROCESSES:
            return self._end("processes")
        files = os.statvfs(ROOT)
        files_kb = (files.f_blocks - files.f_bfree) * files.f_frsize // 1024
        bound_kb = self._settings["memory_mb"] * 1024 + self._alone_kb
        at_most_kb = files_kb + sum(map(_resident_kb, others))
        if at_most_kb > bound_kb and files_kb + sum(map(_held_kb, others)) > bound_kb:
            return self._end("memory")
        return BUSY_TICK_S if len(others) > 1 else TICK_S

    def _end(self, cause: str) -> float:
        self._cause = cause
        self.kill()
        return TICK_S


def _cause(status: int) -> str:
    ended_by = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    return {int(signal.SIGXCPU): "cpu", int(signal.SIGXFSZ): "file"}.get(ended_by, "killed")


def _resident_kb(pid: int) -> int:
    """Pages in memory, those shared with the parent too: an upper bound that is cheap."""
    try:
        with open(f"/proc/{pid}/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * resource.getpagesize() // 1024
    except OSError:
        return 0


def _held_kb(pid: int) -> int:
    """The process's share of its pages (PSS)."""
    try:
        with open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as file:
            return next((int(line.split()[1]) for line in file if line.startswith("Pss:")), 0)
    except OSError:
        return 0


def _work(fds: list[int], settings: dict[str, Any]) -> None:
    """The worker, after the fork. Never returns."""
    try:
        kernel.prctl(kernel.PR_SET_DUMPABLE, 1)
        with open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
            file.write("900")
        os.setsid()
        os.environ.update(settings["env"])
        os.makedirs(settings["working_dir"] or HOME, exist_ok=True)
        os.chdir(settings["working_dir"] or HOME)
        sys.path.insert(0, "")
        worker.reseed()
        loop = worker.Worker(socket.socket(fileno=fds[0]), fds[1], settings)
        limits.hold(settings, limits.address_space_bytes())
        loop.serve()
    except BaseException:  # noqa: BLE001  (nothing above this frame may run in this process)
        traceback.print_exc()
        os._exit(1)
    os._exit(0)
