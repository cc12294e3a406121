"""Sandboxes by Landlock and system-call supervision, without namespaces
(https://github.com/multikernel/sandlock).

For machines that forbid namespaces. Weaker and slower than ``bubblewrap``: each session starts an
interpreter that imports packages on first use, a time-out also deletes its files, names and sizes
of host files can be read, and a session whose supervisor is killed from outside can leave processes
behind.
"""

from __future__ import annotations

import asyncio
import base64
import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

from verifiers.errors import SandboxUnavailable
from verifiers.sandbox.host import mounts
from verifiers.sandbox.host.packages import folders, require
from verifiers.sandbox.host.probed import ProbedBackend
from verifiers.sandbox.host.session import Session, limit_in, reported_by, worker_settings
from verifiers.sandbox.host.zygotes import READY_S
from verifiers.sandbox.protocol import SandboxSpec

RUN_SUPERVISOR = "import sys; from verifiers.sandbox.host.sandlock_supervisor import main; main()"
RUN_WORKER = "from guest.worker import main; main()"
END_S = 10.0
DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")


class Sandlock(ProbedBackend):
    """A ``SandboxBackend``. Needs the extra ``sandbox`` and a kernel with Landlock."""

    name = "sandlock"
    capabilities = frozenset({"numpy", "sympy", "files", "state", "isolation"})

    probe = (
        "import os, socket\nfound = []\n"
        + "".join(
            f"try: {attempt}; found.append({name!r})\nexcept OSError: pass\n"
            for name, attempt in (
                ("reads the host", "open(HOST_FILE).read()"),
                ("sees the host's processes", "os.listdir('/proc')"),
                ("opens a port", "socket.create_server(('127.0.0.1', 0))"),
            )
        )
        + "found"
    )
    probe_value, probe_s = "[]", READY_S
    answered = "a supervised session answered and could not access the host"

    async def open(self, spec: SandboxSpec) -> Session:
        spec.check_capabilities(self.name, self.capabilities)
        if importlib.util.find_spec("sandlock") is None:
            raise SandboxUnavailable("The package 'sandlock' is not installed", names=[self.name])
        require(spec.packages)
        return await Session.open(spec, _SupervisedProcesses(spec))


class _SupervisedProcesses:
    """``Processes`` of a session: a process of ``sandlock_supervisor`` runs the worker under
    sandlock."""

    def __init__(self, spec: SandboxSpec):
        self._spec = spec
        self._folder = tempfile.mkdtemp(prefix="sandlock-")
        self._supervisor: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    async def start(self, connection: socket.socket, area_fd: int) -> None:
        await self._end()
        self._control, theirs = socket.socketpair()
        self._control.setblocking(False)
        with theirs:
            self._supervisor = subprocess.Popen(  # noqa: ASYNC220  (milliseconds)
                [
                    sys.executable,
                    *("-P", "-c", RUN_SUPERVISOR),
                    str(theirs.fileno()),
                    json.dumps(self._policy()),
                ],
                stdin=connection.fileno(),
                stdout=area_fd,
                stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env={"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
                start_new_session=True,
                cwd="/",
            )

    def kill(self) -> None:
        """Close the control connection: the supervisor then kills everything."""
        if self._control is not None:
            self._control.close()
            self._control = None

    async def ended(self) -> None:
        return None  # the output area is shared memory, always complete

    async def cause(self) -> str | None:
        if self._control is None:
            return None
        report = await reported_by(self._control, END_S)
        if (failed := report.get("failed")) is not None:
            raise SandboxUnavailable(
                f"sandlock could not confine a process: {failed}", names=["sandlock"]
            )
        return limit_in(report)

    async def clear(self) -> None:
        await self._end()

    async def close(self) -> None:
        await self._end()
        await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)

    async def _end(self) -> None:
        self.kill()
        supervisor, self._supervisor = self._supervisor, None
        if supervisor is not None:
            try:
                await asyncio.to_thread(supervisor.wait, END_S)
            except subprocess.TimeoutExpired:
                supervisor.kill()
                supervisor.wait()

    def _policy(self) -> dict[str, object]:
        """The argument ``POLICY`` of ``sandlock_supervisor``."""
        spec, home = self._spec, f"{self._folder}/home"
        packages = f"{self._folder}/packages"
        for folder in (home, packages, f"{self._folder}/changes"):
            os.makedirs(folder, exist_ok=True)
        for name, path in {**folders(spec.packages), "guest": mounts.GUEST}.items():
            if not os.path.lexists(f"{packages}/{name}"):
                os.symlink(path.resolve(), f"{packages}/{name}")
        layout = mounts.mounts(spec.packages)
        settings = {
            **worker_settings(spec),
            "memory_mb": spec.memory_mb,
            "file_mb": spec.file_mb,
            "cpu_s": spec.cpu_s,
        }
        python = getattr(sys, "_base_executable", sys.executable)
        encoded = base64.b64encode(json.dumps(settings).encode()).decode()
        return {
            "command": [os.path.realpath(python), "-c", RUN_WORKER, "0", "1", encoded],
            "readable": [
                *map(str, layout.visible.values()),
                packages,
                *filter(os.path.exists, DEVICES),
            ],
            "denied": _hidden_on_the_host(layout),
            "folder": self._folder,
            "home": home,
            "writable": [home, "/dev/null"],
            "changes": f"{self._folder}/changes",
            "memory_mb": spec.memory_mb,
            "file_mb": spec.file_mb,
            "num_processes": spec.num_processes,
            "env": {
                "PATH": "/usr/bin:/bin",
                "HOME": home,
                "TMPDIR": home,
                "LANG": "C.UTF-8",
                "PYTHONPATH": packages,
                "PYTHONDONTWRITEBYTECODE": "1",
                "MALLOC_ARENA_MAX": "1",
                "OMP_NUM_THREADS": "1",
                "OPENBLAS_NUM_THREADS": "1",
                **spec.env,
            },
            "working_dir": spec.working_dir or home,
        }


def _hidden_on_the_host(layout: mounts.Mounts) -> list[str]:
    """Host paths of the hidden folders: without namespaces nothing can be mounted over them, so
    access is denied."""
    paths = []
    for hidden in layout.hidden:
        for inside, path in layout.visible.items():
            if hidden.startswith(f"{inside}/"):
                paths.append(str(path / Path(hidden).relative_to(inside)))
    return [path for path in paths if os.path.exists(path)]
