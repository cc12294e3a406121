"""A worker process: ``python -m verifiers.runs.workers FD PULSE_FD SILENT_S``, started by
``channels.ProcessChannel``.

The descriptors are ends of socket pairs, for messages and for the pulse; stdin is a pipe that the
parent never writes to. The process ends when their other ends close, however its parent ended and
whatever it is doing then: a small process beside it sees to that.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import logging
import os
import select
import signal
import socket
import sys
import threading
import time

from verifiers.errors import WorkerLost
from verifiers.runs.workers.channels import GRACE_S, StreamChannel
from verifiers.runs.workers.serving import serve

PULSE_S = 0.5


async def _main(descriptor: int) -> None:
    channel = await StreamChannel.over(socket.socket(fileno=descriptor))
    try:
        with contextlib.suppress(WorkerLost):  # the caller ended before the first message
            await serve(channel)
    finally:
        await channel.close()


def beat(pulse: socket.socket, silent_s: float) -> None:
    """Tell the pool that this process runs, until its end closes.

    An interpreter that is held cannot: ``faulthandler``, which needs none, prints what holds it
    before the pool kills the process after ``silent_s``.
    """
    with contextlib.suppress(OSError):
        while pulse.send(b"."):
            faulthandler.dump_traceback_later(0.75 * silent_s, file=2)
            time.sleep(PULSE_S)


def start_watchdog() -> None:
    """Start a process that kills this one and its children when stdin closes, if they have not ended
    ``GRACE_S`` later; it ends with this one.

    It needs nothing of this process, which may be stopped, or its interpreter held.
    """
    alive, _ = os.pipe()  # the second end is open as long as this process
    if child := os.fork():
        os.waitpid(child, 0)
        os.close(alive)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.close(null)
        return
    if os.fork():  # it is no child, which code of authors could wait for
        os._exit(0)
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (1, 2):
        os.dup2(null, stream)
    os.closerange(3, alive)
    os.closerange(alive + 1, os.sysconf("SC_OPEN_MAX"))
    ends = select.poll()
    for end in (0, alive):
        ends.register(end, 0)  # a closed pipe is always reported
    if all(end != alive for end, _ in ends.poll()):
        ends.unregister(0)
        if not ends.poll(GRACE_S * 1000):
            os.killpg(os.getpgrp(), signal.SIGKILL)
    os._exit(0)


if __name__ == "__main__":
    start_watchdog()
    logging.basicConfig(level=os.environ.get("VF_LOG_LEVEL", "WARNING").upper(), stream=sys.stderr)
    descriptor, pulse_descriptor, silent_s = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    beats = (socket.socket(fileno=pulse_descriptor), silent_s)
    threading.Thread(target=beat, args=beats, name="pulse", daemon=True).start()
    asyncio.run(_main(descriptor))
