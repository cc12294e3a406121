"""The ``Sandbox`` of a rollout, independent of how the worker is isolated (``Processes``).

Guarantees: after a time-out every process of the sandbox is killed and a new interpreter is ready;
a worker that dies is replaced and the result names the cause; a worker's answers are validated;
after ``close`` no process or file remains. Files are read and written by the worker: the host never
resolves a path or link of the sandbox.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import tempfile
from collections.abc import Mapping
from typing import Protocol

from verifiers.errors import SandboxError, SandboxLimit, SandboxUnavailable
from verifiers.sandbox.guest import frames, kernel
from verifiers.sandbox.guest.interpreter import MAX_TEXT
from verifiers.sandbox.host.channel import Answer, Channel, WorkerGone
from verifiers.sandbox.protocol import ExecResult, SandboxSpec

START_S = 60.0
MAX_READ_BYTES = 2**26
LIMITS = frozenset("wall memory cpu file processes output killed".split())
MAX_ESCAPED_BYTES = 6
"""Upper bound on the bytes of JSON per byte of text."""


class Processes(Protocol):
    """Interface that a backend implements for a sandbox: start and kill its processes."""

    async def start(self, connection: socket.socket, area_fd: int) -> None:
        """Kill running processes, then start a worker on this connection; both descriptors are
        duplicated."""
        ...

    def kill(self) -> None:
        """Kill every process of the sandbox; its files stay."""
        ...

    async def ended(self) -> None:
        """Wait, after ``kill``, until the output area is complete."""
        ...

    async def cause(self) -> str | None:
        """Why the last worker ended: a limit of ``LIMITS``, None when unknown. The output area is
        then complete."""
        ...

    async def clear(self) -> None:
        """``kill``, and delete all files."""
        ...

    async def close(self) -> None:
        """``clear``, and release all resources. A second call does nothing."""
        ...


class Session:
    """A ``Sandbox``. Its state is "open", "expired" (after ``wall_s``) or "closed"."""

    def __init__(self, spec: SandboxSpec, processes: Processes):
        self._spec = spec
        self._processes = processes
        self._lock = asyncio.Lock()
        self._channel: Channel | None = None
        self._area = _OutputArea(spec.max_output_bytes)
        self._state = "open"
        self._deadline = asyncio.get_running_loop().time() + spec.wall_s
        self._expiry = asyncio.get_running_loop().call_at(self._deadline, self._expire)

    @classmethod
    async def open(
        cls, spec: SandboxSpec, processes: Processes, start_s: float = START_S
    ) -> Session:
        """*Raises* SandboxUnavailable when no worker answers."""
        session = cls(spec, processes)
        try:
            await asyncio.wait_for(session._answer({"op": "ping"}), start_s)
        except (WorkerGone, TimeoutError) as error:
            reason = await processes.cause() or str(error) or f"no answer in {start_s:g} s"
            raise SandboxUnavailable(f"The sandbox did not start: {reason}") from error
        finally:
            if session._channel is None:
                await session.close()
        return session

    async def exec(self, code_or_argv: str | list[str], *, timeout_s: float) -> ExecResult:
        header: dict[str, object]
        if isinstance(code_or_argv, str):
            header, body = {"op": "python"}, code_or_argv.encode("utf-8", "surrogatepass")
        else:
            header, body = {"op": "command", "argv": list(code_or_argv)}, b""
        async with self._lock:
            await self._usable()
            remaining_s = self._deadline - asyncio.get_running_loop().time()
            try:
                answer, _ = await asyncio.wait_for(
                    self._answer(header, body), min(timeout_s, remaining_s)
                )
            except TimeoutError:
                return await self._timed_out()
            except WorkerGone as gone:
                return await self._died(gone)
        return _result(answer)

    async def read_file(self, path: str) -> bytes:
        answer, content = await self._file({"op": "read", "path": os.fspath(path)})
        if answer.limit == "file":
            raise SandboxLimit(
                f"{path!r} in the sandbox is {answer.message}", limit="file", path=str(path)
            )
        return content

    async def write_file(self, path: str, data: bytes | str) -> None:
        await self._file(
            {"op": "write", "path": os.fspath(path)},
            data.encode("utf-8", "surrogatepass") if isinstance(data, str) else data,
        )

    async def restart(self) -> None:
        async with self._lock:
            await self._usable()
            self._drop_channel()
            self._processes.kill()
            await self._processes.ended()
            await self._replace()

    async def reset(self) -> None:
        async with self._lock:
            await self._usable()
            self._drop_channel()
            await self._processes.clear()

    async def close(self) -> None:
        if self._state == "closed":
            return
        self._state = "closed"
        self._expiry.cancel()
        self._drop_channel()
        try:
            await self._processes.close()
        finally:
            self._area.close()

    # --- one request

    async def _answer(self, header: dict[str, object], body: bytes = b"") -> tuple[Answer, bytes]:
        """Send a request to the worker, started if necessary; cancellation kills every process.
        *Raises* WorkerGone."""
        channel = self._channel or await self._start()
        try:
            return await channel.request(header, body)
        except WorkerGone:
            self._drop_channel()
            raise
        except BaseException:  # a time-out, a cancellation: the worker is ended; raised again
            self._drop_channel()
            self._processes.kill()
            raise

    async def _start(self) -> Channel:
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                await self._processes.start(theirs, self._area.fd)
            self._channel = await Channel.open(ours, max_header_bytes(self._spec), MAX_READ_BYTES)
        except BaseException:  # also when cancelled: close the socket; raised again
            ours.close()
            raise
        return self._channel

    async def _file(self, header: dict[str, object], body: bytes = b"") -> tuple[Answer, bytes]:
        async with self._lock:
            await self._usable()
            try:
                answer, content = await asyncio.wait_for(self._answer(header, body), START_S)
            except (WorkerGone, TimeoutError) as error:
                raise SandboxError(
                    f"The sandbox ended while {header['path']!r} was {header['op']}: {error}"
                ) from error
        if answer.errno is not None and answer.limit is None:
            raise OSError(answer.errno, answer.message or os.strerror(answer.errno), header["path"])
        return answer, content

    # --- end of a worker

    async def _timed_out(self) -> ExecResult:
        await self._processes.ended()
        stdout, stderr, truncated = self._area.texts()
        await self._replace()
        return ExecResult(stdout, stderr, timed_out=True, truncated=truncated, limit="wall")

    async def _died(self, gone: WorkerGone) -> ExecResult:
        cause = await self._processes.cause() or "killed"
        stdout, stderr, truncated = self._area.texts()
        await self._replace()
        error = f"The interpreter ended ({cause}): {gone}"
        return ExecResult(stdout, stderr, error=error, truncated=truncated, limit=cause)

    async def _replace(self) -> None:
        """Start a new worker; its first answer implies that all processes of the previous worker
        have ended."""
        self._area.renew()
        if self._state == "open":
            with contextlib.suppress(WorkerGone, TimeoutError):  # the next call raises the error
                await asyncio.wait_for(self._answer({"op": "ping"}), START_S)

    async def _usable(self) -> None:
        if self._state == "closed":
            raise SandboxError("The sandbox is closed")
        if self._state == "expired":
            raise SandboxLimit(
                f"The sandbox ended after its {self._spec.wall_s:g} s (wall_s)", limit="wall"
            )

    def _expire(self) -> None:
        self._state = "expired"
        self._drop_channel()
        self._processes.kill()

    def _drop_channel(self) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()


class _OutputArea:
    """Memory shared with the worker, which writes its output there; read when the worker cannot
    answer."""

    def __init__(self, max_bytes: int):
        self._max_bytes = max_bytes
        self.fd = self._create()

    def _create(self) -> int:
        size = frames.OUTPUT.size + 2 * self._max_bytes
        if hasattr(os, "memfd_create"):
            return kernel.memory_file("sandbox-output", size)
        fd, name = tempfile.mkstemp()  # not Linux: a file that is unlinked immediately
        os.unlink(name)
        os.ftruncate(fd, size)
        return fd

    def texts(self) -> tuple[str, str, bool]:
        """stdout, stderr and whether one is full."""
        outputs = frames.outputs_in(self.fd, self._max_bytes)
        stdout, stderr = (output.decode("utf-8", "replace") for output in outputs)
        return stdout, stderr, max(map(len, outputs)) == self._max_bytes

    def renew(self) -> None:
        """Replace the memory: a worker that is still ending must not write into that of its
        successor."""
        os.close(self.fd)
        self.fd = self._create()

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def _result(answer: Answer) -> ExecResult:
    limit = answer.limit if answer.limit in LIMITS else None
    return ExecResult(
        answer.stdout,
        answer.stderr,
        answer.value,
        answer.error,
        answer.exit_code,
        truncated=answer.truncated,
        limit=limit or ("output" if answer.truncated else None),
    )


def max_header_bytes(spec: SandboxSpec) -> int:
    """Largest header of an answer."""
    return MAX_ESCAPED_BYTES * (2 * spec.max_output_bytes + 8 * MAX_TEXT) + 4096


def worker_settings(spec: SandboxSpec) -> dict[str, object]:
    """Settings of a worker, a subset of those of a supervisor."""
    return {"max_output_bytes": spec.max_output_bytes, "max_file_bytes": MAX_READ_BYTES}


def supervisor_settings(spec: SandboxSpec) -> dict[str, object]:
    """Settings of a supervisor that a spec has."""
    names = "memory_mb file_mb num_processes cpu_s working_dir".split()
    fields = {name: getattr(spec, name) for name in names}
    return {**worker_settings(spec), **fields, "env": dict(spec.env)}


async def reported_by(control: socket.socket, limit_s: float) -> dict[str, object]:
    """What a supervisor on this machine says of a worker's end; {} when it is gone."""
    try:
        reading = asyncio.get_running_loop().sock_recv(control, 4096)
        report: dict[str, object] = json.loads(await asyncio.wait_for(reading, limit_s))
    except (OSError, ValueError, TimeoutError):
        return {}
    return report


def limit_in(report: Mapping[str, object]) -> str | None:
    """The limit that ended a worker, by a report from a sandbox; None for anything else."""
    cause = report.get("cause")
    return cause if cause in LIMITS else None
