"""Promise: an answer that arrives as a stream is whole, or it is a failure that is repeated; it is
never cut short.

Both clients that stream are tested; what is repeated, and how often, is in
``test_retry_faults.py``.
"""

from __future__ import annotations

import json
import math
import time

import pytest

import verifiers as vf
from support.small_envs import add_one, single_turn
from verifiers.clients import RetryPolicy
from verifiers.clients.dialects import DIALECTS, DialectRequest
from verifiers.testing import Behaviour, FakeServer

CLIENTS = [vf.OpenAIResponsesClient, vf.AnthropicMessagesClient]
REQUEST = vf.ModelRequest([vf.UserMessage("1 + 1")], "m")
CALLS = [vf.ToolCall("c1", "add", {"a": 1, "b": [2, 3]}), vf.ToolCall("c2", "add", {})]
ANSWER = vf.Response(
    vf.AssistantMessage("Let me see.", CALLS, reasoning_content="hm"), "tool_calls"
)

streaming = pytest.mark.parametrize("kind", CLIENTS, ids=["responses", "messages"])


def client_of(kind, server, **fields):
    """A client that repeats soon, so that the tests do."""
    max_retries = fields.pop("max_retries", 4)
    return kind(
        base_url=server.url,
        retry=RetryPolicy(max_retries=max_retries, base_s=0.001, max_s=0.01),
        **fields,
    )


def stream_of(kind, response=ANSWER):
    """The events of a whole stream."""
    request = DialectRequest([], "m", id="fixed", created=1)
    return [*kind.dialect.stream_opening(request), *kind.dialect.stream_rest(response, request)]


def cut_streams(kind, response=ANSWER):
    """A stream cut before each of its events up to the one that says how the answer ended; with
    messages that is the one before the last, which some servers do not send."""
    events = stream_of(kind, response)
    last = len(events) - (kind is vf.AnthropicMessagesClient)
    return [b"".join(events[:i]) for i in range(1, last)]


async def complete(client):
    try:
        return await client.complete(REQUEST)
    finally:
        await client.aclose()


