"""Run ``vf-train`` in a tmux session: the trainer in one pane, the log of the inference server in
another.

The session has a tmux server of its own, with the environment of this process. It stays when
training ends, so that the last lines can be read.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from verifiers.errors import ConfigError


def start(
    name: str, words: Sequence[str], environment: Mapping[str, str], server_log: Path | None
) -> str:
    """Start ``vf-train WORDS`` in the session ``name``; return the command that attaches to it.

    server_log: file that the second pane follows; None without a server.

    Raises ``ConfigError`` when tmux is missing, and for a session that exists.
    """
    if shutil.which("tmux") is None:
        raise ConfigError(
            "--tmux needs tmux, which is not on the path: install it, or leave --tmux out"
        )
    tmux = ["tmux", "-L", name]
    session = subprocess.run([*tmux, "has-session", "-t", name], capture_output=True, check=False)
    if session.returncode == 0:
        raise ConfigError(
            f"there is a tmux session {name}: end it (tmux -L {name} kill-server), or give --tmux"
            " OTHER"
        )
    panes = [shlex.join([sys.executable, "-P", "-m", "verifiers_trainer.cli.train", *words])]
    if server_log is not None:
        panes.append(shlex.join(["tail", "-n", "+1", "-F", str(server_log.absolute())]))
    command = [*tmux, "start-server", ";", "set-option", "-g", "remain-on-exit", "on", ";"]
    size = ["-x", "200", "-y", "50"]
    command += ["new-session", "-d", "-s", name, *size, "-c", str(Path.cwd()), panes[0]]
    for pane in panes[1:]:
        command += [";", "split-window", "-d", "-v", "-t", name, "-c", str(Path.cwd()), pane]
    started = subprocess.run(
        command, capture_output=True, text=True, check=False, env=dict(environment)
    )
    if started.returncode:
        raise ConfigError(f"tmux cannot start the session {name}: {started.stderr.strip()}")
    return f"tmux -L {name} attach"
