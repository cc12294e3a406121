"""``python -m verifiers.sandbox.probe [BACKEND]`` runs every attack in a sandbox and prints what
stopped each.

The targets exist: a secret in the environment of a sleeping process, files, servers. No attack
harms the host, even when it succeeds.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic

import click

from verifiers.errors import SandboxError, VerifiersError
from verifiers.sandbox.choice import backend_for
from verifiers.sandbox.probe.attacks import ATTACKS, DOING, LIMITS, READING, Attack
from verifiers.sandbox.protocol import ExecResult, Sandbox, SandboxBackend

GRACE_S = 5.0
VARIABLE = "VERIFIERS_PROBE_SECRET"


@dataclass(frozen=True, slots=True)
class Bait:
    """Targets of the attacks. ``secret`` is known to the host only."""

    secret: str
    folder: Path
    facts: dict[str, object]
    """Name -> address of a target; passed to the code as ``BAIT``."""

    @property
    def nap(self) -> str:
        return str(self.facts["nap"])

    @property
    def prelude(self) -> str:
        return f"BAIT = {self.facts!r}\n"


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of an attack."""

    attack: Attack
    reached: bool
    by: str
    """What the attack obtained, or what stopped it."""


@contextlib.contextmanager
def bait() -> Iterator[Bait]:
    """Set up the targets; remove them at the end."""
    secret = f"secret-{secrets.token_hex(12)}"
    with (
        tempfile.TemporaryDirectory(prefix="sandbox-bait-") as folder,
        contextlib.ExitStack() as stack,
    ):
        private = Path(folder) / "private"
        private.write_text(secret, encoding="ascii")
        private.chmod(0o600)
        servers = [
            socket.create_server(("127.0.0.1", 0)),
            *(socket.socket(socket.AF_UNIX) for _ in range(2)),
        ]
        name = f"bait-{secrets.token_hex(6)}"
        servers[1].bind(f"{folder}/daemon.sock")
        servers[2].bind(f"\0{name}")
        for server in servers:
            server.listen()
            stack.callback(server.close)
            threading.Thread(target=_serve, args=(server, secret.encode()), daemon=True).start()
        os.environ[VARIABLE] = secret
        stack.callback(os.environ.pop, VARIABLE, None)
        sleeper = subprocess.Popen(
            ["sleep", "1000"], env={VARIABLE: secret, "PATH": os.environ.get("PATH", "")}
        )
        stack.callback(sleeper.wait)
        stack.callback(sleeper.kill)
        stack.enter_context(open(private, encoding="ascii"))
        facts: dict[str, object] = {
            "private": str(private),
            "port": servers[0].getsockname()[1],
            "socket": f"{folder}/daemon.sock",
            "abstract": name,
            "writable": f"{folder}/written",
            "name": name,
            "pid": sleeper.pid,
            "run": os.getpid(),
            "nap": f"3{secrets.randbelow(10**6):06}",
        }
        yield Bait(secret, Path(folder), facts)


def _serve(server: socket.socket, secret: bytes) -> None:
    with contextlib.suppress(OSError):
        while True:
            connection, _ = server.accept()
            with connection:
                connection.sendall(secret)


async def attempt(backend: SandboxBackend, attack: Attack, bait: Bait) -> Outcome:
    """Run one attack in a new sandbox."""
    sandbox = await backend.open(replace(LIMITS, packages=()))
    try:
        started = monotonic()
        result = await sandbox.exec(bait.prelude + attack.code, timeout_s=attack.timeout_s)
        took_s = monotonic() - started
        usable = (await sandbox.exec("6 * 7", timeout_s=20)).value == "42"
        read = await _read_back(sandbox, bait) if attack.name == "link out" else ""
    finally:
        await sandbox.close()
    if not usable:
        return Outcome(attack, True, "the sandbox was unusable afterwards")
    if attack.name == "survivor":
        return await _survivor(attack, bait)
    if attack.name == "link out":
        return Outcome(attack, bait.secret in read, read[:60] or "nothing")
    if attack.name == "deaf to signals":
        ended = result.timed_out and took_s < attack.timeout_s + GRACE_S
        return Outcome(attack, not ended, "limit: wall" if ended else f"ran for {took_s:.1f} s")
    if attack.name == "output flood":
        is_bounded = len(result.stdout) <= 2 * LIMITS.max_output_bytes and result.truncated
        return Outcome(
            attack,
            not is_bounded,
            "limit: output" if is_bounded else f"{len(result.stdout)} characters",
        )
    return _classify(attack, result, bait)


def _classify(attack: Attack, result: ExecResult, bait: Bait) -> Outcome:
    if attack in READING:
        reached = bait.secret in f"{result.value}{result.stdout}"
    else:
        reached = result.value == "'reached'"
    if reached:
        return Outcome(attack, True, "nothing")
    if result.limit:
        return Outcome(attack, False, f"limit: {result.limit}")
    last = (result.error or result.value or "nothing found").strip().splitlines()[-1]
    return Outcome(attack, False, last if attack in DOING or result.error else "target not visible")


async def _read_back(sandbox: Sandbox, bait: Bait) -> str:
    try:
        return (await sandbox.read_file("link")).decode("utf-8", "replace")
    except (OSError, SandboxError) as error:
        return type(error).__name__


async def _survivor(attack: Attack, bait: Bait) -> Outcome:
    """Search for the process on the host, where every process is visible."""
    for _ in range(40):
        if not naps(bait.nap):
            return Outcome(attack, False, "ended with the sandbox")
        await asyncio.sleep(0.05)
    for pid in naps(bait.nap):
        os.kill(pid, 9)
    return Outcome(attack, True, "nothing")


def naps(marker: str) -> list[int]:
    """Ids of the processes ``sleep MARKER``."""
    pids = []
    for process in Path("/proc").iterdir():
        with contextlib.suppress(OSError):  # no process, or a process that has just ended
            if (process / "cmdline").read_bytes() == f"sleep\0{marker}\0".encode():
                pids.append(int(process.name))
    return pids


async def run(name: str) -> list[Outcome]:
    """Run every attack in the backend of this name. *Raises* SandboxUnavailable when it does not
    work here."""
    backend = await backend_for(name)
    with bait() as baits:
        return [await attempt(backend, attack, baits) for attack in ATTACKS]


@click.command()
@click.argument("backend", default="auto")
def main(backend: str) -> None:
    """Run every attack in BACKEND and print what stopped each."""
    try:
        outcomes = asyncio.run(run(backend))
    except VerifiersError as error:
        click.echo(f"Error: {error}", err=True)
        sys.exit(error.exit_code)
    for outcome in outcomes:
        mark = "REACHED" if outcome.reached else "stopped"
        click.echo(f"{mark}  {outcome.attack.name:18} {outcome.attack.aim:58} {outcome.by[:90]}")
    reached = sum(outcome.reached for outcome in outcomes)
    click.echo(f"{len(outcomes) - reached} of {len(outcomes)} attacks stopped")
    sys.exit(1 if reached else 0)
