"""Finished groups become one batch: who is in the baseline, who carries loss, how rows are cut,
what is counted."""

import math

import numpy as np
import pytest
import torch

import verifiers as vf
from support.pipeline import pipeline_config
from verifiers.rollouts.rollout import Rollout
from verifiers.rollouts.state import TrajectoryStep
from verifiers.rollouts.status import Status
from verifiers.rollouts.turn import Turn
from verifiers.types import ResponseTokens
from verifiers_trainer.algorithm.batch import Group, build
from verifiers_trainer.algorithm.group import apply_length_rules
from verifiers_trainer.algorithm.losses import LossInput, Objective, resolve_loss
from verifiers_trainer.algorithm.samples import rollout_samples
from verifiers_trainer.algorithm.statistics import reward_histogram
from verifiers_trainer.settings.config import RLConfig


def record(reward, tokens=3, prompt=2, version=0, error=None, truncated=False, metrics=None):
    turn = Turn(
        np.arange(prompt) + 1, np.arange(tokens) + 10, np.full(tokens, -0.5), version, truncated
    )
    turns = (turn,) if tokens else ()
    return Rollout(turns, reward, metrics or {}, Status("stop", error, truncated))


def group(*rewards, index=0, **fields):
    return Group(index, 7, tuple(record(reward, **fields) for reward in rewards))


def rows_of(batch):
    return [row for rows in batch.rows_R for row in rows]


def test_every_live_token_is_in_one_row_with_its_advantage_and_its_share():
    groups = [group(0, 1, 0, 1), group(1, 1, 1, 0, index=1)]
    batch = build(groups, [], pipeline_config())

    (row,) = rows_of(batch)
    assert batch.num_tokens == batch.stats["tokens/trained"] == 24
    (apart,) = rows_of(build(groups, [], pipeline_config(share_prompts=False)))
    assert apart.num_tokens == 8 * (2 + 3)
    assert row.num_tokens == apart.num_tokens == apart.num_computed
    assert row.num_computed == 2 + 3  # all eight have the same tokens
    assert batch.stats["packing/shared"] == pytest.approx(1 - 5 / 40)
    assert row.weight[row.loss_mask] == pytest.approx(np.full(24, 1 / 24))
    assert not row.weight[~row.loss_mask].any()
    assert sorted(set(row.advantage[row.loss_mask].tolist())) == [-0.75, -0.5, 0.25, 0.5]
    assert row.sampler_logprobs[row.loss_mask] == pytest.approx(-0.5)


def test_unknown_rewards_and_dead_groups_carry_no_loss():
    groups = [
        group(0, 1, math.nan, 1),
        group(1, 1, 1, 1, index=1),
        group(0, math.nan, math.nan, 1, index=2),
    ]

    batch = build(groups, [], pipeline_config())

    assert batch.num_tokens == 9
    np.testing.assert_allclose(batch.advantages_G[0], [-2 / 3, 1 / 3, math.nan, 1 / 3])
    assert np.isnan([batch.advantages_G[1], batch.advantages_G[2]]).all()
    assert (batch.stats["groups/live"], batch.stats["groups/dead"]) == (1, 2)
    assert (batch.stats["reward/unscored"], batch.stats["reward/mean"]) == (3, pytest.approx(7 / 9))


def test_dead_groups_that_are_kept_count_in_every_denominator_and_feel_the_penalty():
    """Advantage 0, weight as all others, and the gradient of beta·KL: as in GRPO, where no group is
    dropped."""
    groups = [
        group(0, 1, math.nan, 1),
        group(1, 1, 1, 1, index=1),
        group(0, math.nan, math.nan, 1, index=2),
    ]
    numbers = {"token_mean": 1 / 21, "sequence_mean": 1 / (7 * 3), "prompt_mean": 1 / (2 * 9)}
    for aggregation, weight in numbers.items():
        config = pipeline_config(zero_variance="keep", aggregation=aggregation, share_prompts=False)
        batch = build(groups, [], config)
        assert batch.num_tokens == 9 + 12  # not the group with too few known rewards
        np.testing.assert_allclose(batch.advantages_G[0], [-2 / 3, 1 / 3, math.nan, 1 / 3])
        assert batch.advantages_G[1].tolist() == [0.0] * 4
        assert np.isnan(batch.advantages_G[2]).all()
        (row,) = [packed_row.to_tensors() for packed_row in rows_of(batch)]
        first = row["loss_mask"] & (row["advantage"] != 0)
        assert row["weight"][first].tolist() == pytest.approx([weight] * 9)

        log_pi = torch.full_like(row["weight"], -0.5).requires_grad_()
        log_ref = torch.full_like(row["weight"], -0.5 + math.log(2))
        objective = Objective(resolve_loss("ppo"), beta=0.1, kl_type="k2")
        tokens = LossInput.of(row | {"reference_logprobs": log_ref}, log_pi)
        (row["weight"] * objective(tokens).losses).sum().backward()
        dead = row["loss_mask"] & ~first
        share = {"prompt_mean": 1 / (2 * 12)}.get(aggregation, weight)
        assert log_pi.grad[dead].tolist() == pytest.approx([-0.1 * math.log(2) * share] * 12)

    dropped = build(groups, [], pipeline_config())  # negative control
    assert dropped.num_tokens == 9
    (row,) = rows_of(dropped)
    assert row.weight[row.loss_mask] == pytest.approx(np.full(9, 1 / 9))


