"""``SandboxEnv``: a sandbox for each rollout that calls a tool, closed whatever happens; failures
are text."""

import asyncio
import shutil

import pytest

import verifiers as vf
from verifiers.environments.sandbox_text import command_text, has_failed
from verifiers.sandbox import ExecResult, SandboxSpec
from verifiers.sandbox.backends.unsafe_subprocess import UnsafeSubprocess
from verifiers.testing import ScriptedClient

ROW = {"question": "Do it.", "answer": ""}


class Watched(UnsafeSubprocess):
    """The plain backend, which counts its sandboxes."""

    def __init__(self):
        super().__init__()
        self.opened, self.closed, self.most_open = 0, 0, 0

    async def open(self, spec):
        sandbox = await super().open(spec)
        self.opened += 1
        self.most_open = max(self.most_open, self.opened - self.closed)
        close = sandbox.close

        async def counted():
            await close()
            self.closed += 1

        sandbox.close = counted
        return sandbox


def bash(command, call_id="c1"):
    return vf.ToolCall(call_id, "bash", {"command": command})


def env_of(cls=vf.SandboxEnv, rows=1, **parameters):
    parameters = {"sandbox": "unsafe_subprocess"} | parameters
    return cls(
        dataset=[ROW | {"question": f"{ROW['question']} {i}"} for i in range(rows)], **parameters
    )


def tool_texts(results, rollout=0):
    return [m["content"] for m in results["completions"][rollout] if m["role"] == "tool"]


def run_env(*replies, **parameters):
    return env_of(**parameters).evaluate(ScriptedClient([*replies, "done"]), "m")


# --- the tool -------------------------------------------------------------------------------------


def test_the_model_sees_one_tool_with_one_parameter():
    (tool,) = env_of().tool_defs
    assert tool["function"]["name"] == "bash"
    assert list(tool["parameters"]["properties"]) == ["command"]
    assert "shell command" in tool["description"]


def test_files_stay_between_the_calls_of_a_rollout_and_not_between_rollouts():
    client = ScriptedClient([bash("cat f"), bash("echo kept > f"), bash("cat f"), "done"])
    results = env_of(rows=2, max_turns=5).evaluate(client, "m", max_concurrent=1)
    for rollout in (0, 1):
        missing, written, read = tool_texts(results, rollout)
        assert "No such file" in missing
        assert (written, read) == ("(no output)", "kept")


def test_what_goes_wrong_is_text_and_counted():
    results = run_env(
        bash("echo out; echo err >&2; exit 3"),
        bash("true"),
        vf.ToolCall("c", "bash", {"cmd": "ls"}),
        vf.ToolCall("c", "python", {"code": "1"}),
    )
    failed, fine, wrong, unknown = tool_texts(results)
    assert failed == "out\nstderr:\nerr\n(exit code 3)"
    assert fine == "(no output)"
    assert "'cmd' is not a parameter" in wrong
    assert "there is no tool 'python'" in unknown
    assert results["metrics"]["tool_errors"] == [3.0]
    assert results["metrics"]["bash_calls"] == [3.0]
    assert results["metrics"]["total_tool_calls"] == [4.0]
    assert results["metrics"]["num_turns"] == [5.0]


def test_a_call_that_takes_too_long_is_stopped_and_the_next_one_works():
    slow, after = tool_texts(
        run_env(bash("echo begun; sleep 60"), bash("echo again"), timeout_per_command_seconds=1)
    )
    assert slow.endswith(
        "(stopped after 1 s, the time limit of one call; all of its processes were ended)"
    )
    assert after == "again"


def test_a_long_output_is_cut_and_says_so():
    (text,) = tool_texts(run_env(bash("seq 1 100000"), max_tool_result_chars=1000))
    assert len(text) < 1100
    assert "characters left out" in text
    assert text.startswith("1\n2\n")


