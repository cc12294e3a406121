"""wordle: its rules against an independent formulation, its rewards, and whole games against a
scripted model."""

import itertools
import re
import subprocess
import sys
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import verifiers as vf
from verifiers.testing import ScriptedClient, run_rollout_sync
from vf_wordle import WordleEnv, load_environment
from vf_wordle.rules import (
    Game,
    Move,
    Rules,
    describe,
    hint_ignored,
    is_over,
    judge,
    mark,
    read_guess,
    replay,
)
from vf_wordle.words import HELD_OUT_EVERY, LENGTHS, load_words, secrets, valid_guesses

FIVE = Rules(5, 6, False, valid_guesses(5))
HARD = Rules(5, 6, True, valid_guesses(5))


def say(word, think="hm"):
    return f"<think>\n{think}\n</think>\n<guess>\n[{word}]\n</guess>"


def rollout(env, answer, replies):
    """One scored game with a known secret."""
    row = dict(env.get_eval_dataset()[0]) | {"answer": answer}
    return run_rollout_sync(env, ScriptedClient(replies, strict=True), row)


def users(state):
    return [message["content"] for message in state["completion"] if message["role"] == "user"]


# --- marks ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("guess", "answer", "marks"),
    [
        ("crane", "crane", "GGGGG"),
        ("boils", "crane", "XXXXX"),
        ("nacre", "crane", "YYYYG"),
        ("geese", "those", "XXXGG"),  # one e of three: the green one takes it
        ("speed", "abide", "XXYXY"),  # one e: the first of two yellows takes it
        ("speed", "erase", "YXYYX"),  # two e: both
        ("speed", "steal", "GXGXX"),  # one e: green takes it, the second gets nothing
        ("allow", "lolly", "XYGYX"),
        ("llama", "small", "YYGYX"),
        ("eerie", "geese", "YGXXG"),
        ("added", "dread", "YYXYG"),
    ],
)
def test_marks_are_the_real_games(guess, answer, marks):
    assert mark(guess, answer) == marks


def brute_force(guess, answer):
    """The one string over G, Y, X that has every property of a marking; found by trying all of
    them."""
    in_both = Counter(guess) & Counter(answer)

    def is_marking(marks):
        triples = list(zip(guess, answer, marks, strict=True))
        # green: exactly where the letters agree
        if any((m == "G") != (g == a) for g, a, m in triples):
            return False
        for letter in set(guess):
            same_letter = [m for g, m in zip(guess, marks, strict=True) if g == letter]
            # as many marks as the words share of the letter
            if len(same_letter) - same_letter.count("X") != in_both[letter]:
                return False
            # yellows stand left of what is not marked
            if "XY" in "".join(m for m in same_letter if m != "G"):
                return False
        return True

    (marking,) = filter(is_marking, map("".join, itertools.product("GYX", repeat=len(guess))))
    return marking


@settings(max_examples=400, deadline=None)
@given(
    st.integers(1, 6).flatmap(lambda n: st.tuples(*[st.text("abc", min_size=n, max_size=n)] * 2))
)
def test_marks_agree_with_a_brute_force_formulation(words):
    assert mark(*words) == brute_force(*words)


def test_a_rule_that_forgets_counts_fails_the_brute_force_formulation():
    def naive(guess, answer):
        return "".join(
            "G" if g == a else "Y" if g in answer else "X"
            for g, a in zip(guess, answer, strict=True)
        )

    assert naive("speed", "abide") != brute_force("speed", "abide") == mark("speed", "abide")


# --- reading a guess ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "guess"),
    [
        ("[crane]", "crane"),
        ("  [ CRANE ]\n", "crane"),
        ("I choose [crane].", "crane"),
        ("[crane] [CRANE]", "crane"),
        ("crane", "crane"),
        (" Crane\n", "crane"),
        ("'crane'", "crane"),
        ("**CRANE**", "crane"),
        ("C R A N E", "crane"),
        ("a b or c d", None),
        ("[crane] or [point]", None),
        ("crane or point", None),
        ("my guess is crane", None),
        ("[your guess]", None),
        ("[]", None),
        ("[cr4ne]", None),
        ("crâne", None),
        ("", None),
        (None, None),
    ],
)
def test_one_word_is_read_with_or_without_brackets(content, guess):
    assert read_guess(content) == guess


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "Give exactly one word"),
        ("[crane] or [point]", "Give exactly one word"),
        ("[cranes]", "'cranes' has 6 letters; the word has 5."),
        ("[a]", "'a' has 1 letters"),
        ("[zzzzz]", "'zzzzz' is not in the word list."),
        (f"[{'z' * 100_000}]", "has 100000 letters"),
    ],
)
def test_a_reply_that_does_not_count_says_why(content, problem):
    move = judge(content, "crane", [], FIVE)
    assert problem in move.problem
    assert (move.word, move.marks) == ("", "")
    assert len(move.problem) < 200


