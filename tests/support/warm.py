"""Children with the project imported already: a fork of one warm process, a tenth of a second each
instead of a second.

For tests that kill many. ``Warm.run`` is ``kill.run_child`` in another way: the same arguments, the
same ``Ended``. A child is a process of its own, killed by its id; the warm one has no threads, no
event loop and no open run.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from typing import Any

from support.kill import FAILPOINT_VARIABLE, HELD_UP_AFTER_S, Ended

WARM = """
import importlib, json, os, socket, sys
import verifiers as vf
import verifiers.runtime.failpoints, verifiers.runs.run, verifiers.clients.http, verifiers.testing, verifiers.rubrics
import msgspec

vf.SingleTurnEnv(dataset=[{"question": "?"}])
line = socket.socket(fileno=int(sys.argv[1]))
while True:
    message, fds, _, _ = socket.recv_fds(line, 1 << 20, 2)
    if not message:
        break
    order = json.loads(message)
    pid = os.fork()
    if pid == 0:
        line.close()
        for fd, target in zip(fds, (1, 2)):
            os.dup2(fd, target)
            os.close(fd)
        os.environ.update(order["environment"])
        importlib.reload(verifiers.runtime.failpoints)  # armed by the environment, counting from zero
        sys.argv = ["-c", *order["args"]]
        code = 0
        try:
            exec(compile(order["code"], "<child>", "exec"), {"__name__": "__main__"})
        except BaseException:  # SystemExit too: the child prints it and exits with code 1
            import traceback
            traceback.print_exc()
            code = 1
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    for fd in fds:
        os.close(fd)
    line.send(b"%d\\n" % pid)
    _, status = os.waitpid(pid, 0)
    line.send(b"%d\\n" % os.waitstatus_to_exitcode(status))
"""


class Warm:
    """A context manager; one child at a time."""

    def __enter__(self) -> Warm:
        self._line, theirs = socket.socketpair()
        variables = {
            name: value for name, value in os.environ.items() if name != FAILPOINT_VARIABLE
        }
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", WARM, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env={**variables, "PYTHONUNBUFFERED": "1"},
            )
        self._answers = self._line.makefile("r")
        return self

    def __exit__(self, *_: object) -> None:
        self._answers.close()
        self._line.close()
        self._process.wait(10)

    def run(
        self,
        code: str,
        *args: object,
        failpoint: str | None = None,
        kill_after_lines: int | None = None,
        kill_after_s: float | None = None,
    ) -> Ended:
        """Run ``code`` to its end, which is SIGKILL after so many lines, or so many seconds after
        the first one."""
        environment = {FAILPOINT_VARIABLE: failpoint} if failpoint else {}
        order: dict[str, Any] = {
            "code": code,
            "args": [str(arg) for arg in args],
            "environment": environment,
        }
        out, out_write = os.pipe()
        err, err_write = os.pipe()
        socket.send_fds(self._line, [json.dumps(order).encode()], [out_write, err_write])
        os.close(out_write)
        os.close(err_write)
        pid = int(self._answers.readline())
        timers = [threading.Timer(HELD_UP_AFTER_S, _kill, [pid])]
        timers[0].start()
        lines: list[str] = []
        with open(out) as stdout, open(err) as stderr:
            for line in stdout:
                lines.append(line.rstrip("\n"))
                if len(lines) == 1 and kill_after_s is not None:
                    timers.append(threading.Timer(kill_after_s, _kill, [pid]))
                    timers[1].start()
                if len(lines) == kill_after_lines:
                    _kill(pid)
            told = stderr.read()
        returncode = int(self._answers.readline())
        for timer in timers:
            timer.cancel()
        return Ended(lines, returncode, told)


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
