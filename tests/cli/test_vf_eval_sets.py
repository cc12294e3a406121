"""A ``vf-eval`` of several runs is a set: the same command continues it, and pays for nothing
twice."""

from __future__ import annotations

import json
import re
import shlex
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest

import verifiers as vf
from support.eval_command import TOY, end, install_toy, last_word, odd_only, start
from support.warm_commands import run_vf_eval
from verifiers.storage.sets import read_set, sets_below
from verifiers.testing import Behaviour, FakeServer

NUM_ROLLOUTS = 12 + 8 + 6
"""Of ``nightly``."""


def nightly(folder: Path, url: str, name: str = "nightly", more: str = "") -> str:
    """A file of three runs: two models, and an ablation."""
    (folder / f"{name}.toml").write_text(
        f'api_base_url = "{url}"\nrollouts_per_example = 2\nmax_concurrent = 2\n{more}\n'
        '[[eval]]\nenv_id = "toy"\nmodel = "m"\nnum_examples = 6\n'
        '[[eval]]\nenv_id = "toy"\nmodel = "k"\nnum_examples = 4\n'
        '[[ablation]]\nid = "toy"\nmodel = "k"\nnum_examples = 3\n[ablation.sweep]\n'
        "temperature = [0.5]\n"
    )
    return f"{name}.toml"


def edited(content: str, change: Callable[[list[Any]], list[Any]]) -> str:
    """The file of a set with other runs."""
    stored = json.loads(content)
    return json.dumps({**stored, "runs": change(stored["runs"])})


def num_rows(folder: Path) -> int:
    """Rollouts on disk, over all sets."""
    return sum(file.read_bytes().count(b"\n") for file in folder.glob("outputs/**/results.jsonl"))


def wait_for_rows(folder: Path, count: int) -> None:
    deadline = time.monotonic() + 30
    while num_rows(folder) < count:
        assert time.monotonic() < deadline, "the set did not get that far"
        time.sleep(0.01)


