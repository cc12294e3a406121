"""Zygote: imports the packages once, then forks sessions into separate namespaces (``session``).

It runs inside the outer sandbox and executes no model-written code. It ends when the host closes
the control connection.
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
    """Import all; return name -> error of those that failed."""
    errors = {}
    for name in names:
        try:
            importlib.import_module(name)
        except Exception as error:  # noqa: BLE001  (reported to the host, which refuses the sandbox)
            errors[name] = f"{type(error).__name__}: {error}"
    return errors


def _fork(control: socket.socket, fd: int, settings: dict[str, object]) -> None:
    child = os.fork()
    if child:
        os.close(fd)
        os.waitpid(child, 0)  # the child ends once the supervisor runs in its namespaces
        return
    try:
        control.close()
        session.enter(socket.socket(fileno=fd), settings)
    except BaseException:  # noqa: BLE001  (the frames above belong to the zygote)
        traceback.print_exc()
    os._exit(0)


if __name__ == "__main__":
    main()
