"""The public API as mypy and pyright see it: ``good.py`` has no error, ``wrong.py`` has one on
every marked line."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
GOOD, WRONG = HERE / "good.py", HERE / "wrong.py"
MARKED = {
    number for number, line in enumerate(WRONG.read_text().splitlines(), 1) if "  # flagged" in line
}


def mypy() -> dict[str, dict[int, str]]:
    """File name -> line -> message."""
    command = [
        "mypy",
        "--config-file",
        HERE / "mypy.ini",
        "--cache-dir",
        ROOT / ".mypy_cache/typing",
        GOOD,
        WRONG,
    ]
    done = subprocess.run(
        [sys.executable, "-m", *map(str, command)], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode in (0, 1), done.stderr
    messages: dict[str, dict[int, str]] = {}
    for path, line, text in re.findall(r"^(.+?):(\d+): error: (.+)$", done.stdout, re.MULTILINE):
        messages.setdefault(Path(path).name, {})[int(line)] = text
    return messages


def pyright() -> dict[str, dict[int, str]]:
    """File name -> line -> message."""
    command = ["pyright", "--outputjson", "--pythonpath", sys.executable, GOOD, WRONG]
    # it asks the network for a newer version
    environment = {**os.environ, "PYRIGHT_PYTHON_IGNORE_WARNINGS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", *map(str, command)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=environment,
    )
    assert done.returncode in (0, 1), done.stderr
    messages: dict[str, dict[int, str]] = {}
    for problem in json.loads(done.stdout)["generalDiagnostics"]:
        if problem["severity"] == "error":
            line = problem["range"]["start"]["line"] + 1
            messages.setdefault(Path(problem["file"]).name, {})[line] = problem["message"]
    return messages


@pytest.mark.parametrize("checker", [mypy, pyright], ids=lambda checker: checker.__name__)
def test_good_uses_pass_and_every_mistake_is_flagged(checker):
    messages = checker()
    assert messages.get(GOOD.name, {}) == {}
    flagged = messages.get(WRONG.name, {})
    assert flagged.keys() - MARKED == set(), flagged
    assert MARKED - flagged.keys() == set()


def test_there_are_enough_uses_and_mistakes():
    assert GOOD.read_text().count("assert_type(") >= 30
    assert len(MARKED) >= 8
