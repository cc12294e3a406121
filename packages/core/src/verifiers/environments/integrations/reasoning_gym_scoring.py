"""Score completions with the scorers of Reasoning Gym, in worker processes only.

Some scorers evaluate the text of the model as Python, directly or through sympy. A worker process
therefore has a time limit per call after which it is killed, a memory limit, ``ast.literal_eval``
in place of ``eval``, and an audit hook that refuses to start processes, open connections and change
files. This protects the machine from accidents and simple attacks; it is not a security boundary
against code written to escape from Python.

When a scorer raises or times out, the reward is 0.0 if the scorer accepts the reference answer;
else the scorer is faulty and the reward is unknown.
"""

from __future__ import annotations

import ast
import contextlib
import os
import sys
from collections.abc import Mapping
from typing import Any

import reasoning_gym

from verifiers.runtime.processes import process_pool

LIMIT_S = 10.0
MAX_MEMORY_BYTES = 4 << 30
MAX_PROCESSES = 4
"""Each imports the whole library, about 200 MB."""
LITERALS = (
    "algorithmic.binary_matrix",
    "algorithmic.spiral_matrix",
    "algorithmic.string_insertion",
    "games.n_queens",
)
"""Modules that parse an answer with ``eval`` although only literals are valid."""
REFUSED = (
    "os.chflags os.chmod os.chown os.exec os.fork os.forkpty os.kill os.killpg os.link os.mkdir"
    " os.posix_spawn os.putenv os.remove os.rename os.rmdir os.setxattr os.spawn os.startfile"
    " os.symlink os.system os.truncate os.unsetenv os.utime pty.spawn signal.pthread_kill"
).split()
REFUSED_MODULES = "ctypes ftplib http shutil smtplib socket sqlite3 subprocess urllib".split()


async def score(
    name: str, config: Mapping[str, object], entry: Mapping[str, Any], answer: str | None
) -> float:
    """Return the score of the model's ``answer`` to an entry. *Raises* ScoringError when the scorer
    is faulty."""
    try:
        return await _call(name, config, entry, answer)
    except TimeoutError:
        await _call(name, config, entry, entry["answer"])  # raises when the scorer is faulty
        return 0.0


async def _call(
    name: str, config: Mapping[str, object], entry: Mapping[str, object], answer: str | None
) -> float:
    pool = process_pool(max(2, min(MAX_PROCESSES, os.cpu_count() or 1)), guard)
    arguments = {"name": name, "config": dict(config), "entry": dict(entry), "answer": answer}
    return float(await pool.run(plain_score, arguments, LIMIT_S, name))


def plain_score(
    name: str, config: Mapping[str, object], entry: Mapping[str, object], answer: str | None
) -> float:
    """Score in this process: for worker processes after ``guard``, and for trusted text."""
    scorer = _scorer(name, config)
    try:
        return float(scorer.score_answer(answer, entry))
    except Exception:  # noqa: BLE001  the next line raises when the scorer is faulty, not the text
        scorer.score_answer(entry["answer"], entry)
        return 0.0


_SCORERS: dict[tuple[str, str], Any] = {}


def _scorer(name: str, config: Mapping[str, object]) -> Any:
    key = name, repr(config)
    if key not in _SCORERS:
        _SCORERS[key] = reasoning_gym.create_dataset(name, **config)
    return _SCORERS[key]


# --- the guard ------------------------------------------------------------------------------------


def guard() -> None:
    """Restrict this process permanently to the operations that scorers need. Initializer of worker
    processes."""
    for module in LITERALS:
        if (scorers := sys.modules.get(f"reasoning_gym.{module}")) is not None:
            vars(scorers)["eval"] = ast.literal_eval
    # unsupported on this platform; the time limit still applies
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        limit = MAX_MEMORY_BYTES if hard == resource.RLIM_INFINITY else min(MAX_MEMORY_BYTES, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
    sys.addaudithook(_refuse)


def _refuse(event: str, arguments: tuple[Any, ...]) -> None:
    """Audit hook. *Raises* PermissionError for operations that no scorer needs."""
    if event == "open":
        _path, mode, flags = arguments
        writes = set(mode or "") & set("wax+") or (flags or 0) & (
            os.O_WRONLY | os.O_RDWR | os.O_CREAT
        )
    else:
        writes = event in REFUSED or event.partition(".")[0] in REFUSED_MODULES
    if writes:
        raise PermissionError(f"a scorer may not do this: {event}")
