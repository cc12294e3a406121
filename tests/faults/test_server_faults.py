"""Promise: a failing model server costs at most the rollouts it failed, and every wait for it has a
bound.

What is repeated, and how often, is in ``test_retry_faults.py``.
"""

import asyncio
import json
import math
import socket
import time

import pytest

import verifiers as vf
from support.small_envs import Talk, add_one, single_turn
from verifiers.clients import OpenAIChatCompletionsClient, RetryPolicy
from verifiers.runs.plan import Plan
from verifiers.runs.rollout import RunContext
from verifiers.runs.runner import Runner
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
        results = single_turn(300).evaluate(
            client_of(server, timeout=0.5), "scripted", max_concurrent=32
        )
        assert results["rewards"] == [1.0] * 300
        assert results["errors"] == [None] * 300
        assert 300 < server.count < 400
        assert time.monotonic() - started < 20
        repeated = [s for s in results["states"] if s["trajectory"][0]["response"].attempts]
        assert 25 <= len(repeated) <= server.count - 300
        assert {a.status for s in repeated for a in s["trajectory"][0]["response"].attempts} >= {
            429,
            500,
        }


def test_without_repeats_the_same_server_costs_rollouts_and_only_those_it_failed():
    """Negative control."""
    with FakeServer(add_one, script=unreliable) as server:
        client = client_of(server, timeout=0.5, max_retries=0)
        results = single_turn(300).evaluate(client, "scripted", max_concurrent=32)
        assert server.count == 300
    failed = [e.error for e in results["errors"] if e is not None]
    assert (failed.count("ModelUnavailable"), failed.count("RateLimited")) == (18, 15)
    assert sum(map(math.isnan, results["rewards"])) == 33
    assert results.metadata.avg_reward == 1.0


def test_a_server_that_accepts_and_never_answers_costs_one_rollout_and_the_place_goes_to_others():
    def silent(hit):
        return Behaviour(never=hit.json()["messages"][-1]["content"] == "3 + 1")

    def run(script):
        with FakeServer(add_one, script=script) as server:
            started = time.monotonic()
            results = single_turn(20).evaluate(
                client_of(server), "scripted", max_concurrent=2, rollout_timeout_s=0.5
            )
            return results, time.monotonic() - started

    _, usual_s = run(None)
    results, took_s = run(silent)
    assert took_s <= usual_s + 0.5 + 1
    assert [n for n, e in enumerate(results["errors"]) if e] == [3]
    error = results["errors"][3]
    assert (error.error, error.where) == ("RolloutTimeout", "the model")
    assert results["rewards"].count(1.0) == 19


@pytest.mark.parametrize(
    "fault", [Behaviour(never=True), Behaviour(drip_s=1.0)], ids=["silent", "a byte per second"]
)
def test_an_attempt_that_does_not_end_is_given_up_and_repeated(fault):
    with FakeServer("1", script=[fault]) as server:
        started = time.monotonic()
        results = single_turn(1).evaluate(client_of(server, timeout=0.3), "scripted")
        assert results["rewards"] == [1.0]
        assert time.monotonic() - started < 3
        assert server.count == 2


def test_without_a_bound_on_the_attempt_the_rollout_waits_for_ever():
    """Negative control: what ends it is the test."""
    with FakeServer("1", script=[Behaviour(drip_s=1.0)]) as server:

        async def run():
            client = client_of(server, timeout=3600.0)
            await asyncio.wait_for(
                single_turn(1).evaluate(client, "scripted", rollout_timeout_s=None), 1.0
            )

        with pytest.raises(TimeoutError):
            asyncio.run(run())


def test_partial_turns_are_kept_when_the_server_falls_silent():
    with FakeServer(["a", "b"], script=lambda hit: Behaviour(never=hit.index >= 2)) as server:
        results = Talk(1, max_turns=9).evaluate(
            client_of(server), "scripted", rollout_timeout_s=0.4
        )
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
            (
                b'{"error": {"message": "The model `scripted` does not exist", "code":'
                b' "model_not_found"}}'
            ),
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


