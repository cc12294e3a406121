"""The shipped configuration with which a real model learns a task: `docs/train/learning.md` shows
the whole runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from verifiers_trainer.run.metrics_files import read_metrics

CONFIG = Path(__file__).parents[2] / "configs" / "vf-train" / "smollm2-stories.toml"


@pytest.mark.real
@pytest.mark.slow  # two minutes of one core
def test_the_model_writes_the_calls_of_stories_after_eight_updates(tmp_path):
    pytest.importorskip("gguf", reason="needs the extra verifiers-trainer[smollm2]")
    words = [
        "--trainer.args.max_steps",
        "8",
        "--eval.steps",
        "8",
        "--trainer.args.output_dir",
        tmp_path / "run",
    ]
    command = [Path(sys.executable).with_name("vf-train"), "@", CONFIG, *words]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=900)
    assert ran.returncode == 0, ran.stderr
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    before, after = (line["eval_reward"] for line in lines if line.get("eval_reward") is not None)
    assert before < 0.4
    assert after > 2 * before
