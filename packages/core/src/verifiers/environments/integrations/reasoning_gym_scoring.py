"""The scorers of Reasoning Gym, called in worker processes: model text reaches them nowhere else.

Some scorers evaluate the answer as Python, directly or through sympy, so that an answer could be a program. Here a
call has a time limit after which its process is killed, a bound on memory, literals in the place of ``eval``, and an
audit hook that refuses to start processes, open connections and change files. That keeps accidents and simple attacks
away from the machine; it is not a boundary against an answer written to break out of Python itself.

An answer that its scorer cannot take (it raises, or does not end) is worth 0.0 when the scorer does take the
generator's own answer; else the scorer is at fault and the reward unknown.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import functools
import os
import sys
from collections.abc import Mapping
from typing import Any

import reasoning_gym

from verifiers.runtime.per_loop import PerLoop
from verifiers.runtime.processes import Processes
from verifiers.runtime.threads import call_in_thread

LIMIT_S = 10.0
MAX_MEMORY_BYTES = 4 << 30
MAX_PROCESSES = 4
"""Each holds the whole library, about 200 MB."""
LITERALS = ("algorithmic.binary_matrix", "algorithmic.spiral_matrix", "algorithmic.string_insertion", "games.n_queens")
"""Modules that read an answer with ``eval`` where a literal is meant."""
REFUSED = (
    "os.chflags os.chmod os.chown os.exec os.fork os.forkpty os.kill os.killpg os.link os.mkdir os.posix_spawn "
    "os.putenv os.remove os.rename os.rmdir os.setxattr os.spawn os.startfile os.symlink os.system os.truncate "
    "os.unsetenv os.utime pty.spawn signal.pthread_kill"
).split()
REFUSED_MODULES = ("ctypes", "ftplib", "http", "shutil", "smtplib", "socket", "sqlite3", "subprocess", "urllib")


class _Pool:
    """The worker processes of one event loop; ``free`` keeps the queue on the loop, so that no threads wait in it."""

    def __init__(self) -> None:
        size = max(2, min(MAX_PROCESSES, os.cpu_count() or 1))
        self.processes, self.free = Processes(size), asyncio.Semaphore(size)

    async def close(self) -> None:
        self.processes.close()


_POOLS: PerLoop[_Pool] = PerLoop(_Pool, _Pool.close)


async def score(name: str, config: Mapping[str, Any], entry: Mapping[str, Any], answer: str | None) -> float:
    """The generator's score of an answer to its entry. *Raises* ScoringError when the scorer is at fault."""
    try:
        return await _call(name, config, entry, answer)
    except TimeoutError:
        await _call(name, config, entry, entry["answer"])  # whose doing it was; raises when it is the scorer's
        return 0.0


async def _call(name: str, config: Mapping[str, Any], entry: Mapping[str, Any], answer: str | None) -> float:
    pool = _POOLS.here()
    arguments = {"name": name, "config": dict(config), "entry": dict(entry), "answer": answer}
    async with pool.free:
        return float(await call_in_thread(pool.processes.call, score_in_worker, arguments, LIMIT_S, name))


def score_in_worker(name: str, config: dict[str, Any], entry: dict[str, Any], answer: str | None) -> float:
    """One score. Runs in a worker process, which it changes for good."""
    guard()
    return plain_score(name, config, entry, answer)


def plain_score(name: str, config: dict[str, Any], entry: dict[str, Any], answer: str | None) -> float:
    """One score, where the caller is: only for answers that can be trusted."""
    scorer = _scorer(name, config)
    try:
        return float(scorer.score_answer(answer, entry))
    except Exception:  # noqa: BLE001  whose doing it was: the next line raises when it is the scorer's
        scorer.score_answer(entry["answer"], entry)
        return 0.0


_SCORERS: dict[tuple[str, str], Any] = {}


def _scorer(name: str, config: dict[str, Any]) -> Any:
    key = name, repr(config)
    if key not in _SCORERS:
        _SCORERS[key] = reasoning_gym.create_dataset(name, **config)
    return _SCORERS[key]


# --- the guard --------------------------------------------------------------------------------------------------


@functools.cache
def guard() -> None:
    """Take from this process what no scorer needs, until it ends."""
    for module in LITERALS:
        if (found := sys.modules.get(f"reasoning_gym.{module}")) is not None:
            vars(found)["eval"] = ast.literal_eval
    with contextlib.suppress(ImportError, ValueError, OSError):  # not on this platform; the time limit remains
        import resource

        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        wanted = MAX_MEMORY_BYTES if hard == resource.RLIM_INFINITY else min(MAX_MEMORY_BYTES, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (wanted, hard))
    sys.addaudithook(_refuse)


def _refuse(event: str, arguments: tuple[Any, ...]) -> None:
    """*Raises* PermissionError for what a scorer has no business to do."""
    if event == "open":
        _path, mode, flags = arguments
        writes = set(mode or "") & set("wax+") or (flags or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
    else:
        writes = event in REFUSED or event.partition(".")[0] in REFUSED_MODULES
    if writes:
        raise PermissionError(f"a scorer may not do this: {event}")
