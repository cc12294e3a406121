"""Statistics of rewards, against hand-made numbers and brute force."""

import itertools
import math
import random
import statistics as standard

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from verifiers.results.columns import Column
from verifiers.results.statistics import (
    PassRates,
    clustered_stderr,
    mean,
    pass_all_k,
    pass_at_k,
    pass_rates,
    percentile,
    share_interval,
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
    passed = pass_rates([1, 0, 1, 1, 1, NAN], ["a", "a", "b", "b", "c", "c"], 2)
    assert passed.any_of == {"1": 0.75, "2": 1.0}
    assert passed.all_of == {"1": 0.75, "2": 0.5}


@pytest.mark.parametrize(("n", "ks"), [(6, "1 2 4 6"), (8, "1 2 4 8"), (3, "1 2 3")])
def test_pass_rates_use_powers_of_two_and_n(n, ks):
    passed = pass_rates([1.0] * n, ["a"] * n, n)
    assert list(passed.any_of) == list(passed.all_of) == list(passed.any_of_interval) == ks.split()


@pytest.mark.parametrize(("alpha", "beta"), [(0.3, 0.9), (2, 6), (1, 30), (8, 1)])
@pytest.mark.parametrize("num_examples", [8, 40])
def test_the_interval_of_pass_at_k_holds_the_truth_in_at_least_93_of_100_evaluations(
    alpha, beta, num_examples
):
    draw = np.random.default_rng(7)
    n, k, covered = 8, 2, 0
    # 1 - E[(1 - p)^2] of a beta distribution
    truth = 1 - beta * (beta + 1) / ((alpha + beta) * (alpha + beta + 1))
    for _ in range(500):
        correct = draw.binomial(n, draw.beta(alpha, beta, num_examples))
        successes = np.concatenate([np.arange(n) < c for c in correct]).astype(float).tolist()
        examples = np.repeat(np.arange(num_examples), n).tolist()
        low, high = pass_rates(successes, examples, n).any_of_interval[str(k)]
        covered += low <= truth <= high
    assert covered / 500 >= 0.93


def test_a_normal_interval_would_not_hold_it():
    draw = np.random.default_rng(7)
    covered = 0
    for _ in range(500):
        rates = [pass_at_k(8, int(c), 2) for c in draw.binomial(8, draw.beta(1, 30, 8))]
        half = 1.96 * standard.stdev(rates) / math.sqrt(8)
        covered += abs(mean(rates) - (1 - 30 / 32)) <= half
    assert covered / 500 < 0.9


def test_the_interval_at_no_success_is_wilsons_with_students_quantile():
    low, high = share_interval([0.0] * 10)
    t = 2.262157  # of 9 degrees of freedom, from a table
    assert (low, high) == (0.0, pytest.approx(t * t / (10 + t * t), abs=1e-3))
    assert share_interval([1.0] * 10)[0] == pytest.approx(1 - high)


@pytest.mark.parametrize(("rewards", "n"), [([1.0], 1), ([NAN, 1.0], 2), ([], 4)])
def test_pass_rates_are_empty_without_a_complete_example(rewards, n):
    assert pass_rates(rewards, ["a"] * len(rewards), n) == PassRates()


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


@pytest.mark.parametrize("seed", range(10))
def test_statistics_of_columns_are_those_of_lists(seed):
    """To the last bit, where siblings are near, far or in part absent."""
    chance = random.Random(seed)
    size, num_examples = chance.choice([1, 2, 5]), chance.choice([1, 7, 60])
    example_numbers = [
        example for example in range(num_examples) for _ in range(size) if chance.random() < 0.9
    ]
    example_numbers.sort(key=lambda example: example + chance.random() * chance.choice([0, 5, 100]))
    successes, rewards = (
        [draw() for _ in example_numbers]
        for draw in (lambda: chance.choice([0.0, 1.0, NAN]), chance.random)
    )
    examples = np.array([2**40 * each - 7 for each in example_numbers])
    columns = Column("f8", rewards, block_rows=8), Column("f8", successes, block_rows=8)
    of_columns = columns[0], columns[1], examples
    of_lists = rewards, successes, example_numbers
    for name, number in {
        "stderr": lambda rewards, _, examples: clustered_stderr(rewards, examples),
        "passed": lambda _, successes, examples: pass_rates(successes, examples, size),
        "percentile": lambda rewards, *_: percentile(rewards, 30),
        "mean": lambda _, successes, __: mean(successes),
    }.items():
        assert str(number(*of_columns)) == str(number(*of_lists)), name