def test_time_and_calls_are_measured():
    results = run_env(bash("sleep 0.3"), bash("true"))
    metrics = {name: values[0] for name, values in results["metrics"].items()}
    assert 0.3 <= metrics["sandbox_command_execution_time"] < 30
    assert 0 < metrics["sandbox_ready_wait_time"] < 30
    assert metrics["tool_errors"] == 0


@pytest.mark.parametrize(
    ("result", "text", "failed"),
    [
        (ExecResult(exit_code=0), "(no output)", False),
        (ExecResult(stdout="a\n\n", exit_code=0), "a", False),
        (ExecResult(stderr="w\n", exit_code=0), "stderr:\nw", False),
        (
            ExecResult(exit_code=-9, limit="memory"),
            "(exit code -9)\n(the memory limit was reached)",
            True,
        ),
        (ExecResult(error="not started", exit_code=127), "not started", True),
        (
            ExecResult(stdout="x", truncated=True, limit="output", exit_code=0),
            "x\n(output was cut: …",
            False,
        ),
        (
            ExecResult(limit="killed"),
            "(the process was ended suddenly; all of its processes were ended)",
            True,
        ),
        (ExecResult(timed_out=True, limit="wall"), "(stopped after 7 s, …", True),
    ],
)
def test_texts_of_results(result, text, failed):
    text_of_call = command_text(result, 7)
    assert text_of_call.startswith(text[:-1]) if text.endswith("…") else text_of_call == text
    assert has_failed(result) is failed


# --- one sandbox per rollout, closed whatever happens ---------------------------------------------


def test_a_rollout_that_calls_nothing_opens_nothing():
    backend = Watched()
    env = env_of(rows=4, sandbox=backend)
    env.evaluate(ScriptedClient(["done"]), "m", max_concurrent=1)
    # the first one alone, to find out whether it works
    assert (backend.opened, backend.closed) == (1, 1)
    env.evaluate(ScriptedClient([bash("true"), "done"]), "m", max_concurrent=1)
    assert (backend.opened, backend.closed) == (5, 5)


def test_rollouts_at_once_find_out_together_whether_it_works():
    backend = Watched()
    env_of(rows=8, sandbox=backend).evaluate(ScriptedClient(["done"]), "m", max_concurrent=8)
    assert (backend.opened, backend.closed) == (1, 1)
    broken = Broken(good=0)
    results = env_of(rows=8, sandbox=broken).evaluate(
        ScriptedClient(["x"]), "m", max_concurrent=8, max_retries=0
    )
    assert broken.asked == 1
    assert {type(state["error"]) for state in results["states"]} == {vf.SandboxUnavailable}
    assert {str(state["error"]) for state in results["states"]} == {"no more of them"}


