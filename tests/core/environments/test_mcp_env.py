"""``MCPEnv`` over a real stdio server: started once, on first use; restarted when it dies; sees
only what it may."""

import asyncio
import contextlib
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path

import pytest

from support.threads import no_new_thread
from verifiers.environments.integrations import extras, mcp_messages, mcp_servers

if not extras.MCP.is_installed:
    pytest.skip("mcp is not installed (the extra 'mcp')", allow_module_level=True)

from verifiers.environments.integrations.mcp import MCPEnv
from verifiers.environments.tool import ToolEnv
from verifiers.errors import ConfigError, InfraError, MissingKeyError
from verifiers.rubrics import Rubric
from verifiers.testing import ScriptedClient
from verifiers.types import ToolCall

SUPPORT = Path(__file__).parents[2] / "support"
SERVER = str(SUPPORT / "plain_mcp_server.py")  # for servers' lives: it starts at once
ROW = {"question": "What is 2 + 3?", "answer": "5"}


def one(completion) -> float:
    return 1.0


def described(name="math", *args, **more):
    return {"name": name, "command": sys.executable, "args": [SERVER, *args], **more}


@contextlib.contextmanager
def mcp_env(*servers, **parameters):
    parameters.setdefault("dataset", [ROW])
    parameters.setdefault("rubric", Rubric([one]))
    with MCPEnv(mcp_servers=list(servers) or [described()], **parameters) as env:
        yield env


@pytest.fixture(scope="module")
def made_with_the_library():
    """One environment over a server made with the protocol's own library, which takes a second to
    start."""

    def double(n: int) -> int:
        """Double a number."""
        return 2 * n

    server = {
        "name": "library",
        "command": sys.executable,
        "args": [str(SUPPORT / "mcp_server.py")],
    }
    with mcp_env(server, tools=[double]) as env:
        yield env


def call(name, id="c1", **arguments):
    return ToolCall(id, name, arguments)


def run(env, *turns, **options):
    return env.evaluate(ScriptedClient([*([turn] for turn in turns), "Done."]), "m", **options)


def answers(results):
    return [m["content"] for m in results["completions"][0] if m["role"] == "tool"]


