"""Advantages against the golden tables; unknown rewards, dead groups, credit per turn. Source:
advantages.py."""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path

import numpy as np
import pytest

from verifiers.errors import ConfigError
from verifiers_trainer.algorithm.advantages import ADVANTAGES, compute_advantages, is_dead
from verifiers_trainer.algorithm.credit import Siblings, turn_advantages

GOLDEN = json.loads((Path(__file__).parents[1] / "data" / "golden_losses.json").read_text())[
    "advantages"
]


def floats(values) -> np.ndarray:
    return np.array([np.nan if v is None else v for v in values], dtype=float)


REWARDS = {name: floats(group["rewards"]) for name, group in GOLDEN["groups"].items()}
LENGTHS = {name: floats(group["lengths"]) for name, group in GOLDEN["groups"].items()}


@pytest.mark.parametrize("name", ["mean", "mean_std", "batch_std", "rloo", "max_rl", "opo"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float64, 1e-9), (np.float32, 1e-5)])
def test_golden_advantages(name, dtype, tolerance):
    rewards_G = [r.astype(dtype) for r in REWARDS.values()]
    computed = compute_advantages(name, rewards_G, lengths_G=list(LENGTHS.values()))
    for advantages, group in zip(computed, GOLDEN["groups"].values(), strict=True):
        expected = floats([None] * 4 if group["dead"] else group["advantages"][name])
        np.testing.assert_allclose(advantages, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", list(GOLDEN["groups"]))
def test_golden_dead_groups(name):
    assert is_dead(REWARDS[name]) == GOLDEN["groups"][name]["dead"]


@pytest.mark.parametrize(
    ("rewards", "fraction", "dead"),
    [
        ([1, 0, np.nan, np.nan], 0.5, False),
        ([1, 0, np.nan, np.nan], 0.75, True),
        ([1, 0, 0, np.nan], 1.0, True),
        ([1, np.nan], 0.01, True),  # two live members at the least
        ([np.nan, np.nan], 0.75, True),
        ([0.1, 0.1 + 1e-12], 0.75, False),
        ([], 0.75, True),
    ],
)
def test_dead_group_rule(rewards, fraction, dead):
    assert is_dead(np.array(rewards, dtype=float), fraction) is dead


def test_without_a_baseline_a_single_equal_or_partly_unknown_group_lives():
    advantages = compute_advantages(
        "none", [np.array([1.0]), np.array([0.5, np.nan]), np.array([np.nan])]
    )
    np.testing.assert_array_equal(np.concatenate(advantages), [1.0, 0.5, np.nan, np.nan])


def test_an_unknown_reward_is_not_a_zero():
    unknown = compute_advantages("mean", [np.array([1.0, 0.5, np.nan, 0.0])])[0]
    np.testing.assert_allclose(unknown, [0.5, 0.0, np.nan, -0.5])
    zero = compute_advantages("mean", [np.array([1.0, 0.5, 0.0, 0.0])])[0]
    assert zero[0] != unknown[0]  # negative control: counted as zero it would move every sibling


def test_a_dead_group_does_not_move_the_batch_deviation():
    live = [np.array([1.0, 0.0, 0.0, 0.0])]
    with_dead = compute_advantages("batch_std", [*live, np.array([0.3, 0.3, 0.3, 0.3])])
    np.testing.assert_array_equal(with_dead[0], compute_advantages("batch_std", live)[0])


def test_the_batch_deviation_is_that_of_rewards_or_of_centred_rewards():
    """Two groups of other difficulty: the raw deviation has the distance of their means, ScaleRL's
    has not."""
    rewards_G = [np.array([1.0, 0.0, np.nan, 0.0]), np.array([5.0, 6.0, 6.0, 5.0])]
    rewards = [1.0, 0.0, 0.0, 5.0, 6.0, 6.0, 5.0]
    raw = statistics.stdev(rewards)
    centred = statistics.stdev([2 / 3, -1 / 3, -1 / 3, -0.5, 0.5, 0.5, -0.5])
    assert raw > 4 * centred
    for name, deviation in (("batch_reward_std", raw), ("batch_std", centred)):
        easy, hard = compute_advantages(name, rewards_G)
        np.testing.assert_allclose(
            easy, np.array([2 / 3, -1 / 3, np.nan, -1 / 3]) / (deviation + 1e-4), rtol=1e-12
        )
        np.testing.assert_allclose(
            hard, np.array([-0.5, 0.5, 0.5, -0.5]) / (deviation + 1e-4), rtol=1e-12
        )


@pytest.mark.parametrize(
    "name", [name for name in ADVANTAGES if name not in ("none", "environment", "best")]
)
def test_a_dead_group_that_is_kept_has_advantages_of_zero(name):
    live = np.array([1.0, 0.0, 0.3, np.nan])
    dead = np.full(4, 0.1)
    short = np.array([1.0, 0.0, np.nan, np.nan])
    groups = [live, dead, short]
    if name == "gdpo":
        groups = [np.stack([group, group], axis=1) for group in groups]
    lengths_G = [np.array([3.0, 1.0, 2.0, 5.0])] * 3
    dropped = compute_advantages(name, groups, lengths_G=lengths_G)
    kept = compute_advantages(name, groups, lengths_G=lengths_G, keep_dead=True)
    assert kept[1].tolist() == [0.0] * 4
    assert np.isnan(dropped[1]).all()
    assert np.isnan([dropped[2], kept[2]]).all()  # too few known rewards
    of_the_batch = {"gdpo", "batch_reward_std"}
    assert np.array_equal(dropped[0], kept[0], equal_nan=True) == (name not in of_the_batch)
    (alone,) = compute_advantages(name, groups[1:2], lengths_G=lengths_G[1:2], keep_dead=True)
    assert alone.tolist() == [0.0] * 4


def test_of_a_group_of_equals_that_is_kept_none_is_the_best():
    """Otherwise its eight rollouts would weigh as much as eight live groups, of which one rollout
    each is trained."""
    live, dead = compute_advantages("best", [np.array([1.0, 0.0]), np.full(8, 0.1)], keep_dead=True)
    np.testing.assert_array_equal(live, [1.0, np.nan])
    assert np.isnan(dead).all()


def test_a_kept_group_counts_in_the_deviation_of_the_batch():
    kept, _ = compute_advantages(
        "batch_reward_std", [np.array([1.0, 0.0]), np.array([4.0, 4.0])], keep_dead=True
    )
    np.testing.assert_allclose(
        kept, np.array([0.5, -0.5]) / (statistics.stdev([1, 0, 4, 4]) + 1e-4), rtol=1e-12
    )


@pytest.mark.parametrize("name", ["mean", "mean_std", "batch_std", "rloo"])
def test_group_baselines_centre_the_live_members(name):
    for advantages in compute_advantages(
        name, [np.array([1.0, 0.2, np.nan, 0.7]), np.array([0.0, 1.0])]
    ):
        assert abs(np.nansum(advantages)) < 1e-12


def test_max_rl_gives_zero_where_the_mean_is_not_positive():
    np.testing.assert_array_equal(
        compute_advantages("max_rl", [np.array([-1.0, 1.0])])[0], [0.0, 0.0]
    )
    np.testing.assert_array_equal(
        compute_advantages("max_rl", [np.array([-2.0, 1.0])])[0], [0.0, 0.0]
    )


def test_gdpo_matches_its_definition_and_lets_functions_of_any_scale_count_alike():
    group = np.array([[1.0, 100.0], [0.0, 100.0], [0.0, 300.0], [np.nan, 0.0]])
    second_group = np.array([[1.0, 0.0], [0.0, 1.0], [0.0, 0.0], [1.0, 1.0]])
    computed = compute_advantages("gdpo", [group, second_group], weights=[1.0, 0.5])
    z = [(g - g.mean(0)) / (g.std(0, ddof=1) + 1e-4) for g in (group[:3], second_group)]
    sums = [s @ np.array([1.0, 0.5]) for s in z]
    batch = np.concatenate(sums)
    expected = [(s - batch.mean()) / (batch.std(ddof=1) + 1e-4) for s in sums]
    np.testing.assert_allclose(computed[0], [*expected[0], np.nan], rtol=1e-12)
    np.testing.assert_allclose(computed[1], expected[1], rtol=1e-12)


def test_gdpo_keeps_a_group_whose_total_is_constant_but_whose_parts_differ():
    parts = np.array([[1.0, 0.0], [0.0, 1.0]])
    assert not is_dead(parts)
    assert is_dead(parts.sum(axis=1))


def of_turns(turn_rewards, gamma=1.0, choice="mean"):
    """The advantages of turns whose last reward holds the rollout's."""
    siblings = Siblings(np.zeros(len(turn_rewards)), np.zeros(0), turn_rewards)
    return turn_advantages(siblings.returns(gamma), choice=choice)


def test_turn_credit_discounts_and_compares_siblings_at_the_same_turn():
    advantages = of_turns(
        [np.array([0.0, 1.0, 2.0]), np.array([1.0, 0.0]), np.array([np.nan, 1.0])], gamma=0.5
    )
    # returns 1, 2, 2 against means 1, 1, 2
    np.testing.assert_allclose(advantages[0], [0.0, 1.0, 0.0])
    np.testing.assert_allclose(advantages[1], [0.0, -1.0])
    assert np.isnan(advantages[2]).all()


def halved(rewards_G, lengths_G=None):
    return [(rewards - rewards.mean()) / 2 for rewards in rewards_G]


def test_turn_credit_by_a_function_gets_each_turn_as_a_group():
    turns = [np.array([0.0, 1.0, 2.0]), np.array([1.0, 0.0]), np.array([np.nan, 1.0])]
    made = of_turns(turns, gamma=0.5, choice=halved)
    for own, means in zip(made, of_turns(turns, gamma=0.5), strict=True):
        np.testing.assert_allclose(own, means / 2)
    with pytest.raises(ConfigError, match=r"the advantage 'sums' .* return a list with an array"):
        of_turns(turns, choice=sums)


def sums(rewards_G, lengths_G=None):
    return [rewards.sum() for rewards in rewards_G]


def test_turn_credit_of_one_turn_is_the_mean_baseline():
    rewards = np.array([1.0, 0.0, np.nan, 0.5])
    by_turn = of_turns([np.array([r]) for r in rewards])
    np.testing.assert_array_equal(np.concatenate(by_turn), compute_advantages("mean", [rewards])[0])
    assert of_turns([]) == []


@pytest.mark.parametrize("gamma", [0.0, 0.5, 1.0])
def test_turn_credit_of_the_best_is_that_of_whole_rollouts_at_each_turn(gamma):
    """Against ``best`` of the returns, computed turn by turn; every return exact in binary."""
    generator = np.random.default_rng(7)
    for _ in range(200):
        turns = [generator.integers(0, 3, generator.integers(1, 4)).astype(float) for _ in range(4)]
        made = of_turns(turns, gamma, choice="best")
        for turn in range(3):
            having = [n for n, rewards in enumerate(turns) if len(rewards) > turn]
            returns = [
                sum(gamma ** (i - turn) * turns[n][i] for i in range(turn, len(turns[n])))
                for n in having
            ]
            for n, turn_return in zip(having, returns, strict=True):
                expected = (
                    1.0 if turn_return == max(returns) and min(returns) < max(returns) else math.nan
                )
                np.testing.assert_equal(made[n][turn], expected)


def test_the_best_turn_needs_siblings_that_are_known_and_differ():
    unknown = of_turns(
        [np.array([np.nan, 9.0]), np.array([1.0, 0.0]), np.array([1.0, 2.0])], choice="best"
    )
    assert np.isnan(unknown[0]).all()
    np.testing.assert_array_equal(unknown[1:], [[np.nan, np.nan], [1.0, 1.0]])
    alone = of_turns([np.array([1.0, 5.0]), np.array([1.0])], 0.0, choice="best")
    # equal at the first turn, and the second has no sibling
    assert np.isnan(np.concatenate(alone)).all()


def test_inputs_are_left_as_they_were():
    rewards = [np.array([1.0, np.nan, 0.0, 0.5])]
    turns = [np.array([0.0, 1.0]), np.array([1.0, 1.0])]
    for name in ("mean", "none"):
        result = compute_advantages(name, rewards)
        result[0][:] = 9
    for choice in ("mean", "best", "none"):
        for of_turn in of_turns(turns, choice=choice):
            of_turn[:] = 9
    np.testing.assert_array_equal(rewards[0], [1.0, np.nan, 0.0, 0.5])
    np.testing.assert_array_equal(turns[0], [0.0, 1.0])


def test_wrong_names_parameters_and_missing_columns_say_what_to_do():
    groups = [np.array([0.0, 1.0])]
    with pytest.raises(ConfigError, match="did you mean 'mean_std'"):
        compute_advantages("mean_sdt", groups)
    with pytest.raises(ConfigError, match="no parameter weights"):
        compute_advantages("mean", groups, weights=[1.0])
    with pytest.raises(ConfigError, match="lengths_G"):
        compute_advantages("opo", groups)
    with pytest.raises(ConfigError, match="one column per reward function"):
        compute_advantages("gdpo", groups)


def test_a_function_of_the_caller_sees_live_groups_and_known_rewards_only():
    seen = []

    def rank(rewards_G, lengths_G=None):
        seen.extend(rewards_G)
        return [np.argsort(np.argsort(r)) - (len(r) - 1) / 2 for r in rewards_G]

    groups = [np.array([3.0, np.nan, 1.0, 2.0]), np.array([1.0, 1.0])]
    advantages = compute_advantages(rank, groups)
    np.testing.assert_array_equal(advantages[0], [1.0, np.nan, -1.0, 0.0])
    assert np.isnan(advantages[1]).all()
    assert [r.tolist() for r in seen] == [[3.0, 1.0, 2.0]]


@pytest.mark.parametrize(
    ("form", "returned"),
    [
        (lambda parts: [part.mean() for part in parts], r"2 arrays of the shapes \[\]"),
        (lambda parts: [part[:, None] for part in parts], r"shapes \[2, 1\], \[3, 1\]"),
        (lambda parts: parts[:1], r"1 arrays of the shapes \[3\]"),
        (np.concatenate, "arrays of the shapes"),
        (lambda parts: 1.0, "a float that is no list"),
        (lambda parts: None, "a NoneType that is no list"),
        (lambda parts: ["a" for _ in parts], "a list that is no list of arrays"),
    ],
)
def test_an_advantage_of_another_form_than_one_number_per_rollout_is_refused(form, returned):
    """Negative control: a mean would be the advantage of every sibling."""

    def mine(rewards_G, lengths_G=None):
        return form([rewards - rewards.mean() for rewards in rewards_G])

    groups = [np.array([1.0, 0.0, 0.5]), np.array([0.0, 1.0])]
    line = f"test_advantages.py:{mine.__code__.co_firstlineno}"
    with pytest.raises(
        ConfigError, match=rf"'mine' .*{line}\) returned .*{returned}.* 2 groups of 2, 3"
    ):
        compute_advantages(mine, groups)

    assigned = np.zeros(3)
    assigned[:] = np.float64(0.25)
    assert (assigned == 0.25).all()


def test_advantages_of_lists_and_of_a_generator_are_arrays():
    def lists(rewards_G, lengths_G=None):
        return ([float(reward) for reward in rewards] for rewards in rewards_G)

    (advantages,) = compute_advantages(lists, [np.array([1.0, 0.0])])
    assert advantages.tolist() == [1.0, 0.0]


def test_an_advantage_that_raises_or_takes_other_arguments_is_named_with_its_line():
    def fails(rewards_G, lengths_G=None):
        return {}["absent"]

    groups = [np.array([1.0, 0.0])]
    line = fails.__code__.co_firstlineno + 1
    with pytest.raises(
        ConfigError, match=rf"'fails' .* raised KeyError: 'absent' .*:{line} in fails\)"
    ):
        compute_advantages(fails, groups)
    with pytest.raises(ConfigError, match=r"raised TypeError: .* takes 1 positional argument"):
        compute_advantages(lambda rewards_G: rewards_G, groups)
    with pytest.raises(ConfigError, match=r"^advantage 'opo' weighs rewards by length"):
        compute_advantages("opo", groups)
