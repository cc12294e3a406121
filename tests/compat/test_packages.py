"""Environment packages as they were written for older versions load, play and score unmodified.

Each is run twice: by ``env.evaluate`` with a scripted client, and by ``vf-eval`` against a server.
What they are worth was worked out by hand from what the packages say; it is not what a run gave.
"""

import itertools
import math
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import verifiers as vf
from compat import players
from support.eval_command import eval_folder, vf_eval  # noqa: F401 - fixtures are found by name
from verifiers.testing import FakeServer, ScriptedClient

PACKAGES = Path(__file__).parent / "packages"
NAN = math.nan


@dataclass(frozen=True)
class Case:
    """What a package is worth to its player: rewards, metrics and stop conditions by row."""

    id: str
    rewards: list[float]
    metrics: dict[str, list[float]]
    stops: list[str]
    args: dict = field(default_factory=dict)
    older_id: str = ""
    """The same package by an id as older versions spelt it."""

    @property
    def player(self):
        return getattr(players, self.id.replace("-", "_"))


TAGGED = 0.2 * 2 / 3
CASES = [
    Case(
        "boxed-sums",
        [1.5, 0.0, 1.5, 0.0],
        {
            "correct_answer_reward_func": [1.0, 0.0, 1.0, 0.0],
            "format_reward_func": [1.0, 0.0, 1.0, 0.0],
            "num_words": [4.0, 1.0, 4.0, 1.0],
        },
        ["max_turns_reached"] * 4,
        {"num_eval_examples": 4},
        older_id="vf-boxed-sums",
    ),
    Case(
        "number-hunt",
        [1.0 + 0.5 * 0.9 + 0.1, 1.0 + 0.5 * 0.8 + 0.1, 1.0 + 0.5 * 0.4 + 0.1],
        {"solved": [1.0] * 3, "few_turns": [0.9, 0.8, 0.4], "num_turns": [1.0, 2.0, 6.0]},
        ["is_completed"] * 3,
        older_id="number_hunt",
    ),
    Case(
        "capital-guess",
        [1.0 + TAGGED] * 3,
        {"correct": [1.0] * 3, "patience": [0.7] * 3, "format_reward_func": [2 / 3] * 3},
        ["is_completed"] * 3,
        {"max_guesses": 5},
    ),
    Case(
        "shop-tools",
        [1.25, 1.25, 0.0],
        {
            "right_total": [1.0, 1.0, 0.0],
            "asked_for_the_price": [1.0, 1.0, 0.0],
            "total_tool_calls": [2.0, 2.0, 1.0],
            "price_of_calls": [1.0, 1.0, 1.0],
            "multiply_calls": [1.0, 1.0, 0.0],
        },
        ["no_tools_called"] * 3,
    ),
    Case(
        "note-keeper",
        [1.0, 1.0, 0.0],
        {
            "all_noted": [1.0, 1.0, 0.0],
            "write_note_calls": [1.0] * 3,
            "count_notes_calls": [1.0] * 3,
        },
        ["no_tools_called"] * 3,
    ),
    Case(
        "ledger-game",
        [1.0, 1.0],
        {"reached": [1.0, 1.0], "num_bookings": [2.0, 3.0], "add_calls": [2.0, 3.0]},
        ["has_final_env_response"] * 2,
    ),
    Case(
        "mixed-tasks",
        [2.0, 0.0, 1.0],
        {
            "is_upper": [1.0, 0.0, NAN],
            "is_count": [NAN, NAN, 1.0],
            "format_reward_func": [NAN, NAN, 1.0],
        },
        ["max_turns_reached"] * 3,
        older_id="someone/mixed-tasks",
    ),
    Case(
        "answer-judge",
        [1.5, 1.5, 0.0],
        {"judge_reward": [1.0, 1.0, 0.0], "brevity": [1.0, 1.0, 0.0]},
        ["max_turns_reached"] * 3,
    ),
    Case(
        "text-continuation",
        [1.0, 1.0, 0.0],
        {"counted": [1.0, 1.0, 0.0], "length": [7.0, 1.0, 10.0], "num_turns": [3.0, 1.0, 4.0]},
        ["reached", "reached", "max_turns_reached"],
    ),
    Case(
        "few-shot-tags",
        [1.0 + 0.5 + 0.2, 1.0 + 0.2 * 0.6, 0.0],
        {
            "right": [1.0, 1.0, 0.0],
            "names_a_factor": [1.0, 0.0, 0.0],
            "format_reward_func": [1.0, 0.6, 0.0],
        },
        ["max_turns_reached"] * 3,
    ),
    Case(
        "self-review",
        [1.5, 0.5],
        {
            "accepted": [1.0, 0.0],
            "shortest": [1.0, 1.0],
            "longest_draft": [7.0, 9.0],
            "num_turns": [2.0, 1.0],
        },
        ["has_final_env_response", "gave_up"],
    ),
]


