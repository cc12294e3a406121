"""Histories as servers take them: against loopback servers as strict as the strictest real ones.
What the rollout holds, and training sees, stays as it was sampled."""

from __future__ import annotations

import json
import re

import pytest

import verifiers as vf
from support.small_envs import Talk
from verifiers.clients import OpenAIChatCompletionsClient, as_client
from verifiers.clients.dialects import messages, responses
from verifiers.clients.payload import BLANK, EMPTY_TEXT, sendable
from verifiers.testing import Behaviour, FakeServer
from verifiers.types import AssistantMessage, ModelRequest, ToolCall, ToolMessage, UserMessage

DETAILS = [{"type": "reasoning.encrypted", "data": "AAAA", "id": "r1"}]
BAD = [
    '{"a": 1, "b": ',
    "",
    "[1, 2]",
    '"text"',
    "null",
    '{"a": NaN}',
    "{'a': 1}",
    "\ud800",
    "{" * 5000,
]


def refusal(status, text):
    return Behaviour(status, body=json.dumps({"error": {"message": text, "code": status}}))


def answer(message, reason="stop"):
    message = {"role": "assistant", "content": None, **message}
    choice = {"index": 0, "message": message, "finish_reason": reason}
    return Behaviour(body=json.dumps({"choices": [choice], "usage": {}}))


def call(arguments, name="add", **extra):
    return {
        "id": "c1",
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    } | extra


def strict_chat(*replies):
    """As vLLM and llama.cpp read calls, OpenAI reads names, vendors read blanks, and Gemini reads
    its own signatures."""

    def script(hit):
        sent = hit.json()["messages"]
        turns = [message for message in sent if message["role"] == "assistant"]
        for message, reply in zip(turns, replies, strict=False):
            for number, made in enumerate(message.get("tool_calls") or ()):
                try:
                    arguments = json.loads(made["function"]["arguments"], parse_constant=refuse)
                except ValueError as error:
                    return refusal(400, str(error))
                if not isinstance(arguments, dict):
                    return refusal(500, "Can only get item pairs from a mapping.")
                if not re.fullmatch("[a-zA-Z0-9_-]{1,64}", made["function"]["name"]):
                    return refusal(400, "tool_calls[0].function.name does not match pattern")
                if made.get("extra_content") != reply["tool_calls"][number].get("extra_content"):
                    return refusal(400, "Function call is missing a thought_signature")
            if message.get("reasoning_details") != reply.get("reasoning_details"):
                return refusal(400, "Reasoning must be repeated")
        reply = replies[min(len(turns), len(replies) - 1)]
        return answer(reply, "tool_calls" if reply.get("tool_calls") else "stop")

    return script


def refuse(constant):
    raise ValueError(f"invalid literal {constant}")


def add(a: int, b: int) -> int:
    """Add."""
    return a + b


def right(completion, answer) -> float:
    return float(completion[-1].content == answer)


def played(script, client=None):
    env = vf.ToolEnv(
        tools=[add], dataset=[{"question": "1+2?", "answer": "3"}], rubric=vf.Rubric(funcs=[right])
    )
    with FakeServer("-", script=script) as server:
        config = client(server.url) if client else vf.ClientConfig(api_base_url=server.url)
        results = env.evaluate(config, "m", num_examples=1, rollouts_per_example=1)
        return results, [hit.json() for hit in server.hits]


@pytest.mark.parametrize("arguments", BAD, ids=range(len(BAD)))
@pytest.mark.parametrize("name", ["add", "functions.add", "", "a" * 99])
def test_a_malformed_call_does_not_end_the_conversation(arguments, name):
    replies = [{"tool_calls": [call(arguments, name)]}, {"content": "3"}]
    results, _ = played(strict_chat(*replies))
    assert results["errors"] == [None]
    assert results["reward"] == [1.0]
    sampled = results["completion"][0][0].tool_calls[0]
    assert sampled.arguments == (arguments or "{}")
    assert sampled.name == name


@pytest.mark.parametrize("reply", [{"reasoning_details": DETAILS}, {"vendor_state": {"k": [1]}}])
@pytest.mark.parametrize("kind", ["http", "sdk"])
def test_fields_of_a_reply_that_are_not_known_are_sent_back(reply, kind):
    made = call('{"a": 1, "b": 2}', extra_content={"google": {"thought_signature": "BBBB"}})
    replies = [{"tool_calls": [made], **reply}, {"content": "3"}]
    client = None
    if kind == "sdk":
        openai = pytest.importorskip("openai")
        client = lambda url: openai.AsyncOpenAI(base_url=url, api_key="k")  # noqa: E731
    results, bodies = played(strict_chat(*replies), client)
    assert results["reward"] == [1.0]
    sent = bodies[1]["messages"][1]
    assert {name: sent[name] for name in reply} == reply
    assert sent["tool_calls"][0]["extra_content"] == made["extra_content"]


def test_null_and_empty_fields_of_a_reply_are_not_kept():
    noise = {"annotations": [], "audio": None, "function_call": None, "refusal": None, "x": {}}
    results, _ = played(strict_chat({"content": "3", **noise}))
    assert dict(results["completion"][0][0]) == {"role": "assistant", "content": "3"}


