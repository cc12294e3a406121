"""No sandbox: a plain child process with this process's rights, network and files. For trusted
code.

Time-outs, state and output bounds work as in a sandbox; no other limit is enforced. ``auto`` never
selects it.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile

from verifiers.sandbox.host.mounts import GUEST
from verifiers.sandbox.host.packages import require
from verifiers.sandbox.host.session import Session, worker_settings
from verifiers.sandbox.protocol import Availability, SandboxSpec

_LOGGER = logging.getLogger(__name__)
GUEST_FOLDER = str(GUEST.parent)
RUN_WORKER = (
    "import sys; sys.path[0] = {folder!r}; from guest.worker import main; sys.path[0] = ''; main()"
)


class UnsafeSubprocess:
    """A ``SandboxBackend`` that isolates nothing."""

    name = "unsafe_subprocess"
    capabilities = frozenset({"numpy", "sympy", "files", "network", "state"})

    def __init__(self) -> None:
        self._warned = False

    async def available(self) -> Availability:
        return Availability(True, "a child process can always be started; it provides no isolation")

    async def open(self, spec: SandboxSpec) -> Session:
        spec.check_capabilities(self.name, self.capabilities)
        require(spec.packages)
        if not self._warned:
            self._warned = True
            _LOGGER.warning(
                "sandbox='unsafe_subprocess': model-written code runs with your rights, files and"
                " network"
            )
        return await Session.open(spec, _Child(spec))


class _Child:
    """``Processes`` of a plain child and its process group."""

    def __init__(self, spec: SandboxSpec):
        self._spec = spec
        self._child: subprocess.Popen[bytes] | None = None
        self._folder = tempfile.mkdtemp(prefix="unsafe-sandbox-")

    async def start(self, connection: socket.socket, area_fd: int) -> None:
        self.kill()
        fds = (connection.fileno(), area_fd)
        settings = base64.b64encode(json.dumps(worker_settings(self._spec)).encode()).decode()
        code = RUN_WORKER.format(folder=GUEST_FOLDER)
        working_dir = self._spec.working_dir or self._folder
        await asyncio.to_thread(os.makedirs, working_dir, exist_ok=True)
        self._child = subprocess.Popen(  # noqa: ASYNC220  (takes milliseconds; the end of a starting thread would kill the child)
            [sys.executable, "-c", code, *map(str, fds), settings],
            pass_fds=fds,
            stdin=subprocess.DEVNULL,
            cwd=working_dir,
            env={**os.environ, **self._spec.env},
            start_new_session=True,
        )

    def kill(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()

    async def ended(self) -> None:
        return None  # the output area is shared memory, always complete

    async def cause(self) -> str | None:
        return None

    async def clear(self) -> None:
        self.kill()
        await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)
        os.makedirs(self._folder, exist_ok=True)

    async def close(self) -> None:
        self.kill()
        await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)
