"""small-tasks: its rows, its exact reward, and what must not be paid."""

import functools
import re

import pytest

import verifiers as vf
from verifiers.testing import ScriptedClient, run_rollout_sync
from vf_small_tasks import TASKS, load_environment
from vf_small_tasks.tasks import CAPITALS, in_words


@functools.cache
def environment(task):
    """The environment of a task, for all tests that only run it: those of 100,000 rows take a third
    of a second."""
    return load_environment(task=task)


def rewards(task, reply, num_examples=20):
    """The rewards of a script: ``reply(row)`` of each of the first evaluation rows."""
    env = environment(task)
    rows = [env.eval_table[i].row for i in range(num_examples)]
    return [run_rollout_sync(env, ScriptedClient([reply(row)]), row)["reward"] for row in rows]


def reward(task, reply, answer):
    env = environment(task)
    row = {"prompt": [{"role": "user", "content": "?"}], "answer": answer, "task": task}
    return run_rollout_sync(env, ScriptedClient([reply]), row)["reward"]


@pytest.mark.parametrize("task", TASKS)
def test_the_answer_is_right_and_nothing_that_needs_no_thought_is(task):
    assert rewards(task, lambda row: row["answer"]) == [1.0] * 20
    answers = {row["answer"] for row in environment(task).get_dataset(30)}
    for reply in (
        lambda row: row["prompt"][-1]["content"],
        lambda row: row["prompt"][-2]["content"] if len(row["prompt"]) > 2 else "London",
        lambda row: f"{row['answer']} or {sorted(answers - {row['answer']})[0]}",
        lambda row: " ".join(sorted(answers | {row["answer"]})),
        lambda row: "",
    ):
        assert rewards(task, reply) == [0.0] * 20


@pytest.mark.parametrize(
    ("task", "reply", "answer", "expected"),
    [
        ("capitals", "It's PARIS, of course.", "Paris", 1.0),
        ("capitals", "Parisian life", "Paris", 0.0),
        ("capitals", "Not Rome but Paris.", "Paris", 0.0),
        (
            "json",
            '{"job": "pilot","age":52,"name":"Eve"}\n',
            '{"name": "Eve", "age": 52, "job": "pilot"}',
            1.0,
        ),
        (
            "json",
            '{"name": "Eve", "age": "52", "job": "pilot"}',
            '{"name": "Eve", "age": 52, "job": "pilot"}',
            0.0,
        ),
        ("json", 'Here: {"name": "Eve"}', '{"name": "Eve"}', 0.0),
        ("json", '```json\n{"name": "Eve"}\n```\n', '{"name": "Eve"}', 1.0),
        ("json", 'Here:\n```json\n{"name": "Eve"}\n```', '{"name": "Eve"}', 0.0),
        ("capitals", "It is Bogotá.", "Bogota", 1.0),
        ("capitals", "<think>Rome? No.</think>It is Paris.", "Paris", 1.0),
        ("capitals", "<think>Paris", "Paris", 0.0),
        ("names", "the last first</think>\nAdams, Tim", "Adams, Tim", 1.0),
        ("names", "<think>Adams, Tim</think>\nTim Adams", "Adams, Tim", 0.0),
        ("json", "[" * 100_000, '{"name": "Eve"}', 0.0),
        ("names", " Adams, Tim\n", "Adams, Tim", 1.0),
        ("names", "adams, tim", "Adams, Tim", 0.0),
        ("numbers", "342.", "342", 0.0),
    ],
)
def test_what_counts_as_right(task, reply, answer, expected):
    assert reward(task, reply, answer) == expected


def test_the_numbers_in_words_are_those_of_another_hand():
    assert [in_words(n) for n in (0, 11, 20, 21, 99, 100, 110, 342, 705, 999)] == [
        "zero", "eleven", "twenty", "twenty-one", "ninety-nine", "one hundred", "one hundred ten",
        "three hundred forty-two", "seven hundred five", "nine hundred ninety-nine",
    ]  # fmt: skip
    assert len({in_words(n) for n in range(1000)}) == 1000


ROWS = {
    "capitals": 58, "json": 109_440, "names": 2700, "numbers": 896, "calculator": 13_920, "stories": 107_616,
    "commands": 1397,
}  # fmt: skip


@pytest.mark.parametrize("task", TASKS)
def test_rows_are_distinct_and_no_solved_example_is_one(task):
    env = load_environment(task=task, num_train_examples=2000)
    questions = [
        prompt[-1]["content"]
        for data in (env.get_dataset(), env.get_eval_dataset())
        for prompt in data["prompt"]
    ]
    shown = {question for question, _ in TASKS[task].shots}
    assert len(questions) == len(set(questions)) == min(2100, ROWS[task])
    assert not shown & set(questions)
    assert len({question for question, _ in TASKS[task].pairs()} - shown) == ROWS[task]


def test_one_question_has_one_answer():
    for task in TASKS.values():
        pairs = task.pairs()
        assert len(dict(pairs)) == len(pairs)
    assert len(set(CAPITALS.values())) == len(CAPITALS) == 58


def test_all_takes_the_tasks_in_turn():
    env = load_environment(task="all", num_train_examples=14, num_eval_examples=14)
    assert env.get_dataset()["task"][:] == [*TASKS, *TASKS]
    assert len(env.get_eval_dataset()) == 14


def test_the_seed_chooses_the_rows_and_the_held_out_ones_do_not_move():
    def held_out(seed, num_train=20):
        return load_environment(
            task="names", seed=seed, num_train_examples=num_train
        ).get_eval_dataset()["answer"][:]

    assert held_out(1) == held_out(1, 500) != held_out(2)


@pytest.mark.parametrize("num_shots", [-1, 0, 2])
def test_the_solved_examples_stand_before_the_question(num_shots):
    (prompt,) = load_environment(task="numbers", num_shots=num_shots).get_dataset(1)["prompt"]
    expected = 4 if num_shots == -1 else num_shots
    assert [message["role"] for message in prompt] == [
        "system",
        *["user", "assistant"] * expected,
        "user",
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"task": "capital"}, "task is 'capital'"),
        (
            {"num_train_examples": 0},
            "num_train_examples must be a whole number of at least 1, not 0",
        ),
        (
            {"num_eval_examples": True},
            "num_eval_examples must be a whole number of at least 1, not True",
        ),
        (
            {"num_shots": -2},
            "num_shots must be a whole number of at least 0, or -1 for all, not -2",
        ),
    ],
)
def test_wrong_arguments_are_named(arguments, message):
    with pytest.raises(vf.ConfigError, match=re.escape(message)):
        load_environment(**arguments)


@pytest.mark.parametrize("seed", [0, 1])
def test_the_first_capitals_are_half_known_ones_in_an_order_of_the_seed(seed):
    rows = [example.row for example in load_environment(seed=seed).eval_table]
    first = [row["answer"] for row in rows[:8]]
    assert set(first) == TASKS["capitals"].first
    assert len({row["answer"] for row in rows}) == 29
    assert (
        first
        != [example.row["answer"] for example in load_environment(seed=seed + 1).eval_table][:8]
    )
