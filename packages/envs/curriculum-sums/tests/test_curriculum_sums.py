"""curriculum-sums: its sums, its exact reward, and the column a curriculum reads."""

import re

import pytest

import verifiers as vf
from verifiers.testing import ScriptedClient, run_rollout_sync
from vf_curriculum_sums import load_environment, read_number
from vf_curriculum_sums.sums import LEVELS, generate_rows, value_of


def text_of(row):
    return re.fullmatch(r"What is (.+)\?", row["question"])[1]


def reply(text, answer="17"):
    env = load_environment(num_train_examples=1, num_eval_examples=1)
    return run_rollout_sync(
        env, ScriptedClient([text]), {"question": "What is 3 + 14?", "answer": answer}
    )


# --- sums -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("difficulty", LEVELS)
def test_every_answer_is_what_python_computes_and_every_sum_is_of_its_level(difficulty):
    level = LEVELS[difficulty]
    _, rows = generate_rows(difficulty, difficulty, 1, 300, seed=1)
    for row in rows:
        text = text_of(row)
        assert re.fullmatch(r"[0-9]+( [-+*] [0-9]+)+", text)
        # the text is digits and + - *, as the line above shows
        assert eval(text) == int(row["answer"])
        assert row["difficulty"] == difficulty
        assert len(re.findall("[0-9]+", text)) == level.terms
        assert text.count("*") == ("*" in level.operators)
    assert any("-" in text_of(row) for row in rows) == ("-" in level.operators)


def test_multiplication_comes_first():
    assert value_of([2, 3, 4], ["*", "+"]) == 10
    assert value_of([2, 3, 4], ["-", "*"]) == -10


def test_levels_take_turns_and_can_be_chosen():
    env = load_environment(num_train_examples=50, num_eval_examples=10)
    assert env.get_dataset()["difficulty"][:5] == [1, 2, 3, 4, 5]
    assert all(env.get_dataset()["difficulty"][:].count(level) == 10 for level in LEVELS)
    hard = load_environment(min_difficulty=4, num_train_examples=50)
    assert set(hard.get_dataset()["difficulty"]) == {4, 5}


def test_no_sum_is_asked_twice_and_none_in_both_sets():
    env = load_environment()
    train, held_out = env.get_dataset()["question"][:], env.get_eval_dataset()["question"][:]
    assert (len(train), len(held_out)) == (1000, 100)
    assert len({*train, *held_out}) == 1100


def test_solved_sums_are_shown_before_the_question_and_are_never_rows():
    def questions(num_shots):
        env = load_environment(max_difficulty=1, num_train_examples=2000, num_shots=num_shots)
        return {prompt[-1]["content"] for prompt in env.get_dataset()["prompt"]}, env.get_dataset(
            1
        )["prompt"][0]

    (plain, _), (shown, prompt) = questions(0), questions(3)
    assert [message["role"] for message in prompt] == ["system", *["user", "assistant"] * 3, "user"]
    assert prompt[2]["content"] == "12 + 7 = 19 <answer>19</answer>"
    solved = {message["content"] for message in prompt[:-1]}
    assert not solved & shown
    assert solved & plain, "the plain sums do not hold the solved ones, so the test shows nothing"


def test_the_seed_chooses_the_sums_and_the_held_out_ones_do_not_move():
    def rows(seed, num_train=20):
        return load_environment(seed=seed, num_train_examples=num_train, num_eval_examples=20)

    assert rows(1).get_dataset()[:] == rows(1).get_dataset()[:]
    assert rows(1).get_dataset()[:] != rows(2).get_dataset()[:]
    assert rows(1).get_eval_dataset()["answer"][:] == rows(1, 500).get_eval_dataset()["answer"][:]


def test_the_difficulty_reaches_reward_functions_and_results():
    env = load_environment(num_train_examples=1, num_eval_examples=10)

    def seen(difficulty):
        return float(difficulty)

    env.rubric.add_metric(seen)
    results = env.evaluate(ScriptedClient(["<answer>0</answer>"]), "scripted")
    assert list(results["metrics"]["seen"]) == [1.0, 2.0, 3.0, 4.0, 5.0] * 2


# --- the reward -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("<answer>17</answer>", 1.0),
        ("3 + 14 = 17, so\n<answer>\n 17 \n</answer>", 1.0),
        ("<answer>+17</answer>", 1.0),
        ("<answer>5</answer> no, <answer>17</answer>", 1.0),
        ("<answer>17</answer> no, <answer>5</answer>", 0.0),
        ("<answer>18</answer>", 0.0),
        ("<answer>17.0</answer>", 0.0),
        ("<answer>16 or 17</answer>", 0.0),
        ("<answer>3 + 14</answer>", 0.0),
        ("<answer></answer>", 0.0),
        ("17", 0.0),
        ("", 0.0),
        (f"<answer>{'9' * 100_000}</answer>", 0.0),
    ],
)
def test_only_the_number_alone_in_the_tags_is_right(text, reward):
    state = reply(text)
    assert state["reward"] == state["metrics"]["correct_answer"] == reward
    assert state["error"] is None


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("1,024", 1024),
        ("12,345,678", 12345678),
        ("-7", -7),
        ("−7", -7),
        ("1,02", None),
        ("1 024", None),
        ("**42**", 42),
        ("$42$", 42),
        (r"\boxed{42}", 42),
        ("42.", 42),
        ("-42.00", None),
        ("4.2", None),
        ("4 2", None),
        ("**4 or 2**", None),
        ("٣", None),
    ],
)
def test_a_number_may_be_written_with_commas_and_a_dash(text, number):
    assert read_number(text) == number


def test_the_format_is_a_metric():
    assert reply("<answer>1</answer>")["metrics"]["format_reward"] == 1.0
    assert reply("17")["metrics"]["format_reward"] == 0.0


def test_an_oracle_earns_one():
    env = load_environment(num_train_examples=1, num_eval_examples=50)
    answers = {
        row["question"]: f"<answer>{row['answer']}</answer>" for row in env.get_eval_dataset()
    }
    assert list(env.evaluate(ScriptedClient(answers), "scripted")["reward"]) == [1.0] * 50


# --- the environment ------------------------------------------------------------------------------


def test_it_loads_by_its_id_and_is_clean():
    env = vf.load_environment("curriculum-sums", max_difficulty=2)
    assert isinstance(env, vf.SingleTurnEnv)
    assert load_environment(system_prompt="").system_prompt is None
    report = vf.check_environment("curriculum-sums")
    assert report.ok, report
    assert not report.warnings, report


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"min_difficulty": 0}, "min_difficulty"),
        ({"max_difficulty": 6}, "max_difficulty=6 is above 5"),
        ({"min_difficulty": 3, "max_difficulty": 2}, "min_difficulty=3 is above max_difficulty=2"),
        (
            {"max_difficulty": 1, "num_train_examples": 5000},
            "difficulty 1 has too few different sums",
        ),
        ({"num_train_examples": 0}, "num_train_examples"),
        ({"num_eval_examples": "1"}, "num_eval_examples"),
        ({"seed": None}, "seed"),
        ({"num_shots": 4}, "num_shots=4 is above 3"),
    ],
)
def test_an_argument_that_cannot_be_used_is_named(arguments, message):
    with pytest.raises(vf.ConfigError, match=message):
        load_environment(**arguments)
