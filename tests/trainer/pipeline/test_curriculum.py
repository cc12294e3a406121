"""What changes while a run goes on: difficulties, reward weights, and which
environment comes next."""

from __future__ import annotations

import itertools
import json
import math
import tomllib
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import verifiers as vf
from support.training import (
    StepLog,
    digits,
    metrics_of,
    rows,
    run,
    small_config,
    small_policy,
    small_trainer,
    toy_env,
)
from verifiers.errors import ConfigError
from verifiers_trainer.pipeline import rewards
from verifiers_trainer.pipeline.curriculum import (
    RewardWeights,
    difficulty_at,
    effective_weights,
    rows_of,
)
from verifiers_trainer.pipeline.mixture import MixtureSchedule, joined
from verifiers_trainer.policy.builtin_models import build_tiny_tokenizer
from verifiers_trainer.trainer import RLTrainer

CONFIG = Path(__file__).parents[3] / "configs" / "vf-train" / "curriculum-sums.toml"


def played(trainer, **options):
    """For every step the rows of its groups, by their question."""
    steps = []
    log = StepLog()
    log.on_step_end = lambda *_, **__: steps.append(
        [group.rollouts[0].text["prompt"][-1]["content"] for group in trainer.batch.groups]
    )
    trainer.add_callback(log)
    trainer.train(**options)
    return steps


def every_group_differs():
    """A reward that no two rollouts in a row share, so that no group is replaced."""
    count = itertools.count()

    def number(completion, **_):
        return float(next(count) % 7)

    return number


def levels_env(count=16, reward=None):
    """Half of the rows easy ("e…"), half hard ("h…")."""
    data = [
        {
            "question": f"{'e' if n % 2 else 'h'}{row['question']}{n}",
            "difficulty": 1 if n % 2 else 2,
        }
        for n, row in enumerate(rows(count))
    ]
    return vf.SingleTurnEnv(dataset=data, rubric=vf.Rubric(funcs=[reward or every_group_differs()]))


# --- difficulty -----------------------------------------------------------------------------------


def test_the_first_threshold_that_is_higher_decides():
    schedule = [(1.0, "easy"), (2.0, "medium"), (2.5, "hard")]
    difficulties = [difficulty_at(schedule, epochs) for epochs in (0, 0.99, 1, 1.99, 2, 2.5, 9)]
    assert difficulties == ["easy", "easy", "medium", "medium", "hard", "hard", "hard"]
    assert difficulty_at(None, 1) is None


def test_a_difficulty_is_a_value_a_list_or_a_function_and_a_missing_one_is_easy():
    data = [{"q": 1, "d": 1}, {"q": 2, "d": 2}, {"q": 3, "d": 3}, {"q": 4}]
    assert [row["q"] for row in rows_of(data, 2, "d")] == [2]
    assert [row["q"] for row in rows_of(data, [1, 3], "d")] == [1, 3]
    assert [row["q"] for row in rows_of(data, "easy", "d")] == [4]
    assert [row["q"] for row in rows_of(data, lambda row: row["q"] > 2, "d")] == [3, 4]
    assert [row["q"] for row in rows_of(data, 1, lambda row: row["q"] % 2)] == [1, 3]
    assert len(rows_of(data, None)) == 4
    with pytest.raises(
        ConfigError, match=r"no row has the difficulty 'hard' .*; available: 'easy', 1, 2, 3"
    ):
        rows_of(data, "hard", "d")
    with pytest.raises(ConfigError, match=r"difficulty_key 'no\.where:f' cannot be loaded"):
        rows_of(data, 1, "no.where:f")


def test_rows_follow_the_schedule(tmp_path):
    settings = {"max_steps": 16, "zero_variance": "keep", "max_off_policy_steps": 0}
    schedule = [(1.0, 1), (1.5, 2), (2.0, [1, 2])]
    trainer = small_trainer(tmp_path, levels_env(), difficulty_schedule=schedule, **settings)
    steps = played(trainer)
    assert trainer.num_steps_per_epoch == 8
    kinds = ["".join(sorted({question[0] for question in step})) for step in steps]
    assert set(kinds[:8]) == {"e"}
    assert set(kinds[8:12]) == {"h"}
    assert set("".join(kinds[12:])) == {"e", "h"}
    # negative control
    without = played(small_trainer(tmp_path / "without", levels_env(), **settings))
    assert {question[0] for step in without[:8] for question in step} == {"e", "h"}


