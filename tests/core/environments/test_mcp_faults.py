"""What happens to one call of a tool server costs no other rollout, is asked once, and has a limit."""

import asyncio
import contextlib
import gzip
import math
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from verifiers.environments import tool_answers
from verifiers.environments.integrations import extras, mcp_http, mcp_messages, mcp_servers

if not extras.MCP.is_installed:
    pytest.skip("mcp is not installed (the extra 'mcp')", allow_module_level=True)

from support.mcp_wire import TOOL, error, events, http, result, text, wire_server
from verifiers.environments.integrations.mcp import MCPEnv
from verifiers.errors import ConfigError
from verifiers.rubrics import Rubric
from verifiers.testing import ScriptedClient
from verifiers.types import ToolCall

PLAIN = str(Path(__file__).parents[2] / "support" / "plain_mcp_server.py")
NUM_ROWS = 6


def right(completion) -> float:
    return 1.0


@contextlib.contextmanager
def mcp_env(*servers, n=NUM_ROWS, **options):
    described = [
        {"name": f"s{number}", "url": server} if isinstance(server, str) else server
        for number, server in enumerate(servers)
    ]
    rows = [{"question": f"q{i}", "answer": ""} for i in range(n)]
    with MCPEnv(mcp_servers=described, dataset=rows, rubric=Rubric([right]), **options) as env:
        yield env


def process(*options):
    return {"name": "p", "command": sys.executable, "args": [PLAIN, *options]}


def by_question(calls_of):
    """A client whose rollout of a question makes ``calls_of(question)``, one after another."""

    def reply(request):
        question = next(m["content"] for m in request.prompt if m["role"] == "user")
        num_done = sum(m["role"] == "tool" for m in request.prompt)
        calls = calls_of(question)
        if num_done == len(calls):
            return "Done."
        return [ToolCall(f"c{num_done}", *calls[num_done])]

    return ScriptedClient(reply)


def work(x):
    return [("work", {"x": x})]


def evaluate(env, calls_of, **options):
    options = {"max_concurrent": NUM_ROWS, "abort_after": 0, "rollout_timeout_s": 60.0} | options
    return env.evaluate(by_question(calls_of), "m", **options)


def told(output):
    return [m["content"] for m in output.completion if m["role"] == "tool"]


def errors(results):
    return {i: o.error.error for i, o in enumerate(results.outputs) if o.error is not None}


# --- one failure, one rollout


def cut_body(message):
    async def write(reader, writer):
        writer.write(http(200, text(message))[:-30])

    return write


LOST = {
    "500": lambda message: http(500, b"no", "text/plain"),
    "404": lambda message: http(404, b"no", "text/plain"),
    "413": lambda message: http(413),
    "429": lambda message: http(429, Retry_After="600"),
    "half JSON": lambda message: http(200, b'{"jsonrpc": "2.0", "id": 1, "resu'),
    "a body that is cut": cut_body,
    "a page": lambda message: http(200, b"<html>", "text/html"),
    "no HTTP": lambda message: b"HELLO\r\n\r\n",
    "no answer": lambda message: b"",
    "accepted": lambda message: http(202),
    "a stream that ends": lambda message: events(b": hello\n\n"),
    "an event that is none": lambda message: events(b"data: {\n\n"),
    "too long": lambda message: text(message, "x" * 200_000),
    "compressed": lambda message: http(200, gzip.compress(text(message)), Content_Encoding="gzip"),
    "a redirect": lambda message: http(307, Location="http://127.0.0.1:1/mcp"),
    "another answer's shape": lambda message: http(200, b'{"jsonrpc":"2.0","method":"x","id":1}'),
}