def test_a_refusal_that_not_every_rollout_would_meet_stops_nothing():
    """Negative control: without an error that ends the run, all 50 are asked for."""
    with FakeServer("1", script=lambda hit: Behaviour(422, body=b"{}")) as server:
        results = single_turn(50).evaluate(
            client_of(server), "scripted", max_concurrent=4, abort_after=0
        )
        assert server.count == 50
    assert results.metadata.num_errors == 50


WORDINGS = {
    "openai": (
        "This model's maximum context length is 4096 tokens. However, your messages resulted in"
        " 5000 tokens."
    ),
    "code": '{"error": {"code": "context_length_exceeded", "message": "no"}}',
    "llama.cpp": (
        "request (5031 tokens) exceeds the available context size (4096 tokens), try increasing it"
    ),
    "vllm": "The decoder prompt (length 5000) is longer than the maximum model length of 4096.",
    "anthropic": "prompt is too long: 210000 tokens > 200000 maximum",
    "gemini": "The input token count (40000) exceeds the maximum number of tokens allowed (32768).",
}


@pytest.mark.parametrize("wording", WORDINGS.values(), ids=WORDINGS)
def test_a_prompt_that_does_not_fit_is_a_stop_condition_is_scored_and_is_not_repeated(wording):
    with FakeServer("1", script=lambda hit: Behaviour(400, body=wording)) as server:
        results = single_turn(3).evaluate(client_of(server), "scripted")
        assert server.count == 3
    assert results["stop_conditions"] == ["prompt_too_long"] * 3
    assert results["errors"] == [None] * 3
    assert results["rewards"] == [0.0] * 3


def test_another_refusal_with_400_is_an_error_and_its_reward_unknown():
    """Negative control: a reader of the status alone could not tell them apart."""
    with FakeServer(
        "1", script=lambda hit: Behaviour(400, body="temperature must be at least 0")
    ) as server:
        results = single_turn(3).evaluate(client_of(server), "scripted")
        assert server.count == 3
    assert [e.error for e in results["errors"]] == ["ModelRefused"] * 3
    assert all(map(math.isnan, results["rewards"]))


# --- nothing there --------------------------------------------------------------------------------


def absent():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"http://127.0.0.1:{listener.getsockname()[1]}/v1"


def test_nothing_listening_is_one_sentence_with_the_url_before_rollouts_start():
    played = []

    class Watched(Talk):
        def setup_state(self, state):
            played.append(state)

    url = absent()
    with pytest.raises(vf.EndpointUnreachable) as caught:
        Watched(5).evaluate(vf.ClientConfig(api_base_url=url), "m")
    assert (
        str(caught.value)
        == f"no answer from {url} (connection refused): start the server or correct the base URL"
    )
    assert caught.value.exit_code == 2
    assert played == []


def test_without_asking_first_every_rollout_finds_out_for_itself():
    """Negative control."""
    client = OpenAIChatCompletionsClient(base_url=absent(), retry=RetryPolicy(max_retries=0))
    results = single_turn(5).evaluate(client, "m", preflight=False)
    assert [e.error for e in results["errors"]] == ["ModelUnavailable"] * 5


# --- answers that are none ------------------------------------------------------------------------

