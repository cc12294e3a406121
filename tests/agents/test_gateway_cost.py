"""What a model call of an agent costs, in counts: each request is parsed once, each message hashed
a fixed number of times, and each stream is one write. ``benchmarks/gateway.py``
measures the time."""

import json as real_json
from collections import Counter

import aiohttp
import pytest

import verifiers as vf
from verifiers.clients import serving
from verifiers.clients.dialects import DIALECTS
from verifiers.testing import ScriptedClient
from verifiers_agents import conversation, gateway

NUM_CALLS = 6
TOOL = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object", "properties": {}}},
}


class CountedJson:
    """The module ``json``, with the texts that are written counted."""

    def __init__(self, counts):
        self._counts = counts

    def __getattr__(self, name):
        return getattr(real_json, name)

    def dumps(self, value, **options):
        self._counts["texts written"] += 1
        return real_json.dumps(value, **options)


@pytest.fixture
def counts(monkeypatch):
    counted = Counter()
    monkeypatch.setattr(gateway, "json", CountedJson(counted))
    decode = serving.decode_message

    def decode_message(text, **bounds):
        counted["texts read"] += 1
        counted["bytes read"] += len(text)
        return decode(text, **bounds)

    monkeypatch.setattr(serving, "decode_message", decode_message)
    parse = DIALECTS["chat"].parse_request
    digest = conversation._digest
    write = gateway.web.StreamResponse.write

    def parse_request(body):
        counted["requests parsed"] += 1
        counted["messages parsed"] += len(body["messages"])
        return parse(body)

    def one_digest(before, message):
        counted["digests"] += 1
        return digest(before, message)

    async def one_write(self, data):
        counted["writes"] += 1
        return await write(self, data)

    monkeypatch.setattr(DIALECTS["chat"], "parse_request", parse_request)
    monkeypatch.setattr(conversation, "_digest", one_digest)
    monkeypatch.setattr(gateway.web.StreamResponse, "write", one_write)
    return counted


def play(stream, times_each=1):
    """An agent whose history grows by two messages with each call; (bytes, messages) of all its
    requests."""
    sent = [0, 0]

    async def agent(state):
        messages = [
            {"role": "system", "content": "An agent."},
            {"role": "user", "content": "Go. " * 500},
        ]
        async with vf.model_gateway(state) as url, aiohttp.ClientSession() as session:
            for number in range(NUM_CALLS):
                body = real_json.dumps(
                    {"model": "m", "messages": messages, "tools": [TOOL], "stream": stream}
                ).encode()
                for _ in range(times_each):
                    async with session.post(f"{url}/chat/completions", data=body) as reply:
                        assert reply.status == 200
                        assert "said" in await reply.text()
                sent[0], sent[1] = sent[0] + len(body), sent[1] + len(messages)
                messages += [
                    {"role": "assistant", "content": "said"},
                    {"role": "user", "content": f"And {number}?"},
                ]

    env = vf.AgentEnv(agent=agent, dataset=[{"question": "?"}], score_rollouts=False)
    (output,) = env.evaluate(ScriptedClient("said"), "m").outputs
    assert (output.error, output.metrics["num_turns"]) == (None, NUM_CALLS)
    return sent


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_reads_its_request_once_and_writes_its_answer_once(counts, stream):
    num_bytes, num_messages = play(stream)
    assert counts["texts read"] == NUM_CALLS
    assert counts["bytes read"] == num_bytes
    assert counts["texts written"] == NUM_CALLS, "the key of a repeated request"
    assert counts["requests parsed"] == 2 * NUM_CALLS, (
        "the request, and the answer as the agent will give it back"
    )
    assert counts["messages parsed"] == num_messages + NUM_CALLS
    assert counts["digests"] == 2 * num_messages + 2 * NUM_CALLS, (
        "a prompt's messages twice, an answer's twice"
    )
    assert counts["writes"] == (NUM_CALLS if stream else 0)


def test_a_repeated_request_is_read_again_and_costs_nothing_more(counts):
    num_bytes, num_messages = play(False, times_each=2)
    assert counts["texts read"] == 2 * NUM_CALLS, (
        "negative control: the counters see a further request"
    )
    assert counts["bytes read"] == 2 * num_bytes
    assert counts["digests"] == 2 * num_messages + 2 * NUM_CALLS