def test_a_field_that_another_server_refuses_is_left_out_from_then_on():
    def script(hit):
        sent = hit.json()["messages"]
        if any("vendor_state" in message for message in sent):
            return refusal(400, "property 'vendor_state' is unsupported")
        return answer({"content": "3", "vendor_state": 1})

    with FakeServer("-", script=script) as server:
        results = Talk(max_turns=3).evaluate(vf.ClientConfig(api_base_url=server.url), "m")
        assert results["errors"] == [None]
        assert server.count == 4  # one refusal, once


@pytest.mark.parametrize("kind", ["http", "sdk"])
@pytest.mark.parametrize(("is_strict", "text"), [(True, EMPTY_TEXT), (False, "")])
def test_only_a_server_that_refuses_blank_messages_gets_a_placeholder(kind, is_strict, text):
    def script(hit):
        sent = hit.json()["messages"]
        if any(not (m["content"] or "").strip() for m in sent) and is_strict:
            return refusal(400, "messages.1: text content blocks must be non-empty")
        return answer({"content": ""})

    with FakeServer("-", script=script) as server:
        client = OpenAIChatCompletionsClient(base_url=server.url)
        if kind == "sdk":
            openai = pytest.importorskip("openai")
            client = as_client(openai.AsyncOpenAI(base_url=server.url, api_key="k"))
        results = Talk(max_turns=2).evaluate(client, "m")
        assert results["errors"] == [None]
        assert server.hits[-1].json()["messages"][1]["content"] == text
        assert results["completion"][0][0]["content"] == ""


def blank_in(body):
    """Whether Anthropic would refuse a text of this body."""
    contents = [message["content"] for message in body["messages"]]
    contents += [body["system"]] if "system" in body else []
    for content in contents:
        if isinstance(content, str):
            content = [{"type": "text", "text": content}]
        for part in content:
            inner = part.get("content") if part.get("type") == "tool_result" else None
            for text in [part, *(inner if isinstance(inner, list) else [])]:
                if text.get("type") == "text" and not text["text"].strip():
                    return True
        if not content:
            return True
    return False


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
BLANK_PART = {"type": "text", "text": " \n"}
CALLED = AssistantMessage("\n", [ToolCall("c1", "add", "{}")])
VERBATIM = AssistantMessage(
    "\n\n",
    [ToolCall("c1", "add", "{}")],
    thinking_blocks=[
        {"type": "text", "text": "\n\n"},
        {"type": "tool_use", "id": "c1", "name": "add", "input": {}},
    ],
)


@pytest.mark.parametrize(
    "prompt",
    [
        [UserMessage("a"), AssistantMessage(""), UserMessage("b")],
        [UserMessage("a"), AssistantMessage(" \n"), UserMessage("b")],
        [UserMessage("a"), AssistantMessage([BLANK_PART]), UserMessage("b")],
        [UserMessage("")],
        [UserMessage([])],
        [UserMessage([IMAGE, BLANK_PART])],
        [{"role": "system", "content": " "}, UserMessage("a")],
        [UserMessage("a"), CALLED, ToolMessage("", "c1")],
        [UserMessage("a"), CALLED, ToolMessage([BLANK_PART], "c1")],
        [UserMessage("a"), VERBATIM, ToolMessage("3", "c1")],
    ],
)
def test_the_messages_dialect_sends_no_blank_text(prompt):
    body = messages.request_body(ModelRequest(prompt=prompt, model="m", sampling_args={}))
    assert not blank_in(body)
    assert blank_in({"messages": [dict(message) for message in prompt]}) or prompt[1:2] == [
        VERBATIM
    ]


@pytest.mark.parametrize("arguments", BAD, ids=range(len(BAD)))
def test_the_responses_dialect_sends_arguments_that_are_objects(arguments):
    item = {"type": "function_call", "call_id": "c1", "name": "add", "arguments": arguments}
    made = ToolCall("c1", "add", arguments)
    for message in (
        AssistantMessage(None, [made]),
        AssistantMessage(None, [made], thinking_blocks=[item]),
    ):
        body = responses.request_body(ModelRequest([UserMessage("a"), message], "m"))
        assert isinstance(json.loads(body["input"][1]["arguments"]), dict)


def test_a_history_that_every_server_takes_is_the_same_object():
    prompt = [UserMessage("a"), AssistantMessage(None, [ToolCall("c1", "add", {"a": 1})])]
    assert sendable(ModelRequest(prompt, "m")) is prompt
    changed = [*prompt, ToolMessage("", "c1"), AssistantMessage("x", [ToolCall("c2", "add", "{")])]
    sent = sendable(ModelRequest(changed, "m"))
    assert [a is b for a, b in zip(sent, changed, strict=True)] == [True, True, True, False]
    assert changed[3].tool_calls[0].arguments == "{"
    assert sendable(ModelRequest(changed, "m"), {BLANK})[2]["content"] == EMPTY_TEXT


def test_a_name_that_the_request_offers_is_kept_whatever_its_characters():
    tool = {"type": "function", "function": {"name": "cal.search", "parameters": {}}}
    prompt = [AssistantMessage(None, [ToolCall("c1", "cal.search", "{}")])]
    assert sendable(ModelRequest(prompt, "m", tools=[tool])) is prompt
    assert (
        sendable(ModelRequest(prompt, "m"))[0]["tool_calls"][0]["function"]["name"] == "cal_search"
    )