@pytest.fixture
def folder(tmp_path):
    install_toy(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def slow_server():
    with FakeServer(odd_only, models=["m", "k"], delay_s=0.05) as server:
        yield server


@pytest.fixture
def server():
    with FakeServer(last_word, models=["m", "k"]) as server:
        yield server


# --- the same command continues the set --------------------------------------------------------


def test_a_set_that_was_killed_three_times_costs_an_uninterrupted_one_and_what_was_in_flight(
    folder, slow_server
):
    words = (nightly(folder, slow_server.url), "--json")
    before, in_flight = slow_server.count, 0
    for at in (3, 14, 22):  # within the first run, the second and the third
        asked, durable = slow_server.count, num_rows(folder)
        child = start(folder, *words)
        wait_for_rows(folder, at)
        child.kill()
        end(child)
        time.sleep(0.1)  # what was sent arrives
        lost = (slow_server.count - asked) - (num_rows(folder) - durable)
        assert 0 <= lost <= 2
        in_flight += lost
    ran = run_vf_eval(folder, *words)
    assert ran.code == 0, ran.err
    assert slow_server.count - before == NUM_ROLLOUTS + in_flight
    assert num_rows(folder) == NUM_ROLLOUTS
    (run_set,) = sets_below(folder)
    assert run_set.is_complete
    assert ran.json["set"]["complete"] is True
    assert [run["num_rollouts"] for run in ran.json["runs"]] == [12, 8, 6]
    # complete: the same command asks nobody, and takes the runs as they are
    files = {path: path.read_bytes() for path in run_set.path.rglob("*.json*")}
    asked, hits = slow_server.count, len(slow_server.hits)
    again = run_vf_eval(folder, *words)
    assert (again.code, slow_server.count, len(slow_server.hits)) == (0, asked, hits)
    assert [run["avg_reward"] for run in again.json["runs"]] == [
        run["avg_reward"] for run in ran.json["runs"]
    ]
    assert "nothing is pending" in again.err
    assert {path: path.read_bytes() for path in run_set.path.rglob("*.json*")} == files


def test_negative_control_a_new_set_pays_for_every_run(folder, slow_server):
    words = (nightly(folder, slow_server.url), "-A")
    before = slow_server.count
    assert run_vf_eval(folder, *words).code == 0
    assert run_vf_eval(folder, *words, "--new").code == 0
    assert slow_server.count - before == 2 * NUM_ROLLOUTS


def test_ctrl_c_prints_a_command_that_pays_for_no_finished_run_of_the_comma_form(
    folder, slow_server
):
    (folder / "more.py").write_text(TOY)
    words = ("toy,more", "-b", slow_server.url, "-m", "m", "-n", "5", "-r", "2", "-c", "2", "--new")
    before = slow_server.count
    child = start(folder, *words)
    wait_for_rows(folder, 13)
    child.send_signal(signal.SIGINT)
    ran = end(child)
    assert ran.code == 130
    assert "1 of 2 runs are complete" in ran.err
    (command,) = re.findall(r"to resume: vf-eval (.+)", ran.err)
    assert "toy,more" in command
    assert "--new" not in command
    lost = slow_server.count - before - num_rows(folder)
    assert 0 <= lost <= 2
    assert run_vf_eval(folder, *shlex.split(command), "-A").code == 0
    assert slow_server.count - before == 20 + lost


def test_a_set_killed_before_its_first_rollout_goes_on(folder, server):
    words = (nightly(folder, server.url), "-A")
    ran = run_vf_eval(folder, *words)
    (run_set,) = sets_below(folder)
    for file in run_set.path.glob("evals/*/*/*"):  # as a kill right after set.json leaves it
        file.unlink()
    again = run_vf_eval(folder, *words)
    assert (ran.code, again.code) == (0, 0)
    (resumed,) = sets_below(folder)
    assert (resumed.id, resumed.created) == (run_set.id, run_set.created)
    assert resumed.is_complete


# --- two nights never mix -------------------------------------------------------------------------


def test_a_set_has_the_id_that_the_command_gives_it_and_two_ids_are_two_sets(
    vf_eval, server, eval_folder
):
    file = nightly(eval_folder, server.url)
    for night in ("2026-11-27", "2026-11-28", "2026-11-28"):
        assert vf_eval(file, "-A", "--set", night).code == 0
    assert server.count == 2 * NUM_ROLLOUTS
    nights = sets_below(eval_folder)
    assert [night.label for night in nights] == ["nightly/2026-11-27", "nightly/2026-11-28"]
    assert [night.path.parent.name for night in nights] == ["nightly"] * 2
    assert all(len(night.runs) == night.num_complete == 3 for night in nights)
    refused = vf_eval(file, "-A", "--set", "2026-11-28", "--new")
    assert refused.code == 2
    assert "2026-11-28 exists; leave --new out to continue it" in refused.paragraph


@pytest.mark.parametrize("set_id", ["../elsewhere", ".hidden", "a/b", "", "a b"])
def test_an_id_is_a_name_of_a_folder(vf_eval, server, eval_folder, set_id):
    refused = vf_eval(nightly(eval_folder, server.url), "--set", set_id)
    assert refused.code == 2
    assert "--set" in refused.paragraph
    assert not (eval_folder / "outputs").exists()


def test_a_set_of_other_runs_is_refused_by_its_id_and_noted_without_one(
    vf_eval, server, eval_folder
):
    file = nightly(eval_folder, server.url)
    assert vf_eval(file, "-A", "--set", "monday").code == 0
    refused = vf_eval(file, "-A", "--set", "monday", "-T", "0.7")
    assert refused.code == 2
    assert (
        "outputs/sets/nightly/monday is a set of other runs: sampling_args.temperature of run 1 was"
        " '<not set>', now 0.7" in refused.paragraph
    )
    before = server.count
    assert vf_eval(file, "-A").code == 0
    (first,) = [night for night in sets_below(eval_folder) if night.id != "monday"]
    first.folder(first.runs[-1]).joinpath("metadata.json").unlink()  # unfinished
    edited = vf_eval(file, "-A", "-n", "2")
    assert edited.code == 0
    assert f"{first.label} is unfinished, and of other runs: num_examples of run 1" in edited.err
    assert server.count - before == NUM_ROLLOUTS + 12


def test_settings_that_change_no_reward_go_on_with_the_set(vf_eval, server, eval_folder):
    file = nightly(eval_folder, server.url)
    assert vf_eval(file, "-A").code == 0
    (run_set,) = sets_below(eval_folder)
    run_set.folder(run_set.runs[0]).joinpath("metadata.json").unlink()
    before = server.count
    changed = vf_eval(file, "-A", "-c", "5", "--timeout", "9", "--max-error-rate", "0.5")
    assert (changed.code, server.count) == (0, before)
    assert len(sets_below(eval_folder)) == 1


@pytest.mark.parametrize("zero", [("--shuffle",), ("--seed", "0"), ("--shuffle-seed", "0")])
def test_a_seed_of_0_is_a_setting_of_the_set(vf_eval, server, eval_folder, zero):
    words = ("toy,toy", "-b", server.url, "-m", "m", "-n", "2", "-r", "1", "-A")
    for more in ((), zero, zero):
        assert vf_eval(*words, *more).code == 0
    assert (len(sets_below(eval_folder)), server.count) == (2, 2 * 4)


def test_a_complete_set_is_published_when_asked(vf_eval, server, eval_folder, monkeypatch):
    published: list[tuple[str, int]] = []

    def push(dataset: datasets.Dataset, name: str) -> None:
        published.append((name, len(dataset)))

    monkeypatch.setattr(datasets.Dataset, "push_to_hub", push)
    words = ("toy,toy", "-b", server.url, "-m", "m", "-n", "2", "-r", "1", "-A")
    assert vf_eval(*words).code == 0
    assert (published, server.count) == ([], 4)
    assert vf_eval(*words, "--save-to-hf-hub", "--hf-hub-dataset-name", "me/night").code == 0
    assert (published, server.count) == ([("me/night", 2)] * 2, 4)


def test_equal_entries_are_runs_of_their_own(vf_eval, server, eval_folder):
    words = ("toy,toy", "-b", server.url, "-m", "m", "-n", "2", "-r", "1", "--json")
    first = vf_eval(*words).json
    assert len({run["path"] for run in first["runs"]}) == 2
    assert first["set"]["name"] == "toy+toy"
    assert server.count == 4
    assert [run["path"] for run in vf_eval(*words).json["runs"]] == [
        run["path"] for run in first["runs"]
    ]
    assert server.count == 4


def test_changed_code_of_an_environment_does_not_mix_with_an_unfinished_set(folder, server):
    words = (nightly(folder, server.url), "-A")
    assert run_vf_eval(folder, *words).code == 0
    (folder / "toy.py").write_text(TOY.replace("float(", "1.0 * float("))
    refused = run_vf_eval(folder, *words)
    assert refused.code == 2
    assert "holds a run of other code: toy.py changed since" in refused.paragraph
    asked = server.count
    assert run_vf_eval(folder, *words, "--accept-changed-code").code == 0
    assert server.count == asked
    assert run_vf_eval(folder, *words, "--new").code == 0
    assert server.count == 2 * asked


def test_the_model_that_a_server_lists_is_part_of_the_set(vf_eval, eval_folder):
    with FakeServer(last_word, models=["m"]) as server:
        words = ("toy,toy", "-b", server.url, "-n", "2", "-r", "1", "-A")
        assert vf_eval(*words).code == 0
        assert vf_eval(*words).code == 0
        assert server.count == 4
    (run_set,) = sets_below(eval_folder)
    assert [run.model for run in run_set.runs] == ["m", "m"]


def test_a_second_process_waits_for_nobody_and_writes_nothing(folder, slow_server):
    words = (nightly(folder, slow_server.url), "-A")
    child = start(folder, *words)
    wait_for_rows(folder, 2)
    busy = run_vf_eval(folder, *words)
    child.kill()
    end(child)
    assert busy.code == 2
    assert re.search(r"outputs/sets/nightly/\w+ is being written by process", busy.paragraph)


# --- where a command is no set --------------------------------------------------------------------


def test_a_single_run_stays_where_it_was_and_is_a_set_when_asked(vf_eval, server, eval_folder):
    words = ("toy", "-b", server.url, "-m", "m", "-n", "2", "-r", "1", "--json")
    single = vf_eval(*words).json
    assert single["runs"][0]["path"].startswith("outputs/evals/toy--m/")
    assert "set" not in single
    named = vf_eval(*words, "--set", "first").json
    assert named["runs"][0]["path"].startswith("outputs/sets/toy/first/evals/toy--m/")
    assert named["set"]["runs"][0]["state"] == "complete"


def test_an_id_contradicts_what_has_no_folder(vf_eval, server, eval_folder):
    file = nightly(eval_folder, server.url)
    assert "--no-save keeps nothing" in vf_eval(file, "--no-save", "--set", "a").paragraph
    assert (
        "names the folder of a single run"
        in vf_eval(
            "toy", "-b", server.url, "-m", "m", "--resume", "outputs/evals/x", "--set", "a"
        ).paragraph
    )
    unsaved = vf_eval(file, "--no-save", "--json")
    assert unsaved.code == 0
    assert unsaved.json["set"]["path"] is None
    assert not (eval_folder / "outputs").exists()


def test_resume_without_a_path_needs_a_set_and_a_dry_run_says_what_it_would_do(
    vf_eval, server, eval_folder
):
    file = nightly(eval_folder, server.url)
    assert "there is no set of these runs in outputs/sets/nightly" in " ".join(
        vf_eval(file, "--resume").paragraph.split()
    )
    planned = vf_eval(file, "--dry-run")
    assert re.search(r"set nightly/\w+ in .*: 0 of 3 runs are complete", planned.out)
    assert not (eval_folder / "outputs").exists()
    assert vf_eval(file, "-A").code == 0
    assert "3 of 3 runs are complete" in vf_eval(file, "--dry-run").out
    assert vf_eval(file, "-A", "--resume").code == 0
    assert server.count == NUM_ROLLOUTS


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: "{",
        lambda content: content.replace('"name"', '"nome"'),
        lambda content: content.replace('"evals/', '"../../evals/', 1),
        lambda content: content.replace('"evals/', '"/evals/', 1),
        lambda content: edited(content, lambda runs: runs[:1]),
        lambda content: edited(content, lambda runs: []),
        lambda content: edited(content, lambda runs: [{**run, "path": ""} for run in runs]),
        lambda content: edited(content, lambda runs: [{**run, "path": "evals/x"} for run in runs]),
    ],
)
def test_a_damaged_file_of_a_set_is_named_and_nothing_is_written(
    vf_eval, server, eval_folder, damage
):
    file = nightly(eval_folder, server.url)
    assert vf_eval(file, "-A", "--set", "a").code == 0
    path = eval_folder / "outputs/sets/nightly/a/set.json"
    path.write_text(damage(path.read_text()))
    refused = vf_eval(file, "-A", "--set", "a")
    assert refused.code == 2
    assert "set.json cannot be read as a set of runs" in refused.paragraph
    assert sets_below(eval_folder) == []
    assert server.count == NUM_ROLLOUTS


