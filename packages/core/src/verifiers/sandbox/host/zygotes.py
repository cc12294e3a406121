"""Zygotes: one warm process per list of packages and mounts, inside an outer bubblewrap sandbox,
that forks sessions.

A zygote ends with this process, even after SIGKILL: its control connection closes, and the kernel
kills it when the thread that started it ends. That thread lives as long as this process, so one
zygote serves every event loop.
"""

from __future__ import annotations

import atexit
import fcntl
import json
import os
import queue
import select
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path

from verifiers.errors import ConfigError, SandboxUnavailable
from verifiers.sandbox.guest import launch
from verifiers.sandbox.host import mounts
from verifiers.sandbox.host.mounts import ENVIRONMENT, FILES, RUN_GUEST, variables
from verifiers.sandbox.host.packages import import_names

READY_S = 120.0
HOST_UIDS = (65534, 1)
"""User ids of the host that code runs as when this process is root: that of the user "nobody", or
1 if it is not mapped."""
MOUNT_POINTS = ("/tmp", "/sandbox", "/etc")

Further = tuple[tuple[str, str], ...]
"""Mounts beside those of every sandbox: (path inside, path of the host)."""
_zygotes: dict[tuple[str, tuple[str, ...], Further], Zygote] = {}
_lock = threading.Lock()


