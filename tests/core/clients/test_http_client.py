"""The transport against a real server on loopback: tokens, faults, retries, preflight, loops and
secrets."""

from __future__ import annotations

import asyncio
import copy
import gc
import json
import pickle
import socket
import threading
import time
import traceback
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import aiohttp
import numpy as np
import pytest

import verifiers as vf
from support.small_envs import single_turn
from verifiers.clients import (
    ClientConfig,
    OpenAIChatCompletionsClient,
    OpenAICompletionsClient,
    RetryPolicy,
)
from verifiers.clients.reply import TokenTexts, Vocabulary, decode, to_response
from verifiers.errors import (
    AuthenticationFailed,
    BudgetExhausted,
    ConfigError,
    EmptyModelResponseError,
    EndpointUnreachable,
    MalformedResponse,
    MissingKeyError,
    ModelNotFound,
    ModelRefused,
    ModelUnavailable,
    OverlongPromptError,
    VerifiersError,
)
from verifiers.results.rows import json_ready
from verifiers.rollouts.state import TrajectoryStep
from verifiers.rollouts.transcript import Transcript
from verifiers.testing import Behaviour, FakeServer
from verifiers.types import AssistantMessage, ModelRequest, Response, ToolCall, UserMessage

FAST = RetryPolicy(max_retries=5, base_s=0.01, max_s=0.05)
REQUEST = ModelRequest([UserMessage("hi")], "m")
TOKENS = ModelRequest([UserMessage("hi")], "m", require_tokens=True)


def client_of(server, retry=FAST, **fields):
    return OpenAIChatCompletionsClient(base_url=server.url, retry=retry, **fields)


async def ask(server, request=REQUEST, **fields):
    client = client_of(server, **fields)
    try:
        return await client.complete(request)
    finally:
        await client.aclose()


def answers(choice=None, **fields):
    """A script entry: HTTP 200 with this completion."""
    body = {"id": "1", "created": 5, "model": "served", "choices": [choice], **fields}
    return Behaviour(body=json.dumps(body))


async def refusal_of(server, **fields):
    with pytest.raises(VerifiersError) as caught:
        await ask(server, retry=RetryPolicy(max_retries=0), **fields)
    return caught.value


# --- what comes back ------------------------------------------------------------------------------


async def test_a_completion_becomes_a_response():
    script = [answers({"message": {"role": "assistant", "content": "yo"}, "finish_reason": "length"}, usage={
        "prompt_tokens": 3, "completion_tokens": 4})]  # fmt: skip
    with FakeServer("x", script) as server:
        response = await ask(server)
    assert (response.text, response.finish_reason, response.model, response.id, response.created) == (
        "yo", "length", "served", "1", 5)  # fmt: skip
    assert response.choices[0].message == AssistantMessage("yo")
    assert response.usage.total_tokens == 7
    assert (response.tokens, response.version, response.attempts, response.raw) == (
        None,
        -1,
        (),
        None,
    )


async def test_tokens_of_the_cache_and_of_reasoning_are_counted_where_the_server_tells_them():
    usage = {"prompt_tokens": 30, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 20},
             "completion_tokens_details": {"reasoning_tokens": 3}}  # fmt: skip
    odd = {
        "prompt_tokens": 30,
        "prompt_tokens_details": {"cached_tokens": None},
        "completion_tokens_details": [],
    }
    answer = {"message": {"role": "assistant", "content": "yo"}, "finish_reason": "stop"}
    with FakeServer("x", [answers(answer, usage=usage), answers(answer, usage=odd)]) as server:
        assert (await ask(server)).usage == vf.Usage(30, 4, cached_tokens=20, reasoning_tokens=3)
        assert (await ask(server)).usage == vf.Usage(30)


async def test_a_reply_that_arrives_as_a_whole_has_a_limit_too():
    """Negative control: the same reply within its limit."""
    with FakeServer("x" * 2000) as server:
        with pytest.raises(MalformedResponse, match=r"more than 1000 bytes \(decoded\)"):
            await ask(server, retry=RetryPolicy(max_retries=0), max_response_bytes=1000)
        assert (await ask(server, max_response_bytes=10_000)).text == "x" * 2000


