"""A worker process: ``python -m verifiers.runs.workers FD PULSE_FD SILENT_S``, started by
``channels.ProcessChannel``.

The descriptors are ends of socket pairs, for messages and for the pulse. The process exits when
their other ends close, however its parent ended and whatever it is doing then.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import faulthandler
import logging
import os
import signal
import socket
import sys
import threading
import time

from verifiers.errors import WorkerLost
from verifiers.runs.workers.channels import GRACE_S, StreamChannel
from verifiers.runs.workers.serving import serve

PULSE_S = 0.5
PR_SET_PDEATHSIG = 1  # linux/prctl.h


async def _main(descriptor: int) -> None:
    channel = await StreamChannel.over(socket.socket(fileno=descriptor))
    try:
        with contextlib.suppress(WorkerLost):  # the caller ended before the first message
            await serve(channel)
    finally:
        await channel.close()


def beat(pulse: socket.socket, silent_s: float) -> None:
    """Tell the pool that this process runs, until its end closes; then kill what has not ended
    after ``GRACE_S``.

    An interpreter that is held for ``silent_s`` cannot do either: ``faulthandler``, which needs
    none, ends the process then, with a traceback of what holds it.
    """
    with contextlib.suppress(OSError):
        while pulse.send(b"."):
            faulthandler.dump_traceback_later(silent_s, exit=True, file=2)
            time.sleep(PULSE_S)
    time.sleep(GRACE_S)
    os.killpg(os.getpid(), signal.SIGKILL)


def continue_with_the_end_of_the_parent() -> None:
    """Have the kernel continue this process, if it is stopped, when its parent ends
    (Linux only)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGCONT)


if __name__ == "__main__":
    logging.basicConfig(level=os.environ.get("VF_LOG_LEVEL", "WARNING").upper(), stream=sys.stderr)
    descriptor, pulse_descriptor, silent_s = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    continue_with_the_end_of_the_parent()
    beats = (socket.socket(fileno=pulse_descriptor), silent_s)
    threading.Thread(target=beat, args=beats, name="pulse", daemon=True).start()
    asyncio.run(_main(descriptor))
