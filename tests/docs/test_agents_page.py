"""What AGENTS.md says is true: its commands run as they stand, and what it names is there."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.doc_blocks import blocks_of

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "AGENTS.md"
(BLOCK,) = (block for block in blocks_of(PAGE) if block.language == "bash")
COMMANDS = BLOCK.code.splitlines()
LONG = {
    ".venv/bin/mypy",
    "python3 run.py test --changed HEAD",
    ".venv/bin/python docs/reference_pages.py --check",
}
"""Minutes, or as long as what was changed needs; ``test_reference_pages.py`` compares every page,
and runs the command's ``main``."""


@pytest.fixture
def set_up():
    sys.path.insert(0, str(ROOT))
    import run

    if not run.STAMP.is_file() or run.STAMP.read_text() != run.fingerprint():
        pytest.skip("the set-up of run.py is not that of this checkout")


@pytest.mark.parametrize(
    "command", [pytest.param(c, marks=pytest.mark.slow if c in LONG else ()) for c in COMMANDS]
)
def test_its_commands_run(set_up, command):
    ran = subprocess.run(command.split(), cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-2000:]


def test_it_is_short_and_what_it_names_is_there():
    text = PAGE.read_text(encoding="utf-8")
    assert len(text.splitlines()) < 60
    names = [
        *re.findall(r"\]\((?!http)([^)#]+)\)", text),
        *re.findall(r"`((?:packages|tests)/[\w./-]+)`", text),
    ]
    assert len(names) > 5
    for name in names:
        assert (ROOT / name).exists(), name
    for name in re.findall(r"`((?:runtime/)?\w+\.py)`", text):
        assert (ROOT / "packages/core/src/verifiers" / name).exists(), name
