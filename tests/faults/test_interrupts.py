"""Promise: Ctrl-C and SIGTERM stop a run within a bound, leave no process behind, and keep what was
acknowledged."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from support.eval_command import end, install_toy, last_word, rows_on_disk, start
from support.kill import start_child
from verifiers.storage.journal import read_journal
from verifiers.testing import FakeServer

# --- the commands ---------------------------------------------------------------------------------

WITH_CHILDREN = """
import os, subprocess
import verifiers as vf

def say_pid(folder, pid):
    with open(os.path.join(folder, str(pid)), "w"):
        pass

def hangs(answer, info):
    child = subprocess.Popen(["sleep", "300"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    say_pid(info["folder"], child.pid)
    say_pid(info["folder"], os.getpid())
    if info["computes"]:
        9**9**9  # and lets no other thread of its process run
    child.wait()

def exact(completion, answer):
    return float(completion[-1]["content"] == answer)

def load_environment(folder, computes, num_good=4):
    def rubric(*functions):
        made = vf.Rubric(funcs=[exact])
        for function in functions:
            made.add_reward_func(function, isolated=True)
        return made

    info = {"folder": folder, "computes": computes}
    rows = [{"question": f"say {n}", "answer": str(n), "info": info} for n in range(40)]
    bad = vf.SingleTurnEnv(eval_dataset=rows[num_good:], rubric=rubric(hangs))
    good = vf.SingleTurnEnv(eval_dataset=rows[:num_good], rubric=rubric())
    return vf.EnvGroup([good, bad], env_names=["good", "bad"])
"""


def alive(pid):
    """Whether the process still runs (a zombie nobody waits for does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def wait_for(what, timeout_s=20.0):
    deadline = time.monotonic() + timeout_s
    while not what():
        assert time.monotonic() < deadline, "it did not get that far"
        time.sleep(0.02)


def gone(pids, within_s=5.0):
    wait_for(lambda: not any(map(alive, pids)), within_s)
    return True


@pytest.fixture
def hanging(tmp_path, request):
    """A running ``vf-eval`` with four rows on disk whose next reward hangs in a process with a
    child of its own."""
    computes = getattr(request, "param", "waits") == "computes"
    install_toy(tmp_path)
    (tmp_path / "toy.py").write_text(WITH_CHILDREN)
    pids = tmp_path / "pids"
    pids.mkdir()
    with FakeServer(last_word, models=["m"]) as server:
        words = ("toy", "-b", server.url, "-m", "m", "-n", "-1", "-r", "1", "-c", "2")
        child = start(
            tmp_path, *words, "-a", json.dumps({"folder": str(pids), "computes": computes})
        )
        wait_for(lambda: len(list(pids.iterdir())) >= 2 or child.poll() is not None)
        assert child.poll() is None, end(child).err
        yield child, [int(file.name) for file in pids.iterdir()], tmp_path, server
        child.kill()


@pytest.mark.parametrize(
    ("signals", "code"),
    [([signal.SIGINT], 130), ([signal.SIGINT, signal.SIGINT], 130), ([signal.SIGTERM], 143)],
    ids=["Ctrl-C", "Ctrl-C twice", "SIGTERM"],
)
def test_an_interrupted_vf_eval_ends_within_the_grace_leaves_no_child_and_keeps_its_rows(
    hanging, signals, code
):
    child, pids, folder, server = hanging
    assert all(map(alive, pids))
    sent = time.monotonic()
    for number in signals:
        child.send_signal(number)
    ran = end(child)
    assert ran.code == code, ran.err
    assert time.monotonic() - sent < 10
    assert gone(pids)
    assert len(rows_on_disk(folder)) >= 4
    asked = server.count
    time.sleep(0.2)
    assert server.count == asked


@pytest.mark.parametrize("hanging", ["waits", "computes"], indirect=True)
def test_after_sigkill_no_child_is_left_either(hanging):
    child, pids, folder, _ = hanging
    child.kill()
    end(child)
    assert gone(pids)
    assert len(rows_on_disk(folder)) >= 4


def test_a_child_that_nobody_ends_outlives_its_killed_parent(tmp_path):
    """Negative control: the same processes, started plainly."""
    code = """
import subprocess, sys
child = subprocess.Popen(["sleep", "300"], start_new_session=True)
print(child.pid, flush=True)
child.wait()
"""
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True
    ) as parent:
        pid = int(parent.stdout.readline())
        parent.kill()
        parent.wait()
        time.sleep(0.3)
        assert alive(pid)
        os.kill(pid, signal.SIGKILL)


# --- the library ----------------------------------------------------------------------------------

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


INTERRUPTING = """
import asyncio, os, signal, time
import verifiers as vf
from verifiers.testing import ScriptedClient

class Env(vf.MultiTurnEnv):
    def env_response(self, messages, state):
        if state["example_id"] == 2 and state["turn"] == 2:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.2)
        return "more"

    @vf.cleanup
    async def put_away(self, state):
        await asyncio.sleep(0.05)
        print("cleaned", state["example_id"])

env = Env(dataset=[{"question": str(n)} for n in range(20)], max_turns=50)
client = ScriptedClient("x", delay_s=0.01)
started = time.monotonic()
try:
    env.evaluate(client, "m", max_concurrent=4)
except KeyboardInterrupt:
    print("interrupted", time.monotonic() - started < 5, client.in_flight)
"""


def test_an_interrupt_inside_a_hook_cleans_up_every_rollout_once():
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-c", INTERRUPTING],
        capture_output=True,
        text=True,
        timeout=60,
    )
    lines = done.stdout.split("\n")
    assert sorted(lines[:4]) == [f"cleaned {n}" for n in range(4)], done.stderr
    assert lines[4] == "interrupted True 0"
    assert "never" not in done.stderr
    assert "Traceback" not in done.stderr


def test_negative_control_an_interrupt_that_a_hook_may_swallow_stops_nothing():
    """Negative control: a hook that catches everything keeps Ctrl-C for itself where nothing else
    stops the run."""
    code = """
import os, signal
stopped = 0
for rollout in range(3):
    try:
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:  # counts the interrupts, which reach all code without the guard
        stopped += 1
print(stopped)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=20)
    assert (done.stdout.strip(), done.returncode) == ("3", 0)
