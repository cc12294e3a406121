"""The dialects against the vendors' own SDKs: their clients read what we write, and we read what
their types write."""

from __future__ import annotations

import importlib
import json
import time

import openai
import pytest
from openai.types.responses import Response as OpenAIResponse
from pydantic import TypeAdapter

import verifiers as vf
from verifiers.clients.dialects import DIALECTS
from verifiers.testing import Behaviour, FakeServer

ADD = vf.Tool(
    "add", "Add two numbers.", {"type": "object", "properties": {"a": {"type": "integer"}}}
)
CALLS = [vf.ToolCall("c1", "add", {"a": 1}), vf.ToolCall("c2", "add", {"a": 2})]
ANSWER = vf.Response(
    vf.AssistantMessage("Let me add.", CALLS, reasoning_content="two sums"),
    "tool_calls",
    usage=vf.Usage(
        prompt_tokens=20,
        completion_tokens=7,
        cached_tokens=12,
        cache_write_tokens=3,
        reasoning_tokens=2,
    ),
)
CUT = vf.Response(vf.AssistantMessage("Let me"), "length", usage=vf.Usage(5, 2))
TALK = [vf.SystemMessage("Be brief."), vf.UserMessage("1 + 1?")]


@pytest.fixture
def server():
    with FakeServer(
        lambda request: CUT if request.sampling_args.get("max_tokens") == 2 else ANSWER
    ) as running:
        yield running


# --- their clients read what we write -------------------------------------------------------------


@pytest.fixture
def openai_client(server):
    with openai.OpenAI(base_url=server.url, api_key="none", max_retries=0) as client:
        yield client


def responses_tools():
    return DIALECTS["responses"].request_body(vf.ModelRequest(TALK, "m", tools=[ADD]))["tools"]


def check_response(response):
    reasoning, message, *calls = response.output
    assert isinstance(response, OpenAIResponse)
    assert (response.status, response.output_text) == ("completed", "Let me add.")
    assert [part.text for part in reasoning.summary] == ["two sums"]
    assert (message.type, message.role, message.status) == ("message", "assistant", "completed")
    assert [(call.type, call.call_id, call.name, json.loads(call.arguments)) for call in calls] == [
        ("function_call", "c1", "add", {"a": 1}),
        ("function_call", "c2", "add", {"a": 2}),
    ]
    usage = response.usage
    assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (20, 7, 27)
    details = usage.input_tokens_details
    assert (details.cached_tokens, details.cache_write_tokens) == (12, 3)
    assert usage.output_tokens_details.reasoning_tokens == 2
    # strictly: every field is there
    OpenAIResponse.model_validate(response.model_dump(by_alias=True))


def test_the_openai_sdk_reads_a_response(openai_client):
    check_response(
        openai_client.responses.create(model="m", input="1 + 1?", tools=responses_tools())
    )
    cut = openai_client.responses.create(model="m", input="1 + 1?", max_output_tokens=2)
    assert (cut.status, cut.incomplete_details.reason, cut.output_text) == (
        "incomplete",
        "max_output_tokens",
        "Let me",
    )


def test_the_openai_sdk_reads_a_stream_of_a_response(openai_client):
    with openai_client.responses.stream(
        model="m", input="1 + 1?", tools=responses_tools()
    ) as stream:
        events = list(stream)
        check_response(stream.get_final_response())
    assert [event.sequence_number for event in events] == list(range(len(events)))
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    arguments = [
        event.arguments for event in events if event.type == "response.function_call_arguments.done"
    ]
    assert (text, [json.loads(a) for a in arguments]) == ("Let me add.", [{"a": 1}, {"a": 2}])
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    opened = [event.type for event in events].count("response.output_item.added")
    assert opened == [event.type for event in events].count("response.output_item.done") == 4