@pytest.mark.parametrize("stop", ["prompt_too_long", "max_completion_tokens_reached"])
def test_a_rollout_that_a_limit_of_the_rollout_cut_is_cut_as_one_whose_reply_was(stop):
    """No turn of it was cut: the next prompt, or the whole, was too long."""
    members = [record(0), record(1), record(0), record(1)]
    members[3].is_truncated, members[3].stop = True, stop
    members = tuple(members)
    masked = build([Group(0, 7, members)], [], pipeline_config(mask_truncated_completions=True))
    assert masked.num_tokens == 9
    assert masked.samples_G[0][3].excluded == "truncated"
    np.testing.assert_allclose(masked.advantages_G[0], [-0.5, 0.5, -0.5, 0.5])
    assert build([Group(0, 7, members)], [], pipeline_config()).num_tokens == 12


def test_overlong_and_truncated_rollouts_stay_in_the_baseline_and_carry_no_loss():
    members = (record(0), record(1, tokens=20), record(0), record(1, truncated=True))
    config = pipeline_config(max_seq_len=10, mask_truncated_completions=True)

    batch = build([Group(0, 7, members)], [], config)

    np.testing.assert_allclose(batch.advantages_G[0], [-0.5, 0.5, -0.5, 0.5])
    assert batch.num_tokens == 6
    assert (batch.stats["rollouts/overlong"], batch.stats["rollouts/truncated"]) == (1, 1)
    assert batch.stats["rollouts/trained"] == 2

    kept = build([Group(0, 7, members)], [], pipeline_config(max_seq_len=10))
    assert kept.num_tokens == 9  # the truncated one, when it is not masked


def test_a_batch_of_nothing_has_no_tokens_and_still_a_row_for_every_rank():
    batch = build([group(1, 1, 1, 1)], [], pipeline_config(), world=2)
    assert batch.num_tokens == 0
    assert [len(rows) for rows in batch.rows_R] == [1, 1]
    assert build([], [], pipeline_config()).num_tokens == 0


def test_no_sample_is_lost_when_samples_and_ranks_do_not_divide():
    groups = [group(*[0, 1, 0, 1], index=i, tokens=3 + i) for i in range(5)]
    single = build(groups, [], pipeline_config(micro_batch_tokens=24))
    three = build(groups, [], pipeline_config(micro_batch_tokens=24), world=3)
    assert len({len(rows) for rows in three.rows_R}) == 1
    for batch in (single, three):
        assert sorted(i for row in rows_of(batch) for i in row.sample_indices) == list(range(20))
        assert sum(row.weight.sum() for row in rows_of(batch)) == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize(
    ("settings", "longest"),
    [
        ({"micro_batch_size": 4, "max_seq_len": 100}, 400),
        ({"micro_batch_size": 4}, 512),
        ({"micro_batch_tokens": 60}, 60),
        ({"packing": False}, 5),
    ],
)
def test_what_bounds_a_row(settings, longest):
    groups = [group(*[0, 1] * 100, index=i) for i in range(3)]
    rows = rows_of(build(groups, [], pipeline_config(share_prompts=False, **settings)))
    assert max(row.num_tokens for row in rows) <= longest
    assert max(row.num_tokens for row in rows) > longest * 0.8


def test_a_sample_longer_than_the_bound_stands_alone_and_is_not_cut():
    config = pipeline_config(micro_batch_tokens=20, share_prompts=False)
    batch = build([group(0, 1, 0, 1, tokens=50)], [], config)
    assert [row.num_tokens for row in rows_of(batch)] == [52] * 4


def test_discarded_groups_are_in_the_statistics_alone():
    batch = build([group(0, 1, 0, 1)], [group(1, 1, 1, 1, index=1)], pipeline_config())
    assert batch.num_tokens == 12
    assert (batch.stats["rollouts/generated"], batch.stats["groups/backfilled"]) == (8, 1)
    assert batch.stats["reward/mean"] == 0.75


def test_statistics_of_failures_and_functions():
    members = (
        record(0, metrics={"f": 0.0}),
        record(math.nan, tokens=0, error="RolloutTimeout: stopped", metrics={"f": math.nan}),
        record(1, metrics={"f": 1.0}),
        record(math.nan, error="EnvironmentFault: x"),
    )
    stats = build([Group(0, 7, members)], [], pipeline_config(min_group_fraction=0.5)).stats
    assert (stats["rollouts/errors"], stats["rollouts/timeouts"]) == (2, 1)
    assert stats["reward/f"] == 0.5
    assert (stats["tokens/completion"], stats["tokens/longest"], stats["tokens/prompt"]) == (
        9,
        3,
        6,
    )
    assert (stats["reward/min"], stats["reward/max"]) == (0, 1)


