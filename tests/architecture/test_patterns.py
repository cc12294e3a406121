"""Every regular expression of the sources takes time in proportion to its text. The worst texts of a
pattern are derived from the pattern: each of its repetitions, repeated as often as fits, with and
without what stands before and after it."""

from __future__ import annotations

import ast
import importlib
import itertools
import re
import signal
import threading
import time
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from re import _constants as ops  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

import pytest

REPO = Path(__file__).resolve().parents[2]
SOURCES = sorted(
    path
    for path in REPO.glob("packages/**/src/**/*.py")
    if re.search(r"\bre\.\w+\(", path.read_text())
)
SHORT, LONG = 2_000, 48_000
"""Characters of a text; one that takes ``NOTICED_S``, and four times as long more than 8 times that,
is tried with 24 times as many."""
NOTICED_S, MAX_CPU_S = 0.001, 0.5
"""The square of the longer text takes several seconds."""
Recipe = tuple[tuple[str, float], ...]
"""(part, its share of the text; 0: once) for each part of a text."""
METHODS = frozenset("search match fullmatch sub subn findall finditer split".split())
SAMPLES = [*map(chr, range(32, 127)), "\n", "\t", "é", "\x1b"]
PARTS_OF_A_PATTERN = {
    "agent.py:_python_version": "the name of a file",
    "coverage.py:looks_like_call": "literal names of tools",
    "installer.py:_failed_with": "literal names, in the last lines of an installer",
    "rows.py:_leak": "a literal answer",
    "tasks.py:names_the_capital": "literal names",
}
"""Functions that put a pattern together: of literal parts alone."""


# --- the patterns ---------------------------------------------------------------------------------


def uses_in(path: Path) -> Iterator[tuple[int, re.Pattern[Any], str]]:
    """(line, pattern, method) of every regular expression that a file writes out."""
    tree = ast.parse(path.read_text())
    names: dict[str, Any] = {"re": re}
    for statement in tree.body:
        for name, value in _assigned(statement):
            names.setdefault(name, _value_of(value, names))
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and ast.unparse(node.func).startswith("re.")):
            continue
        method = ast.unparse(node.func).removeprefix("re.")
        if method not in METHODS | {"compile"}:
            continue
        pattern = _value_of(node, names) if method == "compile" else _compiled(node, names)
        if isinstance(pattern, re.Pattern):
            for used in _methods_of(tree, node) if method == "compile" else [method]:
                yield node.lineno, pattern, used
            continue
        at = [f.name for f in functions if f.lineno <= node.lineno <= (f.end_lineno or 0)]
        if at:
            assert f"{path.name}:{at[-1]}" in PARTS_OF_A_PATTERN, f"{path}:{node.lineno}"
        else:  # put together when the module is imported
            yield from _patterns_of(path, node.lineno)


def _assigned(statement: ast.stmt) -> Iterator[tuple[str, ast.expr]]:
    if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
        yield statement.targets[0].id, statement.value


def _value_of(expression: ast.expr, names: dict[str, Any]) -> Any:
    try:
        return eval(compile(ast.Expression(expression), "", "eval"), dict(names))
    except Exception:  # noqa: BLE001 - it needs what only the module has
        return None


def _compiled(call: ast.Call, names: dict[str, Any]) -> re.Pattern[Any] | None:
    flags = [k.value for k in call.keywords if k.arg == "flags"]
    flags += [argument for argument in call.args if ast.unparse(argument).startswith("re.")]
    text = _value_of(call.args[0], names)
    if isinstance(text, re.Pattern) or not isinstance(text, str | bytes):
        return text if isinstance(text, re.Pattern) else None
    return re.compile(text, sum(_value_of(flag, names) for flag in flags))


def _methods_of(tree: ast.Module, call: ast.Call) -> list[str]:
    """The methods called on the name that a compiled pattern gets; "search" if that is not seen."""
    names = {
        name
        for statement in ast.walk(tree)
        for name, value in (_assigned(statement) if isinstance(statement, ast.stmt) else ())
        if any(node is call for node in ast.walk(value))
    }
    methods = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in names
    }
    return sorted(methods & METHODS) or ["search"]


