"""Several roles in one rollout: whose tokens are trained, with whose rewards, and what a checkpoint
keeps of it."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from support.pipeline import pipeline_config
from support.training import letter_tasks, metrics_of, pair, run, small_policy, small_trainer
from verifiers.rollouts.rollout import Rollout
from verifiers.rollouts.status import Status
from verifiers.rollouts.turn import Turn
from verifiers.rollouts.values import Fork
from verifiers_trainer.algorithm.batch import Group, build
from verifiers_trainer.algorithm.group import apply_length_rules
from verifiers_trainer.algorithm.samples import turn_spans
from verifiers_trainer.algorithm.statistics import rollout_stats
from verifiers_trainer.pipeline.saved_state import load_pipeline, save_pipeline
from verifiers_trainer.pipeline.schedule import PipelineState

A, B, C = 100, 200, 300  # the tokens of each role are its hundred and more


def rollout(rewards, order="ab", error=None, sizes=3, turn_rewards=()):
    """One turn per letter of ``order``, each role continuing its own conversation; ``rewards`` by
    role."""
    turns, ids = [], {}
    for number, role in enumerate(order):
        start = {"a": A, "b": B, "c": C}[role] + 10 * number
        prompt = [*ids.get(role, []), 1 + ord(role), 5]
        sampled = [start + n for n in range(sizes)]
        turns.append(Turn(prompt, sampled, np.full(sizes, -0.5), 0, role=role))
        ids[role] = [*prompt, *sampled]
    for turn, env_reward in zip(turns, turn_rewards, strict=False):
        turn.env_reward = env_reward
    of_roles = {role: rewards[role] for role in dict.fromkeys(order)}
    return Rollout(
        turns, rewards.get("a", 0.0), of_roles, Status("stop", error), role_rewards=of_roles
    )


def trained(batch):
    """Token -> its advantage, of every token with loss."""
    rows = [row for rows in batch.rows_R for row in rows]
    pairs = [
        (int(token), float(advantage))
        for row in rows
        for token, advantage, mask in zip(row.token_ids, row.advantage, row.loss_mask, strict=True)
        if mask
    ]
    return sorted(pairs)


def batch_of(*rollouts, **settings):
    options = {
        "share_prompts": False,
        "batch_size": len(rollouts),
        "rollouts_per_example": len(rollouts),
    }
    return build([Group(0, 7, rollouts)], [], pipeline_config(**options | settings))


def test_where_a_branch_forked_counts_the_shared_turns_of_each_role():
    branch = replace(rollout({"a": 1.0, "b": 0.0}, "abaab"), fork=Fork(1, parent=0, turn=4))
    of_roles = {role: branch.of_role(role) for role in "ab"}
    assert {role: part.fork.turn for role, part in of_roles.items()} == {"a": 3, "b": 1}
    assert [len(part.turns) for part in of_roles.values()] == [3, 2]
    assert all((part.fork.sibling, part.fork.parent) == (1, 0) for part in of_roles.values())
    branch.turns[2].extras["is_trained"] = False
    assert branch.of_role("a").fork.turn == 2


@pytest.mark.parametrize("advantage", ["mean", "mean_std", "rloo"])
def test_advantages_compare_a_role_with_the_same_role_of_the_siblings(advantage):
    generator = np.random.default_rng(0)
    rewards = {"a": generator.normal(size=4), "b": generator.normal(size=4) + 10}
    rollouts = [
        rollout({"a": rewards["a"][n], "b": rewards["b"][n]}, "abab", sizes=1) for n in range(4)
    ]
    batch = batch_of(*rollouts, advantage=advantage)

    def expected(values):  # an independent computation
        centred = values - sum(values) / len(values)
        scale = {"mean": 1.0, "rloo": 4 / 3}.get(advantage) or 1 / (
            np.sqrt((centred**2).sum() / 3) + 1e-4
        )
        return sorted(centred * scale)

    pairs = trained(batch)
    for role, start, role_turns in (("a", A, (0, 20)), ("b", B, (10, 30))):
        for turn in role_turns:
            computed = sorted(value for token, value in pairs if token == start + turn)
            np.testing.assert_allclose(computed, expected(rewards[role]), rtol=1e-5)


def test_an_unknown_reward_leaves_out_that_role_alone():
    unknown = rollout({"a": 1.0, "b": math.nan})
    batch = batch_of(
        unknown,
        rollout({"a": 0.0, "b": 1.0}),
        rollout({"a": 0.5, "b": 0.0}),
        min_group_fraction=0.5,
    )
    pairs = trained(batch)
    assert len([token for token, _ in pairs if token < B]) == 9
    assert {value for token, value in pairs if token >= B} == {0.5, -0.5}
    assert len([token for token, _ in pairs if token >= B]) == 6


def test_a_role_that_took_no_turn_is_compared_with_nobody():
    alone = rollout({"a": 4.0}, "a")
    batch = batch_of(alone, rollout({"a": 0.0, "b": 1.0}), rollout({"a": 2.0, "b": 0.0}))
    values = {token: value for token, value in trained(batch)}
    assert {values[B + 10 + n] for n in range(3)} <= {0.5, -0.5}
    assert sorted({value for token, value in trained(batch) if token < B}) == [-2.0, 0.0, 2.0]


def test_a_group_is_dead_when_no_role_has_a_signal():
    settings = pipeline_config()
    same = {"a": 1.0, "b": 2.0}
    assert Group(0, 7, (rollout(same), rollout(same))).is_dead(settings)
    assert not Group(0, 7, (rollout(same), rollout({"a": 1.0, "b": 3.0}))).is_dead(settings)
    batch = batch_of(rollout(same), rollout({"a": 1.0, "b": 3.0}))
    # of a role whose rewards are equal, nothing
    assert {token // 100 for token, _ in trained(batch)} == {2}


def test_credit_per_turn_adds_the_rewards_of_the_role_s_own_turns():
    first = rollout({"a": 0.0, "b": 0.0}, "aba", turn_rewards=(1.0, 5.0, 2.0), sizes=1)
    second = rollout({"a": 0.0, "b": 0.0}, "aba", turn_rewards=(0.0, 0.0, 0.0), sizes=1)
    pairs = trained(batch_of(first, second, credit="turn"))
    assert pairs == [
        (A, -1.5),
        (A, 1.5),
        (A + 20, -1.0),
        (A + 20, 1.0),
        (B + 10, -2.5),
        (B + 10, 2.5),
    ]


def test_length_rules_apply_to_the_role_whose_turns_break_them():
    cut = replace(rollout({"a": 1.0, "b": 1.0}, "abab"), status=Status("stop", is_truncated=True))
    cut.turns[1].is_truncated = True
    ruled = apply_length_rules(cut, pipeline_config(zero_truncated_completions=True))
    assert ruled.role_rewards == {"a": 1.0, "b": 0.0}
    long = rollout({"a": 1.0, "b": 1.0}, "abab")
    long.turns[3].completion_ids, long.turns[3].sampler_logprobs = np.arange(99), np.zeros(99)
    dropped = apply_length_rules(long, pipeline_config(max_seq_len=20, overlong="drop"))
    assert dropped.role_rewards["a"] == 1.0
    assert math.isnan(dropped.role_rewards["b"])
    batch = batch_of(long, rollout({"a": 0.0, "b": 0.0}, "abab"), max_seq_len=20)
    assert len([token for token, _ in trained(batch) if token < B and token >= A]) == 12


def test_the_rewards_of_roles_are_metrics_of_a_step():
    stats = rollout_stats(
        [Group(0, 7, (rollout({"a": 1.0, "b": -1.0}), rollout({"a": 0.0, "b": math.nan})))]
    )
    assert (stats["reward/a"], stats["reward/b"], stats["rollouts/generated"]) == (0.5, -1.0, 2)


def test_a_checkpoint_keeps_roles_and_their_rewards(tmp_path):
    group = Group(0, 7, (rollout({"a": 1.0, "b": math.nan}, "aba"), rollout({"a": 0.0, "b": 1.0})))
    save_pipeline(tmp_path, PipelineState(ready=[group]), 0, {})
    (loaded,) = load_pipeline(tmp_path)[0].ready
    assert [turn.role for turn in loaded.rollouts[0].turns] == ["a", "b", "a"]
    settings = pipeline_config(min_group_fraction=0.5, share_prompts=False)
    assert trained(build([loaded], [], settings)) == trained(build([group], [], settings))
    assert math.isnan(loaded.rollouts[0].role_rewards["b"])


# --- a training step ------------------------------------------------------------------------------


def gradient_of(tmp_path, name, env):
    """The gradient of the first step, of rollouts that are the same in every call."""
    captured = {}

    class Capture(torch.optim.SGD):
        def step(self, closure=None):
            captured["gradient"] = [
                p.grad.clone() for group in self.param_groups for p in group["params"]
            ]

    model = small_policy()
    optimizer = Capture(model.parameters(), lr=0.0)
    with small_trainer(
        tmp_path / name,
        env,
        model,
        max_steps=1,
        optimizers=(optimizer, None),
        zero_variance="keep",
        max_grad_norm=1e9,
    ) as trainer:
        trainer.train()
    return captured["gradient"]


def test_the_gradient_of_a_step_uses_the_tokens_of_trained_roles_alone(tmp_path):
    both = gradient_of(tmp_path, "both", pair())
    only_left = gradient_of(tmp_path, "left", pair(trained_roles=["left"]))
    only_right = gradient_of(tmp_path, "right", pair(trained_roles=["right"]))
    assert any(g.abs().max() > 0 for g in only_left)
    assert any(g.abs().max() > 0 for g in only_right)
    assert not all(torch.equal(x, y) for x, y in zip(both, only_left, strict=True))
    # each gradient is a mean over its own tokens: together they span the gradient of both
    flat = [
        torch.cat([g.flatten() for g in gradients]).double()
        for gradients in (both, only_left, only_right)
    ]
    shares = torch.linalg.lstsq(torch.stack(flat[1:], 1), flat[0][:, None])
    assert (
        float(
            (torch.stack(flat[1:], 1) @ shares.solution - flat[0][:, None]).norm() / flat[0].norm()
        )
        < 1e-4
    )
    assert float(shares.solution.sum()) == pytest.approx(1.0, abs=1e-3)
    assert (shares.solution > 0).all()


# --- proposed tasks


def attempt(scores, number):
    """The role and reward of an attempt, of its equation: its score minus the mean of
    the others."""
    siblings = [score for sibling, score in enumerate(scores) if sibling != number]
    return f"solver_{number + 1}", scores[number] - sum(siblings) / len(siblings)


def test_attempts_at_an_easy_task_are_not_preferred_to_those_at_a_hard_one():
    """Two proposals: one whose attempts all succeed, one with a single success; A.. are the
    proposer's tokens."""
    solved = [[1.0, 1.0, 1.0], [1.0, 0.0, 0.0]]
    rollouts = []
    for scores in solved:
        turns = [Turn([1, 5], [A], np.full(1, -0.5), 0, role="proposer")]
        rewards = {"proposer": 1 - sum(scores) / 3}
        for number in range(3):
            role, reward = attempt(scores, number)
            rewards[role] = reward
            turns.append(
                Turn([2, 5], [B + 10 * len(rollouts) + number], np.full(1, -0.5), 0, role=role)
            )
        rollouts.append(Rollout(turns, 0.0, rewards, Status("stop"), role_rewards=rewards))
    advantages = dict(trained(batch_of(*rollouts)))
    centre = {
        role: np.mean([attempt_made.role_rewards[role] for attempt_made in rollouts])
        for role in rollouts[0].role_rewards
    }
    for number in range(3):
        for index, scores in enumerate(solved):
            role, reward = attempt(scores, number)
            assert advantages[B + 10 * index + number] == pytest.approx(reward - centre[role])
    # negative control: the plain score as reward prefers every attempt at the easy task to the same
    # at the hard one
    plain = [np.array(scores) - np.mean(solved, axis=0) for scores in solved]
    assert plain[0].tolist() == [0.0, 0.5, 0.5]
    assert advantages[B] < 0 < advantages[B + 10]


