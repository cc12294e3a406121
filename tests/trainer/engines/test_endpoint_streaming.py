"""Streamed completions, read by the real openai client: the same answer as without a stream, as it
comes."""

from __future__ import annotations

import asyncio
import json
import random
import time

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from support.embedded import ask, post, serving, small_model
from verifiers_trainer.engines.http.chat import BadRequest, ChatFormat
from verifiers_trainer.engines.http.replies import completion_text
from verifiers_trainer.engines.http.streaming import DONE, StreamedReply
from verifiers_trainer.engines.http.tool_calls import resolve_tool_call_parser
from verifiers_trainer.engines.http.wire import ChatBody, TextBody, decode_body
from verifiers_trainer.engines.requests import Generation, GenerationRequest, SamplingParams

openai = pytest.importorskip("openai")

MODES = ("padded", "deterministic")
HI = [{"role": "user", "content": "reverse: abc"}]


@pytest.fixture(scope="module")
def engine():
    with serving() as started:
        yield started


def client_of(engine):
    return openai.AsyncOpenAI(base_url=engine.base_url, api_key=engine.api_key, max_retries=0)


async def long_stream(engine, client, **extra):
    return await client.chat.completions.create(
        model=engine.served_model,
        messages=HI,
        max_tokens=200,
        stream=True,
        extra_body={"ignore_eos": True, **extra},
    )


# --- by the openai client -------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
async def test_a_stream_is_the_same_answer_piece_by_piece(mode):
    extra = {"return_token_ids": True, "return_weight_versions": True, "top_k": 20}
    wanted = {
        "messages": HI,
        "max_tokens": 40,
        "seed": 7,
        "logprobs": True,
        "top_logprobs": 2,
        "extra_body": extra,
    }
    with serving(mode=mode) as engine:
        async with client_of(engine) as client:
            complete = await client.chat.completions.create(model=engine.served_model, **wanted)
            stream = await client.chat.completions.create(
                model=engine.served_model,
                stream=True,
                stream_options={"include_usage": True},
                **wanted,
            )
            chunks = [chunk async for chunk in stream]
    *said, last = chunks
    choices = [chunk.choices[0] for chunk in said]
    assert len(choices) > 10
    assert choices[0].delta.role == "assistant"
    assert said[0].prompt_token_ids == complete.prompt_token_ids
    assert (
        "".join(choice.delta.content or "" for choice in choices)
        == complete.choices[0].message.content
    )
    tokens = [token for choice in choices for token in getattr(choice, "token_ids", None) or []]
    assert tokens == complete.choices[0].token_ids
    entries = [entry for choice in choices if choice.logprobs for entry in choice.logprobs.content]
    told = complete.choices[0].logprobs.content
    assert [entry.token for entry in entries] == [entry.token for entry in told]
    assert [len(entry.top_logprobs) for entry in entries] == [2] * len(told)
    difference = np.array([entry.logprob for entry in entries]) - np.array(
        [entry.logprob for entry in told]
    )
    assert np.abs(difference).max() < 1e-4
    assert [choice.finish_reason for choice in choices] == [None] * (len(choices) - 1) + [
        complete.choices[0].finish_reason
    ]
    assert choices[-1].weight_versions == [{"version": 0, "start": 0, "end": len(tokens)}]
    assert last.choices == []
    assert last.usage == complete.usage
    assert {chunk.id for chunk in chunks} == {chunks[0].id}


async def test_without_being_asked_for_there_is_no_usage_and_no_token_ids(engine):
    async with client_of(engine) as client:
        stream = await client.chat.completions.create(
            model=engine.served_model, messages=HI, max_tokens=4, stream=True
        )
        chunks = [chunk async for chunk in stream]
    assert all(chunk.usage is None and chunk.choices for chunk in chunks)
    assert all(
        {"token_ids", "weight_versions"}.isdisjoint(chunk.choices[0].to_dict()) for chunk in chunks
    )


