"""``metrics.jsonl`` reads as one run; trackers get the numbers and cannot disturb anything."""

import json
import logging
import threading
import time

import numpy as np
import pytest
import torch
from transformers import TrainerCallback

from support.training import (
    metrics_of,
    run,
    small_config,
    small_policy,
    small_trainer,
    toy_env,
)
from verifiers.errors import ConfigError
from verifiers.runtime.install_lines import install_line
from verifiers.view.curves import Curves
from verifiers_trainer.policy.builtin_models import build_tiny_tokenizer
from verifiers_trainer.run import trackers
from verifiers_trainer.run.metrics_files import MetricsFile, read_metrics, write_completions
from verifiers_trainer.run.plot import draw_learning_curve, running_mean
from verifiers_trainer.trainer import RLTrainer


def test_a_line_is_json_whatever_the_numbers_are(tmp_path):
    file = MetricsFile(tmp_path / "new" / "folder")
    file.write(
        3,
        3,
        {"a": float("nan"), "b": np.float32(0.5), "c": torch.tensor(2), "d": float("inf"), "e": 1},
    )
    (row,) = read_metrics(file.path)
    assert {name: row[name] for name in "abcde"} == {"a": None, "b": 0.5, "c": 2, "d": None, "e": 1}
    assert (row["step"], row["policy_version"]) == (3, 3)
    assert abs(row["time"] - time.time()) < 60


def test_resuming_drops_the_lines_that_are_trained_again(tmp_path):
    file = MetricsFile(tmp_path)
    for step in (0, 1, 2, 2, 3):
        file.write(step, step, {})
    with file.path.open("a") as unfinished:
        unfinished.write('{"step": 4, "loss')
    MetricsFile(tmp_path).resume(2)
    assert [row["step"] for row in metrics_of(tmp_path)] == [0, 1, 2, 2]


def test_a_line_after_one_that_a_full_disk_tore_is_read(tmp_path):
    file = MetricsFile(tmp_path)
    for step in (1, 2):
        file.write(step, step, {})
    file.path.write_bytes(file.path.read_bytes()[:-20])
    file.write(3, 3, {})
    assert [row["step"] for row in read_metrics(file.path)] == [1, 3]


def test_an_evaluation_before_training_stays_with_the_run_it_was_made_for(tmp_path):
    run(small_trainer(tmp_path, max_steps=1))
    trainer = small_trainer(tmp_path, max_steps=1)
    trainer.evaluate(num_examples=2)
    run(trainer)
    assert [(row["step"], "eval_reward" in row) for row in metrics_of(tmp_path)] == [
        (0, True),
        (1, False),
    ]


def test_a_resumed_run_reads_as_one(tmp_path):
    settings = {"save_strategy": "steps", "save_steps": 2}
    run(small_trainer(tmp_path, **settings, max_steps=3))
    (tmp_path / "checkpoint-3").rename(tmp_path / "gone")
    run(small_trainer(tmp_path, **settings, max_steps=4), resume_from_checkpoint=True)
    assert [row["step"] for row in metrics_of(tmp_path)] == [1, 2, 3, 4]


def test_completions_hold_what_was_said_and_what_it_was_worth(tmp_path):
    run(small_trainer(tmp_path, max_steps=1, log_completions=True))
    rows = [
        json.loads(line)
        for line in (tmp_path / "completions" / "step-1.jsonl").read_text().splitlines()
    ]
    assert sum(row["trained"] for row in rows) == 8
    assert {row.get("excluded") for row in rows if not row["trained"]} <= {"no_signal"}
    for row in rows:
        assert row["prompt"][-1]["role"] == "user"
        assert row["completion"][0]["role"] == "assistant"
        assert row["metrics"]["digits"] == row["reward"]
        assert row["completion_tokens"] in range(1, 5)
        assert {
            "example_id",
            "advantage",
            "stop_condition",
            "error",
            "policy_version",
        } <= row.keys()
    assert sum(row["advantage"] for row in rows if row["trained"]) == pytest.approx(0, abs=1e-9)


def test_completions_of_hostile_text_are_plain_ascii(tmp_path):
    from verifiers.rollouts.rollout import Rollout
    from verifiers_trainer.algorithm.batch import Group, TrainBatch

    row = {"prompt": "\u2028\ud800", "answer": object()}
    record = Rollout((), float("nan"), {"f": float("nan")}, row=row, completion="\x1b]0;x\x07")
    batch = TrainBatch([], (Group(0, 1, (record,)),), (np.array([np.nan]),), {}, 0)
    write_completions(tmp_path, 1, batch)
    content = (tmp_path / "completions" / "step-1.jsonl").read_bytes()
    assert content.isascii()
    assert json.loads(content)["reward"] is None
    assert b"\x1b" not in content


# --- trackers -------------------------------------------------------------------------------------


