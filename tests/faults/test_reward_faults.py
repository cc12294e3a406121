"""Promise: an unknown reward is unknown. Never 0, never in a mean; and scoring neither holds the
loop nor hangs."""

import asyncio
import json
import math
import os
import re
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

import verifiers as vf
from support.small_envs import Talk, exact, single_turn
from verifiers.testing import FakeServer, ScriptedClient


def flaky(completion, answer):
    if int(answer) % 10 == 0:
        raise ConnectionError("the judge is away")
    return 1.0


def test_a_reward_that_raises_on_a_tenth_leaves_these_unknown():
    results = single_turn(100, rubric=vf.Rubric(funcs=[flaky])).evaluate(ScriptedClient("x"), "m")
    assert results.metadata.avg_reward == 1.0
    assert (results.metadata.num_unscored, results.metadata.num_errors) == (10, 0)
    line = flaky.__code__.co_firstlineno + 2
    assert results.summary()["unscored"] == {
        f"ConnectionError in flaky (test_reward_faults.py:{line})": 10
    }


def test_counted_as_zero_the_same_failures_lower_the_mean():
    """Negative control."""
    results = single_turn(100, rubric=vf.Rubric(funcs=[flaky])).evaluate(ScriptedClient("x"), "m")
    assert sum(0.0 if math.isnan(reward) else reward for reward in results["rewards"]) / 100 == 0.9


FLAKY = """
import verifiers as vf

def flaky(completion, answer):
    if int(answer) % 10 == 0:
        raise ConnectionError("the judge is away")
    return 1.0

def load_environment():
    rows = [{"question": f"say {i}", "answer": str(i)} for i in range(100)]
    return vf.SingleTurnEnv(eval_dataset=rows, rubric=vf.Rubric(funcs=[flaky]))
"""


def test_vf_eval_says_how_many_are_unscored_and_why_and_ends_with_0(vf_eval, eval_folder):
    (eval_folder / "toy.py").write_text(FLAKY)
    with FakeServer("x", models=["m"]) as server:
        ran = vf_eval("toy", "-b", server.url, "-n", "-1", "-r", "1")
        assert ran.code == 0
        assert "unscored 10 × ConnectionError in flaky (toy.py:6); not in the mean" in " ".join(
            ran.out.split()
        )
        run = vf_eval("toy", "-b", server.url, "-n", "-1", "-r", "1", "--json").json["runs"][0]
    assert (run["avg_reward"], run["num_unscored"], run["num_errors"]) == (1.0, 10, 0)


def test_vf_eval_of_rewards_that_all_fail_ends_with_their_counts_and_places(vf_eval, eval_folder):
    source = FLAKY.replace("% 10 == 0", "% 4 == 0").replace(
        "return 1.0", "return 1 / (len(completion) - 1)"
    )
    (eval_folder / "toy.py").write_text(source)
    with FakeServer("x", models=["m"]) as server:
        ran = vf_eval("toy", "-b", server.url, "-n", "-1", "-r", "1", "--abort-after", "0")
        stopped = vf_eval("toy", "-b", server.url, "-n", "-1", "-r", "1", "--fresh")
    assert (
        "in a row failed with ScoringError, the last with: reward function 'flaky': raised"
        in stopped.err
    )
    assert re.search(r"raised \w+: .* \(toy.py:[67]\)\. Finished rollouts are kept", stopped.err)
    assert ran.code == 3
    assert (
        "none of 100 rollouts could be scored: 75 x ZeroDivisionError in flaky (toy.py:7), 25 x"
        " ConnectionError in flaky (toy.py:6); the first: ScoringError: reward function 'flaky':"
        " raised ConnectionError: the judge is away" in ran.paragraph
    )


def nested(completion):
    return int(json.loads("{"))


async def awaited(completion):
    await asyncio.sleep(0)
    raise ValueError("no")


@pytest.mark.parametrize(
    ("function", "line", "cause"),
    [(nested, 1, "JSONDecodeError"), (awaited, 2, "ValueError")],
    ids=["sync", "async"],
)
@pytest.mark.parametrize("timeout_s", [None, 5.0])
def test_the_place_of_a_failure_is_the_line_of_the_authors_function(
    function, line, cause, timeout_s
):
    env = single_turn(1, rubric=vf.Rubric(funcs=[function], timeout_s=timeout_s))
    results = env.evaluate(ScriptedClient("x"), "m")
    location = (
        f"{function.__name__} (test_reward_faults.py:{function.__code__.co_firstlineno + line})"
    )
    assert results["errors"][0].where == location
    assert results["states"][0].rollout().error.cause_and_place == f"{cause} in {location}"


