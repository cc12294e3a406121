"""Supervisor process of a sandlock session: confines the worker, reports why it ended, and kills
remaining processes.

Arguments ``FD POLICY``: stdin is the worker's connection, stdout its output area. The cause of the
worker's end is sent on FD; when the host closes FD, every process of the session is killed. The
supervisor is a subreaper: orphaned processes of the session become its children, so none escapes.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import sys
import threading
from typing import Any

from verifiers.sandbox.guest import kernel
from verifiers.sandbox.guest.supervisor import end_descendants

INTERPRETER_MB = 96
"""Memory of the worker before the code allocates anything."""
OWN_PROCESSES = 3


def main() -> None:
    """Supervise until the host closes the connection. Does not return."""
    control, policy = socket.socket(fileno=int(sys.argv[1])), json.loads(sys.argv[2])
    kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
    kernel.drop_privileges()
    threading.Thread(target=_supervise, args=(control, policy), daemon=True).start()
    with contextlib.suppress(OSError):
        while control.recv(1):
            pass
    end_descendants()
    shutil.rmtree(policy["folder"], ignore_errors=True)
    os._exit(0)


def _supervise(control: socket.socket, policy: dict[str, object]) -> None:
    report: dict[str, object]
    try:
        report = {"cause": _run(policy)}
    except Exception as error:  # noqa: BLE001  (reported to the host, which refuses the sandbox)
        report = {"failed": f"{type(error).__name__}: {error}"}
    with contextlib.suppress(OSError):
        # closes the last copy of the worker's connection
        os.dup2(os.open(os.devnull, os.O_RDWR), 0)
        control.send(json.dumps(report).encode())


def _run(policy: dict[str, Any]) -> str:
    """Run the worker; return why it ended."""
    import sandlock

    sandbox = sandlock.Sandbox(
        fs_readable=policy["readable"],
        fs_writable=policy["writable"],
        fs_denied=policy["denied"],
        workdir=policy["home"],
        cwd=policy["home"],
        fs_storage=policy["changes"],
        max_disk=f"{policy['file_mb']}M",
        on_exit=sandlock.BranchAction.ABORT,
        on_error=sandlock.BranchAction.ABORT,
        max_memory=f"{policy['memory_mb'] + INTERPRETER_MB}M",
        max_processes=policy["num_processes"] + OWN_PROCESSES,
        clean_env=True,
        env=policy["env"],
        no_coredump=True,
    )
    inherit = sandlock.StdioMode.INHERIT
    process = sandbox.popen(policy["command"], stdin=inherit, stdout=inherit, stderr=inherit)
    result = process.wait()
    killed = getattr(result, "reason", None) == sandlock.ExitReason.KILLED
    by_signal = {int(signal.SIGXCPU): "cpu", int(signal.SIGXFSZ): "file"}
    return by_signal.get(getattr(result, "signal", 0), "memory" if killed else "killed")
