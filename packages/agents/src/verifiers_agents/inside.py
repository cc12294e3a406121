"""Run one agent program inside its sandbox, forward its model calls, and keep its output.

A program of its own, which imports nothing but the standard library: ``inside.py SETTINGS``, where
SETTINGS is a JSON file. Connections to ``port`` on loopback are forwarded to the Unix socket
``socket`` (None: nothing is forwarded). The agent's output goes into the file ``log``;
``output_of`` reads it, also while it is written. The report is one line of JSON on stdout:
``exit_code``, ``flooded``, ``left`` (names of processes that outlived the agent), or ``failed``.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
from typing import Any

CHUNK = 65536
HEAD = struct.Struct("<Q")
"""Start of the log file: how many bytes the agent wrote."""
POLL_S = 0.05
"""Interval of checks whether the agent has ended, where the system has no descriptors
of processes."""


class Log:
    """The first and the last half of what was written, in a file of bounded size that is readable
    at any time."""

    def __init__(self, path: str, max_bytes: int):
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        self._half = max_bytes // 2
        self.num_bytes = 0

    def write(self, data: bytes) -> None:
        while data:
            start, room = location(self.num_bytes, self._half)
            piece, data = data[:room], data[room:]
            os.pwrite(self._fd, piece, HEAD.size + start)
            self.num_bytes += len(piece)
        os.pwrite(self._fd, HEAD.pack(self.num_bytes), 0)


def location(position: int, half: int) -> tuple[int, int]:
    """(offset in the file, bytes up to the end of that half) of a position in the output."""
    if position < half:
        return position, half - position
    offset = (position - half) % half
    return half + offset, half - offset


def output_of(content: bytes, max_bytes: int) -> tuple[bytes, int]:
    """(the output, with a note where its middle was dropped, bytes that the agent wrote) of a log
    file's content.

    >>> log = Log("/tmp/verifiers-log-doctest", 8)
    >>> log.write(b"abcdefghijk")
    >>> output_of(open("/tmp/verifiers-log-doctest", "rb").read(), 8)
    (b'abcd\\n[3 bytes left out]\\nhijk', 11)
    >>> os.unlink("/tmp/verifiers-log-doctest")
    """
    if len(content) < HEAD.size:
        return b"", 0
    (total,) = HEAD.unpack_from(content)
    body, half = content[HEAD.size :], max_bytes // 2
    if total <= 2 * half:
        return body[:total], total
    turn = (total - half) % half
    last = body[half + turn : 2 * half] + body[half : half + turn]
    return b"".join((body[:half], f"\n[{total - 2 * half} bytes left out]\n".encode(), last)), total


def forward(port: int, path: str) -> None:
    """Accept connections on loopback, and connect each with the socket ``path``; returns once it
    listens."""
    listening = socket.create_server(("127.0.0.1", port), backlog=128)

    def accept() -> None:
        while True:
            inner, _ = listening.accept()
            outer = socket.socket(socket.AF_UNIX)
            try:
                outer.connect(path)
            except OSError:
                inner.close()
                continue
            for source, target in ((inner, outer), (outer, inner)):
                threading.Thread(target=_copy, args=(source, target), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()


def _copy(source: socket.socket, target: socket.socket) -> None:
    """Copy until the end of the stream, then end the other direction."""
    try:
        while data := source.recv(CHUNK):
            target.sendall(data)
    except OSError:
        pass  # one side is gone; the other learns it below
    try:
        target.shutdown(socket.SHUT_WR)
    except OSError:
        source.close()


def run(settings: dict[str, Any]) -> dict[str, object]:
    """Run the agent to its end; returns the report."""
    log = Log(settings["log"], settings["max_log_bytes"])
    if settings["socket"] is not None:
        forward(settings["port"], settings["socket"])
    env = {**os.environ, "PWD": settings["cwd"], **settings["env"]}
    try:
        agent = subprocess.Popen(
            settings["argv"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=settings["cwd"],
            env=env,
            start_new_session=True,
            bufsize=0,
        )
    except (OSError, ValueError) as error:
        return {"failed": f"{type(error).__name__}: {error}"}
    flooded = _read(agent, log, settings["max_output_bytes"])
    if flooded:
        os.killpg(agent.pid, signal.SIGKILL)
    return {
        "exit_code": agent.wait(),
        "flooded": flooded,
        "left": left_processes(agent.pid, settings["alone"]),
    }


def _read(agent: subprocess.Popen[bytes], log: Log, max_bytes: int) -> bool:
    """Copy the output into the log until the agent ends; whether it wrote more than
    ``max_bytes``."""
    assert agent.stdout is not None
    output = agent.stdout.fileno()
    ended = os.pidfd_open(agent.pid) if hasattr(os, "pidfd_open") else None
    watched = [output] if ended is None else [output, ended]
    while watched:
        ready, _, _ = select.select(watched, [], [], POLL_S if ended is None else None)
        if output in ready:
            if not (data := os.read(output, CHUNK)):
                watched.remove(output)
                if ended is None:
                    agent.wait()
            log.write(data)
            if log.num_bytes > max_bytes:
                return True
        elif (ended in ready) if ended is not None else agent.poll() is not None:
            return False  # whatever the agent wrote has been read; others may hold its output open
    return False


def left_processes(session: int, alone: bool) -> list[str]:
    """Names of the processes that the agent left: of its session, or all others where the sandbox
    is theirs alone."""
    excluded = {1, os.getpid(), os.getppid()}
    names = []
    for pid in filter(str.isdigit, os.listdir("/proc") if os.path.isdir("/proc") else ()):
        try:
            with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
                head, _, tail = file.read().rpartition(")")
        except OSError:
            continue  # it has ended
        state, _, _, of_session = tail.split()[:4]
        if state not in "ZX" and int(pid) not in excluded and (alone or int(of_session) == session):
            names.append(head.partition("(")[2])
    return names


def main() -> None:
    with open(sys.argv[1], encoding="utf-8") as file:
        report = run(json.load(file))
    print(json.dumps(report), flush=True)  # noqa: T201  the report is this program's output
    os._exit(0)  # without waiting for connections that are still open


if __name__ == "__main__":
    main()