def test_a_reward_of_the_wrong_kind_is_unknown_and_names_its_function():
    wrong = ["1", None, float("nan"), float("inf"), [1.0]]

    def returned(completion, answer):
        return wrong[int(answer) - 1]

    results = single_turn(
        5, rubric=vf.Rubric(funcs=[returned, exact], weights=[1.0, 0.0])
    ).evaluate(ScriptedClient("x"), "m")
    assert [e.where for e in results["errors"]] == ["returned"] * 5
    assert results.metadata.num_unscored == 5
    assert results["metrics"]["exact"] == [0.0] * 5


@pytest.mark.parametrize("values", [[1.0], [1.0] * 3, None, "11", [1.0, float("nan")]], ids=repr)
def test_a_group_reward_of_the_wrong_length_or_kind_is_unknown(values):
    def together(completions):
        return values

    rubric = vf.Rubric(funcs=[together])
    results = single_turn(1, rubric=rubric).evaluate(
        ScriptedClient("x"), "m", rollouts_per_example=2
    )
    assert {e and e.where for e in results["errors"]} - {None} == {"together"}
    assert math.isnan(results["rewards"][1])


def test_averaged_as_it_is_one_such_value_spoils_the_mean_or_the_run():
    """Negative control."""
    assert math.isnan(sum([1.0, float("nan")]) / 2)
    with pytest.raises(TypeError):
        sum([1.0, "1"])


def test_two_rewards_of_one_name_and_other_weights_are_refused_at_construction():
    for funcs, weights, said in (([exact, exact], None, "exact"), ([exact], [1.0, 0.5], "weights")):
        with pytest.raises(vf.ConfigError, match=said):
            vf.Rubric(funcs=funcs, weights=weights)


def test_kept_by_name_alone_two_rewards_of_one_name_are_one():
    """Negative control: a plain table of functions loses one without a word, and zip the longer
    list's rest."""
    assert len({function.__name__: function for function in (exact, exact)}) == 1
    assert list(zip([exact], [1.0, 0.5], strict=False)) == [(exact, 1.0)]


# --- rewards that compute -------------------------------------------------------------------------

SLEEPER = """
import sys, threading, time
over = threading.Event()
threading.Thread(target=lambda: (sys.stdin.read(), over.set()), daemon=True).start()
late = []
print(flush=True)
while not over.is_set():
    begun = time.perf_counter()
    time.sleep(0.005)
    late.append(time.perf_counter() - begun - 0.005)
print(sorted(late)[int(len(late) * 0.99)])
"""
"""How late the machine itself wakes a process that only sleeps, measured at the same time."""


def busy(completion):
    until = time.thread_time() + 0.5
    while time.thread_time() < until:
        sum(range(500))
    return 1.0


async def late_during(work):
    """(99th percentile of how late a sleep of 5 ms wakes, the same of a process beside this one,
    the result)."""
    late = []

    async def watch():
        while True:
            begun = time.perf_counter()
            await asyncio.sleep(0.005)
            late.append(time.perf_counter() - begun - 0.005)

    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    sleeper = await asyncio.to_thread(subprocess.Popen, [sys.executable, "-c", SLEEPER], **pipes)
    await asyncio.to_thread(sleeper.stdout.readline)
    watcher = asyncio.ensure_future(watch())
    result = await work
    watcher.cancel()
    told, _ = await asyncio.to_thread(sleeper.communicate)
    return sorted(late)[int(len(late) * 0.99)], float(told), result


@pytest.mark.parametrize("count", [8, pytest.param(40, marks=pytest.mark.slow)])
async def test_a_computing_reward_does_not_hold_the_loop_and_other_rollouts_go_on(count):
    """Half a second of CPU in each of so many synchronous rewards: the loop is at most 100 ms late,
    99 times of 100.

    On a busy machine a sleeping process is late too; that much is allowed for.
    """
    ended = []

    async def run(name, env):
        results = await env.evaluate(ScriptedClient("x", delay_s=0.01), "m", max_concurrent=64)
        ended.append(name)
        return results

    async def right(completion, answer):
        return exact(completion, answer)

    heavy = run("heavy", single_turn(count, rubric=vf.Rubric(funcs=[busy])))
    light = run("others", Talk(50, max_turns=5, rubric=vf.Rubric(funcs=[right])))
    late, usual, (results, _) = await late_during(asyncio.gather(heavy, light))
    assert results["rewards"] == [1.0] * count
    assert ended == ["others", "heavy"]
    assert late < 0.1 + usual


