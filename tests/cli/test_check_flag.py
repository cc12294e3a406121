"""``vf-eval --check``: what is wrong with an environment is said before any model is asked."""

from __future__ import annotations

import signal

import pytest

from support.eval_command import TOY, end, last_word, start
from verifiers.testing import FakeServer

SLOW = """
import asyncio
import verifiers as vf

class Game(vf.SingleTurnEnv):
    async def setup_state(self, state):
        print("playing", flush=True)
        await asyncio.sleep(60)

def load_environment():
    return Game(eval_dataset=[{"question": "say 1"}], rubric=vf.Rubric(funcs=[lambda completion: 1.0]))
"""
BROKEN = """
import random
import verifiers as vf

def load_environment(**more):
    rows = [{"question": f"say {i}", "answer": str(random.random())} for i in range(3)]

    def exact(completion, answer):
        return float(completion[-1]["content"] == answer)

    class Game(vf.SingleTurnEnv):
        @vf.cleanup
        async def close(self, state):
            raise RuntimeError("the board is gone")

    return Game(eval_dataset=rows, rubric=vf.Rubric(funcs=[exact]), **more)
"""
"""Two things are wrong with it: its rows differ from one building to the next, and its clean-up
hook raises."""
WARNED = TOY.replace("num_rows: int = 6", "num_rows = 6")


@pytest.fixture(scope="module")
def server():
    with FakeServer(last_word, models=["m"]) as server:
        yield server


def test_errors_are_all_said_and_no_request_is_made(vf_eval, server, eval_folder):
    (eval_folder / "toy.py").write_text(BROKEN)
    before = server.count, len(server.other_hits)
    ran = vf_eval("toy", "-b", server.url, "--check")
    assert (ran.code, ran.out) == (1, "")
    assert "vf-eval: the check found errors; no evaluation was run\ntoy: " in ran.err
    for said in ("the board is gone", "differ", "    at:  toy.py:", "    fix: "):
        assert said in ran.err
    assert (server.count, len(server.other_hits)) == before
    assert not (eval_folder / "outputs").exists()


def test_without_the_flag_the_same_environment_is_run(vf_eval, server, eval_folder):
    (eval_folder / "toy.py").write_text(BROKEN)
    before = server.count
    vf_eval("toy", "-b", server.url, "-n", "1", "-r", "1")
    assert server.count == before + 1


def test_warnings_are_printed_and_the_run_goes_on(vf_eval, server, eval_folder):
    (eval_folder / "toy.py").write_text(WARNED)
    ran = vf_eval("toy", "-b", server.url, "-n", "1", "-r", "1", "--check", "--json")
    assert (ran.code, ran.json["runs"][0]["avg_reward"]) == (0, 1.0)
    assert "warning: toy: no errors, " in ran.err
    assert "argument-without-type" in ran.err


def test_every_environment_is_checked_once_per_set_of_arguments(vf_eval, server, eval_folder):
    (eval_folder / "e.toml").write_text(
        f'api_base_url = "{server.url}"\nnum_examples = 1\nrollouts_per_example = 1\n[[eval]]\nid ='
        ' "toy"\n[[eval]]\nid = "toy"\nmax_tokens = 5\n[[eval]]\nid = "toy"\nargs = { num_rows ='
        " 2 }\n"
    )
    ran = vf_eval("e.toml", "--check", "--dry-run")
    assert ran.code == 0
    assert ran.err.count("toy: no errors") == 2


def test_the_arguments_of_the_evaluation_are_those_that_are_checked(vf_eval, server, eval_folder):
    (eval_folder / "toy.py").write_text(TOY)
    words = ["toy", "-b", server.url, "-n", "1", "-r", "1", "--check"]
    assert vf_eval(*words).code == 0
    ran = vf_eval(*words, "-a", '{"broken_rewards": true}')
    assert (ran.code, "the judge is away" in ran.err) == (1, True)


def test_ctrl_c_ends_a_check(eval_folder):
    (eval_folder / "toy.py").write_text(SLOW)
    child = start(eval_folder, "toy", "-m", "m", "-b", "http://127.0.0.1:9/v1", "--check")
    assert child.stdout is not None
    assert child.stdout.readline() == "playing\n"
    child.send_signal(signal.SIGINT)
    ran = end(child)
    assert (ran.code, ran.err) == (130, "vf-eval: interrupted; nothing was run\n")


def test_json_carries_the_report(vf_eval, server, eval_folder):
    (eval_folder / "toy.py").write_text(BROKEN)
    ran = vf_eval("toy", "-b", server.url, "--check", "--json")
    assert (ran.json["exit_code"], ran.json["error"]["type"], ran.json["runs"]) == (
        1,
        "CheckFailed",
        [],
    )
    assert "the board is gone" in ran.json["error"]["message"]
