"""Promise: interrupted at any instant, the same command finishes the run and does only what is owed.

A child process evaluates against a server of this process and is killed; the server counts what was asked for.
"""

import json
import random
import signal
import time
from collections import Counter
from pathlib import Path

import pytest

import verifiers as vf
from support.kill import run_child, start_child
from verifiers.journal import read_journal
from verifiers.testing import FakeServer

NUM_EXAMPLES, SIBLINGS = 40, 2
PLANNED = NUM_EXAMPLES * SIBLINGS
ROUNDS = 5

CHILD = (
    f"NUM_EXAMPLES, SIBLINGS = {NUM_EXAMPLES}, {SIBLINGS}\n"
    + """
import sys
import verifiers as vf

def right(completion, answer):
    return float(completion[-1]["content"] == answer)

def mean_length(completions):
    return [float(len(completions))] * len(completions)

url, path, grouped, save = sys.argv[1:5]
rows = [{"question": f"{n} + 1", "answer": str(n + 1)} for n in range(NUM_EXAMPLES)]
rubric = vf.Rubric(funcs=[right, mean_length] if grouped == "grouped" else [right])
env = vf.SingleTurnEnv(dataset=rows, rubric=rubric)
results = env.evaluate(
    vf.ClientConfig(api_base_url=url), "scripted", rollouts_per_example=SIBLINGS, max_concurrent=4,
    results_path=path if save == "save" else None,
    on_progress=lambda outputs, metadata: [print("stored", o.example_id, flush=True) for o in outputs],
)
print("done", len(results), results.metadata.avg_reward, results.metadata.status, flush=True)
"""
)


def solve(request):
    return str(int(request.prompt[-1]["content"].split()[0]) + 1)


@pytest.fixture
def server():
    with FakeServer(solve, delay_s=0.002) as server:
        yield server


def questions(server):
    return Counter(request["messages"][-1]["content"] for request in server.requests)


def test_killed_at_random_moments_a_run_ends_with_the_planned_rows_once(server, tmp_path):
    chance = random.Random(5)
    acknowledged = 0
    for _ in range(ROUNDS):
        stop_after = chance.randint(1, 9)
        ended = run_child(CHILD, server.url, tmp_path, "alone", "save", kill_after_lines=stop_after)
        assert ended.killed or "done" in ended.lines[-1], ended.stderr
        acknowledged += sum(line.startswith("stored") for line in ended.lines)
        assert len(list(read_journal(tmp_path / "results.jsonl"))) >= acknowledged
    durable = len(list(read_journal(tmp_path / "results.jsonl")))
    assert 0 < durable < PLANNED
    before = server.count
    ended = run_child(CHILD, server.url, tmp_path, "alone", "save")
    assert ended.lines[-1] == f"done {PLANNED} 1.0 complete", ended.stderr
    assert server.count - before == PLANNED - durable
    rows = list(read_journal(tmp_path / "results.jsonl"))
    assert len(rows) == len({row["rollout_key"] for row in rows}) == PLANNED
    assert Counter(row["example_id"] for row in rows) == dict.fromkeys(range(NUM_EXAMPLES), SIBLINGS)
    before = server.count
    assert "done" in run_child(CHILD, server.url, tmp_path, "alone", "save").lines[-1]
    assert server.count == before


def test_without_saving_a_killed_run_begins_again_from_nothing(server, tmp_path):
    """The twin."""
    run_child(CHILD, server.url, tmp_path, "alone", "forget", kill_after_lines=5)
    before = server.count
    assert run_child(CHILD, server.url, tmp_path, "alone", "forget").lines[-1].startswith(f"done {PLANNED}")
    assert server.count - before == PLANNED


@pytest.mark.parametrize("place", ["journal.before_write:3", "journal.after_write:3", "journal.before_ack:3"])
def test_killed_inside_a_commit_groups_stay_whole(server, tmp_path, place):
    ended = run_child(CHILD, server.url, tmp_path, "grouped", "save", failpoint=place)
    assert ended.killed, ended.stderr
    durable = Counter(row["example_id"] for row in read_journal(tmp_path / "results.jsonl"))
    assert set(durable.values()) <= {SIBLINGS}
    before = server.count
    ended = run_child(CHILD, server.url, tmp_path, "grouped", "save")
    assert ended.lines[-1] == f"done {PLANNED} {1.0 + SIBLINGS} complete", ended.stderr
    assert server.count - before == PLANNED - durable.total()
    rows = list(read_journal(tmp_path / "results.jsonl"))
    assert len({row["rollout_key"] for row in rows}) == len(rows) == PLANNED


