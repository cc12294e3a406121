"""textarena: real games through the package; skipped where TextArena is not installed."""

import pytest

import verifiers as vf
from verifiers.environments.integrations import extras

if not extras.TEXTARENA.is_installed:
    pytest.skip("textarena is not installed (the extra 'ta')", allow_module_level=True)

from verifiers.testing import ScriptedClient
from vf_textarena import DEFAULT_GAME, load_environment


def move(text):
    return f"<think>\nhm\n</think>\n<guess>\n[{text}]\n</guess>"


def halving(request):
    """Plays GuessTheNumber by halving the numbers that are left."""
    low, high, tried = 1, 20, None
    for message in request.prompt:
        if message["role"] == "assistant":
            tried = int(message["content"].split("[")[1].split("]")[0])
        elif tried is not None and "higher" in message["content"]:
            low = tried + 1
        elif tried is not None and "lower" in message["content"]:
            high = tried - 1
    return move((low + high) // 2)


def test_an_oracle_that_plays_well_earns_one():
    env = load_environment(num_train_examples=1, num_eval_examples=30)
    results = env.evaluate(ScriptedClient(halving), "scripted", rollouts_per_example=2)
    assert list(results["reward"]) == [1.0] * 60
    assert max(results["metrics"]["num_turns"]) <= 5


def test_a_model_that_says_nothing_earns_nothing_and_the_game_ends():
    results = load_environment(num_train_examples=1, num_eval_examples=3).evaluate(
        ScriptedClient(["?"]), "scripted"
    )
    assert list(results["reward"]) == [0.0] * 3
    assert {state["stop_condition"] for state in results["states"]} == {"has_final_env_response"}


def test_a_game_that_is_cut_is_worth_nothing():
    env = load_environment(max_turns=1, num_train_examples=1, num_eval_examples=10)
    results = env.evaluate(ScriptedClient([move(21)]), "scripted")
    assert list(results["reward"]) == [0.0] * 10


def test_the_seed_deals_the_games_and_held_out_seeds_are_never_trained_on():
    def seeds(env):
        return [
            [row["info"]["seed"] for row in rows]
            for rows in (env.get_dataset(), env.get_eval_dataset())
        ]

    train, held_out = seeds(load_environment(num_train_examples=20, num_eval_examples=10, seed=5))
    assert train == list(range(5, 25))
    assert not set(train) & set(held_out)

    def transcripts(seed):
        env = load_environment(num_train_examples=1, num_eval_examples=8, seed=seed)
        return [
            str(completion)
            for completion in env.evaluate(ScriptedClient(halving), "scripted")["completion"]
        ]

    assert transcripts(5) == transcripts(5) != transcripts(100)


def test_thinking_is_asked_for_unless_it_is_turned_off():
    assert "<think>" in load_environment().system_prompt
    plain = load_environment(use_think=False)
    assert "<think>" not in plain.system_prompt
    assert plain.parser.get_fields() == ["guess"]
    assert not load_environment(system_prompt="").system_prompt


@pytest.mark.parametrize(
    "game", ["FrozenLake-v0", "Mastermind-v0", "TowerOfHanoi-v0", "LightsOut-v0"]
)
def test_other_games_play(game):
    env = load_environment(game=game, max_turns=3, num_train_examples=1, num_eval_examples=1)
    state = env.evaluate(ScriptedClient([move("right")]), "scripted")["states"][0]
    assert state["error"] is None
    assert 0.0 <= state["reward"] < 1.0
    assert len(state["prompt"][-1]["content"]) > 50


def test_it_loads_by_its_id_and_is_clean():
    env = vf.load_environment("textarena", max_turns=7)
    assert isinstance(env, vf.TextArenaEnv)
    assert (env.game, env.max_turns) == (DEFAULT_GAME, 7)
    report = vf.check_environment("textarena")
    assert report.ok, report
    # the oracle solves what no script guesses
    assert [warning.code for warning in report.warnings] == []
    guesses = iter([move(n % 20 + 1) for n in range(999)])
    report = vf.check_environment(
        "textarena", n=8, client=ScriptedClient(lambda request: next(guesses))
    )
    assert report.ok, report
    assert not report.warnings, report


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"game": "GuessTheNumbers-v0"}, "GuessTheNumber-v0"),
        ({"max_turns": 0}, "max_turns"),
        ({"num_train_examples": 0}, "num_train_examples"),
        ({"num_eval_examples": "5"}, "num_eval_examples"),
        ({"use_think": "no"}, "use_think"),
    ],
)
def test_an_argument_that_cannot_be_used_is_named(arguments, message):
    with pytest.raises(vf.ConfigError, match=message):
        load_environment(**arguments)
