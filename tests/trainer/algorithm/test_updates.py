"""A batch that is divided among several optimizer steps: what each is trained on, against updates
made by hand."""

import copy
import functools
import itertools
import json
import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import TrainerCallback

from support.pipeline import pipeline_config
from support.training import (
    metrics_of,
    run,
    small_config,
    small_policy,
    small_trainer,
    toy_env,
    weights_hash,
)
from verifiers.rollouts.rollout import Rollout
from verifiers.rollouts.status import Status
from verifiers.rollouts.turn import Turn
from verifiers_trainer.algorithm.advantages import compute_advantages
from verifiers_trainer.algorithm.batch import Group, build
from verifiers_trainer.algorithm.diagnostics import RatioMeter
from verifiers_trainer.policy import checkpoint_files
from verifiers_trainer.policy.builtin_models import build_tiny_tokenizer
from verifiers_trainer.run.step import Step
from verifiers_trainer.trainer import RLTrainer


def rollout(reward, tokens=3, turns=1):
    made = tuple(
        Turn(np.arange(2) + 1, np.arange(tokens) + 10, np.full(tokens, -0.5), 0, False)
        for _ in range(turns)
    )
    return Rollout(made, reward, {}, Status("stop"))


def groups_of(count, rewards=(0.0, 1.0, 0.0, 1.0)):
    return [
        Group(index, index, tuple(rollout(reward, 3 + n) for n, reward in enumerate(rewards)))
        for index in range(count)
    ]


def rollouts_in(step):
    return [id(played) for group in step.groups for played in group.rollouts]


# --- how a batch is divided -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_groups", "updates"), [(4, 2), (5, 2), (5, 4), (3, 3), (2, 4), (1, 4), (1, 3), (3, 4)]
)
def test_every_rollout_is_in_one_update_and_groups_stay_whole_where_there_are_enough(
    num_groups, updates
):
    groups = groups_of(num_groups)
    batch = build(groups, [], pipeline_config(updates_per_batch=updates))
    assert len(batch.steps) == updates
    assert Counter(
        rollout_id for step in batch.steps for rollout_id in rollouts_in(step)
    ) == Counter(rollouts_in(batch))
    sizes = [len(rollouts_in(step)) for step in batch.steps]
    assert max(sizes) - min(sizes) <= (4 if num_groups >= updates else 1)
    if num_groups >= updates:
        assert all(len(group.rollouts) == 4 for step in batch.steps for group in step.groups)
    assert sum(step.num_tokens for step in batch.steps) == batch.num_tokens > 0
    for step in batch.steps:  # a step of its own: its weights are a mean over its tokens
        rows = [row for rows in step.rows_R for row in rows]
        assert sum(row.weight.sum() for row in rows) == pytest.approx(1)
        assert sum(int(row.loss_mask.sum()) for row in rows) == step.num_tokens


def test_the_advantages_are_those_of_the_whole_group_and_batch():
    groups = [
        *groups_of(1),
        *(Group(1, 1, (rollout(0.0), rollout(0.2), rollout(0.1), rollout(0.3))),),
    ]
    for advantage in ("mean", "batch_std"):
        single = build(groups, [], pipeline_config(advantage=advantage))
        several = build(groups, [], pipeline_config(advantage=advantage, updates_per_batch=8))
        advantages_found = np.concatenate(
            [values for step in several.steps for values in step.advantages_G]
        )
        np.testing.assert_array_equal(advantages_found, np.concatenate(single.advantages_G))
    # negative control
    alone = build(groups[:1], [], pipeline_config(advantage="batch_std")).advantages_G[0]
    assert not np.allclose(alone, single.advantages_G[0])


def test_a_batch_of_one_update_is_the_step():
    batch = build(groups_of(2), [], pipeline_config())
    assert batch.updates == ()
    assert batch.steps == (batch,)


