"""Transport of worker messages: the ``Channel`` protocol, and its two ends for worker processes on
this machine.

A worker process is a fresh interpreter (not forked, so it inherits no lock, thread or event loop).
It uses a separate socket, so output that an environment prints never mixes with messages. When
either end dies the other reads the end of the stream. A second socket carries the worker's pulse: a
worker that is stopped, or whose interpreter is held, is killed. A process beside the worker kills it
when it does not end with its run. A rollout that blocks the worker's event loop stops no pulse.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import signal
import socket
import struct
import sys
from collections.abc import Awaitable, Callable
from typing import Protocol

from verifiers.errors import WorkerLost
from verifiers.runs.workers.messages import Message

GRACE_S = 5.0
"""Seconds a worker may take to exit before it is killed."""
SILENT_S = 60.0
"""Seconds without a pulse after which a worker is killed; fewer where a rollout may take fewer."""
MIN_SILENT_S = 15.0
CHECKS = 4
"""Silent parts of ``SILENT_S`` in a row: a part may pass because the caller's own loop was busy."""
_LENGTH = struct.Struct("<Q")


class Channel(Protocol):
    """An end of a connection between a pool and a worker."""

    async def send(self, message: Message) -> None:
        """*Raises* WorkerLost when the other end is closed."""
        ...

    async def receive(self) -> Message:
        """The next message. *Raises* WorkerLost, with the cause, when the other end is closed."""
        ...

    async def close(self) -> None:
        """End the connection and, on the pool's side, the worker."""
        ...


OpenChannel = Callable[[], Awaitable[Channel]]


class StreamChannel:
    """Messages over a socket, each as its length (8 bytes) and its pickle."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self._reader, self._writer = reader, writer

    @classmethod
    async def over(cls, end: socket.socket) -> StreamChannel:
        """A channel over one end of a socket pair."""
        return cls(*await asyncio.open_connection(sock=end))

    async def send(self, message: Message) -> None:
        packed = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        if self._writer.is_closing():  # asyncio logs a warning for every further write
            raise WorkerLost("the other end is gone")
        try:
            # no await between the two: writes of tasks must not interleave
            self._writer.write(_LENGTH.pack(len(packed)))
            self._writer.write(packed)
            await self._writer.drain()
        except ConnectionError as error:
            raise WorkerLost("the other end is gone") from error

    async def receive(self) -> Message:
        try:
            (length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
            message: Message = pickle.loads(await self._reader.readexactly(length))
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise WorkerLost("the other end is gone") from error
        return message

    async def close(self) -> None:
        self._writer.close()


class ProcessChannel(StreamChannel):
    """The pool's end of the channel to a worker process."""

    process: asyncio.subprocess.Process
    _clock: asyncio.Task[None]
    silent_s: float
    was_silent: bool

    @classmethod
    async def open(cls, rollout_limit_s: float | None = None) -> ProcessChannel:
        """Start a worker process for rollouts that take ``rollout_limit_s`` at most."""
        silent_s = min(SILENT_S, max(MIN_SILENT_S, rollout_limit_s or SILENT_S))
        ours, theirs = socket.socketpair()
        heard, pulse = socket.socketpair()
        with theirs, pulse:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                *(
                    *("-P", "-m", "verifiers.runs.workers"),
                    str(theirs.fileno()),
                    str(pulse.fileno()),
                    str(silent_s),
                ),
                pass_fds=[theirs.fileno(), pulse.fileno()],
                stdin=asyncio.subprocess.PIPE,  # its end is that of this process
                stdout=sys.stderr.fileno() if _has_file(sys.stderr) else asyncio.subprocess.DEVNULL,
                start_new_session=True,  # so that only the caller receives a Ctrl-C
            )
        channel = cls(*await asyncio.open_connection(sock=ours))
        channel.process, channel.silent_s, channel.was_silent = process, silent_s, False
        channel._clock = asyncio.create_task(channel._watch(heard, silent_s / CHECKS))
        return channel

    async def _watch(self, heard: socket.socket, check_s: float) -> None:
        """Kill the worker when its pulse stops, once it began; return when the worker ends."""
        reader, writer = await asyncio.open_connection(sock=heard)
        with contextlib.closing(writer):
            num_silent, received = 0, await reader.read(1024)
            while received and num_silent < CHECKS:
                try:
                    async with asyncio.timeout(check_s):
                        received = await reader.read(1024)
                    num_silent = 0
                except TimeoutError:
                    num_silent += 1
        if received:
            self.was_silent = True
            self.kill()

    def kill(self) -> None:
        """Kill the worker and its children; a worker that has ended stays as it is."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)

    async def receive(self) -> Message:
        try:
            return await super().receive()
        except WorkerLost as error:
            code = await self._exit_code()
            if code is not None and code < 0:
                cause = f"was killed by signal {-code}"
            else:
                cause = f"ended with exit code {code}"
            if self.was_silent:
                cause = (
                    f"gave no sign of life for {self.silent_s:g} s (stopped, or its interpreter is held)"
                    " and was killed"
                )
            raise WorkerLost(f"the worker process {self.process.pid} {cause}") from error

    async def close(self) -> None:
        await super().close()
        if await self._exit_code() is None:
            self.kill()
            await self.process.wait()
        self._clock.cancel()

    async def _exit_code(self) -> int | None:
        """The exit code; None when the process has not exited after ``GRACE_S``."""
        try:
            return await asyncio.wait_for(self.process.wait(), GRACE_S)
        except TimeoutError:
            return None


def _has_file(stream: object) -> bool:
    try:
        stream.fileno()  # type: ignore[attr-defined]
    except (AttributeError, OSError, ValueError):
        return False
    return True
