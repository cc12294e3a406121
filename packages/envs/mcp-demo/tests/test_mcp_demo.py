"""mcp-demo: its questions, its reward, and rollouts against the real server process."""

import json
import re

import pytest

import verifiers as vf
from verifiers.environments.integrations import extras

if not extras.MCP.is_installed:
    pytest.skip("mcp is not installed (the extra 'mcp')", allow_module_level=True)

from verifiers.testing import ScriptedClient
from vf_mcp_demo import load_environment, read_number
from vf_mcp_demo.catalogue import ITEMS, WAREHOUSES, all_questions, draw_rows, make_catalogue


def call(name, **arguments):
    return [vf.ToolCall("call_1", name, json.dumps(arguments))]


def play(*replies, env=None):
    """One scored rollout of the first held-out question against a fresh server."""
    with env or load_environment(num_train_examples=1, num_eval_examples=1) as env:
        results = env.evaluate(ScriptedClient(list(replies)), "scripted", num_examples=1)
        return results["states"][0]


def tool_texts(state):
    return [message["content"] for message in state["completion"] if message["role"] == "tool"]


# --- questions ------------------------------------------------------------------------------------


def test_questions_are_right_about_the_catalogue():
    catalogue = make_catalogue(0)
    axes, mugs = catalogue["axes"], catalogue["mugs"]
    numbers = dict(all_questions(catalogue, ["axes", "mugs"]))
    assert numbers["How many axes are there in the east warehouse?"] == axes.stock["east"]
    assert numbers["How many axes are there in all warehouses together?"] == sum(
        axes.stock[w] for w in WAREHOUSES
    )
    assert (
        numbers["What are all mugs in the west warehouse worth, in cents?"]
        == mugs.stock["west"] * mugs.price_cents
    )
    together = axes.stock["north"] + mugs.stock["north"]
    assert numbers["How many axes and mugs together are there in the north warehouse?"] == together


def test_no_held_out_item_is_in_a_training_question():
    def items_of(rows):
        return {
            word for row in rows for word in re.findall("[a-z]+", row["question"]) if word in ITEMS
        }

    train, held_out = draw_rows(400, 0, held_out=False), draw_rows(50, 1, held_out=True)
    assert len({row["question"] for row in [*train, *held_out]}) == 450
    assert not items_of(train) & items_of(held_out)


def test_the_seed_chooses_stock_and_questions():
    assert len(ITEMS) == len(set(ITEMS)) == 60
    assert (
        draw_rows(9, 1, held_out=True)
        == draw_rows(9, 1, held_out=True)
        != draw_rows(9, 2, held_out=True)
    )
    assert make_catalogue(1) == make_catalogue(1) != make_catalogue(2)


# --- the reward -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("17", 17),
        (" 1,234 ", 1234),
        ("**17**", 17),
        ("17.", 17),
        ("17.0", None),
        ("1.7", None),
        ("17 cents", None),
        ("1,23", None),
        ("", None),
        (None, None),
        ("9" * 99, None),
    ],
)
def test_only_a_number_alone_is_read(text, number):
    assert read_number(text) == number


@pytest.mark.parametrize(
    ("last", "reward"),
    [
        ("It is <answer>{}</answer>.", 1.0),
        ("It is {}.", 0.0),
        ("<answer>x{}</answer>", 0.0),
        ("", 0.0),
    ],
)
def test_the_last_message_must_hold_the_number_in_tags(last, reward):
    env = load_environment(num_train_examples=1, num_eval_examples=1)
    answer = env.get_eval_dataset()[0]["answer"]
    state = play(call("list_warehouses"), last.format(answer), env=env)
    assert (state["reward"], state["metrics"]["looked_up"]) == (reward, 1.0)


def test_an_answer_before_the_last_message_does_not_count():
    env = load_environment(num_train_examples=1, num_eval_examples=1)
    early = {
        "content": f"<answer>{env.get_eval_dataset()[0]['answer']}</answer>",
        "tool_calls": call("list_items"),
    }
    assert play(early, "I am not sure.", env=env)["reward"] == 0.0


# --- the server -----------------------------------------------------------------------------------


def test_the_server_answers_and_explains_what_it_does_not_know():
    axes = make_catalogue(0)["axes"]
    state = play(
        call("list_warehouses"),
        call("list_items"),
        call("get_price", item="axes"),
        call("get_stock", item="axes", warehouse="east"),
        call("get_stock", item="dragons", warehouse="east"),
        call("get_stock", item="axes", warehouse="moon"),
        "<answer>-1</answer>",
    )
    texts = tool_texts(state)
    assert texts[0] == "north, south, east, west"
    assert texts[1].split(", ") == list(ITEMS)
    assert [int(text) for text in texts[2:4]] == [axes.price_cents, axes.stock["east"]]
    assert "no item 'dragons'" in texts[4]
    assert "no warehouse 'moon'" in texts[5]
    assert state["error"] is None
    assert state["metrics"]["total_tool_calls"] == 6.0


def test_the_servers_stock_is_that_of_the_seed():
    env = load_environment(num_train_examples=1, num_eval_examples=1, seed=7)
    state = play(call("get_price", item="axes"), "x", env=env)
    assert tool_texts(state) == [str(make_catalogue(7)["axes"].price_cents)]
    assert make_catalogue(7)["axes"].price_cents != make_catalogue(0)["axes"].price_cents


def looking_up(request):
    """A player that looks up everything a question needs, in one message, and computes."""
    question = request.prompt[1]["content"]
    words = re.findall("[a-z]+", question)
    items = [word for word in words if word in ITEMS]
    warehouses = [word for word in words if word in WAREHOUSES] or list(WAREHOUSES)
    answers = [int(message["content"]) for message in request.prompt if message["role"] == "tool"]
    if not answers:
        calls = [
            call("get_stock", item=item, warehouse=where)[0]
            for item in items
            for where in warehouses
        ]
        return calls + (call("get_price", item=items[0]) if "worth" in question else [])
    return f"<answer>{answers[0] * answers[1] if 'worth' in question else sum(answers)}</answer>"


def test_an_oracle_that_uses_the_tools_earns_one():
    with load_environment(num_train_examples=1, num_eval_examples=50) as env:
        results = env.evaluate(ScriptedClient(looking_up), "scripted")
    assert list(results["reward"]) == [1.0] * 50
    assert list(results["metrics"]["looked_up"]) == [1.0] * 50


# --- the environment ------------------------------------------------------------------------------


def test_it_loads_by_its_id_and_is_clean():
    env = vf.load_environment("mcp-demo", max_turns=3)
    assert isinstance(env, vf.MCPEnv)
    assert env.max_turns == 3
    report = vf.check_environment("mcp-demo", n=1)
    assert report.ok, report
    assert not report.warnings, report


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_train_examples": 10_000}, "num_train_examples=10000 is more than the 620 questions"),
        ({"num_eval_examples": 200}, "num_eval_examples=200 is more than the 152 questions"),
        ({"num_eval_examples": 0}, "num_eval_examples"),
        ({"max_turns": 0}, "max_turns"),
        ({"seed": "0"}, "seed"),
    ],
)
def test_an_argument_that_cannot_be_used_is_named(arguments, message):
    with pytest.raises(vf.ConfigError, match=message):
        load_environment(**arguments)