# --- one exit code, a line per run ----------------------------------------------------------------


def test_what_failed_is_repeated_alone_by_the_same_command(vf_eval, eval_folder):
    away = ["k"]

    def script(hit):
        return 400 if hit.json()["model"] in away else None

    with FakeServer(last_word, script, models=["m", "k"]) as server:
        words = (nightly(eval_folder, server.url, more="abort_after = 2"), "-A")
        failed = vf_eval(*words)
        assert failed.code == 3
        table = failed.out[failed.out.index("reward ± standard error") :]
        states = re.findall(r"\b(complete|failed|pending)\b", table)
        assert states == ["complete", "failed", "failed"]
        assert "1 of 3 runs are complete" in failed.out
        (command,) = re.findall(r"and nothing else: vf-eval (.+)", failed.err)
        away.clear()
        asked = sum(request["model"] == "m" for request in server.requests)
        repeated = vf_eval(*shlex.split(command), "--json")
        assert repeated.code == 0, repeated.err
        assert sum(request["model"] == "m" for request in server.requests) == asked
        assert [run["state"] for run in repeated.json["set"]["runs"]] == ["complete"] * 3


def test_errors_of_a_complete_run_keep_the_exit_code_until_they_are_repeated(vf_eval, eval_folder):
    broken = ["say 1"]

    def script(hit):
        asked = hit.json()
        is_broken = asked["model"] == "m" and asked["messages"][-1]["content"] in broken
        return 400 if is_broken else None

    with FakeServer(last_word, script, models=["m", "k"]) as server:
        words = (nightly(eval_folder, server.url), "--json")
        first = vf_eval(*words)
        assert first.code == 3
        assert [run["state"] for run in first.json["set"]["runs"]] == [
            "failed",
            "complete",
            "complete",
        ]
        assert first.json["set"]["runs"][0]["exit_code"] == 3
        assert "ended in an error" in first.json["set"]["runs"][0]["error"]["message"]
        (command,) = re.findall(r"and nothing else: vf-eval (.+)", first.err)
        assert "--retry-errors" in command
        asked = server.count
        same = vf_eval(*words)
        assert (same.code, server.count) == (3, asked)
        broken.clear()
        assert vf_eval(*shlex.split(command)).code == 0
        assert server.count == asked + 2


