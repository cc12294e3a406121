"""The warm parent: imports the packages once, then forks one session after another into its own namespaces.

It runs inside the outer sandbox and executes nothing that a model wrote. What a session is, ``session`` says. It ends
with its owner: when the control connection closes.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import socket
import sys
import traceback
from typing import Any

from . import session

MAX_MESSAGE = 2**18


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    settings = json.loads(sys.argv[2])
    sys.argv[:] = [""]
    sys.path[:0] = settings["path"]
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    control.send(json.dumps({"failed": _import_all(settings["imports"])}).encode())
    gc.collect()
    gc.freeze()
    while True:
        data, fds, _, _ = socket.recv_fds(control, MAX_MESSAGE, 1)
        if not data:
            return
        _fork(control, fds[0], json.loads(data))


def _import_all(names: list[str]) -> dict[str, str]:
    """What could not be imported, with why."""
    failed = {}
    for name in names:
        try:
            importlib.import_module(name)
        except Exception as error:  # noqa: BLE001  (said to the owner, who refuses the sandbox)
            failed[name] = f"{type(error).__name__}: {error}"
    return failed


def _fork(control: socket.socket, fd: int, settings: dict[str, Any]) -> None:
    child = os.fork()
    if child:
        os.close(fd)
        os.waitpid(child, 0)  # it ends as soon as the session's first process runs in its namespaces
        return
    try:
        control.close()
        session.enter(socket.socket(fileno=fd), settings)
    except BaseException:  # noqa: BLE001  (nothing above this frame may run in this process)
        traceback.print_exc()
    os._exit(0)


if __name__ == "__main__":
    main()
