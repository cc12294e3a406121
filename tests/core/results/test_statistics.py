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


def rates_by_drawing(siblings: list[list[float]], k: int) -> tuple[float, float, int]:
    """pass@k, pass^k and the number of examples, by drawing each k of the known rollouts."""
    draws = [
        list(itertools.combinations(known, k))
        for known in ([value for value in values if value == value] for values in siblings)
        if len(known) >= k
    ]
    if not draws:
        return NAN, NAN, 0
    any_of = [sum(map(any, drawn)) / len(drawn) for drawn in draws]
    all_of = [sum(map(all, drawn)) / len(drawn) for drawn in draws]
    return standard.fmean(any_of), standard.fmean(all_of), len(draws)


@given(st.lists(st.lists(st.sampled_from([0.0, 1.0, NAN]), min_size=1, max_size=6), max_size=6))
def test_an_example_counts_with_its_known_rollouts_for_each_k_of_at_most_as_many(siblings):
    values = [value for values in siblings for value in values]
    examples = [number for number, values in enumerate(siblings) for _ in values]
    passed = pass_rates(values, examples, 6)
    for k in (1, 2, 4, 6):
        any_of, all_of, num_examples = rates_by_drawing(siblings, k)
        assert passed.num_examples.get(str(k), 0) == num_examples
        if num_examples:
            assert passed.any_of[str(k)] == pytest.approx(any_of)
            assert passed.all_of[str(k)] == pytest.approx(all_of)
    if passed.any_of:
        assert passed.num_unknown == sum(map(math.isnan, values))


def test_the_bounds_are_the_rates_with_every_unknown_rollout_unsolved_and_solved():
    values, examples = [1, NAN, 0, 0, 0, NAN, NAN, NAN], [0, 0, 0, 0, 1, 1, 1, 1]
    passed = pass_rates(values, examples, 4)
    for at, value in enumerate((0.0, 1.0)):
        complete = pass_rates([value if v != v else v for v in values], examples, 4)
        for k, bounds in passed.any_of_bounds.items():
            assert bounds[at] == pytest.approx(complete.any_of[k])
        assert complete.any_of_bounds == {}
        assert complete.num_unknown == 0


def simulated(fails, seed: int, num_examples: int = 100, n: int = 8):
    """(every outcome, those with NaN where a rollout failed, their examples) of an evaluation;
    ``fails(p, outcome)``: chance that a rollout fails."""
    draw = np.random.default_rng(seed)
    p = draw.beta(0.8, 0.8, num_examples)
    every = (draw.random((num_examples, n)) < p[:, None]).astype(float)
    is_failed = draw.random((num_examples, n)) < fails(p[:, None], every)
    outcomes = np.where(is_failed, NAN, every)
    return every.reshape(-1), outcomes.reshape(-1), np.repeat(np.arange(num_examples), n)


def share_that_holds(fails, k: int, of_complete: bool = False) -> float:
    """Of 300 simulated evaluations: those whose interval of pass@k holds the truth."""
    truth = {
        1: 0.5,
        2: 1 - 0.8 * 1.8 / (1.6 * 2.6),
        4: 1 - 0.8 * 1.8 * 2.8 * 3.8 / (1.6 * 2.6 * 3.6 * 4.6),
    }
    num_held = 0
    for seed in range(300):
        _, outcomes, examples = simulated(fails, seed)
        if of_complete:
            is_whole = ~np.isnan(outcomes.reshape(100, 8)).any(1)
            outcomes, examples = outcomes[np.repeat(is_whole, 8)], examples[np.repeat(is_whole, 8)]
        low, high = pass_rates(outcomes, examples, 8).any_of_interval[str(k)]
        num_held += low <= truth[k] <= high
    return num_held / 300


FAILURES = {
    "none": lambda p, outcome: 0 * p,
    "at random": lambda p, outcome: 0.05 + 0 * p,
    "hard examples": lambda p, outcome: 0.3 * (1 - p),
}


@pytest.mark.parametrize("k", [1, 2, 4])
@pytest.mark.parametrize("kind", FAILURES)
def test_intervals_of_pass_at_k_hold_the_truth_with_failures_that_depend_on_the_example(kind, k):
    assert 0.93 <= share_that_holds(FAILURES[kind], k) <= 0.97


def test_the_complete_examples_alone_would_not_hold_it():
    assert share_that_holds(FAILURES["hard examples"], 1, of_complete=True) < 0.3


def test_failures_of_wrong_rollouts_alone_are_past_any_estimate_and_inside_the_bounds():
    def fails(p, outcome):
        return 0.7 * (1 - outcome)

    assert share_that_holds(fails, 1) < 0.1
    for seed in range(20):
        every, outcomes, examples = simulated(fails, seed)
        truth = pass_rates(every, examples, 8).any_of
        for k, (low, high) in pass_rates(outcomes, examples, 8).any_of_bounds.items():
            assert low <= truth[k] <= high


@pytest.mark.parametrize("kind", FAILURES)
def test_the_clustered_error_of_a_mean_holds_the_mean_of_the_rollouts_that_are_known(kind):
    """Its centre leans towards the examples that fail less: it is the mean over known rollouts."""
    draw, fails = np.random.default_rng(3), FAILURES[kind]
    p = draw.beta(0.8, 0.8, 1_000_000)
    chance_known = 1 - fails(p, None)
    target = float((p * chance_known).mean() / chance_known.mean())
    num_held = 0
    for seed in range(300):
        _, outcomes, examples = simulated(fails, seed)
        half = 1.98 * clustered_stderr(outcomes, examples)  # Student's, 99 degrees of freedom
        num_held += abs(mean(outcomes) - target) <= half
    assert 0.93 <= num_held / 300 <= 0.97
    assert (abs(target - 0.5) > 0.03) == (kind == "hard examples")


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


@pytest.mark.parametrize(("rewards", "n"), [([1.0], 1), ([NAN, NAN], 2), ([], 4)])
def test_pass_rates_are_empty_for_one_rollout_each_and_without_a_known_one(rewards, n):
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
