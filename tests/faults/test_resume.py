"""Promise: interrupted at any instant, the same command finishes the run and does only what is
pending.

No row twice, none missing, none from another configuration. A child process evaluates against a
server of this process and is killed; the server counts what was asked for.
"""

import json
import logging
import os
import random
import signal
import time
from collections import Counter
from pathlib import Path

import pytest

import verifiers as vf
from support.eval_command import end, install_toy, last_word, rows_on_disk, start
from support.kill import start_child
from support.small_envs import add_one, exact, single_turn, sums
from verifiers.runs.plan import Plan, pending
from verifiers.runs.store import RunStore
from verifiers.storage.journal import read_journal
from verifiers.testing import FakeServer, ScriptedClient

NUM_EXAMPLES, SIBLINGS = 40, 2
PLANNED = NUM_EXAMPLES * SIBLINGS
ROUNDS, LONG = 25, 300
PLACES = [
    *(f"journal.{name}:3" for name in ("before_write", "after_write", "after_fsync")),
    "journal.open:1",  # while a run is resumed
    "journal.finish:1",
    *(
        f"atomic_write.before_rename:{n}" for n in (1, 2, 3)
    ),  # configuration, first and last metadata
]

CHILD = """
import sys
import verifiers as vf

def right(completion, answer):
    return float(completion[-1]["content"] == answer)

def mean_length(completions):
    return [float(len(completions))] * len(completions)

url, path, grouped, save, count = sys.argv[1:6]
rows = [{"question": f"{n} + 1", "answer": str(n + 1)} for n in range(int(count))]
rubric = vf.Rubric(funcs=[right, mean_length] if grouped == "grouped" else [right])
env = vf.SingleTurnEnv(dataset=rows, rubric=rubric)
results = env.evaluate(
    vf.ClientConfig(api_base_url=url), "scripted", rollouts_per_example=2, max_concurrent=4,
    results_path=path if save == "save" else None,
    on_progress=lambda outputs, metadata: [print("stored", o.example_id, flush=True) for o in outputs],
)
print("done", len(results), results.metadata.avg_reward, results.metadata.status, flush=True)
"""

LARGE = CHILD.replace(
    "import verifiers as vf", "import verifiers as vf, verifiers.runs.store as run_store"
).replace("env.evaluate(", "env.evaluate(keep_states=False, client=")
LARGE = LARGE.replace("url, path", "run_store.LARGE_PLAN = 0\nurl, path", 1).replace(
    '"scripted"', 'model="scripted"'
)
"""The same run, whose rollouts are not held."""


def solve(request):
    return str(int(request.prompt[-1]["content"].split()[0]) + 1)


def right(completion, answer):  # as the child's, whose code is part of the run's identity
    return float(completion[-1]["content"] == answer)


@pytest.fixture
def server():
    with FakeServer(solve, delay_s=0.002) as server:
        yield server


def rows_of(folder):
    file = folder / "results.jsonl"
    return list(read_journal(file)) if file.exists() else []


def finish(warm, server, folder, grouped="alone", count=NUM_EXAMPLES, code=CHILD):
    """Run to the end: exactly the pending rollouts are generated, and each planned one is saved
    once."""
    before, durable = server.count, len(rows_of(folder))
    ended = warm.run(code, server.url, folder, grouped, "save", count)
    reward = 1.0 if grouped == "alone" else 1.0 + SIBLINGS
    assert ended.lines[-1] == f"done {count * SIBLINGS} {reward} complete", ended.stderr
    assert server.count - before == count * SIBLINGS - durable
    rows = rows_of(folder)
    assert len({row["rollout_key"] for row in rows}) == len(rows) == count * SIBLINGS
    assert Counter(row["example_id"] for row in rows) == dict.fromkeys(range(count), SIBLINGS)


# --- kill -9 --------------------------------------------------------------------------------------


def test_killed_at_random_times_25_rounds_a_run_ends_with_the_planned_rows_once(
    warm, server, tmp_path
):
    chance = random.Random(5)
    acknowledged, killed = 0, 0
    for number in range(ROUNDS):
        if number % 2:
            when = {"kill_after_s": chance.uniform(0, 0.05)}
        else:
            when = {"kill_after_lines": chance.randint(1, 9)}
        ended = warm.run(CHILD, server.url, tmp_path, "alone", "save", LONG, **when)
        assert ended.killed or "done" in ended.lines[-1], ended.stderr
        killed += ended.killed
        acknowledged += sum(line.startswith("stored") for line in ended.lines)
        assert len(rows_of(tmp_path)) >= acknowledged > 0
    assert killed > ROUNDS / 2
    finish(warm, server, tmp_path, count=LONG)
    finish(warm, server, tmp_path, count=LONG)  # nothing is pending, nothing is generated