# --- hard mode ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "guess", "ignored"),
    [
        ([("crane", "GXXXX")], "bulky", "letter 1 must be C"),
        ([("crane", "GXXXX")], "clump", None),
        ([("crane", "XXXYX")], "bulky", "the guess must contain N"),
        ([("crane", "XXXYX")], "point", None),
        (
            [("crane", "XXXYX")],
            "crane",
            None,
        ),  # the real game lets absent letters and old places be used again
        ([("speed", "XXYYX")], "begin", "the guess must contain E 2 times"),
        ([("speed", "XXYYX")], "melee", None),
        ([("speed", "XXGYX")], "ready", "letter 3 must be E"),
        ([("crane", "XXXYX"), ("point", "XXXGX")], "brand", None),
        ([("crane", "XXXYX"), ("point", "XXXGX")], "known", "letter 4 must be N"),
        ([], "zzzzz", None),
    ],
)
def test_hard_mode_wants_every_hint_used(before, guess, ignored):
    assert hint_ignored(guess, [Move(word, marks) for word, marks in before]) == ignored


def test_only_hard_mode_refuses_a_guess_that_ignores_a_hint():
    moves = [judge("[crane]", "cloud", [], HARD)]
    assert judge("[point]", "cloud", moves, HARD) == Move(problem="Hard mode: letter 1 must be C.")
    assert judge("[point]", "cloud", moves, FIVE) == Move("point", mark("point", "cloud"))
    refused = [*moves, judge("[point]", "cloud", moves, HARD)]
    assert judge("[clump]", "cloud", refused, HARD).marks  # a refused guess leaves no hints behind


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(secrets(5, False)),
    st.lists(st.sampled_from(load_words("answers.txt", 5)), max_size=5),
)
def test_the_answer_itself_is_never_refused_in_hard_mode(answer, guesses):
    moves = [Move(guess, mark(guess, answer)) for guess in guesses]
    assert hint_ignored(answer, moves) is None


# --- games ----------------------------------------------------------------------------------------


def test_a_game_ends_when_the_word_is_found_or_no_guess_is_left():
    game = replay(["[point]", "[crane]", "[cloud]"], "crane", FIVE)
    assert [move.word for move in game.moves] == ["point", "crane"]
    assert game.is_solved
    lost = replay(
        ["[point]", None, "[zzzzz]", "[cloud]", "[point]", "[point]", "[crane]"], "crane", FIVE
    )
    assert len(lost.moves) == 6
    assert (lost.is_solved, lost.num_invalid) == (False, 2)
    assert is_over("crane", lost.moves, FIVE)
    assert not is_over("crane", lost.moves[:5], FIVE)
    assert not is_over("crane", [], FIVE)


def test_the_last_guess_is_the_last_one_that_counted():
    game = replay(["[crate]", "[zzzzz]"], "crane", FIVE)
    assert game.last_marks == "GGGXG"
    assert Game("crane", ()).last_marks == ""


def test_the_player_is_told_letters_marks_and_what_is_left():
    first = [Move("nacre", "YYYYG")]
    assert describe("crane", first, FIVE) == "N A C R E\nY Y Y Y G\n\nYou have 5 guesses left."
    assert describe("crane", first * 5, FIVE).endswith("You have 1 guess left.")
    assert describe("crane", first * 6, FIVE).endswith("No guesses are left. The word was CRANE.")
    won = [*first, Move("crane", "GGGGG")]
    assert describe("crane", won, FIVE) == "C R A N E\nG G G G G\n\nSolved in 2 of 6 guesses."
    assert describe("crane", [Move(problem="No.")], FIVE).startswith("No.\n\nYou have 5")


# --- words ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", LENGTHS)
def test_words_are_plain_and_every_answer_may_be_guessed(length):
    answers, guesses = load_words("answers.txt", length), load_words("guesses.txt", length)
    assert len(answers) >= 1500
    assert set(answers) < set(guesses)
    assert list(answers) == sorted(set(answers))
    assert all(re.fullmatch("[a-z]+", word) and len(word) == length for word in guesses)