async def test_tool_calls_reasoning_and_part_lists_are_normalised():
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    message = {"content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "reasoning": "hm",
               "tool_calls": [call], "refusal": None, "annotations": []}  # fmt: skip
    with FakeServer("x", [answers({"message": message, "finish_reason": "tool_calls"})]) as server:
        message = (await ask(server)).message
    assert message == {
        "role": "assistant",
        "content": "ab",
        "tool_calls": [call],
        "reasoning_content": "hm",
    }
    assert isinstance(message.tool_calls[0], ToolCall)


async def test_an_empty_text_with_a_reason_is_a_completion():
    with FakeServer(
        "x", [answers({"message": {"content": None}, "finish_reason": "stop"})]
    ) as server:
        assert (await ask(server)).message == AssistantMessage("")


async def test_tokens_come_back_exactly_as_sampled():
    with FakeServer([Response(AssistantMessage("xy"), version=7)], tokens=True) as server:
        tokens = (await ask(server, TOKENS)).tokens
    assert tokens.completion_ids.tolist() == [120, 121, 257]
    assert tokens.prompt_ids.tolist() == [259, 104, 105, 257, 260]
    assert tokens.completion_logprobs.tolist() == [-0.25, -0.375, -0.75]
    assert tokens.version == 7


async def test_the_texts_of_tokens_are_held_once_and_their_logprobs_in_eight_bytes():
    """Negative control: the decoded body itself takes more than twice the bound."""

    def body(n: int) -> bytes:
        content = [
            {"token": f" word{(n * 7 + i) % 300}", "logprob": -0.001 * i - 0.12345}
            for i in range(256)
        ]
        return json.dumps(
            {"choices": [{"message": {"content": "x"}, "logprobs": {"content": content}}]}
        ).encode()

    def growth_per_response(keep) -> float:
        bodies = [body(n) for n in range(60)]
        held = [keep(body) for body in bodies[:10]]
        tracemalloc.start()
        held += [keep(body) for body in bodies[10:]]
        size, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return size / (len(held) - 10)

    def response(body: bytes) -> Response:
        return to_response(decode(body, "here"), ModelRequest([], "m", {}), "here")

    bound = 256 * 12 + 4000  # the number of a text and eight bytes per token, and the response
    assert growth_per_response(response) < bound
    assert growth_per_response(lambda body: decode(body, "here")) > 2 * bound
    sampled = response(body(0)).token_logprobs
    assert sampled["texts"][:2] == [" word0", " word1"]
    assert sampled["logprobs"][:2] == [-0.12345, -0.12445]


async def test_the_texts_of_tokens_are_a_list_to_whoever_reads_them():
    content = [{"token": text, "logprob": -0.5} for text in ("a", "b", "a")]
    body = {
        "choices": [
            {"message": {"content": "x"}, "logprobs": {"content": content}, "token_ids": [1, 2, 1]}
        ]
    }
    read = to_response(
        decode(json.dumps(body | {"prompt_token_ids": [3]}).encode(), "here"), TOKENS, "here"
    )
    assert read.token_logprobs is None  # a trainer names tokens by their ids
    asked = ModelRequest([], "m", {})
    read = to_response(
        decode(json.dumps(body | {"prompt_token_ids": [3]}).encode(), "here"), asked, "here"
    )
    sampled, lists = read.token_logprobs, {"texts": ["a", "b", "a"], "logprobs": [-0.5, -0.5, -0.5]}
    held = dict.__getitem__(sampled, "logprobs")
    assert not isinstance(held, list)
    assert np.shares_memory(read.tokens.completion_logprobs, np.frombuffer(held)), (
        "the numbers are held twice"
    )
    plain = [
        dict(sampled),
        {**sampled},
        sampled | {},
        {} | sampled,
        sampled.copy(),
        copy.copy(sampled),
    ]
    plain += [
        copy.deepcopy(sampled),
        pickle.loads(pickle.dumps(sampled)),
        dict(sampled.items()),
        json_ready(sampled),
    ]
    plain += [
        json.loads(json.dumps(sampled)),
        json.loads(json.dumps({"deep": [sampled]}, indent=1))["deep"][0],
    ]
    plain.append(dict(zip(sampled.keys(), sampled.values(), strict=True)))
    plain.append({name: sampled.get(name) for name in sampled})
    plain.append({name: sampled.setdefault(name) for name in lists})
    assert all(
        type(each) is dict and type(each["texts"]) is type(each["logprobs"]) is list
        for each in plain
    )
    assert all(each == lists and sampled == each and repr(sampled) == repr(lists) for each in plain)
    assert sampled != {**lists, "texts": ["a", "b", "b"]}
    sampled["mine"] = (1,)
    assert (sampled["mine"], sampled.get("other", 2)) == ((1,), 2)
    assert [sampled.pop("texts"), sampled.pop("texts", None), "texts" in sampled] == [
        ["a", "b", "a"],
        None,
        False,
    ]
    with pytest.raises(TypeError):
        json.dumps({"texts": held})  # the negative control: what is held


