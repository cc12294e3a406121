"""Environment packages as they were written for older versions load, play and score unmodified."""

import sys
from pathlib import Path

import pytest

import verifiers as vf
from verifiers.testing import ScriptedClient

PACKAGES = Path(__file__).parents[1] / "support" / "historical"


@pytest.fixture(autouse=True)
def on_the_path(monkeypatch):
    monkeypatch.syspath_prepend(PACKAGES)
    yield
    for path in PACKAGES.glob("*.py"):
        sys.modules.pop(path.stem, None)


def tagged(answer):
    return f"<think>hm</think><answer>{answer}</answer>"


def call(name, **arguments):
    return {"role": "assistant", "tool_calls": [vf.ToolCall("c1", name, arguments)]}


def player(request):
    """Asks for the letter, guesses wrongly, then right."""
    turn = sum(message.role == "assistant" for message in request.prompt)
    country = request.prompt[1].content.split()[-1].rstrip("?")
    capital = {"France": "Paris", "Peru": "Lima", "Japan": "Tokyo"}[country]
    return [call("first_letter", country=country), tagged("Rome"), tagged(capital)][turn]


def test_a_package_of_the_older_age():
    env = vf.load_environment("capital-guess", max_guesses=5)
    client = ScriptedClient(player)
    results = env.evaluate(client, "m", rollouts_per_example=2)
    assert results["errors"] == [None] * 6
    assert results["stop_conditions"] == ["is_completed"] * 6
    assert results["tasks"] == ["capitals"] * 6
    assert results["infos"][0] == {"country": "France"}
    assert results["metrics"]["correct"] == [1.0] * 6
    assert results["metrics"]["patience"] == pytest.approx([0.7] * 6)
    assert all(reward > 1.0 for reward in results["rewards"])
    assert results["states"][0]["guesses"] == ["Rome"]
    roles = [message["role"] for message in results["completions"][0]]
    assert roles == ["assistant", "tool", "assistant", "user", "assistant"]
    assert client.requests[0].tools[0]["function"]["name"] == "first_letter"
    assert client.requests[0].prompt[0] == {"role": "system", "content": "Answer in tags."}


def test_a_wrong_player_of_the_older_age_is_worth_its_format_alone():
    env = vf.load_environment("capital_guess", num_train_examples=1, max_guesses=2)
    results = env.evaluate(ScriptedClient(tagged("Rome")), "m")
    assert results["metrics"]["correct"] == [0.0]
    assert results["rewards"] == pytest.approx([0.2])
    assert len(results["states"][0]["responses"]) == 2


def test_a_package_of_the_newer_age():
    env = vf.load_environment("ledger-game")
    results = env.evaluate_sync(client=ScriptedClient(lambda request: call("add", amount=1)), model="m")
    assert results["errors"] == [None, None]
    assert results["stop_conditions"] == ["has_final_env_response"] * 2
    assert results["rewards"] == [1.0, 1.0]
    assert results["metrics"]["num_bookings"] == [2.0, 3.0]
    assert results["metrics"]["add_calls"] == [2.0, 3.0]
    assert results["completions"][0][-1] == {"role": "user", "content": "Done."}
    assert [state["final_balance"] for state in results["states"]] == [2, 3]
    assert "account" not in env.tool_defs[0].parameters["properties"]
    env.close()
    assert sys.modules["ledger_game"].CLOSED == ["books"]


def test_its_own_stop_condition_and_the_models_faults_are_scored():
    def booking(request):
        too_much = "Reach 2" in request.prompt[0].content
        return (
            call("add", amount=9) if too_much else {"role": "assistant", "tool_calls": [vf.ToolCall("c", "add", "[")]}
        )

    results = vf.load_environment("ledger-game").evaluate(ScriptedClient(booking), "m")
    assert results["stop_conditions"] == ["overdrawn", "max_turns_reached"]
    assert results["rewards"] == [0.0, 0.0]
    assert "not valid JSON" in results["completions"][1][1].content
