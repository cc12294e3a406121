"""gsm8k: its rows, its reward, its sources, and whole rollouts against a scripted model."""

import json
import subprocess
import sys
from importlib.util import find_spec

import pytest

import verifiers as vf
from verifiers.testing import ScriptedClient, make_state
from vf_gsm8k import load_environment
from vf_gsm8k.generator import generate_rows

NUM_STORIES = 37


def answers(env):
    """Question -> answer of every row of an environment."""
    return {
        row["prompt"][-1]["content"]: row["answer"] for row in [*env.dataset, *env.eval_dataset]
    }


# --- rows -----------------------------------------------------------------------------------------


def test_the_checker_finds_nothing_wrong():
    report = vf.check_environment("gsm8k")
    assert report.ok, str(report)


def test_defaults_are_a_thousand_and_a_hundred_different_problems_of_every_story():
    env = load_environment()
    train, held_out = env.get_dataset(), env.get_eval_dataset()
    assert (len(set(train["question"])), len(set(held_out["question"]))) == (1000, 100)
    assert not set(train["question"]) & set(held_out["question"])
    assert len({info["story"] for info in held_out["info"]}) == NUM_STORIES


def test_the_prompt_asks_for_a_box_and_the_solution_has_one():
    row = load_environment(num_train_examples=1).get_dataset()[0]
    assert [message["role"] for message in row["prompt"]] == ["system", "user"]
    assert "\\boxed{}" in row["prompt"][0]["content"]
    assert row["solution"].endswith(f"\\boxed{{{row['answer']}}}")


def test_rows_depend_on_the_seed_and_not_on_the_process():
    program = "from vf_gsm8k.generator import generate_rows; print(generate_rows(40, 3, True))"
    printed = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout
    assert printed.strip() == repr(generate_rows(40, 3, True))
    assert generate_rows(40, 3, True) != generate_rows(40, 4, True)


def test_the_eval_set_does_not_depend_on_the_size_of_the_training_set_and_grows_at_its_end():
    small, large = load_environment(10, 20), load_environment(500, 50)
    assert small.get_eval_dataset()["question"] == large.get_eval_dataset()["question"][:20]
    assert small.get_dataset()["question"] == large.get_dataset()["question"][:10]


# --- reward ---------------------------------------------------------------------------------------


REPLIES = [
    ("3 + 4 = 7, so \\boxed{7}", 1.0, 1.0),
    ("\\boxed{7.0}", 1.0, 1.0),
    ("\\boxed{\\$7}", 1.0, 1.0),
    ("\\boxed{7 \\text{ dollars}}", 1.0, 1.0),
    ("\\boxed{8}, no: \\boxed{7}", 1.0, 1.0),
    ("\\boxed{7}, no: \\boxed{8}", 0.0, 1.0),
    ("<think>\\boxed{7}</think> eight", 0.0, 0.0),
    ("7", 0.0, 0.0),
    ("#### 7", 0.0, 0.0),
    ("\\boxed{}", 0.0, 0.0),
    ("\\boxed{-7}", 0.0, 1.0),
    ("", 0.0, 0.0),
]
"""Reply, its reward, whether it has a box; the right answer is 7."""


async def test_rewards_of_replies():
    env = load_environment(num_train_examples=1, num_eval_examples=1)
    for reply, reward, boxed in REPLIES:
        completion = [{"role": "assistant", "content": reply}]
        result = await env.rubric.score_rollout(make_state([], completion, "7"))
        assert (result["reward"], result["metrics"]["correct_answer"]) == (reward, reward), reply
        assert result["metrics"]["format_reward"] == boxed, reply


def test_an_oracle_earns_one_on_every_row_and_a_neighbour_of_the_answer_nothing():
    env = load_environment(num_train_examples=74, num_eval_examples=74)
    right = answers(env)
    oracle = ScriptedClient(lambda request: f"So \\boxed{{{right[request.prompt[-1]['content']]}}}")
    assert list(env.evaluate(oracle, "scripted")["reward"]) == [1.0] * 74
    train = load_environment(num_train_examples=74)
    results = train.generate(list(train.dataset), oracle, "scripted")
    assert list(results["reward"]) == [1.0] * 74
    off = ScriptedClient(
        lambda request: f"So \\boxed{{{int(right[request.prompt[-1]['content']]) + 1}}}"
    )
    assert list(env.evaluate(off, "scripted")["reward"]) == [0.0] * 74