@pytest.mark.slow
def test_a_proposer_and_a_solver_learn_together(tmp_path):
    def shares(name, **options):
        """Share of proposals that are tasks, and of attempts at tasks that succeed: first and last
        five steps."""
        settings = {
            "batch_size": 32,
            "rollouts_per_example": 16,
            "micro_batch_size": 8,
            "max_tokens": 3,
        }
        env = letter_tasks(**options)
        run(
            small_trainer(
                tmp_path / name,
                env,
                max_steps=40,
                learning_rate=1e-2,
                seed=1,
                save_steps=1000,
                **settings,
            )
        )
        rows = [row for row in metrics_of(tmp_path / name) if "reward/is_task" in row]
        tasks = [np.mean([row["reward/is_task"] for row in part]) for part in (rows[:5], rows[-5:])]
        solved = [
            np.mean([row["reward/solve_rate"] for row in part]) for part in (rows[:5], rows[-5:])
        ]
        return tasks, [rate / share for rate, share in zip(solved, tasks, strict=True)]

    tasks, solved = shares("both")
    assert tasks[1] > tasks[0] + 0.3
    assert solved[1] > solved[0] + 0.2
    # nobody learns to solve
    control_tasks, control = shares("proposer", trained_roles=["proposer"])
    assert control_tasks[1] > control_tasks[0] + 0.3
    assert control[1] < solved[1] - 0.2


