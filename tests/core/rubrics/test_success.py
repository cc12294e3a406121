"""The success metric: which function says whether the task was solved, and what a run
counts by it."""

import math

import pytest

import verifiers as vf
from verifiers.errors import ConfigError, ScoringError
from verifiers.testing import ScriptedClient


def similarity(completion, answer):
    return len(set(completion[-1].content) & set(answer)) / len(set(answer))


def exact(completion, answer):
    return float(completion[-1].content == answer)


def evaluate(rubric, replies="tca", answer="cat"):
    env = vf.SingleTurnEnv(dataset=[{"question": "?", "answer": answer}], rubric=rubric)
    return env.evaluate(ScriptedClient(replies), "m", rollouts_per_example=2)


def test_the_named_function_is_counted_and_the_graded_reward_is_not():
    rubric = vf.Rubric([similarity], success="exact")
    rubric.add_metric(exact)
    results = evaluate(rubric, ["tca", "cat"])
    assert results.rewards == [1.0, 1.0]  # what a threshold of the reward would call solved
    assert results.metrics["success"] == [0.0, 1.0]
    assert (results.metadata.success_metric, results.metadata.avg_success) == ("exact", 0.5)
    assert results.metadata.pass_at_k == {"1": 0.5, "2": 1.0}


def test_without_a_name_a_graded_reward_has_no_success():
    results = evaluate(vf.Rubric([similarity]), ["ca", "cat"])
    assert "success" not in results.metrics
    assert results.metadata.pass_at_k == {}
    assert math.isnan(results.metadata.avg_success)


def test_a_subclass_names_it_as_a_class_attribute():
    class Strict(vf.Rubric):
        success = "exact"

        @vf.metric
        def exact(self, completion, answer):
            return exact(completion, answer)

        @vf.reward
        def partial(self, completion, answer):
            return similarity(completion, answer)

    assert evaluate(Strict()).metadata.success_metric == "exact"
    assert evaluate(Strict()).metadata.avg_success == 0.0


def test_a_reward_method_that_is_called_success_is_the_success_metric():
    class Older(vf.Rubric):
        @vf.reward
        def success(self, completion, answer):
            return exact(completion, answer)

    results = evaluate(Older(), ["cat", "tca"])
    assert (results.metadata.success_metric, results.metrics["success"]) == ("success", [1.0, 0.0])


def test_a_misspelt_name_is_refused_before_the_first_rollout():
    with pytest.raises(
        ConfigError,
        match=r"success='exacct' names no function of the rubric; did you mean 'exact'\?",
    ):
        evaluate(vf.Rubric([exact], success="exacct"))


def test_a_second_function_called_success_is_refused():
    def success(completion):
        return 1.0

    with pytest.raises(ConfigError, match="another function is named 'success'"):
        evaluate(vf.Rubric([exact, success], success="exact"))


def test_a_success_that_is_neither_0_nor_1_is_recorded_and_counted_as_unknown():
    results = evaluate(vf.Rubric([similarity], success="similarity"), ["ca", "cat"])
    assert results.errors[0]["error"] == ScoringError.__name__
    assert (
        "the success metric 'similarity' is 0.666667; it must be 0 or 1"
        in results.errors[0]["message"]
    )
    assert math.isnan(results.metrics["success"][0])
    assert results.metrics["success"][1] == 1.0


def test_the_name_can_be_set_and_changed_after_a_run():
    rubric = vf.Rubric([similarity])
    rubric.add_metric(exact)
    assert evaluate(rubric, ["ca"]).metadata.success_metric is None
    rubric.success = "exact"
    assert evaluate(rubric, ["ca"]).metadata.avg_success == 0.0
    group = vf.RubricGroup([vf.Rubric([similarity]), rubric])
    assert evaluate(group, ["cat"]).metadata.avg_success == 1.0
    rubric.success = None
    assert group.success_metric is None


def test_a_group_takes_the_first_childs_name_under_the_name_it_has_in_the_group():
    group = vf.RubricGroup([vf.Rubric([exact]), vf.Rubric([exact], success="exact")])
    assert group.success_metric == "exact_2"
    assert (
        vf.RubricGroup([vf.Rubric([exact, similarity])], success="exact").success_metric == "exact"
    )
    with pytest.raises(ConfigError, match="names no function"):
        evaluate(vf.RubricGroup([vf.Rubric([exact])], success="similarity"))


def test_members_of_an_env_group_keep_their_own_success():
    def half(completion):
        return 0.5

    first = vf.SingleTurnEnv(
        dataset=[{"question": "a", "answer": "cat"}],
        rubric=vf.Rubric([half, exact], success="exact"),
    )
    two = vf.SingleTurnEnv(dataset=[{"question": "b", "answer": "x"}], rubric=vf.Rubric([exact]))
    results = vf.EnvGroup([first, two]).evaluate(ScriptedClient("cat"), "m")
    assert results.metadata.avg_success == 0.5
    assert results.metadata.success_metric == "exact"