def test_a_vocabulary_of_many_texts_and_threads_has_each_once():
    vocabulary, words = Vocabulary(), [str(n) for n in range(70_000)]
    starts = [0, 20_000, 40_000, 60_000]
    with ThreadPoolExecutor(4) as threads:
        tokens = list(threads.map(lambda start: TokenTexts(words[start:], vocabulary), starts))
    assert [
        texts.tolist() == words[start:] for start, texts in zip(starts, tokens, strict=True)
    ] == [True] * 4
    assert sorted(vocabulary.texts) == sorted(words)


async def test_tokens_are_read_from_every_place_where_servers_put_them():
    content = [{"token": "token_id:5", "logprob": -1.0}, {"token": "token_id:6", "logprob": -2}]
    with_texts = {"text": "ab", "logprobs": {"content": content}, "prompt_token_ids": [1, 2]}
    with_ids = {"message": {"content": "ab"}, "prompt_token_ids": [1, 2],
                "logprobs": {"content": [{"id": 5, "logprob": -1.0}, {"id": 6, "logprob": -2.0}]}}  # fmt: skip
    legacy = {"text": "ab", "token_ids": [5, 6], "logprobs": {"tokens": ["a", "b"], "token_logprobs": [-1.0, -2.0]},
              "weight_versions": [{"version": 4, "start": 1}, {"version": 3, "start": 0}]}  # fmt: skip
    script = [answers(with_texts), answers(with_ids), answers(legacy, prompt_token_ids=[1, 2])]
    with FakeServer("x", script) as server:
        for version, oldest in ((-1, -1), (-1, -1), ([3, 4], 3)):
            response = await ask(server, TOKENS)
            assert response.tokens.prompt_ids.tolist() == [1, 2]
            assert response.tokens.completion_ids.tolist() == [5, 6]
            assert response.tokens.completion_logprobs.tolist() == [-1, -2]
            assert np.asarray(response.tokens.version).tolist() == version
            assert response.version == oldest


@pytest.mark.parametrize(
    ("spans", "version"),
    [
        ([{"version": 4, "start": 0, "end": 2}], 4),
        ([{"version": 4, "start": 0, "end": 1}, {"version": 5, "start": 1, "end": 2}], [4, 5]),
        ([{"version": 5, "start": 1, "end": 2}, {"version": 4}], [4, 5]),
        ([{"version": "8", "start": 0, "end": 1}, {"version": "9", "start": 1}], [8, 9]),
        ([{"version": 6, "start": 1, "end": 2}, {"version": 6, "start": 0, "end": 1}], 6),
        ("7", 7),
        ([{"version": "default"}], -1),
        (
            [{"version": "default", "start": 0, "end": 1}, {"version": 9, "start": 1, "end": 2}],
            [-1, 9],
        ),
    ],
)
async def test_a_token_has_the_version_of_its_span_also_in_saved_rollouts(spans, version):
    content = [{"token": "token_id:5", "logprob": -1.0}, {"token": "token_id:6", "logprob": -2}]
    body = {
        "message": {"content": "ab"},
        "logprobs": {"content": content},
        "weight_versions": spans,
    }
    with FakeServer("x", [answers(body, prompt_token_ids=[1, 2])]) as server:
        tokens = (await ask(server, TOKENS)).tokens
    assert np.asarray(tokens.version).tolist() == version
    step = TrajectoryStep(prompt=[], completion=[], tokens=tokens)
    assert np.asarray(step.version).tolist() == version
    read = Transcript.from_json(json.loads(json.dumps(Transcript([step]).to_json())))
    assert read[0]["tokens"]["version"] == version
    (branch,) = read.branches()
    assert branch.versions[branch.sampled].tolist() == np.broadcast_to(version, 2).tolist()