async def test_several_choices_of_several_prompts_are_told_apart(engine):
    wanted = {"prompt": ["once", "upon a"], "max_tokens": 12, "n": 2, "seed": 3, "logprobs": 1}
    async with client_of(engine) as client:
        complete = await client.completions.create(model=engine.served_model, **wanted)
        stream = await client.completions.create(
            model=engine.served_model, stream=True, stream_options={"include_usage": True}, **wanted
        )
        texts, offsets, usage = [""] * 4, [[] for _ in range(4)], None
        async for chunk in stream:
            usage = chunk.usage or usage
            for choice in chunk.choices:
                texts[choice.index] += choice.text
                offsets[choice.index] += choice.logprobs.text_offset
    assert texts == [choice.text for choice in complete.choices]
    assert offsets == [choice.logprobs.text_offset for choice in complete.choices]
    assert usage == complete.usage


@pytest.mark.parametrize("mode", MODES)
async def test_pieces_come_while_the_rest_is_still_being_drawn(mode):
    """A weight update after the first piece changes the tokens that follow: they were not drawn
    yet."""
    model = small_model()
    with serving(model, mode=mode) as engine:
        async with client_of(engine) as client:
            stream = await long_stream(engine, client, return_weight_versions=True)
            versions = None
            async for chunk in stream:
                if engine.version == 0 and chunk.choices[0].delta.content:
                    with engine.pause():
                        engine.set_version(1)
                versions = getattr(chunk.choices[0], "weight_versions", versions)
    assert [span["version"] for span in versions] == [0, 1]
    assert versions[1]["end"] == 200


@pytest.mark.parametrize("goes_away", [True, False])
async def test_a_client_that_goes_away_ends_its_completion(goes_away):
    model, passes = small_model(), []
    hook = model.lm_head.register_forward_pre_hook(lambda *_: passes.append(time.sleep(0.01)))
    with serving(model) as engine:
        hook.remove()  # the engine's copy keeps it
        passes.clear()
        async with client_of(engine) as client:
            stream = await long_stream(engine, client)
            await anext(stream)
            if goes_away:
                await stream.close()
            else:
                assert len([chunk async for chunk in stream]) > 10
            for _ in range(2000):
                if not (engine._generator._living or engine._endpoint._waiting):
                    break
                await asyncio.sleep(0.01)
    assert (len(passes) < 200) == goes_away


@pytest.mark.parametrize("mode", MODES)
async def test_a_completion_that_fails_on_its_way_is_an_error_of_the_client(mode):
    model = small_model()
    with serving(model, mode=mode) as engine:
        async with client_of(engine) as client:
            stream = await long_stream(engine, client)

            async def read():
                async for chunk in stream:
                    if chunk.choices[0].delta.content:
                        with engine.pause(), torch.no_grad():
                            model.model.norm.weight.fill_(float("nan"))

            with pytest.raises(openai.APIError, match="diverged"):
                await read()


@pytest.mark.parametrize(
    ("route", "fields", "field"),
    [
        ("chat/completions", {"stream_options": {"include_usage": True}}, "stream_options"),
        (
            "chat/completions",
            {"stream": True, "stream_options": {"continuous_usage_stats": True}},
            "continuous_usage",
        ),
        ("chat/completions", {"stream": True, "prompt_logprobs": 0}, "prompt_logprobs"),
        ("chat/completions", {"stream": True, "model": "other"}, "other"),
        ("completions", {"stream": True, "echo": True}, "echo"),
    ],
)
async def test_what_cannot_be_streamed_is_refused_by_name(engine, route, fields, field):
    body = {"prompt": "x", "max_tokens": 2} if route == "completions" else ask()
    ((status, answer),) = await post(engine, [{**body, **fields}], route)
    assert status in (400, 404)
    assert field in answer["error"]["message"]


# --- text out of tokens ---------------------------------------------------------------------------


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte: a character of another alphabet takes several."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: index for index, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def pieces_of(events: list[bytes], index: int = 0) -> list[str]:
    parts = []
    for event in events:
        if event == DONE:
            continue
        for choice in json.loads(event.removeprefix(b"data: "))["choices"]:
            if choice["index"] == index:
                parts.append(
                    choice["text"] if "text" in choice else choice["delta"].get("content") or ""
                )
    return parts