def test_rollouts_without_loss_leave_no_update_empty_and_are_counted_once():
    groups = [
        Group(0, 0, (rollout(0.0), rollout(1.0), rollout(float("nan")), rollout(float("nan"))))
    ]
    batch = build(groups, [], pipeline_config(updates_per_batch=2, min_group_fraction=0.5))
    assert [step.num_tokens for step in batch.steps] == [3, 3]
    assert sum(step.stats["rollouts/generated"] for step in batch.steps) == 4
    assert sum(step.stats["reward/unscored"] for step in batch.steps) == 2


def test_discarded_groups_are_counted_in_one_step_each():
    dead = groups_of(3, rewards=(1.0, 1.0, 1.0, 1.0))
    batch = build(groups_of(2), dead, pipeline_config(updates_per_batch=2))
    assert [step.stats["groups/backfilled"] for step in batch.steps] == [2, 1]
    assert batch.stats["groups/backfilled"] == 3


# --- weights of advantages ------------------------------------------------------------------------


def test_negative_advantages_have_their_weight_and_positive_ones_stay():
    for weight in (0.0, 0.25, 1.0):
        batch = build(groups_of(1), [], pipeline_config(negative_advantage_weight=weight))
        assert batch.advantages_G[0].tolist() == [-0.5 * weight, 0.5, -0.5 * weight, 0.5]
        assert batch.num_tokens == 3 + 4 + 5 + 6
    turns = Group(0, 0, (rollout(0.0, turns=2), rollout(1.0, turns=2)))
    settings = {"credit": "turn", "rollouts_per_example": 2, "negative_advantage_weight": 0.5}
    batch = build([turns], [], pipeline_config(**settings))
    assert batch.advantages_G[0].tolist() == [-0.25, 0.5]


def test_the_best_of_a_group_are_trained_alone():
    (advantages,) = compute_advantages("best", [np.array([0.2, 0.7, np.nan, 0.7])])
    np.testing.assert_array_equal(advantages, [np.nan, 1.0, np.nan, 1.0])
    (dead,) = compute_advantages("best", [np.array([0.7, 0.7, 0.7, 0.7])])
    assert np.isnan(dead).all()
    batch = build(groups_of(1), [], pipeline_config(advantage="best"))
    assert batch.num_tokens == 4 + 6
    assert batch.stats["rollouts/trained"] == 2


# --- against updates made by hand -----------------------------------------------------------------

RUN = {"deterministic": True, "max_off_policy_steps": 0, "batch_size": 16, "max_grad_norm": 1e9}
RUN |= {"optim": "sgd", "learning_rate": 0.5}
"""Four groups of four; steps that are linear in the gradient, so that rounding stays as small as it
is."""


class Batches:
    """A callback that keeps the step of every training step, in order."""

    def __init__(self, trainer):
        self.steps, plain = [], trainer.training_step

        def training_step(model, step, *args):
            self.steps.append(step)
            return plain(model, step, *args)

        trainer.training_step = training_step


def logprobs_of(model, turn, temperature=1.0):
    """Log-probabilities of the sampled tokens of a turn, by the stock model on this
    sequence alone."""
    ids = torch.tensor(np.concatenate([turn.prompt_ids, turn.completion_ids]).astype(np.int64))[
        None
    ]
    logits = model(input_ids=ids).logits[0].float() / temperature
    start = len(turn.prompt_ids)
    return torch.log_softmax(logits[start - 1 : -1], -1).gather(-1, ids[0, start:, None])[:, 0]


