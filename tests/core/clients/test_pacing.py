"""Endpoints whose rates are given: no request is refused, the rate is used, and turns pass on."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time

import pytest

import verifiers as vf
from support.small_envs import single_turn
from verifiers.clients import load_endpoints
from verifiers.clients.pacing import Pace, pace_of
from verifiers.errors import ConfigError
from verifiers.testing import Behaviour, FakeServer
from verifiers.types import AssistantMessage, ModelRequest, Response, Usage, UserMessage

PER_MINUTE = 1200


class Bucket:
    """Refuses what comes faster than a rate, beyond ``burst`` at once."""

    def __init__(self, per_s, burst):
        self.per_s, self.burst, self.room, self.time_s = per_s, burst, burst, 0.0
        self.num_refused = 0

    def __call__(self, hit):
        self.room = min(self.burst, self.room + (hit.time_s - self.time_s) * self.per_s)
        self.time_s = hit.time_s
        if self.room < 1:
            self.num_refused += 1
            return Behaviour(429)
        self.room -= 1
        return None


def registry(tmp_path, url, lines):
    file = tmp_path / "endpoints.toml"
    file.write_text(
        f'[[endpoint]]\nendpoint_id = "e"\nmodel = "scripted"\nurl = "{url}"\n{lines}\n'
    )
    return load_endpoints(file)["e"]


def evaluate(tmp_path, lines, **settings):
    bucket = Bucket(PER_MINUTE / 60, burst=4)
    with FakeServer("2", script=bucket) as server:
        started = time.monotonic()
        env = single_turn(30, rubric=vf.Rubric())
        results = env.evaluate(registry(tmp_path, server.url, lines), "scripted", **settings)
    assert not any(results["errors"])
    return bucket.num_refused, time.monotonic() - started


def test_a_server_that_limits_rates_refuses_no_request_of_a_paced_endpoint(tmp_path):
    num_refused, seconds = evaluate(tmp_path, f"requests_per_minute = {PER_MINUTE}")
    assert num_refused == 0
    assert seconds >= 29 * 60 / PER_MINUTE
    # negative control: without the rate the same run is refused, and repeats
    num_refused, _ = evaluate(tmp_path, "")
    assert num_refused > 10


def request(text="x" * 396, **sampling_args):
    return ModelRequest([UserMessage(text)], "m", sampling_args=sampling_args)


async def seconds_of(pace, requests):
    started = time.monotonic()
    await asyncio.gather(*(pace.wait(one_request) for one_request in requests))
    return time.monotonic() - started


async def test_tokens_count_as_text_and_max_tokens_together():
    def pace():
        return Pace(None, 60_000)  # a token lasts 1 ms

    assert await pace().wait(request(max_tokens=50)) == 150
    assert 0.3 <= await seconds_of(pace(), [request(max_tokens=50)] * 3) < 0.6
    assert await seconds_of(pace(), [request("x", max_tokens=1)] * 3) < 0.1
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 9999}}
    assert await pace().wait(ModelRequest([{"role": "user", "content": [image]}], "m")) < 10


async def test_what_an_answer_had_beyond_its_request_is_counted_when_it_is_there():
    pace = Pace(None, 60_000)
    num_tokens = await pace.wait(request("x"))
    answer = Response(AssistantMessage("y"), usage=Usage(100, 200))
    pace.settle(num_tokens, answer)
    assert 0.3 <= await seconds_of(pace, [request("x")]) < 0.6
    assert await pace.wait(request("x")) == 201  # an answer is expected to be as long as others


async def test_an_endpoint_that_does_not_count_tokens_is_paced_by_the_estimate():
    pace = Pace(None, 60_000)
    pace.settle(await pace.wait(request(max_tokens=50)), Response(AssistantMessage("y")))
    assert 0.1 <= await seconds_of(pace, [request()]) < 0.4


async def test_a_request_that_is_cancelled_gives_its_turn_on():
    pace = Pace(600, None)
    await pace.wait(request())
    waiting = [asyncio.create_task(pace.wait(request())) for _ in range(50)]
    await asyncio.sleep(0.01)
    for task in waiting[:49]:
        task.cancel()
    await asyncio.wait_for(waiting[49], 2)


def test_event_loops_of_other_threads_share_a_pace_and_may_end_while_they_wait():
    pace = Pace(600, None)
    starts = []

    async def waits():
        await pace.wait(request())
        starts.append(time.monotonic())

    async def gives_up():
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(pace.wait(request()), 0.01)

    asyncio.run(waits())
    threads = [
        threading.Thread(target=asyncio.run, args=(step(),)) for step in (waits, gives_up) * 4
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert len(starts) == 5
    assert all(later - earlier > 0.09 for earlier, later in itertools.pairwise(starts))


def test_clients_of_one_endpoint_key_and_rate_share_a_pace():
    shared = pace_of("http://a/v1", "KEY", 60.0, None)
    assert pace_of("http://a/v1", "KEY", 60.0, None) is shared
    assert pace_of("http://a/v1", "OTHER", 60.0, None) is not shared
    assert pace_of("http://a/v1", "KEY", None, None) is None


@pytest.mark.parametrize("value", ["0", "-5", '"60"', "true", "inf"])
@pytest.mark.parametrize("name", ["requests_per_minute", "tokens_per_minute"])
def test_a_rate_is_a_number_above_0(tmp_path, name, value):
    with pytest.raises(ConfigError, match=f"'{name}' must be a number above 0"):
        registry(tmp_path, "http://a/v1", f"{name} = {value}")
    with pytest.raises(ConfigError, match=f"{name} must be a number above 0, or None, not 0"):
        vf.ClientConfig(**{name: 0})
