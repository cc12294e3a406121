"""Credit on a tree: each fork is a group of its own, a node is worth the mean of its leaves."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from verifiers.rollouts.rollout import Rollout
from verifiers.rollouts.status import Status
from verifiers.rollouts.steps import TrajectoryStep
from verifiers.rollouts.transcript import Transcript
from verifiers.rollouts.values import Fork
from verifiers.runtime.decoding import decode_json
from verifiers_trainer.algorithm.batch import Group, build
from verifiers_trainer.algorithm.credit import Siblings, credit, has_signal
from verifiers_trainer.algorithm.tree import Tree
from verifiers_trainer.pipeline.saved_state import load_pipeline, save_pipeline
from verifiers_trainer.pipeline.schedule import PipelineState
from verifiers_trainer.settings.config import RLConfig

SEEDS = range(40)


def settings(**changes):
    values = {
        "advantage": "mean",
        "credit": "rollout",
        "gamma": 1.0,
        "negative_advantage_weight": 1.0,
        "min_group_fraction": 0.0,
        "zero_variance": "keep",
    }
    return SimpleNamespace(**values | changes)


def of_tree(tree, rewards, turn_rewards=(), **changes):
    siblings = Siblings(np.asarray(rewards, float), np.ones(len(rewards)), turn_rewards, tree=tree)
    return credit([siblings], settings(**changes))[0]


def random_tree(rng, n=9):
    """Branches of branches, some that leave where their parent left or before, some at turn 0."""
    parents, turns, num_turns = [], [], []
    for number in range(n):
        parent = int(rng.integers(-1, number)) if number else -1
        turn = 0 if parent < 0 else int(rng.integers(0, num_turns[parent] + 1))
        parents.append(parent)
        turns.append(turn)
        num_turns.append(turn + int(rng.integers(0 if parent >= 0 else 1, 4)))
    return Tree(parents, turns, num_turns)


def oracle(tree, rewards):
    """The advantages by the definition, turn by turn, from what each rollout went through."""

    def name(number, turn):
        if turn >= tree.num_turns[number]:
            return "end", number
        if tree.parents[number] >= 0 and turn < tree.turns[number]:
            return name(tree.parents[number], turn)
        return number, turn

    paths = [
        [name(n, turn) for turn in range(tree.num_turns[n] + 1)] for n in range(len(tree.num_turns))
    ]

    def continuations(past):
        after = {}
        for path, reward in zip(paths, rewards, strict=True):
            if len(path) > len(past) and path[: len(past)] == past:
                after.setdefault(path[len(past)], []).append(reward)
        return after

    def value(leaves):
        known = [reward for reward in leaves if not math.isnan(reward)]
        return sum(known) / len(known) if known else math.nan

    def advantage(path, turn):
        fork = max(s for s in range(turn + 1) if s == 0 or len(continuations(path[:s])) > 1)
        values = {node: value(leaves) for node, leaves in continuations(path[:fork]).items()}
        known = [v for v in values.values() if not math.isnan(v)]
        if len(known) < 2:
            return math.nan
        return values[path[fork]] - sum(known) / len(known)

    return [
        [math.nan if math.isnan(reward) else advantage(path, turn) for turn in range(n)]
        for path, reward, n in zip(paths, rewards, tree.num_turns, strict=True)
    ]


@pytest.mark.parametrize("seed", SEEDS)
def test_each_turn_gets_the_value_of_its_segment_minus_its_siblings(seed):
    rng = np.random.default_rng(seed)
    tree, rewards = random_tree(rng), rng.normal(size=9)
    rewards[rng.random(9) < 0.2] = math.nan
    for computed, expected in zip(of_tree(tree, rewards), oracle(tree, rewards), strict=True):
        np.testing.assert_allclose(computed, expected, atol=1e-12)


@pytest.mark.parametrize("choice", ["mean", "mean_std", "rloo", "batch_std", "opo", "best", "none"])
@pytest.mark.parametrize("zero_variance", ["drop", "keep"])
def test_without_forks_the_credit_is_that_of_the_group(choice, zero_variance):
    rewards, num_turns = [1.0, 0.0, math.nan, 0.5], [2, 1, 3, 2]
    given = {"advantage": choice, "zero_variance": zero_variance}
    flat = of_tree(None, rewards, **given)
    in_tree = of_tree(Tree([-1] * 4, [0] * 4, num_turns), rewards, **given)
    for number, turns, advantage in zip(flat, in_tree, num_turns, strict=True):
        np.testing.assert_array_equal(turns, np.full(advantage, number))


def test_without_forks_credit_per_turn_is_that_of_the_group():
    turn_rewards = [np.array([0.5, 0.25]), np.array([0.0]), np.array([1.0, 0.0, 0.125])]
    given = {"credit": "turn", "gamma": 0.5, "turn_rewards": turn_rewards}
    flat = of_tree(None, [1.0, 0.0, 0.5], **given)
    in_tree = of_tree(Tree([-1] * 3, [0] * 3, [2, 1, 3]), [1.0, 0.0, 0.5], **given)
    for expected, computed in zip(flat, in_tree, strict=True):
        np.testing.assert_array_equal(computed, expected)


def test_credit_per_turn_compares_the_same_turn_of_those_that_share_the_past():
    # two trees; in the first, two rollouts share a turn worth .5
    tree = Tree([-1, 0, -1], [0, 1, 0], [2, 2, 1])
    turn_rewards = [np.array([0.5, 0.25]), np.array([0.5, 0.0]), np.array([0.0])]
    credited = of_tree(tree, [1.0, 0.0, 1.0], turn_rewards, credit="turn", gamma=0.5)
    # after the fork the returns are 1.25 and 0; before it .5 + .5 · mean, against the root's 1
    shared = 0.5 + 0.5 * 0.625
    mean = (shared + 1.0) / 2
    np.testing.assert_allclose(credited[0], [shared - mean, 0.625])
    np.testing.assert_allclose(credited[1], [shared - mean, -0.625])
    np.testing.assert_allclose(credited[2], [1.0 - mean])


@pytest.mark.parametrize("seed", SEEDS[:10])
def test_the_order_of_the_rollouts_does_not_matter(seed):
    rng = np.random.default_rng(seed)
    tree, rewards = random_tree(rng), rng.normal(size=9)
    order = rng.permutation(9)
    at = {int(old): new for new, old in enumerate(order)}
    shuffled = Tree(
        [at.get(tree.parents[old], -1) for old in order],
        [tree.turns[old] for old in order],
        [tree.num_turns[old] for old in order],
    )
    before, after = of_tree(tree, rewards), of_tree(shuffled, rewards[order])
    for new, old in enumerate(order):
        np.testing.assert_allclose(after[new], before[old], atol=1e-12)


@pytest.mark.parametrize("seed", SEEDS[:10])
def test_constants_do_not_matter_and_equal_rewards_teach_nothing(seed):
    rng = np.random.default_rng(seed)
    tree, rewards = random_tree(rng), rng.normal(size=9)
    for plain, moved in zip(of_tree(tree, rewards), of_tree(tree, rewards + 3), strict=True):
        np.testing.assert_allclose(plain, moved, atol=1e-9)
    equal = Siblings(np.ones(9), np.ones(9), tree=tree)
    assert not has_signal([equal], settings())
    assert all(np.isnan(a).all() for a in credit([equal], settings(zero_variance="drop"))[0])


def test_an_unknown_leaf_is_left_out_and_never_0():
    tree = Tree([-1, 0, 0, -1], [0, 1, 1, 0], [2, 2, 2, 2])
    credited = of_tree(tree, [1.0, math.nan, 0.5, 0.25])
    # the trunk is worth .75, the mean of the two that are known; were the third 0, it would be .5
    np.testing.assert_array_equal(credited[0], [0.25, 0.25])
    np.testing.assert_array_equal(credited[1], [math.nan, math.nan])
    np.testing.assert_array_equal(credited[3], [-0.25, -0.25])


def test_a_fork_has_a_signal_where_the_trunks_are_worth_the_same():
    tree = Tree([-1, 0, -1, 2], [0, 1, 0, 1], [2, 2, 2, 2])
    siblings = Siblings(np.array([1.0, 0.0, 0.0, 1.0]), np.ones(4), tree=tree)
    assert has_signal([siblings], settings())
    credited = credit([siblings], settings(zero_variance="drop"))[0]
    np.testing.assert_array_equal(credited[0], [math.nan, 0.5])
    np.testing.assert_array_equal(credited[3], [math.nan, 0.5])


def test_a_branch_leaves_at_a_turn_that_its_parent_has():
    with pytest.raises(ValueError, match="rollout 1 left rollout 0 at turn 3"):
        Tree([-1, 0], [0, 3], [2, 4])


# --- rollouts that share turns --------------------------------------------------------------------


def rollout(fork, reward, *completions):
    turns, prompt = Transcript(), [1, 2]
    for completion in completions:
        turns.append(
            TrajectoryStep(
                prompt=[],
                completion=[],
                tokens={
                    "prompt_ids": list(prompt),
                    "completion_ids": [completion, 3],
                    "completion_logprobs": [-0.5, -0.25],
                    "version": 0,
                },
                previous=turns[-1] if turns else None,
            )
        )
        prompt += [completion, 3, 9]
    return Rollout(turns, reward, status=Status("stop"), fork=fork)


def branched():
    """Two trees of two; in the first the second turn is what differs."""
    return Group(
        0,
        0,
        (
            rollout(Fork(0), 1.0, 11, 12, 13),
            rollout(Fork(1, 0, 1), 0.0, 11, 22),
            rollout(Fork(2), 0.0, 31),
            rollout(Fork(3), 0.25, 41),
        ),
    )


def test_a_batch_trains_shared_turns_with_the_value_of_their_leaves():
    config = RLConfig(batch_size=4, rollouts_per_example=4, micro_batch_size=4, share_prompts=True)
    batch = build([branched()], [], config)
    samples = [sample for part in batch.samples_G[0] for sample in part.samples]
    trained = [sample.advantages[sample.loss_mask].tolist() for sample in samples]
    # the first turn is worth .5, against the roots' mean of .25; after it 1 and 0, against .5
    assert trained == [[0.25] * 2 + [0.5] * 4, [0.25] * 2 + [-0.5] * 2, [-0.25] * 2, [0.0] * 2]
    np.testing.assert_allclose(batch.advantages_G[0], [(0.25 + 1) / 3, -0.125, -0.25, 0.0])
    tokens = sum(row.num_computed for row in batch.rows_R[0])
    assert tokens < sum(sample.num_tokens for sample in samples)  # computed once


def test_without_its_parent_in_the_group_a_branch_is_a_rollout_of_its_own():
    group = branched()
    alone = replace(group, rollouts=group.rollouts[1:])
    flat = replace(group, rollouts=tuple(replace(r, fork=None) for r in alone.rollouts))
    config = RLConfig(batch_size=3, rollouts_per_example=3, micro_batch_size=3)
    first, second = (build([each], [], config).advantages_G[0] for each in (alone, flat))
    np.testing.assert_array_equal(first, second)


def test_a_checkpoint_has_each_shared_turn_once(tmp_path):
    state = PipelineState(ready=[branched()])
    save_pipeline(tmp_path, state, 1, {})
    text = (tmp_path / "pending.jsonl").read_text()
    rows = decode_json(text.splitlines()[0])["rollouts"]
    assert [len(row["trajectory"]) for row in rows] == [3, 1, 1, 1]
    (read,) = load_pipeline(tmp_path)[0].ready
    assert [r.fork for r in read.rollouts] == [r.fork for r in branched().rollouts]
    for saved, given in zip(read.rollouts, branched().rollouts, strict=True):
        assert saved.transcript.to_json() == given.transcript.to_json()
        assert [b.token_ids.tolist() for b in saved.transcript.branches()] == [
            b.token_ids.tolist() for b in given.transcript.branches()
        ]
