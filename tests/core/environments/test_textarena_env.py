"""``TextArenaEnv`` over real games that need no download, and one of our own with a word list."""

import random
import socket
import threading

import pytest

from verifiers.environments.integrations import extras

if not extras.TEXTARENA.is_installed:
    pytest.skip("textarena is not installed (the extra 'ta')", allow_module_level=True)

import textarena

from verifiers.environments.integrations.textarena import TextArenaEnv
from verifiers.errors import ConfigError
from verifiers.parsers import XMLParser
from verifiers.rubrics import Rubric
from verifiers.testing import ScriptedClient

GAME = "GuessTheNumber-v0"


class PickAWord(textarena.Env):
    """A game with a word list, which counts how often it was made and draws at every move."""

    made = 0

    def __init__(self):
        PickAWord.made += 1
        self.words = [f"word{i}" for i in range(2000)]
        self.marks = ["x"]

    def reset(self, num_players, seed=None):
        self.state = textarena.SinglePlayerState(num_players=num_players, seed=seed)
        self.state.reset(
            game_state={}, player_prompt_function=lambda player_id, game_state: "Pick."
        )

    def step(self, action):
        self.marks.append(action)
        drawn = random.choice(self.words)
        if action == "[stop]":
            self.state.set_outcome(reward=0.25, reason="You stopped.")
        self.state.add_observation(
            message=f"I drew {drawn}.", observation_type=textarena.ObservationType.GAME_MESSAGE
        )
        return self.state.step()


if "PickAWord-test" not in textarena.envs.registration.ENV_REGISTRY:
    textarena.register("PickAWord-test", PickAWord)


def guess(move):
    return f"<think>hm</think>\n<guess>{move}</guess>"


def ta_env(game=GAME, **parameters):
    return TextArenaEnv(game, **({"num_train_examples": 2, "num_eval_examples": 2} | parameters))


def halving(request):
    """A reply that halves the numbers that are left."""
    low, high, tried = 1, 20, None
    for message in request.prompt:
        if message["role"] == "assistant":
            tried = int(message["content"].split("[")[1].split("]")[0])
        elif tried is not None and "higher" in message["content"]:
            low = tried + 1
        elif tried is not None and "lower" in message["content"]:
            high = tried - 1
    return guess(f"[{(low + high) // 2}]")


def texts(results, row=0):
    return [message["content"] for message in results["completions"][row]]


# --- a game


def test_a_game_is_played_to_its_end_and_scored_by_itself():
    results = ta_env().evaluate(ScriptedClient(halving), "m")
    system, rules = results["prompts"][0]
    assert "<guess>" in system["content"]
    assert "guess the number between 1 and 20" in rules["content"]
    assert texts(results)[-1].endswith("Congratulations! You guessed the correct number.")
    assert results["stop_conditions"] == ["has_final_env_response"] * 2
    assert results["rewards"] == [1.0, 1.0]
    assert results["metrics"]["game_reward"] == [1.0, 1.0]


def test_the_model_is_told_what_is_new_and_not_the_whole_history():
    results = ta_env(max_turns=2).evaluate(ScriptedClient([guess("[1]")]), "m")
    first = texts(results)[1]
    assert "The target number is higher." in first
    assert "guess the number between" not in first


def test_feedback_is_put_in_the_authors_words():
    env = ta_env(feedback_fn=lambda text: text.split("[GAME]")[-1].strip().upper())
    assert (
        texts(env.evaluate(ScriptedClient([guess("[1]")]), "m"))[1]
        == "THE TARGET NUMBER IS HIGHER."
    )


def test_a_message_without_a_move_is_an_invalid_move_even_after_a_valid_one():
    client = ScriptedClient([guess("[1]"), "I would rather not.", "No."], strict=True)
    results = ta_env().evaluate(client, "m", num_examples=1)
    said = texts(results)
    assert "attempted an invalid move" in said[3]
    assert "already guessed" not in said[3]  # the move of an earlier message is not made again
    assert "Invalid Move" in said[5]
    assert results["errors"] == [None]
    assert 0 <= results["rewards"][0] < 1


def test_the_move_of_the_last_turn_counts():
    (secret,) = [
        state["ta_env"].game_number
        for state in ta_env(max_turns=1).evaluate(ScriptedClient(["-"]), "m", num_examples=1)[
            "states"
        ]
    ]
    results = ta_env(max_turns=1).evaluate(
        ScriptedClient([guess(f"[{secret}]")]), "m", num_examples=1
    )
    assert results["rewards"] == [1.0]


