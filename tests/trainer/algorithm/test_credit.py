"""Who gets the credit: each turn for what came after it, each function by its own spread; and
judges as rewards."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

import verifiers as vf
from support.training import (
    digits,
    first_batch,
    rows,
    run,
    small_config,
    small_policy,
    small_trainer,
)
from verifiers.errors import ConfigError, TooManyFaults
from verifiers.rollouts.rollout import Rollout
from verifiers.rollouts.status import Status
from verifiers.rollouts.turn import Turn
from verifiers.testing import FakeServer, ScriptedClient
from verifiers_trainer.algorithm.batch import Group, build
from verifiers_trainer.algorithm.credit import credit
from verifiers_trainer.pipeline.curriculum import RewardWeights
from verifiers_trainer.pipeline.saved_state import load_pipeline, save_pipeline
from verifiers_trainer.pipeline.schedule import PipelineState
from verifiers_trainer.policy.builtin_models import build_tiny_tokenizer
from verifiers_trainer.settings.config import RLConfig
from verifiers_trainer.trainer import RLTrainer


def turn(start, size=2):
    return Turn(np.arange(start) + 1, np.arange(size) + 1, np.full(size, -0.5), 0)


def record(reward, turn_rewards=(), turns=2, **metrics):
    made = [turn(3 + 10 * n) for n in range(turns)]
    for played_turn, env_reward in zip(made, turn_rewards, strict=False):
        played_turn.env_reward = env_reward
    return Rollout(made, reward, metrics, Status("stop"))


def config(**settings):
    return RLConfig(
        **{"batch_size": 2, "rollouts_per_example": 2, "micro_batch_size": 2, "packing": False}
        | settings
    )


def advantages_by_sample(batch):
    """Of every row, in the order of its length and advantage, what its trained tokens get."""
    made = [
        (row.num_tokens, float(row.advantage[row.loss_mask][0]))
        for rows in batch.rows_R
        for row in rows
        if row.loss_mask.any()
    ]
    return sorted(made)


# --- credit per turn ------------------------------------------------------------------------------


def test_a_turn_gets_what_came_after_it_minus_the_siblings_same_turn():
    group = Group(0, 0, (record(1.0, (0.5, 0.0)), record(0.0, (0.0, 0.0))))
    batch = build([group], [], config(credit="turn", gamma=0.5))
    # returns: [0.5 + 0.5 · 1, 1] and [0, 0]
    assert advantages_by_sample(batch) == [(5, -0.5), (5, 0.5), (15, -0.5), (15, 0.5)]
    assert [list(advantages) for advantages in batch.advantages_G] == [[0.5, -0.5]]
    undiscounted = build([group], [], config(credit="turn"))
    assert advantages_by_sample(undiscounted) == [(5, -0.75), (5, 0.75), (15, -0.5), (15, 0.5)]


def test_an_authors_function_credits_turns_too():
    def doubled(rewards_G, lengths_G=None):
        return [2 * (rewards - rewards.mean()) for rewards in rewards_G]

    group = Group(0, 0, (record(1.0, (0.5, 0.0)), record(0.0, (0.0, 0.0))))
    batch = build([group], [], config(credit="turn", gamma=0.5, advantage=doubled))
    assert advantages_by_sample(batch) == [(5, -1.0), (5, 1.0), (15, -1.0), (15, 1.0)]


def test_without_it_every_turn_gets_the_rollouts_advantage():
    """Negative control: the first turn of the second rollout earned its reward, and is punished for
    the end."""
    group = Group(0, 0, (record(1.0, (0.0, 0.0)), record(0.0, (3.0, 0.0))))
    by_sample = advantages_by_sample(build([group], [], config()))
    turns = advantages_by_sample(build([group], [], config(credit="turn")))
    assert by_sample == [(5, -0.5), (5, 0.5), (15, -0.5), (15, 0.5)]
    assert turns == [(5, -1.0), (5, 1.0), (15, -0.5), (15, 0.5)]
    assert build([group], [], config(credit="turn", advantage="none")).num_tokens == 8


def test_the_best_of_each_turn_is_trained_where_the_best_rollout_is_bad_at_one():
    """The first sibling is best at its first turn, the second at its last; the third at neither."""

    def trained(**settings):
        group = Group(
            0, 0, (record(0.0, (1.0, 0.0)), record(2.0, (0.0, 0.0)), record(0.5, (0.5, 0.0)))
        )
        # a sample for each turn
        (samples,) = build([group], [], config(advantage="best", **settings)).samples_G
        return [[sample.num_trained for sample in rollout.samples] for rollout in samples]

    assert trained(credit="turn", gamma=0.0) == [[2, 0], [0, 2], []]
    # negative control: the first turn of the second earned nothing
    assert trained() == [[], [2, 2], []]


def test_rollouts_of_different_lengths_are_compared_where_both_have_a_turn():
    group = Group(0, 0, (record(1.0, turns=1), record(0.0, turns=3)))
    made = advantages_by_sample(build([group], [], config(credit="turn")))
    assert made == [(5, -0.5), (5, 0.5), (15, 0.0), (25, 0.0)]


def test_groups_are_dead_when_no_turn_differs_or_too_few_are_known():
    settings = config(credit="turn")
    assert Group(0, 0, (record(1.0), record(1.0))).is_dead(settings)
    assert not Group(0, 0, (record(1.0, (0.5, 0.0)), record(1.0))).is_dead(settings)
    # negative control: of equal rewards
    assert Group(0, 0, (record(1.0, (0.5, 0.0)), record(1.0))).is_dead(config())
    assert Group(0, 0, (record(1.0), record(math.nan))).is_dead(settings)
    partial = Group(0, 0, (record(1.0), record(0.0), record(math.nan)))
    assert (
        len(
            advantages_by_sample(
                build([partial], [], config(credit="turn", min_group_fraction=0.5))
            )
        )
        == 4
    )


@pytest.mark.parametrize("size", [3, 5, 6, 7, 8, 10])
def test_a_group_of_equal_rewards_is_dead_whatever_the_credit(size):
    """Their mean differs from them by rounding: 1.4e-17 for six times .1, which is no signal."""
    for reward in (n / 100 for n in range(101)):
        group = Group(0, 0, tuple(record(reward) for _ in range(size)))
        assert group.is_dead(config())
        assert group.is_dead(config(credit="turn")), reward
    # negative control
    lively = Group(0, 0, (*(record(0.1) for _ in range(size - 1)), record(0.1 + 1e-12)))
    assert not lively.is_dead(config(credit="turn"))


def test_the_tokens_of_a_group_of_equal_rewards_are_in_no_denominator():
    dead, live = (
        Group(n, n, tuple(record(r) for r in rewards))
        for n, rewards in enumerate(([0.1] * 6, [0.0, 1.0]))
    )
    batch = build([dead, live], [], config(credit="turn"))
    assert batch.num_tokens == 2 * 2 * 2
    assert {float(w) for w in np.concatenate(batch.weights) if w} == {1 / 8}


def test_equal_returns_are_equal_in_whatever_order_their_rewards_came():
    """.1 + .2 + .3 and .3 + .2 + .1 differ by rounding; the returns of the later
    turns do differ."""
    group = Group(0, 0, (record(0.3, (0.1, 0.2)), record(0.1, (0.3, 0.2))))
    settings = config(credit="turn", advantage="best")
    ((first, second),) = credit(group.siblings(settings), settings)
    np.testing.assert_array_equal([first, second], [[math.nan, 1.0], [math.nan, math.nan]])
    same = Group(0, 0, (record(0.3, (0.1, 0.2)), record(0.3, (0.1, 0.2))))
    assert same.is_dead(settings)


def test_without_a_baseline_a_group_of_zero_returns_is_trained_whatever_the_credit():
    zeros = Group(0, 0, (record(0.0), record(0.0)))
    for choice in ("rollout", "turn"):
        assert not zeros.is_dead(config(credit=choice, advantage="none"))
        assert build([zeros], [], config(credit=choice, advantage="none")).num_tokens == 8


@pytest.mark.parametrize("choice", ["rollout", "turn"])
def test_a_kept_group_means_the_same_for_rollouts_and_turns(choice):
    """Its advantages are 0 and its tokens count; with "best" it has no best, and none of it is
    trained."""
    groups = [
        Group(n, n, tuple(record(r) for r in rewards))
        for n, rewards in enumerate(([0.1] * 6, [0.0, 1.0]))
    ]
    kept = build(groups, [], config(credit=choice, zero_variance="keep"))
    assert kept.num_tokens == 4 * 6 + 4 * 2
    assert kept.advantages_G[0].tolist() == [0.0] * 6
    best = build(groups, [], config(credit=choice, zero_variance="keep", advantage="best"))
    assert best.num_tokens == 4
    assert np.isnan(best.advantages_G[0]).all()
    assert build(groups, [], config(credit=choice)).num_tokens == 4 * 2  # negative control: dropped


class Guess(vf.MultiTurnEnv):
    """Two turns; a digit in the first is worth something at once."""

    async def env_response(self, messages, state):
        said = state["trajectory"][-1]["completion"][-1]["content"] or ""
        state["trajectory"][-1]["reward"] = digits([{"content": said}])
        return [{"role": "user", "content": "again"}]


def test_rewards_of_turns_reach_the_batch_and_a_run(tmp_path):
    env = Guess(dataset=rows(8), rubric=vf.Rubric(funcs=[digits]), max_turns=2)
    trainer = small_trainer(
        tmp_path, env, credit="turn", gamma=0.9, temperature=1.5, max_steps=2, inference="embedded"
    )
    batch = first_batch(trainer)
    trainer.close()
    turn_rewards = [
        record.turn_rewards
        for group in batch.groups
        for record in group.rollouts
        if record.turn_rewards
    ]
    assert turn_rewards
    assert all(
        len(rewards) == 2 and min(rewards) >= 0 and max(rewards) <= 1 for rewards in turn_rewards
    )
    log = run(
        small_trainer(
            tmp_path / "run", env, credit="turn", gamma=0.9, temperature=1.5, inference="embedded"
        )
    )
    assert all(math.isfinite(step["loss"]) for step in log.steps)


def test_a_reward_that_scoring_wrote_into_the_steps_is_not_counted_again(tmp_path):
    """Negative control of the one above: an environment that gives its turns nothing."""

    class Silent(Guess):
        async def env_response(self, messages, state):
            return [{"role": "user", "content": "again"}]

    env = Silent(dataset=rows(8), rubric=vf.Rubric(funcs=[digits]), max_turns=2)
    trainer = small_trainer(tmp_path, env, credit="turn", temperature=1.5, inference="embedded")
    batch = first_batch(trainer)
    trainer.close()
    assert {record.turn_rewards for group in batch.groups for record in group.rollouts} == {()}
    results = env.evaluate(ScriptedClient("12"), "m", num_examples=2, keep_states=True)
    # what it wrote
    assert {step["reward"] for state in results["states"] for step in state["trajectory"]} == {1.0}


class Steps:
    """A game of three moves that are worth 1, 0 and 2."""

    def reset(self, seed=None):
        self.moves = 0
        return "go", {}

    def step(self, action):
        self.moves += 1
        return "go", (1.0, 0.0, 2.0)[self.moves - 1], self.moves == 3, False, {}


@pytest.mark.parametrize(("gamma", "expected"), [(1.0, [3, 2, 2]), (0.0, [1, 0, 2])])
@pytest.mark.parametrize("weight", [1.0, 0.5])
def test_rewards_of_turns_whose_sum_is_the_reward_count_once(gamma, expected, weight):
    pytest.importorskip("gymnasium", reason="the extra 'gym'")
    from verifiers.environments.integrations.gym import GymEnv, sum_step_rewards

    rubric = vf.Rubric([sum_step_rewards, lambda completion: 1.0], [weight, 0.25])
    env = GymEnv(Steps, action_parser=str, num_train_episodes=1, num_eval_episodes=1, rubric=rubric)
    results = env.evaluate(ScriptedClient("x", tokens=True), "m", num_examples=1, keep_states=True)
    played = results["states"][0].rollout()
    group = Group(0, 0, (played,), weights={"sum_step_rewards": weight})
    (siblings,) = group.siblings(config(credit="turn", gamma=gamma))
    (returns,) = siblings.returns(gamma)
    # of the other function, at the last turn
    beside = [0.25, 0.25, 0.25] if gamma else [0, 0, 0.25]
    assert returns.tolist() == (weight * np.array(expected) + beside).tolist()

    played.turn_sum = ""  # the fault: the sum is added to the last turn as well
    (doubled,) = group.siblings(config(credit="turn", gamma=gamma))
    assert doubled.returns(gamma)[0].tolist() != returns.tolist()


@pytest.mark.parametrize("gamma", [1.0, 0.5, 0.0])
def test_a_rollout_that_is_cut_and_worth_nothing_has_returns_of_nothing(gamma):
    cut, sibling = record(3.0, (1.0, 2.0), sums=3.0), record(1.0, (1.0, 0.0), sums=1.0)
    cut.is_truncated = True
    cut.turn_sum = sibling.turn_sum = "sums"
    settings = config(credit="turn", gamma=gamma, zero_truncated_completions=True)
    group = Group(0, 0, (cut, sibling), weights={"sums": 1.0}).limited(settings)
    assert group.limited(settings).rewards.tolist() == [0.0, 1.0]
    (siblings,) = group.siblings(settings)
    zeroed, kept = siblings.returns(gamma)
    assert zeroed.tolist() == [0.0, 0.0]
    assert kept.tolist() == [1.0, 0.0]

    plain = config(credit="turn", gamma=gamma)
    (siblings,) = Group(0, 0, (cut, sibling), weights={"sums": 1.0}).siblings(plain)
    assert siblings.returns(gamma)[0].tolist() == [1.0 + 2.0 * gamma, 2.0]  # negative control


@pytest.mark.parametrize("base", [[0.0, 1.0], [1.0, 1.0]])
def test_a_schedule_and_the_rubrics_own_weights_credit_alike(base):
    """A weight of the schedule is as if the rubric had it: also from 0 to 2, and from 1 to 0."""
    for weights in ([2.0, 1.0], [0.0, 1.0]):
        _, by_rubric = weighted_game(weights, None)
        _, scheduled = weighted_game(base, {0: weights})
        returns = [
            group.siblings(config(credit="turn"))[0].returns(1.0)[0].tolist()
            for group in (by_rubric, scheduled)
        ]
        assert returns[0] == returns[1]


def weighted_game(weights, schedule):
    """(environment, group of one rollout) of the game, rescored under a schedule of weights."""
    pytest.importorskip("gymnasium", reason="the extra 'gym'")
    from verifiers.environments.integrations.gym import GymEnv, sum_step_rewards

    rubric = vf.Rubric([sum_step_rewards, lambda completion: 1.0], weights)
    env = GymEnv(Steps, action_parser=str, num_train_episodes=1, num_eval_episodes=1, rubric=rubric)
    results = env.evaluate(ScriptedClient("x", tokens=True), "m", num_examples=1, keep_states=True)
    (state,) = results["states"]
    used = rubric.plan().weights
    if schedule is not None:
        scheduled = RewardWeights(env, schedule)
        scheduled.decide(0, [state])
        used = scheduled.weights_of(0, state)
    return env, Group(0, 0, (state.rollout(),), weights=dict(used))


# --- a spread for each function -------------------------------------------------------------------


def test_gdpo_lets_functions_of_any_scale_count_alike():
    weights = {"right": 1.0, "short": 1.0}
    records = [
        record(r + 100 * s, right=r, short=100 * s) for r, s in ((1, 0), (0, 1), (0, 0), (1, 1))
    ]
    group = Group(0, 0, tuple(records), weights=weights)
    settings = {"batch_size": 4, "rollouts_per_example": 4, "micro_batch_size": 4}
    (advantages,) = build([group], [], config(**settings, advantage="gdpo")).advantages_G
    assert advantages[0] == pytest.approx(advantages[1], abs=1e-3)
    assert advantages[2] == pytest.approx(-advantages[3], abs=1e-3)
    (summed,) = build([group], [], config(**settings, advantage="mean_std")).advantages_G
    # negative control: in the sum, the large one decides alone
    assert summed[1] > 40 * abs(summed[0] - summed[2])


def test_gdpo_keeps_a_group_whose_sum_is_constant_and_needs_the_parts():
    parts = (record(1.0, right=1.0, short=0.0), record(1.0, right=0.0, short=1.0))
    group = Group(0, 0, parts, weights={"right": 1.0, "short": 1.0})
    assert not group.is_dead(config(advantage="gdpo"))
    assert group.is_dead(config())
    with pytest.raises(ConfigError, match="only the reward is known: use mean_std"):
        build([Group(0, 0, parts)], [], config(advantage="gdpo"))


def test_gdpo_trains_and_takes_the_rubrics_weights(tmp_path):
    def length(completion, **_):
        return 1000.0 * len(completion[-1]["content"] or "")

    env = vf.SingleTurnEnv(
        dataset=rows(8), rubric=vf.Rubric(funcs=[digits, length], weights=[1.0, 0.5])
    )
    trainer = small_trainer(tmp_path, env, advantage="gdpo", max_steps=2, inference="embedded")
    log = run(trainer)
    assert all(math.isfinite(step["loss"]) for step in log.steps)
    assert {tuple(group.weights.items()) for group in trainer.batch.groups} == {
        (("digits", 1.0), ("length", 0.5))
    }


def test_a_checkpoint_keeps_what_advantages_need(tmp_path):
    group = Group(
        3, 7, (record(1.0, (0.5, 0.0), right=1.0), record(0.0)), env="sums", weights={"right": 2.0}
    )
    save_pipeline(tmp_path, PipelineState(ready=[group]), 5, {})
    (again,), version = (load_pipeline(tmp_path)[0].ready, load_pipeline(tmp_path)[1])
    assert (again.env, again.weights, version) == ("sums", {"right": 2.0}, 5)
    assert again.rollouts[0].turn_rewards == (0.5, 0.0)
    settings = config(credit="turn")
    (saved,), (kept,) = (
        credit(group_made.siblings(settings), settings) for group_made in (again, group)
    )
    for turns, expected in zip(saved, kept, strict=True):
        np.testing.assert_array_equal(turns, expected)


# --- judges ---------------------------------------------------------------------------------------


def test_a_policy_learns_what_a_judge_on_a_server_rewards(tmp_path):
    """The judge reads the answer in its question, and is asked once for every rollout."""
    asked = []

    def verdict(request):
        text = str(request.prompt[-1].content)
        asked.append(text)
        answer = text.partition("<<")[2].partition(">>")[0]
        return f"<score>{10 * sum(c.isdigit() for c in answer) / max(1, len(answer)):.1f}</score>"

    with FakeServer(verdict) as server:
        rubric = vf.JudgeRubric(
            judge_client=vf.ClientConfig(api_base_url=server.url),
            judge_models=["judge"],
            judge_prompt="Rate <<{response}>> from 0 to 10.",
        )
        rubric_env = vf.SingleTurnEnv(dataset=rows(40), rubric=rubric)
        trainer = small_trainer(
            tmp_path,
            rubric_env,
            batch_size=16,
            rollouts_per_example=8,
            learning_rate=6e-3,
            max_tokens=4,
            max_steps=25,
            inference="embedded",
        )
        log = run(trainer)
    rewards = [step["reward/mean"] for step in log.steps]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.2 * max(rewards)
    assert len(asked) >= 25 * 16
    assert all(step["reward/unscored"] == 0 for step in log.steps)


# --- advantages of the environment ----------------------------------------------------------------


def supplied(*advantages, reward=1.0):
    return Group(
        0,
        7,
        tuple(replace(record(reward, turns=1), advantage=advantage) for advantage in advantages),
    )


def test_the_environments_advantages_are_trained_unchanged():
    # their sum is not 0: as given
    batch = build([supplied(0.25, -3.0, 0.0)], [], config(advantage="environment"))
    assert advantages_by_sample(batch) == [(5, -3.0), (5, 0.0), (5, 0.25)]
    assert (
        len(advantages_by_sample(build([supplied(0.25, -3.0)], [], config(advantage="mean")))) == 0
    )  # equal rewards


@pytest.mark.parametrize("missing", [None, math.nan, math.inf])
def test_a_rollout_to_which_the_environment_gave_none_is_refused(missing):
    with pytest.raises(
        ConfigError, match=r"example 7 with the reward 1 the advantage .*@vf.advantage method"
    ):
        build([supplied(0.5, missing)], [], config(advantage="environment"))


def test_a_rollout_that_failed_or_has_no_reward_needs_none():
    group = supplied(0.5, None, -0.5, math.nan)
    unknown = replace(group.rollouts[1], reward=math.nan)
    failed = replace(group.rollouts[3], status=Status(error="ScoringError: no baseline"))
    group = replace(group, rollouts=(group.rollouts[0], unknown, group.rollouts[2], failed))
    batch = build([group], [], config(advantage="environment", min_group_fraction=0.5))
    np.testing.assert_array_equal(batch.advantages_G[0], [0.5, math.nan, -0.5, math.nan])
    assert batch.stats["rollouts/trained"] == 2
    assert group.is_dead(config(advantage="environment", min_group_fraction=0.75))


def test_a_group_of_advantages_zero_is_dead_and_one_of_a_single_rollout_is_not():
    settings = config(advantage="environment")
    assert supplied(0.0, 0.0).is_dead(settings)
    assert not supplied(0.5, 0.5).is_dead(settings)
    assert not supplied(-1.0).is_dead(settings)
    assert RLConfig(advantage="environment", rollouts_per_example=1, batch_size=8).problems() == []


class FirstIsBest(vf.Rubric):
    """The advantage of a sibling from its place alone; nothing else gives 0.75."""

    @vf.advantage
    def by_place(self, states):
        return [0.75, *[-0.25] * (len(states) - 1)]


def first_is_best(**options):
    return vf.SingleTurnEnv(dataset=rows(8), rubric=FirstIsBest(funcs=[digits]), **options)


@pytest.mark.parametrize("settings", [{}, {"advantage": "environment"}], ids=["not set", "set"])
def test_a_run_trains_on_what_the_rubrics_method_returns(tmp_path, settings):
    trainer = small_trainer(tmp_path, first_is_best(), **settings)
    assert trainer.args.advantage == "environment"
    run(trainer)
    for advantages in trainer.batch.advantages_G:
        assert list(advantages) == [0.75, -0.25, -0.25, -0.25]
    trained = {
        value
        for rows in trainer.batch.rows_R
        for row in rows
        for value in row.advantage[row.loss_mask]
    }
    assert trained == {0.75, -0.25}


def test_an_advantage_that_is_set_takes_precedence_and_says_so(tmp_path, caplog):
    """Negative control: the trainer's own, centred on the mean, are other numbers."""
    trainer = small_trainer(tmp_path, first_is_best(), advantage="mean", zero_variance="keep")
    batch = first_batch(trainer)
    trainer.close()
    assert all(list(advantages) != [0.75, -0.25, -0.25, -0.25] for advantages in batch.advantages_G)
    assert (
        "the @vf.advantage method of SingleTurnEnv is not used: the setting advantage is 'mean'"
        in caplog.text
    )