def test_the_openai_sdk_reads_chat_completions(openai_client):
    messages = [{"role": "user", "content": "1 + 1?"}]
    choice = openai_client.chat.completions.create(model="m", messages=messages).choices[0]
    assert (choice.message.content, choice.finish_reason) == ("Let me add.", "tool_calls")
    assert [json.loads(call.function.arguments) for call in choice.message.tool_calls] == [
        {"a": 1},
        {"a": 2},
    ]


def test_the_openai_sdk_reads_a_stream_of_chat_completions(openai_client):
    messages = [{"role": "user", "content": "1 + 1?"}]
    options = {"include_usage": True}
    with openai_client.chat.completions.stream(
        model="m", messages=messages, stream_options=options
    ) as stream:
        completion = stream.get_final_completion()
    choice = completion.choices[0]
    assert (choice.message.content, choice.finish_reason) == ("Let me add.", "tool_calls")
    assert [json.loads(call.function.arguments) for call in choice.message.tool_calls] == [
        {"a": 1},
        {"a": 2},
    ]
    assert (
        completion.usage.prompt_tokens,
        completion.usage.prompt_tokens_details.cached_tokens,
    ) == (20, 12)
    plain = list(openai_client.chat.completions.create(model="m", messages=messages, stream=True))
    assert all(chunk.usage is None for chunk in plain)  # only where the request asks for it


@pytest.fixture
def anthropic_client(server):
    import anthropic  # late: it takes two CPU seconds, in every process that collects the tests

    with anthropic.Anthropic(
        base_url=server.url.removesuffix("/v1"), api_key="none", max_retries=0
    ) as client:
        yield client


def messages_call(**fields):
    tools = DIALECTS["messages"].request_body(vf.ModelRequest(TALK, "m", tools=[ADD]))["tools"]
    return {
        "model": "m",
        "max_tokens": 9,
        "messages": [{"role": "user", "content": "1"}],
        "tools": tools,
    } | fields


def check_message(message):
    from anthropic.types import Message

    thinking, text, *calls = message.content
    assert (thinking.thinking, text.text, message.stop_reason) == (
        "two sums",
        "Let me add.",
        "tool_use",
    )
    assert [(call.id, call.name, call.input) for call in calls] == [
        ("c1", "add", {"a": 1}),
        ("c2", "add", {"a": 2}),
    ]
    usage = message.usage
    assert (
        usage.input_tokens,
        usage.cache_read_input_tokens,
        usage.cache_creation_input_tokens,
    ) == (5, 12, 3)
    assert usage.output_tokens == 7
    Message.model_validate(message.model_dump(by_alias=True))  # strictly: every field is there


def test_the_anthropic_sdk_reads_a_message(anthropic_client):
    check_message(anthropic_client.messages.create(**messages_call()))
    assert (
        anthropic_client.messages.create(**messages_call(max_tokens=2)).stop_reason == "max_tokens"
    )


def test_the_anthropic_sdk_reads_a_stream_of_a_message(anthropic_client):
    with anthropic_client.messages.stream(**messages_call()) as stream:
        assert "".join(stream.text_stream) == "Let me add."
        check_message(stream.get_final_message())


@pytest.mark.parametrize(
    ("status", "kind"), [(400, "BadRequestError"), (429, "RateLimitError"), (529, "APIStatusError")]
)
def test_the_anthropic_sdk_reads_an_error(status, kind):
    import anthropic

    body = json.dumps(DIALECTS["messages"].error_body(status, "no room"))
    with FakeServer(script=[Behaviour(status, body=body)]) as server:
        with anthropic.Anthropic(
            base_url=server.url.removesuffix("/v1"), api_key="none", max_retries=0
        ) as client:
            with pytest.raises(getattr(anthropic, kind), match="no room") as caught:
                client.messages.create(**messages_call())
    assert caught.value.status_code == status


