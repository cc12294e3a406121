"""What the errors of servers mean: the words before the status, one row per server; and which of
them end a run."""

from __future__ import annotations

import asyncio
import csv
import json
from pathlib import Path

import pytest

import verifiers as vf
from support.small_envs import single_turn
from verifiers.clients import OpenAIChatCompletionsClient, RetryPolicy
from verifiers.clients.failures import (
    _MESSAGES,
    WORDS,
    Endpoint,
    Standing,
    _strings,
    failure,
    meaning_of,
)
from verifiers.errors import (
    AuthenticationFailed,
    EndpointUnreachable,
    ModelRefused,
    ModelUnavailable,
    RateLimited,
)
from verifiers.runtime.redaction import redacted_text
from verifiers.testing import Behaviour, FakeServer
from verifiers.types import AssistantMessage, ModelRequest, Response, UserMessage

ENDPOINT = Endpoint("http://host/v1", "the variable MY_KEY", "MY_KEY")


def error(message, **fields):
    return json.dumps({"error": {"message": message, **fields}})


with (Path(__file__).parents[2] / "data" / "server_errors.tsv").open(encoding="utf-8") as file:
    SAID = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))


@pytest.mark.parametrize("row", SAID, ids=lambda row: f"{row['meaning']}-{row['server']}")
def test_the_words_of_a_server_say_what_failed(row):
    body = row["body"].encode()
    caught = failure(int(row["status"]), body, ENDPOINT, "m")
    assert type(caught).__name__ == row["error"]
    if row["error"] in ("RateLimited", "ModelRefused"):
        assert (caught.limit == "quota") == (row["meaning"] == "quota")
    words = json.dumps(json.loads(body), ensure_ascii=False) if b"\\u" in body else row["body"]
    assert words in caught.facts["body"]
    if words.startswith(("{", "[")):
        assert words not in str(caught)  # its message, not the characters of JSON
        words = next(iter(_strings(json.loads(body), first=_MESSAGES)))
    assert " ".join(words.split())[:300] in str(caught)


def test_the_message_of_a_refusal_is_shown_before_its_codes():
    body = error("temperature must be 1", type="invalid_request_error", param="temperature")
    assert str(failure(400, body.encode(), ENDPOINT, "m")) == (
        "http://host/v1 refused the request (HTTP 400): temperature must be 1"
        " (invalid_request_error, temperature)"
    )
    listed = {"detail": [{"loc": ["body", "max_tokens"], "msg": "must be above 0"}]}
    refused = failure(422, json.dumps(listed).encode(), ENDPOINT, "m")
    assert str(refused).endswith("(HTTP 422): must be above 0 (body, max_tokens)")
    denied = failure(403, error("not allowed here").encode(), ENDPOINT, "m")
    assert redacted_text(str(denied)).endswith("MY_KEY): not allowed here")


def test_each_meaning_of_the_table_has_rows_here():
    assert {row["meaning"] for row in SAID} == set(WORDS)


@pytest.mark.parametrize(
    ("status", "body", "kind"),
    [
        (500, error("CUDA error: out of memory"), ModelUnavailable),
        (503, error("The model is overloaded, try again later"), ModelUnavailable),
        *((status, error("later"), ModelUnavailable) for status in (408, 409, 424, 425, 599)),
        (426, error("use HTTP/2"), ModelRefused),
        (400, error("temperature: must be at most 2"), ModelRefused),
        (400, error("Invalid 'tools': array too long. Expected maximum length 128"), ModelRefused),
        (400, error("image exceeds 5 MB maximum: 6291456 bytes"), ModelRefused),
        (401, error("the prompt is too long"), AuthenticationFailed),
        (404, '{"detail": "Not Found"}', EndpointUnreachable),
    ],
)
def test_other_words_leave_the_meaning_to_the_status(status, body, kind):
    """Negative control: the general rule on lengths takes none of these."""
    assert type(failure(status, body.encode(), ENDPOINT, "m")) is kind


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        ("Request too large for m on tokens per min (TPM): Limit 30000, Requested 41234.", "above"),
        ("Request too large on tokens per minute (TPM): Limit 6000, Requested 7021, please", "above"),
        ("Rate limit reached for m on tokens per min (TPM): Limit 30000, Used 29000, Requested 3000"
         ". Please try again in 4s.", "rate"),
        ("Rate limit reached for m on requests per min (RPM): Limit 3, Used 3, Requested 1", "rate"),
    ],
)  # fmt: skip
def test_a_request_above_the_whole_rate_of_tokens_is_not_repeated(words, kind):
    refused = failure(429, error(words, code="rate_limit_exceeded").encode(), ENDPOINT, "m")
    assert type(refused) is (ModelRefused if kind == "above" else RateLimited)
    assert ("can never be served: lower max_tokens" in str(refused)) == (kind == "above")
    assert words[:60] in str(refused)