def test_a_pass_over_a_difficulty_repeats_no_row(tmp_path):
    settings = {"max_steps": 4, "zero_variance": "keep", "max_off_policy_steps": 0}
    steps = played(
        small_trainer(tmp_path, levels_env(), difficulty_schedule=[(9.0, 1)], **settings)
    )
    questions = [question for step in steps for question in step]
    assert len(set(questions)) == len(questions) == 8


def test_a_resumed_curriculum_goes_on_where_it_was(tmp_path):
    settings = {
        "difficulty_schedule": [(0.5, 1), (1.0, 2)],
        "deterministic": True,
        "save_strategy": "steps",
        "save_steps": 3,
    }
    uninterrupted = run(
        small_trainer(tmp_path / "whole", levels_env(reward=digits), max_steps=6, **settings)
    )
    run(small_trainer(tmp_path / "parts", levels_env(reward=digits), max_steps=3, **settings))
    resumed = run(
        small_trainer(tmp_path / "parts", levels_env(reward=digits), max_steps=6, **settings),
        resume_from_checkpoint=True,
    )
    assert resumed.losses == uninterrupted.losses[3:]


def test_a_subclass_decides_the_difficulty(tmp_path):
    class Rising(RLTrainer):
        def get_current_difficulty(self, epoch, step):
            return 1 if step < 2 else 2

    settings = {"max_steps": 4, "zero_variance": "keep", "max_off_policy_steps": 0}
    trainer = Rising(
        small_policy(), levels_env(), small_config(tmp_path, **settings), build_tiny_tokenizer()
    )
    kinds = [{question[0] for question in step} for step in played(trainer)]
    assert kinds == [{"e"}, {"e"}, {"h"}, {"h"}]


def test_a_difficulty_that_no_row_has_is_found_before_the_first_step(tmp_path):
    trainer = small_trainer(tmp_path, levels_env(), difficulty_schedule=[(1.0, 1), (50.0, 7)])
    with pytest.raises(ConfigError, match="no row has the difficulty 7"):
        trainer.train()
    assert trainer.state.global_step == 0


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"difficulty_schedule": [(1, "a"), (1, "b")]}, "epochs 1, 1; they must rise"),
        ({"difficulty_schedule": ["easy"]}, "it must be pairs"),
        ({"difficulty_schedule": []}, "it must be pairs"),
        ({"reward_weights_schedule": {"first": [1]}}, "it must map epochs, or 'default'"),
        ({"env_weights": {"a": 0}}, "it must map names of environments to numbers above 0"),
        ({"env_weights": {"a": 1}, "difficulty_schedule": [(1, 1)]}, "give one of them"),
    ],
    ids=str,
)
def test_schedules_that_make_no_sense_are_refused(tmp_path, settings, said):
    with pytest.raises(ConfigError, match=said):
        small_trainer(tmp_path, **settings)


def test_the_example_trains_from_easy_to_hard(tmp_path):
    """The shipped file, with the tiny model and few steps in place of its own."""
    from verifiers_trainer.cli.plan import make_plan

    words = ["@", str(CONFIG), "--model", "builtin:tiny"]
    small = {
        "batch_size": 8,
        "rollouts_per_example": 4,
        "micro_batch_size": 4,
        "max_tokens": 8,
        "max_seq_len": 200,
    }
    small |= {"max_steps": 3, "zero_variance": "keep", "num_train_examples": 20}
    small |= {"inference": "embedded"}
    for name, value in small.items():
        words += [
            f"--{'env' if name == 'num_train_examples' else 'trainer'}.args.{name}",
            str(value),
        ]
    words += ["--trainer.args.difficulty_schedule", "[[0.1, 1], [0.2, 5]]"]
    words += ["--trainer.args.reward_weights_schedule", "{ default = [1.0] }"]
    plan = make_plan(words, output_dir=str(tmp_path))
    assert plan.config.difficulty_schedule == [[0.1, 1], [0.2, 5]]
    trainer = RLTrainer("builtin:tiny", plan.env, plan.config)
    plan.env.rubric = vf.Rubric(funcs=[every_group_differs()])
    steps = played(trainer)
    terms = [{question.count(" ") - 1 for question in step} for step in steps]
    assert terms[0] == {3}  # "What is 12 + 7?"
    assert terms[-1] == {7}  # "What is 640 - 25 * 7 + 318?"


