"""What is said of a reward that is paid without solving the task, and when."""

import json
import math
import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import verifiers as vf
from support.training import metrics_of, rows, small_trainer
from verifiers.checks.audit.recognition import Recogniser
from verifiers.errors import RewardHacked
from verifiers.rollouts.rollout import Rollout
from verifiers.rollouts.status import Status
from verifiers_trainer.algorithm.batch import Group
from verifiers_trainer.policy.checkpoint_files import MANIFEST
from verifiers_trainer.run.metrics_files import COMPLETIONS
from verifiers_trainer.run.plot import draw_learning_curve
from verifiers_trainer.run.reward_signs import (
    flatness,
    numbers_of,
    paid_share,
    signs_of,
    solution_reward,
    within_groups,
)
from verifiers_trainer.run.reward_watch import BEHAVIOURS, SHORT, WINDOW, RewardWatch

# --- when: the watch ------------------------------------------------------------------------------


def alarmed(**columns):
    """The alarms of a run whose metrics are these columns."""
    watch, names = RewardWatch(), set()
    for values in zip(*columns.values(), strict=True):
        names |= watch.add(dict(zip(columns, values, strict=True))).keys()
    return names


def noisy(start, end, steps=4 * WINDOW, seed=0, noise=0.05):
    rng = random.Random(seed)
    return [start + (end - start) * step / steps + rng.gauss(0, noise) for step in range(steps)]


def drift(reward, success, seed=0):
    columns = {
        "reward/mean": noisy(*reward, seed=seed),
        "reward/success": noisy(*success, seed=seed + 50),
    }
    return alarmed(**columns)


def test_a_rising_reward_with_a_falling_success_is_an_alarm():
    assert drift((0.2, 0.9), (0.6, 0.1)) == {"success"}


@pytest.mark.parametrize(
    ("reward", "success"),
    [((0.2, 0.9), (0.1, 0.6)), ((0.5, 0.5), (0.5, 0.5)), ((0.9, 0.2), (0.6, 0.1))],
)
def test_reward_and_success_that_move_together_are_none(reward, success):
    assert not any(drift(reward, success, seed) for seed in range(20))


def test_steps_without_a_known_metric_are_not_watched():
    assert not alarmed(**{"reward/mean": [step / 100 for step in range(100)]})
    unknown = {
        "reward/mean": [0.5] * 100,
        "reward/success": [None] * 100,
        "hacking/copied": [math.nan] * 100,
    }
    assert not alarmed(**unknown)


STEPS = 24
RISES, FALLS, HALF = noisy(0.0, 1.0, STEPS), noisy(1.0, 0.0, STEPS), noisy(0.5, 0.5, STEPS)
SHOWN = {
    "hacking_cheap_replies": {"hacking/cheap_replies": RISES},
    "hacking_copied": {"hacking/copied": RISES},
    "hacking_grading": {"hacking/grading": RISES},
    "hacking_same_reply": {"hacking/same_reply": RISES},
    "hacking_cheap_probability": {
        "hacking/cheap_probability": [10.0 ** (-6 + n / 5) for n in range(STEPS)],
        "hacking/right_probability": [0.1] * STEPS,
    },
    "hacking_unsolved": {"hacking/unsolved": RISES, "reward/mean": RISES, "reward/success": FALLS},
    "hacking_length": {
        "hacking/length": noisy(0.8, 0.9, STEPS), "tokens/completion": [100 + 20 * n for n in range(STEPS)],
        "hacking/right": HALF, "reward/mean": RISES,
    },
    "hacking_format": {
        "hacking/format": noisy(0.9, 1.0, STEPS, noise=0.01), "reward/success": FALLS, "reward/mean": RISES,
    },
    "hacking_flat": {"hacking/flat": [0.3] * 12 + [0.0] * 12, "hacking/right": [0.1] * STEPS},
}  # fmt: skip
SOUND = {
    "hacking_cheap_replies": {"hacking/cheap_replies": noisy(0.05, 0.0, STEPS, noise=0.01)},
    "hacking_copied": {"hacking/copied": [0.0] * STEPS},
    "hacking_grading": {"hacking/grading": noisy(0.1, 0.1, STEPS, noise=0.01)},
    "hacking_same_reply": {"hacking/same_reply": noisy(0.2, 0.0, STEPS, noise=0.01)},
    "hacking_cheap_probability": {
        "hacking/cheap_probability": [10.0 ** (-6 + n / 5) for n in range(STEPS)],
        "hacking/right_probability": [10.0 ** (-6 + n / 5) for n in range(STEPS)],  # the format
    },
    "hacking_unsolved": {"hacking/unsolved": FALLS, "reward/mean": RISES, "reward/success": RISES},
    "hacking_length": {
        "hacking/length": noisy(0.8, 0.9, STEPS), "tokens/completion": [100 + 20 * n for n in range(STEPS)],
        "hacking/right": RISES, "reward/mean": RISES,
    },
    "hacking_format": {
        "hacking/format": noisy(0.2, 0.3, STEPS, noise=0.01), "reward/success": RISES, "reward/mean": RISES,
    },
    "hacking_flat": {"hacking/flat": [0.3] * 12 + [0.0] * 12, "hacking/right": [0.1] * 12 + [1.0] * 12},
}  # fmt: skip


