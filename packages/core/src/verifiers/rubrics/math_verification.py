r"""Compare two mathematical answers with math-verify, in worker processes that are killed at a time
limit.

Model text reaches the algebra engine only in a worker process, limited in time and memory, and only
through its LaTeX grammar (Python is never evaluated). Equal texts and pairs of plain integers need
no process. The engine's time-outs, alarm signals that fail outside the main thread, are disabled.

Extracting an answer from a completion, and the reward, are in ``math_rubric``. Verifiers with the
same ``max_workers`` share the worker processes of an event loop, which end with that loop.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verifiers.data.text import extract_boxed_answer
from verifiers.errors import ConfigError
from verifiers.runtime.install_lines import install_line
from verifiers.runtime.processes import process_pool

if TYPE_CHECKING:
    from types import ModuleType

ENGINE = "math_verify"
MAX_MEMORY_BYTES = 2 << 30
"""Memory that a worker process may allocate after importing the engine."""
MAX_DEFAULT_WORKERS = 8
MAX_NUMBER_CHARS = 200
"""Longest answer that can be a plain number: the engine would spend its whole time on
a longer one."""
_INTEGER = re.compile(r"[+-]?[0-9]{1,18}")


class Outcome(StrEnum):
    """Result of comparing a model's answer with the gold answer."""

    EQUAL = "equal"
    DIFFERENT = "different"
    TIMED_OUT = "timed out"
    """No result within the limit because of the answer: the gold answer alone is parsed in time."""
    UNREADABLE_GOLD = "unreadable gold"
    """The engine cannot parse the gold answer as mathematics, or not in time."""


