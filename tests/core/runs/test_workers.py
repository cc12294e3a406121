"""Environment workers: what they play is what this process would have played, and none of them is
ever left behind."""

import asyncio
import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest

import verifiers as vf
from verifiers.runs.workers import channels
from verifiers.runs.workers.channels import ProcessChannel
from verifiers.testing import ScriptedClient

ENVIRONMENT = """
import os, re, signal, sys, time
from pathlib import Path
import verifiers as vf

class Game(vf.MultiTurnEnv):
    def setup_state(self, state):
        state["live"] = open(os.devnull)          # cannot leave its process
        state["pid"] = os.getpid()
        folder = Path(self.folder)
        with open(folder / f"played-{state['example_id']}", "a") as log:
            log.write(f"{os.getpid()}\\n")
        print("noise on stdout", flush=True)
        if state["answer"] == "crash":
            os._exit(7)
        if state["answer"] == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        if state["answer"] == "hold":
            re.match("(a+)+$", "a" * 64 + "b")    # for ever, without releasing the interpreter
        if state["answer"] == "block":
            time.sleep(1000)
        if state["answer"] == "raise":
            raise LookupError("no such level")

    async def env_response(self, messages, state):
        time.sleep(self.seconds)
        return [{"role": "user", "content": "go on"}]

    @vf.stop
    def two_turns(self, state):
        return len(state["trajectory"]) >= 2

class Scored(vf.Rubric):
    @vf.cleanup
    def close(self, state):
        state["live"].close()
        with open(Path(state["info"]["folder"]) / "closed", "a") as log:
            log.write("x")

def length(completion):
    return float(len(completion))

def best(states):
    return [float(state["example_id"]) for state in states]

def load_environment(folder: str, answers: str = "", num: int = 6, seconds: float = 0.0, group: bool = False):
    rows = [{"question": f"q{i}", "answer": "", "info": {"folder": folder}} for i in range(num)]
    for i, answer in enumerate(filter(None, answers.split(","))):
        rows[i]["answer"] = answer
    rubric = Scored([length, best] if group else [length])
    env = Game(dataset=rows, rubric=rubric, max_turns=5)
    env.folder, env.seconds = folder, seconds
    return env
"""


@pytest.fixture
def game(tmp_path, monkeypatch):
    """A loader of the environment above, found as a module."""
    (tmp_path / "worker_game.py").write_text(ENVIRONMENT)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "worker_game", raising=False)
    return lambda **options: vf.load_environment("worker_game", folder=str(tmp_path), **options)


def echo(request):
    return f"{len(request.prompt)} {request.seed}"


def run(env, **options):
    return env.evaluate(
        ScriptedClient(echo), "m", rollouts_per_example=2, seed=3, num_workers=2, **options
    )


