"""Promise: the number of requests is bounded by one retry layer, which obeys the server and spreads
out.

Everything is counted at the server.
"""

import asyncio
import time
from bisect import bisect_left
from collections import Counter

import openai
import pytest

import verifiers as vf
from support.small_envs import add_one, single_turn
from verifiers.clients import OpenAIChatCompletionsClient, RetryPolicy, as_client
from verifiers.clients.limiter import AdaptiveLimiter
from verifiers.clients.retry import call_with_retries
from verifiers.testing import Behaviour, FakeServer

WORKERS = 64


def client_of(server, policy):
    return OpenAIChatCompletionsClient(base_url=server.url, retry=policy)


def question(hit):
    return hit.json()["messages"][-1]["content"]


# --- how long -------------------------------------------------------------------------------------


class Deaf(RetryPolicy):
    """A policy that does not hear what the server asks for."""

    def pause_s(self, num_failures, retry_after_s):
        return super().pause_s(num_failures, None)


def gaps_after_a_429(policy):
    """Seconds between the refusal and the repetition, of 20 rollouts that are told to wait one
    second."""
    seen = Counter()

    def busy(hit):
        seen[question(hit)] += 1
        return Behaviour(429, {"Retry-After": "1"}) if seen[question(hit)] == 1 else None

    with FakeServer(add_one, script=busy) as server:
        results = single_turn(20).evaluate(client_of(server, policy), "scripted")
        assert results["rewards"] == [1.0] * 20
        assert server.count == 40
        by_question = {}
        for hit in server.hits:
            by_question.setdefault(question(hit), []).append(hit.time_s)
    return [second - first for first, second in by_question.values()]


def test_a_retry_after_of_a_second_is_never_answered_earlier():
    assert min(gaps_after_a_429(RetryPolicy(base_s=0.01))) >= 1


def test_a_policy_that_does_not_hear_it_comes_too_early():
    """Negative control."""
    assert min(gaps_after_a_429(Deaf(base_s=0.01))) < 1


def test_a_retry_after_of_ten_minutes_fails_at_once_and_names_it():
    with FakeServer("x", script=lambda hit: Behaviour(429, {"Retry-After": "600"})) as server:
        results = single_turn(3).evaluate(client_of(server, RetryPolicy()), "scripted")
        assert server.count == 3
    assert [e.error for e in results["errors"]] == ["RateLimited"] * 3
    assert "asking to wait 600 s" in results["errors"][0].message


def test_a_retry_after_beyond_the_rollouts_own_bound_is_not_waited_for():
    with FakeServer("x", script=lambda hit: Behaviour(429, {"Retry-After": "60"})) as server:
        started = time.monotonic()
        results = single_turn(3).evaluate(
            client_of(server, RetryPolicy()), "scripted", rollout_timeout_s=0.5
        )
        assert time.monotonic() - started < 3
        assert server.count == 3
    assert {e.error for e in results["errors"]} <= {"RateLimited", "RolloutTimeout"}


# --- how often ------------------------------------------------------------------------------------


def test_a_rollout_sends_at_most_one_request_more_than_its_repeats():
    with FakeServer("x", script=lambda hit: 429) as server:
        policy = RetryPolicy(max_retries=3, base_s=0.001, max_s=0.002)
        results = single_turn(10).evaluate(client_of(server, policy), "scripted")
        assert set(Counter(map(question, server.hits)).values()) == {4}
    assert "gave up after 4 attempts" in results["errors"][0].message


FAULTS = [500, 502, 503, Behaviour(reset=True)]


@pytest.mark.parametrize("kind", ["ours", "OpenAI", "AsyncOpenAI"])
def test_500_502_503_and_a_reset_are_repeated_by_one_layer_and_their_history_is_on_the_rollout(
    kind,
):
    """The SDK's own repeats (two, unless told otherwise) take no part."""
    with FakeServer(add_one, script=FAULTS) as server:
        options = {
            "ours": lambda: vf.ClientConfig(api_base_url=server.url),
            "OpenAI": lambda: openai.OpenAI(base_url=server.url, api_key="k"),
            "AsyncOpenAI": lambda: openai.AsyncOpenAI(base_url=server.url, api_key="k"),
        }[kind]()
        client = as_client(options)
        client.retry = RetryPolicy(base_s=0.01)
        results = single_turn(1).evaluate(client, "scripted")
        assert server.count == 5
    assert results["rewards"] == [1.0]
    attempts = results["states"][0]["trajectory"][0]["response"].attempts
    assert [attempt.status for attempt in attempts] == [500, 502, 503, None]


async def test_two_layers_of_repeats_multiply():
    """Negative control: the SDK's own layer under ours."""
    with FakeServer("x", script=lambda hit: Behaviour(500, {"retry-after-ms": "1"})) as server:
        sdk = openai.AsyncOpenAI(base_url=server.url, api_key="k", max_retries=2)

        async def send():
            try:
                return await sdk.chat.completions.create(
                    model="m", messages=[{"role": "user", "content": "hi"}]
                )
            except openai.InternalServerError as error:
                raise vf.ModelUnavailable("down", status=500) from error

        with pytest.raises(vf.ModelUnavailable, match="after 4 attempts"):
            await call_with_retries(
                send, RetryPolicy(max_retries=3, base_s=0.001), AdaptiveLimiter(4)
            )
        assert server.count == 3 * 4
        await sdk.close()