# --- the budget -----------------------------------------------------------------------------------


def counted(request):
    return vf.Response(vf.AssistantMessage(last_word(request)), usage=vf.Usage(100, 50))


LIMITED = "max_tokens = 50\n"


def test_a_limit_bounds_the_sum_over_the_runs_of_a_set_and_over_its_sessions(vf_eval, eval_folder):
    with FakeServer(counted, models=["m", "k"]) as server:
        file = nightly(eval_folder, server.url, more=LIMITED)
        words = (file, "--json", "--max-total-tokens")
        stopped = vf_eval(*words, "2600")
        assert stopped.code == 3
        assert 12 < server.count <= 2600 // 150
        states = [run["state"] for run in stopped.json["set"]["runs"]]
        assert states[0] == "complete"
        assert states[1:] != ["complete", "complete"]
        asked = server.count
        assert vf_eval(*words, "2600").code == 3  # what was spent stays spent
        assert (server.count - asked) * 150 <= 2600 - asked * 150
        finished = vf_eval(*words, "9000")
        assert (finished.code, server.count) == (0, NUM_ROLLOUTS)
        spent = sum(run["spent"]["tokens"] for run in finished.json["runs"])
        assert spent == NUM_ROLLOUTS * 150


def test_negative_control_limits_of_the_entries_are_their_own(vf_eval, eval_folder):
    with FakeServer(counted, models=["m", "k"]) as server:
        file = nightly(eval_folder, server.url, more=LIMITED)
        text = (eval_folder / file).read_text()
        (eval_folder / file).write_text(
            text.replace("num_examples", "max_total_tokens = 2700\nnum_examples")
        )
        assert vf_eval(file, "-A").code == 0
        assert server.count * 150 > 2700


