"""An environment served over ZeroMQ to the client of verifiers 0.4, with the requests that this
client sent.

The frames in ``contracts/env_client.json`` were recorded from that client and its own server; the
client itself plays in ``tests/real/test_peer_env_client.py``.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

import verifiers as vf
from support.integration_envs import load_contract, tool_env
from support.small_envs import Talk
from verifiers.environments.integrations import extras
from verifiers.testing import FakeServer
from verifiers_integrations.zmq_server import (
    Endpoint,
    RunRequest,
    ZmqServer,
    graph_of,
    message_of,
    row_of,
)

zmq = pytest.importorskip("zmq", reason="pyzmq is not installed: the extra env-server")
zmq_asyncio = pytest.importorskip(
    "zmq.asyncio", reason="pyzmq is not installed: the extra env-server"
)

RECORDED = load_contract(Path(__file__).parent, "env_client")


def adding(request):
    """Calls the tool, then says what it gave."""
    last = request.prompt[-1]
    if last["role"] == "tool":
        return last["content"]
    return vf.ToolCall("c1", "add", {"a": int(last["content"].split()[0]), "b": 1})


class Client:
    """A DEALER that speaks the recorded frames."""

    def __init__(self, address):
        self._context = zmq_asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.connect(address)
        self.seen = {}

    def close(self):
        self._socket.close(0)
        self._context.term()

    async def send(self, request, method, body):
        encoded = body if isinstance(body, bytes) else msgspec.msgpack.encode(body)
        await self._socket.send_multipart([request.encode(), method.encode(), encoded])

    async def reply(self, request):
        """The last answer to a request; its deltas are in ``seen``."""
        while not any(route == "reply" for route, _ in self.seen.get(request, ())):
            got, route, body = await asyncio.wait_for(self._socket.recv_multipart(), 30)
            self.seen.setdefault(got.decode(), []).append(
                (route.decode(), msgspec.msgpack.decode(body))
            )
        return self.seen[request][-1][1]

    async def ask(self, request, method, body):
        await self.send(request, method, body)
        return await self.reply(request)

    def trace(self, request):
        """The trace that the deltas of a request make."""
        trace = {"nodes": [], "calls": [], "errors": []}
        for route, delta in self.seen[request]:
            if route == "delta":
                trace |= delta.get("open", {}) | delta.get("set", {})
                for name in ("nodes", "calls", "errors"):
                    trace[name] = trace[name] + delta.get(name, [])
        return trace


@asynccontextmanager
async def serving(env, **options):
    """A client of a server of the environment, while the block runs."""
    server, ended = ZmqServer(env, "tcp://127.0.0.1:*", **options), asyncio.Event()
    started = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(server.serve(started.set_result, ended))
    await asyncio.wait({task, started}, return_when=asyncio.FIRST_COMPLETED)
    if task.done():
        task.result()
    client = Client(started.result())
    try:
        yield client
    finally:
        ended.set()
        await asyncio.wait_for(task, 30)
        client.close()


def run_request(url, task, **fields):
    return {
        "task_data": task,
        "client": {"base_url": url, "type": fields.pop("type", "eval")},
        "model": "m",
        **fields,
    }


def recorded(name, url):
    """A recorded request, sent to another endpoint."""
    body = msgspec.msgpack.decode(bytes.fromhex(RECORDED["requests"][name]["body"]))
    body["client"]["base_url"] = url
    return body


# --- what the recorded client asks for


async def test_recorded_requests_are_answered_with_the_recorded_fields():
    with FakeServer(adding) as model:
        async with serving(tool_env()) as client:
            health = RECORDED["requests"]["health"]
            assert await client.ask("h", health["method"], bytes.fromhex(health["body"])) == {
                "success": True,
                "error": None,
            }
            answer = await client.ask("r", "run", recorded("run eval", model.url))
            trace = client.trace("r")
    (summary,) = answer["traces"]
    assert (answer["success"], answer["head"]["ok"]) == (True, True)
    assert summary == {"id": trace["id"], "nodes": 4, "calls": 2}
    assert trace["rewards"] == {"reward": {"score": 1.0, "weight": 1.0}}
    assert [node["message"]["role"] for node in trace["nodes"]] == [
        "user",
        "assistant",
        "tool",
        "assistant",
    ]
    assert [node["parent"] for node in trace["nodes"]] == [None, 0, 1, 2]
    assert [node["sampled"] for node in trace["nodes"]] == [False, True, False, True]
    (call,) = trace["nodes"][1]["message"]["tool_calls"]
    assert (call["id"], call["type"], call["name"], json.loads(call["arguments"])) == (
        *("c1", "function", "add"),
        {"a": 3, "b": 1},
    )
    assert [call["node"] for call in trace["calls"]] == [1, 3]
    fields_of = {name: set(fields) for name, fields in RECORDED["answers"].items()}
    deltas = [delta for route, delta in client.seen["r"] if route == "delta"]
    assert set(answer) == fields_of["reply"]
    assert set(answer["head"]) == fields_of["head"]
    assert set(summary) == fields_of["trace"]
    assert set(deltas[0]["open"]) == fields_of["open"]
    for delta in deltas:
        assert set(delta) <= fields_of["delta"]
        assert set(delta.get("set", ())) <= fields_of["set"]
    for node in trace["nodes"]:
        assert set(node) <= fields_of["node"]
        assert set(node["message"]) == fields_of[f"message {node['message']['role']}"]
    assert all(
        set(call) <= fields_of["call"] and set(call["usage"]) <= fields_of["usage"]
        for call in trace["calls"]
    )
    assert trace["timing"]["agent"]["end"] >= trace["timing"]["agent"]["start"] > 0


async def test_sampling_arguments_key_and_headers_reach_the_endpoint(monkeypatch):
    monkeypatch.setenv("ENV_CLIENT_TOKEN", "t0k")
    with FakeServer("4", tokens=True) as model:
        async with serving(tool_env()) as client:
            body = recorded("run train", model.url)
            body["client"] |= {
                "headers": {"x-run": "7"},
                "headers_from_env": {"x-token": "ENV_CLIENT_TOKEN"},
            }
            assert (await client.ask("r", "run", body))["success"]
            body["client"]["headers_from_env"] = {"x-token": "ENV_CLIENT_MISSING"}
            refused = await client.ask("r2", "run", body)
    hit = model.hits[0]
    sent = hit.json()
    assert (hit.headers["x-run"], hit.headers["x-token"]) == ("7", "t0k")
    assert (sent["temperature"], sent["top_k"], sent["return_token_ids"], sent["logprobs"]) == (
        1.0,
        5,
        True,
        True,
    )
    assert "max_tokens" not in sent
    assert (model.count, refused["success"]) == (1, False)
    assert "ENV_CLIENT_MISSING is not set" in refused["error"]


async def test_token_ids_are_the_sampled_ones_and_a_training_client_is_refused_without_them():
    with FakeServer("more?", tokens=True) as model, FakeServer("more?") as blind:
        async with serving(Talk(1)) as client:
            await client.ask("r", "run", run_request(model.url, {"idx": 0}, type="train"))
            refused = await client.ask(
                "r2", "run", run_request(blind.url, {"idx": 0}, type="train")
            )
            assert (await client.ask("r3", "run", run_request(blind.url, {"idx": 0})))["success"]
            trace, without = client.trace("r"), client.trace("r3")
        config = vf.ClientConfig(api_base_url=model.url)
        sampling = {"logprobs": True, "extra_body": {"return_token_ids": True}}
        results = await Talk(1).evaluate(
            config, "m", sampling_args=sampling, state_columns=["trajectory"]
        )
    tokens = results["outputs"][0]["trajectory"][-1]["tokens"]
    ids = [token for node in trace["nodes"] for token in node["token_ids"]]
    mask = [flag for node in trace["nodes"] for flag in node["mask"]]
    assert len(trace["nodes"]) == 6
    assert sum(mask) == sum(len(node["logprobs"]) for node in trace["nodes"]) > 0
    assert len(ids) == len(mask)
    assert ids == [*tokens["prompt_ids"], *tokens["completion_ids"]]
    assert refused["success"] is False
    assert "returned no token ids" in refused["error"]
    assert [node["token_ids"] for node in without["nodes"]] == [[]] * 6


# --- rewards and failures


async def test_an_unknown_reward_is_none_with_its_error():
    def broken(completion, answer):
        raise ValueError("no scale")

    with FakeServer(adding) as model:
        async with serving(tool_env(funcs=[broken])) as client:
            answer = await client.ask("r", "run", run_request(model.url, {"idx": 1}))
            trace = client.trace("r")
    assert (answer["success"], answer["head"]["ok"], trace["ok"]) == (True, False, False)
    assert trace["rewards"] == {"reward": None}
    assert trace["metrics"]["broken"] is None
    assert "no scale" in trace["errors"][0]["message"]


async def test_a_failed_rollout_fails_alone():
    with FakeServer(adding, script=lambda hit: 400 if b'"2 + 1"' in hit.body else 200) as model:
        async with serving(tool_env()) as client:
            for index in range(4):
                await client.send(f"r{index}", "run", run_request(model.url, {"idx": index}))
            answers = [await client.reply(f"r{index}") for index in range(4)]
            traces = [client.trace(f"r{index}") for index in range(4)]
    assert [answer["success"] for answer in answers] == [True] * 4
    assert [answer["head"]["ok"] for answer in answers] == [True, True, False, True]
    assert [bool(trace["errors"]) for trace in traces] == [False, False, True, False]
    assert (traces[2]["stop_condition"], traces[2]["rewards"]) == ("error", {"reward": None})


@pytest.mark.parametrize(
    ("method", "body", "message"),
    [
        ("run", b"\xc1", "DecodeError"),
        ("run", {"task_data": {}}, "missing required field `client`"),
        (
            "run",
            run_request("http://127.0.0.1:9/v1", {"idx": 99}),
            "its idx 99 is none of the 4 rows of train",
        ),
        (
            "run",
            run_request("http://127.0.0.1:9/v1", {}),
            "its idx None is none of the 4 rows of train",
        ),
        (
            "run",
            run_request("http://127.0.0.1:9/v1", {"idx": 0, "split": "dev"}),
            "the split 'dev' is not one of",
        ),
        (
            "run",
            run_request("http://127.0.0.1:9/v1", {"idx": 0, "image": "x"}),
            "the task sets image",
        ),
        (
            "run",
            run_request("http://127.0.0.1:9/v1", {"idx": 0, "timeout": {"agent": 5.0}}),
            "the task sets timeout",
        ),
        ("strange", b"\x80", "unknown method 'strange'"),
    ],
)
async def test_what_cannot_be_followed_is_an_error_of_that_request(method, body, message):
    async with serving(tool_env()) as client:
        answer = await client.ask("r", method, body)
        assert (answer["success"], message in answer["error"]) == (False, True), answer
        assert (await client.ask("h", "health", b"\x80"))["success"]


async def test_frames_that_are_no_request_are_passed_over():
    async with serving(tool_env()) as client:
        await client._socket.send_multipart([b"only one"])
        await client._socket.send_multipart([b"a", b"b", b"c", b"d", b"e"])
        assert (await client.ask("h", "health", b"\x80"))["success"]


# --- several at once, cancellation, the end


async def test_rollouts_run_at_the_same_time_up_to_the_limit():
    with FakeServer(adding, delay_s=0.2) as model:
        async with serving(tool_env(), max_sessions=3) as client:
            for index in range(6):
                await client.send(f"r{index}", "run", run_request(model.url, {"idx": index % 4}))
            assert all([(await client.reply(f"r{index}"))["head"]["ok"] for index in range(6)])
        assert 1 < model.max_in_flight <= 3


class Watched(Talk):
    """Counts what begins and what is cleaned up."""

    def __init__(self):
        super().__init__(1)
        self.begun, self.cleaned = [], []

    @vf.setup
    def begin(self, state):
        self.begun.append(1)

    @vf.cleanup
    def clean(self, state):
        self.cleaned.append(1)


async def until(condition):
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110  # it is changed on another thread
            await asyncio.sleep(0.01)


async def test_cancel_ends_one_rollout_of_the_same_client_and_cleans_up():
    env = Watched()
    with FakeServer("late", delay_s=20) as model:
        async with serving(env) as client:
            await client.send("r", "run", run_request(model.url, {"idx": 0}))
            await until(lambda: model.count == 1)
            assert (await client.ask("c0", "cancel", {"request_id": "other"}))["cancelled"] is False
            assert env.cleaned == []
            answer = await client.ask("c1", "cancel", {"request_id": "r"})
            assert (answer["success"], answer["cancelled"]) == (True, True)
            assert await client.reply("r") == {
                "success": False,
                "error": "Cancelled: rollout aborted",
            }
            assert (len(env.begun), len(env.cleaned)) == (1, 1)
            assert (await client.ask("c2", "cancel", {"request_id": "r"}))["cancelled"] is False


async def test_the_end_of_the_server_cancels_what_runs():
    env = Watched()
    with FakeServer("late", delay_s=20) as model:
        async with serving(env) as client:
            await client.send("r", "run", run_request(model.url, {"idx": 0}))
            await until(lambda: model.count == 1)
    assert (len(env.begun), len(env.cleaned)) == (1, 1)


@pytest.mark.skipif(sys.platform == "win32", reason="there is no SIGTERM")
@pytest.mark.parametrize("wire", ["zmq", "openenv"])
def test_the_command_serves_and_ends_on_sigterm(wire):
    command = [
        sys.executable,
        "-m",
        "verifiers.cli.serve_env",
        "reverse-text",
        "--wire",
        wire,
        "--port",
        "0",
        "--json",
    ]
    env = {**os.environ, "HF_HUB_OFFLINE": "1"}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env
    )
    try:
        url = json.loads(process.stdout.readline())["url"]
        assert url.startswith("tcp://127.0.0.1:" if wire == "zmq" else "http://127.0.0.1:")

        async def play():
            client = Client(url)
            try:
                return await client.ask("h", "health", b"\x80")
            finally:
                client.close()

        if wire == "zmq":
            assert asyncio.run(play())["success"]
        process.send_signal(signal.SIGTERM)
        _, complaints = process.communicate(timeout=60)
    finally:
        process.kill()
    assert (process.returncode, complaints) == (0, "")


async def test_a_port_in_use_and_a_missing_package_are_one_sentence(monkeypatch):
    async with serving(tool_env()) as client:
        address = client._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        with pytest.raises(vf.ConfigError, match=f"{address} cannot be listened at: .*give --port"):
            await ZmqServer(tool_env(), address).serve(lambda _: None, asyncio.Event())
    monkeypatch.setattr(extras, "ZMQ", extras.Extra("env-server", "no_such_package", "pyzmq"))
    with pytest.raises(
        vf.ConfigError, match=r"--wire zmq needs pyzmq, which is not installed: .*env-server"
    ):
        ZmqServer(tool_env(), "tcp://127.0.0.1:*")


def test_rewards_of_a_group_are_refused():
    def ranked(completions):
        return [float(index) for index in range(len(completions))]

    with pytest.raises(vf.ConfigError, match="scores the rollouts of a group together"):
        ZmqServer(tool_env(funcs=[ranked]), "tcp://127.0.0.1:*")
    ZmqServer(tool_env(), "tcp://127.0.0.1:*")


# --- rows and nodes


def test_a_task_is_a_row():
    env = vf.SingleTurnEnv(dataset=[{"question": "a", "answer": "b"}], system_prompt="Be brief.")
    row = row_of(env, {"idx": 0})
    assert (row["prompt"][0]["content"], row["answer"], row["example_id"]) == ("Be brief.", "b", 0)
    request = row_of(
        env, {"idx": 7, "prompt": "2 + 2", "answer": "4", "network_allow": ["*"], "skills": []}
    )
    assert request == {"question": "2 + 2", "answer": "4", "example_id": 7}
    shouting = row_of(env, {"prompt": "2 + 2", "system_prompt": "Shout."})
    assert [message["role"] for message in shouting["prompt"]] == ["system", "user"]
    messages = [{"role": "user", "content": "hi"}]
    assert row_of(env, {"prompt": messages, "info": {"level": 2}}) == {
        "prompt": messages,
        "info": {"level": 2},
    }


def test_a_turn_that_does_not_continue_begins_a_branch():
    def step(prompt, reply, prompt_ids, ids):
        tokens = {
            "prompt_ids": prompt_ids,
            "completion_ids": ids,
            "completion_logprobs": [-0.5] * len(ids),
        }
        completion = [vf.AssistantMessage(reply)]
        return {
            "prompt": prompt,
            "completion": completion,
            "tokens": tokens,
            "response": None,
            "is_truncated": False,
        }

    request = RunRequest({}, Endpoint("http://127.0.0.1:9/v1"), "m")
    question, more = vf.UserMessage("q"), vf.UserMessage("more")
    first = step([question], "a", [1, 2], [3])
    follows = step([question, vf.AssistantMessage("a"), more], "b", [1, 2, 3, 4], [5, 6])
    nodes, calls = graph_of([first, follows], [], request)
    assert [node["parent"] for node in nodes] == [None, 0, 1, 2]
    assert [node["token_ids"] for node in nodes] == [[1, 2], [3], [4], [5, 6]]
    assert [node["logprobs"] for node in nodes] == [[], [-0.5], [], [-0.5, -0.5]]
    assert [call["node"] for call in calls] == [1, 3]
    rewritten = step([question, vf.AssistantMessage("a"), more], "b", [1, 2, 9, 4], [5, 6])
    nodes, calls = graph_of([first, rewritten], [], request)
    assert [node["parent"] for node in nodes] == [None, 0, None, 2, 3, 4]
    assert [node["token_ids"] for node in nodes] == [[1, 2], [3], [], [], [1, 2, 9, 4], [5, 6]]
    assert [node["sampled"] for node in nodes] == [False, True, False, False, False, True]
    assert [call["node"] for call in calls] == [1, 5]


def test_messages_are_those_of_the_wire():
    image = {
        "type": "image_url",
        "image_url": {"url": "data:image/png;base64,AA==", "detail": "low"},
    }
    audio = {"type": "input_audio", "input_audio": {"data": "AA==", "format": "wav"}}
    parts = message_of(vf.UserMessage([{"type": "text", "text": "see"}, image, audio]))["content"]
    assert parts[1] == {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    assert [part["type"] for part in parts] == ["text", "image_url", "text"]
    thought = message_of(vf.AssistantMessage("4", reasoning_content="2 and 2"))
    assert (thought["content"], thought["reasoning_content"]) == ("4", "2 and 2")
    answered = message_of(vf.ToolMessage("5", tool_call_id="c1"))
    assert (answered["tool_call_id"], answered["content"]) == ("c1", "5")
