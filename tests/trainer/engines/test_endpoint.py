"""The endpoint's contract, over real HTTP: vLLM's field names, and a refusal for what cannot be
honoured."""

from __future__ import annotations

import asyncio
import json
import resource
import time

import aiohttp
import pytest
import torch

from support.embedded import (
    ask,
    complete,
    fine_tuned,
    forward_logprobs,
    post,
    sampled_logprobs,
    serving,
    small_model,
)
from verifiers_trainer.engines.embedded.engine import EmbeddedEngine
from verifiers_trainer.engines.http import endpoint
from verifiers_trainer.engines.http.chat import BadRequest, ChatFormat
from verifiers_trainer.policy.builtin_models import build_tiny_tokenizer

MODES = ("padded", "deterministic")
TOOLS = [
    {
        "type": "function",
        "function": {"name": "add", "description": "adds", "parameters": {"type": "object"}},
    }
]


@pytest.fixture(scope="module")
def engine():
    with serving() as started:
        yield started


def refusal(answer: tuple[int, dict], status: int = 400) -> dict:
    assert answer[0] == status, answer
    assert answer[1]["error"]["message"]
    return answer[1]["error"]


def taught(text: str, answer: str) -> object:
    """A small model that has learnt to answer ``text`` with ``answer``."""
    tokenizer, model = build_tiny_tokenizer(), small_model()
    body = [{"role": "user", "content": text}]
    prompt = tokenizer.apply_chat_template(body, tools=TOOLS, add_generation_prompt=True)[
        "input_ids"
    ]
    return fine_tuned(
        model, [(prompt, [*prompt, *tokenizer(answer)["input_ids"], tokenizer.eos_token_id])]
    )


# --- responses ------------------------------------------------------------------------------------


async def test_a_chat_completion_has_every_field_the_trainer_reads(engine):
    (response,) = await complete(engine, ask(ignore_eos=True))
    (choice,) = response["choices"]
    tokenizer = build_tiny_tokenizer()
    prompt = [{"role": "user", "content": "reverse: abc"}]
    assert (
        response["prompt_token_ids"]
        == tokenizer.apply_chat_template(prompt, add_generation_prompt=True)["input_ids"]
    )
    assert len(choice["token_ids"]) == 12
    assert choice["finish_reason"] == "length"
    assert choice["message"] == {
        "role": "assistant",
        "content": tokenizer.decode(choice["token_ids"], True),
    }
    entries = choice["logprobs"]["content"]
    assert [entry["token"] for entry in entries] == [
        tokenizer.decode([token]) for token in choice["token_ids"]
    ]
    assert all(entry["logprob"] <= 0 and entry["top_logprobs"] == [] for entry in entries)
    assert choice["weight_versions"] == [{"version": 0, "start": 0, "end": 12}]
    assert response["usage"] == {
        "prompt_tokens": len(response["prompt_token_ids"]),
        "completion_tokens": 12,
        "total_tokens": len(response["prompt_token_ids"]) + 12,
    }
    assert response["object"] == "chat.completion"
    assert response["model"] == engine.served_model


