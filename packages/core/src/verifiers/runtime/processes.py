"""Killable worker processes: plain data in, a number out, a deadline on every call.

For algebra, code or unbounded pattern matching on model text: isolated reward functions
(``Rubric.add_reward_func(..., isolated=True)``), math verification and the scorers of Reasoning Gym
run here. At the deadline of a call its process is killed with its children; the next call gets a
new process. No alarm signals are used in this process.

This is not a sandbox: functions run with the rights of this process. It protects against functions
that hang or crash.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pickle
import select
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Hashable, Mapping
from pathlib import Path
from time import monotonic
from typing import Any

from verifiers.errors import ConfigError, ScoringError
from verifiers.runtime.calls import PerLoop
from verifiers.runtime.worker_threads import call_in_thread, workers

WORKER = Path(__file__).with_name("process_main.py")
MAX_ANSWER_BYTES = 16 << 20
START_LIMIT_S = 60.0
"""Bound on starting a process, importing the function and running the initializer; not part of a
call's own limit."""


class ProcessPool:
    """Worker processes, started on demand and reused; at most ``max_processes`` at a time (default:
    one per core).

    Each process runs ``initializer(*initargs)`` once, before its first call. All of these must be
    importable.
    """

    def __init__(
        self,
        max_processes: int | None = None,
        initializer: Callable[..., object] | None = None,
        initargs: tuple[Hashable, ...] = (),
    ):
        limit = max_processes or max(2, os.cpu_count() or 1)
        self._initializer = (initializer, initargs)
        self._free = threading.BoundedSemaphore(limit)
        self._turn = asyncio.Semaphore(limit)
        self._idle: list[_Process] = []
        self._busy: set[_Process] = set()
        self._lock = threading.Lock()

    @property
    def num_processes(self) -> int:
        """Number of live processes, idle or busy."""
        return len(self._idle) + len(self._busy)

    async def run(
        self,
        function: Callable[..., object],
        kwargs: Mapping[str, object],
        limit_s: float,
        name: str,
    ) -> Any:
        """``call`` from the event loop; calls queue on the loop instead of blocking threads."""
        async with self._turn:
            return await call_in_thread(self.call, function, kwargs, limit_s, name)

    def call(
        self,
        function: Callable[..., object],
        kwargs: Mapping[str, object],
        limit_s: float,
        name: str,
    ) -> Any:
        """``function(**kwargs)``, blocking. ``limit_s`` counts from the function's start.

        *Raises* TimeoutError at the deadline; ScoringError when the arguments are not plain data,
        the process died or the function raised (the message contains type and text).
        """
        try:
            call = pickle.dumps((*self._initializer, function, dict(kwargs)))
        except (pickle.PicklingError, TypeError, AttributeError, RecursionError) as error:
            raise ScoringError(
                f"{name!r} is isolated, so its arguments must be plain data: {error}", function=name
            ) from error
        with self._free:
            process = self._take()
            try:
                answer = process.exchange(pickle.dumps((sys.path, limit_s, call)), limit_s)
            except BaseException:  # the process still runs the call: it is ended; raised again
                process.kill()
                raise
            finally:
                with self._lock:
                    self._busy.discard(process)
                    if process.alive:
                        self._idle.append(process)
        if answer is None:
            raise ScoringError(
                f"the worker process of {name!r} died (out of memory or CPU time?)", function=name
            )
        if "error" in answer:
            raise ScoringError(
                f"{name!r} raised {answer['error']}: {answer['message']}", function=name
            )
        return answer["value"]

    def close(self) -> None:
        """Kill all processes; busy processes are reaped by the threads that wait for them."""
        with self._lock:
            idle, self._idle = self._idle, []
            busy = list(self._busy)
        for process in idle:
            process.kill()
        for process in busy:
            process.signal_kill()

    def _take(self) -> _Process:
        with self._lock:
            process = self._idle.pop() if self._idle else _Process()
            self._busy.add(process)
        return process


def process_pool(
    max_processes: int | None = None,
    initializer: Callable[..., object] | None = None,
    initargs: tuple[Hashable, ...] = (),
) -> ProcessPool:
    """The running loop's pool with these settings, created on first use; its processes end with the
    loop.

    Processes without an initializer are cheap to start, so they also end when the loop's worker
    threads go idle.
    """
    pools = _POOLS.here()
    key = (max_processes, initializer, initargs)
    if (pool := pools.get(key)) is None:
        pool = pools[key] = ProcessPool(max_processes, initializer, initargs)
        if initializer is None:
            workers().on_idle.append(pool.close)
    return pool


async def _close_all(pools: dict[Hashable, ProcessPool]) -> None:
    for pool in pools.values():
        pool.close()


_POOLS: PerLoop[dict[Hashable, ProcessPool]] = PerLoop(dict, _close_all)


class _Process:
    def __init__(self) -> None:
        self.alive = True
        self._popen = subprocess.Popen(
            [sys.executable, "-P", str(WORKER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )

    def exchange(self, message: bytes, limit_s: float) -> dict[str, object] | None:
        """Send a message and wait for its answer; None when the process died. *Raises*
        TimeoutError."""
        stdin = self._popen.stdin
        assert stdin is not None
        try:
            stdin.write(struct.pack("<I", len(message)) + message)
            stdin.flush()
        except (OSError, ValueError):
            self.kill()
            return None
        answer = self._receive(START_LIMIT_S)
        return self._receive(limit_s) if answer is not None and "started" in answer else answer

    def _receive(self, limit_s: float) -> dict[str, object] | None:
        deadline = monotonic() + limit_s
        header = self._read(4, deadline, limit_s)
        size = struct.unpack("<I", header)[0] if len(header) == 4 else MAX_ANSWER_BYTES + 1
        body = self._read(size, deadline, limit_s) if size <= MAX_ANSWER_BYTES else b""
        if not body:
            self.kill()
            return None
        answer: dict[str, object] = json.loads(body)
        return answer

    def _read(self, size: int, deadline: float, limit_s: float) -> bytes:
        stdout = self._popen.stdout
        assert stdout is not None
        poll, parts = select.poll(), bytearray()
        poll.register(stdout, select.POLLIN | select.POLLHUP)
        while len(parts) < size:
            if not poll.poll(max(0.0, deadline - monotonic()) * 1000):
                self.kill()
                raise TimeoutError(f"no result within {limit_s:g} s; the process was killed")
            part = os.read(stdout.fileno(), size - len(parts))
            if not part:
                return b""
            parts += part
        return bytes(parts)

    def signal_kill(self) -> None:
        """Send SIGKILL to the process and its children; the thread that uses the
        process reaps it."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._popen.pid, signal.SIGKILL)

    def kill(self) -> None:
        """Kill the process and its children, then reap it; a second call does nothing."""
        if not self.alive:
            return
        self.alive = False
        self.signal_kill()
        self._popen.wait()
        for stream in (self._popen.stdin, self._popen.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()


def require_isolatable(function: Callable[..., object], name: str) -> None:
    """*Raises* ConfigError for a function that a worker process could not import."""
    try:
        pickle.dumps(function)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{name!r} cannot run isolated because it is not importable ({error}); define it at the"
            " top of a module",
            function=name,
        ) from error
    if getattr(function, "__module__", None) == "__main__":
        raise ConfigError(
            f"{name!r} cannot run isolated from the main script; move it to a module that can be"
            " imported",
            function=name,
        )
