"""Comparisons of runs: the arithmetic by brute force, the rates of false alarms by simulation, and
what is refused."""

import itertools
import math
import statistics as standard

import numpy as np
import pytest

import verifiers as vf
from support.small_envs import single_turn
from verifiers.results.comparison import (
    Measured,
    compare_runs,
    examples_needed,
    holm,
    paired_difference,
    sign_flip_test,
    t_interval,
)
from verifiers.testing import ScriptedClient

NAN = math.nan


def run(name, rewards, env_id="sums", **more):
    values = dict(enumerate(rewards)) if isinstance(rewards, list) else rewards
    return Measured(name, env_id, {"reward": values}, **more)


def difference(before, after, **more):
    return paired_difference(run("a", before), run("b", after), "reward", **more)


# --- numbers --------------------------------------------------------------------------------------


def test_siblings_count_once_as_the_mean_of_their_example():
    result = difference(
        [[0, 0, 1, 1], [1, 1, 1, 1], [0, 0, 0, 0]], [[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0]]
    )
    changes = [0.5, -0.5, 0.25]
    assert result.difference == pytest.approx(standard.fmean(changes))
    assert result.stderr == pytest.approx(standard.stdev(changes) / math.sqrt(3))
    assert (result.won, result.lost, result.equal, result.rollouts) == (2, 1, 0, (12, 12))
    half = 4.30265 * result.stderr  # Student's t with two degrees of freedom
    assert (result.low, result.high) == pytest.approx(
        (result.difference - half, result.difference + half), abs=1e-4
    )


def test_more_siblings_of_the_same_examples_do_not_pretend_to_be_more_evidence():
    few = difference([[0.0], [1.0], [0.0]], [[1.0], [1.0], [1.0]])
    many = difference([[0.0] * 50, [1.0] * 50, [0.0] * 50], [[1.0] * 50, [1.0] * 50, [1.0] * 50])
    assert many.stderr == pytest.approx(few.stderr)


def test_unknown_values_are_left_out_and_an_example_without_any_is_no_pair():
    result = difference([[NAN, 1.0], [NAN, NAN], [0.0, 0.0]], [[0.0, 0.0], [1.0, 1.0], [1.0, NAN]])
    assert (result.num_examples, result.rollouts) == (2, (3, 3))
    assert result.difference == 0.0
    assert result.notes == ("1 example without a known value left out",)


def test_the_exact_test_tries_every_sign_pattern():
    values = np.random.default_rng(0).normal(0.4, 1, 9)
    sums = [
        sum(s * v for s, v in zip(signs, values, strict=True))
        for signs in itertools.product((-1, 1), repeat=9)
    ]
    expected = sum(abs(total) >= abs(values.sum()) - 1e-12 for total in sums) / 512
    assert sign_flip_test(values) == pytest.approx(expected)


def test_one_rollout_of_zero_or_one_is_mcnemars_test():
    before = [[0.0]] * 12 + [[1.0]] * 3 + [[1.0]] * 40
    after = [[1.0]] * 12 + [[0.0]] * 3 + [[1.0]] * 40
    result = difference(before, after)
    tail = sum(math.comb(15, k) for k in range(4)) / 2**15
    assert (result.test, result.p) == ("McNemar, exact", pytest.approx(2 * tail))
    assert (result.won, result.lost, result.equal) == (12, 3, 40)


def test_equal_differences_of_many_examples_have_a_p_value_too():
    result = difference([[0.0, 0.5]] * 30, [[0.25, 0.5]] * 30)
    assert (result.test, result.verdict) == ("sign test, exact", "better")


def test_holm_keeps_the_order_and_the_unknown():
    assert holm([0.04, NAN, 0.01, 0.03]) == pytest.approx([0.06, NAN, 0.03, 0.06], nan_ok=True)
    assert holm([0.9, 0.8]) == [1.0, 1.0]


def test_the_planned_number_of_examples_finds_the_difference_four_times_in_five():
    n = examples_needed(0.3, 0.1)
    draws = np.random.default_rng(1).normal(0.1, 0.3, (4000, n))
    stderr = draws.std(axis=1, ddof=1) / math.sqrt(n)
    significant = abs(draws.mean(axis=1) / stderr) > 1.99346  # t quantile for n = 73
    assert n == 73
    assert significant.mean() == pytest.approx(0.8, abs=0.025)


