"""How a run ends before its last step: what is saved, what is said, and what is there to read."""

import json
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import TrainerCallback

from support.training import digits, metrics_of, run, small_trainer, toy_env, weights_hash
from verifiers.errors import GenerationStalled, NoLearningSignal, NonFiniteLoss, TooManyFaults
from verifiers_trainer.pipeline import health
from verifiers_trainer.policy import checkpoint_files
from verifiers_trainer.trainer import RLTrainer


class AtStep(TrainerCallback):
    """Calls ``act`` at the beginning of the third step, with its batch, or at the end of the
    second."""

    def __init__(self, act, begins=True):
        self.act, self.begins = act, begins

    def on_step_begin(self, args, state, control, **_):
        if self.begins and state.global_step == 2:
            self.act()

    def on_step_end(self, args, state, control, **_):
        if not self.begins and state.global_step == 2:
            self.act()


def raising(error):
    def act(*_, **__):
        raise error

    return act


def after_two_steps(then):
    """An environment whose rewards are ``then(completion)`` once two steps are trained."""

    def reward(completion, **_):
        trainer = reward.trainer
        if trainer.state.global_step >= 2:
            return then(completion)
        return digits(completion) + reward.tick()

    reward.count = 0

    def tick():
        reward.count += 1
        return reward.count % 2 / 10

    reward.tick, reward.trainer = tick, None
    return toy_env(reward, count=8), reward


def fail(completion):
    raise ConnectionError("no judge")


def hang(completion):
    time.sleep(1.5)
    return 1.0


ENDINGS = {
    "faults": (TooManyFaults, fail, {}),
    "signal": (NoLearningSignal, lambda completion: -1.0, {"no_signal_steps": 1}),
    "stalled": (GenerationStalled, hang, {"generation_timeout": 0.4, "rollout_timeout": 60.0}),
    "callback": (
        ZeroDivisionError,
        digits,
        {"callbacks": [AtStep(raising(ZeroDivisionError("a bug")), begins=False)]},
    ),
    "ctrl-c": (KeyboardInterrupt, digits, {"callbacks": [AtStep(raising(KeyboardInterrupt()))]}),
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_whatever_ends_a_run_saves_its_last_whole_step(tmp_path, caplog, ending):
    error, then, settings = ENDINGS[ending]
    env, reward = after_two_steps(then)
    trainer = small_trainer(tmp_path, env, max_steps=4, max_off_policy_steps=0, **settings)
    reward.trainer = trainer
    with pytest.raises(error) as raised:
        trainer.train()
    saved = tmp_path / "checkpoint-2"
    checkpoint_files.verify(saved)
    state = load_file(saved / "model.safetensors")
    assert all(
        torch.equal(state[name], value.cpu())
        for name, value in trainer.model.state_dict().items()
        if name in state
    )
    assert "saved step 2, the last before training ended" in caplog.text
    ended = json.loads((tmp_path / "settings.json").read_text()).get("ended", "")
    assert ended == ("" if ending == "ctrl-c" else str(raised.value))  # what vf-view shows
    env, reward = after_two_steps(digits)
    # the reward that ended it is mended: another function
    again = small_trainer(
        tmp_path, env, max_steps=3, max_off_policy_steps=0, accept_changed_code=True
    )
    reward.trainer = again
    assert [
        round(row["staleness/max"]) for row in run(again, resume_from_checkpoint=True).steps
    ] == [0]
    assert "ended" not in json.loads((tmp_path / "settings.json").read_text())
    assert [row["step"] for row in metrics_of(tmp_path) if "loss" in row] == [1, 2, 3]


def test_without_the_saving_they_are_lost(tmp_path, monkeypatch):
    monkeypatch.setattr(RLTrainer, "_save_last_step", lambda self, error: None)
    trainer = small_trainer(tmp_path, max_steps=4, callbacks=[AtStep(raising(ZeroDivisionError()))])
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    assert not checkpoint_files.steps_in(tmp_path)


def test_what_is_saved_already_is_not_saved_again_and_an_untrained_policy_never(tmp_path):
    trainer = small_trainer(
        tmp_path / "saved",
        max_steps=4,
        save_strategy="steps",
        save_steps=2,
        callbacks=[AtStep(raising(ZeroDivisionError()))],
    )
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    assert [step for step, _ in checkpoint_files.steps_in(tmp_path / "saved")] == [2]
    trainer = small_trainer(tmp_path / "none", toy_env(lambda completion, **_: fail(completion)))
    with pytest.raises(TooManyFaults):
        trainer.train()
    assert not checkpoint_files.steps_in(tmp_path / "none")


def ruin(trainer):
    with torch.no_grad():
        next(trainer.model.parameters()).fill_(float("nan"))


def steep(row):
    """Finite itself, with a gradient that is no number."""
    return (row.log_pi - row.log_pi.detach()).abs().sqrt() if steep.active else -row.log_pi


@pytest.mark.parametrize("bad", [True, False])
def test_weights_that_are_bad_are_not_saved_and_those_before_a_bad_gradient_are(
    tmp_path, caplog, bad
):
    steep.active = False
    trainer = small_trainer(tmp_path, max_steps=4, max_off_policy_steps=0, loss=steep)
    trainer.add_callback(
        AtStep((lambda: ruin(trainer)) if bad else lambda: setattr(steep, "active", True))
    )
    with pytest.raises(NonFiniteLoss) as raised:
        trainer.train()
    assert raised.value.key == ("log-probability of the policy" if bad else "gradient norm")
    assert [step for step, _ in checkpoint_files.steps_in(tmp_path)] == ([] if bad else [2])
    assert ("could not be saved: the error says that its weights are bad" in caplog.text) == bad


def test_a_step_that_is_half_applied_is_not_saved(tmp_path, caplog):
    trainer = small_trainer(tmp_path, max_steps=4)
    trainer.create_optimizer_and_scheduler(4)
    plain = trainer.optimizer.step

    def step(*args, **keywords):
        plain(*args, **keywords)
        if trainer.state.global_step == 2:
            raise ZeroDivisionError("in the optimizer")

    trainer.optimizer.step = step
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    assert not checkpoint_files.steps_in(tmp_path)
    assert "the weights of step 3 were being set" in caplog.text


def test_amid_the_updates_of_one_batch_the_step_is_saved_and_resumes(tmp_path):
    class At3(AtStep):
        def on_step_begin(self, args, state, control, **_):
            if state.global_step == 3:
                self.act()

    settings = {"num_iterations": 2, "max_off_policy_steps": 0, "max_steps": 8}
    trainer = small_trainer(tmp_path, callbacks=[At3(raising(ZeroDivisionError()))], **settings)
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    assert [step for step, _ in checkpoint_files.steps_in(tmp_path)] == [3]
    again = small_trainer(tmp_path, generation_timeout=10.0, **settings)
    assert len(run(again, resume_from_checkpoint=True).steps) == 5


# --- solved, and dead from the start --------------------------------------------------------------


@pytest.mark.parametrize("iterations", [1, 2])
def test_a_solved_task_ends_training_without_an_error_saved_and_stays_so(
    tmp_path, monkeypatch, caplog, iterations
):
    monkeypatch.setattr(health, "SOLVED_ROLLOUTS", 32)
    env, reward = after_two_steps(lambda completion: 2.0)
    settings = {"max_steps": 50, "max_off_policy_steps": 0, "num_iterations": iterations}
    trainer = small_trainer(tmp_path, env, **settings)
    reward.trainer = trainer
    output = trainer.train()
    assert (output.global_step, trainer.is_complete) == (2, True)
    assert output.metrics["train_loss"] == output.training_loss
    checkpoint_files.verify(tmp_path / "checkpoint-2")
    assert "solved: the last " in caplog.text
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[-1])["solved"] == 1  # by which a page tells it from an interrupted run
    again = small_trainer(tmp_path, env, **settings)
    reward.trainer = again
    assert again.train(resume_from_checkpoint=True).global_step == 2
    assert again.is_complete
    assert weights_hash(again.model) == weights_hash(trainer.model)


