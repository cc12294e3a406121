"""The shipped fake server does what its script says, seen through a raw HTTP client."""

from __future__ import annotations

import asyncio
import time

import aiohttp
import pytest

from verifiers.errors import ModelRefused
from verifiers.testing import Behaviour, FakeServer
from verifiers.types import ToolCall

BODY = {"model": "m", "messages": [{"role": "user", "content": "abc"}]}


async def post(server, body=BODY, path="/chat/completions", timeout_s=2.0):
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=timeout_s)) as session,
        session.post(server.url + path, json=body) as answer,
    ):
        return answer.status, dict(answer.headers), await answer.read()


async def said(server, body=BODY):
    import json

    return json.loads((await post(server, body))[2])["choices"][0]


async def test_replies_are_text_lists_mappings_or_functions():
    with FakeServer("x") as server:
        assert (await said(server))["message"]["content"] == "x"
    with FakeServer(["a", {"content": "b", "finish_reason": "length"}]) as server:
        choices = [await said(server) for _ in range(3)]
        assert [choice["message"]["content"] for choice in choices] == ["a", "b", "a"]
        assert [choice["finish_reason"] for choice in choices] == ["stop", "length", "stop"]
    with FakeServer({"abc": "known", "*": "other"}) as server:
        assert (await said(server))["message"]["content"] == "known"
    with FakeServer(lambda request: request.prompt[-1].content[::-1]) as server:
        assert (await said(server))["message"]["content"] == "cba"
    with FakeServer([ToolCall("1", "add", {"a": 1})]) as server:
        choice = await said(server)
        assert choice["message"]["tool_calls"][0]["function"]["name"] == "add"
        assert choice["finish_reason"] == "tool_calls"


async def test_faults_are_taken_in_order_and_then_it_behaves():
    script = [Behaviour(429, {"Retry-After": "7"}), 503, Behaviour(body="<html>"), {"delay_s": 0.1}]
    with FakeServer("x", script) as server:
        status, headers, _ = await post(server)
        assert (status, headers["Retry-After"]) == (429, "7")
        assert (await post(server))[0] == 503
        assert (await post(server))[2] == b"<html>"
        started = time.monotonic()
        assert (await post(server))[0] == 200
        assert time.monotonic() - started >= 0.1
        assert (await post(server))[0] == 200
        assert server.count == 5
        assert server.times_s == sorted(server.times_s)
        assert server.requests == [BODY] * 5


async def test_reset_garbage_silence_and_drip():
    script = [
        Behaviour(reset=True),
        Behaviour(garbage=b"\x00\x01"),
        Behaviour(never=True),
        Behaviour(drip_s=0.05),
    ]
    with FakeServer("x", script) as server:
        with pytest.raises(
            (aiohttp.ServerDisconnectedError, ConnectionResetError, aiohttp.ClientOSError)
        ):
            await post(server)
        with pytest.raises(aiohttp.ClientError):
            await post(server)
        with pytest.raises(TimeoutError):
            await post(server, timeout_s=0.1)
        with pytest.raises(TimeoutError):
            await post(server, timeout_s=0.3)
        assert (await post(server))[0] == 200


async def test_exceptions_and_nonsense_become_statuses():
    with FakeServer([ModelRefused("no", status=400), ValueError("broken script")]) as server:
        assert (await post(server))[0] == 400
        assert (await post(server))[0] == 500
        assert (await post(server, {"no": "model"}))[0] == 400
        assert (await post(server, path="/other"))[0] == 404


async def test_token_data_are_sent_to_who_asks():
    with FakeServer("xy", tokens=True) as server:
        plain = await said(server)
        assert "token_ids" not in plain
        assert "logprobs" not in plain
        full = await said(server, {**BODY, "logprobs": True, "return_token_ids": True})
        assert full["token_ids"] == [120, 121, 257]
        assert len(full["logprobs"]["content"]) == 3


async def test_a_child_process_serves_many_at_once():
    with FakeServer("x", process=True, delay_s=0.2) as server:
        started = time.monotonic()
        answers = await asyncio.gather(*(post(server, timeout_s=20) for _ in range(32)))
        assert time.monotonic() - started < 5
        assert {status for status, _, _ in answers} == {200}
        assert server.count == 32
        assert server.max_in_flight > 1


def test_a_taken_port_is_an_error_and_stopping_leaves_no_thread():
    import threading

    with FakeServer("x") as server:
        port = int(server.url.split(":")[2].removesuffix("/v1"))
        with pytest.raises(OSError):
            FakeServer("x", port=port).start()
    assert not [thread for thread in threading.enumerate() if thread.name == "fake-server"]
