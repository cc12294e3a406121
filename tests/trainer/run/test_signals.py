"""SIGTERM and Ctrl-C end a training at once, with its last whole step saved: real processes."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from support.training import metrics_of, run, small_trainer, toy_env
from support.training_child import ForkedScript
from verifiers.errors import CheckpointError
from verifiers_trainer.policy import checkpoint_files

LIMIT_S = 10.0
"""From a signal to a saved checkpoint of a small model."""
SCRIPT = """
import sys, time
from pathlib import Path
import verifiers as vf
from support.training import digits, small_config, small_policy, toy_env
from verifiers_trainer.policy.builtin_models import build_tiny_tokenizer
from verifiers_trainer.trainer import RLTrainer

folder, where, slow_s = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])
calls = 0


def reached():
    (folder / "reached").write_text(where)
    time.sleep(slow_s)


def reward(completion):
    global calls
    calls += 1
    if where == "rollout" and calls == 25:  # of the third batch, and slow for a minute
        reached()
    return digits(completion)


class Slow(RLTrainer):
    def compute_loss(self, *arguments, **keywords):
        if where == "loss" and self.state.global_step == 2:
            reached()
        return super().compute_loss(*arguments, **keywords)

    def evaluate(self, *arguments, **keywords):
        if where == "evaluation" and self.state.global_step == 2:
            reached()
        return super().evaluate(*arguments, **keywords)

    def save_model(self, *arguments, **keywords):
        if where == "checkpoint" and self.state.global_step == 2:
            reached()
        return super().save_model(*arguments, **keywords)

    def finish_step(self):
        if where == "update" and self.state.global_step == 3:
            reached()
        return super().finish_step()


config = small_config(
    folder,
    max_steps=500,
    max_off_policy_steps=0,
    rollout_timeout=300.0,
    generation_timeout=300.0,
    max_concurrent_scoring=1,
    eval_strategy="steps" if where == "evaluation" else "no",
    eval_steps=2,
    save_strategy="steps" if where == "checkpoint" else "no",
    save_steps=2,
)
trainer = Slow(small_policy(), toy_env(reward), config, build_tiny_tokenizer())
try:
    trainer.train(resume_from_checkpoint="auto")
finally:
    print("the script's own clean-up", flush=True)
