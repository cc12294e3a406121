"""tool-test: its tasks, its reward, and whole rollouts in which the tools really run."""

import json

import pytest

import verifiers as vf
from verifiers.testing import ScriptedClient, run_rollout_sync
from vf_tool_test import load_environment
from vf_tool_test.tasks import ask, call_key, generate_tasks, read_call, share_right
from vf_tool_test.tools import ROOMS, TOOLS

ADD = {"name": "add", "arguments": {"a": 3, "b": 14}}
LAMP = {"name": "set_lamp", "arguments": {"room": "hall", "on": True}}
JOIN = {"name": "join_words", "arguments": {"words": ["salt", "bread"], "separator": ", "}}


def made(*calls):
    return [
        vf.ToolCall(f"call_{i}", call["name"], json.dumps(call["arguments"]))
        for i, call in enumerate(calls)
    ]


def rollout(asked, *replies):
    env = load_environment(num_train_examples=1, num_eval_examples=1)
    row = {"question": ask(asked), "answer": "", "info": {"calls": asked}}
    return run_rollout_sync(env, ScriptedClient(list(replies)), row)


# --- tasks ----------------------------------------------------------------------------------------


def test_a_task_shows_every_call_with_its_arguments_as_json():
    assert ask([LAMP]) == 'Make exactly this tool call:\n1. set_lamp with room = "hall", on = true'
    several = ask([ADD, JOIN]).split("\n")
    assert several[0] == "Make exactly these tool calls, all in one message:"
    assert several[1:] == [
        "1. add with a = 3, b = 14",
        '2. join_words with words = ["salt", "bread"], separator = ", "',
    ]


def test_tasks_keep_to_their_bounds_and_use_every_tool():
    rows = generate_tasks(300, 2, 3, seed=1)
    assert {len(row["info"]["calls"]) for row in rows} == {2, 3}
    assert {call["name"] for row in rows for call in row["info"]["calls"]} == {
        tool.__name__ for tool in TOOLS
    }
    for row in rows:
        assert len({call_key(call) for call in row["info"]["calls"]}) == len(row["info"]["calls"])
        assert json.loads(row["answer"]) == row["info"]["calls"]


def test_tasks_are_different_and_the_same_for_the_same_seed():
    rows = generate_tasks(500, 1, 4, seed=1)
    assert len({row["question"] for row in rows}) == 500
    assert rows == generate_tasks(500, 1, 4, seed=1)
    assert rows[:50] == generate_tasks(50, 1, 4, seed=1)
    assert rows != generate_tasks(500, 1, 4, seed=2)


def test_training_and_held_out_tasks_ask_for_different_calls():
    env = load_environment(num_train_examples=400, num_eval_examples=100)
    train, held_out = (
        {frozenset(map(call_key, json.loads(row["answer"]))) for row in rows}
        for rows in (env.get_dataset(), env.get_eval_dataset())
    )
    assert (len(train), len(held_out)) == (400, 100)
    assert not train & held_out
    few = load_environment(num_train_examples=5, num_eval_examples=100)
    assert few.get_eval_dataset()["answer"][:] == env.get_eval_dataset()["answer"][:]


# --- the reward -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "calls", "share"),
    [
        ([ADD, LAMP], [ADD, LAMP], 1.0),
        ([ADD, LAMP], [LAMP, ADD], 1.0),  # the order is free
        ([ADD, LAMP], [ADD], 0.5),
        ([ADD, LAMP], [ADD, ADD], 0.5),  # one call is not two
        ([ADD], [ADD, ADD], 0.5),  # too many cost
        ([ADD], [ADD, LAMP, JOIN], 1 / 3),
        ([ADD], [LAMP], 0.0),
        ([ADD], [], 0.0),
        ([ADD], [{"name": "add", "arguments": {"a": 14, "b": 3}}], 0.0),
        ([ADD], [{"name": "add", "arguments": {"a": 3}}], 0.0),
        ([ADD], [{"name": "add", "arguments": {"a": 3, "b": 14, "c": 0}}], 0.0),
        ([ADD], [{"name": "add", "arguments": {"a": 3.0, "b": 14}}], 1.0),
        ([ADD], [{"name": "add", "arguments": {"a": "3", "b": 14}}], 0.0),
        ([LAMP], [{"name": "set_lamp", "arguments": {"room": "hall", "on": 1}}], 0.0),
        ([LAMP], [{"name": "set_lamp", "arguments": {"room": "hall", "on": False}}], 0.0),
        (
            [JOIN],
            [{"name": "join_words", "arguments": {"words": ["bread", "salt"], "separator": ", "}}],
            0.0,
        ),
    ],
)
def test_the_share_of_calls_that_are_exactly_right(asked, calls, share):
    assert share_right(asked, [read_call(call) for call in made(*calls)]) == pytest.approx(share)