def test_without_the_method_the_setting_is_refused(tmp_path):
    with pytest.raises(
        ConfigError, match=r"a rubric of SingleTurnEnv has no @vf.advantage method to compute it"
    ):
        small_trainer(tmp_path, advantage="environment")
    plain = vf.SingleTurnEnv(dataset=rows(8), rubric=vf.Rubric(funcs=[digits]))
    mixed = vf.EnvGroup([first_is_best(), plain], env_names=["own", "plain"])
    with pytest.raises(ConfigError, match=r"a rubric of EnvGroup has no @vf.advantage method"):
        small_trainer(tmp_path, mixed, advantage="environment")
    assert small_trainer(tmp_path, mixed).args.advantage == "mean"


def test_what_changes_rewards_afterwards_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="zero_truncated_completions changes"):
        small_trainer(
            tmp_path, first_is_best(), advantage="environment", zero_truncated_completions=True
        )

    class OwnTrainer(RLTrainer):
        def compute_rewards(self, completions, prompts):
            return [0.0] * len(completions)

    trainer = OwnTrainer(
        small_policy(), first_is_best(), small_config(tmp_path), build_tiny_tokenizer()
    )
    with pytest.raises(
        ConfigError, match="compute_rewards changes rewards after the environment computed"
    ):
        trainer.train()


