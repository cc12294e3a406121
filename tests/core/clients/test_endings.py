"""How replies and streams end: whole, truncated, or another attempt; never a shorter answer."""

from __future__ import annotations

import json

import pytest

import verifiers as vf
from verifiers.clients.reply import COMPLETE, INTERRUPTED, TRUNCATED
from verifiers.clients.retry import RetryPolicy
from verifiers.testing import Behaviour, FakeServer

REQUEST = vf.ModelRequest([vf.UserMessage("hi")], "m")


def chat(reason, text="It is 1, and th", **message):
    message = {"role": "assistant", "content": text, **message}
    return json.dumps({"choices": [{"message": message, "finish_reason": reason}]})


def messages(reason, text="It is 1, and th"):
    return json.dumps({"content": [{"type": "text", "text": text}], "stop_reason": reason})


def responses(reason, text="It is 1, and th"):
    item = {"type": "message", "content": [{"type": "output_text", "text": text}]}
    details = {"status": "incomplete", "incomplete_details": {"reason": reason}}
    return json.dumps({"output": [item], **details})


CLIENTS = {
    chat: vf.OpenAIChatCompletionsClient,
    messages: vf.AnthropicMessagesClient,
    responses: vf.OpenAIResponsesClient,
}


async def answered(kind, replies, max_retries=0):
    """(the response or the error, number of requests)"""
    with FakeServer("-", script=lambda hit: replies[min(hit.index, len(replies) - 1)]) as server:
        client = kind(base_url=server.url, retry=RetryPolicy(max_retries, base_s=0.0))
        try:
            return await client.complete(REQUEST), server.count
        except vf.VerifiersError as error:
            return error, server.count
        finally:
            await client.aclose()


# --- finish reasons -------------------------------------------------------------------------------


CUT = (
    "length",
    "max_tokens",
    "MAX_TOKENS",
    "max_output_tokens",
    "model_context_window_exceeded",
    "context_length_exceeded",
    "model_length",
    "repetition_truncation",
    "content_filter",
    "SAFETY",
    "RECITATION",
    "guardrail_intervened",
)
BROKEN_OFF = (
    "network_error",
    "insufficient_system_resource",
    "error",
    "abort",
    "cancelled",
    "timeout",
    "unknown",
    "OTHER",
    "pause_turn",
    "MALFORMED_FUNCTION_CALL",
)
ENDED = ("stop", "STOP", "end_turn", "eos", "stop_sequence", "complete", "tool_use", "tool-calls")


@pytest.mark.parametrize("dialect", CLIENTS)
@pytest.mark.parametrize("reason", CUT)
async def test_a_cut_answer_is_truncated(dialect, reason):
    response, _ = await answered(CLIENTS[dialect], [Behaviour(body=dialect(reason))])
    assert (response.text, response.finish_reason) == ("It is 1, and th", "length")


@pytest.mark.parametrize("dialect", [chat, messages])
@pytest.mark.parametrize("reason", [*BROKEN_OFF, "next_years_word"])
async def test_an_interrupted_answer_is_repeated_and_then_unknown(dialect, reason):
    part, whole = Behaviour(body=dialect(reason)), Behaviour(body=dialect("stop", "It is 1."))
    response, count = await answered(CLIENTS[dialect], [part, whole], max_retries=1)
    assert (response.text, response.finish_reason, count) == ("It is 1.", "stop", 2)
    error, count = await answered(CLIENTS[dialect], [part], max_retries=1)
    assert isinstance(error, vf.ModelUnavailable | vf.MalformedResponse)
    assert reason in str(error)
    assert count == 2


@pytest.mark.parametrize("dialect", [chat, messages])
@pytest.mark.parametrize("reason", ENDED)
async def test_a_whole_answer_is_one(dialect, reason):
    """Negative control."""
    response, _ = await answered(CLIENTS[dialect], [Behaviour(body=dialect(reason))])
    assert response.finish_reason in ("stop", "tool_calls")


async def test_a_word_that_nobody_knows_is_repeated_once_and_named():
    error, count = await answered(
        vf.OpenAIChatCompletionsClient, [Behaviour(body=chat("zapped"))], max_retries=9
    )
    assert count == 2
    assert "finish reason 'zapped'" in str(error)


def test_every_word_has_one_meaning():
    assert not TRUNCATED & INTERRUPTED | TRUNCATED & COMPLETE | INTERRUPTED & COMPLETE