@pytest.mark.parametrize("lost", LOST.values(), ids=LOST)
def test_a_call_without_a_usable_answer_is_made_once_and_costs_one_rollout(monkeypatch, lost):
    monkeypatch.setattr(mcp_messages, "MAX_MESSAGE_BYTES", 100_000)

    async def slow(message):
        await asyncio.sleep(0.4)
        return text(message)

    def answer(message, headers):
        if message["method"] != "tools/call":
            return None
        return lost(message) if message["params"]["arguments"]["x"] == "q0" else slow(message)

    with wire_server(answer) as server, mcp_env(server.url) as env:
        results = evaluate(env, work)
        assert errors(results) == {0: "InfraError"}
        assert "'work'" in results.outputs[0].error.message
        assert math.isnan(results.rewards[0])
        assert sorted(server.calls) == [f"q{i}" for i in range(NUM_ROWS)]  # each once
        assert server.methods().count("initialize") == 1


def test_a_server_that_forgot_its_sessions_is_connected_again_and_the_call_repeated():
    """The negative control: nothing else gets through either."""
    with wire_server() as server, mcp_env(server.url, n=1) as env:
        evaluate(env, work)
        server.session = 2
        (output,) = evaluate(env, work).outputs
        assert (output.error, told(output)) == (None, ["done"])
        assert server.methods().count("initialize") == 2


def test_a_neighbours_call_on_the_former_session_ends_there():
    async def slow(message):
        await asyncio.sleep(1.0)
        return text(message)

    def answer(message, headers):
        if message["method"] != "tools/call" or message["params"]["arguments"]["x"] != "slow":
            return None
        return slow(message)

    with wire_server(answer) as server, mcp_env(server.url, n=2) as env:
        evaluate(env, work)

        def calls_of(question):
            if question == "q0":
                return work("slow")
            time.sleep(0.3)  # the neighbour's call is there
            server.session = 2
            return work("quick")

        results = evaluate(env, calls_of)
        assert errors(results) == {}
        assert server.calls.count("slow") == 1


CODES = (-32000, -32001, -32603, -32700)


@pytest.mark.parametrize("code", CODES)
def test_a_servers_own_error_is_told_to_the_model_whatever_its_number(code):
    def answer(message, headers):
        if message["method"] == "tools/call":
            return error(message, code, "the card was declined")
        return None

    with wire_server(answer) as server, mcp_env(server.url, n=1) as env:
        (output,) = evaluate(env, work).outputs
        assert told(output) == ["Error: the card was declined"]
        assert (output.reward, len(server.calls)) == (1.0, 1)


def test_a_call_that_is_given_up_closes_its_connection_and_says_so():
    async def never(message):
        await asyncio.sleep(600)

    def answer(message, headers):
        is_hanging = (
            message["method"] == "tools/call" and message["params"]["arguments"]["x"] != "ok"
        )
        return never(message) if is_hanging else None

    with wire_server(answer) as server, mcp_env(server.url, n=120) as env:
        first = evaluate(env, work, rollout_timeout_s=3.0, max_concurrent=120)
        assert [o.stop_condition for o in first.outputs] == ["timeout_reached"] * 120
        until = time.monotonic() + 10
        while server.num_open > 10 and time.monotonic() < until:
            time.sleep(0.05)
        assert server.num_open <= 10
        assert len(server.calls) == server.methods().count("notifications/cancelled") > 100
        began = time.monotonic()
        assert errors(evaluate(env, lambda question: work("ok"), num_examples=5)) == {}
        assert time.monotonic() - began < 10


# --- streams that end, and ends of runs


def test_a_stream_that_ends_before_its_answer_is_continued_after_a_pause(monkeypatch):
    monkeypatch.setattr(mcp_http, "PAUSE_S", 0.1)
    asked, calls = [], []

    def answer(message, headers):
        if message["method"] == "tools/call":
            calls.append(message)
            return events(b"id: e1\nretry: 0\ndata:\n\n")
        if message["method"] == "GET":
            asked.append((time.monotonic(), headers["last-event-id"]))
            if len(asked) < 3:
                return events(b"id: e%d\ndata:\n\n" % (len(asked) + 1))
            body = text(calls[0]).partition(b"\r\n\r\n")[2]
            return events(b"data: " + body + b"\n\n")
        return None

    with wire_server(answer) as server, mcp_env(server.url, n=1) as env:
        (output,) = evaluate(env, work).outputs
        assert told(output) == ["done"]
        assert [last for _, last in asked] == ["e1", "e2", "e3"]
        first, second, third = (at for at, _ in asked)
        assert second - first >= 0.1
        assert third - second >= 0.2
        assert len(server.calls) == 1


