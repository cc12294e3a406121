"""The gateway over real sockets: dialects, streams, repeated requests, and what it refuses."""

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile

import aiohttp
import openai
import pytest

import verifiers as vf
from verifiers.types import Response
from verifiers_agents import gateway as gateway_module
from verifiers_agents.gateway import PREFIX, SOCKET, Gateway, gateway

BODY = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
REQUESTS = {
    "chat/completions": BODY,
    "responses": {"model": "m", "input": "hi"},
    "messages": {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]},
}


@pytest.fixture
def server():
    with contextlib.ExitStack() as stack:

        def make(**parameters):
            made = Gateway(**parameters)
            stack.callback(made.stop)
            return made

        yield make


async def answer(route, text="hello", delay_s=0.0, count=1):
    """Answer calls of the route as a rollout does; returns them."""
    calls = []
    for _ in range(count):
        calls.append(await route.next())
        await asyncio.sleep(delay_s)
        calls[-1].answer(Response(vf.AssistantMessage(text), usage=vf.Usage(3, 1)))
    return calls


async def post(route, path, body, **more):
    async with aiohttp.ClientSession() as session:
        async with session.post(f"{route.url}/{path}", json=body, **more) as reply:
            return reply.status, await reply.text()


@pytest.mark.parametrize("path", REQUESTS)
async def test_every_dialect_is_answered_in_kind(path):
    route = gateway().open()
    (status, text), (call,) = await asyncio.gather(post(route, path, REQUESTS[path]), answer(route))
    assert status == 200
    assert "hello" in text
    assert [dict(message) for message in call.request.messages] == [
        {"role": "user", "content": "hi"}
    ]
    route.close("done")


@pytest.mark.parametrize("path", REQUESTS)
async def test_a_slow_answer_is_a_stream_with_keep_alive_events(path, server):
    gateway = server(keep_alive_s=0.05)
    route = gateway.open()
    body = REQUESTS[path] | {"stream": True}
    (status, slow), _ = await asyncio.gather(post(route, path, body), answer(route, delay_s=0.3))
    fast_route = gateway.open()
    (_, fast), _ = await asyncio.gather(post(fast_route, path, body), answer(fast_route))
    kept_alive = "event: ping" if path == "messages" else ": "
    assert status == 200
    assert slow.count(kept_alive) >= fast.count(kept_alive) + 3
    assert "hello" in slow
    assert "hello" in fast


async def test_the_openai_client_reads_the_stream_of_a_slow_answer(server):
    route = server(keep_alive_s=0.05).open()
    answering = asyncio.ensure_future(answer(route, delay_s=0.2, count=2))
    async with openai.AsyncOpenAI(base_url=route.url, api_key="x", max_retries=0) as client:
        stream = await client.chat.completions.create(**BODY, stream=True)
        text = "".join(
            [chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices]
        )
        response = await client.responses.create(model="m", input="hi")
    await answering
    assert (text, response.output_text) == ("hello", "hello")


async def test_an_agent_reaches_it_over_a_unix_socket():
    route = gateway().open()
    connector = aiohttp.UnixConnector(str(gateway().folder / SOCKET))

    async def ask():
        async with aiohttp.ClientSession(connector=connector) as session:
            async with session.post(
                f"http://inside{route.path}/v1/chat/completions", json=BODY
            ) as reply:
                return await reply.json()

    body, _ = await asyncio.gather(ask(), answer(route))
    assert body["choices"][0]["message"]["content"] == "hello"


@pytest.mark.parametrize("limit", ["MAX_WAITING", "MAX_WAITING_BYTES"])
async def test_the_waiting_requests_of_one_agent_are_bounded_and_a_neighbour_is_answered(
    monkeypatch, limit
):
    monkeypatch.setattr(gateway_module, limit, {"MAX_WAITING": 2}.get(limit, 200))
    route, neighbour = gateway().open(), gateway().open()
    bodies = [BODY | {"user": f"{i}", "temperature": i} for i in range(3)]
    waiting = [asyncio.ensure_future(post(route, "chat/completions", body)) for body in bodies[:2]]
    await asyncio.sleep(0.3)
    status, text = await post(route, "chat/completions", bodies[2])
    assert status == 429
    assert "the agent has 2 requests of " in text
    (status, _), _ = await asyncio.gather(
        post(neighbour, "chat/completions", BODY), answer(neighbour)
    )
    assert status == 200
    await answer(route, count=2)
    assert [(await each)[0] for each in waiting] == [200, 200]
    (status, _), _ = await asyncio.gather(post(route, "chat/completions", bodies[2]), answer(route))
    assert status == 200