MESSAGE = {"message": {"role": "assistant", "content": "1"}, "finish_reason": "stop"}
TOKENS = {**MESSAGE, "token_ids": [1, 2], "prompt_token_ids": [1]}
WITH_LOGPROBS = {**TOKENS, "logprobs": {"content": [{"logprob": -1.0}, {"logprob": -1.0}]}}
NO_COMPLETIONS = {
    "empty body": b"",
    "choices: null": b'{"choices": null}',
    "cut JSON": b'{"choices": [{"message": {"content": "x"',
    "no logprobs": [TOKENS],
    "lengths differ": [{**TOKENS, "logprobs": {"content": [{"logprob": -1.0}]}}],
    "NaN logprob": [
        {**TOKENS, "logprobs": {"content": [{"logprob": float("nan")}, {"logprob": -1.0}]}}
    ],
    "token id -1": [{**WITH_LOGPROBS, "token_ids": [1, -1]}],
    "token id beyond int32": [{**WITH_LOGPROBS, "token_ids": [1, 2**31]}],
    "prompt id -1": [{**WITH_LOGPROBS, "prompt_token_ids": [-1]}],
    "logprob -1e308": [
        {**TOKENS, "logprobs": {"content": [{"logprob": -1e308}, {"logprob": -1.0}]}}
    ],
    "logprob 3": [{**TOKENS, "logprobs": {"content": [{"logprob": 3.0}, {"logprob": -1.0}]}}],
}


class Kept:
    """A sink that keeps states."""

    def __init__(self):
        self.states = []

    async def store(self, jobs, states):
        self.states += states

    def complete(self, jobs, states):
        pass


@pytest.mark.parametrize("body", NO_COMPLETIONS.values(), ids=NO_COMPLETIONS)
async def test_what_is_no_completion_is_a_malformed_response_and_never_a_key_error(body):
    body = body if isinstance(body, bytes) else json.dumps({"id": "1", "choices": body})
    with FakeServer("1", script=lambda hit: Behaviour(body=body)) as server:
        env, client, sink = single_turn(1), client_of(server, max_retries=1), Kept()
        context = RunContext(client, "scripted", require_tokens=True)
        await Runner(env, context, sink, concurrency=1).run(
            *Plan(list(env.eval_table), [1]).groups()
        )
        await client.aclose()
        assert server.count == 2
    (state,) = sink.states
    assert type(state["error"]) is vf.MalformedResponse
    assert server.url in str(state["error"])
    assert "KeyError" not in repr(state["error"])
    assert "TypeError" not in repr(state["error"])
    assert math.isnan(state["reward"])


@pytest.mark.parametrize("body", NO_COMPLETIONS.values(), ids=NO_COMPLETIONS)
def test_read_naively_the_same_answers_raise_or_pass_for_tokens(body):
    """Negative control."""
    body = body if isinstance(body, bytes) else json.dumps({"id": "1", "choices": body})
    try:
        choice = json.loads(body)["choices"][0]
        logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    except (ValueError, TypeError, KeyError):
        return
    if len(logprobs) == len(choice["token_ids"]):
        ids = [*choice["token_ids"], *choice["prompt_token_ids"]]
        possible = [-9999 <= value <= 0 for value in logprobs]
        assert not all(possible) or not all(0 <= token < 2**31 for token in ids)


NO_IDS = "prompt_token_ids is absent (does the server know return_token_ids?)"


@pytest.mark.parametrize(
    ("num_workers", "choice", "reason"),
    [
        (0, MESSAGE, NO_IDS),
        (0, NO_COMPLETIONS["no logprobs"][0], "0 log-probabilities for 2 tokens"),
        (0, NO_COMPLETIONS["lengths differ"][0], "1 log-probabilities for 2 tokens"),
        (0, NO_COMPLETIONS["NaN logprob"][0], "a log-probability is not finite"),
        (0, NO_COMPLETIONS["token id -1"][0], "-1 is no token id (0 to 2147483647)"),
        (0, NO_COMPLETIONS["logprob 3"][0], "a log-probability is 3, not between -9999 and 0"),
        # a worker hands on the sentence, whatever it says
        (1, MESSAGE, NO_IDS),
        (1, NO_COMPLETIONS["lengths differ"][0], "1 log-probabilities for 2 tokens"),
    ],
    ids=["none", "none with ids", "too few", "NaN", "id", "positive", "worker-none", "worker-few"],
)
def test_an_evaluation_that_asks_for_log_probabilities_says_how_many_turns_lack_them(
    num_workers, choice, reason, caplog
):
    bodies = [
        json.dumps({"id": "1", "choices": [choice_sent]}) for choice_sent in (choice, WITH_LOGPROBS)
    ]

    def script(hit):
        return Behaviour(body=bodies[hit.index % 2])

    with FakeServer("1", script=script) as server:
        if not num_workers:
            env = single_turn(4)
        else:
            env = vf.load_environment("reverse-text", num_eval_examples=4)
        asked = {"logprobs": True}
        env.evaluate(
            client_of(server), "m", sampling_args=asked, num_workers=num_workers, max_concurrent=1
        )
        said = (
            "2 of 4 model turns are saved without the log-probabilities that sampling_args ask"
            f" for: 2 x {reason}"
        )
        assert said in caplog.text
        caplog.clear()
        env.evaluate(client_of(server), "m", num_workers=num_workers)
    assert "log-probabilities" not in caplog.text