def test_runs_begin_no_more_when_nothing_is_left(vf_eval, eval_folder):
    with FakeServer(counted, models=["m", "k"]) as server:
        file = nightly(eval_folder, server.url, more=LIMITED)
        assert vf_eval(file, "-A", "--max-total-tokens", "9000", "-n", "2").code == 0
        asked = server.count
        spent = asked * 150
        (run_set,) = sets_below(eval_folder)
        journal = run_set.folder(run_set.runs[-1])
        for path in journal.iterdir():
            path.unlink()
        ran = vf_eval(file, "--json", "--max-total-tokens", str(spent - 4 * 150), "-n", "2")
        assert (ran.code, server.count) == (3, asked)
        assert [run["state"] for run in ran.json["set"]["runs"]] == [
            "complete",
            "complete",
            "pending",
        ]
        assert ran.json["set"]["runs"][-1]["exit_code"] is None
        assert (
            "stopped: the budget of the set is used up: its runs have spent 1,200 of 1,200 tokens"
            in " ".join(ran.err.split())
        )


@pytest.mark.parametrize("flag", [["--max-total-tokens", "2600"], ["--max-total-tokens=2600"]])
def test_a_remainder_below_one_request_ends_the_set_once_and_fails_no_run(
    vf_eval, eval_folder, flag
):
    with FakeServer(counted, models=["m", "k"]) as server:
        file = nightly(eval_folder, server.url, more=LIMITED)
        ran = vf_eval(file, "--json", *flag)
        asked = server.count
        assert 2600 - asked * 150 > 0  # something is left, and no request fits into it
        states = [run["state"] for run in ran.json["set"]["runs"]]
        assert (ran.code, states) == (3, ["complete", "interrupted", "pending"])
        (run_set,) = sets_below(eval_folder)
        assert run_set.state(run_set.runs[1]) == "interrupted"
        sentence = ran.json["error"]["message"]
        assert sentence.startswith(
            f"stopped: the budget of the set is used up: {asked * 150:,} of 2,600 tokens are spent"
        )
        assert " ".join(ran.err.split()).count("stopped: ") == 1
        (command,) = re.findall(r"and nothing else: vf-eval (.+)", ran.err)
        assert command == f"{file} --json --max-total-tokens MORE"
        assert "must be" in vf_eval(*shlex.split(command)).err
        assert vf_eval(*shlex.split(command.replace("MORE", "9000"))).code == 0
        assert server.count == NUM_ROLLOUTS