def test_continuing_has_a_limit_and_ends_with_the_rollout(monkeypatch):
    monkeypatch.setattr(mcp_http, "PAUSE_S", 0.05)
    monkeypatch.setattr(mcp_http, "MAX_CONTINUED", 3)

    def answer(message, headers):
        if message["method"] in ("tools/call", "GET"):
            return events(b"id: e\nretry: 0\ndata:\n\n")
        return None

    with wire_server(answer) as server, mcp_env(server.url, n=1) as env:
        assert errors(evaluate(env, work)) == {0: "InfraError"}
        assert server.methods().count("GET") == 3
        monkeypatch.setattr(mcp_http, "MAX_CONTINUED", 10**6)
        evaluate(env, work, rollout_timeout_s=1.0)
        time.sleep(0.3)
        num_asked = len(server.seen)
        time.sleep(0.7)
        assert len(server.seen) == num_asked


def test_nothing_is_asked_but_calls_and_nothing_after_the_run():
    with wire_server() as server:
        with mcp_env(server.url, n=1) as env:
            evaluate(env, work)
            assert "GET" not in server.methods()
        assert server.methods()[-1] == "DELETE"
        num_asked = len(server.seen)
        time.sleep(0.5)
        assert len(server.seen) == num_asked


def test_a_server_that_does_not_let_go_costs_no_error_after_the_run(monkeypatch, caplog):
    monkeypatch.setattr(mcp_http, "LEAVE_LIMIT_S", 0.3)

    async def never():
        await asyncio.sleep(600)

    with wire_server(lambda m, headers: never() if m["method"] == "DELETE" else None) as server:
        with mcp_env(server.url, n=1) as env:
            assert errors(evaluate(env, work)) == {}
            began = time.monotonic()
        assert time.monotonic() - began < 5
        assert "DELETE" in server.methods()
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_a_server_that_is_gone_is_not_asked_again_without_a_pause(monkeypatch):
    monkeypatch.setattr(mcp_servers, "PAUSE_S", 0.2)
    is_gone = False

    def answer(message, headers):
        return http(503) if is_gone else None

    with wire_server(answer) as server, mcp_env(server.url, n=1) as env:
        evaluate(env, work)
        is_gone = True
        for _ in range(5):
            began = time.monotonic()
            assert errors(evaluate(env, work)) == {0: "InfraError"}
        assert time.monotonic() - began >= 0.4  # the pause has doubled
        is_gone = False
        assert errors(evaluate(env, work)) == {}


# --- sums without a bound


def of_values(num_values):
    def answer(message, headers):
        if message["method"] != "tools/call":
            return None
        return result(message, content=[], structuredContent={"v": [{}] * num_values})

    return answer


def test_an_answer_of_too_many_values_is_refused_before_they_are_made():
    with wire_server(of_values(600_000)) as server, mcp_env(server.url, n=1) as env:
        (output,) = evaluate(env, work).outputs
        assert "more than 500,000 values" in output.error.message
    with wire_server(of_values(6)) as server, mcp_env(server.url, n=1) as env:
        assert told(evaluate(env, work).outputs[0]) == ['{"v": [{}, {}, {}, {}, {}, {}]}']


