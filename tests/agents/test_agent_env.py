"""``AgentEnv``: real processes in a real sandbox; whatever they do is one rollout, and nothing of
them is left."""

import asyncio
import itertools
import json
import math
import subprocess
import sys
import time

import openai
import pytest

import verifiers as vf
from support.agents import CLAUDE, CLIENT, WRITER
from support.isolated import needs_sandbox
from verifiers.testing import FakeServer, ScriptedClient
from verifiers_agents import process

ROW = {"question": "Write 42.", "answer": "42"}
CALL = vf.ToolCall("c1", "write", '{"text":"42"}')


def wrote(state, answer):
    return float(state["files"].get("answer.txt") == answer)


def env_of(script=WRITER, rows=1, row=ROW, **parameters):
    if parameters.get("sandbox", "auto") == "auto":
        needs_sandbox()
    parameters_of_env = {
        "command": ["python3", "agent.py", "{prompt}"],
        "files": {"agent.py": script},
        "collect": ["*.txt"],
        "rubric": vf.Rubric(funcs=[wrote]),
        "dataset": [row | {"question": f"{row['question']}{' ' * i}"} for i in range(rows)],
    }
    return vf.AgentEnv(**parameters_of_env | parameters)


def run(script=WRITER, replies=(CALL, "done"), options=None, **parameters):
    client = replies if isinstance(replies, ScriptedClient) else ScriptedClient(list(replies))
    return env_of(script, **parameters).evaluate(
        client, "m", **{"state_columns": ["trajectory"]} | (options or {})
    )


def only(results):
    (output,) = results.outputs
    return output


def failure(results):
    output = only(results)
    assert output.error is not None, output["agent"]
    return f"{output.error.error}: {output.error.message}"


# --- a rollout ------------------------------------------------------------------------------------


def test_the_calls_of_a_program_are_the_turns_of_the_rollout():
    output = only(run())
    assert (output.reward, output.stop_condition, output.error) == (1.0, "agent_ended", None)
    assert [message["role"] for message in output.completion] == ["assistant", "tool", "assistant"]
    assert output["files"] == {"answer.txt": "42"}
    assert output["agent"] == output["agent"] | {
        "log": "done\n",
        "exit_code": 0,
        "roles": ["main", "main"],
        "left": [],
    }
    assert output.tool_defs[0]["function"]["name"] == "write"


def test_arguments_written_again_do_not_change_the_history():
    steps = only(run())["trajectory"]
    assert steps[1]["prompt"][2]["tool_calls"][0]["function"]["arguments"] == '{"text":"42"}'
    assert steps[1]["prompt"][: len(steps[0]["prompt"]) + 1] == [
        *steps[0]["prompt"],
        *steps[0]["completion"],
    ]


def test_negative_control_the_agent_really_writes_them_again():
    spied = (
        'open("calls.txt", "w").write(one["function"]["arguments"])\n       '
        ' messages.append({"role": "tool"'
    )
    output = only(run(WRITER.replace('messages.append({"role": "tool"', spied)))
    assert output["files"]["calls.txt"] == '{\n "text": "42"\n}'


def test_the_model_sees_the_tools_that_are_named_alone():
    def reply(request):
        return "saw " + ", ".join(tool["function"]["name"] for tool in request.tools or ())

    assert only(run(replies=ScriptedClient(reply))).completion[-1].content == "saw write"
    assert only(run(replies=ScriptedClient(reply), tools=[])).completion[-1].content == "saw "


def test_a_row_brings_files_and_names_those_to_collect():
    script = (
        CLIENT + "import shutil\nos.makedirs('out')\nshutil.copy('in/a.txt',"
        " 'out/b.md')\nchat([user('x')])"
    )
    info = {"files": {"in/a.txt": "from the row"}, "collect": ["out/**/*.md"]}
    output = only(run(script, ["ok"], row=ROW | {"info": info}, collect=[]))
    assert output["files"] == {"out/b.md": "from the row"}


def test_the_work_folder_is_kept_on_request(tmp_path):
    run(keep_workdirs=tmp_path)
    (folder,) = tmp_path.iterdir()
    assert (folder / "answer.txt").read_text() == "42"


