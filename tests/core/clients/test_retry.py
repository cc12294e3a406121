"""The one retry layer: how often, how long, who is repeated, and how the flow is throttled."""

from __future__ import annotations

import asyncio
import time
from email.utils import format_datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verifiers.clients.failures import Endpoint, failure, is_overlong
from verifiers.clients.limiter import AdaptiveLimiter
from verifiers.clients.retry import RetryPolicy, call_with_retries, parse_retry_after
from verifiers.errors import (
    AuthenticationFailed,
    EndpointUnreachable,
    MalformedResponse,
    ModelNotFound,
    ModelRefused,
    ModelUnavailable,
    OverlongPromptError,
    RateLimited,
)
from verifiers.types import Message, Response

FAST = RetryPolicy(max_retries=3, base_s=0.001, max_s=0.002)
ANSWER = Response(Message(role="assistant", content="ok"))
ENDPOINT = Endpoint("http://host/v1", "the variable MY_KEY", "MY_KEY", secrets=("sk-secret-1",))


def sender(*outcomes):
    """An attempt that goes through ``outcomes``, the last one for ever; counts calls
    on ``.calls``."""

    async def send():
        send.calls += 1
        outcome = outcomes[min(send.calls, len(outcomes)) - 1]
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    send.calls = 0
    return send


async def test_a_success_after_failures_carries_their_history():
    send = sender(ModelUnavailable("down", status=503), RateLimited("slow", status=429), ANSWER)
    response = await call_with_retries(send, FAST, AdaptiveLimiter(4))
    assert [attempt.status for attempt in response.attempts] == [503, 429]
    assert [attempt.reason for attempt in response.attempts] == ["HTTP 503", "HTTP 429"]


async def test_the_number_of_repeats_is_bounded_and_the_error_tells_it():
    send = sender(ModelUnavailable("down", status=500))
    with pytest.raises(ModelUnavailable, match=r"down \(gave up after 4 attempts") as caught:
        await call_with_retries(send, FAST, AdaptiveLimiter(4))
    assert send.calls == 4
    assert len(caught.value.attempts) == 4


@pytest.mark.parametrize(
    "error", [ModelRefused("no"), OverlongPromptError("long"), AuthenticationFailed("key")]
)
async def test_what_repeating_cannot_change_is_not_repeated(error):
    send = sender(error)
    with pytest.raises(type(error)):
        await call_with_retries(send, FAST, AdaptiveLimiter(4))
    assert send.calls == 1


async def test_missing_token_data_is_asked_for_once_more_only():
    send = sender(MalformedResponse("no ids", field="completion_ids"))
    with pytest.raises(MalformedResponse):
        await call_with_retries(send, FAST, AdaptiveLimiter(4))
    assert send.calls == 2


async def test_a_pause_above_the_bound_fails_at_once_as_rate_limited():
    for error in (
        RateLimited("slow", status=429, retry_after_s=600.0),
        ModelUnavailable("down", retry_after_s=600.0),
    ):
        send = sender(error)
        with pytest.raises(RateLimited) as caught:
            await call_with_retries(send, FAST, AdaptiveLimiter(4))
        assert (send.calls, caught.value.retry_after_s) == (1, 600.0)


async def test_a_used_up_quota_is_not_waited_for():
    error = failure(429, b'{"error": {"code": "insufficient_quota"}}', ENDPOINT, "m")
    send = sender(error)
    with pytest.raises(ModelRefused, match="quota"):
        await call_with_retries(send, FAST, AdaptiveLimiter(4))
    assert send.calls == 1


async def test_the_whole_call_is_bounded_even_when_an_attempt_hangs():
    async def hangs():
        await asyncio.sleep(60)

    started = time.monotonic()
    with pytest.raises(ModelUnavailable, match=r"no completion within 0\.1 s"):
        await call_with_retries(hangs, FAST, AdaptiveLimiter(4), timeout_s=0.1)
    assert time.monotonic() - started < 1


async def test_a_pause_that_would_pass_the_bound_is_not_begun():
    send = sender(RateLimited("slow", status=429, retry_after_s=30.0))
    started = time.monotonic()
    with pytest.raises(RateLimited):
        await call_with_retries(send, FAST, AdaptiveLimiter(4), timeout_s=5)
    assert time.monotonic() - started < 1


@given(st.integers(1, 200), st.one_of(st.none(), st.floats(0, 120)))
def test_a_pause_is_never_earlier_than_asked_and_never_unbounded(num_failures, retry_after_s):
    pause_s = RetryPolicy().pause_s(num_failures, retry_after_s)
    assert (retry_after_s or 0) <= pause_s <= (retry_after_s or 0) + 30


def test_pauses_are_spread_over_the_whole_range():
    pauses = [RetryPolicy().pause_s(1, 1.0) for _ in range(4000)]
    per_bucket = [sum(1 + i / 10 <= pause < 1.1 + i / 10 for pause in pauses) for i in range(10)]
    assert max(per_bucket) < 0.25 * len(pauses)


def test_retry_after_is_seconds_milliseconds_or_a_date():
    from datetime import UTC, datetime, timedelta

    in_a_minute = format_datetime(datetime.now(UTC) + timedelta(seconds=60), usegmt=True)
    assert 57 < parse_retry_after(None, in_a_minute) <= 60
    assert parse_retry_after("1500", "9") == 1.5
    assert parse_retry_after(None, "-3") == 0
    assert parse_retry_after(None, "whenever") is None
    assert parse_retry_after(None, "nan") is None


