"""The script of two processes, as its documentation starts it: killed in the middle, it ends where
it would have."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file

from verifiers_trainer.run.metrics_files import METRICS, read_metrics

ROOT = Path(__file__).parents[3]
CONFIG = ROOT / "configs/accelerate/cpu2.yaml"
LAUNCHED = {
    "each holds the model": ["--config_file", str(CONFIG)],
    "each holds half of it": [
        "--config_file",
        str(ROOT / "configs/fsdp2.yaml"),
        "--num_processes",
        "2",
    ],
}
STEPS = 8


def start(launched, folder, log):
    script = str(ROOT / "examples/train_two_ranks.py")
    command = [sys.executable, "-m", "accelerate.commands.launch", *LAUNCHED[launched], script]
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    with log.open("wb") as file:
        return subprocess.Popen(
            [*command, str(folder), str(STEPS)],
            stdout=file,
            stderr=subprocess.STDOUT,
            env=environment,
            cwd=ROOT,
        )


def kill_all(process):
    """kill -9 of the launcher and both ranks at once."""
    family = [process, *psutil.Process(process.pid).children(recursive=True)]
    for member in family:
        os.kill(member.pid, signal.SIGKILL)
    process.wait(30)
    return len(family)


def ended(process, log):
    code = process.wait(300)
    said = log.read_text()
    assert code == 0, said[-3000:]
    return re.search(rf"step {STEPS}, 2 processes, weights ([0-9a-f]{{64}})", said)[1]


@pytest.mark.slow
@pytest.mark.parametrize("launched", LAUNCHED)
def test_killed_in_the_middle_the_same_command_ends_with_the_same_weights(tmp_path, launched):
    log = tmp_path / "log"
    uninterrupted = ended(start(launched, tmp_path / "whole", log), log)

    process = start(launched, tmp_path / "killed", log)
    metrics, deadline = tmp_path / "killed" / METRICS, time.monotonic() + 200
    while not metrics.is_file() or len(read_metrics(metrics)) < 5:
        assert process.poll() is None, log.read_text()[-3000:]
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert kill_all(process) >= 3
    assert len(read_metrics(metrics)) < STEPS
    assert not (tmp_path / "killed" / f"checkpoint-{STEPS}").exists()

    assert ended(start(launched, tmp_path / "killed", log), log) == uninterrupted
    first, second = (read_metrics(tmp_path / name / METRICS) for name in ("whole", "killed"))
    assert [row["loss"] for row in first] == [row["loss"] for row in second]
    assert len({row["loss"] for row in first}) == STEPS


def test_the_launchers_file_is_one_that_accelerate_starts_two_processes_with():
    read = load_config_from_file(str(CONFIG))
    assert read.num_processes == yaml.safe_load(CONFIG.read_text())["num_processes"] == 2
    assert read.use_cpu
    assert str(read.distributed_type.value) == "MULTI_GPU"  # MULTI_CPU starts one process