def by_hand(model, updates, passes, policy_loss):
    """SGD on the updates in their order, as often as there are passes; an update is a list of
    (turn, advantage)."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    before = [[logprobs_of(model, turn).detach() for turn, _ in update] for update in updates]
    losses = []
    for _ in range(passes):
        for update, old in zip(updates, before, strict=True):
            optimizer.zero_grad()
            num_tokens = sum(len(turn.completion_ids) for turn, _ in update)
            loss = torch.zeros(())
            for (turn, advantage), log_old in zip(update, old, strict=True):
                loss = (
                    loss
                    + policy_loss(logprobs_of(model, turn), turn, advantage, log_old).sum()
                    / num_tokens
                )
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
    return losses


def clipped(log_old):
    def loss(log_pi, turn, advantage, before):
        old = before if log_old == "recomputed" else torch.tensor(turn.sampler_logprobs)
        ratio = (log_pi - old).exp()
        return -torch.minimum(ratio * advantage, ratio.clamp(0.98, 1.02) * advantage)

    return loss


def trained_by_hand(trainer, policy_loss, passes=1):
    """(losses of the trainer, of the same updates by hand): the model that is not the trainer's is
    updated."""
    model, before = copy.deepcopy(trainer.model), weights_hash(trainer.model)
    kept = Batches(trainer)
    log = run(trainer)
    updates = [
        [
            (played.turns[0], float(advantage))
            for group, advantages in zip(step.groups, step.advantages_G, strict=True)
            for played, advantage in zip(group.rollouts, advantages, strict=True)
            if not np.isnan(advantage)
        ]
        for step in kept.steps[: len(kept.steps) // passes]
    ]
    losses = by_hand(model, updates, passes, policy_loss)
    for name, parameter in trainer.model.named_parameters():
        assert torch.allclose(parameter, dict(model.named_parameters())[name], atol=2e-6), name
    assert weights_hash(trainer.model) != before
    return [step["loss"] for step in log.steps], losses


@pytest.mark.parametrize(
    "layout",
    [{}, {"packing": False}, {"micro_batch_tokens": 40}, {"share_prompts": False}],
    ids=str,
)
def test_updates_of_one_batch_are_updates_made_by_hand(tmp_path, layout):
    settings = {
        **RUN,
        **layout,
        "loss": "ppo",
        "epsilon": 0.02,
        "updates_per_batch": 4,
        "max_steps": 4,
    }
    losses_found, expected = trained_by_hand(
        small_trainer(tmp_path, **settings), clipped("sampler")
    )
    assert losses_found == pytest.approx(expected, abs=2e-6)
    assert len(set(np.round(losses_found, 9))) == 4  # four different parts


def test_passes_over_a_batch_repeat_its_updates_in_their_order(tmp_path):
    settings = {
        **RUN,
        "loss": "ppo",
        "epsilon": 0.02,
        "updates_per_batch": 2,
        "num_iterations": 2,
        "max_steps": 4,
    }
    trainer = small_trainer(tmp_path, **settings)
    losses_found, expected = trained_by_hand(trainer, clipped("sampler"), passes=2)
    assert losses_found == pytest.approx(expected, abs=2e-6)


def test_old_log_probabilities_of_every_update_are_of_the_policy_that_began_the_batch(tmp_path):
    settings = {
        **RUN,
        "loss": "ppo",
        "epsilon": 0.02,
        "updates_per_batch": 2,
        "max_steps": 2,
        "anchor": "recomputed",
    }
    losses_found, expected = trained_by_hand(
        small_trainer(tmp_path, **settings), clipped("recomputed")
    )
    assert losses_found == pytest.approx(expected, abs=2e-6)


def test_the_recipe_best_of_group_is_cross_entropy_on_the_best(tmp_path):
    def entropy(log_pi, turn, advantage, before):
        assert advantage == 1
        return -log_pi

    trainer = small_trainer(
        tmp_path, **RUN, recipe="best_of_group", updates_per_batch=2, num_iterations=1, max_steps=2
    )
    untrained = copy.deepcopy(trainer.model)
    kept = Batches(trainer)
    run(trainer)
    first = kept.steps[0]
    best = [
        played.turns[0]
        for group in first.groups
        for played in group.rollouts
        if played.reward == max(sibling.reward for sibling in group.rollouts)
    ]
    total, count = 0.0, 0
    for turn in best:
        ids = torch.tensor(np.concatenate([turn.prompt_ids, turn.completion_ids]).astype(np.int64))
        labels = ids.clone()
        labels[: len(turn.prompt_ids)] = -100
        logits = untrained(input_ids=ids[None]).logits[0, :-1].detach()
        total += float(cross_entropy(logits, labels[1:], reduction="sum"))
        count += len(turn.completion_ids)
    assert metrics_of(tmp_path)[0]["loss"] == pytest.approx(total / count, abs=1e-5)
    assert (
        first.num_tokens
        == count
        < sum(played.num_sampled for group in first.groups for played in group.rollouts)
    )


# --- a run of such batches ------------------------------------------------------------------------


def test_a_step_has_the_numbers_of_its_own_rollouts_and_the_batch_is_counted_once(tmp_path):
    settings = {
        **RUN,
        "updates_per_batch": 4,
        "num_iterations": 2,
        "max_steps": 8,
        "log_completions": True,
    }
    log = run(small_trainer(tmp_path, **settings))
    assert [row["batch/step"] for row in log.steps] == list(range(1, 9))
    once = [row for row in log.steps if row["batch/step"] <= 4]
    assert (
        sum(row["rollouts/generated"] for row in once)
        == sum(r["rollouts/generated"] for r in log.steps[4:])
        >= 16
    )
    assert [row["time/wait_generation"] > 0 for row in log.steps] == [True] + [False] * 7
    assert {row["staleness/max"] for row in log.steps} == {0}
    for step in range(1, 9):
        lines = (tmp_path / "completions" / f"step-{step}.jsonl").read_text().splitlines()
        assert sum(json.loads(line)["trained"] for line in lines) == 4
        assert len(lines) == log.steps[step - 1]["rollouts/generated"]


def test_the_lag_counts_batches_of_several_updates(tmp_path):
    log = run(
        small_trainer(
            tmp_path, updates_per_batch=2, num_iterations=2, max_steps=16, max_off_policy_steps=2
        )
    )
    ages = [step["staleness/max"] for step in log.steps]
    assert 0 < max(ages) <= 2
    assert len(log.steps) == 16


def test_checkpoints_lie_between_batches_and_a_resumed_run_is_the_same_bit_for_bit(tmp_path):
    settings = {
        "deterministic": True,
        "updates_per_batch": 2,
        "num_iterations": 2,
        "max_off_policy_steps": 1,
    }
    settings |= {"save_strategy": "steps", "save_steps": 3}
    uninterrupted = small_trainer(tmp_path / "whole", max_steps=8, **settings)
    log = run(uninterrupted)
    assert sorted(step for step, _ in checkpoint_files.steps_in(tmp_path / "whole")) == [4, 8]
    run(small_trainer(tmp_path / "parts", max_steps=4, **settings))
    resumed_trainer = small_trainer(tmp_path / "parts", max_steps=8, **settings)
    assert run(resumed_trainer, resume_from_checkpoint=True).losses == log.losses[4:]
    assert weights_hash(resumed_trainer.model) == weights_hash(uninterrupted.model)


def fail_at(trainer, step):
    """Train until an error of the user's code ends the run after ``step`` optimizer steps."""
    plain = trainer.training_step

    def training_step(*arguments):
        if trainer.state.global_step == step:
            raise ZeroDivisionError("a bug")
        return plain(*arguments)

    trainer.training_step = training_step
    with pytest.raises(ZeroDivisionError):
        trainer.train()