@pytest.mark.parametrize("name", SHOWN)
def test_each_behaviour_is_an_alarm_where_it_is_shown_and_its_like_is_none(name):
    assert name in alarmed(**SHOWN[name])
    assert not alarmed(**SOUND[name]), "negative control"


def test_each_behaviour_of_the_table_is_tried():
    assert {*SHOWN, "success"} == {behaviour.alarm for behaviour in BEHAVIOURS}


def test_a_resumed_run_says_what_the_whole_run_says():
    columns = SHOWN["hacking_unsolved"]
    lines = [
        dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)
    ]
    whole, resumed = RewardWatch(), RewardWatch()
    said = [whole.add(line) for line in lines]
    for line in lines[:15]:
        resumed.add(line)
    assert [resumed.add(line) for line in lines[15:]] == said[15:]
    assert RewardWatch().add(lines[15]) == {}, (
        "negative control: nothing is known of the steps before"
    )


# --- what: the rollouts ---------------------------------------------------------------------------

floats = st.floats(-5, 5) | st.just(math.nan)


@given(st.lists(st.tuples(floats, st.booleans()), min_size=1, max_size=30))
@settings(deadline=None)
def test_a_share_is_between_0_and_1_and_the_shares_of_a_mask_and_its_rest_add_up(pairs):
    rewards, mask = np.array([r for r, _ in pairs]), np.array([m for _, m in pairs])
    share, others = paid_share(rewards, mask), paid_share(rewards, ~mask)
    if not (rewards > 0).any():
        assert math.isnan(share)
        return
    assert 0 <= share <= 1
    assert share + others == pytest.approx(1)
    assert paid_share(rewards[::-1], mask[::-1]) == pytest.approx(share)
    assert paid_share(rewards * 7, mask) == pytest.approx(share)


@given(st.integers(0, 10**6))
@settings(deadline=None, max_examples=30)
def test_a_correlation_within_groups_knows_nothing_of_their_means(seed):
    rng = np.random.default_rng(seed)
    x, y, group = rng.normal(size=24), rng.normal(size=24), np.repeat(np.arange(4), 6)
    moved = y + 10 * rng.normal(size=4)[group]
    assert within_groups(x, moved, group) == pytest.approx(within_groups(x, y, group))
    assert abs(within_groups(x, y, group)) <= 1 + 1e-9
    assert within_groups(x, 3 * x + moved * 0, group) == pytest.approx(1)
    assert math.isnan(within_groups(x, np.ones(24), group))


def test_functions_that_tell_nothing_apart_are_flat_unless_one_does():
    same, apart = np.ones(6), np.array([0, 1, 0, 1, 0, 1.0])
    assert flatness({"a": same, "b": 2 * same}) == 0
    assert flatness({"a": same, "b": apart}) == 0.5
    assert math.isnan(flatness({"a": np.zeros(6), "b": np.full(6, math.nan)}))


def spoken(*texts, rewards, index=0, metrics=None, answer="raep"):
    """A group of replies to "pear"."""
    row = {"prompt": [{"role": "user", "content": "pear"}], "answer": answer, "example_id": index}
    rollouts = [
        Rollout(
            (), reward, dict(metrics or {}), Status("stop"), row,
            [{"role": "assistant", "content": text}],
        )
        for text, reward in zip(texts, rewards, strict=True)
    ]  # fmt: skip
    return Group(index, index, tuple(rollouts), weights={"right": 1.0})


def signs(*groups):
    env = vf.SingleTurnEnv(
        dataset=[{"question": "pear", "answer": "raep"}, {"question": "fig", "answer": "gif"}],
        rubric=vf.Rubric(),
    )
    recogniser = Recogniser(env, list(env.train_table))
    example = env.train_table[0]
    return signs_of(groups, lambda row: recogniser, lambda group: example)


def test_only_what_is_paid_and_wrong_is_a_sign():
    read = signs(spoken("raep", "pear", "", "sys.exit(0)", rewards=[1.0, 1.0, 0.0, 1.0]))
    shown = {name: mask.tolist() for name, mask in read.masks(1.0).items()}
    assert shown["hacking/copied"] == [False, True, False, False]
    assert shown["hacking/cheap_replies"] == [False, True, False, False], (
        "the empty reply was not paid"
    )
    assert shown["hacking/grading"] == [False, False, False, True]
    numbers = numbers_of(read, 1.0)
    assert numbers["hacking/copied"] == numbers["hacking/grading"] == pytest.approx(1 / 3)
    assert numbers["hacking/right"] == 0.25
    assert numbers_of(read, 5.0)["hacking/copied"] == 0, "little beside what a solution earns"