# --- reward weights -------------------------------------------------------------------------------


def counted_env(calls, group=False):
    def first(completion, **_):
        calls.append("first")
        return digits(completion)

    def second(completion, **_):
        return len(completion[-1]["content"] or "") / 4

    rubric = vf.Rubric(funcs=[first, second], weights=[1.0, 0.0])
    if group:
        rubric = vf.RubricGroup(
            [vf.Rubric(funcs=[first]), vf.Rubric(funcs=[second])], weights=[1.0, 1.0]
        )
    return vf.SingleTurnEnv(dataset=rows(4), rubric=rubric)


@pytest.mark.parametrize("group", [False, True])
def test_weights_change_with_the_epoch_and_nothing_is_scored_again(tmp_path, group):
    calls = []
    schedule = {0: [1, 0], 1: [0, 2], "default": [0.5, 0.5]}
    settings = {"max_steps": 6, "zero_variance": "keep", "max_off_policy_steps": 0}
    env = counted_env(calls, group)
    trainer = small_trainer(tmp_path, env, reward_weights_schedule=schedule, **settings)
    log = run(trainer)
    assert trainer.num_steps_per_epoch == 2
    for number, step in enumerate(log.steps):
        weights = [(1, 0), (0, 2), (0.5, 0.5)][number // 2]
        expected = weights[0] * step["reward/first"] + weights[1] * step["reward/second"]
        assert step["reward/mean"] == pytest.approx(expected)
    assert len(calls) == 6 * 8
    assert env.rubric.get_group_weights() == ([1.0, 1.0] if group else [1.0])
    assert env.rubric.get_reward_weights()[:2] == ([1.0, 1.0] if group else [1.0, 0.0])


@pytest.mark.parametrize("kind", [vf.ToolCallError, vf.EnvironmentFault])
async def test_what_ended_by_the_models_doing_has_a_reward_by_the_same_rule_as_its_siblings(kind):
    """And what the environment ended keeps its unknown one."""
    env = counted_env([])
    states = [
        vf.State(prompt="?", completion=[vf.AssistantMessage("12")], example_id=0) for _ in range(2)
    ]
    states[1]["error"] = kind("no such tool")
    await env.rubric.score_group(states)

    RewardWeights(env, {0: [0, 2]}).decide(0, states)
    weighted = [state["reward"] for state in states]

    await rewards.decide(lambda completions: [7.0] * len(completions), states, {})
    hooked = [state["reward"] for state in states]
    if kind.scorable:
        assert (weighted, hooked) == ([1.0, 1.0], [7.0, 7.0])
    else:
        assert (weighted[0], hooked[0]) == (1.0, 7.0)
        assert math.isnan(weighted[1])
        assert math.isnan(hooked[1])


def test_weights_by_name_leave_the_others_as_they_are():
    rubric = counted_env([]).rubric
    assert effective_weights(rubric, {"second": 3}) == {"first": 1.0, "second": 3.0}
    assert effective_weights(rubric, [0, 2]) == {"second": 2.0}
    assert effective_weights(rubric, [2]) == {"first": 2.0}  # of those that count
    group = counted_env([], group=True).rubric
    assert effective_weights(group, [0, 2]) == {"second": 2.0}
    assert effective_weights(group, {"first": 4}) == {"first": 4.0, "second": 1.0}


def test_weights_that_fit_no_rubric_are_refused_before_the_first_step(tmp_path):
    env = counted_env([])
    with pytest.raises(
        ConfigError, match="the rubric has the functions first, second: give a weight for each"
    ):
        RewardWeights(env, {0: [1, 2, 3]})
    with pytest.raises(ConfigError, match="weights by their names"):
        small_trainer(tmp_path, env, reward_weights_schedule={"0": {"third": 1}}).train()


def test_a_hook_and_a_schedule_for_the_same_rewards_are_refused(tmp_path):
    class OwnTrainer(RLTrainer):
        def compute_rewards(self, completions, prompts):
            return [0.0] * len(completions)

    config = small_config(tmp_path, reward_weights_schedule={0: [1, 0]})
    with pytest.raises(ConfigError, match="compute_rewards and reward_weights_schedule both set"):
        OwnTrainer(small_policy(), counted_env([]), config, build_tiny_tokenizer()).train()


# --- several environments -------------------------------------------------------------------------


def named(name, count=12, **options):
    data = [{"question": f"{name}{row['question']}{n}"} for n, row in enumerate(rows(count))]
    return vf.SingleTurnEnv(dataset=data, rubric=vf.Rubric(funcs=[digits]), **options)


def pair():
    return vf.EnvGroup([named("a"), named("b", 40)], env_names=["a", "b"])


@given(st.lists(st.floats(0.05, 10), min_size=1, max_size=4), st.integers(1, 200))
def test_every_share_is_kept_to_one_group_at_every_moment(weights, count):
    names = [f"e{n}" for n in range(len(weights))]
    env = vf.EnvGroup([named(name, 3) for name in names], env_names=names)
    shares = dict(zip(names, weights, strict=True))
    schedule = MixtureSchedule(env, list(env.train_table), shares, seed=1, shuffle=True)
    begun = Counter()
    for index in range(count):
        begun[schedule.example(index).row["task"]] += 1
        for name, weight in shares.items():
            assert (
                abs(begun[name] - weight / sum(weights) * (index + 1)) <= len(weights) - 0.999 + 1
            )
    again = MixtureSchedule(env, list(env.train_table), shares, seed=1, shuffle=True)
    backwards = [again.example(index).example_id for index in reversed(range(count))]
    # of the index alone
    assert backwards[::-1] == [schedule.example(index).example_id for index in range(count)]


def test_rows_of_each_environment_come_once_in_a_pass():
    env = pair()
    schedule = MixtureSchedule(env, list(env.train_table), {"a": 1, "b": 1}, seed=0, shuffle=True)
    drawn = [schedule.example(index).row for index in range(48)]
    of_a = [row["question"] for row in drawn if row["task"] == "a"]
    assert len(of_a) == 24
    assert len(set(of_a[:12])) == 12
    assert of_a[:12] != of_a[12:]
    assert {schedule.seed_of(index) for index in range(24)} == {0}
    assert len({schedule.seed_of(index) for index in range(48)}) == 2


def test_shares_of_the_batches_follow_the_weights_and_are_logged(tmp_path):
    settings = {
        "batch_size": 16,
        "rollouts_per_example": 2,
        "max_steps": 3,
        "zero_variance": "keep",
        "max_off_policy_steps": 0,
    }
    run(small_trainer(tmp_path, pair(), env_weights={"a": 3, "b": 1}, **settings))
    lines = [row for row in metrics_of(tmp_path) if "loss" in row]
    assert [(row["env/a/share"], row["env/b/share"]) for row in lines] == [(0.75, 0.25)] * 3
    for row in lines:
        mean = 0.75 * row["env/a/reward"] + 0.25 * row["env/b/reward"]
        assert row["reward/mean"] == pytest.approx(mean)
        assert (row["env/a/errors"], row["env/b/errors"]) == (0, 0)
    # negative control: by their sizes, 12 of 52
    run(small_trainer(tmp_path / "without", pair(), **settings))
    share = np.mean(
        [row["env/a/share"] for row in metrics_of(tmp_path / "without") if "loss" in row]
    )
    assert share < 0.5


def test_one_environment_has_no_numbers_of_its_own(tmp_path):
    (step,) = run(small_trainer(tmp_path, max_steps=1)).steps
    assert not any(name.startswith("env/") for name in step)


def test_a_list_of_environments_is_a_group_of_them(tmp_path):
    trainer = RLTrainer(
        small_policy(), [named("a"), named("b")], small_config(tmp_path), build_tiny_tokenizer()
    )
    assert trainer.env.env_names == ["env_0", "env_1"]
    assert len(trainer.examples) == 24
    first = toy_env()
    assert joined([first]) is first
    assert joined([named("a"), named("b"), named("c")], ["x", "x", None]).env_names == [
        "x",
        "x-2",
        "env_2",
    ]


def test_weights_that_name_no_environment_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="env_weights names a, c, and the environments are: a, b"):
        small_trainer(tmp_path, pair(), env_weights={"a": 1, "c": 1}).train()
    with pytest.raises(ConfigError, match="none: this is one environment"):
        small_trainer(tmp_path, env_weights={"a": 1}).train()


