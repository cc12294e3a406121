"""Capture stdout and stderr, up to a bound.

File descriptors 1 and 2 become pipes, so output of child processes and C libraries is captured too.
A thread drains them into a memory file shared with the host, which can read partial output after a
time-out.
"""

from __future__ import annotations

import io
import mmap
import os
import select
import sys
import threading

from . import frames

CHUNK = 65536
MAX_LAST_READS = 64


class Output:
    """Capture both streams of this process from construction on."""

    def __init__(self, area_fd: int, max_bytes: int):
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._pipes = [self._redirect(1), self._redirect(2)]
        size = frames.OUTPUT.size + 2 * max_bytes
        self._area = (
            mmap.mmap(area_fd, size) if os.fstat(area_fd).st_size >= size else mmap.mmap(-1, size)
        )
        os.close(area_fd)
        self._stored = [0, 0]
        self._seen = [0, 0]
        # one per thread: a poll object must not be shared
        self._polls = [select.poll(), select.poll()]
        for poll in self._polls:
            for fd in self._pipes:
                poll.register(fd, select.POLLIN)
        sys.stdout = _text(1)
        sys.stderr = _text(2)
        threading.Thread(target=self._drain, name="output", daemon=True).start()

    @staticmethod
    def _redirect(fd: int) -> int:
        ours, theirs = os.pipe()
        os.dup2(theirs, fd, inheritable=True)
        os.close(theirs)
        os.set_blocking(ours, False)
        return ours

    def begin(self) -> None:
        """Discard the captured output."""
        with self._lock:
            self._stored, self._seen = [0, 0], [0, 0]
            frames.OUTPUT.pack_into(self._area, 0, 0, 0)

    def end(self) -> tuple[list[str], bool]:
        """Texts of stdout and stderr since ``begin``, and whether some output was dropped."""
        for stream in (sys.stdout, sys.stderr):
            if not stream.closed:
                stream.flush()
        with self._lock:
            for _ in range(MAX_LAST_READS):
                if not self._read(self._polls[0].poll(0)):
                    break
            return [self._text(number) for number in (0, 1)], self._stored != self._seen

    def _text(self, number: int) -> str:
        if not self._stored[number]:
            return ""
        start = frames.OUTPUT.size + number * self._max_bytes
        text = self._area[start : start + self._stored[number]].decode("utf-8", "replace")
        dropped = self._seen[number] - self._stored[number]
        return f"{text}\n[output cut: {dropped} bytes more]" if dropped else text

    def _drain(self) -> None:
        while True:
            ready = self._polls[1].poll()
            with self._lock:
                self._read(ready)

    def _read(self, ready: list[tuple[int, int]]) -> bool:
        any_read = False
        for fd, _ in ready:
            try:
                chunk = os.read(fd, CHUNK)
            except BlockingIOError:
                continue
            if not chunk:  # all writers closed the pipe
                for poll in self._polls:
                    poll.unregister(fd)
                continue
            any_read = True
            self._store(self._pipes.index(fd), chunk)
        return any_read

    def _store(self, number: int, chunk: bytes) -> None:
        stored = self._stored[number]
        room = min(len(chunk), self._max_bytes - stored)
        start = frames.OUTPUT.size + number * self._max_bytes + stored
        self._area[start : start + room] = chunk[:room]
        self._stored[number] += room
        self._seen[number] += len(chunk)
        frames.OUTPUT.pack_into(self._area, 0, *self._stored)


def _text(fd: int) -> io.TextIOWrapper:
    raw = io.FileIO(fd, "w", closefd=False)
    return io.TextIOWrapper(raw, "utf-8", "backslashreplace", write_through=True)