async def test_nothing_is_returned_that_was_not_asked_for(engine):
    (response,) = await complete(
        engine, {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
    )
    assert "prompt_token_ids" not in response
    assert response["choices"][0]["logprobs"] is None
    assert {"token_ids", "weight_versions"}.isdisjoint(response["choices"][0])


async def test_tokens_can_be_named_by_their_ids(engine):
    (response,) = await complete(engine, ask(return_tokens_as_token_ids=True))
    choice = response["choices"][0]
    assert [e["token"] for e in choice["logprobs"]["content"]] == [
        f"token_id:{t}" for t in choice["token_ids"]
    ]


async def test_a_text_completion_takes_text_or_token_ids(engine):
    tokenizer = build_tiny_tokenizer()
    text = "once upon"
    ids = tokenizer(text)["input_ids"]
    common = {
        "max_tokens": 5,
        "seed": 1,
        "return_token_ids": True,
        "logprobs": 1,
        "ignore_eos": True,
    }
    prompts = [text, [text], ids, [ids]]
    answers = await post(
        engine, [{"prompt": prompt, **common} for prompt in prompts], "completions"
    )
    choices = [answer["choices"][0] for status, answer in answers if status == 200]
    assert len(choices) == 4
    assert all(choice["prompt_token_ids"] == ids for choice in choices)
    assert len({tuple(choice["token_ids"]) for choice in choices}) == 1
    logprobs = choices[0]["logprobs"]
    assert (
        len(logprobs["tokens"])
        == len(logprobs["token_logprobs"])
        == len(logprobs["text_offset"])
        == 5
    )
    assert "".join(logprobs["tokens"])[logprobs["text_offset"][3] :] == "".join(
        logprobs["tokens"][3:]
    )


async def test_without_max_tokens_the_rest_of_the_context_is_used(engine):
    body = ask(ignore_eos=True)
    del body["max_tokens"]
    (response,) = await complete(engine, body)
    assert response["usage"]["total_tokens"] == 256
    (response,) = await complete(engine, ask(max_tokens=10_000, ignore_eos=True))
    assert response["usage"]["total_tokens"] == 256


async def test_the_end_token_is_kept_as_a_token_and_left_out_of_the_text(engine):
    (free,) = await complete(engine, ask(seed=3, ignore_eos=True))
    ids = free["choices"][0]["token_ids"]
    (stopped,) = await complete(engine, ask(seed=3, stop_token_ids=[ids[4]]))
    choice = stopped["choices"][0]
    end = ids.index(ids[4]) + 1
    assert choice["token_ids"] == ids[:end]
    assert choice["finish_reason"] == "stop"
    assert choice["message"]["content"] == build_tiny_tokenizer().decode(ids[: end - 1], True)


async def test_a_stop_text_ends_the_completion_and_is_cut_off_the_text():
    with serving() as engine:
        (free,) = await complete(engine, ask(seed=3, ignore_eos=True))
        text = free["choices"][0]["message"]["content"]
        stop = text[5:7]
        (stopped,) = await complete(engine, ask(seed=3, stop=["never", stop], ignore_eos=True))
    choice = stopped["choices"][0]
    assert choice["message"]["content"] == text[: text.index(stop)]
    assert choice["finish_reason"] == "stop"
    assert choice["token_ids"] == free["choices"][0]["token_ids"][: len(choice["token_ids"])]
    decode = build_tiny_tokenizer().decode
    assert stop in decode(choice["token_ids"], True)
    assert stop not in decode(choice["token_ids"][:-1], True), "sampled on after the stop text"
    assert len(choice["logprobs"]["content"]) == len(choice["token_ids"])


async def test_filters_and_penalties_reach_the_sampler(engine):
    greedy, again = await complete(engine, ask(top_k=1, seed=1), ask(temperature=0, seed=2))
    assert greedy["choices"][0]["token_ids"] == again["choices"][0]["token_ids"]
    assert sampled_logprobs(greedy).abs().max() == 0
    (distinct,) = await complete(
        engine, ask(temperature=0, presence_penalty=2.0, frequency_penalty=2.0, max_tokens=8)
    )
    (repeated,) = await complete(engine, ask(temperature=0, repetition_penalty=100.0, max_tokens=8))
    assert len(set(repeated["choices"][0]["token_ids"])) == len(repeated["choices"][0]["token_ids"])
    assert distinct["choices"][0]["token_ids"]


async def test_prompts_are_truncated_on_the_side_asked_for(engine):
    (untruncated,) = await complete(engine, ask("abcdefgh"))
    ids = untruncated["prompt_token_ids"]
    left, right = await complete(
        engine,
        ask("abcdefgh", truncate_prompt_tokens=6),
        ask("abcdefgh", truncate_prompt_tokens=6, truncation_side="right"),
    )
    assert left["prompt_token_ids"] == ids[-6:]
    assert right["prompt_token_ids"] == ids[:6]


async def test_the_openai_client_reads_it(engine):
    openai = pytest.importorskip("openai")
    async with openai.AsyncOpenAI(base_url=engine.base_url, api_key=engine.api_key) as client:
        response = await client.chat.completions.create(
            model=engine.served_model,
            messages=[{"role": "user", "content": "hi"}],
            max_completion_tokens=4,
            logprobs=True,
            extra_body={"return_token_ids": True, "top_k": 5},
        )
        assert len(response.choices[0].logprobs.content) == len(response.choices[0].token_ids)
        models = await client.models.list()
        assert models.data[0].id == engine.served_model
        with pytest.raises(openai.BadRequestError, match="response_format"):
            await client.chat.completions.create(
                model=engine.served_model,
                messages=[{"role": "user", "content": "hi"}],
                response_format={"type": "json_object"},
            )


# --- several choices, log-probs, prompts ----------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
async def test_choices_of_one_request_are_the_completions_of_consecutive_seeds(mode):
    with serving(mode=mode) as engine:
        (several,) = await complete(engine, ask(n=3, seed=5))
        single = await complete(engine, *[ask(seed=5 + index) for index in range(3)])
    choices = several["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2]
    assert [choice["token_ids"] for choice in choices] == [
        response["choices"][0]["token_ids"] for response in single
    ]
    assert len({tuple(choice["token_ids"]) for choice in choices}) == 3
    assert several["usage"]["completion_tokens"] == sum(
        len(choice["token_ids"]) for choice in choices
    )


@pytest.mark.parametrize("mode", MODES)
async def test_rules_of_their_own_for_every_request_of_a_batch(mode):
    """Log-probs are those of the distribution each request asked for, with neighbours that ask for
    others."""
    model = small_model()
    greedy = ask(temperature=0)
    warm = ask(temperature=1.3, seed=1)
    cold = ask(temperature=0.4, seed=2)
    biased = ask(logit_bias={"20": 50.0})
    short = ask(stop_token_ids=[*range(1, 99)], min_tokens=4, seed=3)
    with serving(model, mode=mode) as engine:
        first, second, third, fourth, fifth = await complete(
            engine, greedy, warm, cold, biased, short
        )
    for response, temperature in ((second, 1.3), (third, 0.4)):
        assert (
            sampled_logprobs(response) - forward_logprobs(model, response, temperature)
        ).abs().max() < 1e-4
    assert (sampled_logprobs(first) - forward_logprobs(model, first)).abs().max() < 1e-4
    assert set(fourth["choices"][0]["token_ids"]) == {20}
    tokens = fifth["choices"][0]["token_ids"]
    assert len(tokens) >= 5
    assert fifth["choices"][0]["stop_reason"] == tokens[-1]


@pytest.mark.parametrize("mode", MODES)
async def test_the_most_likely_tokens_are_told_with_the_sampled_one(mode):
    model = small_model()
    with serving(model, mode=mode) as engine:
        (response,) = await complete(engine, ask(top_logprobs=3, return_tokens_as_token_ids=True))
    prompt, tokens = response["prompt_token_ids"], response["choices"][0]["token_ids"]
    with torch.no_grad():
        logp = torch.log_softmax(
            model(torch.tensor([prompt + tokens], device=model.device)).logits[
                0, len(prompt) - 1 : -1
            ],
            -1,
        )
    for entry, expected in zip(response["choices"][0]["logprobs"]["content"], logp, strict=True):
        best = expected.topk(3)
        assert [alternative["token"] for alternative in entry["top_logprobs"]] == [
            f"token_id:{i}" for i in best.indices.tolist()
        ]
        assert [alternative["logprob"] for alternative in entry["top_logprobs"]] == pytest.approx(
            best.values.tolist(), abs=1e-4
        )


@pytest.mark.parametrize("mode", ["padded", "deterministic"])
async def test_the_prompt_can_be_scored(mode):
    model = small_model()
    text = "a prompt longer than one piece " * 12
    with serving(model, mode=mode, max_seq_len=1024) as engine:
        (response,) = await complete(engine, ask(text, prompt_logprobs=2, n=2, temperature=0.5))
        ((_, scored),) = await post(
            engine,
            [{"prompt": "abcd", "echo": True, "logprobs": 1, "max_tokens": 2, "ignore_eos": True}],
            "completions",
        )
    ids = response["prompt_token_ids"]
    assert len(ids) > 256
    with torch.no_grad():
        logp = torch.log_softmax(model(torch.tensor([ids], device=model.device)).logits[0, :-1], -1)
    assert response["prompt_logprobs"][0] is None
    for token, told, expected in zip(ids[1:], response["prompt_logprobs"][1:], logp, strict=True):
        assert told[str(token)]["logprob"] == pytest.approx(expected[token].item(), abs=1e-4)
        assert told[str(token)]["rank"] == 1 + (expected > expected[token]).sum().item()
        best = expected.topk(2)
        for rank, (alternative, logprob) in enumerate(
            zip(best.indices.tolist(), best.values.tolist(), strict=True), 1
        ):
            assert told[str(alternative)] == {
                "logprob": pytest.approx(logprob, abs=1e-4),
                "rank": rank,
                "decoded_token": build_tiny_tokenizer().decode([alternative]),
            }
    (choice,) = scored["choices"]
    assert choice["text"].startswith("abcd")
    assert choice["logprobs"]["tokens"][:4] == list("abcd")
    assert choice["logprobs"]["token_logprobs"][0] is None
    assert len(choice["logprobs"]["token_logprobs"]) == 6
    assert choice["logprobs"]["text_offset"][:4] == [0, 1, 2, 3]


async def test_several_prompts_of_a_text_completion(engine):
    body = {"max_tokens": 3, "ignore_eos": True, "return_token_ids": True, "seed": 1, "n": 2}
    answers = await post(
        engine, [{**body, "prompt": ["ab", "cde"]}, {**body, "prompt": "cde"}], "completions"
    )
    both, second = (answer for _, answer in answers)
    assert [choice["index"] for choice in both["choices"]] == [0, 1, 2, 3]
    assert [len(choice["prompt_token_ids"]) for choice in both["choices"]] == [2, 2, 3, 3]
    assert [c["token_ids"] for c in both["choices"][2:]] == [
        c["token_ids"] for c in second["choices"]
    ]
    assert both["usage"] == {"prompt_tokens": 5, "completion_tokens": 12, "total_tokens": 17}


async def test_which_stop_text_it_was_and_that_it_can_be_kept():
    fields = {"temperature": 0, "max_tokens": 60, "stop": ["</answer>", "zzz"]}
    with serving(taught("say", "<answer>abc</answer>def"), max_seq_len=512) as engine:
        cut, kept, late = await complete(
            engine,
            ask("say", **fields, tools=TOOLS),
            ask("say", **fields, tools=TOOLS, include_stop_str_in_output=True),
            ask("say", **fields, tools=TOOLS, min_tokens=7),
        )
    assert cut["choices"][0]["message"]["content"] == "<answer>abc"
    assert cut["choices"][0]["stop_reason"] == "</answer>"
    assert kept["choices"][0]["message"]["content"] == "<answer>abc</answer>"
    assert cut["choices"][0]["token_ids"] == kept["choices"][0]["token_ids"]
    assert late["choices"][0]["message"]["content"] == "<answer>abc</answer>def", (
        "the stop text came too early to count"
    )


async def test_a_thought_is_taken_out_of_the_content_when_asked_for():
    with serving(taught("say", "<think>hm</think>yes"), max_seq_len=512) as engine:
        fields = {"temperature": 0, "max_tokens": 40, "tools": TOOLS}
        split, unsplit = await complete(
            engine, ask("say", **fields, separate_reasoning=True), ask("say", **fields)
        )
    assert split["choices"][0]["message"]["reasoning_content"] == "hm"
    assert split["choices"][0]["message"]["content"] == "yes"
    assert unsplit["choices"][0]["message"]["content"] == "<think>hm</think>yes"
    assert split["choices"][0]["token_ids"] == unsplit["choices"][0]["token_ids"]


async def test_a_template_gets_its_variables_and_a_message_can_be_continued():
    tokenizer = build_tiny_tokenizer()
    stock = tokenizer.chat_template
    tokenizer.chat_template = "{% if loud %}LOUD{% endif %}" + stock
    engine = EmbeddedEngine(small_model(), tokenizer, mode="padded", max_seq_len=256, concurrency=4)
    begun = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "well"}]
    with engine:
        loud, plain, continued = await complete(
            engine,
            ask(chat_template_kwargs={"loud": True}),
            ask(),
            {
                **ask(),
                "messages": begun,
                "add_generation_prompt": False,
                "continue_final_message": True,
            },
        )
    assert tokenizer.decode(loud["prompt_token_ids"]).startswith("LOUD")
    assert loud["prompt_token_ids"][4:] == plain["prompt_token_ids"]
    assert tokenizer.decode(continued["prompt_token_ids"]).endswith("assistant\nwell")


