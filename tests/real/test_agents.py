"""The real agent programs, with a scripted model: ``pytest -m real tests/real/test_agents.py``.

Each is skipped with the command that installs it, where it is not installed.
"""

import asyncio
import json
import os
import subprocess
import tempfile
import time

import pytest

import verifiers as vf
from support.real_agents import CASES, LAST_WORDS, SHELLS, play
from verifiers.testing import ScriptedClient
from verifiers.types import Response
from verifiers_agents.agent import find_agent, find_installed
from vf_shell_tasks import TASKS

pytestmark = pytest.mark.real
AGENTS = list(SHELLS)
EXPECTED_REWRITES = {("pi", "broken JSON"): 1}
"""(agent, case) -> how often it really rewrites its history; elsewhere never. ``fork_table.py``
prints the table."""


def model_of(name):
    """A model that writes 42 into answer.txt with the agent's shell, in compact JSON, and then
    ends."""
    tool, parameter, more = SHELLS[name]

    def reply(request):
        if request.prompt[-1]["role"] == "tool":
            return LAST_WORDS.get(name, "I wrote the file; all is done.")
        if tool in [offered["function"]["name"] for offered in request.tools or ()]:
            arguments = {parameter: "echo 42 > answer.txt", **more}
            return vf.ToolCall("c1", tool, json.dumps(arguments, separators=(",", ":")))
        return "A title"

    return ScriptedClient(reply, tokens=True)


def env_of(name, rows=1, question="Write 42 into answer.txt."):
    try:
        find_installed(find_agent(name))
    except vf.ConfigError as error:
        pytest.skip(str(error))
    return vf.AgentEnv(
        agent=name,
        collect=["*.txt"],
        dataset=[{"question": question, "answer": "42"}] * rows,
        rubric=vf.Rubric(
            funcs=[
                lambda state, answer: float(state["files"].get("answer.txt", "").strip() == answer)
            ]
        ),
        timeout_seconds=300,
    )


@pytest.mark.parametrize("name", AGENTS)
def test_an_agent_does_its_work_and_its_history_is_the_sampled_one(name):
    results = env_of(name).evaluate(model_of(name), "m", keep_states=True)
    (output,), (state,) = results.outputs, results.states
    assert output.error is None
    assert (output.reward, output.stop_condition) == (1.0, "agent_ended")
    assert [role for role in output["agent"]["roles"] if role != "side"] == ["main", "main"]
    assert output["agent"]["rewrites"] == 0
    main = [step for step in state["trajectory"] if step["extras"]["role"] == "main"]
    assert main[1]["prompt"][: len(main[0]["prompt"]) + 1] == [
        *main[0]["prompt"],
        *main[0]["completion"],
    ]
    assert len(state.rollout().turns) == 2


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", ["codex", "pi"])
def test_a_conversation_is_one_sample_whatever_the_model_says(name, case):
    env_of(name)  # skips where it is not installed
    measured = play(name, case)
    assert measured.error is None
    assert measured.rewrites == EXPECTED_REWRITES.get((name, case), 0)


def test_codex_that_replaces_its_history_begins_another_sample_and_its_summary_is_known():
    def reply(request):
        if not request.tools:
            return "A summary: answer.txt holds 42, and that is all there was to do."
        if any("produced a summary" in str(message["content"]) for message in request.prompt):
            return "All is done."
        num_tokens = 90_000 if request.prompt[-1]["role"] == "tool" else 100
        call = vf.ToolCall(f"c{num_tokens}", "exec_command", '{"cmd":"echo 42 > answer.txt"}')
        return Response(
            vf.AssistantMessage(None, [call]), "tool_calls", usage=vf.Usage(num_tokens, 10)
        )

    env = env_of("codex")
    env.agent_args = ["-c", "model_auto_compact_token_limit=50000"]
    (output,) = env.evaluate(ScriptedClient(reply), "m").outputs
    assert (output.error, output.reward) == (None, 1.0)
    assert (output["agent"]["roles"], output["agent"]["rewrites"]) == (
        ["main", "main", "summary", "main"],
        1,
    )


@pytest.mark.parametrize("solved", [True, False])
def test_codex_works_on_a_task_in_its_sandbox(solved):
    env_of("codex")  # skips where it is not installed
    env = vf.load_environment("shell-tasks", agent="codex", only=["csv-totals"])
    script = (TASKS / "csv-totals/solution/solve.sh").read_text() if solved else "touch totals.csv"

    def reply(request):
        if request.prompt[-1]["role"] == "tool":
            return "Done."
        return vf.ToolCall("c1", "exec_command", {"cmd": script})

    (output,) = env.evaluate(
        ScriptedClient(reply, tokens=True), "m", state_columns=["verdict"]
    ).outputs
    assert output.error is None
    assert (output.reward, output.stop_condition) == (float(solved), "agent_ended")
    assert (output["agent"]["roles"], output["agent"]["rewrites"]) == (["main", "main"], 0)


def there_is(mark, folder):
    """What exists of agents: processes with the mark in their arguments, sockets of this process,
    files in a folder."""
    arguments = subprocess.run(
        ["ps", "-ewwo", "args"], capture_output=True, text=True, check=True
    ).stdout
    targets = [os.path.realpath(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")]
    return {
        "processes": sum(mark in line for line in arguments.splitlines()),
        "sockets": sum("socket:" in path for path in targets),
        "files": len(os.listdir(folder)),
    }


def test_many_at_once_leave_nothing(tmp_path, monkeypatch):
    """Codex, 32 times at once. While all of them wait for the model, the same look sees them: the
    negative control."""
    # other processes of this machine write to the usual one
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    mark = f"run {time.time_ns()}"
    env_of("codex").evaluate(model_of("codex"), "m")  # starts the gateway and the zygote
    before, seen, all_wait = there_is(mark, tmp_path), {}, asyncio.Event()
    answer = model_of("codex")

    class Waiting(ScriptedClient):
        async def complete(self, request):
            self.in_flight += 1
            if self.in_flight == 32 and not seen:
                seen.update(there_is(mark, tmp_path))
                all_wait.set()
            await asyncio.wait_for(all_wait.wait(), 240)
            return await answer.complete(request)

    results = env_of("codex", 32, f"Write 42 ({mark}).").evaluate(
        Waiting("x"), "m", max_concurrent=32
    )
    assert results["rewards"] == [1.0] * 32
    assert before["processes"] == 0
    assert min(seen["processes"], seen["sockets"] - before["sockets"]) >= 32, seen
    assert there_is(mark, tmp_path) == before