# --- false alarms ---------------------------------------------------------------------------------


def test_students_interval_covers_and_the_normal_one_does_not():
    """Negative control: with 1.96 in place of Student's quantile five examples miss the truth 12%
    of the time."""
    draws = np.random.default_rng(2).normal(0, 1, (4000, 5))
    intervals = np.array([t_interval(row)[1:] for row in draws])
    missed = 1 - ((intervals[:, 0] <= 0) & (intervals[:, 1] >= 0)).mean()
    z_missed = (abs(draws.mean(axis=1)) > 1.96 * draws.std(axis=1, ddof=1) / math.sqrt(5)).mean()
    assert missed == pytest.approx(0.05, abs=0.012)
    assert z_missed == pytest.approx(0.12, abs=0.015)


@pytest.mark.parametrize("num_examples", [6, 40])
def test_equal_models_are_told_apart_at_most_five_times_in_a_hundred(num_examples):
    """Correlated siblings; the naive test over rollouts as negative control."""
    rng = np.random.default_rng(3)
    alarms = naive = 0
    for _ in range(300):
        difficulty = rng.random((num_examples, 1))
        # a change of the example, shared by its siblings
        noise = rng.normal(0, 0.3, (2, num_examples, 1))
        a, b = (
            np.clip(difficulty + part + rng.normal(0, 0.05, (num_examples, 8)), 0, 1)
            for part in noise
        )
        alarms += difference(a.tolist(), b.tolist()).verdict != "not distinguishable"
        every = (b - a).ravel()
        naive += abs(every.mean()) > 1.96 * every.std() / math.sqrt(every.size)
    assert alarms / 300 <= 0.085  # 5% and three standard errors of this simulation
    assert naive / 300 > 0.2


@pytest.mark.parametrize("counts", itertools.combinations([1, 2, 4, 8, 16], 2), ids=str)
@pytest.mark.parametrize(("num_examples", "share"), [(6, 0.05), (16, 0.05), (16, 0.3), (40, 0.05)])
def test_equal_models_with_unequal_numbers_of_rollouts_are_told_apart_as_rarely(
    counts, num_examples, share
):
    """The runs change places in half of the comparisons; interval and verdict agree."""
    rng = np.random.default_rng([*counts, num_examples, int(100 * share)])
    alarms = 0
    for number in range(150):
        some, more = (rng.random((num_examples, count)) < share for count in counts)
        runs = [some.astype(float).tolist(), more.astype(float).tolist()]
        result = difference(*runs[:: 1 if number % 2 else -1])
        alarms += result.verdict != "not distinguishable"
        assert (result.low > 0 or result.high < 0) == (result.p < 0.05)
    assert alarms / 150 <= 0.1  # 5% and three standard errors of this simulation


def test_sign_flips_of_unequal_numbers_of_rollouts_would_tell_equal_models_apart():
    """Negative control: one rollout against sixteen, rarely right; the t test over examples
    likewise."""
    rng = np.random.default_rng(5)
    flipped = students = 0
    for _ in range(200):
        changes = (rng.random(16) < 0.05) - (rng.random((16, 16)) < 0.05).mean(axis=1)
        flipped += sign_flip_test(changes[abs(changes) > 0]) < 0.05
        _, low, high = t_interval(changes)
        students += low > 0 or high < 0
    assert flipped / 200 > 0.25
    assert students / 200 > 0.25


def test_examples_that_change_by_themselves_are_told_apart_as_rarely_with_unequal_numbers_of_rollouts():
    """A change of the example that its siblings share: permuting rollouts would take it for the
    model's."""
    rng = np.random.default_rng(6)
    alarms = 0
    for _ in range(300):
        means = np.clip(rng.random((16, 1)) + rng.normal(0, 0.3, (2, 16, 1)), 0, 1)
        alarms += (
            difference(means[0].tolist(), np.repeat(means[1], 8, 1).tolist()).verdict
            != "not distinguishable"
        )
    assert alarms / 300 <= 0.085


def test_a_clear_difference_is_found_with_unequal_numbers_of_rollouts():
    """And the standard error is that of the rollouts that both could have drawn."""
    result = difference([[0.0]] * 10, [[1.0, 1.0, 1.0, 0.0]] * 10)
    assert (result.test, result.verdict) == ("t test", "better")
    assert result.stderr == pytest.approx(
        math.sqrt(10 * standard.variance([0, 1, 1, 1, 0]) * 1.25) / 10
    )
    assert difference([[0.0]], [[1.0, 1.0]]).verdict == "not distinguishable"