def spans_as_trained(batch):
    """Of each rollout, whether every turn is where its own tokens are in the samples."""
    found = []
    for group, samples_of_group in zip(batch.groups, batch.samples_G, strict=True):
        for played, samples in zip(group.rollouts, samples_of_group, strict=True):
            for turn, (sample, start, end) in zip(
                played.turns, turn_spans(played, samples), strict=True
            ):
                ids = samples.samples[sample].token_ids[start:end]
                found.append(np.array_equal(ids, turn.completion_ids))
    return found


def test_a_turn_is_where_its_tokens_are_whoever_of_the_siblings_began():
    first = rollout({"a": 0.0, "b": 1.0}, "aba")
    second = rollout({"a": 1.0, "b": 0.0}, "bab")
    assert spans_as_trained(batch_of(first, second)) == [True] * 6


@pytest.mark.parametrize("loss", ["distill", "sft"])
def test_without_rewards_the_turns_of_all_roles_are_where_their_tokens_are(loss):
    members = [rollout({"a": 0.0, "b": 1.0}, "aba"), rollout({"a": 1.0, "b": 0.0}, "bab")]
    batch = batch_of(*members, loss=loss, teacher="builtin:tiny" if loss == "distill" else None)
    assert spans_as_trained(batch) == [True] * 6
