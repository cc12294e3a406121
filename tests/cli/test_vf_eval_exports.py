"""``vf-eval --export``: a run is complete when its copies are written, and whatever stopped the
writing, the same command writes them and asks the model nothing."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest

from support.eval_command import end, install_toy, odd_only, start
from support.warm_commands import run_vf_eval
from verifiers import load_results
from verifiers.runtime.failpoints import armed
from verifiers.testing import FakeServer

FILES = {"atif": "atif", "parquet": "results.parquet", "hf": "dataset"}
PLAN = ("-m", "m", "-n", "3", "-r", "2")


@pytest.fixture
def folder(tmp_path):
    install_toy(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def server():
    with FakeServer(odd_only, models=["m"]) as server:
        yield server


def only_run(folder: Path) -> Path:
    (run,) = folder.glob("outputs/evals/*/*")
    return run


def status_of(run: Path) -> str:
    return json.loads((run / "metadata.json").read_text())["status"]


def left_over(run: Path) -> list[Path]:
    return list(run.glob(".*.tmp"))


def rewards_in(run: Path, name: str) -> list[float]:
    if name == "hf":
        import datasets

        return list(datasets.load_from_disk(str(run / FILES[name]))["reward"])
    return load_results(run / FILES[name])["rewards"]


def test_killed_while_it_exports_the_same_command_exports_and_asks_nothing(folder, server):
    words = ("toy", "-b", server.url, *PLAN, "--export", ",".join(FILES))
    # each export is renamed twice: by its writer, and by the command
    killed = end(start(folder, *words, VF_FAILPOINT="replacing.before_rename:3"))
    assert killed.code == -signal.SIGKILL, killed.err
    run, asked = only_run(folder), server.count
    assert (status_of(run), len(left_over(run))) == ("running", 1)
    assert [(run / file).exists() for file in FILES.values()] == [True, False, False]
    ran = run_vf_eval(folder, *words)
    assert (ran.code, server.count, only_run(folder)) == (0, asked, run), ran.err
    assert (status_of(run), left_over(run)) == ("complete", [])
    for name in FILES:
        assert rewards_in(run, name) == load_results(run)["rewards"]


def test_a_full_disk_is_exit_3_and_the_same_command_exports_and_asks_nothing(
    vf_eval, eval_folder, server
):
    words = ("toy", "-b", server.url, *PLAN, "--export", "parquet", "--json")
    with armed("replacing.before_rename:1:ENOSPC"):
        ran = vf_eval(*words)
    run, asked = only_run(eval_folder), server.count
    assert (ran.code, status_of(run), left_over(run)) == (3, "failed", [])
    assert "--export failed: [Errno 28]" in ran.json["error"]["message"]
    assert "the same command writes what is missing" in ran.json["error"]["message"]
    assert [(each["num_rollouts"], each["exported"]) for each in ran.json["runs"]] == [(6, None)]
    again = vf_eval(*words)
    assert (again.code, server.count, only_run(eval_folder)) == (0, asked, run)
    assert list(again.json["runs"][0]["exported"]) == ["parquet"]
    assert status_of(run) == "complete"


def test_a_signal_ends_the_copy_that_was_begun_and_the_same_command_asks_nothing(folder, server):
    rows = '{"num_rows": 100}'
    words = ("toy", "-b", server.url, "-m", "m", "-n", "100", "-r", "1", "-a", rows)
    words += ("--export", "atif")
    child = start(folder, *words)
    deadline = time.monotonic() + 20
    while not list(folder.glob("outputs/evals/*/*/.atif.*.tmp")):
        assert time.monotonic() < deadline
        time.sleep(0.002)
    child.send_signal(signal.SIGINT)
    ran = end(child)
    run, asked = only_run(folder), server.count
    assert (ran.code, status_of(run), left_over(run)) == (130, "interrupted", []), ran.err
    assert "to resume: vf-eval toy" in ran.err
    assert len(load_results(run / "atif")) == 100
    again = run_vf_eval(folder, *words)
    assert (again.code, server.count, only_run(folder)) == (0, asked, run), again.err
    assert status_of(run) == "complete"


def test_a_complete_run_is_exported_by_resume_and_an_earlier_export_is_replaced(
    vf_eval, eval_folder, server
):
    vf_eval("toy", "-b", server.url, *PLAN)
    run, asked = only_run(eval_folder), server.count
    (run / "atif").mkdir()
    (run / "atif" / "000009.json").write_text("half of a")
    for _ in range(2):
        ran = vf_eval("toy", "--resume", str(run), "--export", "atif,hf,parquet", "--json")
        assert (ran.code, server.count, status_of(run)) == (0, asked, "complete"), ran.err
        assert set(ran.json["runs"][0]["exported"]) == set(FILES)
    for name in FILES:
        assert rewards_in(run, name) == load_results(run)["rewards"]
    assert json.loads((run / "atif" / "metadata.json").read_text())["status"] == "complete"


def test_the_size_of_a_resumed_run_is_its_own_and_not_the_environments_default(
    vf_eval, eval_folder, server
):
    vf_eval("toy", "-b", server.url, *PLAN)
    run, asked = only_run(eval_folder), server.count
    (eval_folder / "pyproject.toml").write_text(
        "[tool.verifiers.eval]\nnum_examples = 4\nrollouts_per_example = 5\n"
    )
    ran = vf_eval("toy", "--resume", str(run), "--export", "parquet", "--json")
    assert (ran.code, server.count) == (0, asked), ran.err
    assert ran.json["runs"][0]["num_rollouts"] == len(load_results(run)["rewards"]) == 6
    # a flag makes it larger
    assert vf_eval("toy", "--resume", str(run), "-n", "4", "--json").code == 0
    assert len(load_results(run)["rewards"]) == 8


def test_a_resumed_run_has_its_own_settings_and_the_command_may_say_others(
    vf_eval, eval_folder, server
):
    words = ["-t", "8", "-T", "0.5", "-S", '{"top_p": 0.9}', "-a", '{"num_rows": 7}']
    vf_eval("toy", "-b", server.url, *PLAN, *words, "--shuffle", "--seed", "3")
    run, asked = only_run(eval_folder), server.count
    ran = vf_eval("toy", "--resume", str(run), "--export", "parquet", "--json")
    assert (ran.code, server.count) == (0, asked), ran.err
    (result,) = ran.json["runs"]
    assert (result["num_rollouts"], result["env_args"]) == (6, {"num_rows": 7})
    refused = vf_eval("toy", "--resume", str(run), "-T", "0.6", "--json")
    differing = refused.json["error"]["message"]
    assert "sampling_args.temperature was 0.5, now 0.6" in differing
    assert "max_tokens" not in differing
    for flags, name in (
        (("-a", '{"num_rows": 6}'), "env_args.num_rows"),
        (("--seed", "4"), "seed"),
        (("--no-shuffle",), "shuffle_seed"),
    ):
        refused = vf_eval("toy", "--resume", str(run), *flags, "--json")
        assert f"{name} was " in refused.json["error"]["message"]
    assert server.count == asked


def test_an_argument_that_is_a_secret_is_in_no_file_and_is_given_again(
    vf_eval, eval_folder, server
):
    secret = ("-a", '{"num_rows": 7, "api_key": "sk-secret-of-this-test"}')
    source = (eval_folder / "toy.py").read_text()
    (eval_folder / "toy.py").write_text(source.replace("**more", 'api_key: str = "", **more', 1))
    vf_eval("toy", "-b", server.url, *PLAN, *secret)
    run, asked = only_run(eval_folder), server.count
    refused = vf_eval("toy", "--resume", str(run), "--json")
    assert "env_args.api_key was '*** " in refused.json["error"]["message"]
    assert vf_eval("toy", "--resume", str(run), *secret).code == 0
    assert server.count == asked


def test_a_complete_run_whose_further_export_fails_stays_complete(vf_eval, eval_folder, server):
    vf_eval("toy", "-b", server.url, *PLAN)
    run = only_run(eval_folder)
    with armed("replacing.before_rename:1:ENOSPC"):
        ran = vf_eval("toy", "--resume", str(run), "--export", "atif")
    assert (ran.code, status_of(run)) == (3, "complete")