@pytest.mark.parametrize("name", ["responses", "chat"])
def test_the_openai_sdk_reads_an_error(name):
    body = json.dumps(DIALECTS[name].error_body(400, "no room"))
    with FakeServer(script=[Behaviour(400, body=body)]) as server:
        with openai.OpenAI(base_url=server.url, api_key="none", max_retries=0) as client:
            with pytest.raises(openai.BadRequestError, match="no room"):
                client.responses.create(model="m", input="x")


# --- our requests are of their types --------------------------------------------------------------


def exhausted(value):
    """Iterates what pydantic checks only while it is iterated."""
    if isinstance(value, dict):
        return {name: exhausted(inner) for name, inner in value.items()}
    if isinstance(value, str) or not hasattr(value, "__iter__"):
        return value
    return [exhausted(inner) for inner in value]


@pytest.mark.parametrize(
    ("name", "module", "params"),
    [
        (
            "responses",
            "openai.types.responses.response_create_params",
            "ResponseCreateParamsStreaming",
        ),
        ("messages", "anthropic.types.message_create_params", "MessageCreateParamsStreaming"),
    ],
)
def test_a_request_is_of_the_types_of_the_vendor(name, module, params):
    image = vf.ImageUrlContentPart("data:image/png;base64,iVBORw0KGgo=")
    talk = [
        *TALK,
        ANSWER.message,
        vf.ToolMessage("1", "c1"),
        vf.ToolMessage([vf.TextContentPart("2"), image], "c2"),
        vf.AssistantMessage("2"),
        vf.UserMessage([vf.TextContentPart("And this?"), image]),
    ]
    sampling = {
        "max_tokens": 5,
        "temperature": 0.5,
        "tool_choice": "auto",
        "reasoning_effort": "low",
    }
    sampling["response_format"] = {
        "type": "json_schema",
        "json_schema": {"name": "n", "schema": {"type": "object"}},
    }
    body = DIALECTS[name].request_body(
        vf.ModelRequest(talk, "m", tools=[ADD], sampling_args=sampling), stream=True
    )
    adapter = TypeAdapter(getattr(importlib.import_module(module), params))
    exhausted(adapter.validate_python(body))
    broken = json.loads(
        json.dumps(body).replace('"call_id"', '"call"').replace('"tool_use_id"', '"tool_use"')
    )
    with pytest.raises(ValueError):
        exhausted(adapter.validate_python(broken))


# --- we read what their types write ---------------------------------------------------------------


def their_response():
    return OpenAIResponse.model_validate(
        {
            "id": "resp_1",
            "object": "response",
            "created_at": time.time(),
            "model": "m",
            "status": "completed",
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": [],
            "output": [
                {
                    "type": "reasoning",
                    "id": "rs_1",
                    "summary": [{"type": "summary_text", "text": "hm"}],
                    "encrypted_content": "gAAA",
                },
                {
                    "type": "message",
                    "id": "msg_1",
                    "role": "assistant",
                    "status": "completed",
                    "content": [{"type": "output_text", "text": "hi", "annotations": []}],
                },
                {
                    "type": "function_call",
                    "id": "fc_1",
                    "call_id": "c1",
                    "name": "add",
                    "arguments": '{"a":1}',
                    "status": "completed",
                },
            ],
            "usage": {
                "input_tokens": 20,
                "input_tokens_details": {"cached_tokens": 12, "cache_write_tokens": 0},
                "output_tokens": 7,
                "output_tokens_details": {"reasoning_tokens": 4},
                "total_tokens": 27,
            },
        }
    )


async def complete(client_class, body, **fields):
    with FakeServer(script=[Behaviour(body=body)]) as server:
        client = client_class(base_url=server.url, max_retries=0, **fields)
        try:
            return await client.complete(vf.ModelRequest(TALK, "m")), server.requests[0]
        finally:
            await client.aclose()