# --- words ----------------------------------------------------------------------------------------


def test_an_exact_p_against_the_interval_is_named():
    changes = [-3, -2, -1, -1, -1, -1, -1, 1]
    result = difference([[0.5]] * 8, [[0.5 + change / 8] for change in changes])
    assert result.high < 0
    assert result.p == pytest.approx(14 / 256)
    assert result.sentence().startswith(
        "not distinguishable with 8 examples (p = 0.055; it decides where"
    )
    clear = difference([[0.5]] * 8, [[0.4], [0.6]] * 4)  # negative control: the interval holds zero
    assert "decides" not in clear.sentence()


def test_no_verdict_says_that_there_is_no_difference():
    rng = np.random.default_rng(4)
    before = rng.random((10, 1))
    result = difference(
        before.tolist(), (before + rng.normal(0, 0.2, (10, 1))).tolist(), detect=0.05
    )
    assert result.verdict == "not distinguishable"
    assert (
        result.sentence()
        == f"not distinguishable with 10 examples; {result.examples_needed} would do for a"
        " difference of 0.05"
    )
    assert result.examples_needed > 50
    assert (
        difference([[1.0]] * 3, [[1.0]] * 3).sentence()
        == "not distinguishable with 3 examples, of which none differs"
    )


def test_an_interval_that_rewards_from_0_to_1_cannot_have_is_a_sentence():
    result = difference([[0.0, 0.0], [0.0, 1.0]], [[1.0, 1.0], [1.0, 0.0]])
    assert result.high > 1  # Student's, with one degree of freedom
    assert result.interval() == "too few examples for an interval within ±1"
    wider = difference([[0.0, 0.0], [0.0, 9.0]], [[9.0, 9.0], [9.0, 0.0]])
    assert wider.interval().startswith("95% from ")  # negative control: other rewards
    assert difference([[1.0]] * 3, [[1.0]] * 3).interval() == ""


def test_the_examples_needed_are_no_more_than_students_quantiles_ask_for():
    # a step from the normal quantile to Student's with one degree of freedom overshoots to 43
    assert examples_needed(0.7, 1.5) == 4


def test_the_settings_that_differ_are_named():
    alike = {"rubric": {"class": "Rubric"}, "max_turns": 1}
    first = run("a", [[1.0]], model="m", config={**alike, "sampling_args": {"max_tokens": 32}})
    second = run("b", [[0.0]], model="n", config={**alike, "sampling_args": {"temperature": 0.3}})
    comparison = compare_runs([first, second])
    assert comparison.to_dict()["settings"] == {
        "model": ["m", "n"],
        "sampling_args.max_tokens": [32, None],
        "sampling_args.temperature": [None, 0.3],
    }
    lines = str(comparison).splitlines()
    assert lines[2:5] == [
        "   model: A m, B n",
        "   sampling_args.max_tokens: A 32, B not set",
        "   sampling_args.temperature: A not set, B 0.3",
    ]


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("compared", "because"),
    [
        (run("b", [[1.0]], env_id="words"), "two environments, sums and words"),
        (
            run("b", {"x": [1.0]}, config={"env_args": {"n": 2}}),
            "no example in common (env_args differ)",
        ),
        (
            run("b", [[1.0]], config={"env_args": {"n": 2}}),
            "env_args differ: {'n': 1} and {'n': 2}",
        ),
        (
            run("b", [[1.0]], config={"env_args": {"n": 1}, "reward_weights": [2]}),
            "measure differently (reward_weights differ)",
        ),
    ],
)
def test_runs_that_cannot_be_compared_say_why(compared, because):
    baseline = run("a", [[1.0]], config={"env_args": {"n": 1}, "reward_weights": [1]})
    comparison = compare_runs([baseline, compared])
    assert comparison.differences == ()
    assert because in comparison.refused[0].sentence()
    shares_examples = "x" not in compared.values["reward"]
    forced = compare_runs([baseline, compared], anyway=True)
    assert len(forced.differences) == shares_examples
    if shares_examples:
        assert because in forced.differences[0].notes[0]