def test_a_word_that_nobody_knows_is_told_once_for_a_run(tmp_path):
    env = vf.SingleTurnEnv(
        dataset=[{"question": f"q{i}", "answer": "x"} for i in range(3)],
        rubric=vf.Rubric(funcs=[lambda completion: 1.0]),
    )
    with FakeServer("-", script=lambda hit: Behaviour(body=chat("zapped"))) as server:
        config = vf.ClientConfig(api_base_url=server.url, max_retries=0)
        results = env.evaluate(config, "m", num_examples=3)
    assert all(reward != reward for reward in results["reward"])
    assert all("zapped" in error["message"] for error in results["errors"])


async def test_a_status_of_an_item_says_that_the_answer_was_cut():
    item = {"type": "message", "content": [{"type": "output_text", "text": "a"}]}
    for status, reason in (("incomplete", "length"), ("completed", "stop")):
        body = json.dumps({"status": "completed", "output": [{**item, "status": status}]})
        response, _ = await answered(vf.OpenAIResponsesClient, [Behaviour(body=body)])
        assert response.finish_reason == reason


# --- streams --------------------------------------------------------------------------------------


def streamed(*events, tail=b""):
    data = [
        event if isinstance(event, bytes) else b"data: " + json.dumps(event).encode() + b"\n\n"
        for event in events
    ]
    return Behaviour(headers={"Content-Type": "text/event-stream"}, body=b"".join(data) + tail)


DONE = b"data: [DONE]\n\n"
PING = {"type": "ping"}

START = {"type": "message_start", "message": {"id": "m", "role": "assistant", "usage": {}}}


def block(index, kind="text", **fields):
    fields = fields or {"text": ""}
    content = {"type": kind, **fields}
    return {"type": "content_block_start", "index": index, "content_block": content}


def text(index, text):
    delta = {"type": "text_delta", "text": text}
    return {"type": "content_block_delta", "index": index, "delta": delta}


def stop(index):
    return {"type": "content_block_stop", "index": index}


def ends(reason="end_turn"):
    return {"type": "message_delta", "delta": {"stop_reason": reason}, "usage": {}}


STOP = {"type": "message_stop"}
HELLO = (block(0), text(0, "hel"), text(0, "lo"), stop(0))
CALL = {"id": "c", "name": "f", "input": {}}
INPUT = {"type": "input_json_delta", "partial_json": '{"a": 1}'}
CALLED = {"type": "content_block_delta", "delta": INPUT}

WHOLE_MESSAGES = {
    "in order": (START, *HELLO, ends(), STOP),
    "no message_stop": (START, *HELLO, ends()),
    "no message_stop, and [DONE]": (START, *HELLO, ends(), DONE),
    "no message_start": (*HELLO, ends(), STOP),
    "no content_block_stop": (START, *HELLO[:3], ends(), STOP),
    "two message_start": (START, START, *HELLO, ends(), STOP),
    "a block started twice": (START, HELLO[0], *HELLO, ends(), STOP),
    "two message_delta": (START, *HELLO, ends(), ends(None), STOP),
    "two message_stop": (START, *HELLO, ends(), STOP, STOP),
    "pings": (PING, START, PING, *HELLO, ends(), PING, STOP),
    "[DONE] after the end": (START, *HELLO, ends(), STOP, DONE),
    "usage after the end": (START, *HELLO, ends(), STOP, {**ends(), "usage": {}}),
    "text in the start of its block": (START, block(0, text="hel"), text(0, "lo"), ends(), STOP),
    "one number for two blocks": (
        START,
        block(0),
        text(0, "hel"),
        stop(0),
        block(0),
        text(0, "lo"),
        stop(0),
        ends(),
        STOP,
    ),
    "blocks without numbers": (
        START,
        {"type": "content_block_start", "content_block": {"type": "thinking", "thinking": "t"}},
        {"type": "content_block_stop"},
        {"type": "content_block_start", "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", "delta": {"type": "text_delta", "text": "hello"}},
        ends(),
        STOP,
    ),
    "blocks out of order": (
        START,
        block(1),
        text(1, "lo"),
        stop(1),
        block(0),
        text(0, "hel"),
        stop(0),
        ends(),
        STOP,
    ),
    "a last event without its blank line": (
        START,
        *HELLO,
        ends(),
        b'event: message_stop\ndata: {"type": "message_stop"}\n',
    ),
}
NO_MESSAGES = {
    "nothing": (),
    "[DONE] alone": (DONE,),
    "the start alone": (START,),
    "no stop reason": (START, *HELLO, STOP),
    "a stop reason that is null": (START, *HELLO, ends(None), STOP),
    "no end": (START, *HELLO),
    "no end, and [DONE]": (START, *HELLO, DONE),
    "a cut text": (START, *HELLO[:2]),
    "a block that was not started": (START, text(0, "hello"), ends(), STOP),
    "a started block that starts anew": (START, *HELLO[:2], *HELLO, ends(), STOP),
    "text after the end": (START, *HELLO[:2], ends(), STOP, text(0, "lo")),
    "an error after the text": (START, *HELLO, {"type": "error", "error": {"message": "x"}}),
    "an interrupted answer": (START, *HELLO, ends("network_error"), STOP),
}


