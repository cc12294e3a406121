"""``TasksetEnv``: tasksets of verifiers 0.4, in a Python of their own, evaluated and trained here."""

import json
import math
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

import verifiers as vf
from verifiers.cli.install.command import COMMAND as VF_INSTALL
from verifiers.testing import FakeServer, ScriptedClient
from verifiers_agents.tasksets.folders import FOLDER_VARIABLE

SOURCES = Path(__file__).parents[1] / "support" / "tasksets"
SUMS = {"2 + 3 = ?": "5", "10 + 20 = ?": "31", "7 + 8 = ?": "15", "1 + 1 = ?": "2"}


def answers(request):
    return SUMS[request.prompt[-1]["content"]]


# --- without that Python --------------------------------------------------------------------------


@pytest.fixture
def no_tasksets(monkeypatch, tmp_path):
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "tasksets"))


def a_python(folder, script):
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def test_a_taskset_that_is_not_installed_says_how(no_tasksets):
    with pytest.raises(vf.ConfigError, match="vf-install --taskset reverse-text makes"):
        vf.load_environment("v1:reverse-text")


def test_other_prefixes_are_no_ids():
    with pytest.raises(vf.UnknownEnvironment, match="no environment id"):
        vf.load_environment("v9:reverse-text")


def test_a_python_that_cannot_start_or_dies_is_named_with_its_last_words(tmp_path):
    with pytest.raises(vf.ConfigError, match="python='/nowhere' cannot be started"):
        vf.TasksetEnv("sums_v1", python="/nowhere")
    dying = a_python(tmp_path, "echo 'no module named verifiers.v1' >&2; exit 3")
    with pytest.raises(vf.ConfigError, match="exit code 3; its last words: no module named"):
        vf.TasksetEnv("sums_v1", python=dying)
    refusing = a_python(tmp_path, """read line; echo '{"id": 0, "error": "ValueError: no end"}'""")
    with pytest.raises(vf.ConfigError, match="the taskset failed: ValueError: no end"):
        vf.TasksetEnv("sums_v1", python=refusing)
    babbling = a_python(tmp_path, "read line; echo hello")
    with pytest.raises(vf.ConfigError, match="its last words: hello"):
        vf.TasksetEnv("sums_v1", python=babbling)


def opening(roles=("agent",), tasks=1):
    task = {"type": "m.T", "data": {"prompt": "2 + 3 = ?"}, "system_prompt": None}
    value = {"version": "0.4.0", "roles": roles, "scores": [], "tasks": [task] * tasks}
    return f"read line; echo '{json.dumps({'id': 0, 'value': value})}'"


def test_settings_that_cannot_be_meant_are_refused(tmp_path):
    several = a_python(tmp_path, opening(("solver", "judge")))
    with pytest.raises(vf.ConfigError, match="several agents, solver, judge: say whose reward"):
        vf.TasksetEnv("sums_v1", python=several)
    with pytest.raises(vf.ConfigError, match="role is 'user'; the agents of 'sums_v1' are solver"):
        vf.TasksetEnv("sums_v1", python=several, role="user")
    with pytest.raises(vf.ConfigError, match="has no tasks"):
        vf.TasksetEnv("sums_v1", python=a_python(tmp_path, opening(tasks=0)))
    with pytest.raises(vf.ConfigError, match="takes no dataset"):
        vf.TasksetEnv("sums_v1", python=several, dataset=[{"question": "?"}])
    with pytest.raises(vf.ConfigError, match="its id is the first argument, 'sums_v1'"):
        vf.TasksetEnv("sums_v1", python=several, config={"taskset": {"id": "other"}})


def test_a_process_that_dies_costs_its_own_rollout_and_the_reward_is_unknown(tmp_path):
    """It opens, and dies at the first task; the second rollout starts another."""
    env = vf.TasksetEnv("sums_v1", python=a_python(tmp_path, f"{opening()}; read line; exit 9"))
    results = env.evaluate(ScriptedClient("5"), "m", rollouts_per_example=2, max_concurrent=1)
    for output in results.outputs:
        assert "ended with exit code 9" in output.error.message
        assert math.isnan(output.reward)
    env.close()


