"""What a session's first process does: it starts one worker at a time, watches what that starts, and ends it.

Code of a model runs in workers only. Where this process is the first of its process namespace, the kernel ends all the
others with it; elsewhere (a remote machine) it ends its descendants one by one.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import sys
import time
import traceback
from typing import Any

from . import kernel, limits, seccomp, worker

OWN_PROCESSES = 3
"""First process, worker and its output thread: not counted against the code."""
MAX_FILES = 1024
TICK_S, BUSY_TICK_S = 1.0, 0.1
ENDING_TICK_S, ENDING_TICKS = 0.002, 250
MAX_ROUNDS = 1000


class Warden:
    """``places``: where the code's files are; they count as memory."""

    def __init__(self, settings: dict[str, Any], places: tuple[str, ...]):
        self._settings = settings
        self._places = [*{os.stat(place).st_dev: place for place in places}.values()]
        self._first = os.getpid() == 1
        self._worker: int | None = None
        self._cause: str | None = None
        self._alone_kb = _held_kb(os.getpid())

    @property
    def cause(self) -> str | None:
        """Of the last worker's end."""
        return self._cause

    def begin(self, connection: socket.socket, area_fd: int, drop: list[int]) -> None:
        """A new worker, after ``kill``; it closes ``drop`` first."""
        self._cause = None
        self._worker = os.fork()
        if not self._worker:
            for fd in drop:
                os.close(fd)
            _work(connection, area_fd, self._settings)

    def kill(self) -> None:
        """Everything but this process."""
        if self._first:
            with contextlib.suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)
        else:
            end_descendants()
        with contextlib.suppress(ChildProcessError):
            while True:
                self._took(*os.waitpid(-1, 0))
        self._worker = None

    def reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                self._took(*ended)

    def await_worker(self) -> None:
        """It has closed its connection, so it is about to end; one that is not is ended."""
        for _ in range(ENDING_TICKS):
            self.reap()
            if self._worker is None:
                return
            time.sleep(ENDING_TICK_S)
        self.kill()

    def watch(self) -> float:
        """Hold the processes to what they may have together; the seconds until the next look."""
        others = self._others()
        if len(others) > self._settings["num_processes"] + OWN_PROCESSES:
            return self._end("processes")
        files_kb = sum(map(_files_kb, self._places))
        bound_kb = self._settings["memory_mb"] * 1024 + self._alone_kb
        at_most_kb = files_kb + sum(map(_resident_kb, others))
        if at_most_kb > bound_kb and files_kb + sum(map(_held_kb, others)) > bound_kb:
            return self._end("memory")
        return BUSY_TICK_S if len(others) > 1 else TICK_S

    def _others(self) -> list[int]:
        if self._first:
            return [int(name) for name in os.listdir("/proc") if name.isdigit() and name != "1"]
        return descendants(os.getpid())

    def _took(self, pid: int, status: int) -> None:
        if pid == self._worker:
            self._worker = None
            self._cause = self._cause or _cause(status)

    def _end(self, cause: str) -> float:
        self._cause = cause
        self.kill()
        return TICK_S


def restrict(settings: dict[str, Any]) -> None:
    """This process and all it will start: no capability, no privileges to gain, a system-call filter, few files."""
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


def end_descendants() -> None:
    """Until there is none. They may start others meanwhile, but not more than they are allowed at a time."""
    for _ in range(MAX_ROUNDS):
        found = descendants(os.getpid())
        if not found:
            return
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.002)


def descendants(pid: int) -> list[int]:
    """All but zombies."""
    parents: dict[int, list[int]] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            with open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as file:
                state, parent = file.read().rpartition(")")[2].split()[:2]
            if state != "Z":
                parents.setdefault(int(parent), []).append(int(name))
    found, waiting = [], [pid]
    while waiting:
        children = parents.get(waiting.pop(), [])
        found += children
        waiting += children
    return found


def _cause(status: int) -> str:
    ended_by = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    return {int(signal.SIGXCPU): "cpu", int(signal.SIGXFSZ): "file"}.get(ended_by, "killed")


def _files_kb(place: str) -> int:
    files = os.statvfs(place)
    return (files.f_blocks - files.f_bfree) * files.f_frsize // 1024


def _resident_kb(pid: int) -> int:
    """Pages in memory, those shared with the parent too: an upper bound that is cheap."""
    try:
        with open(f"/proc/{pid}/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * resource.getpagesize() // 1024
    except OSError:
        return 0


def _held_kb(pid: int) -> int:
    """The process's share of its pages (PSS); all it has in memory when that is hidden or the kernel does not say."""
    try:
        with open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as file:
            return next((int(line.split()[1]) for line in file if line.startswith("Pss:")), 0)
    except OSError:
        return _resident_kb(pid)


def _work(connection: socket.socket, area_fd: int, settings: dict[str, Any]) -> None:
    """The worker, after the fork. Never returns."""
    try:
        kernel.prctl(kernel.PR_SET_DUMPABLE, 1)
        with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
            file.write("900")
        os.setsid()
        os.environ.update(settings["env"])
        place = settings["working_dir"] or settings["home"]
        os.makedirs(place, exist_ok=True)
        os.chdir(place)
        sys.path.insert(0, "")
        worker.reseed()
        loop = worker.Worker(connection, area_fd, settings)
        limits.hold(settings, limits.address_space_bytes())
        loop.serve()
    except BaseException:  # noqa: BLE001  (nothing above this frame may run in this process)
        traceback.print_exc()
        os._exit(1)
    os._exit(0)
