"""The real trackers, where they are installed: offline, every step of a run arrives."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

from support.training import metrics_of, run, small_trainer
from verifiers_trainer.run import trackers

pytestmark = pytest.mark.real
STEPS = 3


@pytest.fixture
def trained(tmp_path, monkeypatch):
    """Train with a tracker in an empty folder; the folder, and the mean rewards of the steps."""

    def train(name, **environment):
        if find_spec(name) is None:
            pytest.skip(f"{name} is not installed: python3 tests/real/peers.py trackers")
        for key, value in environment.items():
            monkeypatch.setenv(key, value)
        monkeypatch.chdir(tmp_path)
        # a busy machine takes longer to start a tracker
        monkeypatch.setattr(trackers, "CLOSE_S", 60.0)
        run(small_trainer(tmp_path, max_steps=STEPS, report_to=name))
        rewards = [row["reward/mean"] for row in metrics_of(tmp_path)]
        assert len(rewards) == STEPS
        return tmp_path, rewards

    return train


WITH_WANDB = """
import os
from pathlib import Path
from support.training import run, small_trainer

os.chdir({folder!r})
settings = {{"save_strategy": "steps", "save_steps": 1, "log_completions": True, "report_to": "wandb"}}
run(small_trainer(Path({folder!r}), max_steps={steps}, **settings), resume_from_checkpoint={resumes})
"""


def test_wandb_keeps_an_offline_run_with_completions_asks_nobody_to_log_in_and_goes_on_when_resumed(
    tmp_path,
):
    if find_spec("wandb") is None:
        pytest.skip("wandb is not installed: python3 tests/real/peers.py trackers")
    secrets = {"WANDB_API_KEY", "WANDB_MODE"}
    environment = {key: value for key, value in os.environ.items() if key not in secrets}
    environment |= {
        "HOME": str(tmp_path),
        "PYTHONPATH": os.pathsep.join(sys.path),
        "OMP_NUM_THREADS": "1",
    }
    ids = []
    for steps, resumes in ((STEPS, False), (STEPS + 1, True), (1, False)):
        before = set(tmp_path.glob("wandb/offline-run-*/*.wandb"))
        done = subprocess.run(
            [
                sys.executable,
                "-c",
                WITH_WANDB.format(folder=str(tmp_path), steps=steps, resumes=resumes),
            ],
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=200,
        )
        assert done.returncode == 0, done.stderr
        assert len(metrics_of(tmp_path)) == steps
        (kept,) = set(tmp_path.glob("wandb/offline-run-*/*.wandb")) - before
        content = kept.read_bytes()
        assert content.count(b"train/reward/mean") >= (1 if resumes else steps)
        assert b"train/grad_norm" in content
        tables = [
            json.loads(path.read_text()) for path in kept.parent.rglob("completions_*.table.json")
        ]
        assert len(tables) == (1 if resumes else steps)
        columns = ["step", "example_id", "prompt", "completion", "answer", "reward", "digits"]
        assert tables[0]["columns"][: len(columns)] == columns
        assert len(tables[0]["data"]) == 8
        ids.append(kept.stem.removeprefix("run-"))
    assert ids[0] == ids[1] != ids[2], (
        "a resumed training continues its run, another one begins its own"
    )


def test_tensorboard_has_every_step(trained):
    folder, rewards = trained("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(next(folder.glob("runs/*"))))
    events.Reload()
    scalars = events.Scalars("train/reward/mean")
    assert [event.step for event in scalars] == [1, 2, 3]
    assert [event.value for event in scalars] == pytest.approx(rewards)


def test_trackio_has_every_step(trained, tmp_path):
    import json
    import sqlite3

    _, rewards = trained("trackio", TRACKIO_DIR=str(tmp_path / "trackio"))
    database = max((tmp_path / "trackio").glob("*.db"), key=lambda path: path.stat().st_size)
    lines = [
        json.loads(row[0])
        for row in sqlite3.connect(database).execute("select metrics from metrics order by id")
    ]
    assert [
        line["train/reward/mean"] for line in lines if "train/reward/mean" in line
    ] == pytest.approx(rewards)