def test_a_game_that_was_not_finished_is_worth_nothing():
    results = ta_env(max_turns=1).evaluate(ScriptedClient([guess("[1]")]), "m")
    assert results["stop_conditions"] == ["max_turns_reached"] * 2
    assert results["rewards"] == [0.0, 0.0]


def test_the_prompt_parser_and_rubric_may_be_the_authors():
    def lost(state) -> float:
        return float(state["ta_env"].state.done)

    env = ta_env(system_prompt="", parser=XMLParser(["n"], answer_field="n"), rubric=Rubric([lost]))
    results = env.evaluate(ScriptedClient(["<n>[5]</n>", "<n>[50]</n>", "<n>[50]</n>"]), "m")
    assert [message["role"] for message in results["prompts"][0]] == ["user"]
    assert results["rewards"] == [1.0, 1.0]


# --- independent games


def test_the_seed_deals_the_game_and_siblings_play_the_same_one():
    def secrets(**parameters):
        env = ta_env(num_eval_examples=6, max_turns=1, **parameters)
        results = env.evaluate(ScriptedClient([guess("[1]")]), "m", rollouts_per_example=2)
        return [state["ta_env"].game_number for state in results["states"]]

    dealt = secrets()
    assert dealt[::2] == dealt[1::2]
    assert len(set(dealt)) > 1
    assert secrets() == dealt
    assert secrets(seed=7) != dealt


def test_draws_of_one_game_do_not_depend_on_other_games():
    """Pressing a button of the bandit draws from the global generator of Python."""

    def played(max_concurrent, rows):
        env = TextArenaEnv(
            "Bandit-v0",
            num_train_examples=0,
            num_eval_examples=rows,
            max_turns=6,
            parser=XMLParser(["b"], "b"),
        )
        client = ScriptedClient(["<b>[red]</b>"], delay_s=0.001)
        return env.evaluate(client, "m", max_concurrent=max_concurrent)["completions"]

    alone, together = played(1, 1), played(8, 8)
    assert together[0] == alone[0]
    assert len({str(rollout) for rollout in together}) > 1


def test_the_global_generators_are_left_as_they_were():
    random.seed(5)
    expected = random.Random(5).random()
    ta_env().evaluate(ScriptedClient(halving), "m")
    assert random.random() == expected


def test_games_share_their_word_list_and_nothing_else():
    PickAWord.made = 0
    client = ScriptedClient(lambda request: guess("[go]" if len(request.prompt) == 2 else "[stop]"))
    results = ta_env("PickAWord-test").evaluate(client, "m", rollouts_per_example=2)
    games = [state["ta_env"] for state in results["states"]]
    assert PickAWord.made == 1
    assert len({id(game) for game in games}) == 4
    assert len({id(game.words) for game in games}) == 1
    assert len({id(game.marks) for game in games}) == 4
    assert "You stopped." in texts(results)[-1]


# --- settings


def test_constructing_makes_no_game_and_opens_nothing(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("a socket was opened")

    PickAWord.made, threads = 0, threading.active_count()
    monkeypatch.setattr(socket.socket, "connect", refuse)
    env = ta_env("PickAWord-test", seed=10)
    assert [row["info"]["seed"] for row in env.get_eval_dataset()] == [12, 13]
    ta_env("Wordle-v0")
    assert PickAWord.made == 0
    assert threading.active_count() == threads


def test_a_game_that_does_not_exist_is_refused_with_a_suggestion():
    with pytest.raises(ConfigError, match='did you mean "GuessTheNumber-v0'):
        TextArenaEnv("GuessThenumber-v0x")


def test_a_game_for_several_players_is_refused_before_the_model_is_asked():
    client = ScriptedClient(["never"])
    with pytest.raises(ConfigError, match="'TicTacToe-v0' is not for one player"):
        ta_env("TicTacToe-v0").evaluate(client, "m")
    assert client.requests == []


def test_a_game_that_cannot_be_made_ends_the_run_with_the_reason():
    class Broken(PickAWord):
        def __init__(self):
            raise LookupError("\n*****\n  Resource \x1b[93mwords\x1b[0m not found.\n  Please use")

    textarena.envs.registration.ENV_REGISTRY.pop("Broken-test", None)
    textarena.register("Broken-test", Broken)
    with pytest.raises(
        ConfigError, match="'Broken-test' cannot be created: LookupError: Resource words not found"
    ):
        ta_env("Broken-test").evaluate(ScriptedClient(["never"]), "m")


def test_completion_mode_is_refused():
    with pytest.raises(ConfigError, match="chat messages"):
        ta_env(message_type="completion", system_prompt="")