def test_words_of_the_prompt_that_an_error_repeats_mean_nothing():
    echo = "the context length of 8192 tokens is exceeded; flagged by moderation"
    body = {"error": {"message": "bad", "metadata": {"flagged_input": echo}}}
    assert type(failure(400, json.dumps(body).encode(), ENDPOINT, "m")) is ModelRefused
    assert meaning_of(echo) == "overlong"  # and as the server's own words they do


def test_what_the_model_wrote_in_a_call_that_was_refused_means_nothing():
    said = error(
        "tool call validation failed", code="tool_use_failed", failed_generation="rate limit"
    )
    assert type(failure(400, said.encode(), ENDPOINT, "m")) is ModelRefused


@pytest.mark.parametrize("status", [403, 404, 302])
def test_a_failure_by_status_alone_shows_the_words_too(status):
    text = str(failure(status, b'{"error": "teapots only"}', ENDPOINT, "m"))
    assert "teapots only" in text
    assert "refused the key" not in text


# --- which errors end the run ---------------------------------------------------------------------

FAST = RetryPolicy(max_retries=2, base_s=0.01, max_s=0.02)
DENIED = Behaviour(403, body='{"error": "computer says no"}')


def evaluate(script, **settings):
    with FakeServer("2", script=script) as server:
        client = OpenAIChatCompletionsClient(base_url=server.url, retry=FAST)
        return single_turn(20, rubric=vf.Rubric()).evaluate(client, "scripted", **settings)


def is_row(hit, number):
    return hit.json()["messages"][-1]["content"] == f"{number} + 1"


@pytest.mark.parametrize("fault", [DENIED, Behaviour(404), Behaviour(400, body="unknown model")])
@pytest.mark.parametrize("concurrency", [1, 20])
def test_an_error_of_one_request_among_successes_is_that_rollouts(fault, concurrency):
    """With 20 in flight the refusal is the first answer of all."""

    def script(hit):
        return fault if is_row(hit, 3) else Behaviour(delay_s=0.2 if concurrency > 1 else 0.0)

    results = evaluate(script, max_concurrent=concurrency)
    errors = [row.message for row in results["errors"] if row]
    assert len(errors) == 1
    assert "other requests succeeded there" in errors[0]
    assert results.metadata.num_errors == 1


def test_an_error_that_every_request_meets_ends_the_run_though_many_are_in_flight():
    """Negative control: without a success it is believed, and asked for no more than is in
    flight."""
    hits = []

    def script(hit):
        hits.append(hit)
        return DENIED

    with pytest.raises(AuthenticationFailed, match="computer says no"):
        evaluate(script, max_concurrent=5)
    assert len(hits) <= 5


NO_MONEY = Behaviour(402, body=error("Insufficient credits"))
NO_QUOTA = Behaviour(429, body=error("You exceeded your current quota", code="insufficient_quota"))
PROVIDER_UNPAID = Behaviour(body=error("Provider returned error", code=402))


@pytest.mark.parametrize("fault", [NO_MONEY, NO_QUOTA, PROVIDER_UNPAID])
@pytest.mark.parametrize("first", [0, 3])
def test_an_account_without_money_ends_the_run_at_once(fault, first):
    """Also after successes; a rate limit, the negative control, is asked again."""
    hits = []

    def script(hit):
        hits.append(hit)
        return fault if len(hits) > first else None

    with pytest.raises(vf.BudgetExhausted) as caught:
        evaluate(script, max_concurrent=1)
    assert len(hits) == first + 1  # neither repeated nor followed by another
    text = str(caught.value)
    assert "the account of the variable OPENAI_API_KEY has no money" in text
    assert json.loads(fault.body)["error"]["message"] in text
    assert "add credit to the account" in text

    def limited(hit):
        hits.append(hit)
        return Behaviour(429) if len(hits) % 2 else None

    hits.clear()
    assert not any(evaluate(limited, max_concurrent=1)["errors"])
    assert len(hits) == 40