@pytest.mark.parametrize("arguments", ["{", "[3, 14]", "null", "[" * 100_000])
def test_arguments_that_are_no_json_object_are_a_wrong_call(arguments):
    assert read_call(vf.ToolCall("1", "add", arguments)) is None
    assert share_right([ADD], [None]) == 0.0


def test_calls_in_either_form_of_a_stored_message_are_read():
    flat = {"id": "1", "name": "add", "arguments": '{"a": 3, "b": 14}'}
    assert read_call(flat) == read_call(dict(made(ADD)[0])) == call_key(ADD)


# --- whole rollouts -------------------------------------------------------------------------------


def test_the_tools_run_and_answer_in_the_order_of_the_calls():
    state = rollout([ADD, LAMP, JOIN], made(ADD, LAMP, JOIN), "Done.")
    answers = [message["content"] for message in state["completion"] if message["role"] == "tool"]
    assert answers == ["17", "The lamp in the hall is on.", "salt, bread"]
    assert (state["reward"], state["metrics"]["all_right"]) == (1.0, 1.0)
    assert state["metrics"]["total_tool_calls"] == 3.0
    assert state["metrics"]["set_lamp_calls"] == 1.0


@pytest.mark.parametrize(
    ("call", "answer"),
    [
        ({"name": "to_fahrenheit", "arguments": {"celsius": 36.6}}, "97.88"),
        ({"name": "count_letter", "arguments": {"text": "green tiger", "letter": "e"}}, "3"),
    ],
)
def test_every_tool_computes(call, answer):
    state = rollout([call], made(call), "Done.")
    assert [m["content"] for m in state["completion"] if m["role"] == "tool"] == [answer]
    assert state["reward"] == 1.0


def test_only_the_first_message_counts():
    one_by_one = rollout([ADD, LAMP], made(ADD), made(LAMP))
    assert (one_by_one["reward"], one_by_one["metrics"]["all_right"]) == (0.5, 0.0)
    talk_first = rollout([ADD], "Let me think.", made(ADD))
    assert talk_first["reward"] == 0.0


def test_an_unknown_tool_and_a_wrong_argument_are_told_to_the_model_and_cost():
    wrong = {"name": "set_lamp", "arguments": {"room": "cellar", "on": True}}
    state = rollout([ADD], made(ADD, {"name": "subtract", "arguments": {}}, wrong), "Oh.")
    told = [message["content"] for message in state["completion"] if message["role"] == "tool"]
    assert "no tool 'subtract'" in told[1]
    assert all(room in told[2] for room in ROOMS)
    assert state["error"] is None
    assert state["reward"] == pytest.approx(1 / 3)


def oracle(rows, most=99):
    """Makes the calls that each of these rows asks for, ``most`` at most."""
    calls = {row["question"]: made(*json.loads(row["answer"])[:most]) for row in rows}

    def perfect(request):
        last = request.prompt[-1]
        return "Done." if last["role"] == "tool" else calls[last["content"]]

    return ScriptedClient(perfect)


def test_an_oracle_earns_one():
    env = load_environment(num_train_examples=1, num_eval_examples=30)
    results = env.evaluate(oracle(env.get_eval_dataset()), "scripted", rollouts_per_example=2)
    assert list(results["reward"]) == [1.0] * 60


# --- the environment ------------------------------------------------------------------------------


def test_it_loads_by_its_id_and_is_clean():
    env = vf.load_environment("tool-test", max_calls=2)
    assert isinstance(env, vf.ToolEnv)
    assert {tool["function"]["name"] for tool in env.tool_defs} == {tool.__name__ for tool in TOOLS}
    assert env.tool_defs[3]["function"]["parameters"]["properties"]["room"]["enum"] == list(ROOMS)
    report = vf.check_environment("tool-test")
    assert report.ok, report
    # the oracle solves what no script guesses
    assert [warning.code for warning in report.warnings] == []
    report = vf.check_environment(
        env, client=oracle([*env.get_dataset(), *env.get_eval_dataset()], most=1), n=10
    )
    assert report.ok, report
    assert not report.warnings, report


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"min_calls": 0}, "min_calls"),
        ({"min_calls": 5}, "min_calls=5 is above max_calls=4"),
        ({"max_calls": 33}, "max_calls=33 is more than 32"),
        ({"num_train_examples": 0}, "num_train_examples"),
        ({"num_eval_examples": 1.5}, "num_eval_examples"),
        ({"seed": "a"}, "seed"),
    ],
)
def test_an_argument_that_cannot_be_used_is_named(arguments, message):
    with pytest.raises(vf.ConfigError, match=message):
        load_environment(**arguments)


def test_more_tasks_than_there_are_is_an_error(monkeypatch):
    monkeypatch.setattr("vf_tool_test.tasks.draw_arguments", lambda tool, rng: {})
    with pytest.raises(vf.ConfigError, match="9 examples are more than the 5 different tasks"):
        generate_tasks(9, 1, 1, seed=0)