def is_running(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def gone(pid, limit_s=5.0):
    deadline = time.monotonic() + limit_s
    while is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not is_running(pid)


# --- tools


def test_the_model_calls_the_tools_of_the_servers_beside_the_environments_own(
    made_with_the_library,
):
    client = ScriptedClient([[call("add", a=2, b=3)], [call("double", n=5)], "It is 10."])
    results = made_with_the_library.evaluate(client, "m")
    assert answers(results) == ["5", "10"]
    assert results["rewards"] == [1.0]
    shown = {tool["function"]["name"]: tool["function"] for tool in client.requests[0].tools}
    assert list(shown) == ["double", "add", "split", "fail", "picture"]
    assert shown["add"]["description"] == "Add two numbers."
    assert shown["add"]["parameters"]["required"] == ["a", "b"]
    assert {name: values[0] for name, values in results["metrics"].items()}["add_calls"] == 1.0


def test_what_a_tool_reports_as_an_error_is_told_to_the_model_and_scored(made_with_the_library):
    results = run(
        made_with_the_library, call("fail", why="no luck"), call("add", a="x", b=1), call("nothing")
    )
    failed, refused, unknown = answers(results)
    assert failed.startswith("Error: ")
    assert "no luck" in failed
    assert refused.startswith("Error: ")
    assert "there is no tool 'nothing'" in unknown
    assert results["errors"] == [None]
    assert results["rewards"] == [1.0]


def test_the_authors_formatter_words_the_errors(made_with_the_library, monkeypatch):
    monkeypatch.setattr(made_with_the_library, "error_formatter", lambda error: "failed")
    assert answers(run(made_with_the_library, call("fail", why="x"))) == ["failed"]


def test_images_and_structured_results_reach_the_model_as_content(made_with_the_library):
    (part,), split = answers(run(made_with_the_library, call("picture"), call("split", number=42)))
    assert part["type"] == "image_url"
    assert part["image_url"]["url"].startswith("data:image/png;base64,iVBOR")
    assert json.loads(split) == {"tens": 4, "ones": 2}


# --- the servers' life


def test_constructing_starts_nothing(tmp_path):
    with contextlib.ExitStack() as stack:
        with no_new_thread():
            env = stack.enter_context(
                mcp_env(described("math", "--starts", str(tmp_path / "starts")))
            )
        assert not (tmp_path / "starts").exists()
        assert env.tool_defs == []


def test_one_set_serves_all_rollouts_and_all_runs_and_ends_with_the_environment(
    tmp_path, shadowed_modules
):
    starts = tmp_path / "starts"
    rows = [{"question": str(i), "answer": ""} for i in range(4)]
    with (
        no_new_thread(5.0),
        mcp_env(described("math", "--starts", str(starts)), dataset=rows) as env,
    ):
        for _ in range(2):  # each blocking call has an event loop of its own
            client = ScriptedClient(
                lambda request: "Done." if len(request.prompt) > 1 else [call("add", a=1, b=1)]
            )
            results = env.evaluate(client, "m", rollouts_per_example=2)
            assert results["errors"] == [None] * 8
        (pid,) = map(int, starts.read_text().split())
        assert is_running(pid)
    assert gone(pid)


@pytest.mark.skipif(sys.platform != "linux", reason="a reaper needs a subreaper")
@pytest.mark.parametrize("end", ["closed", "crash", "deaf"])
def test_a_daemon_of_a_server_ends_with_it(end, monkeypatch):
    monkeypatch.setattr(mcp_servers, "EXIT_LIMIT_S", 0.5)
    with mcp_env() as env:
        (daemon,) = answers(run(env, call("daemon")))
        assert is_running(int(daemon))
        if end != "closed":
            run(env, call(end))
    assert gone(int(daemon))


@pytest.mark.skipif(sys.platform != "linux", reason="a reaper needs a subreaper")
def test_without_a_reaper_a_daemon_outlives_its_server(monkeypatch):
    """Negative control."""
    monkeypatch.setattr(mcp_servers, "_reaped", lambda command, environment: command)
    with mcp_env() as env:
        (daemon,) = answers(run(env, call("daemon")))
    assert is_running(int(daemon))
    os.kill(int(daemon), signal.SIGKILL)


async def test_it_serves_within_a_running_loop_too():
    with mcp_env() as env:
        results = await env.a_evaluate(ScriptedClient([[call("add", a=2, b=2)], "4"]), "m")
        assert answers(results) == ["4"]
        await env.aclose()


def test_a_server_that_died_is_started_again(tmp_path):
    starts = tmp_path / "starts"
    with mcp_env(described("math", "--starts", str(starts))) as env:
        (before,) = answers(run(env, call("process_id")))
        os.kill(int(before), signal.SIGKILL)
        results = run(env, call("process_id"))
        (after,) = answers(results)
        assert results["errors"] == [None]
    assert after != before
    assert starts.read_text().split() == [before, after]


def test_a_server_that_dies_again_ends_the_rollout_and_its_reward_is_unknown(tmp_path):
    starts = tmp_path / "starts"
    with mcp_env(described("math", "--starts", str(starts))) as env:
        results = run(env, call("crash"))
        (error,) = results["errors"]
        assert error["error"] == InfraError.__name__
        assert "'math' died during the call of 'crash'" in error["message"]
        assert "the reactor is leaking" in error["message"]
        assert error["retryable"]
        assert math.isnan(results["rewards"][0])
        assert len(starts.read_text().split()) == 2
        # the next rollout is not its victim
        assert answers(run(env, call("add", a=1, b=2))) == ["3"]


@pytest.mark.parametrize("limit", [2**20, 2**24])
def test_a_message_without_end_is_left_at_the_limit_and_ends_its_rollout_alone(monkeypatch, limit):
    """The second limit is the negative control: so much is held."""
    monkeypatch.setattr(mcp_messages, "MAX_MESSAGE_BYTES", limit)

    def flood(env):
        tracemalloc.start()
        try:
            (error,) = run(env, call("flood"))["errors"]
            return tracemalloc.get_traced_memory()[1], error
        finally:
            tracemalloc.stop()

    with mcp_env() as env:
        assert answers(run(env, call("add", a=1, b=2))) == ["3"]
        peak, error = flood(env)
        if peak >= 10 * 2**20:  # threads of other tests allocate too, and not twice at this time
            peak = min(peak, flood(env)[0])
        assert "'flood', and again after a restart" in error["message"]
        assert f"it sent a message longer than {limit >> 20} MiB" in error["message"]
        assert (peak < 10 * 2**20) is (limit == 2**20)
        assert answers(run(env, call("add", a=1, b=2))) == ["3"]


def test_a_call_that_outlasts_the_rollout_leaves_the_server_usable():
    with mcp_env(timeout_seconds=1.0) as env:
        run(env, call("add", a=1, b=2))
        results = run(env, call("slow", seconds=1.3))
        assert results["stop_conditions"] == ["timeout_reached"]
        env.timeout_seconds = 20.0
        assert answers(run(env, call("add", a=1, b=2))) == ["3"]


# --- what a server sees


def test_a_server_sees_only_the_variables_it_was_given(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    monkeypatch.setenv("PASSED_ON", "yes")
    with mcp_env(described(env={"GIVEN": "value"})) as env:
        seen = json.loads(answers(run(env, call("environment")))[0])
    assert seen["GIVEN"] == "value"
    assert "sk-secret" not in seen.values()
    assert "PASSED_ON" not in seen
    child = subprocess.run(  # without the list, it would see the key
        [sys.executable, "-c", "import os; print(os.environ['OPENAI_API_KEY'])"],
        capture_output=True,
        text=True,
    )
    assert child.stdout.strip() == "sk-secret"
    with mcp_env(described(env=["PASSED_ON"])) as env:
        assert json.loads(answers(run(env, call("environment")))[0])["PASSED_ON"] == "yes"


# --- settings that cannot work


def test_two_tools_of_one_name_are_refused_before_the_model_is_asked():
    def add(a: int) -> int:
        """Add."""
        return a

    client = ScriptedClient(["never"])
    with (
        mcp_env(tools=[add]) as env,
        pytest.raises(
            ConfigError, match="the environment and the MCP server 'math' both have a tool 'add'"
        ),
    ):
        env.evaluate(client, "m")
    assert client.requests == []


def test_names_that_no_provider_takes_or_two_servers_have_are_changed_and_called_as_they_are():
    with mcp_env(described("one"), described("two", "--also", "a.b")) as env:
        client = ScriptedClient([[call("two_add", a=1, b=2)], [call("a_b")], "Done."])
        results = env.evaluate(client, "m")
        names = {tool["function"]["name"] for tool in client.requests[0].tools}
        assert {"one_add", "two_add", "a_b"} <= names
        assert all(re.fullmatch("[a-zA-Z0-9_-]{1,64}", name) for name in names)
        assert answers(results)[0] == "3"


def test_tools_are_chosen_left_out_and_renamed():
    chosen = described("one", tools=["add"]), described("two", exclude=["add"])
    with mcp_env(*chosen) as env:
        client = ScriptedClient("Done.")
        env.evaluate(client, "m")
        names = {tool["function"]["name"] for tool in client.requests[0].tools}
        assert "add" in names
        assert not names & {"one_add", "two_add"}
    with mcp_env(described(rename={"add": "plus"})) as env:
        assert answers(run(env, call("plus", a=1, b=2))) == ["3"]
    for wrong in ({"tools": ["ad"]}, {"exclude": ["ad"]}, {"rename": {"ad": "x"}}):
        with (
            mcp_env(described(**wrong)) as env,
            pytest.raises(ConfigError, match="has no tool 'ad'"),
        ):
            run(env)


@pytest.mark.parametrize(
    ("server", "said"),
    [
        ({"name": "x", "command": "/no/such/program"}, "'x' .*/no/such/program.* did not start"),
        (
            {
                "name": "x",
                "command": sys.executable,
                "args": ["-c", "raise SystemExit('no licence')"],
            },
            "no licence",
        ),
        (described("x", "--mute"), "no answer within 1 s(.|\n)*I say nothing"),
    ],
)
def test_a_server_that_does_not_start_ends_the_run_with_what_it_said(server, said):
    client = ScriptedClient(["never"])
    with mcp_env(server, start_timeout_s=1.0) as env, pytest.raises(ConfigError, match=said):
        env.evaluate(client, "m")
    assert client.requests == []


@pytest.mark.parametrize(
    ("servers", "said"),
    [
        ([], "at least one server"),
        (
            [{"name": "x", "env": {"KEY": "sk-secret"}}],
            "needs a command; its fields are: name, env$",
        ),
        ([{"name": "x", "command": "y", "arg": []}], "did you mean 'args'"),
        ([{"name": "x", "command": "y", "args": "-v"}], "list of strings"),
        (
            [{"name": "x", "command": "y"}, {"name": "x", "command": "z"}],
            "two MCP servers are named 'x'",
        ),
    ],
)
def test_a_server_that_is_not_described_properly_is_refused_at_construction(servers, said):
    with pytest.raises(ConfigError, match=said):
        MCPEnv(mcp_servers=servers, dataset=[ROW])


def test_a_listed_variable_that_is_not_set_is_named():
    with pytest.raises(MissingKeyError, match="NO_SUCH_VARIABLE"):
        MCPEnv(mcp_servers=[described(env=["NO_SUCH_VARIABLE"])], dataset=[ROW])


def test_servers_may_be_described_by_objects():
    class Described:
        name, command, args, env, description = "math", sys.executable, [SERVER], None, "Sums."

    with mcp_env(Described()) as env:
        assert isinstance(env, ToolEnv)
        assert env.mcp_servers[0].description == "Sums."
        assert "env=" not in repr(env.mcp_servers[0])  # its values may be secrets
        assert answers(run(env, call("add", a=1, b=1))) == ["2"]


def test_environments_left_open_take_their_servers_with_them(tmp_path):
    """A script that never closes its environment ends, and leaves no process behind."""
    script = f"""
import sys; sys.path[:0] = {[str(Path(__file__).parents[2])]!r}
from core.environments.test_mcp_env import MCPEnv, ROW, described, call, ScriptedClient
env = MCPEnv(mcp_servers=[described("math", "--starts", {str(tmp_path / "starts")!r})], dataset=[ROW])
env.evaluate(ScriptedClient([[call("add", a=1, b=1)], "2"]), "m")
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert gone(int((tmp_path / "starts").read_text()))
    assert "Traceback" not in done.stderr


async def test_calls_of_several_loops_share_one_server():
    with mcp_env() as env:
        pids = await asyncio.gather(
            *(asyncio.to_thread(lambda: answers(run(env, call("process_id")))) for _ in range(3))
        )
    assert len({pid for (pid,) in pids}) == 1