# --- a storm --------------------------------------------------------------------------------------


class Storm:
    """A run of 64 workers that meets nothing but 429 for the first seconds."""

    def __init__(self, policy, storm_s, num_rollouts, headers=None):
        self.storm_s, self.refusal = storm_s, Behaviour(429, headers or {})
        self.hits = []  # (seconds since the first, in flight, question)
        with FakeServer(add_one, script=self.answer, delay_s=0.02) as self.server:
            client = client_of(self.server, policy)
            self.results = single_turn(num_rollouts).evaluate(
                client, "scripted", max_concurrent=WORKERS
            )

    def answer(self, hit):
        self.hits.append((hit.time_s, self.server.in_flight, question(hit)))
        return self.refusal if hit.time_s - self.hits[0][0] < self.storm_s else None

    def repeats(self, before_s=float("inf")):
        """When repeats came, in seconds since the first request of all."""
        seen, begun = set(), self.hits[0][0]
        for time_s, _, name in self.hits:
            if name in seen and time_s - begun < before_s:
                yield time_s - begun
            seen.add(name)

    def most_in_a_tenth_of_a_second(self, before_s=float("inf")):
        repeats = list(self.repeats(before_s))
        return max(bisect_left(repeats, first + 0.1) - n for n, first in enumerate(repeats))

    def most_in_flight(self, after_s, before_s=float("inf")):
        begun = self.hits[0][0]
        return max(count for time_s, count, _ in self.hits if after_s <= time_s - begun < before_s)


def test_five_seconds_of_429_against_64_workers_are_survived_spread_out_and_with_fewer_in_flight():
    storm = Storm(RetryPolicy(max_s=2.0), 5.0, 3000)
    assert storm.results["rewards"] == [1.0] * 3000
    assert storm.most_in_a_tenth_of_a_second() <= 0.25 * len(list(storm.repeats()))
    assert storm.most_in_a_tenth_of_a_second(before_s=5.0) <= WORKERS / 2
    assert storm.most_in_flight(0, 0.2) > WORKERS / 2
    assert storm.most_in_flight(1.5, 5.0) <= WORKERS / 8  # cut
    assert storm.most_in_flight(5.0) == WORKERS  # restored


def test_told_to_wait_a_second_not_everybody_comes_back_after_a_second():
    storm = Storm(RetryPolicy(max_s=1.0), 1.5, 200, {"Retry-After": "1"})
    assert storm.results["rewards"] == [1.0] * 200
    assert storm.most_in_a_tenth_of_a_second(before_s=1.5) <= WORKERS / 2


class InStep(RetryPolicy):
    """Pauses without jitter."""

    def pause_s(self, num_failures, retry_after_s):
        return retry_after_s or self.base_s


class VirtualTime(asyncio.SelectorEventLoop):
    """A loop whose clock jumps to the next timer, so that a busy machine changes nothing."""

    now = 0.0

    def time(self):
        return self.now

    def _run_once(self):
        if not self._ready and self._scheduled:
            self.now = max(self.now, self._scheduled[0].when())
        super()._run_once()


def repeats_in_virtual_time(policy, retry_after_s, storm_s=2.1):
    """When 64 workers, whose requests take 20 ms and meet nothing but 429 for ``storm_s`` seconds,
    repeat in these."""
    limiter, repeats = AdaptiveLimiter(WORKERS), []

    async def work():
        num_sent = 0

        async def send():
            nonlocal num_sent
            num_sent += 1
            if num_sent > 1 and loop.time() < storm_s:
                repeats.append(loop.time())
            started = loop.time()
            await asyncio.sleep(0.02)
            if started < storm_s:
                raise vf.RateLimited("busy", status=429, retry_after_s=retry_after_s)
            return vf.Response(vf.AssistantMessage("x"))

        await call_with_retries(send, policy, limiter)

    async def all_of_them():
        await asyncio.gather(*(work() for _ in range(WORKERS)))

    loop = VirtualTime()
    try:
        loop.run_until_complete(all_of_them())
    finally:
        loop.close()
    return repeats


def most_repeats_at_once(policy, retry_after_s):
    """The most in a tenth of a second."""
    repeats = repeats_in_virtual_time(policy, retry_after_s)
    assert len(repeats) >= 25
    return max(bisect_left(repeats, first + 0.1) - n for n, first in enumerate(repeats))


AS_ASKED = pytest.mark.parametrize("retry_after_s", [None, 1.0], ids=["no hint", "Retry-After: 1"])


@AS_ASKED
def test_the_repeats_of_64_workers_are_spread_out(retry_after_s):
    assert most_repeats_at_once(RetryPolicy(max_s=1.0), retry_after_s) <= WORKERS / 2


@AS_ASKED
def test_without_jitter_the_repeats_come_all_at_once(retry_after_s):
    """Negative control."""
    assert most_repeats_at_once(InStep(), retry_after_s) > 0.9 * WORKERS


def test_without_the_cut_as_many_stay_in_flight_as_there_are_workers(monkeypatch):
    """Negative control."""
    monkeypatch.setattr(AdaptiveLimiter, "refused", lambda self, ticket: None)
    storm = Storm(InStep(base_s=0.5), 0.8, WORKERS)
    assert storm.most_in_flight(0.4) > WORKERS / 8