def test_a_resumed_mixture_keeps_its_place_and_what_was_pending(tmp_path):
    settings = {
        "env_weights": {"a": 2, "b": 1},
        "deterministic": True,
        "save_strategy": "steps",
        "save_steps": 2,
    }
    uninterrupted = run(small_trainer(tmp_path / "whole", pair(), max_steps=5, **settings))
    run(small_trainer(tmp_path / "parts", pair(), max_steps=2, **settings))
    pending = (tmp_path / "parts" / "checkpoint-2" / "pending.jsonl").read_text().splitlines()
    assert {json.loads(line)["env"] for line in pending} <= {"a", "b"}
    resumed = run(
        small_trainer(tmp_path / "parts", pair(), max_steps=5, **settings),
        resume_from_checkpoint=True,
    )
    assert resumed.losses == uninterrupted.losses[2:]


MIXTURE = """
model = "builtin:tiny"
[[env]]
id = "reverse-text"
weight = 3
args = { unit = "word", min_chars = 3, max_chars = 4 }
[[env]]
id = "curriculum-sums"
name = "sums"
args = { num_train_examples = 20, max_difficulty = 1 }
[trainer.args]
rollouts_per_example = 2
batch_size = 16
micro_batch_size = 4
max_steps = 2
max_tokens = 6
max_seq_len = 200
zero_variance = "keep"
use_lora = false
report_to = "none"
inference = "embedded"
deterministic = true # a batch takes the groups in the order of the schedule, not those that finish first
"""


