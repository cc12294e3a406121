"""Promises: one rollout's failure is that rollout's failure; every wait has a bound and says what it waits for."""

import asyncio
import math
import time

import pytest

import verifiers as vf
from support.small_envs import Talk, add_one, single_turn
from verifiers.clients import OpenAIChatCompletionsClient, RetryPolicy
from verifiers.testing import Behaviour, FakeServer


def client_of(server, **fields):
    """A client that repeats soon, so that the tests do."""
    max_retries = fields.pop("max_retries", 4)
    policy = RetryPolicy(max_retries=max_retries, base_s=0.01, max_s=0.05)
    return OpenAIChatCompletionsClient(base_url=server.url, retry=policy, **fields)


def unreliable(hit):
    """Every tenth request fails, every hundredth is never answered."""
    if hit.index % 100 == 50:
        return Behaviour(never=True)
    if hit.index % 10 == 3:
        return Behaviour(429, {"Retry-After": "0"}) if hit.index % 20 == 3 else Behaviour(500)
    return None


def test_a_server_that_fails_often_and_is_silent_sometimes_costs_nothing():
    with FakeServer(add_one, script=unreliable) as server:
        started = time.monotonic()
        results = single_turn(300).evaluate(client_of(server, timeout=0.5), "scripted", max_concurrent=32)
        assert results["rewards"] == [1.0] * 300
        assert results["errors"] == [None] * 300
        assert 300 < server.count < 400
        assert time.monotonic() - started < 20
        repeated = [s for s in results["states"] if s["trajectory"][0]["response"].attempts]
        assert 25 <= len(repeated) <= server.count - 300
        assert {a.status for s in repeated for a in s["trajectory"][0]["response"].attempts} >= {429, 500}


def test_without_repeats_the_same_server_costs_rollouts_and_only_those_it_failed():
    """The twin."""
    with FakeServer(add_one, script=unreliable) as server:
        client = client_of(server, timeout=0.5, max_retries=0)
        results = single_turn(300).evaluate(client, "scripted", max_concurrent=32)
        assert server.count == 300
    failed = [e.error for e in results["errors"] if e is not None]
    assert (failed.count("ModelUnavailable"), failed.count("RateLimited")) == (18, 15)
    assert sum(map(math.isnan, results["rewards"])) == 33
    assert results.metadata.avg_reward == 1.0


def test_a_rollout_that_is_never_answered_is_bounded_and_its_place_is_given_to_others():
    def silent(hit):
        return Behaviour(never=hit.json()["messages"][-1]["content"] == "3 + 1")

    with FakeServer(add_one, script=silent) as server:
        started = time.monotonic()
        results = single_turn(20).evaluate(client_of(server), "scripted", max_concurrent=2, rollout_timeout_s=0.5)
        assert time.monotonic() - started < 2.5
    assert [n for n, e in enumerate(results["errors"]) if e] == [3]
    error = results["errors"][3]
    assert (error.error, error.where) == ("RolloutTimeout", "the model")
    assert results["rewards"].count(1.0) == 19


def test_a_server_that_drips_is_bounded_per_attempt():
    with FakeServer("1", script=[Behaviour(drip_s=0.2)]) as server:
        started = time.monotonic()
        results = single_turn(1).evaluate(client_of(server, timeout=0.3), "scripted")
        assert results["rewards"] == [1.0]
        assert time.monotonic() - started < 3
        assert server.count == 2


def test_partial_turns_are_kept_when_the_server_falls_silent():
    with FakeServer(["a", "b"], script=lambda hit: Behaviour(never=hit.index >= 2)) as server:
        results = Talk(1, max_turns=9).evaluate(client_of(server), "scripted", rollout_timeout_s=0.4)
    assert [m["content"] for m in results["completions"][0]] == ["a", "more", "b"]
    assert results["errors"][0].error == "RolloutTimeout"
    assert results["is_truncated"] == [True]