def test_the_shipped_solutions_earn_one():
    env = load_environment(num_eval_examples=40)
    solutions = {row["question"]: row["solution"] for row in env.eval_dataset}
    client = ScriptedClient(lambda request: solutions[request.prompt[-1]["content"]])
    assert list(env.evaluate(client, "scripted")["reward"]) == [1.0] * 40


def test_it_loads_by_its_id():
    env = vf.load_environment("gsm8k", num_train_examples=3, num_eval_examples=2)
    assert isinstance(env, vf.SingleTurnEnv)
    assert env.env_id == "gsm8k"


# --- arguments and sources ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_train_examples": 0}, "num_train_examples"),
        ({"num_eval_examples": -2}, "num_eval_examples"),
        ({"num_eval_examples": "5"}, "num_eval_examples"),
        ({"seed": 0.5}, "seed"),
        ({"seed": True}, "seed"),
        ({"dataset_name": "math"}, "dataset_name"),
    ],
)
def test_an_argument_that_cannot_be_used_is_named(arguments, message):
    with pytest.raises(vf.ConfigError, match=message):
        load_environment(**arguments)


def test_more_problems_than_there_are_is_an_error_and_not_a_short_set(monkeypatch):
    env = load_environment(num_train_examples=10)
    monkeypatch.setattr("vf_gsm8k.generator.STORIES", {"ratio": lambda draw: None})
    with pytest.raises(
        vf.DatasetError, match="num_train_examples=10 is more than can be generated"
    ):
        env.get_dataset()


@pytest.fixture
def no_network(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("no_network")
def test_without_a_network_the_published_set_names_the_offline_choice(monkeypatch):
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    env = load_environment(dataset_name="openai/gsm8k")  # nothing is read yet
    with pytest.raises(
        vf.DatasetError, match="leave dataset_name out: gsm8k then generates its problems"
    ):
        env.get_dataset()


@pytest.mark.usefixtures("no_network")
@pytest.mark.parametrize("name", ["openai/gsm8k", "gsm8k"])
def test_the_published_set_is_read_from_both_splits(tmp_path, name):
    """A folder of the dataset's name stands for the hub: the loader reads both alike."""
    folder = tmp_path / "openai/gsm8k"
    folder.mkdir(parents=True)
    for split, number in (("train", 30), ("test", 12)):
        rows = [
            {"question": f"{split} {i}?", "answer": f"1 + 1\n#### {1000 + i:,}"}
            for i in range(number)
        ]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "README.md").write_text(
        "---\nconfigs:\n- config_name: main\n  data_files:\n"
        "  - {split: train, path: train.jsonl}\n  - {split: test, path: test.jsonl}\n---\n"
    )
    everything = load_environment(dataset_name=name)
    assert (len(everything.get_dataset()), len(everything.get_eval_dataset())) == (30, 12)
    assert everything.get_eval_dataset()[3]["answer"] == "1003"
    some = load_environment(dataset_name=name, num_train_examples=5, num_eval_examples=4)
    assert (len(some.get_dataset()), len(some.get_eval_dataset())) == (5, 4)
    assert all(question.startswith("test") for question in some.get_eval_dataset()["question"])


@pytest.mark.skipif(
    find_spec("reasoning_gym") is None, reason="reasoning-gym is not installed (extra offline)"
)
def test_gsm_symbolic_gives_different_questions_whose_answers_earn_one():
    env = load_environment(dataset_name="gsm_symbolic", num_train_examples=30, num_eval_examples=12)
    right = answers(env)
    assert len(right) == 42
    assert not any("Give the result" in question for question in right)
    oracle = ScriptedClient(lambda request: f"\\boxed{{{right[request.prompt[-1]['content']]}}}")
    assert list(env.evaluate(oracle, "scripted")["reward"]) == [1.0] * 12


@pytest.mark.skipif(find_spec("reasoning_gym") is not None, reason="reasoning-gym is installed")
def test_gsm_symbolic_without_its_extra_names_it():
    with pytest.raises(vf.ConfigError, match=r"vf-gsm8k\[offline\]"):
        load_environment(dataset_name="gsm_symbolic")