def test_the_oldest_token_decides_the_age_and_groups_without_tokens_have_none():
    old = Group(0, 7, (record(0, version=5), record(1, version=np.array([3, 4, 4]))))
    assert old.oldest_version == 3
    assert Group(0, 7, (record(0, tokens=0),)).oldest_version is None


def test_the_histogram_counts_unknown_rewards_too():
    assert reward_histogram([group(0, 1, 1, 0.33333)]) == {0.0: 1, 0.333: 1, 1.0: 2}
    ((value, count),) = reward_histogram([group(math.nan, math.nan)]).items()
    assert (math.isnan(value), count) == (True, 2)


def test_truncated_rollouts_get_the_reward_zero_only_when_asked():
    cut = vf.State(reward=0.9, is_truncated=True)
    untruncated = vf.State(reward=0.9)
    zero = RLConfig(zero_truncated_completions=True)
    assert cut.rollout().reward == 0.9
    assert apply_length_rules(cut.rollout(), zero).reward == 0.0
    assert apply_length_rules(untruncated.rollout(), zero).reward == 0.9
    failed = vf.State(reward=float("nan"), is_truncated=True, error=vf.RolloutTimeout("too long"))
    assert math.isnan(apply_length_rules(failed.rollout(), zero).reward)


# --- the turns of a finished rollout --------------------------------------------------------------


def state_of(*prompts_and_completions, drop=()):
    """A rollout whose steps were recorded as the runner records them; ``drop``: steps its author
    took out again."""
    state, steps = vf.State(), []
    for version, (prompt, completion) in enumerate(prompts_and_completions):
        previous = steps[-1] if steps else None
        sampled = ResponseTokens(
            np.array(prompt, np.int32),
            np.array(completion, np.int32),
            np.full(len(completion), -0.5, np.float32),
            version,
        )
        tokens = sampled
        steps.append(
            TrajectoryStep([], [], tokens=tokens, is_truncated=version == 1, previous=previous)
        )
    state["trajectory"] = [step for number, step in enumerate(steps) if number not in drop]
    return state


GROWING = (
    ([1, 2], [3]),
    ([1, 2, 3, 4], [5, 6]),
    ([1, 2, 3, 4, 5, 6], [7]),
    ([1, 2, 3, 4, 5, 6, 7, 8, 9], []),
)
REWRITTEN = (
    ([1, 2], [3, 4]),
    ([1, 2, 4, 5], [6]),
    ([1, 2, 4, 5, 6, 7], [8]),
    ([9, 1], [2]),
    ([9, 1, 2], [3]),
)


@pytest.mark.parametrize("drop", [(), (0,), (1,), (2,), (0, 2), (0, 1, 2, 3, 4)])
@pytest.mark.parametrize("turns", [GROWING, REWRITTEN], ids=["growing", "rewritten"])
def test_turns_are_what_was_sent_and_sampled_whatever_they_share(turns, drop):
    record = state_of(*turns, drop=drop).rollout()

    kept = [turn for number, turn in enumerate(turns) if number not in drop]
    assert [(t.prompt_ids.tolist(), t.completion_ids.tolist()) for t in record.turns] == list(kept)
    assert [turn.version for turn in record.turns] == [
        n for n in range(len(turns)) if n not in drop
    ]
    for turn in record.turns:
        if turn.token_parent is not None:
            shared = turn.token_parent.full_ids()[: turn.num_shared].tolist()
            assert turn.prompt_ids[: turn.num_shared].tolist() == shared
    assert [turn.is_truncated for turn in record.turns] == [
        n == 1 for n in range(len(turns)) if n not in drop
    ]


def test_a_prefix_shared_with_a_removed_turn_is_not_one_of_the_turn_before():
    state = state_of(([1, 2], [3]), ([7, 8, 9, 9], [6]), ([7, 8, 9, 9, 6, 5], [4]), drop=(1,))
    first, third = state.rollout().turns
    assert state["trajectory"][1]["tokens"].shared == 5
    assert len(rollout_samples([first, third], 0.0).samples) == 2
    third.settle()
    # the fault: linked to another turn
    third.token_parent, third.num_shared = first, first.num_tokens
    assert len(rollout_samples([first, third], 0.0).samples) == 1


def test_steps_without_tokens_are_no_turns():
    state = state_of(*GROWING)
    state["trajectory"].insert(1, TrajectoryStep([], []))
    assert len(state.rollout().turns) == 4
    assert vf.State().rollout().turns == ()


def test_prompts_that_continue_each_other_are_kept_once():
    turns = [(list(range(1, 4 * n + 2)), [4 * n + 2, 4 * n + 3]) for n in range(20)]
    record = state_of(*turns).rollout()
    stored = sum(turn.new_prompt_ids.nbytes for turn in record.turns)
    assert stored < 4 * len(turns[-1][0])
    assert sum(turn.prompt_ids.nbytes for turn in record.turns) > 9 * stored
