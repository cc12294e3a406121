"""The real inspect-ai: it reads what we write, lists it, and plays an environment through its own
provider.

Run by ``python3 tests/real/peers.py inspect``.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip(
    "inspect_ai", reason="inspect-ai is not installed: python3 tests/real/peers.py inspect"
)

from inspect_ai import Task
from inspect_ai import eval as inspect_eval
from inspect_ai.dataset import Sample
from inspect_ai.log import read_eval_log
from inspect_ai.model import get_model
from inspect_ai.scorer import CORRECT, INCORRECT, Score, accuracy, scorer
from inspect_ai.solver import basic_agent
from inspect_ai.tool import bash
from inspect_ai.util import sandbox

import verifiers as vf
from support.integration_plays import plays_tool_test
from support.isolated import needs_sandbox
from support.peer_double import differences
from verifiers.testing import FakeServer
from verifiers_integrations.inspect import to_inspect
from verifiers_integrations.inspect_task import to_task

pytestmark = pytest.mark.real


@pytest.fixture
def env():
    return vf.load_environment("tool-test", num_train_examples=2, num_eval_examples=4)


@pytest.fixture
def server(env):
    with FakeServer(plays_tool_test(env, broken={2}, wrong={1})) as server:
        yield server


def test_the_peer_has_what_was_recorded():
    assert differences("inspect_ai") == []


def test_a_finished_run_is_read_back_with_our_means(env, server, tmp_path):
    results = env.evaluate(
        vf.ClientConfig(api_base_url=server.url, max_retries=0), "m", rollouts_per_example=3,
        results_path=tmp_path / "run", num_examples=4,
    )  # fmt: skip
    path = to_inspect(tmp_path / "run", tmp_path / "logs" / "run.eval")
    log = read_eval_log(str(path))
    reward = log.results.scores[0]
    assert reward.metrics["mean"].value == pytest.approx(results.metadata["avg_reward"])
    assert reward.metrics["stderr"].value == pytest.approx(results.metadata["reward_stderr"])
    assert (reward.scored_samples, reward.unscored_samples, len(log.samples)) == (9, 3, 12)
    assert sorted({sample.epoch for sample in log.samples}) == [1, 2, 3]
    told = [sample for sample in log.samples if sample.error is None]
    assert {message.role for sample in told for message in sample.messages} == {
        "user",
        "assistant",
        "tool",
    }
    assert all(sample.messages[1].tool_calls for sample in told)
    failed = [sample for sample in log.samples if sample.error is not None]
    assert {sample.id for sample in failed} == {2}
    assert all("reward" not in sample.scores for sample in failed)


def test_its_command_lists_and_dumps_the_log(env, server, tmp_path):
    results = env.evaluate(
        vf.ClientConfig(api_base_url=server.url, max_retries=0), "m", num_examples=2
    )
    path = to_inspect(results, tmp_path / "logs" / "run.eval")
    listed = _inspect("log", "list", "--log-dir", str(path.parent), cwd=tmp_path)
    assert "run.eval" in listed
    assert '"calls_right"' in _inspect("log", "dump", str(path), cwd=tmp_path)


def test_an_environment_is_played_inside_inspect(env, server, tmp_path):
    model = get_model("openai-api/local/m", base_url=server.url, api_key="none", max_retries=0)
    (log,) = inspect_eval(
        to_task(env, num_examples=4),
        model=model,
        display="none",
        log_dir=str(tmp_path),
        max_retries=0,
    )
    assert log.status == "success"
    rewards = {sample.id: sample.scores["reward"].value for sample in log.samples if sample.scores}
    assert rewards == {0: 1.0, 1: 0.0, 3: 1.0}
    (failed,) = [sample for sample in log.samples if sample.error]
    assert (failed.id, "ModelError" in failed.error.message) == (2, True)
    assert log.results.scores[0].metrics["mean"].value == pytest.approx(2 / 3), (
        "the failed one is no zero"
    )
    assert [message.role for message in log.samples[0].messages][:3] == [
        "user",
        "assistant",
        "tool",
    ]


def test_vf_eval_exports_a_log_that_inspect_reads(env, server, tmp_path):
    """The command itself, in a process of its own: ``vf-eval … --export inspect``."""
    arguments = '{"num_train_examples": 2, "num_eval_examples": 4}'
    words = [
        "tool-test",
        "-a",
        arguments,
        "-m",
        "m",
        "-b",
        server.url,
        "-n",
        "4",
        "-r",
        "2",
        "--max-retries",
        "0",
    ]
    command = Path(sys.executable).with_name("vf-eval")
    ran = subprocess.run(
        [command, *words, "--max-error-rate", "1", "--export", "inspect", "--json"],
        cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    (run,) = json.loads(ran.stdout)["runs"]
    log = read_eval_log(str(tmp_path / run["exported"]["inspect"]))
    assert (log.status, len(log.samples), log.results.metadata["vf_unscored"]) == ("success", 8, 2)
    assert log.results.scores[0].metrics["mean"].value == pytest.approx(2 / 3)
    assert log.eval.task_args == json.loads(arguments)


def _agent_log(tmp_path, *commands, check, kind="verifiers"):
    """Inspect's own basic agent with its own bash tool; the model calls the commands one by one,
    then submits."""
    calls = [
        vf.ToolCall(f"c{n}", "bash", {"command": command}) for n, command in enumerate(commands)
    ]
    submit = vf.ToolCall("s", "submit", {"answer": "done"})
    task = Task(
        dataset=[
            Sample(input="Write right to out.txt.", target="right", files={"start.txt": "start"})
        ],
        solver=basic_agent(tools=[bash(timeout=5)], max_attempts=1),
        scorer=check,
        sandbox=kind,
    )
    with FakeServer([*calls, submit]) as server:
        model = get_model("openai-api/local/m", base_url=server.url, api_key="none", max_retries=0)
        (log,) = inspect_eval(task, model=model, display="none", log_dir=str(tmp_path))
    return log


@scorer(metrics=[accuracy()])
def _out_is_right():
    async def score(state, target):
        try:
            content = await sandbox().read_file("out.txt")
        except FileNotFoundError:
            content = ""
        return Score(value=CORRECT if content.strip() == target.text else INCORRECT)

    return score


def test_its_agent_works_in_our_sandbox(tmp_path):
    needs_sandbox()
    commands = (
        "cat start.txt; pwd; id -u; ls /root /home 2>&1 | tail -1",
        "sleep 60",
        "exit 3",
        "echo right > out.txt",
    )
    log = _agent_log(tmp_path, *commands, check=_out_is_right())
    assert log.status == "success", log.error
    tools = [message for message in log.samples[0].messages if message.role == "tool"]
    said = [message.error.message if message.error else message.text for message in tools]
    assert said[0].startswith("start/workspace\n1000\n"), said[0]
    assert "No such file" in said[0], "no folder of the host is there"
    assert "timed out" in said[1].lower()
    assert log.samples[0].scores["_out_is_right"].value == "C"
    wrong = _agent_log(tmp_path, "echo wrong > out.txt", check=_out_is_right())
    assert wrong.samples[0].scores["_out_is_right"].value == "I"


def test_what_our_sandbox_does_not_take_is_said(tmp_path):
    log = _agent_log(tmp_path, "true", check=_out_is_right(), kind=("verifiers", "compose.yaml"))
    assert log.status == "error"
    assert "takes no configuration" in log.error.message


def _inspect(*words, cwd):
    command = Path(sys.executable).with_name("inspect")
    return subprocess.run(
        [command, *words], cwd=cwd, capture_output=True, text=True, check=True, timeout=120
    ).stdout