def streamed(
    tokens: list[int], chat: ChatFormat, stop: tuple[str, ...], ended_by: str | None
) -> list[str]:
    body = decode_body(b'{"prompt": "x", "stream": true}', TextBody)
    request = GenerationRequest(
        "r", np.zeros(1, np.int32), SamplingParams(max_tokens=len(tokens), stop=stop)
    )
    reply = StreamedReply([request], body, chat, "m", None)
    events = [event for token in tokens[:-1] for event in reply.token(0, token, -1.0, None)]
    arrays = np.array(tokens, np.int32), np.full(len(tokens), -1, np.float32)
    generation = Generation(request, *arrays, finish_reason="stop", stop_text=ended_by)
    events += reply.finish(0, generation)
    pieces = pieces_of(events)
    assert "".join(pieces) == completion_text(generation, body, chat)
    return pieces


def test_characters_of_several_tokens_come_whole():
    tokenizer = byte_tokenizer()
    chat, text = ChatFormat(tokenizer), "naïve 漢字 🙂 end"
    tokens = tokenizer(text)["input_ids"]
    pieces = streamed(tokens, chat, (), None)
    assert len(tokens) > len(text)  # negative control: token by token it is another text
    assert "".join(chat.piece(token) for token in tokens) != text
    assert "".join(pieces) == text
    assert "\ufffd" not in "".join(pieces)
    assert pieces.count("漢") == pieces.count("🙂") == 1


def test_pieces_are_the_text_for_any_bytes():
    """Also for bytes that never become a character."""
    chat, rng = ChatFormat(byte_tokenizer()), random.Random(0)
    for _ in range(200):
        streamed([rng.randrange(256) for _ in range(rng.randint(1, 30))], chat, (), None)


def test_what_may_begin_a_stop_text_is_held():
    tokenizer = byte_tokenizer()
    chat = ChatFormat(tokenizer)
    pieces = streamed(
        tokenizer("one </a two </answer>")["input_ids"], chat, ("</answer>", "\n\n"), "</answer>"
    )
    assert "".join(pieces) == "one </a two "
    assert " " in pieces  # what was held came once it was known to be text
    assert not any(piece.endswith("</") for piece in pieces)


def test_a_tokenizer_that_reads_differently_is_refused_and_never_sent_wrong():
    tokenizer = byte_tokenizer()

    class Joined(ChatFormat):
        """Takes the space before a comma out, which only shows when the comma comes."""

        def decode(self, token_ids, skip_special_tokens=True):
            return super().decode(token_ids, skip_special_tokens).replace(" ,", ",")

    with pytest.raises(BadRequest, match="use stream=false"):
        streamed(tokenizer("a , b , c")["input_ids"], Joined(tokenizer), (), None)


def test_calls_of_tools_come_in_one_piece_at_the_end():
    tokenizer = byte_tokenizer()
    body = decode_body(b'{"messages": [], "stream": true}', ChatBody)
    text = 'Sure. <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    tokens = tokenizer(text)["input_ids"]
    request = GenerationRequest("r", np.zeros(1, np.int32), SamplingParams(max_tokens=len(tokens)))
    reply = StreamedReply(
        [request], body, ChatFormat(tokenizer), "m", resolve_tool_call_parser("hermes", None)
    )
    assert not [event for token in tokens[:-1] for event in reply.token(0, token, -1.0, None)]
    arrays = np.array(tokens, np.int32), np.full(len(tokens), -1, np.float32)
    event, done = reply.finish(0, Generation(request, *arrays, finish_reason="stop"))
    assert done == DONE
    (choice,) = json.loads(event.removeprefix(b"data: "))["choices"]
    (call,) = choice["delta"]["tool_calls"]
    assert (call["index"], call["type"], call["function"]["name"]) == (0, "function", "add")
    assert json.loads(call["function"]["arguments"]) == {"a": 1}
    assert choice["delta"]["content"].strip() == "Sure."
    assert choice["finish_reason"] == "tool_calls"