def test_the_check_before_a_run_names_an_account_without_money():
    with FakeServer("2", models=NO_MONEY) as server:
        client = OpenAIChatCompletionsClient(base_url=server.url, retry=FAST)
        with pytest.raises(vf.BudgetExhausted, match="Insufficient credits"):
            asyncio.run(client.preflight("m"))


def test_a_flood_of_refusals_after_a_success_still_ends_the_run():
    with pytest.raises(vf.TooManyFaults):
        evaluate(lambda hit: None if is_row(hit, 0) else DENIED, abort_after=6, max_concurrent=1)


async def test_an_error_held_for_a_request_in_flight_is_released_when_that_is_cancelled():
    standing = Standing()

    async def denied():
        raise AuthenticationFailed("no")

    async def waiting():
        await asyncio.sleep(60)
        return Response(AssistantMessage("ok"))

    slow = asyncio.create_task(standing.call("m", waiting()))
    await asyncio.sleep(0)
    held = asyncio.create_task(standing.call("m", denied()))
    await asyncio.sleep(0.01)
    assert not held.done()
    with pytest.raises(AuthenticationFailed):  # another model has its own standing
        await standing.call("n", denied())
    slow.cancel()
    with pytest.raises(AuthenticationFailed):
        await held


@pytest.mark.parametrize(
    "body",
    [
        {"error": {"code": 502, "message": "the upstream fell over"}},
        {"error": {"code": 40303, "message": "the upstream fell over"}, "choices": []},
        {"object": "error", "message": "the upstream fell over", "code": 40303},
        {
            "choices": [
                {
                    "message": {"content": "ha"},
                    "finish_reason": "error",
                    "error": {"code": 502, "message": "the upstream fell over"},
                }
            ]
        },
    ],
)
async def test_an_error_in_an_answer_of_status_200_keeps_code_and_words(body):
    with FakeServer("x", script=lambda hit: Behaviour(body=json.dumps(body))) as server:
        client = OpenAIChatCompletionsClient(base_url=server.url, max_retries=0)
        with pytest.raises(vf.ModelError, match="fell over") as caught:
            await client.complete(ModelRequest([UserMessage("hi")], "m"))
        await client.aclose()
    assert str(body.get("code") or "502") in str(caught.value) or "40303" in str(caught.value)


def reply_of(dialect, text, reason):
    """A reply with this text, whose end has this reason, as the servers of the dialect send it."""
    if dialect == "chat":
        return {"choices": [{"message": {"content": text}, "finish_reason": reason}]}
    if dialect == "messages":
        blocks = [{"type": "text", "text": text}] if text else []
        return {"content": blocks, "stop_reason": reason}
    parts = [{"type": "output_text", "text": text}] if text else []
    item = {"type": "message", "role": "assistant", "content": parts}
    return {"output": [item], "status": "incomplete", "incomplete_details": {"reason": reason}}


@pytest.mark.parametrize(
    ("dialect", "client_type", "reason"),
    [
        ("chat", OpenAIChatCompletionsClient, "content_filter"),
        ("chat", OpenAIChatCompletionsClient, "SAFETY"),
        ("messages", vf.AnthropicMessagesClient, "refusal"),
        ("responses", vf.OpenAIResponsesClient, "content_filter"),
    ],
)
async def test_a_reply_that_a_filter_withheld_is_unknown(dialect, client_type, reason):
    async def complete(text, reason):
        body = json.dumps(reply_of(dialect, text, reason))
        with FakeServer("x", script=lambda hit: Behaviour(body=body)) as server:
            client = client_type(base_url=server.url, max_retries=0)
            try:
                return await client.complete(ModelRequest([UserMessage("hi")], "m"))
            finally:
                await client.aclose()

    with pytest.raises(vf.ModelRefused, match="withheld by a content filter"):
        await complete("", reason)
    # negative controls: what the filter let pass, and an empty reply that the model ended
    assert (await complete("a start", reason)).text == "a start"
    assert (await complete("", "stop_sequence")).text == ""
