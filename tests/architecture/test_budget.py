"""Every folder has a number of lines, in ``pyproject.toml``.

It may fall freely, and rises only in a commit that says why.
"""

import re
import tomllib
from collections.abc import Iterable
from pathlib import Path

import pytest

from support.import_graph import REPOSITORY

BUDGET = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["tool"][
    "verifiers"
]["budget"]
TABLE = "[tool.verifiers.budget] of pyproject.toml"


def sources(root: Path, pattern: str) -> list[Path]:
    """Python files of the product; templates are text that it writes."""
    return [path for path in root.glob(pattern) if not {"templates", ".venv"} & set(path.parts)]


def num_lines(paths: Iterable[Path]) -> int:
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)


def lines_by_folder(root: Path) -> dict[str, int]:
    """Folder below ``packages`` -> lines of Python; environments count together, files at a top as
    that top."""
    lines: dict[str, int] = {}
    for path in sources(root, "packages/**/src/**/*.py"):
        distribution, *folders = [
            part for part in path.relative_to(root / "packages").parts if part != "src"
        ]
        folder = (
            "/".join([distribution, *folders[:-1][:2]]) if distribution != "envs" else distribution
        )
        lines[folder] = lines.get(folder, 0) + num_lines([path])
    return lines


def sums(root: Path) -> dict[str, int]:
    kernel = {
        path
        for pattern in BUDGET["kernel-files"]
        for path in sources(root, f"packages/core/src/{pattern}")
    }
    guides = [path for path in root.glob("docs/**/*.md") if "reference" not in path.parts]
    return {
        "product": num_lines(sources(root, "packages/**/src/**/*.py")),
        "kernel": num_lines(kernel),
        "tests": num_lines(sources(root, "tests/**/*.py")),
        "words-of-guides": sum(len(path.read_text(encoding="utf-8").split()) for path in guides),
    }


def exceeded(counts: dict[str, int], budget: dict[str, int]) -> list[str]:
    """A sentence for each folder that has more lines than its budget, or has none."""
    without = [
        f"{name} has no number in {TABLE}; write {count}"
        for name, count in counts.items()
        if name not in budget
    ]
    return without + [
        f"{name} has {count} lines, of at most {budget[name]}: make it smaller, "
        f"or raise the number in {TABLE} in a commit that says why"
        for name, count in counts.items()
        if count > budget.get(name, count)
    ]


def test_no_folder_has_more_lines_than_its_budget():
    assert exceeded(lines_by_folder(REPOSITORY), BUDGET["lines"]) == []


def test_product_kernel_tests_and_guides_stay_below_their_numbers():
    assert exceeded(sums(REPOSITORY), BUDGET["sums"]) == []


def test_a_folder_that_is_gone_has_no_number():
    assert sorted(BUDGET["lines"].keys() - lines_by_folder(REPOSITORY)) == []


def test_the_kernel_is_what_its_patterns_match():
    for pattern in BUDGET["kernel-files"]:
        assert sources(REPOSITORY, f"packages/core/src/{pattern}"), f"{pattern} matches nothing"


@pytest.fixture
def tree(tmp_path):
    for name, count in {
        "packages/core/src/verifiers/rubrics/rubric.py": 3,
        "packages/core/src/verifiers/rubrics/deep/er.py": 2,
        "packages/core/src/verifiers/errors.py": 4,
        "packages/core/src/verifiers/templates/env.py": 100,
        "packages/envs/wordle/src/vf_wordle/wordle.py": 5,
        "packages/envs/wordle/tests/test_wordle.py": 100,
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("pass\n" * count)
    return tmp_path


def test_lines_are_counted_per_folder(tree):
    assert lines_by_folder(tree) == {"core/verifiers/rubrics": 5, "core/verifiers": 4, "envs": 5}
    assert sums(tree)["product"] == 14


def test_a_line_too_many_would_be_found(tree):
    """Negative control: the sentence names the folder, its lines and its number."""
    (line,) = exceeded(
        lines_by_folder(tree), {"core/verifiers/rubrics": 4, "core/verifiers": 4, "envs": 5}
    )

    assert re.match(r"core/verifiers/rubrics has 5 lines, of at most 4: make it smaller", line)


def test_a_folder_without_a_number_would_be_found(tree):
    (line,) = exceeded(lines_by_folder(tree), {"core/verifiers": 4, "envs": 5})

    assert line.startswith("core/verifiers/rubrics has no number")