class MathVerifier:
    """Compares answers. ``timeout_seconds`` limits one comparison, ``max_workers`` the number of
    processes.

    *Raises* ConfigError when the extra ``math`` is not installed or a setting cannot be used.
    """

    def __init__(
        self,
        timeout_seconds: float = 5.0,
        max_workers: int | None = None,
        max_verify_chars: int = 50_000,
        strict: bool = True,
    ) -> None:
        if not timeout_seconds > 0:
            raise ConfigError(
                f"timeout_seconds must be above 0, not {timeout_seconds!r}", key="timeout_seconds"
            )
        if max_workers is not None and max_workers < 1:
            raise ConfigError(
                f"max_workers must be 1 or more, not {max_workers!r}", key="max_workers"
            )
        if importlib.util.find_spec(ENGINE) is None:
            raise ConfigError(
                "math-verify, which compares answers, is not installed:"
                f" {install_line('verifiers', 'math')}"
            )
        self.timeout_seconds = timeout_seconds
        self.max_workers = max_workers or max(2, min(MAX_DEFAULT_WORKERS, os.cpu_count() or 1))
        self.max_verify_chars = max_verify_chars
        self.strict = strict

    async def compare(self, gold: object, answer: str) -> Outcome:
        r"""Compare ``answer`` with ``gold``; a ``\boxed{…}`` in either is replaced by its content.

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
            if self.strict and not is_one_answer(gold, answer):
                return await self._refused(gold)
            outcome = await self._in_process(gold, answer)
            if outcome is Outcome.EQUAL and self.strict:
                for side in other_sides(gold, answer):
                    outcome = (
                        await self._in_process(gold, side) if outcome is Outcome.EQUAL else outcome
                    )
            return outcome
        except TimeoutError:
            return await self._after_time_out(gold)

    async def _refused(self, gold: str) -> Outcome:
        """DIFFERENT, unless no answer can be compared with the gold answer."""
        if _PLAIN_NUMBER.fullmatch(gold):
            return Outcome.DIFFERENT
        outcome = await self._in_process(gold, "0")
        return outcome if outcome is Outcome.UNREADABLE_GOLD else Outcome.DIFFERENT

    async def _after_time_out(self, gold: str) -> Outcome:
        """Determine whether the answer or the gold caused a time-out: compare the gold with a
        trivial answer."""
        try:
            outcome = await self._in_process(gold, "0")
        except TimeoutError:
            return Outcome.UNREADABLE_GOLD
        return outcome if outcome is Outcome.UNREADABLE_GOLD else Outcome.TIMED_OUT

    async def _in_process(self, gold: str, answer: str) -> Outcome:
        pool = process_pool(self.max_workers, load_engine, (ENGINE,))
        arguments = {"engine": ENGINE, "gold": gold, "answer": answer}
        return Outcome(
            await pool.run(compare_in_worker, arguments, self.timeout_seconds, "math verification")
        )


_PLAIN_NUMBER = re.compile(r"[-+]?[0-9][0-9,]*(?:\.[0-9]+)?")
_THOUSANDS = re.compile(r"(?<=[0-9])(?:,|\{,\}|,?\\[!,])(?=[0-9]{3}(?![0-9]))")
_EQUALITY = re.compile(r"(?<![<>!:\\])=(?!=)")
_TO_WORK_OUT = re.compile(
    r"(?<=[0-9)}])\s*(?:[-+*]|\\times(?!\s*10\s*\^)|\\cdot(?!\s*10\s*\^)|\\div(?![a-z]))\s*(?=[0-9(\\{])"
)


def is_one_answer(gold: str, answer: str) -> bool:
    r"""Whether an answer is one value, worked out: no list beside a single gold value, no sum
    beside a plain number.

    >>> is_one_answer("7", "[7, 7]"), is_one_answer("7", "4 + 3"), is_one_answer("7000", r"7 \times 10^3")
    (False, False, True)
    >>> is_one_answer("19", "12 + 7 = 19"), is_one_answer("(1, 2)", "(1, 2)"), is_one_answer("1024", "1,024")
    (True, True, True)
    """
    plain = _THOUSANDS.sub("", answer)
    if "," in plain and "," not in _THOUSANDS.sub("", gold):
        return False
    if not _PLAIN_NUMBER.fullmatch(gold):
        return True
    return len(plain) <= MAX_NUMBER_CHARS and not _TO_WORK_OUT.search(_EQUALITY.split(plain)[-1])


def other_sides(gold: str, answer: str) -> list[str]:
    r"""The sides of an equation that must equal the gold answer too: those with a digit, but for
    the last.

    >>> other_sides("7", "7 + 1 = 7"), other_sides("7", "x = 7"), other_sides("x = 7", "x = 7")
    (['7 + 1'], [], [])
    """
    if _EQUALITY.search(gold):
        return []
    return [side.strip() for side in _EQUALITY.split(answer)[:-1] if re.search(r"[0-9]", side)]


def load_engine(engine: str) -> None:
    """Prepare a worker process: import the engine, then limit the memory that the process may add
    to it.

    Above ``MAX_MEMORY_BYTES`` allocations fail with a MemoryError that the process survives. The
    limit is relative to current use, because libraries reserve address space per core. Platforms
    without ``/proc`` have only the time limit.
    """
    importlib.import_module(engine)
    statm = Path("/proc/self/statm")
    if not statm.exists():
        return
    import resource

    used = int(statm.read_text().split()[0]) * resource.getpagesize()
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    limit = used + MAX_MEMORY_BYTES
    resource.setrlimit(
        resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard)
    )


def compare_in_worker(engine: str, gold: str, answer: str) -> str:
    """The ``Outcome`` of one comparison, as text. Runs in a worker process; ``engine`` is the name
    of the module."""
    math_verify = importlib.import_module(engine)
    gold_parsed = _read(math_verify, gold)
    if all(isinstance(expression, str) for expression in gold_parsed):  # no expression was parsed
        return Outcome.UNREADABLE_GOLD.value
    answer_parsed = _read(math_verify, answer)
    is_equal = bool(answer_parsed) and math_verify.verify(
        gold_parsed, answer_parsed, timeout_seconds=None
    )
    return (Outcome.EQUAL if is_equal else Outcome.DIFFERENT).value


def _read(engine: ModuleType, text: str) -> list[Any]:
    """The parsed expression and its text; empty for text with unbalanced braces."""
    in_box = f"\\boxed{{{text}}}"
    if extract_boxed_answer(in_box, strict=True) != text:
        return []
    only_latex = [engine.LatexExtractionConfig(boxed_match_priority=0)]
    parsed: list[Any] = engine.parse(in_box, extraction_config=only_latex, parsing_timeout=None)
    return parsed


def _content(text: str) -> str:
    """The content of the last box, else the whole text, without surrounding white space and dollar
    signs."""
    return extract_boxed_answer(text).strip().strip("$").strip()
