"""Confidence sequences and planned sizes, by simulated evaluations with correlated siblings.

The fast tests simulate hundreds of evaluations, the slow one 10,000.
"""

import math

import numpy as np
import pytest

import verifiers as vf
from verifiers.results.comparison import examples_needed
from verifiers.results.planning import Spread, detectable, sizes
from verifiers.results.sequential import ConfidenceSequence

SIBLINGS = 4


def rollouts(rng, difficulty):
    """The example means [batch] of ``SIBLINGS`` rollouts that succeed with probability
    ``difficulty`` [batch]."""
    return rng.binomial(SIBLINGS, difficulty) / SIBLINGS


def missed_at_any_time(num, examples, rng):
    """The share of evaluations whose sequence excludes the true mean 1/3 at some time, and the
    naive interval's."""
    sequence = ConfidenceSequence(num_points=200, batch=num)
    missed, naive = np.zeros(num, bool), np.zeros(num, bool)
    total = squares = np.zeros(num)
    for n in range(1, examples + 1):
        x = rollouts(rng, rng.beta(1, 2, num))  # the siblings of an example share its difficulty
        sequence.add(x)
        low, high = sequence.intervals()
        missed |= (low > 1 / 3) | (high < 1 / 3)
        total, squares = total + x, squares + x * x
        if n > 10:
            stderr = np.sqrt(np.maximum(squares / n - (total / n) ** 2, 1e-12) / (n - 1))
            naive |= abs(total / n - 1 / 3) > 1.96 * stderr
    return missed.mean(), naive.mean()


def stopped_comparisons(num, rng, difference, examples):
    """(decision +1, -1 or 0, examples until it) of paired evaluations of two models, stopped when
    decided."""
    sequence = ConfidenceSequence(-1.0, 1.0, num_points=400, batch=num)
    decided, when = np.zeros(num, int), np.full(num, examples)
    for n in range(1, examples + 1):
        difficulty = rng.uniform(0.2, 0.8 - difference, num)
        change = rng.normal(0, 0.05, num)  # the models differ from example to example
        after = np.clip(difficulty + difference + change, 0, 1)
        sequence.add(rollouts(rng, after) - rollouts(rng, difficulty))
        low, high = sequence.intervals()
        new = (decided == 0) & ((low > 0) | (high < 0))
        decided[new] = np.where(low[new] > 0, 1, -1)
        when[new] = n
    return decided, when


def planned(rng, difference):
    """The examples that a fixed comparison needs for ``difference``, from the spread of one long
    pilot."""
    difficulty = rng.uniform(0.2, 0.8, 100_000)
    after = np.clip(difficulty + rng.normal(0, 0.05, difficulty.size), 0, 1)
    pairs = rollouts(rng, after) - rollouts(rng, difficulty)
    return examples_needed(float(pairs.std()), difference)


def check_sequences(num):
    rng = np.random.default_rng(7)
    allowed = 0.05 + 3 * math.sqrt(0.05 * 0.95 / num) if num < 5000 else 0.05
    missed, naive = missed_at_any_time(num, 200, rng)
    assert missed <= allowed
    # negative control: a fixed-sample interval that is looked at after every example
    assert naive > 0.15
    n = planned(rng, 0.1)
    equal, _ = stopped_comparisons(num, rng, 0.0, n)
    assert (equal != 0).mean() <= allowed
    decided, when = stopped_comparisons(num, rng, 0.2, n)
    # 40% fewer, at twice the difference that the fixed comparison is made for
    assert np.median(when) <= 0.6 * n
    assert (decided == 1).mean() >= 0.95
    assert not (decided == -1).any()
    return missed, naive, (equal != 0).mean(), np.median(when) / n


def test_few_hundred_evaluations_hold_their_level_and_stop_early():
    check_sequences(300)


@pytest.mark.slow
def test_ten_thousand_evaluations_hold_their_level_and_stop_early():
    print(check_sequences(10_000))


def test_the_capital_is_that_of_the_papers_formula():
    """Theorem 3 of the source, written out for one candidate mean."""
    values, m, alpha = [0.2, 0.9, 0.4, 0.4, 1.0], 0.25, 0.05
    up = down = 1.0
    mean_before, squares = 0.5, 0.25
    excluded = False
    for t, x in enumerate(values * 12, 1):
        variance = squares / t
        bet = math.sqrt(2 * math.log(2 / alpha) / (variance * t * math.log(t + 1)))
        up *= 1 + min(bet, 0.5 / m) * (x - m)
        down *= 1 - min(bet, 0.5 / (1 - m)) * (x - m)
        excluded |= max(up / 2, down / 2) >= 1 / alpha
        mean_before = (0.5 + sum((values * 12)[:t])) / (t + 1)
        squares += (x - mean_before) ** 2
        sequence = ConfidenceSequence(num_points=400)
        for y in (values * 12)[:t]:
            sequence.add(y)
        low, high = sequence.interval()
        assert (low > m or high < m) in (excluded, False)  # a step wider at most
        if excluded:
            assert low > m - 2 / 400
    assert excluded


def test_the_interval_starts_as_the_whole_range_and_narrows_in_its_units():
    sequence = ConfidenceSequence(-10.0, 30.0)
    assert sequence.interval() == (-10.0, 30.0)
    for _ in range(200):
        sequence.add(10.0)
    low, high = sequence.interval()
    assert 8 < low < 10 < high < 12


@pytest.mark.parametrize("value", [1.5, -0.1, math.nan])
def test_a_value_outside_the_range_is_refused(value):
    with pytest.raises(vf.ConfigError, match="is outside 0 to 1"):
        ConfidenceSequence().add(value)
    with pytest.raises(vf.ConfigError, match="the lower first"):
        ConfidenceSequence(1.0, 1.0)


# --- planned sizes --------------------------------------------------------------------------------


def test_the_spread_of_examples_and_siblings_is_found_again():
    rng = np.random.default_rng(0)
    examples = rng.normal(0.5, 0.2, 4000)
    values = {n: list(rng.normal(mean, 0.4, 5)) for n, mean in enumerate(examples)}
    spread = Spread.of(values)
    assert spread.between == pytest.approx(0.2, abs=0.01)
    assert spread.within == pytest.approx(0.4, abs=0.005)
    assert Spread.of({"a": [0.5], "b": [1.0]}) is None
    assert Spread.of({"a": [0.5, math.nan], "b": [1.0, 0.0]}) is None


def test_sizes_shrink_with_siblings_only_as_far_as_the_examples_allow():
    by_siblings = {size.siblings: size for size in sizes(Spread(0.3, 0.4), 0.05)}
    assert by_siblings[16].at_least < by_siblings[1].at_least / 14
    assert by_siblings[16].at_most > by_siblings[1].at_most / 2.8
    low, high = detectable(Spread(0.3, 0.4), by_siblings[4].at_least, 4)
    assert low == pytest.approx(0.05, abs=0.002)
    assert high > 0.08


def test_the_least_size_finds_the_difference_four_times_in_five():
    rng = np.random.default_rng(1)
    (size,) = sizes(Spread(0.3, 0.4), 0.1, [4])
    pairs = rng.normal(0.1, math.sqrt(2 * 0.4**2 / 4), (4000, size.at_least))
    t = pairs.mean(axis=1) / (pairs.std(axis=1, ddof=1) / math.sqrt(size.at_least))
    # Student's quantile, 63 degrees of freedom
    assert (abs(t) > 1.9977).mean() == pytest.approx(0.8, abs=0.025)