async def test_a_repeated_request_is_one_call_with_one_answer():
    route = gateway().open()
    both = asyncio.gather(*[post(route, "chat/completions", BODY) for _ in range(2)])
    (call,) = await answer(route, delay_s=0.1)
    texts = [json.loads(text)["choices"][0]["message"] for _, text in await both]
    later = await post(route, "chat/completions", BODY | {"stream": True})
    assert texts[0] == texts[1]
    assert "hello" in later[1]
    assert call.num_repeats == 2
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(route.next(), 0.1)


async def test_negative_control_another_request_is_another_call():
    route = gateway().open()
    answering = asyncio.ensure_future(answer(route, count=2))
    await post(route, "chat/completions", BODY)
    await post(route, "chat/completions", BODY | {"temperature": 0.5})
    assert len(await answering) == 2


async def test_an_agent_that_hangs_up_and_asks_again_gets_the_answer():
    route = gateway().open()
    with pytest.raises(TimeoutError):
        await post(route, "chat/completions", BODY, timeout=aiohttp.ClientTimeout(total=0.1))
    (_, text), (call,) = await asyncio.gather(
        post(route, "chat/completions", BODY), answer(route, delay_s=0.1)
    )
    assert "hello" in text
    assert call.num_repeats == 1


async def test_a_failure_is_an_error_of_the_dialect_also_inside_a_stream(server):
    route = server(keep_alive_s=0.05).open()

    async def refuse(count):
        for _ in range(count):
            call = await route.next()
            await asyncio.sleep(0.2 if call.request.stream else 0)
            call.refuse(502, "the model did not answer: it is down")

    refusing = asyncio.ensure_future(refuse(3))
    status, text = await post(route, "messages", REQUESTS["messages"])
    assert (status, json.loads(text)["type"]) == (502, "error")
    async with openai.AsyncOpenAI(base_url=route.url, api_key="x", max_retries=0) as client:
        with pytest.raises(openai.APIStatusError, match="it is down"):
            await client.chat.completions.create(**BODY)
        with pytest.raises(openai.APIError, match="it is down"):
            async for _ in await client.chat.completions.create(
                **BODY | {"messages": [], "stream": True}
            ):
                pass
    await refusing


async def test_what_it_does_not_serve_is_one_sentence():
    route = gateway().open(("chat",))
    unknown = route.url.replace(route.id, "someone-else")
    async with aiohttp.ClientSession() as session:
        for url, expected in [
            (f"{unknown}/chat/completions", "there is no rollout with this id"),
            (f"{gateway().url}/v1/chat/completions", "is not a path of this gateway"),
            (f"{route.url}/embeddings", "offered are chat/completions and models"),
            (
                f"{route.url}/responses",
                "the dialect 'responses', which this environment does not offer",
            ),
        ]:
            async with session.post(url, json=BODY) as reply:
                assert reply.status == 404
                assert expected in (await reply.json())["error"]["message"]
        async with session.post(f"{route.url}/chat/completions", data=b"{") as reply:
            assert reply.status == 400
            assert "cannot be read" in (await reply.json())["error"]["message"]
    assert len(route.refusals) == 3  # of this rollout alone


async def test_a_route_that_is_over_says_why_and_refuses_those_that_wait():
    route = gateway().open()
    waiting = asyncio.ensure_future(post(route, "chat/completions", BODY))
    await route.next()
    route.close("max_turns_reached")
    status, text = await asyncio.wait_for(waiting, 5)
    assert (status, json.loads(text)["error"]["message"]) == (403, "max_turns_reached")
    status, text = await post(route, "chat/completions", BODY)
    assert (status, json.loads(text)["error"]["message"]) == (
        404,
        "the rollout is over: max_turns_reached",
    )


