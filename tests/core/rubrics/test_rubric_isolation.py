"""Isolated reward functions: a process that is killed at the bound."""

import asyncio
import math
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from verifiers.errors import ConfigError, ScoringError
from verifiers.rollouts.state import State
from verifiers.rubrics import Rubric
from verifiers.runtime.processes import process_pool

SOURCE = """
    import os, re, sys, time, subprocess
    import numpy

    def exact(completion, answer): return numpy.float32(completion[-1]["content"] == answer)
    def ranked(completions): return numpy.arange(len(completions))
    def pid(answer): print("noise"); return os.getpid()
    def endless(answer): return 9**9**9
    def backtrack(answer): return bool(re.match(r"(a+)+$", "a" * 40 + "b"))
    def spawns(answer): return subprocess.Popen(["sleep", "60"], stdout=subprocess.DEVNULL).wait()
    def leaves_behind(file):
        return subprocess.Popen(["sh", "-c", f"touch {file}.begun; sleep 0.8; touch {file}"]).wait()
    def dies(answer): os._exit(3)
    def raises(answer): raise LookupError("no such unit")
    def text(answer): return object()
    def path_of(name): return name
    done = []
    def prepare(name): done.append(name)
    def preparations(): return done
"""


@pytest.fixture
def functions(tmp_path, monkeypatch):
    (tmp_path / "isolated_functions.py").write_text(textwrap.dedent(SOURCE))
    monkeypatch.syspath_prepend(str(tmp_path))
    import isolated_functions

    yield isolated_functions
    del sys.modules["isolated_functions"]


def state_of():
    return State(prompt="2+2", completion=[{"role": "assistant", "content": "4"}], answer="4")


def rubric_of(*functions, timeout_s=10.0):
    rubric = Rubric(timeout_s=timeout_s)
    for function in functions:
        rubric.add_reward_func(function, isolated=True)
    return rubric


async def test_an_isolated_function_runs_in_another_process_that_is_reused(functions):
    rubric = rubric_of(functions.exact, functions.pid)
    first, second = await rubric.score_rollout(state_of()), await rubric.score_rollout(state_of())
    assert first["exact"] == 1.0
    assert first["pid"] == second["pid"] != os.getpid()


async def test_group_functions_can_be_isolated(functions):
    scores = await rubric_of(functions.ranked).score_group([state_of(), state_of()])
    assert scores["reward"] == [0.0, 1.0]


@pytest.mark.parametrize("name", ["endless", "backtrack", "spawns"])
async def test_a_function_that_hangs_is_killed_and_the_next_is_unaffected(functions, name):
    rubric = rubric_of(getattr(functions, name), functions.pid, timeout_s=0.5)
    state = state_of()
    begun = time.monotonic()
    await rubric.score_rollout(state)
    assert time.monotonic() - begun < 5
    assert "was killed" in str(state["error"])
    assert state["error"].function == name
    assert math.isnan(state["reward"])
    assert state["metrics"]["pid"] > 0


async def test_the_time_an_import_takes_is_not_the_functions(functions, tmp_path):
    (tmp_path / "slow_import.py").write_text(
        "import time; time.sleep(0.6)\ndef one(answer): return 1.0\n"
    )
    import slow_import

    assert (await rubric_of(slow_import.one, timeout_s=0.3).score_rollout(state_of()))[
        "reward"
    ] == 1.0


def wait_for(file, bound_s=60.0):
    given_up = time.monotonic() + bound_s
    while not file.exists():
        assert time.monotonic() < given_up, f"{file} did not appear"
        time.sleep(0.02)


def kill_when_begun(code, folder):
    """Negative control of a killed scoring process: only the process itself is killed."""
    process = subprocess.Popen([sys.executable, "-c", code], cwd=folder)
    wait_for(folder / "spared.begun")
    process.kill()
    process.wait()
    wait_for(folder / "spared")


async def test_children_of_a_killed_process_are_gone_too(functions, tmp_path):
    pid = await process_pool().run(functions.pid, {"answer": ""}, 10, "pid")
    with pytest.raises(TimeoutError):
        await process_pool().run(
            functions.leaves_behind, {"file": str(tmp_path / "killed")}, 0.4, "leaves_behind"
        )
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    code = f"import isolated_functions as f; f.leaves_behind({str(tmp_path / 'spared')!r})"
    await asyncio.to_thread(kill_when_begun, code, tmp_path)
    assert not (tmp_path / "killed").exists()


@pytest.mark.parametrize(
    ("name", "says"),
    [("dies", "died"), ("raises", "LookupError: no such unit"), ("text", "return a number")],
)
async def test_other_failures_are_scoring_errors_that_say_what_happened(functions, name, says):
    state = state_of()
    await rubric_of(getattr(functions, name)).score_rollout(state)
    assert isinstance(state["error"], ScoringError)
    assert says in str(state["error"])
    assert (await rubric_of(functions.exact).score_rollout(state_of()))["reward"] == 1.0


def test_a_function_a_process_cannot_import_is_refused_at_once(functions):
    def local(answer):
        return 1.0

    async def coroutine(answer):
        return 1.0

    for function in (local, coroutine, lambda answer: 1.0):
        with pytest.raises(ConfigError, match="isolated"):
            rubric_of(function)


async def test_arguments_that_are_no_data_are_a_scoring_error(functions):
    rubric = rubric_of(functions.path_of)
    rubric.add_class_object("name", lambda: None)
    state = state_of()
    await rubric.score_rollout(state)
    assert "plain data" in str(state["error"])


def test_processes_end_with_the_loop(functions):
    async def use():
        pid = await process_pool().run(functions.pid, {"answer": ""}, 10, "pid")
        assert process_pool().num_processes == 1
        return pid

    pid = asyncio.run(use())
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_an_initializer_runs_once_in_each_process_and_its_processes_serve_no_other_pool(
    functions,
):
    prepared, plain = process_pool(1, functions.prepare, ("ready",)), process_pool(1)
    assert prepared is process_pool(1, functions.prepare, ("ready",))
    assert [await prepared.run(functions.preparations, {}, 10, "prepared") for _ in range(2)] == [
        ["ready"]
    ] * 2
    assert await plain.run(functions.preparations, {}, 10, "plain") == []  # negative control
    assert prepared.num_processes == plain.num_processes == 1


async def test_an_initializer_that_fails_is_a_scoring_error(functions):
    with pytest.raises(ScoringError, match="LookupError: no such unit"):
        await process_pool(1, functions.raises, ("",)).run(functions.pid, {"answer": ""}, 10, "pid")


async def test_many_at_a_time_share_a_few_processes(functions):
    rubric = rubric_of(functions.pid)
    states = [state_of() for _ in range(20)]
    await asyncio.gather(*(rubric.score_individual(state) for state in states))
    assert len({state["reward"] for state in states}) <= max(2, os.cpu_count() or 1)


def test_no_alarm_signal_is_used_anywhere():
    import verifiers.rubrics as package

    sources = [file.read_text() for file in Path(package.__file__).parent.glob("*.py")]
    assert sources
    assert not any(
        "SIGALRM" in source or "setitimer" in source or "signal.alarm" in source
        for source in sources
    )