@pytest.mark.parametrize(
    ("label", "version"),
    [(2**60 - 1, 2**60 - 1), (2**63 - 1, 2**63 - 1), (2**63, -1), (10**30, -1)],
)
async def test_a_version_is_any_number_of_64_bits(label, version):
    """A trainer's labels have up to 60 bits: the run and the version."""
    body = {"message": {"content": "ab"}, "weight_versions": [{"version": str(label)}]}
    with FakeServer("x", [answers(body)]) as server:
        assert (await ask(server)).version == version


# --- faults (whole runs: faults/) -----------------------------------------------------------------


async def test_server_errors_and_resets_are_repeated_with_their_history():
    with FakeServer(
        "x", [500, 502, 503, Behaviour(reset=True), Behaviour(garbage=b"\x00nonsense")]
    ) as server:
        response = await ask(server)
        assert server.count == 6
    assert [attempt.status for attempt in response.attempts] == [500, 502, 503, None, None]


@pytest.mark.parametrize("status", [401, 403])
async def test_a_refused_key_stops_after_one_request_and_names_the_variable(status, monkeypatch):
    monkeypatch.setenv("MY_KEY", "sk-canary-123456")
    with FakeServer("x", [Behaviour(status, body="bad key sk-canary-123456")]) as server:
        with pytest.raises(AuthenticationFailed, match="MY_KEY") as caught:
            await ask(server, api_key_var="MY_KEY")
        assert server.count == 1
        assert server.hits[0].headers["authorization"] == "Bearer sk-canary-123456"
    report = "".join(traceback.format_exception(caught.value)) + repr(caught.value.facts)
    assert "canary" not in report


async def test_an_unknown_model_and_a_wrong_path_are_told_apart():
    with FakeServer("x", [Behaviour(404, body="The model `m` does not exist"), 404]) as server:
        with pytest.raises(ModelNotFound, match="'m'"):
            await ask(server)
        with pytest.raises(EndpointUnreachable, match="/v1"):
            await ask(server)
        assert server.count == 2


async def test_a_full_context_and_other_refusals_are_not_repeated():
    with FakeServer("x", [Behaviour(400, body="maximum context length is 10"), 400]) as server:
        with pytest.raises(OverlongPromptError):
            await ask(server)
        with pytest.raises(ModelRefused):
            await ask(server)
        assert server.count == 2


@pytest.mark.parametrize("fault", [Behaviour(never=True), Behaviour(drip_s=0.2)])
async def test_silence_and_dripping_end_with_the_attempt_and_are_repeated(fault):
    with FakeServer("x", [fault]) as server:
        response = await ask(server, timeout=0.3)
        assert server.count == 2
    assert "within 0.3 s" in response.attempts[0].reason


async def test_negative_control_without_a_bound_or_a_repeat_the_call_hangs_or_fails():
    with FakeServer("x", [Behaviour(never=True), 503]) as server:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(ask(server, timeout=60), 0.5)
        with pytest.raises(ModelUnavailable):
            await ask(server, retry=RetryPolicy(max_retries=0))


async def test_the_whole_call_ends_at_its_bound():
    with FakeServer("x", lambda hit: Behaviour(never=True)) as server:
        started = time.monotonic()
        with pytest.raises(ModelUnavailable, match=r"within 0\.4 s"):
            await ask(server, ModelRequest([UserMessage("hi")], "m", timeout_s=0.4), timeout=60)
        assert time.monotonic() - started < 1.4


