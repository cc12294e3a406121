"""The shipped scripted, recording and replaying clients, and the byte tokenizer."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from verifiers.clients import Client
from verifiers.errors import ConfigError, ModelUnavailable
from verifiers.testing import (
    ByteTokenizer,
    RecordingClient,
    ReplayClient,
    ScriptedClient,
    scripted_logprobs,
)
from verifiers.types import AssistantMessage, ModelRequest, Response, ToolCall, UserMessage


def ask(client, text="hi", **fields):
    return asyncio.run(client.complete(ModelRequest([UserMessage(text)], "m", **fields)))


def test_it_is_a_client_and_records_requests():
    client = ScriptedClient(["a", "b"])
    assert isinstance(client, Client)
    assert [ask(client).text for _ in range(3)] == ["a", "b", "a"]
    assert [request.prompt[0].content for request in client.requests] == ["hi"] * 3


def test_a_strict_list_runs_out():
    client = ScriptedClient(["a"], strict=True)
    ask(client)
    with pytest.raises(ConfigError, match="has 1 replies, and this is request 2"):
        ask(client)


def test_mappings_functions_calls_responses_and_exceptions_are_replies():
    assert ask(ScriptedClient({"hi": "known"})).text == "known"
    assert ask(ScriptedClient({"*": "other"})).text == "other"
    with pytest.raises(ConfigError, match="no reply to 'hi'"):
        ask(ScriptedClient({"x": "y"}))

    async def reverse(request):
        return request.prompt[-1].content[::-1]

    assert ask(ScriptedClient(reverse)).text == "ih"
    assert ask(ScriptedClient([[ToolCall("1", "f", {})]])).finish_reason == "tool_calls"
    assert ask(ScriptedClient([Response(AssistantMessage("r"), version=4)])).version == 4
    with pytest.raises(ModelUnavailable):
        ask(ScriptedClient([ModelUnavailable("down")]))


def test_errors_come_by_call_number_or_function():
    client = ScriptedClient("ok", errors={1: ModelUnavailable("second")})
    assert ask(client).text == "ok"
    with pytest.raises(ModelUnavailable):
        ask(client)
    assert ask(client).text == "ok"


def test_tokens_render_the_conversation_and_carry_exact_logprobs():
    response = ask(ScriptedClient("yo", tokens=True))
    assert ByteTokenizer().decode(response.tokens.prompt_ids) == "<|user|>hi<|end|><|assistant|>"
    assert ByteTokenizer().decode(response.tokens.completion_ids) == "yo<|end|>"
    assert (
        response.tokens.completion_logprobs.tolist() == scripted_logprobs([121, 111, 257]).tolist()
    )
    assert response.usage.completion_tokens == 3
    cut = ask(ScriptedClient([{"content": "yo", "finish_reason": "length"}], tokens=True))
    assert cut.tokens.completion_ids.tolist() == [121, 111]


def test_the_next_prompt_begins_with_the_turn_before_it():
    client = ScriptedClient(["<think>a</think>b", "c"], tokens=True)
    first = ask(client)
    history = [UserMessage("hi"), first.message, UserMessage("more")]
    second = asyncio.run(client.complete(ModelRequest(history, "m")))
    before = np.concatenate([first.tokens.prompt_ids, first.tokens.completion_ids])
    assert second.tokens.prompt_ids[: len(before)].tolist() == before.tolist()
    forgetful = ByteTokenizer(keep_reasoning=False).apply_chat_template(
        history, add_generation_prompt=True
    )
    assert forgetful[: len(before)] != before.tolist()


@given(st.text())
def test_bytes_round_trip_every_text(text):
    tokenizer = ByteTokenizer()
    assert tokenizer.decode(tokenizer.encode(text)) == text
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": text}])
    assert rendered.count(tokenizer.eos_token_id) == 1


def test_a_recorded_conversation_is_replayed(tmp_path):
    path = tmp_path / "talk.jsonl"
    script = ScriptedClient(["a", [ToolCall("1", "f", {"x": "\u2028"})]], tokens=True)
    recording = RecordingClient(script, path)
    originals = [ask(recording, seed=1), ask(recording, seed=1), ask(recording, "other")]
    replay = ReplayClient(path)
    replayed = [ask(replay, seed=1), ask(replay, seed=1), ask(replay, "other")]
    for before, after in zip(originals, replayed, strict=True):
        assert after.message == before.message
        assert (
            after.tokens.completion_logprobs.tolist() == before.tokens.completion_logprobs.tolist()
        )
    assert replayed[1].message.tool_calls[0].name == "f"
    with pytest.raises(ConfigError, match="no recording of this request"):
        ask(replay, "never asked")
