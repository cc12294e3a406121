"""``MCPEnv`` over Streamable HTTP: real servers of the protocol's own library on loopback, with
sessions and without, and servers that fail in every way that a network has."""

import asyncio
import contextlib
import json
import socket
import threading
import time

import pytest

from verifiers.environments.integrations import extras, mcp_messages

if not extras.MCP.is_installed:
    pytest.skip("mcp is not installed (the extra 'mcp')", allow_module_level=True)

import uvicorn
from mcp.server.mcpserver import MCPServer

from verifiers.environments.integrations.mcp import MCPEnv
from verifiers.errors import ConfigError, MissingKeyError
from verifiers.rubrics import Rubric
from verifiers.testing import ScriptedClient
from verifiers.types import ToolCall

SECRET = "tok-of-the-test-1234"


def constant(completion) -> float:
    return 1.0


class Server:
    """A server in a thread; ``seen`` has the headers of its requests, ``answer`` may replace an
    answer."""

    def __init__(self, is_older=False, port=0, **options):
        library = MCPServer("for-tests")
        self.calls, self.seen = 0, []

        @library.tool()
        def add(a: int, b: int) -> str:
            self.calls += 1
            return str(a + b)

        @library.tool(name="dotted.name")
        def dotted() -> str:
            return "dotted"

        @library.tool()
        def long(size: int) -> str:
            return "x" * size

        self.app = library.streamable_http_app(**options)
        self.is_older, self.answer = is_older, None
        config = uvicorn.Config(self, port=port, log_level="critical", lifespan="on")
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(target=self.server.run, daemon=True)
        self.thread.start()
        while not self.server.started:
            time.sleep(0.01)
        self.port = self.server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}/mcp"

    async def __call__(self, scope, receive, send):
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        self.seen.append((scope["method"], headers))
        answer = self.answer(scope, headers) if self.answer else None
        if self.is_older and headers.get("mcp-protocol-version", "") >= "2026":
            answer = (400, {}, b"Unsupported protocol version")  # what it answered then
        if answer is None:
            return await self.app(scope, receive, send)
        status, more, body = answer
        start = {"type": "http.response.start", "status": status}
        await send(start | {"headers": [(k.encode(), v.encode()) for k, v in more.items()]})
        await send({"type": "http.response.body", "body": body})

    def stop(self):
        self.server.should_exit = self.server.force_exit = True
        self.thread.join()


@contextlib.contextmanager
def serving(**options):
    server = Server(**options)
    try:
        yield server
    finally:
        server.stop()


@contextlib.contextmanager
def mcp_env(*servers, **parameters):
    described = [
        {"name": f"s{n}", "url": server} if isinstance(server, str) else server
        for n, server in enumerate(servers)
    ]
    with MCPEnv(
        mcp_servers=described,
        dataset=[{"question": "2 + 3?", "answer": "5"}],
        rubric=Rubric([constant]),
        **parameters,
    ) as env:
        yield env


ADD = ToolCall("c1", "add", {"a": 2, "b": 3})


def run(env, *calls, **options):
    calls = calls or (ADD,)
    return env.evaluate(ScriptedClient([*([call] for call in calls), "Done."]), "m", **options)


def answers(results):
    return [m["content"] for m in results["completions"][0] if m["role"] == "tool"]


GENERATIONS = {
    "sessions": {"is_older": True},
    "sessions, JSON": {"is_older": True, "json_response": True},
    "stateless": {},
    "stateless, JSON": {"json_response": True},
    "older, stateless": {"is_older": True, "stateless_http": True},
}


@pytest.mark.parametrize("options", GENERATIONS.values(), ids=GENERATIONS)
def test_both_generations_are_spoken(options):
    with serving(**options) as server, mcp_env(server.url) as env:
        assert answers(run(env, ADD, ToolCall("c2", "dotted_name", {}))) == ["5", "dotted"]
        assert answers(run(env)) == ["5"]
        sessions = {headers.get("mcp-session-id") for _, headers in server.seen} - {None}
        has_sessions = options.get("is_older") and not options.get("stateless_http")
        assert len(sessions) == int(bool(has_sessions))
    assert not has_sessions or server.seen[-1][0] == "DELETE"


def test_tools_of_servers_of_both_kinds_are_chosen_renamed_and_told_apart():
    with serving() as first, serving(is_older=True) as second:
        servers = [
            {"name": "a", "url": first.url, "exclude": ["long"], "rename": {"dotted.name": "dot"}},
            {"name": "b", "url": second.url, "tools": ["add"]},
        ]
        with mcp_env(*servers) as env:
            results = run(env, ToolCall("c1", "a_add", {"a": 1, "b": 1}), ToolCall("c2", "dot", {}))
            assert answers(results) == ["2", "dotted"]
            assert (first.calls, second.calls) == (1, 0)