def _patterns_of(path: Path, line: int) -> Iterator[tuple[int, re.Pattern[Any], str]]:
    name = ".".join(path.with_suffix("").parts[path.parts.index("src") + 1 :])
    values = vars(importlib.import_module(name)).values()
    pending = [value for value in values if isinstance(value, dict | list | tuple)]
    while pending:
        value = pending.pop()
        if isinstance(value, re.Pattern):
            yield line, value, "search"
        elif isinstance(value, dict):
            pending += value.values()
        elif isinstance(value, list | tuple):
            pending += value


# --- their worst texts ----------------------------------------------------------------------------


def worst_texts(pattern: re.Pattern[Any]) -> Iterator[Recipe]:
    """How to make texts of what the pattern repeats."""
    text = pattern.pattern
    tree = parser.parse(
        text if isinstance(text, str) else text.decode("latin1"), pattern.flags & ~re.UNICODE
    )
    triples = [("", example, "") for example in _examples(tree, 1)]
    triples += [("", char, "") for char in "a \n0."]
    _repetitions(tree, [""], triples)
    seen: set[Recipe] = set()
    for before, repeated, after in triples:
        once, all_of_it = (before, 0.0), (repeated, 1.0)
        for recipe in (
            (once, all_of_it, (after, 0.0)),
            (once, all_of_it, ("\x00", 0.0)),
            ((before + repeated, 1.0),),
            ((before + 2 * repeated, 1.0),),
            ((before + 20 * repeated, 1.0),),
            ((before, 1.0),),
            ((f"{before}\n", 1.0),),
            ((before, 0.5), (repeated, 0.5)),
            ((repeated, 0.5), (before, 0.5)),
        ):
            if recipe not in seen:
                seen.add(recipe)
                yield recipe