@pytest.mark.parametrize("streamed", [False, True])
async def test_our_client_reads_a_response_of_the_openai_types(streamed):
    theirs = their_response().model_dump(mode="json")
    body = json.dumps(theirs)
    if streamed:
        event = {"type": "response.completed", "sequence_number": 0, "response": theirs}
        body = f"event: response.completed\ndata: {json.dumps(event)}\n\n"
    response, _ = await complete(vf.OpenAIResponsesClient, body)
    assert (response.text, response.message.reasoning_content, response.finish_reason) == (
        "hi",
        "hm",
        "tool_calls",
    )
    assert response.message.tool_calls == [vf.ToolCall("c1", "add", '{"a":1}')]
    assert response.usage == vf.Usage(20, 7, 12, 0, 4)
    # the next turn holds the reasoning item as the vendor wrote it
    request = vf.ModelRequest([*TALK, response.message, vf.ToolMessage("2", "c1")], "m")
    items = DIALECTS["responses"].request_body(request)["input"]
    assert items[2] == theirs["output"][0]


def their_message_events():
    """A stream with every kind of block, each event of the SDK's type."""
    usage = {
        "input_tokens": 5,
        "cache_read_input_tokens": 12,
        "cache_creation_input_tokens": 3,
        "output_tokens": 1,
    }
    head = {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": "m",
        "content": [],
        "stop_reason": None,
    }
    blocks = [
        (
            {"type": "thinking", "thinking": "", "signature": ""},
            [
                {"type": "thinking_delta", "thinking": "two "},
                {"type": "thinking_delta", "thinking": "sums"},
                {"type": "signature_delta", "signature": "EqQB"},
            ],
        ),
        ({"type": "redacted_thinking", "data": "xyz"}, []),
        (
            {"type": "text", "text": ""},
            [{"type": "text_delta", "text": "h"}, {"type": "text_delta", "text": "i"}],
        ),
        (
            {"type": "tool_use", "id": "c1", "name": "add", "input": {}},
            [{"type": "input_json_delta", "partial_json": part} for part in ("", '{"a', '": 1}')],
        ),
        ({"type": "tool_use", "id": "c2", "name": "now", "input": {}}, []),
    ]
    yield {"type": "message_start", "message": head | {"usage": usage}}
    for index, (block, deltas) in enumerate(blocks):
        yield {"type": "content_block_start", "index": index, "content_block": block}
        for delta in deltas:
            yield {"type": "content_block_delta", "index": index, "delta": delta}
        yield {"type": "content_block_stop", "index": index}
    yield {
        "type": "message_delta",
        "delta": {"stop_reason": "tool_use"},
        "usage": {"output_tokens": 7},
    }
    yield {"type": "message_stop"}


async def test_our_client_reads_a_stream_of_the_anthropic_types():
    from anthropic.types import RawMessageStreamEvent

    adapter = TypeAdapter(RawMessageStreamEvent)
    events = [adapter.validate_python(event) for event in their_message_events()]
    lines = [f"event: {event.type}\ndata: {event.model_dump_json()}\n\n" for event in events]
    response, sent = await complete(
        vf.AnthropicMessagesClient, "".join([*lines[:1], "event: ping\ndata: {}\n\n", *lines[1:]])
    )
    message = response.message
    assert (message.content, message.reasoning_content, response.finish_reason) == (
        "hi",
        "two sums",
        "tool_calls",
    )
    assert message.tool_calls == [
        vf.ToolCall("c1", "add", '{"a": 1}'),
        vf.ToolCall("c2", "now", "{}"),
    ]
    assert response.usage == vf.Usage(20, 7, 12, 3)
    assert sent["system"] == "Be brief."
    request = vf.ModelRequest(
        [*TALK, message, vf.ToolMessage("2", "c1"), vf.ToolMessage("3", "c2")], "m"
    )
    said = DIALECTS["messages"].request_body(request)["messages"][1]["content"]
    assert said[:2] == [
        {"type": "thinking", "thinking": "two sums", "signature": "EqQB"},
        {"type": "redacted_thinking", "data": "xyz"},
    ]