OK = {
    "message": {"content": "a"},
    "finish_reason": "stop",
    "token_ids": [1, 2],
    "prompt_token_ids": [1],
}
BAD_BODIES = {
    "empty": b"",
    "web page": b"<html>",
    "cut": b'{"choices": [{"message"',
    "choices null": b'{"choices": null}',
    "choices empty": b'{"choices": []}',
    "choices wrong": b'{"choices": {"a": 1}}',
    "not an object": b"[1, 2]",
    "message is text": b'{"choices": [{"message": "a"}]}',
    "content is a number": b'{"choices": [{"message": {"content": 5}}]}',
    "tool calls are text": b'{"choices": [{"message": {"tool_calls": ["a"]}}]}',
    "not utf-8": b'{"choices": "\xff"}',
}
BAD_TOKENS = {
    "no prompt ids": ({"prompt_token_ids": None}, "prompt_ids"),
    "empty prompt ids": (
        {"prompt_token_ids": [], "logprobs": {"token_logprobs": [-1, -1]}},
        "prompt_ids",
    ),
    "no completion ids": ({"token_ids": None}, "completion_ids"),
    "no logprobs": ({}, "completion_logprobs"),
    "too few": ({"logprobs": {"content": [{"logprob": -1}]}}, "completion_logprobs"),
    "NaN": (
        {"logprobs": {"content": [{"logprob": float("nan")}, {"logprob": -1}]}},
        "completion_logprobs",
    ),
    "null": (
        {"logprobs": {"content": [{"logprob": None}, {"logprob": -1}]}},
        "completion_logprobs",
    ),
    "text": ({"logprobs": {"token_logprobs": ["a", "b"]}}, "completion_logprobs"),
    "huge id": (
        {"token_ids": [2**40, 1], "logprobs": {"token_logprobs": [-1, -1]}},
        "completion_logprobs",
    ),
}


@pytest.mark.parametrize("body", BAD_BODIES.values(), ids=BAD_BODIES)
async def test_what_is_no_completion_is_malformed_after_repeats(body):
    with FakeServer("x", lambda hit: Behaviour(body=body)) as server:
        with pytest.raises(MalformedResponse, match="gave up after 2 attempts"):
            await ask(server, retry=RetryPolicy(max_retries=1, base_s=0.001))


@pytest.mark.parametrize(("change", "field"), BAD_TOKENS.values(), ids=BAD_TOKENS)
async def test_incomplete_token_data_are_refused_by_name_when_required_and_dropped_otherwise(
    change, field
):
    with FakeServer("x", lambda hit: answers({**OK, **change})) as server:
        with pytest.raises(MalformedResponse, match=field) as caught:
            await ask(server, TOKENS)
        assert caught.value.field == field
        assert (await ask(server)).tokens is None


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        ('{"base_resp": {"status_msg": "insufficient balance"}}', BudgetExhausted),
        ('{"choices": null, "status_msg": "context window exceeds limit"}', OverlongPromptError),
        ('{"error_code": 336103, "error_msg": "Prompt tokens too long"}', OverlongPromptError),
        ('[{"error": {"status": "RESOURCE_EXHAUSTED"}}]', vf.RateLimited),
        ('{"detail": "the model m does not exist"}', ModelNotFound),
        ('{"error": "Unexpected endpoint or method. (POST /chat)"}', EndpointUnreachable),
        ('{"choices": [{"message": "the rate limit"}]}', MalformedResponse),  # the model's words
        ('{"detail": "a teapot"}', MalformedResponse),
    ],
)
async def test_an_error_in_a_body_with_status_200_is_read_by_its_words(body, kind):
    with FakeServer(script=lambda hit: Behaviour(body=body)) as server:
        caught = await refusal_of(server)
    assert type(caught) is kind
    words = next(iter(json.loads(body).values())) if body.startswith('{"detail') else ""
    assert words in str(caught)


async def test_the_words_of_a_server_are_shown_without_the_key_that_it_repeats():
    body = '{"detail": "no plan for sk-secret-key"}'
    with FakeServer(script=lambda hit: Behaviour(body=body)) as server:
        caught = await refusal_of(server, api_key="sk-secret-key")
    assert "no plan for ***" in str(caught)
    assert "sk-secret" not in repr(caught.facts)
    chain = traceback.format_exception(caught)
    assert "sk-secret" not in "".join(chain).replace('api_key="sk-secret-key"', "")


def completion_of(message, reason="stop", **fields):
    choice = {"message": {"role": "assistant", **message}, "finish_reason": reason}
    body = {"prompt_token_ids": [1], "choices": [choice | fields.pop("choice", {})], **fields}
    return json.dumps(body).encode()


def called(**call):
    return completion_of({"content": None, "tool_calls": [call]}, "tool_calls")


