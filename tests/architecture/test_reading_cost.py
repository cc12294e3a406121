"""What a reader must open: files and file-to-file edges of one evaluation and one training step. They may only fall.

A lower number is written here by whoever reaches it; nothing but a decision raises one.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from support import reading_cost
from support.training_child import child_context

SCRIPT = Path(__file__).parents[1] / "support/reading_cost.py"


def cost(measured: str) -> tuple[int, int, list[str]]:
    found = json.loads(measured)
    return len(found["files"]), len(found["edges"]), found["files"]


def test_one_row_of_five_turns_passes_through_few_files():
    ran = subprocess.run([sys.executable, str(SCRIPT), "evaluation"], capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    files, edges, names = cost(ran.stdout.splitlines()[-1])

    assert "verifiers/rollouts/loop.py" in names, "the recorder sees nothing"
    assert files <= 21, names
    assert edges <= 55


def test_one_training_step_passes_through_few_files(tmp_path):
    pytest.importorskip("torch", reason="needs the trainer")
    child = child_context().Process(target=reading_cost.training_in_child, args=(str(tmp_path),))
    child.start()
    child.join(600)
    assert child.exitcode == 0, "it hangs" if child.exitcode is None else "see above"
    files, edges, names = cost((tmp_path / "measured.json").read_text())

    assert "verifiers_trainer/algorithm/losses.py" in names, "the recorder sees nothing"
    assert files <= 87, names
    assert edges <= 185