def test_what_leads_out_of_the_work_folder_is_not_kept_and_costs_nothing_else(tmp_path):
    links = "import os; os.symlink('/etc', 'out'); os.symlink('answer.txt', 'inside')\n"
    output = only(run(links + WRITER, keep_workdirs=tmp_path))
    assert (output.reward, output.error) == (1.0, None)
    (folder,) = tmp_path.iterdir()
    assert (folder / "answer.txt").read_text() == "42"
    assert not (folder / "out").is_symlink()
    assert (folder / "inside").is_symlink()
    (note,) = output["agent"]["notes"]
    assert "the copy of the work folder is without out, which lead out of it" in note


DAEMON = """
import os
if os.fork() == 0:
    os.setsid()
    null = os.open("/dev/null", os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(null, number)
    while True:
        for name in ("answer.txt", "../work.tar"):
            open("swap", "w").write("changed")
            os.replace("swap", name)
"""


def test_what_the_agent_leaves_running_changes_no_file_that_is_read(tmp_path):
    """It is named as left; the control is the answer, which the daemon does change while the agent
    runs."""
    script = (
        WRITER
        + DAEMON
        + "import time\nwhile open('answer.txt').read() != 'changed':\n    time.sleep(0.01)\n"
    )
    output = only(run(script, keep_workdirs=tmp_path))
    assert output["agent"]["left"] == ["python3"]
    assert output["agent"]["notes"] == []
    assert output["files"]["answer.txt"] == "changed"
    (folder,) = tmp_path.iterdir()
    assert (folder / "answer.txt").read_text() == "changed"


def test_a_work_folder_that_cannot_be_kept_costs_no_rollout(tmp_path):
    (tmp_path / "file").write_text("")
    output = only(run(keep_workdirs=tmp_path / "file"))
    assert (output.reward, output.error) == (1.0, None)
    assert "the work folder was not kept as a whole" in output["agent"]["notes"][0]


