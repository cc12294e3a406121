"""The words of the glossary: what its second table forbids stands in no docstring, comment, message
or page."""

import ast
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.import_graph import CORE, REPOSITORY, TRAINER
from support.sources import nodes_of

GLOSSARY = REPOSITORY / "docs/reference/glossary.md"
PAGES = [
    *REPOSITORY.glob("*.md"),
    *REPOSITORY.glob("docs/**/*.md"),
    *REPOSITORY.glob("packages/**/README.md"),
]
OLD_PATHS = CORE / "legacy/moved.py"
SOURCES = [
    path for package in (CORE, TRAINER) for path in package.rglob("*.py") if path != OLD_PATHS
]
BANNED_NAMES = frozenset(
    "twin keeper warden owed mu said told made asked wanted kept shown chosen".split()
)
VAGUE_NAMES = frozenset(
    "one ones place places found known given named taken left own whole other others rest".split()
)
"""Identifiers that say how a value came, or nothing: a name says what the value is."""
PUBLIC = {
    "checks/report.py": "place",  # a key of a report's JSON
    "clients/resolve.py": "given",
    "results/outputs.py": "place",
    "results/stored.py": "place",
    "types/requests.py": "given",
}
"""Names of the published interface."""


def forbidden() -> dict[str, str]:
    """Pattern -> what to write instead, from the glossary."""
    text = GLOSSARY.read_text(encoding="utf-8").split("## Words that are not used")[1]
    return dict(re.findall(r"^\| `(.+?)` \| (.+?) \|$", text, re.MULTILINE))


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """(line, text) of what people read: every string and comment of a module, every
    line of a page."""
    if path.suffix == ".md":
        yield from enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        return
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type in (
                tokenize.STRING,
                tokenize.COMMENT,
                getattr(tokenize, "FSTRING_MIDDLE", -1),
            ):
                yield token.start[0], token.string


def findings(path: Path, patterns: dict[str, str]) -> list[str]:
    text = path.read_text(encoding="utf-8")
    if not any(re.search(pattern, text, re.IGNORECASE) for pattern in patterns):
        return []  # without its words, whose tokens take three times as long
    return [
        f"{path.relative_to(REPOSITORY) if path.is_relative_to(REPOSITORY) else path}:{line}:"
        f" {match[0]!r}; write: {instead}"
        for line, text in prose(path)
        for pattern, instead in patterns.items()
        if (match := re.search(pattern, text, re.IGNORECASE))
    ]


def names(path: Path) -> Iterator[tuple[int, str]]:
    """(line, name) of what a module binds: variables, parameters, attributes, functions, classes.
    ``other`` of two operands and ``left`` with ``right`` are terms."""
    nodes = nodes_of(path)
    operands = {
        id(node.args[-1]) for node in nodes if isinstance(node, ast.arguments) and node.args
    }
    has_right = any(getattr(node, "id", getattr(node, "arg", "")) == "right" for node in nodes)
    for node in nodes:
        match node:
            case (
                ast.Name(id=name, ctx=ast.Store())
                | ast.Attribute(attr=name, ctx=ast.Store())
                | ast.arg(arg=name)
                | ast.FunctionDef(name=name)
                | ast.AsyncFunctionDef(name=name)
                | ast.ClassDef(name=name)
                | ast.ExceptHandler(name=str(name))
                | ast.MatchAs(name=str(name))
                | ast.alias(asname=str(name))
            ):
                is_term = id(node) in operands if name == "other" else has_right and name == "left"
                if not is_term:
                    yield getattr(node, "lineno", 0), name.strip("_").lower()


def test_words_that_the_glossary_forbids_are_not_used():
    patterns = forbidden()
    assert len(patterns) >= 6
    lines = [line for path in {*PAGES, *SOURCES} - {GLOSSARY} for line in findings(path, patterns)]
    assert not lines, "\n".join([f"{GLOSSARY.name} has another word for these:", *lines])


def test_names_say_what_the_value_is():
    lines = [
        f"{path.relative_to(REPOSITORY)}:{line}: {name}"
        for path in REPOSITORY.glob("packages/*/src/**/*.py")
        if path != OLD_PATHS
        for line, name in names(path)
        if name in BANNED_NAMES | VAGUE_NAMES
        and not any(path.match(file) and name == public for file, public in PUBLIC.items())
    ]
    rule = "a name says what the value is, not how it came (response, not given); rename these:"
    assert not lines, "\n".join([rule, *lines])


@pytest.mark.parametrize(
    "text", ['"""A twin of it."""', "x = 1  # the keeper knows", 'raise ValueError("3 are owed")']
)
def test_such_a_word_would_be_found(tmp_path, text):
    """Negative control."""
    path = tmp_path / "module.py"
    path.write_text(text + "\n")
    assert findings(path, forbidden())


@pytest.mark.parametrize(
    "code",
    ["found = 1", "for one in x: pass", "def f(place): pass", "x.known = 1", "def _own(): pass"],
)
def test_such_a_name_would_be_found(tmp_path, code):
    """Negative control."""
    path = tmp_path / "module.py"
    path.write_text(code + "\n")
    assert [name for _, name in names(path) if name in VAGUE_NAMES]