def test_a_run_that_fails_amid_a_batch_resumes_at_the_next_of_its_steps(tmp_path):
    stopped_at = 7
    settings = {"deterministic": True, "updates_per_batch": 2, "num_iterations": 2, "max_steps": 12}
    settings |= {"max_off_policy_steps": 1, "batch_size": 8}
    uninterrupted = small_trainer(tmp_path / "whole", **settings)
    log = run(uninterrupted)
    broken = small_trainer(tmp_path / "parts", **settings)
    fail_at(broken, stopped_at)
    assert [step for step, _ in checkpoint_files.steps_in(tmp_path / "parts")] == [stopped_at]
    resumed_trainer = small_trainer(tmp_path / "parts", **settings)
    resumed = run(resumed_trainer, resume_from_checkpoint=True)
    assert resumed.losses == log.losses[stopped_at:]
    assert weights_hash(resumed_trainer.model) == weights_hash(uninterrupted.model)


class AtHand(RLTrainer):
    """Trains on finished rollouts of equal tokens whose rewards differ from step to step."""

    def get_batch(self, step):
        return [replace(group, rollouts=group.rollouts[step % 2 :]) for group in groups_of(2)]


def written(folder, **settings):
    """A trainer on text that no policy sampled: its ratio is to the policy of the batch."""
    prompts = [[{"role": "user", "content": f"q{n // 4}"}] for n in range(16)]
    answers = [[{"role": "assistant", "content": "ab" if n % 2 else "12"}] for n in range(16)]
    dataset = {
        "prompts": prompts,
        "completions": answers,
        "rewards": [float(n % 2 == 0) for n in range(16)],
    }
    return RLTrainer(
        small_policy(),
        None,
        small_config(folder, **settings),
        build_tiny_tokenizer(),
        dataset=dataset,
    )