def test_without_saving_a_killed_run_begins_again_from_nothing(warm, server, tmp_path):
    """Negative control."""
    warm.run(CHILD, server.url, tmp_path, "alone", "forget", NUM_EXAMPLES, kill_after_lines=5)
    before = server.count
    assert (
        warm.run(CHILD, server.url, tmp_path, "alone", "forget", NUM_EXAMPLES)
        .lines[-1]
        .startswith("done 80")
    )
    assert server.count - before == PLANNED


@pytest.mark.parametrize("grouped", ["alone", "grouped"])
@pytest.mark.parametrize("failpoint", PLACES)
def test_killed_at_each_failpoint_no_row_is_lost_or_done_twice_and_groups_stay_whole(
    warm, server, tmp_path, failpoint, grouped
):
    if failpoint == "journal.open:1":
        assert warm.run(
            CHILD, server.url, tmp_path, grouped, "save", NUM_EXAMPLES, kill_after_lines=9
        ).killed
    ended = warm.run(
        CHILD, server.url, tmp_path, grouped, "save", NUM_EXAMPLES, failpoint=failpoint
    )
    assert ended.killed, ended.stderr
    rows = rows_of(tmp_path)
    assert len(rows) >= sum(line.startswith("stored") for line in ended.lines)
    if grouped == "grouped":
        assert set(Counter(row["example_id"] for row in rows).values()) <= {SIBLINGS}
    finish(warm, server, tmp_path, grouped)


@pytest.mark.parametrize(
    "failpoint", [*PLACES[2:4], "index.append:1", "atomic_write.before_rename:3"]
)
def test_a_large_run_that_is_killed_at_a_failpoint_loses_no_row_and_does_none_twice(
    warm, server, tmp_path, failpoint
):
    if failpoint == "journal.open:1":
        assert warm.run(
            LARGE, server.url, tmp_path, "grouped", "save", NUM_EXAMPLES, kill_after_lines=9
        ).killed
    ended = warm.run(
        LARGE, server.url, tmp_path, "grouped", "save", NUM_EXAMPLES, failpoint=failpoint
    )
    assert ended.killed, ended.stderr
    assert len(rows_of(tmp_path)) >= sum(line.startswith("stored") for line in ended.lines)
    finish(warm, server, tmp_path, "grouped", code=LARGE)
    assert (tmp_path / "results.index").exists()
    finish(warm, server, tmp_path, "grouped", code=LARGE)


def test_rows_of_a_group_written_one_by_one_are_torn_apart_by_a_kill(warm, tmp_path):
    """Negative control of whole groups: the same rows, appended one at a time."""
    code = (
        "import sys\nfrom verifiers.storage.journal import Journal\nwith Journal.open(sys.argv[1])"
        " as j:\n"
    )
    for append, durable in (
        ("[j.append_sync({'key': n}) for n in range(4)]", 2),
        ("j.append_sync(rows)", 0),
    ):
        file = tmp_path / f"{durable}.jsonl"
        rows = "    rows = [{'key': n} for n in range(4)]\n"
        warm.run(f"{code}{rows}    {append}", file, failpoint=f"journal.before_write:{durable + 1}")
        assert len(list(read_journal(file))) == durable


def test_power_loss_in_the_middle_of_a_row_costs_that_row_only(warm, server, tmp_path):
    """A torn tail cannot be had by killing; the file is cut by hand."""
    finish(warm, server, tmp_path)
    file = tmp_path / "results.jsonl"
    file.write_bytes(file.read_bytes()[:-40])
    before = server.count
    finish(warm, server, tmp_path)
    assert server.count - before == 1


# --- the disk -------------------------------------------------------------------------------------

SMALL_DISK = "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000))\n"


@pytest.mark.parametrize(
    ("limit", "failpoint", "said"),
    [
        ("", "journal.before_write:3:ENOSPC", "No space left"),
        ("", "journal.after_write:3:raise", "Input/output error"),
        (SMALL_DISK, None, "File too large"),
    ],
    ids=["full at the third write", "EIO at the third fsync", "full for real"],
)
def test_a_failing_disk_stops_the_run_and_keeps_what_was_acknowledged(
    warm, server, tmp_path, limit, failpoint, said
):
    ended = warm.run(
        limit + CHILD, server.url, tmp_path, "alone", "save", NUM_EXAMPLES, failpoint=failpoint
    )
    assert "JournalError" in ended.stderr
    assert said in ended.stderr
    stored = sum(line.startswith("stored") for line in ended.lines)
    assert 0 < stored <= len(rows_of(tmp_path)) < PLANNED
    assert json.loads((tmp_path / "metadata.json").read_text())["status"] == "failed"
    finish(warm, server, tmp_path)


