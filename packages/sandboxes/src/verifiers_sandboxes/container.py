"""Base of the container backends: the root file system, the guest init in it, and the connection to
the guest init.

Each backend defines in ``launch`` the command that runs the guest init in a container, and the
clean-up after that command ends. The root consists of host files, read-only, as with
``bubblewrap``: no image is pulled.

The connection is the command's input and output (``Pipe``). The input closes when this process
ends, also by SIGKILL; then the guest init ends, and the container with it. A shell waits for the
command and removes the container, so the clean-up does not depend on this process.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import tempfile
from abc import abstractmethod
from collections import deque
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import IO, Any

from verifiers.errors import SandboxUnavailable
from verifiers.runtime.folders import user_cache_folder
from verifiers.sandbox.guest import frames
from verifiers.sandbox.host import mounts
from verifiers.sandbox.host.mounts import ENVIRONMENT, FILES, RUN_GUEST
from verifiers.sandbox.host.packages import require
from verifiers.sandbox.host.probed import ProbedBackend
from verifiers.sandbox.host.session import Session
from verifiers.sandbox.protocol import SandboxSpec
from verifiers_sandboxes.remote_processes import (
    END_S,
    MAX_HEAD_BYTES,
    InitConnection,
    RemoteProcesses,
    encoded_settings,
    max_reply_bytes,
)

ROOT = "/sandbox"
HOME = f"{ROOT}/home"
SHARED = "/dev/shm"
ROOT_VERSION = 1
"""Version of the root's layout; cached roots of another version are not used."""
FIRST_UID = 2**21
"""First of the user ids that hosts do not assign. Each sandbox has another: the kernel counts
processes per user."""
_uids = itertools.count(random.SystemRandom().randrange(2**28))
CLEAN_UP = 'after=$1; shift; "$@"; code=$?; eval "$after" </dev/null >/dev/null 2>&1; exit $code'
"""Shell script: run a command, then the clean-up command in its first argument; exit with the
command's code."""
MAX_ERROR_CHARS = 400
_QUIET: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)


@dataclass(frozen=True, slots=True)
class Root:
    """Example: ``Root(Path("/tmp/x"), {"/usr/bin": "/usr/bin"}, "3f2a")``"""

    folder: Path
    """A file system of mount points, links and a few files."""
    visible: dict[str, str]
    """Path inside -> file or folder of the host, mounted read-only; parents first."""
    digest: str
    """Hexadecimal hash of the contents, the name of the root."""


@dataclass(frozen=True, slots=True)
class Launch:
    """A command that runs a guest init, and the shell command that cleans up after it."""

    argv: list[str]
    after: str = "true"


class ContainerBackend(ProbedBackend):
    """A ``SandboxBackend`` that runs a program installed on this machine."""

    name: str
    program: str
    network = False
    """Whether ``SandboxSpec.network=True`` is supported."""

    probe_s = 60.0

    @property
    def capabilities(self) -> frozenset[str]:
        return frozenset(
            {"numpy", "sympy", "files", "state", "isolation"}
            | ({"network"} if self.network else set())
        )

    @abstractmethod
    async def launch(self, program: str, spec: SandboxSpec, init_command: list[str]) -> Launch:
        """The command of a container that runs ``init_command``; ``ROOT`` is an empty, size-limited
        tmpfs."""

    def find(self) -> str | None:
        """Path of the program; None when it is not installed."""
        return shutil.which(self.program)

    async def open(self, spec: SandboxSpec) -> Session:
        spec.check_capabilities(self.name, self.capabilities)
        require(spec.packages)
        if (program := self.find()) is None:
            raise SandboxUnavailable(
                f"The program {self.program!r} is not installed", names=[self.name]
            )

        async def connect() -> InitConnection:
            launch = await self.launch(program, spec, _init_command(spec))
            return await Pipe.open(launch.argv, launch.after, max_reply_bytes(spec), self.name)

        return await Session.open(spec, RemoteProcesses(connect))