class Recorder(TrainerCallback):
    def __init__(self):
        self.events = []
        self.threads = set()

    def on_train_begin(self, args, state, control, **_):
        self.events.append("begin")

    def on_log(self, args, state, control, logs=None, **_):
        self.events.append((state.global_step, dict(logs)))
        self.threads.add(threading.current_thread().name)

    def on_train_end(self, args, state, control, **_):
        self.events.append("end")


def test_a_tracker_gets_every_step_on_a_thread_of_its_own(tmp_path, monkeypatch):
    recorder = Recorder()
    monkeypatch.setitem(trackers.FACTORIES, "wandb", lambda: recorder)
    run(small_trainer(tmp_path, max_steps=2, report_to="wandb"))
    assert (recorder.events[0], recorder.events[-1]) == ("begin", "end")
    steps = [
        (step, logs["reward/mean"])
        for step, logs in (e for e in recorder.events if isinstance(e, tuple))
        if "loss" in logs
    ]
    assert steps == [(row["step"], row["reward/mean"]) for row in metrics_of(tmp_path)]
    assert recorder.threads == {"verifiers-wandb"}
    assert "verifiers-wandb" not in {thread.name for thread in threading.enumerate()}


class Logs(RLTrainer):
    """Logs from within a step, and by the method for it."""

    def compute_loss(self, model, inputs, **keywords):
        self.log({"mine/row": torch.tensor(2.0), "mine/other": 1})
        self.log({"mine/other": 3})
        return super().compute_loss(model, inputs, **keywords)

    def step_metrics(self, batch):
        lengths = [len(rollout.completion) for group in batch.groups for rollout in group.rollouts]
        return {"mine/messages": np.mean(lengths)}


class LogsFromOutside(TrainerCallback):
    trainer = None

    def on_log(self, args, state, control, logs=None, **_):
        if "loss" in logs:
            logs["mine/added"] = 10 * state.global_step

    def on_step_end(self, args, state, control, **_):
        self.trainer.log({"mine/after": state.global_step})


def test_a_metric_of_ones_own_arrives_in_the_file_the_history_the_trackers_and_the_view(
    tmp_path, monkeypatch
):
    recorder, callback = Recorder(), LogsFromOutside()
    monkeypatch.setitem(trackers.FACTORIES, "wandb", lambda: recorder)
    config = small_config(tmp_path, max_steps=2, report_to="wandb")
    trainer = Logs(small_policy(), toy_env(), config, build_tiny_tokenizer(), callbacks=[callback])
    callback.trainer = trainer
    run(trainer)
    expected = {
        "mine/row": [2.0, 2.0],
        "mine/other": [2.0, 2.0],
        "mine/messages": [1.0, 1.0],
        "mine/added": [10, 20],
        "mine/after": [1, 2],
    }
    sent = [logs for logs in recorder.events if isinstance(logs, tuple)]
    frame, curves = trainer.history.to_pandas(), Curves(tmp_path / "metrics.jsonl")
    curves.read()
    for name, values in expected.items():
        assert [row[name] for row in metrics_of(tmp_path) if name in row] == values
        assert frame[name].dropna().tolist() == values
        assert [value for _, value in curves.points(name)] == values
        assert [logs[name] for _, logs in sent if name in logs] == values
    steps = [row for row in metrics_of(tmp_path) if "reward/mean" in row]
    assert all("mine/row" in row and "mine/after" not in row for row in steps)
    assert not any("train_runtime" in row for row in metrics_of(tmp_path))


@pytest.mark.parametrize("value", [torch.ones(3), [1.0, 2.0], None, "high"])
def test_a_metric_that_is_not_one_number_is_refused_by_name(tmp_path, value):
    trainer = small_trainer(tmp_path, max_steps=1)
    with pytest.raises(ConfigError, match=r"the metric 'mine' is .*, and a metric is one number"):
        trainer.log({"mine": value})


class Raises(Recorder):
    def on_log(self, args, state, control, logs=None, **_):
        raise ConnectionError("no network")


class Hangs(Recorder):
    def on_log(self, args, state, control, logs=None, **_):
        threading.Event().wait()


def absent():
    raise RuntimeError("wandb is not installed")


@pytest.mark.parametrize(
    ("tracker", "said"),
    [(Raises, "no network"), (Hangs, "does not come to an end"), (absent, "is not installed")],
)
def test_a_tracker_that_fails_hangs_or_is_absent_costs_one_warning(
    tmp_path, monkeypatch, caplog, tracker, said
):
    monkeypatch.setitem(trackers.FACTORIES, "wandb", tracker)
    monkeypatch.setattr(trackers, "CLOSE_S", 0.2)
    with caplog.at_level(logging.WARNING, "verifiers_trainer.run.trackers"):
        run(small_trainer(tmp_path, max_steps=3, report_to=["wandb"]))
    warnings = [
        record.message
        for record in caplog.records
        if record.name == "verifiers_trainer.run.trackers"
    ]
    assert len(warnings) == 1
    assert said in warnings[0]
    assert len(metrics_of(tmp_path)) == 3