def test_a_run_that_meets_its_own_limit_does_not_keep_the_others_from_running(vf_eval, eval_folder):
    with FakeServer(counted, models=["m", "k"]) as server:
        file = nightly(eval_folder, server.url, more=LIMITED)
        text = (eval_folder / file).read_text()
        limited = text.replace("num_examples = 6", "num_examples = 6\nmax_total_tokens = 1000")
        (eval_folder / file).write_text(limited)
        ran = vf_eval(file, "--json")
        states = [run["state"] for run in ran.json["set"]["runs"]]
        assert (ran.code, states) == (3, ["interrupted", "complete", "complete"])
        assert "of the set" not in ran.err
        assert "MORE" not in ran.err


def test_a_limit_over_runs_that_are_not_saved_counts_them_too(vf_eval, eval_folder):
    with FakeServer(counted, models=["m", "k"]) as server:
        file = nightly(eval_folder, server.url, more=LIMITED)
        ran = vf_eval(file, "-A", "--no-save", "--max-total-tokens", "2600")
        assert ran.code == 3
        assert 12 < server.count <= 2600 // 150


# --- progress -------------------------------------------------------------------------------------


def test_progress_counts_over_the_set(vf_eval, server, eval_folder):
    ran = vf_eval(nightly(eval_folder, server.url), "-A", "--progress", "json")
    events = [json.loads(line) for line in ran.err.splitlines() if line.startswith("{")]
    done = [event["all_done"] for event in events if event["event"] == "rollout"]
    assert done == list(range(1, NUM_ROLLOUTS + 1))
    assert {event["all_total"] for event in events if event["event"] == "rollout"} == {NUM_ROLLOUTS}


def test_the_file_of_the_page_runs_against_a_server_that_limits_rates(vf_eval, eval_folder):
    page = Path(__file__).parents[2] / "docs/evaluate/nightly.md"
    (text,) = re.findall(r"<!-- file: nightly.toml -->\n```toml\n(.*?)```", page.read_text(), re.S)

    def limited(hit):  # every seventh request is refused, whoever sends it
        return Behaviour(status=429, headers={"retry-after": "0"}) if hit.index % 7 == 1 else None

    with FakeServer(counted, limited, models=["my-model", "gpt-4.1-mini"]) as server:
        (eval_folder / "nightly.toml").write_text(
            text.replace("http://127.0.0.1:8000/v1", server.url)
        )
        ran = vf_eval("nightly.toml", "--set", "2026-11-28", "--json")
        assert ran.code == 0, ran.err
        refused = sum(hit.index % 7 == 1 for hit in server.hits)
        assert refused > 3
        counts = [(run["num_rollouts"], run["num_errors"]) for run in ran.json["runs"]]
        assert counts == [(8, 0)] * 4
        num_sent = server.count
        again = vf_eval("nightly.toml", "--set", "2026-11-28", "--json")
        assert (again.code, server.count) == (0, num_sent)


def test_the_file_of_a_set_holds_no_secret(vf_eval, server, eval_folder):
    secret = '{"judge_api_key": "sk-canary-123456"}'
    (eval_folder / "toy.py").write_text(
        TOY.replace("**more):", "judge_api_key=None):").replace(", **more)", ")")
    )
    assert vf_eval(nightly(eval_folder, server.url), "-A", "-a", secret).code == 0
    (run_set,) = sets_below(eval_folder)
    content = (run_set.path / "set.json").read_text()
    assert "judge_api_key" in content
    assert "canary" not in content
    assert read_set(run_set.path) == run_set