def test_rollouts_at_once_have_sandboxes_of_their_own():
    backend = Watched()

    def reply(request):
        mine = request.prompt[0]["content"].split()[-1]
        return (
            [bash(f"echo {mine} >> f"), bash("sleep 0.2"), bash("cat f")][len(request.prompt) // 2]
            if (len(request.prompt) < 6)
            else "done"
        )

    results = env_of(rows=6, sandbox=backend).evaluate(ScriptedClient(reply), "m", max_concurrent=6)
    assert [tool_texts(results, i)[-1] for i in range(6)] == [str(i) for i in range(6)]
    assert backend.most_open > 1
    assert backend.opened == backend.closed == 6


def test_calls_of_one_message_share_the_sandbox():
    backend = Watched()
    both = [bash("echo one > f; cat f", "a"), bash("echo two", "b")]
    results = run_env(both, sandbox=backend, parallel_tool_calls=True)
    assert sorted(tool_texts(results)) == ["one", "two"]
    assert (backend.opened, backend.closed) == (1, 1)


class Failing(vf.SandboxEnv):
    def env_response(self, messages, state, **_):
        if len(state["trajectory"]) == 2:
            raise ValueError("a bug")
        return super().env_response(messages, state)


def test_a_fault_of_the_environment_closes_the_sandbox():
    backend = Watched()
    results = env_of(Failing, sandbox=backend).evaluate(ScriptedClient([bash("true")]), "m")
    assert "a bug" in str(results["states"][0]["error"])
    assert (backend.opened, backend.closed) == (1, 1)


def test_a_time_out_of_the_rollout_closes_the_sandbox_and_ends_its_processes(tmp_path):
    backend, mark = Watched(), tmp_path / "mark"
    env = env_of(sandbox=backend, timeout_seconds=2)
    results = env.evaluate(ScriptedClient([bash(f"sleep 4; touch {mark}")]), "m")
    assert results["states"][0]["stop_condition"] == "timeout_reached"
    assert (backend.opened, backend.closed) == (1, 1)
    asyncio.run(asyncio.sleep(3))
    assert not mark.exists()


async def test_cancelling_a_run_closes_every_sandbox():
    backend = Watched()
    env = env_of(rows=3, sandbox=backend)
    run = asyncio.ensure_future(
        env.evaluate(ScriptedClient([bash("sleep 60")]), "m", max_concurrent=3)
    )
    async with asyncio.timeout(60):
        while backend.opened < 3:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    await asyncio.sleep(0.2)
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    assert (backend.opened, backend.closed) == (3, 3)


class Opened(vf.SandboxEnv):
    """Negative control: an override without the mark is no clean-up handler."""

    async def close_sandbox(self, state): ...


async def test_without_the_clean_up_the_sandbox_would_stay_open():
    backend = Watched()
    env = env_of(Opened, sandbox=backend)
    results = await env.evaluate(ScriptedClient([bash("true"), "done"]), "m")
    assert (backend.opened, backend.closed) == (1, 0)
    await results["states"][0]["sandbox"].sandbox.close()


def test_the_state_keeps_no_open_sandbox_and_opens_none_after_the_end():
    env = env_of()
    state = env.evaluate(ScriptedClient([bash("true"), "done"]), "m")["states"][0]
    assert state["sandbox"].sandbox is None
    assert state["sandbox"].num_calls == 1
    with pytest.raises(vf.SandboxUnavailable, match="over"):
        asyncio.run(env.get_sandbox(state))


# --- hooks and settings ---------------------------------------------------------------------------


class Collecting(vf.SandboxEnv):
    """Writes a file before the first turn, reads one back before the sandbox closes."""

    async def setup_state(self, state):
        await (await self.get_sandbox(state)).write_file("task.txt", "abc")

    async def post_rollout(self, state):
        state["found"] = await (await self.get_sandbox(state)).read_file("answer.txt")


def test_an_author_writes_files_before_and_reads_them_after():
    client = ScriptedClient([bash("rev task.txt > answer.txt"), "done"])
    results = env_of(Collecting).evaluate(client, "m")
    assert results["states"][0]["found"].strip() == b"cba"


class Different(vf.SandboxEnv):
    async def get_sandbox_spec(self, state):
        return SandboxSpec(env={"ROW": str(state["example_id"])})


class DifferentByItsOlderName(vf.SandboxEnv):
    def get_sandbox_request(self, state):
        return SandboxSpec(env={"ROW": str(state["example_id"])})


@pytest.mark.parametrize("cls", [Different, DifferentByItsOlderName])
def test_a_rollout_may_have_its_own_specification(cls):
    results = env_of(cls, rows=2).evaluate(ScriptedClient(_once("echo row $ROW")), "m")
    assert [tool_texts(results, i) for i in (0, 1)] == [["row 0"], ["row 1"]]


def _once(command):
    return lambda request: "done" if request.prompt[-1]["role"] == "tool" else bash(command)


class Shop(vf.SandboxEnv):
    """A further tool that uses the sandbox."""

    def __init__(self, **parameters):
        super().__init__(**parameters)
        self.add_tool(self.size, args_to_skip=["state"])

    async def size(self, path: str, state) -> str:
        """The size of a file."""
        return (await self.run_code(state, ["wc", "-c", path])).stdout.split()[0]


def test_a_tool_of_ones_own_uses_the_rollouts_sandbox():
    results = run_env(bash("printf 12345 > f"), vf.ToolCall("c", "size", {"path": "f"}), cls=Shop)
    assert tool_texts(results) == ["(no output)", "5"]


def test_settings_become_the_specification():
    env = env_of(
        memory_gb=0.5, timeout_minutes=2, environment_vars={"A": 1}, working_dir="/tmp", cpu_cores=2
    )
    spec = env.sandbox_spec
    assert (spec.memory_mb, spec.wall_s, spec.cpu_s, dict(spec.env)) == (512, 120, 240, {"A": "1"})
    assert (spec.file_mb, spec.working_dir, spec.network) == (512, "/tmp", False)


def test_parameters_of_remote_services_are_accepted_and_noted_once(caplog):
    with caplog.at_level("INFO", logger="verifiers"):
        env = env_of(docker_image="python:3.11-slim", gpu_count=0, team_id=None, max_retries=5)
    assert env.remote_options["docker_image"] == "python:3.11-slim"
    assert [r.getMessage() for r in caplog.records] == [
        "ignored by a local sandbox: docker_image, gpu_count, max_retries, team_id"
    ]
    with pytest.raises(vf.ConfigError, match="memory_gb"):
        env_of(memory_gbs=2)


@pytest.mark.parametrize(
    "wrong",
    [
        {"memory_gb": 0},
        {"timeout_per_command_seconds": -1},
        {"timeout_minutes": "5"},
        {"cpu_cores": True},
    ],
)
def test_a_setting_that_cannot_be_used_is_named(wrong):
    with pytest.raises(vf.ConfigError, match=next(iter(wrong))):
        env_of(**wrong)


def test_an_unknown_sandbox_ends_the_run_before_the_model_is_asked():
    client = ScriptedClient(["done"])
    with pytest.raises(vf.ConfigError, match="bubblewarp"):
        env_of(sandbox="bubblewarp").evaluate(client, "m")
    assert client.requests == []


class Broken(UnsafeSubprocess):
    """Opens ``good`` sandboxes, then none."""

    def __init__(self, good):
        super().__init__()
        self.good, self.asked = good, 0

    async def open(self, spec):
        self.asked += 1
        await asyncio.sleep(0.1)
        if self.good == 0:
            raise vf.SandboxUnavailable("no more of them")
        self.good -= 1
        return await super().open(spec)


def test_a_sandbox_that_does_not_open_is_no_doing_of_the_model():
    results = env_of(rows=2, sandbox=Broken(good=1)).evaluate(
        ScriptedClient(_once("true")), "m", max_concurrent=1, max_retries=0
    )
    assert results["states"][0]["error"] is None
    error = results["states"][1]["error"]
    assert isinstance(error, vf.SandboxUnavailable)
    assert results["rewards"][1] != results["rewards"][1]  # unknown, not 0


class Slow(UnsafeSubprocess):
    async def open(self, spec):
        await asyncio.sleep(60)


def test_a_sandbox_that_takes_too_long_to_open_is_unavailable():
    results = env_of(sandbox=Slow(), max_startup_wait_seconds=0.2).evaluate(
        ScriptedClient(["x"]), "m", max_retries=0
    )
    assert "not open after 0.2 s (max_startup_wait_seconds)" in str(results["states"][0]["error"])


def test_one_environment_serves_several_event_loops():
    env = env_of()
    for _ in range(2):
        assert tool_texts(env.evaluate(ScriptedClient([bash("echo 1"), "done"]), "m")) == ["1"]


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")
def test_in_a_real_sandbox_the_hosts_files_and_variables_are_not_there(monkeypatch, tmp_path):
    monkeypatch.setenv("SECRET_KEY", "hidden")
    (tmp_path / "host").write_text("host")
    command = f"echo key=$SECRET_KEY; ls {tmp_path}; echo mine > f; cat f"
    plain = tool_texts(run_env(bash(command)))[0]
    assert "key=hidden" in plain
    assert "host" in plain
    inside = tool_texts(run_env(bash(command), sandbox="bubblewrap"))[0]
    assert "key=\n" in inside
    assert "mine" in inside
    assert "No such file" in inside