# --- the limiter ----------------------------------------------------------------------------------


async def test_a_refusal_halves_the_flow_once_per_round_trip():
    limiter = AdaptiveLimiter(64)
    tickets = [limiter.enter_now() for _ in range(64)]
    for ticket in tickets:
        limiter.refused(ticket)
    assert (limiter.limit, limiter.num_cuts) == (32, 1)


async def test_successes_bring_the_flow_back():
    limiter = AdaptiveLimiter(64)
    for _ in range(5):
        limiter.refused(limiter.enter_now())
        limiter.leave()
    assert limiter.limit == 1
    for _ in range(2000):
        ticket = limiter.enter_now()
        assert ticket
        limiter.succeeded()
        limiter.leave()
    assert limiter.limit > 32


async def test_who_is_over_the_limit_waits_in_order_and_a_cancelled_waiter_loses_no_place():
    limiter = AdaptiveLimiter(1)
    limiter.enter_now()
    admitted = []

    async def enter(name):
        await limiter.enter()
        admitted.append(name)

    first, second, third = (asyncio.create_task(enter(name)) for name in "abc")
    await asyncio.sleep(0)
    second.cancel()
    await asyncio.sleep(0)
    limiter.leave()
    await first
    limiter.leave()
    await third
    assert admitted == ["a", "c"]
    assert limiter.in_flight == 1


async def test_a_waiter_cancelled_after_admission_gives_its_place_back():
    limiter = AdaptiveLimiter(1)
    limiter.enter_now()
    waiter = asyncio.create_task(limiter.enter())
    await asyncio.sleep(0)
    limiter.leave()  # admits the waiter, which has not run yet
    waiter.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiter
    assert limiter.in_flight == 0


# --- classification -------------------------------------------------------------------------------

OVERLONG = [
    (
        "This model's maximum context length is 4096 tokens. However, your messages resulted in"
        " 5000 tokens."
    ),
    '{"error":{"code":"context_length_exceeded","message":"too long"}}',
    "request (5031 tokens) exceeds the available context size (4096 tokens), try increasing it",
    "The input (5031 tokens) is longer than the model's context length (4096 tokens).",
    "The decoder prompt (length 5000) is longer than the maximum model length of 4096.",
    "prompt is too long: 210000 tokens > 200000 maximum",
    "Input validation error: `inputs` must have less than 1024 tokens. Given: 5000",
    "Please reduce the length of the messages or completion.",
    "The input token count (40000) exceeds the maximum number of tokens allowed (32768).",
    "too many tokens: total number of tokens in the prompt exceeds the limit of 4081",
    "max_tokens must be at least 1, got -904.",
    (
        "This model's maximum context length is 4096 tokens. However, you requested 4500 tokens "
        "(4000 in the messages, 500 in the completion)."
    ),
]
NOT_OVERLONG = [
    (
        "'max_tokens' is too large: 5000. This model's maximum context length is 4096 tokens and"
        " your request has 10."
    ),
    (
        "This model's maximum context length is 4096 tokens. However, you requested 5010 tokens "
        "(10 in the messages, 5000 in the completion)."
    ),
    "temperature must be at least 0",
    "messages is too short",
]


@pytest.mark.parametrize("text", OVERLONG)
def test_every_wording_of_a_full_context_is_recognised(text):
    assert isinstance(failure(400, text.encode(), ENDPOINT, "m"), OverlongPromptError)


@pytest.mark.parametrize("text", NOT_OVERLONG)
def test_a_limit_of_tokens_that_is_too_large_is_not_the_prompts_fault(text):
    assert not is_overlong(text)
    assert isinstance(failure(400, text.encode(), ENDPOINT, "m"), ModelRefused)


@pytest.mark.parametrize(
    ("status", "body", "kind"),
    [
        (401, "no", AuthenticationFailed),
        (403, "no", AuthenticationFailed),
        (404, "The model `m` does not exist", ModelNotFound),
        (
            404,
            '{"object":"error","message":"The model `m` does not exist.","code":404}',
            ModelNotFound,
        ),
        (400, "m is not a valid model ID", ModelNotFound),
        (404, "Not Found", EndpointUnreachable),
        (405, "Method Not Allowed", EndpointUnreachable),
        (307, "", EndpointUnreachable),
        (408, "", ModelUnavailable),
        (409, "", ModelUnavailable),
        (429, "", RateLimited),
        (500, "", ModelUnavailable),
        (529, "", ModelUnavailable),
        (400, "bad", ModelRefused),
        (413, "Request Entity Too Large", ModelRefused),
        (422, "bad", ModelRefused),
        (418, "", ModelRefused),
    ],
)
def test_every_status_has_one_class_and_names_the_endpoint_or_the_model(status, body, kind):
    error = failure(status, body.encode(), ENDPOINT, "m")
    assert type(error) is kind
    assert "http://host/v1" in str(error) or "of m" in str(error)
    assert error.status == status


def test_a_refused_key_names_its_variable_and_never_the_key():
    error = failure(401, b"Incorrect API key provided: sk-secret-1", ENDPOINT, "m")
    assert "MY_KEY" in str(error)
    assert "sk-secret-1" not in f"{error!r} {error.facts}"
    assert "sk-secret-1" not in repr(ENDPOINT)
