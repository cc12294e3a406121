"""A run that is killed and resumed ends exactly as one that was not; a run twice is the same run
twice."""

import logging

import pytest
from transformers import TrainerCallback

import verifiers as vf
from support.training import (
    branched,
    files_hash,
    metrics_of,
    run,
    small_trainer,
    weights_hash,
)
from support.training_child import SAVED, child_context, train_in_child
from verifiers.errors import RunMismatch

RUN = {
    "deterministic": True,
    "max_steps": 6,
    "save_strategy": "steps",
    "save_steps": 2,
    "log_completions": True,
}


@pytest.fixture(scope="module")
def children():
    return child_context()


@pytest.fixture(scope="module")
def undisturbed(children, tmp_path_factory):
    """The folder of an uninterrupted run, by lag."""
    folders = {}

    def of(lag):
        if lag not in folders:
            folders[lag] = tmp_path_factory.mktemp(f"lag{lag}")
            assert train_in_child(children, folders[lag], **RUN, max_off_policy_steps=lag) == 0
        return folders[lag]

    return of


def losses(folder):
    return [(row["step"], row["loss"].hex()) for row in metrics_of(folder) if "loss" in row]


def assert_same_run(first, second, num_steps=6):
    assert [step for step, _ in losses(first)] == list(range(1, num_steps + 1))
    assert losses(first) == losses(second)
    end = f"checkpoint-{num_steps}"
    assert files_hash(first / end, *SAVED) == files_hash(second / end, *SAVED)
    assert files_hash(first / end, "pending.jsonl") == files_hash(second / end, "pending.jsonl")
    for step in range(1, num_steps + 1):
        rollouts = f"completions/step-{step}.jsonl"
        assert (first / rollouts).read_bytes() == (second / rollouts).read_bytes()
    untimed = [
        {k: v for k, v in row.items() if not k.startswith(("time", "throughput", "alarm"))}
        for row in metrics_of(first)
    ]
    assert untimed == [
        {k: v for k, v in row.items() if not k.startswith(("time", "throughput", "alarm"))}
        for row in metrics_of(second)
    ]


@pytest.mark.parametrize("lag", [0, 1])
def test_two_deterministic_runs_are_one(tmp_path, undisturbed, lag):
    trainer = small_trainer(tmp_path, **RUN, max_off_policy_steps=lag)
    log = run(trainer)

    assert log.losses == [loss for _, loss in losses(undisturbed(lag))]
    assert_same_run(tmp_path, undisturbed(lag))


def test_another_seed_is_another_run(tmp_path, undisturbed):
    log = run(
        small_trainer(tmp_path, **RUN | {"save_strategy": "no", "seed": 7}, max_off_policy_steps=1)
    )

    assert log.losses != [loss for _, loss in losses(undisturbed(1))]


KILLS = [
    (0, "checkpoint.after_rename:1", "checkpoint-2"),
    (1, "checkpoint.after_rename:1", "checkpoint-2"),
    (1, "checkpoint.before_manifest:2", "checkpoint-2"),
    (1, "checkpoint.before_rename:2", "checkpoint-2"),
]
MORE = [
    (lag, f"checkpoint.{failpoint}:{passes}", newest)
    for lag in (0, 1, 2)
    for failpoint in ("before_manifest", "before_rename", "after_rename")
    for passes, newest in ((2, "checkpoint-2"), (3, "checkpoint-4"))
]


def killed_and_resumed_ends_the_same(tmp_path, children, undisturbed, lag, failpoint, newest):
    assert train_in_child(children, tmp_path, failpoint, **RUN, max_off_policy_steps=lag) == -9
    assert (tmp_path / newest).is_dir()

    assert train_in_child(children, tmp_path, **RUN, max_off_policy_steps=lag) == 0

    assert_same_run(tmp_path, undisturbed(lag))
    assert not list(tmp_path.glob(".tmp-*"))


@pytest.mark.parametrize(("lag", "failpoint", "newest"), KILLS)
def test_killed_at_a_checkpoint_and_resumed_is_the_same_run(
    tmp_path, children, undisturbed, lag, failpoint, newest
):
    killed_and_resumed_ends_the_same(tmp_path, children, undisturbed, lag, failpoint, newest)


@pytest.mark.slow
@pytest.mark.parametrize(("lag", "failpoint", "newest"), MORE)
def test_killed_at_every_failpoint_and_resumed_is_the_same_run(
    tmp_path, children, undisturbed, lag, failpoint, newest
):
    killed_and_resumed_ends_the_same(tmp_path, children, undisturbed, lag, failpoint, newest)


ROLES = {
    "environment": "pair",
    "zero_variance": "keep",
    "beta": 0.5,
    "kl_type": "k2",
    "sync_ref_model": True,
    "ref_model_sync_steps": 3,
    "lr_scheduler_type": "linear",
    "max_off_policy_steps": 1,
}
"""Self-play as the docs do it: two roles of one model, and a reference that follows."""


def test_a_training_of_two_roles_that_is_killed_and_resumed_is_the_same_run(tmp_path, children):
    uninterrupted, killed = tmp_path / "whole", tmp_path / "killed"
    assert train_in_child(children, uninterrupted, **RUN | ROLES) == 0
    rows = metrics_of(uninterrupted)
    assert all({"reward/left", "reward/right"} <= row.keys() for row in rows if "loss" in row)

    assert train_in_child(children, killed, "checkpoint.before_rename:2", **RUN | ROLES) == -9
    assert train_in_child(children, killed, **RUN | ROLES) == 0

    assert_same_run(uninterrupted, killed)
    reference = (  # moved at the third step, after the checkpoint that the run goes on from
        "reference.safetensors"
    )
    assert files_hash(uninterrupted / "checkpoint-6", reference) == files_hash(
        killed / "checkpoint-6", reference
    )
    assert files_hash(uninterrupted / "checkpoint-6", reference) != files_hash(
        uninterrupted / "checkpoint-2", reference
    )


