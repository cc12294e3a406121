"""A worker process: ``python -m verifiers.runs.workers FD``, started by ``channels.ProcessChannel``.

FD is one end of a socket pair. The process exits when the other end closes, so it never outlives its parent.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import sys

from verifiers.errors import WorkerLost
from verifiers.runs.workers.channels import StreamChannel
from verifiers.runs.workers.serving import serve


async def _main(descriptor: int) -> None:
    channel = await StreamChannel.over(socket.socket(fileno=descriptor))
    try:
        with contextlib.suppress(WorkerLost):  # the caller ended before the first message
            await serve(channel)
    finally:
        await channel.close()


if __name__ == "__main__":
    logging.basicConfig(level=os.environ.get("VF_LOG_LEVEL", "WARNING").upper(), stream=sys.stderr)
    asyncio.run(_main(int(sys.argv[1])))