@pytest.mark.parametrize(
    ("bad", "error"),
    [
        (Behaviour(body=b""), "MalformedResponse"),
        (Behaviour(body=b'{"choices": null}'), "MalformedResponse"),
        (Behaviour(body=b'{"choices": [{"message": {"content": "x"'), "MalformedResponse"),
        (Behaviour(garbage=b"\x00\x01\x02"), "ModelUnavailable"),
        (Behaviour(reset=True), "ModelUnavailable"),
        (Behaviour(422, body=b'{"error": {"message": "no such argument"}}'), "ModelRefused"),
    ],
)
def test_whatever_the_server_says_is_one_of_our_errors_on_one_rollout(bad, error):
    def spoilt(hit):
        return bad if hit.json()["messages"][-1]["content"] == "1 + 1" else None

    with FakeServer(add_one, script=spoilt) as server:
        results = single_turn(5).evaluate(client_of(server, max_retries=1), "scripted")
    assert [e and e.error for e in results["errors"]] == [None, error, None, None, None]
    assert results["rewards"].count(1.0) == 4
    assert issubclass(getattr(vf, error), vf.ModelError)


@pytest.mark.parametrize(
    ("status", "body", "error"),
    [
        (401, b'{"error": {"message": "bad key"}}', vf.AuthenticationFailed),
        (
            404,
            b'{"error": {"message": "The model `scripted` does not exist", "code": "model_not_found"}}',
            vf.ModelNotFound,
        ),
    ],
)
def test_what_every_rollout_would_meet_stops_the_run_after_the_first(status, body, error):
    with FakeServer("1", script=lambda hit: Behaviour(status, body=body)) as server:
        with pytest.raises(error) as caught:
            single_turn(200).evaluate(client_of(server), "scripted", max_concurrent=4)
        assert server.count <= 4
    assert caught.value.exit_code == 2
    assert "scripted" in str(caught.value) or "key" in str(caught.value)


def test_a_prompt_that_does_not_fit_is_a_stop_condition_and_is_not_repeated():
    body = b'{"error": {"message": "This model has a maximum context length of 4096 tokens, you asked for 5000"}}'
    with FakeServer("1", script=lambda hit: Behaviour(400, body=body)) as server:
        results = single_turn(3).evaluate(client_of(server), "scripted")
        assert server.count == 3
    assert results["stop_conditions"] == ["prompt_too_long"] * 3
    assert results["errors"] == [None] * 3
    assert results["rewards"] == [0.0] * 3


def test_a_server_that_dies_and_returns_costs_nothing():
    server = FakeServer(add_one, delay_s=0.01)
    server.start()
    port = int(server.url.split(":")[2].split("/")[0])
    client = client_of(server, max_retries=100)

    async def run():
        task = asyncio.ensure_future(single_turn(60).evaluate(client, "scripted", max_concurrent=8))
        await asyncio.sleep(0.05)
        await asyncio.to_thread(server.stop)
        await asyncio.sleep(0.3)
        with FakeServer(add_one, port=port):
            return await task

    results = asyncio.run(run())
    assert results["rewards"] == [1.0] * 60
    assert results["errors"] == [None] * 60


def test_a_server_that_is_down_stops_the_run_with_its_cause(monkeypatch):
    sent, exchange = [], vf.OpenAIChatCompletionsClient._exchange

    async def noted(self, *request):
        sent.append(time.monotonic())
        return await exchange(self, *request)

    monkeypatch.setattr(vf.OpenAIChatCompletionsClient, "_exchange", noted)
    with FakeServer("1", script=lambda hit: Behaviour(503)) as server:
        client = client_of(server, max_retries=1)
        with pytest.raises(vf.TooManyFaults, match="HTTP 503") as caught:
            single_turn(1000).evaluate(client, "scripted", max_concurrent=8, abort_after=16)
        returned, num_sent = time.monotonic(), len(sent)
        assert caught.value.cause == "ModelUnavailable"
        assert server.count <= 2 * (16 + 8)
        time.sleep(0.8)
        assert len(sent) == num_sent  # nothing is sent after the return; what was on its way may still arrive
        assert max(sent) <= returned
        assert server.count <= num_sent
