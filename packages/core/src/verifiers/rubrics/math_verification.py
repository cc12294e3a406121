r"""Whether two mathematical answers are equal, found out by math-verify in processes that are killed at a time limit.

The promise: model text reaches an algebra engine only in a worker process, bounded in time and memory, and only through
its LaTeX grammar (no evaluation of Python). Answers that are the same text, or two plain integers, need no process.
The engine's own time-outs are alarm signals, which fail off the main thread; they are switched off.

This module extracts no answer from a completion and gives no reward (``math_rubric``). The processes of one event loop
are shared by all verifiers with the same number of workers, stay warm, and end with the loop.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import importlib.util
import os
import re
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from verifiers.data.text import extract_boxed_answer
from verifiers.errors import ConfigError
from verifiers.runtime.per_loop import PerLoop
from verifiers.runtime.processes import Processes
from verifiers.runtime.threads import call_in_thread

ENGINE = "math_verify"
MAX_MEMORY_BYTES = 2 << 30
"""What one worker process may allocate beyond what it has when the engine is imported."""
MAX_DEFAULT_WORKERS = 8
_INTEGER = re.compile(r"[+-]?[0-9]{1,18}")


class Outcome(StrEnum):
    """What was found out about a model's answer."""

    EQUAL = "equal"
    DIFFERENT = "different"
    TIMED_OUT = "timed out"
    """No result within the limit, and that is the answer's doing: the gold answer alone is read in time."""
    UNREADABLE_GOLD = "unreadable gold"
    """The gold answer is no mathematics that the engine reads, or takes it too long."""


class MathVerifier:
    """Compares answers. ``timeout_seconds`` bounds one comparison, ``max_workers`` the processes at a time.

    *Raises* ConfigError when the extra ``math`` is not installed or a setting cannot be used.
    """

    def __init__(
        self, timeout_seconds: float = 5.0, max_workers: int | None = None, max_verify_chars: int = 50_000
    ) -> None:
        if not timeout_seconds > 0:
            raise ConfigError(f"timeout_seconds must be above 0, not {timeout_seconds!r}", key="timeout_seconds")
        if max_workers is not None and max_workers < 1:
            raise ConfigError(f"max_workers must be 1 or more, not {max_workers!r}", key="max_workers")
        if importlib.util.find_spec(ENGINE) is None:
            raise ConfigError("math-verify is not installed, which checks answers: pip install 'verifiers[math]'")
        self.timeout_seconds = timeout_seconds
        self.max_workers = max_workers or max(2, min(MAX_DEFAULT_WORKERS, os.cpu_count() or 1))
        self.max_verify_chars = max_verify_chars

    async def compare(self, gold: Any, answer: str) -> Outcome:
        r"""What is known about ``answer``; the content of a ``\boxed{…}`` in either counts in its place.

        *Raises* ScoringError when the worker process died or could not import the engine.
        """
        gold, answer = _content("" if gold is None else str(gold)), _content(answer)
        if gold and gold == answer:
            return Outcome.EQUAL
        if _INTEGER.fullmatch(gold) and _INTEGER.fullmatch(answer):
            return Outcome.EQUAL if int(gold) == int(answer) else Outcome.DIFFERENT
        if not gold or len(gold) > self.max_verify_chars:
            return Outcome.UNREADABLE_GOLD
        if not answer or len(answer) > self.max_verify_chars:
            return Outcome.DIFFERENT
        try:
            return await self._in_process(gold, answer)
        except TimeoutError:
            return await self._after_time_out(gold)

    async def _after_time_out(self, gold: str) -> Outcome:
        """Whose doing it was: a harmless answer is compared with the same gold."""
        try:
            outcome = await self._in_process(gold, "0")
        except TimeoutError:
            return Outcome.UNREADABLE_GOLD
        return outcome if outcome is Outcome.UNREADABLE_GOLD else Outcome.TIMED_OUT

    async def _in_process(self, gold: str, answer: str) -> Outcome:
        pool = _pools(self.max_workers).here()
        arguments = {"engine": _ImportedThere(ENGINE), "gold": gold, "answer": answer}
        async with pool.free:
            found = await call_in_thread(
                pool.processes.call, compare_in_worker, arguments, self.timeout_seconds, "math verification"
            )
        return Outcome(found)


def compare_in_worker(engine: Any, gold: str, answer: str) -> str:
    """The ``Outcome`` of one comparison, as text. Runs in a worker process; ``engine`` is the module math_verify."""
    _bound_memory()
    wanted = _read(engine, gold)
    if not any(not isinstance(one, str) for one in wanted):
        return Outcome.UNREADABLE_GOLD.value
    given = _read(engine, answer)
    is_equal = bool(given) and engine.verify(wanted, given, timeout_seconds=None)
    return (Outcome.EQUAL if is_equal else Outcome.DIFFERENT).value


def _read(engine: Any, text: str) -> list[Any]:
    """The expression in ``text`` with its source; nothing for text that cannot stand in braces."""
    in_box = f"\\boxed{{{text}}}"
    if extract_boxed_answer(in_box, strict=True) != text:
        return []
    only_latex = [engine.LatexExtractionConfig(boxed_match_priority=0)]
    read: list[Any] = engine.parse(in_box, extraction_config=only_latex, parsing_timeout=None)
    return read


@functools.cache
def _bound_memory() -> None:
    """Let the kernel refuse this process more than ``MAX_MEMORY_BYTES``: a MemoryError, which the engine survives.

    Relative to the present, since libraries reserve address space by the number of cores. Does nothing on platforms
    without ``/proc``; the time limit remains there.
    """
    statm = Path("/proc/self/statm")
    if not statm.exists():
        return
    import resource

    used = int(statm.read_text().split()[0]) * resource.getpagesize()
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    wanted = used + MAX_MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard))


@dataclass(frozen=True, slots=True)
class _ImportedThere:
    """Arrives in a worker process as the module of this name: imported there, before the time limit begins."""

    name: str

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return importlib.import_module, (self.name,)


class _Pool:
    """Worker processes of one event loop; ``free`` keeps the queue on the loop, so that no threads wait in it."""

    def __init__(self, num_workers: int) -> None:
        self.processes = Processes(num_workers)
        self.free = asyncio.Semaphore(num_workers)

    async def close(self) -> None:
        self.processes.close()


@functools.cache
def _pools(num_workers: int) -> PerLoop[_Pool]:
    return PerLoop(lambda: _Pool(num_workers), _Pool.close)


def _content(text: str) -> str:
    """The answer itself: out of its last box, without white space and dollar signs around it."""
    return extract_boxed_answer(text).strip().strip("$").strip()
