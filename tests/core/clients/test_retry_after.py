"""Retry-After headers of every kind: none is more than a pause of its request."""

import math

import pytest

import verifiers as vf
from verifiers.clients.retry import parse_retry_after
from verifiers.testing import Behaviour, FakeServer

ODD = [
    "Mon, 01 Jan 2020 00:00:00 +99999999999999",
    "Mon, 01 Jan 2020 00:00:00 " + "9" * 300,
    "Mon, 01 Jan 2020 00:00:00 -99999999999999",
    "Mon, 01 Jan 0001 00:00:00 +2359",
    "Fri, 31 Dec 9999 23:59:59 -2359",
    "Mon, 01 Jan 99999 00:00:00 GMT",
    "1 Jan 0000 00:00:00 GMT",
    "Mon, 01 Jan 2020 99:99:99 GMT",
    "nan",
    "1e309",
    "9" * 5000,
    ",,,,",
    "x" * 7000,
    "١",
]


@pytest.mark.parametrize("text", ODD)
def test_an_odd_pause_is_no_error(text):
    for headers in ((None, text), (text, None), (text, text)):
        seconds = parse_retry_after(*headers)
        assert seconds is None or (seconds >= 0 and not math.isnan(seconds))


def test_an_odd_pause_costs_its_rollout_at_most():
    rows = [{"question": f"q{i}", "answer": ""} for i in range(4)]
    env = vf.SingleTurnEnv(dataset=rows, rubric=vf.Rubric([lambda completion: 1.0]))
    with FakeServer(script=[Behaviour(429, {"Retry-After": ODD[0]})]) as server:
        config = vf.ClientConfig(api_base_url=server.url, max_retries=0)
        results = env.evaluate(config, "m", abort_after=0)
    (error,) = [error for error in results["errors"] if error is not None]
    assert error.error == "RateLimited"