def test_a_file_that_the_command_names_is_there(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(WRITER)
    assert only(run(command=["python3", "mine.py", "{prompt}"], files={})).reward == 1.0


def test_there_is_no_network_but_the_model():
    script = (
        CLIENT
        + "import socket\nfor port in (22, 80):\n    for host in ('127.0.0.1', '1.1.1.1'):\n       "
        " try:\n            socket.create_connection((host, port), 2); print('reached', host)\n  "
        "      except OSError as error:\n            print('not',"
        " host)\nprint(sorted(os.listdir('/run/verifiers')), os.path.exists('/root'), 'PATH' in"
        " os.environ)\nchat([user('x')])"
    )
    log = only(run(script, ["ok"]))["agent"]["log"]
    assert log.splitlines() == [
        *["not 127.0.0.1", "not 1.1.1.1"] * 2,
        "['gateway.sock'] False True",
    ]


def test_without_isolation_the_same_program_runs_with_the_rights_of_the_user():
    output = only(
        run(sandbox="unsafe_subprocess", command=[sys.executable, "agent.py", "{prompt}"])
    )
    assert (output.reward, output["agent"]["log"]) == (1.0, "done\n")


def test_a_backend_without_mounts_is_refused_before_the_first_call():
    from verifiers.sandbox.backends.sandlock import Sandlock

    with pytest.raises(vf.ConfigError, match="'sandlock' cannot: use sandbox='bubblewrap'"):
        run(sandbox=Sandlock())


def test_claude_code_is_called_as_recorded_and_served_in_its_dialect(tmp_path, monkeypatch):
    """The program is proprietary, and so a script with its arguments, variables and wire stands in
    its place."""
    program = (
        tmp_path
        / "agents/claude-code/2.1.332/node_modules/@anthropic-ai/claude-code-linux-x64/claude"
    )
    program.parent.mkdir(parents=True)
    program.write_text(CLAUDE)
    program.chmod(0o755)
    monkeypatch.setenv("VF_AGENTS", str(tmp_path / "agents"))
    call = vf.ToolCall("toolu_1", "Bash", '{"command":"printf 42 > answer.txt; cat answer.txt"}')
    output = only(
        run(
            command=None,
            agent="claude-code",
            agent_args=["--tools", "Bash"],
            files={},
            replies=[call, "ok"],
        )
    )
    assert (output.reward, output["agent"]["log"], output["agent"]["version"]) == (
        1.0,
        "end_turn ok\n",
        "2.1.332",
    )
    assert (output["agent"]["roles"], output["agent"]["rewrites"]) == (["main", "main"], 0)
    first, second = output["trajectory"]
    assert [message["role"] for message in second["prompt"]] == [
        "system",
        "user",
        "assistant",
        "tool",
        "system",
    ]
    assert second["prompt"][:3] == [*first["prompt"], *first["completion"]], (
        "the arguments as sampled"
    )


# --- limits and failures: one sentence on that rollout --------------------------------------------


def test_an_agent_that_dies_is_quoted_and_keeps_its_turns():
    script = CLIENT + "chat([user('x')])\nprint('about to fail')\nraise ValueError('no such luck')"
    results = run(script, ["hello"])
    message = failure(results)
    assert message.startswith(
        "AgentFailure: the agent 'python3 agent.py' ended with exit code 1; its log ends with: "
    )
    assert message.endswith("raise ValueError('no such luck') | ValueError: no such luck"), (
        "no line of marks alone"
    )
    assert len(only(results)["trajectory"]) == 1
    assert (only(results).reward, only(results).metrics["agent_failed"]) == (0.0, 1.0)
    unscored = only(run(script, ["hello"], score_failures=False))
    assert unscored.error.error == "AgentError"
    assert unscored.reward != unscored.reward  # unknown
    assert unscored.metrics["agent_failed"] == 1.0


def test_an_agent_that_fails_over_an_answer_that_was_cut_is_scored():
    script = CLIENT + "chat([user('x')])\nsys.exit('incomplete')"
    cut = vf.Response(vf.AssistantMessage("hel"), "length")
    output = only(run(script, [cut]))
    assert (output.error, output.is_truncated, output.reward, output["agent"]["exit_code"]) == (
        None,
        True,
        0.0,
        1,
    )
    assert output["agent"]["log"] == "incomplete\n"


def test_an_agent_that_is_killed():
    script = CLIENT + "import signal\nchat([user('x')])\nos.kill(os.getpid(), signal.SIGKILL)"
    message = failure(run(script, ["a"]))
    assert (
        message
        == "AgentFailure: the agent 'python3 agent.py' was ended by signal 9; it wrote nothing"
    )


INSIDE = """
parent = os.getppid()
def report(text):
    with open(f"/proc/{parent}/fd/1", "w") as file:
        file.write(text)
"""
KILL = "\nimport signal, time\nos.kill(parent, signal.SIGKILL)\ntime.sleep(60)"
ENDS = {
    "its supervisor is killed": KILL,
    "the report is forged: not started": '\nreport(\'{"failed": "no such file"}\')' + KILL,
    "the report is forged: empty": "\nreport('{}')" + KILL,
    "the report is forged: a list": "\nreport('[1]')" + KILL,
    "the report is forged: a text": '\nreport(\'{"exit_code": "x", "left": []}\')' + KILL,
}


@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
def test_what_the_model_does_to_the_process_that_runs_its_agent_is_scored(end):
    script = CLIENT + INSIDE + "open('answer.txt', 'w').write('41')\nchat([user('x')])" + end
    output = only(run(script, ["a"]))
    assert (output.error.error, output.reward) == ("AgentFailure", 0.0)
    assert output.metrics["agent_failed"] == 1.0
    assert output["files"] == {"answer.txt": "41"}

    off = only(run(script, ["a"], score_failures=False))  # negative control
    assert (off.error.error, off.reward != off.reward) == ("AgentError", True)


def test_a_request_that_is_refused_after_the_first_answer_is_scored():
    replies = ["a", vf.ModelRefused("tools[0] has no name", status=400)]
    script = CLIENT + "chat([user('x')])\nchat([user('y')])"
    message = failure(results := run(script, ScriptedClient(replies)))
    assert message == (
        "AgentFailure: a request of the agent 'python3 agent.py' was refused: tools[0] has no name"
    )
    assert only(results).reward == 0.0
    off = run(script, ScriptedClient(replies), score_failures=False)
    assert failure(off).startswith("ModelRefused")  # negative control
    assert only(off).reward != only(off).reward


def test_an_agent_that_is_ended_before_its_model_has_answered_is_not_scored():
    output = only(run(CLIENT + INSIDE + KILL, ["a"]))
    assert (output.error.error, output.reward != output.reward) == ("AgentError", True)


def test_an_agent_that_does_not_start():
    message = failure(run(command=["no-such-program"]))
    assert message.startswith(
        "AgentError: the agent 'no-such-program' could not be started: FileNotFoundError"
    )
    assert message.endswith("after its first word: ['python3', 'agent.py', '{prompt}']")


def test_a_script_that_is_not_there_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    message = failure(run(command=["python3", "agnt.py"]))
    assert message.startswith(
        "AgentError: the agent 'python3 agnt.py' ended with exit code 2; its log ends with: "
    )
    assert message.endswith(
        f"; agnt.py is no file of the working directory {tmp_path}, so it was not copied"
    )


def test_an_agent_that_never_calls_the_model():
    message = failure(run("print('I know it')"))
    assert (
        message
        == "AgentError: the agent 'python3 agent.py' ended without a model call (its address is in"
        " OPENAI_BASE_URL and ANTHROPIC_BASE_URL); its log ends with: I know it"
    )


def test_an_agent_that_hangs_is_ended():
    started = time.monotonic()
    results = run(
        CLIENT + "chat([user('x')])\nprint('waiting', flush=True)\ntime.sleep(600)",
        ["a"],
        max_idle_seconds=1,
    )
    assert (
        failure(results)
        == "SandboxLimit: the agent 'python3 agent.py' was ended: it neither called the model nor"
        " ended for 1 s (max_idle_seconds)"
    )
    assert only(results)["agent"]["log"] == "waiting\n"
    assert time.monotonic() - started < 15


def test_an_agent_that_floods_is_ended_and_its_log_is_bounded():
    script = CLIENT + "chat([user('x')])\nprint('first words')\nwhile True: print('x' * 1000)"
    results = run(script, ["a"], max_output_mb=0.5, max_log_kb=2)
    assert (
        failure(results)
        == "SandboxLimit: the agent 'python3 agent.py' was ended: it wrote more than 524288 bytes"
        " (max_output_mb)"
    )
    log = only(results)["agent"]["log"]
    assert log.startswith("first words")
    assert "bytes left out]" in log
    assert len(log) < 2200


def test_an_agent_that_uses_too_much_memory():
    results = run(
        CLIENT + "chat([user('x')])\nb = b'x' * 2**30\ntime.sleep(20)", ["a"], memory_gb=0.25
    )
    assert (
        failure(results)
        == "SandboxLimit: the agent 'python3 agent.py' was ended: its sandbox reached the limit of"
        " memory (memory_gb)"
    )


def test_a_dialect_that_is_not_offered_is_named():
    message = failure(run(dialect="responses"))
    assert "exit code 1" in message
    assert (
        "the dialect 'chat', which this environment does not offer (dialect='responses')" in message
    )


def test_a_path_that_is_not_offered_is_named():
    message = failure(run(CLIENT + "call('embeddings', {'input': 'x'})"))
    assert (
        message.count(
            "POST /v1/embeddings, which is not offered; offered are chat/completions, responses"
        )
        == 1
    )


def test_a_request_that_cannot_be_read_is_named():
    message = failure(run(CLIENT + "call('chat/completions', {'model': 'm', 'messages': 'hi'})"))
    assert "a request to /v1/chat/completions cannot be read: messages" in message


def test_more_turns_than_allowed_end_the_rollout_and_the_last_answer_is_used():
    results = run(replies=[CALL] * 5, max_turns=2)
    output = only(results)
    assert (output.stop_condition, output.error, len(output["trajectory"])) == (
        "max_turns_reached",
        None,
        2,
    )
    assert output.reward == 1.0  # the tool of the last turn has run


def test_a_rollout_with_as_many_turns_as_allowed_ends_by_itself():
    assert only(run(max_turns=2)).stop_condition == "agent_ended"


def test_a_time_limit_of_the_task_is_not_an_error():
    output = only(run(CLIENT + "chat([user('x')])\ntime.sleep(600)", ["a"], timeout_seconds=1.5))
    assert (output.stop_condition, output.error) == ("timeout_reached", None)


def test_a_failure_of_the_model_reaches_the_agent_and_is_the_rollouts_error():
    client = ScriptedClient("x", errors={0: vf.ModelUnavailable("it is down", status=503)})
    results = run(replies=client, options={"max_retries": 0})
    assert failure(results) == "ModelUnavailable: it is down"


def test_a_daemon_is_named_and_ended():
    nap = f"86400.{time.time_ns() % 10**9}"
    script = (
        CLIENT + "import subprocess\nchat([user('x')])\nsubprocess.Popen(['setsid', 'sleep',"
        f" '{nap}'])\ntime.sleep(0.5)"
    )
    output = only(run(script, ["a"]))
    assert output.error is None
    assert output["agent"]["left"] == ["sleep"]
    deadline = time.monotonic() + 10  # a killed process is listed until the kernel has ended it
    while nap in _processes() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert nap not in _processes()


def test_a_file_that_is_too_large_is_left_out_by_name():
    script = (
        CLIENT + "open('big.txt', 'w').write('x' * 2_000_000)\nopen('b.txt',"
        " 'wb').write(b'\\xff')\nchat([user('x')])"
    )
    output = only(run(script, ["a"]))
    assert output["files"].keys() == {"b.txt"}
    assert output["agent"]["notes"] == [
        "big.txt was not collected: 2000000 bytes are more than max_file_mb"
    ]


@pytest.mark.parametrize("limit", ["MAX_COLLECTED", "MAX_COLLECTED_BYTES"])
def test_the_collected_files_are_bounded_together(monkeypatch, limit):
    monkeypatch.setattr(process, limit, {"MAX_COLLECTED": 2}.get(limit, 1))
    script = (
        CLIENT + "for name in 'abcd':\n    open(f'{name}.txt', 'w').write('x' * 400_000)\n"
        "chat([user('x')])"
    )
    output = only(run(script, ["a"]))
    assert output["files"].keys() == {"a.txt", "b.txt"}
    (note,) = output["agent"]["notes"]
    assert note.startswith("c.txt and what follows it, 2 files, were not collected: at most ")


def test_negative_control_all_of_them_are_within_the_limit_of_each():
    script = (
        CLIENT + "for name in 'abcd':\n    open(f'{name}.txt', 'w').write('x' * 400_000)\n"
        "chat([user('x')])"
    )
    assert len(only(run(script, ["a"]))["files"]) == 4


# --- a limit on what is spent ---------------------------------------------------------------------

SPENDERS = {
    "max_tokens=0": "max_tokens is '0'; it must be a whole number, at least 1",
    "max_tokens=-90_000_000": "max_tokens is '-90000000'; it must be a whole number",
    "max_tokens=True": "max_tokens is 'True'; it must be a whole number",
    "audio": "neither text nor an image, whose cost has no bound here",
    "long": "more than is left of the run's limit",
}


@pytest.mark.parametrize("kind", SPENDERS)
def test_a_request_of_an_agent_that_cannot_be_bounded_costs_its_rollout_alone(kind):
    """The last agent sends it when the others are done, whose rollouts stay."""
    content = {
        "audio": [{"type": "input_audio", "input_audio": {"data": "AA", "format": "wav"}}],
        "long": "x" * 300_000,
    }.get(kind, "x")
    more = f", {kind}" if "=" in kind else ""
    script = (
        CLIENT + "if sys.argv[1].endswith('   '):\n    chat([user(sys.argv[1])])\n"
        f"    chat([user({content!r})]{more})\nelse:\n    chat([user(sys.argv[1])])"
    )
    counted = vf.Response(vf.AssistantMessage("ok"), usage=vf.Usage(40, 2))
    with FakeServer(lambda request: counted) as server:
        client = vf.as_client(vf.ClientConfig(api_base_url=server.url))
        results = env_of(script, rows=4).evaluate(
            client, "m", max_total_tokens=200_000, max_tokens=20, max_concurrent=1
        )
    *ended_well, last = results.outputs
    assert [output.error for output in ended_well] == [None] * 3
    assert SPENDERS[kind] in f"{last.error.message}; {last['agent']['notes']}"


# --- roles and sampling ---------------------------------------------------------------------------

SIDE = WRITER.replace("while True:", "chat([user('Give this a title.')])\nwhile True:", 1)


def test_a_call_without_tools_before_the_first_turn_is_recorded_and_not_trained():
    results = run(SIDE, ["a title", CALL, "done"], options={"keep_states": True})
    output, (state,) = only(results), results.states
    assert output["agent"]["roles"] == ["side", "main", "main"]
    assert output.metrics["side_calls"] == 1
    assert [step["extras"]["is_trained"] for step in state["trajectory"]] == [False, True, True]
    assert [message["role"] for message in output.completion] == ["assistant", "tool", "assistant"]


@pytest.mark.parametrize(("roles", "count"), [(("main",), 2), (("main", "side"), 3)])
def test_which_roles_are_trained_is_a_setting(roles, count):
    client = ScriptedClient(["a title", CALL, "done"], tokens=True)
    (state,) = run(SIDE, client, options={"keep_states": True}, trained_roles=roles).states
    assert len(state.rollout().turns) == count


def test_side_calls_do_not_count_as_turns():
    output = only(run(SIDE, ["a title", CALL, "done"], max_turns=2))
    assert (output.stop_condition, output.reward) == ("agent_ended", 1.0)


def test_the_runs_sampling_arguments_win_and_the_smaller_limit_of_tokens_counts():
    script = CLIENT + "chat([user('x')], temperature=0.9, max_tokens=100, top_p=0.5, logit_bias={})"
    client = ScriptedClient("ok")
    run(
        script, client, options={"sampling_args": {"temperature": 0.1, "max_completion_tokens": 50}}
    )
    sent = client.requests[0].sampling_args
    assert {
        name: sent.get(name)
        for name in ("temperature", "top_p", "max_completion_tokens", "max_tokens")
    } == {"temperature": 0.1, "top_p": 0.5, "max_completion_tokens": 50, "max_tokens": None}


# --- frameworks in this process -------------------------------------------------------------------


async def asks_twice(state):
    async with (
        vf.model_gateway(state) as url,
        openai.AsyncOpenAI(base_url=url, api_key="unused", max_retries=0) as client,
    ):
        first = await client.chat.completions.create(
            model="any", messages=[{"role": "user", "content": "Hi."}]
        )
        said = {"role": "assistant", "content": first.choices[0].message.content}
        more = [{"role": "user", "content": "Hi."}, said, {"role": "user", "content": "And?"}]
        second = await client.chat.completions.create(model="any", messages=more)
        state["told"] = second.choices[0].message.content


@pytest.mark.parametrize("first", [True, False])
def test_a_first_prompt_that_does_not_fit_measures_nothing(first):
    """Not a reward of 0: the model was never asked. A later prompt that does not fit ends it."""

    def short_of_room(request):
        if first or len(request.prompt) > 1:
            raise vf.OverlongPromptError("the context is 8 tokens")
        return "one"

    env = vf.AgentEnv(agent=asks_twice, dataset=[ROW], rubric=vf.Rubric([lambda state: 0.0]))
    (output,) = env.evaluate(ScriptedClient(short_of_room), "m", num_examples=1).outputs
    if first:
        assert math.isnan(output.reward)
        assert "the first prompt of the agent 'asks_twice' is too long" in output.error["message"]
    else:
        assert (output.reward, output.error) == (0.0, None)
        assert output.stop_condition == "prompt_too_long"


async def rewrites(state):
    async with (
        vf.model_gateway(state) as url,
        openai.AsyncOpenAI(base_url=url, api_key="unused") as client,
    ):

        async def ask(*texts):
            roles = ("user", "assistant", "user")
            messages = [
                {"role": role, "content": text} for role, text in zip(roles, texts, strict=False)
            ]
            await client.chat.completions.create(model="policy", messages=messages)

        await ask("Work.")
        await ask("Work, shortened.", "I did something.", "3 files were seen.")


def test_what_an_agent_shows_after_it_replaced_its_history_is_in_the_conversation():
    env = vf.AgentEnv(agent=rewrites, dataset=[ROW])
    results = env.evaluate(ScriptedClient(["first", "second"]), "m", num_examples=1)
    assert [message.content for message in results["completions"][0]] == [
        "first",
        "3 files were seen.",
        "second",
    ]


async def drops_a_reply(state):
    async with (
        vf.model_gateway(state) as url,
        openai.AsyncOpenAI(base_url=url, api_key="unused") as client,
    ):
        messages = [{"role": "user", "content": "Work."}]

        async def ask():
            answer = await client.chat.completions.create(
                model="policy", messages=messages, tools=[RUN]
            )
            return answer.choices[0].message.model_dump(exclude_none=True)

        messages += [await ask(), {"role": "tool", "tool_call_id": "c1", "content": "ok"}]
        await ask()  # an answer without a call, which the agent does not take
        messages.append({"role": "user", "content": "Call a tool."})
        await ask()


RUN = {
    "type": "function",
    "function": {"name": "run", "parameters": {"type": "object", "properties": {}}},
}


def test_an_agent_that_drops_a_reply_shows_each_tool_message_once_and_rewrote_its_history():
    env = vf.AgentEnv(agent=drops_a_reply, dataset=[ROW])
    replies = [vf.ToolCall("c1", "run", {}), "Done.", "Done again."]
    results = env.evaluate(ScriptedClient(replies), "m", num_examples=1)
    shown = [(m.role, m.get("tool_call_id") or m.content) for m in results["completions"][0]]
    assert shown == [
        ("assistant", None),
        ("tool", "c1"),
        ("assistant", "Done."),
        ("user", "Call a tool."),
        ("assistant", "Done again."),
    ]
    assert results["metrics"]["history_rewrites"] == [1.0]


def test_a_framework_in_this_process_is_served_over_loopback():
    env = vf.AgentEnv(
        agent=asks_twice,
        dataset=[ROW],
        rubric=vf.Rubric(funcs=[lambda state: state["told"] == "two"]),
    )
    output = only(env.evaluate(ScriptedClient(["one", "two"]), "m", state_columns=["told"]))
    assert (output.reward, output.metrics["num_turns"], output["told"]) == (1.0, 2.0, "two")


def test_a_subclass_may_run_the_agent_itself():
    class OwnAgentEnv(vf.AgentEnv):
        async def run_agent(self, state):
            await asks_twice(state)

    output = only(
        OwnAgentEnv(dataset=[ROW]).evaluate(
            ScriptedClient(["one", "two"]), "m", score_rollouts=False
        )
    )
    assert output.stop_condition == "agent_ended"


def test_what_the_framework_raises_is_the_rollouts_error():
    async def fails(state):
        raise KeyError("not there")

    env = vf.AgentEnv(agent=fails, dataset=[ROW])
    assert (
        failure(env.evaluate(ScriptedClient("x"), "m"))
        == "EnvironmentFault: the agent raised KeyError: 'not there'"
    )


def test_a_rollout_of_another_environment_has_no_gateway():
    async def use():
        async with vf.model_gateway(vf.State()):
            pass

    with pytest.raises(vf.ConfigError, match="this rollout has no agent"):
        asyncio.run(use())


# --- many -----------------------------------------------------------------------------------------


def test_many_agents_at_once_leave_nothing_and_keep_apart():
    def reply(request):
        text = request.prompt[1]["content"]
        if request.prompt[-1]["role"] == "tool":
            return "done"
        return vf.ToolCall("c", "write", {"text": f"{len(text)}"})

    mark = f"{time.time_ns()}"  # in the arguments of each process
    options = {"max_concurrent": 16}
    results = run(
        replies=ScriptedClient(reply), rows=16, row=ROW | {"question": mark}, options=options
    )
    files = [output["files"]["answer.txt"] for output in results.outputs]
    assert files == [str(len(mark) + i) for i in range(16)]
    assert mark not in _processes()


KILLED = """
import verifiers as vf
from support.agents import CLIENT
from verifiers.testing import ScriptedClient
script = CLIENT + "chat([user('x')])\\nimport subprocess\\nsubprocess.Popen(['setsid', 'sleep', sys.argv[1]])\\n"
script += "time.sleep(600)"
rows = [{"question": str(i)} for i in range(4)]
env = vf.AgentEnv(command=["python3", "agent.py", "MARK"], files={"agent.py": script}, dataset=rows)
def reply(request):
    print("called", flush=True)
    return "ok"
env.evaluate(ScriptedClient(reply), "m", max_concurrent=4)
"""


def test_when_the_run_is_killed_no_agent_is_left():
    needs_sandbox()
    mark = f"86400.{time.time_ns() % 10**9}"
    with subprocess.Popen(
        [sys.executable, "-c", KILLED.replace("MARK", mark)],
        stdout=subprocess.PIPE,
        text=True,
        cwd="tests",
    ) as child:
        for _ in range(4):
            assert child.stdout.readline() == "called\n"
        time.sleep(0.3)
        assert mark in _processes()
        child.kill()
    deadline = time.monotonic() + 5
    while mark in _processes() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert mark not in _processes()


RESUMED = """
import sys
import verifiers as vf
from support.agents import WRITER
from verifiers.testing import ScriptedClient

mark, path, waits = sys.argv[1:]
rows = [{"question": f"{mark} {n}", "answer": "42"} for n in range(6)]
env = vf.AgentEnv(command=["python3", "agent.py", "{prompt}"], files={"agent.py": WRITER}, collect=["*.txt"],
                  dataset=rows, rubric=vf.Rubric(funcs=[lambda state: float("answer.txt" in state["files"])]))

async def reply(request):
    import asyncio
    print("asked", flush=True)
    if waits == "waits" and request.prompt[1]["content"][-1] in "345":
        await asyncio.sleep(600)
    return "done" if request.prompt[-1]["role"] == "tool" else vf.ToolCall("c", "write", {"text": "42"})

results = env.evaluate(ScriptedClient(reply), "m", max_concurrent=6, results_path=path, on_progress=lambda outputs, _:
                       [print("stored", output.example_id, flush=True) for output in outputs])
print("done", len(results.outputs), results["rewards"], len(set(o.example_id for o in results.outputs)), flush=True)
"""


def test_a_run_that_is_killed_resumes_keeps_its_finished_rollouts_and_leaves_no_agent(tmp_path):
    needs_sandbox()
    mark = f"{time.time_ns()}"

    def child(waits):
        words = [sys.executable, "-u", "-c", RESUMED, mark, str(tmp_path / "run"), waits]
        return subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd="tests")

    with child("waits") as first:
        lines = []
        while sum(line.startswith("stored") for line in lines) < 3 or lines.count("asked\n") < 9:
            lines.append(first.stdout.readline())
            assert lines[-1], "it ended before it was killed"
        assert mark in _processes().replace(f"{mark} {tmp_path}", "")
        first.kill()
    with child("goes") as second:
        said = second.stdout.read().splitlines()
    assert said.count("asked") == 6, (
        "three rollouts of two calls; those that were stored are not played again"
    )
    assert said[-1] == f"done 6 {[1.0] * 6} 6"
    assert mark not in _processes()