def _text(recipe: Recipe, num_chars: int) -> str:
    return "".join(
        part * (int(num_chars * share) // len(part)) if share and part else part
        for part, share in recipe
    )


def _repetitions(items: Iterable[Any], prefixes: list[str], found: list[tuple[str, str, str]]):
    """Append (what stands before, what is repeated, what stands after) of each repetition."""
    items = list(items)
    for i, (op, value) in enumerate(items):
        before = [p + e for p in prefixes for e in _examples(items[:i], 2)][:6]
        if op in (ops.MAX_REPEAT, ops.MIN_REPEAT, ops.POSSESSIVE_REPEAT):
            _, most, part = value
            examples = [example for example in _examples(part, 4) if example]
            if most is ops.MAXREPEAT or most > 16:
                after = _examples(items[i + 1 :], 1)[0]
                found += [(p, example, after) for p in before for example in examples]
                found += [
                    (before[0], a + b, after) for a, b in itertools.combinations(examples[:4], 2)
                ]
            _repetitions(part, before, found)
        elif op is ops.SUBPATTERN:
            _repetitions(value[3], before, found)
        elif op is ops.ATOMIC_GROUP:
            _repetitions(value, before, found)
        elif op is ops.BRANCH:
            for branch in value[1]:
                _repetitions(branch, before, found)
        elif op in (ops.ASSERT, ops.ASSERT_NOT):
            _repetitions(value[1], before, found)


def _examples(items: Iterable[Any], num: int) -> list[str]:
    """Some short texts that the parts of a pattern match, at least one."""
    texts = [""]
    for op, value in items:
        texts = [a + b for a in texts for b in _examples_of(op, value, num)][: 4 * num]
    return texts or [""]


def _examples_of(op: Any, value: Any, num: int) -> list[str]:
    if op is ops.LITERAL:
        return [chr(value)]
    if op is ops.ANY or op is ops.NOT_LITERAL:
        return _spread([c for c in SAMPLES if ord(c) != (10 if op is ops.ANY else value)], num)
    if op is ops.IN:
        return _spread([c for c in SAMPLES if _is_in(c, value)], num) or [
            chr(item) for kind, item in value if kind is ops.LITERAL
        ]
    if op is ops.BRANCH:
        return [text for branch in value[1] for text in _examples(branch, 1)][: max(4, 4 * num)]
    if op in (ops.SUBPATTERN, ops.ATOMIC_GROUP):
        return _examples(value[3] if op is ops.SUBPATTERN else value, num)
    if op in (ops.MAX_REPEAT, ops.MIN_REPEAT, ops.POSSESSIVE_REPEAT):
        return [text * min(value[0], 40) for text in _examples(value[2], num)]
    return ["a"] if op is ops.GROUPREF else [""]


def _is_in(char: str, items: list[Any]) -> bool:
    classes = {
        ops.CATEGORY_DIGIT: char.isdigit(),
        ops.CATEGORY_SPACE: char.isspace(),
        ops.CATEGORY_WORD: char.isalnum() or char == "_",
        ops.CATEGORY_NOT_DIGIT: not char.isdigit(),
        ops.CATEGORY_NOT_SPACE: not char.isspace(),
        ops.CATEGORY_NOT_WORD: not (char.isalnum() or char == "_"),
    }
    is_listed = any(
        ord(char) == value
        if kind is ops.LITERAL
        else value[0] <= ord(char) <= value[1]
        if kind is ops.RANGE
        else kind is ops.CATEGORY and classes[value]
        for kind, value in items
    )
    return is_listed != any(kind is ops.NEGATE for kind, _ in items)


def _spread(chars: list[str], num: int) -> list[str]:
    """Some of the characters, of each kind."""
    kinds = {(c.isalpha(), c.isdigit(), c.isspace()): c for c in chars}
    return list(dict.fromkeys([*kinds.values(), *chars]))[:num]


# --- the test -------------------------------------------------------------------------------------


def slow_text(pattern: re.Pattern[Any], method: str) -> str | None:
    """A text for which the pattern takes longer than ``MAX_CPU_S``; None if there is none."""

    def too_slow(*_: object) -> None:
        raise TimeoutError

    def spent_s(text: str) -> float:
        subject = text if isinstance(pattern.pattern, str) else text.encode()
        arguments = [subject[:0], subject] if method in ("sub", "subn") else [subject]
        started = time.process_time()
        for _ in result if isinstance(result := use(*arguments), Iterator) else ():
            pass
        return time.process_time() - started

    use = getattr(pattern, method)
    previous = signal.signal(signal.SIGPROF, too_slow)
    try:
        for recipe in worst_texts(pattern):
            signal.setitimer(signal.ITIMER_PROF, MAX_CPU_S)
            try:
                if spent_s(_text(recipe, SHORT)) > NOTICED_S:
                    short_s = spent_s(_text(recipe, SHORT))  # the first may have been slower
                    if spent_s(_text(recipe, 4 * SHORT)) > 8 * short_s:
                        spent_s(_text(recipe, LONG))
            except TimeoutError:
                return f"{_text(recipe, 40)} …"
            finally:
                signal.setitimer(signal.ITIMER_PROF, 0)
        return None
    finally:
        signal.signal(signal.SIGPROF, previous)


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="the limit is a timer of the process")
@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(REPO).as_posix())
def test_every_pattern_takes_time_in_proportion_to_its_text(path):
    assert threading.current_thread() is threading.main_thread()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        slow = [
            f"{path.relative_to(REPO)}:{line} {method} of {text!r}"
            for line, pattern, method in uses_in(path)
            if (text := slow_text(pattern, method))
        ]
    assert not slow, "\n".join(slow)


def test_the_patterns_are_found():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert sum(1 for path in SOURCES for _ in uses_in(path)) > 150


@pytest.mark.parametrize(
    ("pattern", "method"),
    [
        (r"\b[a-z][a-z+.-]*://", "sub"),  # starts everywhere
        (r"(a+)+$", "match"),
        (r"\s+$", "search"),
        (r"<think>.*?</think>", "sub"),
        (r"[\s.]*x?[\s.]*", "fullmatch"),
        (r"is (?P<a>\d+).*?(?P<b>\d+) in", "search"),
    ],
)
def test_patterns_that_take_the_square_of_a_text_are_found(pattern, method):
    assert slow_text(re.compile(pattern, re.DOTALL), method) is not None