def test_keys_come_from_variables_and_are_never_stored(monkeypatch, tmp_path):
    monkeypatch.setenv("MY_KEY", SECRET)
    monkeypatch.setenv("TENANT", "tenant-of-the-test-7")
    described = {"name": "s", "api_key_var": "MY_KEY", "header_vars": {"X-Tenant": "TENANT"}}
    with serving() as server, mcp_env(described | {"url": server.url}) as env:
        results = run(env, save_results=True, results_path=tmp_path / "run")
        assert answers(results) == ["5"]
        for _, headers in server.seen:
            assert headers["authorization"] == f"Bearer {SECRET}"
            assert headers["x-tenant"] == "tenant-of-the-test-7"
        shown = json.dumps(env.identity(), default=str) + repr(vars(env)) + repr(env.mcp_servers)
    saved = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    for secret in (SECRET, "tenant-of-the-test-7"):
        assert secret not in shown
        assert secret.encode() not in saved
    assert "MY_KEY" in shown
    monkeypatch.delenv("TENANT")
    with pytest.raises(MissingKeyError, match=r"'s' needs TENANT"):
        MCPEnv(mcp_servers=[described | {"url": "http://localhost/mcp"}], dataset=[])


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"url": "https://me:pass@host/mcp"}, "without a login: name the variable"),
        ({"url": "file:///etc/passwd"}, "must be http://HOST"),
        ({"url": "http://h/mcp", "command": "x"}, "has a url, which command does not go with"),
        ({"command": "x", "api_key_var": "K"}, "has no url, which api_key_var does not go with"),
    ],
)
def test_an_address_that_cannot_be_is_refused_at_construction(more, said):
    with pytest.raises(ConfigError, match=said):
        MCPEnv(mcp_servers=[{"name": "x"} | more], dataset=[{"question": "?"}])


def test_a_server_that_cannot_be_reached_ends_the_run_before_the_first_call():
    with socket.create_server(("127.0.0.1", 0)) as free:
        url = f"http://127.0.0.1:{free.getsockname()[1]}/mcp"
    client = ScriptedClient("x")
    with (
        mcp_env(url) as env,
        pytest.raises(ConfigError, match=r"127.0.0.1:\d+/mcp\) did not answer: .*connect"),
    ):
        env.evaluate(client, "m")
    assert not client.requests


def test_a_server_that_does_not_answer_is_given_up():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/mcp"
        with (
            mcp_env(url, start_timeout_s=0.5) as env,
            pytest.raises(ConfigError, match=r"no answer within 0.5 s"),
        ):
            run(env)


FAILURES = {
    "a redirect": (307, {"location": "http://127.0.0.1:1/mcp"}, b"", "redirects to http://127.0.0.1:1/mcp: use"),
    "a redirect on the same host": (307, {"location": "/mcp/"}, b"", "redirects to /mcp/"),
    "a refusal": (401, {}, b"no such key", "HTTP 401: no such key"),
    "a failure": (500, {}, b"", "HTTP 500"),
    "no JSON": (200, {"content-type": "application/json"}, b"<html>", "it is no message of the protocol"),
    "a page": (200, {"content-type": "text/html"}, b"<html>", "text/html"),
    "compressed": (200, {"content-type": "application/json", "content-encoding": "gzip"}, b"x", "compressed"),
}  # fmt: skip


@pytest.mark.parametrize("failure", FAILURES.values(), ids=FAILURES)
def test_what_is_no_answer_is_named_at_the_start_and_makes_a_later_reward_unknown(failure):
    *answer, said = failure
    with serving() as server:
        server.answer = lambda scope, headers: tuple(answer)
        with mcp_env(server.url) as env, pytest.raises(ConfigError) as caught:
            run(env)
        assert said in str(caught.value)
        server.answer = None
        with mcp_env(server.url) as env:
            run(env)
            server.answer = lambda scope, headers: tuple(answer)
            (output,) = run(env).outputs
    assert output.error.error == "InfraError"
    assert output.reward != output.reward
    assert said in output.error.message


def test_a_redirect_takes_no_key_elsewhere(monkeypatch):
    monkeypatch.setenv("MY_KEY", SECRET)
    with serving() as theirs, serving() as ours:
        ours.answer = lambda scope, headers: (307, {"location": theirs.url}, b"")
        described = {"name": "s", "url": ours.url, "api_key_var": "MY_KEY"}
        with mcp_env(described) as env, pytest.raises(ConfigError, match="redirects to"):
            run(env)
        assert not theirs.seen


@pytest.mark.parametrize("options", [{"json_response": True}, {}], ids=["JSON", "events"])
def test_an_answer_without_end_is_left_at_the_limit(monkeypatch, options):
    monkeypatch.setattr(mcp_messages, "MAX_MESSAGE_BYTES", 50_000)
    call = ToolCall("c1", "long", {"size": 100_000})
    with serving(**options) as server, mcp_env(server.url) as env:
        (output,) = run(env, call).outputs
        assert output.error.error == "InfraError"
        assert "'long'" in output.error.message
        assert answers(run(env, ToolCall("c1", "long", {"size": 20_000}))) == ["x" * 20_000]


@pytest.mark.parametrize("is_older", [True, False], ids=["sessions", "stateless"])
def test_a_server_that_comes_back_is_connected_again(is_older):
    server = Server(is_older=is_older)
    with mcp_env(server.url) as env:
        assert answers(run(env)) == ["5"]
        server.stop()
        again = Server(is_older=is_older, port=server.port)  # it knows no session of before
        try:
            assert answers(run(env)) == ["5"]
            assert again.calls == 1
        finally:
            again.stop()
        (output,) = run(env).outputs
        assert output.error.error == "InfraError"
        assert "Cannot connect to host 127.0.0.1" in output.error.message


def test_a_tools_own_error_is_told_to_the_model():
    with serving() as server, mcp_env(server.url) as env:
        (told,) = answers(run(env, ToolCall("c1", "add", {"a": "x", "b": 1})))
        assert told.startswith("Error: ")


async def test_calls_of_several_loops_share_one_session():
    with serving(is_older=True) as server, mcp_env(server.url) as env:
        runs = [asyncio.to_thread(run, env) for _ in range(3)]
        assert [answers(results) for results in await asyncio.gather(*runs)] == [["5"]] * 3
        assert len({h["mcp-session-id"] for _, h in server.seen if "mcp-session-id" in h}) == 1