def test_answers_are_common_words_without_plurals():
    answers = set(load_words("answers.txt", 5))
    assert {"crane", "color", "glass", "audio"} <= answers
    assert not {"words", "colour", "boxes", "aecia"} & answers
    assert {"words", "boxes", "aecia"} <= valid_guesses(5)


@pytest.mark.parametrize("length", LENGTHS)
def test_no_held_out_word_is_ever_secret_in_training_whatever_the_seeds(length):
    train, held_out = set(secrets(length, False)), set(secrets(length, True))
    assert not train & held_out
    assert train | held_out == set(load_words("answers.txt", length))
    assert HELD_OUT_EVERY - 2 < len(train) / len(held_out) < HELD_OUT_EVERY
    for seed in (0, 1):
        env = load_environment(
            word_length=length, num_train_examples=100, num_eval_examples=50, seed=seed
        )
        assert set(env.get_dataset()["answer"]) <= train
        assert set(env.get_eval_dataset()["answer"]) <= held_out


def test_two_thousand_training_and_twenty_held_out_games_by_default():
    env = load_environment()
    assert len(set(env.get_dataset()["answer"])) == 2000
    assert len(set(env.get_eval_dataset()["answer"])) == 20
    assert len(load_environment(word_length=4).get_dataset()) == len(secrets(4, False)) < 2000


def test_the_seed_chooses_the_games_on_every_machine():
    def first(seed):
        return load_environment(seed=seed, num_train_examples=5).get_dataset()["answer"][:]

    assert first(3) == first(3) != first(4)
    program = (
        "from vf_wordle import *; print(load_environment(num_train_examples=5,"
        " seed=3).get_dataset()['answer'][:])"
    )
    printed = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout
    assert printed.strip() == repr(first(3))


# --- rewards --------------------------------------------------------------------------------------


def test_an_oracle_earns_the_most_there_is():
    state = rollout(load_environment(), "crane", [say("crane")])
    assert state["metrics"] == {
        "correct_answer": 1.0,
        "partial_answer": 0.0,
        "length_bonus": 1.0,
        "format_reward": 1.0,
        "invalid_guesses": 0.0,
        "success": 1.0,
        "num_turns": 1.0,
    }
    assert state["reward"] == pytest.approx(2.2)
    assert state["stop_condition"] == "game_over"
    assert users(state) == ["C R A N E\nG G G G G\n\nSolved in 1 of 6 guesses."]


@pytest.mark.parametrize("turns", range(1, 7))
def test_the_bonus_is_one_over_the_number_of_guesses(turns):
    words = ["point", "cloud", "begin", "ready", "bulky"][: turns - 1]
    state = rollout(load_environment(), "crane", [*map(say, words), say("crane")])
    assert state["metrics"]["length_bonus"] == pytest.approx(1 / turns)
    assert state["reward"] == pytest.approx(1 + 1 / turns + 0.2)


def test_a_reply_without_a_guess_counts_as_one_for_the_bonus():
    state = rollout(load_environment(), "crane", ["what?", say("zzzzz"), say("crane")])
    assert state["metrics"]["length_bonus"] == pytest.approx(1 / 3)
    assert state["metrics"]["invalid_guesses"] == 2.0


def test_greens_and_yellows_of_the_last_guess_are_worth_something_when_the_word_is_not_found():
    replies = [*map(say, ["crate", "point", "cloud", "begin", "ready"]), say("nacre")]
    state = rollout(load_environment(), "crane", replies)
    assert state["metrics"]["partial_answer"] == pytest.approx(0.2 * 1 + 0.1 * 4)
    assert state["metrics"]["correct_answer"] == state["metrics"]["length_bonus"] == 0.0
    assert state["reward"] == pytest.approx(0.6 + 0.2)
    assert users(state)[-1].endswith("The word was CRANE.")
    assert not state["is_truncated"]
    after = rollout(load_environment(), "crane", [*replies[:4], say("crate"), "I give up."])
    assert after["metrics"]["partial_answer"] == pytest.approx(0.8)


@pytest.mark.parametrize("length", LENGTHS)
def test_no_game_that_was_lost_earns_as_much_as_one_that_was_won_last(length):
    env = load_environment(word_length=length, num_train_examples=1, num_eval_examples=1)
    answer = env.get_eval_dataset()[0]["answer"]
    near = max(
        valid_guesses(length) - {answer}, key=lambda word: (mark(word, answer).count("G"), word)
    )
    lost, won = (rollout(env, answer, [say(near)] * 5 + [say(last)]) for last in (near, answer))
    assert 0.5 < lost["metrics"]["partial_answer"] < 1.0
    assert lost["reward"] < won["reward"] == pytest.approx(1 + 1 / 6 + 0.2)


