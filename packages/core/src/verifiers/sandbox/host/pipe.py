"""A line that is the input and output of a command: what runs a keeper in a container.

The command's input ends when this process does, however it ends; the keeper then ends and the container with it. What
is to be done after that (remove the container) is done by a shell that waits for it, so it does not need this process.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import tempfile
from collections import deque
from typing import IO, Any

from verifiers.errors import SandboxUnavailable
from verifiers.sandbox.guest import frames
from verifiers.sandbox.host.remote_processes import END_S, MAX_HEAD_BYTES

AFTER = 'after=$1; shift; "$@"; code=$?; eval "$after" </dev/null >/dev/null 2>&1; exit $code'
KEPT_WORDS = 400
_QUIET: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)


class Pipe:
    """A ``Line``."""

    def __init__(self, process: asyncio.subprocess.Process, errors: IO[bytes], max_body_bytes: int, after: str):
        assert process.stdin is not None
        assert process.stdout is not None
        self._process, self._errors, self._after = process, errors, after
        self._input, self._output = process.stdin, process.stdout
        self._max_body_bytes = max_body_bytes
        self._waiting: deque[asyncio.Future[tuple[dict[str, Any], bytes]]] = deque()
        self._ended: str | None = None
        self._reading = asyncio.create_task(self._read())

    @classmethod
    async def open(cls, argv: list[str], after: str, max_body_bytes: int, name: str) -> Pipe:
        """``after`` is a shell's command. *Raises* SandboxUnavailable with the command's last words."""
        errors = tempfile.TemporaryFile()  # noqa: SIM115  (closed by close)
        process = await asyncio.create_subprocess_exec(
            *["/bin/sh", "-c", AFTER, "sh", after, *argv],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,
        )
        pipe = cls(process, errors, max_body_bytes, after)
        try:
            await pipe.order({"op": "kill"})
        except ConnectionResetError as error:
            await pipe.close()
            raise SandboxUnavailable(f"{name} could not start a sandbox: {error}", names=[name]) from error
        except BaseException:
            await pipe.close()
            raise
        return pipe

    async def order(self, header: dict[str, Any], body: bytes = b"") -> tuple[dict[str, Any], bytes]:
        if self._ended is not None:
            raise ConnectionResetError(self._ended)
        reply: asyncio.Future[tuple[dict[str, Any], bytes]] = asyncio.get_running_loop().create_future()
        self._waiting.append(reply)
        self._input.write(frames.pack(header, body))
        with contextlib.suppress(OSError):  # then the reading ends too, and says why
            await self._input.drain()
        return await reply

    async def close(self) -> None:
        """Politely, then not."""
        if self._errors.closed:
            return
        self._fail("closed")
        self._input.close()
        try:
            await asyncio.wait_for(self._process.wait(), END_S)
        except TimeoutError:
            ending = await asyncio.create_subprocess_exec("/bin/sh", "-c", self._after, **_QUIET)
            await ending.wait()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            await self._process.wait()
        finally:
            self._reading.cancel()
            self._errors.close()

    async def _read(self) -> None:
        try:
            while True:
                lengths = await self._output.readexactly(frames.LENGTHS.size)
                header_size, body_size = frames.LENGTHS.unpack(lengths)
                if header_size > MAX_HEAD_BYTES or body_size > self._max_body_bytes or not self._waiting:
                    return self._fail("it sent what is no reply")
                header = json.loads(await self._output.readexactly(header_size))
                body = await self._output.readexactly(body_size)
                reply = self._waiting.popleft()
                if not reply.done():
                    reply.set_result((dict(header), body))
        except (asyncio.IncompleteReadError, OSError):
            await self._process.wait()
            self._fail(self._last_words())
        except (ValueError, TypeError, RecursionError):
            self._fail("it sent what is no reply")

    def _fail(self, why: str) -> None:
        self._ended = self._ended or why
        while self._waiting:
            reply = self._waiting.popleft()
            if not reply.done():
                reply.set_exception(ConnectionResetError(self._ended))

    def _last_words(self) -> str:
        if self._errors.closed:
            return "closed"
        self._errors.seek(0)
        lines = self._errors.read(2**16).decode("utf-8", "replace").strip().splitlines()
        return lines[-1][:KEPT_WORDS] if lines else f"its command ended with {self._process.returncode}"
