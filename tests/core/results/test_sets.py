"""Sets of runs: their pairs, and how often equal and worse nights are called worse."""

import math

import numpy as np
import pytest

from verifiers.errors import ConfigError
from verifiers.results.comparison import Measured, holm
from verifiers.results.sets import compare_sets, pair_runs


def run(name, rewards=((1.0,),), env_id="sums", model="m", **config):
    more = {key: config.pop(key) for key in ("status", "stopped") if key in config}
    return Measured(name, env_id, {"reward": dict(enumerate(rewards))}, model, config, **more)


def names(pairs):
    return [(baseline.name, partner.name) for baseline, partner in pairs]


def worse(comparison):
    return [d.run for d in comparison.differences if d.verdict == "worse"]


def night(name, chances, rng, siblings=4):
    """A run of each row of ``chances`` [runs, examples]: whether each rollout is right."""
    return [
        run(f"{name}/{index}", rng.binomial(1, row[:, None], (len(row), siblings)).astype(float))
        for index, row in enumerate(chances)
    ]


def environments(runs):
    return [
        Measured(
            r.name, f"env-{index}", {"reward": {k: list(v) for k, v in r.values["reward"].items()}}
        )
        for index, r in enumerate(runs)
    ]


# --- pairs ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("env_id", "words"),
        ("model", "n"),
        ("env_args", {"num_rows": 7}),
        ("sampling_args", {"temperature": 1.0}),
    ],
)
def test_a_partner_has_the_same_environment_arguments_model_and_sampling(setting, value):
    before = [run("a/1"), run("a/2", **{setting: value})]
    after = [run("b/1", **{setting: value}), run("b/2")]
    assert names(pair_runs(before, after)) == [("a/1", "b/2"), ("a/2", "b/1")]


def test_several_runs_of_the_same_settings_prefer_the_same_configuration():
    before = [run("a/1", seed=1), run("a/2", seed=2), run("a/3", seed=3)]
    after = [run("b/1", seed=4), run("b/2", seed=2)]
    assert names(pair_runs(before, after)) == [("a/1", "b/1"), ("a/2", "b/2")]


def test_whole_numbers_are_equal_as_integer_and_float():
    before, after = run("a", sampling_args={"top_p": 1}), run("b", sampling_args={"top_p": 1.0})
    assert names(pair_runs([before], [after])) == [("a", "b")]


def test_runs_without_a_partner_are_named_and_do_not_change_the_others():
    before, after = [run("a/1"), run("a/2", model="old")], [run("b/1"), run("b/2", model="new")]
    comparison = compare_sets(before, after)
    assert [d.run for d in comparison.differences] == ["b/1"]
    assert comparison.to_dict()["without_partner"] == [["a/2"], ["b/2"]]
    text = str(comparison)
    assert "without a partner in the second set:\n  sums · old · a/2" in text
    assert "without a partner in the first set:\n  sums · new · b/2" in text


def test_sets_without_a_pair_are_refused_with_an_example_of_each():
    with pytest.raises(ConfigError, match="sums · old is in the first, sums · new in the second"):
        compare_sets([run("a", model="old")], [run("b", model="new")])


# --- how often ------------------------------------------------------------------------------------


def test_a_copy_of_a_night_is_never_worse_nor_refused():
    rng = np.random.default_rng(0)
    stopped = {"against": "x", "low": -1.0, "high": -0.5, "is_decided": True}
    for metrics in (["reward"], ["reward", "exact"]):
        before = environments(night("a", rng.beta(3, 1, (20, 30)), rng))
        before += [
            run("a/stopped", [[0.0], [1.0]], stopped=stopped),
            run("a/unknown", [[math.nan], [math.nan]], env_id="unknown"),
            run("a/empty", [], env_id="empty"),
        ]
        before[0].values["exact"] = before[0].values["reward"]
        comparison = compare_sets(before, before, metrics, one_sided=True)
        assert (worse(comparison), comparison.refused) == ([], ())
        assert {d.p_adjusted for d in comparison.differences if d.num_examples} == {1.0}


def test_the_run_that_a_rule_ended_is_refused_unless_it_is_a_copy():
    stopped = {"against": "x", "low": -1.0, "high": -0.5, "is_decided": True}
    before = [run("a", [[0.0], [1.0]], stopped=stopped)]
    assert compare_sets(before, [run("b", [[1.0], [1.0]], stopped=stopped)]).refused


def test_a_lower_run_of_three_standard_errors_among_copies_is_found():
    """Its rollouts are drawn again, 3 standard errors of the difference lower: 88% are found. The
    copies cannot be worse, and so do not count in the adjustment."""
    found = 0
    for seed in range(100):
        rng = np.random.default_rng(seed)
        chances = rng.beta(3, 1, (6, 100))
        before = environments(night("a", chances, rng))
        stderr = math.sqrt(2 * (chances[5] * (1 - chances[5])).mean() / 4 / 100)
        lower = chances[5] * (1 - 3 * stderr / chances[5].mean())
        after = [*before[:5], environments(night("b", [*chances[:5], lower], rng))[5]]
        is_worse = worse(compare_sets(before, after, one_sided=True))
        assert is_worse in ([], ["b/5"])
        found += is_worse == ["b/5"]
    assert found >= 80


def test_nights_of_equal_models_are_told_apart_at_most_five_times_in_a_hundred():
    """Negative control: without the adjustment a fifth of the nights of six runs has a verdict."""
    adjusted = unadjusted = 0
    for seed in range(100):
        rng = np.random.default_rng(seed)
        chances = rng.beta(3, 1, (6, 40))
        before, after = (environments(night(name, chances, rng)) for name in "ab")
        comparison = compare_sets(before, after, one_sided=True)
        adjusted += bool(worse(comparison))
        unadjusted += any(d.p < 0.05 for d in comparison.differences)
    assert adjusted <= 8  # 5 expected
    assert unadjusted >= 15


def test_a_test_that_cannot_give_so_small_a_p_does_not_count_for_it():
    assert holm([0.01, 1.0, 0.5], [0.0, 1.0, 0.25]) == [0.01, 1.0, 0.5]
    assert holm([0.3, 0.01], [0.3, 0.0]) == [0.3, 0.01]
    assert holm([0.3, 0.01], [0.01, 0.0]) == [0.3, 0.02]


def test_one_sided_is_half_of_the_p_of_a_lower_run_and_no_verdict_for_a_higher_one():
    low, high = [[0.0]] * 6, [[1.0]] * 6
    (lower,) = compare_sets([run("a", high)], [run("b", low)], one_sided=True).differences
    assert (lower.test, lower.p, lower.verdict) == (
        "McNemar, exact, one-sided",
        pytest.approx(1 / 2**6),
        "worse",
    )
    (higher,) = compare_sets([run("a", low)], [run("b", high)], one_sided=True).differences
    assert (higher.verdict, higher.sentence()) == (
        "not distinguishable",
        "not worse with 6 examples",
    )
    (both,) = compare_sets([run("a", low)], [run("b", high)]).differences
    assert (both.verdict, both.p) == ("better", pytest.approx(2 / 2**6))
