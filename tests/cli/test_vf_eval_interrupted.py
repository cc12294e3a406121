"""An interrupted ``vf-eval``: nothing that counted is lost, and the same command does only what is
pending."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from support.eval_command import end, install_toy, odd_only, rows_on_disk, start
from support.warm_commands import run_vf_eval
from verifiers.testing import FakeServer

PLAN = ("-m", "m", "-n", "12", "-r", "2", "-c", "2", "-a", '{"num_rows": 12}')


def wait_for_rows(folder: Path, count: int) -> int:
    """Wait until ``count`` rows are on disk; how many there are."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        files = list(folder.glob("outputs/evals/*/*/results.jsonl"))
        if files and (num_rows := files[0].read_bytes().count(b"\n")) >= count:
            return num_rows
        time.sleep(0.02)
    raise AssertionError("the run did not get that far")


def status_on_disk(folder: Path) -> str:
    (file,) = folder.glob("outputs/evals/*/*/metadata.json")
    return json.loads(file.read_text())["status"]


@pytest.fixture
def folder(tmp_path):
    install_toy(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def server():
    with FakeServer(odd_only, models=["m"], delay_s=0.06) as server:
        yield server


def test_after_sigkill_the_same_command_finishes_the_plan_and_asks_only_for_what_is_pending(
    folder, server
):
    words = ("toy", "-b", server.url, *PLAN, "--json")
    child = start(folder, *words)
    wait_for_rows(folder, 8)
    child.kill()
    end(child)
    durable = len(rows_on_disk(folder))
    assert 8 <= durable < 24
    before = server.count
    ran = run_vf_eval(folder, *words)
    assert ran.code == 0, ran.err
    assert "unfinished; resuming it" in ran.err
    assert server.count - before == 24 - durable
    rows = rows_on_disk(folder)
    assert len(rows) == len({row["rollout_key"] for row in rows}) == 24
    assert Counter(row["example_id"] for row in rows) == dict.fromkeys(range(12), 2)
    (run,) = ran.json["runs"]
    assert (run["num_rollouts"], run["resumed"], run["avg_reward"]) == (24, durable, 0.5)
    assert run["pass_at_k"] == {"1": 0.5, "2": 0.5}
    # clusters of two equal rewards: as if the run had never stopped
    assert 0.14 < run["reward_stderr"] < 0.16


def test_a_run_resumed_in_the_middle_of_a_group_sums_up_as_if_it_had_never_stopped(
    vf_eval, eval_folder, server
):
    words = ("toy", "-b", server.url, "-m", "m", "-n", "4", "-r", "2", "--json")
    (uninterrupted,) = vf_eval(*words).json["runs"]
    (journal,) = eval_folder.glob("outputs/evals/*/*/results.jsonl")
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join(lines[:-3]))  # as a kill leaves it: a prefix of whole rows
    journal.with_name("metadata.json").unlink()
    (resumed,) = vf_eval(*words).json["runs"]
    assert resumed["resumed"] == 5
    for key in (
        "path",
        "num_rollouts",
        "avg_reward",
        "reward_stderr",
        "pass_at_k",
        "pass_all_k",
        "stop_conditions",
    ):
        assert resumed[key] == uninterrupted[key], key


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_keeps_what_is_finished_and_prints_the_command_that_goes_on(
    folder, server, number, code
):
    child = start(folder, "toy", "-b", server.url, *PLAN)
    wait_for_rows(folder, 4)
    sent = time.monotonic()
    child.send_signal(number)
    ran = end(child)
    assert time.monotonic() - sent < 5
    assert ran.code == code
    assert ran.out == ""
    assert status_on_disk(folder) == "interrupted"
    asked, durable = server.count, len(rows_on_disk(folder))
    assert 4 <= durable < 24
    (command,) = [
        line.removeprefix("to resume: vf-eval ")
        for line in ran.err.splitlines()
        if line.startswith("to resume")
    ]
    assert server.count == asked  # nothing calls the model after the end
    assert run_vf_eval(folder, *shlex.split(command), "-A").code == 0
    assert server.count - asked == 24 - durable
    assert status_on_disk(folder) == "complete"


def test_a_fresh_run_that_is_interrupted_is_resumed_by_its_path(folder, server):
    child = start(folder, "toy", "-b", server.url, *PLAN, "--fresh")
    wait_for_rows(folder, 1)
    child.send_signal(signal.SIGINT)
    err = end(child).err
    assert "--fresh" not in err
    assert "--resume outputs/evals/toy--m/" in err


BUSY = """
import time
import verifiers as vf

class Busy(vf.SingleTurnEnv):
    def setup_state(self, state):
        print("busy", flush=True)
        while True:
            time.sleep(0.01)  # keeps the event loop from ever taking a turn

def load_environment():
    return Busy(eval_dataset=[{"question": "?", "answer": "!"}])
"""


def test_a_second_ctrl_c_leaves_at_once_even_when_author_code_holds_the_loop(folder, server):
    (folder / "toy.py").write_text(BUSY)
    child = start(folder, "toy", "-b", server.url, "-m", "m")
    assert child.stdout is not None
    assert child.stdout.readline() == "busy\n"
    child.send_signal(signal.SIGINT)
    time.sleep(0.1)
    child.send_signal(signal.SIGINT)
    sent = time.monotonic()
    ran = end(child)
    assert time.monotonic() - sent < 2
    assert ran.code == 130
    assert "exiting immediately; finished rollouts are saved" in ran.err


NEGATIVE_CONTROL = """
import asyncio, signal, time

async def main():
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, lambda: exit(130))
    print("busy", flush=True)
    while True:
        time.sleep(0.01)

asyncio.run(main())
"""


def test_negative_control_a_handler_of_the_event_loop_would_never_have_run():
    with subprocess.Popen(
        [sys.executable, "-c", NEGATIVE_CONTROL], stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "busy\n"
        for _ in range(2):
            child.send_signal(signal.SIGINT)
            time.sleep(0.1)
        with pytest.raises(subprocess.TimeoutExpired):
            child.wait(0.5)
        child.kill()


ENDLESS = """
import asyncio, sys
from verifiers.cli import interrupt

interrupt.GRACE_S = 0.3

async def main():
    with interrupt.interruptible(asyncio.current_task(), print):
        print("ready", flush=True)
        while True:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                print("cancelled", flush=True)

asyncio.run(main())
"""


def test_clean_up_that_does_not_end_is_left_after_the_grace(folder):
    with subprocess.Popen(
        [sys.executable, "-c", ENDLESS], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        child.send_signal(signal.SIGTERM)
        ran = end(child, 5)
    assert (ran.code, "cancelled" in ran.out) == (143, True)
    assert "the clean-up did not end within 0.3 s" in ran.err


HELD = """
import asyncio, time
from verifiers.cli import display, interrupt

interrupt.BLOCKED_S = 0.2

def author_code_that_holds_the_loop():
    time.sleep(1.0)

async def main():
    async with display.ticking(display.Display(None)):
        await asyncio.sleep(0.1)
        author_code_that_holds_the_loop()

asyncio.run(main())
"""


def test_the_stack_of_what_holds_the_interpreter_is_printed():
    ran = subprocess.run(
        [sys.executable, "-c", HELD], capture_output=True, text=True, check=True, timeout=20
    )
    assert "in author_code_that_holds_the_loop" in ran.stderr
