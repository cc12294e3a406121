"""The process that runs one session under sandlock: confines the worker, says why it ended, and ends what is left.

``supervised FD POLICY``: input is the worker's connection, output its memory for output; on FD its owner hears of the
end, and when its owner closes FD every process of the session is killed. Orphans of the session become children of this
process, so that none is lost.
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
OWN_PROCESSES = 3


def main() -> None:
    control, policy = socket.socket(fileno=int(sys.argv[1])), json.loads(sys.argv[2])
    kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
    kernel.drop_privileges()
    threading.Thread(target=_play, args=(control, policy), daemon=True).start()
    with contextlib.suppress(OSError):
        while control.recv(1):
            pass
    end_descendants()
    shutil.rmtree(policy["folder"], ignore_errors=True)
    os._exit(0)


def _play(control: socket.socket, policy: dict[str, Any]) -> None:
    told: dict[str, Any]
    try:
        told = {"cause": _run(policy)}
    except Exception as error:  # noqa: BLE001  (said to the owner, who refuses the sandbox)
        told = {"failed": f"{type(error).__name__}: {error}"}
    with contextlib.suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_RDWR), 0)  # the last copy of the worker's connection
        control.send(json.dumps(told).encode())


def _run(policy: dict[str, Any]) -> str:
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