def test_a_tracker_that_is_too_slow_is_given_up_and_never_waited_for(monkeypatch, caplog):
    monkeypatch.setitem(trackers.FACTORIES, "wandb", Hangs)
    monkeypatch.setattr(trackers, "QUEUE_SIZE", 4)
    tracker = trackers.Trackers(["wandb"])
    state = type("State", (), {"global_step": 1})()
    tracker.on_train_begin(None, state, None)
    started = time.monotonic()
    for _ in range(100):
        tracker.log(None, state, None, {"loss": 1.0})
    tracker.close()
    assert time.monotonic() - started < 1
    assert "has not taken the last 4 events" in caplog.text


def test_a_tracker_that_is_not_installed_is_named_before_the_model_is_loaded(
    tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(trackers, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="cannot load the"):
        RLTrainer(
            "no/such-model", toy_env(), small_config(tmp_path, report_to=["wandb", "trackio"])
        )
    for name in ("wandb", "trackio"):
        sentence = (
            f"{name} is not installed and gets no numbers:"
            f" {install_line('verifiers-trainer', name)};"
        )
        assert caplog.text.count(sentence) == 1


def test_a_tracker_of_tables_gets_the_completions_of_every_logged_step(tmp_path, monkeypatch):
    class Tables(Recorder):
        def on_completions(self, args, step, control, groups):
            self.events.append(
                ("table", step, [r.reward for group in groups for r in group.rollouts])
            )

    recorder = Tables()
    monkeypatch.setitem(trackers.FACTORIES, "wandb", lambda: recorder)
    run(
        small_trainer(
            tmp_path, max_steps=4, report_to="wandb", log_completions=True, logging_steps=2
        )
    )
    tables = {event[1]: event[2] for event in recorder.events if event[0] == "table"}
    assert sorted(tables) == [2, 4]
    for step, rewards in tables.items():
        lines = (tmp_path / "completions" / f"step-{step}.jsonl").read_text().splitlines()
        saved = [json.loads(line) for line in lines]
        assert rewards == [row["reward"] for row in saved if row["trained"]]


def test_the_end_waits_for_a_tracker_that_is_slow_to_finish(monkeypatch, caplog):
    class Slow(Recorder):
        def finish(self):
            time.sleep(0.5)
            self.events.append("finished")

    recorder = Slow()
    monkeypatch.setitem(trackers.FACTORIES, "wandb", lambda: recorder)
    monkeypatch.setattr(trackers, "SAY_S", 0.1)
    caplog.set_level(logging.INFO, "verifiers_trainer.run.trackers")
    tracker = trackers.Trackers(["wandb"])
    tracker.on_train_begin(None, type("State", (), {"global_step": 0})(), None)
    tracker.close()
    assert recorder.events == ["begin", "finished"]
    assert "waiting for wandb to send the last numbers, for 180 s at most" in caplog.text
    assert "gets no more numbers" not in caplog.text


# --- the picture ----------------------------------------------------------------------------------


def test_the_learning_curve_is_drawn_with_gaps_and_evaluations(tmp_path):
    file = MetricsFile(tmp_path)
    file.write(0, 0, {"eval_reward": 0.1, "eval_reward_stderr": None})
    for step in range(1, 15):
        file.write(
            step, step, {"reward/mean": float("nan") if step == 3 else step / 20, "entropy": 1.0}
        )
    draw_learning_curve(file.path, tmp_path / "curve.png", "a title")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_the_running_mean_looks_back_ten_steps_over_gaps():
    values = np.array([1.0, np.nan, 3.0, *[5.0] * 10])
    assert running_mean(values)[[0, 1, 2, 12]].tolist() == [1, 1, 2, 5]
    assert np.isnan(running_mean(np.array([np.nan]))).all()


def test_a_run_that_ended_before_its_first_step_is_an_earlier_run_too(tmp_path):
    ours = MetricsFile(tmp_path)
    ours.write(0, 0, {"eval_reward": 0.1})  # an evaluation before training: part of this run
    assert not ours.holds_earlier
    # in another process that line is of a run that is over
    assert MetricsFile(tmp_path).holds_earlier


def test_a_second_training_does_not_take_over_what_stood_before_the_first(tmp_path):
    file = MetricsFile(tmp_path)
    file.write(0, 0, {"eval_reward": 0.1})
    file.start(anew=False)
    file.write(1, 1, {})
    assert file.holds_earlier
    (tmp_path / "metrics.jsonl").rename(tmp_path / "aside")
    file.start(anew=True)
    assert not (tmp_path / "metrics.jsonl").exists()