def at_hand(folder, **settings):
    trainer = AtHand(
        small_policy(), toy_env(), small_config(folder, **settings), build_tiny_tokenizer()
    )
    trainer.checks_sampler = False
    return trainer


KINDS = {
    "sampled, against the policy of the batch": (
        small_trainer,
        {"loss": "ppo", "anchor": "recomputed", "tis_cap": 2.0},
    ),
    "written": (written, {"loss": "ppo"}),
    "at hand": (at_hand, {"loss": "reinforce"}),
    "with a reference that follows": (
        small_trainer,
        {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 1},
    ),
}


STOPPED = {
    "deterministic": True,
    "updates_per_batch": 2,
    "num_iterations": 2,
    "max_steps": 8,
    "batch_size": 8,
    "learning_rate": 0.01,
}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """(losses, hash of the weights) of a whole run of a kind, which is trained once."""

    @functools.cache
    def run_of(kind):
        make, extra = KINDS[kind]
        trainer = make(tmp_path_factory.mktemp("whole"), **STOPPED | extra)
        return run(trainer).losses, weights_hash(trainer.model)

    return run_of


@pytest.mark.parametrize("stopped_at", [1, 2, 7])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_fixed_for_a_batch_and_its_position_survive_a_stop_within_it(
    tmp_path, uninterrupted, kind, stopped_at
):
    """Losses equal those of the run that was not stopped, bit for bit, at every update."""
    make, extra = KINDS[kind]
    losses, weights = uninterrupted(kind)
    fail_at(make(tmp_path, **STOPPED | extra), stopped_at)
    resumed_trainer = make(tmp_path, **STOPPED | extra)
    assert run(resumed_trainer, resume_from_checkpoint=True).losses == losses[stopped_at:]
    assert weights_hash(resumed_trainer.model) == weights


def test_the_rows_of_an_update_do_not_change_it(tmp_path):
    """Gradient accumulation: one row, or a row for each sample."""
    settings = {**RUN, "updates_per_batch": 2, "max_steps": 4}
    single = run(small_trainer(tmp_path / "one", micro_batch_tokens=512, **settings))
    many = run(small_trainer(tmp_path / "many", micro_batch_tokens=24, **settings))
    assert many.steps[0]["packing/rows"] > single.steps[0]["packing/rows"] == 1
    assert [row["loss"] for row in many.steps] == pytest.approx(
        [row["loss"] for row in single.steps], abs=2e-6
    )


def test_finished_rollouts_are_divided_too_and_keep_their_rewards(tmp_path):
    prompts = [[{"role": "user", "content": f"q{n // 2}"}] for n in range(8)]
    answers = [[{"role": "assistant", "content": "ab" if n % 2 else "12"}] for n in range(8)]
    rewards = [float(n % 2 == 0) for n in range(8)]
    dataset = {"prompts": prompts, "completions": answers, "rewards": rewards}
    config = small_config(tmp_path, updates_per_batch=2, max_steps=4, log_completions=True)
    log = run(RLTrainer(small_policy(), None, config, build_tiny_tokenizer(), dataset=dataset))
    assert [row["rollouts/generated"] for row in log.steps] == [4] * 4
    assert [row["reward/mean"] for row in log.steps] == [0.5] * 4