class Zygote:
    """A zygote. ``fork`` may be called from any thread."""

    def __init__(self, command: str, packages: tuple[str, ...], further: Further = ()):
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  (closed by close)
        with theirs:
            self._process = _on_starter(lambda: self._launch(command, packages, further, theirs))
        self._wait_until_ready(packages)

    def fork(self, settings: Mapping[str, object]) -> socket.socket:
        """Fork a session; return its control connection. *Raises* SandboxUnavailable when the
        zygote is gone."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            try:
                socket.send_fds(self._control, [json.dumps(settings).encode()], [theirs.fileno()])
            except OSError as error:
                ours.close()
                raise SandboxUnavailable(
                    f"The zygote process of the sandboxes has ended: {self._last_error_line()}"
                ) from error
        ours.setblocking(False)
        return ours

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def ended_within(self, limit_s: float) -> bool:
        """Whether it has ended, or does so in time."""
        try:
            self._process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def close(self) -> None:
        self._control.close()
        self._process.kill()
        self._process.wait()
        self._errors.close()

    def _launch(
        self, command: str, packages: tuple[str, ...], further: Further, theirs: socket.socket
    ) -> subprocess.Popen[bytes]:
        settings = json.dumps({"imports": import_names(packages), "path": [mounts.PACKAGES]})
        layout = mounts.mounts(packages, further)
        sources = [str(path) for path in layout.visible.values()]
        if os.getuid():
            staged = sources
        else:
            staged = [f"{launch.STAGE}/{number}" for number in range(len(sources))]
        fds = {path: _memory_file(text) for path, text in FILES.items()}
        arguments = [command, *_options(layout, staged, fds), mounts.INTERPRETER, "-c"]
        arguments += [
            RUN_GUEST.format(path=mounts.INSIDE, module="zygote"),
            str(theirs.fileno()),
            settings,
        ]
        try:
            return self._start(arguments, sources, [theirs.fileno(), *fds.values()])
        finally:
            for fd in fds.values():
                os.close(fd)

    def _start(
        self, arguments: list[str], sources: list[str], fds: list[int]
    ) -> subprocess.Popen[bytes]:
        if os.getuid() != 0:
            return self._popen(arguments, fds)
        ours, theirs = socket.socketpair()
        with ours, theirs:
            fd = theirs.fileno()
            code = RUN_GUEST.format(path=str(mounts.GUEST.parent), module="launch")
            launcher = [sys.executable, "-c", code, str(fd), json.dumps(sources)]
            process = self._popen([*launcher, *arguments], [*fds, fd])
            theirs.close()
            if ours.recv(1) == b"?":
                _map_users(process.pid)
                ours.send(b"!")
        return process

    def _popen(self, arguments: list[str], fds: list[int]) -> subprocess.Popen[bytes]:
        quiet = subprocess.DEVNULL
        return subprocess.Popen(
            arguments,
            stdin=quiet,
            stdout=quiet,
            stderr=self._errors,
            pass_fds=fds,
            env=ENVIRONMENT,
            cwd="/",
        )

    def _wait_until_ready(self, packages: tuple[str, ...]) -> None:
        ready, _, _ = select.select([self._control], [], [], READY_S)
        report = self._control.recv(2**16) if ready else b""
        if not report:
            reason = self._last_error_line()
            self.close()
            raise SandboxUnavailable(
                f"bubblewrap could not start a sandbox: {reason}", names=["bubblewrap"]
            )
        if failed := json.loads(report)["failed"]:
            self.close()
            reasons = "; ".join(f"{name} ({error})" for name, error in failed.items())
            raise ConfigError(
                f"Packages {packages} cannot be imported in the sandbox: {reasons}", names=[*failed]
            )

    def _last_error_line(self) -> str:
        if self._errors.closed:
            return "another took its place"
        self._errors.seek(0)
        lines = self._errors.read(2**16).decode("utf-8", "replace").strip().splitlines()
        return lines[-1] if lines else "it ended without a message"


def zygote_for(command: str, packages: tuple[str, ...], further: Further = ()) -> Zygote:
    """Return the zygote for these packages and mounts. Starting a zygote takes as long as importing
    the packages.

    *Raises* SandboxUnavailable when it does not start, ConfigError when a package cannot be
    imported inside.
    """
    key = (command, packages, further)
    with _lock:
        zygote = _zygotes.get(key)
        if zygote is not None and not zygote.alive:
            _zygotes.pop(key).close()
            zygote = None
        if zygote is None:
            zygote = _zygotes[key] = Zygote(command, packages, further)
        return zygote


def close_all() -> None:
    """End every zygote and thereby every session."""
    with _lock:
        while _zygotes:
            _zygotes.popitem()[1].close()


atexit.register(close_all)


def _options(layout: mounts.Mounts, sources: list[str], files: dict[str, int]) -> list[str]:
    """Options of bubblewrap. Sessions share this file system, so all of it is
    remounted read-only."""
    options = (
        "--unshare-user --unshare-ipc --unshare-pid --unshare-net --unshare-uts"
        " --unshare-cgroup-try".split()
    )
    options += ["--uid", str(launch.UID), "--gid", str(launch.UID), "--hostname", "sandbox"]
    options += "--die-with-parent --new-session --clearenv".split()
    for path in (*layout.folders(), *MOUNT_POINTS):
        options += ["--perms", "0755", "--dir", path]
    for source, target in zip(sources, layout.visible, strict=True):
        options += ["--ro-bind", source, target]
    for path in layout.hidden:
        options += ["--tmpfs", path, "--remount-ro", path]
    for path, target in layout.links.items():
        options += ["--symlink", target, path]
    for path, fd in files.items():
        options += ["--perms", "0444", "--ro-bind-data", str(fd), path]
    options += "--proc /proc --dev /dev --chdir / --remount-ro /dev --remount-ro /".split()
    return [
        *options,
        *(word for name, value in variables().items() for word in ("--setenv", name, value)),
    ]


def owner() -> int:
    """The user id of the host that code runs as: files of this user are its own inside."""
    if os.getuid() != 0:
        return os.getuid()
    with open("/proc/self/uid_map", encoding="ascii") as file:
        ranges = [[int(word) for word in line.split()] for line in file]
    is_mapped = [
        uid for uid in HOST_UIDS if any(first <= uid < first + count for first, _, count in ranges)
    ]
    return (is_mapped or HOST_UIDS)[0]


def _map_users(pid: int) -> None:
    """Write the user maps of a process. *Raises* OSError when this root user is not
    permitted to."""
    for kind in ("uid", "gid"):
        text = f"0 0 1\n{launch.UID} {owner()} 1\n"
        Path(f"/proc/{pid}/{kind}_map").write_text(text, encoding="ascii")


def _memory_file(text: str) -> int:
    """A sealed, read-only file in memory."""
    fd = os.memfd_create("sandbox-file", os.MFD_ALLOW_SEALING)
    os.write(fd, text.encode())
    os.lseek(fd, 0, os.SEEK_SET)
    fcntl.fcntl(
        fd,
        fcntl.F_ADD_SEALS,
        fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL,
    )
    return fd


@lru_cache
def _starter() -> queue.SimpleQueue[Callable[[], None]]:
    """A thread that never ends: with ``--die-with-parent`` the kernel kills a process when its
    starting thread ends."""
    work: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()

    def serve() -> None:
        while True:
            work.get()()

    threading.Thread(target=serve, name="sandbox-starter", daemon=True).start()
    return work


def _on_starter(start: Callable[[], subprocess.Popen[bytes]]) -> subprocess.Popen[bytes]:
    """Call ``start`` in the starter thread; return its result or raise its exception."""
    done: queue.SimpleQueue[subprocess.Popen[bytes] | BaseException] = queue.SimpleQueue()

    def call() -> None:
        try:
            done.put(start())
        except BaseException as error:  # noqa: BLE001  (raised in the calling thread)
            done.put(error)

    _starter().put(call)
    outcome = done.get()
    if isinstance(outcome, BaseException):
        raise outcome
    return outcome