@pytest.fixture(autouse=True)
def on_the_path(monkeypatch):
    monkeypatch.syspath_prepend(PACKAGES)
    yield
    for path in PACKAGES.glob("*.py"):
        sys.modules.pop(path.stem, None)


@pytest.fixture(scope="module")
def judge():
    with FakeServer(players.strict_judge) as server:
        yield server


def arguments(case, judge):
    return case.args | ({"judge_base_url": judge.url} if case.id == "answer-judge" else {})


def check(case, results):
    assert results["errors"] == [None] * len(case.rewards)
    assert results["rewards"] == pytest.approx(case.rewards)
    for name, values in case.metrics.items():
        assert results["metrics"][name] == pytest.approx(values, nan_ok=True), name
    assert results["stop_conditions"] == case.stops


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_a_package_is_evaluated(case, judge):
    env = vf.load_environment(case.id, **arguments(case, judge))
    check(case, env.evaluate(ScriptedClient(case.player), "m", max_concurrent=4))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_a_package_by_the_command(case, judge, vf_eval, eval_folder):  # noqa: F811
    settings = [f"--env.args.{name}={value}" for name, value in arguments(case, judge).items()]
    with FakeServer(case.player, models=["m"]) as server:
        ran = vf_eval(
            case.older_id or case.id,
            "-b",
            server.url,
            "-m",
            "m",
            "-n",
            "-1",
            "-r",
            "1",
            "--json",
            *settings,
        )
    assert ran.code == 0, ran.err
    (run,) = ran.json["runs"]
    assert run["avg_reward"] == pytest.approx(sum(case.rewards) / len(case.rewards))
    check(case, vf.load_results(run["path"]))


def test_every_package_is_tried():
    assert {case.id.replace("-", "_") for case in CASES} == {
        path.stem for path in PACKAGES.glob("*.py")
    }


# --- what single packages show


def played(env_id, player=None, **env_args):
    env = vf.load_environment(env_id, **env_args)
    return env, env.evaluate(
        ScriptedClient(player or getattr(players, env_id.replace("-", "_"))), "m"
    )


def test_tools_and_objects_of_the_oldest_form():
    env = vf.load_environment("capital-guess", max_guesses=5)
    client = ScriptedClient(players.capital_guess)
    results = env.evaluate(client, "m", rollouts_per_example=2)
    assert results["tasks"] == ["capitals"] * 6
    assert results["infos"][0] == {"country": "France"}
    assert results["states"][0]["guesses"] == ["Rome"]
    roles = [message["role"] for message in results["completions"][0]]
    assert roles == ["assistant", "tool", "assistant", "user", "assistant"]
    assert client.requests[0].tools[0]["function"]["name"] == "first_letter"
    assert client.requests[0].prompt[0] == {"role": "system", "content": "Answer in tags."}


def test_a_wrong_player_is_worth_its_format_alone():
    _, results = played(
        "capital_guess", lambda _: players.tagged("Rome"), num_train_examples=1, max_guesses=2
    )
    assert results["metrics"]["correct"] == [0.0]
    assert results["rewards"] == pytest.approx([0.2])
    assert len(results["states"][0]["responses"]) == 2


def test_a_game_that_is_not_won_ends_by_the_bound_of_its_class():
    _, results = played("number-hunt", lambda _: "<guess>3</guess>", max_turns=2)
    assert results["metrics"]["solved"] == [0.0] * 3
    assert results["metrics"]["num_turns"] == [2.0] * 3
    assert [state["low"] for state in results["states"]] == [4] * 3


def test_what_tools_answer_stands_in_the_completion():
    env, results = played("shop-tools")
    said = [
        [m["content"] for m in completion if m["role"] == "tool"]
        for completion in results["completions"]
    ]
    assert said == [["3", "12"], ["11", "22"], ["'pear'"]]
    assert [tool["function"]["name"] for tool in env.oai_tools] == ["price_of", "multiply"]
    assert env.oai_tools[1]["function"]["parameters"]["required"] == ["a"]