def test_vf_eval_on_a_failing_disk_ends_with_3(tmp_path):
    install_toy(tmp_path)
    with FakeServer(last_word, models=["m"]) as server:
        words = ("toy", "-b", server.url, "-n", "-1", "-r", "4", "-c", "1")
        ran = end(start(tmp_path, *words, VF_FAILPOINT="journal.after_write:5:raise"))
        assert ran.code == 3, ran.err
        assert "Input/output error" in ran.err
        assert "Traceback" not in ran.err
        kept = len(rows_on_disk(tmp_path))
        assert 4 <= kept < 24
        before = server.count
        assert end(start(tmp_path, *words)).code == 0  # negative control: without the fault
        assert server.count - before == 24 - kept


def test_a_flipped_byte_stops_vf_eval_with_3_by_file_and_line_and_the_file_is_untouched(
    vf_eval, eval_folder
):
    with FakeServer(last_word, models=["m"]) as server:
        (run,) = vf_eval("toy", "-b", server.url, "-n", "3", "-r", "1", "--json").json["runs"]
        file = Path(run["path"], "results.jsonl")
        damaged = bytearray(file.read_bytes())
        damaged[damaged.index(b"\n") + 20] ^= 1
        file.write_bytes(damaged)
        asked = server.count
        ran = vf_eval("toy", "-b", server.url, "-n", "4", "-r", "1", "--resume", run["path"])
        assert (ran.code, server.count) == (3, asked)
        assert "results.jsonl:2: this row is damaged" in ran.paragraph
        assert file.read_bytes() == damaged


# --- one writer -----------------------------------------------------------------------------------


def test_a_second_process_on_the_same_directory_is_refused(server, tmp_path):
    with start_child(CHILD, server.url, tmp_path, "alone", "save", NUM_EXAMPLES) as first:
        assert first.stdout.readline().startswith("stored")
        first.send_signal(signal.SIGSTOP)
        try:
            with pytest.raises(vf.RunBusy) as caught:
                single_turn(NUM_EXAMPLES, rubric=vf.Rubric(funcs=[right])).evaluate(
                    vf.ClientConfig(api_base_url=server.url),
                    "scripted",
                    rollouts_per_example=2,
                    results_path=tmp_path,
                )
            assert caught.value.pid == first.pid
        finally:
            first.send_signal(signal.SIGCONT)
        lines = first.stdout.read().split("\n")
        assert f"done {PLANNED} 1.0 complete" in lines


def test_a_second_vf_eval_on_the_same_directory_is_exit_2_with_pid_and_host_and_the_first_goes_on(
    vf_eval, eval_folder
):
    with FakeServer(last_word, models=["m"], delay_s=0.05) as server:
        words = ("toy", "-b", server.url, "-m", "m", "-n", "-1", "-r", "2", "-c", "1")
        first = start(eval_folder, *words)
        while not list(eval_folder.glob("outputs/evals/*/*/metadata.json")):
            assert first.poll() is None, end(first).err
            time.sleep(0.01)
        first.send_signal(signal.SIGSTOP)
        ran = vf_eval(*words)
        first.send_signal(signal.SIGCONT)
        assert ran.code == 2
        assert str(first.pid) in ran.paragraph
        assert os.uname().nodename in ran.paragraph
        assert end(first).code == 0
        assert len(rows_on_disk(eval_folder)) == server.count == 12


# --- another configuration, other rows ------------------------------------------------------------


def test_without_the_fingerprint_rows_of_another_model_would_count_as_done(tmp_path):
    """Negative control of refusing another configuration: what names a row on disk is its example
    and its sibling."""
    env = single_turn(3)
    env.evaluate(ScriptedClient("wrong"), "weak", results_path=tmp_path)
    plan, logger = Plan(list(env.eval_table), [1] * 3), logging.getLogger()
    store = RunStore(plan, None, logger)
    store.saved = {row["rollout_key"]: (1, row) for row in rows_of(tmp_path)}
    store.num_saved = len(store.saved)
    assert (
        list(pending(plan, store, lambda *args: None, whole_groups=False, retry_errors=False)) == []
    )
    with pytest.raises(vf.RunMismatch, match="model was 'weak', now 'strong'"):
        env.evaluate(ScriptedClient(add_one), "strong", results_path=tmp_path)


def test_matched_by_place_a_reordered_row_would_get_the_result_of_another(tmp_path):
    """Negative control of matching rows by their content."""
    single_turn(3).evaluate(ScriptedClient(add_one), "m", results_path=tmp_path)
    reordered = vf.SingleTurnEnv(dataset=sums(3)[::-1], rubric=vf.Rubric(funcs=[exact]))
    by_place = [row["completion"][-1]["content"] for row in rows_of(tmp_path)]
    assert by_place != [example.row["answer"] for example in reordered.train_table]
    client = ScriptedClient(add_one)
    assert reordered.evaluate(client, "m", results_path=tmp_path)["rewards"] == [1.0] * 3
    assert client.requests == []