async def test_the_same_reward_on_the_loop_holds_it():
    """Negative control."""

    async def on_the_loop(completion):
        return busy(completion)

    env = single_turn(3, rubric=vf.Rubric(funcs=[on_the_loop]))
    late, usual, _ = await late_during(env.evaluate(ScriptedClient("x"), "m"))
    assert late > 0.4 + usual


# --- rewards that hang ----------------------------------------------------------------------------

HANGING = """
    import os, re, sys

    def note(folder):
        open(os.path.join(folder, str(os.getpid())), "w").close()

    def regex(info): note(info["folder"]); return bool(re.match(r"(a+)+$", "a" * 40 + "b"))
    def power(info): note(info["folder"]); return 9**9**9
    def algebra(info): note(info["folder"]); return float(sympy.simplify("factorial(10**8) / factorial(10**8)"))
"""


@pytest.fixture
def hanging(tmp_path, monkeypatch, request):
    imports = "import sympy\n" if "algebra" in request.node.name else ""
    (tmp_path / "hanging_rewards.py").write_text(imports + textwrap.dedent(HANGING))
    (tmp_path / "plain_rewards.py").write_text("def right(completion): return 1.0")
    monkeypatch.syspath_prepend(str(tmp_path))
    hanging_rewards = pytest.importorskip(
        "hanging_rewards", reason="sympy is not installed", exc_type=ImportError
    )
    yield hanging_rewards
    del sys.modules["hanging_rewards"], sys.modules["plain_rewards"]


def is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize(
    ("name", "where"),
    [(name, where) for name in ("regex", "power") for where in ("main thread", "another thread")]
    + [("algebra", "another thread")],
)
def test_a_reward_that_hangs_is_killed_at_its_time_its_process_is_gone_and_the_next_is_unaffected(
    hanging, tmp_path, name, where
):
    import plain_rewards

    rubric = vf.Rubric(timeout_s=1.0)
    for function in (getattr(hanging, name), plain_rewards.right):
        rubric.add_reward_func(function, isolated=True)
    pids = tmp_path / "pids"
    pids.mkdir()
    env = vf.SingleTurnEnv(
        dataset=[{"question": "?", "info": {"folder": str(pids)}}], rubric=rubric
    )
    outcome = []
    if where == "main thread":
        outcome.append(env.evaluate(ScriptedClient("x"), "m"))
    else:
        thread = threading.Thread(
            target=lambda: outcome.append(env.evaluate(ScriptedClient("x"), "m"))
        )
        thread.start()
        thread.join()
    ended = time.time()
    (results,) = outcome
    assert math.isnan(results["rewards"][0])
    assert results["errors"][0].where == name
    assert results["metrics"]["right"] == [1.0]
    (file,) = pids.iterdir()
    assert not is_alive(int(file.name))
    # the next one's process needs its time too
    assert 1.0 <= ended - file.stat().st_mtime < 1.0 + 5


def test_a_thread_that_hangs_cannot_be_ended():
    """Negative control: given up, it goes on."""
    release = threading.Event()

    def waits(completion):
        return float(release.wait(20))

    results = single_turn(1, rubric=vf.Rubric(funcs=[waits], timeout_s=0.2)).evaluate(
        ScriptedClient("x"), "m"
    )
    assert math.isnan(results["rewards"][0])
    assert any(thread.name == "verifiers-worker" for thread in threading.enumerate())
    release.set()


def test_no_source_uses_an_alarm_signal():
    """It works on the main thread alone, and belongs to the program we are used in."""
    for_others = "runtime/alarms.py"  # gives threads the alarms that code of others sets
    sources = [
        file.read_text()
        for file in Path(vf.__file__).parent.rglob("*.py")
        if not file.match(for_others)
    ]
    assert len(sources) > 100
    assert not [
        text[:60] for text in sources if re.search(r"SIGALRM|setitimer|signal\.alarm", text)
    ]