def test_a_missing_metric_and_a_single_run_are_refused_by_name():
    with pytest.raises(vf.ConfigError, match="needs two runs"):
        compare_runs([run("a", [[1.0]])])
    with pytest.raises(vf.ConfigError, match="no run has the metric 'rewrad'; they have reward"):
        compare_runs([run("a", [[1.0]]), run("b", [[1.0]])], ["rewrad"])


def test_several_environments_have_a_baseline_each_and_share_one_adjustment():
    clear = [[0.0]] * 20, [[1.0]] * 20
    runs = [
        run("a1", clear[0]),
        run("b1", clear[0], "words"),
        run("a2", clear[1]),
        run("b2", clear[1], "words"),
    ]
    comparison = compare_runs(runs)
    assert [(d.baseline, d.run) for d in comparison.differences] == [("a1", "a2"), ("b1", "b2")]
    assert all(d.p_adjusted == pytest.approx(2 * d.p) for d in comparison.differences)


# --- results --------------------------------------------------------------------------------------


def test_results_in_memory_and_from_disk_compare_alike(tmp_path):
    env = single_turn(7)
    wrong = ScriptedClient("no idea")
    before = env.evaluate(
        wrong, "m", num_examples=7, rollouts_per_example=2, results_path=tmp_path / "a"
    )
    after = env.evaluate(
        ScriptedClient("7"),
        "m2",
        num_examples=7,
        rollouts_per_example=2,
        results_path=tmp_path / "b",
    )
    live = before.compare(after).differences[0]
    loaded = vf.load_results(tmp_path / "a").compare(vf.load_results(tmp_path / "b")).differences[0]
    mixed = before.compare(vf.load_results(tmp_path / "b")).differences[0]
    assert live.num_examples == loaded.num_examples == mixed.num_examples == 7
    assert live.difference == loaded.difference == mixed.difference
    assert f"B − A  reward: {live.sentence()}" in str(before.compare(after))
    assert repr(before.compare(after)) == str(before.compare(after))


# --- runs that a stopping rule ended --------------------------------------------------------------

DECIDED = {"low": 0.05, "high": 0.4, "num_examples": 40, "against": "a", "is_decided": True}


def test_a_run_that_ended_when_it_differed_is_refused_with_its_own_interval():
    runs = [run("a", [[0.0]] * 40), run("b", [[1.0]] * 40, stopped=DECIDED)]
    compared = compare_runs(runs)
    assert compared.differences == ()
    (because,) = compared.refused[0].because
    assert "b ended as soon as it differed from a" in because
    assert "between 0.050 and 0.400" in because
    (difference_anyway,) = compare_runs(runs, anyway=True).differences
    assert any("as soon as it differed" in note for note in difference_anyway.notes)
    # negative control: all examples were run, and nothing was decided
    undecided = run("b", [[1.0]] * 40, stopped=DECIDED | {"is_decided": False})
    assert compare_runs([runs[0], undecided]).refused == ()


def test_a_run_that_ended_when_its_mean_was_known_is_compared_with_a_note():
    ended = run("a", [[0.0]] * 40, stopped=DECIDED | {"against": None})
    (compared,) = compare_runs([ended, run("b", [[1.0]] * 40)]).differences
    assert "a ended once its mean was known well enough" in compared.notes[0]


def test_p_values_at_the_time_that_shows_a_difference_are_wrong_in_far_more_than_5_of_100_runs():
    """What the refusal is for: two equal models, looked at after every example."""
    draw, num_wrong = np.random.default_rng(5), 0
    for _ in range(200):
        values = draw.normal(size=100)
        sizes = np.arange(10, 101)
        sums, squares = values.cumsum()[9:], (values**2).cumsum()[9:]
        t = sums / sizes / np.sqrt((squares / sizes - (sums / sizes) ** 2) / (sizes - 1))
        num_wrong += bool((abs(t) > 1.98).any())
    assert num_wrong / 200 > 0.2


def test_the_results_of_a_stopped_run_say_that_they_are(tmp_path):
    env = single_turn(8)
    baseline = env.evaluate(ScriptedClient("no"), "m", results_path=tmp_path / "a")
    better = env.evaluate(ScriptedClient("no"), "m", results_path=tmp_path / "b")
    better.metadata["stopped"] = DECIDED
    assert "as soon as it differed" in str(better.compare(baseline))
