"""What a reader must open: files and file-to-file edges of one evaluation and one training step. They may only fall.

A lower number is written here by whoever reaches it; nothing but a decision raises one.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "support/reading_cost.py"


def cost(*arguments: str) -> tuple[int, int, list[str]]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    ran = subprocess.run(
        [sys.executable, str(SCRIPT), *arguments], env=environment, capture_output=True, text=True, timeout=300
    )
    assert ran.returncode == 0, ran.stderr
    measured = json.loads(ran.stdout.splitlines()[-1])
    return len(measured["files"]), len(measured["edges"]), measured["files"]


def test_one_row_of_five_turns_passes_through_few_files():
    files, edges, names = cost("evaluation")

    assert "verifiers/rollouts/loop.py" in names, "the recorder sees nothing"
    assert files <= 34, names
    assert edges <= 87


def test_one_training_step_passes_through_few_files(tmp_path):
    pytest.importorskip("torch", reason="needs the trainer")
    files, edges, names = cost("training", str(tmp_path))

    assert "verifiers_trainer/algorithm/losses.py" in names, "the recorder sees nothing"
    assert files <= 96, names
    assert edges <= 205
