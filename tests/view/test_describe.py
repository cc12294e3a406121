"""What the list says of a run: how it stands, also when its process is gone, and how a training
goes."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time

import pytest

from support import view_runs
from verifiers.storage.directory import RunDirectory
from verifiers.storage.files import LOCK_NAME
from verifiers.tui.texts import run_line
from verifiers.view.catalog import Catalog
from verifiers.view.describe import _tokens, describe, version
from verifiers.view.describe import settings as stored_settings
from verifiers.view.library import Library
from verifiers.view.listing import MIN_LISTED
from verifiers.view.tokens import pieces_of


@pytest.fixture
def begun(tmp_path):
    """The folder of a run that says it is running, whose process is this one."""
    path = tmp_path / "evals" / "tower--m" / "abc"
    with RunDirectory.create_or_resume(path, {"env_id": "tower", "model": "m"}) as run:
        with run.open_journal() as journal:
            journal.append_sync(view_runs.plain_row(0, random.Random(0)))
        run.write_metadata({"env_id": "tower", "model": "m", "status": "running"})
    return path


def status(folder):
    (source,) = Catalog([folder]).sources().values()
    return describe(source)["status"]


def hold(path, pid):
    holder = json.loads((path / LOCK_NAME).read_bytes())
    (path / LOCK_NAME).write_text(json.dumps(holder | {"pid": pid}))


def test_a_run_whose_process_lives_is_running(begun):
    assert status(begun) == "running"


def test_a_run_whose_process_is_gone_is_interrupted(begun):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    hold(begun, ended.pid)
    assert status(begun) == "interrupted"


def test_a_run_of_another_machine_is_judged_by_its_files(begun):
    (begun / LOCK_NAME).write_text(json.dumps({"pid": 1, "host": "elsewhere.example"}))
    assert status(begun) == "running"
    for file in begun.iterdir():
        os.utime(file, (time.time() - 3600, time.time() - 3600))
    assert status(begun) == "interrupted"


def test_the_version_changes_with_a_row_and_with_the_end_of_the_process(begun):
    (source,) = Catalog([begun]).sources().values()
    first = version(source)
    assert version(source) == first
    with (
        RunDirectory.create_or_resume(begun, {"env_id": "tower", "model": "m"}) as run,
        run.open_journal() as journal,
    ):
        journal.append_sync(view_runs.plain_row(1, random.Random(0)))
    second = version(source)
    assert second != first
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    hold(begun, ended.pid)
    assert version(source) != second


def test_a_long_list_of_runs_comes_in_parts_that_make_the_whole(tmp_path):
    for number in range(MIN_LISTED + 5):
        view_runs.training(tmp_path / f"run-{number:03}", num_steps=1)
    library = Library(Catalog([tmp_path]))
    all_runs = library.runs()
    assert (len(all_runs["runs"]), all_runs["next"]) == (MIN_LISTED + 5, None)
    first = library.runs(budget_s=0.0)
    assert (len(first["runs"]), first["next"]) == (MIN_LISTED, MIN_LISTED)
    second = library.runs(first["next"], budget_s=0.0)
    assert second["next"] is None
    assert [run["id"] for run in first["runs"] + second["runs"]] == [
        run["id"] for run in all_runs["runs"]
    ]


def test_a_lock_that_another_process_took_is_read_again(begun):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    hold(begun, ended.pid)
    assert status(begun) == "interrupted"
    hold(begun, os.getpid())
    assert status(begun) == "running"


def test_a_training_says_how_far_it_came(tmp_path):
    folder = view_runs.training(tmp_path / "learner", num_steps=12)
    (run,) = Library(Catalog([tmp_path])).runs()["runs"]
    assert (run["kind"], run["rollouts"], run["status"], len(run["curve"])) == (
        "training",
        12,
        "running",
        12,
    )
    (folder / "summary.json").write_text(
        json.dumps({"environment": "words", "model": "tiny", "steps": 12})
    )
    (run,) = Library(Catalog([tmp_path])).runs()["runs"]
    assert (run["env"], run["model"], run["status"]) == ("words", "tiny", "finished")
    (folder / "summary.json").write_text(json.dumps({"steps": 20}))
    for file in [folder, *folder.rglob("*")]:
        os.utime(file, (1, 1))
    (run,) = Library(Catalog([tmp_path])).runs()["runs"]
    assert run["status"] == "interrupted"


def test_a_solved_training_is_finished_before_its_last_step(tmp_path):
    """Negative control: without the line of its end it was interrupted."""
    folder = view_runs.training(tmp_path / "learner", num_steps=12)
    (folder / "summary.json").write_text(json.dumps({"steps": 20}))
    for line, said in (("", "interrupted"), ('{"step": 12, "solved": 1}\n', "finished")):
        with (folder / "metrics.jsonl").open("a") as file:
            file.write(line)
        for file in [folder, *folder.rglob("*")]:
            os.utime(file, (1, 1))
        (run,) = Library(Catalog([tmp_path])).runs()["runs"]
        assert run["status"] == said


def test_a_training_that_ended_with_an_error_says_which(tmp_path):
    """Negative control: without it, it was interrupted."""
    folder = view_runs.training(tmp_path / "learner", num_steps=12)
    facts = {"max_steps": 20, "configuration": {}}
    for ended, said in (({}, "interrupted"), ({"ended": "no learning signal"}, "failed")):
        (folder / "settings.json").write_text(json.dumps(facts | ended))
        for file in [folder, *folder.rglob("*")]:
            os.utime(file, (1, 1))
        (run,) = Library(Catalog([tmp_path])).runs()["runs"]
        assert (run["status"], run["ended"]) == (said, ended.get("ended"))
        assert str(run_line(run)).endswith("  no learning signal") == (said == "failed")


def test_the_files_of_the_trainer_itself_are_read(tmp_path):
    loggers = pytest.importorskip(
        "verifiers_trainer.run.metrics_files", reason="the trainer is not installed"
    )
    file = loggers.MetricsFile(tmp_path / "run")
    for step in (1, 2, 3):
        file.write(
            step, step, {"reward/mean": float("nan") if step == 2 else step / 4, "loss": 0.1}
        )
    library = Library(Catalog([tmp_path]))
    answer = library.metrics("run")
    assert [line["reward/mean"] for line in answer["lines"]] == [0.25, None, 0.75]
    assert [line["step"] for line in library.metrics("run", 2, answer["generation"])["lines"]] == [
        3
    ]
    file.resume(1)  # cut back, as resuming does, then as long as before
    for step in (2, 3):
        file.write(step, step, {"reward/mean": 0.5})
    again = library.metrics("run", 2, answer["generation"])
    assert [line["reward/mean"] for line in again["lines"]] == [0.25, 0.5, 0.5]


def test_a_character_of_several_tokens_belongs_to_the_last():
    pieces = pieces_of("bytes")
    assert pieces(list("aé€b".encode())) == ["a", "", "é", "", "", "€", "b"]
    assert pieces([0xFF, 0x61])[-1].endswith("a")


def test_a_training_names_its_model_by_its_newest_checkpoint(tmp_path):
    view_runs.training(tmp_path / "words", num_steps=2)
    for step, model in ((1, "before"), (2, "builtin:tiny")):
        state = tmp_path / f"words/checkpoint-{step}"
        state.mkdir()
        (state / "rl_state.json").write_text(
            json.dumps({"model": model, "configuration": {"env_id": "sums"}})
        )
    (source,) = Catalog([tmp_path]).sources().values()
    assert (describe(source)["model"], describe(source)["env"]) == ("builtin:tiny", "sums")


def test_before_its_first_checkpoint_a_training_has_the_settings_that_it_started_with(tmp_path):
    view_runs.training(tmp_path / "words", num_steps=1)
    (tmp_path / "words/settings.json").write_text(
        json.dumps(
            {
                "model": "builtin:tiny",
                "max_steps": 7,
                "configuration": {"env_id": "sums", "learning_rate": 0.5},
            }
        )
    )
    (source,) = Catalog([tmp_path]).sources().values()
    facts = describe(source)
    assert (facts["model"], facts["env"], facts["planned"]) == ("builtin:tiny", "sums", 7)
    assert facts["settings"]["learning_rate"] == 0.5
    assert stored_settings(source)["flat"]["learning_rate"] == 0.5


def test_the_settings_hold_what_a_model_of_this_process_samples_by_default(begun):
    local = {"name": "small", "sampling": {"temperature": 1.0, "top_k": 0}}
    facts = {
        "env_id": "tower",
        "model": "m",
        "status": "complete",
        "sampling_args": {"temperature": 0.5},
    }
    (begun / "metadata.json").write_text(json.dumps(facts | {"local_model": local}))
    (source,) = Catalog([begun.parents[1]]).sources().values()
    settings = describe(source)["settings"]
    assert (settings["sampling.temperature"], settings["sampling.top_k"]) == (0.5, 0)


def test_the_tokens_of_a_run_that_older_versions_saved_as_none_are_unknown():
    """And the control: what was counted counts."""
    for usage, tokens in (((0.0, 0.0), None), ((3.0, 0.0), 12.0)):
        means = dict(zip(("input_tokens", "output_tokens"), usage, strict=True))
        assert _tokens({"num_rollouts": 4, "usage": means}) == tokens