def test_log_probabilities_by_text_are_not_missed_and_are_warned_of_where_the_turns_are_not_saved(
    tmp_path, caplog
):
    by_text = {"content": [{"token": "4", "logprob": -0.5}]}
    body = json.dumps({"id": "1", "choices": [{**MESSAGE, "logprobs": by_text}]})
    with FakeServer("1", script=lambda hit: Behaviour(body=body)) as server:
        saved = {
            "sampling_args": {"logprobs": True},
            "results_path": tmp_path / "a",
            "state_columns": ["trajectory"],
        }
        results = single_turn(2).evaluate(client_of(server), "m", **saved)
        extras = [
            each["trajectory"][0]["extras"] for each in (results["states"][0], results.outputs[0])
        ]
        lists = {"logprobs": {"texts": ["4"], "logprobs": [-0.5]}}
        assert [json.loads(json.dumps(each)) for each in extras] == extras == [lists, lists]
        assert all(type(values) is list for each in extras for values in each["logprobs"].values())
        assert "log-probabilities" not in caplog.text
        forgotten = {**saved, "results_path": tmp_path / "b", "state_columns": []}
        single_turn(2).evaluate(client_of(server), "m", **forgotten)
    assert 'are not saved: save the turns as well, with state_columns=["trajectory"]' in caplog.text


# --- a server that goes away ----------------------------------------------------------------------


def with_an_outage(client, server, num_rollouts, outage_s):
    """Results of a run during which the server dies for so many seconds."""
    port = int(server.url.split(":")[2].split("/")[0])

    async def run():
        env = single_turn(num_rollouts)
        task = asyncio.ensure_future(
            env.evaluate(client, "scripted", max_concurrent=8, abort_after=0)
        )
        while server.count < 12:  # noqa: ASYNC110 - the server counts in another thread
            await asyncio.sleep(0.01)
        await asyncio.to_thread(server.stop)
        await asyncio.sleep(outage_s)
        with FakeServer(add_one, port=port):
            return await task

    return asyncio.run(run())


def test_a_server_that_dies_for_two_seconds_and_returns_costs_nothing():
    server = FakeServer(add_one, delay_s=0.01)
    server.start()
    client = OpenAIChatCompletionsClient(base_url=server.url, retry=RetryPolicy(max_s=2.0))
    results = with_an_outage(client, server, 60, 2.0)
    assert results["rewards"] == [1.0] * 60
    assert results["errors"] == [None] * 60


def test_without_repeats_the_same_outage_costs_rollouts():
    """Negative control."""
    server = FakeServer(add_one, delay_s=0.01)
    server.start()
    results = with_an_outage(client_of(server, max_retries=0), server, 60, 0.1)
    assert "ModelUnavailable" in {e and e.error for e in results["errors"]}


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
        # nothing is sent after the return; what was on its way may still arrive
        assert len(sent) == num_sent
        assert max(sent) <= returned
        assert server.count <= num_sent