def test_a_full_disk_stops_the_run_and_keeps_what_was_acknowledged(server, tmp_path):
    ended = run_child(CHILD, server.url, tmp_path, "alone", "save", failpoint="journal.before_write:3:ENOSPC")
    assert "JournalError" in ended.stderr
    assert "No space left" in ended.stderr
    stored = sum(line.startswith("stored") for line in ended.lines)
    assert 0 < stored <= len(list(read_journal(tmp_path / "results.jsonl"))) < PLANNED
    assert json.loads((tmp_path / "metadata.json").read_text())["status"] == "failed"
    assert run_child(CHILD, server.url, tmp_path, "alone", "save").lines[-1] == f"done {PLANNED} 1.0 complete"


def test_a_second_process_on_the_same_directory_is_refused(server, tmp_path):
    with start_child(CHILD, server.url, tmp_path, "alone", "save") as first:
        assert first.stdout.readline().startswith("stored")
        first.send_signal(signal.SIGSTOP)
        try:
            with pytest.raises(vf.RunBusy) as caught:
                _evaluate_here(server, tmp_path)
            assert caught.value.pid == first.pid
        finally:
            first.send_signal(signal.SIGCONT)
        rest = first.stdout.read().split("\n")
        assert f"done {PLANNED} 1.0 complete" in rest


def _evaluate_here(server, path):
    rows = [{"question": f"{n} + 1", "answer": str(n + 1)} for n in range(NUM_EXAMPLES)]

    def right(completion, answer):
        return float(completion[-1]["content"] == answer)

    env = vf.SingleTurnEnv(dataset=rows, rubric=vf.Rubric(funcs=[right]))
    client = vf.ClientConfig(api_base_url=server.url)
    return env.evaluate(client, "scripted", rollouts_per_example=SIBLINGS, results_path=path)


CLEANING = """
import asyncio, signal, sys
import verifiers as vf
from pathlib import Path

class Env(vf.SingleTurnEnv):
    @vf.cleanup
    async def put_away(self, state):
        await asyncio.sleep(0.05)
        print("cleaned", flush=True)

handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
env = Env(dataset=[{"question": f"{n} + 1"} for n in range(50)])
try:
    env.evaluate(vf.ClientConfig(api_base_url=sys.argv[1]), "scripted", max_concurrent=4, results_path=sys.argv[2],
                 on_progress=lambda outputs, metadata: print("stored", flush=True))
except KeyboardInterrupt:
    print("interrupted", (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == handlers, flush=True)
    raise
"""


def test_ctrl_c_cancels_cleans_up_and_keeps_what_was_acknowledged(tmp_path):
    with FakeServer("1", script=lambda hit: {"delay_s": 0.0 if hit.index < 4 else 30.0}) as server:
        with start_child(CLEANING, server.url, tmp_path) as child:
            lines = [child.stdout.readline().strip() for _ in range(8)]
            time.sleep(0.3)
            started = time.monotonic()
            child.send_signal(signal.SIGINT)
            lines += child.stdout.read().split("\n")
            child.wait(20)
        assert time.monotonic() - started < 5
        assert lines.count("cleaned") == 8
        assert "interrupted True" in lines
        asked = server.count
    assert asked == 8
    assert child.returncode == -signal.SIGINT
    assert len(list(read_journal(tmp_path / "results.jsonl"))) == lines.count("stored") == 4
    assert json.loads((tmp_path / "metadata.json").read_text())["status"] == "interrupted"


def test_power_loss_in_the_middle_of_a_row_costs_that_row_only(server, tmp_path):
    """A torn tail cannot be had by killing; the file is cut by hand."""
    assert "done" in run_child(CHILD, server.url, tmp_path, "alone", "save").lines[-1]
    file = Path(tmp_path / "results.jsonl")
    file.write_bytes(file.read_bytes()[:-40])
    before = server.count
    assert run_child(CHILD, server.url, tmp_path, "alone", "save").lines[-1] == f"done {PLANNED} 1.0 complete"
    assert server.count - before == 1