@pytest.mark.parametrize(
    "body",
    [
        completion_of({"content": [{"type": "text", "text": 5}]}),
        called(id="c", function="f"),
        completion_of(
            {"content": "a"},
            choice={"token_ids": [1], "logprobs": {"content": [{"logprob": -(10**400)}]}},
        ),
        completion_of(
            {"content": "a"}, choice={"logprobs": {"tokens": ["token_id:" + "9" * 5000]}}
        ),
        completion_of({"content": "a"}, weight_versions=[{"version": 1, "start": "x"}, 2]),
    ],
    ids=["text", "function", "logprob", "token id", "span"],
)
async def test_a_field_of_another_type_is_a_malformed_reply_and_nothing_else(body):
    with FakeServer(script=lambda hit: Behaviour(body=body)) as server:
        caught = await refusal_of(server)
    assert type(caught) is MalformedResponse
    assert "not in the form of the chat API" in str(caught)


@pytest.mark.parametrize("status", [200, 201])
async def test_numbers_that_are_no_counts_do_not_cost_the_reply(status):
    usage = {"prompt_tokens": -5, "completion_tokens": 12.0}
    body = completion_of({"content": ["a", "b"]}, "MAX_TOKENS", usage=usage)
    body = body.replace(b'"usage"', b'"created": NaN, "usage"')
    with FakeServer(script=[Behaviour(status, body=body)]) as server:
        response = await ask(server)
    assert (response.message["content"], response.finish_reason) == ("ab", "length")
    assert (response.usage.prompt_tokens, response.usage.completion_tokens) == (0, 12)
    assert response.created == 0


async def test_the_name_and_id_of_a_call_are_texts():
    body = called(id=7, function={"name": 5, "arguments": "{}"})
    with FakeServer(script=[Behaviour(body=body)]) as server:
        response = await ask(server)
    assert response.message["tool_calls"] == [ToolCall("7", "5", "{}")]


async def test_nothing_at_all_is_an_empty_response():
    with FakeServer("x", lambda hit: answers({"message": {"content": None}})) as server:
        with pytest.raises(EmptyModelResponseError):
            await ask(server, retry=RetryPolicy(max_retries=0))


async def test_a_lone_surrogate_in_an_answer_survives():
    with FakeServer(["a\ud800b"]) as server:
        assert (await ask(server)).text == "a\ud800b"


# --- names, headers, modes ------------------------------------------------------------------------


async def test_the_older_name_of_the_limit_is_tried_once_and_remembered():
    def script(hit):
        old = "max_completion_tokens" in hit.json()
        if old:
            return Behaviour(400, body="Unrecognized request argument: max_completion_tokens")
        return None

    with FakeServer("x", script) as server:
        client = client_of(server)
        for _ in range(3):
            response = await client.complete(
                ModelRequest([UserMessage("hi")], "m", sampling_args={"max_tokens": 5})
            )
            assert response.attempts == ()
        await client.aclose()
        assert server.count == 4
        assert server.requests[-1]["max_tokens"] == 5


async def test_headers_name_the_conversation_and_carry_what_was_configured():
    with FakeServer("x") as server:
        request = ModelRequest([UserMessage("hi")], "m", rollout_id="r-1", headers={"X-Own": "2"})
        await ask(server, request, headers={"X-Team": "a"})
        headers = server.hits[0].headers
    assert (headers["x-session-id"], headers["x-own"], headers["x-team"]) == ("r-1", "2", "a")
    assert "authorization" not in headers


async def test_a_header_that_cannot_be_sent_is_the_requests_own_failure():
    with FakeServer("x") as server:
        with pytest.raises(ModelRefused, match="header"):
            await ask(server, ModelRequest([UserMessage("hi")], "m", headers={"X": "a\nb"}))


async def test_text_requests_use_the_completions_endpoint():
    with FakeServer("more") as server:
        assert (
            await ask(server, ModelRequest("once", "m", message_type="completion"))
        ).text == "more"
        assert server.hits[0].path == "/v1/completions"
        client = OpenAICompletionsClient(base_url=server.url)
        assert (await client.complete(ModelRequest("once", "m"))).text == "more"
        with pytest.raises(ConfigError, match="continues text"):
            await client.complete(REQUEST)
        await client.aclose()


