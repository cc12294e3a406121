"""Core names no distribution above it, and nothing that one provides: it finds them by entry point,
and those that are missing in ``distributions.json``."""

import re

import pytest

from support.import_graph import CORE
from verifiers.runtime.distributions import SANDBOXES, distributions, packages, provided

HISTORY = ("compat.py", "legacy/", "__init__.pyi")
"""Where things were once, and what type checkers read, which look nothing up."""
NAMES = sorted({*distributions(), *packages(), *provided(SANDBOXES)})
NAMED = re.compile(rf"(?<![\w-])(?:{'|'.join(map(re.escape, NAMES))})(?![\w-])")


def named_in(text):
    return NAMED.findall(text)


def test_no_source_of_core_names_what_stands_above_it():
    sources = {
        path.relative_to(CORE).as_posix(): path.read_text(encoding="utf-8")
        for path in CORE.rglob("*.py*")
        if path.suffix in (".py", ".pyi")
    }
    assert len(sources) > 200
    assert {
        name: named_in(text)
        for name, text in sources.items()
        if not name.startswith(HISTORY) and named_in(text)
    } == {}


@pytest.mark.parametrize(
    "line",
    ['part("x", "verifiers-agents")', "import verifiers_trainer.cli", 'AUTO = {"docker": 1}'],
)
def test_such_a_line_would_be_found(line):
    """Negative control."""
    assert named_in(line)
