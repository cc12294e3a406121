"""``vf-*`` on a path of its own, for shells that call many: each is a fork of one process that has imported them.

A command is a process with the caller's folder, variables and streams, and runs the script that is installed; only the
imports are paid once. A test of starting, of signals or of kills starts the real one.
"""

from __future__ import annotations

import functools
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

NAMES = ("vf-audit", "vf-compare", "vf-eval", "vf-init", "vf-install", "vf-rescore", "vf-view")
"""Not ``vf-train``: the others would hold torch."""

CALL = """
import json, os, socket, sys

line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
line.connect(sys.argv[1])
socket.send_fds(line, [json.dumps([sys.argv[2:], os.getcwd(), dict(os.environ)]).encode()], [0, 1, 2])
code = int(line.recv(64) or -9)
if code < 0:
    os.kill(os.getpid(), -code)
sys.exit(code)
"""

SERVE = """
import gc, importlib, json, os, runpy, select, signal, site, socket, sys
import verifiers as vf
import verifiers.cli.audit, verifiers.cli.evaluate.command, verifiers.cli.install, verifiers.clients.http

vf.SingleTurnEnv(dataset=[{"question": "?"}])
listener = socket.socket(fileno=int(sys.argv[1]))
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
gc.collect()
gc.freeze()
while listener in select.select([listener, 0], [], [])[0]:  # else the process of the tests has ended
    line, _ = listener.accept()
    if os.fork():
        line.close()
        continue
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    listener.close()
    message, fds, _, _ = socket.recv_fds(line, 1 << 20, 3)
    if pid := os.fork():
        for fd in fds:
            os.close(fd)
        line.send(b"%d" % os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        os._exit(0)
    line.close()
    for target, fd in enumerate(fds):
        os.dup2(fd, target)
        os.close(fd)
    # of a file and of a pipe they differ
    sys.stdin = sys.__stdin__ = open(0, closefd=False)
    sys.stdout = sys.__stdout__ = open(1, "w", closefd=False)
    sys.stderr = sys.__stderr__ = open(2, "w", 1, errors="backslashreplace", closefd=False)
    sys.argv, folder, variables = json.loads(message)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(variables)
    sys.path[:1] = [os.path.dirname(sys.argv[0]), *filter(None, variables.get("PYTHONPATH", "").split(os.pathsep))]
    for packages in site.getsitepackages():  # what has been installed since
        site.addsitedir(packages)
    importlib.invalidate_caches()
    runpy.run_path(sys.argv[0], run_name="__main__")
    break
"""


@functools.cache
def folder() -> Path:
    """The folder for the front of ``PATH``; what serves it ends with this process."""
    made, tools = Path(tempfile.mkdtemp(prefix="vf-warm-")), Path(sys.executable).parent
    address = made / "socket"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(address))
        listener.listen(16)
        _SERVERS.append(
            subprocess.Popen(
                [sys.executable, "-c", SERVE, str(listener.fileno())],
                pass_fds=[listener.fileno()],
                stdin=subprocess.PIPE,
            )
        )
    (made / "call.py").write_text(CALL)
    for name in NAMES:
        command = made / name
        command.write_text(f'#!/bin/sh\nexec {sys.executable} -IS {made}/call.py {address} {tools}/{name} "$@"\n')
        command.chmod(0o755)
    return made


_SERVERS: list[subprocess.Popen[bytes]] = []
"""Kept, so that the pipe to a server stays open."""
