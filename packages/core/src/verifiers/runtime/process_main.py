"""The main program of a worker process: read pickled calls from stdin, write their results to
stdout as JSON.

It runs as a script and does not import the package by itself. Results are JSON, so that a function
corrupted by its input cannot execute code in the parent; printed output is discarded. When stdin
closes because the parent has ended, the process and its children are killed, also during a call. On
Linux the kernel does that; elsewhere the CPU time limit ends a function that never releases the
interpreter lock.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import pickle
import select
import signal
import struct
import sys
import threading
from typing import Any, BinaryIO


def read_message(stream: BinaryIO) -> bytes | None:
    """Read the next length-prefixed message; None at the end of the stream."""
    header = stream.read(4)
    return stream.read(struct.unpack("<I", header)[0]) if len(header) == 4 else None


def write_message(stream: BinaryIO, text: bytes) -> None:
    stream.write(struct.pack("<I", len(text)) + text)
    stream.flush()


def bound_cpu_time(limit_s: float) -> None:
    """Have the kernel end this process a little after ``limit_s`` more seconds of CPU time."""
    try:
        import resource
    except ImportError:  # not on this platform; the parent's deadline still applies
        return
    used = resource.getrusage(resource.RUSAGE_SELF)
    soft = math.ceil(used.ru_utime + used.ru_stime + limit_s) + 2
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    resource.setrlimit(
        resource.RLIMIT_CPU, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard)
    )


def plain(value: object) -> Any:
    """A numpy scalar as a Python number, an array as a list, other objects as their repr."""
    for method in ("tolist", "item"):
        if hasattr(value, method):
            return getattr(value, method)()
    return repr(value)


initialized: list[Any] = []
"""Initializers that have run in this process: at most one."""


def answer(message: bytes, results: BinaryIO) -> dict[str, Any]:
    """Make one call and return its value or error; sends ``started`` after imports and
    initialization."""
    try:
        path, limit_s, call = pickle.loads(message)
        sys.path[:] = path
        initializer, initargs, function, kwargs = pickle.loads(call)
        if initializer is not None and initializer not in initialized:
            initializer(*initargs)
            initialized.append(initializer)
        bound_cpu_time(limit_s)
        write_message(results, b'{"started": true}')
        killed_with_parent(True)
        try:
            return {"value": function(**kwargs)}
        finally:
            killed_with_parent(False)
    except BaseException as error:  # noqa: BLE001  returned to the parent, which raises a ScoringError
        return {"error": type(error).__name__, "message": str(error)[:2000]}


def killed_with_parent(on: bool) -> None:
    """Have the kernel kill the process group at any event on stdin, such as its closing (Linux
    only)."""
    if hasattr(fcntl, "F_SETSIG") and os.getpgrp() == os.getpid():
        fcntl.fcntl(0, fcntl.F_SETOWN, -os.getpid())
        fcntl.fcntl(0, fcntl.F_SETSIG, signal.SIGKILL)
        flags = fcntl.fcntl(0, fcntl.F_GETFL)
        fcntl.fcntl(0, fcntl.F_SETFL, flags | os.O_ASYNC if on else flags & ~os.O_ASYNC)


def end_with_parent() -> None:
    """Wait until stdin is closed, then kill the process group."""
    parent = select.poll()
    parent.register(0, 0)  # a closed pipe is always reported
    parent.poll()
    os.killpg(os.getpid(), signal.SIGKILL)


def main() -> None:
    threading.Thread(target=end_with_parent, daemon=True).start()
    results = os.fdopen(os.dup(1), "wb")
    sink = os.open(os.devnull, os.O_WRONLY)
    os.dup2(sink, 1)
    os.dup2(sink, 2)
    while (message := read_message(sys.stdin.buffer)) is not None:
        outcome = answer(message, results)
        try:
            text = json.dumps(outcome, default=plain).encode()
        except (TypeError, ValueError, RecursionError) as error:
            text = json.dumps(
                {"error": type(error).__name__, "message": str(error)[:2000]}
            ).encode()
        write_message(results, text)


if __name__ == "__main__":
    main()