@pytest.mark.parametrize("mode", MODES)
async def test_a_client_that_goes_away_drops_all_its_choices(mode):
    with serving(mode=mode, concurrency=2, max_seq_len=4096) as engine:
        endless = asyncio.create_task(post(engine, [ask(max_tokens=4000, ignore_eos=True, n=6)]))
        await asyncio.sleep(0.3)
        endless.cancel()
        await asyncio.wait_for(complete(engine, ask(max_tokens=2)), 5)


# --- tools ----------------------------------------------------------------------------------------


async def test_a_tool_call_round_trip():
    written = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
    question = {"role": "user", "content": "sum"}
    with serving(taught("sum", written), max_seq_len=1024) as engine:
        fields = {"temperature": 0, "max_tokens": 200, "tools": TOOLS}
        first, plain = await complete(
            engine,
            ask("sum", **fields),
            ask("sum", **{**fields, "tool_choice": "none", "max_tokens": 3}),
        )
        message = first["choices"][0]["message"]
        (call,) = message["tool_calls"]
        assert first["choices"][0]["finish_reason"] == "tool_calls"
        assert message["content"] is None
        assert call["function"]["name"] == "add"
        assert json.loads(call["function"]["arguments"]) == {"a": 1, "b": 2}
        assert "tool_calls" not in plain["choices"][0]["message"]
        result = {"role": "tool", "tool_call_id": call["id"], "content": "3"}
        (second,) = await complete(
            engine, {**ask(**fields), "messages": [question, message, result]}
        )
    sampled = first["prompt_token_ids"] + first["choices"][0]["token_ids"]
    assert second["prompt_token_ids"][: len(sampled)] == sampled, (
        "the second prompt must continue the first"
    )


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"top_logprobs": 2, "logprobs": False}, "top_logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"logit_bias": {"99999": 1}}, "logit_bias"),
        ({"min_tokens": 13}, "min_tokens"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"guided_regex": "a+"}, "guided_regex"),
        ({"typical_p": 0.5}, "typical_p"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"top_k": "many"}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stop": [""]}, "stop"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": 3, "truncation_side": "middle"}, "truncation_side"),
        ({"messages": []}, "messages"),
        ({"messages": [{"content": "x"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
        ({"messages": "hello"}, "messages"),
    ],
)
async def test_what_cannot_be_honoured_is_refused_by_name(engine, fields, field):
    ((status, answer),) = await post(engine, [ask(**fields)])
    error = refusal((status, answer))
    assert field in error["message"]
    assert error["param"] == field


async def test_neutral_values_of_unsupported_parameters_are_accepted(engine):
    neutral = {
        "n": 1,
        "stream": False,
        "top_logprobs": 0,
        "logit_bias": None,
        "response_format": {"type": "text"},
    }
    await complete(engine, ask(**neutral, tool_choice="auto", user="me", top_k=-1))


async def test_a_prompt_over_the_limit_is_a_context_length_error(engine):
    ((status, answer),) = await post(engine, [ask("x" * 300)])
    error = refusal((status, answer))
    assert "maximum context length is 256 tokens" in error["message"]
    assert error["code"] == "context_length_exceeded"


async def test_bodies_that_are_no_json_and_prompts_that_are_no_tokens(engine):
    headers = {"Authorization": f"Bearer {engine.api_key}"}
    async with aiohttp.ClientSession(headers=headers) as http:
        async with http.post(f"{engine.base_url}/chat/completions", data=b"{") as response:
            assert response.status == 400
        async with http.post(f"{engine.base_url}/nothing", data=b"{}") as response:
            assert response.status == 404
            assert "error" in await response.json()
    bodies = [
        {"prompt": [999_999]},
        {"prompt": ["a", 3]},
        {"prompt": []},
        {"prompt": [True]},
        {"prompt": [[], [1]]},
    ]
    for answer in await post(engine, bodies, "completions"):
        assert refusal(answer)["param"] == "prompt"


async def test_fields_that_a_proxy_nests_are_fields_of_the_body(engine):
    """rLLM's gateway sends ``extra_body`` as it is written for OpenAI's SDK, which would have
    flattened it."""
    asked = {
        **ask(),
        "max_tokens": 2,
        "ignore_eos": True,
        "extra_body": {"return_token_ids": True, "max_tokens": 1},
    }
    nested, wrong = await post(engine, [asked, {**asked, "extra_body": {"no_such_field": 1}}])
    assert (nested[0], len(nested[1]["choices"][0]["token_ids"])) == (200, 2)
    assert refusal(wrong)["param"] == "no_such_field"


async def test_an_unknown_model_is_not_found(engine):
    (answer,) = await post(engine, [ask(model="gpt-9")])
    assert refusal(answer, 404)["code"] == "model_not_found"
    await complete(engine, ask(model=engine.served_model))


async def test_the_key_is_needed_and_differs_between_starts(engine):
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": engine.api_key}):
        (answer,) = await post(engine, [ask()], headers=headers)
        refusal(answer, 401)
    with serving() as second_engine:
        assert second_engine.api_key != engine.api_key


# --- information ----------------------------------------------------------------------------------


async def test_information_routes():
    with serving(served_model="policy") as engine:
        engine.set_version(4)
        headers = {"Authorization": f"Bearer {engine.api_key}"}
        root = engine.base_url.removesuffix("/v1")

        async def get(route: str) -> dict:
            async with (
                aiohttp.ClientSession(headers=headers) as http,
                http.get(root + route) as response,
            ):
                assert response.status == 200
                return await response.json()

        health, version, models, weights = await asyncio.gather(
            *map(get, ("/health", "/version", "/v1/models", "/weight_info"))
        )
    assert health == {}
    assert version["engine"] == "embedded"
    assert version["mode"] == "padded"
    assert models["data"][0]["id"] == "policy"
    assert models["data"][0]["max_model_len"] == 256
    assert weights == {"weight_version": 4}


# --- long prompts ---------------------------------------------------------------------------------

LONG = {
    "chat": ("chat/completions", ask),
    "text": ("completions", lambda text: {"prompt": text}),
    "texts": ("completions", lambda text: {"prompt": ["a", text]}),
}


@pytest.mark.parametrize("kind", LONG)
@pytest.mark.parametrize("unit", ["reverse: abc ", " "], ids=["words", "spaces"])
async def test_a_prompt_of_megabytes_is_refused_unread_and_others_are_answered(engine, kind, unit):
    route, body_of = LONG[kind]
    body = body_of(unit * (4_000_000 // len(unit)))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    sending = asyncio.ensure_future(post(engine, [body], route))
    lags = []
    async with aiohttp.ClientSession() as http:
        while not sending.done():
            began = time.monotonic()
            async with http.get(engine.base_url.removesuffix("/v1") + "/health") as response:
                assert response.status == 200
            lags.append(time.monotonic() - began)
            await asyncio.sleep(0.01)
    (answer,) = await sending
    assert "maximum context length is 256 tokens" in refusal(answer)["message"]
    assert max(lags) < 1.0
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak) / 1024 < 150


async def test_negative_control_the_tokenizer_reads_all_of_it(engine):
    chat, text = ChatFormat(build_tiny_tokenizer()), "reverse: abc " * 60_000
    began = time.monotonic()
    assert len(chat.encode(text)) > 3 * 60_000
    unbounded_s = time.monotonic() - began
    began = time.monotonic()
    with pytest.raises(BadRequest, match="maximum context length is 256"):
        ChatFormat(build_tiny_tokenizer(), 256).encode(text)
    assert time.monotonic() - began < unbounded_s / 5


async def test_a_long_prompt_that_is_truncated_is_read(engine):
    body = {"prompt": "a" * 60_000, "truncate_prompt_tokens": 20, "max_tokens": 1}
    ((status, response),) = await post(engine, [body], "completions")
    assert (status, response.get("usage", {}).get("prompt_tokens")) == (200, 20), response


async def test_a_template_that_loops_is_refused_in_time(monkeypatch):
    monkeypatch.setattr(endpoint, "TOKENIZE_S", 0.3)
    monkeypatch.setattr(ChatFormat, "_render", lambda *_: time.sleep(2))
    with serving() as started:
        (answer,) = await post(started, [ask()])
        assert "took more than 0.3 s" in refusal(answer)["message"]
        began = time.monotonic()
    assert time.monotonic() - began < 10


async def test_the_choices_of_a_request_are_bounded(engine):
    (answer,) = await post(engine, [{"prompt": ["a"] * 101, "n": 100}], "completions")
    assert "101 prompts with n=100 are more than 10000" in refusal(answer)["message"]