def gone(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"


def test_rows_are_those_that_this_process_would_have_made(game):
    here = game().evaluate(ScriptedClient(echo), "m", rollouts_per_example=2, seed=3)
    there = run(game())
    for left, right in zip(here["outputs"], there["outputs"], strict=True):
        for name in (
            "example_id",
            "prompt",
            "completion",
            "reward",
            "metrics",
            "stop_condition",
            "advantage",
        ):
            assert left[name] == right[name], name
    assert [len(s["trajectory"]) for s in there["states"]] == [2] * 12
    assert {s["pid"] for s in there["states"]}.isdisjoint({os.getpid()})


def test_both_workers_play(game, shadowed_modules):
    states = run(game(seconds=0.05))["states"]
    assert len({state["pid"] for state in states}) == 2


def test_live_objects_stay_behind_and_the_client_is_the_callers(game):
    client = ScriptedClient(echo)
    states = game().evaluate(client, "m", num_workers=1)["states"]
    assert all("live" not in state for state in states)
    assert all(state["client"] is client for state in states)


def test_turns_share_their_prefixes_again(game):
    steps = run(game())["states"][0]["trajectory"]
    assert steps[1]["prompt"][: len(steps[0]["prompt"])] == steps[0]["prompt"]
    assert steps[1].shared > 0


def test_a_failure_in_a_worker_keeps_its_chain_and_traceback(game):
    outputs = run(game(answers="raise"))["outputs"]
    error = outputs[0]["error"]
    assert error["error"] == "EnvironmentFault"
    assert "LookupError" in error["error_chain_str"]
    assert "no such level" in error["traceback"]
    assert "worker_game.py" in error["traceback"]
    assert [row["error"] for row in outputs[2:]] == [None] * 10


def test_a_killed_worker_costs_what_it_held_and_that_is_played_again(game, tmp_path, caplog):
    # in all more than a second, so that it is killed while it plays
    env = game(num=20, seconds=0.3)

    async def kill_one():
        while not (started := list(tmp_path.glob("played-*"))):  # noqa: ASYNC110 - another process writes them
            await asyncio.sleep(0.02)
        await asyncio.sleep(0.2)
        os.kill(int(started[0].read_text().split()[0]), signal.SIGKILL)

    async def both():
        killing = asyncio.create_task(kill_one())
        results = await env.evaluate(
            ScriptedClient(echo), "m", rollouts_per_example=2, num_workers=2, max_concurrent=8
        )
        await killing
        return results

    outputs = asyncio.run(both())["outputs"]
    assert [row["error"] for row in outputs] == [None] * 40
    assert len({(row["example_id"]) for row in outputs}) == 20
    played = sum(len(path.read_text().split()) for path in tmp_path.glob("played-*"))
    held = int(re.search(r"signal 9; running its (\d+) rollouts again", caplog.text)[1])
    assert 0 < held <= 8
    # some it had not begun
    assert 40 <= played <= 40 + held, "more was played again than the dead worker held"


def test_a_rollout_that_kills_its_workers_fails_alone(game, tmp_path):
    outputs = game(answers="crash").evaluate(ScriptedClient(echo), "m", num_workers=2)["outputs"]
    assert outputs[0]["error"]["error"] == "WorkerLost"
    assert "exit code 7" in outputs[0]["error"]["message"]
    assert [row["error"] for row in outputs[1:]] == [None] * 5
    assert len((tmp_path / "played-0").read_text().split()) == 3


def test_without_workers_the_same_rollout_kills_everything(game, tmp_path):
    """Negative control: the environment of the test above, played in a process of its own."""
    pid = os.fork()
    if pid == 0:
        game(answers="crash").evaluate(ScriptedClient(echo), "m")
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7


def test_rubric_cleanup_runs_once_where_the_rollout_was_played(game, tmp_path):
    results = run(game(group=True))
    assert (tmp_path / "closed").read_text() == "x" * 12
    assert [row["metrics"]["best"] for row in results["outputs"]] == [
        float(i // 2) for i in range(12)
    ]


def test_scoring_after_all_are_played(game, tmp_path):
    results = game().evaluate(
        ScriptedClient(echo), "m", num_workers=2, interleave_scoring=False, score_rollouts=True
    )
    assert [row["metrics"]["length"] for row in results["outputs"]] == [3.0] * 6


def test_limits_of_model_calls_hold_over_all_workers(game):
    running, most = 0, 0

    async def counted(request):
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.01)
        running -= 1
        return "ok"

    game(num=12).evaluate(ScriptedClient(counted), "m", num_workers=2, max_concurrent_generation=3)
    assert most == 3


def test_what_ends_a_run_ends_it_from_a_worker_too(game):
    def refused(request):
        raise vf.AuthenticationFailed("the key was refused", api_key_var="NO_KEY")

    with pytest.raises(vf.AuthenticationFailed, match="refused") as caught:
        game().evaluate(ScriptedClient(refused), "m", num_workers=2)
    assert caught.value.api_key_var == "NO_KEY"


@pytest.mark.parametrize("wait_until_playing", [True, False], ids=["playing", "starting"])
def test_no_worker_outlives_its_run(game, monkeypatch, tmp_path, wait_until_playing):
    pids = []
    opened = ProcessChannel.open.__func__

    async def remembered(cls, *limits):
        channel = await opened(cls, *limits)
        pids.append(channel.process.pid)
        return channel

    monkeypatch.setattr(ProcessChannel, "open", classmethod(remembered))
    env = game(num=40, seconds=0.02)

    async def cancelled():
        task = asyncio.create_task(env.evaluate(ScriptedClient(echo), "m", num_workers=2))
        while len(pids) < 2 or (wait_until_playing and not list(tmp_path.glob("played-*"))):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())
    assert len(pids) == 2
    assert [Path(f"/proc/{pid}/stat").read_text() for pid in pids if not gone(pid)] == []


