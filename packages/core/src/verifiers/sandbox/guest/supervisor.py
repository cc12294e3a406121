"""Supervisor: the first process of a session. It starts one worker at a time, enforces limits and
kills processes.

Model-written code runs only in workers and their children. When this process is PID 1 of its
namespace, the kernel kills all others when it ends; elsewhere (on a remote machine) it kills its
descendants in turn.
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
"""Supervisor, worker and its output thread: not counted against the limit of the code."""
MAX_FILES = 1024
TICK_S, BUSY_TICK_S = 1.0, 0.1
ENDING_TICK_S, ENDING_TICKS = 0.002, 250
MAX_ROUNDS = 1000
"""Rounds of killing descendants, which may fork in the meantime."""


class Supervisor:
    """``mount_points``: in-memory file systems of the code, whose files count as memory."""

    def __init__(self, settings: dict[str, Any], mount_points: tuple[str, ...]):
        self._settings = settings
        self._mount_points = [*{os.stat(path).st_dev: path for path in mount_points}.values()]
        self._is_pid_1 = os.getpid() == 1
        self._worker: int | None = None
        self._cause: str | None = None
        self._has_run = False
        """Whether a worker was started before."""
        self._own_kb = _proportional_kb(os.getpid())

    @property
    def cause(self) -> str | None:
        """Why the last worker ended; None while it runs."""
        return self._cause

    def start_worker(self, connection: socket.socket, area_fd: int, close_fds: list[int]) -> None:
        """Fork a worker, after ``kill``; the child first closes ``close_fds``."""
        self._cause = None
        self._worker = os.fork()
        if not self._worker:
            for fd in close_fds:
                os.close(fd)
            _run_worker(connection, area_fd, self._settings, self._has_run)
        self._has_run = True

    def kill(self) -> None:
        """Kill every process but this process."""
        if self._is_pid_1:
            with contextlib.suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)
        else:
            end_descendants()
        with contextlib.suppress(ChildProcessError):
            while True:
                self._note_end(*os.waitpid(-1, 0))
        self._worker = None

    def reap(self) -> None:
        """Collect processes that have ended. A worker takes all others with it: a process may hold
        its connection open."""
        had_worker = self._worker is not None
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                self._note_end(*ended)
        if had_worker and self._worker is None:
            self.kill()

    def await_worker(self) -> None:
        """Wait for a worker that closed its connection; kill it after ``ENDING_TICKS``."""
        for _ in range(ENDING_TICKS):
            self.reap()
            if self._worker is None:
                return
            time.sleep(ENDING_TICK_S)
        self.kill()

    def check_limits(self) -> float:
        """Kill all processes when their total exceeds a limit; return the seconds until the next
        check."""
        processes = self._processes()
        if len(processes) > self._settings["num_processes"] + OWN_PROCESSES:
            return self._end("processes")
        files_kb = sum(map(_files_kb, self._mount_points))
        max_kb = self._settings["memory_mb"] * 1024 + self._own_kb
        # The resident size is a cheap upper bound; the proportional size is read only when that
        # exceeds the limit.
        resident_kb = files_kb + sum(map(_resident_kb, processes))
        if resident_kb > max_kb and files_kb + sum(map(_proportional_kb, processes)) > max_kb:
            return self._end("memory")
        return BUSY_TICK_S if len(processes) > 1 else TICK_S

    def _processes(self) -> list[int]:
        if self._is_pid_1:
            return [int(name) for name in os.listdir("/proc") if name.isdigit() and name != "1"]
        return descendants(os.getpid())

    def _note_end(self, pid: int, status: int) -> None:
        if pid == self._worker:
            self._worker = None
            self._cause = self._cause or _cause(status)

    def _end(self, cause: str) -> float:
        self._cause = cause
        self.kill()
        return TICK_S


def restrict(settings: dict[str, Any]) -> None:
    """Drop all privileges, install the system-call filter and set limits, for this process and its
    future children."""
    kernel.drop_privileges()
    kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
    for name, value in (
        (resource.RLIMIT_NPROC, settings["num_processes"] + OWN_PROCESSES),
        (resource.RLIMIT_NOFILE, MAX_FILES),
        (resource.RLIMIT_MEMLOCK, 0),
    ):
        limits.lower(name, value)
    program = seccomp.instructions()
    if program is not None:
        kernel.install_filter(program)


def end_descendants() -> None:
    """Kill descendants until none remain. They may fork in the meantime, within their process
    limit."""
    for _ in range(MAX_ROUNDS):
        pids = descendants(os.getpid())
        if not pids:
            return
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.002)


def descendants(pid: int) -> list[int]:
    """Process ids of all descendants except zombies."""
    parents: dict[int, list[int]] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            with open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as file:
                state, parent = file.read().rpartition(")")[2].split()[:2]
            if state != "Z":
                parents.setdefault(int(parent), []).append(int(name))
    pids, pending = [], [pid]
    while pending:
        children = parents.get(pending.pop(), [])
        pids += children
        pending += children
    return pids


def _cause(status: int) -> str:
    ended_by = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    return {int(signal.SIGXCPU): "cpu", int(signal.SIGXFSZ): "file"}.get(ended_by, "killed")


def _files_kb(path: str) -> int:
    files = os.statvfs(path)
    return (files.f_blocks - files.f_bfree) * files.f_frsize // 1024


def _resident_kb(pid: int) -> int:
    """Resident set size including shared pages; 0 for a process that has ended."""
    try:
        with open(f"/proc/{pid}/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * resource.getpagesize() // 1024
    except OSError:
        return 0


def _proportional_kb(pid: int) -> int:
    """Proportional set size (PSS); the resident size when the process hides it or the kernel does
    not report it."""
    try:
        with open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as file:
            return next((int(line.split()[1]) for line in file if line.startswith("Pss:")), 0)
    except OSError:
        return _resident_kb(pid)


def _enter_folder(settings: dict[str, Any], has_run: bool) -> None:
    """Enter the working folder. Code that has run may have replaced it by a link or a file: then
    the home, or the root.

    *Raises* OSError when no code has run and the folder cannot be created.
    """
    for folder in (settings["working_dir"] or settings["home"], settings["home"], "/"):
        try:
            os.makedirs(folder, exist_ok=True)
            return os.chdir(folder)
        except OSError:
            if not has_run:
                raise
    return None


def _run_worker(
    connection: socket.socket, area_fd: int, settings: dict[str, Any], has_run: bool
) -> None:
    """The worker's main function, after the fork. Does not return."""
    try:
        kernel.prctl(kernel.PR_SET_DUMPABLE, 1)
        with (
            contextlib.suppress(OSError),
            open("/proc/self/oom_score_adj", "w", encoding="ascii") as file,
        ):
            file.write("900")  # the kernel's OOM killer selects workers first
        os.setsid()
        os.environ.update(settings["env"])
        _enter_folder(settings, has_run)
        sys.path.insert(0, "")
        worker.reseed()
        server = worker.Worker(connection, area_fd, settings)
        limits.apply(settings, limits.address_space_bytes())
        server.serve()
    except BaseException:  # noqa: BLE001  (the frames above belong to the supervisor)
        traceback.print_exc()
        os._exit(1)
    os._exit(0)