@streaming
async def test_a_stream_cut_anywhere_is_asked_for_again(kind):
    size = len(b"".join(stream_of(kind)))
    cuts = [0, 1, *range(50, size, size // 12), size - 1]
    with FakeServer([ANSWER], script=[Behaviour(cut_bytes=cut) for cut in cuts]) as server:
        response = await complete(client_of(kind, server, max_retries=len(cuts)))
        assert server.count == len(cuts) + 1
    assert response.message == ANSWER.message
    assert len(response.attempts) == len(cuts)


@streaming
async def test_a_stream_that_ends_before_the_end_of_its_answer_is_asked_for_again(kind):
    bodies = cut_streams(kind)
    with FakeServer([ANSWER], script=[Behaviour(body=body) for body in bodies]) as server:
        response = await complete(client_of(kind, server, max_retries=len(bodies)))
        assert server.count == len(bodies) + 1
    assert response.message == ANSWER.message
    assert {
        "ended its stream before the answer was whole" in attempt.reason
        for attempt in response.attempts
    } == {True}


@streaming
async def test_without_the_last_event_the_cut_answer_reads_like_a_shorter_one(kind):
    """Negative control: the events before the cut hold a message that looks whole."""
    reader = kind.dialect.stream_reader()
    last = b"message_delta" if kind is vf.AnthropicMessagesClient else b"output_item.done"
    events = stream_of(kind, vf.Response(vf.AssistantMessage("1 + 1 is"), "stop"))
    for event in events[
        : max(i for i, earlier_event in enumerate(events) if last in earlier_event) + 1
    ]:
        reader.feed(event.decode().partition("data: ")[2])
    body = reader.body() | {"stop_reason": "end_turn", "status": "completed"}
    assert kind.dialect.parse_response(body, REQUEST, "here").text == "1 + 1 is"
    assert not reader.is_done


@streaming
@pytest.mark.parametrize("cut_bytes", [0, 200])
async def test_a_silent_stream_is_left_after_idle_timeout_and_asked_for_again(kind, cut_bytes):
    with FakeServer([ANSWER], script=[Behaviour(never=True, cut_bytes=cut_bytes)]) as server:
        started = time.monotonic()
        response = await complete(client_of(kind, server, idle_timeout=0.2))
    assert 0.2 <= time.monotonic() - started < 5
    assert "sent nothing for 0.2 s" in response.attempts[0].reason
    assert response.message == ANSWER.message


@streaming
async def test_without_an_idle_timeout_a_silent_stream_holds_its_rollout_to_the_end(kind):
    """Negative control."""
    with FakeServer([ANSWER], script=[Behaviour(never=True, cut_bytes=200)]) as server:
        with pytest.raises(vf.ModelUnavailable, match=r"did not finish a response within 0\.5 s"):
            await complete(client_of(kind, server, timeout=0.5, idle_timeout=60, max_retries=0))


@streaming
async def test_a_slow_stream_is_not_a_silent_one(kind):
    alive = kind.dialect.keep_alive(DialectRequest([], "m"))
    # which holds it all
    events = stream_of(kind) if kind is vf.AnthropicMessagesClient else stream_of(kind)[-1:]
    body = alive * 2 + b"".join(events)
    with FakeServer(script=[Behaviour(body=body, drip_s=0.6 / len(body))]) as server:
        started = time.monotonic()
        response = await complete(client_of(kind, server, idle_timeout=0.2, max_retries=0))
    assert time.monotonic() - started > 0.5
    assert response.message == ANSWER.message


ERRORS = {
    529: vf.ModelUnavailable,
    500: vf.ModelUnavailable,
    429: vf.RateLimited,
    401: vf.AuthenticationFailed,
}


def error_stream(kind, status, text):
    request = DialectRequest([], "m")
    return b"".join(kind.dialect.stream_opening(request)) + kind.dialect.error_event(
        status, text, request
    )


@streaming
@pytest.mark.parametrize("status", [529, 500, 429])
async def test_an_error_inside_a_stream_is_repeated_as_one_outside(kind, status):
    outside = Behaviour(status, body=json.dumps(kind.dialect.error_body(status, "busy")))
    inside = Behaviour(body=error_stream(kind, status, "busy"))
    with FakeServer([ANSWER], script=[inside, outside]) as server:
        response = await complete(client_of(kind, server))
        assert server.count == 3
    assert response.message == ANSWER.message
    with FakeServer([ANSWER], script=[inside]) as server:
        with pytest.raises(ERRORS[status], match="busy"):
            await complete(client_of(kind, server, max_retries=0))


@streaming
@pytest.mark.parametrize("is_inside", [True, False])
def test_a_prompt_that_does_not_fit_is_a_stop_condition_in_either_place(kind, is_inside):
    text = "prompt is too long: 210000 tokens > 200000 maximum"
    if is_inside:
        body = error_stream(kind, 400, text)
    else:
        body = json.dumps(kind.dialect.error_body(400, text))
    behaviour = Behaviour(200 if is_inside else 400, body=body)
    with FakeServer("1", script=lambda hit: behaviour) as server:
        results = single_turn(2).evaluate(client_of(kind, server), "m")
        assert server.count == 2
    assert results["stop_conditions"] == ["prompt_too_long"] * 2


NO_STREAMS = {
    "not JSON": b"data: {\n\n",
    "a number": b"data: 3\n\n",
    "a list": b"data: []\n\n",
    "a web page": b"<html>",
    "nothing": b"",
    "JSON without an answer": b"{}",
    "a null answer": b'{"output": null, "content": null}',
}


@streaming
@pytest.mark.parametrize("body", NO_STREAMS.values(), ids=NO_STREAMS)
def test_what_is_no_answer_costs_its_rollout_and_is_named(kind, body):
    with FakeServer(
        add_one, script=lambda hit: Behaviour(body=body) if b"0 + 1" in hit.body else None
    ) as server:
        results = single_turn(3).evaluate(client_of(kind, server, max_retries=1), "m")
        assert server.count == 4
    assert [error.error if error else None for error in results["errors"]] == [
        "MalformedResponse",
        None,
        None,
    ]
    assert math.isnan(results["rewards"][0])
    assert results["rewards"][1:] == [1.0, 1.0]
    assert server.url in results["errors"][0].message


@streaming
async def test_a_stream_above_the_limit_on_its_length_is_left(kind):
    body = stream_of(kind)[0] + b": keep-alive\n\n" * 10_000
    with FakeServer(script=lambda hit: Behaviour(body=body)) as server:
        with pytest.raises(vf.MalformedResponse, match="more than 65536 bytes"):
            await complete(client_of(kind, server, max_response_bytes=2**16, max_retries=0))


@streaming
def test_a_server_that_fails_in_every_way_costs_nothing(kind):
    faults = [
        Behaviour(529, body=json.dumps(kind.dialect.error_body(529, "busy"))),
        Behaviour(body=cut_streams(kind, vf.Response(vf.AssistantMessage("x")))[-1]),
        Behaviour(cut_bytes=150),
        Behaviour(never=True, cut_bytes=100),
        Behaviour(body=error_stream(kind, 529, "busy")),
        Behaviour(reset=True),
        Behaviour(body=b"data: {\n\n"),
    ]
    script = [fault for fault in faults for _ in range(4)]
    with FakeServer(add_one, script=script) as server:
        results = single_turn(20).evaluate(
            client_of(kind, server, idle_timeout=0.3, max_retries=len(script)), "m"
        )
        assert server.count == 20 + len(script)
    assert results["rewards"] == [1.0] * 20


@streaming
def test_without_repeats_the_same_server_costs_the_rollouts_it_failed(kind):
    """Negative control."""
    with FakeServer(add_one, script=[Behaviour(cut_bytes=150)] * 4) as server:
        results = single_turn(20).evaluate(
            client_of(kind, server, max_retries=0), "m", abort_after=0
        )
    assert [error.error for error in results["errors"] if error is not None] == [
        "ModelUnavailable"
    ] * 4


def test_every_dialect_but_chat_is_streamed_by_a_client():
    assert {kind.dialect.NAME for kind in CLIENTS} == DIALECTS.keys() - {"chat"}