def test_the_format_reward_wants_the_tags_that_were_asked_for():
    bare = "<guess>[crane]</guess>"
    assert (
        rollout(load_environment(use_think=False), "crane", [bare])["metrics"]["format_reward"]
        == 1.0
    )
    assert rollout(load_environment(use_think=True), "crane", [bare])["metrics"][
        "format_reward"
    ] == pytest.approx(0.6)
    assert rollout(load_environment(), "crane", [say("crane")])["metrics"]["format_reward"] == 1.0
    silent = rollout(load_environment(), "crane", ["crane"] * 6)
    assert silent["metrics"]["format_reward"] == silent["reward"] == 0.0


def test_a_game_plays_on_without_brackets():
    assert (
        rollout(load_environment(), "crane", ["<guess>crane</guess>"])["metrics"]["correct_answer"]
        == 1.0
    )


def test_of_several_guesses_in_one_reply_the_last_counts():
    state = rollout(
        load_environment(), "crane", ["<guess>[point]</guess><guess>[crane]</guess>", say("crane")]
    )
    assert state["metrics"]["length_bonus"] == 1.0


def test_stored_rollouts_score_the_same_without_the_state_of_the_game():
    env = load_environment()
    played = rollout(env, "crane", [say("point"), "what?", say("crane")])
    score = env.rubric.score_rollout_sync(
        prompt=played["prompt"], completion=played["completion"], answer="crane", state={}
    )
    assert score["reward"] == pytest.approx(played["reward"])
    assert score["metrics"]["invalid_guesses"] == 1.0


def test_hard_mode_is_told_and_kept():
    env = load_environment(hard_mode=True, num_train_examples=5)
    assert "must use all" in env.system_prompt
    assert "must use all" not in load_environment(num_train_examples=5).system_prompt
    state = rollout(env, "cloud", [say("crane"), say("point"), say("cloud")])
    assert "Hard mode: letter 1 must be C." in users(state)[1]
    assert state["metrics"]["invalid_guesses"] == 1.0


def test_games_of_other_sizes():
    env = load_environment(word_length=7, max_guesses=2, num_train_examples=5)
    assert "7 letters in at most 2 guesses" in env.system_prompt
    state = rollout(env, "picture", [say("crane"), say("picture")])
    assert state["metrics"]["correct_answer"] == 1.0
    assert "'crane' has 5 letters; the word has 7." in users(state)[0]


# --- the environment ------------------------------------------------------------------------------


def test_thinking_is_asked_for_unless_it_is_turned_off():
    think, plain = load_environment(), load_environment(use_think=False)
    assert "<think>" in think.system_prompt
    assert "<think>" not in plain.system_prompt
    assert (think.parser.get_fields(), plain.parser.get_fields()) == (["think", "guess"], ["guess"])
    assert load_environment(system_prompt="").system_prompt is None
    assert load_environment(system_prompt="Play.").system_prompt == "Play."


def test_it_loads_by_its_id_and_is_clean_but_for_the_size_of_its_reward():
    env = vf.load_environment("wordle", num_train_examples=50)
    assert isinstance(env, WordleEnv)
    assert (env.env_id, env.max_turns) == ("wordle", 6)
    report = vf.check_environment("wordle", n=2)
    assert report.ok, report
    # 2.2 at most, as documented
    assert [warning.code for warning in report.warnings] == ["reward-outside-range"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_train_examples": 0}, "num_train_examples"),
        (
            {"num_train_examples": 5000},
            "num_train_examples=5000 is more than the 20.. training words of 5 letters",
        ),
        ({"num_eval_examples": 1000}, "num_eval_examples=1000 is more than the 209 held-out words"),
        ({"num_eval_examples": True}, "num_eval_examples"),
        ({"word_length": 3}, "word_length must be 4 to 8, not 3"),
        ({"word_length": "5"}, "word_length"),
        ({"max_guesses": 0}, "max_guesses"),
        ({"hard_mode": "yes"}, "hard_mode must be true or false"),
        ({"use_think": 1}, "use_think must be true or false"),
        ({"seed": 0.5}, "seed"),
    ],
)
def test_an_argument_that_cannot_be_used_is_named(arguments, message):
    with pytest.raises(vf.ConfigError, match=message):
        load_environment(**arguments)