async def test_raw_bodies_are_kept_only_on_request_and_a_query_is_added():
    with FakeServer("x") as server:
        response = await ask(server, keep_raw=True, query={"api-version": "3"})
        assert response.raw["choices"][0]["message"]["content"] == "x"
        assert server.hits[0].query == "api-version=3"


async def test_large_bodies_are_sent_whole():
    with FakeServer("x") as server:
        await ask(server, ModelRequest([UserMessage("a" * 3_000_000)], "m"))
        assert len(server.requests[0]["messages"][0]["content"]) == 3_000_000


# --- settings -------------------------------------------------------------------------------------


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://host/v1", "", "http://user:pass@host/v1"])
def test_a_base_url_that_cannot_be_used_is_refused_at_construction(url):
    with pytest.raises(ConfigError) as caught:
        OpenAIChatCompletionsClient(base_url=url)
    assert "pass@" not in str(caught.value)


def test_unknown_settings_and_types_are_refused():
    with pytest.raises(ConfigError, match="timeouts"):
        OpenAIChatCompletionsClient(timeouts=3)
    with pytest.raises(ConfigError, match="later"):
        ClientConfig(client_type="renderer")
    with pytest.raises(ConfigError, match="did you mean"):
        ClientConfig(client_type="openai_chat_completion")
    with pytest.raises(ConfigError, match="timeout"):
        ClientConfig(timeout=0)


async def test_a_key_is_needed_only_away_from_loopback_and_only_when_asked(monkeypatch):
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    client = OpenAIChatCompletionsClient(
        base_url="https://example.invalid/v1", api_key_var="NO_SUCH_KEY"
    )
    with pytest.raises(MissingKeyError, match="NO_SUCH_KEY"):
        await client.complete(REQUEST)


def test_no_secret_is_shown():
    client = OpenAIChatCompletionsClient(
        base_url="http://h/v1", api_key="sk-canary", headers={"X": "canary"}
    )
    assert "canary" not in f"{client!r} {client.config!r}"


def test_construction_opens_nothing():
    threads = threading.active_count()
    OpenAIChatCompletionsClient(base_url="https://example.invalid/v1")
    assert threading.active_count() == threads


# --- preflight (row 16) ---------------------------------------------------------------------------


async def preflight(url, model=None, timeout_s=2.0):
    client = OpenAIChatCompletionsClient(base_url=url)
    try:
        return await client.preflight(model, timeout_s)
    finally:
        await client.aclose()


def free_port():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


async def test_nothing_listening_is_one_sentence_with_the_url_and_the_fix():
    url = f"http://127.0.0.1:{free_port()}/v1"
    with pytest.raises(EndpointUnreachable) as caught:
        await preflight(url)
    assert (
        str(caught.value)
        == f"no answer from {url} (connection refused): start the server or correct the base URL"
    )


@pytest.mark.parametrize(
    "models", [Behaviour(body="<html>hello"), Behaviour(302, {"Location": "/login"})]
)
async def test_a_web_page_or_a_redirect_is_no_endpoint(models):
    with FakeServer("x", models=models) as server:
        with pytest.raises(EndpointUnreachable, match="base URL"):
            await preflight(server.url)


async def test_a_wrong_path_ends_the_run_at_its_first_request_and_a_server_without_a_listing_is_not_wrong():
    with FakeServer("x") as server:
        wrong = OpenAIChatCompletionsClient(base_url=server.url.removesuffix("/v1") + "/api")
        with pytest.raises(EndpointUnreachable, match="/v1"):
            await single_turn(5).a_evaluate(wrong, "m")
        await wrong.aclose()
    with FakeServer("x", models=Behaviour(404)) as server:
        assert await preflight(server.url) is None
        assert not server.requests


async def test_a_server_of_a_few_lines_is_asked_for_nothing_but_its_models_before_the_first_rollout():
    """It has one route and reads the message without looking whether one is there."""

    class Few(BaseHTTPRequestHandler):
        asked: ClassVar[list] = []

        def do_POST(self):
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self.asked.append(request["messages"][-1]["content"])
            choice = {
                "index": 0,
                "finish_reason": "stop",
                "message": {"role": "assistant", "content": "hi"},
            }
            body = json.dumps({"id": "1", "model": "m", "choices": [choice]}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Few)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        client = OpenAIChatCompletionsClient(base_url=f"http://127.0.0.1:{server.server_port}/v1")
        results = await single_turn(2).a_evaluate(client, "m")
        await client.aclose()
    finally:
        server.shutdown()
        server.server_close()
    assert (results["errors"], len(Few.asked)) == ([None, None], 2)