def test_the_wait_for_a_batch_is_compared_with_the_time_of_all_its_steps(tmp_path):
    trainer = small_trainer(tmp_path, updates_per_batch=4, max_steps=8)
    recorder, batch = trainer.recorder, build(groups_of(1), [], pipeline_config())
    alarms = []
    for step in range(1, 9):
        waited = 0.0 if (step - 1) % 4 else 5.0 if step == 1 else 50.0
        numbers = {"time/wait_generation": waited, "time/step": waited + 1.0}
        now = Step(batch, [], RatioMeter(step), numbers=numbers)
        recorder.warn(step, now)
        alarms.append("alarm/waiting" in now.numbers)
    # 5 s of 9, then 50 of 54; of the first step alone both are above 80 %
    assert alarms == [False] * 7 + [True]


# --- an update without a trained token ------------------------------------------------------------


class HalfEqual(RLTrainer):
    """Each batch has a group with a signal and one of equal rewards, in whichever order ``lively``
    says."""

    lively = (0, 1)

    def get_batch(self, step):
        order = np.roll([0, 1], self.lively[step % 2])
        made = [groups_of(1)[0], Group(1, 1, tuple(rollout(1.0) for _ in range(4)))]
        return [made[n] for n in order]


@pytest.mark.parametrize("optimizer", ["adamw_torch", "sgd"])
def test_an_update_without_a_trained_token_moves_nothing(tmp_path, optimizer):
    """Momentum and weight decay would; the schedule and the number of the policy go on."""
    settings = {
        "updates_per_batch": 2,
        "advantage": "best",
        "zero_variance": "keep",
        "loss": "reinforce",
    }
    settings |= {
        "optim": optimizer,
        "weight_decay": 0.1,
        "lr_scheduler_type": "linear",
        "learning_rate": 0.01,
    }
    settings |= {"optim_args": "momentum=0.9"} if optimizer == "sgd" else {}
    config = small_config(tmp_path, max_steps=4, **settings)
    trainer = HalfEqual(small_policy(), toy_env(), config, build_tiny_tokenizer())
    trainer.checks_sampler = False
    hashes, rates = [weights_hash(trainer.model)], []

    class Watch(TrainerCallback):
        def on_step_end(self, *_, **__):
            hashes.append(weights_hash(trainer.model))
            rates.append(trainer.last_step["learning_rate"])

    trainer.add_callback(Watch())
    trainer.train()
    trained = [row["tokens/trained"] > 0 for row in metrics_of(tmp_path)]
    assert trained == [True, False, False, True]
    assert [before != after for before, after in itertools.pairwise(hashes)] == trained
    assert np.diff(rates) == pytest.approx([-0.0025] * 3)
    assert [row["grad_norm"] > 0 for row in metrics_of(tmp_path)] == trained


def test_counts_of_groups_and_alarms_are_of_the_whole_batch(tmp_path):
    """A part of a group, with one rollout, is no group without a signal; nor is a part with an
    error a bad batch."""
    batch = build(groups_of(1), [], pipeline_config(updates_per_batch=4))
    assert batch.stats["groups/live"] == 1
    assert [step.stats["groups/live"] for step in batch.steps] == [1, 0, 0, 0]
    assert [step.stats["groups/dead"] for step in batch.steps] == [0, 0, 0, 0]
    failed = replace(rollout(math.nan), status=Status(error="ModelError: gone"))
    many = [
        Group(n, n, (*(rollout(float(m % 2)) for m in range(5)), *[failed] * (n == 0)))
        for n in range(2)
    ]
    trainer = small_trainer(tmp_path, updates_per_batch=2, max_steps=4)
    full_batch = build(many, [], pipeline_config(updates_per_batch=2))
    parts = [
        replace(part, stats={**full_batch.stats, **part.stats}, part_of=full_batch)
        for part in full_batch.steps
    ]
    # negative control
    assert parts[0].stats["rollouts/errors"] / parts[0].stats["rollouts/generated"] > 0.1
    for number, part in enumerate(parts, start=1):
        numbers = {"time/step": 1.0, "time/wait_generation": 0.0}
        step = Step(part, [], RatioMeter(0), numbers=numbers)
        trainer.recorder.warn(number, step)
        assert not [
            name for name in step.numbers if name.startswith("alarm/") and name != "alarm/fill"
        ]
