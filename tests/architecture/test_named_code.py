"""What ARCHITECTURE.md and the glossary name, files and names of the code, exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
SOURCES = [REPOSITORY / "packages/core/src/verifiers"]
SOURCES += [REPOSITORY / "packages/trainer/src/verifiers_trainer"]
NAMES = r"((?:`\w+`(?:, )?)+)"
FILE = r"`(\w+(?:/\w+)*\.py|\w+(?:/\w+)+)`"


def names_in(path: Path) -> set[str]:
    """Every name that a module, or a module of a folder, defines, imports or reads."""
    files = sorted(path.rglob("*.py")) if path.is_dir() else [path]
    names: set[str] = set()
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                names.add(node.name)
            elif isinstance(node, ast.Name):
                names.add(node.id)
    return names


def missing_in_table(text: str) -> list[str]:
    """Files of the table "Where to change what" that do not exist, and names that a file does not
    have: those after a colon, in brackets, or before "in"."""
    table = text.partition("## Where to change what")[2].partition("\n## ")[0]
    files = {name: files_called(name) for name in re.findall(FILE, table)}
    missing = [name for name, paths in files.items() if not paths]
    pairs = re.findall(f"{FILE}(?:: | \\(){NAMES}", table)
    pairs += [(file, names) for names, file in re.findall(f"{NAMES} in {FILE}", table)]
    for file, names in pairs:
        present = set().union(*map(names_in, files[file]))
        missing += [n for n in re.findall(r"\w+", names) if files[file] and n not in present]
    return missing


def files_called(name: str) -> list[Path]:
    """The modules or folders with this path, below a source folder or below a folder of it."""
    return [
        path
        for source in SOURCES
        for path in [source / name, *(folder / name for folder in source.iterdir())]
        if path.exists()
    ]


def missing_in_glossary(text: str) -> list[str]:
    """Dotted names of the last column that are no module, nor a name in one."""
    missing = []
    for line in text.splitlines():
        if line.count("|") != 4:
            continue
        for name in re.findall(r"`(\w+(?:\.\w+)+)`", line.split("|")[3]):
            *folders, last = name.split(".")
            if folders[0] == "vf" or folders[0][0].isupper():  # an attribute of a class
                continue
            is_module = any(
                (source.joinpath(*folders, last).with_suffix(end)).exists()
                for source in SOURCES
                for end in ("", ".py")
            )
            holders = [
                path
                for source in SOURCES
                for path in (
                    source.joinpath(*folders).with_suffix(".py"),
                    source.joinpath(*folders),
                )
                if path.exists()
            ]
            if not is_module and not any(last in names_in(path) for path in holders):
                missing.append(name)
    return missing


PAGES = {
    "ARCHITECTURE.md": missing_in_table,
    "docs/reference/glossary.md": missing_in_glossary,
}


@pytest.mark.parametrize("page", PAGES)
def test_what_a_page_names_exists(page):
    assert PAGES[page]((REPOSITORY / page).read_text(encoding="utf-8")) == []


def test_a_name_that_moved_is_noticed():
    table = (
        "## Where to change what\n| a group | `pipeline/pipeline.py`: `GroupState`, `capacity` |\n"
    )
    assert missing_in_table(table) == ["GroupState"]
    assert missing_in_table(table.replace("pipeline.py", "line.py")) == ["pipeline/line.py"]
    glossary = "| **plan** | the rollouts | `runs.runner.Plans`, `runs.plan` |\n"
    assert missing_in_glossary(glossary) == ["runs.runner.Plans"]