def test_a_method_that_fails_ends_the_run_with_its_error(tmp_path):
    class Broken(vf.Rubric):
        @vf.advantage
        def none_at_all(self, states):
            raise ConnectionError("no critic")

    env = vf.SingleTurnEnv(dataset=rows(8), rubric=Broken(funcs=[digits]))
    with pytest.raises(TooManyFaults, match="no critic"):
        small_trainer(tmp_path, env).train()


def test_the_environments_advantages_of_waiting_rollouts_are_saved(tmp_path):
    state = PipelineState(ready=[supplied(0.25, math.nan, None)])
    save_pipeline(tmp_path, state, 3, {})
    (group,) = load_pipeline(tmp_path)[0].ready
    assert [rollout.advantage for rollout in group.rollouts] == [0.25, None, None]


def test_a_function_that_does_not_apply_is_neither_better_nor_worse_than_its_siblings():
    rollouts = [
        Rollout([turn(3)], 2.0, {"a": 1.0, "b": 1.0}),
        Rollout([turn(3)], 1.0, {"a": 0.0, "b": 1.0}),
        Rollout([turn(3)], 1.0, {"a": 1.0}, not_applicable=["b"]),
        Rollout([turn(3)], math.nan, {"a": 1.0, "b": math.nan}),
    ]
    group = Group(0, 0, tuple(rollouts), weights={"a": 1.0, "b": 1.0})
    assert group.scores[:3].tolist() == [[1.0, 1.0], [0.0, 1.0], [1.0, 1.0]]
    assert np.isnan(group.scores[3]).all()
