"""Judges against labels: by hand, by the published formula, and the coverage of the corrected mean
by simulation."""

import math

import numpy as np
import pytest

import verifiers as vf
from verifiers.results.agreement import agreement, cohens_kappa, corrected_share, label_of

NAN = math.nan


def test_kappa_of_cohens_own_kind_of_table():
    """50 cases, 20 both yes, 15 both no, 5 and 10 apart: kappa is 0.4 by the textbook."""
    judge = [True] * 25 + [False] * 25
    person = [True] * 20 + [False] * 5 + [True] * 10 + [False] * 15
    kappa, stderr = cohens_kappa(judge, person)
    assert kappa == pytest.approx(0.4)
    assert stderr == pytest.approx(math.sqrt(0.7 * 0.3 / 50) / 0.5)
    assert cohens_kappa([1, 0, 1], [1, 0, 1])[0] == 1.0
    assert math.isnan(cohens_kappa([1, 1], [1, 1])[0])


def test_an_agreement_has_the_table_and_leaves_out_the_unknown():
    values = [1.0, 0.9, 0.2, NAN, 0.0, 0.7, 0.4]
    labels = [True, False, False, True, True, None, None]
    measured = agreement(values, labels, range(7))
    assert (measured.num_labelled, measured.num_rollouts) == (4, 6)
    assert (measured.true_yes, measured.false_yes, measured.false_no, measured.true_no) == (
        1,
        1,
        1,
        1,
    )
    assert (
        measured.sensitivity,
        measured.specificity,
        measured.accuracy,
        measured.judged_mean,
    ) == (0.5, 0.5, 0.5, 0.5)
    assert math.isnan(measured.corrected_mean)  # no better than chance
    assert measured.to_dict()["corrected_mean"] is None


def simulated(rng, truth, num, labelled, sensitivity=0.95, specificity=0.75):
    right = rng.random(num) < truth
    judged = np.where(right, rng.random(num) < sensitivity, rng.random(num) > specificity)
    labels = [bool(right[n]) if n < labelled else None for n in range(num)]
    return agreement(judged.astype(float).tolist(), labels, range(num))


def test_the_corrected_mean_covers_the_truth_and_the_judged_one_does_not():
    """Negative control: the judge's own mean with its interval."""
    rng = np.random.default_rng(0)
    covered = naive = 0
    for _ in range(400):
        measured = simulated(rng, 0.4, 600, 120)
        covered += measured.low <= 0.4 <= measured.high
        naive += abs(measured.judged_mean - 0.4) <= 1.96 * math.sqrt(0.24 / 600)
    assert covered / 400 >= 0.93
    assert naive / 400 < 0.05


def test_siblings_widen_the_interval():
    rng = np.random.default_rng(1)
    right = np.repeat(rng.random(60) < 0.5, 8)
    judged = np.where(rng.random(480) < 0.05, ~right, right).astype(float).tolist()
    labels = [bool(right[n]) if n % 2 else None for n in range(480)]
    grouped = agreement(judged, labels, [n // 8 for n in range(480)])
    alone = agreement(judged, labels, range(480))
    assert grouped.high - grouped.low > 1.5 * (alone.high - alone.low)


def test_the_interval_is_the_published_formula():
    """Written out with numbers: 0.5 judged of 1,000; 90 of 100 and 80 of 100."""
    z, q, n = 1.959964, (500 + 1.920729) / 1003.841459, 1003.841459
    se, sp = 91 / 102, 81 / 102
    p = (q + sp - 1) / (se + sp - 1)
    shift = 2 * z**2 * (p * se * (1 - se) / 102 - (1 - p) * sp * (1 - sp) / 102)
    variance = q * (1 - q) / n + p**2 * se * (1 - se) / 102 + (1 - p) ** 2 * sp * (1 - sp) / 102
    half = z * math.sqrt(variance) / (se + sp - 1)
    share, low, high = corrected_share(0.5, 1000, (90, 100), (80, 100))
    assert share == pytest.approx((0.5 + 0.8 - 1) / 0.7)
    assert (low, high) == pytest.approx((p + shift - half, p + shift + half), abs=1e-6)
    assert all(map(math.isnan, corrected_share(0.5, 10, (0, 0), (5, 5))))


@pytest.mark.parametrize(
    ("value", "label"), [(True, True), (0, False), (1.0, True), ("Pass", True), ("no", False)]
)
def test_labels_are_read_from_words_and_numbers(value, label):
    assert label_of({"human": value}, "human") is label


def test_a_label_that_is_neither_yes_nor_no_is_refused_and_none_at_all_too():
    with pytest.raises(vf.ConfigError, match=r"'maybe' in 'info\.human' is neither yes nor no"):
        label_of({"info": {"human": "maybe"}}, "info.human")
    with pytest.raises(vf.ConfigError, match="no rollout has both 'reward' and a label in 'x'"):
        agreement([1.0], [None], [0], column="x")