"""


def started(folder, where, slow_s=60.0, words=None, is_cold=True):
    """A script that trains, as soon as it is amid what ``where`` says. One that ``is_cold`` does its
    imports itself, others are forks: see ``child_context``."""
    folder.mkdir(parents=True, exist_ok=True)
    if not is_cold:
        return amid(folder, ForkedScript(SCRIPT, folder, where, str(slow_s)))
    (script := folder / "script.py").write_text(SCRIPT)
    here = Path(__file__).parents[2]
    words = [sys.executable, str(script)] if words is None else [*words, str(script)]
    child = subprocess.Popen(
        [*words, str(folder), where, str(slow_s)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONPATH": str(here), "OMP_NUM_THREADS": "1"},
    )
    return amid(folder, child)


def amid(folder, child):
    """The child, as soon as it is where it was told to signal."""
    deadline = time.monotonic() + 120
    while not (folder / "reached").exists():
        if child.poll() is not None or time.monotonic() > deadline:
            child.kill()
            raise AssertionError(child.communicate()[0])
        time.sleep(0.05)
    return child


def saved_within(folder, name, limit_s=LIMIT_S):
    """Seconds until a checkpoint is there."""
    began = time.monotonic()
    manifest = folder / name / checkpoint_files.MANIFEST
    while not manifest.is_file():
        assert time.monotonic() - began < 3 * limit_s, "nothing was saved"
        time.sleep(0.02)
    return time.monotonic() - began


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "where", ["rollout", pytest.param("loss", marks=SLOW), pytest.param("evaluation", marks=SLOW)]
)
def test_sigterm_saves_the_last_whole_step_wherever_it_comes(tmp_path, where):
    child = started(tmp_path, where)
    child.send_signal(signal.SIGTERM)
    assert saved_within(tmp_path, "checkpoint-2") < LIMIT_S
    output, _ = child.communicate(timeout=60)
    assert child.returncode == 143, output
    assert "the script's own clean-up" in output
    assert "the last whole step is saved" in output
    checkpoint_files.verify(tmp_path / "checkpoint-2")
    assert [row["step"] for row in metrics_of(tmp_path) if "loss" in row] == [1, 2]
    assert "ended" not in json.loads((tmp_path / "settings.json").read_text())  # no failure


@pytest.mark.parametrize(
    ("where", "step"), [("update", 3), pytest.param("checkpoint", 2, marks=SLOW)]
)
def test_a_step_or_a_checkpoint_that_is_being_written_is_finished_first(tmp_path, where, step):
    child = started(tmp_path, where, slow_s=2.0, is_cold=False)
    child.send_signal(signal.SIGTERM)
    output, _ = child.communicate(timeout=60)
    assert child.returncode == 143, output
    assert [number for number, _ in checkpoint_files.steps_in(tmp_path)] == [step]
    checkpoint_files.verify(tmp_path / f"checkpoint-{step}")
    assert [row["step"] for row in metrics_of(tmp_path) if "loss" in row][-1] == step


def test_a_second_signal_ends_at_once(tmp_path):
    child = started(tmp_path, "update", is_cold=False)
    child.send_signal(signal.SIGTERM)
    time.sleep(0.5)
    began = time.monotonic()
    child.send_signal(signal.SIGTERM)
    output, _ = child.communicate(timeout=60)
    assert time.monotonic() - began < 5.0
    assert child.returncode == 143, output
    assert "ending at once" in output
    assert "clean-up" not in output


def test_a_program_with_a_handler_of_its_own_keeps_it(tmp_path):
    received = []
    before = signal.signal(signal.SIGTERM, lambda *_: received.append(1))
    try:
        trainer = small_trainer(
            tmp_path,
            toy_env(lambda completion: os.kill(os.getpid(), signal.SIGTERM) or 1.0 * len(received)),
            max_steps=1,
        )
        run(trainer)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert received
    assert trainer.exit_code == 0


def test_a_batch_that_was_not_trained_is_trained_when_the_run_goes_on(tmp_path):
    """Interrupted within the third step; as if nothing had happened."""
    settings = {"deterministic": True, "max_steps": 4, "save_strategy": "no"}
    whole = run(small_trainer(tmp_path / "whole", **settings))

    trainer = small_trainer(tmp_path / "parts", **settings)
    compute_loss = trainer.compute_loss

    def stopping(*arguments, **keywords):
        if trainer.state.global_step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return compute_loss(*arguments, **keywords)

    trainer.compute_loss = stopping
    with pytest.raises(SystemExit) as raised:
        trainer.train()
    assert raised.value.code == 143
    again = run(small_trainer(tmp_path / "parts", **settings), resume_from_checkpoint="auto")
    assert again.losses == whole.losses[2:]


def test_auto_resumes_if_there_is_something(tmp_path):
    settings = {"save_strategy": "steps", "save_steps": 2}
    assert len(run(small_trainer(tmp_path, **settings), resume_from_checkpoint="auto").steps) == 2
    longer = small_trainer(tmp_path, **settings, max_steps=4, resume_from_checkpoint="auto")
    assert [row["batch/step"] for row in run(longer).steps] == [1, 1]
    assert [row["step"] for row in metrics_of(tmp_path) if "loss" in row] == [1, 2, 3, 4]

    # damaged checkpoints are something: they are not moved aside without a word
    for _, folder in checkpoint_files.steps_in(tmp_path):
        (folder / "rl_state.json").write_text("{}")
    with pytest.raises(CheckpointError, match="no valid checkpoint"):
        small_trainer(tmp_path, **settings).train(resume_from_checkpoint="auto")
    assert checkpoint_files.steps_in(tmp_path)


# --- several processes ----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("where", ["rollout", "loss"])
def test_two_ranks_of_torchrun_save_together(tmp_path, where):
    words = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    words += ["--master-port", "0", "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
    child = started(tmp_path, where, 60.0 if where == "rollout" else 1.0, words)
    child.send_signal(signal.SIGTERM)
    step = 2 if where == "rollout" else 3  # the step of all is finished first
    assert saved_within(tmp_path, f"checkpoint-{step}") < LIMIT_S
    output, _ = child.communicate(timeout=90)
    checkpoint_files.verify(tmp_path / f"checkpoint-{step}")
    assert (tmp_path / f"checkpoint-{step}" / "rng_1.safetensors").is_file()
    assert "could not be saved" not in output