async def test_models_and_count_tokens():
    route = gateway().open()
    async with openai.AsyncOpenAI(base_url=route.url, api_key="x") as client:
        assert [model.id async for model in client.models.list()] == ["policy"]
    status, text = await post(route, "messages/count_tokens", REQUESTS["messages"])
    # an estimate: a quarter of the bytes
    assert (status, json.loads(text)["input_tokens"]) == (200, 12)
    doubled = route.url + "/v1"  # Anthropic's clients add the version themselves
    async with aiohttp.ClientSession() as session:
        async with session.get(f"{doubled}/models") as reply:
            assert reply.status == 200


START = """
from verifiers_agents.gateway import Gateway
import os, signal
print(Gateway().folder, flush=True)
"""


def started_in(folder, more="os._exit(0)"):
    """The folder of a gateway in a process with this folder for temporary files."""
    env = {**os.environ, "TMPDIR": str(folder)}
    return subprocess.run(
        [sys.executable, "-c", START + more], env=env, capture_output=True, text=True
    ).stdout.strip()


def test_the_folder_of_a_killed_process_is_removed_by_the_next():
    """The socket of a killed process stays behind, and would for ever."""
    with tempfile.TemporaryDirectory() as folder:
        folder_of_killed = started_in(folder, "os.kill(os.getpid(), signal.SIGKILL)")
        assert os.path.isdir(folder_of_killed)
        second = started_in(folder)
        assert os.listdir(folder) == [os.path.basename(second)]


def test_the_socket_of_a_run_in_another_pid_namespace_stays():
    """Its process id, that of no process here, is in the name of its folder."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, f"{PREFIX}{2**22 + 1}-x", SOCKET)
        os.mkdir(os.path.dirname(path))
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(path)
            listening.listen()
            started_in(folder)
            assert os.path.exists(path)
        started_in(folder)  # the control: nobody listens now
        assert not os.path.exists(os.path.dirname(path))


def test_a_folder_whose_path_is_too_long_for_a_socket_is_not_used(tmp_path):
    long = tmp_path / ("x" * 90)
    long.mkdir()
    used = started_in(long)
    assert os.path.isdir(used)
    assert not used.startswith(str(long))


async def test_bodies_of_no_announced_length_count_for_their_agent_as_they_come(monkeypatch):
    monkeypatch.setattr(gateway_module, "SHORT_BYTES", 10)
    monkeypatch.setattr(gateway_module, "MAX_WAITING_BYTES", 5000)
    bad, good = gateway().open(), gateway().open()
    port = int(gateway().url.rpartition(":")[2])
    begun = []
    for _ in range(2):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        head = f"POST {bad.path}/v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n"
        writer.write(head.encode() + b"Transfer-Encoding: chunked\r\n\r\nfa0\r\n" + b" " * 4000)
        await writer.drain()
        await asyncio.sleep(0.2)
        begun.append((reader, writer))
    line = await asyncio.wait_for(begun[1][0].readline(), 5)
    assert b" 429 " in line
    (status, _), _ = await asyncio.gather(post(good, "chat/completions", BODY), answer(good))
    assert status == 200
    for _, writer in begun:
        writer.close()
    for route in (bad, good):
        route.close("over")


async def test_a_refused_request_is_tried_anew_when_it_is_sent_again():
    route = gateway().open()

    async def rollout():
        (await route.next()).refuse(503, "the model did not answer")
        await answer(route)

    task = asyncio.ensure_future(rollout())
    refused = await post(route, "chat/completions", BODY)
    again = await asyncio.wait_for(post(route, "chat/completions", BODY), 10)
    await task
    assert refused[0] == 503
    # negative control: what was answered is a repetition, which nobody generates again
    repeated = await asyncio.wait_for(post(route, "chat/completions", BODY), 10)
    for status, text in (again, repeated):
        assert (status, json.loads(text)["choices"][0]["message"]["content"]) == (200, "hello")
    route.close("over")
    assert (await post(route, "chat/completions", BODY))[0] == 404