def test_early_in_a_graded_run_the_best_reward_is_not_that_of_a_solution():
    groups = [spoken("pear", "lime", rewards=[0.4, 0.1])]
    assert solution_reward(groups, 0.4) == 1
    assert solution_reward(groups, 3.0) == 3
    assert numbers_of(signs(*groups), solution_reward(groups, 0.4))["hacking/copied"] == 0
    assert numbers_of(signs(*groups), 0.4)["hacking/copied"] == 0.8, "negative control"


def test_one_reply_to_several_examples_is_the_same_reply():
    groups = [spoken("plum", "kiwi" * (1 + n), rewards=[1.0, 0.0], index=n) for n in range(3)]
    assert numbers_of(signs(*groups), 1.0)["hacking/same_reply"] == 1
    assert numbers_of(signs(*groups[:2]), 1.0)["hacking/same_reply"] == 0, "two are a chance"
    right = [spoken("raep", rewards=[1.0], index=n) for n in range(3)]
    assert numbers_of(signs(*right), 1.0)["hacking/same_reply"] == 0, "it is right each time"


def test_a_failed_rollout_shows_nothing():
    group = spoken("pear", "pear", rewards=[1.0, 1.0])
    failed = replace(group.rollouts[1], reward=math.nan, completion=None)
    read = signs(replace(group, rollouts=(group.rollouts[0], failed)))
    assert read.masks(1.0)["hacking/copied"].tolist() == [True, False]


# --- in a training --------------------------------------------------------------------------------


def unread_env():
    """The answer is asked for in tags, which no reply of a random model has; small letters pay."""

    def letters(completion):
        return float(any(letter.islower() for letter in completion[-1]["content"] or ""))

    parser = vf.XMLParser(["answer"])
    dataset = [{**row, "answer": "17"} for row in rows()]
    return vf.SingleTurnEnv(
        dataset=dataset, parser=parser, rubric=vf.Rubric([letters], parser=parser)
    )


def test_a_training_stops_at_a_hacked_reward_with_its_last_step_saved(tmp_path):
    stops = small_trainer(
        tmp_path, unread_env(), max_steps=9, on_reward_hacking="stop", log_completions=True
    )
    with pytest.raises(RewardHacked, match=r"cheap.*Training stops") as raised:
        stops.train()
    assert raised.value.behaviour == "hacking_cheap_replies"
    lines = metrics_of(tmp_path)
    assert lines[-1]["step"] == SHORT
    assert lines[-1]["alarm/hacking_cheap_replies"] == 1
    assert (tmp_path / f"checkpoint-{SHORT}" / MANIFEST).is_file()
    path = tmp_path / COMPLETIONS / f"step-{SHORT}.jsonl"
    rollouts = [json.loads(line) for line in path.read_text().splitlines()]
    paid = [rollout for rollout in rollouts if "hacking/cheap_replies" in rollout["metrics"]]
    assert paid
    assert all(rollout["reward"] > 0 for rollout in paid)
    goes_on = small_trainer(tmp_path, unread_env(), max_steps=SHORT + 1, on_reward_hacking="warn")
    goes_on.train(resume_from_checkpoint=True)
    assert metrics_of(tmp_path)[-1]["alarm/hacking_cheap_replies"] == 1, "the file says what was"


def test_a_training_that_ignores_it_measures_nothing(tmp_path):
    small_trainer(tmp_path, unread_env(), max_steps=SHORT, on_reward_hacking="ignore").train()
    assert not [name for line in metrics_of(tmp_path) for name in line if "hacking" in name]


def test_the_learning_curve_is_drawn_with_success_and_the_non_solution_line(tmp_path):
    lines = [
        {"step": n, "reward/mean": n / 9, "reward/success": n / 18, "reward/non_solution": 0.3}
        for n in range(10)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    draw_learning_curve(tmp_path / "metrics.jsonl", tmp_path / "with.svg", "run")
    picture = (tmp_path / "with.svg").read_text()
    assert "best non-solution" in picture
    assert "reward/success" in picture
    plain = [{"step": n, "reward/mean": n / 9} for n in range(10)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in plain))
    draw_learning_curve(tmp_path / "metrics.jsonl", tmp_path / "without.svg", "run")
    assert "best non-solution" not in (tmp_path / "without.svg").read_text()


def test_a_cheap_reply_that_was_paid_is_scored_under_the_policy(tmp_path):
    trainer = small_trainer(tmp_path, unread_env(), max_steps=9)
    trainer.train()
    lines = metrics_of(tmp_path)
    scored = [line["step"] for line in lines if "hacking/cheap_probability" in line]
    assert scored == [5, 9], "every four versions, from the first at which one was paid"
    assert all(
        0 <= line["hacking/right_probability"] <= 1 for line in lines if line["step"] in scored
    )
