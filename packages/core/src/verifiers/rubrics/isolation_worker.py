"""The program of a killable worker process: reads pickled calls from stdin, writes numbers as JSON to stdout.

It runs as a script, imports nothing of ours by itself, and believes only its parent. What goes back is JSON, so that
a function corrupted by what it was fed cannot make the parent execute anything. Whatever a function prints is
discarded. It ends when its stdin closes, and bounds its own CPU time in case its parent is gone.
"""

from __future__ import annotations

import json
import math
import os
import pickle
import struct
import sys
from typing import Any, BinaryIO


def read_message(stream: BinaryIO) -> bytes | None:
    """The next length-prefixed message; None at the end of the stream."""
    header = stream.read(4)
    return stream.read(struct.unpack("<I", header)[0]) if len(header) == 4 else None


def write_message(stream: BinaryIO, text: bytes) -> None:
    stream.write(struct.pack("<I", len(text)) + text)
    stream.flush()


def bound_cpu_time(limit_s: float) -> None:
    """Let the kernel end this process a little after ``limit_s`` more seconds of computing."""
    try:
        import resource
    except ImportError:  # not on this platform; the parent's deadline remains
        return
    used = resource.getrusage(resource.RUSAGE_SELF)
    soft = math.ceil(used.ru_utime + used.ru_stime + limit_s) + 2
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    resource.setrlimit(resource.RLIMIT_CPU, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))


def plain(value: Any) -> Any:
    """A numpy scalar as the Python number it holds; arrays as lists."""
    for method in ("tolist", "item"):
        if hasattr(value, method):
            return getattr(value, method)()
    return repr(value)


def answer(message: bytes, results: BinaryIO) -> dict[str, Any]:
    """Make one call and describe its outcome; says ``started`` once everything is imported."""
    try:
        path, limit_s, call = pickle.loads(message)
        sys.path[:] = path
        function, kwargs = pickle.loads(call)
        bound_cpu_time(limit_s)
        write_message(results, b'{"started": true}')
        return {"value": function(**kwargs)}
    except BaseException as error:  # noqa: BLE001  reported to the parent, which judges it
        return {"error": type(error).__name__, "message": str(error)[:2000]}


def main() -> None:
    results = os.fdopen(os.dup(1), "wb")
    sink = os.open(os.devnull, os.O_WRONLY)
    os.dup2(sink, 1)
    os.dup2(sink, 2)
    while (message := read_message(sys.stdin.buffer)) is not None:
        outcome = answer(message, results)
        try:
            text = json.dumps(outcome, default=plain).encode()
        except (TypeError, ValueError, RecursionError) as error:
            text = json.dumps({"error": type(error).__name__, "message": str(error)[:2000]}).encode()
        write_message(results, text)


if __name__ == "__main__":
    main()
