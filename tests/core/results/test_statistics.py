"""Statistics of rewards, against hand-made numbers and brute force."""

import itertools
import math
import statistics as standard

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verifiers.results.statistics import (
    clustered_stderr,
    mean,
    pass_all_k,
    pass_at_k,
    pass_rates,
    percentile,
)
from verifiers.rubrics.advantages import centered_advantages

NAN = math.nan


def test_unknown_values_are_in_no_mean():
    assert mean([1.0, NAN, 0.0, NAN]) == 0.5
    assert math.isnan(mean([NAN]))
    assert math.isnan(mean([]))


def test_with_one_rollout_per_example_the_error_is_the_usual_one():
    values = [0.0, 1.0, 1.0, 0.5]
    assert clustered_stderr(values, range(4)) == pytest.approx(standard.stdev(values) / 2)


def test_copies_inside_an_example_do_not_make_the_error_smaller():
    once = clustered_stderr([0.0, 1.0, 1.0], "abc")
    copied = clustered_stderr([0.0] * 8 + [1.0] * 16, ["a"] * 8 + ["b"] * 8 + ["c"] * 8)
    assert copied == pytest.approx(once)
    naive = standard.stdev([0.0] * 8 + [1.0] * 16) / math.sqrt(24)
    assert naive < 0.4 * once  # what ignoring the clusters would claim


def test_one_example_has_no_error_bar():
    assert math.isnan(clustered_stderr([0.0, 1.0], ["a", "a"]))


@given(st.integers(1, 8), st.data())
def test_pass_at_k_equals_counting_all_draws(n, data):
    correct = data.draw(st.integers(0, n))
    k = data.draw(st.integers(1, n))
    draws = list(itertools.combinations([1] * correct + [0] * (n - correct), k))
    assert pass_at_k(n, correct, k) == pytest.approx(sum(map(any, draws)) / len(draws))
    assert pass_all_k(n, correct, k) == pytest.approx(sum(map(all, draws)) / len(draws))


def test_pass_rates_leave_out_examples_with_an_unknown_reward():
    any_of, all_of = pass_rates([1, 0, 1, 1, 1, NAN], ["a", "a", "b", "b", "c", "c"], 2, 0.5)
    assert any_of == {"1": 0.75, "2": 1.0}
    assert all_of == {"1": 0.75, "2": 0.5}


def test_pass_rates_use_powers_of_two_up_to_n():
    any_of, _ = pass_rates([1.0] * 6, ["a"] * 6, 6, 0.5)
    assert list(any_of) == ["1", "2", "4"]


@pytest.mark.parametrize(("rewards", "n"), [([1.0], 1), ([NAN, 1.0], 2), ([], 4)])
def test_pass_rates_are_empty_without_a_complete_example(rewards, n):
    assert pass_rates(rewards, ["a"] * len(rewards), n, 0.5) == ({}, {})


def test_percentiles_interpolate():
    assert percentile([4, 1, 3, 2], 50) == 2.5
    assert percentile([1, 2, 3, NAN], 100) == 3
    assert math.isnan(percentile([], 95))


def test_advantages_are_centred_on_the_known_rewards():
    assert centered_advantages([1.0, 0.0]) == [0.5, -0.5]
    assert centered_advantages([0.7]) == [0.0]
    alone = centered_advantages([NAN, 0.7])
    assert math.isnan(alone[0])
    assert alone[1] == 0.0
