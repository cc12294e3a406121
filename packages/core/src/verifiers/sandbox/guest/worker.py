"""Worker: runs the code and answers requests of the host sequentially until the connection closes.

Forked by a supervisor, or run as a command with arguments ``SOCKET_FD AREA_FD SETTINGS``, where
SETTINGS is base64 of JSON. It provides no isolation.
"""

from __future__ import annotations

import base64
import errno
import fcntl
import json
import os
import socket
import stat
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from . import frames, kernel, limits, seccomp
from .interpreter import Interpreter, cut
from .output import Output

ASSUMED_BYTES = 64 * 2**20
"""Assumed address space of a bare interpreter where ``/proc`` cannot be read."""


class Worker:
    def __init__(self, connection: socket.socket, area_fd: int, settings: dict[str, Any]):
        self._connection = connection
        self._output = Output(area_fd, settings["max_output_bytes"])
        self._max_file = settings["max_file_bytes"]
        self._interpreter = Interpreter()
        sys.modules["__main__"] = self._interpreter.main
        os.register_at_fork(after_in_child=self._disconnect)

    def _disconnect(self) -> None:
        """In a child that the code forks: give up the connection, which would outlive the worker in
        a daemon."""
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, self._connection.fileno(), inheritable=False)
        os.close(null)

    def serve(self) -> None:
        stream = self._connection.makefile("rb")
        while (request := frames.read(stream)) is not None:
            header, body = request
            answer, content = getattr(self, f"do_{header['op']}")(header, body)
            self._connection.sendall(frames.pack(answer, content))

    def do_ping(self, header: Mapping[str, object], body: bytes) -> tuple[dict[str, object], bytes]:
        return {}, b""

    def do_python(
        self, header: Mapping[str, object], body: bytes
    ) -> tuple[dict[str, object], bytes]:
        pid = os.getpid()
        self._output.begin()
        value, error, limit = self._interpreter.run(body.decode("utf-8", "surrogatepass"))
        if os.getpid() != pid:  # a child that the code forked; only the worker may answer
            os._exit(0)
        return self._answer(value=value, error=error, limit=limit)

    def do_command(self, header: dict[str, Any], body: bytes) -> tuple[dict[str, object], bytes]:
        self._output.begin()
        try:
            process = subprocess.Popen(header["argv"], stdin=subprocess.DEVNULL, stdout=1, stderr=2)
        except (OSError, ValueError) as error:
            limit = (
                "processes" if isinstance(error, OSError) and error.errno == errno.EAGAIN else None
            )
            return self._answer(
                error=cut(f"{type(error).__name__}: {error}"), exit_code=127, limit=limit
            )
        return self._answer(exit_code=process.wait())

    def do_read(self, header: dict[str, Any], body: bytes) -> tuple[dict[str, object], bytes]:
        try:
            with open(header["path"], "rb", opener=_open_nonblocking) as file:
                if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                    raise OSError(errno.EINVAL, "not a regular file")
                content = file.read(self._max_file + 1)
        except (OSError, ValueError) as error:
            return _failure(error), b""
        if len(content) > self._max_file:
            return {
                "limit": "file",
                "errno": errno.EFBIG,
                "message": f"larger than {self._max_file} bytes",
            }, b""
        return {}, content

    def do_write(self, header: dict[str, Any], body: bytes) -> tuple[dict[str, object], bytes]:
        path = header["path"]
        try:
            os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
            with open(path, "wb") as file:
                file.write(body)
        except (OSError, ValueError) as error:
            return _failure(error), b""
        return {}, b""

    def _answer(self, **fields: object) -> tuple[dict[str, Any], bytes]:
        (stdout, stderr), truncated = self._output.end()
        fields.update(stdout=stdout, stderr=stderr, truncated=truncated)
        return fields, b""


def _open_nonblocking(path: str, flags: int) -> int:
    """Open without blocking on a named pipe."""
    return os.open(path, flags | os.O_NONBLOCK)


def _failure(error: OSError | ValueError) -> dict[str, object]:
    if isinstance(error, OSError):
        return {"errno": error.errno or errno.EIO, "message": cut(error.strerror or str(error))}
    return {"errno": errno.EINVAL, "message": cut(str(error))}


def reseed() -> None:
    """Reseed NumPy so that sessions of a zygote draw different numbers. ``random`` reseeds itself
    on fork."""
    if (random := sys.modules.get("numpy.random")) is not None:
        random.seed()


def main() -> None:
    """Run a worker as a command, with limits and filter when the settings have them."""
    socket_fd = int(sys.argv[1])
    area_fd = int(sys.argv[2])
    settings = json.loads(base64.b64decode(sys.argv[3]))
    sys.argv[:] = [""]
    socket_fd, area_fd = (_above_stderr(fd) for fd in (socket_fd, area_fd))
    worker = Worker(socket.socket(fileno=socket_fd), area_fd, settings)
    if "memory_mb" in settings:
        limits.apply(settings, ASSUMED_BYTES)
        program = seccomp.instructions(pretend=True)
        if program is None:
            sys.exit("no system-call filter exists for this architecture")
        kernel.install_filter(program)
    worker.serve()


def _above_stderr(fd: int) -> int:
    """Move a descriptor above 2: 0, 1 and 2 are stdin, stdout and stderr of the code."""
    if fd > 2:
        return fd
    moved = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3)
    os.dup2(os.open(os.devnull, os.O_RDONLY), fd)
    return moved