def _processes():
    return subprocess.run(["ps", "-ewwo", "args"], capture_output=True, text=True).stdout


# --- parameters -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parameters", "match"),
    [
        ({}, "needs agent= "),
        ({"agent": "codex", "command": ["x"]}, "and not both"),
        ({"command": "python3 agent.py"}, "lists of texts"),
        ({"command": ["x"], "dialect": "gemini"}, "dialect is 'gemini'; it must be one of chat"),
        ({"command": ["x"], "history": "none"}, "history is 'none'"),
        ({"command": ["x"], "trained_roles": ["side", "chief"]}, "trained_roles has 'chief'"),
        ({"command": ["x"], "files": {"a": 3}}, "files maps paths to text"),
    ],
)
def test_parameters_that_cannot_be(parameters, match):
    with pytest.raises(vf.ConfigError, match=match):
        vf.AgentEnv(dataset=[ROW], **parameters)


def test_an_agent_is_its_identity():
    def described(**parameters):
        return json.dumps(env_of(sandbox="bubblewrap", **parameters).identity(), default=str)

    assert described() == described()
    assert described() == described(keep_workdirs="elsewhere")
    for changed in (
        {"files": {"agent.py": "pass"}},
        {"command": ["python3", "other.py"]},
        {"tools": []},
    ):
        assert described() != described(**changed)


