"""A trainer whose model is split over two processes, used in every way that a trainer of one
process is."""

import dataclasses

import numpy as np
import pytest

from support import split, split_runs
from support.ranks import on_ranks, results
from support.training import small_policy
from support.training_child import child_context
from verifiers_trainer.cli.throughput import PlannedRun, exchange
from verifiers_trainer.policy.sizes import Architecture
from verifiers_trainer.settings.fields import Settings


@pytest.fixture(scope="module")
def children():
    return child_context()


@pytest.fixture
def on(children, tmp_path):
    """Call a function on some ranks, in a folder of that name; what each rank returned."""

    def call(work, name="run", world=2, **settings):
        return on_ranks(
            children, tmp_path / name, work, str(tmp_path / name), world=world, **settings
        )

    return call


def assert_as_one(first, single):
    """The same losses and weights, as far as another order of sums allows."""
    np.testing.assert_allclose(first["losses"], single["losses"], rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(first["values"], single["values"], rtol=1e-3, atol=2e-6)


# --- the pass of the batch's policy ---------------------------------------------------------------


def test_text_that_nobody_sampled_on_one_rank_alone_is_trained_as_one_process_trains_it(on):
    first, second = results(on(split_runs.train_given))
    (single,) = results(on(split_runs.train_given, "one", world=1))
    assert {first["needed"][0], second["needed"][0]} == {True, False}
    assert first["weights"] == second["weights"]
    assert len(first["losses"]) == 4
    assert_as_one(first, single)


def test_where_each_rank_decides_alone_on_the_pass_of_the_batchs_policy_they_wait_for_each_other(
    on,
):
    ended = on(split_runs.train_given, each_rank_decides=True, ddp_timeout=4)
    said = [rank.result[1] for rank in ended if rank.exit_code == 1]
    assert len(said) == 2
    assert any("lost the other processes" in text for text in said)


# --- what a step exchanges ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("use_lora", "shards"), [(False, True), (True, True), (False, False)], ids=str
)
def test_two_processes_exchange_what_vf_train_plans(on, use_lora, shards):
    """Measured: calls and bytes of the collectives of a step on two packed rows each."""
    settings = {"use_lora": use_lora, "batch_size": 16, "micro_batch_tokens": 64}
    first, second = results(on(split_runs.counted, is_split=shards, **settings))
    assert first["seen"] == second["seen"]
    calls, moved, rows = first["seen"]
    assert rows == 2
    model = Architecture.of(small_policy().config.to_dict())
    per_rollout = rows * 64 * 2 / 16
    inputs = {"trainers": 2, "shards": shards, "trained": 1, "computed_tokens": per_rollout}
    inputs |= {"prompt_tokens": 0, "completion_tokens": 0, "flash": 0}
    values = dataclasses.asdict(Settings()) | settings
    planned = exchange(PlannedRun(model, values, inputs, {}, is_accelerator=False))
    reduce = "_reduce_scatter_base_" if shards else "allreduce_"
    assert calls.get("_allgather_base_", 0) == planned.gathers
    assert calls[reduce] == planned.reductions == (1 if not shards else 2 if use_lora else 4)
    assert moved.get("_allgather_base_", 0) == pytest.approx(planned.gathered, rel=0.01)
    assert moved[reduce] == pytest.approx(planned.reduced, rel=0.01)


# --- finished rollouts ----------------------------------------------------------------------------


def test_finished_rollouts_are_shared_among_the_ranks(on):
    first, second = results(on(split_runs.train_offline))
    (single,) = results(on(split_runs.train_offline, "one", world=1))
    assert first["weights"] == second["weights"]
    assert len(first["losses"]) == 3
    assert_as_one(first, single)


# --- before, between and after trainings ----------------------------------------------------------

MOMENTS = ("first", "taught", "trained", "again")


@pytest.mark.slow
def test_before_between_and_after_trainings_the_policy_is_asked_and_saved_as_it_is(on):
    first, second = results(on(split_runs.taught_and_trained))
    (single,) = results(on(split_runs.taught_and_trained, "one", world=1))
    assert first["rewards"] == second["rewards"] == single["rewards"]
    assert first["rewards"][-1] >= 0.5 > first["first"]["evaluated"]
    for moment in MOMENTS:
        assert first[moment] == single[moment]
        assert first[moment]["is_own"]
        assert first[moment]["evaluated"] == second[moment]["evaluated"]
    assert first["taught"]["evaluated"] == first["rewards"][-1]
    assert len({tuple(first[moment]["answers"]) for moment in MOMENTS}) > 2
    assert_as_one(first, single)


@pytest.mark.slow
def test_a_copy_that_only_steps_renew_would_not_have_learnt_from_a_warm_up(on):
    first, _ = results(on(split_runs.taught_and_trained, stale=True, until="taught"))
    assert set(first["rewards"]) == {first["first"]["evaluated"]}
    assert not first["taught"]["is_own"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", [{}, {"use_lora": True}], ids=["full", "lora"])
def test_the_best_weights_that_a_training_comes_back_to_are_those_that_are_sampled(on, kind):
    first, second = results(on(split_runs.best_at_first, **kind))
    (single,) = results(on(split_runs.best_at_first, "one", world=1, **kind))
    for result in (first, second, single):
        assert (result["best"], result["as_saved"], result["as_sampled"]) == (1, True, True)
    assert first["weights"] == second["weights"]
    assert_as_one(first, single)


def test_without_its_renewal_rank_0s_copy_would_stay_at_the_last_step(on):
    first, _ = results(on(split_runs.best_at_first, stale=True))
    assert (first["as_saved"], first["as_sampled"]) == (True, False)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [{}, {"use_lora": True}], ids=["full", "lora"])
