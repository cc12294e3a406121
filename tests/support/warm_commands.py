"""The commands of this project as programs on a path, each a fork of one process that has imported
them.

For tests that start many and ask what they do: a start takes a tenth of a second instead of half. A
command is a process of its own, with its caller's arguments, folder, variables and streams; it ends
as any Python ends, and its
exit code is passed on. Signals are not: tests of signals, and of the start itself, run the
installed scripts.
"""

from __future__ import annotations

import functools
import gc
import importlib
import importlib.metadata
import json
import os
import select
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from support.eval_command import Ran

PRELOADED = (
    "verifiers.checks.audit.report verifiers.cli.evaluate.checking verifiers.cli.evaluate.command"
    " verifiers.cli.evaluate.display verifiers.cli.evaluate.summary verifiers.cli.install.command"
    " verifiers.cli.init verifiers.environments verifiers.results.comparison"
    " verifiers.runs.rescoring verifiers.runs.runner verifiers.view.export verifiers.view.library"
    # what a command imports late
    " pydantic.config pydantic.fields pydantic.functional_validators pydantic.json_schema"
    " pydantic.main pydantic.type_adapter pydantic.types rich.console uvloop encodings.idna zoneinfo"
).split()
PROGRAM = f"""#!{sys.executable} -IS
import json, os, socket, sys
folder, name = os.path.split(sys.argv[0])
with socket.socket(socket.AF_UNIX) as line:
    line.connect(os.path.join(folder, "socket"))
    socket.send_fds(line, [b" "], [0, 1, 2])
    line.sendall(json.dumps([name, sys.argv, os.getcwd(), dict(os.environ)]).encode())
    line.shutdown(socket.SHUT_WR)
    sys.exit(int(line.recv(16) or 1))
"""


@functools.cache
def folder() -> str:
    """A folder with a program for each command; they run as long as this process does."""
    # short: the path of a socket has at most a hundred characters
    programs = Path(tempfile.mkdtemp(prefix="vf-"))
    scripts = {
        entry_point.name: entry_point.value
        for entry_point in importlib.metadata.entry_points(group="console_scripts")
    }
    for name in filter(lambda name: name.startswith("vf-"), scripts):
        (programs / name).write_text(PROGRAM)
        (programs / name).chmod(0o755)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(programs / "socket"))
        server.listen()
        command = [sys.executable, "-P", __file__, str(server.fileno()), json.dumps(scripts)]
        _processes.append(
            subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[server.fileno()])
        )
    return str(programs)


def run_vf_eval(where: Path, *words: str, **variables: str) -> Ran:
    """``vf-eval words…`` in a folder, run to its end."""
    from support.eval_command import end, start  # late: it loads pytest, and no command does

    return end(start(where, *words, command=[f"{folder()}/vf-eval"], **variables))


_processes: list[subprocess.Popen[bytes]] = []
"""Each ends when its standard input does, which is with this process."""


def _next_command(server: socket.socket) -> str | None:
    """Fork for each caller until standard input ends; returns in the fork, which has become the
    caller's command."""
    while server in select.select([server, sys.stdin], [], [])[0]:
        caller, _ = server.accept()
        if os.fork() == 0:
            break
        caller.close()
        while os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            os.wait()
    else:
        shutil.rmtree(os.path.dirname(server.getsockname()))
        return None
    server.close()
    _, streams, _, _ = socket.recv_fds(caller, 1, 3)
    name, sys.argv, here, variables = json.loads(b"".join(iter(lambda: caller.recv(1 << 16), b"")))
    if command := os.fork():
        code = os.waitstatus_to_exitcode(os.waitpid(command, 0)[1])
        caller.sendall(b"%d" % (code if code >= 0 else 128 - code))
        os._exit(0)
    caller.close()
    for standard, stream in enumerate(streams):
        os.dup2(stream, standard)
        os.close(stream)
    sys.stdin, sys.stdout = open(0), open(1, "w")  # noqa: SIM115
    sys.stderr = open(2, "w", 1, errors="backslashreplace")  # noqa: SIM115
    os.chdir(here)
    os.environ.clear()
    os.environ.update(variables)
    sys.path[:0] = [
        os.path.dirname(sys.executable),
        *filter(None, variables.get("PYTHONPATH", "").split(os.pathsep)),
    ]
    return str(name)


def _warm_up() -> None:
    """Do what every command would do again: three fifths of the CPU time of a short ``vf-eval``."""
    for module in PRELOADED:
        importlib.import_module(module)
    from verifiers.cli.common.reader import Fields
    from verifiers.cli.evaluate.options import CommandSettings, EvalSettings
    from verifiers.runtime.values import adapter
    from verifiers.storage.provenance import own_commit

    for settings in (EvalSettings, CommandSettings):
        for hint in Fields.of(settings).hints.values():
            adapter(hint)
    own_commit()


if __name__ == "__main__":
    _warm_up()
    scripts = json.loads(sys.argv[2])
    gc.collect()
    gc.freeze()
    if wanted := _next_command(socket.socket(fileno=int(sys.argv[1]))):
        module, _, function = scripts[wanted].partition(":")
        sys.exit(getattr(importlib.import_module(module), function)())