async def test_a_silent_server_is_given_up_on():
    with FakeServer("x", models=Behaviour(never=True)) as server:
        with pytest.raises(EndpointUnreachable, match=r"within 0\.2 s"):
            await preflight(server.url, timeout_s=0.2)


async def test_a_refused_key_stops_before_the_run():
    with FakeServer("x", models=Behaviour(401)) as server:
        with pytest.raises(AuthenticationFailed, match="OPENAI_API_KEY"):
            await preflight(server.url)


async def test_a_model_that_is_not_listed_is_a_warning():
    with FakeServer("x", models=["a", "b"]) as server:
        assert await preflight(server.url, "a") is None
        assert await preflight(server.url, "c") == f"{server.url} lists a, b, not 'c'"
    with FakeServer("x", models=Behaviour(503)) as server:
        assert "HTTP 503" in await preflight(server.url, "c")


# --- loops ----------------------------------------------------------------------------------------


def test_one_client_serves_many_loops_and_each_shutdown_closes_its_session(recwarn):
    gc.collect()  # what other tests left behind
    recwarn.clear()
    with FakeServer("x") as server:
        client = client_of(server)
        sessions = []

        async def once():
            sessions.append(client._pools.here().session)
            return (await client.complete(REQUEST)).text

        assert [asyncio.run(once()) for _ in range(3)] == ["x"] * 3
        threads = [threading.Thread(target=lambda: asyncio.run(once())) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(set(sessions)) == 7
        assert all(session.closed for session in sessions)
        assert client._pools.num_open == 0
    gc.collect()
    assert not [str(w.message) for w in recwarn if issubclass(w.category, ResourceWarning)]


def test_negative_control_a_session_shared_by_loops_breaks():
    with FakeServer("x") as server:
        session = []

        async def once():
            if not session:
                session.append(aiohttp.ClientSession())
            body = {"model": "m", "messages": []}
            async with session[0].post(server.url + "/chat/completions", json=body) as answer:
                return answer.status

        assert asyncio.run(once()) == 200
        with pytest.raises(RuntimeError):
            asyncio.run(once())
        session[0].detach()


async def test_closing_under_a_running_request_repeats_it_on_a_new_session():
    with FakeServer("x", [Behaviour(delay_s=0.3)]) as server:
        client = client_of(server)
        pending = asyncio.create_task(client.complete(REQUEST))
        await asyncio.sleep(0.1)
        await client.aclose()
        assert (await pending).text == "x"
        await client.aclose()


async def test_connections_are_reused_and_bounded():
    with FakeServer("x", delay_s=0.05) as server:
        client = client_of(server, max_connections=4)
        await asyncio.gather(*(client.complete(REQUEST) for _ in range(12)))
        await client.aclose()
        assert server.max_in_flight <= 4


async def test_cancelling_a_call_stops_it():
    with FakeServer("x", lambda hit: 500) as server:
        client = client_of(server)
        pending = asyncio.create_task(client.complete(REQUEST))
        while server.count < 2:  # noqa: ASYNC110 - the server counts in another thread
            await asyncio.sleep(0.01)
        pending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await pending
        await asyncio.sleep(0.1)  # the server may still be reading what was sent before
        seen = server.count
        await asyncio.sleep(0.2)
        assert server.count == seen
        await client.aclose()


async def test_no_lower_error_leaks_whatever_the_server_does():
    faults = [Behaviour(garbage=b"HTTP/1.1 999999 x\r\n\r\n"),
              Behaviour(garbage=b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nab"),
              Behaviour(headers={"Content-Encoding": "gzip"}), Behaviour(headers={"Content-Length": "-1"}),
              Behaviour(garbage=b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"),
              Behaviour(garbage=b"\r\n" * 5), Behaviour(headers={"X" * 9000: "y"}), Behaviour(reset=True)]  # fmt: skip
    with FakeServer("x", faults) as server:
        for _ in faults:
            with pytest.raises(VerifiersError):
                await ask(server, retry=RetryPolicy(max_retries=0))