def test_sub_agents_in_parallel_are_a_sample_each():
    async def agent(state):
        async def ask(*messages):
            roles = ("system", "user", "assistant", "user")
            prompt = [{"role": r, "content": t} for r, t in zip(roles, messages, strict=False)]
            answer = await client.chat.completions.create(
                model="policy", messages=prompt, tools=[tool], timeout=30
            )
            return answer.choices[0].message.content

        async def delegate(number):
            first = await ask("You help.", f"part {number}")
            return await ask("You help.", f"part {number}", first, "go on")

        function = {"name": "t", "description": "", "parameters": {"type": "object"}}
        tool = {"type": "function", "function": function}
        async with (
            vf.model_gateway(state) as url,
            openai.AsyncOpenAI(base_url=url, api_key="unused") as client,
        ):
            first = await ask("You lead.", "begin")
            await asyncio.gather(*map(delegate, range(3)))
            await ask("You lead.", "begin", first, "end")

    numbers = itertools.count()
    env = vf.AgentEnv(agent=agent, dataset=[{"question": "q"}])
    client = ScriptedClient(lambda request: f"reply {next(numbers)}", tokens=True)
    (output,) = env.evaluate(client, "m", state_columns=["trajectory"]).outputs
    assert output["agent"]["roles"] == ["main", *["subagent"] * 6, "main"]
    assert [len(branch.turns) for branch in output["trajectory"].branches()] == [2, 2, 2, 2]