STREAMS = {
    "an event without end": lambda body: events(*[b"data: " + b"x" * 99] * 5000),
    "comments without end": lambda body: events(*[b": " + b"x" * 997 + b"\n\n"] * 5000),
    "too long an event": lambda body: events(b"data: " + b" " * 150_000 + body + b"\n\n"),
    "questions without end": lambda body: events(
        *[b'data: {"jsonrpc":"2.0","id":%d,"method":"ping"}\n\n' % i for i in range(200)],
        ends=False,
    ),
}


@pytest.mark.parametrize("stream", STREAMS.values(), ids=STREAMS)
def test_a_stream_of_events_has_the_limits_of_a_message(monkeypatch, stream):
    monkeypatch.setattr(mcp_messages, "MAX_MESSAGE_BYTES", 100_000)

    def answer(message, headers):
        if message["method"] == "tools/call":
            return stream(text(message).partition(b"\r\n\r\n")[2])
        return None

    with wire_server(answer) as server, mcp_env(server.url, n=1) as env:
        assert errors(evaluate(env, work)) == {0: "InfraError"}


def test_a_compressed_stream_of_events_is_refused():
    def answer(message, headers):
        if message["method"] != "tools/call":
            return None
        body = b"data: " + text(message).partition(b"\r\n\r\n")[2] + b"\n\n"
        encoding = (
            {"Content_Encoding": "gzip"} if message["params"]["arguments"]["x"] == "q0" else {}
        )
        return http(200, gzip.compress(body) if encoding else body, "text/event-stream", **encoding)

    with wire_server(answer) as server, mcp_env(server.url, n=2) as env:
        results = evaluate(env, work)
        assert "it compressed an answer" in results.outputs[0].error.message
        assert told(results.outputs[1]) == ["done"]


def test_tools_without_end_end_the_run_before_the_first_call(monkeypatch):
    monkeypatch.setattr(mcp_servers, "MAX_LISTED_BYTES", 100_000)
    pages = []

    def listed(message, headers, step=1):
        if message["method"] != "tools/list":
            return None
        pages.append(message)
        tool = TOOL | {"name": f"t{len(pages)}", "description": "x" * 9000}
        return result(message, tools=[tool], nextCursor=str(step * len(pages)))

    with wire_server(listed) as server, mcp_env(server.url) as env:
        with pytest.raises(ConfigError, match="the list of its tools is longer than 100000 bytes"):
            evaluate(env, work)
        assert len(pages) == 11
    with (
        wire_server(lambda m, headers: listed(m, headers, 0)) as server,
        mcp_env(server.url) as env,
        pytest.raises(ConfigError, match="has the same page twice"),
    ):
        evaluate(env, work)


def test_what_a_server_says_of_its_tools_is_bounded_in_every_row(tmp_path):
    tools = [TOOL | {"description": "x" * 2**20}, TOOL | {"name": "also"}]
    with wire_server(tools=tools) as server, mcp_env(server.url, n=2) as env:
        results = evaluate(env, work, results_path=tmp_path / "run")
        assert errors(results) == {}
    rows = (tmp_path / "run" / "results.jsonl").read_text().splitlines()
    assert [20_000 < len(row) < 30_000 for row in rows] == [True] * 2
    deep = {"type": "object", "properties": {"x" * 600_000: {"type": "string"}}}
    tools = [TOOL | {"inputSchema": deep}, TOOL | {"name": "also", "inputSchema": deep}]
    with wire_server(tools=tools) as server:
        with mcp_env(server.url) as env, pytest.raises(ConfigError, match="at most 1,048,576 may"):
            evaluate(env, work)
        fewer = {"name": "s", "url": server.url, "exclude": ["also"]}
        with mcp_env(fewer, n=1) as env:
            assert errors(evaluate(env, work)) == {}
    assert tool_answers.MAX_DEFINITIONS_CHARS == 2**20


# --- child processes