@pytest.mark.slow
def test_a_training_that_is_killed_in_a_branch_and_resumed_is_the_same_run(tmp_path, children):
    settings = {
        **RUN,
        **{"environment": "branched", "zero_variance": "keep", "max_off_policy_steps": 0},
        **{"save_steps": 1, "max_steps": 3},
    }
    uninterrupted, killed = tmp_path / "whole", tmp_path / "killed"
    assert train_in_child(children, uninterrupted, **settings) == 0
    # four branches a step: the tenth is sampled for the third, perhaps before the second is saved
    assert train_in_child(children, killed, "in_branch:10", **settings) == -9
    assert (killed / "checkpoint-1").is_dir()
    assert not (killed / "checkpoint-3").exists()
    assert train_in_child(children, killed, **settings) == 0

    assert_same_run(uninterrupted, killed, num_steps=3)


def test_without_determinism_a_resumed_run_trains_what_was_pending_and_counts_on(tmp_path):
    settings = {
        "max_steps": 3,
        "save_strategy": "steps",
        "save_steps": 3,
        "max_off_policy_steps": 1,
    }
    run(small_trainer(tmp_path, **settings))

    trainer = small_trainer(tmp_path, **settings | {"max_steps": 6})
    log = run(trainer, resume_from_checkpoint=True)

    assert len(log.steps) == 3
    assert trainer.state.global_step == 6
    assert all(step["staleness/max"] <= 1 for step in log.steps)
    assert [row["step"] for row in metrics_of(tmp_path)] == [1, 2, 3, 4, 5, 6]


def test_a_finished_run_is_not_trained_further(tmp_path):
    settings = {"max_steps": 2, "save_strategy": "steps", "save_steps": 2}
    first = small_trainer(tmp_path, **settings)
    run(first)

    again = small_trainer(tmp_path, **settings)
    assert run(again, resume_from_checkpoint=True).steps == []
    assert weights_hash(again.model) == weights_hash(first.model)
    assert again.policy_version == 2


# --- another number of steps ----------------------------------------------------------------------


PLATEAU = {"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "steps", "eval_steps": 100}
# its best value is infinite at first
PLATEAU |= {"metric_for_best_model": "eval_reward", "eval_num_examples": 2}


def linear(lr, total):
    return [lr * (total - step) / total for step in range(total)]


def rates_of(folder, caplog, first, then, **settings):
    """Learning rates of a run of ``first`` steps that stops after two, resumed with
    ``then`` steps."""
    settings = {
        "save_strategy": "steps",
        "save_steps": 2,
        "learning_rate": 1e-3,
        "max_off_policy_steps": 0,
        **settings,
    }
    trainer = small_trainer(folder, max_steps=first, **settings)
    trainer.add_callback(StopsAfter(2))
    begun = run(trainer).steps
    with caplog.at_level(logging.INFO, "verifiers_trainer"):
        resumed = run(
            small_trainer(folder, max_steps=then, **settings), resume_from_checkpoint=True
        ).steps
    return [step["learning_rate"] for step in [*begun, *resumed]]


class StopsAfter(TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **_):
        control.should_save = control.should_training_stop = state.global_step >= self.step


@pytest.mark.parametrize(("first", "then"), [(4, 8), (8, 4), (2, 4)])
def test_a_schedule_follows_the_length_of_the_resumed_run_and_says_so(
    tmp_path, caplog, first, then
):
    rates = rates_of(tmp_path, caplog, first, then, lr_scheduler_type="linear")
    assert rates == pytest.approx(linear(1e-3, first)[:2] + linear(1e-3, then)[2:], rel=1e-9)
    old, new = ([*linear(1e-3, total), 0.0][2] for total in (first, then))
    said = (
        f"max_steps was {first} and is {then}: from here on the schedule 'linear' is that of {then}"
        " steps; "
    )
    assert f"{said}the learning rate of step 3 is {new:.3g}, and not {old:.3g}" in caplog.text


@pytest.mark.parametrize(
    "settings",
    [{}, {"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 1}, PLATEAU],
    ids=str,
)
def test_a_schedule_without_an_end_goes_on(tmp_path, caplog, settings):
    assert rates_of(tmp_path, caplog, 4, 6, **settings)[2:] == [1e-3] * 4
    assert "max_steps was 4 and is 6; the learning rate does not depend on it" in caplog.text


def test_the_same_length_says_nothing(tmp_path, caplog):
    assert rates_of(tmp_path, caplog, 4, 4, lr_scheduler_type="linear") == pytest.approx(
        linear(1e-3, 4)
    )
    assert "max_steps was" not in caplog.text


def test_other_branches_are_another_run(tmp_path):
    settings = {"max_steps": 1, "save_strategy": "steps", "save_steps": 1, "max_seq_len": 128}
    run(small_trainer(tmp_path, env=branched(), **settings))
    checkpoint = str(tmp_path / "checkpoint-1")
    env = branched()
    trainer = small_trainer(tmp_path, env=env, **settings | {"max_steps": 2})
    assert trainer.checkpoints.starting_point(checkpoint).step == 1  # negative control: the same
    env.set_branching(vf.Branching(at=1, branches=4))
    with pytest.raises(RunMismatch, match="branching was"):
        trainer.checkpoints.starting_point(checkpoint)