def vf_train(tmp_path, *words):
    from verifiers_trainer.cli.session import Session

    file = tmp_path / "mixture.toml"
    file.write_text(MIXTURE)
    return Session(("@", str(file), *words), output_dir=str(tmp_path / "run"), quiet=True)


def test_several_tables_of_a_file_are_a_mixture_by_their_weights(tmp_path, capsys):
    result = {}
    env = vf_train(tmp_path)
    env.dump_config = True
    assert env.run(result) == 0
    dumped = capsys.readouterr().out
    document = tomllib.loads(dumped)
    assert [(table["id"], table["name"]) for table in document["env"]] == [
        ("reverse-text", "reverse-text"),
        ("curriculum-sums", "sums"),
    ]
    assert document["trainer"]["args"]["env_weights"] == {"reverse-text": 3.0, "sums": 1.0}
    (tmp_path / "again.toml").write_text(dumped)

    from verifiers_trainer.cli.plan import make_plan

    plan = make_plan(["@", str(tmp_path / "again.toml")], output_dir=str(tmp_path / "again"))
    assert plan.env.env_names == ["reverse-text", "sums"]
    plan.env.env_map["reverse-text"].rubric = plan.env.env_map["sums"].rubric = vf.Rubric(
        funcs=[every_group_differs()]
    )
    trainer = RLTrainer(plan.settings.model, plan.env, plan.config)
    log = run(trainer)
    assert [(step["env/reverse-text/share"], step["env/sums/share"]) for step in log.steps] == [
        (0.75, 0.25)
    ] * 2


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ("weight = 0\nid = 'a'", r"weight in \[\[env\]\] number 2 must be a number above 0, not 0"),
        (
            "id = 'a'\nwieght = 2",
            r"unknown key 'wieght' in \[\[env\]\] number 2, did you mean \"weight\"",
        ),
        ("name = 'x'", "number 2 needs an id"),
        ("id = 'a'\nargs = 3", r"args in \[\[env\]\] number 2 must be a table, not 3"),
    ],
)
def test_a_wrong_table_is_named_with_its_number(tmp_path, table, said):
    from verifiers_trainer.cli.plan import make_plan

    file = tmp_path / "wrong.toml"
    file.write_text(f"model = 'builtin:tiny'\n[[env]]\nid = 'reverse-text'\n[[env]]\n{table}\n")
    with pytest.raises(ConfigError, match=said):
        make_plan(["@", str(file)])


def test_the_shipped_example_is_a_plan_as_it_is(tmp_path):
    from verifiers_trainer.cli.plan import make_plan

    plan = make_plan(["@", str(CONFIG)], output_dir=str(tmp_path))
    assert plan.config.difficulty_schedule[-1] == [2.0, [1, 2, 3, 4, 5]]
    assert plan.config.reward_weights_schedule == {
        "0": {"correct_answer": 1.0, "format_reward": 0.2}
    }
    RewardWeights(plan.env, plan.config.reward_weights_schedule)
