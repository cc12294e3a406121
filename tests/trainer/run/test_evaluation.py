"""Evaluations before, during and after training: same engine, fixed weights, results kept, failures
survived."""

import json
import math
from collections import Counter

import pytest

import verifiers as vf
from support.training import digits, metrics_of, rows, run, small_trainer, toy_env, weights_hash
from verifiers.errors import CheckpointError, TooManyFaults
from verifiers_trainer.policy import checkpoint_files
from verifiers_trainer.run.evaluation import run_rollouts


def saved_rows(folder):
    return [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]


def test_before_during_and_after_training(tmp_path):
    trainer = small_trainer(tmp_path, max_steps=2, eval_strategy="steps", eval_steps=1)
    before = trainer.evaluate()
    run(trainer)
    after = trainer.evaluate(num_examples=3)
    trainer.close()

    assert before.keys() == after.keys()
    assert {
        "eval_reward",
        "eval_reward_stderr",
        "eval_digits",
        "eval_num_unscored",
        "eval_truncated",
    } <= before.keys()
    assert 0 <= before["eval_reward"] <= 1
    lines = [row for row in metrics_of(tmp_path) if "eval_reward" in row]
    assert [row["step"] for row in lines] == [0, 1, 2, 2]
    assert {path.name for path in (tmp_path / "eval").iterdir()} == {
        "step-0",
        "step-1",
        "step-2",
        "step-2-2",
    }
    assert (
        len(saved_rows(tmp_path / "eval" / "step-0")),
        len(saved_rows(tmp_path / "eval" / "step-2-2")),
    ) == (8, 3)


def test_the_strategy_can_be_set_by_attribute_and_runs_at_the_start(tmp_path):
    trainer = small_trainer(
        tmp_path, max_steps=1, eval_on_start=True, eval_strategy="steps", eval_steps=5
    )
    run(trainer)
    assert [row["step"] for row in metrics_of(tmp_path) if "eval_reward" in row] == [0, 1]


def test_an_evaluation_changes_neither_weights_nor_the_run(tmp_path):
    settings = {"max_steps": 3, "deterministic": True}
    plain = small_trainer(tmp_path / "plain", **settings)
    watched = small_trainer(
        tmp_path / "watched", **settings, eval_strategy="steps", eval_steps=1, eval_num_examples=2
    )
    unwatched, evaluated = run(plain), run(watched)
    assert unwatched.losses == evaluated.losses
    assert weights_hash(plain.model) == weights_hash(watched.model)


def test_another_environment_and_its_own_sampling(tmp_path):
    eval_env = vf.SingleTurnEnv(
        dataset=rows(5), rubric=vf.Rubric(funcs=[lambda completion, **_: 0.25])
    )
    trainer = small_trainer(
        tmp_path,
        eval_env=eval_env,
        eval_rollouts_per_example=2,
        eval_sampling_args={"max_tokens": 1},
    )
    metrics = trainer.evaluate(num_examples=-1)
    trainer.close()
    assert metrics["eval_reward"] == 0.25
    stored = saved_rows(tmp_path / "eval" / "step-0")
    assert len(stored) == 10
    assert all(len(row["completion"][-1]["content"]) <= 20 for row in stored)
    assert metrics["eval_truncated"] > 0.5
    assert metrics["eval_tokens"] == 10
    # the reward is graded, and no success metric is named
    assert math.isnan(metrics["eval_pass_at_1"])


def test_rows_and_a_prefix_of_ones_own(tmp_path):
    trainer = small_trainer(tmp_path)
    metrics = trainer.evaluate([{"question": "a"}, {"question": "b"}], metric_key_prefix="probe")
    trainer.close()
    assert "probe_reward" in metrics
    assert len(saved_rows(tmp_path / "probe" / "step-0")) == 2


def test_unknown_rewards_are_counted_and_in_no_mean(tmp_path):
    def unknown_for_some(prompt, completion, **_):
        return None if len(prompt[-1]["content"]) == 2 else 0.5

    trainer = small_trainer(tmp_path, toy_env(unknown_for_some))
    metrics = trainer.evaluate()
    trainer.close()
    unknown = sum(len(row["question"]) == 2 for row in rows(8, seed=1))
    assert 0 < unknown < 8
    assert (metrics["eval_num_unscored"], metrics["eval_reward"]) == (unknown, 0.5)


def test_the_examples_behind_each_pass_at_k_are_counted(tmp_path):
    asked = Counter()

    def fails_once(prompt, completion, **_):
        question = prompt[-1]["content"]
        asked[question] += 1
        return None if len(question) == 2 and asked[question] == 1 else 1.0

    trainer = small_trainer(tmp_path, toy_env(fails_once), eval_rollouts_per_example=2)
    metrics = trainer.evaluate()
    trainer.close()
    num_short = len({row["question"] for row in rows(8, seed=1) if len(row["question"]) == 2})
    num_examples = len({row["question"] for row in rows(8, seed=1)})
    assert metrics["eval_pass_at_k_unknown"] == num_short
    assert metrics["eval_pass_at_1_examples"] == num_examples
    assert 0 < num_examples - metrics["eval_pass_at_2_examples"] <= num_short
    assert metrics["eval_pass_at_1"] == metrics["eval_pass_at_2"] == 1.0


class BrokenEvaluation(vf.SingleTurnEnv):
    def a_evaluate(self, *args, **options):
        raise TooManyFaults("the judge is down", cause="judge", count=9)


def test_an_evaluation_that_fails_is_reported_and_training_goes_on(tmp_path, caplog):
    broken = BrokenEvaluation(dataset=rows(4), rubric=vf.Rubric(funcs=[digits]))
    settings = {
        "eval_env": broken,
        "eval_strategy": "steps",
        "eval_steps": 1,
        "metric_for_best_model": "reward",
    }
    assert len(run(small_trainer(tmp_path, **settings)).steps) == 2
    assert "the evaluation at step 1 failed; training continues: the judge is down" in caplog.text

    with pytest.raises(TooManyFaults, match="the judge is down"):
        run(small_trainer(tmp_path, **settings, eval_required=True))


def test_the_best_checkpoint_is_kept_and_loaded_at_the_end(tmp_path):
    scores = iter([0.9, 0.1, 0.1, 0.1])
    scored = {}

    def falling(state, **_):
        return scored["now"]

    trainer = small_trainer(
        tmp_path,
        eval_env=vf.SingleTurnEnv(dataset=rows(2), rubric=vf.Rubric(funcs=[falling])),
        max_steps=4,
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=1,
        save_total_limit=2,
        load_best_model_at_end=True,
        metric_for_best_model="reward",
        greater_is_better=True,
        learning_rate=1e-2,
    )
    plain = trainer.evaluate
    hashes = []

    def evaluate(**options):
        scored["now"] = next(scores)
        hashes.append(weights_hash(trainer.model))
        return plain(**options)

    trainer.evaluate = evaluate
    run(trainer)

    assert [step for step, _ in checkpoint_files.steps_in(tmp_path)] == [4, 3, 1]
    assert weights_hash(trainer.model) == hashes[0] != hashes[-1]


def test_playing_leaves_nothing_open(tmp_path):
    with small_trainer(tmp_path) as trainer:
        results = run_rollouts(
            trainer.training_run, trainer.run_context(), inputs=[{"question": "a"}]
        )
        assert len(results) == 1
        assert not (tmp_path / "eval").exists()
    with pytest.raises(CheckpointError):
        trainer.train(resume_from_checkpoint=True)