def test_the_command_is_shown_before_it_runs(no_tasksets, capsys):
    assert VF_INSTALL.run(["--taskset", str(SOURCES), "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert "verifiers==0.4.0 mcp==2.0.0" in said
    assert str(SOURCES) in said


# --- with it --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tasksets")
    before = os.environ.get(FOLDER_VARIABLE)
    os.environ[FOLDER_VARIABLE] = str(folder)
    assert VF_INSTALL.run(["--taskset", str(SOURCES)]) == 0
    yield folder / "tasksets"
    if before is None:
        del os.environ[FOLDER_VARIABLE]
    else:
        os.environ[FOLDER_VARIABLE] = before


@pytest.mark.slow
def test_rewards_are_those_of_its_own_command(installed, tmp_path):
    with FakeServer(answers, models=["m"]) as server:
        words = f"sums_v1 -m m --client.base-url {server.url} --client.api-key-var KEY --no-push"
        null = "--env.agent.harness.id null --env.agent.runtime.type subprocess"
        program = installed / "bin" / "vf-eval"
        subprocess.run(
            [program, *words.split(), *null.split()],
            cwd=tmp_path,
            env={**os.environ, "KEY": "x"},
            check=True,
            capture_output=True,
        )
        env = vf.load_environment("v1:sums_v1")
        client = vf.OpenAIChatCompletionsClient(base_url=server.url, api_key="x")
        results = env.evaluate(client, "m")
        env.close()
    (traces,) = tmp_path.rglob("traces.jsonl")
    theirs = {}
    for line in traces.read_text().splitlines():
        episode = json.loads(line)
        trace = episode["traces"][0] if "traces" in episode else episode
        theirs[trace["task"]["data"]["prompt"]] = (
            {name: r["score"] * r["weight"] for name, r in trace["rewards"].items()},
            trace["metrics"],
        )
    ours = {
        output.prompt[-1]["content"]: (
            {"is_right": output.reward},
            {"num_digits": output["metrics"]["num_digits"]},
        )
        for output in results.outputs
    }
    assert ours == theirs
    assert sorted(results["rewards"]) == [0.0, 2.0, 2.0, 2.0]


@pytest.mark.slow
def test_a_tool_over_mcp_and_a_user_who_is_code(installed):
    env = vf.load_environment("v1:lookup_v1")
    call = vf.ToolCall("c1", "atlas_capital", {"country": "France"})
    results = env.evaluate(ScriptedClient([call, "It is Paris."]), "m", num_examples=1)
    env.close()
    (output,) = results.outputs
    assert output.reward == 1.0
    assert [message["content"] for message in output.completion[1:]] == ["Paris", "It is Paris."]

    env = vf.load_environment("v1:guess_v1")
    results = env.evaluate(ScriptedClient(["6", "3"]), "m", num_examples=1)
    env.close()
    (output,) = results.outputs
    assert output.reward == 1.0
    assert [message["content"] for message in output.completion] == ["6", "lower", "3"]


@pytest.mark.slow
def test_what_ends_a_rollout_ends_its_episode(installed):
    """A model that fails, one that is cut off by the limit of turns, a process that is killed."""
    env = vf.load_environment("v1:guess_v1", max_turns=2)
    results = env.evaluate(ScriptedClient(["1", "2", "3"]), "m", num_examples=1)
    (output,) = results.outputs
    assert output["metrics"]["num_turns"] == 2
    assert output.reward == 0.0
    failing = env.evaluate(
        ScriptedClient([vf.ModelRefused("no", status=400)]), "m", num_examples=1
    ).outputs[0]
    assert "no" in failing.error.message
    assert math.isnan(failing.reward)
    (process,) = env._processes.values()
    process._process.kill()
    process._process.wait()
    again = env.evaluate(ScriptedClient("3"), "m", num_examples=1).outputs[0]
    assert (again.reward, again.error) == (1.0, None)
    env.close()


@pytest.mark.slow
def test_a_harness_that_runs_what_the_model_writes_needs_a_runtime(installed):
    with pytest.raises(vf.ConfigError, match="the harness 'bash' of 'agent' runs what the model"):
        vf.load_environment("v1:sums_v1", config={"agent": {"harness": {"id": "bash"}}})


@pytest.mark.slow
def test_it_is_trained(installed, tmp_path):
    """Every sampled token of the episodes is in the batch, and the run ends as others do."""
    config = tmp_path / "train.toml"
    config.write_text(
        f"""
model = "builtin:tiny"
[env]
id = "v1:sums_v1"
[trainer.args]
output_dir = "{tmp_path / "run"}"
max_steps = 2
batch_size = 8
rollouts_per_example = 4
max_tokens = 4
zero_variance = "keep"  # random weights solve no sum
"""
    )
    ran = subprocess.run(
        [Path(sys.executable).with_name("vf-train"), "@", config],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == 2