@pytest.mark.parametrize("events", WHOLE_MESSAGES.values(), ids=WHOLE_MESSAGES)
async def test_a_stream_of_messages_is_whole(events):
    response, _ = await answered(vf.AnthropicMessagesClient, [streamed(*events)])
    assert isinstance(response, vf.Response), response
    assert (response.text, response.finish_reason) == ("hello", "stop")


@pytest.mark.parametrize("events", NO_MESSAGES.values(), ids=NO_MESSAGES)
async def test_a_stream_of_messages_that_is_not_whole_is_repeated(events):
    whole = streamed(START, *HELLO, ends(), STOP)
    error, _ = await answered(vf.AnthropicMessagesClient, [streamed(*events)])
    assert isinstance(error, vf.ModelUnavailable | vf.MalformedResponse)
    response, count = await answered(vf.AnthropicMessagesClient, [streamed(*events), whole], 1)
    assert (response.text, count) == ("hello", 2)


async def test_a_call_beside_a_text_of_the_same_number_is_not_lost():
    started = block(0, "tool_use", **CALL)
    events = (START, *HELLO, started, {**CALLED, "index": 0}, stop(0), ends("tool_use"), STOP)
    response, _ = await answered(vf.AnthropicMessagesClient, [streamed(*events)])
    assert (response.text, response.message.tool_calls[0].arguments) == ("hello", '{"a": 1}')


PART = {"type": "output_text", "text": "hello", "annotations": []}
ITEM = {
    "type": "message",
    "id": "m1",
    "role": "assistant",
    "status": "completed",
    "content": [PART],
}
AT = {"output_index": 0, "content_index": 0, "item_id": "m1"}


def event(kind, **fields):
    return {"type": f"response.{kind}", **fields}


def ended(output, status="completed", **fields):
    return event(status, response={"id": "r", "status": status, "output": output, **fields})


CREATED = event("created", response={"id": "r", "status": "in_progress", "output": []})
ADDED = event("output_item.added", output_index=0, item={**ITEM, "content": []})
PART_ADDED = event("content_part.added", **AT, part={**PART, "text": ""})
DELTAS = (
    event("output_text.delta", **AT, delta="hel"),
    event("output_text.delta", **AT, delta="lo"),
)
TEXT_DONE = event("output_text.done", **AT, text="hello")
ITEM_DONE = event("output_item.done", output_index=0, item=ITEM)
ALL = (CREATED, ADDED, PART_ADDED, *DELTAS, TEXT_DONE, ITEM_DONE)