@pytest.mark.parametrize(
    "call",
    [
        ("long", {"size": 200_000}),
        ("long", {"size": 200_000, "id_last": True}),
        ("half", {}),
        ("add", {"a": 1, "b": math.nan}),
    ],
    ids=["too long", "too long, its id last", "half an answer", "what JSON cannot say"],
)
def test_an_answer_that_a_child_process_botches_costs_one_rollout(monkeypatch, tmp_path, call):
    monkeypatch.setattr(mcp_messages, "MAX_MESSAGE_BYTES", 100_000)
    server = process("--threads", "--starts", str(tmp_path / "starts"))
    with mcp_env(server) as env:
        results = evaluate(
            env, lambda question: [call] if question == "q0" else [("slow", {"seconds": 0.5})]
        )
        assert set(errors(results)) <= {0}
        assert (0 in errors(results)) or told(results.outputs[0])[0].startswith("Error: ")
        assert len((tmp_path / "starts").read_text().split()) == 1
    monkeypatch.setattr(mcp_messages, "MAX_MESSAGE_BYTES", 300_000)
    if call[0] == "long":  # the negative control
        with mcp_env(process(), n=1) as env:
            assert told(evaluate(env, lambda question: [call]).outputs[0]) == ["x" * 200_000]


def test_a_text_that_is_no_text_is_sent_and_costs_no_neighbour():
    def calls_of(question):
        return [("long", {"size": 3, "id_last": "\ud800"})] if question == "q0" else NUMBERS

    with mcp_env(process("--threads")) as env:
        assert set(errors(evaluate(env, calls_of))) <= {0}
        assert errors(evaluate(env, lambda question: NUMBERS)) == {}


NUMBERS = [("add", {"a": 1, "b": 2})]


def test_a_call_that_ends_its_server_fails_alone(tmp_path):
    server = process("--threads", "--starts", str(tmp_path / "starts"))

    def calls_of(question):
        # while the others are being answered
        first = [("slow", {"seconds": 0.2})] if question == "q0" else []
        return [*first, ("crash", {})] if question == "q0" else [("slow", {"seconds": 0.6})]

    with mcp_env(server) as env:
        results = evaluate(env, calls_of)
        assert errors(results) == {0: "InfraError"}
        assert "and again after a restart" in results.outputs[0].error.message
        assert len((tmp_path / "starts").read_text().split()) <= 3


@pytest.mark.parametrize("limit_s", [0.5, 60.0], ids=["a limit", "none"])
def test_a_child_process_that_hangs_in_one_call_is_ended(monkeypatch, tmp_path, limit_s):
    """Its one thread answers nobody; without the limit it never would."""
    monkeypatch.setattr(mcp_servers, "SILENT_LIMIT_S", limit_s)
    with mcp_env(process("--starts", str(tmp_path / "starts")), n=1) as env:
        evaluate(env, lambda question: NUMBERS)
        evaluate(env, lambda question: [("hang", {})], rollout_timeout_s=0.5)
        (output,) = evaluate(env, lambda question: NUMBERS, rollout_timeout_s=6.0).outputs
        assert (output.error is None and told(output) == ["3"]) is (limit_s < 1)
        for pid in (tmp_path / "starts").read_text().split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)


@pytest.mark.parametrize(
    "content",
    [
        "text",
        None,
        ["x"],
        [{"type": "text"}],
        [{"type": "text", "text": 5}],
        [{"type": "hologram"}],
    ],
    ids=str,
)
def test_a_result_that_is_none_is_the_servers_fault_and_not_the_models(content):
    """It was told to the model as an error of its call, and the rollout was scored."""

    def answer(message, headers):
        is_bad = message["method"] == "tools/call" and message["params"]["arguments"]["x"] == "q0"
        return result(message, content=content) if is_bad else None

    with wire_server(answer) as server, mcp_env(server.url, n=2) as env:
        results = evaluate(env, work)
    assert errors(results) == {0: "InfraError"}
    said = results.outputs[0].error.message
    assert "it answered with what is no result of a tool (content" in said
    assert math.isnan(results.outputs[0].reward)
    assert told(results.outputs[1]) == ["done"]