def test_workers_end_with_a_caller_that_is_killed(game, tmp_path):
    """However the caller dies, its socket closes."""
    (tmp_path / "caller.py").write_text(
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "import verifiers as vf\nfrom verifiers.testing import ScriptedClient\n"
        "env = vf.load_environment('worker_game', folder=sys.argv[1], num=500, seconds=0.05)\n"
        "env.evaluate(ScriptedClient(lambda r: 'x'), 'm', num_workers=2)\n"
    )
    import subprocess

    caller = subprocess.Popen(
        [sys.executable, tmp_path / "caller.py", str(tmp_path)], stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 60
    while not (played := list(tmp_path.glob("played-*"))) and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.3)
    caller.kill()
    caller.wait()
    pids = {int(pid) for path in played for pid in path.read_text().split()}
    while not all(gone(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert pids
    assert all(gone(pid) for pid in pids)


@pytest.mark.parametrize("how", ["stop", "hold"])
def test_a_rollout_that_halts_its_workers_fails_alone(game, tmp_path, monkeypatch, how):
    monkeypatch.setattr(channels, "SILENT_S", 2.0)
    says = "gave no sign of life for 2 s"
    outputs = game(answers=how).evaluate(ScriptedClient(echo), "m", num_workers=2)["outputs"]
    assert outputs[0]["error"]["error"] == "WorkerLost"
    assert says in outputs[0]["error"]["message"]
    assert [row["error"] for row in outputs[1:]] == [None] * 5
    assert len((tmp_path / "played-0").read_text().split()) == 2


@pytest.mark.parametrize("how", ["stop", "hold"])
def test_a_rollout_that_halts_a_worker_in_which_it_is_alone_costs_that_once(
    game, tmp_path, monkeypatch, how
):
    monkeypatch.setattr(channels, "SILENT_S", 2.0)
    (row,) = game(num=1, answers=how).evaluate(ScriptedClient(echo), "m", num_workers=1)["outputs"]
    assert row["error"]["error"] == "WorkerLost"
    assert len((tmp_path / "played-0").read_text().split()) == 1


@pytest.mark.parametrize(
    ("rollout_limit_s", "silent_s"), [(None, 60.0), (3600.0, 60.0), (30.0, 30.0), (1.0, 15.0)]
)
async def test_a_worker_is_given_up_after_the_time_of_a_rollout(rollout_limit_s, silent_s):
    channel = await ProcessChannel.open(rollout_limit_s)
    await channel.close()
    assert channel.silent_s == silent_s


def test_negative_control_a_rollout_that_blocks_its_loop_for_longer_is_not_lost(
    game, tmp_path, monkeypatch
):
    monkeypatch.setattr(channels, "SILENT_S", 2.0)
    outputs = game(num=2, seconds=5.0).evaluate(ScriptedClient(echo), "m", num_workers=2)["outputs"]
    assert [row["error"] for row in outputs] == [None] * 2
    assert [len(path.read_text().split()) for path in tmp_path.glob("played-*")] == [1, 1]


@pytest.mark.parametrize("how", ["stop", "hold", "block"])
def test_a_halted_worker_ends_with_a_caller_that_is_killed(game, tmp_path, how):
    (tmp_path / "caller.py").write_text(
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "import verifiers as vf\nfrom verifiers.runs.workers import channels\n"
        "from verifiers.testing import ScriptedClient\n"
        "channels.SILENT_S = 6\n"  # the clock is slower than the kill below
        "env = vf.load_environment('worker_game', folder=sys.argv[1], num=1, answers=sys.argv[2])\n"
        "env.evaluate(ScriptedClient(lambda r: 'x'), 'm', num_workers=1)\n"
    )
    import subprocess

    command = [sys.executable, tmp_path / "caller.py", str(tmp_path), how]
    caller = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob("played-*")) and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.5)
    (pid,) = map(int, (tmp_path / "played-0").read_text().split())
    assert not gone(pid)
    caller.kill()
    caller.wait()
    while not gone(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert gone(pid)


def test_an_environment_made_by_hand_is_refused():
    env = vf.SingleTurnEnv(dataset=[{"question": "q"}], rubric=vf.Rubric([lambda: 1.0]))
    with pytest.raises(
        vf.ConfigError, match=r"constructed directly.*load_environment.*num_workers=0"
    ):
        env.evaluate(ScriptedClient(echo), "m", num_workers=2)


def test_settings_changed_after_loading_reach_the_workers(game):
    env = game()
    env.set_kwargs(max_turns=1)
    assert {len(state["trajectory"]) for state in run(env)["states"]} == {1}


def test_an_environment_changed_by_hand_is_refused(game):
    """Negative control: a change that no worker can know of."""
    env = game()
    env.max_turns = 1
    with pytest.raises(vf.ConfigError, match="max_turns differ"):
        run(env)


@pytest.mark.parametrize(
    ("options", "says"),
    [({"num_workers": -1}, "at least 0"), ({"num_workers": 2.5}, "whole number|at least 0"),
     ({"num_workers": 1, "worker_backend": "threads"}, "one of process, ray")],
)  # fmt: skip
def test_bad_values_are_refused(game, options, says):
    with pytest.raises(vf.ConfigError, match=says):
        game().evaluate(ScriptedClient(echo), "m", **options)


@pytest.mark.parametrize("name", ["my_sums", "my-sums", "my_sums.py"])
def test_a_local_environment_runs_in_workers_under_every_spelling_of_its_id(
    name, tmp_path, monkeypatch
):
    (tmp_path / "my_sums.py").write_text(
        "import verifiers as vf\n\n\ndef exact(completion, answer):\n    return 1.0\n\n\n"
        "def load_environment():\n"
        "    rows = [{'question': '1 + 1', 'answer': '2'}]\n"
        "    return vf.SingleTurnEnv(eval_dataset=rows, rubric=vf.Rubric([exact]))\n"
    )
    monkeypatch.chdir(tmp_path)
    results = vf.load_environment(name).evaluate(ScriptedClient("2"), "m", num_workers=1)
    assert results.rewards == [1.0]