class Pipe:
    """An ``InitConnection`` over the input and output of the command that runs the container."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        errors: IO[bytes],
        max_body_bytes: int,
        after: str,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        self._process, self._errors, self._after = process, errors, after
        self._input, self._output = process.stdin, process.stdout
        self._max_body_bytes = max_body_bytes
        self._pending: deque[asyncio.Future[tuple[dict[str, object], bytes]]] = deque()
        self._end_reason: str | None = None
        self._reading = asyncio.create_task(self._read())

    @classmethod
    async def open(cls, argv: list[str], after: str, max_body_bytes: int, name: str) -> Pipe:
        """Start ``argv``; the shell command ``after`` runs when it ends.

        *Raises* SandboxUnavailable with the last line of the command's stderr.
        """
        errors = tempfile.TemporaryFile()  # noqa: SIM115  (closed by close)
        process = await asyncio.create_subprocess_exec(
            *["/bin/sh", "-c", CLEAN_UP, "sh", after, *argv],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,
        )
        pipe = cls(process, errors, max_body_bytes, after)
        try:
            # no process to kill yet: the reply confirms that the guest init runs
            await pipe.request({"op": "kill"})
        except ConnectionResetError as error:
            await pipe.close()
            raise SandboxUnavailable(
                f"{name} could not start a sandbox: {error}", names=[name]
            ) from error
        except BaseException:  # a cancelled start must not leave a container; raised again
            await pipe.close()
            raise
        return pipe

    async def request(
        self, header: dict[str, object], body: bytes = b""
    ) -> tuple[dict[str, Any], bytes]:
        if self._end_reason is not None:
            raise ConnectionResetError(self._end_reason)
        reply: asyncio.Future[tuple[dict[str, object], bytes]] = (
            asyncio.get_running_loop().create_future()
        )
        self._pending.append(reply)
        self._input.write(frames.pack(header, body))
        # the command has ended: _read sets the reason on the reply
        with contextlib.suppress(OSError):
            await self._input.drain()
        return await reply

    async def close(self) -> None:
        """Close the input, which ends the guest init; after ``END_S`` clean up and kill the command
        instead."""
        if self._errors.closed:
            return
        self._fail("closed")
        self._input.close()
        try:
            await asyncio.wait_for(self._process.wait(), END_S)
        except TimeoutError:
            cleaning = await asyncio.create_subprocess_exec("/bin/sh", "-c", self._after, **_QUIET)
            await cleaning.wait()
            with contextlib.suppress(ProcessLookupError):  # it has already ended
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
                if (
                    header_size > MAX_HEAD_BYTES
                    or body_size > self._max_body_bytes
                    or not self._pending
                ):
                    return self._fail("it sent a malformed reply")
                header = json.loads(await self._output.readexactly(header_size))
                body = await self._output.readexactly(body_size)
                reply = self._pending.popleft()
                if not reply.done():
                    reply.set_result((dict(header), body))
        except (asyncio.IncompleteReadError, OSError):
            await self._process.wait()
            self._fail(self._last_error_line())
        except (ValueError, TypeError, RecursionError):  # the header is not a JSON object
            self._fail("it sent a malformed reply")

    def _fail(self, reason: str) -> None:
        self._end_reason = self._end_reason or reason
        while self._pending:
            reply = self._pending.popleft()
            if not reply.done():
                reply.set_exception(ConnectionResetError(self._end_reason))

    def _last_error_line(self) -> str:
        if self._errors.closed:
            return "closed"
        self._errors.seek(0)
        lines = self._errors.read(2**16).decode("utf-8", "replace").strip().splitlines()
        if lines:
            return lines[-1][:MAX_ERROR_CHARS]
        return f"its command ended with {self._process.returncode}"


def file_sizes(spec: SandboxSpec) -> tuple[int, int]:
    """Sizes of the file systems ``ROOT`` and ``SHARED`` in MB; their sum is the limit of the
    sandbox."""
    all_mb = max(2, min(spec.file_mb, spec.memory_mb))
    shared_mb = max(1, min(64, all_mb // 8))
    return all_mb - shared_mb, shared_mb


def unique_uid() -> int:
    """A user id that is used by no other sandbox and not assigned by hosts."""
    return FIRST_UID + next(_uids) % 2**28


def environment(spec: SandboxSpec) -> dict[str, str]:
    """Environment variables of the sandbox."""
    return {**ENVIRONMENT, **spec.env}


def _init_command(spec: SandboxSpec) -> list[str]:
    settings = encoded_settings(spec, HOME, [ROOT, SHARED, "/tmp"], [f"{ROOT}/tmp"], confined=True)
    return [mounts.INTERPRETER, "-c", RUN_GUEST.format(path=mounts.INSIDE, module="init"), settings]


@lru_cache
def root_for(packages: tuple[str, ...]) -> Root:
    """The root for these packages, created once in the user's cache folder; it contains only mount
    points and links."""
    layout = mounts.mounts(packages)
    contents = repr(
        (
            ROOT_VERSION,
            sorted(layout.visible.items()),
            sorted(layout.links.items()),
            sorted(layout.hidden),
            sorted(FILES.items()),
        )
    )
    digest = hashlib.sha256(contents.encode()).hexdigest()[:16]
    caches = user_cache_folder() / "sandbox"
    folder = caches / digest
    if not folder.exists():
        caches.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(dir=caches, prefix="making-"))
        _create_root(unfinished, layout)
        unfinished.chmod(0o755)
        try:
            unfinished.rename(folder)
        except OSError:  # another process created it first
            shutil.rmtree(unfinished, ignore_errors=True)
    sources = {inside: str(path) for inside, path in layout.visible.items()}
    sources |= {inside: str(folder / "empty") for inside in layout.hidden}
    return Root(folder / "root", dict(sorted(sources.items())), digest)


def _create_root(folder: Path, layout: mounts.Mounts) -> None:
    for path in (folder / "empty", folder / "root"):
        path.mkdir(mode=0o755)
    for inside in [*layout.folders(), ROOT, "/proc", "/sys", "/dev", "/run", "/etc"]:
        (folder / f"root{inside}").mkdir(mode=0o755, parents=True, exist_ok=True)
    # engines copy the mode of the mount point to the mounted file system
    (folder / f"root{ROOT}").chmod(0o1777)
    for inside, path in layout.visible.items():
        mount_point = folder / f"root{inside}"
        if path.is_dir():
            mount_point.mkdir(mode=0o755, exist_ok=True)
        elif not mount_point.exists():
            mount_point.touch()
    for inside, target in {**layout.links, "/tmp": f"{ROOT}/tmp"}.items():
        (folder / f"root{inside}").symlink_to(target)
    for inside, text in FILES.items():
        (folder / f"root{inside}").write_text(text, encoding="ascii")