WHOLE_RESPONSES = {
    "in order": (*ALL, ended([ITEM])),
    "the last event alone": (ended([ITEM]),),
    "output null": (*ALL, ended(None)),
    "output empty": (*ALL, ended([])),
    "no item.done": (*ALL[:-1], ended(None)),
    "text events alone": (*ALL[:-1], ended([])),
    "deltas alone": (CREATED, *DELTAS, ended([])),
    "the item and deltas": (CREATED, ADDED, *DELTAS, ended([])),
    "the whole text alone": (CREATED, TEXT_DONE, ended([])),
    "a part that is done": (
        CREATED,
        ADDED,
        event("content_part.done", **AT, part=PART),
        ended([]),
    ),
    "deltas without places": (
        event("output_text.delta", delta="hel"),
        event("output_text.delta", delta="lo"),
        ended(None),
    ),
    "item.done twice": (*ALL, ITEM_DONE, ended([])),
    "[DONE]": (*ALL, ended([ITEM]), DONE),
    "[DONE] before the end": (*ALL, DONE, ended([ITEM])),
    "no status": (*ALL, event("completed", response={"id": "r", "output": [ITEM]})),
    "events after the end": (*ALL, ended([ITEM]), ITEM_DONE),
    "a last event without its blank line": (
        *ALL,
        b"data: " + json.dumps(ended([ITEM])).encode() + b"\n",
    ),
    "reasoning before the text": (
        event("output_item.added", output_index=0, item={"type": "reasoning", "summary": []}),
        event("reasoning_summary_text.delta", output_index=0, summary_index=0, delta="t"),
        event("output_text.delta", output_index=1, content_index=0, delta="hello"),
        ended([]),
    ),
}
NO_RESPONSES = {
    "nothing": (),
    "[DONE] alone": (DONE,),
    "no end": ALL,
    "no end, and [DONE]": (*ALL, DONE),
    "nothing but the end": (CREATED, ended([])),
    "nothing but the end, output null": (CREATED, ended(None)),
    "a cut stream": ALL[:4],
    "a failure": (*ALL, ended([], "failed", error={"code": "server_error", "message": "x"})),
    "an end that cancels": (*ALL, ended([ITEM], "cancelled")),
    "a last event with less": (*ALL, ended([{**ITEM, "content": [{**PART, "text": "hel"}]}])),
    "a last event without a status": (*ALL, event("completed", response=None)),
    "a status that is no end": (
        *ALL,
        event("completed", response={"status": "in_progress", "output": [ITEM]}),
    ),
    "text after the end": (*ALL[:4], ended([]), DELTAS[1]),
}


@pytest.mark.parametrize("events", WHOLE_RESPONSES.values(), ids=WHOLE_RESPONSES)
async def test_a_stream_of_responses_is_whole(events):
    response, _ = await answered(vf.OpenAIResponsesClient, [streamed(*events)])
    assert isinstance(response, vf.Response), response
    assert (response.text, response.finish_reason) == ("hello", "stop")


@pytest.mark.parametrize("events", NO_RESPONSES.values(), ids=NO_RESPONSES)
async def test_a_stream_of_responses_that_is_not_whole_is_repeated(events):
    error, _ = await answered(vf.OpenAIResponsesClient, [streamed(*events)])
    assert isinstance(error, vf.ModelUnavailable | vf.MalformedResponse), error
    whole = streamed(*ALL, ended([ITEM]))
    response, count = await answered(vf.OpenAIResponsesClient, [streamed(*events), whole], 1)
    assert (response.text, count) == ("hello", 2)


@pytest.mark.parametrize("has_status", [True, False])
async def test_a_stream_that_ends_incomplete_is_truncated(has_status):
    last = ended([ITEM], "incomplete")
    if not has_status:
        del last["response"]["status"]
    response, _ = await answered(vf.OpenAIResponsesClient, [streamed(*ALL, last)])
    assert (response.text, response.finish_reason) == ("hello", "length")


async def test_a_call_of_events_alone_is_made():
    made = {"type": "function_call", "id": "fc_1", "call_id": "c", "name": "f", "arguments": ""}
    at = {"output_index": 0, "item_id": "fc_1"}
    events = (
        CREATED,
        event("output_item.added", output_index=0, item=made),
        event("function_call_arguments.delta", **at, delta='{"a"'),
        event("function_call_arguments.delta", **at, delta=": 1}"),
        ended([]),
    )
    response, _ = await answered(vf.OpenAIResponsesClient, [streamed(*events)])
    assert response.message.tool_calls == [vf.ToolCall("c", "f", '{"a": 1}')]
    assert response.finish_reason == "tool_calls"


def chunk(delta, reason=None):
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": reason}]}


CHAT_STREAMS = {
    "a whole stream": (chunk({"content": "hello"}), chunk({}, "stop"), DONE),
    "a cut stream": (chunk({"content": "hel"}),),
    "nothing": (),
    "[DONE] alone": (DONE,),
}


@pytest.mark.parametrize("events", CHAT_STREAMS.values(), ids=CHAT_STREAMS)
async def test_a_stream_that_nobody_asked_for_is_no_answer(events):
    """Chat completions are read as a whole."""
    error, _ = await answered(vf.OpenAIChatCompletionsClient, [streamed(*events)])
    assert isinstance(error, vf.MalformedResponse)