def test_the_same_trainer_goes_on_from_its_checkpoint(on, kind):
    first, second = results(on(split_runs.resumed_by_the_same_trainer, **kind))
    (single,) = results(on(split_runs.resumed_by_the_same_trainer, "one", world=1, **kind))
    assert first["weights"] == second["weights"]
    assert first["merged"] == pytest.approx(single["merged"], abs=2e-6)
    assert len(first["losses"]) == 4
    assert_as_one(first, single)


# --- what goes wrong on one rank ------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spoil", "kind", "said"),
    [
        ("nan", "NonFiniteLoss", "the sampled log-probability of step 2 is not finite"),
        ("bug", "RunError", "rank 1 failed: ZeroDivisionError: a bug on this rank alone"),
        ("kill", "RunError", "rank 0 lost the other processes of this training"),
    ],
)
def test_what_ends_rank_1_ends_rank_0_though_it_waits_for_parts_of_the_model(on, spoil, kind, said):
    first, second = on(split_runs.spoilt_on_rank_1, spoil=spoil)
    assert first.exit_code == 1
    assert first.result[0] == kind
    assert said in first.result[1]
    assert second.exit_code == (-9 if spoil == "kill" else 1)


@pytest.mark.slow
def test_a_callback_that_stops_one_rank_stops_both_after_the_same_step(on):
    first, second = results(on(split_runs.spoilt_on_rank_1, spoil="stop", save_strategy="steps"))
    assert (first["step"], second["step"]) == (2, 2)
    assert first["weights"] == second["weights"]


# --- other settings of the launcher's file --------------------------------------------------------

OTHERS = {
    "activation checkpointing": {"fsdp_activation_checkpointing": True},
    "one group": {"fsdp_auto_wrap_policy": "NO_WRAP"},
    "every rank reads the files": {"fsdp_cpu_ram_efficient_loading": False},
    "offloaded": {"fsdp_offload_params": True},
}


@pytest.mark.slow
def test_other_settings_of_the_split_change_nothing(on):
    settings = {"deterministic": True, "max_steps": 3, "learning_rate": 1e-2, "beta": 0.1}
    as_shipped, _ = results(on(split.train, **settings))
    for name, changed in OTHERS.items():
        result, _ = results(on(split.train, name, split=changed, **settings))
        assert result["weights"] == as_shipped["weights"], name
        assert result["losses"] == as_shipped["losses"], name


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", [{"use_lora": True}, {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 1}]
)
def test_checkpoints_of_layers_that_are_wrapped_have_the_names_of_those_that_are_not(on, kind):
    settings = {"deterministic": True, "save_strategy": "steps", "save_steps": 2, **kind}
    wrapped = {"split": OTHERS["activation checkpointing"]}
    (single,) = results(on(split.train, "one", world=1, max_steps=4, **settings))
    results(on(split.train, max_steps=2, **settings, **wrapped))
    first, second = results(on(split.train, resume=True, max_steps=4, **settings, **wrapped))
    assert first["weights"] == second["weights"]
    assert_as_one(first, single)
    results(on(split.train, "moved", max_steps=2, **settings, **wrapped))
    (moved,) = results(on(split.train, "moved", world=1, resume=True, max_steps=4, **settings))
    assert_as_one(moved, single)


# --- whole weights kept between forward and backward ----------------------------------------------

FOLLOWING = {
    "beta": 0.1,
    "sync_ref_model": True,
    "ref_model_sync_steps": 1,
    "num_iterations": 2,
    "max_steps": 4,
}
KEPT = {"fsdp_reshard_after_forward": False}


@pytest.mark.slow
def test_weights_kept_whole_until_the_backward_pass_change_nothing(on):
    settings = {
        "deterministic": True,
        "learning_rate": 1e-2,
        "anchor": "recomputed",
        "loss": "ppo",
        **FOLLOWING,
    }
    kept, second_rank = results(on(split.train, "kept", split=KEPT, **settings))
    dropped, _ = results(on(split.train, "dropped", **settings))
    assert kept["weights"] == second_rank["weights"] == dropped["weights"]
    assert (kept["losses"], kept["penalty"]) == (dropped["losses"], dropped["penalty"])
    assert kept["evaluated"] == dropped["evaluated"]
    assert max(kept["penalty"]) > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spoil", "said"),
    [("left", "The size of tensor a"), ("asked", "got mixed torch.Tensor and DTensor")],
)
def test_left_there_or_taken_for_a_model_that_is_not_split_the_reference_cannot_be_put_in_place(
    on, spoil, said
):
    settings = {"deterministic": True, "anchor": "recomputed", "loss": "ppo", **FOLLOWING}
    ended = on(split_runs.spoilt, "kept", spoil=spoil, split=KEPT, **settings)
    assert all(rank.exit_code == 1 and said in rank.result[1] for rank in ended)
