"""Promise: whatever a model calls is answered by a short text, and its rollout goes on.

Over real HTTP, so that what the model wrote passes the wire as it would.
"""

import json

import pytest

import verifiers as vf
from verifiers.testing import FakeServer
from verifiers.types import ToolCall

LIMIT = 2000
BAD_CALLS = {
    "bad JSON": ("square", '{"n": ', "not valid JSON"),
    "no object": ("square", "[12]", "one JSON object, not a list"),
    "unknown tool": ("sqare", '{"n": 1}', "there is no tool 'sqare'; the tools are: square"),
    "wrong type": ("square", '{"n": "twelve"}', "should be a valid integer"),
    "missing argument": ("square", "{}", "'n' is missing"),
    "unknown argument": ("square", '{"n": 1, "m": 2}', "'m' is not a parameter"),
    "5 MB argument": ("square", json.dumps({"n": "9" * 5_000_000}), "'n'"),
    "5 MB name": ("x" * 5_000_000, "{}", "there is no tool"),
    "deep nesting": ("square", '{"n": ' + "[" * 100_000 + "]" * 100_000 + "}", "nested too deeply"),
    "tool that raises": ("broken", "{}", "division by zero"),
    "5 MB result": ("flood", "{}", "characters left out"),
}


def square(n: int) -> int:
    """Square a number."""
    return n * n


def broken() -> float:
    """Divide."""
    return 1 / 0


def flood() -> str:
    """Say much."""
    return "x" * 5_000_000


def says_144(completion) -> float:
    return float(completion[-1]["content"] == "144")


def play(*replies):
    """(results, the messages of each request) of one conversation over HTTP."""
    tools = [square, broken, flood]
    env = vf.ToolEnv(
        tools=tools,
        dataset=[{"question": "12 squared?"}],
        rubric=vf.Rubric(funcs=[says_144]),
        max_turns=20,
        max_tool_result_chars=LIMIT,
    )
    with FakeServer([*replies, "144"]) as server:
        results = env.evaluate(vf.ClientConfig(api_base_url=server.url), "scripted")
        return results, [hit.json()["messages"] for hit in server.hits]


@pytest.mark.parametrize(("name", "arguments", "said"), BAD_CALLS.values(), ids=BAD_CALLS)
def test_a_bad_call_is_told_to_the_model_in_a_bounded_text_and_the_rollout_goes_on(
    name, arguments, said
):
    good = [ToolCall("c2", "square", '{"n": 12}')]
    results, requests = play([ToolCall("c1", name, arguments)], good)
    told = [message["content"] for message in requests[-1] if message["role"] == "tool"]
    assert said in told[0]
    assert len(told[0]) < LIMIT + 200
    assert told[1] == "144"
    assert (results["rewards"], results["errors"]) == ([1.0], [None])


def test_ten_thousand_calls_in_one_message_are_each_answered_briefly():
    results, requests = play([ToolCall(f"c{n}", "flood", "{}") for n in range(10_000)])
    told = [message for message in requests[-1] if message["role"] == "tool"]
    assert [message["tool_call_id"] for message in told] == [f"c{n}" for n in range(10_000)]
    assert sum(len(message["content"]) for message in told) < 128 * (LIMIT + 200) + 10_000 * 80
    assert (results["rewards"], results["errors"]) == ([1.0], [None])


@pytest.mark.parametrize(("name", "arguments", "said"), BAD_CALLS.values(), ids=BAD_CALLS)
def test_called_naively_the_same_calls_raise_or_are_without_bound(name, arguments, said):
    """Negative control."""
    tools = {function.__name__: function for function in (square, broken, flood)}
    try:
        result = str(tools[name](**json.loads(arguments)))
    except Exception:  # noqa: BLE001 - a rollout would end with it, whatever it is
        return
    assert len(result) > LIMIT