def test_hidden_arguments_are_filled_in_and_a_full_notebook_is_told_to_the_model():
    env, results = played("note-keeper")
    said = [
        [m["content"] for m in completion if m["role"] == "tool"]
        for completion in results["completions"]
    ]
    assert said == [["noted (1)", "1"], ["noted (2)", "2"], ["the notebook is full", "3"]]
    write_note = next(tool for tool in env.tool_defs if tool.name == "write_note")
    assert set(write_note.parameters["properties"]) == {"text"}


def test_marked_methods_of_the_newer_form():
    env, results = played("ledger-game")
    assert results["completions"][0][-1] == {"role": "user", "content": "Done."}
    assert [state["final_balance"] for state in results["states"]] == [2, 3]
    assert "account" not in env.tool_defs[0].parameters["properties"]
    env.close()
    assert sys.modules["ledger_game"].CLOSED == ["books"]


def test_its_own_stop_condition_and_the_models_faults_are_scored():
    def booking(request):
        too_much = "Reach 2" in request.prompt[0].content
        broken = {"role": "assistant", "tool_calls": [vf.ToolCall("c", "add", "[")]}
        return players.call("add", amount=9) if too_much else broken

    _, results = played("ledger-game", booking)
    assert results["stop_conditions"] == ["overdrawn", "max_turns_reached"]
    assert results["rewards"] == [0.0, 0.0]
    assert "not valid JSON" in results["completions"][1][1].content


def test_rows_of_a_group_keep_prompt_and_kind_of_their_member():
    env, results = played("mixed-tasks")
    assert results["tasks"] == ["upper", "upper", "count"]
    assert results["infos"][2] == {"kind": "len", "env_id": "count", "src_task": "letters"}
    assert results["prompts"][0][0]["content"] == "Write it in capitals."
    assert isinstance(env.get_env_for_task("count").parser, vf.XMLParser)


def test_the_judge_reads_the_question_the_answer_and_nothing_of_the_thinking(judge):
    before = len(judge.hits)
    played("answer-judge", judge_base_url=judge.url)
    asked = [hit.json() for hit in judge.hits[before:]]
    assert {body["messages"][-1]["content"].splitlines()[0] for body in asked} == {
        "Question: Which planet is red?",
        "Question: How many moons has {Earth}?",
        "Question: Is the sun a star?",
    }
    assert any("\nGiven: one\n" in body["messages"][-1]["content"] for body in asked)
    assert {(body["model"], body["temperature"]) for body in asked} == {("judge", 0.0)}


def test_text_prompts_go_to_the_completions_endpoint_and_come_back_as_text():
    with FakeServer(players.text_continuation, models=["m"]) as server:
        config = vf.ClientConfig(api_base_url=server.url)
        results = vf.load_environment("text-continuation").evaluate(config, "m")
    assert {hit.path for hit in server.hits} == {"/v1/completions"}
    assert results["completions"] == ["2, 3, 4", "8", "2, 3, 4, 5"]


@pytest.mark.parametrize("use_json_info", [False, True])
def test_info_as_a_column_of_dicts_or_of_text_and_few_shot_examples(use_json_info):
    _, results = played("few-shot-tags", use_json_info=use_json_info)
    assert results["rewards"] == pytest.approx([1.7, 1.12, 0.0])
    assert [message["role"] for message in results["prompts"][0]] == [
        "system",
        "user",
        "assistant",
        "user",
    ]
    assert (
        results["prompts"][0][2]["content"]
        == "<reasoning>\n3 * 3\n</reasoning>\n<verdict>\nno\n</verdict>"
    )
    assert results["infos"][0] == {"kind": "small", "factor": 2}


def test_siblings_are_compared_and_extras_are_kept():
    drafts = itertools.count(1)

    def player(request):
        if (
            players.last(request).startswith("Review: ")
            or "fog" not in request.prompt[0]["content"]
        ):
            return players.self_review(request)
        if players.turns(request):
            return "fog v2"
        return "fog v2" if next(drafts) == 1 else "fog v1"

    env = vf.load_environment("self-review")
    results = env.evaluate(ScriptedClient(player), "m", rollouts_per_example=2, max_concurrent=1)
    assert results["metrics"]["shortest"] == [1.0, 1.0, 1.0, 0.0]
    assert results["rewards"] == [1.5, 1.5, 1.5, 1.0]
    assert results["advantages"] == [0.0, 0.0, 0.25, -0.25]
    assert [state["num_reviews"] for state in results["states"]] == [2, 2, 1, 2]
    assert [state["num_messages"] for state in results["states"]] == [4, 4, 2, 4]
    assert [step["extras"] for step in results["states"][3]["trajectory"]] == [
        {"length": 6},
        {"length": 6},
    ]
