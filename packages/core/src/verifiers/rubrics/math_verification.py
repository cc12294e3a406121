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
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unicodedata import decimal

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
a longer number."""
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
            if self.strict and _PLAIN_NUMBER.fullmatch(gold) and len(answer) > MAX_NUMBER_CHARS:
                return Outcome.DIFFERENT
            return await self._in_process(gold, answer)
        except TimeoutError:
            return await self._after_time_out(gold)

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
        arguments = {"engine": ENGINE, "gold": gold, "answer": answer, "strict": self.strict}
        return Outcome(
            await pool.run(compare_in_worker, arguments, self.timeout_seconds, "math verification")
        )


_PLAIN_NUMBER = re.compile(r"[-+]?[0-9][0-9,]*(?:\.[0-9]+)?")
_EQUALITY = re.compile(r"(?<![<>!:\\])=(?!=)")
_COMMAS = re.compile(r"[,;]|\\text\s*\{\s*(?:,\s*)?(?:and|or)\s*\}|\b(?:and|or)\b")
_OR = re.compile(r"\bor\b|\\lor\b|\\vee\b")
_NAME = re.compile(r"\|?\\?[a-zA-Z]+(?:_(?:\w|\{[^{}]*\}))?\'*(?:\([^()]*\))?\|?")
"""What an equation gives a value: ``a_{1}``, ``f(2)``, ``P(X=2)``."""
_TO_WORK_OUT = re.compile(
    r"(?<=[0-9)}])\s*(?:[-+]|(?:\*|\\times|\\cdot)(?!\s*10\s*\^)|\\div(?![a-z]))\s*(?=[0-9(\\{])"
)
_INNER = r"(?:[^{}]++|\{[^{}]*+\})*+"
SPELLINGS = (
    # what models and people write, what the engine reads
    (r"[\u200b-\u200d\u2060\ufeff]", ""),
    (r"\\underline\{([^{}]*)\}", r"\1"),
    (r"^\\[(\[](.*)\\[)\]]$", r"\1"),
    (r"^(\*\*|__|\*|`)(.*)\1$", r"\2"),
    (r"~|\\(?:q?quad|displaystyle|textstyle)(?![a-zA-Z])", " "),
    (r"(?:\\[ ,;:!]|\s){1,9}$|(?<!\\)\\$", ""),
    (r"\$?\s{0,9}(?<!\\)[.,;。，；]$|\\\\$", ""),
    (rf"\\(?:boldsymbol|bm|mathbf)\s{{0,9}}\{{({_INNER})\}}", r"\1"),
    (rf"^\{{\\(?:bf|rm|it|sf|tt|em)\b\s{{0,9}}({_INNER})\}}$", r"\1"),
    (r"^\\(?:text|textbf|textit|mathrm)\s{0,9}\{([^{}]*)\}$", r"\1"),
    (r"\$?\s{0,9}(?<!\\)[.,;。，；]$|\\\\$", ""),
    (r"\\mathrm\s{0,9}\{\s{0,9}([ei])\s{0,9}\}", r"\1"),
    (r"\\(binom|dbinom|tbinom)\s{0,9}(\d)\s{0,9}(\d)", r"\\\1{\2}{\3}"),
    (r"^(?:=|≈|\\approx|\\simeq)\s*", ""),
    (r"^\\text\{[^{}]*(?::|\bis)\s*\}\s*|^(?:[Tt]he )?(?:final )?[Aa]nswer(?: is\b|:)\s*:?\s*", ""),
    (r"^\(?([A-Z])[).:]$", r"\1"),
    (r"^(?=[^\d=<>]*+\d)([^=<>]*+)=\s*([a-zA-Z])$", r"\2=\1"),
    (r"[–−‐‑]", "-"),
    (r"^(-?\d+)(?:\s+|\\[ ,;])(\d+)\s*/\s*(\d+)$", r"\1\\frac{\2}{\3}"),
    (r"(?<=\d)(?:\\?[ _]|\\[,;!]|\{,\}|[\u00a0\u2009\u202f])(?=\d{3}(?!\d))", ""),
    (r"(?<=[\w)}\]])\*\*(?=[-\w({])", "^"),
    (r"[€£¥₹]", ""),
    (r"\\frac\{\\(?:text|mathrm)\{[^{}]*\}\}\{\\(?:text|mathrm)\{[^{}]*\}\}", ""),
    (r"\\langle", "("),
    (r"\\rangle", ")"),
    (r"\\varnothing", r"\\emptyset "),
    (r"\\log_(?:e|\{e\})", r"\\ln "),
    (r"\\sqrt\{-1\}", "i"),
    (r"(?<=\d)\s+(?=i\b)", ""),
    (r"∛\s*(?:\(([^()]*)\)|(\d+|[a-zA-Z]))", r"\\sqrt[3]{\1\2}"),
    (r"(?<![\\a-zA-Z])sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}"),
    (r"(?<![\\a-zA-Z])pi(?![a-zA-Z])", r"\\pi "),
    (r"[×✕]", r"\\times "),
    (r"·|∙|⋅", r"\\cdot "),
    (r"÷", r"\\div "),
    (r"±", r"\\pm "),
    (r"√\s*(?:\(([^()]*)\)|(\d+|[a-zA-Z]))", r"\\sqrt{\1\2}"),
    (r"°|º|˚", r"^\\circ "),
    (r"π", r"\\pi "),
    (r"∞", r"\\infty "),
    (r"⌊", r"\\lfloor "),
    (r"⌋", r"\\rfloor "),
    (r"⌈", r"\\lceil "),
    (r"⌉", r"\\rceil "),
    (r"≤", r"\\le "),
    (r"≥", r"\\ge "),
    (r"∪", r"\\cup "),
    (r"∈", r"\\in "),
    (r"²", "^{2}"),
    (r"³", "^{3}"),
    (r"½", r"\\frac{1}{2}"),
    (r"¼", r"\\frac{1}{4}"),
    (r"¾", r"\\frac{3}{4}"),
    (r"(?<!\\)%", r"\\%"),
    (r"(?<=\d)[eE]([-+]?\d+)(?![\d.a-zA-Z])", r"\\times 10^{\1}"),
    (r"\^\(?([-+]?\d{2,}|[-+]\d)\)?(?![\d.])", r"^{\1}"),
)
"""In this order, before a strict comparison."""
_SPELLINGS = [(re.compile(written, re.DOTALL), read) for written, read in SPELLINGS]
_REPEATING = re.compile(r"(?<!\d)(\d*)\.(\d*)(?:\\(?:overline|bar|dot)\{?|\((?=\d+\)))(\d+)[})]?")
_RATIO = re.compile(r"[1-9]\d*(?:\s*:\s*[1-9]\d*){2,}")
_IN_BASE = re.compile(r"([0-9a-zA-Z]+)_\{?([0-9]{1,2})\}?")
_PERCENT = re.compile(r"(?:\s|\\[ ,;!]){0,9}\\%$")
_HALF_OF_DAY = re.compile(
    r"(?<=\d)(?:\s|\\[,; ]|\\text\w*\{)*\b([ap])\.?\s?m\b\.?\s*\}?", re.IGNORECASE
)
TINY = 1e-3
"""Numbers below it are compared relatively: the engine rounds to 6 decimal places."""


def spelled(text: str) -> str:
    r"""The text in the engine's spelling.

    >>> spelled("8√3"), spelled("**42.**"), spelled("–1.5e-7")
    ('8\\sqrt{3}', '42', '-1.5\\times 10^{-7}')
    """
    if not text.isascii():  # digits of other scripts, and wide ones
        text = "".join(str(decimal(letter, letter)) for letter in text)
    for written, read in _SPELLINGS:
        text = written.sub(read, text.strip())
    if _RATIO.fullmatch(text):  # of three numbers or more, of which the engine reads the first
        first, *parts = text.split(":")
        text = f"({', '.join(['1', *(f'{number.strip()}/{first.strip()}' for number in parts)])})"
    return _REPEATING.sub(_as_fraction, text.strip())


def _as_fraction(match: re.Match[str]) -> str:
    """A repeating decimal as its fraction: ``0.1\\overline{6}`` is (16 - 1)/90."""
    integer, once, again = match.groups()
    numerator = int(integer + once + again) - int(integer + once or "0")
    return rf"\frac{{{numerator}}}{{{'9' * len(again)}{'0' * len(once)}}}"


def load_engine(engine: str) -> None:
    """Prepare a worker process: import the engine, then limit the memory that the process may add
    to it.

    Above ``MAX_MEMORY_BYTES`` allocations fail with a MemoryError that the process survives. The
    limit is relative to current use, because libraries reserve address space per core. Platforms
    without ``/proc`` have only the time limit.
    """
    importlib.import_module(engine)
    import sympy  # noqa: F401

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


def compare_in_worker(engine: str, gold: str, answer: str, strict: bool) -> str:
    """The ``Outcome`` of a comparison, as text. Runs in a worker process; ``engine`` is the name
    of the module."""
    math_verify = importlib.import_module(engine)
    if strict:
        gold, answer = spelled(gold), spelled(answer)
        if gold and gold == answer:
            return Outcome.EQUAL.value
        if differs_in_words(gold, answer):
            return Outcome.DIFFERENT.value
        gold, answer = _without_one_percent(gold, answer)
        gold, answer = _in_ten(*(_HALF_OF_DAY.sub("", text) for text in (gold, answer)))
    gold_parsed = _read(math_verify, gold, strict)
    if all(isinstance(expression, str) for expression in gold_parsed):  # no expression was parsed
        return Outcome.UNREADABLE_GOLD.value
    answer_parsed = _read(math_verify, answer, strict)

    def are_equal(left: Sequence[object], right: Sequence[object]) -> bool:
        if not (left and right):
            return False
        # an interval for an inequality, and an inequality for an interval
        options = {"timeout_seconds": None, "allow_set_relation_comp": strict}
        if math_verify.verify(left, right, **options):
            return True
        return strict and _are_exactly_equal(left[0], right[0])

    if not are_equal(gold_parsed, answer_parsed):
        return Outcome.DIFFERENT.value
    if not strict:
        return Outcome.EQUAL.value
    is_right = _is_one_value(gold_parsed[0], answer_parsed[0], answer)
    if not _EQUALITY.search(gold):  # each side of an equation that has a value is a claim
        are_several = _has_several_values(gold_parsed[0])
        for part in _outside_brackets(_COMMAS, answer) if are_several else [answer]:
            sides = _outside_brackets(_EQUALITY, part)
            claims = [side for side in sides if _is_claim(side)]
            if len(sides) > 1:
                values = [_read(math_verify, claim, strict) for claim in claims]
                first = values[0] if are_several and values else gold_parsed
                is_right = is_right and all(are_equal(first, value) for value in values)
            if _PLAIN_NUMBER.fullmatch(gold):
                is_right = is_right and not all(map(_TO_WORK_OUT.search, claims or [part]))
    is_right = is_right and _are_as_near_as_their_size(gold_parsed[0], answer_parsed[0])
    return (Outcome.EQUAL if is_right else Outcome.DIFFERENT).value


def differs_in_words(gold: str, answer: str) -> bool:
    """Whether words that the engine drops tell two answers apart: the half of a day.

    >>> differs_in_words("3:30 a.m.", "3:30 pm"), differs_in_words("3:30 a.m.", "3:30")
    (True, False)
    """
    halves = [_HALF_OF_DAY.search(text) for text in (gold, answer)]
    return all(halves) and len({half[1].lower() for half in halves if half}) == 2


def _without_one_percent(gold: str, answer: str) -> tuple[str, str]:
    """Two decimals of which one has a percent sign and both the same digits, without it: a gold
    answer of 12.5 asks for the number of percent, as the engine takes it for whole numbers.

    >>> _without_one_percent("12.5", "12.5 \\\\%"), _without_one_percent("0.125", "12.5\\\\%")
    (('12.5', '12.5'), ('0.125', '12.5\\\\%'))
    """
    bare = [_PERCENT.sub("", text) for text in (gold, answer)]
    has_one = (bare[0] == gold) != (bare[1] == answer)
    return (bare[0], bare[1]) if has_one and bare[0] == bare[1] else (gold, answer)


def _in_ten(gold: str, answer: str) -> tuple[str, str]:
    """Two numbers with a base each, whose subscripts the engine drops, in base ten."""
    numbers = []
    for text in (gold, answer):
        match = _IN_BASE.fullmatch(text)
        if match is None or not 2 <= int(match[2]) <= 36:
            return gold, answer
        try:
            numbers.append(str(int(match[1], int(match[2]))))
        except ValueError:  # a digit that the base does not have
            return gold, answer
    return numbers[0], numbers[1]


def _is_claim(side: str) -> bool:
    """Whether a side of an equation is a value, and not the name of what has it: ``f(2)``."""
    return re.search(r"[0-9]", side) is not None and not _NAME.fullmatch(side)


def _outside_brackets(separator: re.Pattern[str], text: str) -> list[str]:
    """The parts of a text between separators that are not in brackets."""
    parts, start, position, depth = [], 0, 0, 0
    for match in separator.finditer(text):
        before = text[position : match.start()]
        depth += sum(map(before.count, "({[")) - sum(map(before.count, ")}]"))
        position = match.start()
        if depth <= 0:
            parts.append(text[start : match.start()].strip())
            start = match.end()
    return [*parts, text[start:].strip()]


def _has_several_values(gold: object) -> bool:
    import sympy

    return isinstance(gold, sympy.Set | sympy.Tuple)


def _are_exactly_equal(gold: Any, answer: Any) -> bool:
    """Whether two expressions are equal, of which a decimal is read exactly: ``2^{0.5}``."""
    import sympy

    sides = [side.rhs if isinstance(side, sympy.Eq) else side for side in (gold, answer)]
    if not all(isinstance(side, sympy.Expr) for side in sides):
        return False
    decimals = set().union(*(side.atoms(sympy.Float) for side in sides))
    exact: dict[object, object] = {decimal: sympy.Rational(str(decimal)) for decimal in decimals}
    for symbol in set().union(*(side.free_symbols for side in sides)):
        exact[symbol] = sympy.Symbol(symbol.name)  # the engine takes some for real
    if not decimals:
        return False
    distance = sides[0].xreplace(exact) - sides[1].xreplace(exact)
    return bool((sympy.simplify if distance.is_number else sympy.expand)(distance) == 0)


def _is_one_value(gold: object, answer: object, text: str) -> bool:
    """Whether an equal answer is no list of values beside a single gold value: ``[7, 7]`` for 7."""
    import sympy

    if not isinstance(answer, sympy.FiniteSet) or _has_several_values(gold):
        return True
    return len(answer.args) == 1 and "," not in text


def _are_as_near_as_their_size(gold: Any, answer: Any) -> bool:
    """Whether two expressions that the engine takes for equal are so relatively, where they are
    ``TINY`` numbers: exact numbers exactly."""
    import sympy

    gold, answer = (side.rhs if isinstance(side, sympy.Eq) else side for side in (gold, answer))
    if isinstance(gold, sympy.Tuple | sympy.FiniteSet | sympy.Interval) and isinstance(
        answer, type(gold)
    ):
        pairs = [(g, a) for g in gold.args for a in answer.args]
        if not isinstance(gold, sympy.FiniteSet):
            pairs = list(zip(gold.args, answer.args, strict=False))
            return all(_are_as_near_as_their_size(g, a) for g, a in pairs)
        near = [(g, a) for g, a in pairs if _are_as_near_as_their_size(g, a)]
        return {g for g, _ in near} == set(gold.args) and {a for _, a in near} == set(answer.args)
    if not all(isinstance(side, sympy.Expr) and side.is_number for side in (gold, answer)):
        return True
    gold, answer = gold.doit(), answer.doit()
    size = max(abs(gold.evalf(30)), abs(answer.evalf(30)))
    if not size < TINY:
        return True
    if gold.is_Rational and answer.is_Rational:
        return bool(gold == answer)
    is_exact = not (gold.has(sympy.Float) or answer.has(sympy.Float))
    distance = abs((gold - answer).evalf(30))
    return bool(distance <= size * (1e-12 if is_exact else TINY))


def _read(engine: ModuleType, text: str, strict: bool) -> list[Any]:
    """The parsed expression and its text; empty for text with unbalanced braces. Inequalities with
    "or" between them, a list to the engine, are a union if strict."""
    in_box = f"\\boxed{{{text}}}"
    if extract_boxed_answer(in_box, strict=True) != text:
        return []
    only_latex = [engine.LatexExtractionConfig(boxed_match_priority=0)]
    parsed: list[object] = engine.parse(in_box, extraction_config=only_latex, parsing_timeout=None)
    if strict and parsed and _OR.search(text):
        import sympy

        members = getattr(parsed[0], "args", ())
        if members and all(isinstance(m, sympy.core.relational.Relational) for m in members):
            parsed[0] = sympy.Union(*(member.as_set() for member in members))
    return parsed


def _content(text: str) -> str:
    """The content of the last box, else the whole text, without surrounding white space and dollar
    signs."""
    return extract_boxed_answer(text).strip().strip("$").strip()