def test_a_run_that_is_dead_from_its_start_leaves_its_batches_and_rollouts_to_read(tmp_path):
    trainer = small_trainer(
        tmp_path,
        toy_env(lambda completion, **_: 0.0),
        no_signal_steps=3,
        oversample=1.0,
        log_completions=True,
        max_off_policy_steps=0,
    )
    with pytest.raises(NoLearningSignal):
        trainer.train()
    lines = metrics_of(tmp_path)
    assert [(line["step"], line["dead/batches"], line["dead/rollouts"]) for line in lines] == [
        (0, 1, 8),
        (0, 2, 16),
        (0, 3, 24),
    ]
    assert lines[-1]["dead/success_bound"] == pytest.approx(1 - 0.05 ** (1 / 24))
    rollouts = [
        json.loads(line)
        for line in Path(tmp_path, "completions", "dropped-1.jsonl").read_text().splitlines()
    ]
    assert len(rollouts) == 24
    assert {row["reward"] for row in rollouts} == {0.0}
    assert {row["advantage"] for row in rollouts} == {None}


def test_resuming_drops_the_dropped_rollouts_of_steps_that_are_trained_again(tmp_path):
    trainer = small_trainer(tmp_path, log_completions=True, save_strategy="steps", save_steps=1)
    trainer.recorder.record_dropped(1, [], {"dead/batches": 1})
    trainer.recorder.record_dropped(3, [], {"dead/batches": 1})
    trainer.recorder.file.resume(1)
    assert [path.name for path in (tmp_path / "completions").iterdir()] == ["dropped-1.jsonl"]
    assert [line["step"] for line in metrics_of(tmp_path)] == [0]
    trainer.close()


def test_kept_dead_batches_are_steps_of_schedule_and_max_steps(tmp_path):
    settings = {
        "zero_variance": "keep",
        "max_steps": 5,
        "lr_scheduler_type": "linear",
        "generation_timeout": 10.0,
    }
    log = run(small_trainer(tmp_path, toy_env(lambda completion, **_: 1.0), **settings))
    assert [row["groups/dead"] for row in log.steps] == [2] * 5
    rates = [row["learning_rate"] for row in log.steps]
    assert rates == pytest.approx([1e-3 * (1 - n / 5) for n in range(5)])
    assert not any("dead/batches" in line for line in metrics_of(tmp_path))
